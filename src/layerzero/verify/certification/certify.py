"""Level 1 of verification: every kernel against its contract, forward and backward; a certificate
for those that pass.

Three lanes. `quick` takes seconds per kernel: all cases of the op, two of three in 16 bits too, a
few more sizes and crossings, each kind of circumstance once, gradients. `full` has every size and
every layout of every tensor, `stress` also many seeds. A JIT kernel gets fewer cases, and
circumstances and gradients in the longer lanes only; where compiling takes long, the quick lane
ends with what compiles again after JIT_QUICK_S, or leaves out what comes after JIT_ALL_S, on a CPU
all of them beside kernels that need no compiler, and where a case takes long, others as long; the
verdict says so. A kernel passes if no case fails; what its own rules refuse is counted as skipped.
"""

from __future__ import annotations

import gc
import hashlib
import math
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from typing import Any

import torch

from ...machine import hardware, loading
from ...machine.builds import build_of
from ...machine.faults import FAULTS
from ...spec.codec import encode
from ...spec.kernel import Kernel
from ...spec.op import Op
from ...spec.reason import Code, Reason
from ...world import snapshot as worlds
from ...world.registry import certificates
from ...world.registry.certificates import Certificate, contract_of
from ..cases.generated import case_key, is_costly
from ..code.own_code import own_code
from ..code.rare import check_counts, check_limits, check_rare_code
from ..code.search import search_unrun_code
from ..code.tracing import Tracer
from ..diagnosis.diagnose import Diagnosis, diagnose, hides_another
from ..kernel import shared
from ..kernel.absence import absence, refused_by_hardware
from ..kernel.contract import (
    CaseResult,
    case_tensors,
    case_values,
    check_case,
    load_once,
)
from ..kernel.gradients import check_gradients
from ..kernel.process_state import ONCE, process_state, put_back
from ..kernel.state_changes import changed_by_formula
from .capture import certificate_fields
from .checks import COMPILES_S, checks_of
from .circumstances.content_circumstances import check_contents
from .coverage import NOTHING, Coverage, measure_coverage
from .non_finite import nan_propagates
from .second_derivative import is_right_or_raises

# with their seeds
LANES: Mapping[str, tuple[int, ...]] = {"quick": (0,), "full": (0,), "stress": tuple(range(20))}
# After so long the rest is left to the full lane: of one kernel, and of all together.
JIT_QUICK_S, JIT_ALL_S = 20.0, 30.0
# A case in which a kernel takes longer than the first is not asked again at another dtype, which is
# asked first with the next seed; beyond the second nor are others of as many heads or rows, where
# it is these that take long.
REPEATED_CASE_S, SLOW_CASE_S = 0.04, 0.25
# Of a kernel that has taken so long for cases beyond the op's own, one in THINNED of the others is
# asked: which ones, the seed says.
OTHERS_S, THINNED = 1.5, 3
WATCHED = (check_case, check_contents, check_gradients)    # they look at the process themselves
UNRUN_SHOWN = 6                                # parts of a kernel's code that are named
OUTRIGHT_FAILURES = 100                        # that may hide others from a diagnosis


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
    unrun: tuple[str, ...] = ()                # parts of its own code that no call has reached

    @property
    def failures(self) -> tuple[CaseResult, ...]:
        return tuple(r for r in self.results if r.status == "failed")

    @property
    def ran(self) -> int:
        return sum(r.status != "skipped" for r in self.results)

    @property
    def status(self) -> str:
        """failed, skipped (nothing of it could be asked), passed, or unproven: nothing failed, but
        no call reached some of its own code."""
        if self.failures or not self.ran:
            return "failed" if self.failures else "skipped"
        return "unproven" if self.unrun else "passed"

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
            "unrun": list(self.unrun),
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


class _Results(list[CaseResult]):
    """The results of a kernel, in their order."""

    def __init__(self, op: Op, on_result: Callable[[CaseResult], None] | None) -> None:
        super().__init__()
        self.op, self.on_result, self.failed, self.ran_since = op, on_result, 0, 0

    def add(self, result: CaseResult) -> None:
        self.append(result)
        self.failed += result.status == "failed"
        self.ran_since += self.failed > 0 and result.status != "skipped"
        if self.on_result is not None:
            self.on_result(result)

    @property
    def are_enough(self) -> bool:
        """Do the failures do for a diagnosis? Calls that fail outright, or in another dtype than
        the op's, tell nothing of the others."""
        if self.failed < 6 and self.ran_since < 16:
            return False
        others = sum(r.status == "failed" and not hides_another(self.op, r) for r in self)
        return (others >= 6 or self.failed >= 6 + OUTRIGHT_FAILURES
                or (others > 0 and self.ran_since >= 16))


def certify(kernel: Kernel, device: str = "cpu", lane: str = "quick",
            seeds: Sequence[int] | None = None, *,
            stop_early: bool = False, on_result: Callable[[CaseResult], None]
            | None = None) -> Verdict:
    """Verifies one kernel, or diagnoses what is wrong with it. Nothing is written.

    `stop_early`: after a failure only a few more cases run, enough for the diagnosis.
    """
    started, results = time.perf_counter(), _Results(kernel.op, on_result)
    cut_short, slow = "", SlowCases(kernel.op, *(seeds or ())[:1])
    with warnings.catch_warnings(), _allow_recompiles(kernel, device):
        warnings.simplefilter("ignore")
        # so that a kernel which ignores all changes what is shown
        warnings.filterwarnings("ignore", message="first of the filters")
        checks = checks_of(kernel, device, lane, LANES[lane] if seeds is None else seeds)
        tracer = _tracer(kernel, device)
        while (check := _next_check(kernel, checks)) is not None:
            case = _plain_case(check) if lane == "quick" and not kernel.jit else None
            if case is not None and slow.leave_out(case):
                continue
            check_start = time.perf_counter()
            tracer.next_check()
            with tracer.watching():
                result = _guarded_check(kernel, check)
            if case is not None and result.passed:
                slow.count(case, result.seconds)
            results.add(result)
            if stop_early and results.are_enough:
                break
            elapsed = time.perf_counter() - started
            compiled = time.perf_counter() - check_start > COMPILES_S
            # what the first check compiled may serve others
            if (kernel.jit and lane == "quick" and result.passed and elapsed > JIT_QUICK_S
                    and compiled and len(results) > 1):
                left = sum(1 for _ in checks)
                cut_short = (f"{left} of {left + len(results)} cases: compiling took "
                             f"{elapsed:.0f} s") if left else ""
                break
        if not results.failed and any(r.passed for r in results):
            for result in _asked_by_code(kernel, tracer, device, lane, (seeds or LANES[lane])[0]):
                results.add(result)
                if results.are_enough:
                    break
    unrun = tuple(tracer.texts())
    diagnosis = _diagnosis(kernel, results, unrun, device)
    coverage = measure_coverage(kernel, device, lane, LANES[lane] if seeds is None else seeds,
                                results)
    if slow.left_out:
        cut_short = (f"{slow.left_out} long cases: at another dtype, where they take "
                     f"{REPEATED_CASE_S:g} s, as long as one that took {SLOW_CASE_S:g} s, or "
                     f"after {OTHERS_S:g} s")
    if cut_short:
        coverage = replace(coverage, missing=(cut_short, *coverage.missing))
    verdict = Verdict(kernel.id, kernel.op.name, lane, tuple(results), None, diagnosis,
                      coverage=coverage, unrun=unrun)
    certificate = _certificate(kernel, device, verdict) if verdict.status == "passed" else None
    return replace(verdict, certificate=certificate, seconds=time.perf_counter() - started)


def _tracer(kernel: Kernel, device: str) -> Tracer:
    """Returns what tells which of the kernel's own code runs; nothing of one that compiles."""
    if kernel.jit or kernel.backend == "reference" or absence(kernel, device) is not None:
        return Tracer({})
    try:
        others = [k.load for k in worlds.current().catalog.kernels if k.id != kernel.id]
        return Tracer(own_code(kernel.load, load_once(kernel), others), shared.latest_case)
    except FAULTS:                             # its first check says so
        return Tracer({})


def _asked_by_code(kernel: Kernel, tracer: Tracer, device: str, lane: str,
                   seed: int) -> Iterator[CaseResult]:
    """Yields the results of the calls that the kernel's own code asks for."""
    for look in (check_counts, search_unrun_code, check_limits, check_rare_code):
        with suppress(*FAULTS):                # what cannot be drawn is no fault of the kernel
            yield from look(kernel, tracer, device, lane, seed)


def _next_check(kernel: Kernel,
                checks: Iterator[Callable[[], CaseResult]]) -> Callable[[], CaseResult] | None:
    """Returns the next check; one that fails where none could be made."""
    try:
        return next(checks, None)
    except FAULTS as e:
        return partial(CaseResult, kernel.id, {}, kernel.op.dtypes[0], "failed", kinds=("fault",),
                       detail=f"its cases could not be made: {type(e).__name__}: {e}")


class SlowCases:
    """The plain cases that took a kernel long, and how many were left out for them."""

    def __init__(self, op: Op, seed: int = 0) -> None:
        self.op, self.seed, self.left_out = op, seed, 0
        self.rows, self.spent = math.inf, 0.0
        self.keys: set[str] = set()

    def count(self, case: Mapping[str, Any], seconds: float) -> None:
        """Counts what a case took."""
        self.spent += 0.0 if case in self.op.cases else seconds
        if seconds > REPEATED_CASE_S:
            self.add(case, seconds)

    def add(self, case: Mapping[str, Any], seconds: float = math.inf) -> None:
        self.keys.add(case_key(case))
        # what is one at a time is slow for many rows
        if seconds > SLOW_CASE_S and self.op.tensors and not is_costly(self.op, case):
            self.rows = min(self.rows, self._rows(case))

    def leave_out(self, case: Mapping[str, Any]) -> bool:
        """Counts a case that is as long as a slow one. The op's own cases are never left out."""
        is_slow = (bool(self.keys) or self.spent > OTHERS_S) and case not in self.op.cases and (
            self._is_thinned(case) or case_key(case) in self.keys
            or 2 * self._rows(case) >= self.rows)
        self.left_out += is_slow
        return is_slow

    def _is_thinned(self, case: Mapping[str, Any]) -> bool:
        return self.spent > OTHERS_S and (
            zlib.crc32(case_key(case).encode()) + self.seed) % THINNED > 0

    def _rows(self, case: Mapping[str, Any]) -> int:
        main = case_tensors(self.op, case, self.op.dtypes[0]).get(self.op.main_tensor)
        if main is None:                       # texts: how many there are says little
            return 0
        return main.numel() // max(main.shape[-1], 1) if main.dim() else 1


def _plain_case(check: Callable[[], CaseResult]) -> Mapping[str, Any] | None:
    """Returns the case of a check that has no circumstance; None for any other check."""
    if not isinstance(check, partial) or check.func is not check_case or len(check.args) != 5:
        return None
    case: Mapping[str, Any] = check.args[1]
    return case


def _guarded_check(kernel: Kernel, check: Callable[[], CaseResult]) -> CaseResult:
    """Runs a check. What escapes from it, as from a formula with inputs that a kernel has spoilt,
    is a result of this kernel."""
    try:
        if getattr(check, "func", check) in WATCHED:
            return check()
        return _watched_check(kernel, check)
    except FAULTS as e:
        arguments = getattr(check, "args", ())
        case = next((a for a in arguments if isinstance(a, Mapping)), {})
        return CaseResult(kernel.id, case, kernel.op.dtypes[0], "failed", kinds=("fault",),
                          detail=f"the check itself ended in {type(e).__name__}: {e}")


def _watched_check(kernel: Kernel, check: Callable[[], CaseResult]) -> CaseResult:
    """Runs a check that does not look at the process itself, of a kernel that compiles nothing."""
    device = next((a for a in getattr(check, "args", ())       # no name of a kernel
                   if isinstance(a, str) and a.partition(":")[0] == "cuda"), "cpu")
    state = process_state(device)
    result = check()
    changed = [name for name in put_back(state, device) if name not in ONCE]
    if not changed or kernel.jit or kernel.package or not result.passed:
        return result
    values = case_values(kernel.op, kernel.op.cases[0], result.dtype, device)
    excused = changed_by_formula(kernel.op, values, device)
    changed = [name for name in changed if name not in excused]
    return replace(result, status="failed", kinds=("global state",),
                   detail=f"{changed[0]} changed during the calls") if changed else result


def _diagnosis(kernel: Kernel, results: Sequence[CaseResult], unrun: Sequence[str],
               device: str) -> Diagnosis | None:
    try:
        diagnosis = diagnose(kernel, results, device)
        if diagnosis is None and unrun and any(r.status != "skipped" for r in results):
            return Diagnosis("unknown", "nothing failed, but no call that its rules accept has "
                             f"reached {len(unrun)} part{'s' * (len(unrun) > 1)} of its own code, "
                             f"of which nothing is proven: {'; '.join(unrun[:UNRUN_SHOWN])}")
        return diagnosis
    except FAULTS as e:
        first = next(r for r in results if r.status == "failed")
        return Diagnosis("unknown", f"{first.detail} (its diagnosis ended in {type(e).__name__}: "
                                    f"{e})")


def _allow_recompiles(kernel: Kernel, device: str) -> Any:
    """Raises torch's recompile limit: one size in many circumstances compiles more often than it
    allows."""
    if not kernel.jit or absence(kernel, device) is not None:
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
    kernels, late = without_late(kernels, device, lane)
    yield from (not_run(kernel, lane, Reason(Code.JIT_NOT_WARMED)) for kernel in late)
    ops = list(dict.fromkeys(kernel.op.name for kernel in kernels))
    threshold, *others = gc.get_threshold()
    gc.set_threshold(10 * threshold, *others)  # all that is kept is looked at each time
    try:
        # op by op: what the formula gives is computed once for all kernels of an op
        yield from _certified_in_turn(
            sorted(kernels, key=lambda kernel: ops.index(kernel.op.name)), device, lane, seeds)
    finally:
        gc.set_threshold(threshold, *others)
        shared.forget()


def without_late(kernels: Sequence[Kernel], device: str,
                 lane: str) -> tuple[list[Kernel], list[Kernel]]:
    """Separates what the quick lane of a CPU leaves to the longer ones: kernels that compile,
    beside such as do not. Torch's compiler takes a minute before its first one runs."""
    if lane != "quick" or device != "cpu" or all(k.jit for k in kernels):
        return list(kernels), []
    late = [k for k in kernels if k.jit and loading.availability(k) is None
            and refused_by_hardware(k, device) is None]
    left_out = {k.id for k in late}
    return [k for k in kernels if k.id not in left_out], late


def _certified_in_turn(kernels: Sequence[Kernel], device: str, lane: str,
                       seeds: Sequence[int] | None) -> Iterator[Verdict]:
    target, culprit, compiling = hardware.probe(device), "", 0.0
    for kernel in kernels:
        if culprit:
            yield not_run(kernel, lane, Reason(
                Code.DEVICE_FAULT, None, f"{culprit} failed before; verify this one again"))
            continue
        if kernel.jit and lane == "quick" and compiling > JIT_ALL_S:
            yield not_run(kernel, lane, Reason(Code.JIT_NOT_WARMED))
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


def not_run(kernel: Kernel, lane: str, reason: Reason) -> Verdict:
    return Verdict(kernel.id, kernel.op.name, lane, (
        CaseResult(kernel.id, {}, kernel.op.dtypes[0], "skipped", (reason,)),))


def publish() -> None:
    """Publishes a world, so that selection sees the certificates that were written."""
    worlds.publish(lambda world: world.replace(), "certificates")


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
        second_order=is_right_or_raises(verdict.results),
        covers=str(verdict.coverage), misses="; ".join(verdict.coverage.missing), made_at=_now(),
        layerzero=loading.installed_version("layerzero") or "",
        **certificate_fields(kernel, device))
