"""The tuner: who is timed, in which order, what is written down, and what selection makes of it.

Where the order of times matters they are scripted: the watch runs a kernel and gives the next
number that the test wrote for it. What is left is real: worlds, plans, bindings, the store.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers import ATTENTION, Fake, allow_only, register

import layerzero as lz
from layerzero import cli
from layerzero.files.calls import write_calls
from layerzero.operate.inspection import dispatcher_of
from layerzero.perf.record import Measurement, Rates
from layerzero.spec.call import Call, TensorSpec
from layerzero.spec.errors import ConfigError, DeviceLost
from layerzero.spec.reason import Code
from layerzero.spec.rules import Rule, contiguous
from layerzero.tuning import contest, harness, tuner
from layerzero.tuning.contest import (
    FIRST_ROUNDS,
    MIN_ROUNDS,
    apply_transforms,
    far_behind,
    is_settled,
)
from layerzero.tuning.functions import torch_functions
from layerzero.tuning.harness import GRAPH_MARGIN, MARGIN, Timings
from layerzero.tuning.rates import Reading
from layerzero.tuning.tuner import survey, tune
from layerzero.world import snapshot as worlds

ROOF = Rates(1e5, 1e4)
CASTING = Rule("dtype", "in", ("float64",), Code.DTYPE_UNSUPPORTED, repair="cast")


def norm(n: int = 8, hidden: int = 32, **more) -> Call:
    return Call("rms_norm", {"x": TensorSpec((n, hidden), "float32")}, **more)


def attention(*shape: int, **more) -> Call:
    spec = TensorSpec(shape, "float32")
    return Call("attention", {"query": spec, "key": spec, "value": spec}, **more)


class Script:
    """A watch that gives scripted microseconds for the kernel that ran last; the last number for
    ever."""

    max_calls, margin, seconds = 4, MARGIN, 5e-4

    def __init__(self) -> None:
        self.last, self.us = "", {}

    def fake(self, id: str, *us: float, **declared) -> Fake:
        self.us[id] = list(us)
        return Fake(id, before=lambda: setattr(self, "last", id), **{"prior": 1.0, **declared})

    def sample(self, way, calls):
        way()
        script = self.us[self.last]
        return script.pop(0) if len(script) > 1 else script[0]


@pytest.fixture
def script(world, monkeypatch):
    """Only fakes serve, by scripted times; the device's rates are known and nothing is kept on
    disk."""
    lz.configure(perfdb="off")
    place = worlds.current().place("cpu")
    worlds.publish(lambda w: w.replace(perf=w.perf.including((), {place: ROOF})), "rates")
    scripted = Script()
    monkeypatch.setattr(tuner, "stopwatch", lambda device, mode, cold: scripted)
    return scripted


def serve(*fakes: Fake) -> None:
    register(*fakes)
    allow_only(*(fake.id for fake in fakes))
    lz.configure(perfdb="off")


def explain_norm(n: int = 8, hidden: int = 32):
    return lz.explain("rms_norm", torch.ones(n, hidden))


# the choice

def test_the_measured_best_is_chosen_from_then_on(script):
    praised, humble = script.fake("fake.praised", 90.0,
                                  prior=50.0), script.fake("fake.humble", 40.0)
    serve(praised, humble)
    assert explain_norm().kernel == "fake.praised"
    report = tune([norm()])
    tuned = report.tuned[0]
    assert (tuned.best, tuned.chosen, tuned.before, tuned.sure, tuned.tied) == (
        "fake.humble", "fake.humble", "fake.praised", 1.0, ())
    plan = explain_norm()
    assert plan.kernel == "fake.humble" and {s.score.source for s in plan.steps} == {"measured"}
    assert [k.kernel for k in tuned.kernels] == ["fake.humble", "fake.praised"]


def test_of_two_that_run_the_same_torch_functions_the_default_stays(script):
    serve(script.fake("torch.usual", 20.0, baseline=True, prior=1.0),
          script.fake("torch.entry", 10.0, prior=50.0))
    tuned = tune([norm()]).tuned[0]
    assert (tuned.best, tuned.chosen, tuned.tied) == ("torch.usual", "torch.usual",
                                                      ("torch.entry",))
    assert {k.kernel: k.summary.median for k in tuned.kernels} == {"torch.usual": 20.0,
                                                                   "torch.entry": 20.0}
    assert explain_norm().kernel == "torch.usual"


def test_a_kernel_whose_work_torch_does_not_see_is_not_called_the_same(script):
    serve(script.fake("torch.usual", 20.0, baseline=True), script.fake("fake.native", 10.0))
    assert tune([norm()]).tuned[0].chosen == "fake.native"


def test_the_entry_below_sdpa_runs_what_sdpa_runs():
    q = torch.randn(1, 4, 8, 16)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    entry = torch._scaled_dot_product_flash_attention_for_cpu
    assert torch_functions(sdpa, (q, q, q)) == torch_functions(entry, (q, q, q))
    assert torch_functions(sdpa, (q, q, q)) != torch_functions(torch.softmax, (q, -1))
    assert torch_functions(sdpa, (q, q, q)) != torch_functions(sdpa, (q, q[:, :, :4], q[:, :, :4]))


def test_real_times_decide_the_same_way(world):
    lz.configure(perfdb="off")
    place = worlds.current().place("cpu")
    worlds.publish(lambda w: w.replace(perf=w.perf.including((), {place: ROOF})), "rates")
    slow, quick = Fake("fake.slow", before=lambda: time.sleep(0.02),
                       prior=50.0), Fake("fake.quick", prior=1.0)
    serve(slow, quick)
    tuned = tune([norm()], rounds=10).tuned[0]
    assert (tuned.best, tuned.chosen) == ("fake.quick", "fake.quick") == (explain_norm().kernel,
                                                                          tuned.best)
    assert tuned.winner.summary.samples == 10


def test_noise_that_all_share_does_not_hide_who_is_faster(script):
    noise = [1.0, 5.0, 2.0, 9.0, 1.5, 3.0, 7.0, 1.0, 4.0, 6.0] * 10
    serve(script.fake("fake.a", *(130 * n for n in [1, 1, *noise]), prior=50.0),
          script.fake("fake.b", *(100 * n for n in [1, 1, *noise])))
    tuned = tune([norm()]).tuned[0]
    assert ((tuned.best, tuned.chosen, tuned.sure) == ("fake.b", "fake.b", 1.0)
            and explain_norm().kernel == "fake.b")


def test_noise_in_a_kernel_that_is_far_behind_does_not_bring_it_back(script):
    serve(script.fake("fake.noisy", 900.0, 900.0, 900.0, 90_000.0, 5000.0, prior=100.0),
          script.fake("fake.b", 100.0))
    tuned = tune([norm()]).tuned[0]
    assert tuned.chosen == explain_norm().kernel == "fake.b"


def test_a_quiet_spread_is_written_down_as_it_is(script):
    wobble = [100.0, 101.0, 102.0, 103.0, 104.0] * 20
    serve(script.fake("fake.a", *wobble), script.fake("fake.b", *(2 * us for us in wobble)))
    rows = {m.kernel: m.spread for m in tune([norm()]).tuned[0].measurements}
    assert rows["fake.a"] == pytest.approx(4.0 / 102.0, rel=0.3) == rows["fake.b"]


def test_what_cannot_be_told_apart_is_a_tie_and_stays_one_choice(script):
    serve(script.fake("fake.first", 1.0), script.fake("fake.second", 1.0, prior=2.0))
    # by chance, one or the other is ahead
    for first, second in ((100.0, 100.5), (100.5, 100.0), (101.0, 100.0)):
        wobble = [1.0, 1.003, 0.996, 1.001, 0.999, 1.004] * 12
        script.us = {"fake.first": [first * w for w in wobble],
                     "fake.second": [second * w for w in reversed(wobble)]}
        tuned = tune([norm()], again=True).tuned[0]
        assert (tuned.best, tuned.tied, tuned.chosen) == ("fake.second", ("fake.first",),
                                                          "fake.second")
        assert tuned.certainty == "tie with fake.first"
        assert len({(m.median_us, m.spread, m.samples) for m in tuned.measurements}) == 1
        assert explain_norm().kernel == "fake.second"


def test_a_kernel_that_lost_is_not_chosen_because_others_tie(script):
    """It is slower than torch in every round; the third's noise must not lift torch above it."""
    swing = [100.0, 100.0, 140.0, 100.0, 140.0] * 40
    serve(script.fake("fake.torch", *swing, baseline=True),
          script.fake("reference.slower", *(1.04 * us for us in swing)),
          script.fake("fake.noisy", *(101.0 if us > 100 else 140.0 for us in swing)))
    tuned = tune([norm()]).tuned[0]
    assert (tuned.best, tuned.chosen, tuned.tied) == ("fake.torch", "fake.torch", ("fake.noisy",))
    assert explain_norm().kernel == "fake.torch"


def test_the_gain_is_over_the_baseline_and_the_roofline_is_the_device_s(script):
    serve(script.fake("fake.torch", 30.0, baseline=True), script.fake("fake.own", 10.0))
    tuned = tune([norm(8, 32)]).tuned[0]
    assert tuned.baseline == "fake.torch" and tuned.gain.median == pytest.approx(3.0)
    assert (tuned.flops, tuned.bytes) == (4 * 8 * 32, 2 * 4 * 8 * 32)
    assert tuned.roofline == pytest.approx(ROOF.roofline_us(tuned.flops, tuned.bytes) / 10.0)
    data = tuned.to_json()
    assert data["flops_per_s"] == pytest.approx(tuned.flops / 10.0 * 1e6)
    json.dumps(data)


def test_a_kernel_that_needs_a_copy_is_charged_for_it_in_the_verdict(script):
    copying = script.fake("fake.copying", 10.0, requires=(contiguous("x"),))
    serve(copying, script.fake("fake.plain", 11.0))
    strided = Call("rms_norm", {"x": TensorSpec((4096, 512), "float32", strides=(1024, 1))})
    tuned = tune([strided]).tuned[0]
    # 16 MiB to move take longer than 1 us
    assert tuned.best == tuned.chosen == "fake.plain"
    assert next(k for k in tuned.kernels if k.kernel == "fake.copying").summary.median == 10.0


# what is timed

def test_inputs_are_copied_once_before_the_clock_runs(script):
    copying = script.fake("fake.copying", 10.0, requires=(contiguous("x"),))
    serve(copying)
    seen = set()
    look = copying.before
    copying.before = lambda: (look(), seen.add(copying.got["x"].data_ptr()))
    tune([Call("rms_norm", {"x": TensorSpec((64, 32), "float32", strides=(64, 1))})])
    assert copying.got["x"].is_contiguous() and len(seen) == 1


def test_a_copy_is_contiguous_in_the_layout_that_the_kernel_sees(script):
    bshd = script.fake("fake.bshd", 10.0, op=ATTENTION, variants=("bshd",),
                       requires=(contiguous("query"),))
    serve(bshd)
    tuned = tune([attention(2, 4, 16, 8)]).tuned[0]
    assert tuned.best == "fake.bshd" and tuned.tied == ()
    assert bshd.got["query"].shape == (2, 16, 4, 8) and bshd.got["query"].is_contiguous()
    plan = lz.explain("attention", *(torch.ones(2, 4, 16, 8) for _ in range(3)))
    query = torch.randn(2, 4, 16, 8)
    values = tuple(query if p.name in ("query", "key", "value") else p.default
                   for p in ATTENTION.params)
    ready = apply_transforms(ATTENTION, plan.steps[0], values, plan.facts)[0]
    assert torch.equal(ready, query) and ready.transpose(1, 2).is_contiguous()


def test_a_cast_is_done_before_the_clock_runs(script):
    half = script.fake("fake.half", 10.0, requires=(CASTING,))
    serve(half)
    lz.configure(allow_adaptation=True)
    assert tune([norm()]).tuned[0].best == "fake.half"
    assert half.got["x"].dtype == torch.float64


def test_a_gradient_is_timed_with_its_way_back(script):
    fake = script.fake("fake.one", 10.0)
    serve(fake)
    weighted = {"x": TensorSpec((8, 32), "float32"), "weight": TensorSpec((32,), "float32")}
    tuned = tune([Call("rms_norm", weighted, grad=True)]).tuned[0]
    assert "grad" in tuned.family and tuned.roofline is None
    assert fake.got["x"].requires_grad and fake.got["weight"].requires_grad
    assert tuned.measurements[0].bucket != tune([norm()]).tuned[0].measurements[0].bucket


def test_who_is_far_behind_is_timed_a_little_and_measured_all_the_same(script):
    serve(script.fake("fake.best", 10.0, prior=3.0), script.fake("fake.fair", 12.0, prior=2.5),
          script.fake("fake.slow", 40.0, prior=2.0), script.fake("fake.awful", 5000.0))
    tuned = {k.kernel: k for k in tune([norm()]).tuned[0].kernels}
    assert {k for k, timed in tuned.items() if timed.dropped} == {"fake.slow", "fake.awful"}
    assert (tuned["fake.slow"].summary.samples,
            tuned["fake.awful"].summary.samples) == (FIRST_ROUNDS, 1)
    assert tuned["fake.best"].summary.samples >= MIN_ROUNDS
    assert {s.score.source for s in explain_norm().steps} == {"measured"}


def test_one_unlucky_call_does_not_make_a_kernel_hopeless(script):
    serve(script.fake("fake.a", 20.0, prior=2.0), script.fake("fake.b", 9000.0, 9000.0, 10.0))
    tuned = tune([norm()]).tuned[0]
    assert tuned.best == "fake.b" and not tuned.winner.dropped


def test_rounds_go_on_until_it_is_settled():
    even = Timings({"a": [100.0] * 20, "b": [100.5] * 20})
    apart = Timings({"a": [100.0] * 20, "b": [110.0] * 20})
    open_ = Timings({"a": [100.0, 120.0] * 10, "b": [118.0, 95.0] * 10})
    assert [is_settled(t, "ab", MARGIN) for t in (even, apart, open_)] == [True, True, False]


@pytest.mark.parametrize(("margin", "tied"), [(MARGIN, ("fake.b",)), (GRAPH_MARGIN, ())])
def test_a_clock_that_repeats_itself_better_tells_nearer_times_apart(script, margin, tied):
    script.margin = margin
    serve(script.fake("fake.a", 100.0), script.fake("fake.b", 101.5))
    tuned = tune([norm()]).tuned[0]
    assert (tuned.best, tuned.tied) == ("fake.a", tied)


def test_hopeless_means_every_sample_against_every_sample():
    timings = Timings({"a": [10.0, 11.0, 30.0], "b": [40.0, 95.0, 99.0], "c": [91.0, 92.0, 95.0]})
    assert far_behind(timings, "abc") == ["c"]


# who is not timed

def test_a_kernel_that_throws_is_reported_and_the_others_decide(script):
    broken = script.fake("fake.broken", 1.0, prior=9.0, fault=ValueError("not today"))
    serve(broken, script.fake("fake.one", 10.0))
    tuned = tune([norm()]).tuned[0]
    assert tuned.best == "fake.one" and tuned.failed["fake.broken"].code is Code.KERNEL_FAILED
    assert "not today" in tuned.failed["fake.broken"].message
    assert not worlds.current().health
    assert [m.kernel for m in tuned.measurements] == ["fake.one"]


@pytest.mark.parametrize("good_calls", [1, 2, 5])
@pytest.mark.parametrize("us", [10.0, 9000.0])
def test_a_kernel_may_also_throw_later(script, good_calls, us):
    late = script.fake("fake.late", us)
    serve(script.fake("fake.one", 10.0, prior=2.0), late)
    plain = late.before

    def before():
        plain()
        if late.calls > good_calls:
            raise ValueError("not any more")

    late.before = before
    tuned = tune([norm()]).tuned[0]
    gone = us > 1000 and good_calls == 5       # it had left before
    assert ("fake.late" in tuned.failed) != gone and tuned.best == "fake.one"
    assert ("fake.late" in {m.kernel for m in tuned.measurements}) == gone


def test_out_of_memory_is_told_as_that(script):
    serve(script.fake("fake.greedy", 1.0, fault=torch.OutOfMemoryError("out of memory")),
          script.fake("fake.one", 10.0))
    assert tune([norm()]).tuned[0].failed["fake.greedy"].code is Code.OUT_OF_MEMORY


def test_if_every_kernel_throws_the_call_is_skipped_with_their_reasons(script):
    serve(script.fake("fake.broken", 1.0, fault=ValueError("not today")))
    report = tune([norm()])
    assert not report.tuned and "not today" in report.skipped[0].reason


def test_a_library_that_does_not_load_is_reported(script):
    def load():
        raise ImportError("no such library")

    serve(script.fake("fake.one", 10.0))
    lz.register(lz.Kernel("fake.absent", lz.op("rms_norm"), load, prior=9.0, less_work="a test"))
    tuned = tune([norm()]).tuned[0]
    assert tuned.best == "fake.one" and "no such library" in tuned.failed["fake.absent"].message


def test_a_lost_device_ends_tuning_and_keeps_what_was_found(script):
    fatal = script.fake("fake.fatal", 10.0)
    serve(fatal)
    plain, kept = fatal.before, []

    def before():
        plain()
        if kept:                               # the first kind was saved
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    fatal.before = before
    with pytest.raises(DeviceLost, match="illegal memory access"):
        tune([norm(8), norm(8, 64)], save=lambda rows, rates: kept.extend(rows))
    assert len(kept) == 1


def test_without_a_certificate_nothing_is_timed_where_policy_demands_one(script):
    trusted, stranger = script.fake("fake.trusted", 20.0), script.fake("fake.stranger", 10.0)
    serve(trusted, stranger)
    lz.configure(require_certificates=True)
    worlds.publish(lambda w: w.replace(certified=frozenset({"fake.trusted"})), "certified")
    tuned = tune([norm()]).tuned[0]
    assert [k.kernel for k in tuned.kernels] == ["fake.trusted"] and stranger.calls == 0
    assert Code.UNCERTIFIED in [r.code for x in tuned.rejected if x.kernel == "fake.stranger"
                                for r in x.reasons]


def test_what_policy_denies_is_not_timed(script):
    denied = script.fake("fake.denied", 1.0)
    register(denied, script.fake("fake.one", 10.0))
    allow_only("fake.one")
    assert tune([norm()]).tuned[0].best == "fake.one" and denied.calls == 0


def test_what_compiles_is_compiled_first_and_is_warm_afterwards(script):
    jit, plain = script.fake("fake.jit", 5.0, jit=True), script.fake("fake.plain", 10.0)
    serve(jit, plain)
    assert explain_norm().why_not("fake.jit")[0].code is Code.JIT_NOT_WARMED
    look, first = jit.before, [True]
    jit.before = lambda: (look(), time.sleep(0.05) if first and first.pop() else None)
    tuned = tune([norm()]).tuned[0]
    rows = {m.kernel: m for m in tuned.measurements}
    assert (rows["fake.jit"].compile_us > 0 and rows["fake.jit"].median_us == 5.0
            and rows["fake.plain"].compile_us == 0)
    assert tuned.chosen == explain_norm().kernel == "fake.jit"
    # for this kind of call, not for others
    assert {entry[0] for entry in worlds.current().warmed} == {"fake.jit"}
    # no call: it would be compiled meanwhile
    assert lz.explain("rms_norm", torch.ones(3, 5, 7)).kernel == "fake.plain"


# which calls, and in which order

def test_calls_of_one_kind_are_timed_once_and_count_together(script):
    jobs, skipped = survey([norm(8, count=3), norm(8, count=4), norm(9)], "cpu")
    assert not skipped and sorted(job.call.count for job in jobs) == [1, 7]


def test_what_takes_most_time_comes_first(script):
    jobs, _ = survey([norm(16, 64), norm(2048, 512), norm(1, 32, count=100_000_000)], "cpu")
    assert [dict(job.kind.sizes)["rows"] for job in jobs] == [1, 2048, 16]


def test_a_survey_needs_no_memory(script):
    job = survey([norm(1 << 20, 1 << 20)], "cpu")[0][0]
    assert job.nbytes == 2 * 4 * (1 << 40)


def test_a_call_that_cannot_be_made_is_skipped_with_the_reason(script):
    fake = script.fake("fake.one", 10.0)
    serve(fake)
    wrong = Call("rms_norm",
                 {"x": TensorSpec((8, 32), "float32"), "weight": TensorSpec((33,), "float32")})
    report = tune([wrong, Call("no_such_op", {}), norm(1 << 20, 1 << 20), norm()])
    reasons = [s.reason for s in report.skipped]
    assert "weight" in reasons[0] and "no op" in reasons[1] and "GiB" in reasons[2]
    assert len(report.tuned) == 1 and "3 skipped" in str(report)


def test_an_unusual_call_is_tuned_as_what_it_is_rewritten_to(script):
    fake = script.fake("fake.one", 10.0, op=ATTENTION)
    serve(fake)
    tune([attention(4, 16, 8)])
    assert fake.got["query"].dim() == 4
    plan = lz.explain("attention", *(torch.ones(4, 16, 8) for _ in range(3)))
    assert plan.steps[0].score.source == "measured"


def test_an_op_a_file_or_one_call_will_do(script, tmp_path):
    serve(script.fake("fake.one", 10.0))
    write_calls(tmp_path / "calls.jsonl", [norm(8), norm(64)])
    assert len(tune(tmp_path / "calls.jsonl").tuned) == 2
    assert len(tune(norm(128)).tuned) == 1
    assert len(tune("rms_norm").tuned) > 3
    with pytest.raises(ConfigError, match="llama-3-8b"):
        tune("lama-3-8b")


# stopping and going on

def test_what_was_measured_is_not_timed_again_unless_asked(script):
    fake = script.fake("fake.one", 10.0)
    serve(fake)
    tune([norm()])
    calls = fake.calls
    report = tune([norm()])
    assert (len(report.already), report.tuned, fake.calls) == (1, (), calls)
    assert len(tune([norm()], again=True).tuned) == 1 and fake.calls > calls


def test_a_new_kernel_or_another_build_is_a_reason_to_time_again(script):
    serve(script.fake("fake.one", 10.0))
    tune([norm()])
    older = [m._replace(build="older", at=m.at + 1) for m in worlds.current().perf]
    worlds.publish(lambda w: w.replace(perf=w.perf.including(older)), "older")
    assert len(tune([norm()]).tuned) == 1
    lz.register(script.fake("fake.two", 5.0).kernel)
    assert tune([norm()]).tuned[0].best == "fake.two"


def test_when_the_time_is_up_the_rest_is_left(script):
    fake = script.fake("fake.one", 10.0)
    serve(fake)
    report = tune([norm(8), norm(64)], seconds=0.0)
    assert (len(report.left), report.stopped, fake.calls) == (2, "out of time", 0)
    assert "2 left (out of time)" in str(report)


def test_one_large_call_does_not_take_the_time_of_all(script, monkeypatch):
    fakes = [script.fake(f"fake.{n}", 10.0) for n in range(8)]
    now = [0.0]
    clock = SimpleNamespace(**{**vars(time), "perf_counter": lambda: now[0]})
    for module in (tuner, contest, harness):
        monkeypatch.setattr(module, "time", clock)
    for fake in fakes:
        fake.before = lambda mark=fake.before: (mark(), now.append(now.pop() + 1.0))
    serve(*fakes)
    report = tune([norm(8 * n) for n in range(1, 13)], seconds=60.0)
    assert len(report.tuned) >= 3              # all of it was the first call's


def test_a_first_call_that_takes_all_the_time_is_the_last_and_what_was_measured_stays(
        script, monkeypatch):
    quick, slow = script.fake("fake.quick", 10.0, prior=90.0), script.fake("fake.slow", 10.0,
                                                                           prior=50.0)
    never, mark, now = script.fake("fake.never", 10.0), slow.before, [0.0]
    clock = SimpleNamespace(**{**vars(time), "perf_counter": lambda: now[0]})
    for module in (tuner, contest, harness):
        monkeypatch.setattr(module, "time", clock)
    slow.before = lambda: (mark(), now.append(now.pop() + 1.0))
    serve(quick, slow, never)
    report = tune([norm()], seconds=1.0)
    assert (slow.calls, never.calls) == (1, 0)
    tuned = report.tuned[0]
    assert ([k.kernel for k in tuned.kernels], tuned.no_time_for) == (["fake.quick"],
                                                                      ("fake.slow", "fake.never"))
    assert [m.kernel for m in worlds.current().perf] == ["fake.quick"]
    slow.before = mark
    assert {k.kernel for k in tune([norm()]).tuned[0].kernels} == {"fake.quick", "fake.slow",
                                                                   "fake.never"}


def test_compiling_that_takes_all_the_time_leaves_the_others_their_rounds(script, monkeypatch):
    jit, one, two = (script.fake("fake.jit", 5.0, jit=True, prior=90.0),
                     script.fake("fake.one", 10.0), script.fake("fake.two", 20.0))
    mark, now = jit.before, [0.0]
    clock = SimpleNamespace(**{**vars(time), "perf_counter": lambda: now[0]})
    for module in (tuner, contest, harness):
        monkeypatch.setattr(module, "time", clock)
    jit.before = lambda: (mark(), now.append(now.pop() + 60.0))
    serve(jit, one, two)
    tuned = tune([norm()], seconds=30.0).tuned[0]
    assert (tuned.best, tuned.no_time_for) == ("fake.one", ("fake.jit",))
    assert [k.summary.samples for k in tuned.kernels] == [contest.FIRST_ROUNDS] * 2


def test_no_compiler_is_begun_that_would_not_end_in_time(script):
    jit = script.fake("fake.jit", 5.0, jit=True, prior=90.0)
    serve(jit, script.fake("fake.one", 10.0))
    tuned = tune([norm()], seconds=contest.COMPILE_SECONDS - 1).tuned[0]
    assert (jit.calls, tuned.best, tuned.no_time_for) == (0, "fake.one", ("fake.jit",))
    assert tune([norm()]).tuned[0].best == "fake.jit"          # how long that took is known now
    assert tune([norm(64)], seconds=contest.COMPILE_SECONDS - 1).tuned[0].best == "fake.jit"


def test_one_round_makes_nobody_sure(script):
    serve(script.fake("fake.one", 10.0), script.fake("fake.two", 20.0))
    tuned = tune([norm()]).tuned[0]
    assert tuned.certainty == "100% sure"
    once = [replace(k, summary=replace(k.summary, samples=1)) for k in tuned.kernels]
    assert replace(tuned, kernels=tuple(once)).certainty == "one round only"


def test_a_kernel_that_is_expected_to_take_longer_than_what_is_left_does_not_begin(script):
    fake = script.fake("fake.one", 10.0, overhead_us=6e7)
    serve(fake)
    report = tune([norm()], seconds=60.0)
    assert ((fake.calls, report.tuned) == (0, ())
            and "fake.one: no time for it" in report.skipped[0].reason)


def test_an_interruption_keeps_what_was_found_and_the_next_run_goes_on(script):
    fake = script.fake("fake.one", 10.0)
    serve(fake)
    plain, stop = fake.before, []

    def before():
        plain()
        if stop:
            raise KeyboardInterrupt

    def progress(done, total, what):
        stop[:] = ["now"] if done == 1 and not resumed else []

    fake.before, resumed = before, []
    report = tune([norm(8), norm(64), norm(512)], progress=progress)
    assert (report.stopped, len(report.tuned), len(report.left)) == ("interrupted", 1, 2)
    resumed.append(True)
    stop.clear()
    report = tune([norm(8), norm(64), norm(512)], progress=progress)
    assert (report.stopped, len(report.tuned), len(report.already), report.left) == ("", 2, 1, ())


def test_progress_is_told_before_each_kind_and_at_the_end(script):
    serve(script.fake("fake.one", 10.0))
    seen = []
    tune([norm(8), norm(64)], progress=lambda *what: seen.append(what))
    assert [(done, total) for done, total, _ in seen] == [(0, 2), (1, 2), (2, 2)]
    assert "rows=64" in seen[0][2]


# what is written down

def test_the_rows_say_what_was_timed(script):
    on_entry = [10.0] * (4 if dispatcher_of("rms_norm").native is not None else 2)
    serve(script.fake("fake.one", *on_entry, *([10.0] * 9), 20.0))
    row = tune([norm(8, 32)], rounds=MIN_ROUNDS).tuned[0].measurements[0]
    assert isinstance(row, Measurement)
    assert (row.kernel, row.op, row.median_us, row.samples) == ("fake.one", "rms_norm", 10.0,
                                                                MIN_ROUNDS)
    assert (row.sizes == "rows=8 hidden=32" and row.family == "float32"
            and row.bucket.startswith(row.family))
    assert row.place == worlds.current().place("cpu") and row.build and row.at > 0
    assert row.p99_us > row.p95_us > row.median_us and math.isfinite(row.spread)


def test_rates_are_measured_once_and_saved(script, monkeypatch):
    serve(script.fake("fake.one", 10.0))
    worlds.publish(lambda w: w.replace(perf=type(w.perf)()), "no rates")
    asked, saved = [], []
    monkeypatch.setattr(tuner, "measure_rates", lambda device, seconds: asked.append(device)
                        or Reading(ROOF, False))
    report = tune([norm(8), norm(64)], save=lambda rows, rates: saved.append(rates))
    place = worlds.current().place("cpu")
    assert asked == ["cpu"] and saved[0] == report.rates == {place: ROOF}
    assert report.tuned[0].roofline is not None


def test_measurements_are_kept_on_disk_for_the_next_process(script, tmp_path):
    serve(script.fake("fake.one", 10.0))
    lz.configure(perfdb=str(tmp_path / "perf.sqlite"))
    place = worlds.current().place("cpu")
    worlds.publish(lambda w: w.replace(perf=w.perf.including((), {place: ROOF})), "rates")
    tune([norm()])
    lz.configure(perfdb="off")
    assert explain_norm().steps[0].score.source == "less work"
    lz.configure(perfdb=str(tmp_path / "perf.sqlite"))
    assert explain_norm().steps[0].score.source == "measured"


# the command

def run(*argv: str) -> int:
    with pytest.raises(SystemExit) as e:
        cli.main(["tune", *argv])
    return int(e.value.code or 0)


def test_the_command_prints_a_table(script, capsys):
    serve(script.fake("fake.torch", 30.0, baseline=True, prior=9.0), script.fake("fake.own", 10.0))
    assert run("rms_norm", "x=8x32", "and", "x=64x32", "--dtype", "float32", "--device", "cpu") == 0
    out = capsys.readouterr().out
    assert "rows=8 hidden=32" in out and "rows=64 hidden=32" in out
    assert "3.00x" in out and "100% sure" in out and "2 kinds of call tuned" in out
    # the first: no neighbour was measured
    line = next(line for line in out.splitlines() if "rows=64 " in line)
    assert line.startswith("fake.own") and "fake.torch" in line                # chosen before
    assert run("rms_norm", "x=8x32", "--dtype", "float32", "--device", "cpu") == 0
    assert "1 were measured before" in capsys.readouterr().out


def test_the_command_speaks_json(script, capsys, tmp_path):
    serve(script.fake("fake.one", 10.0))
    write_calls(tmp_path / "calls.jsonl", [norm(8)])
    assert run("--calls", str(tmp_path / "calls.jsonl"), "--device", "cpu", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["tuned"][0]["best"] == "fake.one" and data["left"] == []


def test_the_command_says_when_nothing_can_be_tuned(script, capsys):
    serve(script.fake("fake.one", 10.0, fault=ValueError("not today")))
    assert run("rms_norm", "x=8x32", "--dtype", "float32", "--device", "cpu") == 1
    assert "not today" in capsys.readouterr().out


@pytest.mark.parametrize(("argv", "word"), [
    (("rms_norm", "--model", "llama-3-8b"), "OP and --model"),
    (("--calls", "nowhere.jsonl"), "no such file"),
    (("--model", "lama-3-8b"), "llama-3-8b"), (("no_such_op",), "no_such_op")])
def test_a_mistake_on_the_command_line_is_named(argv, word, capsys):
    assert run(*argv) == 2
    assert word in capsys.readouterr().err
