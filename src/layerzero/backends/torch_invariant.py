"""Layers whose results keep their bits, one row or one head at a time.

A library's product of many rows adds up in another order than that of one, so a row's result
depends on how many there are. Here every row, or every head of every sequence, is a call of its own
with the same sizes, whatever else is in the batch. This is slow for many rows; it serves on every
device, with gradients, and where nothing is compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ops.attention import OP as attention
from ..ops.linear import OP as linear
from ..spec import rules as r
from ..spec.kernel import Kernel
from ..spec.reason import Code


def _linear() -> Callable[..., Any]:
    reference = linear.reference

    def run(x: Tensor, weight: Tensor, bias: Tensor | None = None,
            activation: str | None = None) -> Tensor:
        # a copy of its own: what a library computes may depend on how a row is aligned
        rows = [reference(row.clone()[None], weight, bias, activation)
                for row in x.reshape(-1, x.shape[-1]).unbind()]
        return torch.cat(rows).view(*x.shape[:-1], weight.shape[0])

    return run


def _attention() -> Callable[..., Any]:
    reference = attention.reference

    def run(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False,
            scale: float | None = None, *, causal_align: str | None = None, window_left: int = -1,
            window_right: int = -1, softcap: float = 0.0) -> Tensor:
        group = query.shape[1] // key.shape[1]
        options = {"is_causal": is_causal, "scale": scale, "causal_align": causal_align,
                   "window_left": window_left, "window_right": window_right, "softcap": softcap}
        # a copy of its own, in float32 or wider: torch's half types are slow on many CPUs
        wide = torch.promote_types(query.dtype, torch.float32)
        heads = [[reference(*(t[b:b + 1, h:h + 1].to(wide, copy=True) for t, h in (
            (query, head), (key, head // group), (value, head // group))), **options)
            for head in range(query.shape[1])] for b in range(query.shape[0])]
        return torch.cat([torch.cat(row, 1) for row in heads]).to(query.dtype)

    return run


KERNELS = (
    Kernel("torch.linear_each_row", linear, _linear, (
        r.at_least("rows", 1, Code.EMPTY_INPUT), r.at_least("in_features", 1, Code.EMPTY_INPUT)),
           prior=0.02, overhead_us=20.0, batch_invariant=True, only_invariant=True,
           note="one row at a time"),
    Kernel("torch.attention_each_head", attention, _attention, (
        r.absent("attn_mask.dtype", Code.MASK_UNSUPPORTED),
        r.absent("alibi_slopes.dtype", Code.ALIBI_UNSUPPORTED),
        r.equals("dropout_p", 0.0, Code.DROPOUT_UNSUPPORTED),
        r.off("return_lse", Code.LSE_UNSUPPORTED),
        r.at_least("batch", 1, Code.EMPTY_INPUT), r.at_least("kv_heads", 1, Code.EMPTY_INPUT)),
        prior=0.02, overhead_us=200.0, variants=("bhsd",), batch_invariant=True, tp_invariant=True,
        only_invariant=True, note="one head of one sequence at a time"),
)
