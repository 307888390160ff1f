"""The roofline plot: every point in its place, every label beside its own."""

from __future__ import annotations

import re

import pytest
from report_pages import RATES, ROWS, Reader, flat, measured, overview

from layerzero.perf.record import Rates
from layerzero.report import roofline
from layerzero.report.overview import group_by_kind
from layerzero.report.page import render
from layerzero.report.roofs import Cost, Roofs


def _points(svg):
    return [(float(x), float(y)) for x, y in re.findall(r'<circle cx="([\d.-]+)" cy="([\d.-]+)"',
                                                        svg)]


def test_a_winner_at_the_roof_lies_on_the_line():
    # 1e4 FLOP a byte: compute bound
    at_peak = measured("k.k", 1000.0, rows=1, flops=1e8, bytes=1e4)
    # 0.01 FLOP a byte: memory bound
    at_band = measured("k.k", 100.0, rows=2, flops=1e4, bytes=1e6)
    kinds = group_by_kind((at_peak, at_band), RATES, frozenset())
    assert [kind.roofline for kind in kinds] == [1.0, 1.0]
    svg = roofline.plot(kinds, Roofs.known(RATES, ()), {kinds[0]: 1})
    line = [tuple(map(float, p.split(","))) for p in re.search(r'points="([^"]+)"', svg)[1].split()]
    (right, peak), (left, low) = _points(svg)
    assert [peak, peak] == pytest.approx([line[1][1], line[2][1]], abs=0.2)
    share = (left - line[0][0]) / (line[1][0] - line[0][0])
    assert (0 <= share <= 1 and low == pytest.approx(line[0][1] + share * (line[1][1] - line[0][1]),
                                                     abs=0.3))
    assert right > line[1][0]


@pytest.mark.parametrize(("flops", "moved", "us", "rates"), [
    (1.0, 1.0, 1e-6, Rates(1e-3, 1e6)), (1e18, 1.0, 1e9, Rates(1e12, 1e-3)),
    (1.0, 1e15, 1e12, RATES), (2e6, 1e5, 50.0, RATES)])
def test_every_point_and_the_roof_are_inside_the_picture(flops, moved, us, rates):
    kinds = group_by_kind([measured("k.k", us, flops=flops, bytes=moved)], rates, frozenset())
    svg = roofline.plot(kinds, Roofs.known(rates, [Cost(flops, moved, us)]), {kinds[0]: 1})
    corners = re.search(r'points="([^"]+)"', svg)[1].split()
    for x, y in (*_points(svg), *(map(float, corner.split(",")) for corner in corners)):
        assert roofline.LEFT - 0.1 <= x <= roofline.WIDTH - roofline.RIGHT + 0.1
        assert roofline.TOP - 0.1 <= y <= roofline.HEIGHT - roofline.BOTTOM + 0.1
    assert not re.search(r"\b(nan|inf)\b", svg)


def test_the_plot_leaves_out_what_has_no_place_in_it_and_says_so():
    rows = [*ROWS, measured("k.k", 5.0, op="embedding", flops=0.0)]
    page = Reader(render(overview(rows)))
    assert page.tags.count("circle") == 2
    assert "Not shown: 2 kinds of call" in page.text
    titles = [t for t in page.texts if "FLOP per byte," in t]
    assert (len(titles) == 2
            and "fast.one, 40 GFLOP/s, 20 FLOP per byte, 40% of the roof" in titles[0])


def test_labels_do_not_lie_on_each_other_or_on_a_point():
    rows = [measured("k.k", 50.0 + n / 10, rows=n) for n in range(1, 30)]      # nearly one place
    kinds = group_by_kind(rows, RATES, frozenset())
    svg = roofline.plot(kinds, Roofs.known(RATES, ()), {k: i for i, k in enumerate(kinds[:10], 1)})
    spots = [(float(x), float(y) - 4, text) for x, y, text in re.findall(
        r'<text class="letter halo" x="([\d.]+)" y="([\d.]+)">(\d+)</text>', svg)]
    assert len(spots) >= 8                     # the rest found no room, and is in the table
    for i, (x, y, _) in enumerate(spots):
        for other_x, other_y, _ in spots[i + 1:]:
            assert abs(x - other_x) > 12 or abs(y - other_y) > 12
        for px, py in _points(svg):
            assert abs(x - px) > 8 or abs(y - py) > 8
        assert roofline.LEFT < x < roofline.WIDTH - roofline.RIGHT


def test_calls_from_the_cache_have_a_roof_of_their_own():
    rows = [measured("k.k", 1.0, rows=1, flops=1e3, bytes=5e4),               # 50 GB/s
            measured("k.k", 1000.0, rows=2, flops=1e5, bytes=5e6)]             # 5 GB/s
    page = overview(rows, kinds=group_by_kind(rows, RATES, frozenset(), None, 1 << 20),
                    cache_bytes=1 << 20)
    small, large = page.kinds
    assert (small.roofline, large.roofline) == (1.0, 0.5)
    text = flat(Reader(render(page)).text)
    assert "memory 10 GB/s; cache 50 GB/s for calls whose data fit 1 MiB." in text
