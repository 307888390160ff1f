"""Explains a wrong result by altered references that give what the kernel gives: the mistakes that
the op declares, and an argument left out or taken from the first row for all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...dispatch.facts import dtype_name
from ...machine.faults import FAULTS
from ...spec.kernel import Kernel
from ...spec.mistake import Mistake, Results
from ...spec.op import Op
from ..kernel.contract import (
    CaseResult,
    call,
    case_refusals,
    case_tensors,
    case_values,
    formula,
    results_of,
    upcast,
)
from .reruns.calls_again import are_close, is_right, sample_failures, values_of

MAX_RERUNS = 8                                 # failing cases that are rerun
# What an argument speaks of, by a part of its name.
CLASS_OF_ARGUMENT = (
    ("attn_mask", "mask"), ("window", "window"), ("alibi", "position bias"), ("softcap", "scale"),
    ("capacity", "capacity"), ("is_causal", "mask"), ("causal_align", "alignment"),
    ("stride_last", "layout"), ("contiguous", "layout"), ("key_scale", "scale"),
    ("value_scale", "scale"), ("scales", "scale"))


def class_of(name: str, otherwise: str) -> str:
    return next((kind for part, kind in CLASS_OF_ARGUMENT if part in name), otherwise)


def meaning_of(name: str) -> str:
    """Returns the class of a kernel that means something else by this argument."""
    return "scale" if name == "scale" else class_of(name, "convention")


def explain_by_mistake(kernel: Kernel, failed: Sequence[CaseResult],
                        device: str) -> tuple[str, str] | None:
    """Returns the mistake that explains most failing cases, if two thirds of those it applies
    to."""
    votes: Counter[tuple[str, str]] = Counter()
    applied: Counter[tuple[str, str]] = Counter()
    shown: dict[tuple[str, str], tuple[Mistake, CaseResult]] = {}
    sample = sample_failures(failed, MAX_RERUNS)
    for r in sample:
        values = values_of(kernel, r, device)
        if values is None:
            continue
        try:
            with torch.no_grad():
                out, expected = results_of(call(kernel, values)), formula(kernel.op, upcast(values))
        except FAULTS:
            continue
        other = case_values(kernel.op, r.case, r.dtype, device, r.seed + 1001)
        for mistake in (*kernel.op.mistakes, *_undeclared(kernel.op, values)):
            altered = _altered_results(kernel.op, mistake.apply, values)
            if (altered is None or are_close(kernel.op, r.dtype, altered, expected)
                    or _is_constant(kernel.op, mistake.apply, altered, other, r)):
                continue
            applied[mistake.kind, mistake.words] += 1
            if are_close(kernel.op, r.dtype, out, altered) and not _is_of_finiteness(
                    mistake, altered, expected):
                votes[mistake.kind, mistake.words] += 1
                shown.setdefault((mistake.kind, mistake.words), (mistake, r))
    best = max(votes, key=lambda k: (votes[k], -applied[k]), default=None)
    if (best is None or votes[best] * 3 < applied[best] * 2
            or not _is_confirmed(kernel, *shown[best], device)
            or (best[0] == "convention" and not _holds_elsewhere(kernel, *shown[best], device))):
        return None
    return best[0], (f"it gives what the reference gives with {best[1]}, in {votes[best]} of "
                     f"{applied[best]} failing cases where that makes a difference")


def _is_of_finiteness(mistake: Mistake, altered: Sequence[Any], expected: Sequence[Any]) -> bool:
    """Does a mistake about a number, a factor or a place make nothing but infinities and NaN? Many
    do."""
    pairs = [(a.double(), b.double()) for a, b in zip(altered, expected)
             if isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape]
    finite = [(a[both], b[both]) for a, b in pairs if bool((both := a.isfinite() & b.isfinite())
                                                           .any())]
    return (mistake.kind in ("convention", "scale", "stale page", "head map")
            and any(not torch.equal(a.isfinite(), b.isfinite()) for a, b in pairs)
            and all(torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in finite))


def _is_confirmed(kernel: Kernel, mistake: Mistake, r: CaseResult, device: str) -> bool:
    """Does the kernel mostly give what the altered reference gives with other numbers that make a
    difference too, and is it right with none, unless it takes a circumstance to be wrong? A few
    numbers may be the same by chance, and of extreme scores one value is left."""
    op, matches = kernel.op, []                # type: Op, list[bool]
    mild = {n: v for n, v in r.case.items() if n != "extreme"}
    calls = [(r.case, 1001), (r.case, 1002), (r.case, 1003)]
    calls += [(mild, by) for by in (0, 1001, 1002, 1003)] if mild != r.case else []
    for case, by in calls:
        values = case_values(op, case, r.dtype, device, r.seed + by)
        altered = _altered_results(op, mistake.apply, values)
        try:
            with torch.no_grad():
                out, expected = results_of(call(kernel, values)), formula(op, upcast(values))
        except FAULTS:
            continue
        if altered is None or are_close(op, r.dtype, altered, expected):
            continue
        if are_close(op, r.dtype, out, expected):
            if case == r.case and not r.circumstance:
                return False
            continue
        matches.append(are_close(op, r.dtype, out, altered))
    return 3 * sum(matches) >= 2 * len(matches)


def _holds_elsewhere(kernel: Kernel, mistake: Mistake, r: CaseResult, device: str) -> bool:
    """Is no case of the op with the same tensors right in which the mistake makes a difference?
    What a kernel means by an argument is the same in all."""
    op = kernel.op

    def ranks(case: Mapping[str, Any]) -> dict[str, int]:
        return {n: t.dim() for n, t in case_tensors(op, case, r.dtype, device, r.seed).items()}

    for case in () if r.circumstance else op.cases:
        if (not case_refusals(kernel, case, r.dtype, device, r.seed)
                and ranks(case) == ranks(r.case)):
            values = case_values(op, case, r.dtype, device, r.seed)
            altered = _altered_results(op, mistake.apply, values)
            if (altered is not None and not are_close(op, r.dtype, altered,
                                                      formula(op, upcast(values)))
                    and is_right(kernel, values, r.dtype)):
                return False
    return True


def _is_constant(op: Op, alter: Any, altered: tuple[Any, ...], other: dict[str, Any],
                 r: CaseResult) -> bool:
    """Is the altered result a number that it is with all other numbers too, as the loss of one
    class is zero? Then it says nothing that a kernel gives it as well."""
    single = all(isinstance(t, Tensor) and t.numel() == 1 for t in altered)
    again = _altered_results(op, alter, other) if single and not r.circumstance else None
    return again is not None and all(
        isinstance(t, Tensor) and torch.equal(t, u) for t, u in zip(altered, again))


def _meaning(op: Op, value: Any) -> str:
    """Returns what an argument is about that no name tells: of a draw the weights, or how rows of
    integers are read."""
    indices = isinstance(value, Tensor) and not value.is_floating_point()
    return "distribution" if op.family == "sampling" and not indices else "convention"


def _undeclared(op: Op, values: Mapping[str, Any]) -> Iterator[Mistake]:
    """Yields what any adapter may do with an optional argument: ignore it, or read its first row
    for all."""
    declared = {mistake.words for mistake in op.mistakes}
    for p in op.params:
        value = values[p.name]
        if p.required or p.name == op.variant or (not isinstance(value, Tensor)
                                                  and value == p.default):
            continue
        kind = class_of(p.name, _meaning(op, value))
        if not any(p.name in words and "left out" in words for words in declared):
            yield Mistake(kind, f"{p.name} ignored",
                          lambda op, v, p=p: {**v, p.name: p.default})  # type: ignore[misc]
        if isinstance(value, Tensor) and value.dim() and value.shape[0] > 1:
            yield Mistake(kind, f"the first row of {p.name} for all", lambda op, v, n=p.name: {  # type: ignore[misc]
                **v, n: v[n][:1].expand_as(v[n])})
    scales = [p.name for p in op.params if not p.required and p.name.endswith("_scale")
              and isinstance(t := values[p.name], Tensor) and t.dim() and t.shape[0] > 1]
    if len(scales) > 1:
        yield Mistake("scale", f"the first row of {' and '.join(scales)} for all", lambda op, v: {
            **v, **{n: v[n][:1].expand_as(v[n]) for n in scales}})
    yield from _other_readings(op, values)


# What a required tensor speaks of, by a part of its name.
_CLASS_OF_TENSOR = (("block_table", "stale page"), ("lens", "mask"), ("starts", "mask"),
                    ("position_ids", "alignment"))


def _has_padding(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.int32, torch.int64) \
        and bool((value < 0).any())


def _count_from_the_end(name: str, count: int, op: Op, values: dict[str, Any]) -> dict[str, Any]:
    t = values[name]
    return {**values, name: torch.where(t < 0, t + count, t)}


def _other_readings(op: Op, values: Mapping[str, Any]) -> Iterator[Mistake]:
    """Yields how a tensor beside the main ones may be read otherwise: the first row for all,
    alone or of all tables at once, a square one transposed, codes of a byte as another type."""
    def kind(name: str) -> str:
        other = next((k for part, k in _CLASS_OF_TENSOR if part in name), "convention")
        by_name = _meaning(op, values[name]) == "convention"
        return class_of(name, other) if by_name else "distribution"

    tables = [p.name for p in op.params if isinstance(values[p.name], Tensor)
              and p.name not in (op.main_tensor, *op.same_dtype)]
    rows = [n for n in tables if values[n].dim() > 1 and values[n].shape[0] > 1]
    for names in (*([n] for n in rows if op.by_name[n].required), *([rows] if rows else ())):
        yield Mistake(kind(names[0]), f"the first row of {' and '.join(names)} for all",
                      lambda op, v, names=names: {  # type: ignore[misc]
                          **v, **{n: v[n][:1].expand_as(v[n]) for n in names}})
    counts = sorted({n for v in values.values() if isinstance(v, Tensor) and v.is_floating_point()
                     for n in (*v.shape[:1], *v.shape[-1:])})
    for name in (p.name for p in op.params if _has_padding(values[p.name])):
        yield from (Mistake("mask", f"negative {name} counted from the end of {n}",
                            partial(_count_from_the_end, name, n)) for n in counts)
    for name in tables:
        t = values[name]
        if t.dim() > 1 and t.shape[-1] == t.shape[-2] > 1:
            yield Mistake(kind(name), f"{name} transposed", lambda op, v, n=name: {  # type: ignore[misc]
                **v, n: v[n].transpose(-1, -2)})
        for dtype in _BYTES if t.dtype in _BYTES else ():
            if dtype != t.dtype:
                alike = [n for n in tables if values[n].dtype == t.dtype]
                for names in ([name], alike) if len(alike) > 1 else ([name],):
                    yield Mistake(
                        kind(name), f"{' and '.join(names)} read as {dtype_name(dtype)}",
                        partial(_read_as, {n: values[n] for n in names}, dtype))


_BYTES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8)


def _read_as(codes: Mapping[str, Tensor], dtype: torch.dtype, op: Op,
             v: dict[str, Any]) -> dict[str, Any]:
    """Returns a call with codes of one type taken for those of another."""
    return {**v, **upcast({n: t.contiguous().view(dtype) for n, t in codes.items()})}


def scale_mistake(kernel: Kernel, failed: Sequence[CaseResult],
                   device: str) -> tuple[str, str] | None:
    """Returns a mistake of the scale, which the sizes of a call make: those of its heads."""
    mistake = explain_by_mistake(kernel, failed, device)
    return mistake if mistake and mistake[0] == "scale" else None


def _altered_results(op: Op, alter: Any, values: dict[str, Any]) -> tuple[Any, ...] | None:
    """Returns the results of the altered reference, floats in float64; None where it does not
    apply."""
    try:
        with torch.no_grad():
            outcome = alter(op, upcast(values))
            if outcome is None:
                return None
            return outcome.values if isinstance(outcome, Results) else formula(op, outcome)
    except FAULTS:                             # the mistake makes no sense for this call
        return None
