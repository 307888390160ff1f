"""A launch without what Triton works out anew at every call.

JITFunction.run binds arguments, asks each for its specialisation, and makes a text of that to look up what was
compiled. Here a function made for the types of the arguments reads what the specialisation depends on (dtypes, whether
a pointer or a number is a multiple of 16, whether a number is 1 or needs 64 bits, the constants) into a tuple. A tuple
that was seen before leads straight to the compiled kernel, which gets bare pointers. Anything unusual, such as a hook
of a profiler, is launched by Triton itself. What is launched while a call is recorded is told to spec/replay.py: the
next such call needs no Python; bare.py makes of a compiled kernel what the driver is to be given.
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

from ...spec import codegen, replay
from ...spec.launch import LaunchLimits, LaunchRefused, block_problems, config_problems, grid_problems
from ...spec.replay import Varying
from . import bare

MOST_KNOWN = 4096                              # exact argument tuples of one function; a growing length has no end
WIDE = 1 << 31


@dataclass(frozen=True)
class Compiled:
    """One specialisation that was made ready. `cache`: where it was: nowhere (compiled), on disk, or in memory."""

    function: str
    cache: str                                 # compiled | disk | memory
    seconds: float
    shared: int
    num_warps: int


class Counts(NamedTuple):
    """Of one function: launches of what was ready, and specialisations by where they came from."""

    hits: int
    compiled: int
    from_disk: int


class _Ready(NamedTuple):
    run: Callable[..., Any]
    function: Any
    packed: Any
    constants: tuple[Any, ...]                 # of the parameters after those that are passed at run time
    made: Any                                  # Triton's CompiledKernel


told: list[Callable[[Compiled], None]] = []    # called with every specialisation that is made ready
_listening = threading.Lock()
_limits: dict[int, LaunchLimits] = {}


def limits_of(device: int) -> LaunchLimits:
    """As the driver says."""
    found = _limits.get(device)
    if found is None:
        given = driver.active.utils.get_device_properties(device)
        found = _limits[device] = LaunchLimits(shared=int(given["max_shared_mem"]))
    return found


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
        self._runtime = _leading(fn) if isinstance(fn, JITFunction) and torch.version.hip is None else -1

    @property
    def counts(self) -> Counts:
        return Counts(int(repr(self._hits)[6:-1]), self._made["compiled"], self._made["disk"])

    def __call__(self, grid: Sequence[int], args: tuple[Any, ...], meta: Mapping[str, Any],
                 varying: tuple[Varying, ...] = ()) -> None:
        """`args`: the parameters that are no constants, in order. `meta`: constants, num_warps and the like.
        `varying`: which of `args`, by their place, may be others in a replay."""
        types = tuple(map(type, args))
        reader = self._readers.get(types)
        if reader is None and types not in self._readers:
            reader = self._readers[types] = self._reader(types)
        watcher = replay.watcher()
        if reader is None or self.fn.pre_run_hooks or _hooked():
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
        ready.run(*full, torch._C._cuda_getCurrentRawStream(device), ready.function, ready.packed, None, None, None,
                  *values, *ready.constants)
        if watcher is not None:
            hooks = hook_lists(self.fn)
            launch = bare.launch(self.fn, ready.made, full, args, varying, hooks) if hooks else "hooks it cannot watch"
            if isinstance(launch, str):
                watcher.refuse(f"{self.name}: {launch}")
            else:
                watcher.launched(launch)

    def _obtain(self, key: Any, device: int, grid: Sequence[int], args: tuple[Any, ...],
                meta: Mapping[str, Any]) -> _Ready:
        """Numbers that were not seen before may be of a kind that was: then nothing is compiled."""
        kind = (device, *map(self._kind, self.fn.params, args), *meta.items())
        ready = self._kinds.get(kind)
        if ready is None:
            ready = self._kinds[kind] = self._compile(device, grid, args, meta)
        else:
            self._tick()
        if len(self._exact) >= MOST_KNOWN:
            self._exact.clear()
        self._exact[key] = ready
        return ready

    def _compile(self, device: int, grid: Sequence[int], args: tuple[Any, ...], meta: Mapping[str, Any]) -> _Ready:
        wrong = config_problems(meta, blocks_of(meta))
        if wrong:
            raise LaunchRefused.of(self.name, wrong)
        found: list[bool] = []
        began = time.perf_counter()
        with _compilations(found):
            made = self.fn.warmup(*args, grid=tuple(grid), **meta)
        wrong = block_problems(made.metadata.num_warps, made.metadata.shared, limits_of(device))
        if wrong:
            raise LaunchRefused.of(self.name, wrong)
        made[(1, 1, 1)]                        # loads it; nothing runs
        cache = "memory" if not found else "disk" if found[-1] else "compiled"
        self._made[cache] += 1
        event = Compiled(self.name, cache, time.perf_counter() - began, made.metadata.shared, made.metadata.num_warps)
        for sink in told:
            sink(event)
        constants = tuple(meta.get(p.name, p.default) for p in self.fn.params[self._runtime:])
        return _Ready(made.run, made.function, made.packed_metadata, constants, made)

    def _reader(self, types: tuple[type, ...]) -> Callable[..., Any] | None:
        """A function of the arguments that gives (what their specialisation may depend on, what to pass)."""
        if len(types) != self._runtime:
            return None
        given = [f"a{i}" for i in range(len(types))]
        lines: list[str] = []                  # of the function
        parts = [str(len(self._readers))]      # of the key: first, which types these are
        passed: list[str] = []
        for name, kind, param in zip(given, types, self.fn.params):
            passed.append(name)
            if issubclass(kind, Tensor):
                lines.append(f"{name}_at = {name}.data_ptr()")
                parts += [f"{name}.dtype", f"{name}_at % 16"]
                passed[-1] = f"{name}_at"
            elif kind is int and param.do_not_specialize:
                parts.append(f"-{WIDE} <= {name} < {WIDE}")
            elif kind is int:
                parts.append(name)
            elif kind not in (bool, float, type(None)):
                return None
        lines.append(f"return ({', '.join(parts)},), ({', '.join(passed)},)")
        scope: dict[str, Any] = {}
        source = f"def read({', '.join(given)}):\n    " + "\n    ".join(lines)     # made of types alone
        exec(codegen.compile(source, "launch read"), scope)
        return scope["read"]  # type: ignore[no-any-return]

    @staticmethod
    def _kind(param: Any, value: Any) -> Any:
        """What Triton tells apart of one argument."""
        if isinstance(value, Tensor):
            return value.dtype, value.data_ptr() % 16 == 0
        if type(value) is int:
            small = -WIDE <= value < WIDE, value < 1 << 63
            return small if param.do_not_specialize else (*small, value == 1, value % 16 == 0)
        return type(value)                     # of a float or a bool no value is compiled in


def blocks_of(meta: Mapping[str, Any]) -> list[str]:
    """The constants that are sizes of blocks, by their name."""
    return [name for name, value in meta.items() if name.startswith("BLOCK") and type(value) is int]


def checked_grid(name: str, grid: Sequence[int], device: int | None) -> tuple[int, ...]:
    """The grid, or LaunchRefused if the device cannot take it. `device` None: the interpreter."""
    if len(grid) == 1 and type(grid[0]) is int and 0 < grid[0] < WIDE:
        return grid[0],
    wrong = grid_problems(grid, LaunchLimits() if device is None else limits_of(device))
    if wrong:
        raise LaunchRefused.of(name, wrong)
    return tuple(grid)


def _leading(fn: Any) -> int:
    """How many parameters are passed at run time; -1 if constants stand between them."""
    flags = [p.is_constexpr for p in fn.params]
    count = flags.index(True) if True in flags else len(flags)
    return count if all(flags[count:]) else -1


def _hooked() -> bool:
    """Does somebody watch launches? Before Triton 3.5 a hook was a function or None, later it is a chain."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool((enter is not None and getattr(enter, "calls", True))
                or (leave is not None and getattr(leave, "calls", True)))


def hook_lists(fn: Any) -> tuple[list[Any], ...]:
    """Lists that are empty as long as nobody watches launches; none before Triton 3.5, where hooks are no lists."""
    chains = (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
    lists = [*(getattr(chain, "calls", None) for chain in chains), fn.pre_run_hooks]
    found = tuple(hooks for hooks in lists if type(hooks) is list)
    return found if len(found) == len(lists) else ()


@contextmanager
def _compilations(found: list[bool]) -> Iterator[None]:
    """For each compilation meanwhile, whether it was in the cache on disk."""
    with _listening:
        before = knobs.compilation.listener

        def listener(**given: Any) -> None:
            found.append(bool(given["cache_hit"]))
            if before is not None:
                before(**given)

        knobs.compilation.listener = listener
        try:
            yield
        finally:
            knobs.compilation.listener = before
