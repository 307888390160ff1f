"""FlashInfer on one dense sequence, and its layers: attention, norms, rope, sampling."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...ops.add_rms_norm import OP as add_rms_norm
from ...ops.attention import OP as attention
from ...ops.formulas.sampling import draw, filters, kept, random_numbers, scores_of, weights_of
from ...ops.rms_norm import OP as rms_norm
from ...ops.rope import OP as rope
from ...ops.sample import OP as sample
from ...spec.kernel import Kernel
from ...spec.reason import Code
from ...spec.rules import (
    Condition,
    absent,
    aligned,
    any_of,
    at_least,
    at_most,
    contiguous,
    dtypes,
    equals,
    generations,
    multiple_of,
    on,
    one_of,
    present,
    unit_stride,
    when,
)
from .._packing import PACKED
from .common import HALF, HARDWARE, HEAD_DIMS, LIBRARY, LN2, TRIED

GROUPS = (1, 2, 3, 4, 6, 8, 16)                # query heads for a KV head that decode is instantiated for
MOST_TOP_K = 1024


# Attention over one sequence.

def _prefill(library: str) -> Callable[..., Any]:
    from flashinfer import single_prefill_with_kv_cache as prefill

    def run(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, scale: float | None = None, *,
            window_left: int = -1, window_right: int = -1, softcap: float = 0.0, return_lse: bool = False) -> Any:
        found = prefill(query[0], key[0], value[0], causal=is_causal, kv_layout="NHD", sm_scale=scale,
                        window_left=window_left, logits_soft_cap=softcap, backend=library, return_lse=return_lse)
        return (found[0][None], (found[1].t() * LN2)[None]) if return_lse else found[None]

    return run


def _prefill_fa2() -> Callable[..., Any]:
    return _prefill("fa2")


def _prefill_fa3() -> Callable[..., Any]:
    return _prefill("fa3")


def _decode() -> Callable[..., Any]:
    from flashinfer import single_decode_with_kv_cache as decode

    def run(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, scale: float | None = None, *,
            layout: str = "bhsd", window_left: int = -1, window_right: int = -1, softcap: float = 0.0,
            return_lse: bool = False) -> Any:
        found = decode(query.flatten(0, 2), key[0], value[0], kv_layout="HND" if layout == "bhsd" else "NHD",
                       sm_scale=scale, window_left=window_left, logits_soft_cap=softcap, return_lse=return_lse)
        out = (found[0] if return_lse else found).view(query.shape)
        return (out, (found[1] * LN2)[None, :, None]) if return_lse else out

    return run


# Norms. The library writes the sum of the fused one into its inputs, so it is given copies.

def _rms_norm() -> Callable[..., Any]:
    from flashinfer.norm import gemma_rmsnorm, rmsnorm

    def run(x: Tensor, weight: Tensor, eps: float = 1e-6, *, offset: float = 0.0) -> Tensor:
        norm = gemma_rmsnorm if offset else rmsnorm
        out: Tensor = norm(x.view(-1, x.shape[-1]), weight, eps)
        return out.view(x.shape)

    return run


def _add_rms_norm() -> Callable[..., Any]:
    from flashinfer.norm import fused_add_rmsnorm

    def run(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
        out, total = x.clone(), residual.clone()
        fused_add_rmsnorm(out.view(-1, x.shape[-1]), total.view(-1, x.shape[-1]), weight, eps)
        return out, total

    return run


def _rope() -> Callable[..., Any]:
    from flashinfer.rope import apply_rope_with_cos_sin_cache

    def run(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, *, style: str,
            layout: str = "bhsd", rotary_dim: int | None = None) -> tuple[Tensor, Tensor]:
        if layout == "bhsd":
            turned = run(q.transpose(-3, -2), k.transpose(-3, -2), cos, sin, position_ids, style=style, layout="bshd")
            return turned[0].transpose(-3, -2), turned[1].transpose(-3, -2)
        *batch, seq, _, head_dim = q.shape
        rows = math.prod(batch)
        table = PACKED.get("flashinfer.rope", _joined, cos, sin)
        table = _joined(cos, sin) if table is None else table
        if position_ids is not None:
            at = position_ids.expand(*batch, seq).reshape(-1)
        else:
            own = cos.dim() == 3 and cos.shape[0] > 1          # a row of the table for every token of every sequence
            at = torch.arange(rows * seq if own else seq, device=q.device)
            at = at if own else at.repeat(rows)
        turned = apply_rope_with_cos_sin_cache(at, q.reshape(rows * seq, -1), k.reshape(rows * seq, -1), head_dim,
                                               table, style == "rotate_half")
        return turned[0].view(q.shape), turned[1].view(k.shape)

    return run


def _joined(cos: Tensor, sin: Tensor) -> Tensor:
    """One table (positions, rotary_dim) in float32, cosines first."""
    return torch.cat((cos.reshape(-1, cos.shape[-1]), sin.reshape(-1, sin.shape[-1])), -1).float()


def _sample() -> Callable[..., Any]:
    """Its radix top-k finds the candidates, ties by the lowest id; filters and draw among them are the contract's.

    Its own samplers draw from random numbers of their own, so another token than the contract says.
    """
    from flashinfer.topk import TopKTieBreak
    from flashinfer.topk import top_k as highest

    def run(logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, *,
            uniforms: Tensor | None = None, seed: int | None = None, seed_rows: Tensor | None = None, offset: int = 0,
            generator: torch.Generator | None = None, from_probs: bool = False, return_logprobs: bool = False) -> Any:
        batch, vocab = logits.shape
        uniform = random_numbers(batch, 1, logits.device, uniforms, seed, seed_rows, offset, generator)
        by = filters(vocab, temperature, top_k, top_p, min_p, None, None, None, None, uniform.dtype)
        scores = scores_of(logits.detach(), temperature, None, from_probs)
        values, ids = highest(scores, by.most, deterministic=True, tie_break=TopKTieBreak.SMALL)
        ids, order = ids.sort(-1)                              # by id first, so that the stable sort ranks ties by it
        values = values.gather(1, order)
        ranked, rank = values.sort(dim=-1, descending=True, stable=True)
        weights = weights_of(ranked, from_probs)
        weights = torch.zeros_like(weights).scatter(1, rank, torch.where(kept(weights, by), weights, 0.0))
        column, total = draw(weights, uniform), weights.sum(-1, keepdim=True)
        tokens = torch.where(total > 0, ids.gather(1, column), -1)[:, 0]
        if not return_logprobs:
            return tokens
        chosen = weights.gather(1, column)
        return tokens, torch.where(total > 0, chosen.log() - total.log(), -torch.inf)[:, 0].to(scores.dtype)

    return run


ALIGNED = one_of("causal_align", "bottom_right", code=Code.CAUSAL_ALIGNMENT_UNSUPPORTED)
ALIGNED_OR_SQUARE = any_of(equals("causal_offset", 0), ALIGNED)
ONE_SEQUENCE: tuple[Condition, ...] = (
    *HARDWARE, HALF, equals("batch", 1, Code.SHAPE_UNSUPPORTED),
    one_of("head_dim", *HEAD_DIMS, code=Code.HEAD_DIM_INVALID), equals("head_dim_gap", 0, Code.HEAD_DIM_INVALID),
    at_least("kv_heads", 1, Code.EMPTY_INPUT), at_least("seq_k", 1, Code.EMPTY_INPUT),
    at_least("seq_q", 1, Code.EMPTY_INPUT), absent("attn_mask.dtype", Code.MASK_UNSUPPORTED),
    absent("alibi_slopes.dtype", Code.ALIBI_UNSUPPORTED), equals("dropout_p", 0.0, Code.DROPOUT_UNSUPPORTED),
    # It takes the largest score before it scales them.
    at_least("scale", 1e-30, Code.SCALE_UNSUPPORTED),
    when(on("is_causal"), ALIGNED_OR_SQUARE), when(at_least("window_left", 0), ALIGNED_OR_SQUARE),
    # A right edge is that of causality or none.
    any_of(equals("window_right", -1), on("is_causal", Code.WINDOW_UNSUPPORTED)),
    # A row that sees no key is not written.
    when(on("is_causal"), at_least("causal_offset", 0, Code.SEQ_LEN_UNSUPPORTED)),
    *(unit_stride(name) for name in ("query", "key", "value")), *(aligned(n, 16) for n in ("query", "key", "value")))
_SAME_WEIGHT: tuple[Condition, ...] = tuple(   # the kernel takes its bytes for the input's dtype, whatever they are
    when(equals("dtype", d), one_of("weight.dtype", d, code=Code.DTYPE_UNSUPPORTED)) for d in ("float16", "bfloat16"))
NORM: tuple[Condition, ...] = (
    *HARDWARE, HALF, present("weight.dtype", Code.FEATURE_UNSUPPORTED), *_SAME_WEIGHT, contiguous("x"),
    contiguous("weight"), aligned("x", 16), aligned("weight", 16), at_least("rows", 1, Code.EMPTY_INPUT),
    multiple_of("hidden", 8), at_most("hidden", 16384))
NO_ROWS: tuple[Condition, ...] = tuple(
    absent(f"{name}.dtype") for name in (
        "history", "token_counts", "temperature_rows", "top_k_rows", "top_p_rows", "min_p_rows",
        "repetition_penalty_rows", "presence_penalty_rows", "frequency_penalty_rows"))

WORKSPACE = "32 * 1024 * 1024"                 # bytes, taken anew in every call of one sequence

KERNELS = (
    Kernel("flashinfer.prefill_fa2", attention, _prefill_fa2, ONE_SEQUENCE, variants=("bshd",), prior=10.0,
           overhead_us=25.0, workspace=WORKSPACE, **TRIED),
    Kernel("flashinfer.prefill_fa3", attention, _prefill_fa3, (*ONE_SEQUENCE, generations("hopper")),
           variants=("bshd",), prior=16.0, overhead_us=25.0, workspace=WORKSPACE, **TRIED),
    Kernel("flashinfer.decode", attention, _decode, (
        *ONE_SEQUENCE, equals("seq_q", 1, Code.SEQ_LEN_UNSUPPORTED),
        one_of("group", *GROUPS, code=Code.GQA_UNSUPPORTED),
        *(contiguous(name) for name in ("query", "key", "value"))),        # it reads no strides
        variants=("bhsd", "bshd"), prior=9.0, overhead_us=25.0, workspace=WORKSPACE, **TRIED,
        note="without tensor cores; with many query heads for a KV head prefill_fa2 is the quicker one"),
    Kernel("flashinfer.rms_norm", rms_norm, _rms_norm, (*NORM, one_of("offset", 0.0, 1.0)), prior=5.0,
           overhead_us=12.0, **TRIED),
    Kernel("flashinfer.add_rms_norm", add_rms_norm, _add_rms_norm, (
        *NORM, contiguous("residual"), aligned("residual", 16)), prior=2.5, overhead_us=20.0, **TRIED,
        note="the library writes into its inputs, so both are copied first"),
    Kernel("flashinfer.rope", rope, _rope, (
        *HARDWARE, HALF, present("k.dtype", Code.FEATURE_UNSUPPORTED), contiguous("q"), contiguous("k"),
        aligned("q", 16), aligned("k", 16), one_of("head_dim", *HEAD_DIMS, code=Code.HEAD_DIM_INVALID),
        multiple_of("half", 8), at_least("seq", 1, Code.EMPTY_INPUT), at_least("batch", 1, Code.EMPTY_INPUT),
        at_least("kv_heads", 1, Code.EMPTY_INPUT)), variants=("bhsd", "bshd"), prior=4.0, overhead_us=30.0, **TRIED,
        note="cos and sin are joined into one table, once for as long as they live unchanged"),
    Kernel("flashinfer.sample", sample, _sample, (
        *HARDWARE, dtypes("float32", "float16", "bfloat16"), at_least("batch", 1, Code.EMPTY_INPUT),
        at_least("top_k", 2, Code.FEATURE_UNSUPPORTED), at_most("top_k", MOST_TOP_K, Code.FEATURE_UNSUPPORTED),
        at_least("temperature", 1e-30, Code.FEATURE_UNSUPPORTED), *NO_ROWS),
        prior=3.0, overhead_us=120.0, workspace="8 * batch * vocab", **LIBRARY,
        note="top-k by its radix selection; its own samplers draw other tokens than the contract"),
)
