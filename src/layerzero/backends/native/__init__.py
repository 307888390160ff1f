"""Our own CPU kernels, compiled by `lz build` for this processor; see kernels.cpp.

They read raw memory, so they take plain tensors only, and have no backward. Half types are
converted to float32 in registers: on a CPU without half-precision arithmetic they are as fast as
float32, or faster if memory-bound.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...ops.add_rms_norm import OP as add_rms_norm
from ...ops.attention import OP as attention
from ...ops.formulas.moe import GATED
from ...ops.grouped_attention import OP as grouped_attention
from ...ops.linear import OP as linear
from ...ops.mlp import OP as mlp
from ...ops.paged_attention import OP as paged_attention
from ...ops.quantized_linear import OP as quantized_linear
from ...ops.rms_norm import OP as rms_norm
from ...ops.rope import OP as rope
from ...spec import rules as r
from ...spec.errors import InvalidCall
from ...spec.reason import Code, Reason
from . import build, ggml, linear_attention, rows
from .declaration import DTYPES, FLOATS, ONE_PASS, declare, empty_rows, rows_of
from .grouped import load_grouped, load_paged

ACTIVATIONS = {None: 0, "relu": 1, "silu": 2, "gelu": 3, "gelu_tanh": 4,
               # for a gated one, the activation of the gate
               "reglu": 1, "swiglu": 2, "geglu": 3, "geglu_tanh": 4}
MAX_SMALL_HEAD_ROWS = 6
MAX_QUERY_ROWS = 8         # of decode: for more, prefill kernels are faster


def _attention_decode(invariant: bool = False) -> Callable[..., Any]:
    decode = build.module().attention_decode
    empty, threads = torch.empty, torch.get_num_threads

    def run(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False,
            scale: float | None = None, *, causal_align: str | None = None, window_left: int = -1,
            window_right: int = -1, softcap: float = 0.0,
            return_lse: bool = False) -> Any:
        sizes, key_sizes = query.shape, key.shape
        batch, heads, seq_q, dim = sizes
        dim_v = value.shape[3]
        dtype = query.dtype
        out = empty(batch, heads, seq_q, dim_v, dtype=dtype)
        lse = empty(batch, heads, seq_q, dtype=torch.float32) if return_lse else None
        decode(DTYPES[dtype], query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr(),
               None if lse is None else lse.data_ptr(), sizes, key_sizes, dim_v,
               query.stride(), key.stride(), value.stride(),
               key_sizes[2] - seq_q if causal_align == "bottom_right" else 0, window_left,
               0 if is_causal else window_right, dim ** -0.5 if scale is None else scale, softcap,
               threads(), invariant)
        return out if lse is None else (out, lse)

    return run


def _attention_invariant() -> Callable[..., Any]:
    return _attention_decode(True)


def _rms_norm() -> Callable[..., Any]:
    norm = build.module().rms_norm
    threads = torch.get_num_threads

    def run(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6,
            offset: float = 0.0) -> Tensor:
        dtype, hidden = x.dtype, x.shape[-1]
        out = empty_rows(x)
        x, step = rows_of(x)
        norm(DTYPES[dtype], 0 if weight is None else DTYPES[weight.dtype], x.data_ptr(), None,
             None if weight is None else weight.data_ptr(), out.data_ptr(), 0,
             out.numel() // hidden, hidden, step, 0, eps, offset, threads())
        return out

    return run


def _add_rms_norm() -> Callable[..., Any]:
    norm = build.module().rms_norm
    threads = torch.get_num_threads

    def run(x: Tensor, residual: Tensor, weight: Tensor | None = None,
            eps: float = 1e-6) -> tuple[Tensor, Tensor]:
        dtype, hidden = x.dtype, x.shape[-1]
        out, total = empty_rows(x), empty_rows(x)
        (x, step), (residual, residual_step) = rows_of(x), rows_of(residual)
        norm(DTYPES[dtype], 0 if weight is None else DTYPES[weight.dtype], x.data_ptr(),
             residual.data_ptr(), None if weight is None else weight.data_ptr(), out.data_ptr(),
             total.data_ptr(), out.numel() // hidden, hidden, step, residual_step, eps, 0.0,
             threads())
        return out, total

    return run


def _rope() -> Callable[..., Any]:
    rotate = build.module().rope
    threads, int64 = torch.get_num_threads, torch.int64

    def run(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor,
            position_ids: Tensor | None = None, *, style: str, layout: str = "bhsd",
            rotary_dim: int | None = None) -> Any:
        dtype = q.dtype
        to_q = empty_rows(q)
        to_k = None if k is None else empty_rows(k)
        keys = (None, 0, None, None) if k is None or to_k is None else (
            k.data_ptr(), to_k.data_ptr(), k.shape, k.stride())
        positions, half = cos.shape[-2:]
        # A table with a batch of 1 is shared.
        cos_batch, sin_batch = (t.stride(0) if t.dim() == 3 and t.shape[0] > 1 else 0
                                for t in (cos, sin))
        ids = (None, False, 0, 0) if position_ids is None else (
            position_ids.data_ptr(), position_ids.dtype is int64,
            position_ids.stride(0) if position_ids.dim() == 2 and position_ids.shape[0] > 1 else 0,
            position_ids.stride(-1))
        out_of_range = rotate(
            DTYPES[dtype], DTYPES[cos.dtype], layout == "bshd", style == "interleaved", q.dim(),
            q.data_ptr(), to_q.data_ptr(), q.shape, q.stride(), *keys, cos.data_ptr(),
            sin.data_ptr(), positions, half, cos_batch, cos.stride(-2), sin_batch, sin.stride(-2),
            *ids, threads())
        if out_of_range is not None:
            raise InvalidCall.of("rope", Reason(
                Code.VALUE_OUT_OF_RANGE, f"between 0 and {positions - 1}, the last row of cos",
                out_of_range, "position_ids"))
        return to_q if to_k is None else (to_q, to_k)

    return run


def _linear(invariant: bool = False) -> Callable[..., Any]:
    product, empty, threads = build.module().product, torch.empty, torch.get_num_threads

    def run(x: Tensor, weight: Tensor, bias: Tensor | None = None,
            activation: str | None = None) -> Tensor:
        outputs, inputs = weight.shape
        dtype = x.dtype
        out = empty(*x.shape[:-1], outputs, dtype=dtype)
        x, step = rows_of(x)
        product(DTYPES[dtype], x.data_ptr(), weight.data_ptr(), None if bias is None
                else bias.data_ptr(), out.data_ptr(), out.numel() // outputs, inputs, outputs, step,
                weight.stride(0), ACTIVATIONS[activation], threads(), invariant)
        return out

    return run


def _linear_invariant() -> Callable[..., Any]:
    return _linear(True)


def _mlp_invariant() -> Callable[..., Any]:
    return _mlp(True)


def _mlp(invariant: bool = False) -> Callable[..., Any]:
    product, empty, threads = build.module().feed_forward, torch.empty, torch.get_num_threads

    def run(x: Tensor, weight_in: Tensor, weight_down: Tensor, activation: str = "swiglu", *,
            weight_up: Tensor | None = None, bias_in: Tensor | None = None,
            bias_up: Tensor | None = None, bias_down: Tensor | None = None) -> Tensor:
        outputs, inner = weight_down.shape
        dtype, hidden = x.dtype, x.shape[-1]
        out = empty(*x.shape[:-1], outputs, dtype=dtype)
        x, step = rows_of(x)
        if weight_up is None and activation in GATED:
            weight_in, weight_up = weight_in[:inner], weight_in[inner:]
            if bias_in is not None:
                bias_in, bias_up = bias_in[:inner], bias_in[inner:]
        product(DTYPES[dtype], x.data_ptr(), weight_in.data_ptr(), None if weight_up is None
                else weight_up.data_ptr(), None if bias_in is None else bias_in.data_ptr(),
                None if bias_up is None else bias_up.data_ptr(),
                weight_down.data_ptr(), None if bias_down is None else bias_down.data_ptr(),
                out.data_ptr(), out.numel() // outputs, hidden, inner, outputs, step,
                weight_in.stride(0), 0 if weight_up is None else weight_up.stride(0),
                weight_down.stride(0), ACTIVATIONS[activation],
                threads(), invariant)
        return out

    return run


WEIGHT_RULES: tuple[r.Condition, ...] = (
    r.unit_stride("weight"), r.one_of("weight.dtype", None, *FLOATS, code=Code.DTYPE_UNSUPPORTED))
TABLE_RULES: tuple[r.Condition, ...] = (
    r.unit_stride("cos"), r.unit_stride("sin"), r.dtypes(*FLOATS, of="cos.dtype"),
    *(r.when(r.equals("cos.dtype", d), r.equals("sin.dtype", d, Code.DTYPE_UNSUPPORTED))
      for d in FLOATS))

HEAD_RULES: tuple[r.Condition, ...] = (
    r.at_least("kv_heads", 1, Code.EMPTY_INPUT), r.at_least("head_dim", 1, Code.EMPTY_INPUT),
    r.at_least("head_dim_v", 1, Code.EMPTY_INPUT), r.unit_stride("query"))
GROUPED_RULES: tuple[r.Condition, ...] = (
    *HEAD_RULES, r.unit_stride("key"), r.unit_stride("value"))


def _cache_rules(name: str) -> tuple[r.Condition, ...]:
    """Returns the rules for a cache in the query's dtype."""
    return (r.absent(f"{name}_scale.dtype", Code.SCALE_UNSUPPORTED),
            r.unit_stride(f"{name}_cache", repair=False),
            *(r.when(r.equals("dtype", d),
                     r.one_of(f"{name}_cache.dtype", d, code=Code.KV_CACHE_DTYPE_MISMATCH))
              for d in FLOATS))


PAGED_RULES: tuple[r.Condition, ...] = (
    *HEAD_RULES, r.any_of(r.absent("cu_seqlens_q.dtype"),
                          r.present("max_seqlen_q", Code.MISSING_METADATA)),
    *_cache_rules("key"), *_cache_rules("value"))
FEW_QUERIES = r.at_most("max_seqlen_q", MAX_QUERY_ROWS, Code.SEQ_LEN_UNSUPPORTED)
MANY_QUERIES = r.at_least("max_seqlen_q", MAX_QUERY_ROWS + 1)

DECODE_RULES: tuple[r.Condition, ...] = (
    r.at_most("seq_q", MAX_QUERY_ROWS, Code.SEQ_LEN_UNSUPPORTED),
    r.at_least("kv_heads", 1, Code.EMPTY_INPUT), r.at_least("head_dim", 1, Code.EMPTY_INPUT),
    r.at_least("head_dim_v", 1, Code.EMPTY_INPUT),
    r.unit_stride("query"), r.unit_stride("key"), r.unit_stride("value"),
    r.absent("attn_mask.dtype", Code.MASK_UNSUPPORTED),
    r.absent("alibi_slopes.dtype", Code.ALIBI_UNSUPPORTED),
    r.equals("dropout_p", 0.0, Code.DROPOUT_UNSUPPORTED))

# With AVX-512 torch's matmul is as fast from two rows on.
ONE_ROW: tuple[r.Condition, ...] = (r.dtypes("bfloat16"), r.cpu_isa("avx512f"),
                                    r.equals("rows", 1, Code.SHAPE_UNSUPPORTED))
LINEAR_RULES: tuple[r.Condition, ...] = (
    r.unit_stride("x"), r.unit_stride("weight", repair=False), r.unit_stride("bias"),
    r.at_least("in_features", 1, Code.EMPTY_INPUT), r.at_least("out_features", 1, Code.EMPTY_INPUT))
MLP_RULES: tuple[r.Condition, ...] = (
    r.unit_stride("x"), r.at_least("out", 1, Code.EMPTY_INPUT),
    *(r.unit_stride(w, repair=False) for w in ("weight_in", "weight_up", "weight_down")),
    *(r.unit_stride(b) for b in ("bias_in", "bias_up", "bias_down")))
GGML_RULES: tuple[r.Condition, ...] = (
    r.equals("activations", "q8"),
    r.one_of("format", *ggml.FORMATS, code=Code.QUANT_FORMAT_UNSUPPORTED),
    r.unit_stride("x"), r.contiguous("weight_q"), r.unit_stride("bias"))
IN_ORDER = "every result is added up in one order, whatever is computed beside it"
WIDENED = ("half types are widened in registers, or once for all rows, where torch computes an "
           "element at a time")

KERNELS = (
    declare(linear, _linear, 10.0, 3.0, *ONE_ROW, *LINEAR_RULES, name="linear_vector",
            note="torch's product for one row takes 20 microseconds before it begins"),
    declare(mlp, _mlp, 10.0, 5.0, *ONE_ROW, *MLP_RULES, name="mlp_vector",
            less_work="activation and product of gate and up where they are computed"),
    # The estimate of torch's time does not include its slow half types, so these overheads are set
    # below its own.
    declare(linear, _linear, 24.0, 1.0, *r.slow_half_matmul(), *LINEAR_RULES, name="linear_half",
            less_work=WIDENED),
    declare(mlp, _mlp, 24.0, 5.0, *r.slow_half_matmul(), *MLP_RULES, name="mlp_half",
            less_work=WIDENED),
    declare(linear, _linear_invariant, 2.0, 4.0, *LINEAR_RULES, name="linear_invariant",
            batch_invariant=True, tp_invariant=True, note=IN_ORDER),
    declare(mlp, _mlp_invariant, 2.0, 6.0, *MLP_RULES, name="mlp_invariant", batch_invariant=True,
            note=IN_ORDER),
    declare(quantized_linear, ggml.linear, 30.0, 5.0, *GGML_RULES, name="ggml_linear",
            less_work="multiplies the codes as bytes, and writes no dequantized weight",
            note="keeps a second copy of the weight, its rows interleaved; the same result on any "
                 "number of threads; its code for SVE beyond 128 bits is untested on hardware"),
    declare(attention, _attention_decode, 20.0, 3.0, *DECODE_RULES, r.at_least("group", 2),
            r.any_of(r.at_most("seq_q", MAX_SMALL_HEAD_ROWS), r.at_least("head_dim", 65)),
            name="attention_decode", variants=("bhsd",),
            less_work="reads keys and values once for all query heads that share them",
            note="the same result on any number of threads"),
    # For 8 rows of a small head torch is as fast, or faster by a fifth; this serves what torch
    # needs a mask for.
    declare(attention, _attention_decode, 5.0, 3.0, *DECODE_RULES, r.at_least("group", 2),
            r.at_least("seq_q", MAX_SMALL_HEAD_ROWS + 1),
            r.at_most("head_dim", 64), name="attention_decode_rows", variants=("bhsd",),
            note="for more query rows of small heads"),
    # Without shared KV heads torch reads no more and ranks first; this serves what it does not
    # support.
    declare(attention, _attention_decode, 5.0, 3.0, *DECODE_RULES, r.equals("group", 1),
            name="attention_decode_mha",
            variants=("bhsd",), note="for as many KV heads as query heads"),
    declare(attention, _attention_decode, 20.0, 1.0, *DECODE_RULES, *r.slow_half_matmul(),
            name="attention_decode_half",
            variants=("bhsd",), less_work=WIDENED),
    declare(attention, _attention_invariant, 20.0, 3.0, *DECODE_RULES, name="attention_invariant",
            variants=("bhsd",), batch_invariant=True, tp_invariant=True,
            note="keys are split alike, however many heads and sequences there are"),
    declare(grouped_attention, load_grouped, 20.0, 6.0, *GROUPED_RULES, FEW_QUERIES,
            less_work="keys that several items have are read and converted once"),
    declare(grouped_attention, load_grouped, 2.5, 6.0, *GROUPED_RULES, MANY_QUERIES,
            name="grouped_attention_rows", note="for more query rows"),
    declare(paged_attention, load_paged, 20.0, 8.0, *PAGED_RULES, FEW_QUERIES,
            variants=("NHD", "HND"),
            less_work="reads pages where they lie, and pages that sequences share once"),
    declare(paged_attention, load_paged, 2.0, 8.0, *PAGED_RULES, MANY_QUERIES,
            name="paged_attention_rows", variants=("NHD", "HND"), note="for more query rows"),
    declare(rms_norm, _rms_norm, 12.0, 2.0, r.unit_stride("x"), *WEIGHT_RULES, less_work=ONE_PASS,
            batch_invariant=True),
    declare(add_rms_norm, _add_rms_norm, 12.0, 3.0, r.unit_stride("x"), r.unit_stride("residual"),
            *WEIGHT_RULES,
            less_work=ONE_PASS, batch_invariant=True),
    declare(rope, _rope, 12.0, 4.0, r.unit_stride("q"), r.unit_stride("k"), *TABLE_RULES,
            less_work=ONE_PASS,
            batch_invariant=True, tp_invariant=True,
            note="a token's angles are read once for all its heads"),
    *rows.KERNELS, *linear_attention.KERNELS,
)
