"""xFormers' memory-efficient attention. Layout (batch, seq, heads, dim); groups of query heads as a fifth dimension.

Its extension is built against one CUDA and one torch: beside another it does not load, and every call ends in "No
operator found". What it was built for stands in a file of the package, so that is known without importing it.
Its cutlass operator reads a bias 16 bytes at a time, so the rows of one must be spaced by 16 bytes.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..ops.attention import OP as attention
from ..spec.kernel import Kernel
from ..spec.reason import Code, Reason
from ..spec.rules import (
    absent,
    aligned,
    any_of,
    at_least,
    at_most,
    device,
    differs,
    dtypes,
    equals,
    multiple_of,
    off,
    one_of,
    plain_tensors,
    present,
    sm,
    unit_stride,
    vendor,
    when,
)


def built() -> bool | Reason:
    """Does its extension fit this torch? The CUDA of both must have one major version, and torch must not be older."""
    spec = importlib.util.find_spec("xformers")
    if spec is None or spec.origin is None:
        return Reason(Code.NOT_INSTALLED, "xformers")
    path = Path(spec.origin).with_name("cpp_lib.json")
    try:
        made = json.loads(path.read_text())["version"]
        cuda, built_for = int(made["cuda"] or 0), str(made["torch"])
    except (OSError, ValueError, KeyError, TypeError) as e:
        return Reason(Code.ABI_MISMATCH, None, f"{path.name} does not say what it was built for ({type(e).__name__})")
    return fits(cuda, built_for, torch.version.cuda, torch.__version__)


def fits(cuda: int, built_for: str, cuda_here: str | None, torch_here: str) -> bool | Reason:
    """`cuda` as it writes it: 1208 is 12.8."""
    from packaging.version import Version
    here = int(cuda_here.partition(".")[0]) if cuda_here else 0
    if cuda // 100 == here and Version(torch_here).release >= Version(built_for).release:
        return True
    return Reason(Code.ABI_MISMATCH, None,
                  f"xformers was built for torch {built_for} and CUDA {cuda // 100}.{cuda % 100}; this is torch "
                  f"{torch_here} with {f'CUDA {cuda_here}' if cuda_here else 'no CUDA'}")


def _attention() -> Callable[..., Any]:
    from xformers import ops
    from xformers.ops import fmha

    def run(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
            is_causal: bool = False, scale: float | None = None, *, causal_align: str | None = None) -> Tensor:
        heads, kv_heads = query.shape[2], key.shape[2]
        bias: Any = None
        if is_causal:
            corner = causal_align == "bottom_right"
            bias = fmha.attn_bias.LowerTriangularFromBottomRightMask() if corner else ops.LowerTriangularMask()
        elif attn_mask is not None:
            bias = spaced(attn_mask).expand(query.shape[0], heads, query.shape[1], key.shape[1])
        if heads != kv_heads:                  # (batch, seq, groups, heads of a group, dim); a key for all of a group
            query = query.unflatten(2, (kv_heads, -1))
            key, value = (t[:, :, :, None].expand(-1, -1, -1, heads // kv_heads, -1) for t in (key, value))
            bias = bias.unflatten(1, (kv_heads, -1)) if isinstance(bias, Tensor) else bias
        out: Tensor = ops.memory_efficient_attention(query, key, value, bias, dropout_p, scale)
        return out.flatten(2, 3) if heads != kv_heads else out

    return run


def spaced(mask: Tensor) -> Tensor:
    """The same mask with rows that begin every 16 bytes; a copy where they do not yet, or do not follow each other."""
    step = 16 // mask.element_size()
    if mask.stride(-1) == 1 and all(s % step == 0 for s in mask.stride()[:-1]) and mask.data_ptr() % 16 == 0:
        return mask
    width = mask.shape[-1]
    wide = mask.new_empty((*mask.shape[:-1], -(-width // step) * step))[..., :width]
    return wide.copy_(mask)


KERNELS = (
    Kernel("xformers.attention", attention, _attention, package="xformers", version=">=0.0.30,<0.1", built=built,
           variants=("bshd",), prior=11.0, overhead_us=35.0, traceable=False, untested=True,
           deterministic_backward=False, requires=(
               device("cuda"), vendor("nvidia"), sm(at_least=80), dtypes("float16", "bfloat16"), plain_tensors(),
               multiple_of("head_dim", 8), multiple_of("head_dim_v", 8), at_most("head_dim", 256),
               at_most("head_dim_v", 256), at_least("batch", 1, Code.EMPTY_INPUT),
               at_least("seq_q", 1, Code.EMPTY_INPUT), at_least("seq_k", 1, Code.EMPTY_INPUT),
               at_least("kv_heads", 1, Code.EMPTY_INPUT), off("return_lse", Code.LSE_UNSUPPORTED),
               equals("softcap", 0.0, Code.SOFTCAP_UNSUPPORTED),
               absent("alibi_slopes.dtype", Code.ALIBI_UNSUPPORTED),
               equals("window_left", -1, Code.WINDOW_UNSUPPORTED),
               equals("window_right", -1, Code.WINDOW_UNSUPPORTED),
               # A row that sees no key is NaN where the mask is one of its own, so only where every row sees one.
               any_of(off("is_causal"), at_least("causal_offset", 0, Code.SEQ_LEN_UNSUPPORTED)),
               # A bias is added; True and False say something else. It gets a gradient only where it is not padded.
               one_of("attn_mask.dtype", None, "float16", "bfloat16", code=Code.MASK_DTYPE_UNSUPPORTED),
               one_of("attn_mask.ndim", None, 4, code=Code.MASK_BROADCAST_UNSUPPORTED),
               differs("attn_mask.requires_grad", True, Code.BACKWARD_UNSUPPORTED),
               # With a bias only its cutlass operator serves, which is for SM 9.0 at the latest.
               when(present("attn_mask.dtype"), sm(below=91)),
               unit_stride("query"), unit_stride("key"), unit_stride("value"), aligned("query", 16),
               aligned("key", 16), aligned("value", 16)),
           note="written from its source: the extension at hand was built for another CUDA"),
)
