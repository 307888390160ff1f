"""The facts of a call that is only described, read from meta tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..dispatch import tracing
from ..operate import calls as described
from ..operate import inspection
from ..spec.call import Call, TensorSpec
from ..spec.errors import InvalidCall
from ..spec.op import Op
from ..world.snapshot import World
from .table import Facts


def facts_of(call: Call, world: World, kind: str) -> tuple[Op, dict[str, Any]]:
    """Return the op of a call and its facts on a device of this kind, read from meta tensors."""
    dispatcher = inspection.dispatcher_of(call.op)
    values = _values(dispatcher.op, call)
    with torch.set_grad_enabled(call.grad):
        if dispatcher.op.canonical is not None:
            redirect = dispatcher.op.canonical(dict(values))
            if redirect is not None:
                dispatcher = inspection.dispatcher_of(redirect.op)
                values = {p.name: redirect.values.get(p.name, p.default)
                          for p in dispatcher.op.params}
        facts = dispatcher.facts(tuple(values[n] for n in dispatcher.names), world)
    facts["device"] = kind
    facts.update(assumed_alignment(values, facts))
    return dispatcher.op, facts


def assumed_alignment(values: Mapping[str, Any], facts: Facts) -> dict[str, int]:
    """Return the alignment of tensors without memory, as if torch had allocated them."""
    alignments = {}
    for name, value in values.items():
        if isinstance(value, Tensor) and f"{name}.alignment" in facts:
            size = value.element_size()
            strides = ((value.shape[-1],) if value.is_contiguous() and value.dim() > 1
                       else value.stride()[:-1])
            bits = 128
            for step in (value.storage_offset(), *strides):
                bits |= int(tracing.hint(step)) * size
            alignments[f"{name}.alignment"] = bits & -bits
    return alignments


def _values(op: Op, call: Call) -> dict[str, Any]:
    if call.case is not None:
        values = described.make_values(op, call)
        return {n: v.to("meta") if isinstance(v, Tensor) else v for n, v in values.items()}
    plain = {n: v for n, v in call.arguments.items() if not isinstance(v, TensorSpec)}
    values = described.make_values(op, replace(call, arguments={**plain, **{
        n: None for n in call.arguments if n not in plain}}, grad=False))
    for name, spec in call.arguments.items():
        if not isinstance(spec, TensorSpec):
            continue
        dtype = getattr(torch, spec.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise InvalidCall(
                f"lz.{op.name}: {name}: there is no dtype {spec.dtype!r} in this torch")
        tensor = (torch.empty(spec.shape, dtype=dtype, device="meta") if spec.strides is None
                  else torch.empty_strided(spec.shape, spec.strides, dtype=dtype, device="meta"))
        wants = call.grad and name in op.differentiable and dtype.is_floating_point
        values[name] = tensor.requires_grad_() if wants else tensor
    return values
