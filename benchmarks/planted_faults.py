"""Plants every broken kernel of tests/faults and tells which of them get a certificate, and what
the others are taken for.

python benchmarks/planted_faults.py [NAME ...] [--lane quick|full] [--seed N] [--old]

Each fault runs in a forked process of its own: some change the process for good. Exit code 1 if a
fault got a certificate or a class that is not its own.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "faults"))

from broken_kernels import FAULTS, Fault
from model_size_faults import SIZE_FAULTS

from layerzero.verify.kernel.certify import certify

LIMIT_S = 300


def judge(fault: Fault, lane: str, seed: int, pipe: Any) -> None:
    verdict = certify(fault.kernel(), lane=lane, seeds=(seed,), stop_early=True)
    diagnosis = verdict.diagnosis
    pipe.send((verdict.status, diagnosis.kind if diagnosis else "",
               f"{diagnosis.says}; {diagnosis.where}" if diagnosis else ""))


def run(fault: Fault, lane: str, seed: int) -> tuple[str, str, str]:
    """Returns the status, the class and the evidence; "ended" if the process did."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=judge, args=(fault, lane, seed, theirs))
    process.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(LIMIT_S) else ("ended", "", f"no verdict in {LIMIT_S} s")
    except EOFError:
        return "ended", "", "its process ended"
    finally:
        process.kill()
        process.join()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--lane", default="quick", choices=("quick", "full"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--old", action="store_true", help="those of broken_kernels.py")
    args = parser.parse_args()
    faults = [f for f in (FAULTS if args.old else SIZE_FAULTS)
              if not args.names or f.name in args.names]
    caught = named = 0
    for fault in faults:
        started = time.perf_counter()
        status, kind, says = run(fault, args.lane, args.seed)
        right = status != "failed" or kind in (*fault.kinds, "unknown")
        caught += status == "failed"
        named += status == "failed" and right
        mark = "!!" if status != "failed" else "ok" if kind in fault.kinds else "??"
        print(f"{mark} {fault.op.name}: {fault.name}: {status} {kind} "
              f"({time.perf_counter() - started:.1f} s) {'' if mark == 'ok' else says[:240]}",
              flush=True)
    print(f"{caught} of {len(faults)} caught, {named} of them with the right class or unknown")
    return 0 if named == len(faults) else 1


if __name__ == "__main__":
    sys.exit(main())
