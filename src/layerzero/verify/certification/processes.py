"""Certifies kernels of a CPU in several processes at once, one for each core.

A process takes one operation after another, so that what a formula gives is still computed once
for all kernels of the operation. A kernel that ends its process has failed; another process goes on
with the kernels after it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from ...machine import hardware, loading
from ...spec.kernel import Kernel
from ...spec.reason import Code, Reason
from ...world import snapshot as worlds
from ...world.registry import certificates
from ..diagnosis.diagnose import Diagnosis
from ..kernel.contract import CaseResult
from .certify import Verdict, certify_all, failure_of, not_run, without_late

MOST = 8                                       # each takes one to two GB of memory
_KILLED = -int(getattr(signal, "SIGKILL", 9))


def certify_in_processes(kernels: Sequence[Kernel], device: str = "cpu", lane: str = "quick",
                         seeds: Sequence[int] | None = None,
                         workers: int = 0) -> Iterator[Verdict]:
    """Certifies as `certify_all` does, with so many processes; 0: one for each core of a CPU. The
    verdicts come as they are ready. What needs one process alone is certified in this one."""
    in_time, late = without_late(kernels, device, lane)
    groups = _groups([k for k in in_time if loading.availability(k) is None])
    count = min(workers or (_cores() if device == "cpu" else 1), len(groups), MOST)
    if count < 2:
        yield from certify_all(kernels, device, lane, seeds)
        return
    mine = [k for k in kernels if loading.availability(k) is not None]
    yield from (not_run(k, lane, Reason(Code.JIT_NOT_WARMED)) for k in late)
    running: list[_Worker] = []
    try:
        while groups or running:
            while groups and len(running) < count:
                running.append(_Worker(groups.pop(0), device, lane, seeds))
            for pipe in wait([worker.pipe for worker in running]):
                worker = next(w for w in running if w.pipe is pipe)
                answer = worker.receive()
                if isinstance(answer, Verdict):
                    yield answer
                elif isinstance(answer, list): # kernels that only this process knows
                    mine += answer
                elif not worker.has_ended:
                    worker.assign(groups.pop(0) if groups else [])
                else:
                    running.remove(worker)
                    if worker.kernels and worker.began:
                        yield _ended(worker.kernels.pop(0), device, lane, worker.process.exitcode)
                    elif worker.kernels:       # no process can be started here
                        mine += [k for group in groups for k in group] + worker.kernels
                        worker.kernels, groups = [], []
                    groups[:0] = [worker.kernels] if worker.kernels else []
    finally:
        for worker in running:
            worker.process.terminate()
    yield from certify_all(mine, device, lane, seeds)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _groups(kernels: Sequence[Kernel]) -> list[list[Kernel]]:
    """Returns the kernels of each operation, those first that take longest: what is left at the
    end should be short. Arguments are what most checks go through. Before them all that compile,
    which share the time for it."""
    by_op: dict[str, list[Kernel]] = {}
    for kernel in kernels:
        by_op.setdefault("" if kernel.jit else kernel.op.name, []).append(kernel)
    return sorted(by_op.values(), key=lambda group: (
        not group[0].jit, -len(group) * len(group[0].op.params)))


class _Worker:
    """A process, and the kernels that it has yet to answer for; it is at the first of them."""

    def __init__(self, kernels: list[Kernel], device: str, lane: str,
                 seeds: Sequence[int] | None) -> None:
        context = multiprocessing.get_context("spawn")     # a fork may hang in OpenMP
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, device, lane, seeds))
        self.process.start()
        theirs.close()
        self.kernels: list[Kernel] = []
        self.began = self.has_ended = False
        self.assign(kernels)

    def assign(self, kernels: list[Kernel]) -> None:
        """Sends a group; none ends the process."""
        self.kernels = list(kernels)
        with contextlib.suppress(BrokenPipeError):         # the next receive says so
            self.pipe.send([(kernel.id, kernel.to_json()) for kernel in kernels])

    def receive(self) -> Verdict | list[Kernel] | None:
        """Returns a verdict, the kernels that the process does not know, or None where it has done
        all or has ended."""
        try:
            answer: Verdict | list[str] | None = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            self.has_ended = True
            return None
        self.began = True
        if answer is None:
            return None
        names = [answer.kernel] if isinstance(answer, Verdict) else answer
        gone = [k for k in self.kernels if k.id in names]
        self.kernels = [k for k in self.kernels if k.id not in names]
        return answer if isinstance(answer, Verdict) else gone


def _serve(pipe: Connection[Any, Any], device: str, lane: str,
           seeds: Sequence[int] | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)           # an interrupt is for who started it
    torch.set_num_threads(1)
    # as many compile already: Inductor would start more, which each import torch
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    known = worlds.current().catalog.by_id
    with contextlib.suppress(EOFError, BrokenPipeError):   # who started it is gone
        while wanted := pipe.recv():
            names = [n for n, declared in wanted if n in known and known[n].to_json() == declared]
            pipe.send([name for name, _ in wanted if name not in names])
            for verdict in certify_all([known[name] for name in names], device, lane, seeds):
                pipe.send(verdict)
            pipe.send(None)


def _ended(kernel: Kernel, device: str, lane: str, code: int | None) -> Verdict:
    """Returns the verdict of a kernel whose process has ended, and keeps it where it is the
    kernel's fault."""
    op = kernel.op
    if code == _KILLED:
        return Verdict(kernel.id, op.name, lane, (CaseResult(
            kernel.id, {}, op.dtypes[0], "skipped", (Reason(
                Code.OUT_OF_MEMORY, None, "its process was killed"),)),))
    name = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
    text = f"its process ended with {name}"
    verdict = Verdict(kernel.id, op.name, lane, (CaseResult(
        kernel.id, {}, op.dtypes[0], "failed", kinds=("fault",), detail=text),),
        diagnosis=Diagnosis("fault", text))
    certificates.write_failure(failure_of(kernel, device, verdict), hardware.probe(device))
    return verdict
