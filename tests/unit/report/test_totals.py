"""The numbers of the report: gain, time, loss and roof, each with one meaning."""

from __future__ import annotations

import pytest
from report_pages import BASELINES, RATES, ROWS, THREE, Reader, flat, measured, overview, usages

from layerzero.perf.record import Rates
from layerzero.report.formats import format_ratio, format_time
from layerzero.report.overview import Total, group_by_kind
from layerzero.report.page import render
from layerzero.report.roofs import Cost, Roofs


def test_winner_tie_gain_and_roofline_of_a_kind():
    grad, small, large = group_by_kind(reversed(ROWS), RATES,
                                       BASELINES)[2], *group_by_kind(ROWS, RATES, BASELINES)[:2]
    assert [c.kernel for c in small.candidates] == ["fast.one", "torch.own", "slow.one"]
    assert (small.fastest.kernel, small.tied, small.gain) == ("fast.one", (), 2.0)
    # 2e6 FLOP at 1e5 a microsecond
    assert small.roofline == pytest.approx(20.0 / 50.0)
    assert small.ratio("slow.one") == 4.5 and small.ratio("nobody") is None
    assert large.fastest.kernel == "torch.own" and large.gain == 1.0
    assert [c.kernel for c in large.tied] == ["fast.one"]              # 1 % slower: no difference
    # the contract counts the way forward only
    assert grad.roofline is None and grad.family == "float32 grad"


def test_kinds_are_in_the_order_of_their_sizes_and_not_of_their_letters():
    rows = [measured("k.k", 1.0, rows=n) for n in (1024, 8, 64)]
    assert [k.sizes.split()[0] for k in group_by_kind(rows, None, frozenset())] == [
        "rows=8", "rows=64", "rows=1024"]


def test_the_gain_is_the_ratio_of_the_times_of_what_could_be_compared():
    total = Total(group_by_kind(THREE, None, BASELINES))
    assert (total.us, total.compared.us, total.torch_us) == (21.0, 20.0, 100.0)
    assert (total.gain, total.saved_us, total.range) == (5.0, 80.0, (2.0, 8.0))
    assert Total(group_by_kind(THREE[2:3], None, BASELINES)).gain is None


def test_every_number_is_weighted_by_the_calls_of_the_workload():
    kinds = group_by_kind(THREE, None, BASELINES, usages(rows2=(30, "fast.one"), rows1=(1, "")))
    total = overview(kinds=kinds).total
    assert [(kind.calls, kind.us) for kind in total.kinds] == [(30, 300.0), (1, 10.0)]
    assert (total.calls, total.us, total.torch_us) == (31, 310.0, 680.0)      # 30 x 20 + 80
    assert total.gain == pytest.approx(680 / 310)
    assert next(kind for kind in kinds if "rows=3" in kind.sizes).calls == 0  # not in the workload


def test_a_kernel_that_is_chosen_and_not_the_fastest_loses_time():
    kinds = group_by_kind(ROWS, RATES, BASELINES, usages(
        rows64=(10, "torch.own"), rows512=(10, "fast.one")))
    small, large = kinds[:2]
    assert (small.used.kernel, small.us, small.lost_us, small.gain) == ("torch.own", 1000, 500, 1)
    assert large.used.kernel == "fast.one" and large.lost_us == 0      # a tie loses nothing
    assert small.roofline == pytest.approx(0.2)                        # of the kernel in use
    assert small.headroom_us == pytest.approx(10 * (100 - 20))


def test_kernels_of_one_mode_are_not_raced_against_those_of_another():
    rows = [measured("torch.own", 10.0), measured("torch.own", 4.0, mode="captured"),
            measured("fast.one", 2.0, mode="captured")]
    kinds = group_by_kind(rows, None, BASELINES)
    assert {kind.mode: (kind.fastest.us, kind.gain) for kind in kinds} == {
        "eager": (10.0, 1.0), "captured": (2.0, 2.0)}
    assert overview(rows).total.us == 10.0     # and their times are not added up
    assert "(captured)" in Reader(render(overview(rows))).text


def test_a_roof_rises_when_it_is_beaten():
    slow = Rates(flops_per_us=100.0, bytes_per_us=10.0)
    fast = Cost(flops=4000.0, bytes=50.0, us=10.0)             # 400 FLOP, 5 bytes
    wide = Cost(flops=10.0, bytes=900.0, us=30.0)              # 30 bytes
    small = Cost(flops=10.0, bytes=64.0, us=1.0)               # 64 bytes, from the cache
    assert Roofs.known(slow, [fast]) == Roofs(400.0, 10.0, 10.0, 0, frozenset({"flops"}))
    roofs = Roofs.known(slow, [fast, wide, small], cache_bytes=100)
    assert (roofs.flops, roofs.memory, roofs.cache) == (400.0, 30.0, 64.0)
    assert roofs.raised == {"flops", "memory"}
    for cost in (fast, wide, small):
        assert roofs.least_us(cost.flops, cost.bytes) <= cost.us
    assert [roofs.limit(c.flops, c.bytes) for c in (fast, wide, small)] == [
        "compute", "memory", "cache"]


def test_no_kernel_is_over_the_roof_and_the_page_says_that_it_rose():
    rows = [measured("k.k", 2.0, rows=n, flops=1e6 * n, bytes=1e5) for n in (1, 2, 3)]
    page = overview(rows)
    assert max(kind.roofline for kind in page.kinds) == 1.0
    text = flat(Reader(render(page)).text)
    assert "Compute and memory had been measured lower" in text
    assert "compute 1.5 TFLOP/s" in text


def test_without_measured_rates_there_is_no_percentage():
    page = Reader(render(overview(rates=None)))
    assert all(kind.roofline is None for kind in group_by_kind(ROWS, None, BASELINES))
    assert "The rates of this device are not measured" in page.text


@pytest.mark.parametrize(("us", "text"), [(0.5, "0.5 µs"), (12.34, "12.3 µs"), (1234.0, "1.23 ms"),
                                          (2.5e6, "2.5 s")])
def test_times_are_written_in_a_unit_that_fits(us, text):
    assert format_time(us).replace("\N{NO-BREAK SPACE}", " ") == text


@pytest.mark.parametrize(("value", "text"), [(1.0, "1.00x"), (12.34, "12.3x"), (1234.5, "1234x")])
def test_ratios_are_written_with_as_many_digits_as_say_something(value, text):
    assert format_ratio(value) == text
