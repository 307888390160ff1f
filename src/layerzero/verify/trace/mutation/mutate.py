"""Changed references against the check of a definition: which of the changes it notices.

The answers to a definition (lz, and torch's functions) are computed once for each reading of it;
every mutant of the reference then runs in the process of the references, for a limited time, and is
compared with them as the reference is: in every reading that the text allows, and that the mutated
code suggests. One that only rounds more is noticed, since the report of a definition says so. A
mutant that gives the same as the reference to the bit, also where
everything is float64, or that differs there by rounding alone (another order of a sum, a factor
that cancels), is counted apart: no check of results could notice it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ....machine.faults import FAULTS
from ....spec.errors import DataError
from ..answers import draws
from ..answers.answer import Answer
from ..answers.frequencies import drawn_often
from ..answers.lookup import answers
from ..answers.references import Ran, References
from ..answers.truths import truths
from ..answers.unseen import queries_without_keys
from ..definition import Definition
from ..inputs.generation import generate
from ..readings import Unmapped
from ..run import Limits, compare_outputs, in_float64, judge_draws, verify
from ..scaling import CannotScale, scaled, too_large
from .mutants import Mutant, mutants

ENOUGH = 1 << 22                               # bytes of fixed inputs: each mutant reads them
DRAWN = (0, 1)                                 # seeds: what survives the first meets the second


@dataclass(frozen=True)
class Outcome:
    """killed: the check disagrees, or the mutant did not end well. survived: nothing noticed it.
    equivalent: nothing could."""

    mutant: Mutant
    status: str
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        m = self.mutant
        return {"kind": m.kind, "line": m.line, "change": m.change, "status": self.status,
                "why": self.why}


@dataclass(frozen=True)
class MutationReport:
    """What became of the mutants of one definition; `skipped` says why there are none."""

    definition: str
    op_type: str
    outcomes: tuple[Outcome, ...] = ()
    skipped: str = ""

    @property
    def counts(self) -> Counter[str]:
        return Counter(o.status for o in self.outcomes)

    @property
    def rate(self) -> float:
        """The share of mutants that were killed, of those that are not equivalent."""
        return kill_rate(self.counts)

    def to_json(self) -> dict[str, Any]:
        return {"definition": self.definition, "op_type": self.op_type, "skipped": self.skipped,
                "mutants": len(self.outcomes), **{s: self.counts[s] for s in (
                    "killed", "survived", "equivalent")},
                "by_kind": {k: dict(Counter(o.status for o in self.outcomes if o.mutant.kind == k))
                            for k in sorted({o.mutant.kind for o in self.outcomes})},
                "not_killed": [o.to_json() for o in self.outcomes if o.status != "killed"]}


def kill_rate(counts: Mapping[str, int]) -> float:
    killed, survived = counts.get("killed", 0), counts.get("survived", 0)
    return killed / (killed + survived) if killed + survived else math.nan


@dataclass(frozen=True)
class _Trial:
    """One set of inputs with the answers of others and what the reference itself gives."""

    inputs: Mapping[str, Any]
    reference: Ran
    answered: dict[str, Mapping[str, Mapping[str, Tensor]]] = field(default_factory=dict)

    def outputs(self, answer: Answer) -> Mapping[str, Mapping[str, Tensor]]:
        """What lz and torch give in this reading; nothing where lz cannot serve it."""
        if str(answer) not in self.answered:
            self.answered[str(answer)] = _outputs(answer, self.inputs)
        return self.answered[str(answer)]

    def undefined(self, answer: Answer) -> Tensor | None:
        """The rows that the unchanged reference leaves undefined, and may."""
        rows = queries_without_keys(answer, self.inputs)
        limits = Limits(answer.definition, undefined=rows)
        return rows if limits.leaves_undefined(self.reference.outputs) else None


def mutate(definition: Definition, references: References, limit: int = 0, seed: int = 0,
           size: str = "small", progress: Callable[[int, int], None] | None = None
           ) -> MutationReport:
    """Run the mutants of a definition's reference: `most` of them, or all."""
    def skipped(why: str) -> MutationReport:
        return MutationReport(definition.name, definition.op_type, skipped=why)

    used = drawn_often(definition)
    if too_large(definition, ENOUGH):          # a mutant costs as much as a reference
        try:
            used = scaled(definition)[0]
        except CannotScale as e:
            if too_large(definition):
                return skipped(f"it is large and cannot be made smaller: {e}")
    try:
        report = verify(used, references, size, seed=seed)
    except Unmapped as e:
        return skipped(str(e))
    if not report.passed:
        return skipped(f"unchanged, it is {report.status}: {report.detail or report}")
    try:
        answer = answers(used)[report.reading]
        trials = [_trial(used, answer, references, size, seed + s) for s in DRAWN]
    except DataError as e:
        return skipped(str(e))
    every = mutants(used.reference, limit, f"{definition.name} {seed}")
    alive: dict[int, str] = dict.fromkeys(range(len(every)), "")
    outcomes: dict[int, Outcome] = {}
    done = 0
    for trial in trials:
        codes = [every[i].code for i in alive]
        runs = references.run_all(used, codes, trial.inputs, timed=False)
        for i, ran in zip(list(alive), runs):
            why = _objection(used, readings_of(used, every[i].code, answer), trial, ran)
            if why:
                outcomes[i] = Outcome(every[i], "killed", why)
                del alive[i]
            done += trial is trials[0]
            if progress is not None:
                progress(done, len(every))
    for i in alive:
        same = _why_equivalent(used, references, every[i], trials)
        outcomes[i] = Outcome(every[i], "equivalent" if same else "survived", same)
    return MutationReport(definition.name, definition.op_type,
                          tuple(outcomes[i] for i in range(len(every))))


def _trial(definition: Definition, answer: Answer, references: References, size: str,
           seed: int) -> _Trial:
    inputs: Mapping[str, Any] = generate(definition, size, seed=seed)
    if answer.random:
        inputs, _ = draws.repeated(answer, inputs)
    return _Trial(inputs, references.run(definition, inputs))


def _outputs(answer: Answer, inputs: Mapping[str, Any]) -> dict[str, Mapping[str, Tensor]]:
    outputs: dict[str, Mapping[str, Tensor]] = {}
    try:
        outputs["lz"] = answer(inputs)
    except FAULTS:                             # a reading that has no call is none
        return {}
    for truth in truths(answer) if not answer.random else ():
        if truth.compute is not None:
            try:
                outputs[truth.source] = truth(answer, inputs)
            except FAULTS:                     # the report of the definition says so
                continue
    return outputs


def readings_of(definition: Definition, code: str, adopted: Answer) -> list[Answer]:
    """The readings that a normal run would accept of the definition with this code: the adopted
    one first, then those that its text does not contradict."""
    try:
        others = answers(replace(definition, reference=code))
    except Unmapped:                           # what no call answers does not pass
        others = ()
    allowed = [a for a in others if not a.contradictions and not a.disagreements]
    return [adopted, *(a for a in allowed if str(a) != str(adopted))]


def _objection(definition: Definition, answers: Sequence[Answer], trial: _Trial, ran: Ran) -> str:
    """Return why these outputs are not taken for the reference's; nothing where they are."""
    if not ran.ok:
        return ran.status
    answer = answers[0]
    if answer.random:
        tokens = ran.outputs[answer.roles["out"]]
        expected = trial.reference.outputs[answer.roles["out"]]
        if tokens.shape != expected.shape or tokens.dtype != expected.dtype:
            return "shape or dtype"
        return next((v.detail for v in judge_draws(answer, trial.inputs, tokens)
                     if not v.passed), "")
    objections = [_difference(Limits(definition, undefined=trial.undefined(a)), trial.outputs(a),
                              ran) for a in answers]
    return objections[0] if all(objections) else ""


def _difference(limits: Limits, answered: Mapping[str, Mapping[str, Tensor]], ran: Ran) -> str:
    for name, outputs in answered.items():
        comparison = compare_outputs(name, outputs, "reference", ran.outputs, limits)
        if not comparison.passed:
            return f"{name}: {next(v.status for v in comparison.verdicts if not v.passed)}"
    return "" if answered else "lz: no call"


# Mutants that no result could tell.

def _why_equivalent(definition: Definition, references: References, mutant: Mutant,
                    trials: Sequence[_Trial]) -> str:
    """Return in what sense it gives the same as the reference; nothing where it does not."""
    identical, only_rounding = True, mutant.kind != "dtype"
    for trial in trials:
        ran = next(references.run_all(definition, (mutant.code,), trial.inputs, timed=False))
        wide = {n: v.double() if isinstance(v, Tensor) and v.is_floating_point()
                and v.dtype.itemsize > 1 else v for n, v in trial.inputs.items()}
        exact, changed = references.run_all(
            definition, (in_float64(definition.reference), in_float64(mutant.code)), wide,
            timed=False)
        identical &= _same(ran, trial.reference) and (_same(changed, exact) or not exact.ok)
        only_rounding &= exact.ok and changed.ok and _near(changed, exact)
    return ("the same to the bit" if identical
            else "in float64 the same but for rounding" if only_rounding else "")


def _same(a: Ran, b: Ran) -> bool:
    return a.ok and b.ok and all(
        a.outputs[n].shape == b.outputs[n].shape and a.outputs[n].dtype == b.outputs[n].dtype
        and torch.equal(a.outputs[n].double().nan_to_num(nan=math.pi),
                        b.outputs[n].double().nan_to_num(nan=math.pi)) for n in b.outputs)


def _near(a: Ran, b: Ran) -> bool:
    """Do float64 results agree but for rounding? Others must be equal, and none be narrower."""
    for name, want in b.outputs.items():
        got = a.outputs[name]
        if got.shape != want.shape or got.dtype != want.dtype:
            return False
        if want.dtype is not torch.float64:
            if want.is_floating_point() or not torch.equal(got, want):
                return False
        elif not torch.allclose(got, want, rtol=1e-12, atol=1e-12 * float(
                want[want.isfinite()].abs().max() if bool(want.isfinite().any()) else 0.0),
                equal_nan=True):
            return False
    return True


def summary(reports: Sequence[MutationReport]) -> dict[str, Any]:
    """Return the counts of all, by type of operation and in total."""
    def total(chosen: Sequence[MutationReport]) -> dict[str, Any]:
        counts: Counter[str] = sum((r.counts for r in chosen), Counter())
        return {"definitions": sum(not r.skipped for r in chosen),
                **{s: counts[s] for s in ("killed", "survived", "equivalent")},
                "rate": round(kill_rate(counts), 4) if counts else None}

    types = sorted({r.op_type for r in reports})
    return {**total(reports), "by_type": {
        t: total([r for r in reports if r.op_type == t]) for t in types}}


