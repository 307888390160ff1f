"""Kernels that compile on first use: which calls need which compiled code, and serving only those
that have it.

A kind of call (its bucket) is what selection can tell apart. A compiler tells more apart: the
number of dimensions, the order of strides, every plain number, the thread count, whether a tensor
wants a gradient or was made in inference mode. The last two are removed before the call; the rest
is its *form*. A kernel is ready for a call when it was compiled for the kind and for the form.
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
from ...selection.engine import kind_to_compile
from ...spec.event import Fallback, WarmedUp
from ...spec.kernel import Kernel
from ...spec.op import Op
from ...spec.reason import Code, Reason
from ...world import events
from ...world.snapshot import World

Form = tuple[Any, ...]
MAX_EVENTS = 64                                 # forms of one entry that get an event each
PLAIN = frozenset((bool, int, float, str, type(None)))
# of one entry; a counter among the arguments makes ever new ones
MAX_SIGNATURES = 4096


def constant_axes(op: Op, facts: Mapping[str, Any]) -> tuple[frozenset[int], ...]:
    """Return each parameter's axes, from the end, whose size is equal in all calls of the kind."""
    patterns = op.patterns[facts[op.variant] if op.variant else ""]
    tokens = [patterns.get(p.name, ()) for p in op.params]
    return tuple(frozenset(-i for i, token in enumerate(reversed(t), 1) if token in op.exact
                           or token.isdigit())
                 for t in tokens)


def signature(values: tuple[Any, ...], grad: bool) -> Form:
    """Return a key finer than the form and quicker to read: calls that share it share the form."""
    parts: list[Any] = [*_process_state()]
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


def _process_state() -> Form:
    """Returns the state of the process that is compiled in."""
    return (torch.get_num_threads(), torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision())


def form_of(values: tuple[Any, ...], constant: tuple[frozenset[int], ...], grad: bool,
            at_runtime: tuple[bool, ...] = ()) -> Form:
    """Return all that a compiler may specialize on: of the sizes only which are equal, and which
    are 0 or 1.

    `at_runtime`: for each parameter, is it a number that the kernel takes at run time? Then only 0,
    1 and None count.
    """
    sizes: list[int] = []
    parts = [_tensor_form(v, axes, grad, sizes) if isinstance(v, Tensor) else type(v)
             if type(v) not in PLAIN or (runtime and v not in (0, 1, None)) else (type(v), v)
             for v, axes, runtime in zip(values, constant, at_runtime or (False,) * len(values))]
    return (_process_state(), tuple([sizes.index(n) for n in sizes]), *parts)


def runtime_numbers(kernel: Kernel) -> tuple[bool, ...]:
    """Is each parameter a number taken at run time? A library's are; torch compiles all in."""
    free = free_integers(kernel.op)
    return tuple(bool(kernel.package) and (p.kind == "float" or p.name in free)
                 for p in kernel.op.params)


def _tensor_form(t: Tensor, constant: frozenset[int], grad: bool, sizes: list[int]) -> Form:
    shape = tuple(t.shape)
    sizes += [n for i, n in enumerate(shape, -len(shape)) if n > 1 and i not in constant]
    pointer = 0 if t.device.type == "cpu" else t.data_ptr() % 16
    mode = (type(t), t.requires_grad, t.is_inference()) if grad else ()
    return (t.dtype, t.device, tuple([min(n, 2) for n in shape]), memory_order(shape, t.stride()),
            pointer, *mode)


def memory_order(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Return the order of the dimensions in memory if the tensor is dense, else -1 and strides."""
    order = sorted(range(len(shape)), key=lambda i: -strides[i])
    step = 1
    for i in reversed(order):
        if strides[i] != step:
            return (-1, *strides)
        step *= max(shape[i], 1)
    return tuple(order)


def warmed_keys(kernel: Kernel, facts: Mapping[str, Any],
                values: tuple[Any, ...]) -> frozenset[Any]:
    """Return what to add to the world's `warmed` once the kernel has served this call."""
    kind = kind_to_compile(kernel.op, facts)
    form = form_of(values, constant_axes(kernel.op, facts), facts["grad"], runtime_numbers(kernel))
    return frozenset({(kernel.id, kind), (kernel.id, kind, form)})


def world_for_call(world: World, op: Op, facts: Mapping[str, Any],
                   values: tuple[Any, ...]) -> World:
    """Return the world without the kernels that were warmed up for other forms only."""
    unready = {k.id for k in world.kernels(op.name) if k.jit and k.id not in world.warmed
               and not warmed_keys(k, facts, values) <= world.warmed}
    return without_warmed(world, unready) if world.warmed and unready else world


def without_warmed(world: World, kernels: Collection[str]) -> World:
    """Return the world as if these kernels were not warmed up."""
    return world.replace((), warmed=frozenset(w for w in world.warmed if w[0] not in kernels))


def call(run: Callable[..., Any], values: tuple[Any, ...], grad: bool) -> Any:
    """Call a compiled kernel, always in the same way: each way of calling would be compiled for."""
    return run(*values) if grad else call_plain(run, values)


def call_plain(run: Callable[..., Any], values: tuple[Any, ...]) -> Any:
    """Call `run` with plain tensors and no gradients: each other kind would be compiled for."""
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
    if value.is_inference():                   # make a plain tensor over the same memory
        return torch.empty(0, dtype=value.dtype, device=value.device).set_(
            value.untyped_storage(), value.storage_offset(), value.shape, value.stride())
    return value if type(value) is Tensor and not value.requires_grad else value.detach()


def only_compiled(kernel: Kernel, run: Callable[..., Any], facts: Mapping[str, Any],
                  warmed: Collection[Any],
                  fall_back: Callable[[tuple[Any, ...]], tuple[str, Any]],
                  on_unready: Callable[[tuple[Any, ...]],
                                       object] = lambda values: None) -> Callable[..., Any]:
    """Wrap `run` so that it serves only the forms it was compiled for.

    Any other call goes to `fall_back`, which returns (kernel, result); `on_unready` is called with
    the first call of each such form.
    """
    kind, constant, grad = kind_to_compile(kernel.op,
                                           facts), constant_axes(kernel.op, facts), facts["grad"]
    at_runtime = runtime_numbers(kernel)
    is_ready: dict[Form, bool] = {}
    reported: set[Form] = set()
    # a library compiles for no mode: the call needs no plain tensors
    library = bool(kernel.package)

    def call_if_ready(*values: Any) -> Any:
        key = signature(values, grad)
        ready, form = is_ready.get(key), None
        if ready is None:
            form = form_of(values, constant, grad, at_runtime)
            if len(is_ready) >= MAX_SIGNATURES:
                is_ready.clear()
            is_ready[key] = ready = (kernel.id, kind, form) in warmed
        if ready:
            return run(*values) if library else call(run, values, grad)
        served_by, out = fall_back(values)
        if form is not None and form not in reported and len(reported) < MAX_EVENTS:
            reported.add(form)
            events.emit(Fallback(kernel.op.name, kernel.id, served_by, Reason(Code.JIT_NOT_WARMED)))
            on_unready(values)
        return out

    return call_if_ready


def report_compile(kernel: Kernel, run: Callable[..., Any], grad: bool,
                   failed: Callable[[BaseException], object]) -> Callable[..., Any]:
    """Wrap `run` so that an event reports its first call, which may compile for seconds."""
    first, library = threading.Lock(), bool(kernel.package)

    def compiling(*values: Any) -> Any:
        if not first.acquire(blocking=False):  # never released: there is one first call
            return run(*values) if library else call(run, values, grad)
        start = time.perf_counter()
        try:
            out = call(run, values, grad)
        except faults.FAULTS as fault:
            if faults.classify(fault) == "kernel":
                failed(fault)
            raise
        events.emit(WarmedUp(kernel.op.name, kernel.id, time.perf_counter() - start))
        return out

    return compiling
