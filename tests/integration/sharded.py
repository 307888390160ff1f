"""What each process of a gloo group does in the tests of context parallelism, and how they are
started: from a server that has imported everything once."""

from __future__ import annotations

import functools
import math
import os
import types
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from layerzero.integrations import context_parallel as cp
from layerzero.integrations import rewiring
from layerzero.spec.errors import ConfigError


def start(world_size: int, store: str, check: Callable[..., None], *args: Any) -> None:
    """Runs check(rank, world_size, *args) in so many processes; raises what one of them raised."""
    paths = os.pathsep.join((str(Path(__file__).parent), os.environ["PYTHONPATH"]))
    mp.get_context("forkserver").set_forkserver_preload(
        ["sharded", "sharded_server"])
    with mock.patch.dict(os.environ, PYTHONPATH=paths):
        mp.start_processes(_process, (world_size, store, check, args), world_size,
                           start_method="forkserver")


def _process(rank: int, world_size: int, store: str, check: Callable[..., None],
             args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank,
                            world_size=world_size)
    try:
        check(rank, world_size, *args)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def whole(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: list[int], causal: bool = True,
          window: int = -1) -> tuple[Tensor, Tensor]:
    """Attention of one rank that holds everything, and its log-sum-exp (tokens, heads)."""
    outs, lses = [], []
    for a, b in pairwise(cu_seqlens):
        key, value = (t[a:b].repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        scores = torch.einsum("nhd,mhd->hnm", q[a:b], key) * q.shape[2] ** -0.5
        distance = torch.arange(b - a)[:, None] - torch.arange(b - a)
        hidden = (distance < 0) if causal else torch.zeros_like(distance, dtype=torch.bool)
        hidden |= (distance > window) if window >= 0 else False
        scores = scores.masked_fill(hidden, -math.inf)
        outs.append(torch.einsum("hnm,mhd->nhd", scores.softmax(-1), value))
        lses.append(scores.logsumexp(-1).T)
    return torch.cat(outs), torch.cat(lses)


def draw(tokens: int, *heads: int, dim: int = 8, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    gen = torch.Generator().manual_seed(tokens)
    return [torch.randn((tokens, n, dim), generator=gen).to(dtype) for n in heads]


def boundaries(world_size: int, *units: int) -> list[int]:
    """Sequences of so many times 2 x world_size tokens."""
    return [2 * world_size * sum(units[:i]) for i in range(len(units) + 1)]


def check_every_method(rank: int, world_size: int) -> None:
    """Forward and backward of each, against one rank; two sequences of unequal length, GQA."""
    cu = boundaries(world_size, 2, 0, 5)
    heads = max(4, world_size)
    q, k, v, dout = (t.requires_grad_() for t in draw(cu[-1], heads, 2, 2, heads))
    out, lse = whole(q, k, v, cu)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    local_cu = cp.local_cu_seqlens(torch.tensor(cu, dtype=torch.int32), world_size)
    odd = dist.new_group([*range(world_size)])         # a group of one's own

    def mine(t: Tensor) -> Tensor:
        return cp.shard(t.detach(), cu, rank, world_size)

    for method, options in ((cp.zigzag_attention, {"heads_k_stride": 1}),
                            (cp.zigzag_attention, {"heads_k_stride": 2, "group": odd}),
                            (cp.ring_attention, {"group": odd}), (cp.ulysses_attention, {})):
        leaves = [mine(t).requires_grad_() for t in (q, k, v)]
        got, got_lse = method(*leaves, local_cu, return_lse=True, **options)
        got.backward(mine(dout))
        for name, a, b in (("out", got, out), ("lse", got_lse, lse), *(
                (n, t.grad, g) for n, t, g in zip(("dq", "dk", "dv"), leaves, grads))):
            torch.testing.assert_close(a, mine(b), rtol=0, atol=1e-10,
                                       msg=lambda m, n=name, f=method: f"{f.__name__} {n}: {m}")
    torch.testing.assert_close(cp.unshard(mine(out), cu), out.detach(), rtol=0, atol=0)
    if world_size == 4:
        check_a_group_of_some(rank, q.detach(), k.detach(), v.detach(), out.detach(), cu)


def check_a_group_of_some(rank: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
                          cu: list[int]) -> None:
    """Processes 1 and 3 are ranks 0 and 1 of a group; the others are told that they do not belong."""
    some = dist.new_group([1, 3])
    parts = [cp.shard(t, cu, rank // 2, 2) for t in (q, k, v)]
    call = functools.partial(cp.ring_attention, *parts, [c // 2 for c in cu], group=some)
    if rank not in (1, 3):
        with pytest.raises(ConfigError, match="this process belongs to"):
            call()
        return
    torch.testing.assert_close(call(), cp.shard(out, cu, rank // 2, 2), rtol=0, atol=1e-10)


def check_zigzag_llama3(rank: int, world_size: int, cu: list[int], heads: int, kv_heads: int,
                        dim: int, backward: bool) -> None:
    """The grouped call against the one that rearranges and calls twice, and against one rank."""
    q, k, v, dout = draw(cu[-1], heads, kv_heads, kv_heads, heads, dim=dim, dtype=torch.float32)
    kv = torch.stack((k, v), 1)
    cu_k = torch.tensor(cu, dtype=torch.int32)
    longest = max(b - a for a, b in pairwise(cu))
    results = []
    for grouped in (True, False) if longest <= 4096 else (True,):
        mine_q, mine_kv = (cp.shard(t, cu, rank, world_size).requires_grad_(backward)
                           for t in (q, kv))
        out = cp.zigzag_llama3_flash_attn_varlen_kvpacked_func(
            mine_q, mine_kv, cp.local_cu_seqlens(cu_k, world_size), cu_k, longest, longest,
            heads_k_stride=kv_heads, local_k_slice=slice(0, cu[-1]), causal=True,
            use_grouped_attention=grouped)
        assert out.shape == (cu[-1] // world_size, heads, dim) and bool(out.isfinite().all())
        if backward:
            out.backward(cp.shard(dout, cu, rank, world_size))
        results.append((out.detach(), mine_q.grad, mine_kv.grad))
    (out, *grads), *baseline = results
    for (other, *other_grads) in baseline:
        torch.testing.assert_close(out, other, rtol=1e-3, atol=1e-3)
        for a, b in zip(grads, other_grads):
            torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)
    if rank == 0:                              # the formula takes as long as all ranks
        exact = whole(q, k, v, cu)[0] if len(cu) > 2 else functional.scaled_dot_product_attention(
            *(t.transpose(0, 1)[None] for t in (q, k, v)), is_causal=True)[0].transpose(0, 1)
        torch.testing.assert_close(out, cp.shard(exact, cu, rank, world_size), rtol=1e-3, atol=1e-3)


def can_torch_shard(mesh: Any, length: int) -> bool:
    """Returns whether this torch shards sequences of that length: older ones balance the ranks, or
    refuse."""
    from torch.distributed.tensor.experimental import context_parallel
    try:
        with context_parallel(mesh, buffers=[torch.zeros(length)], buffer_seq_dims=[0]):
            return True
    except AssertionError:
        return False


def check_torchs_context(rank: int, world_size: int) -> None:
    """Inside context_parallel torch's attention is that over all ranks, and afterwards its own."""
    mesh = init_device_mesh("cpu", (world_size,))
    stock = functional.scaled_dot_product_attention
    for length, method in ((8 * world_size, "zigzag"), (8 * world_size, "ring"),
                           (3 * world_size, "zigzag")):    # the last cannot be balanced
        gen = torch.Generator().manual_seed(length)
        x = torch.randn((2, length, 4, 8), generator=gen, dtype=torch.float64)
        q, k, v = x.transpose(1, 2), x[:, :, :2].transpose(1, 2), x[:, :, 2:].transpose(1, 2)
        expected = stock(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
        context = cp.context_parallel(mesh, buffers=[x, expected], buffer_seq_dims=[1, 1],
                                      method=method)
        if length % (2 * world_size) and not can_torch_shard(mesh, length):
            with pytest.raises(ConfigError, match=f"multiple of {2 * world_size}, got {length}; pad"), \
                    context:
                pass
            assert functional.scaled_dot_product_attention is stock and x.shape[1] == length
            continue
        with context:
            assert x.shape[1] == length // world_size
            q, k, v = x.transpose(1, 2), x[:, :, :2].transpose(1, 2), x[:, :, 2:].transpose(1, 2)
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            torch.testing.assert_close(out.transpose(1, 2), expected, rtol=0, atol=1e-12)
            patched = rewiring.sdpa(q, k, v, is_causal=True, enable_gqa=True)     # of lz.patch
            torch.testing.assert_close(patched, out, rtol=0, atol=0)
            with pytest.raises(ConfigError, match="attn_mask"):
                functional.scaled_dot_product_attention(q, q, q, torch.zeros(()))
        assert functional.scaled_dot_product_attention is stock and x.shape[1] == length


def check_transformers(rank: int, world_size: int) -> None:
    """A model over sharded tokens gives the logits, loss and gradients of the model over all."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from layerzero.integrations.transformers.attention import attention_forward

    config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).double()
    tokens = torch.randint(32, (2, 8 * world_size))
    batch = {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}
    stock = model(**batch)
    stock.loss.backward()
    grads = [p.grad.clone() for p in model.parameters()]
    cu = [0, tokens.shape[1]]
    for method in ("zigzag", "ring", "ulysses"):
        model.set_attn_implementation(cp.register_context_parallel(method=method))
        model.zero_grad()
        got = model(**cp.shard_batch(batch), num_items_in_batch=2 * (tokens.shape[1] - 1))
        got.loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        torch.testing.assert_close(got.logits, cp.shard(stock.logits, cu, rank, world_size, dim=1),
                                   rtol=0, atol=1e-6)          # rotary tables are float32
        for p, grad in zip(model.parameters(), grads):
            torch.testing.assert_close(p.grad, grad, rtol=0, atol=1e-6)
    q = torch.randn(1, 2, 8 * world_size, 8, dtype=torch.float64)
    expected, x = functional.scaled_dot_product_attention(q, q, q, is_causal=True), q.clone()
    with cp.context_parallel(init_device_mesh("cpu", (world_size,)), buffers=[x, expected],
                             buffer_seq_dims=[2, 2]):      # attn_implementation="layerzero" in it
        got, _ = attention_forward(types.SimpleNamespace(is_causal=True), x, x, x, None)
        torch.testing.assert_close(got.transpose(1, 2), expected, rtol=0, atol=1e-12)
    with pytest.raises(ConfigError, match="shard_batch"):
        model(cp.shard(tokens, cu, rank, world_size, dim=1))           # without its positions
    # two sequences in one row, told by their local boundaries
    bounds = [0, 2 * world_size, 8 * world_size]
    model.set_attn_implementation(cp.register_context_parallel())
    packed = model(cp.shard(tokens[:1], bounds, rank, world_size, dim=1),
                   position_ids=cp.shard_positions(bounds, rank, world_size)[None],
                   cu_seq_lens_q=torch.tensor(bounds, dtype=torch.int32) // world_size)
    model.set_attn_implementation("sdpa")
    expected = torch.cat([model(tokens[:1, a:b]).logits for a, b in pairwise(bounds)], 1)
    torch.testing.assert_close(packed.logits, cp.shard(expected, bounds, rank, world_size, dim=1),
                               rtol=0, atol=1e-6)
