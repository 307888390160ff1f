"""Each fault of attention_call_faults.py is found by the check that is there for it;
benchmarks/planted_faults.py --set calls certifies all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
from attention_call_faults import ATTENTION_CALL_FAULTS

from layerzero.backends.reference import KERNELS
from layerzero.spec.kernel import Kernel
from layerzero.verify.certification.checks import checks_of
from layerzero.verify.certification.circumstances.argument_circumstances import OtherNumber
from layerzero.verify.certification.circumstances.call_circumstances import Expanded
from layerzero.verify.certification.dropout import dropout_checks
from layerzero.verify.kernel.contract import CaseResult, Circumstance, check_case
from layerzero.verify.kernel.gradients import also_gradient_cases, check_gradients

CALLS = {f.name: f for f in ATTENTION_CALL_FAULTS}
ATTENTION = next(k for k in KERNELS if k.op.name == "attention")


def also_gradients(kernel: Kernel) -> Iterator[CaseResult]:
    for case, name in also_gradient_cases(kernel.op):
        yield check_gradients(kernel, case, "float32", only=name)
        yield check_gradients(kernel, case, "float32", also=name)


def mask_ranks(kernel: Kernel) -> Iterator[CaseResult]:
    yield from (check_case(kernel, case, "float32") for case in kernel.op.cases
                if case.get("mask") in ("keys", "heads", "heads3d"))


def dropout(kernel: Kernel) -> Iterator[CaseResult]:
    yield from (check() for check in dropout_checks(kernel, "float32", "cpu", "full", 0))


@pytest.mark.parametrize(("name", "check"), [
    ("end_of_a_window_counted_in_32_bits", lambda k: check_case(
        k, {"d": 16}, "float32", circumstance=OtherNumber("window_right", 2 ** 31 - 1))),
    ("without_gqa_there_is_one_head", lambda k: check_case(
        k, {"d": 16}, "float32", circumstance=OtherNumber("enable_gqa", False))),
    ("heads_of_an_expanded_key_share_a_gradient", lambda k: check_gradients(
        k, {}, "float32", altered=Expanded("key", 1))),
    ("capped_scores_of_float64_in_float32", lambda k: check_case(k, {"softcap": 5.0}, "float64")),
    ("every_mask_lists_full_blocks", lambda k: check_case(k, {"mask": "partial"}, "float32")),
    ("sums_of_float64_in_float32", lambda k: check_case(k, {"lses_dtype": "float64"}, "float32"))])
def test_a_call_shows_it(name, check) -> None:
    sound = next(k for k in KERNELS if k.op is CALLS[name].op)
    assert check(sound).passed
    assert check(CALLS[name].kernel()).status == "failed"


def test_the_quick_lane_has_these_calls() -> None:
    kernel = CALLS["slopes_have_no_gradient"].kernel()
    made = list(checks_of(kernel, "cpu", "quick", (0,)))
    altered = [c.keywords["altered"].name for c in made if "altered" in getattr(c, "keywords", {})]
    assert any("spread" in name for name in altered)
    names = {a.name for c in made for a in getattr(c, "args", ()) if isinstance(a, Circumstance)}
    assert {"given window_right = 2.14748e+09", "given enable_gqa = 0"} <= names
    assert any("float64" in c.args and "softcap" in c.args[1] for c in made
               if isinstance(c, partial) and c.func is check_case)


@pytest.mark.parametrize(("checks", "names"), [
    (also_gradients, ("bias_of_all_samples_has_the_gradient_of_the_first",
                      "slopes_have_no_gradient")),
    (mask_ranks, ("mask_of_three_dimensions_is_one_for_each_sample",
                  "mask_of_one_dimension_is_of_the_queries")),
    (dropout, ("causal_calls_drop_nothing", "dropping_everything_divides_by_zero",
               "gradient_of_the_scores_drops_nothing", "seedofitsown"))])
def test_it_is_found_and_the_formula_passes(checks, names) -> None:
    sound = list(checks(ATTENTION))
    assert {r.status for r in sound} <= {"passed", "skipped"}
    assert any(r.passed for r in sound)
    for name in names:
        failed = next((r for r in checks(CALLS[name].kernel()) if r.status == "failed"), None)
        assert failed is not None, name
        assert set(failed.kinds) & {*CALLS[name].kinds, "error"}, name
