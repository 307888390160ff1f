"""CUDA graphs: how a capture is prepared and made, what it took, and what has become of the kernels it holds.

A graph keeps what was chosen when it was captured: no later change of policy, measurements or health reaches into it.
`graph` remembers the choices for as long as the graph lives, and an event says when one of its kernels has been taken
out of service since. `attempt` makes a trial capture and says what came in its way;
verify/kernel/capture.py judges by it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

from ..dispatch.dispatcher import dispatchers
from ..machine import faults
from ..spec.errors import ConfigError, DeviceLost
from ..spec.event import HealthChanged
from ..spec.kernel import Kernel
from ..spec.reason import Code, Reason
from ..world import context, events, incidents
from ..world import snapshot as worlds
from ..world.snapshot import World

OURS = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[1]}{os.sep}", contextlib.__file__, "<")
WARM_UPS = 3                                   # calls before a capture: libraries settle their plans within these
Calls = Mapping[str, Mapping[str, int]]        # op -> kernel -> how often


@dataclass(frozen=True)
class GraphKernelDisabled(HealthChanged):
    """A kernel that a live CUDA graph was captured with has been taken out of service; the graph still runs it."""

    name: ClassVar[str] = "graph_kernel_disabled"
    graph: str = ""


def absence() -> str:
    """Why nothing can be captured here; nothing if it can."""
    if torch.cuda.is_available():
        return ""
    return f"there is no CUDA device here (torch {torch.__version__} sees none), so no CUDA graph can be captured"


# What was chosen, held for the life of the graph.

@dataclass(eq=False)
class HeldGraph:
    """What the captured calls chose. Lives as long as the graph it was captured into."""

    label: str
    calls: Calls = field(default_factory=dict)
    disabled: dict[str, Reason] = field(default_factory=dict)      # its kernels that were taken out of service since
    _kernels: tuple[Kernel, ...] = ()
    _loaded: tuple[Any, ...] = ()              # what they run stays in memory, whatever is unregistered

    @property
    def kernels(self) -> tuple[str, ...]:
        return tuple(k.id for k in self._kernels)

    def look(self, world: World) -> None:
        for kernel in self._kernels:
            reason = _out_of_service(world, kernel)
            if reason is not None and kernel.id not in self.disabled:
                self.disabled[kernel.id] = reason
                events.emit(GraphKernelDisabled(kernel.op.name, kernel.id, "disabled", reason, self.label))


_held: weakref.WeakSet[HeldGraph] = weakref.WeakSet()
_watching = threading.Lock()
_watched = False


def _watch(held: HeldGraph) -> None:
    global _watched
    with _watching:
        _held.add(held)
        if not _watched:
            worlds.add_listener(_look)
            _watched = True


def _look(world: World) -> None:
    for held in list(_held):
        held.look(world)


def _out_of_service(world: World, kernel: Kernel) -> Reason | None:
    if world.catalog.by_id.get(kernel.id) is not kernel:
        return Reason(Code.BACKEND_DISABLED, None, "it was unregistered or replaced")
    groups = (world.health.get(kernel.health), world.health.get(kernel.id))
    blocked = next((r for h in groups if h is not None and (r := h.blocks) is not None), None)
    return blocked or world.unloadable.get(kernel.id)


@contextmanager
def graph(cuda_graph: Any, **options: Any) -> Iterator[HeldGraph]:
    """Capture into `cuda_graph` as `with torch.cuda.graph(...)` does, and hold what the calls choose.

    Takes the options of torch.cuda.graph (pool, stream, capture_error_mode). Warm up first:
    `lz.graphs.warmup_capture(fn)`.
    """
    if absent := absence():
        raise ConfigError(f"lz.graphs.graph: {absent}; run without a graph")
    held = HeldGraph(f"graph {id(cuda_graph):#x}")
    before = hits()
    with capturing(cuda_graph, **options):
        yield held
    hold(held, since(before))
    cuda_graph.layerzero = held                # the graph owns it, so that both end together


def hold(held: HeldGraph, calls: Calls) -> None:
    by_id = worlds.current().catalog.by_id
    held.calls = calls
    held._kernels = tuple(by_id[k] for kernels in calls.values() for k in kernels if k in by_id)
    held._loaded = tuple(incidents.loaded(k) for k in held._kernels)
    _watch(held)


@contextmanager
def capturing(cuda_graph: Any, **options: Any) -> Iterator[None]:
    """torch.cuda.graph, which after a failure leaves its stream, torch's generator and the allocator in the capture."""
    index = torch.cuda.current_device()
    generator = torch.cuda.default_generators[index]
    pool = options.pop("pool", None) or torch.cuda.graph_pool_handle()
    collecting = gc.isenabled()
    gc.disable()                               # an earlier graph that the collector freed now would end the capture
    try:
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(cuda_graph, pool=pool, **options):
            yield
    except BaseException:                      # passed on, an interrupt too: what the capture left is put right first
        generator.graphsafe_set_state(generator.clone_state())
        with suppress(RuntimeError, AttributeError):           # the allocator was told so already, or never asked
            torch._C._cuda_endAllocateToPool(index, pool)
        raise
    finally:
        if collecting:
            gc.enable()


def hits() -> dict[str, dict[str, int]]:
    return {name: d.hits() for name, d in list(dispatchers.items()) if d.world is not None}


def since(before: Mapping[str, Mapping[str, int]]) -> Calls:
    """The calls of each op and kernel since `before`, which hits() gave."""
    grown = {op: {k: n - before.get(op, {}).get(k, 0) for k, n in kernels.items()} for op, kernels in hits().items()}
    return {op: kept for op, kernels in grown.items() if (kept := {k: n for k, n in kernels.items() if n > 0})}


def warm_up(fn: Callable[[], Any], stream: Any = None, times: int = WARM_UPS) -> None:
    """Run `fn` as it will be captured, on a stream beside: libraries make handles and plans, kernels are compiled.

    The kernels are those that a capture will choose, which need not be those of a call outside one.
    """
    side, here = stream or torch.cuda.Stream(), torch.cuda.current_stream()
    side.wait_stream(here)
    with torch.cuda.stream(side), context.overriding({"graph_strict_mode": True}):
        for _ in range(times):
            fn()
    here.wait_stream(side)
    torch.cuda.synchronize()


def warmup_capture(fn: Callable[..., Any], *args: Any, times: int = WARM_UPS, **kwargs: Any) -> None:
    """Call this before capturing `fn(*args, **kwargs)`: it runs it a few times as it will be captured."""
    if absent := absence():
        raise ConfigError(f"lz.graphs.warmup_capture: {absent}")
    warm_up(lambda: fn(*args, **kwargs), times=times)


# A trial.

@dataclass(frozen=True)
class Problem:
    """What came in the way of a capture."""

    kind: str                                  # no cuda | sync | allocation | no kernel | fault | stale result
    text: str
    where: str = ""                            # file and line of the statement, where one can be told

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}" + (f" ({self.where})" if self.where else "")


@dataclass(frozen=True)
class Attempt:
    """A capture that was tried. `graph` can be replayed, and writes `result`, if there are no problems."""

    graph: Any = None
    result: Any = None
    calls: Calls = field(default_factory=dict)
    pool_bytes: int = 0                        # that the graph keeps for itself
    device_bytes: int = 0                      # that are gone from the device; the executable graph counts too
    problems: tuple[Problem, ...] = ()
    begun: bool = True                         # False: it failed already before the capture


def attempt(fn: Callable[[], Any], stream: Any = None, warm_ups: int = WARM_UPS, **options: Any) -> Attempt:
    """Warm up and capture `fn`. What it does wrong is told, not raised; a device that is lost raises DeviceLost."""
    side = stream or torch.cuda.Stream()
    try:
        warm_up(fn, side, warm_ups)
    except faults.FAULTS as e:
        return Attempt(problems=(problem_of(first_cause(e), "before the capture: "),), begun=False)
    cuda_graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    gc.collect()
    torch.cuda.empty_cache()
    with torch.cuda.stream(side):              # torch keeps two numbers of its generator there, outside of any pool;
        beside = torch.empty(1, device="cuda")  # what lies beside them keeps their segment from being given back
    free, reserved, segments = _memory()
    before = hits()
    try:
        with capturing(cuda_graph, pool=pool, stream=side, **options):
            result = fn()
    except faults.FAULTS as e:
        calls, first = since(before), first_cause(e)
        problems = [problem_of(first)]
        if problems[0].kind == "sync":         # the first one spoilt the capture; there may be more
            problems += [Problem("sync", "waits for the device", where) for where in synchronizations(fn)
                         if where not in problems[0].where]
        return Attempt(calls=calls, problems=tuple(problems))
    torch.cuda.synchronize()
    free_after, reserved_after, after = _memory()
    del beside
    known = any("segment_pool_id" in s for s in after.values())        # whose a segment is, torch tells since 2.3
    ours = [s for s in after.values() if tuple(s.get("segment_pool_id", ())) == tuple(pool)]
    outside = [s for address, s in after.items()
               if address not in segments and tuple(s.get("segment_pool_id", pool)) != tuple(pool)]
    kept = sum(s["total_size"] for s in ours) if known else reserved_after - reserved
    elsewhere = sum(s["total_size"] for s in outside)
    problems = [Problem("allocation", f"{elsewhere} bytes were allocated outside the graph's own pool, so on a stream "
                        "that is not captured")] if outside else []
    return Attempt(cuda_graph, result, since(before), kept, free - free_after, tuple(problems))


def _memory() -> tuple[int, int, dict[int, Any]]:
    free, _ = torch.cuda.mem_get_info()
    return free, torch.cuda.memory_reserved(), {s["address"]: s for s in torch.cuda.memory_snapshot()}


def first_cause(error: BaseException) -> BaseException:
    """The end of a capture that failed raises an error of its own, over the one that says why."""
    while (earlier := error.__cause__ or error.__context__) is not None:
        error = earlier
    return error


def problem_of(error: BaseException, prefix: str = "") -> Problem:
    kind = faults.classify(error)
    if kind == "sticky" or isinstance(error, DeviceLost):
        raise DeviceLost(f"{prefix}the device was lost: {error}. The device context is lost; restart the process.",
                         [faults.reason_of(error, "sticky")]) from error
    told = "sync" if kind in ("capture", "lost") else "allocation" if kind == "memory" else (
        "no kernel" if Code.CUDA_GRAPH_UNSAFE in getattr(error, "codes", ()) else "fault")
    lines = str(error).strip().splitlines()
    return Problem(told, f"{prefix}{type(error).__name__}: {lines[0] if lines else ''}"[:400], place_of(error))


def place_of(error: BaseException) -> str:
    """The innermost line outside torch and this library that was running."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(OURS)]
    return f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""


def synchronizations(fn: Callable[[], Any]) -> list[str]:
    """Where `fn` waits for the device, as torch sees it: file and line of each."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            fn()
        except faults.FAULTS:                  # what it does wrong beside is told by the capture
            pass
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    return list(dict.fromkeys(f"{w.filename}:{w.lineno}" for w in seen if "synchronizing CUDA" in str(w.message)))
