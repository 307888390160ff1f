"""Compiling a kernel for a kind of call: at once for a warm-up, or in the background while another kernel serves.

A call finds that a kernel would serve it, were it compiled. It is served by the next one at once, and leaves here
what it looks like: shapes, strides, dtypes, and copies of its whole numbers. A thread makes tensors like that, calls
the kernel with them on a stream of its own, and tells the world, so that the next such call chooses anew. Of several
processes one compiles; the others wait for what it leaves on disk.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ...machine import faults, loading, locks
from ...machine.memory import free_bytes
from ...machine.process_lock import lock_path, process_lock
from ...select.engine import kind_to_compile
from ...select.trial import worth_trying
from ...spec.codec import Record
from ...spec.errors import DataError
from ...spec.event import CompileQueued, CompileSkipped, WarmedUp
from ...spec.kernel import Kernel
from ...spec.launch import LaunchRefused
from ...spec.op import Op
from ...spec.plan import INTERPOLATED, LESS_WORK, MEASURED, POLICY, SHIPPED, Plan, Step
from ...spec.sealed import PRIVATE_FOLDER, check_folder, trusted_folder
from ...world import config, events, health
from ...world import snapshot as worlds
from ...world.catalog import Catalog
from ...world.context import Override
from ...world.incidents import change_health, compile_failed, mark_unloadable
from ...world.snapshot import World
from ..protection import wrong_result
from . import jit, sizes
from .sizes import Caller

PATIENCE = 900.0                               # seconds to wait for another process that compiles the same
LAST_WORDS = 10.0                              # seconds that a compile under way gets when the process ends
FORK_PATIENCE = 30.0
MOST_WAITING = 64                              # kernels in the queue; more are skipped, with an event
MOST_FORMS = 16                                # of one kernel and kind of call that are compiled unasked
MOST_KNOWN = 4096
MOST_COPIED = 1 << 26                          # bytes of whole numbers that a call may leave here
OF_FREE_MEMORY = 0.1                           # what the made-up inputs of one compile may take
CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


class Binds(Caller, Protocol):
    """A dispatcher, as far as it matters here."""

    def binding(self, kernel: Kernel, step: Step, facts: Mapping[str, Any], fixed: Mapping[str, Any]) -> Any: ...


def share_caches() -> None:
    """Compiled code outlives the process, in our cache folder unless the user says where."""
    torchs_own = os.path.join(tempfile.gettempdir(), "torchinductor_")     # which torch sets itself, where nobody did
    for variable, name in CACHES.items():
        if (os.environ.get(variable) or torchs_own).startswith(torchs_own):
            os.environ[variable] = str(_own_cache(name))


def _own_cache(name: str) -> Path:
    """A folder whose files Triton or Inductor may run: they seal nothing, so it must never have been open to others.

    One that was is left alone, and this process compiles for itself, into a folder that goes when it ends.
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
        own = tempfile.mkdtemp(prefix=f"layerzero-{name}-")
        atexit.register(shutil.rmtree, own, ignore_errors=True)
        events.log.warning("%s; %s compiles into a folder of this process instead", e, name)
        return Path(own)


# one kernel, now

_compiling = threading.RLock()                 # held while something is compiled: a fork waits for it


def compile_now(found: Binds, kernel: Kernel, step: Step, facts: Mapping[str, Any], values: tuple[Any, ...],
                new: frozenset[Any] | None = None) -> str | None:
    """Load and call the kernel for this kind of call; None, or why it stays out. `new`: what is ready afterwards."""
    kind, grad = kind_to_compile(found.op, facts), facts["grad"]
    new = jit.entries(kernel, facts, values) if new is None else new
    if new <= worlds.current().warmed:
        return None
    began = time.perf_counter()
    try:
        with locks.DeferEvents(), process_lock(_lock_name(kernel, kind), PATIENCE, closing), _compiling:
            if closing():
                return "the process ends"
            run = found.binding(kernel, step, facts, {}).run
            _run(found, run, values, grad)
            for other in sizes.at_the_ends(found, facts, values, kind):
                _run(found, run, other, grad)
                new |= jit.entries(kernel, facts, other)
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
    events.emit(WarmedUp(found.op.name, kernel.id, time.perf_counter() - began))
    worlds.publish(lambda w: w.replace({found.op.name}, warmed=w.warmed | new) if kernel.id in w.catalog.by_id else w,
                   f"warmed:{kernel.id}")
    return None


def _lock_name(kernel: Kernel, kind: str) -> str:
    return f"{kernel.id} {kind} {torch.__version__}"


def was_compiled(kernel: Kernel, facts: Mapping[str, Any]) -> bool:
    """Has a process of this machine compiled the kernel for such calls, and are there caches that may hold it?"""
    if not lock_path(_lock_name(kernel, kind_to_compile(kernel.op, facts))).exists():
        return False
    ours = config.cache_dir()
    folders = [ours / "cuda", *(os.environ.get(variable) or ours / name for variable, name in CACHES.items())]
    return any(os.path.isdir(folder) and os.listdir(folder) for folder in folders)


def _run(found: Binds, run: Callable[..., Any], values: tuple[Any, ...], grad: bool) -> None:
    out = jit.call(run, values, grad)
    wrong = wrong_result(found.op, dict(zip(found.names, values)), out)
    if wrong is not None:
        raise wrong
    tensors = [t for t in (out if isinstance(out, (tuple, list)) else (out,)) if isinstance(t, Tensor)]
    leaves = [v for v in values if isinstance(v, Tensor) and v.requires_grad] if grad else []
    outs = [t for t in tensors if t.requires_grad]
    if leaves and outs:
        torch.autograd.grad(outs, leaves, [torch.ones_like(t) for t in outs], allow_unused=True)
    for kind in {t.device.type for t in tensors} - {"cpu", "meta"}:
        module = getattr(torch, kind)          # a fault of the device must show here; others' streams are left alone
        (module.current_stream() if hasattr(module, "current_stream") else module).synchronize()


# inputs like those of a call

class _Like(NamedTuple):
    """What to make a tensor from. `numbers`: the whole numbers of the call's own, which cannot be made up."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int                                # elements: a pointer's remainder by 16 bytes is compiled in
    grad: bool
    numbers: Tensor | None

    def made(self) -> Tensor:
        extent = _extent(self.shape, self.stride)
        flat = torch.empty(self.offset + extent, dtype=self.dtype, device=self.device)
        if self.numbers is not None:
            flat[self.offset:].copy_(self.numbers)
        elif self.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            # Nobody's random numbers but our own: the caller's next ones stay what they would have been.
            flat.normal_(generator=torch.Generator(self.device).manual_seed(0))
        else:
            flat.zero_()
        return flat.as_strided(self.shape, self.stride, self.offset).requires_grad_(self.grad)


def _extent(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    return 1 + sum((n - 1) * s for n, s in zip(shape, stride)) if all(shape) else 0


def _like(t: Tensor, grad: bool) -> _Like:
    shape, stride, numbers = tuple(t.shape), t.stride(), None
    if not t.is_floating_point():
        numbers = t.detach().as_strided((_extent(shape, stride),), (1,)).clone()
    offset = 0 if t.is_cpu else t.data_ptr() % 16 // t.element_size()
    return _Like(shape, stride, t.dtype, t.device, offset, grad and t.requires_grad, numbers)


def _unfit(kernel: Kernel, facts: Mapping[str, Any], values: tuple[Any, ...]) -> str:
    """Why inputs like these are not to be made; "" if they may be."""
    tensors = [v for v in values if isinstance(v, Tensor)]
    if facts.get("dropout_p"):
        return "it draws random numbers, which are the caller's"
    if any(p.kind == "generator" for p in kernel.op.params) and not kernel.package:
        return "torch compiles random numbers in"
    if any(p.kind == "object" for p in kernel.op.params):
        return "it takes objects, of which there is no other"
    room = sum(_extent(tuple(t.shape), t.stride()) * t.element_size() for t in tensors)
    if 3 * room > (limit := OF_FREE_MEMORY * free_bytes(facts["device"])):     # itself, and the ends of its bucket
        return f"inputs like its own take {room >> 20} MiB, and {int(limit) >> 20} MiB may be taken; use lz.warmup"
    if sum(t.nbytes for t in tensors if not t.is_floating_point()) > MOST_COPIED:
        return f"more than {MOST_COPIED >> 20} MiB of whole numbers would have to be copied; use lz.warmup"
    return ""


# the queue

@dataclass(eq=False)
class _Job:
    found: Binds
    kernel: Kernel
    step: Step
    facts: Mapping[str, Any]
    values: tuple[Any, ...]                    # tensors as _Like
    new: frozenset[Any]
    waits_for: Any = None                      # a CUDA event: the copies of whole numbers are under way until then
    began: float = 0.0

    @property
    def label(self) -> str:
        return f"{self.kernel.id} for {kind_to_compile(self.found.op, self.facts)}"


_turn = locks.Lock()                           # guards what follows
_queue: deque[_Job] = deque()
_known: dict[frozenset[Any], object] = {}      # what was asked for, and by which request
_forms: dict[tuple[str, str], int] = {}        # (kernel, kind) -> how many forms of it were asked for
_current: _Job | None = None
_thread: threading.Thread | None = None
_closing = False


def request_better(found: Binds, world: World, plan: Plan, override: Override | None, values: tuple[Any, ...]) -> None:
    """Have the kernels compiled that would serve this call, were they compiled already: as it is, and as it will be
    while a CUDA graph is captured, since nothing is compiled then."""
    facts = plan.facts
    if plan.locked or facts["graph"] or facts["tensor_kind"] != "plain" or not _may(found.op, world, facts, override):
        return
    for graph in (False, True) if facts["device"] == "cuda" else (False,):
        steps = world.plan(found.op, {**facts, "graph": graph}, override, compiled=True).steps
        kernel = world.catalog.by_id[steps[0].kernel] if steps else None
        if kernel is not None and kernel.jit and kernel.id != plan.kernel and is_worth_it(kernel, steps[0]):
            request(found, kernel, steps[0], facts, values)
        if not graph and world.policy.setting("learn"):        # what is not compiled cannot be tried
            for step in steps:
                kernel = world.catalog.by_id[step.kernel]
                if kernel.jit and kernel.replayable and worth_trying(step.score.total_us, steps[0].score.total_us):
                    request(found, kernel, step, facts, values)


def _may(op: Op, world: World, facts: Mapping[str, Any], override: Override | None) -> bool:
    """Is there a kernel that compiles, and may it do so in the background?"""
    around = world.surroundings(facts["device"], override)
    return around.policy.setting("jit") == "background" and any(
        k.jit for k in world.roster(op, facts["device"], around).viable)


def is_worth_it(kernel: Kernel, step: Step) -> bool:
    """A guess is not worth seconds of CPU; nor is less work by construction where Inductor compiles it."""
    return step.score.source in (MEASURED, INTERPOLATED, SHIPPED, POLICY) or (
        step.score.source == LESS_WORK and bool(kernel.package))


def request(found: Binds, kernel: Kernel, step: Step, facts: Mapping[str, Any], values: tuple[Any, ...]) -> None:
    """Have the kernel compiled for calls like this one. Returns at once; at most once for each kind and form."""
    new, asked = jit.entries(kernel, facts, values), object()
    kind = kernel.id, kind_to_compile(kernel.op, facts)
    waiting = 0
    try:
        with _turn:
            if new in _known or _closing or _forms.get(kind, 0) >= MOST_FORMS:
                return
            for known in (_known, _forms):     # kernels and sizes without end: begin anew
                if len(known) >= MOST_KNOWN:
                    known.clear()  # type: ignore[attr-defined]
            _known[new] = asked
            _forms[kind] = _forms.get(kind, 0) + 1
            full = len(_queue) >= MOST_WAITING
            if full:
                del _known[new]                # it may be asked for again
        problem = f"{MOST_WAITING} wait already" if full else _unfit(kernel, facts, values)
        try:
            kept = () if problem else tuple(_kept(v, facts["grad"]) for v in values)
        except faults.FAULTS as e:             # no room for the copies: that is not the caller's trouble
            problem = f"its whole numbers could not be copied: {e}"
        if not problem:
            job = _Job(found, kernel, step, facts, kept, new, _copied(values))
            with _turn:
                _queue.append(job)
                waiting = len(_queue)
                _start()
    except BaseException:                      # an interrupt, passed on: it may be asked for again
        if _known.get(new) is asked:
            del _known[new]
        raise
    events.emit(CompileSkipped(kernel.op.name, kernel.id, problem) if problem else
                CompileQueued(kernel.op.name, kernel.id, waiting))


def _kept(value: Any, grad: bool) -> Any:
    return _like(value, grad) if isinstance(value, Tensor) else value


def _copied(values: tuple[Any, ...]) -> Any:
    """An event after the copies, where they are made on a GPU."""
    cuda = next((v for v in values if isinstance(v, Tensor) and v.is_cuda), None)
    return torch.cuda.current_stream(cuda.device).record_event() if cuda is not None else None


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
        with _turn:
            if _thread is not me:              # an interrupt came while it was started, and there is another
                return
            if _closing or not _queue:
                _thread = _current = None
                return
            job = _current = _queue.popleft()
            job.began = time.monotonic()
        try:
            problem = _compile(job)
        except events.ANY_ERROR as e:          # also what a kernel should not raise: this thread goes on
            problem = f"{type(e).__name__}: {e}"
        if problem is not None:
            events.emit(CompileSkipped(job.kernel.op.name, job.kernel.id, problem))


def _compile(job: _Job) -> str | None:
    if worlds.current().catalog.by_id.get(job.kernel.id) is not job.kernel:
        return "it was unregistered"
    grad = job.facts["grad"]
    with _aside(job), torch.inference_mode(False), torch.set_grad_enabled(grad):
        try:
            values = tuple(v.made() if isinstance(v, _Like) else v for v in job.values)
            values = _with_own_generator(job.kernel, values)
        except faults.FAULTS as e:             # no memory for them
            return f"inputs like those of the call could not be made: {e}"
        return compile_now(job.found, job.kernel, job.step, job.facts, values, job.new)


def _with_own_generator(kernel: Kernel, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The caller's next random numbers stay what they would have been. What a library compiles reads none."""
    device = next((v.device for v in values if isinstance(v, Tensor)), torch.device("cpu"))
    return tuple(torch.Generator(device).manual_seed(0) if p.kind == "generator" else v
                 for p, v in zip(kernel.op.params, values))


@contextmanager
def _aside(job: _Job) -> Iterator[None]:
    """On a stream of its own, and so that a graph which another thread captures meanwhile is not spoilt."""
    with ExitStack() as stack:
        device = next((v.device for v in job.values if isinstance(v, _Like) and v.device.type == "cuda"), None)
        if device is not None:
            stack.enter_context(torch.cuda.device(device))
            if torch.version.hip is None:
                from ...backends.cuda.compiler import outside_captures  # `import layerzero` reads no backend

                stack.enter_context(outside_captures())
            stream = torch.cuda.Stream(device)
            if job.waits_for is not None:
                stream.wait_event(job.waits_for)
            stack.enter_context(torch.cuda.stream(stream))
        yield


@dataclass(frozen=True)
class Status(Record):
    """What is compiled in the background, and what waits for it."""

    compiling: str = ""                        # kernel and kind of call
    seconds: float = 0.0                       # so far
    waiting: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.compiling:
            return "nothing"
        return f"{self.compiling}, {self.seconds:.1f} s so far; {len(self.waiting)} wait"


def status() -> Status:
    with _turn:
        job, waiting = _current, tuple(j.label for j in _queue)
    return Status("" if job is None else job.label, 0.0 if job is None else time.monotonic() - job.began, waiting)


def wait(timeout: float | None = None) -> bool:
    """Until nothing is compiled in the background any more; is that so?"""
    end = None if timeout is None else time.monotonic() + timeout
    while (thread := _thread) is not None and thread.is_alive():
        thread.join(None if end is None else max(end - time.monotonic(), 0))
        if thread.is_alive():
            return False
    return True


# the end of this process, and its children

def _close() -> None:
    """The process ends: nothing new is begun, and a compile under way gets some time, since it cannot be stopped."""
    global _closing
    with _turn:
        _closing = True
        _queue.clear()
        thread = _thread
    if thread is not None:
        thread.join(LAST_WORDS)


def closing() -> bool:
    return _closing


def _before_fork() -> None:
    _compiling.acquire(timeout=FORK_PATIENCE)  # a child must not inherit a compiler's lock that nobody gives back


def _after_fork_in_parent() -> None:
    with suppress(RuntimeError):               # the wait was too long and the fork went on
        _compiling.release()


def _after_fork() -> None:
    """In the child: the thread is gone. What it was asked for is forgotten, so that it may be asked for again."""
    global _thread, _current, _compiling
    _thread, _current, _compiling = None, None, threading.RLock()
    _queue.clear()
    _known.clear()
    _forms.clear()


def _look(world: World) -> None:
    """What was unregistered is not compiled any more."""
    global _catalog
    if world.catalog is _catalog:
        return
    known = world.catalog.by_id
    with _turn:
        gone = [job for job in _queue if known.get(job.kernel.id) is not job.kernel]
        for job in gone:
            _queue.remove(job)
        for new in [n for n in _known if any((w if isinstance(w, str) else w[0]) not in known for w in n)]:
            del _known[new]
        for kind in [k for k in _forms if k[0] not in known]:
            del _forms[kind]
    _catalog = world.catalog
    for job in gone:
        events.emit(CompileSkipped(job.kernel.op.name, job.kernel.id, "it was unregistered"))


_catalog: Catalog | None = None                # that of the last world that was looked at
worlds.add_listener(_look)
atexit.register(_close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork)
