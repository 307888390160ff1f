"""Makes failing calls again with other numbers, pages and lengths, each chosen so that it could
refute what it is to confirm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ....machine.faults import FAULTS
from ....spec.kernel import Kernel
from ....spec.op import Op
from ...certification.invariance import axis_of
from ...kernel.contract import CaseResult, call, case_values, formula, results_of, upcast
from ...kernel.results import are_equal
from .calls_again import calls_of_other_contents, is_right, sample_failures, values_of

Values = dict[str, Any]
FEW = 16                                       # numbers of a result that say nothing of a factor


def _votes(counts: Counter[str], texts: dict[str, str], sample: Sequence[CaseResult],
           detail: str) -> tuple[str, str] | None:
    """Returns the class that every sampled call votes for."""
    return next(((kind, f"{texts[kind]}: {detail}") for kind, count in counts.items()
                 if count == len(sample)), None)


def _wrong(kernel: Kernel, values: Values, dtype: str) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields each result of floats with the exact one, and where it is wrong."""
    rtol, atol = (max(8 * t, 1e-6) for t in kernel.op.tolerance.of(dtype))
    with torch.no_grad():
        pairs = zip(results_of(call(kernel, values)), formula(kernel.op, upcast(values)))
        for got, want in pairs:
            if not isinstance(want, Tensor) or not isinstance(got, Tensor):
                continue
            got, want = got.double(), want.double()
            if got.shape == want.shape:
                yield got, want, ~torch.isclose(got, want, rtol=rtol, atol=atol, equal_nan=True)


# Numbers that are not finite.

def differs_in_finiteness(kernel: Kernel, values: Values, dtype: str) -> bool:
    """Is every wrong number of a call one that is not finite, or is not in the formula?"""
    some = False
    try:
        for got, want, wrong in _wrong(kernel, values, dtype):
            if bool((wrong & got.isfinite() & want.isfinite()).any()):
                return False
            some = some or bool(wrong.any())
    except FAULTS:
        return False
    return some


def is_formula_finite(kernel: Kernel, failed: Sequence[CaseResult], device: str) -> bool:
    """Has the formula finite numbers alone for the sampled failing calls?"""
    calls = [v for r in sample_failures(failed, 3)
             if (v := values_of(kernel, r, device)) is not None]
    return all(bool(t.double().isfinite().all()) for v in calls
               for t in formula(kernel.op, upcast(v))
               if isinstance(t, Tensor) and t.is_floating_point())


def explain_by_finiteness(kernel: Kernel, failed: Sequence[CaseResult],
                          device: str) -> tuple[str, str] | None:
    """Explains calls in which nothing is wrong but what is not finite: by the size of numbers,
    where smaller ones mend it."""
    op, votes = kernel.op, Counter()           # type: Op, Counter[str]
    sample = [(r, v) for r in sample_failures(failed, 3)
              if (v := values_of(kernel, r, device)) is not None]
    for r, values in sample:
        if not differs_in_finiteness(kernel, values, r.dtype):
            return None
        main = values.get(op.main_tensor)
        smaller = (isinstance(main, Tensor) and main.is_floating_point() and main.dtype.itemsize > 1
                   and is_right(kernel, {**values, op.main_tensor: main * 2.0 ** -7}, r.dtype)
                   and not _divides_by_nothing(kernel, values, r.dtype))
        votes["overflow" if smaller or _are_beyond_range(kernel, values, r.dtype)
              else "non-finite values"] += 1
    if len(votes) > 1:                         # some are mended: the others are larger still
        votes = Counter({"non-finite values": len(sample)})
    return _votes(votes, {"overflow": "right with the same numbers 128 times smaller, or infinite "
                                      "where the formula and all inputs are finite",
                          "non-finite values": "wrong only in numbers that are not finite, or are "
                                               "not where the formula's are"},
                  [r for r, _ in sample], failed[0].detail) if sample else None


def _are_beyond_range(kernel: Kernel, values: Values, dtype: str) -> bool:
    """Is every wrong number infinite, where the formula's and all of the call are finite?"""
    if not all(bool(t.isfinite().all()) for t in values.values() if isinstance(t, Tensor)
               and t.is_floating_point() and t.dtype.itemsize > 1):
        return False
    return all(bool((got.isinf() & want.isfinite() | ~wrong).all())
               for got, want, wrong in _wrong(kernel, values, dtype))


def _divides_by_nothing(kernel: Kernel, values: Values, dtype: str) -> bool:
    """Are the same numbers right in another order, and is the formula zero in every wrong row?
    Then a sum is too small to divide by, and none too large."""
    name, main = kernel.op.main_tensor, values[kernel.op.main_tensor]
    others = ({**values, name: main.roll(by, -1)} for by in range(1, 9) if main.dim())
    if not any(is_right(kernel, other, dtype) for other in others):
        return False
    wrong_rows = (want.reshape(-1, want.shape[-1])[wrong.reshape(-1, want.shape[-1]).any(1)]
                  for _, want, wrong in _wrong(kernel, values, dtype) if want.dim())
    tiny = torch.finfo(main.dtype).tiny
    return all(bool((rows.abs() <= tiny).all()) for rows in wrong_rows)


def is_wrong_beside_zeros(kernel: Kernel, failed: Sequence[CaseResult], device: str) -> bool:
    """Is a number of every sampled failing call wrong that is finite in the formula, and not zero?
    """
    calls = [(v, r.dtype) for r in sample_failures(failed, 3)
             if (v := values_of(kernel, r, device)) is not None]
    return bool(calls) and all(any(bool((wrong & want.isfinite() & (want != 0)).any())
                                   for _, want, wrong in _wrong(kernel, *c)) for c in calls)


def is_right_when_finite(kernel: Kernel, failed: Sequence[CaseResult], device: str) -> bool:
    """Have sampled failing calls infinities or NaN, and are right in the same sizes with numbers in
    their place?"""
    calls = (v for r in sample_failures(failed, 3)
             if (v := values_of(kernel, r, device)) is not None)
    mains = [t for v in calls if isinstance(t := v.get(kernel.op.main_tensor), Tensor)]
    return (not any(t.is_floating_point() and t.dtype.itemsize > 1 and bool(t.isfinite().all())
                    for t in mains) and is_right_with_other_numbers(kernel, failed, device))


def is_right_with_other_numbers(kernel: Kernel, failed: Sequence[CaseResult], device: str) -> bool:
    """Are sampled failing calls right in the same sizes with numbers in the place of infinities and
    NaN, or 128 times smaller where all are finite, and wrong as they are?"""
    calls = [(v, r.dtype) for r in sample_failures(failed, 3)
             if (v := values_of(kernel, r, device)) is not None]
    name = kernel.op.main_tensor

    def is_mended(values: Values, dtype: str) -> bool:
        main = values.get(name)
        if (not isinstance(main, Tensor) or not main.is_floating_point()
                or main.dtype.itemsize == 1):
            return False
        other = (main * 2.0 ** -7 if bool(main.isfinite().all())
                 else main.nan_to_num(nan=0.0, posinf=64.0, neginf=-64.0))
        return (not is_right(kernel, values, dtype)
                and is_right(kernel, {**values, name: other}, dtype))

    return bool(calls) and all(is_mended(*c) for c in calls)


def is_right_with_smaller_numbers(kernel: Kernel, failed: Sequence[CaseResult],
                                  device: str) -> bool:
    """Are sampled failing calls right in the same sizes with codes or numbers 8 times smaller,
    though they are so wrong that an error which shrinks with them would be seen?"""
    sample = sample_failures([r for r in failed if not r.circumstance], 3)
    return bool(sample) and all(
        r.dtype == "float32" and r.ratio > 1e4
        and any(is_right(kernel, v, r.dtype) for v in _with_smaller_numbers(
            kernel.op, case_values(kernel.op, r.case, r.dtype, device, r.seed)))
        for r in sample)


def _with_smaller_numbers(op: Op, values: Values) -> Iterator[Values]:
    for name, t in values.items():
        if not isinstance(t, Tensor) or not t.numel():
            continue
        if name == op.main_tensor and t.dtype == torch.float32:
            yield {**values, name: t / 8}
        elif t.dtype == torch.int8 and int(t.int().abs().max()) > 64:
            yield {**values, name: t.div(8, rounding_mode="trunc")}


# One factor.

def explain_by_factor(kernel: Kernel, failed: Sequence[CaseResult],
                      device: str) -> tuple[str, str] | None:
    """Explains calls whose every result is the formula's times one number."""
    factors: list[float] = []
    for r in sample_failures([r for r in failed if not r.circumstance], 3):
        values = case_values(kernel.op, r.case, r.dtype, device, r.seed)
        rtol, atol = (max(8 * t, 1e-6) for t in kernel.op.tolerance.of(r.dtype))
        try:
            results = [(got, want) for got, want, wrong in _wrong(kernel, values, r.dtype)
                       if bool(wrong.any())]
        except FAULTS:
            return None
        for got, want in results:
            factor = float((got * want).sum() / want.square().sum().clamp(min=1e-300))
            # of a few numbers any may be a multiple
            if want.numel() < FEW or not torch.allclose(got, factor * want, rtol=rtol, atol=atol):
                return None
            factors.append(factor)
    return None if not factors else (
        "scale", f"every number is {factors[0]:.4g} times the formula's: {failed[0].detail}")


# Pages.

def explain_by_pages(kernel: Kernel, failed: Sequence[CaseResult],
                     device: str) -> tuple[str, str] | None:
    """Explains failing calls over pages whose unused slots hold infinities: a kernel whose result
    changes with the numbers there reads them, and one that is right where all pages are alike reads
    other pages than the table says."""
    sample = sample_failures([r for r in failed if not r.circumstance], 3)
    votes: Counter[str] = Counter()
    for r in sample:
        values = case_values(kernel.op, r.case, r.dtype, device, r.seed)
        caches = [n for n in values if n.endswith("_cache")]
        if (not isinstance(values.get("context_lens"), Tensor) or not caches
                or any(values[n].dtype.itemsize == 1 for n in caches)):
            return None
        votes[_vote_of_pages(kernel, values, caches, r.dtype)] += 1
    votes.pop("", None)
    return _votes(votes, {
        "stale page": "right where all pages are alike: it reads other pages than the table's",
        "out of bounds": "its result changes with the slots that are not used: it reads them"},
        sample, failed[0].detail)


def _vote_of_pages(kernel: Kernel, values: Values, caches: Sequence[str], dtype: str) -> str:
    def filled(number: float) -> Values:
        return {**values, **{n: values[n].nan_to_num(posinf=number) for n in caches}}

    plain = filled(0.5)
    alike = {n: plain[n][:1].expand_as(plain[n]).contiguous() for n in caches}
    try:
        if is_right(kernel, plain, dtype):     # infinities times zero
            return ""
        with torch.no_grad():
            if is_right(kernel, {**plain, **alike}, dtype):
                moved = (results_of(call(kernel, v)) for v in (plain, _relabelled(plain, caches)))
                return "" if are_equal(*moved) else "stale page"
            runs = [results_of(call(kernel, v)) for v in (plain, filled(2.0))]
        return "" if are_equal(*runs) else "out of bounds"
    except FAULTS:
        return ""


def _relabelled(values: Values, caches: Sequence[str]) -> Values:
    """Returns the call with its pages elsewhere, and a table that says so: for one who follows the
    table nothing changes."""
    table, count = values["block_table"], values[caches[0]].shape[0]
    order = torch.arange(count, device=table.device).flip(0)
    inside = (table >= 0) & (table < count)
    return {**values, **{n: values[n][order] for n in caches}, "block_table": torch.where(
        inside, order[table.clamp(0, count - 1).long()].to(table.dtype), table)}


# Equal numbers, and the last rows.

def explain_by_values(kernel: Kernel, failed: Sequence[CaseResult],
                      device: str) -> tuple[str, str] | None:
    """Reruns failing cases without ties, and with more rows behind those that are wrong."""
    op, votes = kernel.op, Counter()           # type: Op, Counter[str]
    sample = sample_failures([r for r in failed if not r.circumstance], 3)
    for r in sample:
        values = case_values(op, r.case, r.dtype, device, r.seed)
        main = values[op.main_tensor]
        if (not main.is_floating_point() or main.dtype.itemsize == 1 or not main.numel()
                or is_right(kernel, values, r.dtype)):     # wrong by too little for this judge
            continue
        if _is_right_without_ties(kernel, values, r.dtype):
            votes["ties"] += 1
        elif _is_wrong_in_one_tail(kernel, r, values, device):
            votes["last rows"] += 1
    return _votes(votes, {
        "ties": "right where no two numbers of a row are equal",
        "last rows": "every row but the last ones is right, and these are with others behind "
                     "them"}, sample, failed[0].detail)


def _is_right_without_ties(kernel: Kernel, values: Values, dtype: str) -> bool:
    """Do numbers without equal ones mend a call, where other numbers with the same ties do not,
    and none that is zero? Not where NaN is wrong: rows of zeros are equal too, and divided by their
    largest number."""
    main = values[kernel.op.main_tensor]
    order = torch.arange(main.shape[-1] if main.dim() else 1, device=main.device)
    tied = main.float().clamp(-100, 100) * 1.25
    spaced = main.float().clamp(-100, 100) + (order.float() - order.numel() / 2) * 2.0 ** -6
    name = kernel.op.main_tensor
    # zeros have one code, whatever their number
    counted = main[main != 0] if kernel.op.family == "quantization" else main
    raised = [] if kernel.op.family == "quantization" else [main.float().clamp(-100, 100) + 101]
    return (_has_ties(counted) and is_right(kernel, {**values, name: spaced.to(main)}, dtype)
            and not any(is_right(kernel, {**values, name: x.to(main)}, dtype)
                        for x in (tied, *raised))
            and not differs_in_finiteness(kernel, values, dtype))


def _has_ties(t: Tensor) -> bool:
    rows = t.reshape(-1, t.shape[-1])[:64] if t.dim() else ()
    return any(row.unique().numel() < row.numel() for row in rows)


def _is_wrong_in_one_tail(kernel: Kernel, r: CaseResult, values: Values, device: str) -> bool:
    """Is the call wrong in its last rows only, and with other numbers, ids and lengths in no other
    rows? A place that contents fill up, as an expert's, ends where they say."""
    tail = wrong_tail(kernel, values, r.dtype)
    if tail is None:
        return False
    axis, bad = tail
    for other in calls_of_other_contents(kernel, r, device):
        rows = _wrong_rows(_first_wrong(kernel, other, r.dtype), axis)
        if not bool(rows.any()) or bool(rows[:-bad].any()):
            return False
    return True


def wrong_tail(kernel: Kernel, values: Values, dtype: str) -> tuple[int, int] | None:
    """Returns the axis along which the first result is wrong in its last rows only, and how many
    they are: fewer than are right, which the same rows are too in a call that goes on behind them.
    What is wrong from a certain row on stays so."""
    op = kernel.op
    variant = values[op.variant] if op.variant else ""
    # a result of another shape than declared has the rows of the main tensor
    tokens = next(iter(op.result_patterns[variant]), op.patterns[variant].get(op.main_tensor, ()))
    try:
        wrong = _first_wrong(kernel, values, dtype)
        for axis in range(max(wrong.dim() - 1, 0)):
            rows = _wrong_rows(wrong, axis)
            count, bad = rows.numel(), int(rows.sum())
            # of two or three rows the last may be wrong for another reason: of a batch, of heads
            if count <= 3 or not 0 < bad <= count // 2 or not bool(rows[-bad:].all()):
                continue
            token = next((t for t in tokens if axis_of(wrong, tokens, t) == axis), "")
            longer = _twice(op, values, token.lstrip("*"))
            if longer is None:
                continue
            again = _first_wrong(kernel, longer, dtype)
            if (again.dim() == wrong.dim() and again.shape[axis] == 2 * count
                    and not bool(_wrong_rows(again, axis)[:count].any())
                    and _has_the_same_rows(op, values, longer, axis)):
                return axis, bad
    except FAULTS:
        return None
    return None


def _has_the_same_rows(op: Op, values: Values, longer: Values, axis: int) -> bool:
    """Does the longer call begin with the rows of the other? Of twice as many heads the first
    ones share other keys."""
    with torch.no_grad():
        rows, more = formula(op, upcast(values))[0], formula(op, upcast(longer))[0]
    return torch.allclose(more.narrow(axis, 0, rows.shape[axis]).double(), rows.double(),
                          rtol=1e-9, atol=1e-9, equal_nan=True)


def _first_wrong(kernel: Kernel, values: Values, dtype: str) -> Tensor:
    return next((wrong for _, _, wrong in _wrong(kernel, values, dtype)), torch.zeros(()))


def _wrong_rows(wrong: Tensor, axis: int) -> Tensor:
    return wrong.movedim(axis, 0).reshape(wrong.shape[axis], -1).any(1)


def _twice(op: Op, values: Values, dim: str) -> Values | None:
    """Returns the call with every tensor that has this size followed by itself; None where a tensor
    may be broadcast along it."""
    longer, patterns = dict(values), op.patterns[values[op.variant] if op.variant else ""]
    for name, tokens in patterns.items():
        t, token = values.get(name), next((k for k in tokens if k.lstrip("*~") == dim), None)
        if not dim or not isinstance(t, Tensor) or token is None:
            continue
        axis = None if token.startswith("~") else axis_of(t, tokens, token)
        if axis is None:
            return None
        longer[name] = torch.cat([t, t], axis)
    return longer if dim else None
