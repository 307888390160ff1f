"""The stages of the release gate.

Each yields checks: one with findings fails, one with a note is incomplete.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..machine import hardware, loading
from ..machine.faults import FAULTS
from ..plan.readiness import readiness_check
from ..spec.errors import LayerZeroError
from ..spec.kernel import Kernel
from ..verify.cases.declarations import Checked, Finding, docs_check, static_checks
from ..verify.certification.certify import publish
from ..verify.certification.processes import certify_in_processes
from ..verify.kernel.contract import check_case
from ..verify.model.families import Cell, model_cells
from ..world import snapshot as worlds
from ..world.registry import certificates
from ..world.registry.certificates import Certificate
from . import performance, schemas
from .soak import SoakReport, soak
from .soak_load import WRONG

QUICK_CASES = 2                                # of each kernel, at one dtype
SOAK_SECONDS = {"quick": 10.0, "usual": 600.0, "full": 7200.0}
LANES = ("quick", "usual", "full")


@dataclass(frozen=True)
class GateOptions:
    """The options of one run of the gate."""

    target: str
    device: str
    lane: str = "usual"                        # quick | usual | full
    root: Path = Path()                        # of a source checkout
    baseline: Path | None = None
    families: Sequence[str] = ()
    backend: str = ""
    soak_seconds: float = 0.0                  # 0: as the lane says
    say: Callable[[str], None] = lambda text: None

    @property
    def baselines(self) -> Path:
        return self.root / "benchmarks" / "baselines"

    @property
    def baseline_file(self) -> Path:
        return self.baseline or self.baselines / f"{self.target}.json"


@dataclass(frozen=True)
class GateStage:
    says: str
    run: Callable[[GateOptions], Iterator[Checked]]


def _static(options: GateOptions) -> Iterator[Checked]:
    yield from static_checks(worlds.current().catalog)
    yield docs_check(options.root)


def _models(options: GateOptions) -> Iterator[Checked]:
    lane = "full" if options.lane == "full" else "quick"
    for cell in model_cells(options.families, lane=lane, device=options.device,
                            named=options.backend):
        yield ModelChecked.of(cell)


@dataclass(frozen=True)
class ModelChecked(Checked):
    """A check that is one cell of the models."""

    cell: Cell | None = None

    @classmethod
    def of(cls, cell: Cell) -> ModelChecked:
        name, _, text = str(cell).partition(": ")
        findings = (() if cell.passed
                    else (Finding("models", name, text, "lz verify models layer says where"),))
        return cls("models", f"{name}: as plain torch", 1, findings, seconds=cell.seconds,
                   cell=cell)


# Correctness.

def _correctness(options: GateOptions) -> Iterator[Checked]:
    """Check that every kernel here keeps its contract: by certificate, or verified now."""
    runnable = [k for k in worlds.current().catalog.kernels if _can_run(k, options.device)]
    if options.lane == "quick":
        yield _few_cases([k for k in runnable if not k.jit], options, sum(k.jit for k in runnable))
        return
    statuses = certificates.statuses(runnable, hardware.probe(options.device))
    proven = [k for k in runnable if options.lane != "full"
              and isinstance(statuses[k.id], Certificate)]
    unproven = [k for k in runnable if k not in proven]
    started, findings, ran = time.perf_counter(), [], Counter()      # type: float, list[Finding], Counter[str]
    for verdict in certify_in_processes(unproven, options.device,
                                        "full" if options.lane == "full" else "quick"):
        ran[verdict.status] += 1
        options.say(
            f"      {verdict.kernel}: {verdict.status}, {verdict.ran} cases, {verdict.seconds:.0f} "
            "s")
        if verdict.failures:
            says = (verdict.diagnosis.says if verdict.diagnosis is not None
                    else str(verdict.failures[0]))
            findings.append(Finding("contract", verdict.kernel, says,
                                    f"lz verify kernels --kernel {verdict.kernel}"))
        elif verdict.status == "unproven" and verdict.diagnosis is not None:
            findings.append(Finding("contract", verdict.kernel, verdict.diagnosis.says,
                                    f"lz verify kernels --kernel {verdict.kernel} --full"))
    publish()
    yield Checked("contract",
                  f"every kernel keeps its contract: {len(proven)} by a certificate that holds, "
                  f"{ran['passed']} verified now, {ran['skipped']} refuse every case",
                  len(runnable), tuple(findings), seconds=time.perf_counter() - started)


def _can_run(kernel: Kernel, device: str) -> bool:
    if kernel.untested or loading.availability(kernel) is not None:
        return False
    facts = hardware.probe(device).facts()
    return not any(rule.check(facts) for rule in kernel.requires if {
        leaf.fact for leaf in rule.leaves()} <= facts.keys())


def _few_cases(kernels: Sequence[Kernel], options: GateOptions, compiling: int) -> Checked:
    started, findings, ran = time.perf_counter(), [], 0       # type: float, list[Finding], int
    for kernel in kernels:
        for case in kernel.op.cases[:QUICK_CASES]:
            try:
                result = check_case(kernel, case, kernel.op.dtypes[0], options.device)
            except FAULTS as e:
                findings.append(Finding("contract", kernel.id,
                                        f"the check ended in {type(e).__name__}: {e}"))
                break
            ran += result.status != "skipped"
            if result.status == "failed":
                findings.append(Finding("contract", kernel.id, result.detail or str(result),
                                        f"lz verify kernels --kernel {kernel.id}"))
                break
    note = f"{ran} cases only, and none of {compiling} kernels that compile; without --quick all"
    return Checked("contract", "every kernel keeps its contract", len(kernels), tuple(findings),
                   note, time.perf_counter() - started)


# The others.

def _performance(options: GateOptions) -> Iterator[Checked]:
    seconds = performance.QUICK_SECONDS if options.lane == "quick" else performance.SECONDS
    yield from performance.compare(options.baseline_file, options.target, options.device, seconds,
                                   say=options.say)


def _schema(options: GateOptions) -> Iterator[Checked]:
    yield from schemas.check(options.baselines / schemas.RECORD)


def _soak(options: GateOptions) -> Iterator[Checked]:
    seconds = options.soak_seconds or SOAK_SECONDS[options.lane]
    yield from soak_checks(soak(seconds, device=options.device), seconds)


def soak_checks(report: SoakReport, seconds: float) -> Iterator[Checked]:
    """Yield the findings of a soak as checks."""
    counts, texts = report.counts, report.failures
    findings = []
    for kind in WRONG:
        if counts.get(kind):
            first = next((text for text in texts if text.startswith(kind)), kind)
            findings.append(Finding("answers", kind, f"{counts[kind]} times; {first}",
                                    "lz soak runs it alone"))
    calls = sum(counts.get(name, 0) for name in ("calls", "calls of new sizes", "calls in bursts"))
    broken_off = f"interrupted after {report.seconds:.0f} s" if report.parts[-1].interrupted else ""
    yield Checked("answers",
                  f"{calls} calls in {report.seconds:.0f} s of faults, forks and changes: all "
                  "right",
                  len(WRONG), tuple(findings), broken_off, report.seconds)
    series = report.series
    grown = tuple(Finding("trend", s.name,
                          f"grows by {s.trend.per_hour:.3g} {s.unit} an hour (95 % of "
                          f"{s.trend.low:.3g} to {s.trend.high:.3g}); at most {s.most:.3g} is "
                          "wanted",
                          "lz soak --hours shows it")
                  for s in series if not s.passed and s.trend is not None)
    short = not any(s.judged for s in series)
    yield Checked("trend", "memory, files, threads and latency do not grow", len(series), grown,
                  f"{seconds:.0f} s are too short to judge a slope" if short else "")


def _readiness(options: GateOptions) -> Iterator[Checked]:
    yield readiness_checked(options.device)


def readiness_checked(device: str) -> Checked:
    """Return the result of lz.readiness_check on this machine as a check."""
    started, says = time.perf_counter(), "lz.readiness_check finds nothing in the way of serving"
    try:
        report = readiness_check(device=device)
    except LayerZeroError as e:
        return Checked("ready", says, 1,
                       (Finding("ready", device, f"it ended in {type(e).__name__}: {e}"),))
    findings = tuple(Finding("ready", check.name, check.got, check.hint) for check in report.failed)
    warned = ", ".join(check.name for check in report.warnings)
    return Checked("ready", says, len(report.checks), findings,
                   f"warnings: {warned}" if warned else "", time.perf_counter() - started)


STAGES: Mapping[str, GateStage] = {
    "static": GateStage("the declarations are complete and reachable", _static),
    "models": GateStage("models equal plain torch", _models),
    "correctness": GateStage("every kernel that can run here keeps its contract", _correctness),
    "schema": GateStage("the files lz writes are of the versions they say", _schema),
    "performance": GateStage("no call got slower against torch than the baseline allows",
                             _performance),
    "soak": GateStage("nothing goes wrong or grows under faults, forks and changes", _soak),
    "readiness": GateStage("this machine could serve now", _readiness),
}


def run_stage(name: str, options: GateOptions) -> Iterator[Checked]:
    """Yield the checks of a stage as they are done, timed; an exception is a finding."""
    started = time.perf_counter()
    try:
        for checked in STAGES[name].run(options):
            now = time.perf_counter()
            yield checked if checked.seconds else replace(checked, seconds=now - started)
            started = now
    except LayerZeroError:
        # the question was wrong: a file that cannot be read, no such family
        raise
    except FAULTS as e:
        yield Checked(name, STAGES[name].says, 1,
                      (Finding(name, "stage", f"ended in {type(e).__name__}: {e}"),),
                      seconds=time.perf_counter() - started)
