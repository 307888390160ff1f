"""Our own GPU kernels in CUDA C++, for what Triton has no words for: clusters of blocks, fragments in our own order.

This file declares them; compiler.py compiles them with NVRTC when they are first called. They read raw memory, so they
take plain tensors only, and have no backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...ops.add_rms_norm import OP as add_rms_norm
from ...ops.attention import OP as attention
from ...ops.paged_attention import OP as paged_attention
from ...ops.quantized_linear import OP as quantized_linear
from ...ops.rms_norm import OP as rms_norm
from ...ops.sample import OP as sample
from ...spec.kernel import Kernel
from ...spec.op import Op
from ...spec.reason import Code
from ...spec.rules import (
    Condition,
    Rule,
    absent,
    aligned,
    any_of,
    at_least,
    at_most,
    contiguous,
    device,
    dtypes,
    equals,
    multiple_of,
    one_of,
    plain_tensors,
    present,
    sm,
    unit_stride,
    vendor,
    when,
)
from . import compiler

# What a test in the emulator, on the CPU, does without. Clusters came with compute capability 9.0.
HARDWARE: tuple[Condition, ...] = (device("cuda"), vendor("nvidia"), sm(at_least=90))
HALF = dtypes("float16", "bfloat16")
MOST_GRID = 65535          # blocks along the second and third axis
MOST_ROWS = 32             # of decode.cu: query heads that share a KV head times their tokens
MOST_ROWS_WIDE = 16        # of heads of more than 128: more do not fit the registers


def _attention() -> Callable[..., Any]:
    from .decode import attention_decode
    return attention_decode


def _paged_attention() -> Callable[..., Any]:
    from .decode import paged_attention_decode
    return paged_attention_decode


def _quantized_linear() -> Callable[..., Any]:
    from .gemv import quantized_linear
    return quantized_linear


def _rms_norm() -> Callable[..., Any]:
    from .norm import rms_norm
    return rms_norm


def _add_rms_norm() -> Callable[..., Any]:
    from .norm import add_rms_norm
    return add_rms_norm


def _sample() -> Callable[..., Any]:
    from .sampling import sample
    return sample


def _kernel(name: str, op: Op, load: Callable[[], Callable[..., Any]], prior: float, overhead_us: float,
            *requires: Condition, **more: Any) -> Kernel:
    return Kernel(f"cuda.{name}", op, load, (*HARDWARE, plain_tensors(), *requires),
                  package="layerzero.backends.cuda", distribution="layerzero", built=compiler.ready, prior=prior,
                  overhead_us=overhead_us, differentiable=False, traceable=False, jit=True,
                  replayable=True, **more)


def _in_place(tensor: str, to_bytes: int = 16) -> tuple[Condition, ...]:
    """What is too large to be copied first must lie as it is read: in pieces of 16 bytes."""
    return (unit_stride(tensor, repair=False), Rule(f"{tensor}.alignment", "ge", to_bytes, Code.POINTER_ALIGNMENT))


def _few_rows(tokens: str, most: int) -> tuple[Condition, ...]:
    """group * tokens <= most: a rule reads one fact, so there is one for each number of tokens that a group allows."""
    allowed = {most // group: group for group in range(most, 0, -1)}           # tokens -> the smallest such group
    return (at_most("group", most), at_most(tokens, most, Code.SEQ_LEN_UNSUPPORTED),
            *(when(at_least("group", group), at_most(tokens, n, Code.SEQ_LEN_UNSUPPORTED))
              for n, group in allowed.items() if group > 1))


def _decode(tokens: str) -> tuple[Condition, ...]:
    """What decode.cu takes, of tensors or of pages."""
    return (HALF, one_of("head_dim", 64, 128, 256, code=Code.HEAD_DIM_INVALID),
            equals("head_dim_gap", 0, Code.HEAD_DIM_INVALID), *_few_rows(tokens, MOST_ROWS),
            *(when(at_least("head_dim", 129), rule) for rule in _few_rows(tokens, MOST_ROWS_WIDE)),
            at_least("batch", 1, Code.EMPTY_INPUT), at_most("batch", MOST_GRID),
            at_least("kv_heads", 1, Code.EMPTY_INPUT), at_most("kv_heads", MOST_GRID),
            at_least("scale", 1e-30, Code.SCALE_UNSUPPORTED), equals("softcap", 0.0, Code.SOFTCAP_UNSUPPORTED),
            unit_stride("query"), aligned("query", 16))


def _decode_shared(rows: str) -> str:
    """What decode.shared_of gives for two warps and two stages: the launcher takes what the device has room for."""
    return f"256 * head_dim + (({rows}) + 7) // 8 * 16 * head_dim + ({rows}) * (4 * head_dim + 192) + 16"


# Of gemv.cu: x, shared out among the most blocks that a cluster has; beside it tiles of the weight, sums and scales.
GEMV_SHARED = "(1 + (rows > 1) + 2 * (rows > 2) + 4 * (rows > 4) + 8 * (rows > 8)) * in_features // 4 + 73728"

INT4, EIGHT_BITS = one_of("format", "int4"), one_of("format", "int8", "fp8_e4m3")
CODES: tuple[Condition, ...] = (               # what gemv.cu reads of a weight
    contiguous("weight_q", repair=False),
    *_in_place("weight_q"), multiple_of("in_features", 16), when(INT4, multiple_of("in_features", 32)),
    at_most("in_features", 1 << 15),           # 16 rows of x fit the shared memory of a cluster
    contiguous("scales"), equals("shared_rows", 0, Code.SCALE_LAYOUT_MISMATCH),
    one_of("scales.dtype", "float32", "bfloat16", "float16", code=Code.SCALE_LAYOUT_MISMATCH), contiguous("zeros"),
    when(INT4, one_of("zeros.dtype", None, "uint8", code=Code.SCALE_LAYOUT_MISMATCH)),
    when(EIGHT_BITS, one_of("zeros.dtype", None, "int8", code=Code.SCALE_LAYOUT_MISMATCH)),
    when(INT4, any_of(one_of("group_size", 32, 64), multiple_of("group_size", 128, Code.SCALE_LAYOUT_MISMATCH))),
    when(EIGHT_BITS, any_of(equals("group_size", 32), multiple_of("group_size", 64, Code.SCALE_LAYOUT_MISMATCH))))

NORM: tuple[Condition, ...] = (
    HALF, multiple_of("hidden", 8), at_most("hidden", 1 << 15), unit_stride("x"), aligned("x", 16),
    unit_stride("weight"), aligned("weight", 16),
    when(equals("dtype", "float16"), one_of("weight.dtype", None, "float16", "float32", code=Code.DTYPE_UNSUPPORTED)),
    when(equals("dtype", "bfloat16"), one_of("weight.dtype", None, "bfloat16", "float32", code=Code.DTYPE_UNSUPPORTED)))

LAST_AT_LAST = one_of("causal_align", "bottom_right", code=Code.CAUSAL_ALIGNMENT_UNSUPPORTED)

KERNELS = (
    _kernel("attention_decode", attention, _attention, 10.0, 20.0, *_decode("seq_q"),
            at_least("seq_q", 1, Code.EMPTY_INPUT), *_in_place("key"), *_in_place("value"),
            when(equals("is_causal", True), LAST_AT_LAST), when(at_least("window_left", 0), LAST_AT_LAST),
            equals("window_right", -1, Code.WINDOW_UNSUPPORTED), absent("alibi_slopes.dtype", Code.ALIBI_UNSUPPORTED),
            absent("attn_mask.dtype", Code.MASK_UNSUPPORTED), equals("dropout_p", 0.0, Code.DROPOUT_UNSUPPORTED),
            variants=("bhsd", "bshd"), shared_memory=_decode_shared("group * seq_q"),
            note="each KV head is a cluster of blocks that meet in shared memory; nothing goes through global memory"),
    _kernel("paged_attention_decode", paged_attention, _paged_attention, 10.0, 20.0, *_decode("max_seqlen_q"),
            any_of(absent("cu_seqlens_q.dtype"), present("max_seqlen_q", Code.MISSING_METADATA)),
            multiple_of("page_size", 16, Code.PAGE_SIZE_UNSUPPORTED), *_in_place("key_cache"),
            *_in_place("value_cache"),
            *(when(equals("dtype", d), one_of(f"{t}_cache.dtype", d, code=Code.KV_CACHE_DTYPE_MISMATCH))
              for t in ("key", "value") for d in ("float16", "bfloat16")),
            *(absent(f"{t}_scale.dtype", Code.KV_CACHE_DTYPE_MISMATCH) for t in ("key", "value")),
            dtypes("int32", of="block_table.dtype"), dtypes("int32", of="context_lens.dtype"),
            one_of("cu_seqlens_q.dtype", None, "int32", code=Code.DTYPE_UNSUPPORTED), unit_stride("block_table"),
            unit_stride("context_lens"), unit_stride("cu_seqlens_q"), variants=("NHD", "HND"),
            shared_memory=_decode_shared("group * max(max_seqlen_q, 1)"),
            less_work="reads each page once, where it lies; no length is read on the host"),
    _kernel("quantized_linear", quantized_linear, _quantized_linear, 10.0, 14.0, HALF, *CODES,
            at_least("rows", 1, Code.EMPTY_INPUT), at_most("rows", 16), equals("activations", "none"),
            unit_stride("bias"), shared_memory=GEMV_SHARED,
            less_work="reads the codes, and writes no dequantized weight",
            note="codes go to the tensor cores as the bits they are; nothing is converted"),
    _kernel("rms_norm", rms_norm, _rms_norm, 8.0, 10.0, *NORM, shared_memory="256",
            note="a block for each row"),
    _kernel("add_rms_norm", add_rms_norm, _add_rms_norm, 8.0, 10.0, *NORM, unit_stride("residual"),
            aligned("residual", 16), shared_memory="256", less_work="one pass for sum and norm",
            note="a block for each row"),
    _kernel("sample", sample, _sample, 6.0, 15.0, dtypes("float16", "bfloat16", "float32"), unit_stride("logits"),
            at_most("vocab", 1 << 20), shared_memory="28672",
            less_work="finds where top-k and top-p cut without a sort, in one launch",
            note="each row is a cluster of blocks that keeps it in shared memory"),
)
