"""Context parallelism with all ranks in this process: the programs are those of real processes, which
tests/integration/test_zigzag_llama3_grouped.py starts."""

from __future__ import annotations

import gc
import inspect
import weakref
from itertools import pairwise

import pytest
import torch
from torch.autograd import gradcheck
from torch.utils.checkpoint import checkpoint

import layerzero as lz
from layerzero.integrations import context_parallel as cp
from layerzero.integrations.context_parallel import gather, ranks, recorded, sharding
from layerzero.spec.errors import ConfigError, InvalidCall

METHODS = {"zigzag": cp.zigzag_attention, "ring": cp.ring_attention, "ulysses": cp.ulysses_attention}


def draw(tokens, *heads, dim=8, dtype=torch.float64):
    gen = torch.Generator().manual_seed(tokens)
    return [torch.randn((tokens, n, dim), generator=gen).to(dtype) for n in heads]


def bounds(size, *units):
    """Sequences of so many times 2 x size tokens."""
    return [2 * size * sum(units[:i]) for i in range(len(units) + 1)]


def run(method, tensors, cu, size, layout="zigzag", **options):
    """The result over all ranks, in the order of the sequences."""
    group = cp.SimulatedRanks(size)
    parts = [[cp.shard(t, cu, rank, size, layout=layout) for rank in range(size)] for t in tensors]
    local = cp.local_cu_seqlens(torch.tensor(cu, dtype=torch.int32), size)
    outs = METHODS[method](*parts, local, layout=layout, group=group, **options)
    back = torch.cat([cp.shard_indices(cu, rank, size, layout) for rank in range(size)]).argsort()
    if options.get("return_lse"):
        return tuple(torch.cat(one)[back] for one in zip(*outs))
    return torch.cat(outs)[back]


def one_rank(q, k, v, cu, **options):
    starts = torch.tensor(cu, dtype=torch.int32)
    items = torch.stack((starts[:-1], starts[1:] - starts[:-1]) * 2, 1)
    longest = int((starts[1:] - starts[:-1]).max())
    return lz.grouped_attention(q, k, v, items, longest, longest, **options)


# the result

@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("method", "options"), [
    ("zigzag", {"heads_k_stride": 1}), ("zigzag", {"heads_k_stride": 2}),
    ("zigzag", {"heads_k_stride": 4}), ("ring", {}), ("ulysses", {})])
@pytest.mark.parametrize("size", [1, 3])
def test_forward_and_backward_are_those_of_one_rank(size, method, options, causal, layout):
    """Three sequences, one of them empty, GQA, gradients of the result and of its log-sum-exp."""
    cu = bounds(size, 2, 0, 3)
    heads, kv_heads = (12, 4) if method == "zigzag" else (6, 3)
    q, k, v, dout = draw(cu[-1], heads, kv_heads, kv_heads, heads)
    tensors = [t.requires_grad_() for t in (q, k, v)]
    dlse = dout[..., 0]
    wanted = one_rank(q, k, v, cu, is_causal=causal, return_lse=True)
    results = run(method, tensors, cu, size, layout, is_causal=causal, return_lse=True, **options)
    for a, b in zip(results, wanted):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    got, exact = (torch.autograd.grad(r, tensors, (dout, dlse)) for r in (results, wanted))
    for a, b in zip(got, exact):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_gradients_by_finite_differences(method):
    cu = bounds(2, 1, 2)
    tensors = [t.requires_grad_() for t in draw(cu[-1], 2, 1, 1, dim=2)]
    assert gradcheck(lambda *qkv: run(method, qkv, cu, 2), tensors, fast_mode=True)


@pytest.mark.parametrize("options", [{"window_left": 5}, {"softcap": 3.0, "scale": 0.7}])
@pytest.mark.parametrize("method", ["zigzag", "ulysses"])
def test_windows_and_softcap_reach_across_ranks(method, options):
    cu = bounds(2, 3, 1)
    tensors = draw(cu[-1], 4, 2, 2)
    torch.testing.assert_close(run(method, tensors, cu, 2, **options),
                               one_rank(*tensors, cu, is_causal=True, **options), rtol=0, atol=1e-12)


def test_the_rearranging_way_gives_the_same():
    cu = bounds(2, 3, 1)
    tensors = [t.requires_grad_() for t in draw(cu[-1], 4, 2, 2)]
    ways = [run("zigzag", tensors, cu, 2, rearrange=how) for how in (False, True)]
    torch.testing.assert_close(*ways, rtol=0, atol=1e-12)
    grads = [torch.autograd.grad(out.square().sum(), tensors) for out in ways]
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", ["zigzag", "ring"])
def test_half_precision_sums_the_ranks_gradients_in_float32(method, monkeypatch):
    sums, exchanged = [], ranks._exchanged

    def spy(kind, tensors):
        sums.append((kind, tensors[0].dtype))
        return exchanged(kind, tensors)

    cu = bounds(4, 4)
    tensors = [t.bfloat16().requires_grad_() for t in draw(cu[-1], 2, 1, 1)]
    exact = [t.detach().double().requires_grad_() for t in tensors]
    dout = torch.ones(cu[-1], 2, 8, dtype=torch.float64)
    wanted = torch.autograd.grad(one_rank(*exact, cu, is_causal=True), exact, dout)
    alone = torch.autograd.grad(one_rank(*tensors, cu, is_causal=True), tensors, dout.bfloat16())
    out = run(method, tensors, cu, 4)
    monkeypatch.setattr(ranks, "_exchanged", spy)
    grads = torch.autograd.grad(out, tensors, dout.bfloat16())
    kind = {"zigzag": "reduce_scatter", "ring": "shift"}[method]
    assert (kind, torch.float32) in sums and ("reduce_scatter", torch.bfloat16) not in sums
    for got, one, want in zip(grads, alone, wanted):
        assert got.dtype == torch.bfloat16
        assert (got - want).norm() <= 3 * (one - want).norm()


# what a rank reads and does

@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_key_is_read_exactly_once(size, method):
    """Equal scores and values that are rows of the identity: a query's result shows how often it has
    read each key."""
    cu = bounds(size, 1, 3)
    tokens = cu[-1]
    q = torch.zeros(tokens, 4, 8, dtype=torch.float64)
    values = torch.eye(tokens, dtype=torch.float64)[:, None].expand(-1, 4, -1)
    out = run(method, (q, q, values), cu, size)
    first = torch.tensor([a for a, b in pairwise(cu) for _ in range(a, b)])
    row, column = torch.arange(tokens)[:, None], torch.arange(tokens)
    seen = (column >= first[:, None]) & (column <= row)
    expected = seen / seen.sum(1, keepdim=True).double()
    torch.testing.assert_close(out, expected[:, None].expand_as(out), rtol=0, atol=1e-15)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_zigzag_is_equal_work_for_every_rank(size):
    starts = torch.tensor(bounds(size, 2, 7), dtype=torch.int32) // size
    work = {}
    for layout in ("zigzag", "contiguous"):
        sequences = sharding.sequences_of(starts, None, layout, size, torch.device("cpu"))
        tokens = int(starts[-1])
        items = [sequences.gathered(rank, tokens, True).items.long() for rank in range(size)]
        # each row of n sees m - n + 1 to m keys
        work[layout] = [int((n * m - n * (n - 1) // 2).sum()) for _, n, _, m in (i.unbind(1)
                                                                               for i in items)]
    assert len(set(work["zigzag"])) == 1 and len(set(work["contiguous"])) == size
    assert sum(work["zigzag"]) == sum(work["contiguous"])


def test_a_chunk_of_heads_is_one_call_over_the_buffer_itself(monkeypatch):
    """No copy of what was gathered: the keys of the call lie in the buffer that the exchange
    filled."""
    calls, buffers = [], []
    call, exchanged = recorded.grouped_attention, ranks._exchanged

    def spy(query, key, value, **more):
        calls.append((key, value, more["chunk_starts"]))
        return call(query, key, value, **more)

    def spy_exchanged(kind, tensors):
        results = exchanged(kind, tensors)
        buffers.extend(results[:1])
        return results

    monkeypatch.setattr(recorded, "grouped_attention", spy)
    monkeypatch.setattr(ranks, "_exchanged", spy_exchanged)
    cu = bounds(2, 1, 3)
    run("zigzag", draw(cu[-1], 8, 4, 4), cu, 2, heads_k_stride=2)
    assert len(calls) == 2 * 2 and len(buffers) == 2        # ranks x chunks of heads
    where = {b.untyped_storage().data_ptr() for b in buffers}
    assert {t.untyped_storage().data_ptr() for key, value, _ in calls for t in (key, value)} == where
    assert all(starts.shape == (4, 4) for *_, starts in calls)


def test_the_next_heads_are_on_their_way_while_these_are_attended_to():
    """In the order of a rank's doings: the second exchange starts before the first attention."""
    doings = []

    class Slow:
        def __init__(self, tensor):
            self.tensor = tensor

        def wait(self):
            doings.append("wait")
            return self.tensor

    def attend(q, k, v):
        doings.append("attend")
        return q

    q, k, v = draw(4, 3, 3, 3)
    program = gather._forward(q, k, v, attend, 1, False)
    exchange = next(program)
    with pytest.raises(StopIteration):
        while True:
            doings.append(exchange.kind)
            exchange = program.send(Slow(exchange.tensor))
    assert doings == ["all_gather", "wait", "all_gather", "attend", "wait", "all_gather", "attend",
                      "wait", "attend"]


def test_what_was_gathered_is_freed_after_the_forward(monkeypatch):
    """The graph holds where the keys were, not the keys; the backward gathers again."""
    alive, exchanged = [], ranks._exchanged

    def spy(kind, tensors):
        results = exchanged(kind, tensors)
        alive.append(weakref.ref(results[0].untyped_storage()))
        return results

    monkeypatch.setattr(ranks, "_exchanged", spy)

    class Saving(torch.autograd.Function):     # as a kernel with a backward of its own does it
        @staticmethod
        def forward(ctx, q, k, v):
            ctx.save_for_backward(q, k, v)
            return q.clone()

        @staticmethod
        def backward(ctx, grad):
            q, k, v = ctx.saved_tensors
            return grad * q, k.clone(), v.clone()

    q, k, v = ([t.requires_grad_() for t in draw(4, 2, 2)] for _ in range(3))
    group = cp.SimulatedRanks(2)
    outs = gather.gathered_attention(group, q, k, v, [Saving.apply] * 2, 1, False)
    gc.collect()
    assert len(alive) == 2 and all(ref() is None for ref in alive)
    grads = torch.autograd.grad(sum(out.sum() for out in outs), [*q, *k, *v])
    assert [*map(torch.equal, grads, [*q, *(2 * t for t in (*k, *v))])] == [True] * 6
    assert len(alive) == 6                     # gathered and summed, for two chunks of heads


def test_backward_twice_over_one_graph():
    cu = bounds(2, 2)
    tensors = [t.requires_grad_() for t in draw(cu[-1], 2, 2, 2)]
    out = run("zigzag", tensors, cu, 2).sum()
    first = torch.autograd.grad(out, tensors, retain_graph=True)
    for a, b in zip(first, torch.autograd.grad(out, tensors)):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_activation_checkpoints_and_autocast(method, reentrant):
    cu = bounds(2, 1, 2)
    tensors = [t.float().requires_grad_() for t in draw(cu[-1], 4, 2, 2)]
    out = one_rank(*tensors, cu, is_causal=True)
    wanted = torch.autograd.grad(out.square().sum(), tensors)
    checkpoint(lambda *qkv: run(method, qkv, cu, 2), *tensors,
               use_reentrant=reentrant).square().sum().backward()
    for t, want in zip(tensors, wanted):
        torch.testing.assert_close(t.grad, want, rtol=1e-4, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        lower = run(method, tensors, cu, 2)
    assert lower.dtype == torch.bfloat16
    grads = torch.autograd.grad(lower.float().square().sum(), tensors)
    for got, want in zip((lower, *grads), (out, *wanted)):
        assert (got.float() - want).norm() <= 2e-2 * want.norm()


def test_nothing_is_recorded_where_no_gradient_is_wanted(monkeypatch):
    monkeypatch.delattr(gather, "Recorded")
    cu = bounds(2, 2)
    tensors = [t.requires_grad_() for t in draw(cu[-1], 2, 2, 2)]
    with torch.no_grad():
        out = run("zigzag", tensors, cu, 2)
    assert not out.requires_grad
    with torch.inference_mode():               # and boundaries made there serve later
        run("zigzag", [t.detach() for t in tensors], cu, 2)


# the parts

def test_shards_positions_and_back():
    cu = bounds(2, 1, 2)
    tokens = torch.arange(cu[-1])
    parts = [cp.shard(tokens, cu, rank, 2) for rank in range(2)]
    assert parts[0].tolist() == [0, 3, 4, 5, 10, 11] and parts[1].tolist() == [1, 2, 6, 7, 8, 9]
    assert cp.shard_positions(cu, 0, 2).tolist() == [0, 3, 0, 1, 6, 7]
    assert torch.equal(cp.unshard(parts, cu, cp.SimulatedRanks(2)), tokens)
    wide = torch.arange(3 * cu[-1]).view(3, -1)
    parts = [cp.shard(wide, cu, rank, 2, dim=1) for rank in range(2)]
    assert torch.equal(cp.unshard(parts, cu, cp.SimulatedRanks(2), dim=1), wide)


def test_a_batch_keeps_its_labels_and_positions():
    tokens = torch.arange(16).view(2, 8)
    group = cp.SimulatedRanks(2)
    batch = cp.shard_batch({"input_ids": tokens, "labels": tokens}, group, rank=0)
    assert batch["input_ids"].tolist() == [[0, 1, 6, 7], [8, 9, 14, 15]]
    assert batch["shift_labels"].tolist() == [[1, 2, 7, -100], [9, 10, 15, -100]]
    assert batch["position_ids"].tolist() == [[0, 1, 6, 7]] * 2
    with pytest.raises(ConfigError, match="padded batch"):
        cp.shard_batch({"input_ids": tokens, "attention_mask": tokens}, group, rank=0)


def test_items_are_made_once_until_the_boundaries_change():
    starts = torch.tensor([0, 4], dtype=torch.int32)
    made = [sharding.sequences_of(starts, 4, "zigzag", 2, starts.device).gathered(0, 4, True)
            for _ in range(2)]
    assert made[0] is made[1] and made[0].items.tolist() == [[0, 2, 0, 2], [2, 2, 0, 8]]
    starts[1] = 2
    again = sharding.sequences_of(starts, 4, "zigzag", 2, starts.device).gathered(0, 4, True)
    assert again.items.tolist() == [[0, 1, 0, 1], [1, 1, 0, 4]]


def test_llama3_splits_packed_sequences_anywhere():
    cu = torch.tensor([0, 6, 7, 24], dtype=torch.int32)
    q, k, v = draw(24, 4, 2, 2)
    group = cp.SimulatedRanks(3)
    for causal in (True, False):
        parts = [cp.llama3_flash_attn_prepare_cu_seqlens(cu, causal, rank, 3) for rank in range(3)]
        assert parts[0][0].tolist() == [0, 6, 7, 8] and parts[0][4] == slice(0, 8 if causal else 24)
        items = []
        for cu_q, cu_k, longest_q, longest_k, part in parts:
            items.append(sharding.Items(torch.stack(
                (cu_q[:-1], cu_q.diff(), cu_k[:-1] + part.start, cu_k.diff()), 1).int(), longest_q,
                longest_k))
        out = cp.methods.items_attention(q.chunk(3), k.chunk(3), v.chunk(3), items, is_causal=causal,
                                         group=group)
        torch.testing.assert_close(torch.cat(out), one_rank(q, k, v, cu.tolist(), is_causal=causal),
                                   rtol=0, atol=1e-12)


# faces and errors

def test_the_names_of_ring_flash_attention_take_its_arguments():
    varlen = ["q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k",
              "heads_k_stride", "local_k_slice"]
    common = ["dropout_p", "softmax_scale", "causal", "window_size", "alibi_slopes", "deterministic",
              "return_attn_probs", "group"]

    def names(function):
        return [*inspect.signature(function).parameters]

    assert names(cp.llama3_flash_attn_varlen_func) == varlen + common
    assert names(cp.zigzag_llama3_flash_attn_varlen_func)[:17] == varlen + common
    assert "use_grouped_attention" in names(cp.zigzag_llama3_flash_attn_varlen_func)
    for name in ("ring_flash_attn_varlen_func", "zigzag_ring_flash_attn_varlen_func"):
        assert names(getattr(cp, name)) == ["q", "k", "v", "cu_seqlens", "max_seqlen", *common]
    for name in ("ring_flash_attn_func", "zigzag_ring_flash_attn_func"):
        assert names(getattr(cp, name)) == ["q", "k", "v", *common]
    packed = [n for n in cp.__all__ if "packed" in n]
    assert len(packed) == 12 and all(getattr(cp, n).__name__ == n for n in packed)


def wrong(message, method="zigzag", size=2, starts=(0, 8), tokens=8, heads=(2, 2, 2), **options):
    tensors = [[t] * size for t in draw(tokens, *heads)]
    with pytest.raises(ConfigError, match=message):
        METHODS[method](*tensors, list(starts), group=cp.SimulatedRanks(size), **options)


def test_errors_say_what_to_do():
    wrong("not all even", starts=(0, 3, 8))
    wrong("must divide the 2 KV heads, got 3", heads_k_stride=3)
    wrong("at least the longest local part, 8, got 4", max_seqlen=4)
    wrong("pass is_causal=True", window_left=3, is_causal=False)
    wrong("layout must be 'zigzag' or 'contiguous'", layout="striped")
    wrong("take fewer ranks", "ulysses", size=4)
    with pytest.raises(ConfigError, match="pad it to 16"):
        cp.shard_indices([0, 13], 0, 4)
    with pytest.raises(ConfigError, match="from 1 on, got 0"):
        cp.SimulatedRanks(0)
    x = torch.zeros(4, 1, 8)
    with pytest.raises(ConfigError, match="for each of 2 simulated ranks, got Tensor"):
        cp.zigzag_attention(x, x, x, [0, 4], group=cp.SimulatedRanks(2))
    with pytest.raises(ConfigError, match="init_process_group first"):
        cp.zigzag_attention(x, x, x, [0, 4])
    with pytest.raises(ConfigError, match="does not compute dropout_p"):
        cp.ring_flash_attn_func(x[None], x[None], x[None], dropout_p=0.1)
    with pytest.raises(ConfigError, match="zigzag_llama3_flash_attn_varlen_func has causal windows"):
        cp.ring_flash_attn_func(x[None], x[None], x[None], causal=True, window_size=(2, 0))
    with pytest.raises(ConfigError, match="wants the buffers"), cp.context_parallel(None):
        pass
    with pytest.raises(InvalidCall):           # the op's own word about what it is given
        cp.zigzag_attention([x], [x], [x], [0, 6], group=cp.SimulatedRanks(1))


def test_a_torch_without_distributed_is_told_kindly(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    x = torch.zeros(4, 1, 8)
    with pytest.raises(ConfigError, match=r"this build of torch is without.*SimulatedRanks"):
        cp.zigzag_attention(x, x, x, [0, 4])
    cp.zigzag_attention([x], [x], [x], [0, 4], group=cp.SimulatedRanks(1))
