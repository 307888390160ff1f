"""What the checks of a kernel reached, and what they did not: a certificate says both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...spec.codec import Record
from ...spec.kernel import Kernel
from ..cases.pairs import argument_levels, pair_cases
from ..kernel.case_sizes import numbers_of
from ..kernel.contract import CaseResult
from .calls import LEFT_OUT
from .circumstances.content_circumstances import FORGET_PACKED

SHOWN = 6                                      # of each list


@dataclass(frozen=True)
class Coverage(Record):
    """The largest sizes and the pairs of argument values that ran; what did not run."""

    sizes: Mapping[str, int]
    pairs: int = 0
    pairs_reachable: int = 0
    missing: tuple[str, ...] = ()

    def __str__(self) -> str:
        sizes = ", ".join(f"{name} {n:,}" for name, n in self.sizes.items())
        pairs = (f"; {self.pairs} of {self.pairs_reachable} pairs of argument values"
                 if self.pairs_reachable else "")
        return f"sizes up to {sizes}{pairs}" if sizes else pairs[2:]


NOTHING = Coverage({})


def measure_coverage(kernel: Kernel, device: str, lane: str, seeds: Sequence[int],
                     results: Sequence[CaseResult]) -> Coverage:
    """Returns what these results cover of the kernel's op."""
    op, ran = kernel.op, [r for r in results if r.status != "skipped"]
    if not op.tensors or not ran:
        return NOTHING
    sizes = {name: max((_largest(r.case.get(name, default)) for r in ran), default=0)
             for name, default in numbers_of(op).items()}
    missing = []
    levels = argument_levels(op)
    tried_values = {name: {repr(r.case.get(name, values[0])) for r in ran}
                    for name, values in levels.items()}
    untried = [f"{name}={value!r}" for name, values in levels.items() for value in values
               if repr(value) not in tried_values[name]]
    if untried:
        missing.append(f"arguments no accepted case has: {_listed(untried)}")
    missing += [f"{r.circumstance}: {r.detail}" for r in ran if LEFT_OUT in r.detail]
    missing += [f"{c}: {FORGET_PACKED}" for c in dict.fromkeys(
        r.circumstance for r in ran if r.detail == FORGET_PACKED)]
    tried = {r.circumstance for r in ran}
    skipped = list(dict.fromkeys(r.circumstance for r in results if r.reasons
                                 and r.circumstance and r.circumstance not in tried))
    if skipped:
        missing.append(f"circumstances that its rules refuse: {_listed(skipped)}")
    if kernel.jit and lane == "quick":
        missing.append("circumstances, gradients, pairs and most sizes: compiled for each call, it "
                       "has them in the full lane")
        return Coverage(sizes, missing=tuple(missing))
    if not any(r.circumstance.startswith("backward") for r in ran) and op.differentiable:
        missing.append("gradients")
    if kernel.backend == "reference":
        return Coverage(sizes, missing=tuple(missing))
    pairs = [pair_cases(kernel, device, lane, seed) for seed in seeds]
    parts = len({seed % 4 for seed in seeds})
    if lane == "quick" and parts < 4:
        missing.append(f"{4 - parts} quarters of the remainders of 128 of every size: other seeds "
                       "have them")
    return Coverage(sizes, max((p.covered for p in pairs), default=0),
                    max((p.reachable for p in pairs), default=0), tuple(missing))


def _largest(value: Any) -> int:
    return max((i for i in value if type(i) is int), default=0) if isinstance(value, tuple) else (
        value if type(value) is int else 0)


def _listed(names: Sequence[str]) -> str:
    rest = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")
