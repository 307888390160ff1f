"""What a kernel keeps of contents that change without a trace, and numbers that its dtype holds
while their squares are beyond it."""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import layerzero as lz
from layerzero.backends._packing import PackedWeights
from layerzero.ops.formulas.block_masks import dense_mask
from layerzero.verify.certification.certify import certify
from layerzero.verify.certification.circumstances import content_circumstances
from layerzero.verify.certification.circumstances.call_circumstances import (
    ChangedInPlace,
    ChangedParameters,
)
from layerzero.verify.certification.circumstances.content_circumstances import (
    BLOCK_MASK,
    FORGET_PACKED,
    LoudHalf,
    MaskOfNextBatch,
    WrittenUnseen,
    check_contents,
    content_checks,
)
from layerzero.verify.certification.coverage import measure_coverage
from layerzero.verify.diagnosis.circumstance_names import kind_of
from layerzero.verify.kernel.contract import check_case

LINEAR, NORM, MASKED = (lz.op(n) for n in ("linear", "group_norm", "block_sparse_attention"))
PLAIN = {"bias": False}


def by_version() -> Any:
    """Keeps a transposed weight by its version, as some packed weights are."""
    kept: dict[Any, Tensor] = {}

    def run(x: Tensor, weight: Tensor, bias: Any = None, activation: Any = None) -> Tensor:
        key = weight.data_ptr(), weight._version, weight.shape
        if key not in kept:
            kept.clear()
            kept[key] = weight.t().clone()
        return LINEAR.reference(x, kept[key].t(), bias, activation)

    return run


def in_packed_weights() -> Any:
    def run(x: Tensor, weight: Tensor, bias: Any = None, activation: Any = None) -> Tensor:
        packed = content_circumstances.PACKED.get("planted", Tensor.clone, weight)
        return LINEAR.reference(x, packed, bias, activation)

    return run


def squares_in_half() -> Any:
    def run(x: Tensor, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
        rows = x.reshape(x.shape[0], groups, -1).float()
        rows = rows - rows.mean(-1, keepdim=True)
        squares = rows.half().square().float() if x.dtype == torch.float16 else rows.square()
        out = (rows * torch.rsqrt(squares.mean(-1, keepdim=True) + eps)).view(x.shape)
        shape = 1, -1, *(1,) * (x.dim() - 2)
        out = out if weight is None else out * weight.float().view(shape)
        return (out if bias is None else out + bias.float().view(shape)).to(x.dtype)

    return run


def mask_by_function(code: bool = False) -> Any:
    kept: dict[Any, Tensor] = {}

    def run(query: Tensor, key: Tensor, value: Tensor, block_mask: Any, scale: Any = None,
            *, softcap: float = 0.0, return_lse: bool = False) -> Tensor:
        known = (block_mask.mask_mod.__code__ if code else block_mask.mask_mod,
                 block_mask.BLOCK_SIZE, tuple(block_mask.shape))
        mask = kept.setdefault(known, dense_mask(block_mask))
        return F.scaled_dot_product_attention(query, key, value, mask, scale=scale)

    return run


def test_a_weight_kept_by_its_version_is_found_by_a_write_that_leaves_none() -> None:
    kernel = lz.Kernel("planted.by_version", LINEAR, by_version)
    for circumstance in (ChangedInPlace(), ChangedParameters()):
        assert check_case(kernel, PLAIN, "float32", circumstance=circumstance).passed
    found = check_contents(kernel, PLAIN, "float32", "cpu", 0, WrittenUnseen())
    assert found.status == "failed" and kind_of([found.circumstance]) == "stale cache"


def test_packed_weights_are_dropped_by_the_documented_call_and_the_certificate_says_so(
        monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = lz.Kernel("planted.packed", LINEAR, in_packed_weights)
    result = check_contents(kernel, PLAIN, "float32", "cpu", 0, WrittenUnseen())
    assert result.passed and result.detail == FORGET_PACKED
    missing = measure_coverage(kernel, "cpu", "quick", (0,), [result]).missing
    assert f"{result.circumstance}: {FORGET_PACKED}" in missing
    # the call is what makes it right
    monkeypatch.setattr(PackedWeights, "forget", lambda self, *tensors: 0)
    assert check_contents(kernel, PLAIN, "float32", "cpu", 0, WrittenUnseen()).status == "failed"


def test_a_kernel_that_keeps_nothing_needs_no_such_call() -> None:
    kernel = lz.Kernel("planted.right", LINEAR, lambda: LINEAR.reference)
    result = check_contents(kernel, PLAIN, "float32", "cpu", 0, WrittenUnseen())
    assert result.passed and FORGET_PACKED not in result.detail


def test_a_mask_kept_by_its_function_is_found_in_the_next_batch() -> None:
    wrong = lz.Kernel("planted.mask", MASKED, mask_by_function)
    right = lz.Kernel("planted.asks", MASKED, lambda: MASKED.reference)
    assert check_case(wrong, {}, "float32").passed
    found = [r for check in content_checks(wrong, "cpu", 0)
             if BLOCK_MASK in (r := check()).circumstance]
    # another mask of the function, the same one, and one of another function
    assert [r.status for r in found] == ["failed", "failed", "passed"]
    assert {kind_of([r.circumstance]) for r in found} == {"stale cache"}
    assert all(check_case(right, {}, "float32", circumstance=MaskOfNextBatch(*how)).passed
               for how in ((False,), (True,), (False, True)))


def test_a_mask_kept_by_the_code_of_its_function_is_found_over_another_tensor() -> None:
    wrong = lz.Kernel("planted.mask_by_code", MASKED, partial(mask_by_function, code=True))
    result = check_case(wrong, {}, "float32", circumstance=MaskOfNextBatch(only_code=True))
    assert result.status == "failed" and kind_of([result.circumstance]) == "stale cache"


def test_a_mask_of_few_keys_tells_nothing() -> None:
    values = MASKED.inputs(sq=7, sk=2)
    assert MaskOfNextBatch().alter(MASKED, values) is None


def test_squares_beyond_float16_are_found() -> None:
    wrong = lz.Kernel("planted.half", NORM, squares_in_half)
    right = lz.Kernel("planted.float", NORM, lambda: NORM.reference)
    assert check_case(wrong, {}, "float16").passed
    found, = (r for check in content_checks(wrong, "cpu", 0) if (r := check()).status == "failed")
    assert kind_of([found.circumstance]) == "overflow"
    assert all(check().passed for check in content_checks(right, "cpu", 0))


def test_loud_numbers_are_asked_where_float16_holds_the_result_and_a_rounding_stays_one() -> None:
    loud = LoudHalf().alter(LINEAR, LINEAR.inputs(dtype=torch.float16))
    assert loud is not None and 140 < float(loud["x"].float().std()) < 290
    assert LoudHalf().alter(LINEAR, LINEAR.inputs(dtype=torch.float32)) is None
    wide = LINEAR.inputs(dtype=torch.float16)
    assert LoudHalf().alter(LINEAR, {**wide, "weight": wide["weight"] * 4096}) is None
    scores = lz.op("attention")
    assert LoudHalf().alter(scores, scores.inputs(dtype=torch.float16)) is None


def test_nan_in_rows_of_zeros_is_no_matter_of_ties() -> None:
    quantize = lz.op("quantize")

    def run(x: Tensor, format: str, *options: Any, **named: Any) -> Any:
        codes, *rest = quantize.reference(x, format, *options, **named)
        is_empty = (x == 0).all(-1, keepdim=True)
        if codes.dtype == torch.float8_e4m3fn and bool(is_empty.any()) and codes.shape == x.shape:
            codes = torch.where(is_empty, torch.nan, codes.float()).to(codes.dtype)
        return codes, *rest

    kernel = lz.Kernel("planted.zeros", quantize, lambda: functools.wraps(quantize.reference)(run))
    verdict = certify(kernel, stop_early=True)
    assert verdict.diagnosis is not None and verdict.diagnosis.kind == "non-finite values"
