"""Checks the backward of a kernel against the autograd of the float64 reference, case by case.

For each input that requires a gradient the error is at most `times_eager` x that of the eager
formula's own gradient at the same dtype, plus the op's tolerance. The output gradient is passed
contiguous, with gaps of NaN between its elements and, at the op's first dtype, as a part of wider
rows and with its second dimension last in memory; inputs must be unchanged afterwards; the result
of the forward pass is judged too. Other output gradients (output_grads.py) are asked for by name.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...machine import loading
from ...machine.faults import FAULTS, classify, reason_of
from ...spec.kernel import Kernel
from ...spec.op import Op
from .circumstance import AS_DECLARED, Circumstance
from .contract import (
    RETRIES,
    UNREPEATABLE,
    CaseResult,
    call,
    case_outline,
    case_values,
    formula,
    may_be_chance,
    refusals,
    results_of,
    upcast,
)
from .error_budget import UNITS, rounding_budget, roundings_of, terms_of
from .guarded import find_changes, guarded, poisoned_memory, snapshot, with_layout
from .judging import ROUNDINGS, judge_result
from .output_grads import SCALES, draw_output_grads, with_earlier_grads
from .process_state import COMPILING, ONCE, process_state, put_back
from .results import (
    Complaint,
    find_aliasing,
    find_wrong_shapes,
    outlives_its_caller,
    storage_address,
)
from .shared import compute_once, fingerprint
from .state_changes import changed_by_formula

LONG_SUM = 1000
MOST_WORDS = 8
Errors = tuple[float, float, float]            # error, eager error, error over allowed error
Layout = tuple[str, Callable[[Tensor], Tensor | None]]


def gradient_cases(op: Op) -> tuple[Mapping[str, Any], ...]:
    """Returns the gradient cases the op declares, else its first cases, a sample of the rest and
    the plainest for each argument that a case sets, of a few words for each; and for each
    differentiable tensor that those do not give, the first case that does."""
    return _gradient_cases(op)


@lru_cache(maxsize=64)
def _gradient_cases(op: Op) -> tuple[Mapping[str, Any], ...]:
    if not op.differentiable:
        return ()
    cases = op.gradient_cases or (*op.cases[:4], *op.cases[4::max(len(op.cases) // 8, 1)])
    sampled = () if op.gradient_cases else op.cases
    for name in dict.fromkeys(name for case in sampled for name in case):
        having = [case for case in op.cases if name in case]
        words = {case[name] for case in having if type(case[name]) is str}
        seen_words = {case.get(name) for case in cases}
        plain = [min(having, key=len)]
        if len(words) <= MOST_WORDS:           # an activation, not every format
            plain += [min((c for c in having if c[name] == word), key=len)
                      for word in sorted(words - seen_words)]
        cases = (*cases, *(case for i, case in enumerate(plain)
                           if case not in cases and case not in plain[:i]))
    seen = set().union(*(_wanted(op, case) for case in cases))
    for case in op.cases:
        missing = _wanted(op, case) - seen if seen < set(op.differentiable) else set()
        if missing:
            cases, seen = (*cases, case), seen | missing
    return cases


def _wanted(op: Op, case: Mapping[str, Any]) -> set[str]:
    values = case_values(op, case, op.dtypes[0])
    return {n for n in op.differentiable if isinstance(values[n], Tensor) and values[n].numel()}


@lru_cache(maxsize=64)
def also_gradient_cases(op: Op) -> tuple[tuple[Mapping[str, Any], str], ...]:
    """Returns each tensor of `also_differentiable` with the first case of each way in which it is
    broadcast: what adds up its gradient has another sum there."""
    chosen: dict[Any, tuple[Mapping[str, Any], str]] = {}
    for case in (*gradient_cases(op), *op.cases) if op.also_differentiable else ():
        values = case_outline(op, case, op.dtypes[0])
        for name, t in _floating(values, op.also_differentiable).items():
            chosen.setdefault((name, tuple(n == 1 for n in t.shape)), (case, name))
    return tuple(chosen.values())


def also_wanted(kernel: Kernel, case: Mapping[str, Any], dtype: str, device: str,
                seed: int) -> str:
    """Returns a tensor of this call of which the kernel does not refuse the gradient, beside those
    that have one always; "" if there is none."""
    op = kernel.op
    names = _floating(case_outline(op, case, dtype, device, seed), op.also_differentiable)
    return next((n for n in names if not refusals(kernel, requiring_grad(
        op, case_values(op, case, dtype, device, seed), also=n))), "")


def _floating(values: Mapping[str, Any], names: Sequence[str]) -> dict[str, Tensor]:
    return {n: t for n in names if isinstance(t := values[n], Tensor) and t.is_floating_point()
            and t.numel()}


def requiring_grad(op: Op, values: Mapping[str, Any], only: str = "",
                   also: str = "") -> dict[str, Any]:
    """Returns the values with requires_grad, with their strides; or with `only` some of them, "x
    and weight"; and `also` with one that need not have it."""
    names = (*only.split(" and "), also) if only else (*op.differentiable, also)
    by_id: dict[int, Tensor] = {}              # one tensor may be given twice
    return {name: by_id.setdefault(id(v), v.detach().requires_grad_())
            if name in names and isinstance(v, Tensor) and v.is_floating_point()
            and v.dtype.itemsize > 1 else v for name, v in values.items()}


def has_plain_gradients(op: Op, case: Mapping[str, Any], dtype: str, device: str = "cpu",
                        seed: int = 0) -> bool:
    """Are the formula's own gradients numbers, and not all zero? Where every key is hidden, or
    every row ignored, kernels may differ in whether there is a gradient at all."""
    def compute() -> bool:
        values = requiring_grad(op, case_values(op, case, dtype, device, seed))
        results = [r for r in formula(op, values) if isinstance(r, Tensor)]
        wanted = [values[n] for n in _wanting(values)]
        if not wanted or not all(r.requires_grad and bool(r.isfinite().all()) for r in results):
            return False
        grads = torch.autograd.grad(results, wanted, [torch.ones_like(r) for r in results],
                                    allow_unused=True)
        return (all(g is None or bool(g.isfinite().all()) for g in grads)
                and any(g is not None and bool(g.any()) for g in grads))

    plain: bool = compute_once(op, ("plain gradients", repr(case), dtype, device, seed), compute)
    return plain


def check_gradients(kernel: Kernel, case: Mapping[str, Any], dtype: str, device: str = "cpu",
                    seed: int = 0,
                    only: str = "", again: bool = True, summed: bool = False,
                    source: int | None = None, also: str = "",
                    altered: Circumstance = AS_DECLARED, of: str = "") -> CaseResult:
    """Judges one case; skipped if the kernel declares no backward or refuses the call. `summed`:
    the gradient is that of a sum, one number expanded, and comes from another thread. `source`:
    the only one of several results that is used. `also`: a tensor that wants one beside others.
    `altered`: how a tensor lies in memory, or what is around the calls. `of`: what the output
    gradient is like, a word of output_grads.py."""
    op, circumstance = kernel.op, f"backward to {only}" if only else "backward"
    circumstance += f" to {also} too" if also else ""
    circumstance += f" with {altered.name}" if altered.name else ""
    circumstance += " from a sum" if summed else ""
    circumstance += "" if source is None else f" from result {source} alone"
    circumstance += f" of {of}" if of else ""

    def result(status: str, complaints: Sequence[Complaint] = (), reasons: Any = (),
               detail: str = "", errors: Errors = (0.0, 0.0, 0.0)) -> CaseResult:
        return CaseResult(kernel.id, case, dtype, status, tuple(reasons), *errors,
                          detail or "; ".join(c.text for c in complaints), circumstance, seed,
                          tuple(dict.fromkeys(c.kind for c in complaints)))

    if not kernel.differentiable or any(case.get(n) in v for n, v in op.no_gradient.items()):
        return result("skipped", detail="declares no backward")
    arguments = altered.alter(op, case_values(op, case, dtype, device, seed))
    if arguments is None:
        return result("skipped", detail="does not apply")
    values = with_earlier_grads(guarded(requiring_grad(op, arguments, only, also)))
    if not any(isinstance(v, Tensor) and v.requires_grad for v in values.values()):
        return result("skipped", detail="nothing wants a gradient")
    reasons = refusals(kernel, values)
    if reasons:
        return result("skipped", (), reasons)
    before, state = snapshot(values), process_state(device)
    try:
        with altered.around(device):
            results = results_of(call(kernel, values))
        wrong = [*find_wrong_shapes(results, results_of(op.meta(**values))),
                 *find_aliasing([results], values)]
        if wrong:
            return result("failed", wrong)
        output_grads = [g if source is None or source % len(results) == i else None
                        for i, g in enumerate(draw_output_grads(results, summed, of))]
    except loading.LoadFailed as e:
        return result("skipped", (), (e.reason,))
    except FAULTS as e:
        return result("failed", [Complaint("gradient", str(reason_of(e, classify(e))))])
    contents, grads_before = fingerprint(values), snapshot(_named(output_grads))
    expected: ExpectedGradients = compute_once(
        op, contents and ("gradients", contents, _wanting(values), summed, source, altered.name,
                          of, tuple((r.shape, r.dtype) for r in results)),
        lambda: _expected_gradients(op, values, output_grads, SCALES.get(of, 1.0)))
    lost = [i for i, (r, e) in enumerate(zip(results, expected.eager))
            if expected.recorded[i] and e.numel() and not r.requires_grad]
    if lost:                                   # none, where all gradients are empty
        lost = lost if any(values[n].numel() for n in _wanting(values)) else []
        return result("failed" if lost else "passed", [
            Complaint("gradient", f"the gradient of result {i} is silently lost") for i in lost])
    try:
        # how it lies in memory is the same for every dtype and tensor
        layouts = LAYOUTS if dtype == op.dtypes[0] and not only and altered is AS_DECLARED \
            else LAYOUTS[:1]
        with altered.around(device):
            runs, suffixes = _passes(values, results, output_grads, summed, layouts, SCALES.get(of))
    except loading.LoadFailed as e:
        return result("skipped", (), (e.reason,))
    except FAULTS as e:
        return result("failed", [Complaint("gradient", str(reason_of(e, classify(e))))])
    complaints = [Complaint("in-place change", text)
                  for text in (*find_changes(values, before),
                               *find_changes(_named(output_grads), grads_before))]
    changed = {name for name in put_back(state, device)
               if name not in ONCE and not (kernel.jit and name in COMPILING)}
    if changed:
        changed -= set(changed_by_formula(op, values, device))
    complaints += [Complaint("global state", f"{name} changed during forward and backward")
                   for name in sorted(changed)]
    if len(layouts) > 1 and not kernel.jit and outlives_its_caller(
            lambda: results_of(call(kernel, values))):
        complaints.append(Complaint("leak", "a result outlives its caller"))
    complaints += _shared_gradients(runs[0], runs[1], values, results, output_grads)
    worst: Errors = (0.0, 0.0, 0.0)
    compared = ([r.detach() for r in results],) * 2
    for i, four_results in enumerate(zip(*compared, expected.exact, expected.eager)):
        forward = judge_result(op, dtype, f"result {i}", *four_results)
        if dtype in UNITS and any(c.kind == "error" for c in forward.complaints):
            budget = _forward_budget(op, values, expected.exact, dtype)[i]
            forward = judge_result(op, dtype, f"result {i}", *four_results, budget=budget)
        complaints += forward.complaints
        worst = max(worst, (forward.error, forward.eager_error, forward.ratio), key=lambda e: e[2])
    for i, (got, suffix) in enumerate(zip(runs[1:], suffixes)):
        if i and not complaints and _equal(got, runs[1]):
            continue                           # as it was judged
        gradient_complaints, errors = _judge_gradients(op, dtype, suffix, got,
                                                       expected.exact_grads, expected.eager_grads,
                                                       values, sum(r.numel() for r in results),
                                                       partial(_rounding_budgets, op, values,
                                                               output_grads, expected.exact_grads))
        complaints += gradient_complaints
        worst = max(worst, errors, key=lambda e: e[2])
    if kernel.backward_repeats(torch.device(device).type):
        if (not _equal(*runs[:2])
                and not _equal(*_deterministic_passes(values, results, output_grads))):
            complaints.append(Complaint("non-determinism", "two backward passes differ"))
        elif len(layouts) > 1 and not kernel.jit and _differs_again(kernel, values, output_grads,
                                                                    runs[0]):
            complaints.append(Complaint("non-determinism", "the gradients of a second forward pass "
                                                           "differ from those of the first"))
    kinds = {c.kind for c in complaints}
    if kinds and again and kinds <= {"gradient", "error"} and may_be_chance(results, worst[2]):
        retries = [check_gradients(kernel, case, dtype, device, seed + 1000 + i, only, False,
                                   summed, source, also, altered, of)
                   for i in range(RETRIES)]
        if sum(retry.status == "failed" for retry in retries) < 2:
            return result("passed", detail=f"just outside once: {complaints[0].text}",
                          errors=(*worst[:2], 1.0))
    return result("failed" if complaints else "passed", complaints, (), "", worst)


def _named(output_grads: Sequence[Tensor | None]) -> dict[str, Any]:
    return {f"the gradient of result {i}": g for i, g in enumerate(output_grads)}


def _shared_gradients(first: Mapping[str, Tensor], second: Mapping[str, Tensor],
                      values: Mapping[str, Any], results: Sequence[Any],
                      output_grads: Sequence[Tensor | None]) -> Iterator[Complaint]:
    """Yields gradients that two backward passes wrote to the same memory, or that are inputs or
    results: what is added to them later is added to those. One that is passed on is no fault."""
    passed_on = {storage_address(t) for t in output_grads if t is not None}
    others = {storage_address(t): name for name, t in (
        *values.items(), *((f"result {i}", r) for i, r in enumerate(results)))
        if isinstance(t, Tensor) and t.numel()}
    for name in first:
        address = storage_address(first[name])
        if not first[name].numel() or address in passed_on:
            continue
        if address in others:
            yield Complaint("aliasing", f"the gradient of {name} shares memory with "
                                        f"{others[address]}")
        elif address == storage_address(second[name]):
            yield Complaint("aliasing", f"the gradient of {name} shares memory with that of "
                                        "another backward pass")


def _equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return all(one[n].dtype == other[n].dtype and torch.equal(one[n], other[n]) for n in one)


def _differs_again(kernel: Kernel, values: Mapping[str, Any],
                   output_grads: Sequence[Tensor | None], first: Mapping[str, Tensor]) -> bool:
    """Are the gradients others after another forward pass, twice, and where torch is asked for the
    same bits too? An order may be chosen there."""
    def gradients() -> dict[str, Tensor]:
        with torch.enable_grad():
            results = results_of(call(kernel, values))
        return _backward(values, results, output_grads, keep=False)

    if _equal(gradients(), first) or _equal(gradients(), first):
        return False
    with _same_bits():
        return not _equal(gradients(), gradients())


def _deterministic_passes(values: Mapping[str, Any], results: Sequence[Tensor],
                          output_grads: Sequence[Tensor | None]) -> list[dict[str, Tensor]]:
    with _same_bits():
        return [_backward(values, results, output_grads) for _ in range(2)]


@contextmanager
def _same_bits() -> Iterator[None]:
    """Asks torch for the same bits every time: on a GPU the backward pass of an index adds in any
    order otherwise."""
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    # the public one imports torch's compiler, which leaves traces that later checks count
    set_deterministic: Any = torch._C._set_deterministic_algorithms
    set_deterministic(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        set_deterministic(before, warn_only=warns)


class ExpectedGradients(NamedTuple):
    """What the formula gives for a case, in float64 and at the dtype of the call."""

    exact: list[Tensor]
    eager: list[Tensor]
    recorded: list[bool]                       # of each result: has the eager one a gradient?
    exact_grads: dict[str, Tensor]
    eager_grads: dict[str, Tensor]


def _expected_gradients(op: Op, values: Mapping[str, Any], output_grads: Sequence[Tensor | None],
                        scale: float) -> ExpectedGradients:
    # those alone: a cache of one byte an element has no gradient, its upcast copy would
    wide_values = _leaves(upcast(values), values)
    eager, exact = formula(op, values), formula(op, wide_values)
    wide_grads = [w if w is None else w.double() for w in output_grads]
    grads = (_backward(wide_values, exact, wide_grads, keep=False),
             _scaled_backward(values, eager, output_grads, scale, keep=False))
    # copies: a result may be an input, a gradient the one that the kernel gets
    return ExpectedGradients([r.detach().clone() for r in exact],
                             [r.detach().clone() for r in eager],
                             [r.requires_grad for r in eager],
                             *({n: g.clone() for n, g in side.items()} for side in grads))


def _leaves(others: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the same numbers in another dtype; a tensor that is given twice stays one."""
    by_id: dict[int, Tensor] = {}
    return {n: by_id.setdefault(id(values[n]), v.detach().requires_grad_(values[n].requires_grad))
            if isinstance(v, Tensor) and v.is_floating_point() else v for n, v in others.items()}


def _wanting(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the names of the tensors that want a gradient."""
    return tuple(n for n, v in values.items() if isinstance(v, Tensor) and v.requires_grad)


def _judge_gradients(op: Op, dtype: str, suffix: str, got: Mapping[str, Tensor],
                     exact: Mapping[str, Tensor], eager: Mapping[str, Tensor],
                     values: Mapping[str, Any], terms: int,
                     budgets: Callable[[], Mapping[str, float]]) -> tuple[list[Complaint], Errors]:
    """Returns complaints, and the errors of the worst input. `terms`: the number of results, whose
    gradients are summed. `budgets` tells what a rounding of the inputs moves each gradient."""
    rtol, atol = op.tolerance.of(dtype)
    complaints: list[Complaint] = []
    worst = (0.0, 0.0, 0.0)
    for name, want in exact.items():
        if got[name].dtype != values[name].dtype or got[name].shape != want.shape:
            complaints.append(Complaint("gradient",
                                        f"gradient of {name}{suffix} is {tuple(got[name].shape)} "
                                                    f"{got[name].dtype}"))
            continue
        if not want.numel():
            continue
        error, eager_error = (float((g[name].double() - want).abs().nan_to_num(nan=torch.inf).max())
                              for g in (got, eager))
        largest = float(want.abs().max())
        bound = op.tolerance.times_eager * eager_error + atol + rtol * largest
        if terms > LONG_SUM * want.numel():    # one after another in float32 is no mistake
            bound += 2 * UNITS["float32"] * math.sqrt(terms / want.numel()) * largest
        if error > bound:                      # it may be badly conditioned, and eager lucky
            bound += ROUNDINGS * budgets()[name]
        if error > bound:
            complaints.append(Complaint("gradient",
                                        f"gradient of {name}{suffix}: error {error:.3g} exceeds "
                                                    f"{bound:.3g}; eager {eager_error:.3g}"))
        worst = max(worst, (error, eager_error, error / bound), key=lambda e: e[2])
    return complaints, worst


def _forward_budget(op: Op, values: Mapping[str, Any], exact: Sequence[Tensor],
                    dtype: str) -> list[Tensor | None]:
    plain = {n: v.detach() if isinstance(v, Tensor) else v for n, v in values.items()}
    with torch.no_grad():
        return rounding_budget(partial(formula, op), plain, upcast(plain), tuple(exact), dtype, op)


def _rounding_budgets(op: Op, values: Mapping[str, Any], output_grads: Sequence[Tensor | None],
                      exact: Mapping[str, Tensor]) -> dict[str, float]:
    """Returns how far rounding the inputs to float32 moves each gradient, at most."""
    weights = [w if w is None else w.double() for w in output_grads]

    def gradients(rounded: Mapping[str, Any]) -> tuple[Tensor, ...]:
        leaves = _leaves(rounded, values)
        with torch.enable_grad():
            return tuple(_backward(leaves, formula(op, leaves), weights, keep=False).values())

    moved = rounding_budget(gradients, values, upcast(values), tuple(exact.values()))
    times = max(1.0, roundings_of(op, max(terms_of(op, values, 1))) / ROUNDINGS)
    return {n: 0.0 if gap is None or not gap.numel() else times * float(gap.max())
            for n, gap in zip(exact, moved)}


def _passes(values: Mapping[str, Any], results: Sequence[Tensor],
            output_grads: Sequence[Tensor | None], summed: bool, layouts: Sequence[Layout],
            scale: float | None = None) -> tuple[list[dict[str, Tensor]], list[str]]:
    """Returns the gradients of several passes, the first two of the same output gradients, and how
    those of the second and the others were given. `scale`: that of the output gradients, which the
    kernel gets and its gradients are divided by."""
    if scale is not None:
        return [_scaled_backward(values, results, output_grads, scale) for _ in range(2)], [""]
    if summed:
        with ThreadPoolExecutor(1) as pool:
            return [*pool.map(lambda g: _backward(values, results, g), [output_grads] * 2)], [""]
    runs = [_backward(values, results, output_grads) for _ in range(2)]
    with warnings.catch_warnings(), poisoned_memory():
        warnings.filterwarnings("ignore", message=UNREPEATABLE)
        runs += [_backward(values, results, _laid_out(output_grads, layout))
                 for _, layout in layouts]
    return runs, ["", *(f", given one {how}," for how, _ in layouts)]


def _laid_out(weights: Sequence[Tensor | None],
              layout: Callable[[Tensor], Tensor | None]) -> list[Tensor | None]:
    """Returns the same gradients in another layout, those that have it."""
    return [w if w is None else (w if (other := layout(w)) is None else other) for w in weights]


def _with_gaps(t: Tensor) -> Tensor | None:
    """Returns a copy with NaN between its elements; of several dimensions of rows the first two are
    exchanged in memory, as after a transposition of heads."""
    if t.dim() < 3:
        return with_layout(t, "sparse")
    moved = with_layout(t.transpose(0, 1), "sparse")
    return None if moved is None else moved.transpose(0, 1)


def _channels_last(t: Tensor) -> Tensor | None:
    """Returns a copy as the next layer gives it that has its channels last, or its heads."""
    return t.movedim(1, -1).contiguous().movedim(-1, 1) if t.dim() > 2 else with_layout(
        t, "transposed")


LAYOUTS: tuple[Layout, ...] = (
    ("with gaps", _with_gaps),
    ("as a part of wider rows", partial(with_layout, layout="padded")),
    ("with its second dimension last in memory", _channels_last))


def _scaled_backward(values: Mapping[str, Any], results: Sequence[Tensor],
                     output_grads: Sequence[Tensor | None], scale: float,
                     keep: bool = True) -> dict[str, Tensor]:
    """Returns the gradients by output gradients that are so many times as large, divided by that:
    infinite where a dtype has no room for them."""
    if scale == 1.0:
        return _backward(values, results, output_grads, keep)
    scaled = [g if g is None else g * scale for g in output_grads]
    return {n: g / scale for n, g in _backward(values, results, scaled, keep).items()}


def _backward(values: Mapping[str, Any], results: Sequence[Tensor],
              output_grads: Sequence[Tensor | None], keep: bool = True) -> dict[str, Tensor]:
    inputs = {n: values[n] for n in _wanting(values)}
    pairs = [(r, w) for r, w in zip(results, output_grads) if w is not None and r.requires_grad]
    if not pairs:
        return {n: torch.zeros_like(v) for n, v in inputs.items()}
    grads = torch.autograd.grad([r for r, _ in pairs], list(inputs.values()), [w for _, w in pairs],
                                allow_unused=True, retain_graph=keep)
    return {n: torch.zeros_like(v) if g is None else g for (n, v), g in zip(inputs.items(), grads)}
