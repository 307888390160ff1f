"""What a call costs in a worker process: beside the same kernel in this process, for small and large
tensors, and for tensors that lie in shared memory already.

    python benchmarks/isolation.py  some seconds; a table, and results/local/isolation.json
    python benchmarks/isolation.py --python /opt/venv/bin/python
        with a worker of another interpreter, which may have another torch

The worker and this process take turns, some calls each. "cost" is the difference of
the medians, "quiet" that of the fastest tenth, which other programs on the machine disturb least.
The rate is the bytes of inputs and results over the quiet cost.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import layerzero as lz
from layerzero.machine.isolation import pool

OUT = Path(__file__).parent / "results" / "local" / "isolation.json"
GOALS = {"small_us": 30.0, "large_gb_per_s": 8.0}
KERNEL = "torch.rms_norm"
LARGE = (64 << 20) // 4                        # elements of a large input


@dataclass
class Row:
    name: str
    nbytes: int                                # of inputs and results
    here_us: float
    worker_us: float
    cost_us: float
    quiet_cost_us: float

    @property
    def gb_per_s(self) -> float:
        return self.nbytes / self.quiet_cost_us / 1e3 if self.quiet_cost_us > 0 else math.inf


def measure(name: str, call: Callable[[str], Any], nbytes: int, seconds: float,
            pause: float = 0.0) -> Row:
    """Times the worker and this process in turn; `pause`: seconds of other work between calls."""
    for where in ("worker", "here"):
        for _ in range(3):
            call(where)
    burst = 20 if nbytes < 1 << 20 and not pause else 1    # a worker just called is awake
    samples: dict[str, list[float]] = {"worker": [], "here": []}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(samples["here"]) < 5:
        for where, times in samples.items():
            for _ in range(burst):
                end_of_pause = time.perf_counter() + pause
                while time.perf_counter() < end_of_pause:
                    pass
                start = time.perf_counter()
                call(where)
                times.append((time.perf_counter() - start) * 1e6)
    here, there = samples["here"], samples["worker"]
    return Row(name, nbytes, statistics.median(here), statistics.median(there),
               statistics.median(there) - statistics.median(here), _quiet(there) - _quiet(here))


def _quiet(times: list[float]) -> float:
    return sorted(times)[len(times) // 10]


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> Callable[[str], Any]:
    """Calls of the same kernel, through lz in the worker and directly here."""
    shape, cuda = weight.shape, x.is_cuda

    def call(where: str) -> Any:
        if where == "worker":
            out = lz.rms_norm(x, weight, backend=f"worker.{KERNEL}")
        else:
            out = torch.rms_norm(x, shape, weight, 1e-6)
        if cuda:
            torch.cuda.synchronize()
        return out

    return call


def rows(seconds: float) -> list[Row]:
    """Small calls, then large ones by where their inputs lie."""
    found = []
    for count, hidden in ((1, 64), (8, 64), (32, 256)):
        x, weight = torch.randn(count, hidden), torch.rand(hidden)
        found.append(measure(f"small {count}x{hidden}", rms_norm(x, weight), 2 * x.nbytes, seconds))
        if (count, hidden) == (8, 64):
            found.append(measure("small 8x64, 0.4 ms apart", rms_norm(x, weight), 2 * x.nbytes,
                                 seconds, 4e-4))
    weight = torch.rand(4096)
    copied = torch.randn(LARGE // 4096, 4096)
    shared = copied.clone().share_memory_()
    result = lz.rms_norm(copied, weight, backend=f"worker.{KERNEL}")
    size = f"{copied.nbytes >> 20} MiB"
    for name, x in ((f"{size}, copied in", copied), (f"{size}, shared by torch", shared),
                    (f"{size}, a worker's result", result)):
        found.append(measure(name, rms_norm(x, weight), 2 * x.nbytes, 4 * seconds))
    if torch.cuda.is_available():
        for count in (8, LARGE // 4096):
            x = torch.randn(count, 4096, device="cuda")
            call = rms_norm(x, weight.cuda())
            assert torch.equal(call("worker"), call("here"))
            found.append(measure(f"cuda {count}x4096, by IPC handle", call, 2 * x.nbytes, seconds))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default="", help="the interpreter of the worker")
    parser.add_argument("--seconds", type=float, default=1.0, help="per small row")
    args = parser.parse_args()
    lz.configure(isolation=f"{KERNEL}=worker" + (f":{args.python}" if args.python else ""),
                 isolation_memory=4 << 30)
    with torch.no_grad():
        found = rows(args.seconds)
    worker = pool.pools()[0].workers[0]
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch "
          f"{torch.__version__}; the worker has torch {worker.versions['torch']}\n")
    print(f"{'':<32} {'here us':>10} {'worker us':>10} {'cost us':>10} {'quiet us':>10} {'GB/s':>7}")
    for row in found:
        print(f"{row.name:<32} {row.here_us:>10.1f} {row.worker_us:>10.1f} {row.cost_us:>10.1f} "
              f"{row.quiet_cost_us:>10.1f} {row.gb_per_s:>7.1f}")
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps({
        "machine": platform.machine(), "cores": os.cpu_count(), "load": os.getloadavg()[0],
        "torch": torch.__version__, "worker": worker.versions, "goals": GOALS,
        "rows": [{**asdict(row), "gb_per_s": min(row.gb_per_s, 1e6)} for row in found]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
