"""Our own GPU kernels in CUDA C++, for what Triton cannot express: thread block clusters, custom
fragment layouts.

This file declares them; compiler.py compiles them with NVRTC when they are first called. They read
raw memory, so they take plain tensors only, and have no backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...ops.add_rms_norm import OP as add_rms_norm
from ...ops.attention import OP as attention
from ...ops.grouped_attention import OP as grouped_attention
from ...ops.linear import OP as linear
from ...ops.paged_attention import OP as paged_attention
from ...ops.quantized_linear import OP as quantized_linear
from ...ops.rms_norm import OP as rms_norm
from ...ops.sample import OP as sample
from ...spec import rules as r
from ...spec.kernel import Kernel
from ...spec.op import Op
from ...spec.reason import Code
from . import compiler

# Tests in the emulator, on the CPU, drop these rules. Clusters need compute capability 9.0.
HARDWARE: tuple[r.Condition, ...] = (r.device("cuda"), r.vendor("nvidia"), r.sm(at_least=90))
HALF = r.dtypes("float16", "bfloat16")
MAX_GRID = 65535           # grid limit of the second and third axis
MAX_ROWS = 32              # of an item or sequence: query heads of a KV head times their tokens
MAX_SEQUENCES = 1024       # of paged_attention_shared: every row of the result looks for its own
MAX_ROWS_WIDE = 16         # for head_dim > 128: more do not fit into registers


def _attention() -> Callable[..., Any]:
    from .attention.decode import attention_decode
    return attention_decode


def _paged_attention() -> Callable[..., Any]:
    from .attention.decode import paged_attention_decode
    return paged_attention_decode


def _grouped_attention() -> Callable[..., Any]:
    from .attention.grouped import grouped_attention_decode
    return grouped_attention_decode


def _paged_attention_shared() -> Callable[..., Any]:
    from .attention.grouped import paged_attention_shared
    return paged_attention_shared


def _linear() -> Callable[..., Any]:
    from .linear.rows import linear
    return linear


def _quantized_linear() -> Callable[..., Any]:
    from .linear.gemv import quantized_linear
    return quantized_linear


def _rms_norm() -> Callable[..., Any]:
    from .norm.norm import rms_norm
    return rms_norm


def _add_rms_norm() -> Callable[..., Any]:
    from .norm.norm import add_rms_norm
    return add_rms_norm


def _sample() -> Callable[..., Any]:
    from .sampling.sample import sample
    return sample


def _kernel(name: str, op: Op, load: Callable[[], Callable[..., Any]], prior: float,
            overhead_us: float, *requires: r.Condition, **more: Any) -> Kernel:
    return Kernel(f"cuda.{name}", op, load, (*HARDWARE, r.plain_tensors(), *requires),
                  package="layerzero.backends.cuda", distribution="layerzero", built=compiler.ready,
                  prior=prior, overhead_us=overhead_us, differentiable=False, traceable=False,
                  jit=True, replayable=True, **more)


def _read_in_place(tensor: str) -> tuple[r.Condition, ...]:
    """Returns the rules for a tensor that is too large to copy: 16-byte aligned rows."""
    return (r.unit_stride(tensor, repair=False),
            r.Rule(f"{tensor}.alignment", "ge", 16, Code.POINTER_ALIGNMENT))


def _few_rows(tokens: str, limit: int) -> tuple[r.Condition, ...]:
    """Returns rules for group * tokens <= most, one per number of tokens: a rule reads one fact."""
    # tokens -> the smallest group that allows no more
    allowed = {limit // group: group for group in range(limit, 0, -1)}
    return (r.at_most("group", limit), r.at_most(tokens, limit, Code.SEQ_LEN_UNSUPPORTED),
            *(r.when(r.at_least("group", group), r.at_most(tokens, n, Code.SEQ_LEN_UNSUPPORTED))
              for n, group in allowed.items() if group > 1))


def _decode_rules(tokens: str) -> tuple[r.Condition, ...]:
    """Returns the rules that decode.cu and grouped.cu have for all K and V."""
    return (HALF, r.one_of("head_dim", 64, 128, 256, code=Code.HEAD_DIM_INVALID),
            r.equals("head_dim_gap", 0, Code.HEAD_DIM_INVALID), *_few_rows(tokens, MAX_ROWS),
            *(r.when(r.at_least("head_dim", 129), rule)
              for rule in _few_rows(tokens, MAX_ROWS_WIDE)),
            r.at_least("kv_heads", 1, Code.EMPTY_INPUT), r.at_most("kv_heads", MAX_GRID),
            r.at_least("scale", 1e-30, Code.SCALE_UNSUPPORTED),
            r.unit_stride("query"), r.aligned("query", 16))


# of decode.cu, beyond those
BATCH: tuple[r.Condition, ...] = (
    r.at_least("batch", 1, Code.EMPTY_INPUT), r.at_most("batch", MAX_GRID),
    r.equals("softcap", 0.0, Code.SOFTCAP_UNSUPPORTED))

PAGES: tuple[r.Condition, ...] = (             # how both read a paged cache
    r.any_of(r.absent("cu_seqlens_q.dtype"), r.present("max_seqlen_q", Code.MISSING_METADATA)),
    r.multiple_of("page_size", 16, Code.PAGE_SIZE_UNSUPPORTED), *_read_in_place("key_cache"),
    *_read_in_place("value_cache"),
    *(r.when(r.equals("dtype", d),
             r.one_of(f"{t}_cache.dtype", d, code=Code.KV_CACHE_DTYPE_MISMATCH))
      for t in ("key", "value") for d in ("float16", "bfloat16")),
    *(r.absent(f"{t}_scale.dtype", Code.KV_CACHE_DTYPE_MISMATCH) for t in ("key", "value")),
    r.dtypes("int32", of="block_table.dtype"), r.dtypes("int32", of="context_lens.dtype"),
    r.one_of("cu_seqlens_q.dtype", None, "int32", code=Code.DTYPE_UNSUPPORTED),
    r.unit_stride("block_table"), r.unit_stride("context_lens"), r.unit_stride("cu_seqlens_q"))


def _decode_shared(rows: str) -> str:
    """Returns decode.shared_bytes for two warps and stages; the launcher uses as many as fit."""
    return (f"256 * head_dim + (({rows}) + 7) // 8 * 16 * head_dim + ({rows}) * (4 * head_dim + "
            "192) + 16")


# shared memory of the small configurations of attention/grouped, at most
GROUPED_SHARED, CASCADE_SHARED = "70696 + 28920 * (head_dim > 128)", "100368"

# Of gemv.cu: x, split over the largest cluster, and tiles of weight, sums and scales.
GEMV_SHARED = ("(1 + (rows > 1) + 2 * (rows > 2) + 4 * (rows > 4) + 8 * (rows > 8)) * in_features "
               "// 4 + 73728")

# of rows.cu; it uses as much as there is
ROWS_SHARED = "65536"

INT4, EIGHT_BITS = r.one_of("format", "int4"), r.one_of("format", "int8", "fp8_e4m3")
WEIGHT_RULES: tuple[r.Condition, ...] = (      # how gemv.cu reads a weight
    r.one_of("format", "int4", "int8", "fp8_e4m3", code=Code.QUANT_FORMAT_UNSUPPORTED),
    r.contiguous("weight_q", repair=False),
    *_read_in_place("weight_q"), r.multiple_of("in_features", 16),
    r.when(INT4, r.multiple_of("in_features", 32)),
    # 16 rows of x fit into the shared memory of a cluster
    r.at_most("in_features", 1 << 15),
    r.contiguous("scales"), r.equals("shared_rows", 0, Code.SCALE_LAYOUT_MISMATCH),
    r.one_of("scales.dtype", "float32", "bfloat16", "float16", code=Code.SCALE_LAYOUT_MISMATCH),
    r.contiguous("zeros"),
    r.when(INT4, r.one_of("zeros.dtype", None, "uint8", code=Code.SCALE_LAYOUT_MISMATCH)),
    r.when(EIGHT_BITS, r.one_of("zeros.dtype", None, "int8", code=Code.SCALE_LAYOUT_MISMATCH)),
    r.when(INT4, r.any_of(r.one_of("group_size", 32, 64),
                          r.multiple_of("group_size", 128, Code.SCALE_LAYOUT_MISMATCH))),
    r.when(EIGHT_BITS, r.any_of(r.equals("group_size", 32),
                                r.multiple_of("group_size", 64, Code.SCALE_LAYOUT_MISMATCH))))

NORM: tuple[r.Condition, ...] = (
    HALF, r.multiple_of("hidden", 8), r.at_most("hidden", 1 << 15), r.unit_stride("x"),
    r.aligned("x", 16), r.unit_stride("weight"), r.aligned("weight", 16),
    r.when(r.equals("dtype", "float16"), r.one_of("weight.dtype", None, "float16", "float32",
                                                  code=Code.DTYPE_UNSUPPORTED)),
    r.when(r.equals("dtype", "bfloat16"), r.one_of("weight.dtype", None, "bfloat16", "float32",
                                                   code=Code.DTYPE_UNSUPPORTED)))

BOTTOM_RIGHT = r.one_of("causal_align", "bottom_right", code=Code.CAUSAL_ALIGNMENT_UNSUPPORTED)

KERNELS = (
    _kernel("attention_decode", attention, _attention, 10.0, 20.0, *_decode_rules("seq_q"),
            *BATCH, r.at_least("seq_q", 1, Code.EMPTY_INPUT), *_read_in_place("key"),
            *_read_in_place("value"), r.when(r.equals("is_causal", True), BOTTOM_RIGHT),
            r.when(r.at_least("window_left", 0), BOTTOM_RIGHT),
            r.equals("window_right", -1, Code.WINDOW_UNSUPPORTED),
            r.absent("alibi_slopes.dtype", Code.ALIBI_UNSUPPORTED),
            r.absent("attn_mask.dtype", Code.MASK_UNSUPPORTED),
            r.equals("dropout_p", 0.0, Code.DROPOUT_UNSUPPORTED),
            variants=("bhsd", "bshd"), shared_memory=_decode_shared("group * seq_q"),
            note="each KV head is a cluster of blocks that meet in shared memory; nothing goes "
                 "through global memory"),
    _kernel("paged_attention_decode", paged_attention, _paged_attention, 10.0, 20.0,
            *_decode_rules("max_seqlen_q"), *BATCH, *PAGES, variants=("NHD", "HND"),
            shared_memory=_decode_shared("group * max(max_seqlen_q, 1)"),
            less_work="reads each page once, where it lies; no length is read on the host"),
    _kernel("paged_attention_shared", paged_attention, _paged_attention_shared, 5.0, 40.0,
            *_decode_rules("max_seqlen_q"), *PAGES,
            r.at_least("batch", 2, Code.SHAPE_UNSUPPORTED), r.at_most("batch", MAX_SEQUENCES),
            r.any_of(r.absent("max_seqlen_q"), r.at_least("max_seqlen_q", 1, Code.EMPTY_INPUT)),
            r.at_least("tokens", 1, Code.EMPTY_INPUT), r.at_most("tokens", MAX_GRID),
            r.at_most("seq_k", 1 << 22), variants=("NHD", "HND"),
            shared_memory=CASCADE_SHARED,
            note="finds on the device which leading pages neighbouring sequences share, and reads "
                 "these once"),
    _kernel("grouped_attention_decode", grouped_attention, _grouped_attention, 10.0, 30.0,
            *_decode_rules("max_seqlen_q"), r.at_least("max_seqlen_q", 1, Code.EMPTY_INPUT),
            r.at_least("n_items", 1, Code.EMPTY_INPUT), r.at_most("n_items", 4096),
            r.at_least("tokens_q", 1, Code.EMPTY_INPUT), r.at_most("tokens_q", MAX_GRID),
            r.at_most("tokens_k", 1 << 29), *_read_in_place("key"), *_read_in_place("value"),
            r.contiguous("items"), r.absent("chunk_starts.dtype", Code.SHAPE_UNSUPPORTED),
            r.absent("chunk_lengths.dtype", Code.SHAPE_UNSUPPORTED),
            shared_memory=GROUPED_SHARED,
            less_work="reads a key once for all items that see it; no item is read on the host"),
    _kernel("linear_rows", linear, _linear, 1.1, 14.0, HALF,
            r.at_least("rows", 1, Code.EMPTY_INPUT), r.at_most("rows", 16), r.unit_stride("x"),
            *_read_in_place("weight"), r.absent("activation"),
            r.at_least("out_features", 1, Code.EMPTY_INPUT),
            r.at_least("in_features", 8), r.multiple_of("in_features", 8),
            r.at_most("in_features", 1 << 15),
            r.when(r.at_least("rows", 9), r.at_most("in_features", 1 << 14)), r.unit_stride("bias"),
            shared_memory=ROWS_SHARED,
            note="in a graph the weight is on its way before the kernels in front have ended"),
    _kernel("quantized_linear", quantized_linear, _quantized_linear, 10.0, 14.0, HALF,
            *WEIGHT_RULES, r.at_least("rows", 1, Code.EMPTY_INPUT), r.at_most("rows", 16),
            r.equals("activations", "none"), r.unit_stride("bias"), shared_memory=GEMV_SHARED,
            less_work="reads the codes, and writes no dequantized weight",
            note="codes go to the tensor cores as the bits they are; nothing is converted"),
    _kernel("rms_norm", rms_norm, _rms_norm, 8.0, 10.0, *NORM, shared_memory="256",
            note="a block for each row"),
    _kernel("add_rms_norm", add_rms_norm, _add_rms_norm, 8.0, 10.0, *NORM,
            r.unit_stride("residual"), r.aligned("residual", 16), shared_memory="256",
            less_work="one pass for sum and norm", note="a block for each row"),
    _kernel("sample", sample, _sample, 6.0, 15.0, r.dtypes("float16", "bfloat16", "float32"),
            r.unit_stride("logits"), r.at_most("vocab", 1 << 20), shared_memory="28672",
            less_work="finds where top-k and top-p cut without a sort, in one launch",
            note="each row is a cluster of blocks that keeps it in shared memory"),
)
