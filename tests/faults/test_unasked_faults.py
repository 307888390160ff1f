"""Each fault in a call that few tests make is found by the check that makes it."""

from __future__ import annotations

from typing import Any

import pytest
from unasked_faults import UNASKED_FAULTS

from layerzero.verify.certification.circumstances.dtype_circumstances import (
    OtherDtype,
    SecondDtypes,
)
from layerzero.verify.certification.circumstances.text_circumstances import TokenizerOfEarlier
from layerzero.verify.certification.circumstances.use_circumstances import check_generator
from layerzero.verify.certification.growth import check_other_contents
from layerzero.verify.kernel.contract import CaseResult, Circumstance, check_case
from layerzero.verify.kernel.gradients import check_gradients

ROWS = {"penalties": "history counts", "rows": True}


@pytest.mark.parametrize(("name", "case", "dtype", "circumstance"), [
    ("numbers_of_one_size_have_one_dtype", {}, "float16", SecondDtypes()),
    ("top_k_of_32_bits_keeps_one_more", ROWS, "float32", OtherDtype("top_k_rows")),
    ("seed_comes_before_the_seeds_of_rows", {"random": "seed_rows+seed+generator"}, "float32",
     None),
    ("negative_top_k_is_greedy", {"rows": True, "batch": 32, "vocab": 9, "special": "ties",
                                  "scale": 1.0}, "float32", None),
    ("last_thousand_tokens_of_the_history", {"penalties": "history", "past": "long",
                                             "vocab": 2_100, "scale": 1.0}, "float32", None),
    ("keptresultishandedout", {}, "int64", None),
    ("texts_are_sorted_by_length", {"text": (2, 1)}, "int64", None),
    ("tokenizerbyitsid", {}, "int64", TokenizerOfEarlier()),
    ("lines_end_as_on_unix", {"text": 22}, "int64", None),
    ("masked_ids_are_left_out", {"ids": (14, 15), "form": "tokens"}, "int64", None)])
def test_it_is_found(name: str, case: dict[str, Any], dtype: str,
                     circumstance: Circumstance | None) -> None:
    kernel = UNASKED_FAULTS[name].kernel()
    if circumstance is None:
        found = check_case(kernel, case, dtype)
    else:
        assert check_case(kernel, case, dtype).passed
        found = check_case(kernel, case, dtype, circumstance=circumstance)
    assert found.status == "failed"


def found_by(check: Any, name: str, case: dict[str, Any], dtype: str) -> CaseResult:
    kernel = UNASKED_FAULTS[name].kernel()
    assert check_case(kernel, case, dtype).passed
    result: CaseResult = check(kernel, case, dtype)
    return result


def test_a_gradient_of_wider_rows_is_given() -> None:
    found = found_by(check_gradients, "gradient_of_wider_rows_is_read_as_one_block", {}, "float32")
    assert found.status == "failed" and "wider rows" in found.detail


def test_a_draw_without_a_seed_is_repeated_by_the_seed_of_torch() -> None:
    found = found_by(check_generator, "draws_without_a_seed_are_its_own", {}, "float32")
    assert found.kinds == ("distribution",)


def test_texts_that_are_kept_for_ever_are_a_leak() -> None:
    found = found_by(check_other_contents, "everytextiskept",
                     {"drawn": True, "cache_prefix": True}, "int64")
    assert found.kinds == ("leak",)
