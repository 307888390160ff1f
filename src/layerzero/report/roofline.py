"""The roofline as an SVG: work per byte of a call, how fast the winner does it, and what the device allows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ..perf.record import Rates
from .markup import Html, el, join
from .overview import Kind

WIDTH, HEIGHT = 480, 360
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 26, 46
MARK, CROWD = 8, 40                            # radius of a point; more points are smaller ones
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def plotted(kinds: Sequence[Kind]) -> list[Kind]:
    """Those with a place in the plot: without work, without bytes or with a way back there is none."""
    return [k for k in kinds if k.roofline_us is not None and k.flops > 0 and k.bytes > 0]


def intensity(kind: Kind) -> float:
    return kind.flops / kind.bytes


def achieved(kind: Kind) -> float:
    """FLOP/s."""
    return kind.flops / kind.winner.us * 1e6


def rate_text(per_second: float, unit: str) -> str:
    size, prefix = next(((s, p) for s, p in _PREFIXES if per_second >= s), (1.0, ""))
    return f"{per_second / size:.3g} {prefix}{unit}/s"


def plot(kinds: Sequence[Kind], rates: Rates, letters: Mapping[str, str]) -> Html:
    """`letters` names each operation in its points."""
    peak, band = rates.flops_per_us * 1e6, rates.bytes_per_us * 1e6
    xs, ys = [peak / band, *map(intensity, kinds)], [peak, *map(achieved, kinds)]
    x = _Axis(min(xs), max(xs), LEFT, WIDTH - RIGHT)
    y = _Axis(min(ys), max(ys), HEIGHT - BOTTOM, TOP)
    ridge = min(max(peak / band, x.low), x.high)
    roof = [(x.low, x.low * band), (ridge, peak), (x.high, peak)]
    start = max(x.low, y.low / band)           # the slope enters the picture here
    roof[0] = (start, start * band)
    parts = [_grid(x, y)]
    parts.append(el("polyline", class_="roof", points=" ".join(f"{x.at(a):.1f},{y.at(b):.1f}" for a, b in roof)))
    parts += [_point(kind, x, y, letters, MARK if len(kinds) <= CROWD else MARK - 1) for kind in kinds]
    parts.append(el("text", f"compute {rate_text(peak, 'FLOP')}", x=WIDTH - RIGHT - 2, y=f"{y.at(peak) - 7:.1f}",
                    text_anchor="end", class_="halo"))
    slope = math.degrees(math.atan2(y.at(ridge * band) - y.at(start * band), x.at(ridge) - x.at(start)))
    at = f"{x.at(start) + 8:.1f},{y.at(start * band) - 8:.1f}"
    if x.at(ridge) - x.at(start) > 150:        # else there is no room beside the slope; the text above says it
        parts.append(el("text", f"memory {rate_text(band, 'B')}", class_="halo",
                        transform=f"translate({at}) rotate({slope:.1f})"))
    return el("svg", *parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img",
              aria_label=f"Roofline plot of {len(kinds)} winners; the table below has the same numbers")


class _Axis:
    """A logarithmic axis from one power of ten to another."""

    def __init__(self, low: float, high: float, begin: float, end: float) -> None:
        self.first, self.last = math.floor(math.log10(low / 1.3)), math.ceil(math.log10(high * 1.3))
        self.low, self.high, self._begin, self._end = 10.0 ** self.first, 10.0 ** self.last, begin, end

    def at(self, value: float) -> float:
        share = (math.log10(value) - self.first) / (self.last - self.first)
        return self._begin + share * (self._end - self._begin)

    def ticks(self) -> list[int]:
        step = max(1, math.ceil((self.last - self.first) / 8))
        return list(range(self.first, self.last + 1, step))


def _grid(x: _Axis, y: _Axis) -> Html:
    parts = []
    for n in x.ticks():
        at = f"{x.at(10.0 ** n):.1f}"
        parts += [el("line", class_="grid", x1=at, x2=at, y1=TOP, y2=HEIGHT - BOTTOM),
                  el("text", _tick(n), class_="tick", x=at, y=HEIGHT - BOTTOM + 17, text_anchor="middle")]
    for n in y.ticks():
        at = f"{y.at(10.0 ** n):.1f}"
        parts += [el("line", class_="grid", x1=LEFT, x2=WIDTH - RIGHT, y1=at, y2=at),
                  el("text", _tick(n), class_="tick", x=LEFT - 6, y=f"{float(at) + 4:.1f}", text_anchor="end")]
    parts.append(el("text", "FLOP per byte", x=(LEFT + WIDTH - RIGHT) / 2, y=HEIGHT - 8, text_anchor="middle"))
    parts.append(el("text", "FLOP/s", x=4, y=14))
    return join(*parts)


def _tick(n: int) -> str:
    if n >= 3:
        size, prefix = next((s, p) for s, p in _PREFIXES if 10 ** n >= s)
        return f"{10.0 ** n / size:.0f}{prefix}"
    return f"{10.0 ** n:g}"


def _point(kind: Kind, x: _Axis, y: _Axis, letters: Mapping[str, str], radius: int) -> Html:
    across, up = x.at(intensity(kind)), y.at(achieved(kind))
    told = (f"{kind.label}: {kind.winner.kernel}, {rate_text(achieved(kind), 'FLOP')}, "
            f"{intensity(kind):.3g} FLOP per byte, {kind.roofline or 0:.0%} of the roofline")
    return el("g", el("title", told), el("circle", cx=f"{across:.1f}", cy=f"{up:.1f}", r=radius),
              el("text", letters.get(kind.op, ""), class_="letter", x=f"{across:.1f}", y=f"{up + 3.5:.1f}"))
