"""Linear layers with ggml's weights against ggml's own CPU backend, same bytes, same threads.

    python benchmarks/llama_cpp.py --ggml FOLDER            the folder with libggml-base and -cpu
    python benchmarks/llama_cpp.py                          that of an installed llama_cpp package
    python benchmarks/llama_cpp.py --formats q4_k q6_k --threads 1 --rows 1

The kernels are compared, with weights and results in memory of theirs: ours without dispatch,
ggml's as a graph of one product, the weight in its repacked buffer where it has one for the format.
Each of the two runs in a process of its own, as OpenMP threads of one that still spin would slow
the other down; they take turns in every round. Weights are read from several copies, more than the
caches hold. Figures are medians of the rounds, and of their ratios: CPU time on one thread, wall
time on more; results are compared first. Prints a table, writes JSON (--out).
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

import torch

FORMATS = ("q4_k", "q5_k", "q6_k", "q8_0", "q4_0", "q4_1")
SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336))      # out_features, in_features
TYPES = {"q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "q4_k": 12, "q5_k": 13, "q6_k": 14}
COPIES = 100 << 20                             # bytes of all copies of a weight, at least
Side = tuple[Callable[[int], object], Callable[[], list[float]]]
APART = 0.02           # seconds between turns, in which threads of the one before fall asleep


def make_weight(case: dict[str, Any]) -> torch.Tensor:
    from layerzero.ops.formulas.ggml import random_blocks

    rows = random_blocks(torch.Generator().manual_seed(1), (64,), case["inputs"], case["format"])
    return rows.repeat(case["outputs"] // 64, 1)


def make_input(case: dict[str, Any]) -> torch.Tensor:
    return torch.randn((case["rows"], case["inputs"]), generator=torch.Generator().manual_seed(2))


# The two that are compared: a Side multiplies with the copy of that number, and returns results.

def prepare_layerzero(case: dict[str, Any], folder: str) -> Side:
    from layerzero.backends.native.ggml import multiply, pack_weight

    torch.set_num_threads(case["threads"])
    weight, x = make_weight(case), make_input(case)
    packed = [pack_weight(weight, case["format"]) for _ in range(case["copies"])]

    out = torch.empty(case["rows"], case["outputs"])

    def run(i: int) -> torch.Tensor:
        return multiply(x, packed[i], None, case["outputs"], case["format"], out=out)

    return run, lambda: run(0)[-1, :64].tolist()


class Ggml:
    """ggml's CPU backend through its C interface."""

    def __init__(self, folder: str) -> None:
        self.base, self.cpu = (ctypes.CDLL(str(Path(folder) / f"libggml-{part}.so"),
                                           ctypes.RTLD_GLOBAL) for part in ("base", "cpu"))
        self.buffers: list[int] = []

    def call(self, name: str, *args: Any, result: Any = ctypes.c_void_p) -> Any:
        function = getattr(self.cpu if hasattr(self.cpu, name) else self.base, name)
        function.restype = result
        return function(*(ctypes.c_void_p(a) if isinstance(a, int) else a for a in args))

    def context(self) -> int:
        class Parameters(ctypes.Structure):
            _fields_ = [("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p),
                        ("no_alloc", ctypes.c_bool)]

        return int(self.call("ggml_init", Parameters(4 << 20, None, True)))

    def tensor(self, context: int, type: int, k: int, rows: int) -> int:
        return int(self.call("ggml_new_tensor_2d", context, ctypes.c_int(type),
                             ctypes.c_int64(k), ctypes.c_int64(rows)))

    def allocate(self, context: int, buffer_type: int) -> None:
        self.buffers.append(int(self.call("ggml_backend_alloc_ctx_tensors_from_buft", context,
                                          buffer_type)))

    def free(self) -> None:
        for buffer in self.buffers:
            self.call("ggml_backend_buffer_free", buffer, result=None)
        self.buffers.clear()

    def weight_buffers(self) -> list[int]:
        """Returns buffer types for weights, the best first: AMX or repacked ones, then plain."""
        registry = self.call("ggml_backend_cpu_reg")
        device = self.call("ggml_backend_reg_dev_get", registry, ctypes.c_size_t(0))
        address = self.call("ggml_backend_reg_get_proc_address", registry,
                            b"ggml_backend_dev_get_extra_bufts")
        extra = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(address)(device)
        found, i = [], 0
        while extra and extra[i]:
            found.append(int(extra[i]))
            i += 1
        return [*found, int(self.call("ggml_backend_cpu_buffer_type"))]

    def place(self, case: dict[str, Any], blocks: torch.Tensor) -> tuple[int, int]:
        """Returns a graph of one product and its result, the weight in the best buffer that its
        backend can multiply from."""
        device = self.call("ggml_backend_reg_dev_get", self.call("ggml_backend_cpu_reg"),
                           ctypes.c_size_t(0))
        for buffer in self.weight_buffers():
            weights, values = self.context(), self.context()
            weight = self.tensor(weights, TYPES[case["format"]], case["inputs"], case["outputs"])
            self.allocate(weights, buffer)
            x = self.tensor(values, 0, case["inputs"], case["rows"])
            out = int(self.call("ggml_mul_mat", values, weight, x))
            if not self.call("ggml_backend_dev_supports_op", device, out, result=ctypes.c_bool):
                continue
            self.allocate(values, int(self.call("ggml_backend_cpu_buffer_type")))
            # A repacked buffer repacks only the formats it knows.
            self.call("ggml_backend_tensor_set", weight, blocks.data_ptr(), ctypes.c_size_t(0),
                      ctypes.c_size_t(blocks.nbytes), result=None)
            data = make_input(case)
            self.call("ggml_backend_tensor_set", x, data.data_ptr(), ctypes.c_size_t(0),
                      ctypes.c_size_t(data.nbytes), result=None)
            graph = int(self.call("ggml_new_graph", values))
            self.call("ggml_build_forward_expand", graph, out, result=None)
            return graph, out
        raise SystemExit(f"ggml multiplies {case['format']} from none of its buffers")


@lru_cache(maxsize=None)
def open_ggml(folder: str) -> Ggml:
    return Ggml(folder)


def prepare_ggml(case: dict[str, Any], folder: str) -> Side:
    ggml, weight = open_ggml(folder), make_weight(case)
    ggml.free()                                # what the case before has allocated
    backend = int(ggml.call("ggml_backend_cpu_init"))
    ggml.call("ggml_backend_cpu_set_n_threads", backend, ctypes.c_int(case["threads"]), result=None)
    graphs = [ggml.place(case, weight) for _ in range(case["copies"])]

    def run(i: int) -> None:
        ggml.call("ggml_backend_graph_compute", backend, graphs[i][0], result=ctypes.c_int)

    def results() -> list[float]:
        run(0)
        out = torch.empty(case["rows"], case["outputs"])
        ggml.call("ggml_backend_tensor_get", graphs[0][1], out.data_ptr(), ctypes.c_size_t(0),
                  ctypes.c_size_t(out.nbytes), result=None)
        return out[-1, :64].tolist()

    return run, results


def work(side: str, folder: str) -> None:
    """A process of one side: reads a case, then a line for each round; answers in lines."""
    prepare = prepare_layerzero if side == "layerzero" else prepare_ggml
    for line in sys.stdin:
        if line.startswith("{"):
            case = json.loads(line)
            run, results = prepare(case, folder)
            print(json.dumps(results()), flush=True)
            continue
        clock = time.process_time if case["threads"] == 1 else time.perf_counter
        began = clock()
        for i in range(int(line)):
            run(i % case["copies"])
        print((clock() - began) / int(line), flush=True)


class Worker:
    def __init__(self, side: str, folder: str) -> None:
        command = [sys.executable, __file__, "--side", side, "--ggml", folder]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        text=True)

    def ask(self, line: str) -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline()


def measure(case: dict[str, Any], rounds: int, sides: dict[str, Worker]) -> dict[str, Any]:
    """Returns the case with the microseconds of both sides, how many times as fast the first is,
    and how far their results are apart."""
    ours, theirs = (torch.tensor(json.loads(worker.ask(json.dumps(case))))
                    for worker in sides.values())
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side, worker in sides.items():
            time.sleep(APART)
            seconds[side].append(float(worker.ask(str(case["repeats"]))))
    return {**{key: case[key] for key in ("format", "outputs", "inputs", "rows", "threads")},
            **{f"{side}_us": round(median(s) * 1e6, 1) for side, s in seconds.items()},
            "times": round(median(b / a for a, b in zip(*seconds.values())), 2),
            "difference": float((ours - theirs).norm() / theirs.norm())}


def kernels(args: argparse.Namespace, folder: str) -> list[dict[str, Any]]:
    """Products of one row (GEMV, in GB/s of ggml's blocks) and of a prompt."""
    from layerzero.ops.formulas.ggml import GGML_FORMATS

    measured: list[dict[str, Any]] = []
    sides = {side: Worker(side, folder) for side in ("layerzero", "ggml")}
    print("format  weight        rows threads  layerzero GB/s     ggml GB/s     times  difference")
    for format in args.formats:
        for outputs, inputs in SHAPES[:args.shapes]:
            nbytes = outputs * GGML_FORMATS[format].row_bytes(inputs)
            for rows in args.rows:
                for threads in args.threads:
                    copies = 1 if rows > 32 else -(-COPIES // nbytes)
                    case = {"format": format, "outputs": outputs, "inputs": inputs, "rows": rows,
                            "threads": threads, "copies": copies,
                            "repeats": 4 * copies if rows <= 32 else 1}
                    row = measure(case, args.rounds, sides)
                    measured.append(row)
                    shown = "".join(f"{row[s]:9.0f} us {nbytes / row[s] / 1e3:5.1f} "
                                    for s in ("layerzero_us", "ggml_us"))
                    print(f"{format:6} {outputs:6} x {inputs:5} {rows:5} {threads:4} {shown} "
                          f"{row['times']:6.2f} {row['difference']:9.1e}", flush=True)
    for worker in sides.values():
        assert worker.process.stdin is not None
        worker.process.stdin.close()
        worker.process.wait()
    return measured


def processor_name() -> str:
    from layerzero.machine.hardware import read_cpu

    return read_cpu().name


def find_ggml() -> str:
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        raise SystemExit("no ggml: give the folder of libggml-base.so and libggml-cpu.so as "
                         "--ggml, or install llama-cpp-python")
    return str(Path(spec.origin).parent / "lib")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ggml", metavar="FOLDER", help="where libggml-base and libggml-cpu are")
    parser.add_argument("--formats", nargs="+", default=FORMATS, choices=tuple(TYPES))
    parser.add_argument("--rows", nargs="+", type=int, default=(1, 512))
    parser.add_argument("--threads", nargs="+", type=int, default=(1, 2))
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="how many of the shapes")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--out", type=Path, help="where to write JSON")
    parser.add_argument("--side", choices=("layerzero", "ggml"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        work(args.side, args.ggml)
        return
    report = {"machine": platform.machine(), "processor": processor_name(),
              "torch": torch.__version__, "kernels": kernels(args, args.ggml or find_ggml())}
    if args.out:
        args.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
