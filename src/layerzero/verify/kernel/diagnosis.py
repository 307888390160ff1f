"""Diagnoses a failed kernel: its wrong results are compared with those of deliberately altered
references.

A diagnosis is a class, a sentence with its evidence, where the kernel fails ("exactly where seq_q %
128 = 64 and attn_mask is given") and what to do.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...dispatch.facts import read
from ...machine.faults import FAULTS
from ...spec.alteration import Results
from ...spec.kernel import Kernel
from ...spec.op import Op
from .circumstances import circumstances
from .contract import CaseResult, Circumstance, call, case_values, formula, results_of, upcast
from .guarded import guarded, poisoned_memory

# class -> what to do about it
CLASSES: Mapping[str, str] = {
    "mask":
        "look at how the mask, causality or sequence boundaries reach the kernel; or let a rule "
        "refuse such calls",
    "alignment":
        "the diagonal is where causal_align says: pass the kernel its offset, or let a rule refuse "
        "the other",
    "convention": "the library means something else by this argument: convert it in the backend's "
                  "adapter",
    "scale": "look at which factor the library applies itself, and where",
    "head map": "query head h belongs to KV head h // group: expand with repeat_interleave, not "
                "repeat",
    "window": "the window counts keys left and right of the diagonal, the diagonal itself not "
              "included",
    "position bias": "pass the bias on, or let a rule refuse calls with one",
    "capacity": "an expert serves the first `capacity` pairs in token order, no fewer and no more",
    "distribution": "the draw must be the contract's function of its random number; see "
                    "ops/formulas/sampling.py",
    "precision": "accumulate in float32 or wider, and round once at the end",
    "uninitialised output": "write every element of the result; rows, tails and empty inputs too",
    "out of bounds": "read and write only what the shapes, strides and lengths cover",
    "stale page": "follow block_table on every call",
    "non-determinism": "declare deterministic=False, or make the order of summation fixed",
    "in-place change": "work on a copy: the caller's tensors are not the kernel's",
    "aliasing": "return memory of the result's own",
    "gradient": "mend the backward, or declare differentiable=False",
    "dtype": "the result has the dtype of the contract, whatever autocast says",
    "layout": "honour the strides, or declare a rule (contiguous): such calls are then copied or "
              "refused",
    "state": "keep nothing between calls that is not looked up by contents or version",
    "shape": "return what the op's meta function says",
    "global state": "leave torch's settings and random numbers as they were",
    "threads": "give every call scratch memory of its own",
    "index overflow": "count offsets in 64 bits",
    "mode": "one way for every mode of torch: gradients recorded or not, inference mode or not",
    "sizes": "the kernel is wrong for some sizes only: mend it, or let a rule refuse them",
    "fault": "mend it, or let a rule refuse what it cannot do",
    "unknown": "compare it with the op's reference on the case above",
}
# Kinds of complaint that are the diagnosis if every failing case has them.
_DIRECT = ("distribution", "in-place change", "aliasing", "shape", "dtype", "threads", "fault",
           "global state")
_BY_CIRCUMSTANCE = (
    ("given the ", "convention"), ("autocast", "dtype"), ("2^31", "index overflow"),
    ("changed in place", "state"), ("after another call", "state"),
    ("threads", "threads"), ("inference mode", "mode"), ("recording gradients", "mode"),
    (" is ", "layout"), ("eight times", "state"), ("sparse", "layout"), ("padded", "layout"),
    ("transposed", "layout"), ("offset", "layout"), ("spread", "layout"), ("filled with", "sizes"))
# And by the fact that distinguishes failing calls.
_BY_FACT = (("attn_mask", "mask"), ("window", "window"), ("alibi", "position bias"),
            ("softcap", "scale"), ("causal_align", "alignment"), ("stride_last", "layout"),
            ("contiguous", "layout"))
STRIDED = ("sparse", "padded", "transposed", "offset", "spread")
MAX_RERUNS = 8                                 # failing cases that are rerun


@dataclass(frozen=True)
class Diagnosis:
    kind: str                                  # one of CLASSES
    says: str
    where: str = ""

    @property
    def advice(self) -> str:
        return CLASSES[self.kind]

    def __str__(self) -> str:
        where = f"; of these cases it fails exactly where {self.where}" if self.where else ""
        return f"{self.kind}: {self.says}{where}. What to do: {self.advice}"


def diagnose(kernel: Kernel, results: Sequence[CaseResult],
             device: str = "cpu") -> Diagnosis | None:
    """Returns the diagnosis; None if nothing failed."""
    failed = [r for r in results if r.status == "failed"]
    if not failed:
        return None
    where = failing_conditions(kernel.op, results, device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind, says = _explain(kernel, failed, results, device, where)
    return Diagnosis(kind, says, where)


def _explain(kernel: Kernel, failed: Sequence[CaseResult], results: Sequence[CaseResult],
             device: str,
             where: str) -> tuple[str, str]:
    for kind in _DIRECT:
        if all(kind in r.kinds for r in failed):
            return kind, failed[0].detail
    forward = [r for r in failed if not r.circumstance.startswith("backward")]
    if not forward:
        return "gradient", f"the forward pass is right, the backward is not: {failed[0].detail}"
    alteration = _explain_by_alteration(kernel, forward, device)
    if alteration:
        return alteration
    strided = [r for r in forward if "stride" in r.case or "memory" in r.case
               or r.circumstance.endswith(STRIDED)]
    if len(strided) == len(forward) and not any("out of bounds" in r.kinds for r in forward):
        return "layout", f"wrong for tensors that are not contiguous only: {forward[0].detail}"
    memory_fault = _explain_by_memory(kernel, forward, device)
    if memory_fault:
        return memory_fault
    names = {r.circumstance for r in forward}
    if all(names):                             # it fails only under circumstances
        for word, kind in _BY_CIRCUMSTANCE:
            if all(word in name for name in names):
                return (kind,
                        f"right as it is, wrong {_listed_names(sorted(names))}: "
                        f"{forward[0].detail}")
        kinds = Counter(next((k for word, k in _BY_CIRCUMSTANCE if word in name), "unknown")
                        for name in names)
        return kinds.most_common(1)[0][
            0], f"right as it is, wrong {_listed_names(sorted(names))}: {forward[0].detail}"
    for kind in _DIRECT:
        if all(kind in r.kinds for r in forward):
            return kind, forward[0].detail
    if all("non-determinism" in r.kinds for r in forward):
        has_errors = any("error" in r.kinds or "not finite" in r.kinds for r in forward)
        return ("state" if has_errors else "non-determinism",
                f"the result depends on earlier calls: {forward[0].detail}")
    for fact, kind in _BY_FACT:
        if fact in where:
            return kind, forward[0].detail
    if kernel.op.read is not None:
        return "unknown", f"no altered reference explains it: {forward[0].detail}"
    dtypes = {r.dtype for r in forward}
    argument = _common_argument(kernel.op, where)
    if argument and "float32" in dtypes:
        return ("convention",
                f"right without {argument}, wrong with it, in float32 too: {forward[0].detail}")
    right_when_wide = ("float32" not in dtypes
                       and any(r.passed and r.dtype == "float32" for r in results))
    if right_when_wide or all(r.error < 0.05 for r in forward):
        excess = (f"{forward[0].ratio:.1f} times what is allowed" if math.isfinite(forward[0].ratio)
                  else "other codes")
        return "precision", (f"close, but {excess}, in "
                             f"{', '.join(sorted(dtypes))}: {forward[0].detail}")
    if any(r.passed for r in results) and where:
        return "sizes", forward[0].detail
    if kernel.op.family == "sampling":
        return ("distribution",
                f"other tokens or probabilities than the contract's: {forward[0].detail}")
    return "unknown", f"no altered reference explains it: {forward[0].detail}"


def _common_argument(op: Op, where: str) -> str:
    """Returns the optional argument that all failing calls give, "" if there is none."""
    for part in where.split(" and "):
        name, _, value = part.partition(" is ")
        param = op.by_name.get(name.split(" ")[0].partition(".")[0])
        if param is not None and not param.required and value != str(param.default):
            return param.name
    return ""


def _listed_names(names: Sequence[str]) -> str:
    return "under " + (" / ".join(names[:4])) + (f" and {len(names) - 4} more" if len(names) > 4
                                                 else "")


# By altered references.

def _explain_by_alteration(kernel: Kernel, failed: Sequence[CaseResult],
                           device: str) -> tuple[str, str] | None:
    """Returns the alteration that explains most failing cases, if at least half of those it applies
    to."""
    votes: Counter[tuple[str, str]] = Counter()
    applied: Counter[tuple[str, str]] = Counter()
    sample = _sample(failed, MAX_RERUNS)
    for r in sample:
        values = _values_of(kernel, r, device)
        if values is None:
            continue
        try:
            with torch.no_grad():
                out, expected = results_of(call(kernel, values)), formula(kernel.op, upcast(values))
        except FAULTS:
            continue
        for alteration in kernel.op.alterations:
            altered = _altered_results(kernel.op, alteration.alter, values)
            if altered is None or _are_close(kernel.op, r.dtype, altered, expected):
                continue
            applied[alteration.kind, alteration.words] += 1
            votes[alteration.kind, alteration.words] += _are_close(kernel.op, r.dtype, out, altered)
    if (not votes or not (best := max(votes, key=lambda k: (votes[k], -applied[k])))
        or not votes[best]):
        return None
    if votes[best] * 2 < applied[best]:
        return None
    return (best[0],
            (
                f"it gives what the reference gives with {best[1]}, in {votes[best]} of "
                         f"{applied[best]} failing cases where that makes a difference"))


def _altered_results(op: Op, alter: Any, values: dict[str, Any]) -> tuple[Any, ...] | None:
    """Returns the results of the altered reference, floats in float64; None where it does not
    apply."""
    try:
        with torch.no_grad():
            outcome = alter(op, upcast(values))
            if outcome is None:
                return None
            return outcome.values if isinstance(outcome, Results) else formula(op, outcome)
    except FAULTS:                             # the alteration makes no sense for this call
        return None


def _are_close(op: Op, dtype: str, a: Sequence[Any], b: Sequence[Any]) -> bool:
    if len(a) != len(b):
        return False
    rtol, atol = op.tolerance.of(dtype)
    for x, y in zip(a, b):
        if not isinstance(x, Tensor) or not isinstance(y, Tensor):
            if x != y:
                return False
        elif x.shape != y.shape:
            return False
        elif not x.is_floating_point() or not y.is_floating_point():
            if not torch.equal(x, y):
                return False
        elif not torch.allclose(x.double(), y.double(), rtol=max(8 * rtol, 1e-6),
                                atol=max(8 * atol, 1e-6),
                                equal_nan=True):
            return False
    return True


def _sample(failed: Sequence[CaseResult], count: int) -> list[CaseResult]:
    """Samples failing cases evenly, the widest dtype first, without large ones if possible."""
    ranked = sorted(failed, key=lambda r: (bool(r.circumstance),
                                           {"float32": 0, "int64": 0}.get(r.dtype, 1)))
    large = [r for r in ranked if any(type(n) is int and n > 8_000 for n in r.case.values())]
    # each is rerun a dozen times
    ranked = [r for r in ranked if r not in large] or large[:1]
    step = max(len(ranked) // count, 1)
    return ranked[::step][:count]


def _find_circumstance(op: Op, name: str) -> Circumstance | None:
    return next((c for c in circumstances(op, "full") if c.name == name), None)


def _values_of(kernel: Kernel, r: CaseResult, device: str) -> dict[str, Any] | None:
    """Returns the values of a case in its circumstance; None if that changes more than values."""
    values = case_values(kernel.op, r.case, r.dtype, device, r.seed)
    if not r.circumstance:
        return values
    circumstance = _find_circumstance(kernel.op, r.circumstance)
    if circumstance is None or (type(circumstance).before is not Circumstance.before
                                or type(circumstance).around is not Circumstance.around):
        return None
    return circumstance.alter(kernel.op, values)


# By poisoned and guarded memory.

def _explain_by_memory(kernel: Kernel, failed: Sequence[CaseResult],
                       device: str) -> tuple[str, str] | None:
    """Reruns failing cases over poisoned memory, between margins of NaN, and repeatedly."""
    if kernel.op.read is not None:
        return None
    for r in _sample(failed, 3):
        values = _values_of(kernel, r, device)
        if values is None:
            continue
        try:
            with torch.no_grad():
                first = results_of(call(kernel, values))
                again = [results_of(call(kernel, values)) for _ in range(6)]
                with poisoned_memory():
                    poisoned = results_of(call(kernel, values))
                guarded_result = results_of(call(kernel, guarded(values)))
                expected = formula(kernel.op, upcast(values))
        except FAULTS:
            continue
        if not all(isinstance(t, Tensor) for t in first):
            return None
        if not _are_equal(first, poisoned) and _has_holes(poisoned, expected):
            return ("uninitialised output",
                    "over memory full of NaN its result has NaN: not every element is written")
        if not _are_equal(first, guarded_result) and _has_holes(guarded_result, expected):
            return ("out of bounds",
                    "with NaN on both sides of every input its result has NaN: it reads beside one")
        if any(not _are_equal(first, other) for other in again):
            all_right = all(_are_close(kernel.op, r.dtype, out, expected)
                            for out in (first, *again))
            if all_right or (kernel.deterministic and "non-determinism" in r.kinds):
                return "non-determinism", "the same call gives other results from run to run"
            return "state", "the same call gives another result from run to run, and a wrong one"
    return None


def _are_equal(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    def plain(t: Tensor) -> Tensor:
        if t.dtype.itemsize == 1:
            return t.view(torch.uint8)
        return t.nan_to_num(nan=12345.0) if t.is_floating_point() else t

    return all(torch.equal(plain(x), plain(y)) for x, y in zip(a, b))


def _has_holes(out: Sequence[Tensor], truth: Sequence[Tensor]) -> bool:
    """Does a result have NaN where the expected one has none, or the integers that fill fresh
    memory?"""
    for x, y in zip(out, truth):
        if x.is_floating_point() and x.dtype.itemsize > 1 and bool((x.isnan() & ~y.isnan()).any()):
            return True
        if not x.is_floating_point() and x.numel() and x.dtype != torch.bool:
            if (bool((x == torch.iinfo(x.dtype).max).any())
                and not bool((y == torch.iinfo(x.dtype).max).any())):
                return True
    return False


# By the facts of failing calls.

def failing_conditions(op: Op, results: Iterable[CaseResult], device: str = "cpu") -> str:
    """Returns the one or two facts that distinguish failing cases from passing ones; "" if none
    do."""
    calls: list[tuple[bool, dict[str, Any]]] = []
    for r in results:
        if r.status == "skipped" or r.circumstance.startswith("backward"):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                values = case_values(op, r.case, r.dtype, device, r.seed)
                circumstance = _find_circumstance(op, r.circumstance) if r.circumstance else None
                values = ((circumstance.alter(op, values) or values) if circumstance is not None
                          else values)
                facts = {n: v for n, v in read(op, values).items()
                         if not n.endswith(("alignment", "requires_grad"))}
            except FAULTS:
                continue
        calls.append((r.status == "failed", {**facts, "circumstance": r.circumstance or None}))
    failing, passing = [f for has_failed, f in calls if has_failed], [f for has_failed, f in calls
                                                                      if not has_failed]
    if not failing or not passing:
        return ""
    tests = [(text, {i for i, f in enumerate(passing) if test(f)})
             for text, test in _candidate_tests(failing, passing)]
    single = [text for text, passing_with_it in tests if not passing_with_it]
    if single:
        return single[0]
    selective = [first for first in tests if len(first[1]) < len(passing)]
    pairs = itertools.combinations(selective, 2)
    return next((f"{first[0]} and {second[0]}" for first, second in pairs
                 if not first[1] & second[1]), "")


Test = Callable[[Mapping[str, Any]], bool]


def _candidate_tests(failing: Sequence[Mapping[str, Any]],
                     passing: Sequence[Mapping[str, Any]]) -> list[tuple[str, Test]]:
    """Returns tests that all failing cases meet, the most specific first."""
    beyond: list[tuple[str, Test]] = []
    equal: list[tuple[str, Test]] = []
    numbers: list[tuple[str, Test]] = []
    remainder: list[tuple[str, Test]] = []
    bounds: list[tuple[str, Test]] = []
    for name in failing[0]:
        values: list[Any] = [f.get(name) for f in failing]
        first = values[0]
        if all(_is_number(v) for v in values):
            passing_values = [f[name] for f in passing if _is_number(f.get(name))]
            if passing_values and min(values) > 4 * max(*passing_values, 1):
                beyond.append(
                    (f"{name} >= {min(values):g} (it passes up to {max(passing_values):g})",
                     _between(name, min(values), math.inf)))
        if all(type(v) is type(first) and v == first for v in values):
            if first is not None and first is not False and first not in ("", -1):
                (numbers if _is_number(first)
                 else equal).append((f"{name} is {first}", _equals(name, first)))
            continue
        if all(v is not None for v in values) and isinstance(first, str):
            equal.append((f"{name} is given", lambda f, n=name: f.get(n) is not None))  # type: ignore[misc]
        if not all(_is_number(v) for v in values):
            continue
        bounds.append((f"{name} >= {min(values):g}", _between(name, min(values), math.inf)))
        bounds.append((f"{name} <= {max(values):g}", _between(name, -math.inf, max(values))))
        for divisor in (128, 64, 32, 16, 8, 4, 3, 2):
            remainders = {v % divisor for v in values}
            if len(remainders) == 1 and all(type(v) is int for v in values):
                remainder.append((f"{name} % {divisor} = {min(remainders)}",
                                  _has_remainder(name, divisor, min(remainders))))
                break
    return [*equal, *beyond, *numbers, *remainder, *bounds]


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _equals(name: str, value: Any) -> Test:
    return lambda f: bool(f.get(name) == value)


def _between(name: str, low: float, high: float) -> Test:
    return lambda f: _is_number(f.get(name)) and low <= f[name] <= high


def _has_remainder(name: str, divisor: int, remainder: int) -> Test:
    return lambda f: type(f.get(name)) is int and f[name] % divisor == remainder
