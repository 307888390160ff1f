"""Level 1 of verification: every kernel against its contract, forward and backward; a certificate for those that pass.

Three lanes. `quick` takes seconds for a kernel: all cases of the op at every dtype, a few more sizes and crossings,
each kind of circumstance once, gradients. `full` has every size and every layout of every tensor, `stress` also many
seeds. A kernel that compiles is asked less, and for circumstances and gradients in the longer lanes only. A kernel
passes if no case fails; what its own rules refuse is counted as skipped.
"""

from __future__ import annotations

import hashlib
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
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
from ...spec.op import Op
from ...spec.reason import Reason
from ...world import certificates
from ...world import snapshot as worlds
from ...world.certificates import Certificate, contract_of
from .capture import certificate_fields
from .cases import cases_for, degenerate, dtypes_for, key, reaching
from .circumstances import Handed, check_dropout, check_threads, circumstances
from .contract import CaseResult, call, case_values, check_case, formula, refusals, results_of
from .diagnosis import Diagnosis, diagnose
from .gradients import check_gradients, gradient_cases

Cell = tuple[Mapping[str, Any], str]           # a case and a dtype
LANES: Mapping[str, tuple[int, ...]] = {"quick": (0,), "full": (0, 1), "stress": tuple(range(20))}   # and their seeds
JIT_CASES = {"quick": 4, "full": 16, "stress": 60}      # a compiling kernel takes seconds for each


@dataclass(frozen=True)
class Verdict:
    """What came of one kernel. `certificate` where it passed, `diagnosis` where it failed."""

    kernel: str
    op: str
    lane: str
    results: tuple[CaseResult, ...]
    certificate: Certificate | None = None
    diagnosis: Diagnosis | None = None
    seconds: float = 0.0

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
        """The largest error over what was allowed."""
        return max((r.ratio for r in self.results), default=0.0)

    @property
    def refusal(self) -> str:
        """Why nothing ran, where nothing did."""
        reasons = Counter(str(reason) for r in self.results for reason in r.reasons)
        return reasons.most_common(1)[0][0] if reasons else ""

    def to_json(self) -> dict[str, Any]:
        return {
            "kernel": self.kernel, "op": self.op, "lane": self.lane, "status": self.status, "cases": self.ran,
            "skipped": len(self.results) - self.ran, "worst": self.worst, "seconds": round(self.seconds, 2),
            "refusal": self.refusal if self.status == "skipped" else "",
            "certificate": encode(self.certificate),
            "diagnosis": None if self.diagnosis is None else {
                "class": self.diagnosis.kind, "says": self.diagnosis.says, "where": self.diagnosis.where,
                "advice": self.diagnosis.advice},
            "failures": [{"case": dict(r.case), "dtype": r.dtype, "circumstance": r.circumstance, "seed": r.seed,
                          "kinds": list(r.kinds), "detail": r.detail} for r in self.failures[:20]]}


def certify(kernel: Kernel, device: str = "cpu", lane: str = "quick", seeds: Sequence[int] | None = None, *,
            stop_early: bool = False, say: Callable[[CaseResult], None] | None = None) -> Verdict:
    """Prove one kernel, or say what is wrong with it. Nothing is written.

    `stop_early`: once it has failed, only a little more is asked, enough to say what is wrong.
    """
    started, results, failed, since = time.perf_counter(), [], 0, 0    # type: float, list[CaseResult], int, int
    with warnings.catch_warnings(), _many_compilations(kernel):
        warnings.simplefilter("ignore")
        for check in _checks(kernel, device, lane, LANES[lane] if seeds is None else seeds):
            result = check()
            results.append(result)
            failed += result.status == "failed"
            since += failed > 0 and result.status != "skipped"
            if say is not None:
                say(result)
            if stop_early and (failed >= 6 or since >= 16):
                break
    diagnosis = diagnose(kernel, results, device)
    verdict = Verdict(kernel.id, kernel.op.name, lane, tuple(results), None, diagnosis)
    made = _certificate(kernel, device, verdict) if verdict.status == "passed" else None
    return Verdict(kernel.id, kernel.op.name, lane, tuple(results), made, diagnosis, time.perf_counter() - started)


def _many_compilations(kernel: Kernel) -> Any:
    """One size in many circumstances is compiled more often than torch allows a function in a program."""
    if not kernel.jit:
        return nullcontext()
    from torch._dynamo import config  # imports much, which a kernel that compiles needs anyway
    return config.patch(recompile_limit=512)


def certify_all(kernels: Sequence[Kernel], device: str = "cpu", lane: str = "quick",
                seeds: Sequence[int] | None = None) -> Iterator[Verdict]:
    """One after the other; each certificate is on disk before the next kernel begins, so it may be interrupted.

    A kernel that fails loses the certificate it had.
    """
    here = hardware.probe(device)
    for kernel in kernels:
        verdict = certify(kernel, device, lane, seeds)
        if verdict.certificate is not None:
            certificates.write(verdict.certificate, here)
        elif verdict.status == "failed":
            (certificates.folder(here) / f"{kernel.id}.json").unlink(missing_ok=True)
        yield verdict


def publish() -> None:
    """Let selection see the certificates that were written."""
    worlds.publish(lambda world: world.replace(), "certificates")


# What is asked of a kernel.

def _checks(kernel: Kernel, device: str, lane: str, seeds: Sequence[int]) -> Iterator[Callable[[], CaseResult]]:
    op = kernel.op
    absent = loading.availability(kernel) or _elsewhere(kernel, device)
    if absent is not None:
        yield partial(CaseResult, kernel.id, {}, op.dtypes[0], "skipped", (absent,))
        return
    for seed in seeds:
        cases = cases_for(op, lane, seed)
        ways, _ = reaching(kernel, lane, [hardware.probe(device).facts()], seed)
        cases += tuple(way.case for way in ways if way.donor is None)
        cells = [(case, dtype) for case in cases for dtype in dtypes_for(op, lane, case)]
        cells = _served(kernel, cells, device, seed)
        if kernel.jit:
            limit = JIT_CASES[lane]
            cells = cells[::max(len(cells) // limit, 1)][:limit]
            yield from (partial(check_case, kernel, case, dtype, device, seed) for case, dtype in cells)
            if lane != "quick" and seed == seeds[0]:           # each may compile anew, so each kind once
                yield from _in_circumstances(kernel, cells, device, "quick", seed)
                yield from islice(_backwards(kernel, device, "quick", seed), limit)
            continue
        own = {key(case) for case in op.cases}
        first = [cell for cell in cells if key(cell[0]) in own and cell[1] == op.dtypes[0]]
        later = sorted((cell for cell in cells if cell not in first), key=lambda cell: key(cell[0]) in own)
        yield from (partial(check_case, kernel, case, dtype, device, seed) for case, dtype in first)
        for case, dtype in first[:1]:
            yield partial(check_threads, kernel, case, dtype, device, seed)
            if op.dropout_case:
                yield partial(check_dropout, kernel, dtype, device, seed)
        yield from (partial(check_case, kernel, way.case, dtype, device, seed, Handed(way))
                    for way in ways if way.donor is not None for dtype in dtypes_for(op, lane, way.case))
        yield from _in_circumstances(kernel, cells, device, lane, seed)
        yield from _backwards(kernel, device, lane, seed)
        yield from (partial(check_case, kernel, case, dtype, device, seed) for case, dtype in later)


def _elsewhere(kernel: Kernel, device: str) -> Reason | None:
    """Why no call on this device is one for the kernel, where its rules on hardware alone say so."""
    here = hardware.probe(device).facts()
    alone = (rule for rule in kernel.requires if {leaf.fact for leaf in rule.leaves()} <= here.keys())
    return next((reason for rule in alone if (reason := rule.check(here)) is not None), None)


def _served(kernel: Kernel, cells: list[Cell], device: str, seed: int) -> list[Cell]:
    """All cells; of a kernel that compiles, and so is asked only a few, those it takes."""
    return [c for c in cells if _takes(kernel, c, device, seed)] or cells[:1] if kernel.jit else cells


def _takes(kernel: Kernel, cell: Cell, device: str, seed: int) -> bool:
    return not refusals(kernel, case_values(kernel.op, cell[0], cell[1], device, seed))


def _in_circumstances(kernel: Kernel, cells: Sequence[Cell], device: str, lane: str,
                      seed: int) -> Iterator[Callable[[], CaseResult]]:
    """On cells that the kernel serves, one for each dtype; in the longer lanes more."""
    op, chosen = kernel.op, []                 # type: Op, list[Cell]
    count = {"quick": 1, "full": 3, "stress": 3}[lane]
    for dtype in ("float32", "bfloat16") if "float32" in op.dtypes else op.dtypes[:1]:
        served = (c for c in cells if c[1] == dtype and _takes(kernel, c, device, seed))
        chosen += [c for c, _ in zip(_richest(op, served, device), range(count))]
    for case, dtype in chosen:
        yield from (partial(check_case, kernel, case, dtype, device, seed, under) for under in circumstances(op, lane))


def _richest(op: Op, cells: Iterator[Cell], device: str) -> list[Cell]:
    """Those with the most tensors first, of the first dozen; without an odd layout of their own, and not empty."""
    found: list[tuple[int, int, Cell]] = []
    for cell in cells:
        values = case_values(op, cell[0], cell[1], device)
        tensors = [v for v in values.values() if isinstance(v, Tensor)]
        if "stride" not in cell[0] and all(t.numel() for t in tensors):
            found.append((-len(tensors), len(found), cell))
        if len(found) == 24:
            break
    return [cell for _, _, cell in sorted(found, key=lambda f: f[:2])]


def _backwards(kernel: Kernel, device: str, lane: str, seed: int) -> Iterator[Callable[[], CaseResult]]:
    op = kernel.op
    if not kernel.differentiable or not op.differentiable:
        return
    dtypes = [d for d in op.dtypes if d in ("float32", "bfloat16")] if lane == "quick" else [*op.dtypes, "float64"]
    own = [c for c in op.cases if lane != "quick" and not degenerate(op, read(op, case_values(op, c, op.dtypes[0])))]
    cases = (*gradient_cases(op), *own)
    yield from (partial(check_gradients, kernel, case, dtype, device, seed) for case in cases for dtype in dtypes)
    yield from (partial(check_gradients, kernel, case, dtypes[0], device, seed, name)
                for case in cases[:1] for name in op.differentiable)


# The certificate.

def _certificate(kernel: Kernel, device: str, verdict: Verdict) -> Certificate:
    here, ran = hardware.probe(device), [r for r in verdict.results if r.status != "skipped"]
    grid = sorted(f"{key(r.case)} {r.dtype} {r.circumstance} {r.seed}" for r in ran)
    eager = [r.error / r.eager_error for r in ran if r.eager_error > 0 and r.error < float("inf")]
    return Certificate(
        kernel.id, kernel.op.name, build_of(kernel), contract_of(kernel.op), here.signature, here.name, len(ran),
        len(verdict.results) - len(ran), tuple(sorted({r.dtype for r in ran})),
        hashlib.sha256("\n".join(grid).encode()).hexdigest()[:16],
        gradients=sum(r.circumstance.startswith("backward") for r in ran), worst=verdict.worst,
        worst_over_eager=max(eager, default=0.0), deterministic=kernel.deterministic,
        writes_all=kernel.op.read is None, nan_propagates=nan_propagates(kernel, device),
        made_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        layerzero=loading.installed_version("layerzero") or "", **certificate_fields(kernel, device))


def nan_propagates(kernel: Kernel, device: str = "cpu") -> bool | None:
    """Is one NaN in the main tensor a NaN wherever the formula has one? None where the op does not tell."""
    op = kernel.op
    if op.read is not None or kernel.jit:
        return None
    for case in op.cases[:8]:
        values = case_values(op, case, op.dtypes[0], device)
        main = values.get(op.main_tensor)
        if not isinstance(main, Tensor) or not main.is_floating_point() or main.dtype.itemsize == 1 or not main.numel():
            continue
        main[(-1,) * main.dim()] = torch.nan
        if refusals(kernel, values):
            continue
        try:
            with torch.no_grad():
                want, got = formula(op, values), results_of(call(kernel, values))
        except FAULTS:
            return False
        expected = [w.isnan() for w in want if w.is_floating_point() and w.dtype.itemsize > 1]
        found = [g.isnan() for g in got if g.is_floating_point() and g.dtype.itemsize > 1]
        if not any(bool(e.any()) for e in expected):
            return None
        return all(bool((f | ~e).all()) for e, f in zip(expected, found))
    return None
