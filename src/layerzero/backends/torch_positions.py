"""Rotary positions and ALiBi by a few torch operations each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ops.alibi import OP as alibi
from ..ops.formulas.rope import gather_angles
from ..ops.rope import OP as rope
from ..spec import rules as r
from ..spec.kernel import Kernel
from ..spec.reason import Code


def _rope_with(rotate: Callable[[Tensor, Tensor, Tensor, str], Tensor]) -> Callable[..., Any]:
    """Returns a kernel that rotates by `rotate`, which gets the rotary part, float32 or wider."""
    def rotate_tensor(x: Tensor, cos: Tensor, sin: Tensor, style: str) -> Tensor:
        rotary = 2 * cos.shape[-1]
        if rotary == x.shape[-1]:
            return rotate(x.to(cos.dtype), cos, sin, style).to(x.dtype)
        return torch.cat((rotate(x[..., :rotary].to(cos.dtype), cos, sin, style).to(x.dtype),
                          x[..., rotary:]), -1)

    def run(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor,
            position_ids: Tensor | None = None, *, style: str, layout: str = "bhsd",
            rotary_dim: int | None = None) -> Any:
        cos, sin = gather_angles(cos, position_ids, layout,
                                 q.dtype), gather_angles(sin, position_ids, layout, q.dtype)
        rotated_q = rotate_tensor(q, cos, sin, style)
        return rotated_q if k is None else (rotated_q, rotate_tensor(k, cos, sin, style))

    return run


def _pairs(x: Tensor, style: str) -> tuple[Tensor, Tensor]:
    """Returns the first and the second elements of all pairs, as views."""
    if style == "interleaved":
        return x[..., ::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, style: str) -> Tensor:
    first, second = _pairs(x, style)
    rotated = torch.addcmul(first * cos, second, sin, value=-1), torch.addcmul(second * cos, first,
                                                                               sin)
    return (torch.stack(rotated, -1).flatten(-2) if style == "interleaved"
            else torch.cat(rotated, -1))


def _rope() -> Callable[..., Any]:
    return _rope_with(_rotate)


def _rope_joint() -> Callable[..., Any]:
    """Concatenates queries and keys as heads of one tensor: half the launches for one more copy."""
    rotate_one = _rope_with(_rotate)

    def run(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, *,
            style: str, layout: str = "bhsd", rotary_dim: int | None = None) -> Any:
        heads = -3 if layout == "bhsd" else -2
        joint = rotate_one(torch.cat((q, k), heads), None, cos, sin, position_ids, style=style,
                           layout=layout)
        return joint.split((q.shape[heads], k.shape[heads]), heads)

    return run


def _rope_buffered() -> Callable[..., Any]:
    def rotate(x: Tensor, cos: Tensor, sin: Tensor, style: str) -> Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        (first, second), (out_first, out_second) = _pairs(x, style), _pairs(out, style)
        torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-1)
        torch.mul(second, cos, out=out_second).addcmul_(first, sin)
        return out

    return torch.no_grad()(_rope_with(rotate))


def _rope_complex() -> Callable[..., Any]:
    def rotate(x: Tensor, cos: Tensor, sin: Tensor, style: str) -> Tensor:
        if x.stride(-1) != 1 or x.storage_offset() % 2 or any(step % 2 for step in x.stride()[:-1]):
            # pairs must be aligned like complex numbers
            x = x.clone(memory_format=torch.contiguous_format)
        rotated = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.complex(cos, sin)
        return torch.view_as_real(rotated).flatten(-2)

    return _rope_with(rotate)


def _alibi() -> Callable[..., Any]:
    """Computes the bias once per distance, then lays it out as rows shifted by one."""
    def run(slopes: Tensor, seq_q: int, seq_k: int, *, causal_align: str | None = None,
            is_causal: bool = False) -> Tensor:
        if seq_q == 0 or seq_k == 0:
            return slopes.new_zeros((slopes.shape[0], seq_q, seq_k)) * slopes[:, None, None]
        # position of the last query
        last = seq_k - 1 if causal_align == "bottom_right" else seq_q - 1
        distance = torch.arange(-last, seq_q + seq_k - 1 - last, device=slopes.device)
        upcast = slopes.to(torch.promote_types(slopes.dtype, torch.float32))
        row = upcast[:, None] * -distance.abs()
        if is_causal:
            row = row.masked_fill(distance > 0, -torch.inf)
        # the gradient is a sum over all rows, in float32 or wider
        if not slopes.requires_grad:
            row = row.to(slopes.dtype)
        return (row[:, None] if seq_q == 1 else row.unfold(1, seq_k, 1).flip(1)).to(slopes.dtype)

    return run


KERNELS = (
    Kernel("torch.rope", rope, _rope, prior=1.3, overhead_us=15.0, baseline=True,
           batch_invariant=True, tp_invariant=True,
           workspace="12 * batch * heads * seq * head_dim"),
    Kernel("torch.rope_joint", rope, _rope_joint, prior=1.3, overhead_us=10.0,
           workspace="16 * batch * heads * seq * head_dim",
           requires=(r.present("k.dtype", Code.FEATURE_UNSUPPORTED),
                     r.at_most("seq", 16, Code.SEQ_LEN_UNSUPPORTED)),
           note="both results are views of one tensor"),
    Kernel("torch.rope_buffered", rope, _rope_buffered, prior=1.8, overhead_us=30.0,
           differentiable=False, traceable=False, requires=(r.plain_tensors(),),
           workspace="8 * batch * heads * seq * head_dim",
           note="writes both halves of the result in place, so it keeps nothing for a backward"),
    Kernel("torch.rope_complex", rope, _rope_complex, prior=4.0, overhead_us=12.0, traceable=False,
           requires=(r.equals("style", "interleaved", Code.ROPE_STYLE_UNSUPPORTED),),
           workspace="8 * batch * heads * seq * head_dim",
           less_work="one complex multiplication, where the formula is four products and two sums"),
    Kernel("torch.alibi", alibi, _alibi, prior=2.0, overhead_us=12.0, baseline=True),
)
