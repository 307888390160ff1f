"""The policy: settings, rules, layers, and what they decide. No file, no clock, no device."""

from __future__ import annotations

import itertools
import json
from dataclasses import FrozenInstanceError, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layerzero.selection import isolation
from layerzero.selection.conditions import Like, parse_when
from layerzero.selection.policy import (
    ALWAYS,
    LAYERS,
    SETTINGS,
    Layer,
    Policy,
    PolicyRule,
    suggest,
    validate_setting,
)
from layerzero.spec.errors import ConfigError
from layerzero.spec.reason import Code
from layerzero.spec.rules import Rule

FACTS = {
    "device": "cuda", "dtype": "bfloat16", "head_dim": 128, "seq_q": 1, "seq_k": 2048,
    "is_causal": True, "dropout_p": 0.5, "softcap": None, "layout": "bhsd",
    "isa": ("avx2", "avx512f"), "sm": 90, "torch_version": "2.8.0",
}
KERNELS = ("torch.sdpa_math", "torch.sdpa_flash", "flash_attn.v2", "flashinfer.single",
           "reference.attention")
steady = settings(deadline=None)


def rule(action, kernels, ops="*", when=None, **rest):
    return PolicyRule.of(action, kernels, ops, when, **rest)


def policy(**layers):
    """`policy(file=[rules], call={settings})`."""
    return Policy(tuple(Layer(name, content) if isinstance(content, dict)
                        else Layer(name, {}, tuple(content))
                        for name, content in layers.items()))


def accepted(p, op="attention", facts=FACTS):
    return [k for k in KERNELS if p.verdict(k, op, facts) is None]


# settings

@pytest.mark.parametrize(("name", "inputs", "want"), [
    ("strict_mode", True, True), ("strict_mode", "on", True), ("strict_mode", "No", False),
    ("strict_mode", 1, True), ("strict_mode", " 0 ", False), ("native", "false", False),
    ("cache_size", 10, 10), ("cache_size", "10", 10),
    ("memory_headroom", None, None), ("memory_headroom", "none", None),
    ("memory_headroom", 1 << 40, 1 << 40), ("memory_headroom_fraction", 1, 1.0),
    ("memory_headroom_fraction", "0.5", 0.5), ("cache_ttl", "60", 60.0),
    ("cache_ttl", "Null", None), ("policy_poll", 0, 0.0),
    ("log_level", "DEBUG", "debug"), ("perfdb", "/data/My File.db", "/data/My File.db"),
])
def test_a_valid_setting_comes_back_in_its_own_type(name, inputs, want):
    got = validate_setting(name, inputs)
    assert got == want and type(got) is type(want)


@pytest.mark.parametrize(("name", "inputs", "wanted"), [
    *(("strict_mode", bad, "true or false") for bad in ("maybe", 2, None, [])),
    *(("cache_size", bad, "a whole number >= 1") for bad in (0, 1.5, True, "many", None)),
    ("memory_headroom", -1, "a whole number >= 0 or none"), ("memory_headroom", "2GB", "or none"),
    ("memory_headroom_fraction", 1.5, "a number from 0 to 1"),
    ("memory_headroom_fraction", "nan", "a number"),
    ("breaker_cooldown", float("inf"), "a number >= 0"),
    ("breaker_cooldown", 10 ** 400, "a number >= 0"),
    ("breaker_threshold", 0, ">= 1"), ("cache_ttl", -1, ">= 0 or none"),
    ("policy_poll", "often", "a number >= 0"),
    ("log_level", "loud", "one of debug, info, warning, error, critical"),
    ("log_level", 10, "one of debug"),
    ("perfdb", 5, "text"),
])
def test_a_bad_setting_says_what_was_wanted_and_what_came(name, inputs, wanted):
    with pytest.raises(ConfigError) as e:
        validate_setting(name, inputs)
    assert wanted in str(e.value) and name in str(e.value) and repr(inputs) in str(e.value)


def test_an_unknown_setting_names_the_nearest_or_all():
    with pytest.raises(ConfigError,
                       match="unknown setting 'strict_mod'; did you mean 'strict_mode'"):
        validate_setting("strict_mod", True)
    with pytest.raises(ConfigError, match=r"known are allow_adaptation, .*strict_mode"):
        validate_setting("xyzzy", True)
    with pytest.raises(ConfigError, match="did you mean 'cache_size'"):
        Policy().setting("cache_sizes")
    assert suggest("lok", ("lock", "deny")) == "; did you mean 'lock'?"


def test_every_default_is_valid_and_documented():
    for name, setting in SETTINGS.items():
        assert validate_setting(name, setting.default) == setting.default
        assert setting.doc and "\n" not in setting.doc
        assert Policy().setting(name) == setting.default


@steady
@given(st.sampled_from(sorted(SETTINGS)), st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(),
    st.lists(st.integers())))
def test_any_value_is_coerced_or_refused_with_a_config_error(name, value):
    try:
        got = validate_setting(name, value)
    except ConfigError:
        return
    assert validate_setting(name, got) == got      # coercing twice changes nothing
    assert got is None or type(got) is SETTINGS[name].type


# conditions

@pytest.mark.parametrize(("when", "holds"), [
    ({"head_dim": "> 128"}, False), ({"head_dim": "> 127"}, True), ({"head_dim": ">= 128"}, True),
    ({"head_dim": ">=129"}, False), ({"head_dim": "< 128"}, False), ({"head_dim": "<129"}, True),
    ({"head_dim": "<= 128"}, True), ({"head_dim": "<= 127"}, False), ({"head_dim": " != 4 "}, True),
    ({"head_dim": "!= 128"}, False), ({"head_dim": "== 128"}, True), ({"head_dim": "== 64"}, False),
    ({"head_dim": 128}, True), ({"head_dim": 64}, False),
    ({"head_dim": [64, 128]}, True), ({"head_dim": [64, 96]}, False),
    ({"seq_k": "512..4096"}, True), ({"seq_k": "2048 .. 2048"}, True),
    ({"seq_k": "2049..4096"}, False), ({"seq_k": "1..2047"}, False),
    ({"dropout_p": "> 0"}, True), ({"dropout_p": "> 0.5"}, False), ({"dropout_p": "< 1"}, True),
    ({"dropout_p": "0.1..0.6"}, True), ({"dropout_p": "> 1e-3"}, True),
    ({"is_causal": True}, True), ({"is_causal": False}, False), ({"is_causal": "== true"}, True),
    ({"is_causal": "!= true"}, False),
    ({"dtype": "bfloat16"}, True), ({"dtype": "float16"}, False),
    ({"dtype": ["float16", "bfloat16"]}, True), ({"dtype": "!= float16"}, True),
    ({"dtype": "!= bfloat16"}, False), ({"dtype": "*float16"}, True), ({"dtype": "float*"}, False),
    ({"dtype": ["float32", "bf*"]}, True), ({"device": "cu*"}, True), ({"device": "cud?"}, True),
    ({"device": "[cx]*"}, True), ({"device": "CU*"}, False),
    ({"isa": "avx512f"}, True), ({"isa": "avx512*"}, True), ({"isa": "amx*"}, False),
    ({"isa": ["amx", "avx2"]}, True),
    # an absent value is met by null alone
    ({"softcap": None}, True), ({"softcap": "== null"}, True), ({"softcap": "!= null"}, False),
    ({"softcap": "> 0"}, False), ({"softcap": "< 10"}, False), ({"softcap": "0..10"}, False),
    ({"softcap": 30}, False), ({"softcap": [None, 30]}, True), ({"softcap": "!= 30"}, True),
    ({"softcap": "a*"}, False), ({"head_dim": None}, False), ({"head_dim": "!= null"}, True),
    # several facts: all of them
    ({"head_dim": 128, "dtype": "bfloat16"}, True), ({"head_dim": 128, "dtype": "float16"}, False),
    # facts that the op does not have, or of another type
    ({"page_size": 16}, False), ({"page_size": "!= 16"}, False), ({"page_size": None}, False),
    ({"page*": "x*"}, False), ({"layout": "> 3"}, False), ({"isa": "> 3"}, False),
    ({"head_dim": "12*"}, False), ({"torch_version": "2.8.*"}, True),
])
def test_conditions(when, holds):
    assert rule("deny", "torch.*", when=when).matches("attention", FACTS) is holds


def test_numbers_and_membership_are_spec_rules_that_the_key_can_read():
    tests = parse_when({"seq_k": "512..4096", "head_dim": "> 64", "dtype": ["float16", "bfloat16"],
                        "device": "cu*"})
    assert [type(t) for t in tests].count(Like) == 1
    plain = [(t.fact, t.test, t.value) for t in tests if isinstance(t, Rule)]
    assert plain == [
        ("dtype", "in", ("float16", "bfloat16")),
        ("head_dim", "present", None), ("head_dim", "ge", 64), ("head_dim", "ne", 64),
        ("seq_k", "present", None), ("seq_k", "ge", 512), ("seq_k", "le", 4096)]
    assert all(isinstance(leaf, Rule) for t in tests for leaf in t.leaves())
    assert parse_when({"a": 1, "b": 2}) == parse_when({"b": 2, "a": 1})


@pytest.mark.parametrize(("value", "message"), [
    ("> big", "a comparison wants a number, got 'big'"), (">", "wants a number, got ''"),
    ("<= true", "wants a number"), ("> 1e999", "wants a number"),
    ("> " + "9" * 400, "wants a number"), ("4096..512", "is empty; write the smaller number first"),
    ("!= cu*", "'!=' takes one plain value"), ("!=", "'!=' takes one plain value"),
    ("== ", "wants text"), ([], "an empty list matches nothing"), (["cu*", 3], "do not mix"),
    *((bad, "a list takes plain values") for bad in (["> 3"], [1, "2..3"])),
    *((bad, "wants text") for bad in ("", {}, [[1]], float("nan"))),
])
def test_a_condition_that_cannot_be_read_is_refused(value, message):
    with pytest.raises(ConfigError) as e:
        parse_when({"head_dim": value})
    assert str(e.value).startswith("head_dim: ") and message in str(e.value)


@pytest.mark.parametrize(("fact", "value"), [
    ("torch_version", ">= 2.9"), ("cuda_version", 12.8), ("dtype", "> 3"), ("device", [0, "cuda"]),
    ("q.dtype", "!= 3")])
def test_a_number_for_a_fact_that_is_text_is_refused(fact, value):
    with pytest.raises(ConfigError, match=f"{fact} is text and never equals a number"):
        parse_when({fact: value})
    with pytest.raises(ConfigError, match="'!=' takes one plain value"):
        parse_when({"isa": "!= avx2"})


@steady
@given(st.integers(-10**6, 10**6), st.sampled_from([">", ">=", "<", "<=", "!=", "=="]),
       st.integers(-10**6, 10**6) | st.floats(-1e6, 1e6))
def test_comparisons_are_those_of_python(n, sign, value):
    want = {">": value > n, ">=": value >= n, "<": value < n, "<=": value <= n, "!=": value != n,
            "==": value == n}
    assert rule("deny", "a.b", when={"x": f"{sign} {n}"}).matches("op", {"x": value}) is want[sign]


@steady
@given(st.text() | st.lists(st.text() | st.none() | st.integers(), max_size=3) | st.floats()
       | st.integers(),
       st.text() | st.none() | st.integers() | st.floats() | st.tuples(st.text()))
def test_any_condition_is_refused_when_read_or_never_fails_when_matched(value, fact):
    try:
        tests = parse_when({"x": value})
    except ConfigError:
        return
    r = PolicyRule("deny", ("a.b",), when=tests)
    assert r.matches("op", {"x": fact}) in (True, False)
    assert r.matches("op", {}) is False
    assert PolicyRule.from_json(json.loads(json.dumps(r.to_json()))) == r


# rules

@pytest.mark.parametrize(("action", "kernels", "rest", "message"), [
    ("forbid", "torch.*", {}, "unknown action 'forbid'"),
    ("dny", "torch.*", {}, "did you mean 'deny'"),
    ("deny", (), {}, "deny names no kernel"),
    ("deny", "torch.*", {"ops": ()}, "deny names no op"),
    ("deny", "torch/*", {}, "a kernel pattern has a-z"),
    ("deny", "", {}, "a kernel pattern has a-z"),
    ("deny", (5,), {}, "a kernel pattern has a-z"),
    ("deny", "torch.*", {"ops": "a b"}, "an? op pattern has a-z"),
    ("lock", "flash attn?!", {}, "a kernel pattern has a-z"),
    ("boost", "torch.*", {"factor": 0}, "factor must be a number > 0, got 0"),
    ("boost", "torch.*", {"factor": -1.5}, "factor must be a number > 0"),
    ("boost", "torch.*", {"factor": float("nan")}, "factor must be a number > 0"),
    ("boost", "torch.*", {"factor": "2"}, "factor must be a number > 0"),
    ("boost", "torch.*", {"factor": 10 ** 400}, "factor must be a number > 0"),
    ("deny", "torch.*", {"factor": 2.0}, "deny takes no factor"),
])
def test_a_rule_that_makes_no_sense_is_refused(action, kernels, rest, message):
    with pytest.raises(ConfigError, match=message):
        rule(action, kernels, **rest)


def test_a_rule_matches_ops_and_kernels_by_wildcard():
    r = rule("deny", ["flash_attn.*", "torch.sdpa_flash"], ["*attention", "rms_norm"])
    assert [op for op in ("attention", "varlen_attention", "rms_norm", "layer_norm")
            if r.matches(op, {})] == [
        "attention", "varlen_attention", "rms_norm"]
    assert [k for k in KERNELS if r.covers(k)] == ["torch.sdpa_flash", "flash_attn.v2"]


def test_a_rule_is_immutable_hashable_readable_and_survives_json():
    r = rule("boost", "torch.*", "attention", {"head_dim": "> 128", "device": "cu*"}, factor=2,
             origin="x.yaml:3",
             expires_at=12.5)
    assert r.factor == 2.0 and hash(r) == hash(replace(r)) and {r: 1}[replace(r)] == 1
    assert PolicyRule.from_json(json.loads(json.dumps(r.to_json()))) == r
    assert str(r).startswith("boost torch.* x2 for attention when device like cu*")
    with pytest.raises(FrozenInstanceError):
        r.action = "deny"  # type: ignore[misc]


GOOD = rule("deny", "torch.*", when={"head_dim": "> 3"}).to_json()


@pytest.mark.parametrize("broken", [
    *({k: v for k, v in GOOD.items() if k != gone} for gone in GOOD),
    {**GOOD, "action": "x"}, {**GOOD, "kernels": 3}, {**GOOD, "when": [{}]}, {**GOOD, "when": [3]},
    {**GOOD, "when": [{"fact": "x", "test": "near", "value": 1, "code": "NOT_INSTALLED"}]},
    {**GOOD, "when": [{"fact": "x", "test": "eq", "value": 1, "code": "NO_SUCH_CODE"}]},
    {**GOOD, "when": [{"any_of": []}]}, [], "text",
])
def test_a_broken_rule_in_json_is_refused(broken):
    with pytest.raises(ConfigError):
        PolicyRule.from_json(broken)


def test_names_of_ops_and_facts_can_be_checked():
    ops = {"attention": {"head_dim", "dtype"}, "rms_norm": {"hidden", "dtype"}}
    for good in (rule("deny", "torch.*"), rule("deny", "torch.*", "att*", {"head_dim": "> 3"}),
                 rule("deny", "torch.*", when={"hidden": 64, "dtype": "float16"})):
        good.check(ops)
    with pytest.raises(ConfigError, match="no op matches 'attenton'; did you mean 'attention'"):
        rule("deny", "torch.*", "attenton").check(ops)
    with pytest.raises(ConfigError,
                       match="no op of attention has the fact 'head_dims'; did you mean 'head_dim'"):
        rule("deny", "torch.*", "attention", {"head_dims": 3}).check(ops)
    with pytest.raises(ConfigError, match="has the fact 'hidden'"):
        rule("deny", "torch.*", "attention", {"hidden": 3}).check(ops)


# layers

def test_all_six_layers_in_order_for_settings():
    full = Policy(tuple(Layer(name, {"cache_size": 10 + rank}) for rank, name in enumerate(LAYERS)))
    for rank, name in enumerate(LAYERS):
        assert full.setting("cache_size") == 10 + rank
        full = full.without(name)
    assert full.setting("cache_size") == SETTINGS["cache_size"].default


@pytest.mark.parametrize(("high", "low"), list(itertools.combinations(LAYERS, 2)))
def test_of_any_two_layers_the_higher_decides(high, low):
    lock_a, lock_b = rule("lock", "torch.sdpa_math", origin=high), rule("lock", "flash_attn.v2",
                                                                        origin=low)
    both = policy(**{low: [lock_b], high: [lock_a]})       # given in the wrong order on purpose
    assert both.lock("attention", FACTS) is lock_a and accepted(both) == ["torch.sdpa_math"]
    over = policy(**{high: [rule("lock", "flash_attn.v2")], low: [rule("deny", "flash_attn.*")]})
    assert accepted(over) == ["flash_attn.v2"]
    under = policy(**{high: [rule("deny", "flash_attn.*")], low: [rule("lock", "flash_attn.v2")]})
    # named and forbidden: nothing serves in its place
    assert accepted(under) == []
    both = policy(**{low: {"strict_mode": True}, high: {"strict_mode": False}})
    assert both.setting("strict_mode") is False


def test_layers_are_immutable_checked_and_given_once():
    with pytest.raises(ConfigError, match="unknown policy layer 'flie'; did you mean 'file'"):
        Layer("flie")
    with pytest.raises(ConfigError, match="did you mean 'strict_mode'"):
        Layer("file", {"strictmode": True})
    with pytest.raises(ConfigError, match="may be given once"):
        Policy((Layer("file"), Layer("file")))
    source = {"strict_mode": "yes"}
    layer = Layer("call", source)
    source["strict_mode"] = "no"
    assert layer.settings["strict_mode"] is True
    with pytest.raises(TypeError):
        layer.settings["strict_mode"] = False  # type: ignore[index]
    assert {layer: 1}[Layer("call", {"strict_mode": True})] == 1
    assert {Policy((layer,)): 1}[Policy((Layer("call", {"strict_mode": 1}),))] == 1


def test_with_layer_replaces_and_inserts_at_its_rank_and_leaves_the_old_policy_alone():
    base = policy(file={"cache_size": 1}, call={"cache_size": 5})
    more = base.with_layer(Layer("environment", {"cache_size": 2})).with_layer(Layer("call", {}))
    assert [layer.name for layer in more.layers] == ["call", "environment", "file"]
    assert more.setting("cache_size") == 2 and base.setting("cache_size") == 5
    assert more.without("environment").setting("cache_size") == 1
    assert base.without("context") == base


# verdicts

@pytest.mark.parametrize(("rules", "want"), [
    ([], list(KERNELS)),
    ([("lock", "flashinfer.*")], ["flashinfer.single"]),
    ([("deny", "torch.*")], ["flash_attn.v2", "flashinfer.single", "reference.attention"]),
    ([("deny", "reference.*")], list(KERNELS[:4])),
    ([("allow", "torch.*")], ["torch.sdpa_math", "torch.sdpa_flash", "reference.attention"]),
    ([("allow", "torch.sdpa_math"), ("allow", "flash_attn.*")],
     ["torch.sdpa_math", "flash_attn.v2", "reference.attention"]),
    ([("allow", "torch.*"), ("deny", "torch.sdpa_math")],
     ["torch.sdpa_flash", "reference.attention"]),
    ([("deny", "torch.*"), ("lock", "torch.sdpa_math")], ["torch.sdpa_math"]),
    ([("allow", "flash_attn.*"), ("lock", "torch.sdpa_math")], ["torch.sdpa_math"]),
    ([("allow", "no.such")], ["reference.attention"]),
    ([("lock", "no.such")], []),
    # the first that matches
    ([("lock", "torch.sdpa_math"), ("lock", "flash_attn.v2")], ["torch.sdpa_math"]),
    ([("boost", "torch.*")], list(KERNELS)),
])
def test_in_one_layer_lock_beats_deny_beats_allow(rules, want):
    assert accepted(policy(file=[rule(*r) for r in rules])) == want


def test_the_reasons_name_the_rule():
    p = policy(file=[rule("lock", "torch.sdpa_math", "attention", origin="policy.yaml:3")],
               environment=[rule("deny", "flash_attn.*", origin="LAYERZERO_DENY")])
    locked = p.verdict("flashinfer.single", "attention", FACTS)
    assert (locked.code, locked.want, locked.got) == (Code.LOCKED_TO_ANOTHER, ("torch.sdpa_math",),
                                                      "policy.yaml:3")
    assert locked.message == "policy.yaml:3 locks this call to torch.sdpa_math"
    denied = p.verdict("flash_attn.v2", "attention", FACTS)
    assert (denied.code, denied.got) == (Code.DENIED_BY_POLICY, "LAYERZERO_DENY")
    only = policy(call=[rule("allow", "torch.*", origin="a"),
                        rule("allow", "triton.*", origin="b")])
    reason = only.verdict("flash_attn.v2", "attention", FACTS)
    assert (reason.code, reason.want, reason.got) == (Code.NOT_ALLOWED_BY_POLICY,
                                                      "torch.*, triton.*", "a, b")
    assert reason.message == "not among torch.*, triton.*, allowed by a, b"


def test_a_call_overrides_a_denial_in_the_file():
    denied = policy(file=[rule("deny", "flash_attn.*")])
    assert denied.verdict("flash_attn.v2", "attention", FACTS).code is Code.DENIED_BY_POLICY
    for action in ("lock", "allow"):
        over = denied.with_layer(Layer("call", {}, (rule(action, "flash_attn.v2"),)))
        assert over.verdict("flash_attn.v2", "attention", FACTS) is None
    unrelated = denied.with_layer(Layer("call", {}, (rule("allow", "flash_attn.v2", "rms_norm"),)))
    assert unrelated.verdict("flash_attn.v2", "attention", FACTS).code is Code.DENIED_BY_POLICY


def test_an_allow_list_sets_lower_locks_aside_and_the_lock_says_so_too():
    p = policy(call=[rule("allow", "flash_attn.*")], file=[rule("lock", "torch.sdpa_math")])
    assert p.lock("attention", FACTS) is None
    assert accepted(p) == ["flash_attn.v2", "reference.attention"]
    assert ALWAYS == ("reference.*",)
    below = policy(call=[rule("allow", "flash_attn.*")], file=[rule("deny", "reference.*")])
    # exempt from allow lists, not from a denial
    assert accepted(below) == ["flash_attn.v2"]
    elsewhere = policy(call=[rule("allow", "flash_attn.*", when={"head_dim": 64})],
                       file=[rule("lock", "torch.sdpa_math")])
    assert accepted(elsewhere) == ["torch.sdpa_math"]


def test_causal_attention_locks_to_one_library_and_other_calls_do_not():
    p = policy(file=[rule("lock", "flashinfer.*", "attention", {"is_causal": True})])
    assert accepted(p) == ["flashinfer.single"]
    assert accepted(p, facts={**FACTS, "is_causal": False}) == list(KERNELS)
    assert accepted(p, op="varlen_attention") == list(KERNELS)
    assert (p.lock("attention", {**FACTS, "is_causal": False}) is None
            and p.lock("rms_norm", {}) is None)


@pytest.mark.parametrize(
    ("action", "kernels"), [("deny", "torch.*"), ("allow", "flash_attn.*"),
                            ("lock", "flash_attn.v2")])
def test_a_rule_decides_only_where_its_conditions_hold(action, kernels):
    p = policy(file=[rule(action, kernels, "att*", {"head_dim": "> 128"})])
    assert "torch.sdpa_math" not in accepted(p, facts={**FACTS, "head_dim": 129})
    assert accepted(p) == accepted(p, "rms_norm", {**FACTS, "head_dim": 129}) == list(KERNELS)


def test_a_special_lock_stands_before_a_general_one():
    p = policy(file=[rule("lock", "torch.sdpa_math", when={"head_dim": "> 128"}),
                     rule("lock", "flash_attn.v2")])
    assert accepted(p) == ["flash_attn.v2"]
    assert accepted(p, facts={**FACTS, "head_dim": 256}) == ["torch.sdpa_math"]


def test_boosts_of_all_layers_multiply():
    p = policy(file=[rule("boost", "torch.*", factor=2.0),
                     rule("boost", "torch.sdpa_math", factor=0.5)],
               call=[rule("boost", "*", "attention", {"head_dim": ">= 128"}, factor=3.0)])
    assert p.boost("torch.sdpa_flash", "attention", FACTS) == 6.0
    assert p.boost("torch.sdpa_math", "attention", FACTS) == 3.0
    assert p.boost("torch.sdpa_math", "attention", {"head_dim": 64}) == 1.0
    assert (p.boost("flash_attn.v2", "rms_norm", FACTS) == 1.0
            and Policy().boost("a.b", "c", {}) == 1.0)
    extreme = policy(file=[rule("boost", "*", when={"head_dim": f">= {n}"}, factor=1e-300)
                           for n in (1, 2)])
    assert extreme.boost("a.b", "attention", FACTS) > 0


class _Facts(dict):
    """Remembers what was asked."""

    def __init__(self, *args):
        super().__init__(*args)
        self.read = set()

    def __getitem__(self, key):
        self.read.add(key)
        return super().__getitem__(key)


def test_leaves_are_those_of_the_op_once_and_cover_every_fact_that_is_read():
    p = policy(file=[rule("deny", "torch.*", "attention", {"head_dim": "> 128", "device": "cu*"}),
                     rule("boost", "torch.*", "*", {"head_dim": "> 128", "dtype": "bfloat16"},
                          factor=2),
                     rule("deny", "torch.*", "rms_norm", {"hidden": 64})],
               call=[rule("lock", "torch.*", "attention", {"seq_k": "< 4"})])
    leaves = list(p.leaves("attention"))
    assert len(leaves) == len(set(leaves)) and "hidden" not in {leaf.fact for leaf in leaves}
    assert ("head_dim", "ge", 128) in {(leaf.fact, leaf.test, leaf.value) for leaf in leaves}
    facts = _Facts(FACTS)
    for kernel in KERNELS:
        p.verdict(kernel, "attention", facts)
        p.boost(kernel, "attention", facts)
    p.lock("attention", facts)
    assert facts.read <= {leaf.fact for leaf in leaves}
    assert {leaf.fact for leaf in p.leaves("rms_norm")} == {"head_dim", "dtype", "hidden"}
    assert {leaf.fact for leaf in p.leaves("rms_norm", {"dtype", "hidden"})} == {"hidden"}
    assert list(Policy().leaves("attention")) == []


@steady
@given(st.integers(0, 300), st.integers(0, 300),
       st.sampled_from(["> 128", ">= 128", "< 128", "<= 128", "!= 128", "64..200"]))
def test_calls_that_no_leaf_tells_apart_get_the_same_verdict(a, b, text):
    p = policy(file=[rule("deny", "torch.*", when={"head_dim": text})])
    same = all((leaf.check({"head_dim": a}) is None) == (leaf.check({"head_dim": b}) is None)
               for leaf in p.leaves("attention"))
    verdicts = {p.verdict("torch.sdpa_math", "attention", {"head_dim": n}) is None for n in (a, b)}
    assert not same or len(verdicts) == 1


# time

def test_time_boxed_layers_and_rules_run_out():
    forever, short = rule("deny", "torch.*"), rule("deny", "flash_attn.*", expires_at=50.0)
    p = Policy((Layer("context", {"strict_mode": True}, (), 100.0),
                Layer("file", {}, (short, forever))))
    assert p.next_deadline == 50.0 and p.at(49.9) is p
    later = p.at(50.0)
    assert (later.layers[1].rules == (forever,) and later.setting("strict_mode") is True
            and later.next_deadline == 100.0)
    last = later.at(100.0)
    assert ([layer.name for layer in last.layers] == ["file"]
            and last.setting("strict_mode") is False)
    assert last.next_deadline is None and last.at(1e9) is last
    assert len({p.hash, later.hash, last.hash}) == 3
    assert p.at(1e9) == last                          # both at once


# the hash

settings_strategy = st.fixed_dictionaries({}, optional={
    "strict_mode": st.booleans(), "cache_size": st.integers(1, 100),
    "log_level": st.sampled_from(["info", "error"]),
    "cache_ttl": st.none() | st.floats(0, 100)})
rule_strategy = st.builds(
    rule, st.sampled_from(["lock", "allow", "deny"]), st.sampled_from(["torch.*", "flash_attn.v2"]),
    st.sampled_from(["*", "attention"]),
    st.sampled_from([None, {"head_dim": "> 128"}, {"dtype": "bf*"}]))


@steady
@given(settings_strategy, st.lists(rule_strategy, max_size=3), st.randoms())
def test_the_hash_is_stable_under_reordering_of_settings_and_layers(values, rules, random):
    shuffled = list(values.items())
    random.shuffle(shuffled)
    a = Policy((Layer("file", values, tuple(rules)), Layer("call", {"native": False})))
    b = Policy((Layer("call", {"native": False}), Layer("file", dict(shuffled), tuple(rules))))
    assert a.hash == b.hash and len(a.hash) == 16 and int(a.hash, 16) >= 0


@steady
@given(st.lists(rule_strategy, max_size=3), st.lists(rule_strategy, max_size=3))
def test_the_hash_changes_when_a_rule_changes(first, second):
    a, b = policy(file=first), policy(file=second)
    assert (a.hash == b.hash) == (first == second)


def test_the_hash_names_what_is_decided_and_not_where_or_until_when():
    base = policy(file=[rule("deny", "torch.*")])
    assert policy(file=[rule("deny", "torch.*", origin="elsewhere:9",
                             expires_at=3.0)]).hash == base.hash
    assert Policy((Layer("file", {}, base.layers[0].rules, 3.0), Layer("call"))).hash == base.hash
    assert policy(environment=[rule("deny", "torch.*")]).hash != base.hash
    assert policy(file=[rule("boost", "a.b", factor=2)]).hash != policy(
        file=[rule("boost", "a.b", factor=3)]).hash
    # sha256 of "[]": the same in every process
    assert Policy().hash == "4f53cda18c2baa0c"
    assert json.loads(json.dumps(base.to_json()))["hash"] == base.hash


@pytest.mark.parametrize(("written", "kept"), [
    ("auto", "*=auto"), ("", ""), ("a.*=worker , b.c = auto", "a.*=worker,b.c=auto"),
    (["xformers.* = worker: /opt/x y/python", "auto"],
     "xformers.*=worker:/opt/x y/python,*=auto")])
def test_isolation_is_a_list_of_patterns_modes_and_interpreters(written, kept):
    assert validate_setting("isolation", written) == kept
    assert validate_setting("isolation", kept) == kept


@pytest.mark.parametrize("wrong", ["worker", "a.*=thread", "A.*=worker", ["a.*=worker:/x,y"], 3])
def test_isolation_that_says_nothing_is_refused(wrong):
    with pytest.raises(ConfigError, match="PATTERN=worker"):
        validate_setting("isolation", wrong)


def test_the_first_entry_of_isolation_that_covers_a_kernel_decides():
    first, second = isolation.parse("torch.*=worker:/opt/python,*=auto")
    assert (first.mode, first.python) == ("worker", "/opt/python") and first.covers("torch.x")
    assert not first.covers("other.x") and second.covers("other.x") and second.python == ""
