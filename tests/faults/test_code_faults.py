"""What only the code of a kernel tells is found by it; a kernel whose code no call reaches is not
proven, and not accused."""

from __future__ import annotations

import functools

import pytest
from code_faults import CODE_FAULTS, sound_kernels

from layerzero.spec.kernel import Kernel
from layerzero.verify.certification.certify import Verdict, certify
from layerzero.verify.code.own_code import own_code
from layerzero.verify.code.rare import check_counts, check_limits, check_rare_code
from layerzero.verify.code.search import search_unrun_code
from layerzero.verify.code.tracing import Tracer
from layerzero.verify.kernel.contract import check_case, load_once
from layerzero.verify.kernel.shared import latest_case

PLANTED = {f.name: f for f in CODE_FAULTS}


def traced(kernel: Kernel) -> Tracer:
    """Runs the op's own cases."""
    tracer = Tracer(own_code(kernel.load, load_once(kernel)), latest_case)
    for case in kernel.op.cases:
        tracer.next_check()
        with tracer.watching():
            assert check_case(kernel, case, kernel.op.dtypes[0]).status != "failed"
    return tracer


@pytest.mark.parametrize("name", [name for name in PLANTED if name != "onecallof1234"])
def test_calls_are_found_that_reach_it(name):
    kernel = PLANTED[name].kernel()
    tracer = traced(kernel)
    assert not tracer.complete
    results = search_unrun_code(kernel, tracer, "cpu", "quick", 0, limit_s=200.0)
    assert any(r.status == "failed" for r in results)


def test_calls_are_counted_as_far_as_the_code_counts():
    kernel = PLANTED["onecallof1234"].kernel()
    tracer = traced(kernel)
    result, = check_counts(kernel, tracer, "cpu", "full", 0)
    assert result.status == "failed" and result.kinds == ("state",)
    assert result.circumstance == "1234 calls"


@functools.lru_cache(maxsize=None)
def verdict_of(name: str) -> Verdict:
    return certify(next(f for f in sound_kernels() if f.name == name).kernel())


def test_code_that_no_call_reaches_is_not_proven():
    verdict = verdict_of("a_path_that_nobody_reaches")
    assert verdict.status == "unproven" and verdict.certificate is None and not verdict.failures
    assert len(verdict.unrun) == 1 and "return right(x=x.contiguous()" in verdict.unrun[0]
    assert verdict.diagnosis.kind == "unknown" and verdict.unrun[0] in verdict.diagnosis.says
    assert verdict.to_json()["status"] == "unproven"


def test_what_only_raises_or_is_for_other_machines_needs_no_call():
    verdict = verdict_of("careful")
    assert verdict.status == "passed" and verdict.certificate is not None and not verdict.unrun


def test_sound_kernels_pass_where_their_code_is_asked_more_of():
    kernel = next(f for f in sound_kernels() if f.name == "careful").kernel()
    tracer = traced(kernel)
    for look in (check_limits, check_rare_code):
        results = [*look(kernel, tracer, "cpu", "quick", 0)]
        assert not any(r.status == "failed" for r in results)
    assert any(r.passed for r in results)
