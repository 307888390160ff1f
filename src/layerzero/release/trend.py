"""Does a series of samples grow? Its slope by Theil and Sen, with a confidence interval.

The slope is the median over all pairs of samples, so a third of them may be outliers. A series may
have several parts (processes that ran one after the other); only samples of the same part make a
pair, since each process begins at a level of its own.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ..spec.codec import Record

Point = tuple[float, float]                    # (hours, value)
MIN_SAMPLES = 12                               # fewer say nothing about a slope
SURE = 0.95
# of a part; beyond these every second one is left out: pairs are many
MAX_SAMPLES = 1500


@dataclass(frozen=True)
class Trend(Record):
    """The slope of a series per hour, and its 95 % confidence interval."""

    per_hour: float
    low: float
    high: float
    level: float                               # the median of the values
    samples: int


def theil_sen(parts: Sequence[Sequence[Point]]) -> Trend | None:
    """Returns the Theil-Sen trend of a series in parts; None where there are too few samples.

    The interval is Sen's, from the variance of Kendall's S, which adds up over the parts; samples
    are assumed to be independent.
    """
    thinned = [_thin(part) for part in parts]
    slopes, variance = [], 0.0
    for part in thinned:
        n = len(part)
        variance += n * (n - 1) * (2 * n + 5) / 18
        slopes += [(y - v) / (x - u) for i, (u, v) in enumerate(part) for x, y in part[i + 1:]
                   if x > u]
    samples = sum(map(len, thinned))
    if samples < MIN_SAMPLES or not slopes:
        return None
    slopes.sort()
    reach = statistics.NormalDist().inv_cdf((1 + SURE) / 2) * math.sqrt(variance)
    first, last = (len(slopes) - reach) / 2, (len(slopes) + reach) / 2
    return Trend(statistics.median(slopes), slopes[max(math.floor(first), 0)],
                 slopes[min(math.ceil(last), len(slopes) - 1)],
                 statistics.median(v for part in thinned for _, v in part), samples)


def _thin(part: Sequence[Point]) -> Sequence[Point]:
    while len(part) > MAX_SAMPLES:
        part = part[::2]
    return part
