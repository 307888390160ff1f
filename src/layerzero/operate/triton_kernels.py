"""Bring your own Triton kernel: a @triton.jit function becomes a kernel of an operation like any
other.

It is chosen by measurement, checked against the contract, compiled before it is first needed, and
left out with a reason where the device cannot launch it. Several configurations are several
kernels: the tuner times each of them for each kind of call, and its measurements decide, not a
search at run time.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ..spec.errors import RegistrationError
from ..spec.event import WarmedUp
from ..spec.kernel import Kernel
from ..spec.op import Op, resolve_import_path
from ..spec.rules import Condition, device, plain_tensors
from ..spec.rules.launch import config_problems
from ..world import events

if TYPE_CHECKING:
    from ..backends.triton.launch import Launcher, LoadedSpecialization

Grid = Sequence[int] | Callable[[Mapping[str, Any]], Sequence[int]]
LAUNCH_OPTIONS = frozenset({"num_warps", "num_stages", "num_ctas", "maxnreg"})

_launchers: dict[str, Launcher] = {}


@dataclass(frozen=True)
class TritonCompiled(WarmedUp):
    """A Triton function is ready for new arguments; `cache`: compiled, or found on disk."""

    name: ClassVar[str] = "triton_compiled"
    cache: str = ""
    shared: int = 0                            # bytes of shared memory that a block takes


@dataclass(frozen=True)
class TritonCache:
    """Counts of one kernel in this process: launches, compiles, and finds on disk."""

    kernel: str
    hits: int
    compiled: int
    from_disk: int


def triton_cache() -> tuple[TritonCache, ...]:
    """Return a row of counts for each of your Triton kernels that was loaded."""
    return tuple(TritonCache(name, *launcher.counts)
                 for name, launcher in _launchers.copy().items())


def triton_kernel(id: str, op: Op, fn: Any, *, launch: Callable[..., Any], grid: Grid,
                  meta: Mapping[str, Any] | None = None, requires: Iterable[Condition] = (),
                  **declared: Any) -> Kernel:
    """Make a kernel of `op` that launches `fn`; register it with lz.register, or list it in a
    plugin's KERNELS.

    fn      the @triton.jit function, or where it is: "package.module:name", imported when it is
            first needed
    launch  takes parameters of the op by name; allocates the results and returns (results,
            arguments of fn in order) or, where constants depend on the call, (results, arguments,
            constants)
    grid    the grid, or a function of all arguments and constants by name that returns it
    meta    constants (BLOCK...: powers of two) and num_warps, num_stages, num_ctas, maxnreg
    """
    constants = dict(meta or {})
    _check(id, op, fn, launch, constants)

    def load() -> Callable[..., Any]:
        return _runner(id, resolve_import_path(fn) if isinstance(fn, str) else fn, launch, grid,
                       constants)

    load.__module__ = launch.__module__        # its build is that of the file with the kernel
    defaults: dict[str, Any] = {"package": "triton", "differentiable": False, "traceable": False,
                                "jit": True,
                                "overhead_us": 15.0}
    hardware: tuple[Condition, ...] = (device("cuda"), plain_tensors())
    return Kernel(id, op, load, (*hardware, *requires), **{**defaults, **declared})


def triton_kernels(id: str, op: Op, fn: Any, *, configs: Sequence[Mapping[str, Any]],
                   launch: Callable[..., Any], grid: Grid, meta: Mapping[str, Any] | None = None,
                   **more: Any) -> tuple[Kernel, ...]:
    """Make one kernel for each configuration, named `id` and its settings: lz.tune times them, the
    fastest serves."""
    named: dict[str, Kernel] = {}
    for config in configs:
        parts = [re.sub(r"[^a-z0-9]+", "_", f"{name}{value}".lower())
                 for name, value in config.items()]
        full = "_".join([id, *parts])
        if full in named:
            raise RegistrationError(
                f"kernel {id!r}: two configurations are called {full!r}: {dict(config)}")
        named[full] = triton_kernel(full, op, fn, launch=launch, grid=grid,
                                    meta={**(meta or {}), **config}, **more)
    if not named:
        raise RegistrationError(
            f"kernel {id!r}: wanted at least one configuration, such as {{'BLOCK': 1024}}")
    return tuple(named.values())


def _check(id: str, op: Op, fn: Any, launch: Callable[..., Any], meta: Mapping[str, Any]) -> None:
    """Refuse what is known to be wrong before anything is imported."""
    problems = config_problems(meta, [name for name in meta if name.startswith("BLOCK")])
    if problems:
        raise RegistrationError(f"kernel {id!r}: " + "; ".join(r.message for r in problems),
                                problems)
    unknown = [name for name in inspect.signature(launch).parameters if name not in op.by_name]
    if unknown:
        raise RegistrationError(
            f"kernel {id!r}: launch wants a parameter {unknown[0]!r}; lz.{op.name} has "
            f"{', '.join(op.by_name)}")
    if isinstance(fn, str):
        if ":" not in fn:
            raise RegistrationError(
                f"kernel {id!r}: wanted a @triton.jit function or its place, as in "
                f"'package.module:name', got {fn!r}")
        return
    arg_names = getattr(fn, "arg_names", None)
    if arg_names is None:
        raise RegistrationError(
            f"kernel {id!r}: wanted a @triton.jit function, got {type(fn).__name__}")
    extra = sorted(meta.keys() - set(arg_names) - LAUNCH_OPTIONS)
    if extra:
        raise RegistrationError(
            f"kernel {id!r}: {', '.join(extra)} is no parameter of the Triton function, which has "
            f"{', '.join(arg_names)}; options are {', '.join(sorted(LAUNCH_OPTIONS))}")


def _runner(id: str, fn: Any, launch: Callable[..., Any], grid: Grid,
            meta: Mapping[str, Any]) -> Callable[..., Any]:
    """Make what the dispatcher calls: a function with the parameters of `launch`."""
    from ..backends.triton import launch as launching  # imports Triton

    if _emit_compiled not in launching.listeners:
        launching.listeners.append(_emit_compiled)
    launcher = _launchers[id] = launching.Launcher(fn, id)
    names = tuple(fn.arg_names)
    fixed = None if callable(grid) else tuple(grid)
    on_gpu = torch.cuda.is_available()         # else this is Triton's interpreter

    def run(*args: Any, **kwargs: Any) -> Any:
        launched = launch(*args, **kwargs)
        result, values = launched[0], tuple(launched[1])
        constants = {**meta, **launched[2]} if len(launched) > 2 else meta
        size = fixed
        if callable(grid):
            size = tuple(grid({**dict(zip(names, values)), **constants}))
        assert size is not None
        if 0 in size:                          # nothing to do; CUDA refuses an empty grid
            return result
        index = torch.cuda.current_device() if on_gpu else None
        launcher(launching.checked_grid(id, size, index), values, constants)
        return result

    run.__signature__ = inspect.signature(launch)  # type: ignore[attr-defined]
    return run


def _emit_compiled(compiled: LoadedSpecialization) -> None:
    events.emit(TritonCompiled(kernel=compiled.function, cache=compiled.cache,
                               seconds=compiled.seconds, shared=compiled.shared))
