"""Launches Triton kernels without the overhead of JITFunction.run.

JITFunction.run binds arguments, computes the specialization of each, and formats it as a string to
look up the compiled kernel. Here a function generated for the types of the arguments reads what the
specialization depends on (dtypes, whether a pointer or a number is a multiple of 16, whether a
number is 1 or needs 64 bits, the constants) into a tuple. A known tuple leads straight to the
compiled kernel, which gets raw pointers. Unusual launches, such as with a profiler's hook, are left
to Triton. Launches during a recorded call are reported to spec/replay.py, so that the next such
call needs no Python; bare.py describes them for the driver.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from ...files import codegen
from ...spec import replay
from ...spec.replay import Varying
from ...spec.rules.launch import (
    LaunchLimits,
    LaunchRefused,
    block_problems,
    config_problems,
    grid_problems,
)
from . import bare

# exact argument tuples of a function; growing lengths add new ones
MAX_EXACT_KEYS = 4096
INT32_END = 1 << 31


@dataclass(frozen=True)
class LoadedSpecialization:
    """A specialization that was loaded. `cache`: compiled, or found on disk or in memory."""

    function: str
    cache: str                                 # compiled | disk | memory
    seconds: float
    shared: int
    num_warps: int


class LaunchCounts(NamedTuple):
    """Statistics of one function: launches by loaded specialization, specializations by source."""

    hits: int
    compiled: int
    from_disk: int


class _Ready(NamedTuple):
    run: Callable[..., Any]
    function: Any
    packed: Any
    constants: tuple[Any, ...]                 # of the parameters after the run-time ones
    compiled: Any                              # Triton's CompiledKernel


# called with every loaded specialization
listeners: list[Callable[[LoadedSpecialization], None]] = []
_listener_lock = threading.Lock()
_limits: dict[int, LaunchLimits] = {}


def limits_of(device: int) -> LaunchLimits:
    """Returns the launch limits of a device, from the driver."""
    limits = _limits.get(device)
    if limits is None:
        properties = driver.active.utils.get_device_properties(device)
        limits = _limits[device] = LaunchLimits(shared=int(properties["max_shared_mem"]))
    return limits


class Launcher:
    """Launches one @triton.jit function."""

    def __init__(self, fn: Any, name: str = "") -> None:
        self.fn, self.name = fn, name or getattr(fn, "__name__", repr(fn))
        self._exact: dict[Any, _Ready] = {}
        self._kinds: dict[Any, _Ready] = {}
        self._readers: dict[tuple[type, ...], Callable[..., Any] | None] = {}
        self._hits = itertools.count()
        self._tick = self._hits.__next__
        self._made = {"compiled": 0, "disk": 0, "memory": 0}
        self._runtime = (_runtime_parameters(fn) if isinstance(fn, JITFunction)
                         and torch.version.hip is None
                         and getattr(torch.version, "xpu", None) is None else -1)

    @property
    def counts(self) -> LaunchCounts:
        return LaunchCounts(int(repr(self._hits)[6:-1]), self._made["compiled"], self._made["disk"])

    def __call__(self, grid: Sequence[int], args: tuple[Any, ...], meta: Mapping[str, Any],
                 varying: tuple[Varying, ...] = ()) -> None:
        """Launches with `args`, the run-time arguments in order, and `meta`, the constants,
        num_warps and the like. `varying`: which of `args`, by index, may differ in a replay."""
        types = tuple(map(type, args))
        reader = self._readers.get(types)
        if reader is None and types not in self._readers:
            reader = self._readers[types] = self._reader(types)
        watcher = replay.watcher()
        if reader is None or self.fn.pre_run_hooks or _has_hooks():
            self.fn[tuple(grid)](*args, **meta)
            if watcher is not None:
                watcher.refuse(f"Triton itself launches {self.name}")
            return
        device = torch.cuda.current_device()
        exact, values = reader(*args)
        key = (device, exact, *meta, *meta.values())
        ready = self._exact.get(key)
        if ready is None:
            ready = self._obtain(key, device, grid, args, meta)
        else:
            self._tick()
        size = len(grid)
        full = grid[0], grid[1] if size > 1 else 1, grid[2] if size > 2 else 1
        ready.run(*full, torch._C._cuda_getCurrentRawStream(device), ready.function, ready.packed,
                  None, None, None, *values, *ready.constants)
        if watcher is not None:
            hooks = hook_lists(self.fn)
            launch = (bare.launch(self.fn, ready.compiled, full, args, varying, hooks) if hooks
                      else "hooks it cannot watch")
            if isinstance(launch, str):
                watcher.refuse(f"{self.name}: {launch}")
            else:
                watcher.launched(launch)

    def _obtain(self, key: Any, device: int, grid: Sequence[int], args: tuple[Any, ...],
                meta: Mapping[str, Any]) -> _Ready:
        """Returns the specialization for new arguments; it is compiled only if it is new too."""
        kind = (device, *map(self._kind, self.fn.params, args), *meta.items())
        ready = self._kinds.get(kind)
        if ready is None:
            ready = self._kinds[kind] = self._compile(device, grid, args, meta)
        else:
            self._tick()
        if len(self._exact) >= MAX_EXACT_KEYS:
            self._exact.clear()
        self._exact[key] = ready
        return ready

    def _compile(self, device: int, grid: Sequence[int], args: tuple[Any, ...],
                 meta: Mapping[str, Any]) -> _Ready:
        reasons = config_problems(meta, blocks_of(meta))
        if reasons:
            raise LaunchRefused.of(self.name, reasons)
        cache_hits: list[bool] = []
        start = time.perf_counter()
        with _compilations(cache_hits):
            compiled = self.fn.warmup(*args, grid=tuple(grid), **meta)
        reasons = block_problems(compiled.metadata.num_warps, compiled.metadata.shared,
                                 limits_of(device))
        if reasons:
            raise LaunchRefused.of(self.name, reasons)
        compiled[(1, 1, 1)]                    # loads it without a launch
        cache = "memory" if not cache_hits else "disk" if cache_hits[-1] else "compiled"
        self._made[cache] += 1
        event = LoadedSpecialization(self.name, cache, time.perf_counter() - start,
                                     compiled.metadata.shared, compiled.metadata.num_warps)
        for listener in listeners:
            listener(event)
        (replay.waiting.add if "griddepcontrol.wait" in str(compiled.asm.get("ptx", ""))
         else replay.waiting.discard)(compiled.function)
        constants = tuple(meta.get(p.name, p.default) for p in self.fn.params[self._runtime:])
        return _Ready(compiled.run, compiled.function, compiled.packed_metadata, constants,
                      compiled)

    def _reader(self, types: tuple[type, ...]) -> Callable[..., Any] | None:
        """Generates a function of the arguments: (what specialization reads, what to pass)."""
        if len(types) != self._runtime:
            return None
        names = [f"a{i}" for i in range(len(types))]
        lines: list[str] = []                  # body of the function
        parts = [str(len(self._readers))]      # of the key; the first identifies the types
        passed: list[str] = []
        for name, kind, param in zip(names, types, self.fn.params):
            passed.append(name)
            if issubclass(kind, Tensor):
                lines.append(f"{name}_at = {name}.data_ptr()")
                parts += [f"{name}.dtype", f"{name}_at % 16"]
                passed[-1] = f"{name}_at"
            elif kind is int and param.do_not_specialize:
                parts.append(f"-{INT32_END} <= {name} < {INT32_END}")
            elif kind is int:
                parts.append(name)
            elif kind not in (bool, float, type(None)):
                return None
        lines.append(f"return ({', '.join(parts)},), ({', '.join(passed)},)")
        scope: dict[str, Any] = {}
        # depends on types alone
        source = f"def read({', '.join(names)}):\n    " + "\n    ".join(lines)
        exec(codegen.compile(source, "launch read"), scope)
        return scope["read"]  # type: ignore[no-any-return]

    @staticmethod
    def _kind(param: Any, value: Any) -> Any:
        """Returns what Triton specializes an argument on."""
        if isinstance(value, Tensor):
            return value.dtype, value.data_ptr() % 16 == 0
        if type(value) is int:
            small = -INT32_END <= value < INT32_END, value < 1 << 63
            return small if param.do_not_specialize else (*small, value == 1, value % 16 == 0)
        return type(value)                     # values of floats and bools are not compiled in


def blocks_of(meta: Mapping[str, Any]) -> list[str]:
    """Returns the names of the constants that are block sizes."""
    return [name for name, value in meta.items() if name.startswith("BLOCK") and type(value) is int]


def checked_grid(name: str, grid: Sequence[int], device: int | None) -> tuple[int, ...]:
    """Returns the grid; LaunchRefused beyond the device's limits. `device` None: interpreter."""
    if len(grid) == 1 and type(grid[0]) is int and 0 < grid[0] < INT32_END:
        return grid[0],
    reasons = grid_problems(grid, LaunchLimits() if device is None else limits_of(device))
    if reasons:
        raise LaunchRefused.of(name, reasons)
    return tuple(grid)


def _runtime_parameters(fn: Any) -> int:
    """Returns the number of leading run-time parameters; -1 if constants are between them."""
    flags = [p.is_constexpr for p in fn.params]
    count = flags.index(True) if True in flags else len(flags)
    return count if all(flags[count:]) else -1


def _has_hooks() -> bool:
    """Returns whether launch hooks are set: before Triton 3.5 a function or None, later a chain."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool((enter is not None and getattr(enter, "calls", True))
                or (leave is not None and getattr(leave, "calls", True)))


def hook_lists(fn: Any) -> tuple[list[Any], ...]:
    """Returns the lists of launch hooks, to be checked in a replay; () before Triton 3.5."""
    chains = (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
    lists = [*(getattr(chain, "calls", None) for chain in chains), fn.pre_run_hooks]
    usable = tuple(hooks for hooks in lists if type(hooks) is list)
    return usable if len(usable) == len(lists) else ()


@contextmanager
def _compilations(cache_hits: list[bool]) -> Iterator[None]:
    """Appends to `cache_hits`, per compilation inside the block, whether the disk cache had it."""
    with _listener_lock:
        previous = knobs.compilation.listener

        def listener(**event: Any) -> None:
            cache_hits.append(bool(event["cache_hit"]))
            if previous is not None:
                previous(**event)

        knobs.compilation.listener = listener
        try:
            yield
        finally:
            knobs.compilation.listener = previous
