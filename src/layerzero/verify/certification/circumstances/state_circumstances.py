"""What a kernel may have kept of earlier calls, in ways that only some calls show: contents that
change in inference mode or while gradients are recorded, after many calls, of parameters without a
version; tensors that are parts of one; results that come back as inputs.

They are for the longer lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ....backends._packing import PACKED
from ....spec.kernel import Kernel
from ....spec.op import Op
from ...cases.generated import if_allowed
from ...kernel.circumstance import Circumstance
from ...kernel.contract import call, results_of

Values = dict[str, Any]
Other = Callable[[], Values]
CALLS = 40                                     # after which a kernel takes a weight for constant


def _tensors(values: Values, others: Values) -> dict[str, Tensor] | None:
    """Returns the tensors that can be given the contents of others in place; None if one cannot."""
    tensors = {n: t for n, t in values.items() if isinstance(t, Tensor)}
    if any(not isinstance(others[n], Tensor) or others[n].shape != t.shape
           or (0 in t.stride() and t.numel() > 1) for n, t in tensors.items()):
        return None
    return tensors


def _write(tensors: dict[str, Tensor], others: Values) -> None:
    with torch.no_grad():
        for name, t in tensors.items():
            t.copy_(others[name])


class ChangedInMode(Circumstance):
    """The contents change in place between calls in a mode in which a kernel may keep what it does
    not keep elsewhere: inference tensors have no version, autocast has a cache of its own."""

    any_dtype = True

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.name = f"changed in place after a call {mode}"

    def alter(self, op: Op, values: Values) -> Values | None:
        name = op.main_tensor                  # the weights are frozen, as beside an adapter
        t = values.get(name)
        if self.mode == "under autocast":      # the dispatcher has cast them already
            return values if isinstance(t, Tensor) and t.dtype == torch.bfloat16 else None
        if self.mode != "while gradients are recorded":
            return values
        if name not in op.differentiable or not isinstance(t, Tensor) or not t.is_floating_point():
            return None
        return {**values, name: t.detach().requires_grad_()}

    def before(self, kernel: Kernel, values: Values, other: Other) -> Values | None:
        with torch.inference_mode(False):      # others are given the same tensors
            others = other()
        if self.mode == "in inference mode":   # inference tensors, as weights loaded there are
            values = {n: v.clone() if isinstance(v, Tensor) and 0 not in v.stride() else v
                      for n, v in values.items()}
        tensors = _tensors(values, others)
        if tensors is None:
            return None
        for _ in range(2):
            call(kernel, values)
        _write(tensors, others)
        return {**others, **tensors}

    def around(self, device: str) -> Any:
        if self.mode == "in inference mode":
            return torch.inference_mode()
        if self.mode == "while gradients are recorded":
            return torch.enable_grad()
        return torch.autocast(torch.device(device).type, dtype=torch.bfloat16)


class ChangedLater(Circumstance):
    """The contents change in place after many calls: a kernel may pack what it was given often."""

    name, any_dtype = f"changed in place after {CALLS} calls", True

    def before(self, kernel: Kernel, values: Values, other: Other) -> Values | None:
        others = other()
        tensors = _tensors(values, others)
        if tensors is None:
            return None
        for _ in range(CALLS):
            call(kernel, values)
        _write(tensors, others)
        return {**others, **tensors}


class ParametersWrittenUnseen(Circumstance):
    """Parameters, as weights are, written through `.data`: no version tells. The library's own
    cache of packed weights is told by the call that is documented for it."""

    name, any_dtype = "parameters changed in place after a call without a version", True

    def before(self, kernel: Kernel, values: Values, other: Other) -> Values | None:
        others = other()
        weights = {n: torch.nn.Parameter(t, requires_grad=False) for n, t in values.items()
                   if n != kernel.op.main_tensor and isinstance(t, Tensor)
                   and t.is_floating_point() and t.dtype.itemsize > 1}
        values = {**values, **weights}
        tensors = _tensors(values, others)
        if not weights or tensors is None:
            return None
        for _ in range(2):
            call(kernel, values)
        # what else there is goes with them, and is written where it is seen
        _write({n: t.data if n in weights else t for n, t in tensors.items()}, others)
        PACKED.forget(*weights.values())
        return {**others, **tensors}


class PartsOfOne(Circumstance):
    """Each tensor is a part of one that has those of an earlier call too, as the weights of layers
    that are stacked: the tensor that they are parts of does not tell which."""

    name, any_dtype = "parts of one tensor with those of an earlier call", True

    def before(self, kernel: Kernel, values: Values, other: Other) -> Values | None:
        others = other()
        tensors = _tensors(values, others)
        if tensors is None:
            return None
        stacks = {n: torch.stack((others[n].to(t.dtype), t)) for n, t in tensors.items()
                  if t.is_contiguous() and t.numel() and others[n].dtype == t.dtype}
        if not stacks:
            return None
        for _ in range(2):
            call(kernel, {**others, **{n: s[0] for n, s in stacks.items()}})
        return {**values, **{n: s[1] for n, s in stacks.items()}}


class OwnResults(Circumstance):
    """Results come back as inputs, as states do: they are the caller's, who may still want them."""

    name = "given its own results"

    def before(self, kernel: Kernel, values: Values, other: Other) -> Values | None:
        given = dict(values)
        results = [r for r in results_of(call(kernel, values)) if isinstance(r, Tensor)]
        for result in results:
            name = next((n for n, t in given.items() if t is values[n] and isinstance(t, Tensor)
                         and t.shape == result.shape and t.dtype == result.dtype and t.numel()
                         and t.is_floating_point() and t.dtype.itemsize > 1), None)
            if name is not None and bool(result.isfinite().all()):
                given[name] = result
        if all(given[n] is values[n] for n in values):
            return None
        return if_allowed(kernel.op, given)


def state_circumstances(op: Op) -> Iterator[Circumstance]:
    yield from (ChangedInMode("in inference mode"), ChangedLater(), ParametersWrittenUnseen(),
                PartsOfOne(), OwnResults())
    if op.differentiable:
        yield ChangedInMode("while gradients are recorded")
    if op.autocast:
        yield ChangedInMode("under autocast")
