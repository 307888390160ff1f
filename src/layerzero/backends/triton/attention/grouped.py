"""Launches the kernels of grouped_forward.py and grouped_backward.py."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..launch import Launcher
from ..machine import device_size
from .grouped_backward import delta_kernel, key_kernel, query_kernel, work_kernel
from .grouped_forward import LOOKUP, PLAIN, SEGMENTS, forward_kernel

MIN_SEGMENT = 512          # keys per chunk on average, from which a loop for each chunk pays
PAIRS = 128                # items and chunks that a program for keys looks at together
DELTA_ROWS = 32

_forward, _delta, _query = Launcher(forward_kernel), Launcher(delta_kernel), Launcher(query_kernel)
_work, _key = Launcher(work_kernel), Launcher(key_kernel)


class Tile(NamedTuple):
    """The block sizes of a kernel: rows of the query, keys; warps; stages of the pipeline."""

    block_m: int
    block_n: int
    warps: int
    stages: int


class Configs(NamedTuple):
    forward: Tile
    query: Tile
    key: Tile


def _tile(n: int) -> int:
    return max(16, triton.next_power_of_2(n))


@lru_cache(maxsize=4096)
def configs(rows: int, dim: int, dim_v: int, itemsize: int, device: torch.device) -> Configs:
    """Returns what was fastest on an H200, with as many stages as fit into shared memory. `rows`:
    of the longest item."""
    widest = max(_tile(dim), _tile(dim_v))
    if itemsize > 2:
        forward = query = key = Tile(32, 32, 4, 1)
    elif widest <= 64:
        forward, query, key = Tile(128, 128, 8, 3), Tile(128, 64, 8, 3), Tile(64, 128, 8, 2)
    elif widest <= 128:
        forward, query, key = Tile(128, 128, 8, 3), Tile(128, 64, 8, 3), Tile(64, 128, 8, 3)
    else:
        forward, query, key = Tile(128, 64, 8, 2), Tile(64, 64, 8, 1), Tile(32, 64, 8, 1)
    block_m = min(forward.block_m, _tile(rows))
    forward = forward._replace(block_m=block_m, warps=min(forward.warps, max(4, block_m // 16)))
    row = widest * itemsize
    return Configs(_fit(forward, row, forward.block_m, True, device),
                   _fit(query, row, 2 * query.block_m, True, device),
                   _fit(key, row, 2 * key.block_n, False, device))


def _fit(tile: Tile, row: int, kept: int, reads_keys: bool, device: torch.device) -> Tile:
    """Reduces stages, then keys, until what the loop reads (keys and values, or queries and
    gradients) fits beside the rows that are kept; `row`: bytes of one."""
    _, shared = device_size(device)

    def size(t: Tile) -> int:
        return row * (kept + 2 * t.stages * (t.block_n if reads_keys else t.block_m))

    while tile.stages > 1 and size(tile) > shared:
        tile = tile._replace(stages=tile.stages - 1)
    while reads_keys and tile.block_n > 16 and size(tile) > shared:
        tile = tile._replace(block_n=tile.block_n // 2)
    return tile


class Call(NamedTuple):
    """The arguments that forward and backward share."""

    items: Tensor
    order: Tensor                              # items by descending number of keys
    starts: Tensor | None
    lengths: Tensor | None
    max_q: int
    max_k: int
    left: int
    right: int
    scale: float
    softcap: float
    chosen: Configs | None

    @property
    def chunks(self) -> int:
        return 1 if self.starts is None else self.starts.shape[1]

    @property
    def address(self) -> int:
        if self.starts is None:
            return PLAIN.value                 # type: ignore[no-any-return]
        by_segments = self.max_k >= MIN_SEGMENT * self.chunks
        return (SEGMENTS if by_segments else LOOKUP).value  # type: ignore[no-any-return]

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        """Chunk starts and lengths; where there are none any pointer will do."""
        return ((self.items, self.items) if self.starts is None or self.lengths is None
                else (self.starts, self.lengths))

    def features(self) -> dict[str, Any]:
        return {"ADDRESS": self.address, "LEFT": self.left >= 0, "RIGHT": self.right >= 0}


def _dims(dim: int, dim_v: int, group: int, tile: Tile) -> dict[str, Any]:
    return {"GROUP": group, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "DIM": dim,
            "DIM_V": dim_v, "DIM_POW": _tile(dim), "DIM_V_POW": _tile(dim_v),
            "STAGES": tile.stages, "num_warps": tile.warps}


def _token_head(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(t.stride(axis) for t in tensors for axis in (0, 1))


def _configs(query: Tensor, value: Tensor, group: int, call: Call) -> Configs:
    return call.chosen or configs(call.max_q * group, query.shape[2], value.shape[2],
                                  query.element_size(), query.device)


def run_forward(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    tokens, heads, dim = query.shape
    kv_heads, dim_v = key.shape[1], value.shape[2]
    # rows of no item stay as they are
    out = query.new_zeros((tokens, heads, dim_v))
    lse = query.new_full((tokens, heads), -torch.inf, dtype=torch.float32)
    group = heads // max(kv_heads, 1)
    tile = _configs(query, value, group, call).forward
    blocks = triton.cdiv(call.max_q * group, tile.block_m)
    programs = call.items.shape[0] * blocks * kv_heads
    if programs and tokens:
        _forward((programs,), (
            query, key, value, out, lse, call.items, call.order, *call.tables,
            *_token_head(query, key, value), heads, call.scale, call.softcap, call.left, call.right,
            blocks, call.chunks),
            {**_dims(dim, dim_v, group, tile), **call.features(),
             "SOFTCAP": call.softcap > 0.0})
    return out, lse


def run_backward(query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, grad: Tensor,
                 lse_grad: Tensor | None, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    tokens, heads, dim = query.shape
    tokens_k, kv_heads, dim_v = value.shape
    group, count = heads // max(kv_heads, 1), call.items.shape[0]
    dq = torch.zeros_like(query, memory_format=torch.contiguous_format)
    dk, dv = (torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (key, value))
    if not (tokens and tokens_k and heads and count and call.max_q):
        return dq, dk, dv
    grad = grad if grad.stride(2) == 1 else grad.contiguous()
    delta = torch.empty_like(lse)
    _delta((triton.cdiv(tokens * heads, DELTA_ROWS),), (
        out, grad, lse if lse_grad is None else lse_grad.contiguous(), delta, tokens * heads, heads,
        *_token_head(grad)),
        {"BLOCK": DELTA_ROWS, "DIM_V": dim_v, "DIM_V_POW": _tile(dim_v),
         "LSE_GRAD": lse_grad is not None, "num_warps": 4})
    tiles = _configs(query, value, group, call)
    softcap = {"SOFTCAP": call.softcap > 0.0}
    strides = _token_head(query, key, value, grad)
    blocks = triton.cdiv(call.max_q * group, tiles.query.block_m)
    _query((count * blocks * kv_heads,), (
        query, key, value, grad, lse, delta, dq, call.items, call.order, *call.tables, *strides,
        heads, call.scale, call.softcap, call.left, call.right, blocks, call.chunks),
        {**_dims(dim, dim_v, group, tiles.query), **call.features(), **softcap})
    blocks, pairs = triton.cdiv(tokens_k, tiles.key.block_n), count * call.chunks
    work = torch.empty(blocks, dtype=torch.int32, device=query.device)
    counted = {"PAIRS": min(PAIRS, _tile(pairs))}
    _work((blocks,), (work, call.items, *call.tables, call.left, call.right, pairs, call.chunks),
          {"BLOCK_N": tiles.key.block_n, **counted, **call.features(), "num_warps": 4})
    _key((blocks * kv_heads,), (
        query, key, value, grad, lse, delta, dk, dv, call.items,
        torch.argsort(work, descending=True), *call.tables, *strides, heads, tokens_k, call.scale,
        call.softcap, call.left, call.right, pairs, call.chunks),
        {**_dims(dim, dim_v, group, tiles.key), **counted, **call.features(), **softcap})
    return dq, dk, dv


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor,
                call: Call) -> tuple[Tensor, Tensor]:
        out, lse = run_forward(query, key, value, call)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.call = call                        # its tensors are integers
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor | None, lse_grad: Tensor | None) -> tuple[Any, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        if grad is None:
            grad = torch.zeros_like(out)
        return (*run_backward(query, key, value, out, lse, grad, lse_grad, ctx.call), None)


def grouped_attention(
    query: Tensor, key: Tensor, value: Tensor, items: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    is_causal: bool = False, scale: float | None = None, *, window_left: int = -1,
    window_right: int = -1, softcap: float = 0.0, return_lse: bool = False,
    chunk_starts: Tensor | None = None, chunk_lengths: Tensor | None = None,
    chosen: Configs | None = None,
) -> Any:
    """`chosen` overrides the configuration, for benchmarks."""
    # A window beyond all keys is none; so sums with it stay in 32 bits.
    most = max_seqlen_q + max_seqlen_k
    left = -1 if window_left > most else window_left
    right = 0 if is_causal else -1 if window_right > most else window_right
    items = items.contiguous()
    order = torch.argsort(items[:, 3], descending=True)
    call = Call(items, order, None if chunk_starts is None else chunk_starts.contiguous(),
                None if chunk_lengths is None else chunk_lengths.contiguous(), max_seqlen_q,
                max_seqlen_k, left, right, query.shape[2] ** -0.5 if scale is None else scale,
                softcap, chosen)
    if torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value)):
        out, lse = _Attention.apply(query, key, value, call)
    else:
        out, lse = run_forward(query, key, value, call)
    return (out, lse) if return_lse else out
