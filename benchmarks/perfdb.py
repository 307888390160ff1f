"""What the store of measurements costs: writing, a point query, loading the view, the first
question to it.

    python benchmarks/perfdb.py  100 000 rows; a table, and a JSON under results/local
    python benchmarks/perfdb.py --rows 2000              shows that everything runs
    python benchmarks/perfdb.py --url postgresql://...
        the same through a server; its tables are filled and emptied

Every number is the median of several runs and the best of them, which says more on a machine that
is busy. The file was just written, so it is in the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from layerzero.perf.fleet import FleetStore
from layerzero.perf.interface import Store
from layerzero.perf.record import Kind, Measurement, Rates
from layerzero.perf.store import SqliteStore

OUT = Path(__file__).parent / "results" / "local" / "perfdb.json"
KERNELS, PLACES = 50, 4


def rows(count: int) -> Iterator[Measurement]:
    """As long as real ones: fifty kernels of attention, four machines."""
    draw = random.Random(0)
    for i in range(count):
        n = i // (KERNELS * PLACES)
        sizes = f"batch={1 + n % 8} heads=32 kv_heads=8 seq_q=1 seq_k={64 + n} head_dim=128"
        us = 5 + 100 * draw.random()
        yield Measurement(
            f"torch.sdpa_kernel_{i % KERNELS}", "attention", f"bfloat16 is_causal=True {sizes}",
            f"0123456789abcde{i // KERNELS % PLACES}-4t", us, draw.random() / 5, 50,
            "bfloat16 is_causal=True", sizes, 1e9 * draw.random(), 1e6 * draw.random(), 1.1 * us,
            1.2 * us, 0.0, "source#0123456789abcdef", 1.7e9 + i)


def timed(work: Callable[[], Any], runs: int) -> dict[str, float]:
    """Milliseconds: as the clock has it, and what this process computed."""
    found, computed = [], []
    for _ in range(runs):
        start, busy = time.perf_counter(), time.process_time()
        work()
        computed.append((time.process_time() - busy) * 1e3)
        found.append((time.perf_counter() - start) * 1e3)
    return {"median_ms": statistics.median(found), "best_ms": min(found),
            "best_cpu_ms": min(computed)}


def measure(open_store: Callable[[], Store], count: int) -> dict[str, dict[str, float]]:
    data = list(rows(count))
    builds = {m.kernel: m.build for m in data[:KERNELS]}
    result = {}
    with open_store() as store:
        result["write all, one transaction"] = timed(lambda: store.put(data,
                                                                       {"machine": "benchmark"}), 1)
        result["write ten more"] = timed(lambda: store.put(data[:10]), 20)
        asked = iter(random.Random(1).choices(data, k=2000))

        def point() -> None:
            m = next(asked)
            assert store.get(m.kernel, m.bucket, m.place) is not None

        result["point query"] = timed(point, 2000)
    result["open the store"] = timed(lambda: open_store().close(), 20)

    def load() -> None:
        with open_store() as store:
            assert store.view(builds)

    result["open, check and load the view"] = timed(load, 7)
    with open_store() as store:
        view = store.view(builds)
    kernels = iter(builds)
    result["first question about a kernel"] = timed(lambda: view.get(next(kernels), "", ""),
                                                    len(builds))
    some = iter(random.Random(2).choices(data, k=2000))

    def ask() -> None:
        m = next(some)
        assert view.get(m.kernel, m.bucket, m.place) is not None

    result["question to the view"] = timed(ask, 2000)
    m = data[0]
    sizes = tuple((name, int(n))
                  for name, _, n in (part.partition("=") for part in m.sizes.split()))
    kind = Kind(m.family, sizes, "")
    view.estimate(m.kernel, kind, m.place, Rates(1e5, 1e4), 1.0)
    result["estimate from neighbours"] = timed(lambda: view.estimate(m.kernel, kind, m.place,
                                                                     Rates(1e5, 1e4), 1.0), 50)
    more = m._replace(median_us=1.0, at=1.75e9)
    result["the view with one more"] = timed(lambda: view.including([more]), 50)
    with open_store() as store:
        assert store.prune() == count
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--url", help="a PostgreSQL database to fill and empty")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "perf.sqlite"
        found = {"SQLite": measure(lambda: SqliteStore(path), args.rows)}
    if args.url:
        found["PostgreSQL"] = measure(lambda: FleetStore(args.url), args.rows)
    for name, result in found.items():
        print(f"\n{name}, {args.rows} rows")
        for what, times in result.items():
            unit, scale = ("us", 1e3) if times["median_ms"] < 1 else ("ms", 1.0)
            median, best, cpu = (f"{times[name] * scale:9.1f} {unit}" for name in times)
            print(f"  {what:<32} {median}   best {best}   of it computed {cpu}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    args.out.write_text(json.dumps({"rows": args.rows, "python": platform.python_version(),
                                    "load_average": load,
                                    "results": found}, indent=2))


if __name__ == "__main__":
    main()
