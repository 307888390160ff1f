"""Calls of kernels that compile on first use: in what form they come, and how their number is kept small.

A kind of call (its bucket) is what selection can tell apart. A compiler tells more apart: the number of
dimensions, the order of strides, every plain number, the thread count, whether a tensor wants a gradient
or was made in inference mode. The last two are taken away before the call; the rest is its *form*.
A kernel is ready for a call when it was compiled for the kind and for the form.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from ...machine import faults
from ...perf.record import free_integers
from ...select.engine import kind_to_compile
from ...spec.event import Fallback, WarmedUp
from ...spec.kernel import Kernel
from ...spec.op import Op
from ...spec.reason import Code, Reason
from ...world import events
from ...world.snapshot import World

Form = tuple[Any, ...]
MOST_TOLD = 64                                 # forms of one entry that each get an event
PLAIN = frozenset((bool, int, float, str, type(None)))
MOST_KNOWN = 4096                              # signatures of one entry; a counter that is passed has no end


def constant_axes(op: Op, facts: Mapping[str, Any]) -> tuple[frozenset[int], ...]:
    """Of each parameter, the axes, counted from the end, whose size the kind of call fixes."""
    patterns = op.patterns[facts[op.variant] if op.variant else ""]
    tokens = [patterns.get(p.name, ()) for p in op.params]
    return tuple(frozenset(-i for i, token in enumerate(reversed(t), 1) if token in op.exact or token.isdigit())
                 for t in tokens)


def signature(values: tuple[Any, ...], grad: bool) -> Form:
    """Finer than the form and quicker to read: calls that share it share their form."""
    parts: list[Any] = [*_state()]
    for v in values:
        kind = type(v)
        if kind in PLAIN:
            parts += (kind, v)
        elif isinstance(v, Tensor):
            parts += (v.dtype, v.device, v.shape, v.stride(), v.is_cpu or v.data_ptr() % 16)
            if grad:
                parts += (kind, v.requires_grad, v.is_inference())
        else:
            parts.append(kind)
    return tuple(parts)


def _state() -> Form:
    """What holds for the whole process and is compiled in."""
    return (torch.get_num_threads(), torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision())


def form_of(values: tuple[Any, ...], constant: tuple[frozenset[int], ...], grad: bool,
            passed: tuple[bool, ...] = ()) -> Form:
    """All that a compiler may look at besides the sizes: of those, which are equal, and which are 0 or 1.

    `passed`: of each parameter, is it a number that is passed on, so that only 0, 1 and None may be compiled in?
    """
    sizes: list[int] = []
    parts = [_part(v, axes, grad, sizes) if isinstance(v, Tensor) else type(v)
             if type(v) not in PLAIN or (given and v not in (0, 1, None)) else (type(v), v)
             for v, axes, given in zip(values, constant, passed or (False,) * len(values))]
    return (_state(), tuple([sizes.index(n) for n in sizes]), *parts)


def passed_on(kernel: Kernel) -> tuple[bool, ...]:
    """Of each parameter: is it a number that the kernel takes at run time? A library's are; torch compiles all in."""
    free = free_integers(kernel.op)
    return tuple(bool(kernel.package) and (p.kind == "float" or p.name in free) for p in kernel.op.params)


def _part(t: Tensor, constant: frozenset[int], grad: bool, sizes: list[int]) -> Form:
    shape = tuple(t.shape)
    sizes += [n for i, n in enumerate(shape, -len(shape)) if n > 1 and i not in constant]
    pointer = 0 if t.device.type == "cpu" else t.data_ptr() % 16
    mode = (type(t), t.requires_grad, t.is_inference()) if grad else ()
    return (t.dtype, t.device, tuple([min(n, 2) for n in shape]), order_of(shape, t.stride()), pointer, *mode)


def order_of(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """How the dimensions lie in memory: their order if the tensor is dense, else its strides."""
    order = sorted(range(len(shape)), key=lambda i: -strides[i])
    step = 1
    for i in reversed(order):
        if strides[i] != step:
            return (-1, *strides)
        step *= max(shape[i], 1)
    return tuple(order)


def entries(kernel: Kernel, facts: Mapping[str, Any], values: tuple[Any, ...]) -> frozenset[Any]:
    """What to add to the world's `warmed` once the kernel has served this call."""
    kind = kind_to_compile(kernel.op, facts)
    form = form_of(values, constant_axes(kernel.op, facts), facts["grad"], passed_on(kernel))
    return frozenset({(kernel.id, kind), (kernel.id, kind, form)})


def as_seen(world: World, op: Op, facts: Mapping[str, Any], values: tuple[Any, ...]) -> World:
    """The world as this very call finds it: a kernel that was warmed up for other forms only is not."""
    unready = {k.id for k in world.kernels(op.name) if k.jit and k.id not in world.warmed
               and not entries(k, facts, values) <= world.warmed}
    return without(world, unready) if world.warmed and unready else world


def without(world: World, kernels: Collection[str]) -> World:
    """The world before these kernels were warmed up."""
    return world.replace((), warmed=frozenset(w for w in world.warmed if w[0] not in kernels))


def call(run: Callable[..., Any], values: tuple[Any, ...], grad: bool) -> Any:
    """One call of a compiled kernel; each way of calling it would be compiled for, so there is one."""
    return run(*values) if grad else plainly(run, values)


def plainly(run: Callable[..., Any], values: tuple[Any, ...]) -> Any:
    """`run` with plain tensors and without gradients: parameters and inference mode would each be compiled for."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            return run(*[_plain(v) for v in values])
    if torch.is_grad_enabled():
        with torch.no_grad():
            return run(*[_plain(v) for v in values])
    return run(*[_plain(v) for v in values])


def _plain(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.is_inference():                   # another tensor over the same memory
        return torch.empty(0, dtype=value.dtype, device=value.device).set_(
            value.untyped_storage(), value.storage_offset(), value.shape, value.stride())
    return value if type(value) is Tensor and not value.requires_grad else value.detach()


def guarded(kernel: Kernel, run: Callable[..., Any], facts: Mapping[str, Any], warmed: Collection[Any],
            instead: Callable[[tuple[Any, ...]], tuple[str, Any]],
            unready: Callable[[tuple[Any, ...]], object] = lambda values: None) -> Callable[..., Any]:
    """`run` for the forms it was compiled for. Any other call goes to `instead`, which gives (kernel, result);
    `unready` is told of the first call in each such form."""
    kind, constant, grad = kind_to_compile(kernel.op, facts), constant_axes(kernel.op, facts), facts["grad"]
    passed = passed_on(kernel)
    known: dict[Form, bool] = {}
    told: set[Form] = set()
    library = bool(kernel.package)             # what a library compiles depends on no mode: nothing is taken away

    def ready(*values: Any) -> Any:
        raw = signature(values, grad)
        fits, form = known.get(raw), None
        if fits is None:
            form = form_of(values, constant, grad, passed)
            if len(known) >= MOST_KNOWN:
                known.clear()
            known[raw] = fits = (kernel.id, kind, form) in warmed
        if fits:
            return run(*values) if library else call(run, values, grad)
        served_by, out = instead(values)
        if form is not None and form not in told and len(told) < MOST_TOLD:
            told.add(form)
            events.emit(Fallback(kernel.op.name, kernel.id, served_by, Reason(Code.JIT_NOT_WARMED)))
            unready(values)
        return out

    return ready


def timed(kernel: Kernel, run: Callable[..., Any], grad: bool,
          failed: Callable[[BaseException], object]) -> Callable[..., Any]:
    """The first call may compile for seconds: an event says so, that no such wait goes unexplained."""
    first, library = threading.Lock(), bool(kernel.package)

    def compiling(*values: Any) -> Any:
        if not first.acquire(blocking=False):  # never released: there is one first call
            return run(*values) if library else call(run, values, grad)
        began = time.perf_counter()
        try:
            out = call(run, values, grad)
        except faults.FAULTS as fault:
            if faults.classify(fault) == "kernel":
                failed(fault)
            raise
        events.emit(WarmedUp(kernel.op.name, kernel.id, time.perf_counter() - began))
        return out

    return compiling
