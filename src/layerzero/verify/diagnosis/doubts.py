"""What speaks against a name: another cause that gives the same evidence, asked by a rerun that
changes this one alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...spec.kernel import Kernel
from ...spec.op import Op
from ..cases.generated import Case, if_allowed
from ..certification.invariance import SIZES, calls_of_parts
from ..kernel.case_sizes import numbers_of
from ..kernel.contract import (
    CaseResult,
    call,
    case_facts,
    case_refusals,
    case_tensors,
    case_values,
    formula,
    refusals,
    results_of,
    upcast,
)
from ..kernel.error_budget import UNITS
from .reruns.boundary_reruns import explain_by_boundaries
from .reruns.calls_again import (
    are_close,
    calls_of_other_contents,
    confirmed_arguments,
    is_right,
    sample_failures,
)
from .reruns.kept_reruns import is_wrong_in_turn, is_wrong_with_one_other
from .reruns.order_reruns import argument_in_order
from .reruns.rounding_reruns import errors_come_again
from .reruns.row_reruns import has_tokens_right
from .reruns.size_reruns import SEEDS, Reruns, Sized, sizes_of

Values = dict[str, Any]
WIDE = ("float32", "float64")
MANY_SEEDS = tuple(range(2001, 2013))          # with which a wrong draw is not right by chance
SLIGHT = 4                                     # times what a gradient may be wrong by
LARGE = 1000                                   # of a size, beyond which indices may not fit
A_ROUNDING = 2 * UNITS["bfloat16"]             # of the largest number


def doubt_about(kind: str, kernel: Kernel, failed: Sequence[CaseResult], device: str) -> str:
    """Returns why a kernel that looks like one of this class may be of another; "" if nothing
    speaks against it."""
    question = _DOUBTS.get(kind)
    return question(kernel, failed, device) if question else ""


# Sizes.

def _about_sizes(kernel: Kernel, failed: Sequence[CaseResult], device: str) -> str:
    """At the same sizes it must be wrong whatever the numbers, and at another of one size right."""
    reruns = Reruns(kernel, device, limit_s=5.0)
    for r in sample_failures([r for r in failed if not r.circumstance], 2):
        values = case_values(kernel.op, r.case, r.dtype, device, r.seed)
        if is_right(kernel, values, r.dtype):
            return "its error is so small that other numbers may mend it"
        doubt = (_by_other_numbers(kernel, r, values, device) or _by_order(kernel, r, values)
                 or _by_other_sizes(reruns, r, device))
        if doubt:
            return doubt
    return ""


def _by_other_numbers(kernel: Kernel, r: CaseResult, values: Values, device: str) -> str:
    if r.kinds and set(r.kinds) <= {"not finite"} and not _has_large_sizes(kernel, r, device):
        return "its results are not finite, as those of an overflow"
    shown = {n: torch.ones_like(v) for n, v in values.items()
             if isinstance(v, Tensor) and v.dtype == torch.bool}
    if shown and set(r.kinds) <= {"not finite"} and is_right(kernel, {**values, **shown}, r.dtype):
        return f"its results are finite where {' and '.join(shown)} hides nothing"
    if r.dtype not in WIDE and _is_one_rounding(kernel, r, values) and _is_right_when_wide(
            kernel, r, device):
        return "it is right in float32, and off by no more than a number rounded to 16 bits"
    if _is_wrong_where_zero(kernel, values, r.dtype):
        return "rows alone are wrong of which the formula gives zero"
    copies = {n: v.clone() if isinstance(v, Tensor) else v for n, v in values.items()}
    if is_right(kernel, copies, r.dtype):
        return "the same call is right in other memory"
    others = calls_of_other_contents(kernel, r, device)
    if any(is_right(kernel, other, r.dtype) for other in others):
        return "a call of the same sizes is right with other numbers"
    return _by_smaller_numbers(kernel, r, values, 8)


def _by_smaller_numbers(kernel: Kernel, r: CaseResult, values: Values, times: int) -> str:
    small, (_, atol) = _scaled(kernel.op, values, 1 / times), kernel.op.tolerance.of(r.dtype)
    # an error that shrinks with the numbers must still be seen
    if small and r.dtype in WIDE and r.error > 4000 * atol and is_right(kernel, small, r.dtype):
        return f"the same call is right with numbers {times} times smaller"
    return ""


def _is_one_rounding(kernel: Kernel, r: CaseResult, values: Values) -> bool:
    """Is every number off by less than two roundings to the dtype, as by a factor in it?"""
    with torch.no_grad():
        pairs = zip(results_of(call(kernel, values)), formula(kernel.op, upcast(values)))
        return all(bool(((out.double() - want).abs() <= 4 * UNITS[r.dtype] * want.abs()).all())
                   for out, want in pairs if isinstance(out, Tensor) and want.is_floating_point())


def _is_wrong_where_zero(kernel: Kernel, values: Values, dtype: str) -> bool:
    """Is every wrong number one in place of a zero, or of minus infinity, and are others right? So
    are rows that nobody writes because they have nothing to add up."""
    rtol, atol = kernel.op.tolerance.of(dtype)
    some = others = False
    with torch.no_grad():
        for out, want in zip(results_of(call(kernel, values)),
                             formula(kernel.op, upcast(values))):
            if not isinstance(out, Tensor) or not want.is_floating_point() or want.dim() == 0:
                continue
            wrong = ~((out.double() - want).abs() <= 16 * (atol + rtol * want.abs()))
            wrong &= out.double() != want      # infinities
            nothing = (want == 0) | (want == -torch.inf)
            if bool((wrong & ~nothing).any()):
                return False
            some, others = some or bool(wrong.any()), others or bool((~nothing).any())
    return some and others


def _has_large_sizes(kernel: Kernel, r: CaseResult, device: str) -> bool:
    """Is there a size that an index may not count? It then leads to memory that nobody wrote."""
    facts = case_facts(kernel.op, r.case, r.dtype, device, r.seed)
    return any(type(facts.get(dim)) is int and facts[dim] > LARGE for dim in kernel.op.dims)


def _scaled(op: Op, values: Values, factor: float) -> Values | None:
    main = values.get(op.main_tensor)
    if not isinstance(main, Tensor) or not main.is_floating_point() or main.dtype.itemsize == 1:
        return None
    return {**values, op.main_tensor: main * factor}


def _by_order(kernel: Kernel, r: CaseResult, values: Values) -> str:
    name = argument_in_order(kernel, values, r.dtype)
    return name and f"the same call is right with {name} in order"


def _by_other_sizes(reruns: Reruns, r: CaseResult, device: str) -> str:
    """Is there one size of which both larger and smaller ones make the call right, or are all that
    do larger, or all smaller? Else it is what sizes have to do with each other."""
    kernel = reruns.kernel
    if _is_right_when_smaller(reruns, r, device):
        return ""
    right: dict[str, dict[int, Sized]] = {}
    directions: dict[str, set[bool]] = {}
    for name, n, sized in sizes_of(kernel.op, r.case):
        mended = [m for m in _near(n)
                  if reruns.all_are(True, [sized(m)], r.dtype, r.seed, SEEDS[:2])]
        if mended:
            right.setdefault(name, {}).update(dict.fromkeys(mended, sized))
            directions.setdefault(name, set()).update(m > n for m in mended)
    if not right:
        return "" if reruns.is_late else "no other size makes it right"
    ways = set().union(*directions.values())
    both = [name for name, found in directions.items() if len(found) > 1]
    if len(right) > 1 and len(ways) > 1 and len(both) != 1:
        return f"{' and '.join(list(right)[:2])} each make it right"
    if r.dtype not in WIDE and len(ways) == 1 and _is_right_when_wide(kernel, r, device):
        return "it is right in float32"
    name = (both or list(right))[0]
    m, sized = next(iter(right[name].items()))
    return _by_loud_numbers(kernel, r, name, m, sized(m), device)


def _is_right_when_smaller(reruns: Reruns, r: CaseResult, device: str) -> bool:
    """Is it right without an option of the case that changes nothing but sizes, as a large pool?"""
    op = reruns.kernel.op
    facts = case_facts(op, r.case, r.dtype, device, r.seed)
    for option in [n for n in r.case if r.case[n] is True and n not in op.by_name]:
        other = {n: v for n, v in r.case.items() if n != option}
        if reruns.all_are(True, [other], r.dtype, r.seed, SEEDS[:2]):
            others = case_facts(op, other, r.dtype, device, r.seed)
            changed = {n for n in facts if facts[n] != others.get(n)}
            if all(n in op.dims or n in op.derived or n.endswith(("alignment", "stride_last"))
                   for n in changed):
                return True
    return False


def _near(n: int) -> list[int]:
    sizes = [n + 1, n - 1, n + 2, n + -n % 8, n + -n % 64, n // 2, n // 4, n // 8, n // 32]
    sizes += [m for m in (8, 16, 33) if m > 2 * n]
    return [m for m in dict.fromkeys(sizes) if m != n and m >= 2]


def _is_right_when_wide(kernel: Kernel, r: CaseResult, device: str) -> bool:
    return (not case_refusals(kernel, r.case, "float32", device, r.seed) and is_right(
        kernel, case_values(kernel.op, r.case, "float32", device, r.seed), "float32"))


def _by_loud_numbers(kernel: Kernel, r: CaseResult, name: str, m: int, case: Case,
                     device: str) -> str:
    """Is the call of another size wrong too with larger numbers? Many only made one likelier."""
    if r.dtype not in WIDE:
        return ""
    values = case_values(kernel.op, case, r.dtype, device, r.seed)
    for factor in (4.0, 16.0):
        loud = _scaled(kernel.op, values, factor)
        if (loud and _is_formula_right(kernel.op, loud, r.dtype)
                and not is_right(kernel, loud, r.dtype)):
            return f"with numbers {factor:g} times larger it is wrong where {name} is {m} too"
    return ""


# Roundings, range, threads.

def _about_precision(kernel: Kernel, failed: Sequence[CaseResult], device: str) -> str:
    plain = sample_failures([r for r in failed if r.dtype in WIDE and not r.circumstance], 3)
    # each by its own: one call has another penalty than the next
    if (kernel.op.family == "sampling" and plain
            and all(confirmed_arguments(kernel, [r], device) for r in plain)):
        return "it is right without an argument that chooses among tokens"
    # in 16 bits alone a sum that grows too large for its terms errs to one side
    wide = [r for r in failed if r.dtype in WIDE and not r.circumstance]
    return ("its errors are the same with numbers that differ a little"
            if wide and errors_come_again(kernel, wide, device) else "")


def _about_scale(kernel: Kernel, failed: Sequence[CaseResult], device: str) -> str:
    """Another scale, or one left out, shows by more than what 16 bits make of it."""
    sample = sample_failures([r for r in failed if not r.circumstance and r.dtype in WIDE], 3)
    for r in sample:
        values = case_values(kernel.op, r.case, r.dtype, device, r.seed)
        with torch.no_grad():
            pairs = zip(results_of(call(kernel, values)), formula(kernel.op, upcast(values)))
            if any(float((out.double() - want).abs().max()) > A_ROUNDING * float(want.abs().max())
                   for out, want in pairs if isinstance(out, Tensor)
                   and want.is_floating_point() and want.numel()):
                return ""
    return "it is off by no more than a number rounded to 16 bits" if sample else ""


def _about_overflow(kernel: Kernel, failed: Sequence[CaseResult], device: str) -> str:
    """Numbers that are too large stay so when they grow."""
    for r in sample_failures([r for r in failed if not r.circumstance], 2):
        values = case_values(kernel.op, r.case, r.dtype, device, r.seed)
        larger = _scaled(kernel.op, values, 2.0)
        if larger and not is_right(kernel, values, r.dtype) and is_right(kernel, larger, r.dtype):
            return "it is right with numbers twice as large"
    return ""


def _about_mask(kernel: Kernel, failed: Sequence[CaseResult], device: str) -> str:
    """What is hidden stays so when the numbers shrink; a maximum that begins at zero is lost among
    few large scores, which an argument leaves to a row."""
    for r in sample_failures([r for r in failed if not r.circumstance and r.dtype in WIDE], 2):
        values = case_values(kernel.op, r.case, r.dtype, device, r.seed)
        doubt = _by_smaller_numbers(kernel, r, values, 64)
        if doubt:
            return doubt
    return ""


def _about_convention(kernel: Kernel, failed: Sequence[CaseResult], device: str) -> str:
    """What an argument means has nothing to do with how large the numbers are, of which some are
    chosen: the error of what is computed shrinks with them."""
    for r in sample_failures([r for r in failed if not r.circumstance and r.dtype in WIDE
                              and "differs from the formula" in r.detail], 3):
        values = case_values(kernel.op, r.case, r.dtype, device, r.seed)
        doubt = next(filter(None, (_by_smaller_numbers(kernel, r, values, n) for n in (8, 64))), "")
        if doubt:
            return doubt
    return ""


def _about_threads(kernel: Kernel, failed: Sequence[CaseResult], device: str) -> str:
    together = [r for r in failed if "set_num_threads" not in r.circumstance]
    if together and is_wrong_in_turn(kernel, together, device):
        return "calls of one thread in turn are wrong too"
    return ("it is wrong too after a call of which one tensor is another"
            if together and is_wrong_with_one_other(kernel, together, device) else "")


# Bits.

def _about_invariance(kernel: Kernel, failed: Sequence[CaseResult], device: str) -> str:
    """Where bits of parts are others than those of the whole, both must be right."""
    claimed = [r for r in failed if "invariance" in r.kinds]
    for r in sample_failures(claimed, 2):
        values = case_values(kernel.op, r.case, r.dtype, device, r.seed)
        if not is_right(kernel, values, r.dtype):
            return "the whole is wrong by itself"
        for to in SIZES:
            for part in calls_of_parts(kernel.op, values, to):
                if not refusals(kernel, part) and not is_right(kernel, part, r.dtype):
                    return "a part is wrong by itself"
    return ""


# Ties.

def _about_ties(kernel: Kernel, failed: Sequence[CaseResult], device: str) -> str:
    """Equal numbers must be wrong in a smaller call too: of very many some are equal."""
    op = kernel.op
    for r in sample_failures([r for r in failed if not r.circumstance], 2):
        sizes = {n: 40 if type(v) is int else tuple(min(i, 40) for i in v)
                 for n, v in r.case.items() if n in numbers_of(op) and n not in op.by_name
                 and (v if type(v) is int else max(v, default=0)) > LARGE}
        if not sizes or case_refusals(kernel, {**r.case, **sizes}, r.dtype, device, r.seed):
            continue
        values = case_values(op, {**r.case, **sizes}, r.dtype, device, r.seed)
        main = values[op.main_tensor]
        if main.is_floating_point() and is_right(
                kernel, {**values, op.main_tensor: main.round()}, r.dtype):
            return "equal numbers are right where there are fewer"
    return ""


# Gradients.

def _about_gradient(kernel: Kernel, failed: Sequence[CaseResult], device: str) -> str:
    """The forward pass must be right with other numbers of each tensor that has a gradient: one of
    which a part is not read has no gradient there, and is right while its parts are alike. A small
    error in 16 bits alone may be a rounding of either pass."""
    if all(r.dtype not in WIDE and 0 < r.ratio < SLIGHT for r in failed):
        return f"it is less than {SLIGHT} times what is allowed, and in 16 bits alone"
    for r in sample_failures([r for r in failed if "gradient" in r.kinds], 2):
        values = case_values(kernel.op, r.case, r.dtype, device, r.seed)
        if not is_right(kernel, values, r.dtype):
            continue
        name = next((n for n in kernel.op.differentiable
                     if (other := _varied(values, n, r.seed)) is not None
                     and _is_formula_right(kernel.op, other, r.dtype)
                     and not is_right(kernel, other, r.dtype)), "")
        if name:
            return f"the forward pass is wrong with other numbers of {name}"
    return ""


def _varied(values: Values, name: str, seed: int) -> Values | None:
    """Returns the call with each number of a tensor changed by itself, up to a quarter."""
    t = values.get(name)
    if not isinstance(t, Tensor) or not t.is_floating_point() or t.dtype.itemsize == 1:
        return None
    draw = torch.Generator().manual_seed(seed)
    by = torch.rand(t.shape, generator=draw).to(device=t.device, dtype=t.dtype)
    return {**values, name: t.detach() * (1 + by / 4)}


def _is_formula_right(op: Op, values: Values, dtype: str) -> bool:
    """Is the formula in this dtype as near to itself in float64 as a kernel has to be?"""
    with torch.no_grad():
        return are_close(op, dtype, formula(op, values), formula(op, upcast(values)))


# Draws.

def _about_distribution(kernel: Kernel, failed: Sequence[CaseResult], device: str) -> str:
    """Tokens must be wrong, and stay so in other sizes and without padding."""
    plain = [r for r in failed if not r.circumstance]
    if kernel.op.family != "sampling":
        return ""
    if all(_is_right_when_finite(kernel, r, device) for r in sample_failures(failed, 3)):
        return "it is right where no number is infinite"
    kind, says = explain_by_boundaries(kernel, failed, device) or ("", "")
    if kind == "ties" or not plain:
        return says if kind == "ties" else ""
    if (has_tokens_right(kernel, plain, device, MANY_SEEDS)
            and not confirmed_arguments(kernel, plain, device)):   # a filter: right by chance
        return "its tokens are right"
    reruns = Reruns(kernel, device, limit_s=5.0)
    for r in sample_failures(plain, 2):
        if not reruns.all_are(False, [r.case], r.dtype, r.seed):
            continue                           # right with some numbers: nothing to compare
        doubt = (_by_padding(kernel, r, device) or _by_size_of_draws(reruns, r)
                 or _by_form_of_draws(reruns, r, device))
        if doubt:
            return doubt
    return ""


def _is_right_when_finite(kernel: Kernel, r: CaseResult, device: str) -> bool:
    """Is it right with zeros in the place of what is not finite, of which there is some?"""
    values = case_values(kernel.op, r.case, r.dtype, device, r.seed)
    finite = {n: v.nan_to_num(0.0, 0.0, 0.0) for n, v in values.items() if isinstance(v, Tensor)
              and v.is_floating_point() and not bool(v.isfinite().all())}
    return bool(finite) and is_right(kernel, {**values, **finite}, r.dtype)


def _by_padding(kernel: Kernel, r: CaseResult, device: str) -> str:
    calls = [case_values(kernel.op, r.case, r.dtype, device, r.seed + by) for by in MANY_SEEDS]
    main = calls[0].get(kernel.op.main_tensor)
    last = main.shape[-1] - 1 if isinstance(main, Tensor) and main.is_floating_point() else -1
    for name, t in calls[0].items():
        if (isinstance(t, Tensor) and t.dtype in (torch.int32, torch.int64) and t.dim() == 2
                and last >= 0 and bool((t > last).any())):
            others = [if_allowed(kernel.op, {**v, name: v[name].clamp(max=last)}) for v in calls]
            if all(v is not None and is_right(kernel, v, r.dtype) for v in others):
                return f"right without numbers beyond the last token in {name}"
        if isinstance(t, Tensor) and _is_padded(t):
            others = [if_allowed(kernel.op, {**v, name: v[name].clamp(min=0)}) for v in calls]
            if all(v is not None and is_right(kernel, v, r.dtype) for v in others):
                return f"right without padding in {name}"
    return ""


def _is_padded(t: Tensor) -> bool:
    """Are numbers negative, and at the end of rows alone? At the front they mean something."""
    if t.dtype not in (torch.int32, torch.int64) or t.dim() < 2 or not bool((t < 0).any()):
        return False
    none = t < 0
    return bool((none[..., 1:] >= none[..., :-1]).all()) and not bool(none[..., 0].all())


def _by_size_of_draws(reruns: Reruns, r: CaseResult) -> str:
    for name, n, sized in sizes_of(reruns.kernel.op, r.case):
        # of few tokens many draws are right
        for m in (m for m in _near(n)[:6] if m > n or m >= max(n // 2, 8)):
            if reruns.all_are(True, [sized(m)], r.dtype, r.seed, MANY_SEEDS):
                return f"right where {name} is {m}"
    return ""


def _by_form_of_draws(reruns: Reruns, r: CaseResult, device: str) -> str:
    """Is it right with another word for what has other sizes then, as the nodes of a tree?"""
    op = reruns.kernel.op

    def shapes(case: Case) -> list[Any]:
        return [t.shape for t in case_tensors(op, case, r.dtype, device, r.seed).values()]

    for name in (n for n, v in r.case.items() if type(v) is str and n not in op.by_name):
        words = {c[name] for c in op.cases if type(c.get(name)) is str} - {r.case[name]}
        for other in ({**r.case, name: word} for word in sorted(words)):
            if (reruns.all_are(True, [other], r.dtype, r.seed, MANY_SEEDS)
                    and shapes(other) != shapes(r.case)):
                return f"right where {name} is {other[name]}"
    return ""


_DOUBTS: Mapping[str, Callable[[Kernel, Sequence[CaseResult], str], str]] = {
    "sizes": _about_sizes, "precision": _about_precision, "mask": _about_mask,
    "convention": _about_convention,
    "overflow": _about_overflow, "scale": _about_scale, "threads": _about_threads,
    "gradient": _about_gradient,
    "distribution": _about_distribution, "invariance": _about_invariance, "ties": _about_ties}
