"""Plants the broken kernels of tests/faults and tells which of them get a certificate, and what the
others are taken for.

python benchmarks/planted_faults.py [NAME ...]
    [--set all|first|sizes|field|shapes|numbers|authors|edges|ports|calls] [--lane quick|full] [--seed N] [--workers N] [--limit SECONDS] [--json FILE]

Each fault runs in a forked process of its own: some change the process for good, some end it. One
that ends its process, as a write beside its memory does, is caught, with the class "fault"; one
that gives no verdict within the limit is not. Exit code 1 if a fault got a certificate or a class
that is not its own. `--json` adds the run to a file of results, from which docs/reference/proof.md
is written.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import signal
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "faults"))

from attention_author_faults import ATTENTION_AUTHOR_FAULTS
from attention_call_faults import ATTENTION_CALL_FAULTS
from broken_kernels import FAULTS, Fault
from edge_faults import EDGE_FAULTS
from field_faults import FIELD_FAULTS
from fusion_faults import FUSION_FAULTS
from layer_author_faults import LAYER_AUTHOR_FAULTS
from model_size_faults import SIZE_FAULTS
from number_faults import NUMBER_FAULTS
from optional_author_faults import OPTIONAL_AUTHOR_FAULTS
from port_faults import PORTED_ATTENTION_FAULTS
from shape_faults import SHAPE_FAULTS
from state_author_faults import STATE_AUTHOR_FAULTS
from use_faults import USE_FAULTS

from layerzero.machine import hardware
from layerzero.verify.certification.certify import certify
from layerzero.verify.report import sources_digest

SETS = {"first": tuple(FAULTS), "sizes": tuple(SIZE_FAULTS), "field": tuple(FIELD_FAULTS),
        "shapes": tuple(SHAPE_FAULTS), "numbers": tuple(NUMBER_FAULTS),
        "authors": (*ATTENTION_AUTHOR_FAULTS, *LAYER_AUTHOR_FAULTS, *STATE_AUTHOR_FAULTS,
                    *OPTIONAL_AUTHOR_FAULTS),
        "edges": (*USE_FAULTS, *EDGE_FAULTS),
        "ports": (*PORTED_ATTENTION_FAULTS, *FUSION_FAULTS),
        "calls": tuple(ATTENTION_CALL_FAULTS)}
SETS["all"] = tuple(fault for faults in SETS.values() for fault in faults)
CAUGHT = ("failed", "crashed")


class Outcome(NamedTuple):
    status: str                                # failed | passed | skipped | crashed | no verdict
    kind: str
    says: str
    seconds: float = 0.0


def judge(fault: Fault, lane: str, seed: int, pipe: Any) -> None:
    torch.set_num_threads(1)
    verdict = certify(fault.kernel(), lane=lane, seeds=(seed,), stop_early=True)
    diagnosis = verdict.diagnosis
    pipe.send((verdict.status, diagnosis.kind if diagnosis else "",
               f"{diagnosis.says}; {diagnosis.where}" if diagnosis else ""))


class Trial:
    """A fault in a process of its own."""

    def __init__(self, fault: Fault, lane: str, seed: int) -> None:
        context = multiprocessing.get_context("fork")
        self.fault, self.started = fault, time.perf_counter()
        self.pipe, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=judge, args=(fault, lane, seed, theirs))
        self.process.start()
        theirs.close()

    def seconds(self) -> float:
        return round(time.perf_counter() - self.started, 1)

    def outcome(self) -> Outcome:
        """Returns what became of it, once its pipe has something or has ended."""
        try:
            return Outcome(*self.pipe.recv(), self.seconds())
        except (EOFError, OSError):            # it died, perhaps within its message
            self.process.join()
            code = self.process.exitcode or 0
            if code in (0, 1, -signal.SIGKILL):        # a mistake here, or memory ran out
                return Outcome("no verdict", "", f"its process ended with {code}", self.seconds())
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            return Outcome("crashed", "fault", f"its process ended with {how}", self.seconds())

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def trials(faults: tuple[Fault, ...], lane: str, seed: int, workers: int,
           limit: float) -> Iterator[tuple[Fault, Outcome]]:
    """Yields each fault with what became of it, as they end."""
    left, running = list(faults), []           # type: list[Fault], list[Trial]
    while left or running:
        while left and len(running) < workers:
            running.append(Trial(left.pop(0), lane, seed))
        ended = wait([trial.pipe for trial in running], timeout=1.0)
        for trial in list(running):
            if trial.pipe in ended:
                outcome = trial.outcome()
            elif trial.seconds() > limit:
                outcome = Outcome("no verdict", "", f"none in {limit:.0f} s", trial.seconds())
            else:
                continue
            trial.end()
            running.remove(trial)
            yield trial.fault, outcome


def report(outcomes: Iterator[tuple[Fault, Outcome]], lane: str, seed: int) -> dict[str, Any]:
    """Prints a line for each fault and returns the run."""
    rows = []
    for fault, o in outcomes:
        right = o.status == "crashed" or (o.status == "failed"
                                          and o.kind in (*fault.kinds, "unknown"))
        mark = "!!" if o.status not in CAUGHT else "ok" if right and o.kind != "unknown" else "??"
        print(f"{mark} {fault.op.name}: {fault.name}: {o.status} {o.kind} ({o.seconds:.1f} s) "
              f"{'' if mark == 'ok' else o.says[:400]}", flush=True)
        rows.append({"fault": fault.name, "op": fault.op.name, "status": o.status,
                     "class": o.kind, "right": right})
    caught = sum(r["status"] in CAUGHT for r in rows)
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
    parser.add_argument("--limit", type=float, default=300, help="seconds a fault may take")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    faults = tuple(f for f in SETS[args.set] if not args.names or f.name in args.names)
    torch.set_num_threads(1)
    outcomes = trials(faults, args.lane, args.seed, args.workers, args.limit)
    result = {"set": args.set, **report(outcomes, args.lane, args.seed)}
    if args.json is not None:
        known = json.loads(args.json.read_text()) if args.json.exists() else {"runs": []}
        args.json.write_text(json.dumps({"kind": "faults", "runs": [*known["runs"], result]},
                                        indent=1) + "\n")
    return 0 if result["named"] == result["planted"] else 1


if __name__ == "__main__":
    sys.exit(main())
