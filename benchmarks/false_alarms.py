"""Verifies every kernel of this machine that is believed right, with many seeds, and logs each
verdict: whatever fails here is a mistake of the kernel or a false alarm of the verifier.

python benchmarks/false_alarms.py LOG.jsonl [--seeds 0-19] [--lane quick] [--device cpu]
    [--workers 1] [--kernel PATTERN] [--until 15:10]

A line of the log is one kernel with one seed. What the log already has for the same sources is not
run again, so a run may be ended at any time and taken up later. Each seed of an operation runs in
a process of its own, which shares what the formula gave among the kernels of the operation.
`lz verify report` summarises such logs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import datetime, timezone
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from layerzero.machine import hardware, loading
from layerzero.spec.kernel import Kernel
from layerzero.verify.kernel.certify import certify
from layerzero.verify.report import sources_digest
from layerzero.world import snapshot as worlds


def kernels_here(device: str, pattern: str) -> dict[str, list[Kernel]]:
    """Returns the kernels that can run here, by operation."""
    by_op: dict[str, list[Kernel]] = {}
    for kernel in worlds.current().catalog.kernels:
        if fnmatchcase(kernel.id, pattern) and loading.availability(kernel) is None:
            by_op.setdefault(kernel.op.name, []).append(kernel)
    return by_op


def verify_kernels(names: list[str], seed: int, lane: str, device: str) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    lines, by_id = [], worlds.current().catalog.by_id
    for name in names:
        started, cpu = time.perf_counter(), time.process_time()
        verdict = certify(by_id[name], device, lane, (seed,))
        diagnosis = verdict.diagnosis
        lines.append({
            "kernel": name, "op": verdict.op, "seed": seed, "lane": lane, "device": device,
            "status": verdict.status, "cases": verdict.ran, "worst": round(verdict.worst, 4),
            "class": diagnosis.kind if diagnosis else "",
            "says": diagnosis.says if diagnosis else verdict.refusal,
            "failures": [str(r) for r in verdict.failures[:3]],
            "seconds": round(time.perf_counter() - started, 2),
            "cpu_seconds": round(time.process_time() - cpu, 2),
            "at": datetime.now(timezone.utc).isoformat(timespec="seconds")})
    return lines


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
    context = multiprocessing.get_context("fork" if args.device == "cpu" else "spawn")
    with args.log.open("a") as log, ProcessPoolExecutor(args.workers, context
                                                        ) as pool:
        waiting = iter(work)
        running = {pool.submit(verify_kernels, names, seed, args.lane, args.device)
                   for (names, seed), _ in zip(waiting, range(args.workers))}
        while running:
            ended = next(as_completed(running))
            running.remove(ended)
            for row in ended.result():
                log.write(json.dumps({**row, **about}) + "\n")
                count += 1
                if row["status"] == "failed":
                    failed += 1
                    print(f"!! {row['kernel']} seed {row['seed']}: {row['class']}: {row['says']}",
                          flush=True)
            log.flush()
            over = args.until and datetime.now(timezone.utc).strftime("%H:%M") >= args.until
            following = None if over else next(waiting, None)
            if following is not None:
                running.add(pool.submit(verify_kernels, *following, args.lane, args.device))
    print(f"{count} verdicts, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
