"""The roofline plot as an SVG: FLOP per byte of each kind of call against the FLOP/s of its winner.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ..perf.record import Rates
from .formats import PREFIXES, format_rate
from .markup import Markup, element, join
from .overview import CallKind

WIDTH, HEIGHT = 480, 360
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 26, 46
# of a point; with more points than this it is smaller
RADIUS, CROWD = 8, 40


def plotted(kinds: Sequence[CallKind]) -> list[CallKind]:
    """Return the kinds that can be drawn: those with FLOPs, bytes and a roofline."""
    return [k for k in kinds if k.roofline_us is not None and k.flops > 0 and k.bytes > 0]


def plot(kinds: Sequence[CallKind], rates: Rates, letters: Mapping[str, str]) -> Markup:
    """Draw the winners under the measured ceilings; `letters` labels the points by operation."""
    peak, bandwidth = rates.flops_per_us * 1e6, rates.bytes_per_us * 1e6
    xs = [peak / bandwidth, *(kind.intensity for kind in kinds)]
    ys = [peak, *(kind.flops_per_s for kind in kinds)]
    x = _Axis(min(xs), max(xs), LEFT, WIDTH - RIGHT)
    y = _Axis(min(ys), max(ys), HEIGHT - BOTTOM, TOP)
    ridge = min(max(peak / bandwidth, x.low), x.high)
    start = max(x.low, y.low / bandwidth)      # where the memory slope enters the picture
    roof = [(start, start * bandwidth), (ridge, peak), (x.high, peak)]
    points = " ".join(f"{x.at(a):.1f},{y.at(b):.1f}" for a, b in roof)
    radius = RADIUS if len(kinds) <= CROWD else RADIUS - 1
    parts = [_grid(x, y), element("polyline", class_="roof", points=points),
             *(_point(kind, x, y, letters, radius) for kind in kinds),
             element("text", f"compute {format_rate(peak, 'FLOP')}", x=WIDTH - RIGHT - 2,
                     y=f"{y.at(peak) - 7:.1f}", text_anchor="end", class_="halo")]
    if x.at(ridge) - x.at(start) > 150:        # else there is no room beside the slope
        angle = math.degrees(math.atan2(y.at(ridge * bandwidth) - y.at(start * bandwidth),
                                        x.at(ridge) - x.at(start)))
        corner = f"{x.at(start) + 8:.1f},{y.at(start * bandwidth) - 8:.1f}"
        parts.append(element("text", f"memory {format_rate(bandwidth, 'B')}", class_="halo",
                             transform=f"translate({corner}) rotate({angle:.1f})"))
    return element("svg", *parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img",
                   aria_label=f"Roofline plot of {len(kinds)} winners; the table below has the "
                              "same numbers")


class _Axis:
    """A logarithmic axis between two powers of ten."""

    def __init__(self, low: float, high: float, begin: float, end: float) -> None:
        self.first, self.last = math.floor(math.log10(low / 1.3)), math.ceil(math.log10(high * 1.3))
        self.low, self.high, self._begin, self._end = (10.0 ** self.first, 10.0 ** self.last, begin,
                                                       end)

    def at(self, value: float) -> float:
        share = (math.log10(value) - self.first) / (self.last - self.first)
        return self._begin + share * (self._end - self._begin)

    def ticks(self) -> list[int]:
        step = max(1, math.ceil((self.last - self.first) / 8))
        return list(range(self.first, self.last + 1, step))


def _grid(x: _Axis, y: _Axis) -> Markup:
    parts = []
    for n in x.ticks():
        at = f"{x.at(10.0 ** n):.1f}"
        parts += [element("line", class_="grid", x1=at, x2=at, y1=TOP, y2=HEIGHT - BOTTOM),
                  element("text", _tick(n), class_="tick", x=at, y=HEIGHT - BOTTOM + 17,
                          text_anchor="middle")]
    for n in y.ticks():
        at = f"{y.at(10.0 ** n):.1f}"
        parts += [element("line", class_="grid", x1=LEFT, x2=WIDTH - RIGHT, y1=at, y2=at),
                  element("text", _tick(n), class_="tick", x=LEFT - 6, y=f"{float(at) + 4:.1f}",
                          text_anchor="end")]
    parts.append(element("text", "FLOP per byte", x=(LEFT + WIDTH - RIGHT) / 2, y=HEIGHT - 8,
                         text_anchor="middle"))
    parts.append(element("text", "FLOP/s", x=4, y=14))
    return join(*parts)


def _tick(n: int) -> str:
    if n >= 3:
        size, prefix = next((s, p) for s, p in PREFIXES if 10 ** n >= s)
        return f"{10.0 ** n / size:.0f}{prefix}"
    return f"{10.0 ** n:g}"


def _point(kind: CallKind, x: _Axis, y: _Axis, letters: Mapping[str, str], radius: int) -> Markup:
    cx, cy = x.at(kind.intensity), y.at(kind.flops_per_s)
    title = (f"{kind.label}: {kind.winner.kernel}, {format_rate(kind.flops_per_s, 'FLOP')}, "
             f"{kind.intensity:.3g} FLOP per byte, {kind.roofline or 0:.0%} of the roofline")
    return element(
        "g", element("title", title), element("circle", cx=f"{cx:.1f}", cy=f"{cy:.1f}", r=radius),
        element("text", letters.get(kind.op, ""), class_="letter", x=f"{cx:.1f}",
                y=f"{cy + 3.5:.1f}"))
