"""Expected time of a kernel for a call: measured here if it was, guessed from its prior if not.

The guess is the roofline time of the op, slowed by how far the eager formula usually stays behind
it, sped up by the kernel's prior. Where some candidates were measured, the guesses of the others are
scaled by how far the guess was off for the measured ones; a noisy measurement is mixed with the guess.
A kind of call that was not measured is judged by its neighbours (perf/record.py), which counts less
the farther they are. What these numbers may decide is said in engine.py: a guess never overrules torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..perf.record import Estimate, Measurement, Rates
from ..spec.expr import parse
from ..spec.kernel import Kernel
from ..spec.op import Op
from ..spec.plan import INTERPOLATED, MEASURED, Score, Step, Transform

EAGER_OVER_ROOFLINE = 8.0


DEFAULT_RATES: Mapping[str, Rates] = {
    "cpu": Rates(1e5, 2e4), "cuda": Rates(5e8, 2e6), "xpu": Rates(1e8, 1e6), "hpu": Rates(3e8, 2e6),
    "mps": Rates(1e7, 2e5)}


def rates_of(device: str) -> Rates:
    return DEFAULT_RATES.get(device, DEFAULT_RATES["cpu"])


def roofline_us(op: Op, facts: Mapping[str, Any], rates: Rates) -> float:
    return rates.roofline_us(parse(op.flops)(facts), parse(op.bytes)(facts))


def guess_us(kernel: Kernel, roofline: float) -> float:
    return kernel.overhead_us + EAGER_OVER_ROOFLINE * roofline / kernel.prior


Found = Measurement | Estimate


def expected_us(found: Found) -> float:
    return found.median_us if isinstance(found, Measurement) else found.us


def calibration(guesses: Mapping[str, float], found: Mapping[str, Found]) -> float:
    """The geometric mean of measured over guessed, for those that were measured."""
    ratios = [math.log(us / guesses[k]) for k, m in found.items() if guesses[k] > 0 and (us := expected_us(m)) > 0]
    return math.exp(sum(ratios) / len(ratios)) if ratios else 1.0


def moving_us(transforms: tuple[Transform, ...], rates: Rates) -> float:
    return sum(2.0 * t.bytes for t in transforms) / rates.bytes_per_us


def preceded(step: Step, casts: tuple[Transform, ...], rates: Rates) -> Step:
    """The step as it is for a call whose inputs are cast before anything is chosen: every step pays the same."""
    more, s = moving_us(casts, rates), step.score
    more_expensive = s._replace(total_us=s.total_us + more / s.boost, transform_us=s.transform_us + more)
    return step._replace(score=more_expensive, transforms=(*casts, *step.transforms))


def score(guess: float, found: Found | None, transforms: tuple[Transform, ...], boost: float, rates: Rates,
          mixed: bool = True) -> Score:
    """Expected microseconds from a measurement, or from a guess where there is none. `mixed`: a number that is not
    sure is mixed with the guess; not where it stands against torch's own, which no guess overrules."""
    transform_us = moving_us(transforms, rates) if transforms else 0.0
    if found is None:
        return Score((guess + transform_us) / boost, guess, transform_us, boost)
    trust = found.trust if mixed else 1.0
    kernel_us = trust * expected_us(found) + (1.0 - trust) * guess
    total_us = (kernel_us + transform_us) / boost
    if isinstance(found, Measurement):
        return Score(total_us, kernel_us, transform_us, boost, MEASURED, found.samples, found.spread)
    return Score(total_us, kernel_us, transform_us, boost, INTERPOLATED, found.samples, 0.0, found.distance)
