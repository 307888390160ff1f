"""The reason codes: the stable vocabulary in which every refusal is told."""

from __future__ import annotations

import json
import re
import string
from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layerzero.spec.codec import decode
from layerzero.spec.errors import InvalidCall, LayerZeroError
from layerzero.spec.reason import Category, Code, Reason, plain

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
