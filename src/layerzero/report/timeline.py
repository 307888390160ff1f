"""The time of the workload over the dates of its measurements, as an SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import datetime

from .formats import format_time
from .history import Point
from .labels import LINE, Labels
from .markup import Markup, element

WIDTH, HEIGHT = 480, 230
LEFT, RIGHT, TOP, BOTTOM = 58, 116, 26, 30
DAY = 86400.0
ROUND = (1, 1.2, 1.6, 2, 2.4, 3, 4, 5, 6, 8, 10)


def plot(points: Sequence[Point]) -> Markup:
    """Draw the time with lz and with torch's own kernels; at least two points."""
    begin, end = points[0].at, points[-1].at
    top = _round_up(max(max(p.us, p.torch_us) for p in points))

    def x(at: float) -> float:
        return LEFT + (at - begin) / (end - begin) * (WIDTH - LEFT - RIGHT)

    def y(us: float) -> float:
        return HEIGHT - BOTTOM - us / top * (HEIGHT - BOTTOM - TOP)

    parts: list[Markup] = []
    for i in range(5):
        at = f"{y(top * i / 4):.1f}"
        parts += [element("line", class_="grid", x1=LEFT, x2=WIDTH - RIGHT, y1=at, y2=at),
                  element("text", format_time(top * i / 4) if i else "0", class_="tick", x=LEFT - 6,
                          y=f"{float(at) + 4:.1f}", text_anchor="end")]
    parts += _dates(points, x)
    parts += _versions(points, x)
    ends = []
    for name, values in (("torch", [p.torch_us for p in points]), ("lz", [p.us for p in points])):
        steps = [f"M{x(begin):.1f} {y(values[0]):.1f}"]
        steps += [f"H{x(p.at):.1f} V{y(us):.1f}" for p, us in zip(points[1:], values[1:])]
        parts.append(element("path", class_=f"series {name}", d=" ".join(steps)))
        parts += [element("g", element("title", _title(p)), element(
            "circle", class_=name, cx=f"{x(p.at):.1f}", cy=f"{y(us):.1f}", r=3.5))
            for p, us in zip(points, values)]
        ends.append((y(values[-1]), name, f"{name} {format_time(values[-1])}"))
    last = -math.inf
    for at_y, name, text in sorted(ends):
        last = max(at_y, last + LINE + 1)
        parts.append(element("text", text, class_=f"end {name}", x=WIDTH - RIGHT + 8,
                             y=f"{last + 4:.1f}"))
    return element("svg", *parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img",
                   aria_label=f"Time of the workload at {len(points)} dates")


def _dates(points: Sequence[Point], x: Callable[[float], float]) -> list[Markup]:
    short = points[-1].at - points[0].at < 2 * DAY
    parts, right = [], -math.inf
    for i, p in enumerate(points):
        text = datetime.fromtimestamp(p.at).strftime("%m-%d %H:%M" if short else "%Y-%m-%d")
        half = Labels.width(text) / 2
        at = x(p.at)
        limit = WIDTH - 2 - half               # the last date must fit too
        final = x(points[-1].at)
        if i < len(points) - 1 and (at - half < right + 8 or at + half > final - half - 8):
            continue
        parts.append(element("text", text, class_="tick", x=f"{min(at, limit):.1f}", y=HEIGHT - 9,
                             text_anchor="middle"))
        right = at + half
    return parts


def _versions(points: Sequence[Point], x: Callable[[float], float]) -> list[Markup]:
    """Mark where another version of torch begins."""
    parts, version, right = [], points[0].torch, -math.inf
    for p in points[1:]:
        if p.torch and p.torch != version:
            version, at, text = p.torch, x(p.at), f"torch {p.torch.partition('+')[0]}"
            parts.append(element("line", class_="mark", x1=f"{at:.1f}", x2=f"{at:.1f}", y1=TOP,
                                 y2=HEIGHT - BOTTOM))
            half = Labels.width(text) / 2
            if at - half > right + 6:
                parts.append(element("text", text, class_="tick", x=f"{at:.1f}", y=TOP - 8,
                                     text_anchor="middle"))
                right = at + half
    return parts


def _title(point: Point) -> str:
    date = datetime.fromtimestamp(point.at).astimezone().strftime("%Y-%m-%d %H:%M")
    return (f"{date}: {format_time(point.us)}, torch's own {format_time(point.torch_us)}"
            + (f", torch {point.torch}" if point.torch else ""))


def _round_up(value: float) -> float:
    """Return the next round number, whose quarters are short to write."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(n * power for n in ROUND if n * power >= value * 0.999999)
