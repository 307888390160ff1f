"""torch's own scaled dot-product attention: the default choice, and each implementation behind it
by name.

The named ones are the aten entry points below `F.scaled_dot_product_attention`. They skip its
checks and padding, so its checks are rules here: some entries crash the process or give wrong
results when one is broken. The notes say which.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..ops.attention import OP as attention
from ..ops.formulas.common import FLOATS, position_terms
from ..spec import rules as r
from ..spec.kernel import SDPA, SDPA_BACKENDS, ByFact, Const, Direct, Kernel, direct
from ..spec.reason import Code
from ._sequences import EFFICIENT_DIM, EFFICIENT_DIM_ON_CUDA, POSITIVE_SCALE, sdpa

HALF = ("float16", "bfloat16")
NONE = Const(None)
FLASH, EFFICIENT, MATH, CUDNN = SDPA_BACKENDS   # torch's names of its implementations

# Rules of kernels that do not support a parameter.
NO_SOFTCAP = r.equals("softcap", 0.0, Code.SOFTCAP_UNSUPPORTED)
NO_ALIBI = r.absent("alibi_slopes.dtype", Code.ALIBI_UNSUPPORTED)
NO_WINDOW = (r.equals("window_left", -1, Code.WINDOW_UNSUPPORTED),
             r.equals("window_right", -1, Code.WINDOW_UNSUPPORTED))
NO_LSE = r.off("return_lse", Code.LSE_UNSUPPORTED)
NO_DROPOUT = r.equals("dropout_p", 0.0, Code.DROPOUT_UNSUPPORTED)
NO_MASK = r.absent("attn_mask.dtype", Code.MASK_UNSUPPORTED)
NO_EXTRAS = (NO_SOFTCAP, NO_ALIBI, *NO_WINDOW)

WITH_LSE = r.on("return_lse")
TOP_LEFT = r.any_of(r.off("is_causal"), r.equals("causal_offset", 0),
                    r.one_of("causal_align", None, "top_left",
                             code=Code.CAUSAL_ALIGNMENT_UNSUPPORTED))
BOTTOM_RIGHT = r.any_of(r.off("is_causal"), r.equals("causal_offset", 0),
                        r.one_of("causal_align", "bottom_right",
                                 code=Code.CAUSAL_ALIGNMENT_UNSUPPORTED))
# Masked scores are -inf before scaling: times 0 that is NaN, times a negative number +inf.
CAUSAL_SCALE = r.any_of(r.off("is_causal"), POSITIVE_SCALE)
HAS_HEADS = r.at_least("kv_heads", 1, Code.EMPTY_INPUT)
HAS_BATCH = r.at_least("batch", 1, Code.EMPTY_INPUT)
NOT_EMPTY = (r.at_least("seq_q", 1, Code.EMPTY_INPUT), r.at_least("seq_k", 1, Code.EMPTY_INPUT),
             HAS_HEADS)
UNIT_STRIDES = (r.unit_stride("query"), r.unit_stride("key"), r.unit_stride("value"))
MASK_WITHOUT_GRAD = r.differs("attn_mask.requires_grad", True, Code.BACKWARD_UNSUPPORTED)
SLOPES_WITHOUT_GRAD = r.differs("alibi_slopes.requires_grad", True, Code.BACKWARD_UNSUPPORTED)
# The entries return the log-sum-exp without a gradient: a loss on it would silently lose its part.
LSE_WITHOUT_GRAD = r.any_of(r.off("return_lse"), r.off("grad", Code.BACKWARD_UNSUPPORTED))
FLOAT_MASK = r.one_of("attn_mask.dtype", None, *FLOATS, code=Code.MASK_DTYPE_UNSUPPORTED)
SAME_HEAD_DIM = r.equals("head_dim_gap", 0, Code.HEAD_DIM_INVALID)
# CUDA kernels load 16 bytes at a time: unaligned, cuDNN gives wrong results, flash crashes.
ON_16_BYTES = (r.aligned("query", 16), r.aligned("key", 16), r.aligned("value", 16))
# A mask from an unaligned address leaves the device in a failed state (torch 2.11, H200).
MASK_ON_16_BYTES = r.when(r.present("attn_mask.dtype"), r.aligned("attn_mask", 16))
SMALL_MASK = 1 << 16       # elements
MASK_NDIM = r.one_of("attn_mask.ndim", None, 2, 3, 4, code=Code.MASK_BROADCAST_UNSUPPORTED)


def _entry(name: str) -> Callable[..., Any]:
    entry: Callable[..., Any] | None = getattr(torch, name, None)
    if entry is None:
        raise ImportError(f"torch.{name} (torch {torch.__version__})")
    return entry


# enable_gqa makes torch look for groups, which takes 1.4 us on a Neoverse-N1.
GROUPS = ByFact("group", 1, False, True)


def _sdpa() -> Direct:
    torchs_own = torch.nn.functional.scaled_dot_product_attention
    return direct(torchs_own if torch.version.cuda is None else ByFact("grad", False, torchs_own,
                                                                       sdpa),
                  "query", "key", "value", "attn_mask", "dropout_p", "is_causal", scale="scale",
                  enable_gqa=GROUPS)


def _sdpa_bias() -> Callable[..., Any]:
    """Leaves the choice to torch; everything that depends on position is folded into an additive
    mask."""
    def run(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
            dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, *,
            causal_align: str | None = None, window_left: int = -1, window_right: int = -1,
            alibi_slopes: Tensor | None = None) -> Tensor:
        mask = additive_mask(query, key, attn_mask, is_causal, causal_align, window_left,
                             window_right, alibi_slopes, query.dtype)
        if mask.is_cuda and (mask.stride(-1) != 1 or mask.shape[-1] != key.shape[2]):
            # torch's memory-efficient kernel refuses a mask that is expanded along its rows
            mask = mask.expand(*mask.shape[:-1], key.shape[2]).contiguous()
        return sdpa(query, key, value, mask, dropout_p, scale=scale, enable_gqa=True)

    return run


def _math() -> Direct:
    return direct(_entry("_scaled_dot_product_attention_math"), "query", "key", "value",
                  "attn_mask", "dropout_p", "is_causal", scale="scale", enable_gqa=GROUPS, item=0)


# CPU

def _flash() -> Direct:
    return direct(_entry("_scaled_dot_product_flash_attention_for_cpu"), "query", "key", "value",
                  Const(0.0), "is_causal", attn_mask="attn_mask", scale="scale", item=0)


def _flash_lse() -> Direct:
    return direct(_entry("_scaled_dot_product_flash_attention_for_cpu"), "query", "key", "value",
                  Const(0.0), "is_causal", scale="scale", first=2)


def _flash_decode() -> Direct:
    """Runs one query that sees every key, without is_causal, which torch would align top-left."""
    return direct(_entry("_scaled_dot_product_flash_attention_for_cpu"), "query", "key", "value",
                  Const(0.0), Const(False), scale="scale", item=0)


def _flash_packed() -> Callable[..., Any]:
    """Packs the query heads of a KV head into rows of one query, so that it is read once."""
    flash = _entry("_scaled_dot_product_flash_attention_for_cpu")

    def run(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None,
            return_lse: bool = False) -> Any:
        batch, heads, seq, dim = query.shape
        out, lse = flash(query.reshape(batch, key.shape[1], -1, dim), key, value, 0.0, False,
                         scale=scale)
        out = out.reshape(batch, heads, seq, dim)
        return (out, lse.reshape(batch, heads, seq)) if return_lse else out

    return run


def _flash_bias() -> Callable[..., Any]:
    """Folds everything that depends on position into one additive mask."""
    flash = _entry("_scaled_dot_product_flash_attention_for_cpu")

    def run(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
            is_causal: bool = False, scale: float | None = None, *, causal_align: str | None = None,
            window_left: int = -1, window_right: int = -1, alibi_slopes: Tensor | None = None,
            return_lse: bool = False) -> Any:
        # float32 for half types, which the entry takes: bfloat16 would round ALiBi's distances.
        mask = additive_mask(query, key, attn_mask, is_causal, causal_align, window_left,
                             window_right, alibi_slopes,
                             torch.promote_types(query.dtype, torch.float32))
        out, lse = flash(query, key, value, 0.0, False, attn_mask=mask, scale=scale)
        if not return_lse:
            return out
        dead = (mask == -math.inf).all(-1)      # the entry gives 0 for a row that sees no key
        return out, lse.masked_fill(dead, -math.inf)

    return run


def _causal_mask(seq_q: int, seq_k: int, offset: int, dtype: torch.dtype,
                 device: torch.device) -> Tensor:
    later = torch.full((1, 1, seq_q, seq_k), -math.inf, dtype=dtype, device=device)
    return later.triu_(1 + offset)              # two steps in place of eight


@lru_cache(maxsize=4)
def _small_causal_mask(seq_q: int, seq_k: int, offset: int, dtype: torch.dtype) -> Tensor:
    """Remembers masks of calls on the CPU that take about as long as the mask: every layer of a
    model asks for the same one. Made outside of inference mode, for a later call that trains."""
    with torch.inference_mode(False):
        return _causal_mask(seq_q, seq_k, offset, dtype, torch.device("cpu"))


def additive_mask(query: Tensor, key: Tensor, attn_mask: Tensor | None, is_causal: bool,
                  causal_align: str | None, window_left: int, window_right: int,
                  alibi_slopes: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Returns mask, causality, window and ALiBi as one 4-D tensor to add to the scores."""
    seq_q, seq_k = query.shape[2], key.shape[2]
    if is_causal and attn_mask is None and window_left < 0 and alibi_slopes is None:
        offset = seq_k - seq_q if causal_align == "bottom_right" else 0
        if (type(query) is Tensor and query.device.type == "cpu"
                and not torch.compiler.is_compiling() and seq_q * seq_k <= SMALL_MASK):
            return _small_causal_mask(seq_q, seq_k, offset, dtype)
        return _causal_mask(seq_q, seq_k, offset, dtype, query.device)
    bias, hidden = position_terms(seq_q, seq_k, is_causal, causal_align, window_left, window_right,
                                  alibi_slopes, query.device)
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        bias = attn_mask.to(dtype) if bias is None else bias + attn_mask
    elif attn_mask is not None:
        hidden = ~attn_mask if hidden is None else hidden | ~attn_mask
    if bias is None:
        assert hidden is not None, "the rules let a call through that has nothing to fold"
        bias = torch.zeros((), dtype=dtype, device=query.device).expand(hidden.shape)
    mask = bias.to(dtype) if hidden is None else bias.to(dtype).masked_fill(hidden, -math.inf)
    if not torch.is_grad_enabled():            # a bias that could be trained keeps torch off flash
        mask = mask.detach()
    return mask[(None,) * (4 - mask.dim())]


# NVIDIA

def _flash_cuda() -> Direct:
    return direct(_entry("_scaled_dot_product_flash_attention"), "query", "key", "value",
                  "dropout_p", "is_causal", Const(False), scale="scale", item=0)


def _flash_cuda_lse() -> Direct:
    return direct(_entry("_scaled_dot_product_flash_attention"), "query", "key", "value",
                  Const(0.0), "is_causal", Const(False), scale="scale", first=2)


def _flash_window() -> Callable[..., Any]:
    """Returns the lower flash entry, which has a window and takes (batch, seq, heads, dim)."""
    flash = torch.ops.aten._flash_attention_forward

    def run(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False,
            scale: float | None = None, *, window_left: int = -1, window_right: int = -1,
            dropout_p: float = 0.0) -> Tensor:
        return flash(
            query,
            key,
            value,
            None,
            None,
            query.shape[1],
            key.shape[1],
            dropout_p,
            is_causal,
            False,  # type: ignore[no-any-return]
            scale=scale,
            window_size_left=window_left,
            window_size_right=window_right,
        )[0]

    return run


def _efficient() -> Direct:
    """Always computes the log-sum-exp: backward needs it, and it is a thousandth of the work."""
    return direct(_entry("_scaled_dot_product_efficient_attention"), "query", "key", "value", NONE,
                  Const(True), "dropout_p", "is_causal", scale="scale", item=0)


def _efficient_lse() -> Callable[..., Any]:
    efficient = _entry("_scaled_dot_product_efficient_attention")

    def run(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False,
            scale: float | None = None) -> tuple[Tensor, Tensor]:
        out, lse = efficient(query, key, value, None, True, 0.0, is_causal, scale=scale)[:2]
        return out, lse[..., :query.shape[2]]          # it comes padded to a multiple of 32 rows

    return run


def _efficient_bias() -> Callable[..., Any]:
    efficient = _entry("_scaled_dot_product_efficient_attention")

    def run(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
            dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, *,
            causal_align: str | None = None, window_left: int = -1, window_right: int = -1,
            alibi_slopes: Tensor | None = None) -> Tensor:
        mask = additive_mask(query, key, attn_mask, is_causal, causal_align, window_left,
                             window_right, alibi_slopes, query.dtype)
        # Its loads are 16 elements wide: every row of the mask must be aligned to that.
        seq_k = key.shape[2]
        mask = mask.expand(*mask.shape[:-1], seq_k)
        mask = (torch.nn.functional.pad(mask, (0, -seq_k % 16))[..., :seq_k] if seq_k % 16
                else mask.contiguous())
        mask = mask.expand(*query.shape[:-1], seq_k)
        return efficient(query, key, value, mask, True, dropout_p, False, scale=scale)[0]  # type: ignore[no-any-return]

    return run


def _cudnn() -> Direct:
    return direct(_entry("_scaled_dot_product_cudnn_attention"), "query", "key", "value", NONE,
                  Const(True), Const(0.0), "is_causal", Const(False), scale="scale", item=0)


def _cudnn_lse() -> Callable[..., Any]:
    cudnn = _entry("_scaled_dot_product_cudnn_attention")

    def run(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False,
            scale: float | None = None) -> tuple[Tensor, Tensor]:
        out, lse = cudnn(query, key, value, None, True, 0.0, is_causal, False, scale=scale)[:2]
        return out, lse.reshape(query.shape[:-1])      # (batch, heads, seq, 1) in some versions

    return run


def _cudnn_bias() -> Callable[..., Any]:
    cudnn = _entry("_scaled_dot_product_cudnn_attention")

    def run(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
            is_causal: bool = False, scale: float | None = None, *, causal_align: str | None = None,
            window_left: int = -1, window_right: int = -1, alibi_slopes: Tensor | None = None,
            return_lse: bool = False) -> Any:
        mask = additive_mask(query, key, attn_mask, is_causal, causal_align, window_left,
                             window_right, alibi_slopes, query.dtype).contiguous()
        # With gaps between its numbers a mask is misread (torch 2.11, H200); expanded it is not.
        mask = mask.expand(query.shape[0], -1, query.shape[2], key.shape[2])
        out, lse = cudnn(query, key, value, mask, True, 0.0, False, False, scale=scale)[:2]
        return (out, lse.reshape(query.shape[:-1])) if return_lse else out

    return run


WINDOWED = r.any_of(r.at_least("window_left", 0, Code.FEATURE_UNSUPPORTED),
                    r.at_least("window_right", 0, Code.FEATURE_UNSUPPORTED))
FOLDS_SOMETHING = r.any_of(r.on("is_causal"), *WINDOWED.rules)
FOLDS_PER_HEAD = r.any_of(r.present("alibi_slopes.dtype"),
                          r.present("attn_mask.dtype", Code.FEATURE_UNSUPPORTED))
FOLDS_ANY = r.any_of(*FOLDS_SOMETHING.rules, *FOLDS_PER_HEAD.rules)
FOLDS_WITHOUT_GRAD = (MASK_WITHOUT_GRAD, SLOPES_WITHOUT_GRAD, LSE_WITHOUT_GRAD)
NO_BOOL_FOR_CUDNN = r.when(r.dtypes(*HALF), r.any_of(
    r.differs("device", "cuda"), r.differs("attn_mask.dtype", "bool", Code.MASK_DTYPE_UNSUPPORTED)))
# Up to torch 2.11 it crashes the process on a CPU if there is nothing to compute.
SDPA_ON_CPU: tuple[r.Condition, ...] = tuple(r.when(r.device("cpu"), rule) for rule in (
    r.at_least("batch", 1, Code.EMPTY_INPUT), r.at_least("seq_q", 1, Code.EMPTY_INPUT),
    r.at_least("seq_k", 1, Code.EMPTY_INPUT)))
# Grids have batch and heads on axes that are limited to 65535. Torch's own choice launches more all
# the same, and leaves part of the result unwritten (torch 2.11, H200).
GRID = tuple(r.at_most(size, 65535, Code.CUDA_BLOCK_LIMIT_EXCEEDED) for size in ("batch", "heads"))
# On CUDA torch may choose cuDNN or flash, which need alignment, or pad, which copies.
SDPA_ON_CUDA: tuple[r.Condition, ...] = (
    r.when(r.device("cuda"), HAS_BATCH),               # cuDNN gives None for an empty batch
    r.when(r.device("cuda"), MASK_ON_16_BYTES),
    *EFFICIENT_DIM_ON_CUDA, *(r.when(r.device("cuda"), rule) for rule in GRID),
    *(r.when(r.device("cuda"), r.when(r.multiple_of("head_dim", 8), rule)) for rule in ON_16_BYTES))
# flash and cuDNN, which take half types
SCALE_ON_CUDA = r.when(r.device("cuda"), r.when(r.dtypes(*HALF), POSITIVE_SCALE))

CPU_FLASH: tuple[r.Condition, ...] = (
    r.device("cpu"), r.dtypes(*FLOATS), SAME_HEAD_DIM, *NOT_EMPTY, *UNIT_STRIDES, NO_DROPOUT,
    NO_SOFTCAP)
CUDA = (r.device("cuda"), r.vendor("nvidia"))
CUDA_FLASH: tuple[r.Condition, ...] = (
    *CUDA, r.sm(at_least=80), r.sm(below=122), r.dtypes(*HALF), r.multiple_of("head_dim", 8),
    r.at_most("head_dim", 256),
    SAME_HEAD_DIM, *NOT_EMPTY, HAS_BATCH, *GRID, *UNIT_STRIDES, *ON_16_BYTES, NO_MASK, NO_SOFTCAP,
    NO_ALIBI, POSITIVE_SCALE,
    # its backward does not fit into the shared memory of these
    r.any_of(r.off("grad"), r.at_most("head_dim", 192),
             r.Rule("sm", "not_in", (86, 87, 88, 89, 120, 121), Code.BACKWARD_UNSUPPORTED)))
CUDA_EFFICIENT: tuple[r.Condition, ...] = (
    *CUDA, r.sm(at_least=50), r.sm(below=122), r.dtypes("float16", "bfloat16", "float32"),
    r.any_of(r.one_of("dtype", "float16", "float32"), r.sm(at_least=80)),
    r.when(r.dtypes(*HALF), r.multiple_of("head_dim", 8)),
    r.when(r.dtypes(*HALF), r.multiple_of("head_dim_v", 8)),
    r.multiple_of("head_dim", 4), r.multiple_of("head_dim_v", 4),
    *EFFICIENT_DIM, r.equals("group", 1, Code.GQA_UNSUPPORTED), *NOT_EMPTY,
    HAS_BATCH, *GRID, *UNIT_STRIDES, *ON_16_BYTES, MASK_ON_16_BYTES, NO_SOFTCAP)
CUDA_CUDNN: tuple[r.Condition, ...] = (
    *CUDA, r.sm(at_least=80), r.sm(below=122), r.dtypes(*HALF), r.multiple_of("head_dim", 8),
    r.multiple_of("head_dim_v", 8), r.at_most("head_dim", 128), r.at_most("head_dim_v", 128),
    r.at_least("seq_q", 1, Code.EMPTY_INPUT), r.at_least("seq_k", 2, Code.SEQ_LEN_UNSUPPORTED),
    HAS_HEADS, HAS_BATCH, *GRID, *UNIT_STRIDES, *ON_16_BYTES, MASK_ON_16_BYTES, NO_DROPOUT,
    NO_SOFTCAP, POSITIVE_SCALE)
CUDNN_PLAIN: tuple[r.Condition, ...] = (*CUDA_CUDNN, NO_MASK, NO_ALIBI, *NO_WINDOW, TOP_LEFT)

CUDNN_PLANS = "builds a plan for every new shape: 59 ms for one more key on an H200, then fast"
BHSD = ("bhsd",)
KV_ONCE = "reads keys and values once for all query heads that share them"
# Before 2.9 torch falls back on its math kernel where KV heads are shared. Since then its own flash
# kernel serves those, and products of a few packed rows are faster than that on x86 only: on a
# Neoverse-N1 they took 0.9 to 2 times as long, depending on how torch was built.
PACKING_PAYS = () if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9) else (
    r.cpu_isa("avx2"),)

KERNELS = (
    Kernel("torch.sdpa", attention, _sdpa, sdpa_backend=SDPA,
           prior=5.5, overhead_us=2.0, variants=BHSD, baseline=True, requires=(
        HAS_HEADS, MASK_NDIM, *NO_EXTRAS, NO_LSE, TOP_LEFT, CAUSAL_SCALE, *SDPA_ON_CPU,
        *SDPA_ON_CUDA, SCALE_ON_CUDA, NO_BOOL_FOR_CUDNN),
        note="torch's default choice, against which everything is compared; with cuDNN a bool mask "
             "that hides a whole row gives the mean of all values, and with the efficient kernel "
             "a row that an additive mask hides by its lowest number throughout gives no mean"),
    Kernel("torch.sdpa_bias", attention, _sdpa_bias, sdpa_backend=SDPA,
           prior=3.5, overhead_us=20.0, variants=BHSD, baseline=True, backward_varies_on=("cuda",),
           workspace="2 * itemsize * elements", requires=(
               HAS_HEADS, NO_SOFTCAP, NO_LSE, SLOPES_WITHOUT_GRAD, *SDPA_ON_CPU, *SDPA_ON_CUDA,
               FOLDS_ANY)),
    Kernel("torch.sdpa_math", attention, _math, sdpa_backend=MATH,
           prior=1.2, overhead_us=15.0, variants=BHSD,
           workspace="3 * max(itemsize, 4) * elements", requires=(
               HAS_HEADS, FLOAT_MASK, *NO_EXTRAS, NO_LSE, TOP_LEFT),
           note="adds a bool mask as 0 and 1; divides by zero with no KV head"),
    Kernel("torch.sdpa_flash", attention, _flash, sdpa_backend=FLASH, batch_invariant=True,
           # half types it packs or not, depending on how many heads there are for a thread
           tp_invariant=True, invariant_when=(r.device("cpu"), r.dtypes("float32")),
           torch=">=2.9", prior=6.0, variants=BHSD, requires=(
        *CPU_FLASH, FLOAT_MASK,
        r.one_of("attn_mask.ndim", None, 2, 4, code=Code.MASK_BROADCAST_UNSUPPORTED),
        MASK_WITHOUT_GRAD, NO_ALIBI, *NO_WINDOW, NO_LSE, TOP_LEFT, CAUSAL_SCALE),
        note="takes fewer KV heads since torch 2.9; kills the process on an empty sequence; reads "
             "a last dimension with gaps as if it had none"),
    Kernel("torch.sdpa_flash_lse", attention, _flash_lse, sdpa_backend=FLASH,
           torch=">=2.9", prior=6.0, variants=BHSD, differentiable=False,
           requires=(*CPU_FLASH, NO_MASK, NO_ALIBI, *NO_WINDOW, WITH_LSE, TOP_LEFT, CAUSAL_SCALE)),
    Kernel("torch.sdpa_flash_decode", attention, _flash_decode, sdpa_backend=FLASH,
           torch=">=2.9", prior=6.0, variants=BHSD,
           less_work="builds no mask", requires=(
        *CPU_FLASH, NO_MASK, NO_ALIBI, *NO_WINDOW, NO_LSE, r.on("is_causal"),
        r.equals("seq_q", 1, Code.SEQ_LEN_UNSUPPORTED), BOTTOM_RIGHT)),
    Kernel("torch.sdpa_flash_packed", attention, _flash_packed, sdpa_backend=FLASH,
           prior=13.0, overhead_us=2.0, variants=BHSD,
           less_work=KV_ONCE, less_work_when=PACKING_PAYS, requires=(
        *CPU_FLASH, NO_MASK, NO_ALIBI, *NO_WINDOW, LSE_WITHOUT_GRAD,
        r.equals("seq_q", 1, Code.SEQ_LEN_UNSUPPORTED),
        r.at_least("group", 2), BOTTOM_RIGHT)),
    Kernel("torch.sdpa_flash_bias", attention, _flash_bias, sdpa_backend=FLASH,
           torch=">=2.9", prior=4.0, overhead_us=15.0, variants=BHSD,
           workspace="2 * max(itemsize, 4) * seq_q * seq_k", requires=(
               *CPU_FLASH, NO_MASK, NO_ALIBI, LSE_WITHOUT_GRAD, FOLDS_SOMETHING)),
    Kernel("torch.sdpa_flash_bias_heads", attention, _flash_bias, sdpa_backend=FLASH,
           torch=">=2.9", prior=3.5, overhead_us=20.0,
           variants=BHSD, workspace="2 * max(itemsize, 4) * elements", requires=(
               *CPU_FLASH, *FOLDS_WITHOUT_GRAD, FOLDS_PER_HEAD)),
    Kernel("torch.sdpa_flash_cuda", attention, _flash_cuda, sdpa_backend=FLASH,
           prior=12.0, variants=BHSD, requires=(
        *CUDA_FLASH, *NO_WINDOW, NO_LSE, BOTTOM_RIGHT),
        less_work="builds no mask and skips what it would hide",
        less_work_when=(r.on("is_causal"), r.differs("causal_offset", 0)),
        note="aligns causality bottom-right, which is why torch refuses it unequal lengths"),
    Kernel("torch.sdpa_flash_cuda_lse", attention, _flash_cuda_lse, sdpa_backend=FLASH,
           prior=12.0, variants=BHSD, differentiable=False,
           requires=(*CUDA_FLASH, *NO_WINDOW, NO_DROPOUT, WITH_LSE, BOTTOM_RIGHT,
                     # a row that sees no key comes back as +inf
                     r.any_of(r.off("is_causal"),
                              r.at_least("causal_offset", 0, Code.LSE_UNSUPPORTED)))),
    Kernel("torch.sdpa_flash_window", attention, _flash_window, sdpa_backend=FLASH,
           prior=12.0, overhead_us=2.0, variants=("bshd",),
           less_work="builds no mask and reads only the window",
           requires=(*CUDA_FLASH, NO_LSE, WINDOWED,
                     r.any_of(r.equals("causal_offset", 0),
                              r.one_of("causal_align", "bottom_right",
                                       code=Code.CAUSAL_ALIGNMENT_UNSUPPORTED)),
                     # no right limit is one of seq_k to it, and one of seq_k or more is none
                     r.any_of(r.on("is_causal"),
                              r.at_least("causal_offset", 0, Code.WINDOW_UNSUPPORTED)))),
    Kernel("torch.sdpa_efficient", attention, _efficient, sdpa_backend=EFFICIENT,
           prior=8.0, variants=BHSD, deterministic_backward=False,
           requires=(*CUDA_EFFICIENT, NO_MASK, NO_ALIBI, *NO_WINDOW, NO_LSE, TOP_LEFT)),
    Kernel("torch.sdpa_efficient_lse", attention, _efficient_lse, sdpa_backend=EFFICIENT,
           prior=8.0, overhead_us=1.0, variants=BHSD,
           differentiable=False, requires=(
               *CUDA_EFFICIENT, NO_DROPOUT, NO_MASK, NO_ALIBI, *NO_WINDOW, WITH_LSE, TOP_LEFT)),
    Kernel("torch.sdpa_efficient_bias", attention, _efficient_bias, sdpa_backend=EFFICIENT,
           prior=5.0, overhead_us=20.0, variants=BHSD,
           workspace="2 * itemsize * elements", deterministic_backward=False, requires=(
               *CUDA_EFFICIENT, NO_LSE, MASK_WITHOUT_GRAD, SLOPES_WITHOUT_GRAD, FOLDS_ANY)),
    Kernel("torch.sdpa_cudnn", attention, _cudnn, sdpa_backend=CUDNN, prior=20.0, overhead_us=2.0,
           variants=BHSD, deterministic=False, differentiable=False,
           requires=(*CUDNN_PLAIN, NO_LSE), plans_each_size=True,
           note=f"{CUDNN_PLANS}; its backward misreads a gradient with gaps (torch 2.11, H200)"),
    Kernel("torch.sdpa_cudnn_lse", attention, _cudnn_lse, sdpa_backend=CUDNN,
           prior=11.0, overhead_us=3.0, variants=BHSD,
           deterministic=False, differentiable=False, requires=(*CUDNN_PLAIN, WITH_LSE),
           plans_each_size=True, note=CUDNN_PLANS),
    Kernel("torch.sdpa_cudnn_bias", attention, _cudnn_bias, sdpa_backend=CUDNN, prior=4.5,
           overhead_us=20.0, variants=BHSD, workspace="2 * itemsize * elements",
           deterministic=False, differentiable=False,
           requires=(*CUDA_CUDNN, *FOLDS_WITHOUT_GRAD, FOLDS_ANY), plans_each_size=True,
           note=CUDNN_PLANS),
)
