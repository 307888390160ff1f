"""Which checks a kernel gets in a lane, and in which order."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

from ...machine import hardware
from ...spec.kernel import Kernel
from ...spec.op import Op
from ..cases.chosen_cells import Cell, largest, most_tensors_first, smallest
from ..cases.covering import (
    cells_without_tensors,
    effective_cells,
    sized_combinations,
    wide_cells,
)
from ..cases.generated import (
    Case,
    case_key,
    cases_for,
    dtypes_for,
    find_argument_cases,
    is_costly,
    is_degenerate,
    own_keys,
    relative_cost,
    with_few_items,
    with_small_sizes,
)
from ..cases.octaves import bulk_calls, item_calls, octave_calls, square_calls
from ..cases.pairs import case_by_case_sizes, long_sums, model_sizes, pair_cases, residues
from ..kernel.absence import absence
from ..kernel.contract import (
    CaseResult,
    Circumstance,
    case_facts,
    case_outline,
    case_refusals,
    case_tensors,
    check_case,
    results_of,
)
from ..kernel.gradients import (
    also_gradient_cases,
    also_wanted,
    check_gradients,
    gradient_cases,
    has_plain_gradients,
)
from ..kernel.process_state import functions_of_torch, put_back_functions
from ..kernel.rare_settings import changed_settings, rare_settings
from .calls import (
    Budget,
    check_many_backwards,
    check_many_calls,
    check_output_margins,
    check_sizes,
)
from .circumstances.argument_circumstances import (
    AllStrided,
    ChangedInPart,
    EveryCode,
    LooseBound,
    PagesBehind,
    WithoutOthers,
    argument_circumstances,
    checks_without_others,
)
from .circumstances.backward_circumstances import backward_checks, kept_checks
from .circumstances.call_circumstances import (
    Autocast,
    Expanded,
    WithArgument,
    broadcast_checks,
    circumstances,
    tensor_circumstances,
)
from .circumstances.content_circumstances import check_contents, content_checks, tensor_checks
from .circumstances.half_range import half_range_checks
from .circumstances.mode_checks import mode_checks
from .circumstances.row_circumstances import OtherLayout, alike_checks
from .circumstances.use_circumstances import (
    after_inference_checks,
    generator_checks,
    rows_in_order_checks,
)
from .circumstances.value_circumstances import gradient_value_checks, value_checks
from .dropout import dropout_checks
from .gradient_calls import gradient_call_checks
from .growth import check_other_contents, other_contents_checks
from .interrupted import interrupted_by_calls, interrupted_checks
from .invariance import check_invariance
from .non_finite import check_non_finite, non_finite_cells
from .threads import check_threads
from .unused_places import unused_place_checks

# Of a JIT kernel: each may compile for seconds. A check that takes longer than COMPILES_S did.
JIT_CASES = {"quick": 4, "full": 16, "stress": 60}
COMPILES_S = 1.0
# of CPU time in a kernel for all sizes of a seed
SIZES_S = {"quick": 0.4, "full": 20.0}
A_MODEL = "a model"
LONG_S = {"quick": 1.5, "full": 60.0, "stress": math.inf}   # of a case that is not for each dtype
# Of a case that takes bfloat16 a tenth of a second, and of one that takes it several.
HALF_FLOPS, LONG_HALF_FLOPS = 4e6, 1.2e7


def checks_of(kernel: Kernel, device: str, lane: str,
              seeds: Sequence[int]) -> Iterator[Callable[[], CaseResult]]:
    """Yields the checks of a kernel, those first that find most."""
    absent = absence(kernel, device)
    if absent is not None:
        yield partial(CaseResult, kernel.id, {}, kernel.op.dtypes[0], "skipped", (absent,))
        return
    functions, settings = functions_of_torch(), rare_settings()
    yield from _checks_by_seed(kernel, device, lane, seeds)
    if not (kernel.jit or kernel.package):     # an import or a compiler may have reasons
        yield partial(_check_functions, kernel, functions, settings)


def _check_functions(kernel: Kernel, functions: dict[str, dict[str, Any]],
                     settings: dict[str, Any]) -> CaseResult:
    """Checks that torch's functions, and settings that few look at, are those that they were before
    the first check."""
    changed = [*(f"{name} is another function now" for name in put_back_functions(functions)),
               *(f"{name} changed during the calls" for name in changed_settings(settings))]
    return CaseResult(kernel.id, {}, kernel.op.dtypes[0], "failed" if changed else "passed",
                      detail=changed[0] if changed else "", circumstance="after all calls",
                      kinds=("global state",) if changed else ())


def _checks_by_seed(kernel: Kernel, device: str, lane: str,
                    seeds: Sequence[int]) -> Iterator[Callable[[], CaseResult]]:
    op = kernel.op
    for seed in seeds:
        cases = cases_for(op, lane, seed)
        argument_cases, _ = find_argument_cases(kernel, lane, [hardware.probe(device).facts()],
                                                seed)
        cases += tuple(argument_case.case for argument_case in argument_cases
                       if argument_case.donor is None)
        cells = [(case, dtype) for case in cases for dtype in dtypes_for(op, lane, case)]
        own = set(own_keys(op))
        if lane == "quick" and device == "cpu":
            declared = _without_costly_repeats(kernel, cells, device, seed)
            cells = [_cheaper(kernel, cell, device, seed) for cell in declared]
            own |= {case_key(cheaper) for (cheaper, _), (case, _) in zip(cells, declared)
                    if case_key(case) in own}
        cells = _accepted_cells(kernel, cells, device, seed)
        if kernel.jit:
            limit = JIT_CASES[lane]
            apart = cells[::max(len(cells) // limit, 1)][:limit]
            yield from _until_one_compiles(limit, (
                partial(check_case, kernel, case, dtype, device, seed)
                for case, dtype in (*apart, *(cell for cell in cells if cell not in apart))))
            # each may compile again, so each kind once
            if lane != "quick" and seed == seeds[0]:
                yield from _circumstance_checks(kernel, apart, device, "quick", seed)
                yield from islice(_gradient_checks(kernel, device, "quick", seed), limit)
            continue
        first = [cell for cell in cells if case_key(cell[0]) in own
                 and cell[1] == op.dtypes[0]]
        if _is_formula(kernel, lane):
            cells = [cell for cell in cells if case_key(cell[0]) in own] or cells
        # the longest after those that tell whether the kernel can do with them
        in_turn = cells[::-1] if lane == "quick" and seed % 2 else cells     # of dtypes
        later = sorted((cell for cell in in_turn if cell not in first),
                       key=lambda cell: (case_key(cell[0]) in own, cell[0] in op.stress))
        yield from (partial(check_case, kernel, case, dtype, device, seed) for case, dtype in first)
        for case, dtype in first[:1]:
            other = largest(op, [c for c, d in cells if d == dtype], dtype, device, seed)
            yield partial(check_threads, kernel, case, dtype, device, seed, other)
            much = largest(op, [c for c, d in cells if d == dtype], dtype, device, seed, False)
            if much is not other:              # in some of which a kernel goes another way
                yield partial(check_threads, kernel, much, dtype, device, seed)
            if not _is_formula(kernel, lane):
                yield interrupted_by_calls(kernel, first, device, lane, seed, other)
            if lane != "quick":
                yield from interrupted_checks(kernel, first, device, seed)
            yield from _invariance_checks(kernel, cells, device, lane, seed)
            yield from dropout_checks(kernel, dtype, device, lane, seed)
        if lane != "quick" and kernel.backend != "reference":
            yield from gradient_call_checks(kernel, device, seed)
        yield from (partial(check_case, kernel, argument_case.case, dtype, device, seed,
                            WithArgument(argument_case))
                    for argument_case in argument_cases if argument_case.donor is not None
                    for dtype in dtypes_for(op, lane, argument_case.case))
        if (("float64" in op.tolerance.by_dtype or op.family == "sampling")
                and kernel.backend != "reference"):
            # what is computed in float32 on one path alone shows in the case of that path
            others = op.cases[3 + seed % 8::8] if lane == "quick" else op.cases[3:]
            yield from (partial(check_case, kernel, case, "float64", device, seed)
                        for case in (*op.cases[:3], *others))
        if not _is_formula(kernel, lane):
            yield from _circumstance_checks(kernel, cells, device, lane, seed)
            yield from _many_call_checks(kernel, cells, device, lane, seed)
        yield from _gradient_checks(kernel, device, lane, seed)
        yield from _once_where_long(((case, partial(check_case, kernel, case, dtype, device, seed))
                                     for case, dtype in later), LONG_S[lane])


def _until_one_compiles(first: int, checks: Iterable[Callable[[], CaseResult]]
                        ) -> Iterator[Callable[[], CaseResult]]:
    """Yields the `first` checks, and then others for as long as what is compiled serves them."""
    for count, check in enumerate(checks, 1):
        start = time.perf_counter()
        yield check
        if count >= first and time.perf_counter() - start > COMPILES_S:
            return


def _once_where_long(checks: Iterable[tuple[Case, Callable[[], CaseResult]]],
                     limit_s: float) -> Iterator[Callable[[], CaseResult]]:
    """Yields the checks but for those of another dtype of a case that took so long in one."""
    long: set[Any] = set()
    for case, check in checks:
        if (key := case_key(case)) not in long:
            began = time.process_time()
            yield check
            long |= {key} if time.process_time() - began > limit_s else set()


def _accepted_cells(kernel: Kernel, cells: list[Cell], device: str, seed: int) -> list[Cell]:
    """Returns all cells; for a JIT kernel, which runs only a few, those it accepts."""
    return ([c for c in cells if _accepts(kernel, c, device, seed)] or cells[:1] if kernel.jit
            else cells)


def _without_costly_repeats(kernel: Kernel, cells: Sequence[Cell], device: str,
                            seed: int) -> list[Cell]:
    """Returns the cells but for costly cases beyond the op's own at a second dtype, where the
    kernel has them at the first: products of 16 bits take many CPUs seconds."""
    op = kernel.op
    kept: list[Cell] = []
    for case, dtype in cells:
        repeats = (kept and kept[-1][0] is case and case not in op.cases and is_costly(op, case)
                   and _accepts(kernel, kept[-1], device, seed))
        kept += [] if repeats else [(case, dtype)]
    return kept


def _cheaper(kernel: Kernel, cell: Cell, device: str, seed: int) -> Cell:
    """Returns a cell of bfloat16, whose products take many CPUs long, with smaller sizes where that
    matters; the op's own cases where the kernel takes float16 too, which has others of them as they
    are."""
    op, (case, dtype) = kernel.op, cell
    if (dtype != "bfloat16" or not is_costly(op, case, HALF_FLOPS)
            or (case in op.cases and not _accepts(kernel, (case, "float16"), device, seed))):
        return cell
    smaller = with_small_sizes(op, case)
    fewer = with_few_items(op, smaller) if is_costly(op, smaller, LONG_HALF_FLOPS) else smaller
    return next(((other, dtype) for other in (fewer, smaller)
                 if _accepts(kernel, (other, dtype), device, seed)), cell)


def _accepts(kernel: Kernel, cell: Cell, device: str, seed: int) -> bool:
    return not case_refusals(kernel, cell[0], cell[1], device, seed)


def _circumstance_checks(kernel: Kernel, cells: Sequence[Cell], device: str, lane: str,
                         seed: int) -> Iterator[Callable[[], CaseResult]]:
    """Yields checks on cells that the kernel accepts, one per dtype, more in the longer lanes; and
    on one more for each tensor that those do not give, of how it lies in memory."""
    op = kernel.op
    # A bound may be the length where there is one item, a code matters in its format: so in every
    # case.
    everywhere = [c for c in argument_circumstances(op)
                  if isinstance(c, (LooseBound, EveryCode, PagesBehind))]
    for case, dtype in cells:
        if dtype != op.dtypes[0] or case not in op.cases:
            continue
        tensors = case_tensors(op, case, dtype, device, seed)
        apply = [c for c in everywhere if isinstance(c, (LooseBound, PagesBehind))
                 or (c.tensor in tensors and tensors[c.tensor].dtype.itemsize == 1)]
        if apply and not case_refusals(kernel, case, dtype, device, seed):
            yield from (partial(check_case, kernel, case, dtype, device, seed, c) for c in apply)
    yield from checks_without_others(kernel, cells, device, seed)
    yield from rows_in_order_checks(kernel, cells, device, seed)
    yield from alike_checks(kernel, cells, device, seed)
    yield from broadcast_checks(kernel, cells, device, seed)
    yield from content_checks(kernel, device, seed)
    yield from half_range_checks(kernel, device, seed)
    yield from tensor_checks(kernel, cells, device, seed)
    count = {"quick": 1, "full": 3, "stress": 3}[lane]
    dtypes = ("float32", "bfloat16") if "float32" in op.dtypes else op.dtypes[:1]
    first = True
    for dtype in dtypes:
        accepted = (c for c in cells if c[1] == dtype and _accepts(kernel, c, device, seed))
        ranked = most_tensors_first(op, accepted, device, seed)
        for _, (case, dtype) in ranked[:count]:
            yield from (partial(check_contents, kernel, case, dtype, device, seed, circumstance)
                        for circumstance in circumstances(op, lane)
                        if not isinstance(circumstance, WithoutOthers)
                        and (first or lane != "quick" or _is_due(circumstance, seed)
                             or isinstance(circumstance, Autocast)))   # there alone
        seen = set().union(*(names for names, _ in ranked[:count])) if ranked else set()
        for names, (case, dtype) in ranked[count:]:
            missing, known, seen = names - seen, {name for name, _ in seen}, seen | names
            yield from (partial(check_case, kernel, case, dtype, device, seed, circumstance)
                        for name, _ in sorted(missing)
                        for circumstance in (
                            # of a known one in another dtype or rank: what is kept of it
                            *(tensor_circumstances(op, name, lane)
                              if lane != "quick" or name not in known
                              else (OtherLayout(name, "transposed"),)),
                            *((ChangedInPart(name),) if first else ())))
        first = first and not ranked
    if lane != "quick":
        yield from value_checks(kernel, cells, device, seed)
    # last: what is kept of any call shows in others too
    yield from after_inference_checks(kernel, device, lane, seed)
    yield from generator_checks(kernel, device, seed)


def _is_due(circumstance: Circumstance, seed: int) -> bool:
    """Is it asked at a second dtype? Of those that may tell something else there every fifth one,
    by the seed."""
    return not circumstance.any_dtype and (zlib.crc32(circumstance.name.encode()) + seed) % 5 == 0


def _is_formula(kernel: Kernel, lane: str) -> bool:
    """Is it compared with itself? Its own cases then say whether its tolerance is sound; nothing
    else does, and the longer lanes have how it goes with memory."""
    return kernel.backend == "reference" and lane == "quick"


def _many_call_checks(kernel: Kernel, cells: Sequence[Cell], device: str, lane: str,
                      seed: int) -> Iterator[Callable[[], CaseResult]]:
    """Yields checks of a thousand calls, of NaN and infinity, of sizes and of pairs of arguments.
    The formula itself needs none of the last two."""
    op = kernel.op
    by_dtype = ([c for c, _ in zip((c for c in cells if c[1] == dtype
                                    and _accepts(kernel, c, device, seed)), range(12))]
                for dtype in op.dtypes)
    accepted = next(filter(None, by_dtype), [])
    if not op.tensors and accepted and kernel.backend != "reference":
        yield from (partial(check_case, kernel, case, dtype, device, seed)
                    for case, dtype in cells_without_tensors(kernel, device, lane, seed))
        yield from (partial(check_other_contents, kernel, *cell, device, seed)
                    for cell in cells if "drawn" in cell[0] and cell[0] in op.stress)
    if not op.tensors or not accepted:
        return
    plain, (case, dtype) = accepted[0], smallest(op, accepted, device, seed)
    calls = 300 if lane == "quick" else 5000
    yield partial(check_many_calls, kernel, case, dtype, device, seed,
                  calls // 10 if kernel.backend == "reference" else calls)
    if kernel.backend != "reference":
        yield from other_contents_checks(kernel, accepted, device, lane, seed)
    with_most = most_tensors_first(op, (c for c in accepted if c[1] == plain[1]), device, seed)
    not_finite = [plain, *(cell for _, cell in with_most[:1]),
                  *non_finite_cells(kernel, cells, device, seed)]
    yield from (partial(check_non_finite, kernel, *cell, device, seed)
                for i, cell in enumerate(not_finite) if cell not in not_finite[:i])
    if kernel.backend != "reference":
        yield from unused_place_checks(kernel, device, seed)
    yield from (partial(check_output_margins, kernel, *cell, device, seed)
                for cell in accepted[::3])
    if kernel.backend != "reference":
        yield from mode_checks(kernel, plain[1], device, lane, seed)
        narrow = next((d for d in ("bfloat16", "float16") if d != plain[1] and any(
            c[1] == d and _accepts(kernel, c, device, seed) for c in cells)), "")
        yield from size_checks(kernel, plain[1], narrow, device, lane, seed)
        yield from (partial(check_case, kernel, case, dtype, device, seed)
                    for case, dtype in (*pair_cases(kernel, device, lane, seed).cells,
                                        *effective_cells(kernel, device, lane, seed),
                                        *wide_cells(kernel, device, lane, seed)))


def size_checks(kernel: Kernel, dtype: str, narrow: str, device: str, lane: str,
                 seed: int) -> Iterator[Callable[[], CaseResult]]:
    """Yields the calls of many sizes, which are compared with the eager formula alone: a quarter of
    them in the `narrow` dtype, for which many kernels have tiles of their own; beyond the quick
    lane half of them in both."""
    op, quick = kernel.op, lane == "quick"
    sizes = [*residues(op, lane, seed), ("each case", case_by_case_sizes(op, lane, seed)),
             ("tiles beside arguments", sized_combinations(kernel, device, lane, seed)),
             (A_MODEL, model_sizes(op, seed, lane)),
             *([("many sequences", items)] if (items := item_calls(op, seed)) else ()),
             *([("every octave", octave_calls(op, seed)), ("millions", bulk_calls(op, seed)),
                ("all lengths", square_calls(op, seed))] if not quick else ())]
    apart: list[tuple[str, Sequence[Sequence[Case]], str]] = []
    for name, cases in sizes:
        part = 4 if quick else 2
        some = {i: group for i, group in enumerate(cases) if narrow and (i + seed) % part == 0
                and (relative_cost(op, group[0]) or math.inf) <= HALF_FLOPS}
        apart.append((name, [group for i, group in enumerate(cases) if not quick or i not in some],
                      dtype))
        if some:
            apart.append((name, list(some.values()), narrow))
    budget = Budget(SIZES_S.get(lane, math.inf), len(apart))
    yield from (partial(check_sizes, kernel, name, cases, of, device, seed,
                        all_others=not quick or name != A_MODEL, budget=budget)
                for name, cases, of in apart)


def _invariance_checks(kernel: Kernel, cells: Sequence[Cell], device: str, lane: str,
                       seed: int) -> Iterator[Callable[[], CaseResult]]:
    """Hold a kernel that claims to be invariant to it, in some of the cases and in those of the op
    that are for this. What computes one head at a time takes seconds for 65,600 heads, and each
    case is computed four times over: such sizes are for the longer lanes."""
    if lane == "quick":
        cells = [(case, dtype) for case, dtype in cells if case not in kernel.op.stress]
    cells = [*cells[::max(len(cells) // 24, 1)],
             *((case, dtype) for case in kernel.op.invariance_cases for dtype in kernel.op.dtypes)]
    for to, declared in (("batch", kernel.batch_invariant), ("tp", kernel.tp_invariant)):
        if declared:
            yield from (partial(check_invariance, kernel, case, dtype, to, device, seed)
                        for case, dtype in cells)


def _with_several_results(op: Op, cases: Sequence[Case],
                          dtype: str) -> Iterator[tuple[Case, int]]:
    """Yields the first case that has several results with a gradient, and their number."""
    for case in cases:
        results = results_of(op.meta(**case_outline(op, case, dtype)))
        if len(results) > 1 and all(t.is_floating_point() for t in results):
            yield case, len(results)
            return


def _first_with(op: Op, cases: Sequence[Case], name: str) -> Case:
    """Returns the first case that gives a tensor."""
    return next((case for case in cases if name in case_tensors(op, case, op.dtypes[0])), cases[0])


def _gradient_checks(kernel: Kernel, device: str, lane: str,
                     seed: int) -> Iterator[Callable[[], CaseResult]]:
    op = kernel.op
    if not kernel.differentiable or not op.differentiable:
        return
    dtypes = ([d for d in op.dtypes if d in ("float32", "bfloat16")] if lane == "quick"
              else [*op.dtypes, "float64"])
    dtypes = dtypes[:1] if _is_formula(kernel, lane) else dtypes
    own_cases = [c for c in op.cases if lane != "quick"
                 and not is_degenerate(op, case_facts(op, c, op.dtypes[0]))]
    cases = (*gradient_cases(op), *own_cases)

    def sized(case: Case, dtype: str) -> Case:
        """Returns a smaller case in the quick lane of a CPU, where the kernel takes it."""
        small = with_small_sizes(op, case) if lane == "quick" and device == "cpu" else case
        return small if _accepts(kernel, (small, dtype), device, seed) else case

    # a quarter in the second dtype, every other one with a gradient of the main tensor alone
    alone = [op.main_tensor if op.main_tensor in op.differentiable and (i + seed) % 2 else ""
             for i in range(len(cases))]
    yield from (partial(check_gradients, kernel, case if dtype == "float32" else sized(case, dtype),
                        dtype, device, seed, alone[i] if dtype == dtypes[-1] != dtypes[0] else "")
                for i, case in enumerate(cases) for dtype in dtypes
                if lane != "quick" or dtype == dtypes[0] or (i + seed) % 8 in (3, 6))
    if lane == "quick" and not _is_formula(kernel, lane):      # two arguments beside each other
        yield from (partial(check_gradients, kernel, case, dtypes[0], device, seed,
                            also=also_wanted(kernel, case, dtypes[0], device, seed))
                    for case, _ in pair_cases(kernel, device, lane, seed).cells[seed % 3::3]
                    if "extreme" not in case
                    and has_plain_gradients(op, case, dtypes[0], device, seed))
    yield from gradient_value_checks(kernel, gradient_cases(op), device, lane, seed)
    # other contents than before: what an earlier backward kept shows
    yield from (partial(check_gradients, kernel, _first_with(op, cases, name), dtypes[0], device,
                        seed + 1, name) for name in op.differentiable)
    # what a backward has kept of tensors that are parts of others, as of one projection
    yield from (partial(check_gradients, kernel, case, dtypes[0], device, seed,
                        altered=AllStrided(layout))
                for i, (case, layout) in enumerate(zip(cases, ("sparse", "transposed")))
                if lane != "quick" or (i + seed) % 2 == 0)
    yield from (partial(check_gradients, kernel, case, dtypes[0], device, seed, source=i)
                for case, count in _with_several_results(op, cases, dtypes[0])
                for i in range(count))
    yield from (partial(check_gradients, kernel, case, dtypes[0], device, seed, summed=True)
                for case in cases[:2])
    if kernel.backend != "reference":          # of which gradients are added up by the caller
        yield from (partial(check_gradients, kernel, cases[0], dtypes[0], device, seed,
                            altered=Expanded(name, (i + seed) % 2))
                    for i, name in enumerate(op.differentiable)
                    if lane != "quick" or (i + seed) % 2)
    for i, (case, name) in enumerate(also_gradient_cases(op)):
        if lane != "quick" or (i + seed) % 2:
            yield partial(check_gradients, kernel, case, dtypes[0], device, seed, only=name)
        if lane != "quick" or not (i + seed) % 2:
            yield partial(check_gradients, kernel, case, dtypes[0], device, seed, also=name)
    # the formula adds up as it does
    yield from (partial(check_gradients, kernel, case, dtypes[0], device, seed)
                for case in (long_sums(op, lane, seed) if kernel.backend != "reference" else ()))
    if not _is_formula(kernel, lane):
        yield from backward_checks(kernel, device, lane, seed)
        yield from kept_checks(kernel, device, seed) if lane != "quick" else ()
        yield from (partial(check_many_backwards, kernel, sized(case, dtypes[0]), dtypes[0], device,
                            seed) for case in cases[:1])
