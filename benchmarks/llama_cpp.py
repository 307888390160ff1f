"""Linear layers with ggml's weights against ggml's own CPU backend, same bytes, same threads.

    python benchmarks/llama_cpp.py --ggml FOLDER            the folder with libggml-base and -cpu
    python benchmarks/llama_cpp.py                          that of an installed llama_cpp package
    python benchmarks/llama_cpp.py --formats q4_k q6_k --threads 1 --rows 1
    python benchmarks/llama_cpp.py --tiles --out tiles.json

The kernels are compared, with weights and results in memory of theirs: ours without dispatch,
ggml's as a graph of one product, the weight in its repacked buffer where it has one for the format.
Each of the two runs in a process of its own, as OpenMP threads of one that still spin would slow
the other down; they take turns in every round. Weights are read from several copies, more than the
caches hold. Figures are medians of the rounds, and of their ratios: CPU time on one thread, wall
time on more; results are compared first. Prints a table, writes JSON (--out).

--tiles needs no ggml: it compares our own kernels with and without tile instructions (AMX), whose
bits must be equal, and dequantizing to bfloat16 with torch's product, and says for each number of
rows how many times as fast tiles are as either. It begins nothing after --seconds. Exit code 1 if a
bit differs.
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
        start = clock()
        for i in range(int(line)):
            run(i % case["copies"])
        print((clock() - start) / int(line), flush=True)


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


# Tile instructions: quant/linear.h's tile_rows_of says from how many rows they are used.

TILE_FORMATS = ("q8_0", "q4_0", "q4_k", "q6_k")
TILE_SHAPES = ((4096, 4096), (4096, 14336))
TILE_ROWS = (1, 4, 8, 16, 32, 64, 128, 512)
DEQUANTIZED_ROWS = 512                         # of the weight, timed, and counted for all of it
TURN = 0.02                                    # seconds of one side's turn, about


def differs_with_tiles(format: str) -> bool:
    from layerzero.backends.native.ggml import multiply, pack_weight

    for rows in (1, 9, 37):                    # a last panel and tile that are not full
        case = {"format": format, "inputs": 2304, "outputs": 64, "rows": rows}
        weight, x = make_weight(case)[:52], make_input(case)
        packed = pack_weight(weight, format)
        if not torch.equal(multiply(x, packed, None, 52, format, tiles=True),
                           multiply(x, packed, None, 52, format, tiles=False)):
            return True
    return False


def seconds_of(run: Callable[[int], object], calls: int) -> float:
    start = time.perf_counter()
    for i in range(calls):
        run(i)
    return (time.perf_counter() - start) / calls


def dequantize_seconds(weight: torch.Tensor, format: str) -> float:
    from layerzero.ops.formulas.ggml import dequantize_blocks

    some = weight[:DEQUANTIZED_ROWS]
    return len(weight) / len(some) * min(
        seconds_of(lambda _: dequantize_blocks(some, format).bfloat16(), 1) for _ in range(3))


def measure_tiles(case: dict[str, Any], copies: list[torch.Tensor], wide: torch.Tensor,
                  dequantize_s: float, rounds: int) -> dict[str, Any]:
    """Returns the case with the microseconds of each side, and whether tiles changed a bit."""
    from layerzero.backends.native.ggml import multiply

    x, format, outputs = make_input(case), case["format"], case["outputs"]
    narrow, out = x.bfloat16(), torch.empty(case["rows"], outputs)

    def product(tiles: bool) -> Callable[[int], torch.Tensor]:
        return lambda i: multiply(x, copies[i % len(copies)], None, outputs, format, out=out,
                                  tiles=tiles)

    sides = {"tiles": product(True), "vectors": product(False),
             "bf16": lambda i: torch.nn.functional.linear(narrow, wide)}
    equal = torch.equal(sides["tiles"](0).clone(), sides["vectors"](0))
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for turns in (("tiles", "vectors"), ("bf16",)):   # torch's threads spin after its turn
        calls = {side: max(1, int(TURN / seconds_of(sides[side], 1))) for side in turns}
        for i in range(rounds):
            for side in turns[::1 - i % 2 * 2]:
                seconds[side].append(seconds_of(sides[side], calls[side]))
    time.sleep(APART)
    us = {f"{side}_us": round(median(s) * 1e6, 1) for side, s in seconds.items()}
    best = us["tiles_us"]
    return {**case, **us, "dequantize_us": round(dequantize_s * 1e6, 1), "equal": equal,
            "tiles_gops": round(2e-3 * case["rows"] * outputs * case["inputs"] / best, 1),
            "times_vectors": round(median(
                b / a for a, b in zip(seconds["tiles"], seconds["vectors"])), 2),
            "times_bf16": round((us["bf16_us"] + 1e6 * dequantize_s) / best, 2)}


def tiles(args: argparse.Namespace) -> dict[str, Any]:
    from layerzero.backends.native import build
    from layerzero.backends.native.ggml import pack_weight

    end = time.perf_counter() + args.seconds
    build.build(say=print)
    isa, usable = build.module().ggml_isa()
    if not usable:
        raise SystemExit(f"no tile instructions: the CPU kernels were built for {isa}, or Linux "
                         "refused the registers; this wants a processor with AMX and Linux 5.16")
    wrong = [f for f in TYPES if differs_with_tiles(f)]
    print(f"{processor_name()}: {isa} + amx; the bits of vectors: "
          + (f"NOT those of {', '.join(wrong)}" if wrong else ", ".join(TYPES)))
    print("times as fast by tiles as by vectors / as dequantizing and bfloat16, for rows of x:")
    print("format threads weight       " + "".join(f"{rows:>11}" for rows in TILE_ROWS)
          + "   GOP/s  bits")
    measured: list[dict[str, Any]] = []
    skipped = 0
    for outputs, inputs in TILE_SHAPES:
        wide = torch.ones(outputs, inputs, dtype=torch.bfloat16)
        for format in TILE_FORMATS:
            if time.perf_counter() > end:
                skipped += 2 * len(TILE_ROWS)
                continue
            shape = {"format": format, "outputs": outputs, "inputs": inputs}
            weight = make_weight(shape)
            torch.set_num_threads(2)
            packed = pack_weight(weight, format)
            copies = [packed, *(packed.clone() for _ in range(COPIES // packed.nbytes))]
            for threads in (1, 2):
                torch.set_num_threads(threads)
                dequantize_s = dequantize_seconds(weight, format)
                line = {rows: measure_tiles({**shape, "rows": rows, "threads": threads},
                                            copies if rows <= 32 else copies[:1], wide,
                                            dequantize_s, 5 if rows < 512 else 3)
                        for rows in TILE_ROWS if time.perf_counter() < end}
                measured += line.values()
                skipped += len(TILE_ROWS) - len(line)
                if line:
                    print(f"{format:6} {threads:7} {outputs} x {inputs:5} " + "".join(
                        f"{m['times_vectors']:5.2f}/{m['times_bf16']:<5.4g}"
                        for m in line.values())
                        + f"{max(m['tiles_gops'] for m in line.values()):8.0f}  "
                        + ("equal" if all(m["equal"] for m in line.values()) else "DIFFER"),
                        flush=True)
    if skipped:
        print(f"{skipped} figures are missing: they were not begun within {args.seconds} s")
    return {"isa": isa, "tiles": measured, "skipped": skipped,
            "equal": not wrong and all(m["equal"] for m in measured)}


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
    parser.add_argument("--tiles", action="store_true", help="our kernels with and without AMX")
    parser.add_argument("--seconds", type=float, default=70, help="with --tiles: after which "
                        "nothing is begun, the build included")
    parser.add_argument("--out", type=Path, help="where to write JSON")
    parser.add_argument("--side", choices=("layerzero", "ggml"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        work(args.side, args.ggml)
        return
    report: dict[str, Any] = {"machine": platform.machine(), "processor": processor_name(),
                              "torch": torch.__version__}
    if args.tiles:
        report.update(tiles(args))
    else:
        report["kernels"] = kernels(args, args.ggml or find_ggml())
    if args.out:
        args.out.write_text(json.dumps(report, indent=1))
    if not report.get("equal", True):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
