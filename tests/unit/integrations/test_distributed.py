"""Agreement between ranks, what of it needs no second process; tests/integration/test_ranks.py has
the rest."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

import layerzero as lz
from layerzero.errors import ConfigError, InvalidCall, RanksError
from layerzero.integrations.distributed.agreement import agreed_orders
from layerzero.integrations.distributed.exchange import Exchange
from layerzero.integrations.distributed.profile import Profile, not_shared
from layerzero.world import snapshot as worlds

pytestmark = [pytest.mark.usefixtures("world"), pytest.mark.skipif(
    not dist.is_available(), reason="this torch has no distributed")]
ALIKE = ["", "", ""]


@pytest.fixture
def alone(world):
    lz.distributed.init("training", lz.distributed.StoreGroup(dist.HashStore(), 0, 1), timeout=5)
    yield
    lz.distributed.shutdown()


def choices(*ranks):
    """unit -> (cell, kernels) of each rank."""
    return [{unit: None if entry is None else [entry[0], entry[1].split()]
             for unit, entry in rank.items()} for rank in ranks]


def test_the_first_kernel_of_the_lowest_rank_that_all_can_run():
    agreed = choices({"u": ("c", "fast mid slow")}, {"u": ("c", "mid slow fast")},
                     {"u": ("c", "slow mid")})
    assert agreed_orders(agreed, ALIKE)["u"] == {"": ["mid", "slow"]}


def test_a_rank_that_cannot_judge_a_call_does_not_count():
    agreed = choices({"u": None}, {"u": ("c", "b a")}, {"u": ("c", "a b")})
    assert agreed_orders(agreed, ALIKE)["u"] == {"": ["b", "a"]}
    assert agreed_orders(choices({"u": None}), [""])["u"] == {}


def test_capability_groups_agree_among_themselves():
    agreed = choices({"u": ("c", "new old")}, {"u": ("c", "old")}, {"u": ("c", "new old")})
    assert agreed_orders(agreed, ["h200", "a100", "h200"])["u"] == {
        "h200": ["new", "old"], "a100": ["old"]}


def test_calls_that_some_rank_cannot_tell_apart_are_agreed_together():
    """On rank 1 both are one cell of the cache, so they have one kernel on every rank."""
    agreed = choices({"u": ("c", "a b"), "v": ("d", "b a"), "w": ("e", "a b")},
                     {"u": ("f", "b a"), "v": ("f", "b"), "w": ("g", "a b")})
    orders = agreed_orders(agreed, ["", ""])
    assert orders["u"] == orders["v"] == {"": ["b"]} and orders["w"] == {"": ["a", "b"]}


def test_a_round_that_timed_out_goes_on_where_it_was():
    store = dist.HashStore()
    ranks = [Exchange(lz.distributed.StoreGroup(store, rank, 2), 0.05) for rank in range(2)]
    for rank in ranks:
        rank.round = 0
    with pytest.raises(RanksError, match="rank 1 of 0, 1 did not come to 'kinds' within 0") as e:
        ranks[0].gather("kinds", "first")
    assert e.value.ranks == (1,)
    with ThreadPoolExecutor(2) as pool:
        late = pool.submit(ranks[1].gather, "kinds", "other")
        # what was said stays said: rank 1 may have read it
        again = pool.submit(ranks[0].gather, "kinds", "second")
        assert late.result() == again.result() == ["first", "other"]
    for rank in ranks:
        rank.end_round("state")
    assert ranks[0].round == 1 and Exchange(
        lz.distributed.StoreGroup(store, 1, 2), 1).join() == "state"


def test_differences_are_named():
    own = Profile({"torch": "2.9", "policy": "a"}, {"triton": "3.5"}, {"k.x": "1"}, "h200")
    other = Profile({"torch": "2.8", "policy": "a"}, {}, {"k.x": "2"}, "a100")
    assert own.differences(own, True) == []
    assert own.differences(other, True) == [
        "torch 2.8 instead of 2.9", "triton absent instead of 3.5", "device a100 instead of h200"]
    assert own.differences(own._replace(builds={"k.x": "2"}), True) == ["another build of k.x"]


def test_kernels_that_some_rank_lacks_are_not_shared():
    world = worlds.current()
    own = Profile.of(world)
    kernel = "native.rms_norm" if "native.rms_norm" in own.builds else "torch.rope_joint"
    without = {k: v for k, v in own.builds.items() if k not in (kernel, "torch.rms_norm")}
    assert not_shared([own, own], world) == ()
    assert not_shared([own, own._replace(builds=without)], world) == (kernel,)  # baselines stay


def test_what_is_asked_for_wrongly_is_named():
    with pytest.raises(ConfigError, match="mode must be one of inference, training, got 'train'"):
        lz.distributed.init("train")
    with pytest.raises(ConfigError, match="init_process_group first"):
        lz.distributed.init()
    with pytest.raises(ConfigError, match="init on every rank first"):
        lz.distributed.sync()
    with pytest.raises(ConfigError, match="0 <= rank < size"):
        lz.distributed.init(group=lz.distributed.StoreGroup(dist.HashStore(), 2, 2))
    with pytest.raises(ConfigError, match="seconds > 0, got 0"):
        lz.distributed.init(group=lz.distributed.StoreGroup(dist.HashStore(), 0, 1), timeout=0)
    with pytest.raises(InvalidCall, match="multiple of its 8 pieces"):
        lz.distributed.row_linear(torch.ones(2, 12), torch.ones(4, 12))
    with pytest.raises(InvalidCall, match="power of two"):
        lz.distributed.column_linear(torch.ones(2, 8), torch.ones(6, 8), splits=3)


def test_an_agreement_is_a_table_above_the_one_in_force(alone):
    x = torch.ones(2, 8)
    with pytest.raises(ConfigError, match="shutdown"):
        lz.distributed.init()
    lz.rms_norm(x)
    with lz.prefer("reference"):
        lz.rms_norm(x)                                 # an override is the program's own decision
    assert lz.distributed.sync() == 1 and lz.distributed.sync() == 0
    assert lz.explain("rms_norm", x).table.startswith("agreed-")
    lz.configure(deterministic=True)                   # the agreement was made under another policy
    assert lz.explain("rms_norm", x).missed.code is lz.Code.PLAN_DRIFT
    assert lz.distributed.sync() == 0                  # the same kernel: published anew all the same
    assert lz.explain("rms_norm", x).table.startswith("agreed-")
    assert "1 kinds of call agreed" in str(lz.distributed.check())


def test_a_kernel_out_of_service_is_agreed_anew(alone):
    x = torch.ones(2, 8)
    lz.rms_norm(x)
    lz.distributed.sync()
    first = lz.which("rms_norm", x)
    lz.configure(rules=(lz.PolicyRule.of("deny", first, "rms_norm"),))
    assert lz.distributed.sync() == 1
    plan = lz.explain("rms_norm", x)
    assert plan.table and plan.kernel != first


def test_a_store_that_hangs_is_named_within_the_time_out():
    """The process that holds a TCPStore may be stopped: its clients then wait without end."""
    exchange = Exchange(lz.distributed.StoreGroup(dist.HashStore(), 0, 1), 0.05)
    answered = threading.Event()

    class Stopped:
        def compare_set(self, *args):
            answered.wait()
            return b""

    exchange._store = Stopped()
    try:
        with pytest.raises(RanksError, match=r"does not answer: within 0\.05 seconds") as e:
            exchange.gather("kinds", "[]")
    finally:
        answered.set()
    assert e.value.ranks == (0,)
