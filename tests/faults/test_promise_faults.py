"""Promises around a call that a kernel may break while each call alone is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from broken_kernels import Fault
from promise_faults import PROMISE_FAULTS
from torch import _compile

from layerzero.spec.kernel import Kernel
from layerzero.verify.certification.certify import certify
from layerzero.verify.certification.circumstances.backward_circumstances import backward_checks
from layerzero.verify.certification.circumstances.use_circumstances import generator_checks
from layerzero.verify.certification.unused_places import unused_place_checks
from layerzero.verify.kernel.contract import CaseResult, check_case
from layerzero.verify.kernel.process_state import (
    functions_of_torch,
    process_state,
    put_back,
    put_back_functions,
)
from layerzero.verify.kernel.results import find_aliasing, find_foreign_memory
from layerzero.world import snapshot as worlds

# All cases of these take many seconds.
LONG = ("attention", "moe", "mlp", "rope", "sample", "speculative_verify")
SHORT_FAULTS = [f for f in PROMISE_FAULTS if f.op.name not in LONG]
LONG_FAULTS = [f for f in PROMISE_FAULTS if f.op.name in LONG
               and f.name != "keepsthelastresultforthebackward"]


@pytest.mark.parametrize("fault", SHORT_FAULTS, ids=lambda f: f.name)
def test_it_is_found_and_named_rightly(fault: Fault) -> None:
    verdict = certify(fault.kernel(), seeds=(0,), stop_early=True)
    assert verdict.status == "failed" and verdict.diagnosis is not None
    assert verdict.diagnosis.kind in {*fault.kinds, "unknown"}, str(verdict.diagnosis)


def _checks(kernel: Kernel) -> Iterator[Callable[[], CaseResult]]:
    yield partial(check_case, kernel, {}, "float32")
    yield from generator_checks(kernel, "cpu", 0)
    yield from unused_place_checks(kernel, "cpu", 0)
    yield from backward_checks(kernel, "cpu", "full", 0)


@pytest.mark.parametrize("fault", LONG_FAULTS, ids=lambda f: f.name)
def test_one_of_the_checks_finds_it(fault: Fault) -> None:
    results = (check() for check in _checks(fault.kernel()))
    failed = next((r for r in results if r.status == "failed"), None)
    assert failed is not None
    kinds = {"not finite": "non-finite values"}
    assert {kinds.get(kind, kind) for kind in failed.kinds} & set(fault.kinds), str(failed)


@pytest.mark.parametrize("name", ["torch.rms_norm", "torch.cross_entropy", "torch.index_select",
                                  "torch.sample_sort", "native.rms_norm"])
def test_a_sound_kernel_passes(name: str) -> None:
    kernel = worlds.current().catalog.by_id[name]
    results = [check() for check in _checks(kernel)]
    assert all(r.status != "failed" for r in results), [str(r) for r in results
                                                        if r.status == "failed"]
    assert any(r.passed for r in results) or name.startswith("native")


def test_what_torchs_compiler_wraps_on_import_is_its_own() -> None:
    before, manual_seed = functions_of_torch(), torch.manual_seed
    try:
        torch.manual_seed = _compile._disable_dynamo(manual_seed)
        assert put_back_functions(before) == []
        assert torch.manual_seed is not manual_seed
    finally:
        torch.manual_seed = manual_seed


def test_functions_of_torch_are_put_back() -> None:
    before, softmax = functions_of_torch(), torch.softmax
    torch.softmax = lambda *args, **kwargs: softmax(*args, **kwargs)
    assert put_back_functions(before) == ["torch.softmax"] and torch.softmax is softmax


def test_an_import_may_add_to_the_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    import warnings

    with warnings.catch_warnings():
        state = process_state("cpu")
        warnings.filterwarnings("ignore", message="of a library")
        monkeypatch.setitem(sys.modules, "a_new_library", sys)
        assert put_back(state, "cpu") == []
        state = process_state("cpu")
        warnings.filterwarnings("ignore", message="of a kernel")
        assert put_back(state, "cpu") == ["the warnings that are shown"]


def test_halves_of_one_buffer_are_no_shared_memory() -> None:
    interleaved = torch.randn(4, 2)
    halves = (interleaved[:, 0], interleaved[:, 1])
    assert not list(find_aliasing([halves], {}))
    assert [c.kind for c in find_aliasing([(interleaved[:, 0], interleaved[1:])], {})] == [
        "aliasing"]


def test_a_result_wants_no_gradient_that_no_input_wants() -> None:
    with torch.enable_grad():
        x, weight = torch.randn(3), torch.randn(3, requires_grad=True)
        assert any("requires a gradient" in c.text
                   for c in find_foreign_memory([x * weight], {"x": x}))
        assert not any("requires a gradient" in c.text
                       for c in find_foreign_memory([x * weight], {"x": x, "weight": weight}))
