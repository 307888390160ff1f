"""Laws that hold whatever is drawn: contexts nest and end, policies merge, sizes keep their order,
layouts do not matter, a key tells apart what a decision depends on, and every reason can be said,
written and read.
"""

from __future__ import annotations

import json
import random
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from helpers import emitted, world
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_calls import MAKERS, neighbour

import layerzero as lz
from layerzero.operate.inspection import dispatcher_of
from layerzero.selection.policy import LAYERS, SETTINGS, Layer, Policy, PolicyRule
from layerzero.spec.codec import decode
from layerzero.spec.errors import InvalidCall
from layerzero.spec.grid import bucket, bucket_bottom, bucket_label, bucket_top
from layerzero.spec.reason import Code, Reason
from layerzero.spec.rules import Condition, Rule
from layerzero.spec.rules.predicate import PREDICATES
from layerzero.world import context
from layerzero.world.config import programmatic_layer

__all__ = ["emitted", "world"]
steady = settings(deadline=None, max_examples=60, derandomize=True,
                  suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])

KERNELS = ("torch.sdpa_math", "torch.sdpa_flash", "torch.sdpa", "reference.attention")
said = st.fixed_dictionaries({}, optional={
    "strict_mode": st.booleans(), "deterministic": st.booleans(), "allow_adaptation": st.booleans(),
    "cache_size": st.integers(1, 9), "cache_ttl": st.none() | st.floats(0, 99)})


# Contexts.

@steady
@given(blocks=st.lists(st.tuples(said, st.sampled_from([None, *KERNELS])), max_size=6),
       leaves_by=st.integers(0, 2))
def test_a_context_holds_inside_and_what_was_before_holds_again(world, blocks, leaves_by):
    """However blocks are nested, and however they are left: at their end, by an error, or by
    several at once."""
    before = context.current.get()
    expected: dict[str, Any] = {}

    def inside(depth: int) -> None:
        outer = context.current.get()
        if depth == len(blocks):
            if leaves_by == 1:
                raise KeyError("out")
            return
        settings_here, kernel = blocks[depth]
        with lz.prefer(*((kernel,) if kernel else ()), **settings_here) as override:
            known = dict(expected)
            expected.update(settings_here)
            assert context.current.get() is override and override.context is not None
            assert dict(override.context.settings) == expected
            try:
                inside(depth + 1)
            finally:
                assert context.current.get() is override
                expected.clear()
                expected.update(known)
        assert context.current.get() is outer

    if leaves_by == 2:
        with ExitStack() as stack:
            for settings_here, kernel in blocks:
                stack.enter_context(lz.prefer(*((kernel,) if kernel else ()), **settings_here))
    else:
        try:
            inside(0)
        except KeyError:
            assert leaves_by == 1
    assert context.current.get() is before


@steady
@given(blocks=st.lists(said, max_size=4))
def test_the_same_words_are_the_same_override(world, blocks):
    """So what was remembered under it is found again."""
    results = []
    for _ in range(2):
        with ExitStack() as stack:
            results.append([stack.enter_context(lz.prefer(**words)) for words in blocks])
    assert all(a is b for a, b in zip(*results))


# Policies.

layer = st.builds(lambda name, words, kernels: Layer(name, words, tuple(
    PolicyRule(action, (k,), origin=name) for action, k in kernels)),
    st.sampled_from(LAYERS), said, st.lists(st.tuples(st.sampled_from(["deny", "allow", "lock"]),
                                                      st.sampled_from(KERNELS)), max_size=3))
layers = st.lists(layer, max_size=5, unique_by=lambda x: x.name)


@steady
@given(stacked=layers, rng=st.randoms(use_true_random=False))
def test_the_highest_layer_that_says_something_decides_it(stacked, rng):
    shuffled = rng.sample(stacked, len(stacked))
    policy = Policy(tuple(shuffled))
    ranked = sorted(stacked, key=lambda x: LAYERS.index(x.name))
    for name, setting in SETTINGS.items():
        wanted = next((x.settings[name] for x in ranked if name in x.settings), setting.default)
        assert policy.setting(name) == wanted
    assert policy.hash == Policy(tuple(stacked)).hash
    for kernel in KERNELS:
        assert policy.verdict(kernel, "attention",
                              {}) == Policy(tuple(ranked)).verdict(kernel, "attention", {})


@steady
@given(first=said, second=said, third=said)
def test_saying_more_is_associative_and_the_last_word_wins(first, second, third):
    one_by_one = programmatic_layer(programmatic_layer(programmatic_layer(None, first), second),
                                    third)
    together = programmatic_layer(programmatic_layer(None, first), {**second, **third})
    assert dict(one_by_one.settings) == dict(together.settings) == {**first, **second, **third}
    assert programmatic_layer(one_by_one, third) == one_by_one


@steady
@given(stacked=layers, lower=layer)
def test_a_layer_put_in_and_taken_out_leaves_what_was_there(stacked, lower):
    others = [x for x in stacked if x.name != lower.name]
    policy = Policy(tuple(others))
    assert policy.with_layer(lower).without(lower.name) == policy
    assert policy.with_layer(lower).with_layer(lower) == policy.with_layer(lower)


# Sizes.

@given(st.integers(0, 2**62), st.integers(0, 2**62))
def test_buckets_keep_the_order_of_sizes(a, b):
    low, high = sorted((a, b))
    assert bucket(low) <= bucket(high)
    assert (bucket(low) == bucket(high)) == (bucket_label(low) == bucket_label(high)) == (
        bucket_bottom(high) <= low <= high <= bucket_top(low))


# Reasons and rules.

scalar = st.none() | st.booleans() | st.integers(-2**62,
                                                 2**62) | st.floats(allow_nan=False) | st.text(
                                                     max_size=12)
value = scalar | st.lists(scalar, max_size=4).map(tuple)


@steady
@given(st.sampled_from(list(Code)), value, value, st.text(max_size=20))
def test_a_reason_is_said_written_and_read(code, want, got, fact):
    reason = Reason(code, want, got, fact)
    assert (str(reason).startswith(code.value)
            and "{" not in code.template.format(want="", got="", fact=""))
    assert decode(Reason, json.loads(json.dumps(reason.to_json())), "reason") == reason
    assert code.value in str(InvalidCall.of("attention", reason))


@steady
@given(st.sampled_from(sorted(PREDICATES)), st.integers(1, 64), st.none() | st.integers(-5, 200))
def test_a_rule_from_json_decides_alike(test, limit, got):
    rule = Rule("hidden", test, (limit, 3) if test in ("in", "not_in") else limit,
                Code.SHAPE_UNSUPPORTED)
    facts = {"hidden": (got,) if test == "has" else got}
    again = decode(Condition, json.loads(json.dumps(rule.to_json())), "condition")
    assert again == rule and again.check(facts) == rule.check(facts)
    reason = rule.check(facts)
    assert reason is None or reason.fact == "hidden"


# Keys.

@pytest.mark.filterwarnings("ignore:.*causal_align is not given")
@pytest.mark.parametrize("op", ["attention", "rms_norm"])
@steady
@given(rng=st.randoms(use_true_random=False), limit=st.integers(1, 200),
       fact=st.sampled_from(["batch", "rows"]))
def test_calls_that_get_different_answers_have_different_keys(world, op, rng, limit, fact):
    """Under any policy: the key holds whatever the decision read, also what only the policy asked
    for."""
    if fact not in lz.op(op).fact_names:
        fact = "head_dim" if op == "attention" else "hidden"
    with lz.prefer("reference", op=op, when={fact: f"<= {limit}"}):
        call = MAKERS[op](rng)
        near = neighbour(rng, call)
        dispatcher = dispatcher_of(op)
        dispatcher.ensure_world()
        keys, plans = [], []
        for args, kwargs in (call, near):
            try:
                plans.append([step.kernel for step in lz.explain(op, *args, **kwargs).steps])
            except InvalidCall as e:
                plans.append(list(e.codes))
            keys.append(dispatcher.key_of(*dispatcher.order_arguments(args, kwargs)))
        if plans[0] != plans[1] and None not in keys:
            assert keys[0] != keys[1]


# Layouts.

@steady
@given(sizes=st.tuples(*(st.integers(1, 5) for _ in range(3))), seq=st.integers(1, 9),
       dim=st.sampled_from([4, 8, 24]), group=st.integers(1, 3), causal=st.booleans(),
       order=st.permutations(range(4)), seed=st.integers(0, 99))
def test_attention_is_the_same_in_any_layout_and_any_memory(world, sizes, seq, dim, group, causal,
                                                            order, seed):
    batch, heads, more = sizes
    gen = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(batch, n, s, dim, generator=gen, dtype=torch.float64)
               for n, s in ((heads * group, seq), (heads, seq + more), (heads, seq + more)))

    def kept(t: torch.Tensor) -> torch.Tensor:
        """The same numbers, in memory that is laid out in another order of dimensions."""
        back = sorted(range(4), key=lambda i: order[i])
        return t.permute(*order).contiguous().permute(*back)

    options = {"is_causal": causal, "causal_align": "bottom_right" if causal else None}
    want = lz.attention(q, k, v, **options)
    other = lz.attention(*(kept(t) for t in (q, k, v)), **options)
    turned = lz.attention(*(t.transpose(1, 2) for t in (q, k, v)), layout="bshd", **options)
    torch.testing.assert_close(other, want, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(turned.transpose(1, 2), want, rtol=1e-10, atol=1e-10)


@steady
@given(st.integers(1, 6), st.integers(1, 40), st.integers(0, 99))
def test_rows_of_a_norm_do_not_know_each_other(world, rows, hidden, seed):
    """In any order, and one by one."""
    gen = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(rows, hidden, generator=gen,
                            dtype=torch.float64), torch.rand(hidden, dtype=torch.float64)
    order = random.Random(seed).sample(range(rows), rows)
    whole = lz.rms_norm(x, weight)
    torch.testing.assert_close(lz.rms_norm(x[order], weight), whole[order], rtol=1e-12, atol=1e-12)
    for i in range(rows):
        torch.testing.assert_close(lz.rms_norm(x[i:i + 1], weight)[0], whole[i], rtol=1e-12,
                                   atol=1e-12)
