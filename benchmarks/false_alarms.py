"""Verifies every kernel of this machine that is believed right, with many seeds, and logs each
verdict: whatever fails here is a mistake of the kernel or a false alarm of the verifier.

python benchmarks/false_alarms.py LOG.jsonl [--seeds 0-19] [--lane quick] [--device cpu]
    [--workers 1] [--kernel PATTERN] [--until 15:10]

A line of the log is one kernel with one seed. What the log already has for the same sources is not
run again, so a run may be ended at any time and taken up later. Each seed of an operation runs in
a process of its own, which shares what the formula gave among the kernels of the operation; where
it dies, the kernel that it was at has failed and the others go on.
`lz verify report` summarises such logs.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from fnmatch import fnmatchcase
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.fx.experimental.symbolic_shapes  # what a first backward pass imports: before a fork

from layerzero.machine import hardware, loading
from layerzero.spec.kernel import Kernel
from layerzero.verify.certification.certify import certify
from layerzero.verify.report import sources_digest
from layerzero.world import snapshot as worlds


def kernels_here(device: str, pattern: str) -> dict[str, list[Kernel]]:
    """Returns the kernels that can run here, by operation."""
    by_op: dict[str, list[Kernel]] = {}
    for kernel in worlds.current().catalog.kernels:
        if fnmatchcase(kernel.id, pattern) and loading.availability(kernel) is None:
            by_op.setdefault(kernel.op.name, []).append(kernel)
    return by_op


def verify_kernels(names: list[str], seed: int, lane: str, device: str, pipe: Any) -> None:
    """Sends the name of each kernel before it is verified, and its line afterwards."""
    torch.set_num_threads(1)
    faulthandler.enable()                      # says where a process was that dies
    by_id = worlds.current().catalog.by_id
    for name in names:
        pipe.send(name)
        started, cpu = time.perf_counter(), time.process_time()
        verdict = certify(by_id[name], device, lane, (seed,))
        diagnosis = verdict.diagnosis
        pipe.send({
            **line_of(name, seed, lane, device), "cases": verdict.ran,
            # what stays unproven of ours is to be looked at, too
            "status": "failed" if verdict.status == "unproven" else verdict.status,
            "worst": round(verdict.worst, 4), "class": diagnosis.kind if diagnosis else "",
            "says": diagnosis.says if diagnosis else verdict.refusal,
            "failures": [str(r) for r in verdict.failures[:3]],
            "seconds": round(time.perf_counter() - started, 2),
            "cpu_seconds": round(time.process_time() - cpu, 2)})
        if device == "cuda" and is_lost():     # the others are verified by another process
            return


def is_lost() -> bool:
    """Returns whether a kernel left the device in a failed state, in which every call fails."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def line_of(name: str, seed: int, lane: str, device: str) -> dict[str, Any]:
    return {"kernel": name, "op": worlds.current().catalog.by_id[name].op.name, "seed": seed,
            "lane": lane, "device": device, "cases": 0, "worst": 0.0, "failures": [],
            "seconds": 0.0, "cpu_seconds": 0.0,
            "at": datetime.now(timezone.utc).isoformat(timespec="seconds")}


class Job:
    """A process that verifies some kernels with one seed."""

    def __init__(self, names: list[str], seed: int, lane: str, device: str) -> None:
        context = multiprocessing.get_context("fork" if device == "cpu" else "spawn")
        self.left, self.current, self.about = list(names), "", (seed, lane, device)
        self.pipe, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=verify_kernels,
                                       args=(names, seed, lane, device, theirs))
        self.process.start()
        theirs.close()

    def take(self) -> dict[str, Any] | None:
        """Returns the next line; None where there is none yet or the process has ended."""
        try:
            told = self.pipe.recv()
        except EOFError:
            self.process.join()
            if not self.current:
                return None
            name, self.current = self.current, ""
            code = self.process.exitcode
            memory = code == -9
            return {**line_of(name, *self.about), "status": "skipped" if memory else "failed",
                    "class": "" if memory else "fault", "says": f"its process ended with {code}"
                    + (", as it does when memory runs out" if memory else "")}
        if isinstance(told, str):
            self.current = told
            self.left.remove(told)
            return None
        self.current = ""
        return dict(told)


def jobs(by_op: dict[str, list[Kernel]], seeds: list[int],
         done: set[tuple[str, int]]) -> Iterator[tuple[list[str], int]]:
    """Yields seed by seed, so that every kernel has had some when a run is ended; what compiles
    comes alone and last."""
    for seed in seeds:
        for jit in (False, True):
            for kernels in by_op.values():
                names = [k.id for k in kernels if k.jit is jit and (k.id, seed) not in done]
                yield from ((([name], seed) for name in names) if jit
                            else [(names, seed)] if names else [])


def parse_seeds(text: str) -> list[int]:
    first, _, last = text.partition("-")
    return list(range(int(first), int(last or first) + 1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("log", type=Path)
    parser.add_argument("--seeds", type=parse_seeds, default=list(range(20)))
    parser.add_argument("--lane", default="quick")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--kernel", default="*")
    parser.add_argument("--until", default="", help="UTC, as 15:10: nothing is begun after it")
    args = parser.parse_args()
    digest = sources_digest()
    target = hardware.probe(args.device)
    about = {"machine": target.name, "signature": target.signature, "sources": digest,
             "torch": torch.__version__, "python": platform.python_version(),
             "arch": platform.machine()}
    lines = args.log.read_text().splitlines() if args.log.exists() else []
    done = {(row["kernel"], row["seed"]) for row in map(json.loads, lines)
            if (row["sources"], row["lane"], row["device"]) == (digest, args.lane, args.device)}
    work = list(jobs(kernels_here(args.device, args.kernel), args.seeds, done))
    failed = count = 0
    running: list[Job] = []
    with args.log.open("a") as log:
        while work or running:
            over = args.until and datetime.now(timezone.utc).strftime("%H:%M") >= args.until
            if over:
                work.clear()
            while work and len(running) < args.workers:
                running.append(Job(*work.pop(0), args.lane, args.device))
            for pipe in wait([job.pipe for job in running], timeout=5.0):
                job = next(job for job in running if job.pipe is pipe)
                row = job.take()
                if row is not None:
                    log.write(json.dumps({**row, **about}) + "\n")
                    log.flush()
                    count += 1
                    failed += row["status"] == "failed"
                    if row["status"] == "failed":
                        print(f"!! {row['kernel']} seed {row['seed']}: {row['class']}: "
                              f"{row['says']}", flush=True)
                if row is None and not job.current and job.process.exitcode is not None:
                    running.remove(job)
                    if job.left:               # it died: the others of its operation go on
                        work.insert(0, (job.left, job.about[0]))
    print(f"{count} verdicts, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
