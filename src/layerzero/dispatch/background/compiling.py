"""Compiling a kernel for a kind of call: at once for a warm-up, or in the background while another
kernel serves.

A call whose best kernel is not compiled yet is served by the next one, and requests the compile
with a description of its inputs: shapes, strides, dtypes, and copies of its integers. A thread
makes tensors like these, calls the kernel with them on a stream of its own, and publishes a world
in which the kernel is warm, so that the next such call selects it. Of several processes one
compiles; the others wait for what it leaves in the caches on disk.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ...files.sealed import PRIVATE_FOLDER, check_folder, trusted_folder
from ...machine import faults, loading, locks
from ...machine.process_lock import lock_path, process_lock
from ...selection.engine import kind_to_compile
from ...selection.trial import worth_trying
from ...spec.codec import Record
from ...spec.errors import DataError
from ...spec.event import CompileQueued, CompileSkipped, WarmedUp
from ...spec.kernel import Kernel
from ...spec.op import Op
from ...spec.plan import INTERPOLATED, LESS_WORK, MEASURED, POLICY, SHIPPED, Plan, Step
from ...spec.rules.launch import LaunchRefused
from ...world import config, events, health
from ...world import snapshot as worlds
from ...world.context import Override
from ...world.incidents import change_health, compile_failed, mark_unloadable
from ...world.registry.catalog import Catalog
from ...world.snapshot import World
from ..protection import wrong_result
from . import jit, sizes
from .inputs import Inputs, describe, why_no_inputs
from .sizes import Caller

# seconds to wait for another process that compiles the same
LOCK_SECONDS = 900.0
# seconds that a compile under way gets when the process ends
EXIT_SECONDS = 10.0
FORK_SECONDS = 30.0
# kernels in the queue; more are skipped, with an event
MAX_QUEUED = 64
# of one kernel and kind of call that are compiled in the background
MAX_FORMS = 16
MAX_REQUESTS = 4096
CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


class DispatcherLike(Caller, Protocol):
    """The interface of a dispatcher that is used here."""

    def bind(self, kernel: Kernel, step: Step, facts: Mapping[str, Any],
             fixed: Mapping[str, Any]) -> Any: ...


def share_caches() -> None:
    """Keep compiled code in our cache folder, unless the user says where."""
    # torch sets this one itself where nobody did
    torchs_own = os.path.join(tempfile.gettempdir(), "torchinductor_")
    for variable, name in CACHES.items():
        if (os.environ.get(variable) or torchs_own).startswith(torchs_own):
            os.environ[variable] = str(_own_cache(name))


def _own_cache(name: str) -> Path:
    """Return a folder whose files Triton or Inductor may run: they seal nothing, so nobody else may
    write to it.

    If others could, the folder is left alone and this process compiles into one that is removed
    when it ends.
    """
    root = config.cache_dir()
    try:
        if os.path.lexists(root / name):
            check_folder(root, name)
            with suppress(PermissionError):    # root's, which nobody else can write
                os.chmod(root / name, PRIVATE_FOLDER)
            return root / name
        return trusted_folder(root, name)
    except (OSError, DataError) as e:
        folder = tempfile.mkdtemp(prefix=f"layerzero-{name}-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        events.log.warning("%s; %s compiles into a folder of this process instead", e, name)
        return Path(folder)


# compiling one kernel now

# held while something is compiled: a fork waits for it
_compile_lock = threading.RLock()


def compile_now(
    dispatcher: DispatcherLike,
    kernel: Kernel,
    step: Step,
    facts: Mapping[str, Any],
    values: tuple[Any, ...],
    warmed: frozenset[Any] | None = None,
) -> str | None:
    """Load and call the kernel for this kind of call; return None, or why it failed. `warmed` is
    what the world adds to its own `warmed` afterwards."""
    kind, grad = kind_to_compile(dispatcher.op, facts), facts["grad"]
    warmed = jit.warmed_keys(kernel, facts, values) if warmed is None else warmed
    if warmed <= worlds.current().warmed:
        return None
    start = time.perf_counter()
    try:
        with locks.DeferEvents(), process_lock(_lock_name(kernel, kind), LOCK_SECONDS,
                                               closing), _compile_lock:
            if closing():
                return "the process ends"
            run = dispatcher.bind(kernel, step, facts, {}).run
            _run(dispatcher, run, values, grad)
            for resized in sizes.at_bucket_ends(dispatcher, facts, values, kind):
                _run(dispatcher, run, resized, grad)
                warmed |= jit.warmed_keys(kernel, facts, resized)
    except loading.LoadFailed as e:
        mark_unloadable(kernel, e.reason)
        return e.reason.message
    except faults.FAULTS as e:
        fault = faults.classify(e)
        reason = faults.reason_of(e, fault)
        if fault == "kernel" or isinstance(e, LaunchRefused):
            reason = compile_failed(kernel, e, facts)
        elif fault == "sticky":
            change_health(kernel.health, lambda old: health.disabled(reason))
        return reason.message
    events.emit(WarmedUp(dispatcher.op.name, kernel.id, time.perf_counter() - start))
    op = dispatcher.op.name
    worlds.publish(lambda w: w.replace({op}, warmed=w.warmed | warmed)
                   if kernel.id in w.catalog.by_id else w,
                   f"warmed:{kernel.id}")
    return None


def _lock_name(kernel: Kernel, kind: str) -> str:
    return f"{kernel.id} {kind} {torch.__version__}"


def was_compiled(kernel: Kernel, facts: Mapping[str, Any]) -> bool:
    """Was the kernel compiled here for such calls, and are there caches that may hold it?"""
    if not lock_path(_lock_name(kernel, kind_to_compile(kernel.op, facts))).exists():
        return False
    cache_folder = config.cache_dir()
    folders = [cache_folder / "cuda", *(os.environ.get(variable) or cache_folder / name
                                        for variable, name in CACHES.items())]
    return any(os.path.isdir(folder) and os.listdir(folder) for folder in folders)


def _run(dispatcher: DispatcherLike, run: Callable[..., Any], values: tuple[Any, ...],
         grad: bool) -> None:
    out = jit.call(run, values, grad)
    wrong = wrong_result(dispatcher.op, dict(zip(dispatcher.names, values)), out)
    if wrong is not None:
        raise wrong
    tensors = [t for t in (out if isinstance(out, (tuple, list)) else (out,))
               if isinstance(t, Tensor)]
    leaves = [v for v in values if isinstance(v, Tensor) and v.requires_grad] if grad else []
    outs = [t for t in tensors if t.requires_grad]
    if leaves and outs:
        torch.autograd.grad(outs, leaves, [torch.ones_like(t) for t in outs], allow_unused=True)
    for kind in {t.device.type for t in tensors} - {"cpu", "meta"}:
        # a fault of the device must show now; other streams are left alone
        module = getattr(torch, kind)
        (module.current_stream() if hasattr(module, "current_stream") else module).synchronize()


# the queue

@dataclass(eq=False)
class _Job:
    dispatcher: DispatcherLike
    kernel: Kernel
    step: Step
    facts: Mapping[str, Any]
    inputs: Inputs
    warmed: frozenset[Any]
    started_at: float = 0.0

    @property
    def label(self) -> str:
        return f"{self.kernel.id} for {kind_to_compile(self.dispatcher.op, self.facts)}"


_queue_lock = locks.Lock()                     # guards all below
_queue: deque[_Job] = deque()
_requested: dict[frozenset[Any], object] = {}  # what is or was compiled, and the request
# (kernel, kind) -> how many of its forms were requested
_forms: dict[tuple[str, str], int] = {}
_current: _Job | None = None
_thread: threading.Thread | None = None
_closing = False


def request_better(dispatcher: DispatcherLike, world: World, plan: Plan, override: Override | None,
                   values: tuple[Any, ...]) -> None:
    """Request the kernels that would serve this call if they were compiled already. Also those that
    would serve it while a CUDA graph is captured: nothing can be compiled then."""
    facts = plan.facts
    if plan.locked or facts["graph"] or facts["tensor_kind"] != "plain":
        return
    if not _may_compile(dispatcher.op, world, facts, override):
        return
    for graph in (False, True) if facts["device"] == "cuda" else (False,):
        steps = world.plan(dispatcher.op, {**facts, "graph": graph}, override, compiled=True).steps
        kernel = world.catalog.by_id[steps[0].kernel] if steps else None
        if (kernel is not None and kernel.jit and kernel.id != plan.kernel
            and is_worth_it(kernel, steps[0])):
            request(dispatcher, kernel, steps[0], facts, values)
        # only compiled kernels can be explored
        if not graph and world.policy.setting("learn"):
            for step in steps:
                kernel = world.catalog.by_id[step.kernel]
                if (kernel.jit and kernel.replayable
                    and worth_trying(step.score.total_us, steps[0].score.total_us)):
                    request(dispatcher, kernel, step, facts, values)


def _may_compile(op: Op, world: World, facts: Mapping[str, Any], override: Override | None) -> bool:
    """Does an op have kernels that compile, and may they compile in the background?"""
    context = world.selection_context(facts["device"], override)
    return context.policy.setting("jit") == "background" and any(
        k.jit for k in world.roster(op, facts["device"], context).viable)


def is_worth_it(kernel: Kernel, step: Step) -> bool:
    """Is the evidence worth seconds of CPU? A guess is not, nor less work through Inductor."""
    return step.score.source in (MEASURED, INTERPOLATED, SHIPPED, POLICY) or (
        step.score.source == LESS_WORK and bool(kernel.package))


def request(
    dispatcher: DispatcherLike, kernel: Kernel, step: Step, facts: Mapping[str, Any],
    values: tuple[Any, ...]
) -> None:
    """Queue a compile for calls like this one, once for each kind and form; returns at once."""
    warmed, token = jit.warmed_keys(kernel, facts, values), object()
    kind = kernel.id, kind_to_compile(kernel.op, facts)
    waiting = 0
    try:
        with _queue_lock:
            if warmed in _requested or _closing or _forms.get(kind, 0) >= MAX_FORMS:
                return
            for table in (_requested, _forms):     # ever new kernels and sizes: start over
                if len(table) >= MAX_REQUESTS:
                    table.clear()  # type: ignore[attr-defined]
            _requested[warmed] = token
            _forms[kind] = _forms.get(kind, 0) + 1
            full = len(_queue) >= MAX_QUEUED
            if full:
                del _requested[warmed]         # it may be requested again
        problem = f"{MAX_QUEUED} wait already" if full else why_no_inputs(kernel, facts, values)
        try:
            inputs = None if problem else describe(values, facts["grad"])
        # no memory for the copies: the caller must not see that
        except faults.FAULTS as e:
            problem = f"its whole numbers could not be copied: {e}"
        if inputs is not None:
            job = _Job(dispatcher, kernel, step, facts, inputs, warmed)
            with _queue_lock:
                _queue.append(job)
                waiting = len(_queue)
                _start()
    except BaseException:                      # an interrupt: it may be requested again
        if _requested.get(warmed) is token:
            del _requested[warmed]
        raise
    events.emit(CompileSkipped(kernel.op.name, kernel.id, problem) if problem else
                CompileQueued(kernel.op.name, kernel.id, waiting))


def _start() -> None:
    global _thread
    if _thread is None or not _thread.is_alive():
        _thread = threading.Thread(target=_work, name="layerzero-compile", daemon=True)
        _thread.start()


def _work() -> None:
    global _thread, _current
    events.mark_background_thread()
    me = threading.current_thread()
    share_caches()
    while True:
        with _queue_lock:
            # an interrupt came while it was started, and another was started
            if _thread is not me:
                return
            if _closing or not _queue:
                _thread = _current = None
                return
            job = _current = _queue.popleft()
            job.started_at = time.monotonic()
        try:
            problem = _compile(job)
        except events.ANY_ERROR as e:          # whatever a kernel raises, this thread goes on
            problem = f"{type(e).__name__}: {e}"
        if problem is not None:
            events.emit(CompileSkipped(job.kernel.op.name, job.kernel.id, problem))


def _compile(job: _Job) -> str | None:
    if worlds.current().catalog.by_id.get(job.kernel.id) is not job.kernel:
        return "it was unregistered"
    grad = job.facts["grad"]
    with job.inputs.own_stream(), torch.inference_mode(False), torch.set_grad_enabled(grad):
        try:
            values = job.inputs.make(job.kernel.op)
        except faults.FAULTS as e:             # no memory for them
            return f"inputs like those of the call could not be made: {e}"
        return compile_now(job.dispatcher, job.kernel, job.step, job.facts, values, job.warmed)


@dataclass(frozen=True)
class CompileStatus(Record):
    """The state of compiling in the background, and how many calls wait for it."""

    compiling: str = ""                        # kernel and kind of call
    seconds: float = 0.0                       # so far
    waiting: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.compiling:
            return "nothing"
        return f"{self.compiling}, {self.seconds:.1f} s so far; {len(self.waiting)} wait"


def status() -> CompileStatus:
    with _queue_lock:
        job, waiting = _current, tuple(j.label for j in _queue)
    return CompileStatus(
        "" if job is None else job.label, 0.0 if job is None else time.monotonic() - job.started_at,
        waiting
    )


def wait(timeout: float | None = None) -> bool:
    """Wait until nothing compiles in the background; return False if `timeout` came first."""
    end = None if timeout is None else time.monotonic() + timeout
    while (thread := _thread) is not None and thread.is_alive():
        thread.join(None if end is None else max(end - time.monotonic(), 0))
        if thread.is_alive():
            return False
    return True


# the end of this process, and its children

def _close() -> None:
    """At exit: start nothing new, and give the current compile, which cannot stop, some time."""
    global _closing
    with _queue_lock:
        _closing = True
        _queue.clear()
        thread = _thread
    if thread is not None:
        thread.join(EXIT_SECONDS)


def closing() -> bool:
    return _closing


def _before_fork() -> None:
    # a child must not inherit a compiler's lock that nobody releases
    _compile_lock.acquire(timeout=FORK_SECONDS)


def _after_fork_in_parent() -> None:
    with suppress(RuntimeError):               # the lock was not acquired in time
        _compile_lock.release()


def _after_fork() -> None:
    """Runs in a forked child: the thread is gone. Forget the requests; they may come again."""
    global _thread, _current, _compile_lock
    _thread, _current, _compile_lock = None, None, threading.RLock()
    _queue.clear()
    _requested.clear()
    _forms.clear()


def _forget_unregistered(world: World) -> None:
    """Drop the requests for kernels that were unregistered."""
    global _catalog
    if world.catalog is _catalog:
        return
    kernels = world.catalog.by_id
    with _queue_lock:
        gone = [job for job in list(_queue) if kernels.get(job.kernel.id) is not job.kernel]
        for job in gone:
            with suppress(ValueError):         # a finalizer emptied it
                _queue.remove(job)
        for warmed in [n for n in list(_requested)
                       if any((w if isinstance(w, str) else w[0]) not in kernels for w in n)]:
            _requested.pop(warmed, None)
        for kind in [k for k in list(_forms) if k[0] not in kernels]:
            _forms.pop(kind, None)
    _catalog = world.catalog
    for job in gone:
        events.emit(CompileSkipped(job.kernel.op.name, job.kernel.id, "it was unregistered"))


_catalog: Catalog | None = None                # the last one seen by _forget_unregistered
worlds.add_listener(_forget_unregistered)
atexit.register(_close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent,
                        after_in_child=_after_fork)
