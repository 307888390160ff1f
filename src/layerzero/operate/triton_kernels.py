"""Bring your own Triton kernel: a @triton.jit function becomes a kernel of an operation like any other.

It is chosen by measurement, checked against the contract, compiled before it is first needed, and left out with a
reason where the device cannot launch it. Several configurations are several kernels: the tuner times each of them for
each kind of call, and what it wrote down decides, not a search at run time.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ..spec.errors import RegistrationError
from ..spec.event import WarmedUp
from ..spec.kernel import Kernel
from ..spec.launch import config_problems
from ..spec.op import Op, resolve_import_path
from ..spec.rules import Condition, device, plain_tensors
from ..world import events

if TYPE_CHECKING:
    from ..backends.triton.launch import Compiled, Launcher

Grid = Sequence[int] | Callable[[Mapping[str, Any]], Sequence[int]]
OPTIONS = frozenset({"num_warps", "num_stages", "num_ctas", "maxnreg"})

_launchers: dict[str, Launcher] = {}


@dataclass(frozen=True)
class TritonCompiled(WarmedUp):
    """A Triton function was made ready for arguments of a new kind. `cache`: compiled, or found on disk, in memory."""

    name: ClassVar[str] = "triton_compiled"
    cache: str = ""
    shared: int = 0                            # bytes of shared memory that a block takes


@dataclass(frozen=True)
class TritonCache:
    """Of one kernel in this process: launches of what was ready, what was compiled, what was found on disk."""

    kernel: str
    hits: int
    compiled: int
    from_disk: int


def triton_cache() -> tuple[TritonCache, ...]:
    """What compiling has cost: a row for each of your Triton kernels that was loaded."""
    return tuple(TritonCache(name, *launcher.counts) for name, launcher in _launchers.items())


def triton_kernel(id: str, op: Op, fn: Any, *, launch: Callable[..., Any], grid: Grid,
                  meta: Mapping[str, Any] | None = None, requires: Iterable[Condition] = (),
                  **declared: Any) -> Kernel:
    """A kernel of `op` that launches `fn`; register it with lz.register, or list it in a plugin's KERNELS.

    fn      the @triton.jit function, or where it is: "package.module:name", imported when it is first needed
    launch  takes parameters of the op by name; allocates the results and gives (results, arguments of fn in order),
            and, where constants depend on the call, a third: their values
    grid    the grid, or a function of all arguments and constants by name that gives it
    meta    constants (BLOCK...: powers of two) and num_warps, num_stages, num_ctas, maxnreg
    """
    chosen = dict(meta or {})
    _check(id, op, fn, launch, chosen)

    def load() -> Callable[..., Any]:
        return _runner(id, resolve_import_path(fn) if isinstance(fn, str) else fn, launch, grid, chosen)

    load.__module__ = launch.__module__        # its build is that of the file the kernel is written in
    given: dict[str, Any] = {"package": "triton", "differentiable": False, "traceable": False, "jit": True,
                             "overhead_us": 15.0}
    hardware: tuple[Condition, ...] = (device("cuda"), plain_tensors())
    return Kernel(id, op, load, (*hardware, *requires), **{**given, **declared})


def triton_kernels(id: str, op: Op, fn: Any, *, configs: Sequence[Mapping[str, Any]], launch: Callable[..., Any],
                   grid: Grid, meta: Mapping[str, Any] | None = None, **more: Any) -> tuple[Kernel, ...]:
    """One kernel for each configuration, called `id` and what it sets: lz.tune times them, and the fastest serves."""
    named: dict[str, Kernel] = {}
    for config in configs:
        parts = [re.sub(r"[^a-z0-9]+", "_", f"{name}{value}".lower()) for name, value in config.items()]
        full = "_".join([id, *parts])
        if full in named:
            raise RegistrationError(f"kernel {id!r}: two configurations are called {full!r}: {dict(config)}")
        named[full] = triton_kernel(full, op, fn, launch=launch, grid=grid, meta={**(meta or {}), **config}, **more)
    if not named:
        raise RegistrationError(f"kernel {id!r}: wanted at least one configuration, such as {{'BLOCK': 1024}}")
    return tuple(named.values())


def _check(id: str, op: Op, fn: Any, launch: Callable[..., Any], meta: Mapping[str, Any]) -> None:
    """What can be known to be wrong before anything is imported."""
    wrong = config_problems(meta, [name for name in meta if name.startswith("BLOCK")])
    if wrong:
        raise RegistrationError(f"kernel {id!r}: " + "; ".join(r.message for r in wrong), wrong)
    strangers = [name for name in inspect.signature(launch).parameters if name not in op.by_name]
    if strangers:
        raise RegistrationError(f"kernel {id!r}: launch wants a parameter {strangers[0]!r}; lz.{op.name} has "
                                f"{', '.join(op.by_name)}")
    if isinstance(fn, str):
        if ":" not in fn:
            raise RegistrationError(f"kernel {id!r}: wanted a @triton.jit function or its place, as in "
                                    f"'package.module:name', got {fn!r}")
        return
    known = getattr(fn, "arg_names", None)
    if known is None:
        raise RegistrationError(f"kernel {id!r}: wanted a @triton.jit function, got {type(fn).__name__}")
    odd = sorted(meta.keys() - set(known) - OPTIONS)
    if odd:
        raise RegistrationError(f"kernel {id!r}: {', '.join(odd)} is no parameter of the Triton function, which has "
                                f"{', '.join(known)}; options are {', '.join(sorted(OPTIONS))}")


def _runner(id: str, fn: Any, launch: Callable[..., Any], grid: Grid, meta: Mapping[str, Any]) -> Callable[..., Any]:
    """What the dispatcher calls: it has the parameters of `launch`."""
    import torch

    from ..backends.triton import launch as launching

    if _tell not in launching.listeners:
        launching.listeners.append(_tell)
    launcher = _launchers[id] = launching.Launcher(fn, id)
    names = tuple(fn.arg_names)
    fixed = None if callable(grid) else tuple(grid)
    on_gpu = torch.cuda.is_available()         # else this is Triton's interpreter

    def run(*args: Any, **kwargs: Any) -> Any:
        made = launch(*args, **kwargs)
        result, values = made[0], tuple(made[1])
        constants = {**meta, **made[2]} if len(made) > 2 else meta
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


def _tell(made: Compiled) -> None:
    events.emit(TritonCompiled(kernel=made.function, cache=made.cache, seconds=made.seconds, shared=made.shared))
