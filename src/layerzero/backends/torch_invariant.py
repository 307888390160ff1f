"""Layers whose results keep their bits, whatever else is in the batch and on this rank.

A library's product of many rows adds up in another order than that of one, so a row's result
depends on how many there are. Attention has kernels that do not: those that compute each block of
queries of each head by itself, over all keys in order. They serve where torch lets them be called
so. Everything else is one row, or one head of one sequence, at a time: slow for many, but it serves
on every device, with gradients, and where nothing is compiled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..ops.attention import OP as attention
from ..ops.formulas.common import FLOATS, position_terms
from ..ops.formulas.moe import activate
from ..ops.linear import OP as linear
from ..spec import rules as r
from ..spec.kernel import SDPA_BACKENDS, Kernel
from ..spec.reason import Code
from ._sequences import EFFICIENT_DIM, POSITIVE_SCALE

ALIGNMENT = 64                                 # bytes, of what torch allocates on a CPU
MAX_GRID = 65535                               # sequences of one launch, and heads
FLASH, EFFICIENT = SDPA_BACKENDS[:2]


def _for_each_row(t: Tensor | None) -> Callable[[], Any]:
    """Returns a function that gives the tensor for one row. Where it wants a gradient, the rows
    share a copy in float32: autograd adds their gradients there, and rounds the sum once."""
    if t is None or t.dtype.itemsize > 2 or not (t.requires_grad and torch.is_grad_enabled()):
        return lambda: t
    upcast = t.float()
    return lambda: upcast.to(t.dtype)


def _aligned_parts(t: Tensor, dtype: torch.dtype) -> Sequence[Tensor]:
    """Returns copies of t[0], t[1] and so on that are aligned as every tensor of its own is: what a
    library computes may depend on that. On the CPU they are parts of one copy."""
    if t.device.type != "cpu":
        return [part.to(dtype, copy=True) for part in t.unbind()]
    flat = t.flatten(1)
    padding = -flat.shape[1] % (ALIGNMENT // dtype.itemsize)
    copied = F.pad(flat.to(dtype), (0, padding))[:, :flat.shape[1]]
    return copied.unflatten(1, t.shape[1:]).unbind()


def _linear() -> Callable[..., Any]:
    product = torch.mm

    def run(x: Tensor, weight: Tensor, bias: Tensor | None = None,
            activation: str | None = None) -> Tensor:
        # rows that are 2^31 elements apart are more than cuBLAS counts
        far_apart = weight.is_cuda and weight.stride(0) >= (1 << 31) - 1
        transposed_of = _for_each_row((weight.contiguous() if far_apart else weight).t())
        bias_of = _for_each_row(bias)
        rows = [product(row, transposed_of())
                for row in _aligned_parts(x.reshape(-1, 1, x.shape[-1]), x.dtype)]
        if activation is not None:
            rows = [activate(row if bias is None else row + bias_of(), activation) for row in rows]
        out = torch.cat(rows).view(*x.shape[:-1], weight.shape[0])
        # a sum of two has the same bits wherever it is computed
        return out if bias is None or activation is not None else out + bias

    return run


def _attention() -> Callable[..., Any]:
    product = torch.mm

    def run(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False,
            scale: float | None = None, *, causal_align: str | None = None, window_left: int = -1,
            window_right: int = -1, softcap: float = 0.0) -> Tensor:
        batch, heads, seq_q, dim = query.shape
        group, factor = heads // key.shape[1], dim ** -0.5 if scale is None else scale
        _, hidden = position_terms(seq_q, key.shape[2], is_causal, causal_align, window_left,
                                   window_right, None, query.device)
        # a copy of its own, in float32 or wider: torch's half types are slow on many CPUs
        acc_dtype = torch.promote_types(query.dtype, torch.float32)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            scores = product(query, key.t()) * factor
            if softcap > 0.0:
                scores = softcap * torch.tanh(scores / softcap)
            if hidden is not None:
                scores = scores.masked_fill(hidden, -math.inf)
            sees_nothing = (scores == -math.inf).all(-1, keepdim=True)
            return product(torch.softmax(scores, -1).masked_fill(sees_nothing, 0.0), value)

        queries, keys, values = (_aligned_parts(t.flatten(0, 1), acc_dtype)
                                 for t in (query, key, value))
        out = [attend(q, keys[i // group], values[i // group]) for i, q in enumerate(queries)]
        return torch.stack(out).view(batch, heads, seq_q, value.shape[3]).to(query.dtype)

    return run


def _attention_wide() -> Callable[..., Any]:
    """Runs torch's flash attention of a CPU in float32: in half types it packs keys or not,
    depending on how many heads there are for a thread."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

    def run(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False,
            scale: float | None = None, *, causal_align: str | None = None, window_left: int = -1,
            window_right: int = -1) -> Tensor:
        acc_dtype = torch.promote_types(query.dtype, torch.float32)
        mask = None
        if window_left >= 0 or window_right >= 0 or (is_causal and causal_align == "bottom_right"
                                                     and query.shape[2] != key.shape[2]):
            _, hidden = position_terms(query.shape[2], key.shape[2], is_causal, causal_align,
                                       window_left, window_right, None, query.device)
            assert hidden is not None
            mask = torch.zeros(hidden.shape, dtype=acc_dtype).masked_fill_(hidden, -math.inf)
            mask, is_causal = mask[(None,) * (4 - mask.dim())], False
        q, k, v = (t.to(acc_dtype) for t in (query, key, value))
        out: Tensor = flash(q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale)[0]
        return out.to(query.dtype)

    return run


def _attention_packed() -> Callable[..., Any]:
    """FlashAttention's entry for packed sequences: it never splits the keys of a head, as the one
    for a batch does if there are few heads."""
    flash = torch.ops.aten._flash_attention_forward.default

    def run(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False,
            scale: float | None = None, *, window_left: int = -1, window_right: int = -1) -> Tensor:
        batch, seq_q, heads, dim = query.shape
        seq_k = key.shape[1]
        if heads > MAX_GRID:
            repeated = (t.repeat_interleave(heads // t.shape[2], 2) for t in (key, value))
            parts = zip(*(t.split(MAX_GRID, 2) for t in (query, *repeated)))
            return torch.cat([run(q, k, v, is_causal, scale, window_left=window_left,
                                  window_right=window_right) for q, k, v in parts], 2)
        starts = [torch.arange(0, (batch + 1) * n, n, dtype=torch.int32, device=query.device)
                  for n in (seq_q, seq_k)]
        # at least two queries, or flash attention would fold heads into rows and split the keys;
        # as many keys, or it would take a longer window for none
        out: Tensor = flash(*(_packed(t) for t in (query, key, value)), *starts, max(seq_q, 2),
                            max(seq_q, seq_k), 0.0, is_causal, False, scale=scale,
                            window_size_left=window_left, window_size_right=window_right)[0]
        return out.view(batch, seq_q, heads, dim)

    return run


def _packed(t: Tensor) -> Tensor:
    t = t.reshape(-1, *t.shape[2:])
    return t.clone(memory_format=torch.contiguous_format) if _is_unaligned(t) else t


def _is_unaligned(t: Tensor) -> bool:
    """Returns whether a row may begin beside a multiple of 16 bytes, which the kernels load."""
    return any((n * t.element_size()) % 16 for n in (t.storage_offset(), *t.stride()[:-1]))


def _attention_efficient() -> Callable[..., Any]:
    """Returns the memory-efficient kernel: one program for each block of queries of a head."""
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention.default

    def run(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False,
            scale: float | None = None) -> Tensor:
        group = query.shape[1] // key.shape[1]
        if group > 1:
            key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        q, k, v = (t.clone(memory_format=torch.contiguous_format) if _is_unaligned(t) else t
                   for t in (query, key, value))
        parts = [torch.cat([efficient(*some, None, False, 0.0, is_causal, scale=scale)[0]
                            for some in zip(*(t.split(MAX_GRID) for t in heads))])
                 for heads in zip(*(t.split(MAX_GRID, 1) for t in (q, k, v)))]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    return run


HALF = r.dtypes("float16", "bfloat16")
CUDA: tuple[r.Condition, ...] = (r.device("cuda"), r.vendor("nvidia"), r.sm(at_least=80),
                                 r.sm(below=122))
PLAIN: tuple[r.Condition, ...] = (
    r.absent("attn_mask.dtype", Code.MASK_UNSUPPORTED),
    r.absent("alibi_slopes.dtype", Code.ALIBI_UNSUPPORTED),
    r.equals("dropout_p", 0.0, Code.DROPOUT_UNSUPPORTED),
    r.off("return_lse", Code.LSE_UNSUPPORTED),
    r.at_least("batch", 1, Code.EMPTY_INPUT), r.at_least("kv_heads", 1, Code.EMPTY_INPUT))
FLASH_RULES: tuple[r.Condition, ...] = (
    *PLAIN, r.equals("softcap", 0.0, Code.SOFTCAP_UNSUPPORTED),
    r.at_least("seq_q", 1, Code.EMPTY_INPUT), r.at_least("seq_k", 1, Code.EMPTY_INPUT),
    r.unit_stride("query"), r.unit_stride("key"), r.unit_stride("value"))
NO_WINDOW = (r.equals("window_left", -1, Code.WINDOW_UNSUPPORTED),
             r.equals("window_right", -1, Code.WINDOW_UNSUPPORTED))
# Flash counts diagonals from the last key.
BOTTOM_RIGHT = tuple(
    r.any_of(nothing, r.equals("causal_offset", 0),
             r.one_of("causal_align", "bottom_right", code=Code.CAUSAL_ALIGNMENT_UNSUPPORTED))
    for nothing in (r.off("is_causal"), *NO_WINDOW))
SAME_HEAD_DIM = r.equals("head_dim_gap", 0, Code.HEAD_DIM_INVALID)
CAUSAL_SCALE = r.any_of(r.off("is_causal"), POSITIVE_SCALE)
BOTH: dict[str, Any] = {"batch_invariant": True, "tp_invariant": True, "only_invariant": True}

KERNELS = (
    Kernel("torch.linear_each_row", linear, _linear, (
        r.at_least("rows", 1, Code.EMPTY_INPUT), r.at_least("in_features", 1, Code.EMPTY_INPUT),
        # a transposed weight is added up column by column: ten times the eager error (MKL)
        r.unit_stride("weight")),
           prior=0.02, overhead_us=20.0, batch_invariant=True, only_invariant=True,
           note="one row at a time"),
    Kernel("torch.attention_each_head", attention, _attention, PLAIN, prior=0.02, overhead_us=200.0,
           variants=("bhsd",), note="one head of one sequence at a time", **BOTH),
    Kernel("torch.attention_wide", attention, _attention_wide, (
        r.device("cpu"), r.dtypes(*FLOATS), *FLASH_RULES, SAME_HEAD_DIM, CAUSAL_SCALE),
           torch=">=2.9", prior=5.0, overhead_us=10.0, variants=("bhsd",), sdpa_backend=FLASH,
           workspace="4 * (itemsize < 4) * batch * head_dim * (2 * heads * seq_q "
                     "+ 2 * kv_heads * seq_k) + 4 * seq_q * seq_k",
           note="in float32, for half types too", **BOTH),
    Kernel("torch.attention_packed", attention, _attention_packed, (
        *CUDA, HALF, *FLASH_RULES, SAME_HEAD_DIM, POSITIVE_SCALE, r.multiple_of("head_dim", 8),
        r.at_most("head_dim", 256), *BOTTOM_RIGHT),
           prior=12.0, overhead_us=30.0, variants=("bshd",), sdpa_backend=FLASH,
           differentiable=False, note="never splits the keys of a head", **BOTH),
    Kernel("torch.attention_each_block", attention, _attention_efficient, (
        *CUDA, r.dtypes("float16", "bfloat16", "float32"), *FLASH_RULES, *NO_WINDOW,
        r.multiple_of("head_dim", 8), r.multiple_of("head_dim_v", 8),
        *EFFICIENT_DIM,
        r.any_of(r.off("is_causal"), r.equals("causal_offset", 0),
                 r.one_of("causal_align", None, "top_left",
                          code=Code.CAUSAL_ALIGNMENT_UNSUPPORTED))),
           prior=8.0, overhead_us=20.0, variants=("bhsd",), sdpa_backend=EFFICIENT,
           workspace="itemsize * batch * heads * seq_k * (head_dim + head_dim_v)",
           differentiable=False, note="one program for each block of queries of a head", **BOTH),
)
