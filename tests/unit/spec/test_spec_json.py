"""The nouns as data: through JSON and back without loss, frozen, and refused where something is
missing.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from layerzero.selection.conditions import parse_when
from layerzero.selection.policy import PolicyRule
from layerzero.spec.codec import decode
from layerzero.spec.device import Device, Generation
from layerzero.spec.errors import RegistrationError, SpecError
from layerzero.spec.event import Fallback
from layerzero.spec.kernel import Const, Kernel, accepted_params, direct
from layerzero.spec.op import FAMILY_FACTS, Op, Tolerance
from layerzero.spec.plan import Plan, Rejected, Score, Step, Transform
from layerzero.spec.reason import Code, Reason
from layerzero.spec.rules import (
    AnyOf,
    Condition,
    Rule,
    When,
    any_of,
    at_most,
    device,
    dtypes,
    multiple_of,
    off,
    on,
    sm,
    unit_stride,
    when,
)
from layerzero.spec.rules.predicate import PREDICATES
from layerzero.world.registry.catalog import builtin_ops

OPS = builtin_ops()


def through_json(data):
    return json.loads(json.dumps(data, allow_nan=False))


# rules

scalars = st.one_of(st.none(), st.booleans(), st.integers(),
                    st.floats(allow_nan=False, allow_infinity=False),
                    st.text(max_size=8))
rules = st.builds(Rule, st.text(min_size=1, max_size=12), st.sampled_from(sorted(PREDICATES)),
                  st.one_of(scalars, st.lists(scalars, max_size=3).map(tuple)),
                  st.sampled_from(Code), st.sampled_from(["", "contiguous", "cast"]))
conditions = st.recursive(rules, lambda inner: st.one_of(
    st.builds(AnyOf, st.lists(inner, min_size=1, max_size=3).map(tuple)),
    st.builds(When, inner, inner)), max_leaves=6)


@settings(deadline=None)
@given(conditions)
def test_a_condition_survives_json(condition):
    back = decode(Condition, through_json(condition.to_json()), "condition")
    assert back == condition
    assert str(back) == str(condition)
    assert list(back.leaves()) == list(condition.leaves())


numbers = st.one_of(st.none(), st.integers(-300, 300))
limits = st.one_of(
    st.builds(Rule, st.just("n"), st.sampled_from(["le", "ge", "eq", "ne"]), st.integers(-300, 300),
              st.just(Code.SHAPE_UNSUPPORTED)),
    st.builds(Rule, st.just("n"), st.just("multiple_of"), st.integers(1, 64),
              st.just(Code.SHAPE_UNSUPPORTED)),
    st.builds(Rule, st.just("n"), st.sampled_from(["in", "not_in"]),
              st.lists(numbers, min_size=1, max_size=4).map(tuple),
              st.just(Code.SHAPE_UNSUPPORTED)))


@settings(deadline=None)
@given(st.recursive(limits, lambda inner: st.one_of(
    st.builds(AnyOf, st.lists(inner, min_size=1, max_size=3).map(tuple)),
    st.builds(When, inner, inner)), max_leaves=6),
    numbers)
def test_a_condition_that_came_back_decides_alike(condition, n):
    back = decode(Condition, through_json(condition.to_json()), "condition")
    assert back.check({"n": n}) == condition.check({"n": n})


def test_a_rule_with_an_unknown_test_names_the_known_ones():
    with pytest.raises(SpecError, match="unknown test 'lte'; known are eq, ne, le"):
        Rule("head_dim", "lte", 128, Code.HEAD_DIM_TOO_LARGE)


def test_an_absent_value_passes_limits_and_fails_membership():
    facts = {"n": None}
    assert at_most("n", 4).check(facts) is None
    assert multiple_of("n", 4).check(facts) is None
    assert Rule("n", "in", (1, 2), Code.SHAPE_UNSUPPORTED).check(facts) is not None
    assert Rule("n", "in", (1, None), Code.SHAPE_UNSUPPORTED).check(facts) is None


def test_the_reason_of_a_choice_is_that_of_its_last_alternative():
    choice = any_of(off("is_causal", Code.CAUSAL_UNSUPPORTED),
                    at_most("seq_q", 1, Code.SEQ_LEN_UNSUPPORTED))
    assert choice.check({"is_causal": True, "seq_q": 1}) is None
    assert choice.check({"is_causal": True, "seq_q": 2}) == Reason(Code.SEQ_LEN_UNSUPPORTED, "<= 1",
                                                                   2, "seq_q")


def test_a_conditional_rule_holds_wherever_its_condition_does_not():
    rule = when(on("is_causal"), at_most("seq_q", 1))
    assert rule.check({"is_causal": False, "seq_q": 9}) is None
    assert rule.check({"is_causal": True, "seq_q": 9}).code is Code.SHAPE_UNSUPPORTED


def test_sm_takes_one_end():
    with pytest.raises(SpecError, match="two rules for a range"):
        sm(at_least=80, below=100)


# ops

@pytest.mark.parametrize("op", OPS.values(), ids=list(OPS))
def test_an_op_survives_json(op):
    back = Op.from_json(through_json(op.to_json()))
    assert json.dumps(back.to_json(), sort_keys=True) == json.dumps(op.to_json(), sort_keys=True)
    assert back.reference is op.reference and back.extra_check is op.extra_check
    assert (back.params, back.dims, back.fact_names, back.requires) == (op.params, op.dims,
                                                                        op.fact_names, op.requires)
    assert back.patterns == op.patterns and back.result_patterns == op.result_patterns
    assert back.tolerance == op.tolerance


@pytest.mark.parametrize("op", OPS.values(), ids=list(OPS))
def test_the_cases_of_an_op_that_came_back_make_the_same_inputs(op):
    back = Op.from_json(through_json(op.to_json()))
    for ours, theirs in zip(op.cases, back.cases):
        a, b = op.inputs(**ours), back.inputs(**theirs)
        assert a.keys() == b.keys()
        for name, value in a.items():
            if isinstance(value, Tensor):
                torch.testing.assert_close(b[name], value, rtol=0, atol=0, equal_nan=True,
                                           msg=f"{ours}: {name}")
            elif isinstance(value, BlockMask):
                assert torch.equal(value.to_dense(), b[name].to_dense()), f"{ours}: {name}"
            elif isinstance(value, torch.Generator):
                assert torch.equal(value.get_state(), b[name].get_state())
            else:
                assert value == b[name], f"{ours}: {name}"


def reference(x: Tensor, weight: Tensor | None = None, limit: int = -1, *,
              gain: float = 1.0) -> Tensor:
    """x * gain."""
    return x * gain


def meta(x: Tensor, weight: Tensor | None = None, limit: int = -1, *, gain: float = 1.0) -> Tensor:
    return torch.empty_like(x)


def inputs(**case: Any) -> dict[str, Any]:
    return {"x": torch.ones(2, 3)}


def small_op(**changes: Any) -> Op:
    fields: dict[str, Any] = {
        "name": "scaled", "family": "elementwise", "reference": reference, "meta": meta,
        "inputs": inputs, "cases": ({},), "tolerance": Tolerance({"float32": (1e-6, 1e-6)}),
        "shapes": {"x": "*rows width", "weight": "width"}, "returns": ("*rows width",),
        "flops": "rows * width", "bytes": "2 * itemsize * rows * width"}
    return Op(**{**fields, **changes})


SMALL = small_op()


@pytest.mark.parametrize(("family", "missing"),
                         [(f, m) for f, names in FAMILY_FACTS.items() for m in names])
def test_an_op_without_what_its_family_needs_is_refused(family, missing):
    """Attention without a head_dim, tokenization without a vocabulary hash, and so on."""
    rest = {name: "width" for name in FAMILY_FACTS[family] if name != missing}
    with pytest.raises(SpecError,
                       match=rf"op 'scaled' of family '{family}' must declare {missing}"):
        small_op(family=family, derived=rest)
    assert small_op(family=family, derived={**rest, missing: "width"}).family == family


def read(values: dict[str, Any]) -> dict[str, Any]:
    return {"length": len(values["x"])}


def test_every_field_of_an_op_travels():
    full = small_op(
        family="attention", derived={"head_dim": "width", "seq_q": "rows", "seq_k": "rows"},
        exact=("width",), main="x", requires=(at_most("width", 64),), differentiable=("x",),
        autocast="lower", canonical=read, unwrap=read, extra_check=read,
        adapt=read, outputs="Tensor[]", same_dtype=("x", "weight"), dtypes=("float64",), read=read,
        reads=("length",), ranges={"gain": (0.0, 1.0)}, nested=True, sdpa_switches=True,
        in_place=("x",), stress=({"rows": 9000},), gradient_cases=({"rows": 2},),
        dropout_case={"rows": 4})
    back = Op.from_json(through_json(full.to_json()))
    # functions, for verification here
    # what verification alone reads stays with the code
    for name in {*Op.__dataclass_fields__} - {"mistakes", "batch_dims", "shard_dims",
                                              "invariance_cases", "also_differentiable"}:
        assert getattr(back, name) == getattr(full, name), name
        default = Op.__dataclass_fields__[name].default
        assert (name == "variant"
                or getattr(full, name) != default), f"{name} is at its default: nothing is shown"


def test_an_op_without_cases_is_refused():
    with pytest.raises(SpecError, match="has no cases"):
        small_op(cases=())


@pytest.mark.parametrize(("text", "problem"),
                         [("rows *", "does not parse"), ("rows ** 2", "uses BinOp"),
                                               ("open('x')", "uses Call"),
                          ("rows.real", "uses Attribute")])
def test_an_op_with_an_expression_we_do_not_speak_is_refused(text, problem):
    for field in ({"flops": text}, {"bytes": text}, {"derived": {"n": text}}):
        with pytest.raises(SpecError, match=problem):
            small_op(**field)


@pytest.mark.parametrize(("fact", "near"), [("widht", "width"), ("x.stride_lats", "x.stride_last"),
                                            ("dtyp", "dtype"),
                                            ("gian", "gain")])
def test_a_rule_on_an_unknown_fact_names_the_nearest(fact, near):
    rule = Rule(fact, "eq", 1, Code.SHAPE_UNSUPPORTED)
    with pytest.raises(SpecError, match=rf"reads the fact '{fact}'.*did you mean '{near}'\?"):
        small_op(requires=(rule,))
    for nested in (rule, any_of(at_most("width", 8), rule), when(rule, at_most("width", 8))):
        with pytest.raises(SpecError,
                           match=rf"kernel 'ours.fast' reads the fact '{fact}'.*'{near}'"):
            Kernel("ours.fast", SMALL, load, requires=(nested,))


def test_parameters_must_have_types_that_a_call_can_be_read_by():
    def starred(x: Tensor, *rest: Tensor) -> Tensor: ...

    def listed(x: Tensor, sizes: list[int]) -> Tensor: ...

    for bad, problem in ((starred, "name every parameter"), (listed, "parameter 'sizes' has type")):
        with pytest.raises(SpecError, match=problem):
            small_op(reference=bad, requires=(at_most("width", 8),))


# kernels

def load() -> Any:
    return reference


FULL = Kernel(
    "ours.fast_2", SMALL, load, package="ours", distribution="ours-kernels", version=">=1.2,<2",
    torch=">=2.8", requires=(device("cuda"), sm(at_least=80),
                             dtypes("float16", "bfloat16", cast=True), at_most("width", 256),
              unit_stride("x"), any_of(off("grad"), multiple_of("width", 8)),
              when(on("deterministic"), at_most("rows", 4))),
    prior=3.5, overhead_us=2.5, workspace="4 * rows", variants=("a", "b"), deterministic=False,
    deterministic_backward=False, differentiable=False,
    graph_safe=False, traceable=False, baseline=True, jit=True, untested=True, note="ours")


@pytest.mark.parametrize("kernel", [FULL, Kernel("ours.plain", SMALL, load)],
                         ids=["every field", "defaults"])
def test_a_kernel_survives_json(kernel):
    data = through_json(kernel.to_json())
    back = Kernel.from_json(data, SMALL)
    assert back.to_json() == kernel.to_json() == data
    assert back.load is kernel.load and back.op is kernel.op
    # Every field travels: one that is added to Kernel and forgotten in to_json would come back as
    # its default.
    assert {f: getattr(back, f) for f in Kernel.__dataclass_fields__} == \
        {f: getattr(kernel, f) for f in Kernel.__dataclass_fields__}


def test_a_kernel_whose_loader_has_no_name_to_find_it_by_says_so():
    def local() -> Any: ...

    data = Kernel("ours.local", SMALL, local).to_json()
    with pytest.raises(SpecError, match="names a local function"):
        Kernel.from_json(data, SMALL)
    assert Kernel.from_json(data, SMALL, resolve=lambda path: load).load is load


@pytest.mark.parametrize("bad", ["fast", "Ours.fast", "ours.", ".fast", "ours fast.x", ""])
def test_a_kernel_needs_an_id_of_backend_and_name(bad):
    with pytest.raises(RegistrationError, match=r"must look like 'backend\.name'"):
        Kernel(bad, SMALL, load)


@pytest.mark.parametrize("prior", [0, -1.0])
def test_a_prior_is_positive(prior):
    with pytest.raises(RegistrationError, match="prior must be > 0"):
        Kernel("ours.fast", SMALL, load, prior=prior)


def test_a_constrained_kernel_is_the_same_under_other_limits():
    other = FULL.constrained((at_most("width", 64),), note="smaller")
    assert [str(r) for r in other.requires] == ["width <= 64"]
    assert (other.id, other.load, other.note) == (FULL.id, FULL.load, "smaller")
    with pytest.raises(SpecError, match="did you mean 'width'"):
        FULL.constrained((at_most("widht", 64),))


def test_what_a_kernel_takes_must_be_what_the_op_has():
    def takes_some(x: Tensor, *, gain: float) -> Tensor: ...

    def wants_more(x: Tensor, bias: Tensor) -> Tensor: ...

    def takes_all(*args: Any) -> Tensor: ...

    assert accepted_params("ours.fast", SMALL, takes_some) == ("x", "gain")
    assert accepted_params("ours.fast", SMALL,
                           direct(torch.mul, "x", Const(2.0), out="weight")) == ("x", "weight")
    for bad, problem in ((wants_more,
                          "wants a parameter 'bias'; lz.scaled has x, weight, limit, gain"),
                         (takes_all, "name the parameters of lz.scaled"),
                         (direct(torch.mul, "x", "y"), "wants 'y'")):
        with pytest.raises(RegistrationError, match=problem):
            accepted_params("ours.fast", SMALL, bad)


# plans

scores = st.builds(Score, *[st.floats(0, 1e9)] * 4,
                   st.sampled_from(["prior", "measured", "interpolated"]),
                   st.integers(0, 99), st.floats(0, 2), st.floats(0, 9))
transforms = st.builds(Transform, st.sampled_from(["contiguous", "cast", "layout"]),
                       st.text(max_size=6),
                       st.integers(0))
reasons = st.builds(Reason, st.sampled_from(Code), scalars,
                    st.lists(scalars, max_size=3).map(tuple),
                    st.text(max_size=6))
names = st.text(min_size=1, max_size=8)
plans = st.builds(
    Plan, names,
    st.dictionaries(names, st.one_of(scalars, st.lists(st.text(), max_size=3).map(tuple)),
                    max_size=5),
    st.lists(st.builds(Step, names, scores, st.lists(transforms, max_size=2).map(tuple),
                       st.integers(0),
                       st.text(max_size=9)), max_size=3).map(tuple),
    st.lists(st.builds(Rejected, names, st.lists(reasons, max_size=3).map(tuple)),
             max_size=3).map(tuple),
    st.text(max_size=16), st.text(max_size=8), st.booleans())


@settings(deadline=None)
@given(plans)
def test_a_plan_survives_json(plan):
    back = Plan.from_json(through_json(plan.to_json()))
    assert back == plan
    assert back.from_cache == plan.from_cache          # left out of ==, kept by JSON
    assert back.kernel == plan.kernel and str(back) == str(plan)


def test_a_plan_says_how_many_bytes_its_choice_moves_first():
    step = Step("a.b", Score(1.0, 1.0),
                (Transform("contiguous", "x", 100), Transform("layout", "bshd")))
    plan = Plan("scaled", {},
                (step, Step("c.d", Score(2.0, 2.0), (Transform("cast", "float16", 7),))), ())
    assert plan.to_json()["transform_bytes"] == 100
    assert "contiguous(x), layout(bshd)" in str(plan)
    empty = Plan("scaled", {}, (), (Rejected("a.b", (Reason(Code.LZ_DISABLED),)),))
    assert not empty and empty.kernel is None and empty.to_json()["transform_bytes"] == 0
    assert empty.why_not("a.b")[0].code is Code.LZ_DISABLED and empty.why_not("c.d") == ()


# devices, policy rules

def test_a_device_survives_json():
    cpu = Device("cpu", 0, "a cpu", "intel", isa=("avx2", "avx512f"), cores=8, total_memory=1 << 34,
                 torch_version="2.8.0")
    gpu = Device("cuda", 1, "a gpu", "nvidia", sm=90, gpu_generation="hopper",
                 tensor_core_generation=4, supports_bf16=True, supports_fp8=True,
                 runtime_version="12.8")
    for one in (cpu, gpu):
        back = Device.from_json(through_json(one.to_json()))
        assert back == one and back.signature == one.signature and back.facts() == one.facts()


@pytest.mark.parametrize("rule", [
    PolicyRule.of("deny", "flash_attn.*"),
    PolicyRule.of("lock", ["torch.*", "reference.*"], ["attention", "rms_*"], {
        "head_dim": "> 128", "dtype": ["float16", "bfloat16"], "device": "cu*", "softcap": None,
        "seq_k": "512..4096"},
        origin="policy.yaml:3"),
    PolicyRule.of("boost", "torch.*", factor=1.5, expires_at=12.5),
], ids=["plain", "conditions", "boost"])
def test_a_policy_rule_survives_json(rule):
    assert PolicyRule.from_json(through_json(rule.to_json())) == rule


# frozen

FROZEN = [
    (Reason(Code.LZ_DISABLED), "got", 1), (at_most("width", 8), "value", 9),
    (any_of(at_most("width", 8)), "rules", ()),
    (when(on("grad"), at_most("width", 8)), "then", None), (SMALL, "exact", ("width",)),
    (FULL, "requires", ()), (Plan("scaled", {}, (), ()), "steps", (1,)),
    (Step("a.b", Score(1.0, 1.0)), "kernel", "c.d"),
    (Score(1.0, 1.0), "total_us", 0.0), (Transform("cast", "float16"), "bytes", 1),
    (Rejected("a.b", ()), "reasons", ()), (Device("cpu", 0, "a cpu", "intel"), "sm", 90),
    (Generation("hopper", 90, 99), "fp8", True),
    (PolicyRule.of("deny", "a.b"), "factor", 2.0), (parse_when({"head_dim": 8})[0], "value", 9),
    (Fallback("attention", "a.b"), "kernel", "c.d"), (SMALL.tolerance, "times_eager", 9.0),
    (SMALL.params[0], "kind", "int"), (direct(torch.mul, "x"), "args", ()),
]


@pytest.mark.parametrize(("value", "field", "new"), FROZEN,
                         ids=[type(v).__name__ for v, _, _ in FROZEN])
def test_nothing_changes_once_made(value, field, new):
    with pytest.raises(AttributeError):        # a frozen dataclass or a named tuple
        setattr(value, field, new)
    changed = value._replace if isinstance(value, tuple) else partial(replace, value)
    assert changed(**{field: getattr(value, field)}) is not value
