"""Context parallelism on one GPU, with all ranks in this process: results, host syncs, memory."""

from __future__ import annotations

import functools

import pytest
import torch

import layerzero as lz
from layerzero.integrations import context_parallel as cp
from layerzero.integrations.context_parallel import recorded

pytestmark = [pytest.mark.gpu,
              pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
METHODS = {"zigzag": cp.zigzag_attention, "ring": cp.ring_attention, "ulysses": cp.ulysses_attention}
KERNEL = "triton.grouped_attention"
RANKS = cp.SimulatedRanks(4)
BOUNDS = [0, 256, 1024]


def qkv(dtype, dim=64):
    gen = torch.Generator().manual_seed(0)
    return [torch.randn((BOUNDS[-1], n, dim), generator=gen).to("cuda", dtype) for n in (8, 4, 4)]


def shards(tensors):
    return [[cp.shard(t, BOUNDS, rank, 4).requires_grad_() for rank in range(4)] for t in tensors]


def local():
    return torch.tensor(BOUNDS, dtype=torch.int32, device="cuda") // 4


def both(method, parts, starts, **options):
    outs = METHODS[method](*parts, starts, 192, group=RANKS, **options)
    flat = [t for one in parts for t in one]
    return outs, torch.autograd.grad(outs, flat, [torch.ones_like(o) for o in outs])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", METHODS)
def test_forward_and_backward_are_those_of_one_rank(method, dtype):
    tensors = qkv(dtype)
    exact = [t.double().requires_grad_() for t in tensors]
    starts = torch.tensor(BOUNDS, dtype=torch.int32)
    items = torch.stack((starts[:-1], starts.diff()) * 2, 1).cuda()
    wanted = lz.grouped_attention(*exact, items, 768, 768, is_causal=True)
    grads = torch.autograd.grad(wanted, exact, torch.ones_like(wanted))
    outs, got = both(method, shards(tensors), local())
    limit = 2e-2 if dtype == torch.bfloat16 else 1e-4      # relative to the whole tensor
    for parts, want in zip((outs, got[:4], got[4:8], got[8:]), (wanted, *grads)):
        gathered = cp.unshard(list(parts), BOUNDS, RANKS).double()
        assert (gathered - want).norm() <= limit * want.norm()


@pytest.fixture
def one_launch(monkeypatch):
    """Every call is served by the kernel that reads no length on the host and saves no copies."""
    if KERNEL not in {row.id for row in lz.list_kernels("grouped_attention")}:
        pytest.skip(f"there is no {KERNEL} here")
    monkeypatch.setattr(recorded, "grouped_attention",
                        functools.partial(lz.grouped_attention, backend=KERNEL))


def test_nothing_waits_for_the_device(one_launch):
    """Neither the boundaries nor the items are read on the host: with a kernel that does not either,
    no call of torch waits."""
    parts, starts = shards(qkv(torch.bfloat16)), local()
    both("zigzag", parts, starts)              # compiles
    fresh = local()                            # items are made anew
    torch.cuda.set_sync_debug_mode("error")
    try:
        both("zigzag", parts, fresh)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_what_was_gathered_is_freed_after_the_forward(one_launch):
    tensors = qkv(torch.bfloat16)
    parts = shards(tensors)
    both("zigzag", parts, local(), heads_k_stride=4)
    before = torch.cuda.memory_allocated()
    outs = cp.zigzag_attention(*parts, local(), 192, group=RANKS, heads_k_stride=4)
    kept = torch.cuda.memory_allocated() - before
    gathered = 2 * tensors[1].numel() * 2      # keys and values of all ranks, in bfloat16
    # out once by the caller and once by the kernel where it keeps a copy, and log-sum-exps
    assert kept < sum(o.numel() for o in outs) * 2 * 2 + gathered // 2
