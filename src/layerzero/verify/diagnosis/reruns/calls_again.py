"""Makes failing calls again with one thing changed: an argument left out, smaller or wider numbers,
contiguous memory. What mends a call says what is wrong with the kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, islice
from typing import Any

import torch
from torch import Tensor

from ....dispatch.facts import read
from ....machine.faults import FAULTS
from ....spec.kernel import Kernel
from ....spec.op import Op
from ...cases.generated import case_key
from ...kernel.case_sizes import numbers_of
from ...kernel.contract import (
    CaseResult,
    Circumstance,
    bind_once,
    call,
    case_values,
    check_case,
    formula,
    load_once,
    refusals,
    results_of,
    upcast,
)
from ...kernel.gradients import requiring_grad
from ...kernel.guarded import with_layout
from ...kernel.results import are_equal
from ..conditions import find_circumstance


def are_close(op: Op, dtype: str, a: Sequence[Any], b: Sequence[Any]) -> bool:
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
                                atol=max(8 * atol, 1e-6), equal_nan=True):
            return False
    return True


def sample_failures(failed: Sequence[CaseResult], count: int) -> list[CaseResult]:
    """Samples failing cases evenly, the widest dtype first, without large ones if possible."""
    ranked = sorted(failed, key=lambda r: (bool(r.circumstance),
                                           {"float32": 0, "int64": 0}.get(r.dtype, 1)))
    large = [r for r in ranked if any(type(n) is int and n > 8_000 for n in r.case.values())]
    # each is rerun a dozen times
    ranked = [r for r in ranked if r not in large] or large[:1]
    step = max(len(ranked) // count, 1)
    return ranked[::step][:count]


def values_of(kernel: Kernel, r: CaseResult, device: str) -> dict[str, Any] | None:
    """Returns the values of a case in its circumstance; None if that changes more than values."""
    values = case_values(kernel.op, r.case, r.dtype, device, r.seed)
    if not r.circumstance:
        return values
    circumstance = find_circumstance(kernel.op, r.circumstance)
    if circumstance is None or (type(circumstance).before is not Circumstance.before
                                or type(circumstance).around is not Circumstance.around):
        return None
    return circumstance.alter(kernel.op, values)


def confirmed_arguments(kernel: Kernel, failed: Sequence[CaseResult], device: str) -> list[str]:
    """Returns the optional arguments of which each, left out alone or made one, makes every sampled
    failing call right; if there is none, such pairs of two."""
    op = kernel.op
    common: set[str] | None = None
    for r in sample_failures([r for r in failed if not r.circumstance], 3):
        values = case_values(op, r.case, r.dtype, device, r.seed)
        if is_right(kernel, values, r.dtype):
            continue                           # wrong by too little for this judge
        # without one that asks for a result there is less to be wrong
        optional = [p for p in op.params if not p.required and p.name != op.variant
                    and (isinstance(values[p.name], Tensor) or values[p.name] != p.default)
                    and not _adds_results(op, values, p.name)]
        neutral = {p.name: [p.default] + [torch.ones_like(v) for v in (values[p.name],)
                                          if isinstance(v, Tensor) and v.is_floating_point()]
                   for p in optional}
        fixed = {n for n, others in neutral.items()
                 if any(is_right(kernel, {**values, n: v}, r.dtype) for v in others)}
        if not fixed:
            fixed = {f"{n} and {m}" for n, m in combinations(neutral, 2)
                     if any(is_right(kernel, {**values, n: v, m: u}, r.dtype)
                            for v, u in zip(neutral[n], neutral[m]))}
        common = fixed if common is None else common & fixed
    return sorted(common or ())


def others_that_mend(kernel: Kernel, failed: Sequence[CaseResult], device: str) -> set[str]:
    """Returns the optional arguments, beside the one that its circumstance gives, without which a
    sampled failing call is right."""
    op, mending = kernel.op, set[str]()
    for r in sample_failures(failed, 2):
        values = values_of(kernel, r, device)
        if values is None:
            continue
        mending |= {p.name for p in op.params if not p.required and p.name != op.variant
                    and f"given {p.name} " not in f"{r.circumstance} "
                    and (isinstance(values[p.name], Tensor) or values[p.name] != p.default)
                    and not _adds_results(op, values, p.name)
                    and is_right(kernel, {**values, p.name: p.default}, r.dtype)}
    return mending


def gives_the_same_for_all(kernel: Kernel, failed: Sequence[CaseResult], name: str,
                           device: str) -> bool:
    """Have sampled failing calls the same result whatever positive number this argument is?"""
    sample = sample_failures([r for r in failed if not r.circumstance], 2)
    for r in sample:
        values = case_values(kernel.op, r.case, r.dtype, device, r.seed)
        number = values.get(name)
        if type(number) is not float or number <= 0:
            return False
        with torch.no_grad():
            first, *others = (results_of(call(kernel, {**values, name: number * by}))
                              for by in (1.0, 0.5, 2.0))
        if not all(are_equal(first, other) for other in others):
            return False
    return bool(sample)


def _adds_results(op: Op, values: dict[str, Any], name: str) -> bool:
    if type(values[name]) is not bool:
        return False
    others = {**values, name: op.by_name[name].default}
    return len(results_of(op.meta(**values))) > len(results_of(op.meta(**others)))


def is_right(kernel: Kernel, values: dict[str, Any], dtype: str) -> bool:
    """Does the kernel serve this call, and as the formula does?"""
    op = kernel.op
    try:
        if refusals(kernel, values):
            return False
        if op.extra_check is not None:
            op.extra_check(values, read(op, values))
        with torch.no_grad():
            return are_close(op, dtype, results_of(call(kernel, values)),
                              formula(op, upcast(values)))
    except FAULTS:                             # the call makes no sense without the argument
        return False


def is_wrong_by_itself(kernel: Kernel, failed: Sequence[CaseResult], device: str) -> bool:
    """Has every sampled failing call wrong numbers, though nothing is called before it or after?"""
    calls = [(values, r.dtype) for r in sample_failures(failed, 3)
             if (values := values_of(kernel, r, device)) is not None]
    return bool(calls) and not any(is_right(kernel, *call) for call in calls)


def is_strided(kernel: Kernel, r: CaseResult, device: str) -> bool:
    return any(isinstance(v, Tensor) and not v.is_contiguous()
               for v in case_values(kernel.op, r.case, r.dtype, device, r.seed).values())


def is_right_when_contiguous(kernel: Kernel, failed: Sequence[CaseResult], device: str) -> bool:
    """Are sampled failing calls right with the same numbers in contiguous memory, and at least half
    of them wrong as they are? What lies beside a tensor may be right by chance."""
    wrong: list[bool] = []
    for r in sample_failures(failed, 3):
        values = values_of(kernel, r, device)
        if values is None:
            continue
        plain = {n: v.clone(memory_format=torch.contiguous_format) if isinstance(v, Tensor) else v
                 for n, v in values.items()}
        if not is_right(kernel, plain, r.dtype):
            return False
        wrong.append(not is_right(kernel, values, r.dtype))
    return any(wrong) and 2 * sum(wrong) >= len(wrong)


def is_right_with_small_gaps(kernel: Kernel, failed: Sequence[CaseResult], device: str) -> bool:
    """Are sampled calls with rows far apart right where the same rows have a small gap between
    them? Else the distance is no matter."""
    sample = sample_failures(failed, 2)
    for r in sample:
        values = case_values(kernel.op, r.case, r.dtype, device, r.seed)
        name = getattr(find_circumstance(kernel.op, r.circumstance), "tensor", "")
        for layout in ("padded", "spaced") if isinstance(values.get(name), Tensor) else ():
            near = with_layout(values[name], layout)
            if near is not None and not is_right(kernel, {**values, name: near}, r.dtype):
                return False
    return bool(sample)


def is_right_when_loaded_anew(kernel: Kernel, failed: Sequence[CaseResult], device: str) -> bool:
    """Are sampled failing calls right as the first calls of a kernel that is loaded again, and
    still wrong now? Then they depend on earlier calls."""
    sample = sample_failures([r for r in failed if not r.circumstance] or failed, 3)
    calls = [(values, r.dtype) for r in sample
             if (values := values_of(kernel, r, device)) is not None]
    if not calls or any(is_right(kernel, *call) for call in calls):
        return False

    def is_right_at_first(values: dict[str, Any], dtype: str) -> bool:
        bind_once.cache_clear()
        load_once.cache_clear()
        return is_right(kernel, values, dtype)

    return all(is_right_at_first(*call) for call in calls)


def is_right_when_recording(kernel: Kernel, failed: Sequence[CaseResult], device: str) -> bool:
    """Are sampled calls that fail without any circumstance right with the same numbers where
    gradients are recorded, and wrong again where none are?"""
    sample = sample_failures([r for r in failed if not r.circumstance], 3)
    if len(sample) < len(failed) and any(r.circumstance for r in failed):
        return False
    for r in sample:
        values = case_values(kernel.op, r.case, r.dtype, device, r.seed)
        try:
            with torch.no_grad():
                want = formula(kernel.op, upcast(values))
            with torch.enable_grad():
                got = [t.detach() if isinstance(t, Tensor) else t for t in
                       results_of(call(kernel, requiring_grad(kernel.op, values)))]
        except FAULTS:
            return False
        if not are_close(kernel.op, r.dtype, got, want) or is_right(kernel, values, r.dtype):
            return False
    return bool(sample)


def is_wrong_when_recording(kernel: Kernel, failed: Sequence[CaseResult], device: str) -> bool:
    """Are sampled calls wrong where gradients are recorded, and right with the same numbers where
    none are?"""
    sample = sample_failures(failed, 3)
    for r in sample:
        values = case_values(kernel.op, r.case, r.dtype, device, r.seed)
        try:
            with torch.enable_grad():
                got = [t.detach() if isinstance(t, Tensor) else t for t in
                       results_of(call(kernel, requiring_grad(kernel.op, values)))]
            with torch.no_grad():
                want = formula(kernel.op, upcast(values))
        except FAULTS:
            return False
        if are_close(kernel.op, r.dtype, got, want) or not is_right(kernel, values, r.dtype):
            return False
    return bool(sample)


def passes_at_some_size(kernel: Kernel, results: Sequence[CaseResult], device: str) -> bool:
    """Does a call pass that has several of whatever the failing ones have several of? One that has
    none, or one, of something passes with many mistakes."""
    def several(r: CaseResult) -> set[str]:
        facts = read(kernel.op, case_values(kernel.op, r.case, r.dtype, device, r.seed))
        return {dim for dim in kernel.op.dims if type(facts.get(dim)) is int and facts[dim] > 1}

    plain = [r for r in results if not r.circumstance]
    needed = [several(r) for r in plain if r.status == "failed"]
    common = set.intersection(*needed) if needed else set()
    return any(common <= several(r) for r in plain if r.passed)


def passes_with_the_same_arguments(kernel: Kernel, results: Sequence[CaseResult],
                                   device: str) -> bool:
    """Does a case pass that is given what each sampled failing one is given, in other sizes?"""
    op = kernel.op

    def given(r: CaseResult) -> frozenset[tuple[str, Any]]:
        values = case_values(op, r.case, r.dtype, device, r.seed)
        return frozenset(
            (p.name, value if isinstance(value, (str, bool)) else None)
            for p in op.params if not p.required
            and (isinstance(value := values[p.name], Tensor) or value != p.default))

    def in_default_sizes(r: CaseResult) -> bool:
        sizes = numbers_of(op).keys() - op.by_name.keys()
        besides = {name: value for name, value in r.case.items() if name not in sizes}
        try:
            return check_case(kernel, besides, r.dtype, device, r.seed).passed
        except FAULTS:                         # some sizes belong together
            return False

    plain = [r for r in results if not r.circumstance]
    passing = {given(r) for r in plain if r.passed}
    failing = sample_failures([r for r in plain if r.status == "failed"], 4)
    return bool(failing) and all(given(r) in passing or in_default_sizes(r) for r in failing)


def passes_with_the_argument(kernel: Kernel, results: Sequence[CaseResult], name: str,
                             device: str) -> bool:
    """Does a case pass that gives the tensors of this argument, where they make a difference? Then
    the kernel knows what they mean."""
    op, names = kernel.op, name.split(" and ")
    for r in (r for r in results if r.passed and not r.circumstance):
        values = case_values(op, r.case, r.dtype, device, r.seed)
        if not all(isinstance(values.get(n), Tensor) for n in names):
            continue
        without = {**values, **dict.fromkeys(names)}
        try:
            with torch.no_grad():
                want, other = formula(op, values), formula(op, without)
        except FAULTS:
            continue
        if not are_close(op, r.dtype, other, want):
            return True
    return False


def fails_with_other_numbers(kernel: Kernel, results: Sequence[CaseResult], device: str) -> bool:
    """Does a case that passed fail with other numbers? Then the numbers decide, and not a size."""
    plain = [r for r in results if not r.circumstance]

    def rerun(before: str, after: str) -> bool:
        return any(check_case(kernel, r.case, r.dtype, device, r.seed + by).status == after
                   for r in sample_failures([r for r in plain if r.status == before], 4)
                   for by in (2000, 2001))

    # of what is drawn also: does one that failed pass?
    return rerun("passed", "failed") or (kernel.op.family == "sampling"
                                         and rerun("failed", "passed"))


def plain_failures(kernel: Kernel, failed: Sequence[CaseResult], results: Sequence[CaseResult],
                   device: str) -> list[CaseResult]:
    """Returns what fails without any circumstance: of the failing cases, and of the op's own at
    dtypes of which no plain case was run."""
    op, plain = kernel.op, [r for r in results if not r.circumstance]
    ran, dtypes = {(case_key(r.case), r.dtype) for r in plain}, {r.dtype for r in plain}
    cells = [(r.case, r.dtype, r.seed) for r in sample_failures(failed, 3)
             if (case_key(r.case), r.dtype) not in ran and r.case]
    cells += [(case, dtype, 0) for dtype in op.dtypes if dtype not in dtypes for case in op.cases]
    tried = (check_case(kernel, case, dtype, device, seed) for case, dtype, seed in cells)
    return list(islice((r for r in tried if r.status == "failed"), 4))


def calls_of_other_contents(kernel: Kernel, r: CaseResult, device: str) -> Iterator[dict[str, Any]]:
    """Yields calls of the same sizes, memory and arguments: with other numbers, and without an
    option of the case that draws other ones, as ids that all are the same."""
    op = kernel.op

    def form(values: dict[str, Any]) -> list[Any]:
        return [(v.shape, v.stride(), v.dtype) if isinstance(v, Tensor) else v
                for v in values.values()]

    own = form(case_values(op, r.case, r.dtype, device, r.seed))
    for by in (1001, 1002, 1003):
        yield case_values(op, r.case, r.dtype, device, r.seed + by)
    for option in [n for n in r.case if n not in op.by_name and n not in numbers_of(op)]:
        case = {n: v for n, v in r.case.items() if n != option}
        try:
            values = case_values(op, case, r.dtype, device, r.seed)
        except FAULTS:                         # options that go together
            continue
        if form(values) == own:
            yield values


def row_dim(op: Op) -> str:
    """Returns the size of the main tensor's first axis."""
    tokens = next(iter(op.patterns.values())).get(op.main_tensor, ())
    return tokens[0].lstrip("*~") if len(tokens) > 1 else ""


def is_wrong_in_few_rows(kernel: Kernel, failed: Sequence[CaseResult], device: str) -> bool:
    """Is a failing call wrong with three of its wrong rows alone? Then many rows only made it
    likelier, as for what is drawn."""
    op = kernel.op
    rows = row_dim(op)
    for r in sample_failures([r for r in failed if not r.circumstance], 2):
        values = case_values(op, r.case, r.dtype, device, r.seed)
        patterns = op.patterns[values[op.variant] if op.variant else ""]
        shared = [n for n, tokens in patterns.items() if isinstance(values.get(n), Tensor)
                  and tokens and tokens[0].lstrip("*~") == rows]
        count = values[op.main_tensor].shape[0] if values[op.main_tensor].dim() else 0
        if not rows or any(values[n].shape[:1] != (count,) for n in shared):
            return False
        try:
            with torch.no_grad():
                pairs = zip(results_of(call(kernel, values)), formula(op, upcast(values)))
                wrong = torch.zeros(count, dtype=torch.bool)
                for got, want in pairs:
                    if got.shape == want.shape and got.shape[:1] == (count,):
                        gap = ~torch.isclose(got.double(), want.double(), rtol=1e-2, atol=1e-2,
                                             equal_nan=True)
                        wrong |= gap.reshape(count, -1).any(1).cpu()
        except FAULTS:
            return False
        few = wrong.nonzero()[:3, 0]
        if not len(few) or is_right(kernel, {**values, **{
                n: values[n][few.to(values[n].device)] for n in shared}}, r.dtype):
            return False
    return True


def fails_again(kernel: Kernel, failed: Sequence[CaseResult], device: str) -> bool:
    """Does one of the sampled failing cases fail again, with the same numbers in other memory?"""
    sample = sample_failures([r for r in failed if not r.circumstance], 3)
    return not sample or any(check_case(kernel, r.case, r.dtype, device, r.seed).status == "failed"
                             for r in sample)
