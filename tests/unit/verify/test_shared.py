"""What the kernels of an op share: inputs, of which each gets a copy, and results of the formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from layerzero.ops.attention import OP as ATTENTION
from layerzero.ops.block_sparse_attention import OP as BLOCK_SPARSE
from layerzero.ops.rms_norm import OP as RMS_NORM
from layerzero.verify.cases.generated import with_few_items, with_small_sizes
from layerzero.verify.certification.certify import SlowCases
from layerzero.verify.certification.circumstances.argument_circumstances import ChangedInPart
from layerzero.verify.certification.circumstances.row_circumstances import LoudEnds, if_finite
from layerzero.verify.kernel import shared
from layerzero.verify.kernel.contract import (
    AS_DECLARED,
    accepts_case,
    case_refusals,
    case_values,
    check_case,
)
from layerzero.verify.kernel.judging import Expected, judge_result
from layerzero.verify.kernel.shared import Kept, copy_values, fingerprint
from layerzero.world import snapshot as worlds


@pytest.mark.parametrize("case", ({}, {"stride": "sparse"}, {"mask": "bool"}))
def test_what_a_kernel_does_to_its_inputs_is_not_seen_by_the_next(case: dict[str, Any]) -> None:
    first, again = (case_values(ATTENTION, case, "float32") for _ in range(2))
    untouched = first["query"].clone()
    first["query"].untyped_storage().fill_(7)
    assert torch.equal(again["query"], untouched)
    assert torch.equal(case_values(ATTENTION, case, "float32")["query"], untouched)
    assert first["query"].stride() == again["query"].stride()
    assert (first["query"].untyped_storage().nbytes()
            == again["query"].untyped_storage().nbytes())


def test_tensors_that_share_memory_share_the_copy() -> None:
    x = torch.randn(4, 6)
    copies = copy_values({"x": x, "row": x[1], "twice": x, "n": 3})
    copies["x"].zero_()
    assert not copies["row"].any() and not copies["twice"].any() and x.any()
    assert copies["row"].storage_offset() == 6 and copies["row"]._is_view()
    assert copies["n"] == 3


@pytest.mark.parametrize("other", (
    {"x": torch.arange(6.0) + 1, "scale": 0.5}, {"x": torch.arange(6.0), "scale": 0.25},
    {"x": torch.arange(6.0).view(2, 3), "scale": 0.5}, {"x": torch.arange(6), "scale": 0.5},
    {"x": (torch.arange(12.0) / 2)[::2], "scale": 0.5}, {"y": torch.arange(6.0), "scale": 0.5}))
def test_other_contents_have_another_fingerprint(other: dict[str, Any]) -> None:
    values = {"x": torch.arange(6.0), "scale": 0.5}
    assert fingerprint(values) == fingerprint(copy_values(values)) is not None
    assert fingerprint(values) != fingerprint(other)


def test_another_layout_has_the_same_contents() -> None:
    x = torch.randn(3, 4)
    one, other = fingerprint({"x": x}), fingerprint({"x": x.t().contiguous().t()})
    assert one is not None and other is not None
    assert one.contents == other.contents and one != other


def test_a_block_mask_has_a_fingerprint_by_its_lists_and_its_function() -> None:
    cases = {"mask": "document"}, {"mask": "document", "blocks": "32x16"}, {"mask": "prefix"}
    first, blocks, other = (fingerprint(BLOCK_SPARSE.inputs(sq=40, sk=40, **c)) for c in cases)
    again = fingerprint(BLOCK_SPARSE.inputs(sq=40, sk=40, mask="document"))
    assert first is not None and again is not None and first.contents == again.contents
    assert len({v.contents for v in (first, blocks, other) if v is not None}) == 3


def test_what_is_no_plain_tensor_has_no_fingerprint() -> None:
    assert fingerprint({"x": object()}) is None
    assert fingerprint({"x": torch.nn.Parameter(torch.ones(2)).detach()}) is not None
    assert fingerprint({"x": torch.empty(shared.ENTRY_BYTES + 1, dtype=torch.uint8)}) is None


def test_a_kernel_alone_is_judged_by_the_same_numbers_as_after_another() -> None:
    by_id = worlds.current().catalog.by_id
    alone, cells = {}, [(c, d) for c in RMS_NORM.cases[:6] for d in ("float32", "bfloat16")]
    for name in ("torch.rms_norm", "reference.rms_norm"):
        shared._RESULTS.find(ATTENTION, "another op")
        shared._INPUTS.find(ATTENTION, "another op")
        alone[name] = [check_case(by_id[name], *cell) for cell in cells]
    after = {name: [check_case(by_id[name], *cell) for cell in cells] for name in alone}
    assert after == alone and all(r.passed for results in after.values() for r in results)


def test_what_is_kept_has_a_bound_and_ends_with_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "ALL_BYTES", 4096)
    kept = Kept()
    assert kept.find(RMS_NORM, "a") is None
    assert all(kept.keep(RMS_NORM, name, name, 900) for name in "ab")
    assert kept.find(RMS_NORM, "a") == "a" and kept.keep(RMS_NORM, "c", "c", 900)
    assert [kept.find(RMS_NORM, name) for name in "abc"] == ["a", None, "c"]
    assert not kept.keep(RMS_NORM, "d", "d", shared.ENTRY_BYTES + 1)
    assert kept.find(ATTENTION, "a") is None and kept.find(RMS_NORM, "a") is None


def test_a_slow_case_leaves_out_those_of_as_many_rows_but_none_of_the_ops_own() -> None:
    slow, many = SlowCases(ATTENTION), {"b": 8200, "hq": 8, "hkv": 8, "sq": 1, "sk": 2, "d": 8}
    assert not slow.leave_out(many)
    slow.add({"b": 1025, "sq": 8, "sk": 8, "d": 8})
    assert slow.leave_out(many) and not slow.leave_out({"b": 3}) and slow.left_out == 1
    costly = SlowCases(ATTENTION)
    costly.add({"sq": 320, "sk": 320, "b": 3})
    assert costly.leave_out({"sq": 320, "sk": 320, "b": 3}) and not costly.leave_out(many)
    assert not any(map(slow.leave_out, ATTENTION.cases))


def test_a_case_of_fewer_items_keeps_what_it_names() -> None:
    assert with_few_items(ATTENTION, {"sq": 192, "hkv": 1}) == {"sq": 192, "hkv": 1, "hq": 2}
    assert with_few_items(ATTENTION, {"hq": 6}) == {"hq": 6, "hkv": 2}


def test_a_smaller_case_keeps_what_it_names() -> None:
    assert with_small_sizes(ATTENTION, {"d": 72, "mask": "bool"}) == {
        "d": 72, "mask": "bool", "sq": 32, "sk": 32}
    named = {"sq": 5, "sk": 9, "d": 8, "causal": True, "align": "top_left"}
    assert with_small_sizes(ATTENTION, named) is named


def _altered(kind: str, t: torch.Tensor) -> torch.Tensor:
    out = t.clone()
    if kind == "nan":
        out.view(-1)[0] = torch.nan
    return out * 1.5 if kind == "wrong" else out + 1e-6 if kind == "near" else out


@pytest.mark.parametrize("kind", ("same", "near", "wrong", "nan"))
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("infinite", (False, True))
def test_a_shared_expectation_judges_as_one_of_its_own(kind: str, dtype: str,
                                                       infinite: bool) -> None:
    truth = torch.randn(6, 8, generator=torch.Generator().manual_seed(1)).double()
    if infinite:
        truth[1, 2] = torch.inf
    eager = truth.to(getattr(torch, dtype))
    expected = Expected(truth, eager)
    for out in (eager.clone(), _altered(kind, eager)):     # the first fills what is shared
        shared_one, own = (judge_result(RMS_NORM, dtype, "result", out, out, truth, eager,
                                        expected=e) for e in (expected, None))
        assert shared_one == own
    assert bool(own.complaints) == (kind in ("wrong", "nan"))


def test_only_what_alter_gives_is_known_by_the_name_of_its_circumstance() -> None:
    assert not ChangedInPart("x").keeps_values
    assert LoudEnds().keeps_values and AS_DECLARED.keeps_values


def test_a_kernel_accepts_a_case_where_it_has_nothing_against_it() -> None:
    for kernel in worlds.current().catalog.kernels_of("rms_norm"):
        for case in RMS_NORM.cases:
            for dtype in RMS_NORM.dtypes:
                assert accepts_case(kernel, case, dtype) == (
                    not case_refusals(kernel, case, dtype))


def test_whether_a_call_is_allowed_is_asked_again_for_other_contents() -> None:
    values = case_values(RMS_NORM, {}, "float32")
    assert if_finite(RMS_NORM, values) is values and if_finite(RMS_NORM, values) is values
    values["x"][0, 0] = torch.nan
    assert if_finite(RMS_NORM, values) is None
