"""CUDA graphs: prepare and make a capture, try one, and keep an eye on the kernels of live graphs.

A graph keeps the kernels that were chosen when it was captured: no later change of policy,
measurements or health reaches into it. `graph` remembers the choices for as long as the graph
lives, and an event says when one of its kernels has been taken out of service since. `attempt`
makes a trial capture and returns what went wrong; verify/certification/capture.py judges by it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

from ..backends.cuda import graph_edges
from ..dispatch.dispatcher import dispatchers
from ..machine import faults, locks
from ..spec import replay
from ..spec.errors import ConfigError, DeviceLost
from ..spec.event import HealthChanged
from ..spec.kernel import Kernel
from ..spec.reason import Code, Reason
from ..world import context, events, incidents
from ..world import snapshot as worlds
from ..world.snapshot import World

LIBRARY_FILES = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[1]}{os.sep}",
                 contextlib.__file__, "<")
# calls before a capture: libraries settle their plans within these
WARM_UPS = 3
Calls = Mapping[str, Mapping[str, int]]        # op -> kernel -> how often


@dataclass(frozen=True)
class GraphKernelDisabled(HealthChanged):
    """A kernel that a live CUDA graph was captured with is out of service; the graph runs it."""

    name: ClassVar[str] = "graph_kernel_disabled"
    graph: str = ""


def why_no_capture() -> str:
    """Return why no CUDA graph can be captured on this machine; "" if one can."""
    if torch.cuda.is_available():
        return ""
    return (f"there is no CUDA device here (torch {torch.__version__} sees none), so no CUDA graph "
            "can be captured")


# Live graphs and their kernels.

@dataclass(eq=False)
class HeldGraph:
    """The kernels of a captured graph. Lives as long as the graph."""

    label: str
    calls: Calls = field(default_factory=dict)
    # its kernels that were taken out of service since
    disabled: dict[str, Reason] = field(default_factory=dict)
    _kernels: tuple[Kernel, ...] = ()
    # keeps their code in memory after they are unregistered
    _loaded: tuple[Any, ...] = ()

    @property
    def kernels(self) -> tuple[str, ...]:
        return tuple(k.id for k in self._kernels)

    def check_health(self, world: World) -> None:
        """Emit an event for each kernel that was taken out of service since."""
        for kernel in self._kernels:
            reason = _out_of_service(world, kernel)
            if reason is not None and kernel.id not in self.disabled:
                self.disabled[kernel.id] = reason
                events.emit(GraphKernelDisabled(kernel.op.name, kernel.id, "disabled", reason,
                                                self.label))


_held: weakref.WeakSet[HeldGraph] = weakref.WeakSet()
_watching = locks.Lock()
_watched = False


def _keep(held: HeldGraph) -> None:
    global _watched
    with _watching:
        _held.add(held)
        if not _watched:
            worlds.add_listener(_check_held)
            _watched = True


def _check_held(world: World) -> None:
    for held in locks.members(_held):
        held.check_health(world)


def _out_of_service(world: World, kernel: Kernel) -> Reason | None:
    if world.catalog.by_id.get(kernel.id) is not kernel:
        return Reason(Code.BACKEND_DISABLED, None, "it was unregistered or replaced")
    groups = (world.health.get(kernel.health), world.health.get(kernel.id))
    blocked = next((r for h in groups if h is not None and (r := h.blocks) is not None), None)
    return blocked or world.unloadable.get(kernel.id)


@contextmanager
def graph(cuda_graph: Any, **options: Any) -> Iterator[HeldGraph]:
    """Capture into `cuda_graph` as `with torch.cuda.graph(...)` does, and remember the kernels of
    the calls.

    Takes the options of torch.cuda.graph (pool, stream, capture_error_mode). Warm up first:
    `lz.graphs.warmup_capture(fn)`.
    """
    if problem := why_no_capture():
        raise ConfigError(f"lz.graphs.graph: {problem}; run without a graph")
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
    _keep(held)


@contextmanager
def capturing(cuda_graph: Any, **options: Any) -> Iterator[None]:
    """Capture as torch.cuda.graph, which leaves stream and allocator capturing after a fault."""
    index = torch.cuda.current_device()
    generator = torch.cuda.default_generators[index]
    pool = options.pop("pool", None) or torch.cuda.graph_pool_handle()
    collecting = gc.isenabled()
    gc.disable()                               # freeing an earlier graph would end the capture
    try:
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(cuda_graph, pool=pool,
                                                                              **options):
            yield
    except BaseException:                      # also an interrupt: clean up after the capture first
        generator.graphsafe_set_state(generator.clone_state())
        # the allocator has ended already, or never began
        with suppress(RuntimeError, AttributeError):
            torch._C._cuda_endAllocateToPool(index, pool)
        raise
    finally:
        if collecting:
            gc.enable()


def hits() -> dict[str, dict[str, int]]:
    return {name: d.hits() for name, d in dispatchers.copy().items() if d.world is not None}


def since(before: Mapping[str, Mapping[str, int]]) -> Calls:
    """Return the calls of each op and kernel since `before`, an earlier result of hits()."""
    grown = {op: {k: n - before.get(op, {}).get(k, 0) for k, n in kernels.items()}
             for op, kernels in hits().items()}
    return {op: called for op, kernels in grown.items()
            if (called := {k: n for k, n in kernels.items() if n > 0})}


def warm_up(fn: Callable[[], Any], stream: Any = None, times: int = WARM_UPS) -> None:
    """Run `fn` as it will be captured, on a side stream: libraries make handles and plans, kernels
    are compiled.

    The kernels are those that a capture will choose, which need not be those of a call outside one.
    """
    side, main = stream or torch.cuda.Stream(), torch.cuda.current_stream()
    side.wait_stream(main)
    with torch.cuda.stream(side), context.overriding({"graph_strict_mode": True}):
        for _ in range(times):
            fn()
    main.wait_stream(side)
    torch.cuda.synchronize()


def warmup_capture(fn: Callable[..., Any], *args: Any, times: int = WARM_UPS,
                   **kwargs: Any) -> None:
    """Run `fn(*args, **kwargs)` a few times as it will be captured; call this before the capture.
    """
    if problem := why_no_capture():
        raise ConfigError(f"lz.graphs.warmup_capture: {problem}")
    warm_up(lambda: fn(*args, **kwargs), times=times)


# A trial capture.

@dataclass(frozen=True)
class Problem:
    """A problem of a capture."""

    # no cuda | sync | allocation | no kernel | fault | stale result
    kind: str
    text: str
    where: str = ""                            # file and line of the statement, if known

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}" + (f" ({self.where})" if self.where else "")


@dataclass(frozen=True)
class Attempt:
    """A capture that was tried; `graph` writes `result` in a replay, if without problems."""

    graph: Any = None
    result: Any = None
    calls: Calls = field(default_factory=dict)
    pool_bytes: int = 0                        # in the graph's own pool
    # no longer free on the device; includes the executable graph
    device_bytes: int = 0
    problems: tuple[Problem, ...] = ()
    begun: bool = True                         # False: it failed before the capture


def attempt(fn: Callable[[], Any], stream: Any = None, warm_ups: int = WARM_UPS,
            overlap: bool = False, **options: Any) -> Attempt:
    """Warm up and capture `fn`. `overlap`: kernels that can wait by themselves begin while the one
    before ends (programmatic dependent launch).

    Problems are returned, not raised; a lost device raises DeviceLost.
    """
    side, handled = stream or torch.cuda.Stream(), sys.exc_info()[1]
    try:
        warm_up(fn, side, warm_ups)
    except faults.FAULTS as e:
        first = first_cause(e, handled)
        return Attempt(problems=(problem_of(first, "before the capture: "),), begun=False)
    overlap = overlap and bool(replay.waiting)
    cuda_graph = torch.cuda.CUDAGraph(keep_graph=True) if overlap else torch.cuda.CUDAGraph()
    pool = torch.cuda.graph_pool_handle()
    if not _collected.get():
        gc.collect()
    torch.cuda.empty_cache()
    # torch keeps generator state there, outside of any pool; `pin`
    with torch.cuda.stream(side):
        pin = torch.empty(1, device="cuda")    # keeps their segment from being freed
    free, reserved, segments = _memory()
    before = hits()
    try:
        with capturing(cuda_graph, pool=pool, stream=side, **options):
            result = fn()
    except faults.FAULTS as e:
        calls, first = since(before), first_cause(e, handled)
        problems = [problem_of(first)]
        if problems[0].kind == "sync":         # the first one ended the capture; there may be more
            problems += [Problem("sync", "waits for the device", where)
                         for where in synchronizations(fn)
                         if where not in problems[0].where]
        return Attempt(calls=calls, problems=tuple(problems))
    if overlap:
        graph_edges.overlap(cuda_graph.raw_cuda_graph(), replay.waiting)
        cuda_graph.instantiate()
    torch.cuda.synchronize()
    free_after, reserved_after, after = _memory()
    del pin
    # torch reports the pool of a segment since 2.3
    known = any("segment_pool_id" in s for s in after.values())
    in_pool = [s for s in after.values() if tuple(s.get("segment_pool_id", ())) == tuple(pool)]
    outside = [s for address, s in after.items()
               if address not in segments and tuple(s.get("segment_pool_id", pool)) != tuple(pool)]
    pool_bytes = sum(s["total_size"] for s in in_pool) if known else reserved_after - reserved
    outside_bytes = sum(s["total_size"] for s in outside)
    problems = (
        [Problem("allocation",
                 f"{outside_bytes} bytes were allocated outside the graph's own pool, so on a "
                 "stream that is not captured")] if outside else [])
    return Attempt(cuda_graph, result, since(before), pool_bytes, free - free_after,
                   tuple(problems))


_collected: ContextVar[bool] = ContextVar("layerzero_collected", default=False)


@contextmanager
def collected_once() -> Iterator[None]:
    """Attempts inside do not collect garbage each: it is done once here, and then not at all until
    the end. In a process with a model in it a collection takes longer than a capture."""
    if _collected.get():
        yield
        return
    gc.collect()
    enabled, token = gc.isenabled(), _collected.set(True)
    gc.disable()
    try:
        yield
    finally:
        _collected.reset(token)
        if enabled:
            gc.enable()


def _memory() -> tuple[int, int, dict[int, Any]]:
    free, _ = torch.cuda.mem_get_info()
    return free, torch.cuda.memory_reserved(), {s["address"]: s
                                                for s in torch.cuda.memory_snapshot()}


def first_cause(error: BaseException, handled: BaseException | None) -> BaseException:
    """Return the first error of a chain: ending a failed capture raises another over the one that
    says why. The chain ends at `handled`, what the caller was handling before."""
    while (earlier := error.__cause__ or error.__context__) is not None and earlier is not handled:
        error = earlier
    return error


def problem_of(error: BaseException, prefix: str = "") -> Problem:
    kind = faults.classify(error)
    if kind == "sticky" or isinstance(error, DeviceLost):
        raise DeviceLost(
            f"{prefix}the device was lost: {error}. The device context is lost; restart the "
            "process.",
            [faults.reason_of(error, "sticky")]) from error
    unsafe = Code.CUDA_GRAPH_UNSAFE in getattr(error, "codes", ())
    problem_kind = ("sync" if kind in ("capture", "lost") else "allocation" if kind == "memory"
                    else "no kernel" if unsafe else "fault")
    lines = str(error).strip().splitlines()
    return Problem(problem_kind,
                   f"{prefix}{type(error).__name__}: {lines[0] if lines else ''}"[:400],
                   place_of(error))


def place_of(error: BaseException) -> str:
    """Return the innermost line of the traceback outside torch and this library."""
    frames = [f for f in traceback.extract_tb(error.__traceback__)
              if not f.filename.startswith(LIBRARY_FILES)]
    return f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""


def synchronizations(fn: Callable[[], Any]) -> list[str]:
    """Return file and line of each place where `fn` waits for the device, as torch reports them."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            fn()
        except faults.FAULTS:                  # other problems are reported by the capture
            pass
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    return list(dict.fromkeys(f"{w.filename}:{w.lineno}" for w in seen
                              if "synchronizing CUDA" in str(w.message)))
