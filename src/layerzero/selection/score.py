"""The expected time of a kernel for a call: measured here, or guessed from its prior.

The guess is the roofline time of the op times the usual slowdown of the eager formula, divided by
the kernel's prior. Where some candidates were measured, the guesses of the others are scaled by how
far the guess was off for the measured ones; a noisy measurement is mixed with the guess. A kind of
call that was not measured is estimated from its neighbours (perf/record.py), which counts less the
farther they are. engine.py says what these numbers may decide: a guess never overrules torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..perf.record import Estimate, Measurement, Rates
from ..spec.kernel import Kernel
from ..spec.op import Op
from ..spec.plan import INTERPOLATED, MEASURED, Score, Step, Transform
from ..spec.rules.expr import parse

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


Timing = Measurement | Estimate


def expected_us(timing: Timing) -> float:
    return timing.median_us if isinstance(timing, Measurement) else timing.us


def calibration(guesses: Mapping[str, float], timings: Mapping[str, Timing]) -> float:
    """Returns the geometric mean of measured over guessed time, of the measured kernels."""
    ratios = [math.log(us / guesses[k]) for k, t in timings.items() if guesses[k] > 0
              and (us := expected_us(t)) > 0]
    return math.exp(sum(ratios) / len(ratios)) if ratios else 1.0


def copy_us(transforms: tuple[Transform, ...], rates: Rates) -> float:
    return sum(2.0 * t.bytes for t in transforms) / rates.bytes_per_us


def with_casts(step: Step, casts: tuple[Transform, ...], rates: Rates) -> Step:
    """Returns the step with the cost of `casts`, which precede any choice, added."""
    extra, s = copy_us(casts, rates), step.score
    more_expensive = s._replace(total_us=s.total_us + extra / s.boost,
                                transform_us=s.transform_us + extra)
    return step._replace(score=more_expensive, transforms=(*casts, *step.transforms))


def score(guess: float, timing: Timing | None, transforms: tuple[Transform, ...], boost: float,
          rates: Rates, mixed: bool = True) -> Score:
    """Expected microseconds from a measurement, or from a guess if there is none.

    With `mixed` an uncertain timing is mixed with the guess. It is off where the kernel competes
    with torch's own, which no guess overrules.
    """
    transform_us = copy_us(transforms, rates) if transforms else 0.0
    if timing is None:
        return Score((guess + transform_us) / boost, guess, transform_us, boost)
    trust = timing.trust if mixed else 1.0
    kernel_us = trust * expected_us(timing) + (1.0 - trust) * guess
    total_us = (kernel_us + transform_us) / boost
    if isinstance(timing, Measurement):
        return Score(total_us, kernel_us, transform_us, boost, MEASURED, timing.samples,
                     timing.spread)
    return Score(total_us, kernel_us, transform_us, boost, INTERPOLATED, timing.samples, 0.0,
                 timing.distance)
