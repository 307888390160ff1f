"""Runs a lane of verification over every kernel that can run here, and records what was run, when
and on what in benchmarks/results, from which docs/reference/proof.md is generated.

python benchmarks/proof.py MACHINE [--lane quick|full] [--seeds 0 1 2] [--device cpu]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from layerzero.machine import hardware
from layerzero.verify.kernel.certify import LANES, Verdict, certify
from layerzero.world import snapshot as worlds

RESULTS = Path(__file__).parent / "results"
KEPT = ("kernel", "op", "status", "cases", "worst", "seconds")


def record(runs: list[tuple[int, list[Verdict], float]], device: str, lane: str) -> dict[str, Any]:
    """Returns the runs, (seed, verdicts, seconds), as they are kept; kernels that are not here are
    left out."""
    return {"device": hardware.probe(device).name, "kind": device, "lane": lane,
            "torch": str(torch.__version__), "cores": len(os.sched_getaffinity(0)),
            "date": datetime.now(timezone.utc).date().isoformat(),
            "runs": [{"seed": seed, "seconds": round(seconds, 1), "kernels": [
                {**{name: v.to_json()[name] for name in KEPT}, "covers": str(v.coverage),
                 "misses": list(v.coverage.missing)} for v in verdicts if v.status != "skipped"]}
                for seed, verdicts, seconds in runs]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("machine", help="of the file's name, such as neoverse-n1")
    parser.add_argument("--lane", default="quick", choices=tuple(LANES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    runs = []
    for seed in args.seeds:
        started, verdicts = time.perf_counter(), []
        for kernel in sorted(worlds.current().catalog.kernels, key=lambda k: k.op.name):
            verdicts.append(certify(kernel, args.device, args.lane, (seed,)))
            if verdicts[-1].status != "skipped":
                print(f"{kernel.id}: {verdicts[-1].status}, {verdicts[-1].seconds:.1f} s",
                      flush=True)
        runs.append((seed, verdicts, time.perf_counter() - started))
        path = RESULTS / f"proof-{args.device}-{args.machine}.json"
        path.write_text(json.dumps(record(runs, args.device, args.lane), indent=1) + "\n")
    return int(any(v.failures for _, verdicts, _ in runs for v in verdicts))


if __name__ == "__main__":
    sys.exit(main())
