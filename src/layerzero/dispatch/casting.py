"""Casts of a call's tensors before a kernel is chosen: by autocast, or as the policy allows."""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from torch import Tensor

from ..spec.errors import InvalidCall
from ..spec.op import Adaptation, Op
from ..spec.plan import Transform
from ..spec.reason import Code
from ..world import snapshot as worlds
from ..world.context import Override


def autocast(op: Op, named: dict[str, Any], first: Tensor | None) -> dict[str, Any] | None:
    """Cast as torch does under autocast: to its dtype, or all to the widest one ("promote");
    float64 stays, and so does all of an op that autocast does not know. Returns the arguments by
    name, for a call without autocast, or None if there is none."""
    kind = first.device.type if first is not None else "meta"
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    if not op.autocast:
        return named
    same_dtype = [n for n in op.same_dtype if n in op.differentiable]
    dtype, eligible = torch.get_autocast_dtype(kind), {*(same_dtype or op.differentiable),
                                                       "attn_mask"}
    if op.autocast == "promote":
        dtypes = {named[n].dtype for n in same_dtype if named[n] is not None}
        if len(dtypes) < 2:
            return named
        dtype = reduce(torch.promote_types, dtypes)
    return {n: t.to(dtype) if n in eligible and t is not None and t.is_floating_point()
            and t.dtype != torch.float64
            else t for n, t in named.items()}


def adapt(op: Op, named: dict[str, Any], error: InvalidCall,
          override: Override | None) -> Adaptation | None:
    """Cast mixed dtypes to the first tensor's, or a KV cache as declared; None if forbidden."""
    codes = set(error.codes)
    if (codes != {Code.MIXED_DTYPES} and (codes != {Code.KV_CACHE_DTYPE_MISMATCH}
                                          or op.adapt is None)):
        return None
    setting = worlds.current().selection_context("cpu", override).policy.setting
    if not setting("allow_adaptation") or setting("strict_mode"):
        return None
    if op.adapt is not None and Code.KV_CACHE_DTYPE_MISMATCH in codes:
        return op.adapt(named)
    dtype = named[op.same_dtype[0]].dtype
    casts = {n: named[n].to(dtype) for n in op.same_dtype if named[n] is not None
             and named[n].dtype != dtype}
    return Adaptation({**named, **casts},
                      tuple(Transform("cast", n, t.nbytes) for n, t in casts.items()))
