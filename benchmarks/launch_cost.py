"""What one eager call costs the host, on a GPU: our kernels launched in Python and replayed
natively, beside torch.

    python benchmarks/launch_cost.py [--only TEXT] [--out FILE.json]

Columns, in microseconds of host time for one call, in a loop without a synchronisation (median of
many short loops, so that the queue of the device never fills):

    torch    the function of torch that a user would write
    python   our kernel, launched by its Python launcher
    lz       lz.<op>, locked to the kernel: the native path, replayed where `replays` is not 0
    bare
        cuLaunchKernelEx alone, in a C loop: the same function and parameters, times the launches of
        a call
    over     lz - bare; the goal is 5 or less

`lz build` must have been run: without the native path there is nothing to replay. Takes less than a
minute.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import layerzero as lz
from layerzero.dispatch import native
from layerzero.dispatch.native.replays import LaunchRecorder
from layerzero.operate.inspection import dispatcher_of
from layerzero.spec import replay
from layerzero.world import incidents
from layerzero.world import snapshot as worlds

CALLS, LOOPS = 100, 40
COLUMNS = ("torch", "python", "lz", "bare", "over")
LOOP = r"""
#include <chrono>
extern "C" double loop(int (*launch)(const void*, void*, void**, void**), const void* config, void* function,
                       void** params, int times) {
    auto start = std::chrono::steady_clock::now();
    for (int n = 0; n < times; ++n) if (launch(config, function, params, nullptr)) return -1;
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count() / times;
}
"""


class Row(NamedTuple):
    kernel: str
    torch: Callable[[], Any] | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    note: str = ""
    steps: tuple[tuple[Any, ...], ...] = ()    # arguments of successive calls, where they differ


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def rows() -> Iterator[Row]:
    x, residual, weight = rand(1, 4096), rand(1, 4096), rand(4096)
    norm = lambda: F.rms_norm(x, (4096,), weight, 1e-6)                                             # noqa: E731
    for library in ("cuda", "triton"):
        yield Row(f"{library}.rms_norm", norm, (x, weight), {})
        yield Row(f"{library}.add_rms_norm",
                  lambda: F.rms_norm(x + residual, (4096,), weight, 1e-6),
                  (x, residual, weight), {})
        q, k, v = rand(1, 32, 1, 128), rand(1, 8, 4096, 128), rand(1, 8, 4096, 128)
        yield Row(f"{library}.attention_decode",
                  lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
                  (q, k, v), {}, "K4096")
        steps = tuple((q, k[:, :, :n], v[:, :, :n]) for n in range(3100, 3100 + CALLS))
        yield Row(f"{library}.attention_decode", None, steps[0], {}, "another length at every call",
                  steps)
        cache, other = rand(512, 16, 8, 128), rand(512, 16, 8, 128)
        table = torch.arange(256, device="cuda", dtype=torch.int32).view(1, 256)
        yield Row(f"{library}.paged_attention_decode", None,
                  (rand(1, 32, 128), cache, other, table,
                   torch.tensor([4000], device="cuda", dtype=torch.int32)), {},
                  "K4096, pages of 16")
        dense = rand(4096, 4096)
        codes, scales = lz.quantize(dense, "int4", granularity="block", block_size=128)[:2]
        yield Row(f"{library}.quantized_linear" + ("_gemv" if library == "triton" else ""),
                  lambda dense=dense: F.linear(x, dense), (x, codes, scales),
                  {"format": "int4", "group_size": 128}, "int4; torch: bf16")
        logits = torch.randn(1, 128256, device="cuda")
        yield Row(f"{library}.sample",
                  lambda logits=logits: torch.multinomial(logits.softmax(-1), 1), (logits,),
                  {"top_p": 0.9}, "torch without top-p")
    weight_out = rand(4096, 4096)
    yield Row("triton.linear_gemv", lambda: F.linear(x, weight_out), (x, weight_out), {}, "1 row")
    wide = rand(3, 4096)
    yield Row("triton.linear_gemv", lambda: F.linear(wide, weight_out), (wide, weight_out), {},
              "3 rows")
    q, k, cos, sin = rand(1, 32, 1, 128), rand(1, 8, 1, 128), rand(1, 64), rand(1, 64)
    yield Row("triton.rope", lambda: (turned(q, cos, sin), turned(k, cos, sin)), (q, k, cos, sin),
              {"style": "rotate_half"})
    gate, down = rand(2 * 2816, 1024), rand(1024, 2816)
    small = rand(1, 1024)
    yield Row("triton.mlp", lambda: F.linear(gated(F.linear(small, gate)), down),
              (small, gate, down), {},
              "torch's products inside: not recorded")


def turned(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = t.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def gated(t: Tensor) -> Tensor:
    a, b = t.chunk(2, -1)
    return F.silu(a) * b


def host(call: Callable[[], Any]) -> float:
    """Microseconds of the host for one call."""
    for _ in range(5):
        call()
    times = []
    for _ in range(LOOPS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - start) / CALLS * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def stepping(call: Callable[..., Any], row: Row) -> Callable[[], Any]:
    """Calls of one row, with the arguments of the next step each."""
    if not row.steps:
        return lambda: call(*row.args, **row.kwargs)
    state = {"at": 0}

    def step() -> Any:
        state["at"] = (state["at"] + 1) % len(row.steps)
        return call(*row.steps[state["at"]], **row.kwargs)

    return step


class Bare:
    """cuLaunchKernelEx in a C loop."""

    def __init__(self) -> None:
        compiler = shutil.which("g++") or shutil.which("c++")
        self.loop: Any = None
        if compiler:
            self.folder = tempfile.TemporaryDirectory()
            library = Path(self.folder.name) / "loop.so"
            subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-x", "c++", "-", "-o",
                            str(library)], check=True,
                           input=LOOP.encode())
            self.loop = ctypes.CDLL(str(library)).loop
            self.loop.restype = ctypes.c_double
            self.loop.argtypes = (*(ctypes.c_void_p,) * 4, ctypes.c_int)

    def time(self, launches: list[replay.Launch]) -> float | None:
        from layerzero.backends.cuda.compiler import CLUSTER_DIMENSION, Attribute, LaunchConfig
        if self.loop is None or not launches:
            return None
        launch = launches[0]                   # repeated alone: a later one needs what it wrote
        attribute = Attribute(id=CLUSTER_DIMENSION, cluster=(launch.cluster, 1, 1))
        config = LaunchConfig(*launch.grid, launch.threads, 1, 1, launch.shared,
                        torch.cuda.current_stream().cuda_stream)
        if launch.cluster > 1:
            config.attributes, config.attribute_count = ctypes.pointer(attribute), 1
        params = ctypes.create_string_buffer(launch.params, len(launch.params))
        base = ctypes.addressof(params)
        places = (ctypes.c_void_p * len(launch.offsets))(*[base + at for at in launch.offsets])
        times = []
        for _ in range(LOOPS):
            torch.cuda.synchronize()
            times.append(self.loop(launch.address, ctypes.addressof(config), launch.function,
                                   ctypes.addressof(places), CALLS))
        torch.cuda.synchronize()
        return statistics.median(times) * len(launches)


def measured(row: Row, bare: Bare) -> dict[str, Any]:
    kernel = worlds.current().catalog.by_id[row.kernel]
    op, run = kernel.op, incidents.loaded(kernel)
    lz.lock(op.name, kernel.id)
    try:
        public = getattr(lz, op.name)
        public(*row.args, **row.kwargs)                        # compiles
        own = getattr(run, "fn", run)
        own(*row.args, **row.kwargs)
        values = dispatcher_of(op.name).order_arguments(row.args, row.kwargs)
        recorder = LaunchRecorder(values)
        with replay.watching(recorder), recorder:
            out = own(*row.args, **row.kwargs)
        recorder.finish(out)
        result: dict[str, Any] = {
            "kernel": row.kernel, "note": row.note, "launches": len(recorder.launches),
            "torch": host(row.torch) if row.torch else None, "python": host(stepping(own, row)),
            "lz": host(stepping(public, row)), "bare": bare.time(recorder.launches),
            "not_recorded": recorder.problem}
        found = dispatcher_of(op.name).native
        entry = found.compiled.lookup(*row.args, **row.kwargs) if found else None
        counts = (entry.recordings.counts() if entry is not None and entry.recordings is not None
                  else (0, 0, 0))
        result["recordings"], result["replays"] = counts[:2]
        result["over"] = None if result["bare"] is None else result["lz"] - result["bare"]
        return result
    finally:
        lz.unlock()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose kernel contains this")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit(
            f"there is no CUDA device here (torch {torch.__version__}); run this on a GPU machine")
    if native.module() is None:
        raise SystemExit(f"the native path is {native.status().text}; {native.status().hint}")
    torch.manual_seed(0)
    bare = Bare()
    found = []
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {platform.machine()}; us of "
        "host time per call")
    print(f"{'kernel':32}" + "".join(f"{name:>8}" for name in COLUMNS) + "  replays")
    with torch.inference_mode():
        for row in rows():
            if given.only not in row.kernel:
                continue
            r = measured(row, bare)
            found.append(r)
            cells = "".join(f"{'-' if r[c] is None else round(r[c], 1):>8}" for c in COLUMNS)
            told = (f"{r['replays']}" if r["replays"]
                    else f"none: {r['not_recorded'] or 'nothing recorded'}")
            print(f"{row.kernel:32}{cells}  {told}  {row.note}", flush=True)
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        where = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
                 "cuda": torch.version.cuda,
                 "machine": platform.machine(), "date": time.strftime("%Y-%m-%d")}
        given.out.write_text(json.dumps({"environment": where, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
