"""policy -> filter -> score, as a pure function: every phase against devices that need not be here.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
import torch
from helpers import ATTENTION, RMS_NORM, call_facts, nvidia, policy, qkv, rows
from hypothesis import given, settings
from hypothesis import strategies as st

import layerzero as lz
from layerzero.machine import hardware
from layerzero.perf.record import Measurement, PerfView, kind_of
from layerzero.selection.engine import SelectionContext, make_roster, select
from layerzero.selection.policy import PolicyRule
from layerzero.selection.score import (
    EAGER_OVER_ROOFLINE,
    calibration,
    guess_us,
    rates_of,
    roofline_us,
)
from layerzero.spec.device import Device
from layerzero.spec.plan import Plan, Transform
from layerzero.spec.reason import Category, Code, Reason
from layerzero.spec.rules import (
    absent,
    at_least,
    at_most,
    cpu_isa,
    device,
    dtypes,
    equals,
    generations,
    multiple_of,
    on,
    sm,
    unit_stride,
    vendor,
)
from layerzero.world.registry import catalog

CPU = Device("cpu", 0, "a CPU", "intel", isa=("avx2",), cores=4, torch_version="2.9.0")
TURING, AMPERE, ADA, HOPPER, BLACKWELL, UNKNOWN = (nvidia(n) for n in (75, 80, 89, 90, 100, 250))
AMD = Device("cuda", 0, "an AMD GPU", "amd", arch="gfx942", gpu_generation="cdna3",
             supports_bf16=True)


def load():
    return ATTENTION.reference


def kernel(id, *requires, op=ATTENTION, **declared):
    return lz.Kernel(id, op, load, requires=requires, **declared)


def facts(**kwargs):
    """The facts of an attention call; sizes as for qkv(), the rest are arguments of the op."""
    names = ("seq_q", "seq_k", "heads", "kv_heads", "dim", "batch", "dtype", "layout")
    sizes = {k: kwargs.pop(k) for k in names if k in kwargs}
    params = {"layout": sizes["layout"], **kwargs} if "layout" in sizes else kwargs
    return call_facts(ATTENTION, *qkv(**sizes), **params)


def decide(kernels, on=HOPPER, call_facts=None, thorough=True, op=ATTENTION, **context):
    context.setdefault("policy", policy())
    scene = SelectionContext(device=on.facts(), place=on.signature, rates=rates_of(on.type), **context)
    known = {**(call_facts or facts(dtype=torch.float16)), **on.facts()}
    return select(op, make_roster(kernels, scene), known, scene, thorough)


def codes(plan, kernel):
    return [r.code for r in plan.why_not(kernel)]


# filter: hardware

@pytest.mark.parametrize(("rules", "serves", "refused"), [
    ((device("cuda"), sm(at_least=80)), (AMPERE, ADA, HOPPER, BLACKWELL, UNKNOWN),
     {TURING: Code.SM_TOO_OLD, CPU: Code.PLATFORM_MISMATCH, AMD: Code.SM_TOO_OLD}),
    ((device("cuda"), vendor("nvidia"), sm(below=122)), (TURING, AMPERE, ADA, HOPPER, BLACKWELL),
     {UNKNOWN: Code.SM_TOO_NEW, AMD: Code.VENDOR_MISMATCH}),
    ((device("cuda"), generations("ada_lovelace", "hopper")), (ADA, HOPPER),
     {TURING: Code.GPU_GENERATION_UNSUPPORTED, AMPERE: Code.GPU_GENERATION_UNSUPPORTED,
      BLACKWELL: Code.GPU_GENERATION_UNSUPPORTED, UNKNOWN: Code.GPU_GENERATION_UNSUPPORTED}),
    ((vendor("amd"),), (AMD,), {HOPPER: Code.VENDOR_MISMATCH}),
    ((device("cpu"), cpu_isa("avx2")), (CPU,), {HOPPER: Code.PLATFORM_MISMATCH}),
    ((device("cpu"), cpu_isa("amx_bf16")), (), {CPU: Code.CPU_ISA_MISSING}),
    ((on("supports_fp8"),), (ADA, HOPPER, BLACKWELL, UNKNOWN),
     {TURING: Code.FEATURE_UNSUPPORTED, AMPERE: Code.FEATURE_UNSUPPORTED}),
    ((at_least("tensor_core_generation", 4, Code.TENSOR_CORE_GENERATION),),
     (HOPPER, BLACKWELL, UNKNOWN),
     {ADA: Code.TENSOR_CORE_GENERATION, TURING: Code.TENSOR_CORE_GENERATION}),
])
def test_hardware_decides(rules, serves, refused):
    k = kernel("lib.k", *rules)
    for where in serves:
        assert decide([k], on=where).kernel == "lib.k", where.name
    for where, code in refused.items():
        plan = decide([k], on=where)
        assert plan.kernel is None
        assert code in codes(plan, "lib.k"), where.name


def test_a_kernel_for_another_platform_is_not_told_about_its_compute_capability():
    plan = decide([kernel("lib.k", device("cuda"), sm(at_least=90), generations("hopper"))], on=CPU)
    assert codes(plan, "lib.k") == [Code.PLATFORM_MISMATCH]


# filter: the call

@pytest.mark.parametrize(("rule", "call", "code"), [
    (dtypes("float16", "bfloat16"), {"dtype": torch.float32}, Code.DTYPE_UNSUPPORTED),
    (at_most("head_dim", 8), {"dim": 16}, Code.HEAD_DIM_TOO_LARGE),
    (multiple_of("head_dim", 32), {"dim": 16}, Code.HEAD_DIM_ALIGNMENT),
    (at_most("seq_q", 4, Code.SEQ_LEN_UNSUPPORTED), {"seq_q": 5}, Code.SEQ_LEN_UNSUPPORTED),
    (equals("group", 1, Code.GQA_UNSUPPORTED), {"heads": 4, "kv_heads": 2}, Code.GQA_UNSUPPORTED),
    (equals("causal_offset", 0), {"seq_q": 2, "seq_k": 8}, Code.FEATURE_UNSUPPORTED),
    (absent("attn_mask.dtype", Code.MASK_UNSUPPORTED), {"attn_mask": torch.ones(8, 8) > 0},
     Code.MASK_UNSUPPORTED),
    (equals("softcap", 0.0, Code.SOFTCAP_UNSUPPORTED), {"softcap": 5.0}, Code.SOFTCAP_UNSUPPORTED),
])
def test_the_call_decides(rule, call, code):
    k, dim = kernel("lib.k", rule), 8 if code is Code.HEAD_DIM_TOO_LARGE else 32
    assert decide([k], call_facts=facts(dtype=torch.float16, dim=dim, seq_q=4)).kernel == "lib.k"
    plan = decide([k], call_facts=facts(**call))
    assert codes(plan, "lib.k") == [code]
    assert plan.why_not("lib.k")[0].fact == rule.fact


@pytest.mark.parametrize(("declared", "known", "settings", "code"), [
    ({"differentiable": False}, {"grad": True}, {}, Code.BACKWARD_UNSUPPORTED),
    ({"deterministic": False}, {"deterministic": True}, {}, Code.NOT_DETERMINISTIC),
    ({"deterministic": False}, {}, {"deterministic": True}, Code.NOT_DETERMINISTIC),
    ({"deterministic_backward": False}, {"deterministic": True, "grad": True}, {},
     Code.NOT_DETERMINISTIC),
    ({"backward_varies_on": ("cuda",)}, {"deterministic": True, "grad": True}, {},
     Code.NOT_DETERMINISTIC),
    ({"graph_safe": False}, {"graph": True}, {}, Code.CUDA_GRAPH_UNSAFE),
    ({"graph_safe": False}, {}, {"graph_strict_mode": True}, Code.CUDA_GRAPH_UNSAFE),
    ({"jit": True}, {}, {}, Code.JIT_NOT_WARMED),
    ({"untested": True}, {}, {}, Code.UNTESTED_ON_HARDWARE),
    ({}, {}, {"require_certificates": True}, Code.UNCERTIFIED),
    ({}, {}, {"disabled": True}, Code.LZ_DISABLED),
])
def test_the_mode_of_the_call_and_of_the_policy_decide(declared, known, settings, code):
    k, plain = kernel("lib.k", **declared), facts(dtype=torch.float16)
    plan = decide([k], call_facts={**plain, **known}, policy=policy(**settings))
    assert codes(plan, "lib.k") == [code]
    assert code.category in (Category.MODE, Category.POLICY, Category.SOFTWARE, Category.FEATURE)


@pytest.mark.parametrize(("declared", "known", "settings"), [
    # no gradient is asked for
    ({"deterministic_backward": False}, {"deterministic": True}, {}),
    ({"backward_varies_on": ("cuda",)}, {"deterministic": True}, {}),
    ({"backward_varies_on": ("xpu",)}, {"deterministic": True, "grad": True}, {}),
    ({"differentiable": False}, {"grad": False}, {}),
    ({"jit": True}, {}, {"jit": "in_request"}),
    ({"untested": True}, {}, {"allow_untested": True}),
    ({"baseline": True}, {}, {"disabled": True}),
])
def test_a_mode_excludes_no_more_than_it_must(declared, known, settings):
    call_facts = {**facts(dtype=torch.float16), **known}
    assert decide([kernel("lib.k", **declared)], call_facts=call_facts, policy=policy(**settings))


def test_graph_mode_asks_nothing_on_a_cpu():
    assert decide([kernel("lib.k", graph_safe=False)], on=CPU,
                  policy=policy(graph_strict_mode=True))


def test_a_warmed_kernel_and_a_certified_one_may_serve():
    k = kernel("lib.k", jit=True)
    assert decide([k], warmed={"lib.k"})
    assert decide([k], warmed={"lib.k"}, certified={"lib.k"},
                  policy=policy(require_certificates=True))
    assert not decide([k], warmed={"lib.k"}, certified={"other.k"},
                      policy=policy(require_certificates=True))


def test_libraries_and_health_decide():
    missing, broken = Reason(Code.NOT_INSTALLED, "lib"), Reason(Code.CIRCUIT_OPEN, "30 s",
                                                                "3 faults")
    ours = [kernel("lib.a", package="lib"), kernel("lib.b", package="lib"), kernel("torch.c")]
    plan = decide(ours, availability={"lib.a": missing}, health={"torch.c": broken})
    assert plan.kernel == "lib.b"
    assert plan.why_not("lib.a") == (missing,) and plan.why_not("torch.c") == (broken,)
    # a fault of one kernel of a library is one of the library
    plan = decide(ours, health={"lib": broken})
    assert [s.kernel for s in plan.steps] == ["torch.c"]
    assert codes(plan, "lib.a") == codes(plan, "lib.b") == [Code.CIRCUIT_OPEN]


# policy

def test_a_lock_leaves_only_what_it_names_and_lifts_the_guards_against_chance():
    ours = [kernel("lib.fast", prior=100), kernel("lib.slow", jit=True, untested=True),
            kernel("reference.r")]
    plan = decide(ours, policy=policy(PolicyRule.of("lock", "lib.slow", origin="me")))
    assert [s.kernel for s in plan.steps] == ["lib.slow"] and plan.locked == "me"
    assert codes(plan, "lib.fast") == codes(plan, "reference.r") == [Code.LOCKED_TO_ANOTHER]
    plan = decide(ours, policy=policy(PolicyRule.of("lock", "lib.*")))
    assert [s.kernel for s in plan.steps] == ["lib.fast", "lib.slow"]


def test_a_lock_does_not_lift_what_a_kernel_cannot_do():
    ours = [kernel("lib.k", at_most("head_dim", 8)), kernel("lib.other")]
    plan = decide(ours, policy=policy(PolicyRule.of("lock", "lib.k")))
    assert not plan.steps and codes(plan, "lib.k") == [Code.HEAD_DIM_TOO_LARGE] and plan.locked


def test_deny_allow_and_conditions():
    ours = [kernel("lib.fast", prior=100), kernel("lib.slow"),
            kernel("reference.r", overhead_us=100)]

    def served(*rules, **call):
        plan = decide(ours, call_facts=facts(**call), policy=policy(*rules))
        return [s.kernel for s in plan.steps]

    assert served(PolicyRule.of("deny", "lib.fast")) == ["lib.slow", "reference.r"]
    # a fallback must remain
    assert served(PolicyRule.of("allow", "lib.slow")) == ["lib.slow", "reference.r"]
    long = PolicyRule.of("deny", "lib.fast", when={"seq_k": "> 100"})
    assert served(long, seq_q=100)[0] == "lib.fast"
    assert served(long, seq_q=101)[0] == "lib.slow"
    assert served(PolicyRule.of("deny", "lib.*", ops="rms_norm"))[0] == "lib.fast"      # another op


# score

def test_the_prior_ranks_and_equal_kernels_keep_the_order_of_their_names():
    ours = [kernel(f"lib.{name}", prior=prior)
            for name, prior in (("b", 2), ("a", 2), ("fast", 4), ("slow", 1))]
    assert [s.kernel for s in decide(ours).steps] == ["lib.fast", "lib.a", "lib.b", "lib.slow"]


def test_the_guess_is_the_roofline_slowed_by_the_eager_formula_and_sped_up_by_the_prior():
    known, rates = facts(seq_q=512, dtype=torch.float16), rates_of("cuda")
    roofline = roofline_us(ATTENTION, known, rates)
    flops, moved = 2 * 2 * 512 * 512 * 32, 2 * (2 * 512 * 32 + 2 * 512 * 32)
    assert roofline == pytest.approx(max(flops / rates.flops_per_us, moved / rates.bytes_per_us))
    k = kernel("lib.k", prior=4, overhead_us=10)
    assert guess_us(k, roofline) == pytest.approx(10 + EAGER_OVER_ROOFLINE * roofline / 4)
    score = decide([k], call_facts=known).steps[0].score
    assert (score.total_us == score.kernel_us == pytest.approx(guess_us(k, roofline))
            and score.source == "prior")


def test_a_fixed_cost_loses_where_there_is_little_to_do_and_wins_where_there_is_much():
    ours = [kernel("lib.quick", prior=1, overhead_us=1),
            kernel("lib.strong", prior=20, overhead_us=50)]
    assert decide(ours, on=CPU, call_facts=facts(seq_q=4)).kernel == "lib.quick"
    assert decide(ours, on=CPU, call_facts=facts(seq_q=1024)).kernel == "lib.strong"


def test_a_boost_divides_the_expected_time_and_boosts_multiply():
    ours = [kernel("lib.a", prior=4), kernel("lib.b", prior=1)]
    rules = (PolicyRule.of("boost", "lib.b", factor=2), PolicyRule.of("boost", "lib.*", factor=3))
    plain, boosted = ({s.kernel: s.score for s in decide(ours, policy=policy(*r)).steps}
                      for r in ((), rules))
    assert (boosted["lib.b"].total_us == pytest.approx(plain["lib.b"].total_us / 6)
            and boosted["lib.b"].boost == 6)
    assert boosted["lib.a"].total_us == pytest.approx(plain["lib.a"].total_us / 3)
    assert boosted["lib.b"].kernel_us == plain["lib.b"].kernel_us
    assert decide(ours, policy=policy(*rules)).kernel == "lib.a"
    assert decide(ours, policy=policy(PolicyRule.of("boost", "lib.b", factor=5))).kernel == "lib.b"


def measured(kernel, us, known, where=HOPPER, **rest):
    return Measurement(kernel, "attention", kind_of(ATTENTION, known).bucket, where.signature, us,
                       **rest)


def test_a_measurement_overrides_the_prior():
    known = facts(seq_q=512, dtype=torch.float16)
    ours = [kernel("lib.praised", prior=50), kernel("lib.humble", prior=1)]
    assert decide(ours, call_facts=known).kernel == "lib.praised"
    perf = PerfView([measured("lib.praised", 90.0, known), measured("lib.humble", 40.0, known)])
    plan = decide(ours, call_facts=known, perf=perf)
    assert plan.kernel == "lib.humble"
    assert [s.score.source for s in plan.steps] == ["measured", "measured"]
    assert plan.steps[0].score.total_us == pytest.approx(40.0)


def test_a_preference_stands_above_a_measurement():
    known = facts(seq_q=512, dtype=torch.float16)
    perf = PerfView([measured("lib.a", 90.0, known), measured("lib.b", 40.0, known)])
    wish = policy(PolicyRule.of("boost", "lib.a", factor=1e6))
    plan = decide([kernel("lib.a"), kernel("lib.b")], call_facts=known, perf=perf, policy=wish)
    assert plan.kernel == "lib.a" and plan.steps[0].score.kernel_us == pytest.approx(90.0)


def test_a_measurement_counts_for_its_bucket_and_device_only():
    known = facts(seq_q=512, seq_k=2100, dtype=torch.float16)
    ours = [kernel("lib.praised", prior=50), kernel("lib.humble", prior=1)]
    perf = PerfView([measured("lib.praised", 90.0, known), measured("lib.humble", 40.0, known)])
    assert decide(ours, call_facts=facts(seq_q=512, seq_k=3072, dtype=torch.float16),
                  perf=perf).kernel == "lib.humble"
    assert decide(ours, call_facts=facts(seq_q=512, seq_k=3073, dtype=torch.float16),
                  perf=perf).kernel == "lib.praised"
    assert decide(ours, call_facts=facts(seq_q=512, seq_k=2100, dtype=torch.bfloat16),
                  perf=perf).kernel == "lib.praised"
    assert decide(ours, call_facts={**known, "grad": True}, perf=perf).kernel == "lib.praised"
    assert decide(ours, on=AMPERE, call_facts=known, perf=perf).kernel == "lib.praised"


def test_a_noisy_measurement_counts_less():
    known = facts(seq_q=512, dtype=torch.float16)
    k = kernel("lib.k")

    def with_spread(spread):
        # keeps the calibration of the guess where it is
        other = measured("lib.other", 10.0, known)
        perf = PerfView([measured("lib.k", 10.0, known, spread=spread), other])
        plan = decide([k, kernel("lib.other")], call_facts=known, perf=perf)
        return next(s.score for s in plan.steps if s.kernel == "lib.k")

    assert with_spread(0.0).kernel_us == pytest.approx(10.0)
    trusts = [Measurement("lib.k", "attention", "", "", 1.0, spread=s).trust
              for s in (0.0, 0.1, 0.25, 1.0, 10.0)]
    assert (trusts == sorted(trusts, reverse=True) and trusts[0] == 1 and trusts[2] == 0.5
            and trusts[-1] < 0.01)


def test_of_a_noisy_slow_and_a_quiet_fast_measurement_the_guess_takes_the_place_of_the_noise():
    known = facts(seq_q=512, dtype=torch.float16)
    ours = [kernel("lib.a", prior=4), kernel("lib.b", prior=1)]

    def winner(spread):
        perf = PerfView([measured("lib.a", 60.0, known),
                         measured("lib.b", 20.0, known, spread=spread)])
        return decide(ours, call_facts=known, perf=perf).kernel

    assert winner(0.0) == "lib.b"
    assert winner(20.0) == "lib.a"                         # by its prior it is four times as fast


def test_the_guesses_of_the_others_are_scaled_by_how_far_the_measured_ones_were_off():
    known = facts(seq_q=512, dtype=torch.float16)
    ours = [kernel("lib.a", prior=2), kernel("lib.b", prior=4)]
    guesses = {s.kernel: s.score.kernel_us for s in decide(ours, call_facts=known).steps}
    slow = measured("lib.a", guesses["lib.a"] * 100, known)
    assert calibration(guesses, {"lib.a": slow}) == pytest.approx(100)
    plan = decide(ours, call_facts=known, perf=PerfView([slow]))
    scores = {s.kernel: s.score for s in plan.steps}
    assert (scores["lib.b"].kernel_us == pytest.approx(guesses["lib.b"] * 100)
            and scores["lib.b"].source == "prior")
    # not chosen for being unmeasured: its prior is better
    assert plan.kernel == "lib.b"


def test_an_unmeasured_kernel_does_not_win_by_a_guess_on_another_scale():
    known = facts(seq_q=512, dtype=torch.float16)
    ours = [kernel("lib.known", prior=4), kernel("lib.unknown", prior=2)]
    assert decide(ours, call_facts=known,
                  perf=PerfView([measured("lib.known", 1e6, known)])).kernel == "lib.known"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_transform_costs_what_it_moves(dtype):
    q, k, v = qkv(seq_q=64, heads=4, dim=32, dtype=dtype)
    sparse = q.repeat_interleave(2, -1)[..., ::2]
    known = call_facts(ATTENTION, sparse, k, v)
    plan = decide([kernel("lib.k", unit_stride("query"), unit_stride("key"))], call_facts=known)
    size = q.numel() * q.element_size()
    assert plan.steps[0].transforms == (Transform("contiguous", "query", size),)
    score = plan.steps[0].score
    # read and written
    assert score.transform_us == pytest.approx(2 * size / rates_of("cuda").bytes_per_us)
    assert score.total_us == pytest.approx(score.kernel_us + score.transform_us)
    assert plan.to_json()["transform_bytes"] == size


def test_the_cost_of_a_transform_can_turn_the_choice():
    q, k, v = qkv(seq_q=512, heads=4, dim=32)
    ours = [kernel("lib.picky", unit_stride("query"), prior=7.01), kernel("lib.easy", prior=7)]
    assert decide(ours, on=CPU, call_facts=call_facts(ATTENTION, q, k, v)).kernel == "lib.picky"
    sparse = call_facts(ATTENTION, q.repeat_interleave(2, -1)[..., ::2], k, v)
    plan = decide(ours, on=CPU, call_facts=sparse)
    assert [s.kernel for s in plan.steps] == ["lib.easy", "lib.picky"]
    strong = [kernel("lib.picky", unit_stride("query"), prior=70), kernel("lib.easy", prior=7)]
    assert decide(strong, on=CPU, call_facts=sparse).kernel == "lib.picky"       # worth the copy


# the plan

def test_no_kernel_is_an_empty_plan_that_says_why():
    plan = decide([kernel("lib.k", at_most("head_dim", 8))])
    assert (not plan and plan.kernel is None and "no kernel" in str(plan)
            and "HEAD_DIM_TOO_LARGE" in str(plan))


def test_brief_gives_the_ranking_alone_and_thorough_every_reason():
    k = kernel("lib.k", dtypes("bfloat16"), at_most("head_dim", 8),
               equals("group", 1, Code.GQA_UNSUPPORTED))
    call_facts = facts(dtype=torch.float32, heads=4, kv_heads=2)
    brief = decide([k], call_facts=call_facts, thorough=False)
    assert not brief.steps and not brief.rejected
    every = [Code.DTYPE_UNSUPPORTED, Code.HEAD_DIM_TOO_LARGE, Code.GQA_UNSUPPORTED]
    assert codes(decide([k], call_facts=call_facts), "lib.k") == every


def test_the_plan_as_text_and_as_json():
    sparse = facts(dtype=torch.float16)
    sparse["query.stride_last"] = 2
    ours = [kernel("lib.a", unit_stride("query")), kernel("lib.b", at_most("head_dim", 8)),
            kernel("lib.new", untested=True)]
    perf = PerfView([measured("lib.a", 12.5, sparse, samples=9, spread=0.01)])
    plan = decide(ours, call_facts=sparse, perf=perf,
                  policy=policy(PolicyRule.of("lock", "lib.*", origin="lz.lock()")))
    text = str(plan)
    for part in ("lz.attention -> lib.", "named by lz.lock()", "after contiguous(query)",
                 "(measured)", "(prior)", "x lib.b", "HEAD_DIM_TOO_LARGE", "untested on hardware"):
        assert part in text, part
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))).steps == plan.steps


BUILTIN = catalog.discover()[0]
DEVICES = (CPU, TURING, AMPERE, ADA, HOPPER, BLACKWELL, UNKNOWN, AMD)


def any_call():
    size = st.integers(1, 300)
    return st.fixed_dictionaries({
        "seq_q": size, "seq_k": size, "kv_heads": st.sampled_from([1, 2]),
        "heads": st.sampled_from([2, 4]), "dim": st.sampled_from([8, 16, 40, 64]),
        "dtype": st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
        "is_causal": st.booleans(), "causal_align": st.sampled_from(["top_left", "bottom_right"]),
        "return_lse": st.booleans(), "softcap": st.sampled_from([0.0, 5.0]),
        "layout": st.sampled_from(["bhsd", "bshd"]),
        "window_left": st.sampled_from([-1, 16])})


@settings(deadline=None, max_examples=40)
@given(any_call(), st.sampled_from(DEVICES), st.booleans(), st.randoms(use_true_random=False))
def test_of_the_real_kernels_each_is_accepted_or_refused_with_a_reason_and_the_order_of_declaration_is_nothing(
        call, where, pretend, shuffle):
    ours = list(BUILTIN.kernels_of("attention"))
    call_facts, names = facts(**call), {k.id for k in ours}
    lenient = policy(jit="in_request", allow_untested=True) if pretend else policy()
    plan = decide(ours, on=where, call_facts=call_facts, policy=lenient)
    steps, refused = [s.kernel for s in plan.steps], [r.kernel for r in plan.rejected]
    assert sorted([*steps, *refused]) == sorted(names)
    assert all(r.reasons for r in plan.rejected)
    ranks = [(s.score.source == "prior" and any(BUILTIN.by_id[k].baseline for k in steps),
              s.score.total_us)
             for s in plan.steps]
    # what has no evidence comes after torch's own
    assert ranks == sorted(ranks)
    assert "reference.attention" in steps                  # there is always a fallback
    assert decide(ours, on=where, call_facts=call_facts, policy=lenient) == plan
    shuffle.shuffle(ours)
    assert decide(ours, on=where, call_facts=call_facts, policy=lenient).steps == plan.steps
    brief = decide(ours, on=where, call_facts=call_facts, policy=lenient, thorough=False)
    assert brief.steps == plan.steps


@settings(deadline=None, max_examples=25)
@given(any_call(), st.sampled_from(DEVICES))
def test_whatever_is_accepted_breaks_none_of_its_own_rules_but_those_a_transform_repairs(call,
                                                                                         where):
    lenient = policy(jit="in_request", allow_untested=True)
    plan = decide(BUILTIN.kernels_of("attention"), on=where, call_facts=facts(**call),
                  policy=lenient)
    for step in plan.steps:
        k = BUILTIN.by_id[step.kernel]
        broken = [r for rule in k.requires if (r := rule.check(plan.facts)) is not None]
        repaired = {t.target for t in step.transforms}
        assert all(r.fact.partition(".")[0] in repaired for r in broken), (step.kernel, broken)


def test_selection_reads_nothing_but_its_arguments():
    ours, call_facts = [kernel("lib.a", prior=3), kernel("lib.b")], facts(dtype=torch.float16)
    frozen = dict(call_facts)
    plans = {str(decide(ours, call_facts=call_facts)) for _ in range(3)}
    torch.set_deterministic_debug_mode("error")
    try:
        plans.add(str(decide(ours, call_facts=call_facts)))
    finally:
        torch.set_deterministic_debug_mode("default")
    assert len(plans) == 1 and call_facts == frozen


def test_the_real_device_is_one_that_selection_takes():
    here = hardware.probe("cpu")
    plan = decide(BUILTIN.kernels_of("rms_norm"), on=here, call_facts=call_facts(RMS_NORM, rows()),
                  op=RMS_NORM)
    assert plan.kernel in ("native.rms_norm", "torch.rms_norm")


def test_of_many_kernels_with_random_priors_the_fastest_is_first():
    shuffle = random.Random(7)
    call_facts = facts(seq_q=256, dtype=torch.float16)
    roofline = roofline_us(ATTENTION, call_facts, rates_of("cuda"))
    for _ in range(50):
        ours = [kernel(f"lib.k{i}", prior=shuffle.uniform(0.5, 30),
                       overhead_us=shuffle.uniform(0, 40))
                for i in range(20)]
        want = sorted(ours, key=lambda k: (guess_us(k, roofline), k.id))
        assert [s.kernel for s in decide(ours, call_facts=call_facts).steps] == [k.id for k in want]


def test_two_cards_of_one_kind_get_the_same_plan():
    ours = [kernel("lib.a", device("cuda"), prior=3), kernel("lib.b", sm(at_least=90))]
    call_facts = facts(seq_q=512, dtype=torch.float16)
    perf = PerfView([measured("lib.a", 30.0, call_facts), measured("lib.b", 20.0, call_facts)])
    assert decide(ours, on=replace(HOPPER, index=1), call_facts=call_facts,
                  perf=perf) == decide(ours, call_facts=call_facts, perf=perf)
    assert decide(ours, call_facts=call_facts, perf=perf).kernel == "lib.b"
