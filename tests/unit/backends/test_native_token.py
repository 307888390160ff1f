"""One call that rotates, keeps and attends equals rope, then the cache, then attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from layerzero.backends.native import build
from layerzero.backends.native.declaration import DTYPES
from layerzero.ops.attention import OP as ATTENTION
from layerzero.ops.rope import OP as ROPE

UNIT = {torch.float32: 2.0 ** -24, torch.bfloat16: 2.0 ** -8, torch.float16: 2.0 ** -11}
SIZES = (                                      # heads, kv_heads, head_dim, rotated, keys before
    (8, 2, 64, 64, 37), (4, 4, 32, 16, 1500), (3, 1, 24, 24, 0), (6, 3, 128, 128, 300))


def unfused(qkv: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, heads: int,
            style: str, rotated: int) -> tuple[Tensor, Tensor]:
    """Returns what the formulas give for (batch, heads, dim), and the key to be kept."""
    kv_heads = keys.shape[2]
    q, k, v = qkv.unsqueeze(1).split((heads, kv_heads, kv_heads), 2)
    q, k = ROPE.reference(q, k, cos.unsqueeze(1), sin.unsqueeze(1), style=style, layout="bshd",
                          rotary_dim=rotated)
    out = ATTENTION.reference(q.transpose(1, 2), *(torch.cat(pair, 1).transpose(1, 2)
                                                   for pair in ((keys, k), (values, v))))
    return out[:, :, 0], k[:, 0]


def fused(qkv: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, heads: int,
          rotated: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the same by the one call, and the value that it kept."""
    batch, length, kv_heads, dim = keys.shape
    rooms = [torch.cat((t, t.new_full((batch, 3, kv_heads, dim), 7.0)), 1) for t in (keys, values)]
    out, qkv = qkv.new_empty((batch, heads, dim)), qkv.clone()
    build.module().token(DTYPES[qkv.dtype], qkv.data_ptr(), cos.data_ptr(), sin.data_ptr(),
                         *(t.data_ptr() for t in (*rooms, out)), batch, heads, kv_heads, dim,
                         rotated // 2, cos.stride(0), rooms[0].stride(0), length, dim ** -0.5, 1)
    for room, before in zip(rooms, (keys, values)):
        assert torch.equal(room[:, :length], before) and bool((room[:, length + 1:] == 7.0).all())
    return out, rooms[0][:, length], rooms[1][:, length]


def in_halves(t: Tensor, rotated: int) -> Tensor:
    """Returns heads whose neighbours that turn together lie half of the rotated part apart."""
    turning = t[..., :rotated].unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return torch.cat((turning, t[..., rotated:]), -1)


@pytest.mark.skipif(build.is_built() is not True, reason="the CPU kernels are not built")
@pytest.mark.parametrize("style", ["rotate_half", "interleaved"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_fused_equals_unfused(sizes: tuple[int, ...], dtype: torch.dtype, style: str) -> None:
    heads, kv_heads, dim, rotated, length = sizes
    gen, batch = torch.Generator().manual_seed(length), 2
    angles = (length + torch.arange(batch))[:, None] * 10000.0 ** -(
        torch.arange(rotated // 2) / (rotated // 2))
    tensors: list[Any] = [torch.randn(batch, heads + 2 * kv_heads, dim, generator=gen),
                          angles.cos(), angles.sin(),
                          *(torch.randn(batch, length, kv_heads, dim, generator=gen)
                            for _ in range(2))]
    tensors = [t.to(dtype) for t in tensors]
    wide, turned = [t.double() for t in tensors], heads + kv_heads
    exact = unfused(*wide, heads, style, rotated)
    # the mean of the values' magnitudes: as large as what is added up, where values cancel
    mean = unfused(torch.cat((wide[0][:, :turned], wide[0][:, turned:].abs()), 1), *wide[1:4],
                   wide[4].abs(), heads, style, rotated)[0]
    eager = unfused(*tensors, heads, style, rotated)
    qkv, cos, sin, keys, values = tensors
    if style == "interleaved":                 # as weights of such models are permuted on loading
        qkv = torch.cat((in_halves(qkv[:, :turned], rotated), qkv[:, turned:]), 1)
        keys, exact_key, eager_key = (in_halves(t, rotated) for t in (keys, exact[1], eager[1]))
        exact, eager = (exact[0], exact_key), (eager[0], eager_key)
    out, key, value = fused(qkv, cos, sin, keys, values, heads, rotated)
    assert torch.equal(value, qkv[:, turned:])
    for got, by_formula, truth, summed in zip((out, key), eager, exact, (mean, exact[1])):
        error, allowed = (float((t.double() - truth).abs().max()) for t in (got, by_formula))
        # the formula may be lucky: two roundings of the largest result are always allowed, and two
        # in float32 of the largest sum
        rounding = max(UNIT[dtype] * float(truth.abs().max()),
                       UNIT[torch.float32] * float(summed.abs().max()))
        assert error <= 2 * allowed + 2 * rounding
