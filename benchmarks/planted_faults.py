"""Plants the broken kernels of tests/faults and tells which of them get a certificate, and what the
others are taken for.

python benchmarks/planted_faults.py [NAME ...] [--set first|sizes|field|all] [--lane quick|full]
    [--seed N] [--workers N] [--json FILE]

Each fault runs in a forked process of its own: some change the process for good. Exit code 1 if a
fault got a certificate or a class that is not its own. `--json` adds the run to a file of results,
from which docs/reference/proof.md is written.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "faults"))

from broken_kernels import FAULTS, Fault
from field_faults import FIELD_FAULTS
from model_size_faults import SIZE_FAULTS

from layerzero.machine import hardware
from layerzero.verify.certification.certify import certify
from layerzero.verify.report import sources_digest

SETS = {"first": tuple(FAULTS), "sizes": tuple(SIZE_FAULTS), "field": tuple(FIELD_FAULTS),
        "all": (*FAULTS, *SIZE_FAULTS, *FIELD_FAULTS)}
LIMIT_S = 300


class Outcome(NamedTuple):
    status: str                                # failed | passed | skipped | ended
    kind: str
    says: str
    seconds: float = 0.0


def judge(fault: Fault, lane: str, seed: int, pipe: Any) -> None:
    torch.set_num_threads(1)
    verdict = certify(fault.kernel(), lane=lane, seeds=(seed,), stop_early=True)
    diagnosis = verdict.diagnosis
    pipe.send((verdict.status, diagnosis.kind if diagnosis else "",
               f"{diagnosis.says}; {diagnosis.where}" if diagnosis else ""))


def run(fault: Fault, lane: str, seed: int) -> Outcome:
    """Returns what became of a fault; "ended" if its process did."""
    context, started = multiprocessing.get_context("fork"), time.perf_counter()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=judge, args=(fault, lane, seed, theirs))
    process.start()
    theirs.close()
    try:
        told = ours.recv() if ours.poll(LIMIT_S) else ("ended", "", f"no verdict in {LIMIT_S} s")
    except EOFError:
        told = "ended", "", "its process ended"
    finally:
        process.kill()
        process.join()
    return Outcome(*told, round(time.perf_counter() - started, 1))


def report(faults: tuple[Fault, ...], outcomes: Iterator[Outcome], lane: str,
           seed: int) -> dict[str, Any]:
    """Prints a line for each fault and returns the run."""
    rows = []
    for fault, o in zip(faults, outcomes):
        right = o.kind in (*fault.kinds, "unknown")
        mark = "!!" if o.status != "failed" else "ok" if o.kind in fault.kinds else "??"
        print(f"{mark} {fault.op.name}: {fault.name}: {o.status} {o.kind} ({o.seconds:.1f} s) "
              f"{'' if mark == 'ok' else o.says[:240]}", flush=True)
        rows.append({"fault": fault.name, "op": fault.op.name, "status": o.status,
                     "class": o.kind, "right": right and o.status == "failed"})
    caught = sum(r["status"] == "failed" for r in rows)
    named = sum(r["right"] for r in rows)
    print(f"{caught} of {len(rows)} caught, {named} of them with the right class or unknown")
    return {"machine": hardware.probe("cpu").name, "torch": torch.__version__,
            "python": platform.python_version(), "sources": sources_digest(), "lane": lane,
            "seed": seed, "at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "planted": len(rows), "caught": caught, "named": named, "faults": rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--set", default="all", choices=tuple(SETS))
    parser.add_argument("--lane", default="quick", choices=("quick", "full"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    faults = tuple(f for f in SETS[args.set] if not args.names or f.name in args.names)
    torch.set_num_threads(1)
    with ThreadPoolExecutor(args.workers) as pool:
        outcomes = pool.map(lambda f: run(f, args.lane, args.seed), faults)
        result = {"set": args.set, **report(faults, outcomes, args.lane, args.seed)}
    if args.json is not None:
        known = json.loads(args.json.read_text()) if args.json.exists() else {"runs": []}
        args.json.write_text(json.dumps({"kind": "faults", "runs": [*known["runs"], result]},
                                        indent=1) + "\n")
    return 0 if result["named"] == result["planted"] else 1


if __name__ == "__main__":
    sys.exit(main())
