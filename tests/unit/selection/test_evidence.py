"""A guess never overrules torch: what may come before the default, by what evidence, and in which
mode it counts.
"""

from __future__ import annotations

import pytest
import torch
from helpers import ATTENTION, call_facts, nvidia, policy, qkv

import layerzero as lz
from layerzero.perf.record import (
    CAPTURED,
    COMPILED,
    EAGER,
    MODES,
    Measurement,
    PerfView,
    kind_of,
    mode_of,
)
from layerzero.selection.engine import SelectionContext, Shipped, make_roster, select
from layerzero.selection.policy import PolicyRule
from layerzero.selection.score import rates_of
from layerzero.spec.rules import at_least
from layerzero.world.registry import catalog

HOPPER = nvidia(90)
RATES = rates_of("cuda")


def kernel(id, **declared):
    return lz.Kernel(id, ATTENTION, lambda: ATTENTION.reference, **declared)


OWN = kernel("torch.own", baseline=True, prior=1.0)
PRAISED = kernel("lib.praised", prior=1e6)
CLEVER = kernel("lib.clever", prior=5.0, less_work="reads each key once",
                less_work_when=(at_least("group", 2),))


def facts(mode=EAGER, **sizes):
    call = call_facts(ATTENTION, *qkv(**{"dtype": torch.float16, **sizes}))
    return {**call, "graph": mode == CAPTURED, "compiled": mode == COMPILED}


def plan_of(kernels, call_facts=None, **context):
    context.setdefault("policy", policy())
    scene = SelectionContext(device=HOPPER.facts(), place=HOPPER.signature, rates=RATES, **context)
    return select(ATTENTION, make_roster(kernels, scene),
                  {**(call_facts or facts()), **HOPPER.facts()},
                  scene)


def times(call_facts, **us):
    """PerfView of these microseconds; the names have _ for a dot."""
    kind = kind_of(ATTENTION, call_facts)
    return PerfView([Measurement(name.replace("_", ".", 1), "attention", kind.bucket,
                                 HOPPER.signature, n, family=kind.family, sizes=kind.sizes_text,
                                 flops=1e6, bytes=1e6, samples=50, mode=mode_of(call_facts))
                     for name, n in us.items()])


def order(plan):
    return [s.kernel for s in plan.steps]


def sources(plan):
    return {s.kernel: s.score.source for s in plan.steps}


def test_no_prior_however_great_comes_before_torchs_own():
    plan = plan_of([PRAISED, OWN])
    assert order(plan) == ["torch.own", "lib.praised"]
    assert sources(plan) == {"torch.own": "default", "lib.praised": "prior"}


def test_of_all_declared_kernels_none_goes_before_the_default_without_saying_why():
    kernels, _ = catalog.discover()
    for where in (HOPPER, nvidia(80)):
        for sizes in ({"seq_q": 1, "seq_k": 4096, "heads": 32, "kv_heads": 8, "dim": 128},
                      {"seq_q": 512, "seq_k": 512, "heads": 8, "kv_heads": 8, "dim": 64}):
            scene = SelectionContext(policy=policy(jit="in_request", allow_untested=True),
                                     device=where.facts(),
                                     place=where.signature, rates=RATES)
            call_facts = {**facts(**sizes), "device": "cuda", **where.facts()}
            plan = select(ATTENTION, make_roster(kernels.kernels_of("attention"), scene),
                          call_facts,
                          scene)
            before = plan.steps[:order(plan).index("torch.sdpa")]
            assert all(s.score.source == "less work" and s.score.evidence for s in before)


def test_less_work_by_construction_counts_where_it_is_claimed():
    grouped, single = facts(heads=8, kv_heads=2), facts(heads=8, kv_heads=8)
    plan = plan_of([OWN, CLEVER], grouped)
    assert (plan.kernel == "lib.clever"
            and plan.steps[0].score.origin == "less work: reads each key once")
    assert "less work: reads each key once" in str(plan)
    assert order(plan_of([OWN, CLEVER], single)) == ["torch.own", "lib.clever"]


def test_less_work_does_not_stand_against_a_measurement_of_torchs_own():
    call_facts = facts(heads=8, kv_heads=2)
    assert plan_of([OWN, CLEVER], call_facts,
                   perf=times(call_facts, torch_own=1.0)).kernel == "torch.own"


def test_a_measurement_says_something_only_beside_one_of_the_default():
    call_facts = facts()
    assert plan_of([PRAISED, OWN], call_facts,
                   perf=times(call_facts, lib_praised=1e-3)).kernel == "torch.own"
    both = plan_of([PRAISED, OWN], call_facts,
                   perf=times(call_facts, lib_praised=5.0, torch_own=9.0))
    assert (order(both) == ["lib.praised", "torch.own"]
            and set(sources(both).values()) == {"measured"})


def test_what_the_user_prefers_needs_no_other_evidence():
    wished = policy(PolicyRule.of("boost", "lib.praised", factor=2.0))
    plan = plan_of([PRAISED, OWN], policy=wished)
    assert plan.kernel == "lib.praised" and plan.steps[0].score.source == "policy"


def test_without_anything_of_torchs_own_the_guess_decides():
    assert order(plan_of([CLEVER, PRAISED])) == ["lib.praised", "lib.clever"]


@pytest.mark.parametrize("mode", MODES)
def test_a_measurement_counts_in_its_own_mode_alone(mode):
    perf = times(facts(mode), lib_praised=5.0, torch_own=9.0)
    for other in MODES:
        plan = plan_of([PRAISED, OWN], facts(other), perf=perf)
        assert plan.kernel == ("lib.praised" if other == mode else "torch.own"), (mode, other)


def test_neighbours_of_another_mode_say_nothing():
    perf = times(facts(CAPTURED, seq_k=1024), lib_praised=5.0, torch_own=50.0)
    near = plan_of([PRAISED, OWN], facts(CAPTURED, seq_k=2048), perf=perf)
    assert near.kernel == "lib.praised" and near.steps[0].score.source == "interpolated"
    assert plan_of([PRAISED, OWN], facts(EAGER, seq_k=2048), perf=perf).kernel == "torch.own"


@pytest.mark.parametrize(("gain", "kernel"), [(1.02, "torch.own"), (1.5, "lib.praised")])
def test_a_neighbour_must_be_ahead_by_more_than_it_may_be_wrong(gain, kernel):
    perf = times(facts(seq_k=1024), lib_praised=10.0, torch_own=10.0 * gain)
    assert plan_of([PRAISED, OWN], facts(seq_k=2048), perf=perf).kernel == kernel


def test_what_is_known_only_where_it_is_fast_does_not_look_fast_everywhere():
    """At the farther neighbour it is as fast as torch's own; nobody kept how slow it was at the
    nearer one."""
    near, far = facts(seq_k=1024), facts(seq_k=8192)
    perf = times(near, torch_own=10.0).including(times(far, torch_own=400.0, lib_praised=100.0))
    assert plan_of([PRAISED, OWN], facts(seq_k=1536), perf=perf).kernel == "torch.own"


def test_what_came_with_the_package_counts_until_something_was_measured_here():
    call_facts = facts()
    came = Shipped(times(call_facts, lib_praised=5.0, torch_own=9.0), "a GPU, today")
    plan = plan_of([PRAISED, OWN], call_facts, shipped=came)
    assert plan.kernel == "lib.praised" and plan.steps[0].score.origin == "shipped: a GPU, today"
    here = plan_of([PRAISED, OWN], call_facts, shipped=came,
                   perf=times(call_facts, lib_praised=9.0, torch_own=5.0))
    assert here.kernel == "torch.own" and here.steps[0].score.source == "measured"
    # A measurement of something else, made here, is no reason to forget what came with the package.
    other = times(facts(CAPTURED), torch_own=5.0)
    assert plan_of([PRAISED, OWN], call_facts, shipped=came, perf=other).kernel == "lib.praised"


def test_shipped_times_of_a_kind_are_not_mixed_with_those_of_this_machine():
    call_facts = facts()
    came = Shipped(times(call_facts, lib_praised=5.0, torch_own=9.0), "a GPU, today")
    assert plan_of([PRAISED, OWN], call_facts, shipped=came,
                   perf=times(call_facts, torch_own=6.0)).kernel == "torch.own"


def test_a_long_call_measured_in_a_graph_counts_outside_too():
    perf = times(facts(CAPTURED), lib_praised=250.0, torch_own=300.0)
    plan = plan_of([PRAISED, OWN], facts(EAGER), perf=perf)
    assert order(plan)[0] == "lib.praised" and "captured in a graph" in plan.steps[0].score.origin
    # where launching counts, or what Inductor fuses, it says nothing
    short = times(facts(CAPTURED), lib_praised=25.0, torch_own=30.0)
    assert order(plan_of([PRAISED, OWN], facts(EAGER), perf=short))[0] == "torch.own"
    assert order(plan_of([PRAISED, OWN], facts(COMPILED), perf=perf))[0] == "torch.own"
    # its own mode comes first
    slower = times(facts(EAGER), lib_praised=320.0, torch_own=300.0)
    both = perf.including(slower)
    assert order(plan_of([PRAISED, OWN], facts(EAGER), perf=both))[0] == "torch.own"
    # a long time outside may be the host's
    eager = times(facts(EAGER), lib_praised=250.0, torch_own=300.0)
    assert order(plan_of([PRAISED, OWN], facts(CAPTURED), perf=eager))[0] == "torch.own"
