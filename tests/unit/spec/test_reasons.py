"""The reason codes: the stable vocabulary in which every refusal is told."""

from __future__ import annotations

import json
import re
import string
from dataclasses import FrozenInstanceError

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import layerzero as lz
from layerzero.spec.codec import decode
from layerzero.spec.errors import InvalidCall, LayerZeroError
from layerzero.spec.reason import Category, Code, Reason, plain
from layerzero.spec.rules import AnyOf, Rule, any_of, when
from layerzero.world import snapshot as worlds

PLACEHOLDERS = {"want", "got", "fact"}

scalars = st.one_of(st.none(), st.booleans(), st.integers(),
                    st.floats(allow_nan=False, allow_infinity=False),
                    st.text())
values = st.one_of(scalars, st.lists(scalars, max_size=4).map(tuple))
reasons = st.builds(Reason, st.sampled_from(Code), values, values, st.text(max_size=20))


def fields_of(template):
    return {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}


def test_there_are_at_least_fifty_and_every_string_is_its_own():
    assert len(Code) >= 50
    # no alias: two names of one string would be merged by Enum
    assert len(Code) == len(Code.__members__)
    assert len({code.value for code in Code}) == len(Code)


@pytest.mark.parametrize("code", Code, ids=str)
def test_a_code_is_its_name_has_a_category_and_a_sentence(code):
    assert code.value == code.name == str(code)
    assert re.fullmatch(r"[A-Z][A-Z0-9_]*", code.value)
    assert isinstance(code.category, Category)
    assert code.template and fields_of(code.template) <= PLACEHOLDERS
    assert "\n" not in code.template + code.advice


@pytest.mark.parametrize("code", Code, ids=str)
def test_a_message_shows_all_that_its_template_names(code):
    message = Reason(code, "WANTED", "CAME", "FACT").message
    shown = {"want": "WANTED", "got": "CAME", "fact": "FACT"}
    for field in fields_of(code.template):
        assert shown[field] in message
    assert "{" not in message


def test_every_category_is_used():
    assert {code.category for code in Code} == set(Category)


@settings(deadline=None)
@given(reasons)
def test_json_keeps_a_reason_without_loss(reason):
    assert decode(Reason, json.loads(json.dumps(reason.to_json(), allow_nan=False)),
                  "reason") == reason


@settings(deadline=None)
@given(reasons)
def test_text_begins_with_the_code(reason):
    assert str(reason) == f"{reason.code.value}: {reason.message}"


def test_want_and_got_become_plain_values():
    reason = Reason(Code.DTYPE_UNSUPPORTED, ["float16", "bfloat16"], {"b", "a"}, "dtype")
    assert reason.want == ("float16", "bfloat16")
    # a set has no order: it is sorted, so that two runs agree
    assert reason.got == ("a", "b")
    assert Reason(Code.WRONG_TYPE, int, complex(1, 2)).got == "(1+2j)"
    assert plain(((1, 2), [3])) == ((1, 2), (3,))


def test_several_wanted_values_read_as_a_choice():
    assert Reason(Code.DTYPE_UNSUPPORTED, ("float16", "bfloat16"), "int8", "dtype").message == \
        "dtype must be one of float16, bfloat16, got int8"
    assert Reason(Code.DTYPE_UNSUPPORTED, ("float16",), "int8",
                  "dtype").message == "dtype must be float16, got int8"
    assert Reason(Code.DTYPE_UNSUPPORTED, "float16",
                  "int8").message == "it must be float16, got int8"


def test_braces_in_a_value_are_text():
    assert "{want}" in Reason(Code.KERNEL_FAILED, None, "RuntimeError: {want} {0}").message


@pytest.mark.parametrize("data", [{"code": "NO_SUCH_CODE"}, {"code": "no_such_code"}])
def test_an_unknown_code_is_refused(data):
    with pytest.raises(ValueError, match=data["code"]):
        decode(Reason, data, "reason")


def test_a_reason_is_frozen_and_hashable():
    reason = Reason(Code.SM_TOO_OLD, ">= 80", 75, "sm")
    with pytest.raises(FrozenInstanceError):
        reason.got = 80
    assert len({reason, Reason(Code.SM_TOO_OLD, ">= 80", 75, "sm")}) == 1


def test_an_error_carries_its_reasons_and_says_the_advice_once():
    first = Reason(Code.MIXED_DEVICES, "cpu", "cuda:0", "key")
    second = Reason(Code.MIXED_DEVICES, "cpu", "cuda:0", "value")
    error = InvalidCall.of("attention", first, second)
    assert isinstance(error, LayerZeroError) and isinstance(error, ValueError)
    assert error.codes == (Code.MIXED_DEVICES,) * 2
    assert str(error).count("move the tensors to one device") == 1
    assert "key is cuda:0" in str(error) and "[MIXED_DEVICES]" in str(error)


# what rules say

rand = torch.rand


def broken(rule, hold=False):
    """Facts that break a rule; with `hold`, that fulfil it."""
    if isinstance(rule, Rule):
        tried = (*rule.predicate.boundaries(), "other", 3, 10 ** 6, None, True, False)
        for value in tried:
            try:
                if rule.predicate.holds(value) == hold:
                    return {rule.fact: value}
            except TypeError:                  # a text where a number is compared
                continue
        raise AssertionError(f"nothing breaks {rule}")
    if isinstance(rule, AnyOf):
        return {k: v for inner in rule.rules for k, v in broken(inner, hold).items()}
    return {**broken(rule.then, hold), **broken(rule.condition, True)}


class Sizes(dict):
    def __missing__(self, name):
        return 7


def every_rule():
    catalog = worlds.current().catalog
    for op in catalog.ops.values():
        for rule in (*op.requires, *(r for k in catalog.kernels_of(op.name) for r in k.requires)):
            yield op, rule


def test_no_message_names_a_fact_that_no_caller_gives():
    internal = {name for op, _ in every_rule() for name in op.derived} - {
        "batch", "hidden", "head_dim", "seq_q", "seq_k", "group", "elements"}
    assert {"group_rest", "head_dim_gap", "causal_offset"} <= internal
    messages = set()
    for op, rule in every_rule():
        for reason in op.reasons((rule,), Sizes(broken(rule))):
            words = set(re.findall(r"[\w.]+", reason.message))
            assert not words & internal, reason.message
            assert not re.search(r"\w\.(stride_last|contiguous|alignment)\b", reason.message)
            assert reason.message.strip() and "{" not in reason.message
            messages.add(reason.message)
    assert len(messages) > 300


def test_every_derived_fact_that_a_rule_reads_has_words():
    for op, rule in every_rule():
        for leaf in rule.leaves():
            if leaf.fact in op.derived:
                declared = leaf.fact in op.words
                plain = op.derived[leaf.fact] in op.by_name    # such as seq_q = max_seqlen_q
                assert declared or plain or leaf.fact == "head_dim", (op.name, leaf.fact)


@pytest.mark.parametrize(("call", "message"), [
    (lambda: lz.attention(rand(1, 8, 4, 16), rand(1, 3, 4, 16), rand(1, 3, 4, 16)),
     "the number of query heads must be a multiple of that of the KV heads, got 8 query heads, "
     "3 KV heads [HEADS_NOT_DIVISIBLE]\n  hint: pass a key and value whose number of heads"),
    (lambda: lz.attention(rand(1, 8, 4, 16), rand(1, 4, 4, 16), rand(1, 4, 4, 16),
                          enable_gqa=False),
     "enable_gqa must be True, got False; or kv_heads must be 1, got 4; or query and key must have "
     "the same number of heads, got 8 query heads, 4 KV heads"),
    (lambda: lz.speculative_verify(torch.zeros(1, 2, dtype=torch.int64), None, rand(1, 2, 9)),
     "target_probs must have one position more than there are draft tokens, got 2 positions")])
def test_a_mistake_is_told_in_terms_of_what_was_given(call, message):
    with pytest.raises(InvalidCall) as caught:
        call()
    assert message in str(caught.value) and "\n  hint: " in str(caught.value)


def test_a_condition_and_alternatives_are_told():
    op = lz.op("attention")
    rule = when(Rule("device", "in", ("cuda",), Code.PLATFORM_MISMATCH),
                any_of(Rule("is_causal", "eq", False, Code.FEATURE_UNSUPPORTED),
                       Rule("attn_mask.dtype", "absent", None, Code.MASK_UNSUPPORTED)))
    facts = {"device": "cuda", "is_causal": True, "attn_mask.dtype": "bool"}
    (reason,) = op.reasons((rule,), facts)
    assert reason.message == ("is_causal must be False, got True; or takes no attention mask, got "
                              "a tensor of bool, where device is cuda")
    assert reason == rule.check(facts) and reason.to_json()["sentence"] == reason.message


def test_every_code_says_what_to_do():
    assert [code for code in Code if not code.advice] == []
