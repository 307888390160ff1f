"""token.cu in the emulator: as exact as torch in the same type, and the cache gets the token."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from layerzero.backends.cuda import compiler
from layerzero.backends.cuda.attention import token

from .run import COMPILER, Kernel

pytestmark = [pytest.mark.correctness,
              pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")]

ROOM = 192


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(compiler, "kernel", Kernel)
    token._compiled.cache_clear()
    yield
    token._compiled.cache_clear()


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    cosine, sine = angles.chunk(2)
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat((-second, first), -1) * sine


def plain(qk: Tensor, value: Tensor, angles: Tensor, position: int, keys: Tensor, values: Tensor,
          window: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """The same in the type of its arguments: attention, and the key and value in the cache."""
    kv_heads = keys.shape[2]
    rotated = rotate(qk[:, 0], angles[position].to(qk.dtype))
    query, key = rotated[:, :-kv_heads], rotated[:, -kv_heads:]
    first = 0 if window is None else max(0, position + 1 - window)
    past_keys, past_values = (torch.cat((cache[:, first:position], fresh[:, None]), 1)
                              for cache, fresh in ((keys, key), (values, value[:, 0])))
    out = torch.nn.functional.scaled_dot_product_attention(
        query[:, :, None], past_keys.transpose(1, 2), past_values.transpose(1, 2), scale=0.11,
        enable_gqa=True)
    return out[:, :, 0], key, value[:, 0]


def drawn(dim: int, heads: int, kv_heads: int, dtype: torch.dtype,
          wide: bool) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    joined = torch.randn(2, 1, heads + 2 * kv_heads, dim).to(dtype)
    turns = torch.rand(ROOM, dim // 2) * 6
    angles = torch.cat((turns.cos(), turns.cos(), turns.sin(), turns.sin()), 1)
    keys, values = (torch.randn(2, ROOM, kv_heads, dim).to(dtype) for _ in "kv")
    return (joined[:, :, :heads + kv_heads], joined[:, :, heads + kv_heads:],
            angles if wide else angles.to(dtype), keys, values)


# dim, query heads, KV heads, dtype, float32 angles, window, configuration, positions
CASES: tuple[tuple[Any, ...], ...] = (
    (128, 8, 2, torch.bfloat16, False, None, token.Config(2, 2), (0, 15, 16, 150)),
    (64, 3, 1, torch.float16, True, 40, token.Config(1, 4), (20, 101)),
    (128, 8, 1, torch.bfloat16, True, 17, token.Config(4, 2), (64, 191)),
)


@pytest.mark.parametrize("dim, heads, kv_heads, dtype, wide, window, config, positions", CASES)
def test_as_exact_as_torch(dim: int, heads: int, kv_heads: int, dtype: torch.dtype, wide: bool,
                           window: int | None, config: token.Config,
                           positions: tuple[int, ...]) -> None:
    qk, value, angles, keys, values = drawn(dim, heads, kv_heads, dtype, wide)
    for position in positions:
        caches = keys.clone(), values.clone()
        for cache in caches:
            cache[:, position:] = torch.nan        # nothing behind the new token may be read
        before = [cache.clone() for cache in caches]
        got = token.attend(qk, value, angles, torch.tensor([position]), *caches, 0.11, window,
                           config)
        eager, _, _ = plain(qk, value, angles, position, *before, window)
        truth, key, _ = plain(*(t.double() for t in (qk, value, angles)), position,
                              *(t.double() for t in before), window)
        allowed = 2 * (eager.double() - truth).abs().max() + 1e-3
        assert (got.double() - truth).abs().max() <= allowed
        torch.testing.assert_close(caches[0][:, position].double(), key, atol=2e-2, rtol=1e-2)
        assert torch.equal(caches[1][:, position], value[:, 0])
        for cache, old in zip(caches, before):     # and no other place is written
            old[:, position] = cache[:, position]
            assert torch.equal(cache.nan_to_num(7.0), old.nan_to_num(7.0))


@pytest.mark.parametrize("machine", [compiler.Machine(132), compiler.Machine(48, 99 << 10)])
def test_every_configuration_can_be_launched(machine: compiler.Machine) -> None:
    for kv_rows, room, dim, group in itertools.product((1, 8, 64, 500), (16, 640, 8192), (64, 128),
                                                       range(1, 9)):
        cfg = token.config(kv_rows, room, machine)
        assert cfg.splits in (1, *token.SPLITS)
        assert cfg.splits == 1 or cfg.splits * kv_rows <= machine.processors
        assert token.shared_bytes(group, dim, cfg) <= machine.shared
