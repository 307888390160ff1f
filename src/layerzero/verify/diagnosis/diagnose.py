"""Diagnoses a failed kernel: its wrong results are compared with those of deliberately altered
references.

A diagnosis is a class, a sentence with its evidence, where the kernel fails ("exactly where seq_q %
128 = 64 and attn_mask is given") and what to do.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...spec.kernel import Kernel
from ...spec.op import Op
from ..kernel.contract import CaseResult
from .conditions import failing_conditions
from .evidence import Evidence
from .explainers import explain

# class -> what to do about it
CLASSES: Mapping[str, str] = {
    "mask":
        "look at how the mask, causality or sequence boundaries reach the kernel; or let a rule "
        "refuse such calls",
    "alignment":
        "the diagonal is where causal_align says: pass the kernel its offset, or let a rule refuse "
        "the other",
    "convention": "the library means something else by this argument: convert it in the backend's "
                  "adapter",
    "scale": "look at which factor the library applies itself, and where",
    "head map": "query head h belongs to KV head h // group: expand with repeat_interleave, not "
                "repeat",
    "window": "the window counts keys left and right of the diagonal, the diagonal itself not "
              "included",
    "position bias": "pass the bias on, or let a rule refuse calls with one",
    "capacity": "an expert serves the first `capacity` pairs in token order, no fewer and no more",
    "distribution": "the draw must be the contract's function of its random number; see "
                    "ops/formulas/sampling.py",
    "precision": "accumulate in float32 or wider, and round once at the end",
    "uninitialised output": "write every element of the result; rows, tails and empty inputs too",
    "out of bounds": "read and write only what the shapes, strides and lengths cover",
    "stale page": "follow block_table on every call",
    "non-determinism": "declare deterministic=False, or make the order of summation fixed",
    "in-place change": "work on a copy: the caller's tensors are not the kernel's",
    "aliasing": "return memory of the result's own, and let arguments share theirs",
    "gradient": "mend the backward, or declare differentiable=False",
    "dtype": "the result has the dtype of the contract, whatever autocast says",
    "layout": "honour the strides, or declare a rule (contiguous): such calls are then copied or "
              "refused",
    "stale cache": "look contents up by what cannot come again: an address, an id or a version "
                   "alone can",
    "state": "keep nothing between calls that is not looked up by contents or version",
    "shape": "return what the op's meta function says",
    "global state": "leave torch's settings and random numbers as they were",
    "invariance": "add in one order, however many rows, heads and columns there are, or drop "
                  "batch_invariant and tp_invariant",
    "threads": "give every call scratch memory of its own",
    "index overflow": "count offsets in 64 bits",
    "mode": "one way for every mode of torch: gradients recorded or not, inference mode or not",
    "result": "return a plain tensor of the caller's own: no Parameter, no inference tensor, "
              "nothing that is kept",
    "leak": "free what a call allocates, or use it again",
    "non-finite values": "a NaN or an infinity appears where the formula has one, and nowhere else",
    "overflow": "subtract the maximum before exponentials, and accumulate where there is range",
    "ties": "of equal numbers the one with the lowest index comes first",
    "last rows": "rows that are left over by tiles or vectors need a loop or mask of their own",
    "sizes": "the kernel is wrong for some sizes only: mend it, or let a rule refuse them",
    "fault": "mend it, or let a rule refuse what it cannot do",
    "unknown": "compare it with the op's reference on the case above",
}


@dataclass(frozen=True)
class Diagnosis:
    kind: str                                  # one of CLASSES
    says: str
    where: str = ""

    @property
    def advice(self) -> str:
        return CLASSES[self.kind]

    def __str__(self) -> str:
        where = f"; of these cases it fails exactly where {self.where}" if self.where else ""
        return f"{self.kind}: {self.says}{where}. What to do: {self.advice}"


OUTRIGHT = {"fault", "shape"}                  # complaints about a call that gives no numbers
NOT_FINITE = "with NaN and infinity"           # circumstances of inputs that are no numbers


def hides_another(op: Op, r: CaseResult) -> bool:
    """May a failure be of a second fault, less telling than what fails besides? A call that gives
    no numbers, or one in a dtype beyond those of the op, which many kernels compute in float32, or
    one that is given NaN and infinity."""
    return bool(r.kinds) and (set(r.kinds) <= OUTRIGHT or r.dtype not in op.dtypes
                              or r.circumstance.startswith(NOT_FINITE))


def diagnose(kernel: Kernel, results: Sequence[CaseResult],
             device: str = "cpu") -> Diagnosis | None:
    """Returns the diagnosis; None if nothing failed."""
    failed = [r for r in results if r.status == "failed"]
    if not failed:
        return None
    # of two faults the one that gives wrong numbers: what raises is noticed, and another serves
    minor = [r for r in failed if hides_another(kernel.op, r)]
    failed = [r for r in failed if r not in minor] or failed
    others = [r for r in results if r not in minor or r in failed]
    where = failing_conditions(kernel.op, others, device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind, says = explain(Evidence(kernel, failed, others, device, where))
    if len(others) < len(results):
        says += f"; besides, {len(minor)} calls fail outright or in other dtypes: {minor[0].detail}"
    return Diagnosis(kind, says, where)
