"""Timing and tuning on a real GPU."""

from __future__ import annotations

import pytest
import torch
from helpers import world

import layerzero as lz
from layerzero.operate.inspection import dispatcher_of
from layerzero.spec.call import Call, TensorSpec
from layerzero.spec.device import Device
from layerzero.tuning.harness import ColdWatch, GraphWatch, Race, WallWatch, cache_bytes, stopwatch
from layerzero.tuning.rates import measure_rates
from layerzero.tuning.tuner import tune
from layerzero.world import snapshot as worlds

__all__ = ["world"]
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("world")]


def norm(rows: int, hidden: int = 4096) -> Call:
    return Call("rms_norm", {"x": TensorSpec((rows, hidden), "bfloat16"),
                             "weight": TensorSpec((hidden,), "bfloat16")})


def attention(seq_q: int, seq_k: int, **more) -> Call:
    query, kv = (TensorSpec((1, heads, seq, 128), "bfloat16")
                 for heads, seq in ((32, seq_q), (8, seq_k)))
    return Call("attention", {"query": query, "key": kv, "value": kv, "is_causal": seq_q == seq_k},
                **more)


def uncompiled() -> None:
    """Nothing is kept on disk, and what compiles for half a minute is left out."""
    jit = [k.id for k in worlds.current().catalog.kernels if k.jit]
    lz.configure(perfdb="off", rules=(lz.PolicyRule.of("deny", jit),))


@pytest.mark.parametrize("cold", [True, False])
def test_much_more_work_takes_longer(cold):
    small, large = torch.randn(64, 64, device="cuda"), torch.randn(8192, 8192, device="cuda")
    race = Race(stopwatch("cuda", cold=cold))
    race.enter("small", lambda: small @ small)
    race.enter("large", lambda: large @ large)
    race.run(10)
    assert race.timings.beats("small", "large", margin=4.0) == 1.0


def test_the_watch_of_a_gpu_is_that_of_the_mode_and_knows_its_cache():
    assert (isinstance(stopwatch("cuda"), WallWatch)
            and isinstance(stopwatch("cuda", cold=True), ColdWatch))
    assert isinstance(stopwatch("cuda", "captured"), GraphWatch)
    assert 1 << 20 <= cache_bytes("cuda") < 1 << 32


def test_the_host_is_in_the_sample_where_it_is_what_takes_long():
    import time
    x = torch.ones(8, device="cuda")
    us = stopwatch("cuda").sample(lambda: (time.sleep(0.002), x.add_(1)), 3)
    assert us >= 2000                          # a sleep is never shorter


def test_a_graph_that_becomes_garbage_meanwhile_does_not_spoil_a_capture():
    """CUDA allows no graph to be destroyed while another is captured, and the collector may run at
    any time."""
    x, old = torch.ones(8, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(old):
        x.add_(1)
    held = [old]
    del old

    def way():
        if torch.cuda.is_current_stream_capturing() and held:
            cycle = [held.pop()]
            cycle.append(cycle)
            del cycle
        [[] for _ in range(5000)]              # enough for the collector to run
        x.add_(1)

    assert GraphWatch().sample(way, 3) > 0 and not held


def test_a_watch_of_graphs_says_what_cannot_be_captured_and_goes_on():
    x, watch = torch.ones(8, device="cuda"), GraphWatch()
    with pytest.raises(RuntimeError):
        watch.sample(lambda: x.sum().item(), 1)
    assert watch.median(lambda: x.add_(1), 5) > 0


def test_the_rates_are_those_of_a_gpu():
    rates = measure_rates("cuda", seconds=1.5).rates
    # 1 TFLOP/s and 10 GB/s: any GPU has more
    assert rates.flops_per_us > 1e6 and rates.bytes_per_us > 1e4


def test_what_was_measured_decides():
    uncompiled()
    calls = [norm(1), norm(4096), attention(1, 4096), attention(1024, 1024)]
    report = tune(calls, device="cuda", rounds=20)
    assert (not report.skipped and sorted(t.mode for t in report.tuned) == ["captured"] * 4
            + ["eager"] * 4)
    for tuned in report.tuned:
        assert len(tuned.kernels) > 1, tuned.failed
        assert {(m.place, m.mode)
                for m in tuned.measurements} == {(worlds.current().place("cuda"), tuned.mode)}
        assert tuned.chosen in (tuned.best, *tuned.tied)
        assert tuned.roofline is not None and tuned.roofline > 0
    q, k = torch.randn(1, 32, 1, 128, device="cuda", dtype=torch.bfloat16), torch.randn(
        1, 8, 4096, 128, device="cuda", dtype=torch.bfloat16)
    plan = lz.explain("attention", q, k, k)
    assert plan.steps[0].score.source == "measured"
    assert len(tune(calls, device="cuda").already) == 2 * len(calls)


@pytest.mark.parametrize(("tuned", "other"), [("captured", "eager"), ("eager", "captured")])
def test_what_was_measured_in_one_mode_does_not_decide_the_other(tuned, other):
    uncompiled()
    call = norm(64)
    before = facts_in(other, call)
    tune([call], device="cuda", mode=tuned, rounds=20)
    after = facts_in(other, call)
    assert (before.kernel == after.kernel == "torch.rms_norm"
            and after.steps[0].score.source == "default")
    assert facts_in(tuned, call).steps[0].score.source == "measured"


def facts_in(mode, call):
    """The plan for the call in this mode."""
    dispatcher = dispatcher_of("rms_norm")
    shapes = (torch.randn(a.shape, dtype=getattr(torch, a.dtype), device="cuda")
              for a in call.arguments.values())
    facts = {**dispatcher.facts(dispatcher.order_arguments(tuple(shapes), {})),
             "graph": mode == "captured"}
    return worlds.current().plan(dispatcher.op, facts)


def test_a_gradient_is_timed_on_a_gpu():
    uncompiled()
    tuned = tune([attention(256, 256, grad=True)], device="cuda", mode="eager", rounds=10).tuned[0]
    assert "grad" in tuned.family and tuned.winner.summary.median > 0


def test_a_call_larger_than_the_memory_is_skipped():
    uncompiled()
    device: Device = worlds.current().device("cuda")
    report = tune([norm(device.total_memory // 4096)], device="cuda")
    assert not report.tuned and "GiB" in report.skipped[0].reason


def test_memory_is_given_back():
    uncompiled()
    tune([norm(64)], device="cuda", rounds=10)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    tune([norm(16384)], device="cuda", rounds=10)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + (1 << 20)
