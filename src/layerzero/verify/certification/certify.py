"""Level 1 of verification: every kernel against its contract, forward and backward; a certificate
for those that pass.

Three lanes. `quick` takes seconds per kernel: all cases of the op at every dtype, a few more sizes
and crossings, each kind of circumstance once, gradients. `full` has every size and every layout of
every tensor, `stress` also many seeds. A JIT kernel gets fewer cases, and circumstances and
gradients in the longer lanes only; where compiling takes long, the quick lane ends after
JIT_QUICK_S, or leaves out what comes after JIT_ALL_S, and where a case takes long, its other
dtypes; the verdict says so. A kernel passes if no case fails; what its own rules refuse is counted
as skipped.
"""

from __future__ import annotations

import hashlib
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from ...dispatch.facts import read
from ...machine import hardware, loading
from ...machine.builds import build_of
from ...machine.faults import FAULTS
from ...spec.codec import encode
from ...spec.kernel import Kernel
from ...spec.reason import Code, Reason
from ...world import snapshot as worlds
from ...world.registry import certificates
from ...world.registry.certificates import Certificate, contract_of
from ..kernel.cases import case_key, cases_for, dtypes_for, find_argument_cases, is_degenerate
from ..kernel.chosen_cells import Cell, largest, most_tensors_first, smallest
from ..kernel.contract import CaseResult, case_values, check_case, refusals
from ..kernel.gradients import check_gradients, gradient_cases
from ..kernel.pairs import long_sums, model_sizes, pair_cases, residues
from .argument_circumstances import (
    EveryCode,
    LooseBound,
    WithoutOthers,
    argument_circumstances,
    checks_without_others,
)
from .calls import (
    check_many_backwards,
    check_many_calls,
    check_non_finite,
    check_output_margins,
    check_sizes,
    nan_propagates,
)
from .capture import certificate_fields
from .circumstances import (
    WithArgument,
    check_dropout,
    check_threads,
    circumstances,
    tensor_circumstances,
)
from .coverage import NOTHING, Coverage, measure_coverage
from .diagnosis import Diagnosis, diagnose
from .invariance import check_invariance

# with their seeds
LANES: Mapping[str, tuple[int, ...]] = {"quick": (0,), "full": (0, 1), "stress": tuple(range(20))}
JIT_CASES = {"quick": 4, "full": 16, "stress": 60}      # each compiles for seconds
# After so long the rest is left to the full lane: of one kernel, and of all together.
JIT_QUICK_S, JIT_ALL_S = 20.0, 30.0
# A case of many thousand heads, that takes a kernel longer, is not asked again at another dtype.
SLOW_CASE_S = 3.0


@dataclass(frozen=True)
class Verdict:
    """The result of one kernel: with a `certificate` if it passed, a `diagnosis` if it failed."""

    kernel: str
    op: str
    lane: str
    results: tuple[CaseResult, ...]
    certificate: Certificate | None = None
    diagnosis: Diagnosis | None = None
    seconds: float = 0.0
    coverage: Coverage = NOTHING

    @property
    def failures(self) -> tuple[CaseResult, ...]:
        return tuple(r for r in self.results if r.status == "failed")

    @property
    def ran(self) -> int:
        return sum(r.status != "skipped" for r in self.results)

    @property
    def status(self) -> str:
        return "failed" if self.failures else "passed" if self.ran else "skipped"

    @property
    def worst(self) -> float:
        """The largest ratio of error to allowed error."""
        return max((r.ratio for r in self.results), default=0.0)

    @property
    def refusal(self) -> str:
        """The most frequent reason for skipping."""
        reasons = Counter(str(reason) for r in self.results for reason in r.reasons)
        return reasons.most_common(1)[0][0] if reasons else ""

    def to_json(self) -> dict[str, Any]:
        return {
            "kernel": self.kernel, "op": self.op, "lane": self.lane, "status": self.status,
            "cases": self.ran, "skipped": len(self.results) - self.ran, "worst": self.worst,
            "seconds": round(self.seconds, 2), "coverage": encode(self.coverage),
            "refusal": self.refusal if self.status == "skipped" else "",
            "certificate": encode(self.certificate),
            "diagnosis": None if self.diagnosis is None else {
                "class": self.diagnosis.kind, "says": self.diagnosis.says,
                "where": self.diagnosis.where, "advice": self.diagnosis.advice},
            "failures": [{"case": dict(r.case), "dtype": r.dtype, "circumstance": r.circumstance,
                          "seed": r.seed,
                          "kinds": list(r.kinds), "detail": r.detail} for r in self.failures[:20]]}


def certify(kernel: Kernel, device: str = "cpu", lane: str = "quick",
            seeds: Sequence[int] | None = None, *,
            stop_early: bool = False, on_result: Callable[[CaseResult], None]
            | None = None) -> Verdict:
    """Verifies one kernel, or diagnoses what is wrong with it. Nothing is written.

    `stop_early`: after a failure only a few more cases run, enough for the diagnosis.
    """
    started, results, failed, ran_since = time.perf_counter(), [], 0, 0  # type: float, list[CaseResult], int, int
    cut_short, slow, repeats = "", set(), 0     # type: str, set[str], int
    with warnings.catch_warnings(), _allow_recompiles(kernel):
        warnings.simplefilter("ignore")
        checks = _checks(kernel, device, lane, LANES[lane] if seeds is None else seeds)
        while (check := _next_check(kernel, checks)) is not None:
            case = _plain_case(check) if lane == "quick" else None
            if case in slow:
                repeats += 1
                continue
            began = time.perf_counter()
            result = _guarded_check(kernel, check)
            if case is not None and result.passed and time.perf_counter() - began > SLOW_CASE_S:
                slow.add(case)
            results.append(result)
            failed += result.status == "failed"
            ran_since += failed > 0 and result.status != "skipped"
            if on_result is not None:
                on_result(result)
            if stop_early and (failed >= 6 or ran_since >= 16):
                break
            elapsed = time.perf_counter() - started
            if kernel.jit and lane == "quick" and result.passed and elapsed > JIT_QUICK_S:
                left = sum(1 for _ in checks)
                cut_short = (f"{left} of {left + len(results)} cases: compiling took "
                             f"{elapsed:.0f} s") if left else ""
                break
    diagnosis = _diagnosis(kernel, results, device)
    coverage = measure_coverage(kernel, device, lane, LANES[lane] if seeds is None else seeds,
                                results)
    if repeats:
        cut_short = (f"{repeats} long cases at a second dtype: each took {SLOW_CASE_S:.0f} s at "
                     "the first")
    if cut_short:
        coverage = replace(coverage, missing=(cut_short, *coverage.missing))
    verdict = Verdict(kernel.id, kernel.op.name, lane, tuple(results), None, diagnosis,
                      coverage=coverage)
    certificate = _certificate(kernel, device, verdict) if verdict.status == "passed" else None
    return replace(verdict, certificate=certificate, seconds=time.perf_counter() - started)


def _next_check(kernel: Kernel,
                checks: Iterator[Callable[[], CaseResult]]) -> Callable[[], CaseResult] | None:
    """Returns the next check; one that fails where none could be made."""
    try:
        return next(checks, None)
    except FAULTS as e:
        return partial(CaseResult, kernel.id, {}, kernel.op.dtypes[0], "failed", kinds=("fault",),
                       detail=f"its cases could not be made: {type(e).__name__}: {e}")


def _plain_case(check: Callable[[], CaseResult]) -> str | None:
    """Returns the case of a check that has no circumstance; None for any other check."""
    if not isinstance(check, partial) or check.func is not check_case or len(check.args) != 5:
        return None
    return case_key(check.args[1])


def _guarded_check(kernel: Kernel, check: Callable[[], CaseResult]) -> CaseResult:
    """Runs a check. What escapes from it, as from a formula with inputs that a kernel has spoilt,
    is a result of this kernel."""
    try:
        return check()
    except FAULTS as e:
        arguments = getattr(check, "args", ())
        case = next((a for a in arguments if isinstance(a, Mapping)), {})
        return CaseResult(kernel.id, case, kernel.op.dtypes[0], "failed", kinds=("fault",),
                          detail=f"the check itself ended in {type(e).__name__}: {e}")


def _diagnosis(kernel: Kernel, results: Sequence[CaseResult], device: str) -> Diagnosis | None:
    try:
        return diagnose(kernel, results, device)
    except FAULTS as e:
        first = next(r for r in results if r.status == "failed")
        return Diagnosis("unknown", f"{first.detail} (its diagnosis ended in {type(e).__name__}: "
                                    f"{e})")


def _allow_recompiles(kernel: Kernel) -> Any:
    """Raises torch's recompile limit: one size in many circumstances compiles more often than it
    allows."""
    if not kernel.jit:
        return nullcontext()
    from torch._dynamo import config  # a heavy import, which a JIT kernel needs anyway
    return config.patch(recompile_limit=512)


def certify_all(kernels: Sequence[Kernel], device: str = "cpu", lane: str = "quick",
                seeds: Sequence[int] | None = None) -> Iterator[Verdict]:
    """Certifies kernels in turn; each certificate is on disk before the next begins, so it may be
    interrupted.

    A kernel that fails loses the certificate it had, and is remembered: selection does not choose
    it by itself any more. One whose verification itself breaks has failed too; the others go on,
    unless it left the GPU in a failed state: then nothing more can be said in this process.
    """
    target = hardware.probe(device)
    ops = list(dict.fromkeys(kernel.op.name for kernel in kernels))
    # op by op: what the formula gives is computed once for all kernels of an op
    culprit, compiling = "", 0.0
    for kernel in sorted(kernels, key=lambda kernel: ops.index(kernel.op.name)):
        if culprit:
            yield _not_run(kernel, lane, Reason(
                Code.DEVICE_FAULT, None, f"{culprit} failed before; verify this one again"))
            continue
        if kernel.jit and lane == "quick" and compiling > JIT_ALL_S:
            yield _not_run(kernel, lane, Reason(Code.JIT_NOT_WARMED))
            continue
        verdict = certify(kernel, device, lane, seeds)
        compiling += verdict.seconds if kernel.jit else 0.0
        if verdict.certificate is not None:
            certificates.write(verdict.certificate, target)
        elif verdict.status == "failed":
            certificates.write_failure(failure_of(kernel, device, verdict), target)
            culprit = kernel.id if _is_lost(device) else ""
        yield verdict


def _is_lost(device: str) -> bool:
    """Returns whether a GPU does nothing any more, as after an illegal access."""
    if not device.startswith("cuda"):
        return False
    try:
        torch.cuda.synchronize(device)
    except FAULTS:
        return True
    return False


def _not_run(kernel: Kernel, lane: str, reason: Reason) -> Verdict:
    return Verdict(kernel.id, kernel.op.name, lane, (
        CaseResult(kernel.id, {}, kernel.op.dtypes[0], "skipped", (reason,)),))


def publish() -> None:
    """Publishes a world, so that selection sees the certificates that were written."""
    worlds.publish(lambda world: world.replace(), "certificates")


# The checks of a kernel.

def _checks(kernel: Kernel, device: str, lane: str,
            seeds: Sequence[int]) -> Iterator[Callable[[], CaseResult]]:
    op = kernel.op
    absent = loading.availability(kernel) or _wrong_device(kernel, device)
    if absent is not None:
        yield partial(CaseResult, kernel.id, {}, op.dtypes[0], "skipped", (absent,))
        return
    for seed in seeds:
        cases = cases_for(op, lane, seed)
        argument_cases, _ = find_argument_cases(kernel, lane, [hardware.probe(device).facts()],
                                                seed)
        cases += tuple(argument_case.case for argument_case in argument_cases
                       if argument_case.donor is None)
        cells = [(case, dtype) for case in cases for dtype in dtypes_for(op, lane, case)]
        cells = _accepted_cells(kernel, cells, device, seed)
        if kernel.jit:
            limit = JIT_CASES[lane]
            cells = cells[::max(len(cells) // limit, 1)][:limit]
            yield from (partial(check_case, kernel, case, dtype, device, seed)
                        for case, dtype in cells)
            # each may compile again, so each kind once
            if lane != "quick" and seed == seeds[0]:
                yield from _circumstance_checks(kernel, cells, device, "quick", seed)
                yield from islice(_gradient_checks(kernel, device, "quick", seed), limit)
            continue
        own_keys = {case_key(case) for case in op.cases}
        first = [cell for cell in cells if case_key(cell[0]) in own_keys
                 and cell[1] == op.dtypes[0]]
        # the formula is compared with itself: its own cases say whether its tolerance is sound
        if kernel.backend == "reference" and lane == "quick":
            cells = [cell for cell in cells if case_key(cell[0]) in own_keys] or cells
        later = sorted((cell for cell in cells if cell not in first),
                       key=lambda cell: case_key(cell[0]) in own_keys)
        yield from (partial(check_case, kernel, case, dtype, device, seed) for case, dtype in first)
        for case, dtype in first[:1]:
            yield partial(check_threads, kernel, case, dtype, device, seed,
                          largest(op, [c for c, d in cells if d == dtype], dtype, device))
            yield from _invariance_checks(kernel, cells, device, lane, seed)
            if op.dropout_case:
                yield partial(check_dropout, kernel, dtype, device, seed)
        yield from (partial(check_case, kernel, argument_case.case, dtype, device, seed,
                            WithArgument(argument_case))
                    for argument_case in argument_cases if argument_case.donor is not None
                    for dtype in dtypes_for(op, lane, argument_case.case))
        if "float64" in op.tolerance.by_dtype and kernel.backend != "reference":
            yield from (partial(check_case, kernel, case, "float64", device, seed)
                        for case in op.cases[:3])
        yield from _circumstance_checks(kernel, cells, device, lane, seed)
        yield from _many_call_checks(kernel, cells, device, lane, seed)
        yield from _gradient_checks(kernel, device, lane, seed)
        yield from (partial(check_case, kernel, case, dtype, device, seed) for case, dtype in later)


def _wrong_device(kernel: Kernel, device: str) -> Reason | None:
    """Returns why the kernel can serve no call on this device, by its rules on hardware alone."""
    here = next((reason for reason in _first_refusals(kernel, device)
                 if reason.code is Code.PLATFORM_MISMATCH), None)
    if here is not None:
        return here
    facts = hardware.probe(device).facts()
    device_rules = (rule for rule in kernel.requires if {leaf.fact for leaf in rule.leaves()}
                    <= facts.keys())
    return next((reason for rule in device_rules if (reason := rule.check(facts)) is not None),
                None)


def _first_refusals(kernel: Kernel, device: str) -> tuple[Reason, ...]:
    """Returns why it refuses the first case: which device it runs on is the same for all."""
    op = kernel.op
    return refusals(kernel, case_values(op, op.cases[0], op.dtypes[0], device)) if op.cases else ()


def _accepted_cells(kernel: Kernel, cells: list[Cell], device: str, seed: int) -> list[Cell]:
    """Returns all cells; for a JIT kernel, which runs only a few, those it accepts."""
    return ([c for c in cells if _accepts(kernel, c, device, seed)] or cells[:1] if kernel.jit
            else cells)


def _accepts(kernel: Kernel, cell: Cell, device: str, seed: int) -> bool:
    return not refusals(kernel, case_values(kernel.op, cell[0], cell[1], device, seed))


def _circumstance_checks(kernel: Kernel, cells: Sequence[Cell], device: str, lane: str,
                         seed: int) -> Iterator[Callable[[], CaseResult]]:
    """Yields checks on cells that the kernel accepts, one per dtype, more in the longer lanes; and
    on one more for each tensor that those do not give, of how it lies in memory."""
    op = kernel.op
    # A bound may be the length where there is one item, a code matters in its format: so in every
    # case.
    everywhere = [c for c in argument_circumstances(op) if isinstance(c, (LooseBound, EveryCode))]
    for case, dtype in cells:
        if dtype != op.dtypes[0] or case not in op.cases:
            continue
        values = case_values(op, case, dtype, device, seed)
        apply = [c for c in everywhere
                 if isinstance(c, LooseBound) or _is_one_byte(values[c.tensor])]
        if apply and not refusals(kernel, values):
            yield from (partial(check_case, kernel, case, dtype, device, seed, c) for c in apply)
    yield from checks_without_others(kernel, cells, device, seed)
    count = {"quick": 1, "full": 3, "stress": 3}[lane]
    for dtype in ("float32", "bfloat16") if "float32" in op.dtypes else op.dtypes[:1]:
        accepted = (c for c in cells if c[1] == dtype and _accepts(kernel, c, device, seed))
        ranked = most_tensors_first(op, accepted, device)
        for _, (case, dtype) in ranked[:count]:
            yield from (partial(check_case, kernel, case, dtype, device, seed, circumstance)
                        for circumstance in circumstances(op, lane)
                        if not isinstance(circumstance, WithoutOthers))
        seen = set().union(*(names for names, _ in ranked[:count])) if ranked else set()
        for names, (case, dtype) in ranked[count:]:
            missing, seen = names - seen, seen | names
            yield from (partial(check_case, kernel, case, dtype, device, seed, circumstance)
                        for name in sorted(missing)
                        for circumstance in tensor_circumstances(op, name, lane))


def _is_one_byte(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype.itemsize == 1


def _many_call_checks(kernel: Kernel, cells: Sequence[Cell], device: str, lane: str,
                      seed: int) -> Iterator[Callable[[], CaseResult]]:
    """Yields checks of a thousand calls, of NaN and infinity, of sizes and of pairs of arguments.
    The formula itself needs none of the last two."""
    op = kernel.op
    by_dtype = ([c for c, _ in zip((c for c in cells if c[1] == dtype
                                    and _accepts(kernel, c, device, seed)), range(12))]
                for dtype in op.dtypes)
    accepted = next(filter(None, by_dtype), [])
    if not op.tensors or not accepted:
        return
    plain, (case, dtype) = accepted[0], smallest(op, accepted, device)
    calls = 1200 if lane == "quick" else 5000
    # a call that is no small one takes long enough
    slow = case_values(op, case, dtype, device)[op.main_tensor].numel() > 4096
    yield partial(check_many_calls, kernel, case, dtype, device, seed,
                  calls // 10 if kernel.backend == "reference" else calls // (4 if slow else 1))
    yield partial(check_non_finite, kernel, *plain, device, seed)
    yield from (partial(check_output_margins, kernel, *cell, device, seed)
                for cell in accepted[::3])
    if kernel.backend != "reference":
        yield from (partial(check_sizes, kernel, name, cases, plain[1], device, seed)
                    for name, cases in (*residues(op, lane, seed),
                                        ("a model", model_sizes(op, seed))))
        yield from (partial(check_case, kernel, case, dtype, device, seed)
                    for case, dtype in pair_cases(kernel, device, lane, seed).cells)


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


def _gradient_checks(kernel: Kernel, device: str, lane: str,
                     seed: int) -> Iterator[Callable[[], CaseResult]]:
    op = kernel.op
    if not kernel.differentiable or not op.differentiable:
        return
    dtypes = ([d for d in op.dtypes if d in ("float32", "bfloat16")] if lane == "quick"
              else [*op.dtypes, "float64"])
    own_cases = [c for c in op.cases if lane != "quick"
                 and not is_degenerate(op, read(op, case_values(op, c, op.dtypes[0])))]
    cases = (*gradient_cases(op), *own_cases)
    yield from (partial(check_gradients, kernel, case, dtype, device, seed) for case in cases
                for dtype in dtypes)
    yield from (partial(check_gradients, kernel, case, dtypes[0], device, seed, name)
                for case in cases[:1] for name in op.differentiable)
    yield from (partial(check_gradients, kernel, case, dtypes[0], device, seed, summed=True)
                for case in cases[:2])
    yield from (partial(check_gradients, kernel, case, dtypes[0], device, seed)
                for case in long_sums(op, seed))
    yield from (partial(check_many_backwards, kernel, case, dtypes[0], device, seed)
                for case in cases[:1])


# The certificate, or the failure.

def failure_of(kernel: Kernel, device: str, verdict: Verdict) -> certificates.FailedCertification:
    """Returns what is remembered of a failed verdict."""
    diagnosis = verdict.diagnosis
    return certificates.FailedCertification(
        kernel.id, kernel.op.name, build_of(kernel), contract_of(kernel.op),
        hardware.probe(device).signature, diagnosis.kind if diagnosis else "unknown",
        diagnosis.says if diagnosis else str(verdict.failures[0]), _now(),
        loading.installed_version("layerzero") or "")


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _certificate(kernel: Kernel, device: str, verdict: Verdict) -> Certificate:
    target, ran = hardware.probe(device), [r for r in verdict.results if r.status != "skipped"]
    grid = sorted(f"{case_key(r.case)} {r.dtype} {r.circumstance} {r.seed}" for r in ran)
    over_eager = [r.error / r.eager_error for r in ran if r.eager_error > 0
                  and r.error < float("inf")]
    return Certificate(
        kernel.id, kernel.op.name, build_of(kernel), contract_of(kernel.op), target.signature,
        target.name, len(ran), len(verdict.results) - len(ran),
        tuple(sorted({r.dtype for r in ran})),
        hashlib.sha256("\n".join(grid).encode()).hexdigest()[:16],
        gradients=sum(r.circumstance.startswith("backward") for r in ran), worst=verdict.worst,
        worst_over_eager=max(over_eager, default=0.0), deterministic=kernel.deterministic,
        writes_all=bool(kernel.op.tensors), nan_propagates=nan_propagates(kernel, device),
        covers=str(verdict.coverage), misses="; ".join(verdict.coverage.missing), made_at=_now(),
        layerzero=loading.installed_version("layerzero") or "",
        **certificate_fields(kernel, device))
