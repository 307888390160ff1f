"""What each process of a gloo group does in the tests of ranks that agree on kernels."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import layerzero as lz
from layerzero.errors import RanksError
from layerzero.spec.call import Call, TensorSpec
from layerzero.spec.event import Event
from layerzero.world import snapshot as worlds


def everywhere(value: Any) -> list[Any]:
    messages = [None] * dist.get_world_size()
    dist.all_gather_object(messages, value)
    return messages


def linear_call(k: int, rows: int = 3) -> Call:
    return Call("linear", {"x": TensorSpec((rows, k), "float32"),
                           "weight": TensorSpec((48, k), "float32")})


def call_linear(k: int, rows: int = 3) -> str:
    x, w = torch.zeros(rows, k), torch.zeros(48, k)
    lz.linear(x, w)
    return lz.which("linear", x, w)


def zeros_at(offset: int, rows: int, width: int) -> torch.Tensor:
    """Returns zeros that begin `offset` bytes behind a multiple of 128."""
    memory = torch.zeros(rows * width + 64)
    start = (offset - memory.data_ptr()) % 128 // 4
    return memory[start:start + rows * width].view(rows, width)


def check_agreement(rank: int, size: int, store: str) -> None:
    check_other_shapes(rank, size)
    check_a_policy_that_differs(rank, size)
    check_training_refuses(rank, size)
    check_uneven_shards(rank, size)
    check_groups(rank, size)
    check_a_mesh(rank, size)
    check_a_change(rank, size)
    check_a_rank_that_is_late(rank, size)
    check_same_bits(rank, size)
    check_a_rank_that_dies(rank, size, store)  # the last: one rank has a policy of its own then


def check_other_shapes(rank: int, size: int) -> None:
    """Every rank sees shapes of its own, the last one none at all: no call waits for another."""
    agreement = lz.distributed.init("training", timeout=60)
    assert agreement.kinds == 0 and agreement.size == size
    if rank < size - 1:
        call_linear(64)
        call_linear(100 + rank)
    own = lz.distributed.status()
    assert own is not None and own.provisional == (2 if rank < size - 1 else 0)
    assert lz.distributed.sync() == size                       # 64, and one more of each but one
    assert len({a.id for a in everywhere(lz.distributed.status())}) == 1
    plan = lz.explain("linear", torch.zeros(3, 100), torch.zeros(48, 100))  # rank 0 alone met it
    assert plan.table.startswith("agreed-") and "agreed" in plan.steps[0].note
    assert len(set(everywhere(plan.kernel))) == 1
    call_linear(64, rows=200)                                  # a new bucket: provisional again
    missed = lz.explain("linear", torch.zeros(200, 64), torch.zeros(48, 64)).missed
    assert missed is not None and missed.code is lz.Code.NOT_AGREED
    assert lz.distributed.check().id == own.id or lz.distributed.sync() >= 0
    if rank == 0:
        ranks = lz.readiness_check(device="cpu")["ranks"]
        assert f"of {size} ranks have not been checked" in ranks.got   # the others did not ask
    dist.barrier()
    lz.distributed.shutdown()
    assert lz.distributed.status() is None
    assert not lz.explain("linear", torch.zeros(3, 64), torch.zeros(48, 64)).table


def check_a_policy_that_differs(rank: int, size: int) -> None:
    """In inference what one rank may not use, none uses, once that is agreed."""
    events: list[Event] = []
    stop = lz.subscribe(events.append)
    if rank == 1:
        lz.configure(rules=(lz.PolicyRule.of("deny", "torch.rms_norm*", "rms_norm"),))
    agreement = lz.distributed.init("inference", timeout=60)
    (difference,) = agreement.differences
    assert difference.startswith("rank 1: policy ")
    assert [e.differences for e in events if e.name == "ranks_differ"] == [(difference,)]
    x = zeros_at(64 * (rank % 2), 5, 64)       # one kind of call, wherever its tensor begins
    lz.rms_norm(x)
    before = everywhere(lz.which("rms_norm", x))
    lz.distributed.sync()
    after = everywhere(lz.which("rms_norm", x))
    assert len(set(after)) == 1 and after[0] == before[1]
    # the ranks may have agreed in two rounds, if one was busy in the first
    assert [e.kinds for e in events if e.name == "ranks_agreed"][-1:] == [1]
    if rank == 0:
        assert lz.readiness_check(device="cpu")["ranks"].state != "fail"
    lz.rms_norm(x)
    stop()
    lz.distributed.shutdown()
    assert lz.which("rms_norm", x) == before[rank]             # each by itself again


def check_training_refuses(rank: int, size: int) -> None:
    """Rank 1 still has a policy of its own."""
    with pytest.raises(RanksError, match=r"rank 1: policy .* instead of") as caught:
        lz.distributed.init("training", timeout=60)
    assert caught.value.ranks == (1,) and lz.distributed.status() is None
    if rank == 1:
        lz.configure(rules=(lz.PolicyRule.of("allow", "*", "rms_norm"),))
        lz._load().worlds.publish(lambda w: w.replace(policy=w.policy.without("programmatic")))
    lz.distributed.init("training", timeout=60)                # the same round: tried again
    lz.distributed.shutdown()


def check_uneven_shards(rank: int, size: int) -> None:
    """Shards of 40, 41, ... inputs: the i-th call of every rank is one call, with one kernel. Calls
    of another operation are refused on all ranks."""
    lz.distributed.init("inference", timeout=60)
    if rank == 0:                                              # rank 0 would choose another
        lz.configure(rules=(lz.PolicyRule.of("deny", "torch.linear", "linear",
                                             {"in_features": 40}),))
    assert lz.distributed.agree([linear_call(40 + rank), linear_call(500)]) == 2
    kernels = everywhere(call_linear(40 + rank))
    assert len(set(kernels)) == 1 and kernels[0] != "torch.linear"
    assert set(everywhere(call_linear(500))) == {"torch.linear"}
    calls = [linear_call(64)] if rank else [Call("rms_norm", {"x": TensorSpec((2, 8), "float32")})]
    with pytest.raises(RanksError, match="came with other calls than rank 0"):
        lz.distributed.agree(calls)
    lz.distributed.shutdown()
    if rank == 0:
        lz._load().worlds.publish(lambda w: w.replace(policy=w.policy.without("programmatic")))


def check_groups(rank: int, size: int) -> None:
    """Two tensor-parallel groups beside each other: each agrees by itself, and a rank that belongs
    to neither is told so."""
    groups = [dist.new_group([0, 1]), dist.new_group([*range(2, size)])] if size > 2 else [None]
    mine = groups[rank // 2] if size > 2 else None
    agreement = lz.distributed.init("inference", mine, timeout=60)
    assert agreement.size == 2 and agreement.rank == rank % 2
    if rank == 0:                                              # only the first replica has traffic
        call_linear(72)
    result = lz.distributed.sync()
    assert result == (1 if rank < 2 else 0)
    lz.distributed.shutdown()
    if size > 2:
        with pytest.raises(lz.errors.ConfigError, match="belongs to"):
            lz.distributed.init(group=groups[1 - rank // 2])


def check_a_mesh(rank: int, size: int) -> None:
    """Tensor-parallel groups 0, 1 and 2, 3, and replicas 0, 2 and 1, 3: rank 0 and rank 3 share no
    group, and choose alike all the same. What rank 2 may not use, nobody does."""
    if size != 4:
        return
    pairs = [[0, 1], [2, 3], [0, 2], [1, 3]]
    groups = [dist.new_group(ranks) for ranks in pairs]
    tensor, data = groups[rank // 2], groups[2 + rank % 2]
    x = torch.zeros(5, 64)
    if rank == 2:
        lz.configure(rules=(lz.PolicyRule.of("deny", lz.which("rms_norm", x), "rms_norm"),))
    lz.distributed.init("inference", tensor, timeout=60, name="tensor")
    lz.rms_norm(x)
    lz.distributed.init("inference", data, timeout=60, name="data")
    call_linear(72 + rank)
    lz.rms_norm(x)
    assert lz.distributed.sync(name="tensor") == 3             # two shapes of linear, rms_norm
    kernels = everywhere(lz.which("rms_norm", x))
    assert kernels[0] == kernels[1] != kernels[2] == kernels[3]
    lz.distributed.sync()                                      # the shapes of the other pair too
    assert len(set(everywhere(lz.which("rms_norm", x)))) == 1
    assert lz.distributed.sync() >= 0 and lz.distributed.sync() == 0 == lz.distributed.sync()
    assert all(len(set(everywhere(call_linear(72 + r)))) == 1 for r in range(4))
    lz.distributed.sync()                                      # each pair met those of the other
    epoch = worlds.current().epoch
    assert lz.distributed.sync() == 0 and worlds.current().epoch == epoch      # nothing is new
    status = lz.distributed.status("data")
    assert status is not None and str(status).startswith("data: 2 ranks, 5 kinds")
    assert lz.distributed.check().name == "tensor"
    with pytest.raises(lz.errors.ConfigError, match=r"name='pipeline'.*'tensor', 'data'"):
        lz.distributed.sync(name="pipeline")
    lz.distributed.shutdown("data")
    assert everywhere(lz.which("rms_norm", x)) == kernels
    lz.distributed.shutdown()
    assert not lz.explain("rms_norm", x).table
    lz._load().worlds.publish(lambda w: w.replace(policy=w.policy.without("programmatic")))


def check_a_change(rank: int, size: int) -> None:
    """A rank that changes its policy alone is found by `check`, and named."""
    lz.distributed.init("training", timeout=60)
    lz.distributed.check()
    if rank == 1:
        lz.configure(strict_mode=True)
    with pytest.raises(RanksError, match="rank 1: policy") as caught:
        lz.distributed.check()
    assert caught.value.ranks == ((1,) if size > 2 else caught.value.ranks)
    if rank != 1:
        lz.configure(strict_mode=True)
    lz.distributed.check()                                     # all have changed alike
    lz.distributed.shutdown()
    lz._load().worlds.publish(lambda w: w.replace(policy=w.policy.without("programmatic")))


def check_a_rank_that_is_late(rank: int, size: int) -> None:
    """The others are told who is missing, and may come again."""
    lz.distributed.init("inference", timeout=60)
    late = size - 1
    if rank != late:
        call_linear(80 + rank)
        with pytest.raises(RanksError, match=f"rank {late} of .* did not come to 'kinds'") as caught:
            lz.distributed.sync(timeout=0.3)
        assert caught.value.ranks == (late,)
        call_linear(200)                                       # calls go on meanwhile
    dist.barrier()
    lz.distributed.sync()
    kinds = [a.kinds for a in everywhere(lz.distributed.status())]
    assert kinds == [late] * size                              # 200 waits for the next one
    assert lz.distributed.sync() == 1
    lz.distributed.shutdown()


def check_a_rank_that_dies(rank: int, size: int, path: str) -> None:
    """Rank 1 dies after an agreement; the others learn it by its number. A new process takes its
    place and its agreement, and the round that had failed goes on."""
    if rank > 1:
        return
    store = dist.FileStore(path, 2)
    group = lz.distributed.StoreGroup(store, rank, 2)

    def first_agreement() -> str:
        lz.distributed.init("inference", group, timeout=60)
        call_linear(64)
        lz.distributed.sync()
        status = lz.distributed.status()
        assert status is not None
        return status.id

    if rank == 0:
        agreed = first_agreement()
        call_linear(96)
        with pytest.raises(RanksError, match="rank 1 of 0, 1 did not come"):
            lz.distributed.sync(timeout=0.3)
        store.set("others know", agreed)
    else:
        pid = os.fork()
        if pid == 0:
            os._exit(0 if first_agreement() else 1)
        assert os.waitpid(pid, 0)[1] == 0
        while not store.check(["others know"]):
            time.sleep(0.01)
        # it may not use what the others run
        lz.configure(rules=(lz.PolicyRule.of("deny", str(lz.which(
            "linear", torch.zeros(3, 64), torch.zeros(48, 64))), "linear"),))
        agreement = lz.distributed.init("inference", group, timeout=60, join=True)
        assert agreement.id == store.get("others know").decode() and agreement.kinds == 1
        assert lz.explain("linear", torch.zeros(3, 64), torch.zeros(48, 64)).table
    assert lz.distributed.sync() == 2          # what is new, and what the joined rank cannot run
    store.set(f"kernel {rank}", call_linear(64))
    assert store.get("kernel 0") == store.get("kernel 1")
    status = lz.distributed.status()
    assert status is not None and status.kinds == 2
    lz.distributed.shutdown()


def tiny_block(group: Any, x: torch.Tensor, ids: torch.Tensor,
               weights: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Embedding, norm, attention by heads, feed-forward layer: of the ranks of one group."""
    d = lz.distributed

    def own(name: str, dim: int = 0) -> torch.Tensor:
        return d.shard(weights[name], dim, group=group).requires_grad_(
            weights[name].is_floating_point() and weights[name].dtype is torch.float32)

    leaf = x.clone().requires_grad_(x.dtype is torch.float32)
    table, q, k, v, o = own("table", 1), own("q"), own("k"), own("v"), own("o", 1)
    hidden = lz.rms_norm(leaf + d.parallel_embedding(ids, table, group=group), weights["norm"])
    heads = [d.column_linear(hidden, w, group=group).view(*x.shape[:2], -1, 16).transpose(1, 2)
             for w in (q, k, v)]
    mixed = d.parallel_attention(*heads, is_causal=True, group=group).transpose(1, 2).flatten(2)
    hidden = hidden + d.row_linear(mixed, o, weights["bias"], group=group)
    gate, up, down = own("gate"), own("up"), own("down", 1)
    out = hidden + d.parallel_mlp(hidden, gate, up, down, group=group)
    if leaf.requires_grad:
        out.square().sum().backward()
        return [out.detach(), leaf.grad, *(w.grad for w in (q, gate, down))]
    return [out]


def check_same_bits(rank: int, size: int) -> None:
    """One, two and four ranks compute the same bits, forward and backward."""
    if size != 4:
        return
    groups = {1: [dist.new_group([r]) for r in range(4)][rank],
              2: [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2], 4: None}
    gen = torch.Generator().manual_seed(1)
    sizes = {"table": (40, 64), "norm": (64,), "q": (256, 64), "k": (128, 64), "v": (128, 64),
             "o": (64, 256), "bias": (64,), "gate": (160, 64), "up": (160, 64), "down": (64, 160)}
    for dtype in (torch.float32, torch.bfloat16):
        weights = {name: torch.randn(shape, generator=gen).to(dtype) / 8
                   for name, shape in sizes.items()}
        x = torch.randn(2, 5, 64, generator=gen).to(dtype)
        ids = torch.randint(0, 40, (2, 5), generator=gen)
        results = {n: tiny_block(group, x, ids, weights) for n, group in groups.items()}
        for n in (2, 4):
            assert torch.equal(results[n][0], results[1][0]), (n, dtype)
            for i, whole in enumerate(results[1][1:]):
                part = results[n][1 + i]
                want = (whole if not i else
                        whole.chunk(n, 1 if i == 3 else 0)[rank % n])      # x, q, gate, down
                assert torch.equal(part, want), (n, i)
