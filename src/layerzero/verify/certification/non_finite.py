"""NaN and infinities in the inputs: they appear where the formula has them, and nowhere else; what
is chosen or counted beside them is what the formula chooses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...machine import loading
from ...machine.faults import FAULTS, classify, reason_of
from ...spec.kernel import Kernel
from ...spec.op import Op
from ..cases.chosen_cells import Cell
from ..cases.generated import given_arguments
from ..kernel.case_sizes import numbers_of
from ..kernel.contract import (
    CaseResult,
    bind_once,
    call,
    case_outline,
    case_refusals,
    case_values,
    eager_results,
    load_once,
    refusals,
    results_of,
)
from ..kernel.shared import fingerprint

Altered = tuple[str, dict[str, Any]]          # what is where, and the call with it
NUMBERS = (math.nan, math.inf, -math.inf)
TRIES = 4                                      # of places at which the formula may show a code
DEFINED = ("sampling", "quantization")         # families whose formulas say what NaN counts as
AFTER_OTHERS = ", after another call"          # and right when it is loaded anew
MOST_CELLS = 16                                # of those that differ by how arguments are combined


def non_finite_codes(dtype: torch.dtype) -> Tensor:
    """Returns the codes of a format of one byte that are NaN or infinite."""
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    return codes[~codes.float().isfinite()]


def _floats(op: Op, values: Mapping[str, Any], one_byte: bool) -> list[str]:
    return [n for n in op.tensors if isinstance(t := values[n], Tensor) and t.numel()
            and t.is_floating_point() and (t.dtype.itemsize == 1) == one_byte]


def _plain_inputs(op: Op, values: Mapping[str, Any], seed: int) -> Iterator[Altered]:
    """Yields calls with one number that is not finite, and where it is."""
    names, main = _floats(op, values, one_byte=False), op.same_dtype or (op.main_tensor,)
    chosen = [*((name, value) for name in names for value in (
        (math.nan, math.inf) if name in main or name in op.differentiable else (math.nan,))), *(
            (name, -math.inf) for name in names if name == op.main_tensor)]
    for name, value in chosen:
        t = values[name].clone()
        place = tuple((seed + 1) * 7 % n for n in t.shape)
        t[place] = value
        yield f"{value} in {name} at {place}", {**values, name: t}


def _code_inputs(op: Op, values: Mapping[str, Any], seed: int) -> Iterator[Altered]:
    """Yields calls with one stored code that is not finite, at a place where the formula has it."""
    for name in _floats(op, values, one_byte=True):
        t = values[name]
        codes = non_finite_codes(t.dtype).view(torch.uint8).tolist()
        for code in codes if len(codes) < 4 else (codes[0], codes[-1], codes[len(codes) // 2]):
            for attempt in range(TRIES):       # not every slot of a cache is used
                changed = t.clone(memory_format=torch.contiguous_format)
                place = tuple((seed + attempt + 1) * 7 % n for n in t.shape)
                changed.view(torch.uint8)[place] = code
                altered = {**values, name: changed}
                results = eager_results(op, altered, fingerprint(altered))
                shows = any(_is_wide(w) and not bool(w.isfinite().all()) for w in results)
                if shows or attempt == TRIES - 1:
                    yield f"code {code:#04x} in {name} at {place}", altered
                    break


def _row_inputs(op: Op, values: Mapping[str, Any], seed: int) -> Iterator[Altered]:
    """Yields calls in which every row of the main tensor has one number that is not finite: at its
    beginning, within it or at its end."""
    main = values[op.main_tensor]
    if op.main_tensor not in _floats(op, values, one_byte=False) or not main.dim():
        return
    rows = torch.arange(main.numel() // main.shape[-1], device=main.device)
    places = torch.tensor((0, main.shape[-1] // 2, main.shape[-1] - 1), device=main.device)
    numbers = torch.tensor(NUMBERS, device=main.device, dtype=main.dtype)
    for turn in range(len(NUMBERS) if rows.numel() < len(NUMBERS) else 2):
        t = main.clone(memory_format=torch.contiguous_format)
        t.view(-1, t.shape[-1])[rows, places[(rows + rows // 3 + 2 * turn + seed) % 3]] = (
            numbers[(rows + turn) % 3])
        yield f"{NUMBERS[turn]} in the first row of {op.main_tensor}, others in others", {
            **values, op.main_tensor: t}


def _is_wide(t: Tensor) -> bool:
    return t.is_floating_point() and t.dtype.itemsize > 1


def check_non_finite(kernel: Kernel, case: Mapping[str, Any], dtype: str, device: str = "cpu",
                     seed: int = 0) -> CaseResult:
    """Checks that a NaN or an infinity in an input appears where the formula has one, and nowhere
    else, and that integers are the formula's. What a library or torch makes of them is recorded in
    its certificate instead: torch adds -inf to the score of a hidden key, so a NaN in that key is
    seen."""
    op, of_others = kernel.op, is_of_others(kernel)

    def result(status: str, kind: str = "", detail: str = "", reasons: Any = (),
               after: str = "") -> CaseResult:
        return CaseResult(kernel.id, case, dtype, status, tuple(reasons), detail=detail,
                          circumstance=f"with NaN and infinity{after}", seed=seed,
                          kinds=(kind,) if kind else ())

    plain = case_values(op, case, dtype, device, seed)
    if not op.tensors:
        return result("skipped")
    reasons = refusals(kernel, plain)
    if reasons:
        return result("skipped", reasons=reasons)
    chooses = not all(map(_is_wide, results_of(op.meta(**plain))))
    kinds = _row_inputs if chooses else _plain_inputs, _code_inputs
    for where, values in (pair for kind in kinds for pair in kind(op, plain, seed)):
        try:
            with torch.no_grad():
                want = eager_results(op, values, fingerprint(values))
                got = results_of(call(kernel, values))
        except loading.LoadFailed as e:
            return result("skipped", reasons=(e.reason,))
        except FAULTS as e:
            return result("failed", "fault", str(reason_of(e, classify(e))))
        complaint = _compare(op, want, got, bool(kernel.package))
        if complaint and not _says_nothing(op, where, want):
            alone = not _is_right_when_loaded_anew(kernel, values, want)
            return result("skipped" if of_others and alone else "failed", complaint[0],
                          f"{where}: {complaint[1]}", after="" if alone else AFTER_OTHERS)
    return result("passed")


def _says_nothing(op: Op, where: str, want: Sequence[Tensor]) -> bool:
    """Has the formula no trace of an infinity? A score of -inf is that of a hidden key to it, and
    to others that of a key."""
    return op.family == "attention" and "inf" in where.split(" in ")[0] and all(
        bool(w.isfinite().all()) for w in want if _is_wide(w))


def _is_right_when_loaded_anew(kernel: Kernel, values: dict[str, Any],
                               want: Sequence[Tensor]) -> bool:
    bind_once.cache_clear()
    load_once.cache_clear()
    try:
        with torch.no_grad():
            got = results_of(call(kernel, values))
    except FAULTS:                             # it is wrong all the same
        return False
    return _compare(kernel.op, want, got, bool(kernel.package)) is None


def is_of_others(kernel: Kernel) -> bool:
    """Is it of a library, or of torch where nothing says what NaN counts as?"""
    return ((kernel.backend == "torch" and kernel.op.family not in DEFINED)
            or bool(kernel.package and kernel.distribution != "layerzero"))


def _compare(op: Op, want: Sequence[Tensor], got: Sequence[Tensor],
             of_a_package: bool) -> tuple[str, str] | None:
    """Returns what is wrong with results of inputs that are not finite: a kind and a text."""
    # which of several NaN is chosen, and whether one is, is nobody's rule elsewhere
    lenient = of_a_package or (op.family not in DEFINED and not all(map(_is_wide, want)))
    for w, g in zip(want, got):
        if not _is_wide(w):
            differs = _chosen_otherwise(w, g, () if op.family in DEFINED else want)
            if differs is not None:
                return "error", f"it differs from the formula, first at {differs}"
            continue
        spread, swallowed = g.isnan() & w.isfinite(), g.isfinite() & ~w.isfinite()
        if op.family in DEFINED:               # every number by itself: no order of a sum
            swallowed = swallowed | ((g != w) & ~w.isfinite() & ~(g.isnan() & w.isnan()))
            spread = spread | ~g.isfinite() & w.isfinite()
        if bool(spread.any()):
            return "not finite", (f"{int(spread.sum())} results are not finite where the "
                                  f"formula's are, first at {_first(spread)}")
        if bool(swallowed.any()) and not lenient:
            return "not finite", (f"swallowed: {int(swallowed.sum())} results are finite or of "
                                  "another kind where the formula's are not finite, first at "
                                  f"{_first(swallowed)}")
    return None


def _chosen_otherwise(want: Tensor, got: Tensor,
                      results: Sequence[Tensor]) -> tuple[int, ...] | None:
    """Returns where integers or codes differ first; not in rows of which one of the `results` is
    NaN, whose order is nobody's."""
    if want.shape != got.shape:
        return ()
    # of a code of NaN its sign is no matter
    a, b = ((t.float().nan_to_num(nan=12345.0) if t.is_floating_point() else t)
            for t in (want, got))
    differs = a != b
    for t in results:
        if _is_wide(t) and t.shape == want.shape and t.dim():
            differs &= ~t.isnan().any(-1, keepdim=True)
    return _first(differs) if bool(differs.any()) else None


def _first(where: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in where.nonzero()[0])


def non_finite_cells(kernel: Kernel, cells: Sequence[Cell], device: str,
                     seed: int) -> Iterator[Cell]:
    """Yields calls that each have another format of one byte, or another word or switch, as a ReLU
    may lose a NaN where other activations keep it; and of an op that chooses or counts those that
    each give other arguments."""
    op, seen, combined = kernel.op, set[Any](), set[frozenset[Any]]()
    if kernel.backend == "reference":          # it is what it is compared with
        return
    own = [cell for cell in cells if cell[0] in op.cases]
    # of a kernel for other dtypes alone the first of those
    first = next((dtype for dtype in op.dtypes for cell in own if cell[1] == dtype
                  and not case_refusals(kernel, *cell, device, seed)), "")
    for case, dtype in own:
        if dtype != first:
            continue
        values = case_outline(op, case, dtype, device, seed)
        facts = frozenset((n, values[n].dtype) for n in _floats(op, values, one_byte=True))
        chooses = bool(facts) or not all(map(_is_wide, results_of(op.meta(**values))))
        if chooses:
            facts |= _choices(op, values)
        elif device == "cpu" and not is_of_others(kernel):    # fmaxf of a GPU keeps no NaN
            facts |= _words(op, values)
            # and a path for one or two of a size
            facts |= {(n, size) for n, size in case.items() if type(size) is int and size in (1, 2)
                      and n in numbers_of(op)}
        is_new = facts - seen or (chooses and facts not in combined and len(combined) < MOST_CELLS)
        if facts and is_new and not case_refusals(kernel, case, dtype, device, seed):
            seen |= facts
            combined.add(facts)
            yield case, dtype


def _words(op: Op, values: Mapping[str, Any]) -> frozenset[tuple[str, Any]]:
    """Returns the words and switches of a call that are not at their defaults, and what of its
    numbers is not."""
    return frozenset((name, v if isinstance(v, (str, bool)) else "given")
                     for name in given_arguments(op, values)
                     if not isinstance(v := values[name], Tensor))


def _choices(op: Op, values: Mapping[str, Any]) -> frozenset[tuple[str, Any]]:
    """Returns what a call gives besides numbers: which tensors, which words, what is off."""
    return frozenset((p.name, v if isinstance(v, (str, bool)) else v != 0) for p in op.params
                     if not isinstance(v := values[p.name], Tensor) and v is not None) | {
                         (p.name, "given") for p in op.params if isinstance(values[p.name], Tensor)}


def nan_propagates(kernel: Kernel, device: str = "cpu") -> bool | None:
    """Does a NaN in the main tensor appear wherever the formula has one? None if the formula has
    none."""
    op = kernel.op
    if not op.tensors or kernel.jit:
        return None
    for case in op.cases[:8]:
        values = case_values(op, case, op.dtypes[0], device)
        main = values.get(op.main_tensor)
        if (not isinstance(main, Tensor) or not main.is_floating_point() or main.dtype.itemsize == 1
            or not main.numel()):
            continue
        main[(-1,) * main.dim()] = torch.nan
        if refusals(kernel, values):
            continue
        try:
            with torch.no_grad():
                want = eager_results(op, values, fingerprint(values))
                got = results_of(call(kernel, values))
        except FAULTS:
            return False
        expected = [w.isnan() for w in want if w.is_floating_point() and w.dtype.itemsize > 1]
        actual = [g.isnan() for g in got if g.is_floating_point() and g.dtype.itemsize > 1]
        if not any(bool(e.any()) for e in expected):
            return None
        return all(bool((f | ~e).all()) for e, f in zip(expected, actual))
    return None
