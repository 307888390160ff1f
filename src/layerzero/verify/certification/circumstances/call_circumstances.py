"""The same call in other circumstances: a kernel that is right on fresh contiguous tensors may be
wrong otherwise.

They are derived from any op's declaration: a tensor in another layout, one tensor passed twice,
contents changed in place after an earlier call, autocast, recorded gradients, many runs, offsets
that exceed 32 bits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from ....dispatch.facts import dtype_name, read
from ....spec.kernel import Kernel
from ....spec.op import Op
from ...cases.chosen_cells import Cell
from ...cases.generated import ArgumentCase, if_allowed, with_argument
from ...kernel.contract import (
    CaseResult,
    Circumstance,
    call,
    case_refusals,
    case_tensors,
    case_values_to_read,
    check_case,
)
from ...kernel.guarded import LAYOUTS, with_distant_rows
from .argument_circumstances import argument_circumstances, shared_rows
from .content_circumstances import WrittenUnseen, content_circumstances
from .grad_circumstances import (
    GivenParameters,
    GradMode,
    RecordingComputed,
    RecordingGradients,
)
from .row_circumstances import MemoryOrder, Narrowed, OtherLayout, OtherSigns, Shifted
from .state_circumstances import state_circumstances
from .text_circumstances import text_circumstances

OBJECTS = 512                                  # of which one may have the id of an earlier one


class Expanded(Circumstance):
    """One tensor expanded along a dimension (stride 0), all of it equal to its first part."""

    alike = True

    def __init__(self, tensor: str, dim: int) -> None:
        self.tensor, self.dim, self.name = tensor, dim, f"{tensor} spread along dimension {dim}"

    def alter(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        t = values[self.tensor]
        if not isinstance(t, Tensor) or t.dim() <= self.dim or t.shape[self.dim] < 2:
            return None
        if not t.is_floating_point() and t.dtype != torch.bool:
            return shared_rows(op, values, self.tensor, self.dim)
        first = t.narrow(self.dim, 0, 1)
        # Unused slots of a page hold what no kernel may read: infinities, or the largest codes.
        if not t.numel() or (t.is_floating_point() and not bool(
                (first.float().abs() < torch.finfo(t.dtype).max).all())):
            return None
        return if_allowed(op, {**values, self.tensor: first.expand_as(t)})


class Broadcast(Circumstance):
    """A tensor that may be broadcast, such as a mask, expanded by the caller (stride 0)."""

    def __init__(self, tensor: str) -> None:
        self.tensor, self.name = tensor, f"{tensor} broadcast by the caller"

    def alter(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        t, facts = values[self.tensor], read(op, values)
        tokens = op.patterns[values[op.variant] if op.variant else ""].get(self.tensor, ())
        if not isinstance(t, Tensor) or not tokens or any(not n.startswith("~") for n in tokens):
            return None
        shape = tuple(facts[n.lstrip("~")] for n in tokens)
        return None if tuple(t.shape) == shape else if_allowed(
            op, {**values, self.tensor: t.expand(shape)})


class UnusualValues(Circumstance):
    """The main tensor with unusual values: all zero, all of one sign, all so small that an eps
    beside their squares matters, one very large; logits all far below zero."""

    def __init__(self, how: str) -> None:
        self.how, self.name, self.even = how, f"filled with {how}", how != "one loud number"

    def alter(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        t = values.get(op.main_tensor)
        if (not isinstance(t, Tensor) or not t.is_floating_point() or t.dtype.itemsize == 1
            or not t.numel()):
            return None
        if self.how == "zeros":                # of both signs
            filled = torch.zeros_like(t)
            filled[..., ::2] = -0.0
        elif self.how == "one sign":
            filled = t.abs() + 1
        elif self.how == "small numbers":
            filled = t * 2.0 ** -12
        elif self.how == "numbers far below zero":
            filled = t - 300.0
        else:
            filled = t.clone()
            filled[(0,) * t.dim()] = 300.0
        return {**values, op.main_tensor: filled}


class WithArgument(Circumstance):
    """An argument of another case is given too: the kernel accepts it, but no accepted case has
    it."""

    def __init__(self, argument_case: ArgumentCase) -> None:
        self.argument_case = argument_case
        self.name = f"given the {argument_case.argument} of {dict(argument_case.donor or {})}"

    def alter(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        main = values[op.main_tensor]
        donated = with_argument(op, self.argument_case, dtype_name(main.dtype), main.device.type)
        argument = self.argument_case.argument
        return None if donated is None else {**values, argument: donated[argument]}


class SharedTensor(Circumstance):
    """One tensor passed as two arguments, as with attention(x, x, x)."""

    def __init__(self, first: str, second: str) -> None:
        self.first, self.second, self.name = first, second, f"{second} is {first}"

    def alter(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        first, second = values[self.first], values[self.second]
        alike = (isinstance(first, Tensor) and isinstance(second, Tensor)
                 and first.shape == second.shape
                 and first.dtype == second.dtype and first.is_floating_point())
        return {**values, self.second: first} if alike else None


class SharedMemory(SharedTensor):
    """Two tensors over one memory in another order: the same address, and other numbers."""

    any_dtype = True

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first, second)
        self.name = f"{second} is {first} in another order"

    def alter(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        shared = super().alter(op, values)
        first = values[self.first]
        if shared is None or first.dim() < 2 or min(first.shape[-2:]) < 2:
            return None
        rows = first.contiguous()
        other = rows.view(*rows.shape[:-2], *rows.shape[:-3:-1]).transpose(-1, -2)
        return if_allowed(op, {**values, self.first: rows, self.second: other})


class ChangedInPlace(Circumstance):
    """The kernel has seen these tensors before with other contents, which it must not remember."""

    name = "changed in place after a call"

    def before(self, kernel: Kernel, values: dict[str, Any],
               other: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        tensors = {n: t for n, t in values.items() if isinstance(t, Tensor)}
        others = other()
        if any(not isinstance(others[n], Tensor) or others[n].shape != t.shape
               or (0 in t.stride() and t.numel() > 1)
               for n, t in tensors.items()):
            return None
        for _ in range(2):
            call(kernel, values)
        for name, t in tensors.items():
            t.copy_(others[name])
        return {**others, **tensors}


class ChangedParameters(ChangedInPlace):
    """The same of tensors that are Parameters, as weights are: some caches are for them alone."""

    name, any_dtype = "parameters changed in place after a call", True

    def before(self, kernel: Kernel, values: dict[str, Any],
               other: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        # frozen: torch may choose another kernel for what wants a gradient
        weights = {n: torch.nn.Parameter(t, requires_grad=False) for n, t in values.items()
                   if n != kernel.op.main_tensor and isinstance(t, Tensor)
                   and t.is_floating_point() and t.dtype.itemsize > 1}
        return super().before(kernel, {**values, **weights}, other) if weights else None


class AfterAnotherCall(Circumstance):
    """The kernel has served other calls before, of the same sizes."""

    name = "after another call"

    def before(self, kernel: Kernel, values: dict[str, Any],
               other: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        call(kernel, other())
        return values


class Autocast(Circumstance):
    """The caller is inside torch.autocast. The dispatcher has cast the tensors already, and calls
    the kernels outside of it; on a GPU torch's own functions would widen some of them."""

    name = "under autocast"

    def alter(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        main = values.get(op.main_tensor)
        if not isinstance(main, Tensor) or main.dtype != torch.bfloat16:
            return None
        return values if op.autocast or not main.is_cuda else None

    def around(self, device: str) -> Any:
        return torch.autocast(torch.device(device).type, dtype=torch.bfloat16)


class InferenceMode(Circumstance):
    name = "in inference mode"

    def before(self, kernel: Kernel, values: dict[str, Any],
               other: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        by_id: dict[int, Tensor] = {}          # inference tensors, as activations are
        return {n: by_id.setdefault(id(v), torch.empty_strided(v.shape, v.stride(), dtype=v.dtype,
                                                               device=v.device)
                                    .copy_(v)) if isinstance(v, Tensor) and 0 not in v.stride()
                else v
                for n, v in values.items()}

    def around(self, device: str) -> Any:
        return torch.inference_mode()


class Repeated(Circumstance):
    name = "eight times"
    runs = 8


class OtherThreadCount(Circumstance):
    """Torch computes with another number of threads: work is divided otherwise."""

    any_dtype = True

    def __init__(self, threads: int) -> None:
        self.threads, self.name = threads, f"with torch.set_num_threads({threads})"

    def around(self, device: str) -> Any:
        return _changed(torch.get_num_threads, torch.set_num_threads, self.threads)


class OtherDefaultDtype(Circumstance):
    """The caller has set another default dtype: a constant that is made without one has it."""

    name, any_dtype = "with torch.set_default_dtype(torch.bfloat16)", True

    def around(self, device: str) -> Any:
        return _changed(torch.get_default_dtype, torch.set_default_dtype, torch.bfloat16)


@contextmanager
def _changed(read: Callable[[], Any], write: Callable[[Any], None], value: Any) -> Iterator[None]:
    """Sets a process-wide value, and puts back the one before."""
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


class ReusedMemory(Circumstance):
    """Tensors that lie where earlier ones lay, which are gone: same address, size and version, and
    the same id of the object where Python gives it again."""

    name = "at the addresses of earlier tensors"

    def before(self, kernel: Kernel, values: dict[str, Any],
               other: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        others = other()
        plain = {n: t for n, t in values.items() if isinstance(t, Tensor) and t.is_contiguous()
                 and t.numel() and t.device.type == "cpu" and isinstance(others[n], Tensor)
                 and others[n].shape == t.shape and others[n].dtype == t.dtype}
        if not plain:
            return None
        memory = {n: (bytearray(t.nbytes + 64), t.dtype, t.shape) for n, t in plain.items()}
        if any(not isinstance(values[n], Tensor) or others[n].shape != values[n].shape
               for n in values if isinstance(others[n], Tensor)):
            return None
        ids: dict[str, int] = {}
        twins: dict[str, Tensor] = {}
        for _ in range(2):                     # the tensors of these calls are gone afterwards
            earlier = {n: _placed(memory[n], others[n]) for n in plain}
            call(kernel, {**others, **earlier})
            ids = {n: id(t) for n, t in earlier.items()}
            # storages of their own over the same memory, made while the objects of others live
            twins = {n: _placed(memory[n], others[n]) for n in plain}
            del earlier
        again = {n: _as_object(ids[n], t) for n, t in twins.items()}
        for n, t in plain.items():
            _placed(memory[n], t)
        return {**values, **again}


class ReusedPlainMemory(ReusedMemory):
    """Likewise, where the earlier tensors changed nothing, as a mask that hides nothing does: what
    is remembered is that they need no look."""

    name = "at the addresses of earlier tensors that changed nothing"

    def before(self, kernel: Kernel, values: dict[str, Any],
               other: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        plain = {p.name: _neutral(p.name, t) for p in kernel.op.params if not p.required
                 and isinstance(t := values[p.name], Tensor)
                 and (t.dtype == torch.bool or (t.is_floating_point() and t.dtype.itemsize > 1))}
        return super().before(kernel, values, lambda: {**values, **plain}) if plain else None


def _neutral(name: str, t: Tensor) -> Tensor:
    """Returns what hides nothing, adds nothing or multiplies by one."""
    adds = t.dtype != torch.bool and any(word in name for word in ("mask", "bias", "slopes"))
    return torch.zeros_like(t) if adds else torch.ones_like(t)


def _as_object(wanted: int, t: Tensor) -> Tensor:
    """Returns the tensor as another object, of that id if one of some gets it."""
    others = []
    for _ in range(OBJECTS):
        others.append(t.detach())              # which are kept, else the next one has its id again
        if id(others[-1]) == wanted:
            break
    return others[-1]


def _placed(memory: tuple[bytearray, torch.dtype, torch.Size], contents: Tensor) -> Tensor:
    """Returns a tensor of its own over the memory, with these contents. Writing the memory leaves
    no trace in a version."""
    buffer, dtype, shape = memory
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        address = torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()
        offset = -address % 64
        raw = contents.contiguous().reshape(-1).view(torch.uint8)
        torch.frombuffer(buffer, dtype=torch.uint8, offset=offset, count=raw.numel()).copy_(raw)
        code = torch.uint8 if dtype.itemsize == 1 else dtype
        tensor = torch.frombuffer(buffer, dtype=code, offset=offset,
                                  count=contents.numel()).reshape(shape)
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


class FarApart(Circumstance):
    """Rows of one tensor span 2^31 elements. This takes gigabytes of address space, not of memory.
    cuBLAS counts in 32 bits, and raises where two rows are so far apart."""

    may_be_refused = True

    def __init__(self, tensor: str) -> None:
        self.tensor, self.name = tensor, f"{tensor} with rows 2^31 elements apart"

    def alter(self, op: Op, values: dict[str, Any]) -> dict[str, Any] | None:
        t = values[self.tensor]
        distant = with_distant_rows(t) if isinstance(t, Tensor) else None
        return None if distant is None else {**values, self.tensor: distant}

    def as_formula_takes(self, values: dict[str, Any]) -> dict[str, Any]:
        return {**values, self.tensor: values[self.tensor].contiguous()}


def broadcast_checks(kernel: Kernel, cells: Sequence[Cell], device: str,
                     seed: int) -> Iterator[Callable[[], CaseResult]]:
    """Yields each tensor that may be broadcast expanded by the caller, once for each of the
    dimensions in which it is one: a mask of heads, of samples, of both."""
    op, seen = kernel.op, set[Any]()
    for case, dtype in cells:
        if dtype != op.dtypes[0] or case not in op.cases or "stride" in case:
            continue
        for name, t in case_tensors(op, case, dtype, device, seed).items():
            key = name, tuple(n == 1 for n in t.shape)
            if key in seen or 1 not in t.shape or case_refusals(kernel, case, dtype, device, seed):
                continue
            circumstance = Broadcast(name)
            if circumstance.alter(op, case_values_to_read(op, case, dtype, device,
                                                          seed)) is not None:
                seen.add(key)
                yield partial(check_case, kernel, case, dtype, device, seed, circumstance)


def circumstances(op: Op, lane: str) -> Iterator[Circumstance]:
    """Yields the circumstances of a lane: quick has each kind, full every layout of every tensor.
    """
    yield from (ChangedInPlace(), ChangedParameters(), AfterAnotherCall(), ReusedMemory(),
                ReusedPlainMemory(), Autocast(), InferenceMode(), RecordingGradients(), GradMode(),
                RecordingComputed(), GivenParameters(),
                Repeated(), OtherThreadCount(3))
    if not op.tensors:
        yield from text_circumstances(op)
        return
    yield from (OtherThreadCount(12), OtherDefaultDtype(), WrittenUnseen())
    if lane != "quick":
        yield from (OtherThreadCount(n) for n in (1, 2, 4, 7, 16))
        yield from (c for c, _ in content_circumstances(op))
        yield from state_circumstances(op)
    yield from (UnusualValues(how) for how in (
        "zeros", "one sign", "small numbers", "one loud number"))
    if op.main_tensor == "logits":
        yield UnusualValues("numbers far below zero")
    main = op.same_dtype or op.differentiable or (op.main_tensor,)
    yield from (shared(a, b) for i, a in enumerate(main) for b in main[i + 1:]
                for shared in (SharedTensor, SharedMemory))
    yield from argument_circumstances(op)
    for name in op.tensors:
        yield from tensor_circumstances(op, name, lane)


def tensor_circumstances(op: Op, name: str, lane: str) -> Iterator[Circumstance]:
    """Yields how one tensor may lie in memory: in other layouts, misaligned, expanded, far apart.
    """
    layouts = LAYOUTS if lane != "quick" else (
        "sparse", "transposed", "transposed part", "offset")
    yield from (OtherLayout(name, layout) for layout in layouts)
    if lane != "quick":
        yield from (MemoryOrder(name, a, b) for a, b in combinations(range(4), 2))
        yield from (Shifted(name, first) for first in (True, False))
    yield from (Expanded(name, dim) for dim in range(5))
    yield from (Narrowed(name, dim) for dim in range(4))
    yield from (Broadcast(name), OtherSigns(name))
    yield FarApart(name)
