"""Each fault in what is kept between calls is found by the check that makes such calls; and kernels
that are sound are not accused by it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kept_faults import KEPT_FAULTS

from layerzero.verify.certification import growth
from layerzero.verify.certification.calls import check_many_calls
from layerzero.verify.certification.circumstances import backward_circumstances as backward
from layerzero.verify.certification.circumstances import content_circumstances as contents
from layerzero.verify.certification.circumstances import state_circumstances as states
from layerzero.verify.certification.interrupted import (
    check_interrupted_backward,
    check_interrupted_first,
    check_out_of_memory,
)
from layerzero.verify.kernel.contract import check_case
from layerzero.verify.kernel.rare_settings import changed_settings, rare_settings
from layerzero.world import snapshot as worlds

Check = Callable[..., Any]


def under(circumstance: Any) -> Check:
    return functools.partial(check_case, circumstance=circumstance)


def growing(other: str) -> Check:
    return functools.partial(growth.check_other_contents, other=other, limit_s=5.0)


def between(*names: str) -> Check:
    return functools.partial(backward.check_between, betweens=names)


IN_INFERENCE = states.ChangedInMode("in inference mode")
FOUND_BY: dict[str, tuple[Check, dict[str, Any], str]] = {
    "packedininferencemode": (under(IN_INFERENCE), {}, "error"),
    "parametersareconstant": (under(states.ParametersWrittenUnseen()), {}, "error"),
    "weightofthestack": (under(states.PartsOfOne()), {}, "error"),
    "ownstatesinplace": (under(states.OwnResults()), {}, "in-place change"),
    "bufferforeveryaddress": (growing(growth.ADDRESSES), {}, "leak"),
    "bufferforeverynumberofrows": (growing(growth.TOKENS), {}, "leak"),
    "bufferforeverythread": (growing(growth.THREADS), {}, "leak"),
    "backwardscratchofall": (check_interrupted_backward, {}, "threads"),
    "roomforeightgradients": (between(backward.MANY), {}, "gradient"),
    "evaluatedbeforetrained": (backward.check_after_evaluation, {}, "gradient"),
    "tableisseenbeforeitismade": (check_interrupted_first, {"affine": False}, "threads"),
    "threads_are_put_back_if_all_goes_well": (check_out_of_memory, {}, "global state"),
    "packedwhenitisusedoften": (under(contents.WrittenUnseen()), {}, "error"),
    "oneinsevenhundredcalls": (functools.partial(check_many_calls, calls=1600), {}, "state"),
}


@pytest.mark.parametrize("name", FOUND_BY)
def test_it_is_right_in_a_plain_call_and_found(name: str) -> None:
    kernel, (check, case, kind) = KEPT_FAULTS[name].kernel(), FOUND_BY[name]
    assert check_case(kernel, case, "float32").passed
    found = check(kernel, case, "float32")
    assert found.status == "failed" and kind in found.kinds, str(found)


def test_a_table_that_is_half_made_when_memory_ends_is_found() -> None:
    kernel = KEPT_FAULTS["tableisseenbeforeitismade"].kernel()
    found = check_out_of_memory(kernel, {"affine": False}, "float32")
    assert found.status == "failed" and found.kinds == ("state",), str(found)


def test_settings_that_few_look_at_are_compared() -> None:
    log, before = logging.getLogger("torch"), rare_settings()
    level = log.level
    try:
        KEPT_FAULTS["torch_says_less"].make()(torch.ones(2, 4), format="int8")
        assert changed_settings(before) == ["level of torch's log"]
    finally:
        log.setLevel(level)
    assert not changed_settings(before)


@pytest.mark.parametrize(("name", "case"), [
    ("reference.rms_norm", {}), ("torch.linear", {}), ("torch.layer_norm", {"affine": False})])
def test_a_sound_kernel_passes(name: str, case: dict[str, Any]) -> None:
    kernel = worlds.current().catalog.by_id[name]
    checks = [check_interrupted_first, check_out_of_memory, check_interrupted_backward,
              between(backward.MANY, backward.SAME_WEIGHTS, backward.OTHERS_GONE),
              backward.check_after_evaluation,
              *(growing(other) for other in (growth.ADDRESSES, growth.TOKENS, growth.THREADS,
                                             growth.STRIDED, growth.IN_INFERENCE,
                                             growth.RECORDED)),
              *(under(c) for c in states.state_circumstances(kernel.op))]
    failed = [r for check in checks if (r := check(kernel, case, "float32")).status == "failed"]
    assert not failed, str(failed[0])
