"""Our own GPU kernels, written in Triton and compiled by it on first use; one file for each family.

This file declares them. Triton is imported when a kernel is first loaded. They read raw memory, so
they take plain tensors only, and but for grouped_attention have no backward. The best number of
programs depends on the GPU: the default is what was fastest on an H200, and half and twice as many
are separate kernels, so that tuning measures and ranks them like all others. What is not bound to
NVIDIA by its instructions is declared for AMD and Intel GPUs too, untested there (`_portable`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from ...ops.add_rms_norm import OP as add_rms_norm
from ...ops.attention import OP as attention
from ...ops.gated_delta_rule import OP as gated_delta_rule
from ...ops.grouped_attention import OP as grouped_attention
from ...ops.linear import OP as linear
from ...ops.mamba_chunk_scan import OP as mamba_chunk_scan
from ...ops.mlp import OP as mlp
from ...ops.paged_attention import OP as paged_attention
from ...ops.quantize import OP as quantize
from ...ops.quantized_linear import OP as quantized_linear
from ...ops.rms_norm import OP as rms_norm
from ...ops.rope import OP as rope
from ...ops.sample import OP as sample
from ...ops.selective_state_update import OP as selective_state_update
from ...spec import rules as r
from ...spec.kernel import Kernel
from ...spec.op import Op
from ...spec.reason import Code

# Tests in Triton's interpreter, on the CPU, drop these rules.
HARDWARE: tuple[r.Condition, ...] = (r.device("cuda"), r.vendor("nvidia"), r.sm(at_least=80))
HALF = r.dtypes("float16", "bfloat16")
FLOATS = r.dtypes("float16", "bfloat16", "float32")
MAX_GRID = 65535          # grid limit of the second and third axis


def _attention() -> Callable[..., Any]:
    from .attention.decode import attention_decode
    return attention_decode


def _attention_invariant() -> Callable[..., Any]:
    from .attention.decode import attention_invariant
    return attention_invariant


def _linear_invariant() -> Callable[..., Any]:
    from .invariant import linear
    return linear


def _mlp_invariant() -> Callable[..., Any]:
    from .invariant import mlp
    return mlp


def _paged_attention() -> Callable[..., Any]:
    from .attention.decode import paged_attention_decode
    return paged_attention_decode


def _grouped_attention() -> Callable[..., Any]:
    from .attention.grouped import grouped_attention
    return grouped_attention


def _rms_norm() -> Callable[..., Any]:
    from .norm import rms_norm
    return rms_norm


def _add_rms_norm() -> Callable[..., Any]:
    from .norm import add_rms_norm
    return add_rms_norm


def _linear() -> Callable[..., Any]:
    from .gemv import linear
    return linear


def _quantized_linear() -> Callable[..., Any]:
    from .gemv import quantized_linear
    return quantized_linear


def _quantized_tiled() -> Callable[..., Any]:
    from .quantized import quantized_linear
    return quantized_linear


def _quantized_decoded() -> Callable[..., Any]:
    from .quantized import decoded_linear
    return decoded_linear


def _int8_dynamic() -> Callable[..., Any]:
    from .rounded import int8_linear
    return int8_linear


def _fp8_dynamic() -> Callable[..., Any]:
    from .rounded import fp8_linear
    return fp8_linear


def _state_update() -> Callable[..., Any]:
    from .linear_attention import selective_state_update
    return selective_state_update


def _chunk_scan() -> Callable[..., Any]:
    from .linear_attention import mamba_chunk_scan
    return mamba_chunk_scan


def _delta_tokens() -> Callable[..., Any]:
    from .linear_attention import delta_rule_tokens
    return delta_rule_tokens


def _delta_chunks() -> Callable[..., Any]:
    from .linear_attention import delta_rule_chunks
    return delta_rule_chunks


def _sample() -> Callable[..., Any]:
    from .sampling import sample
    return sample


def _rope() -> Callable[..., Any]:
    from .rotary import rope
    return rope


def _mlp() -> Callable[..., Any]:
    from .gated import mlp
    return mlp


def _quantize() -> Callable[..., Any]:
    from .codes import quantize
    return quantize


def _with_programs(load: Callable[[], Callable[..., Any]], name: str,
                   share: float) -> Callable[[], Callable[..., Any]]:
    """Returns a loader of `share` as many programs, a global so that a descriptor can name it."""
    def variant() -> Callable[..., Any]:
        return partial(load(), programs=share)

    variant.__name__ = variant.__qualname__ = f"{load.__name__}_{name}"
    globals()[variant.__name__] = variant
    return variant


def _kernel(name: str, op: Op, load: Callable[[], Callable[..., Any]], prior: float,
            overhead_us: float, *requires: r.Condition, **more: Any) -> Kernel:
    return Kernel(f"triton.{name}", op, load, (*HARDWARE, r.plain_tensors(), *requires),
                  package="triton", prior=prior, overhead_us=overhead_us, traceable=False, jit=True,
                  **{"replayable": True, "differentiable": False, **more})


def _few_rows(tokens: str) -> tuple[r.Condition, ...]:
    """At most 64 query rows per KV head, the group rounded up: rules that each read one fact."""
    return (r.at_most(tokens, 64, Code.SEQ_LEN_UNSUPPORTED), r.at_most("group", 64),
            *(r.when(r.at_least("group", 64 // (2 * most) + 1),
                     r.at_most(tokens, most, Code.SEQ_LEN_UNSUPPORTED))
              for most in (32, 16, 8, 4, 2, 1)))


def _power_of_two(fact: str, maximum: int) -> str:
    """Returns an expression for the next power of two in [16, `maximum`], a tile's size."""
    steps = [1 << n for n in range(4, maximum.bit_length() - 1)]
    return "(" + " + ".join(["16", *(f"{n} * ({fact} > {n})" for n in steps)]) + ")"


def _decode_shared(tokens: str) -> str:
    """Returns the shared memory of attention/decode.py with one stage; the launcher uses as many
    stages as fit."""
    rows, block = _power_of_two(f"group * {tokens}", 64), f"(64 + 64 * (group * {tokens} > 16))"
    dim, dim_v = _power_of_two("head_dim", 256), _power_of_two("head_dim_v", 256)
    return f"2 * {block} * ({dim} + {dim_v}) + 2 * {rows} * ({dim} + {block}) + 16 * {block}"


# Several rows: four stages of 64 x 128 of the weight and 128 x 16 of x; one row: a reduction.
GEMV_SHARED = "8192 + 81920 * (rows > 1)"
SMALL_SHARED = "16384"         # for reductions and layout conversions only
# Stages of 128 x 64 of x and of the weight in half types; fewer rows or columns in float32.
INVARIANT_SHARED = "98304"
# One stage of linear_attention.py's scan; its launcher uses as many stages as fit.
SCAN_SHARED = (f"256 * (2 * max({_power_of_two('state_dim', 128)}, 32) + "
               f"{_power_of_two('head_dim', 64)})")
IN_ORDER = "inputs are added in one order, however many rows and columns there are"

POSITIVE_SCALE = r.at_least("scale", 1e-30, Code.SCALE_UNSUPPORTED)
HEAD_RULES: tuple[r.Condition, ...] = (
    r.at_least("head_dim", 1, Code.EMPTY_INPUT), r.at_most("head_dim", 256),
    r.at_most("head_dim_v", 256), r.at_least("head_dim_v", 1, Code.EMPTY_INPUT),
    r.at_most("kv_heads", MAX_GRID), r.at_most("batch", MAX_GRID))


def _cache_rules(name: str) -> tuple[r.Condition, ...]:
    """Returns the rules for a cache whose values are exact in the query's dtype."""
    small = ("float8_e4m3fn", "float8_e5m2", "int8")
    return (r.unit_stride(name, repair=False),
            r.when(r.equals("dtype", "float16"), r.one_of(f"{name}.dtype", "float16", *small,
                                                          code=Code.KV_CACHE_DTYPE_MISMATCH)),
            r.when(r.equals("dtype", "bfloat16"),
                   r.one_of(f"{name}.dtype", "bfloat16", "float16", *small,
                                                           code=Code.KV_CACHE_DTYPE_MISMATCH)),
            r.any_of(r.one_of(f"{name}.dtype", "float16", "bfloat16", "float8_e5m2", "int8"),
                     r.sm(at_least=89)))


NORM: tuple[r.Condition, ...] = (
    FLOATS, r.unit_stride("x"), r.unit_stride("weight"), r.at_most("hidden", 1 << 15),
    r.one_of("weight.dtype", None, "float16", "bfloat16", "float32", code=Code.DTYPE_UNSUPPORTED))

FEW_ROWS: tuple[r.Condition, ...] = (HALF, r.at_least("rows", 1, Code.EMPTY_INPUT),
                                     r.at_most("rows", 16), r.unit_stride("x"))

CODES_ONLY = "reads the codes, and writes no dequantized weight"
QUANTIZED: tuple[r.Condition, ...] = (         # how all of them read a weight
    r.equals("activations", "none"), r.present("scales.dtype", Code.QUANT_FORMAT_UNSUPPORTED),
    r.contiguous("weight_q"), r.contiguous("scales"), r.contiguous("zeros"),
    r.equals("shared_rows", 0, Code.SCALE_LAYOUT_MISMATCH))

ONE_ROUNDING = "rounds x in one pass, where torch runs a kernel for each step of the formula"
ROUNDED: tuple[r.Condition, ...] = (           # of products of codes with codes
    r.absent("zeros.dtype"), r.equals("groups", 1, Code.SCALE_LAYOUT_MISMATCH),
    r.one_of("group_size", 0), r.equals("shared_rows", 0, Code.SCALE_LAYOUT_MISMATCH),
    r.unit_stride("x"), r.contiguous("weight_q"), r.contiguous("scales"), r.unit_stride("bias"))
STATE_ONCE = "the state stays in registers, where torch writes it with each step of the formula"

DEFAULTS = (
    _kernel("attention_decode", attention, _attention, 8.0, 25.0, HALF, *_few_rows("seq_q"),
            *HEAD_RULES, POSITIVE_SCALE,
            # with more heads per KV head, merging the parts takes too long
            r.at_most("group", 16),
            r.at_least("batch", 1, Code.EMPTY_INPUT), r.at_least("seq_q", 1, Code.EMPTY_INPUT),
            r.at_least("kv_heads", 1, Code.EMPTY_INPUT), r.unit_stride("query"),
            r.unit_stride("key"), r.unit_stride("value"),
            r.unit_stride("alibi_slopes"), r.absent("attn_mask.dtype", Code.MASK_UNSUPPORTED),
            r.equals("dropout_p", 0.0, Code.DROPOUT_UNSUPPORTED), variants=("bhsd", "bshd"),
            workspace="264 * 4 * 64 * (head_dim_v + 1)", shared_memory=_decode_shared("seq_q"),
            note="reads each key and value once for all query heads and tokens that share it; one "
                 "launch"),
    _kernel("attention_invariant", attention, _attention_invariant, 20.0, 25.0, HALF,
            *_few_rows("seq_q"), *HEAD_RULES[:4], POSITIVE_SCALE,
            r.at_least("batch", 1, Code.EMPTY_INPUT), r.at_least("seq_q", 1, Code.EMPTY_INPUT),
            r.at_least("kv_heads", 1, Code.EMPTY_INPUT), r.unit_stride("query"),
            r.unit_stride("key"), r.unit_stride("value"), r.unit_stride("alibi_slopes"),
            r.absent("attn_mask.dtype", Code.MASK_UNSUPPORTED),
            r.equals("dropout_p", 0.0, Code.DROPOUT_UNSUPPORTED), variants=("bhsd", "bshd"),
            workspace="4 * batch * heads * seq_q * 32 * (head_dim_v + 1)",
            shared_memory=_decode_shared("seq_q"), batch_invariant=True, tp_invariant=True,
            only_invariant=True,
            note="keys are split alike, however many heads and sequences there are"),
    _kernel("linear_invariant", linear, _linear_invariant, 1.0, 14.0, FLOATS, r.unit_stride("x"),
            r.unit_stride("weight"), r.unit_stride("bias"),
            r.at_least("in_features", 1, Code.EMPTY_INPUT), shared_memory=INVARIANT_SHARED,
            batch_invariant=True, tp_invariant=True, only_invariant=True, note=IN_ORDER),
    _kernel("mlp_invariant", mlp, _mlp_invariant, 1.0, 40.0, FLOATS, r.unit_stride("x"),
            *(r.unit_stride(name) for name in ("weight_in", "weight_down", "weight_up", "bias_in",
                                               "bias_up", "bias_down")),
            workspace="3 * itemsize * rows * inner", shared_memory=INVARIANT_SHARED,
            replayable=False, batch_invariant=True, only_invariant=True, note=IN_ORDER),
    _kernel("paged_attention_decode", paged_attention, _paged_attention, 8.0, 25.0, HALF,
            *_few_rows("max_seqlen_q"), *HEAD_RULES, POSITIVE_SCALE,
            r.at_least("batch", 1, Code.EMPTY_INPUT),
            r.any_of(r.absent("cu_seqlens_q.dtype"),
                     r.present("max_seqlen_q", Code.MISSING_METADATA)),
            r.unit_stride("query"), *_cache_rules("key_cache"), *_cache_rules("value_cache"),
            r.unit_stride("block_table"),
            r.unit_stride("context_lens"), r.unit_stride("cu_seqlens_q"), variants=("NHD", "HND"),
            workspace="264 * 4 * 64 * (head_dim_v + 1)",
            shared_memory=_decode_shared("max_seqlen_q"),
            less_work="reads each page once, where it lies; no length is read on the host"),
    _kernel("grouped_attention", grouped_attention, _grouped_attention, 8.0, 40.0, FLOATS,
            *HEAD_RULES[:4], POSITIVE_SCALE, r.unit_stride("query"), r.unit_stride("key"),
            r.unit_stride("value"), differentiable=True, replayable=False,
            shared_memory="64 * itemsize * " + _power_of_two("head_dim", 256),
            less_work="one launch for all items, keys read where they lie; no length is read on "
                      "the host",
            note="dK and dV without atomics: the same on every run"),
    _kernel("rms_norm", rms_norm, _rms_norm, 6.0, 12.0, *NORM, shared_memory=SMALL_SHARED),
    _kernel("add_rms_norm", add_rms_norm, _add_rms_norm, 6.0, 14.0, *NORM,
            r.unit_stride("residual"), shared_memory=SMALL_SHARED,
            less_work="one pass for sum and norm"),
    _kernel("linear_gemv", linear, _linear, 1.2, 14.0, *FEW_ROWS, r.unit_stride("weight"),
            r.absent("activation"), r.at_least("in_features", 16),
            r.at_least("out_features", 1, Code.EMPTY_INPUT),
            shared_memory=GEMV_SHARED,
            note="for as few rows as a decode step has: reading the weight is all the time there "
                 "is"),
    _kernel("quantized_linear_gemv", quantized_linear, _quantized_linear, 8.0, 16.0, *FEW_ROWS,
            r.equals("rows", 1), r.one_of("format", "int8", "int4", "fp8_e4m3",
                                          code=Code.QUANT_FORMAT_UNSUPPORTED),
            *QUANTIZED, r.aligned("weight_q", 16), r.multiple_of("in_features", 32),
            r.one_of("group_size", 0, 32, 64, 128, 256, code=Code.SCALE_LAYOUT_MISMATCH),
            r.any_of(r.one_of("format", "int8", "int4"), r.sm(at_least=89)),
            shared_memory=GEMV_SHARED, less_work=CODES_ONLY),
    _kernel("quantized_linear_tiled", quantized_linear, _quantized_tiled, 7.0, 18.0, HALF,
            r.at_least("rows", 1, Code.EMPTY_INPUT), r.at_most("rows", 64), r.unit_stride("x"),
            *QUANTIZED, r.multiple_of("in_features", 16), r.unit_stride("bias"),
            r.any_of(r.one_of("group_size", 0, 16, 32), r.multiple_of("group_size", 64)),
            shared_memory="65536", less_work=CODES_ONLY,
            note="codes are decoded on their way to the tensor cores"),
    _kernel("quantized_linear_decoded", quantized_linear, _quantized_decoded, 4.0, 30.0, HALF,
            r.at_least("rows", 17), *QUANTIZED, r.multiple_of("in_features", 16),
            workspace="itemsize * in_features * out_features", shared_memory=SMALL_SHARED,
            replayable=False,
            less_work="writes the weight once, where torch runs a kernel for each step of the "
                      "formula",
            note="torch's matmul follows"),
    _kernel("int8_dynamic_linear", quantized_linear, _int8_dynamic, 10.0, 20.0, HALF,
            r.one_of("activations", "int8"),
            r.one_of("format", "int8", code=Code.QUANT_FORMAT_UNSUPPORTED), *ROUNDED,
            # what torch._int_mm takes
            r.at_least("rows", 17), r.at_most("in_features", 1 << 15),
            r.multiple_of("in_features", 8), r.multiple_of("out_features", 8),
            shared_memory=SMALL_SHARED, replayable=False, less_work=ONE_ROUNDING),
    _kernel("fp8_dynamic_linear", quantized_linear, _fp8_dynamic, 10.0, 20.0,
            r.dtypes("bfloat16"), r.one_of("activations", "fp8"),
            r.one_of("format", "fp8_e4m3", code=Code.QUANT_FORMAT_UNSUPPORTED), *ROUNDED,
            # what torch._scaled_mm takes with a scale for each row
            r.sm(at_least=90), r.dtypes("float32", of="scales.dtype"),
            r.at_least("rows", 1, Code.EMPTY_INPUT), r.at_most("in_features", 1 << 15),
            r.multiple_of("in_features", 16), r.multiple_of("out_features", 16),
            shared_memory=SMALL_SHARED, replayable=False, less_work=ONE_ROUNDING),
    _kernel("sample", sample, _sample, 4.0, 90.0, FLOATS, r.unit_stride("logits"),
            r.at_most("vocab", 1 << 20), r.at_most("batch", MAX_GRID), r.at_most("top_k", 1024),
            r.absent("temperature_rows.dtype"), r.absent("top_k_rows.dtype"),
            r.absent("top_p_rows.dtype"), r.absent("min_p_rows.dtype"),
            r.differs("temperature", 0.0), workspace="batch * (49152 + vocab // 64)",
            shared_memory=SMALL_SHARED, less_work="finds where top-k and top-p cut without a sort"),
    _kernel("rope", rope, _rope, 6.0, 12.0, FLOATS, r.unit_stride("q"), r.unit_stride("k"),
            r.unit_stride("cos"), r.unit_stride("sin"), r.at_most("heads", MAX_GRID),
            r.at_most("half", 1024), variants=("bhsd", "bshd"),
            shared_memory=SMALL_SHARED,
            less_work="q and k in one pass, where torch runs a kernel for each step of the formula",
            note="an id outside the table gives NaN"),
    _kernel("mlp", mlp, _mlp, 1.1, 20.0, FLOATS, r.at_most("rows", MAX_GRID),
            r.one_of("activation", "swiglu", "geglu", "geglu_tanh", "reglu"),
            workspace="3 * itemsize * rows * inner",
            less_work="activation and product between the matrix products in one pass",
            replayable=False),
    _kernel("quantize", quantize, _quantize, 6.0, 12.0, FLOATS, r.unit_stride("x"),
            r.on("symmetric"),
            r.one_of("format", "int8", "fp8_e4m3", code=Code.QUANT_FORMAT_UNSUPPORTED),
            r.one_of("granularity", None, "channel", "block", code=Code.SCALE_LAYOUT_MISMATCH),
            r.any_of(r.equals("granularity", "block"), r.at_most("width", 1 << 15)),
            r.at_most("block_size", 4096),
            r.at_most("block_rows", 256),
            r.one_of("scales.dtype", None, "float32", code=Code.SCALE_LAYOUT_MISMATCH),
            r.absent("zeros.dtype"),
            r.absent("global_scale.dtype"),
            less_work="one pass, where torch runs a kernel for each step of the formula",
            shared_memory=SMALL_SHARED),
    # These were run in Triton's interpreter only.
    _kernel("selective_state_update", selective_state_update, _state_update, 6.0, 20.0, FLOATS,
            r.at_most("state_dim", 256), shared_memory="32768", untested=True,
            replayable=False, less_work=STATE_ONCE),
    # differences of sums over a chunk: not as exact as float32 is meant to be
    _kernel("mamba_chunk_scan", mamba_chunk_scan, _chunk_scan, 6.0, 25.0, HALF,
            r.at_least("seq", 1, Code.EMPTY_INPUT), r.at_most("state_dim", 128),
            shared_memory=SCAN_SHARED, untested=True, replayable=False, less_work=STATE_ONCE),
    _kernel("gated_delta_rule_tokens", gated_delta_rule, _delta_tokens, 6.0, 20.0, FLOATS,
            r.at_least("seq", 1, Code.EMPTY_INPUT), r.at_most("seq", 16),
            r.at_most("head_dim", 256), shared_memory=SMALL_SHARED, untested=True,
            replayable=False, less_work=STATE_ONCE),
    _kernel("gated_delta_rule", gated_delta_rule, _delta_chunks, 5.0, 25.0, FLOATS,
            r.at_least("seq", 1, Code.EMPTY_INPUT), r.at_most("head_dim", 128),
            shared_memory="131072", untested=True, replayable=False, less_work=STATE_ONCE),
)

# Ranked after the defaults if nothing was measured.
PROGRAM_VARIANTS = tuple(
    (kernel, name, _with_programs(load, name, share))
    for kernel, load in (("triton.attention_decode", _attention),
                         ("triton.paged_attention_decode", _paged_attention),
                         ("triton.linear_gemv", _linear),
                         ("triton.quantized_linear_gemv", _quantized_linear))
    for name, share in (("half", 0.5), ("double", 2.0)))
# Counters and streams are those of torch.cuda, which on AMD is HIP's; where neither is needed,
# Intel is served too. `sample` calls a function of CUDA's libdevice, so it stays with NVIDIA.
AMD: tuple[r.Condition, ...] = (
    r.device("cuda"), r.vendor("amd"), r.generations("cdna2", "cdna3", "cdna4", "rdna3", "rdna4"))
AMD_OR_INTEL: tuple[r.Condition, ...] = (r.device("cuda", "xpu"), r.vendor("amd", "intel"))
PORTABLE: tuple[tuple[str, tuple[r.Condition, ...]], ...] = (
    ("attention_decode", AMD), ("paged_attention_decode", AMD), ("grouped_attention", AMD),
    ("linear_gemv", AMD), ("quantized_linear_gemv", AMD), ("rms_norm", AMD_OR_INTEL),
    ("add_rms_norm", AMD_OR_INTEL), ("rope", AMD_OR_INTEL), ("mlp", AMD_OR_INTEL))
KERNELS = (*DEFAULTS, *(replace(k, id=f"{k.id}_{name}", load=load, prior=0.99 * k.prior,
                                note=f"{name} as many programs: for tuning to choose")
                        for of, name, load in PROGRAM_VARIANTS for k in DEFAULTS if k.id == of),
           *(replace(k, id=f"{k.id}_portable", requires=(*hardware, *k.requires[len(HARDWARE):]),
                     untested=True, replayable=False, less_work="",
                     note="the same code, compiled by Triton for this GPU")
             for name, hardware in PORTABLE for k in DEFAULTS if k.id == f"triton.{name}"))
