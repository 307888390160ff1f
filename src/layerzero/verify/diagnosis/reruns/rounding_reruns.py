"""Looks at errors that may be roundings: small, in much of a row, to both sides, others with every
other numbers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ....machine.faults import FAULTS
from ....spec.kernel import Kernel
from ...kernel.contract import (
    CaseResult,
    call,
    case_values,
    formula,
    refusals,
    results_of,
    upcast,
)
from ...kernel.error_budget import UNITS
from .calls_again import is_right, sample_failures, values_of

FEW = 6                                        # numbers of a result that may be round by chance
FEW_NUMBERS, MANY = 8, 23                      # of a result, and drawings that make up for them
LIMIT_S = 0.5                                  # of CPU time for these


def is_wrong_when_wide(kernel: Kernel, failed: Sequence[CaseResult], device: str) -> bool:
    """Is a sampled failing call in 16 bits wrong in float32 too? Then it is not by rounding."""
    for r in sample_failures([r for r in failed if not r.circumstance], 3):
        values = case_values(kernel.op, r.case, "float32", device, r.seed)
        if not refusals(kernel, values) and not is_right(kernel, values, "float32"):
            return True
    return False


def explain_by_rounded_argument(kernel: Kernel, failed: Sequence[CaseResult],
                                device: str) -> tuple[str, str] | None:
    """Explains calls that are right with one argument rounded to 16 bits, and wrong with it as it
    is, whatever the numbers: the kernel rounds it."""
    sample = sample_failures([r for r in failed if not r.circumstance], 3)
    common: set[str] | None = None
    for r in sample:
        calls = [case_values(kernel.op, r.case, r.dtype, device, r.seed + by) for by in (0, 1001)]
        if any(is_right(kernel, values, r.dtype) for values in calls):
            return None
        mended = {n for n in calls[0] if all(
            (other := _rounded(values, n)) is not None and is_right(kernel, other, r.dtype)
            for values in calls)}
        common = mended if common is None else common & mended
    return ("precision", f"right with {min(common)} rounded to 16 bits: {failed[0].detail}") \
        if common else None


def _rounded(values: dict[str, Any], name: str) -> dict[str, Any] | None:
    """Returns the call with a tensor that bfloat16 holds; None where it did before, where a number
    becomes an infinity by it, which is another call, and for a number: one factor for all is as
    well another factor."""
    t = values[name]
    if not isinstance(t, Tensor) or t.dtype not in (torch.float32, torch.float64):
        return None
    rounded = t.bfloat16().to(t.dtype)
    if torch.equal(rounded, t) or bool((rounded.isinf() & ~t.isinf()).any()):
        return None
    return {**values, name: rounded}


def explain_by_rounded_result(kernel: Kernel, failed: Sequence[CaseResult],
                              device: str) -> tuple[str, str] | None:
    """Explains float32 results of which every number is one that 16 bits hold, next to the right
    one: they were rounded."""
    sample = sample_failures([r for r in failed if not r.circumstance and r.dtype == "float32"], 3)
    calls = [case_values(kernel.op, r.case, r.dtype, device, r.seed + by) for r in sample
             for by in (0, 1001)]
    if not calls or not all(_has_rounded_result(kernel, values) for values in calls):
        return None
    return "precision", f"every number of a result is one that 16 bits hold: {failed[0].detail}"


def _has_rounded_result(kernel: Kernel, values: dict[str, Any]) -> bool:
    """Is a result rounded to 16 bits, where the formula's is not?"""
    with torch.no_grad():
        pairs = [(got, want.double()) for got, want in zip(
            results_of(call(kernel, values)), formula(kernel.op, upcast(values)))
            if isinstance(want, Tensor) and isinstance(got, Tensor) and got.shape == want.shape
            and got.dtype == torch.float32 and got.numel() >= FEW]
    return any(torch.equal(got, got.to(half).float())
               and not torch.allclose(want, want.to(half).double(), rtol=2.0 ** -14, atol=0.0)
               and torch.allclose(got.double(), want, rtol=2.0 ** -7, atol=1e-6)
               for got, want in pairs for half in (torch.bfloat16, torch.float16))


def is_small_beside_rows(kernel: Kernel, failed: Sequence[CaseResult], device: str) -> bool:
    """Is the error of every row of sampled failing calls small beside the row?"""
    sample = sample_failures([r for r in failed if not r.circumstance], 2)
    for r in sample:
        values = case_values(kernel.op, r.case, r.dtype, device, r.seed)
        try:
            with torch.no_grad():
                got, want = (results_of(call(kernel, values))[0],
                             formula(kernel.op, upcast(values))[0])
        except FAULTS:
            return False
        if not want.is_floating_point() or got.shape != want.shape or not want.dim():
            return False
        gaps = (got.double() - want).nan_to_num(nan=0.0)       # of equal infinities
        rows = want.nan_to_num(posinf=0.0, neginf=0.0).norm(dim=-1)
        if not bool((gaps.norm(dim=-1) <= 0.05 * rows).all()):
            return False
    return bool(sample)


def is_a_rounding_in_half(kernel: Kernel, failed: Sequence[CaseResult], device: str) -> bool:
    """Is every number of sampled failing calls, in their circumstance, within some roundings to 16
    bits of the largest of its row?"""
    sample = sample_failures(failed, 3)
    for r in sample:
        values = values_of(kernel, r, device)
        if values is None:
            return False
        try:
            with torch.no_grad():
                pairs = list(zip(results_of(call(kernel, values)),
                                 formula(kernel.op, upcast(values))))
        except FAULTS:
            return False
        for got, want in pairs:
            if not isinstance(got, Tensor) or got.shape != want.shape or not want.dim():
                return False
            if want.is_floating_point() and want.numel():
                most = want.abs().nan_to_num(posinf=0.0).amax(-1, keepdim=True)
                if not bool(((got.double() - want).abs() <= 8 * UNITS["bfloat16"] * most).all()):
                    return False
    return bool(sample)


def is_slight(kernel: Kernel, failed: Sequence[CaseResult], device: str) -> bool:
    """Is every error small, also beside the row that it is in? An average over many keys is
    itself small."""
    if not all(r.error < 0.05 for r in failed):
        return False
    for r in sample_failures([r for r in failed if not r.circumstance], 2):
        rtol, atol = kernel.op.tolerance.of(r.dtype)
        values = case_values(kernel.op, r.case, r.dtype, device, r.seed)
        with torch.no_grad():
            results = zip(results_of(call(kernel, values)), formula(kernel.op, upcast(values)))
        for got, want in results:
            if not isinstance(want, Tensor) or not want.is_floating_point() or want.dim() < 2:
                continue
            wrong = (got.double() - want).abs() > 8 * (atol + rtol * want.abs())
            if 0 < float(wrong.double().mean()) < 0.1 and r.ratio > 50:
                return False                   # a few numbers that are wrong, not all a little
            norms = want.norm(dim=-1)
            errors = (got.double() - want).norm(dim=-1)[norms > 1e-3 * norms.max()]
            if errors.numel() and bool((errors > 0.05 * norms[norms > 1e-3 * norms.max()]).any()):
                return False
    return True


def is_rounding(kernel: Kernel, failed: Sequence[CaseResult], device: str) -> bool:
    """Are errors spread as roundings are: in much of each wrong row, and in float64 not to one side
    in all rows? There a constant that is missing looks like a rounding, to one side."""
    some = False
    for r in sample_failures([r for r in failed if not r.circumstance], 3):
        values = case_values(kernel.op, r.case, r.dtype, device, r.seed)
        try:
            with torch.no_grad():
                pairs = list(zip(results_of(call(kernel, values)), formula(kernel.op,
                                                                           upcast(values))))
        except FAULTS:
            return False
        if _is_one_sided(kernel, r, device):
            return False
        for got, want in pairs:
            if isinstance(want, Tensor) and want.is_floating_point() and want.numel():
                spread = _errors_are_spread(got.double(), want, r.dtype == "float64")
                if spread is False:
                    return False
                some = some or spread is True
    return some


def _is_one_sided(kernel: Kernel, r: CaseResult, device: str) -> bool:
    """Is a result of a few numbers wrong to one side with all others that are drawn, as a loss is
    to which something is added? A rounding goes to both."""
    sides: list[float] = []
    for by in range(1001, 1033):
        if len(sides) >= 8:
            break
        values = case_values(kernel.op, r.case, r.dtype, device, r.seed + by)
        try:
            with torch.no_grad():
                got, want = results_of(call(kernel, values))[0], formula(kernel.op,
                                                                         upcast(values))[0]
        except FAULTS:
            return False
        if (not isinstance(want, Tensor) or not want.is_floating_point() or want.numel() > 8
                or got.shape != want.shape):
            return False
        if not bool((got.isfinite() & want.isfinite()).all()):
            continue                           # a loss of which every row is ignored
        gaps = (got.double() - want).reshape(-1)
        sides += gaps[gaps.abs() > 2.0 ** -22 * want.abs().max()].sign().tolist()
    return len(sides) >= 5 and abs(sum(sides)) == len(sides)


def _errors_are_spread(got: Tensor, want: Tensor, is_wide: bool) -> bool | None:
    """None where nothing is wrong."""
    if got.shape != want.shape or not bool((got.isfinite() == want.isfinite()).all()):
        return False
    got, want = got.nan_to_num(posinf=0.0, neginf=0.0), want.nan_to_num(posinf=0.0, neginf=0.0)
    width = want.shape[-1] if want.dim() else 1
    rows, gaps = want.reshape(-1, width), (got - want).reshape(-1, width)
    wrong = gaps.abs().amax(-1) > (2.0 ** -46 if is_wide else 2.0 ** -22) * rows.abs().amax(-1)
    rows, gaps = rows[wrong], gaps[wrong]
    if not len(rows):
        return None
    share = (gaps.abs() > 0.1 * gaps.abs().amax(-1, keepdim=True)).double().mean()
    along = (gaps * rows).sum(-1) / rows.square().sum(-1).clamp(min=1e-300)
    one_sided = (is_wide and len(rows) >= 6
                 and float(along.mean().abs()) > 0.9 * float(along.abs().mean()))
    return (width < 8 or float(share) > 0.2) and not one_sided


def is_rounded(kernel: Kernel, failed: Sequence[CaseResult], device: str) -> bool:
    """Are float32 results off by a rounding to 16 bits, in most elements and to both sides? What
    is wrong by a factor is so to one side in each row."""
    sample = sample_failures([r for r in failed if not r.circumstance], 2)
    for r in sample:
        values = case_values(kernel.op, r.case, r.dtype, device, r.seed)
        with torch.no_grad():
            got, want = results_of(call(kernel, values))[0], formula(kernel.op, upcast(values))[0]
        if (r.dtype != "float32" or not isinstance(want, Tensor) or got.shape != want.shape
                or not want.is_floating_point() or want.dtype.itemsize == 1        # codes
                or want.dim() < 2 or want.shape[-1] < 8):
            return False
        rows, wide = want.reshape(-1, want.shape[-1]), got.double().reshape(-1, want.shape[-1])
        gaps = (wide - rows) / rows.norm(dim=-1, keepdim=True).clamp(min=1e-30)
        wrong = gaps.norm(dim=-1) > 1e-5
        if not bool(wrong.any()) or float(gaps.norm(dim=-1)[wrong].median()) > 2.0 ** -7:
            return False
        unit = rows / rows.norm(dim=-1, keepdim=True).clamp(min=1e-30)
        along = (gaps * unit).sum(-1).abs() / gaps.norm(dim=-1).clamp(min=1e-30)
        if float(along[wrong].median()) > 0.7:
            return False
    return bool(sample)


def errors_come_again(kernel: Kernel, failed: Sequence[CaseResult], device: str) -> bool:
    """Are errors of sampled failing calls nearly the same with numbers that differ by a little more
    than the errors, or those of one of them just the same? Roundings are others then; what is left
    out or counted twice is the same."""
    alike = _likenesses(kernel, failed, device)
    return bool(alike) and (min(min(each) for each in alike) > 0.7
                            or max(min(each) for each in alike) > 0.95)


def errors_are_others(kernel: Kernel, failed: Sequence[CaseResult], device: str) -> bool:
    """Have they nothing to do with each other then, as roundings?"""
    alike = _likenesses(kernel, failed, device)
    return bool(alike) and max(max(each) for each in alike) < 0.4


def _likenesses(kernel: Kernel, failed: Sequence[CaseResult], device: str) -> list[list[float]]:
    """Returns the cosines between the errors of sampled calls and of three near each."""
    sample = sample_failures([r for r in failed if not r.circumstance], 2)
    return [each for r in sample if (each := list(_cosines(kernel, r, device)))]


def _cosines(kernel: Kernel, r: CaseResult, device: str) -> Iterator[float]:
    """Yields none where there is nothing to compare. Results of a few numbers, as a loss, are taken
    together over many drawings."""
    calls: list[dict[str, Any]] = []
    firsts: list[tuple[Tensor, Tensor]] = []
    end = time.process_time() + LIMIT_S
    for by in (0, *range(1001, 1001 + MANY)):
        values = case_values(kernel.op, r.case, r.dtype, device, r.seed + by)
        first = _first_error(kernel, values)
        if first is None:
            return
        calls.append(values)
        firsts.append(first)
        if first[0].numel() > FEW_NUMBERS or time.process_time() > end:
            break
    error, size = (torch.cat([f[i].reshape(-1) for f in firsts]) for i in (0, 1))
    least = max(4 * torch.finfo(getattr(torch, r.dtype)).eps, 2.0 ** -20)
    step = max(min(4 * float(error.norm() / size.norm().clamp(min=1e-300)), 0.05), least)
    draw = torch.Generator().manual_seed(r.seed)

    def near(t: Tensor) -> Tensor:
        noise = torch.randn(t.shape, generator=draw, dtype=torch.float64).to(t.device)
        return (t.double() * (1 + step * noise)).to(t.dtype)

    for _ in range(3):
        again = [_first_error(kernel, {
            n: near(v) if isinstance(v, Tensor) and v.is_floating_point() and v.dtype.itemsize > 1
            else v for n, v in values.items()}) for values in calls]
        errors = [e[0].reshape(-1) for e in again if e is not None]
        if len(errors) == len(firsts) and sum(map(len, errors)) == len(error):
            yield float(torch.nn.functional.cosine_similarity(error, torch.cat(errors), dim=0))


def _first_error(kernel: Kernel, values: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    """Returns the error of the result of floats that is most wrong, and that result; of results
    that have more than a few numbers, if there are any."""
    try:
        with torch.no_grad():
            pairs = [(got.double(), want) for got, want in zip(
                results_of(call(kernel, values)), formula(kernel.op, upcast(values)))
                if isinstance(want, Tensor) and want.is_floating_point() and want.numel()
                and got.shape == want.shape]
    except FAULTS:
        return None
    pairs = [pair for pair in pairs if pair[1].numel() > FEW_NUMBERS] or pairs
    errors = [((got - want).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0),
               want.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)) for got, want in pairs]
    return max(errors, default=None, key=lambda pair: float(
        pair[0].norm() / pair[1].norm().clamp(min=1e-300)))
