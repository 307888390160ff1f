"""The roofline plot as an SVG: FLOP per byte of each kind of call against the FLOP/s it reaches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from .formats import PREFIXES, format_rate
from .labels import Labels
from .markup import Markup, element, join
from .overview import CallKind
from .roofs import Roofs

WIDTH, HEIGHT = 480, 360
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 26, 46
RADIUS = 4
APART = 1.15                                   # times: closer roofs are drawn as one
MARGIN, SHORTEST = 0.35, 1.5                   # decades


def plotted(kinds: Sequence[CallKind]) -> list[CallKind]:
    """Return the kinds that can be drawn: those with FLOPs, bytes and a roofline."""
    return [k for k in kinds if k.roofline_us is not None and k.flops > 0 and k.bytes > 0]


def plot(kinds: Sequence[CallKind], roofs: Roofs, numbers: Mapping[CallKind, int]) -> Markup:
    """Draw the kernels in use under the roofs; `numbers` are the labels of some of the points."""
    peak, bandwidth = roofs.flops * 1e6, roofs.memory * 1e6
    fastest = roofs.cache * 1e6
    xs = [peak / bandwidth, peak / fastest, *(kind.intensity for kind in kinds)]
    ys = [peak, *(kind.flops_per_s for kind in kinds)]
    x = _Axis(min(xs), max(xs), LEFT, WIDTH - RIGHT)
    y = _Axis(min(ys), max(ys), HEIGHT - BOTTOM, TOP)
    labels = Labels(LEFT, TOP, WIDTH - RIGHT, HEIGHT - BOTTOM)
    slopes = [("memory", bandwidth)]
    if fastest > bandwidth * APART:
        slopes.append(("cache", fastest))
    parts = [_grid(x, y), *(_slope(x, y, name, rate, peak) for name, rate in slopes)]
    for kind in kinds:
        at = x.at(kind.intensity), y.at(kind.flops_per_s)
        labels.block(*at, RADIUS + 1, RADIUS + 1)
        parts.append(_point(kind, *at))
    text = f"compute {format_rate(peak, 'FLOP')}"
    spot = labels.beside_line(WIDTH - RIGHT - 2, y.at(peak), text)
    parts.append(element("text", text, x=f"{spot[0]:.1f}", y=f"{spot[1]:.1f}", text_anchor="end",
                         class_="halo"))
    for name, rate in slopes:
        parts.append(_slope_label(x, y, labels, f"{name} {format_rate(rate, 'B')}", rate, peak))
    for kind in sorted((k for k in kinds if k in numbers), key=lambda k: numbers[k]):
        at = x.at(kind.intensity), y.at(kind.flops_per_s)
        parts.append(_number(str(numbers[kind]), *at, labels))
    return element("svg", *parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img",
                   aria_label=f"Roofline plot of {len(kinds)} kinds of call; "
                              "the table below has the same numbers")


class _Axis:
    """A logarithmic axis with some room at both ends, at least a decade and a half long."""

    def __init__(self, low: float, high: float, begin: float, end: float) -> None:
        first, last = math.log10(low) - MARGIN, math.log10(high) + MARGIN
        missing = max(SHORTEST - (last - first), 0.0)
        self._first, self._last = first - missing / 2, last + missing / 2
        self.low, self.high = 10.0 ** self._first, 10.0 ** self._last
        self._begin, self._end = begin, end

    def at(self, value: float) -> float:
        share = (math.log10(value) - self._first) / (self._last - self._first)
        return self._begin + share * (self._end - self._begin)

    def ticks(self) -> list[int]:
        step = max(1, math.ceil((self._last - self._first) / 8))
        return list(range(math.ceil(self._first + 0.1), math.floor(self._last - 0.05) + 1, step))


def _ends(x: _Axis, y: _Axis, rate: float, peak: float) -> tuple[float, float]:
    """Return where a memory slope enters the picture and where it meets the compute roof."""
    return max(x.low, y.low / rate), min(max(peak / rate, x.low), x.high)


def _slope(x: _Axis, y: _Axis, name: str, rate: float, peak: float) -> Markup:
    start, ridge = _ends(x, y, rate, peak)
    corners = [(start, start * rate), (ridge, peak)]
    if name == "memory":
        corners.append((x.high, peak))
    points = " ".join(f"{x.at(a):.1f},{y.at(b):.1f}" for a, b in corners)
    return element("polyline", class_="roof" if name == "memory" else "roof dashed", points=points)


def _slope_label(x: _Axis, y: _Axis, labels: Labels, text: str, rate: float, peak: float) -> Markup:
    """Write along the slope where no point lies, above it if possible; nothing without room."""
    start, ridge = _ends(x, y, rate, peak)
    run, rise = x.at(ridge) - x.at(start), y.at(ridge * rate) - y.at(start * rate)
    angle = math.atan2(rise, run)
    last = int(math.hypot(run, rise) - labels.width(text)) - 6
    for aside in (-6, 15):
        for along in range(8, last, 12):
            cx = x.at(start) + along * math.cos(angle) - aside * math.sin(angle)
            cy = y.at(start * rate) + along * math.sin(angle) + aside * math.cos(angle)
            if labels.take_along(cx, cy, angle, text):
                return element(
                    "text", text, class_="halo",
                    transform=f"translate({cx:.1f},{cy:.1f}) rotate({math.degrees(angle):.1f})")
    return join()


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


def _point(kind: CallKind, cx: float, cy: float) -> Markup:
    title = (f"{kind.label}: {kind.used.kernel}, {format_rate(kind.flops_per_s, 'FLOP')}, "
             f"{kind.intensity:.3g} FLOP per byte, {kind.roofline or 0:.0%} of the roof")
    return element("g", element("title", title),
                   element("circle", cx=f"{cx:.1f}", cy=f"{cy:.1f}", r=RADIUS))


def _number(text: str, cx: float, cy: float, labels: Labels) -> Markup:
    """Write a number beside its point, with a line to it where it had to go farther away."""
    spot = labels.near(cx, cy, text)
    if spot is None:
        return join()
    lx, ly, distance = spot
    parts = [element("text", text, class_="letter halo", x=f"{lx:.1f}", y=f"{ly + 4:.1f}")]
    if distance > 2 * RADIUS + 8:
        parts.insert(0, element("line", class_="leader", x1=f"{cx:.1f}", y1=f"{cy:.1f}",
                                x2=f"{lx:.1f}", y2=f"{ly:.1f}"))
    return join(*parts)
