"""xFormers' memory-efficient attention. Layout (batch, seq, heads, dim); groups of query heads are
a fifth dimension.

Its extension is built for one CUDA and one torch: with others it does not load, and every call
raises "No operator found". A file of the package says what it was built for, so that is known
without importing it. Its cutlass operator reads a bias 16 bytes at a time, so the rows of a bias
must be 16-byte aligned.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from ..ops.attention import OP as attention
from ..spec import rules as r
from ..spec.kernel import Kernel
from ..spec.reason import Code, Reason
from ._sequences import POSITIVE_SCALE


def built() -> bool | Reason:
    """Returns whether the extension fits this torch: same CUDA major, torch not older."""
    spec = importlib.util.find_spec("xformers")
    if spec is None or spec.origin is None:
        return Reason(Code.NOT_INSTALLED, "xformers")
    path = Path(spec.origin).with_name("cpp_lib.json")
    try:
        versions = json.loads(path.read_text())["version"]
        cuda, built_for = int(versions["cuda"] or 0), str(versions["torch"])
    except (OSError, ValueError, KeyError, TypeError) as e:
        return Reason(Code.ABI_MISMATCH, None,
                      f"{path.name} does not say what it was built for ({type(e).__name__})")
    return fits(cuda, built_for, torch.version.cuda, torch.__version__)


def fits(cuda: int, built_for: str, cuda_here: str | None, torch_here: str) -> bool | Reason:
    """Returns whether a build fits, or why not; `cuda` as xformers writes it: 1208 is 12.8."""
    major = int(cuda_here.partition(".")[0]) if cuda_here else 0
    if cuda // 100 == major and Version(torch_here).release >= Version(built_for).release:
        return True
    return Reason(Code.ABI_MISMATCH, None,
                  f"xformers was built for torch {built_for} and CUDA {cuda // 100}.{cuda % 100}; "
                  f"this is torch {torch_here} with "
                  f"{f'CUDA {cuda_here}' if cuda_here else 'no CUDA'}")


def _attention() -> Callable[..., Any]:
    from xformers import ops
    from xformers.ops import fmha

    def run(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
            dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, *,
            causal_align: str | None = None) -> Tensor:
        heads, kv_heads = query.shape[2], key.shape[2]
        bias: Any = None
        if is_causal:
            bottom_right = causal_align == "bottom_right"
            bias = (fmha.attn_bias.LowerTriangularFromBottomRightMask() if bottom_right
                    else ops.LowerTriangularMask())
        elif attn_mask is not None:
            bias = align_rows(attn_mask).expand(query.shape[0], heads, query.shape[1], key.shape[1])
        # (batch, seq, kv_heads, group, dim); keys are expanded over the group
        if heads != kv_heads:
            query = query.unflatten(2, (kv_heads, -1))
            key, value = (t[:, :, :, None].expand(-1, -1, -1, heads // kv_heads, -1)
                          for t in (key, value))
            bias = bias.unflatten(1, (kv_heads, -1)) if isinstance(bias, Tensor) else bias
        out: Tensor = ops.memory_efficient_attention(query, key, value, bias, dropout_p, scale)
        return out.flatten(2, 3) if heads != kv_heads else out

    return run


def align_rows(mask: Tensor) -> Tensor:
    """Returns the mask with rows that begin at multiples of 16 bytes; a copy unless they do."""
    step = 16 // mask.element_size()
    if (mask.stride(-1) == 1 and all(s % step == 0 for s in mask.stride()[:-1])
        and mask.data_ptr() % 16 == 0):
        return mask
    width = mask.shape[-1]
    padded = mask.new_empty((*mask.shape[:-1], -(-width // step) * step))[..., :width]
    return padded.copy_(mask)


KERNELS = (
    Kernel("xformers.attention", attention, _attention, package="xformers", version=">=0.0.30,<0.1",
           built=built, variants=("bshd",), prior=11.0, overhead_us=35.0, traceable=False,
           untested=True, deterministic_backward=False, requires=(
               r.device("cuda"), r.vendor("nvidia"), r.sm(at_least=80),
               r.dtypes("float16", "bfloat16"), r.plain_tensors(),
               r.multiple_of("head_dim", 8), r.multiple_of("head_dim_v", 8),
               r.at_most("head_dim", 256), r.at_most("head_dim_v", 256),
               r.at_least("batch", 1, Code.EMPTY_INPUT), r.at_least("seq_q", 1, Code.EMPTY_INPUT),
               r.at_least("seq_k", 1, Code.EMPTY_INPUT),
               r.at_least("kv_heads", 1, Code.EMPTY_INPUT), POSITIVE_SCALE,
               r.off("return_lse", Code.LSE_UNSUPPORTED),
               r.equals("softcap", 0.0, Code.SOFTCAP_UNSUPPORTED),
               r.absent("alibi_slopes.dtype", Code.ALIBI_UNSUPPORTED),
               r.equals("window_left", -1, Code.WINDOW_UNSUPPORTED),
               r.equals("window_right", -1, Code.WINDOW_UNSUPPORTED),
               # With its own causal masks a row that sees no key is NaN, so every row must see one.
               r.any_of(r.off("is_causal"),
                        r.at_least("causal_offset", 0, Code.SEQ_LEN_UNSUPPORTED)),
               # A mask is added, so it cannot be bool. It gets a gradient only if it is not padded.
               r.one_of("attn_mask.dtype", None, "float16", "bfloat16",
                        code=Code.MASK_DTYPE_UNSUPPORTED),
               r.one_of("attn_mask.ndim", None, 4, code=Code.MASK_BROADCAST_UNSUPPORTED),
               r.differs("attn_mask.requires_grad", True, Code.BACKWARD_UNSUPPORTED),
               # With a bias only its cutlass operator serves, which supports up to SM 9.0.
               r.when(r.present("attn_mask.dtype"), r.sm(below=91)),
               r.unit_stride("query"), r.unit_stride("key"), r.unit_stride("value"),
               r.aligned("query", 16),
               r.aligned("key", 16), r.aligned("value", 16)),
           note="written from its source: the extension at hand was built for another CUDA"),
)
