"""FlashInfer's attention over one dense sequence, norms, rope and sampling."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...ops.add_rms_norm import OP as add_rms_norm
from ...ops.attention import OP as attention
from ...ops.formulas.sampling import (
    draw,
    keep_mask,
    make_filters,
    random_numbers,
    rank_scores,
    token_weights,
)
from ...ops.rms_norm import OP as rms_norm
from ...ops.rope import OP as rope
from ...ops.sample import OP as sample
from ...spec import rules as r
from ...spec.kernel import Kernel
from ...spec.reason import Code
from .._packing import PACKED
from .common import HALF, HARDWARE, HEAD_DIMS, LIBRARY, LN2, TESTED

# query heads per KV head that decode is instantiated for
GROUPS = (1, 2, 3, 4, 6, 8, 16)
MAX_TOP_K = 1024


# Attention over one sequence.

def _prefill(library: str) -> Callable[..., Any]:
    from flashinfer import single_prefill_with_kv_cache as prefill

    def run(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False,
            scale: float | None = None, *, window_left: int = -1, window_right: int = -1,
            softcap: float = 0.0, return_lse: bool = False) -> Any:
        result = prefill(query[0], key[0], value[0], causal=is_causal, kv_layout="NHD",
                         sm_scale=scale, window_left=window_left, logits_soft_cap=softcap,
                         backend=library, return_lse=return_lse)
        return (result[0][None], (result[1].t() * LN2)[None]) if return_lse else result[None]

    return run


def _prefill_fa2() -> Callable[..., Any]:
    return _prefill("fa2")


def _prefill_fa3() -> Callable[..., Any]:
    return _prefill("fa3")


def _decode() -> Callable[..., Any]:
    from flashinfer import single_decode_with_kv_cache as decode

    def run(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False,
            scale: float | None = None, *, layout: str = "bhsd", window_left: int = -1,
            window_right: int = -1, softcap: float = 0.0, return_lse: bool = False) -> Any:
        result = decode(query.flatten(0, 2), key[0], value[0], kv_layout="HND" if layout == "bhsd"
                        else "NHD", sm_scale=scale, window_left=window_left,
                        logits_soft_cap=softcap, return_lse=return_lse)
        out = (result[0] if return_lse else result).view(query.shape)
        return (out, (result[1] * LN2)[None, :, None]) if return_lse else out

    return run


# Norms. The fused one overwrites its inputs, so it gets copies.

def _rms_norm() -> Callable[..., Any]:
    from flashinfer.norm import gemma_rmsnorm, rmsnorm

    def run(x: Tensor, weight: Tensor, eps: float = 1e-6, *, offset: float = 0.0) -> Tensor:
        norm = gemma_rmsnorm if offset else rmsnorm
        out: Tensor = norm(x.view(-1, x.shape[-1]), weight, eps)
        return out.view(x.shape)

    return run


def _add_rms_norm() -> Callable[..., Any]:
    from flashinfer.norm import fused_add_rmsnorm

    def run(x: Tensor, residual: Tensor, weight: Tensor,
            eps: float = 1e-6) -> tuple[Tensor, Tensor]:
        out, total = x.clone(), residual.clone()
        fused_add_rmsnorm(out.view(-1, x.shape[-1]), total.view(-1, x.shape[-1]), weight, eps)
        return out, total

    return run


def _rope() -> Callable[..., Any]:
    from flashinfer.rope import apply_rope_with_cos_sin_cache

    def run(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, *,
            style: str, layout: str = "bhsd",
            rotary_dim: int | None = None) -> tuple[Tensor, Tensor]:
        if layout == "bhsd":
            rotated = run(q.transpose(-3, -2), k.transpose(-3, -2), cos, sin, position_ids,
                          style=style, layout="bshd")
            return rotated[0].transpose(-3, -2), rotated[1].transpose(-3, -2)
        *batch, seq, _, head_dim = q.shape
        rows = math.prod(batch)
        table = PACKED.get("flashinfer.rope", _join_tables, cos, sin)
        table = _join_tables(cos, sin) if table is None else table
        if position_ids is not None:
            positions = position_ids.expand(*batch, seq).reshape(-1)
        else:
            # one row of the table per token of every sequence
            row_per_token = cos.dim() == 3 and cos.shape[0] > 1
            positions = torch.arange(rows * seq if row_per_token else seq, device=q.device)
            positions = positions if row_per_token else positions.repeat(rows)
        rotated = apply_rope_with_cos_sin_cache(positions, q.reshape(rows * seq, -1),
                                                k.reshape(rows * seq, -1), head_dim,
                                                table, style == "rotate_half")
        return rotated[0].view(q.shape), rotated[1].view(k.shape)

    return run


def _join_tables(cos: Tensor, sin: Tensor) -> Tensor:
    """Returns one table (positions, rotary_dim) in float32, cosines first."""
    return torch.cat((cos.reshape(-1, cos.shape[-1]), sin.reshape(-1, sin.shape[-1])), -1).float()


def _sample() -> Callable[..., Any]:
    """Selects the candidates by its radix top-k, ties by the lowest id, then filters and draws as
    the contract says.

    Its own samplers use their own random numbers, so they draw other tokens than the contract.
    """
    from flashinfer.topk import TopKTieBreak
    from flashinfer.topk import top_k as radix_top_k

    def run(logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0,
            min_p: float = 0.0, *, uniforms: Tensor | None = None, seed: int | None = None,
            seed_rows: Tensor | None = None, offset: int = 0,
            generator: torch.Generator | None = None, from_probs: bool = False,
            return_logprobs: bool = False) -> Any:
        batch, vocab = logits.shape
        uniform = random_numbers(batch, 1, logits.device, uniforms, seed, seed_rows, offset,
                                 generator)
        filters = make_filters(vocab, temperature, top_k, top_p, min_p, None, None, None, None,
                               uniform.dtype)
        scores = rank_scores(logits.detach(), temperature, None, from_probs)
        values, ids = radix_top_k(scores, filters.max_top_k, deterministic=True,
                                  tie_break=TopKTieBreak.SMALL)
        # by id first, so that the stable sort breaks ties by id
        ids, order = ids.sort(-1)
        values = values.gather(1, order)
        ranked, rank = values.sort(dim=-1, descending=True, stable=True)
        weights = token_weights(ranked, from_probs)
        weights = torch.zeros_like(weights).scatter(1, rank,
                                                    torch.where(keep_mask(weights, filters),
                                                                weights, 0.0))
        column, total = draw(weights, uniform), weights.sum(-1, keepdim=True)
        tokens = torch.where(total > 0, ids.gather(1, column), -1)[:, 0]
        if not return_logprobs:
            return tokens
        chosen = weights.gather(1, column)
        return tokens, torch.where(total > 0, chosen.log() - total.log(),
                                   -torch.inf)[:, 0].to(scores.dtype)

    return run


ALIGNED = r.one_of("causal_align", "bottom_right", code=Code.CAUSAL_ALIGNMENT_UNSUPPORTED)
ALIGNED_OR_SQUARE = r.any_of(r.equals("causal_offset", 0), ALIGNED)
ONE_SEQUENCE: tuple[r.Condition, ...] = (
    *HARDWARE, HALF, r.equals("batch", 1, Code.SHAPE_UNSUPPORTED),
    r.one_of("head_dim", *HEAD_DIMS, code=Code.HEAD_DIM_INVALID),
    r.equals("head_dim_gap", 0, Code.HEAD_DIM_INVALID),
    r.at_least("kv_heads", 1, Code.EMPTY_INPUT), r.at_least("seq_k", 1, Code.EMPTY_INPUT),
    r.at_least("seq_q", 1, Code.EMPTY_INPUT), r.absent("attn_mask.dtype", Code.MASK_UNSUPPORTED),
    r.absent("alibi_slopes.dtype", Code.ALIBI_UNSUPPORTED),
    r.equals("dropout_p", 0.0, Code.DROPOUT_UNSUPPORTED),
    # It takes the maximum of the scores before scaling.
    r.at_least("scale", 1e-30, Code.SCALE_UNSUPPORTED),
    r.when(r.on("is_causal"), ALIGNED_OR_SQUARE),
    r.when(r.at_least("window_left", 0), ALIGNED_OR_SQUARE),
    # Its only right limit is causality.
    r.any_of(r.equals("window_right", -1), r.on("is_causal", Code.WINDOW_UNSUPPORTED)),
    # A row that sees no key is not written.
    r.when(r.on("is_causal"), r.at_least("causal_offset", 0, Code.SEQ_LEN_UNSUPPORTED)),
    *(r.unit_stride(name) for name in ("query", "key", "value")),
    *(r.aligned(n, 16) for n in ("query", "key", "value")))
_SAME_WEIGHT: tuple[r.Condition, ...] = tuple(   # the kernel reads the weight as the input's dtype
    r.when(r.equals("dtype", d), r.one_of("weight.dtype", d,
                                          code=Code.DTYPE_UNSUPPORTED)) for d in ("float16",
                                                                                  "bfloat16"))
NORM: tuple[r.Condition, ...] = (
    *HARDWARE, HALF, r.present("weight.dtype", Code.FEATURE_UNSUPPORTED), *_SAME_WEIGHT,
    r.contiguous("x"), r.contiguous("weight"), r.aligned("x", 16), r.aligned("weight", 16),
    r.at_least("rows", 1, Code.EMPTY_INPUT), r.multiple_of("hidden", 8), r.at_most("hidden", 16384))
NO_ROWS: tuple[r.Condition, ...] = tuple(
    r.absent(f"{name}.dtype") for name in (
        "history", "token_counts", "temperature_rows", "top_k_rows", "top_p_rows", "min_p_rows",
        "repetition_penalty_rows", "presence_penalty_rows", "frequency_penalty_rows"))

WORKSPACE = "32 * 1024 * 1024"                 # bytes, allocated in every call

KERNELS = (
    Kernel("flashinfer.prefill_fa2", attention, _prefill_fa2, ONE_SEQUENCE, variants=("bshd",),
           prior=10.0, overhead_us=25.0, workspace=WORKSPACE, **TESTED),
    Kernel("flashinfer.prefill_fa3", attention, _prefill_fa3,
           (*ONE_SEQUENCE, r.generations("hopper")), variants=("bshd",), prior=16.0,
           overhead_us=25.0, workspace=WORKSPACE, **TESTED),
    Kernel("flashinfer.decode", attention, _decode, (
        *ONE_SEQUENCE, r.equals("seq_q", 1, Code.SEQ_LEN_UNSUPPORTED),
        r.one_of("group", *GROUPS, code=Code.GQA_UNSUPPORTED),
        *(r.contiguous(name) for name in ("query", "key", "value"))),        # it ignores strides
        variants=("bhsd", "bshd"), prior=9.0, overhead_us=25.0, workspace=WORKSPACE, **TESTED,
        note="without tensor cores; with many query heads for a KV head prefill_fa2 is the quicker "
             "one"),
    Kernel("flashinfer.rms_norm", rms_norm, _rms_norm, (*NORM, r.one_of("offset", 0.0, 1.0)),
           prior=5.0, overhead_us=12.0, **TESTED),
    Kernel("flashinfer.add_rms_norm", add_rms_norm, _add_rms_norm, (
        *NORM, r.contiguous("residual"), r.aligned("residual", 16)), prior=2.5, overhead_us=20.0,
           **TESTED,
        note="the library writes into its inputs, so both are copied first"),
    Kernel("flashinfer.rope", rope, _rope, (
        *HARDWARE, HALF, r.present("k.dtype", Code.FEATURE_UNSUPPORTED), r.contiguous("q"),
        r.contiguous("k"), r.aligned("q", 16), r.aligned("k", 16),
        r.one_of("head_dim", *HEAD_DIMS, code=Code.HEAD_DIM_INVALID),
        r.multiple_of("half", 8), r.at_least("seq", 1, Code.EMPTY_INPUT),
        r.at_least("batch", 1, Code.EMPTY_INPUT),
        r.at_least("kv_heads", 1, Code.EMPTY_INPUT)), variants=("bhsd", "bshd"), prior=4.0,
           overhead_us=30.0, **TESTED,
        note="cos and sin are joined into one table, once for as long as they live unchanged"),
    Kernel("flashinfer.sample", sample, _sample, (
        *HARDWARE, r.dtypes("float32", "float16", "bfloat16"),
        r.at_least("batch", 1, Code.EMPTY_INPUT), r.at_least("top_k", 2, Code.FEATURE_UNSUPPORTED),
        r.at_most("top_k", MAX_TOP_K, Code.FEATURE_UNSUPPORTED),
        r.at_least("temperature", 1e-30, Code.FEATURE_UNSUPPORTED), *NO_ROWS),
        prior=3.0, overhead_us=120.0, workspace="8 * batch * vocab", **LIBRARY,
        note="top-k by its radix selection; its own samplers draw other tokens than the contract"),
)
