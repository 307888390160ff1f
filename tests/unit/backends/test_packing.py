"""Rearranged weights: made once, made anew when the weight changes, gone when it is gone."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from helpers import python
from torch.nn import functional as F

import layerzero as lz
from layerzero.backends._packing import PACKED, PackedWeights
from layerzero.machine.hardware import probe
from layerzero.models.weights.packing import forget_packed, limit_packed, packed_weights

HERE = "avx512f" in probe("cpu").isa
needs_onednn = pytest.mark.skipif(not HERE, reason="torch.linear_prepacked needs AVX-512")


class Counting:
    """Packs by copying, and counts."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        self.calls += 1
        return [t.clone() for t in tensors]


@pytest.fixture
def cache():
    return PackedWeights(limit=1 << 20)


@pytest.fixture
def shared():
    """The library's own cache, left as it was found."""
    limit = PACKED.limit
    PACKED.forget()
    yield PACKED
    PACKED.limit = limit
    PACKED.forget()


def test_packed_once(cache):
    pack, weight = Counting(), torch.randn(4, 4)
    first = cache.get("a", pack, weight)
    assert cache.get("a", pack, weight) is first
    assert (pack.calls, len(cache), cache.nbytes) == (1, 1, 64)


def test_each_kind_has_its_own(cache):
    pack, weight = Counting(), torch.randn(4, 4)
    assert cache.get("a", pack, weight) is not cache.get("b", pack, weight)
    assert pack.calls == 2


@pytest.mark.parametrize("change", [
    lambda w: w.mul_(2), lambda w: w[0].zero_(), lambda w: w.t().add_(1),
    lambda w: w.detach().mul_(3), lambda w: torch.optim.SGD([_with_grad(w)], lr=0.1).step()],
                         ids=["mul", "row", "view", "detached", "optimizer"])
def test_a_write_in_place_packs_anew(cache, change):
    pack, weight = Counting(), torch.nn.Parameter(torch.randn(4, 4))
    cache.get("a", pack, weight)
    with torch.no_grad():
        change(weight)
    assert torch.equal(cache.get("a", pack, weight)[0], weight)
    assert (pack.calls, len(cache)) == (2, 1)


def _with_grad(weight):
    weight.grad = torch.ones_like(weight)
    return weight


def test_any_of_several_tensors_may_change(cache):
    pack, codes, scales = Counting(), torch.ones(4), torch.ones(2)
    cache.get("a", pack, codes, scales)
    scales.mul_(2)
    assert torch.equal(cache.get("a", pack, codes, scales)[1], scales)


def test_new_views_of_one_weight_share_what_was_packed(cache):
    pack, weights = Counting(), torch.randn(3, 4, 4)
    for _ in range(3):
        cache.get("a", pack, weights[1])
        cache.get("a", pack, weights[1].detach())
    assert pack.calls == 1
    cache.get("a", pack, weights[2])
    cache.get("a", pack, weights[1].t())
    assert pack.calls == 3                     # another place, and other strides


def test_gone_with_the_weight(cache):
    weight = torch.randn(4, 4)
    view = weight[:2]
    cache.get("a", Counting(), weight)
    del weight
    gc.collect()
    assert len(cache) == 1                     # the view keeps the memory alive
    del view
    gc.collect()
    assert (len(cache), cache.nbytes) == (0, 0)


def test_new_memory_behind_a_parameter(cache):
    pack, weight = Counting(), torch.nn.Parameter(torch.randn(4, 4))
    cache.get("a", pack, weight)
    weight.data = torch.randn(4, 4)
    assert torch.equal(cache.get("a", pack, weight)[0], weight)
    assert len(cache) == 1


def test_an_address_that_was_given_up_and_taken_by_another(cache):
    """A storage that is resized leaves its address; another tensor of like shape and version may
    get it."""
    pack, first = Counting(), torch.randn(64, 64)
    address = first.data_ptr()
    cache.get("a", pack, first)
    first.untyped_storage().resize_(0)
    tries = [torch.randn(64, 64) for _ in range(50)]
    for other in [t for t in tries if t.data_ptr() == address] or tries[:1]:
        assert torch.equal(cache.get("a", pack, other)[0], other)


def test_a_write_that_leaves_no_trace_is_the_limit_and_can_be_told(cache):
    pack, weight = Counting(), torch.nn.Parameter(torch.randn(4, 4))
    cache.get("a", pack, weight)
    weight.data.mul_(2)                        # bumps no version
    assert not torch.equal(cache.get("a", pack, weight)[0], weight)
    assert cache.forget(weight) == 1
    assert torch.equal(cache.get("a", pack, weight)[0], weight)


def test_forgetting_one_leaves_the_others(cache):
    pack, weights = Counting(), [torch.randn(4, 4) for _ in range(3)]
    for w in weights:
        cache.get("a", pack, w)
    assert cache.forget(weights[1][:2]) == 1   # by any view of it
    assert len(cache) == 2
    assert cache.forget() == 2


def test_when_full_a_newcomer_is_not_packed_and_the_others_stay(cache):
    pack = Counting()
    weights = [torch.randn(256, 256) for _ in range(5)]          # a quarter of the limit each
    packed = [cache.get("a", pack, w) for w in weights]
    assert [p is not None for p in packed] == [True] * 4 + [False]
    assert all(cache.get("a", pack, w) is p for w, p in zip(weights, packed))
    assert pack.calls == 4                     # nobody was thrown out to be packed again
    del weights[0]
    gc.collect()
    assert cache.get("a", pack, weights[-1]) is not None


def test_an_inference_tensor_cannot_be_watched(cache):
    with torch.inference_mode():
        weight = torch.randn(4, 4)
    assert cache.get("a", Counting(), weight) is None


def test_threads_pack_once_and_see_every_change(cache):
    pack, weight, wrong = Counting(), torch.zeros(64, 64), []
    start = threading.Barrier(8)

    def work():
        start.wait()
        for _ in range(200):
            if cache.get("a", pack, weight)[0].shape != weight.shape:
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert (pack.calls, wrong) == (1, [])
    weight.add_(1)
    assert torch.equal(cache.get("a", pack, weight)[0], weight)


def test_a_child_process_is_not_stopped_by_a_lock_of_its_parent():
    out = python("""
        import os, threading, torch
        import layerzero
        from layerzero.backends._packing import PACKED
        held, done = threading.Event(), threading.Event()
        def hold():
            with PACKED._packing:
                held.set(); done.wait()
        threading.Thread(target=hold, daemon=True).start()
        held.wait()
        pid = os.fork()
        if pid == 0:
            got = PACKED.get("a", lambda w: w.clone(), torch.ones(2))
            os._exit(0 if got is not None else 1)
        print(os.waitpid(pid, 0)[1])
        done.set()
    """, timeout=60.0)
    assert out == "0"


# Through the library.

@needs_onednn
def test_a_layer_follows_its_weight(shared):
    x, weight = torch.randn(8, 64), torch.nn.Parameter(torch.randn(32, 64))
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(lz.linear(x, weight, backend="torch.linear_prepacked"),
                                       F.linear(x, weight))
        assert packed_weights().weights == 1
        weight.mul_(-2)
        torch.testing.assert_close(lz.linear(x, weight, backend="torch.linear_prepacked"),
                                   F.linear(x, weight))
        weight.data.mul_(2)
        assert forget_packed(weight) == 1
        torch.testing.assert_close(lz.linear(x, weight, backend="torch.linear_prepacked"),
                                   F.linear(x, weight))


@needs_onednn
def test_without_room_the_answer_is_the_same(shared):
    limit_packed(0)
    x, weight = torch.randn(8, 64), torch.randn(32, 64)
    torch.testing.assert_close(lz.linear(x, weight, activation="silu",
                                         backend="torch.linear_prepacked"),
                               F.silu(F.linear(x, weight)))
    x, gate_up, down = torch.randn(8, 1024), torch.randn(48, 1024) / 32, torch.randn(64, 24)
    torch.testing.assert_close(lz.mlp(x, gate_up, down, backend="torch.mlp_prepacked"),
                               lz.mlp(x, gate_up, down, backend="torch.mlp"))
    assert packed_weights().weights == 0


def test_a_negative_limit_is_refused(shared):
    with pytest.raises(lz.errors.ConfigError, match="-1"):
        limit_packed(-1)
