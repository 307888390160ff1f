"""Warm-up: kernels are compiled before the first request comes, not while it waits.

One thread does the work, critical calls first. What it compiled is published as a new world; until
then, and for every call that was not warmed up, selection takes another kernel. Worker processes
share the compilers' own caches on disk: of several that need the same, one compiles and the others
wait.
"""

from __future__ import annotations

import atexit
import contextvars
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch

from ..dispatch.background.compiling import EXIT_SECONDS, compile_now, share_caches
from ..dispatch.dispatcher import Dispatcher
from ..files.calls import load_calls
from ..machine import faults, hardware, locks
from ..spec.call import Call
from ..spec.codec import Record, encode
from ..spec.display import Displayed, plural
from ..spec.errors import ConfigError, LayerZeroError
from ..spec.event import Fallback, WarmupSkipped
from ..spec.kernel import Kernel
from ..spec.plan import Step
from ..spec.reason import Code, Reason
from ..world import context, events
from ..world import snapshot as worlds
from .calls import make_values
from .inspection import dispatcher_of
from .readiness import first_line

# calls in the background queue; more are skipped, with an event
MAX_WAITING = 256
CANNOT_BE_MADE: tuple[type[BaseException], ...] = (LayerZeroError, *faults.OUT_OF_MEMORY)


class Artefact(Protocol):
    @property
    def call(self) -> Call: ...


@runtime_checkable
class HasCompiledCalls(Protocol):
    """A dispatch table: it lists the calls that a kernel must be compiled for."""

    @property
    def jit(self) -> Sequence[Artefact]: ...


Source = Iterable[Call] | str | os.PathLike[str] | HasCompiledCalls


@dataclass(frozen=True)
class WarmupOutcome(Record):
    """The outcome of one call."""

    call: Call
    state: str = "waiting"                     # waiting | ready | failed | skipped
    kernel: str = ""                           # that serves such calls from now on
    compiled: bool = False                     # does it compile on first use?
    seconds: float = 0.0
    why: str = ""                              # of failed and skipped
    # faster kernels that failed -> why
    left_out: Mapping[str, str] = field(default_factory=dict)


Progress = Callable[[WarmupOutcome], object]


class WarmupReport(Displayed):
    """The progress of a warm-up. It changes while calls wait in the background."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._outcomes = [WarmupOutcome(call) for call in calls]

    @property
    def outcomes(self) -> tuple[WarmupOutcome, ...]:
        return tuple(self._outcomes)

    def _in(self, state: str) -> tuple[WarmupOutcome, ...]:
        return tuple(o for o in self._outcomes if o.state == state)

    @property
    def ready(self) -> tuple[WarmupOutcome, ...]:
        return self._in("ready")

    @property
    def waiting(self) -> tuple[WarmupOutcome, ...]:
        return self._in("waiting")

    @property
    def failed(self) -> tuple[WarmupOutcome, ...]:
        return self._in("failed")

    @property
    def skipped(self) -> tuple[WarmupOutcome, ...]:
        return self._in("skipped")

    @property
    def ok(self) -> bool:
        """Is every call ready, with its fastest kernel?"""
        return all(o.state == "ready" and not o.left_out for o in self._outcomes)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all calls are done; return False if `timeout` seconds came first."""
        with _lock:
            return _lock.wait_for(lambda: not self.waiting, timeout)

    def to_json(self) -> dict[str, Any]:
        return {"ok": self.ok, "calls": encode(self._outcomes)}

    def __str__(self) -> str:
        counts = ", ".join(f"{len(outcomes)} {state}"
                           for state in ("ready", "waiting", "failed", "skipped")
                           if (outcomes := self._in(state)))
        lines = [f"warm-up of {plural(len(self._outcomes), 'call')}: {counts or 'nothing to do'}"]
        for o in self._outcomes:
            parts = [o.state, o.kernel, f"{o.seconds:.1f} s" if o.compiled else "", o.why,
                     *(f"not {kernel}: {why}" for kernel, why in o.left_out.items())]
            lines.append(f"  {o.call.op} {o.call.name}".rstrip() + ": "
                         + ", ".join(filter(None, parts)))
        return "\n".join(lines)


@dataclass(eq=False)
class _Job:
    """One call in the queue."""

    report: WarmupReport
    index: int
    device: str
    progress: Progress | None
    caller_context: contextvars.Context        # has the policies of the caller's `with` blocks
    # the kernel that is compiled, and the one that serves meanwhile
    compiling: tuple[str, str] = ("", "")

    @property
    def call(self) -> Call:
        return self.report._outcomes[self.index].call

    @property
    def done(self) -> bool:
        return self.report._outcomes[self.index].state != "waiting"


@dataclass(eq=False)
class _Settling:
    """After the critical calls: each once more, so that the newest world remembers it."""

    jobs: Sequence[_Job]
    epoch: int                                 # of the world before the warm-up
    done: bool = False


_lock = locks.condition()                      # guards the queues and every outcome
_critical: deque[_Job | _Settling] = deque()
_rest: deque[_Job] = deque()
_thread: threading.Thread | None = None
_current: _Job | None = None
_closing = False


def warmup(calls: Source, *, critical: Source | None = None, background: bool = True,
           timeout: float | None = None, device: str | None = None,
           progress: Progress | None = None, most_waiting: int = MAX_WAITING) -> WarmupReport:
    """Compile and load what `calls` need: descriptions, a file of them (JSON lines), or a dispatch
    table.

    Waits for the `critical` ones, by default all; the others are done in the background, at most
    `most_waiting` of them, or with background=False before it returns. After `timeout` seconds it
    returns in any case: what is not ready is compiled later, and other kernels serve the calls
    until then.
    """
    if timeout is not None and not timeout >= 0:
        raise ConfigError(f"lz.warmup: timeout must be seconds >= 0, got {timeout!r}")
    critical_calls = _read_source(calls if critical is None else critical)
    background_calls = () if critical is None else tuple(
        call for call in _read_source(calls) if call not in critical_calls)
    target = device or hardware.main_kind()
    hardware.probe(target.partition(":")[0])
    share_caches()
    report = WarmupReport((*critical_calls, *background_calls))
    caller_context = contextvars.copy_context()
    jobs = [_Job(report, i, target, progress, caller_context) for i in range(len(report.outcomes))]
    urgent = jobs[:len(critical_calls)] if background else jobs
    settling = _Settling(urgent, worlds.current().epoch, done=not urgent)
    try:
        _enqueue([*urgent, settling] if urgent else [], jobs[len(urgent):], most_waiting)
        with _lock:
            in_time = _lock.wait_for(lambda: settling.done and all(job.done for job in urgent),
                                     timeout)
    except BaseException:                      # an interrupt: cancel what has not begun
        _cancel(report, settling)
        raise
    if not in_time:
        _emit_late(urgent, timeout)
    return report


def _read_source(source: Source) -> tuple[Call, ...]:
    if isinstance(source, HasCompiledCalls):
        source = [artefact.call for artefact in source.jit]
    return load_calls(
        source, "lz.warmup: wanted calls (lz.testing.Call), a file of them or a table")


# the queue

def _enqueue(urgent: Iterable[_Job | _Settling], rest: Sequence[_Job], most: int) -> None:
    global _thread
    with _lock:
        _critical.extend(urgent)
        free = max(most - len(_rest), 0)
        _rest.extend(rest[:free])
        # an interrupt may have come before the last one was started
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_work, name="layerzero-warmup", daemon=True)
            _thread.start()
    for job in rest[free:]:
        _finish(job, WarmupOutcome(job.call, "skipped", why=f"{most} calls wait already"))


def _work() -> None:
    global _thread, _current
    me = threading.current_thread()
    while True:
        with _lock:
            # an interrupt came while it was started, and another was started
            if _thread is not me:
                return
            if _closing or not (_critical or _rest):
                _thread = None
                return
            job = _critical.popleft() if _critical else _rest.popleft()
            _current = job if isinstance(job, _Job) else None
        if isinstance(job, _Settling):
            _settle(job)
            continue
        try:
            outcome = job.caller_context.copy().run(_warm, job)
        except faults.FAULTS as e:
            outcome = WarmupOutcome(job.call, "failed", why=first_line(e))
        _finish(job, outcome)


def _finish(job: _Job, outcome: WarmupOutcome) -> None:
    with _lock:
        if job.done:                           # cancelled meanwhile
            return
        job.report._outcomes[job.index] = outcome
        _lock.notify_all()
    if outcome.state != "ready":
        events.emit(WarmupSkipped(op=job.call.op, kernel=outcome.kernel, problem=outcome.why))
    if job.progress is not None:
        try:
            job.progress(outcome)
        except faults.FAULTS as e:
            events.log.warning("the progress function of lz.warmup failed: %s", e)


def _settle(group: _Settling) -> None:
    if worlds.current().epoch != group.epoch:
        for job in group.jobs:
            if job.report._outcomes[job.index].state == "ready":
                try:
                    job.caller_context.copy().run(_call_once, job)
                except faults.FAULTS as e:
                    events.log.warning("%s could not be called after its warm-up: %s", job.call.op,
                                       e)
    with _lock:
        group.done = True
        _lock.notify_all()


def _cancel(report: WarmupReport, settling: _Settling) -> None:
    with _lock:
        for queue in (_critical, _rest):
            remaining = [job for job in queue if job is not settling
                         and getattr(job, "report", None) is not report]
            queue.clear()
            queue.extend(remaining)  # type: ignore[arg-type]
        for i, outcome in enumerate(report._outcomes):
            if (outcome.state == "waiting"
                and not (_current and _current.report is report and _current.index == i)):
                report._outcomes[i] = WarmupOutcome(outcome.call, "skipped", why="interrupted")
        _lock.notify_all()


def _emit_late(jobs: Iterable[_Job], timeout: float | None) -> None:
    for job in jobs:
        if not job.done:
            kernel, meanwhile = job.compiling
            events.emit(Fallback(job.call.op, kernel, meanwhile, Reason(
                Code.KERNEL_TIMEOUT, f"{timeout:g} s of warm-up; it goes on in the background")))


# one call

def _make_call(job: _Job) -> tuple[Dispatcher, tuple[Any, ...]]:
    """Return the call's dispatcher and arguments in order; unusual calls made canonical."""
    dispatcher = dispatcher_of(job.call.op)
    values = make_values(dispatcher.op, job.call, job.device)
    while (dispatcher.op.canonical is not None
           and (redirect := dispatcher.op.canonical(values)) is not None):
        dispatcher = dispatcher_of(redirect.op)
        values = {p.name: redirect.values.get(p.name, p.default) for p in dispatcher.op.params}
    dispatcher.ensure_world()
    return dispatcher, tuple(values[name] for name in dispatcher.names)


def _call_once(job: _Job) -> None:
    """Call it as a request would: selects, loads the library, and remembers the choice."""
    with torch.set_grad_enabled(job.call.grad):
        dispatcher, values = _make_call(job)
        dispatcher.public(**dict(zip(dispatcher.names, values)))


def _warm(job: _Job) -> WarmupOutcome:
    start = time.perf_counter()
    left_out: dict[str, str] = {}
    with torch.set_grad_enabled(job.call.grad):
        try:
            dispatcher, values = _make_call(job)
            facts = dispatcher.facts(values, worlds.current())
        except CANNOT_BE_MADE as e:
            return WarmupOutcome(job.call, "failed", why=first_line(e))
        meanwhile = _serve_now(dispatcher, values)
        while True:
            choice = _choice(dispatcher, facts, left_out)
            if choice is None:
                return WarmupOutcome(
                    job.call, "failed", why="no kernel can serve it; lz explain says why",
                    left_out=left_out
                )
            kernel, step = choice
            if kernel.jit:
                job.compiling = kernel.id, meanwhile
                problem = compile_now(dispatcher, kernel, step, facts, values)
                if problem is not None:
                    left_out[kernel.id] = problem
                    continue
                _call_once(job)
            took = time.perf_counter() - start
            return WarmupOutcome(job.call, "ready", kernel.id, kernel.jit, took, left_out=left_out)


def _serve_now(dispatcher: Dispatcher, values: tuple[Any, ...]) -> str:
    """Call it as requests do until the better kernel is ready, so that what serves is loaded."""
    world = worlds.current()
    kernel = world.plan(dispatcher.op, dispatcher.facts(values, world),
                        context.current.get()).kernel
    # every kernel that can serve it must be compiled first
    if kernel is None or world.catalog.by_id[kernel].jit:
        return ""
    dispatcher.public(**dict(zip(dispatcher.names, values)))
    return kernel


def _choice(dispatcher: Dispatcher, facts: Mapping[str, Any],
            left_out: Mapping[str, str]) -> tuple[Kernel, Step] | None:
    """Return the kernel that would serve if everything were compiled."""
    world = worlds.current()
    plan = world.plan(dispatcher.op, facts, context.current.get(), compiled=True)
    return next(((world.catalog.by_id[s.kernel], s) for s in plan.steps
                 if s.kernel not in left_out), None)


# the end of this process, and its children

def _close() -> None:
    """At exit: start nothing new, and give the current compile, which cannot stop, some time."""
    global _closing
    with _lock:
        _closing = True
        thread = _thread
    if thread is not None and thread.is_alive():
        thread.join(EXIT_SECONDS)


def _after_fork() -> None:
    """Runs in a forked child: the thread is gone, so what waits is skipped."""
    global _lock, _thread, _current
    waiting = [*(job for job in (*_critical, *_rest) if isinstance(job, _Job)),
               *([_current] if _current else [])]
    _lock, _thread, _current = locks.condition(), None, None
    _critical.clear()
    _rest.clear()
    for job in waiting:
        if not job.done:
            job.report._outcomes[job.index] = WarmupOutcome(job.call, "skipped",
                                                            why="left to the parent process")


atexit.register(_close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
