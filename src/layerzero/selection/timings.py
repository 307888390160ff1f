"""The times that candidates are ranked by: measured here, shipped, or those of neighbours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..perf.record import CAPTURED, EAGER, Kind, PerfView, kind_of, mode_of
from ..spec.kernel import Kernel
from ..spec.op import Op
from .score import Timing

if TYPE_CHECKING:
    from .engine import SelectionContext

LONG_CALL_US = 200.0   # of torch's own kernel on a GPU; launching takes 5 to 100 on the host


class CandidateTimings(NamedTuple):
    """Times of the candidates, all from one source: those of two machines are not compared."""

    by_kernel: Mapping[str, Timing] = {}
    # the title of the table, if they came with the package
    shipped: str = ""
    note: str = ""                             # how they were measured, if in another mode


def _estimates(view: PerfView, default: str, ids: Sequence[str], kind: Kind,
               context: SelectionContext, roofline: float, mode: str) -> dict[str, Timing]:
    """Estimates for a kind of call that was not measured, from measured neighbours. Torch's own is
    interpolated; any other kernel keeps its ratio to torch's own there."""
    own = view.estimate(default, kind, context.place, context.rates, roofline, mode)
    if own is None:
        return {}
    near = view.near(default, kind, context.place, mode)
    ratios = ((k, view.relative(k, near)) for k in ids if k != default)
    return {default: own, **{k: own._replace(us=own.us * ratio) for k, ratio in ratios
                             if ratio is not None}}


def timings_of(op: Op, ids: Sequence[str], facts: Mapping[str, Any], context: SelectionContext,
               roofline: float, default: Kernel | None) -> CandidateTimings:
    """Returns the timings of the best source that has the default: measured here, shipped, in a
    graph where that makes no difference, neighbours."""
    if not context.perf and not context.shipped.view:
        return CandidateTimings()
    kind, mode, place = kind_of(op, facts), mode_of(facts), context.place
    views = [(view, table) for view, table in ((context.perf, ""), (context.shipped.view,
                                                                    context.shipped.title)) if view]
    times: dict[str, Timing]
    for view, table in views:
        times = {k: m for k in ids if (m := view.get(k, kind.bucket, place, mode)) is not None}
        if times and (default is None or default.id in times):
            return CandidateTimings(times, table)
    if default is not None and facts["device"] == "cuda" and mode == EAGER:
        long = _long_calls(context.perf, default.id, ids, kind, place)
        if long:
            return CandidateTimings(long, note="captured in a graph, and too long for the host to "
                                               "count")
    for view, table in views:
        if default is None:
            times = {k: e for k in ids
                     if (e := view.estimate(k, kind, place, context.rates, roofline, mode))}
        else:
            times = _estimates(view, default.id, ids, kind, context, roofline, mode)
        if times:
            return CandidateTimings(times, table)
    return CandidateTimings()


def _long_calls(view: PerfView, default: str, ids: Sequence[str], kind: Kind,
                place: str) -> dict[str, Timing]:
    """Returns the times in a graph, if torch's own kernel keeps the device busy for so long that
    launching it makes no difference; {} otherwise."""
    own = view.get(default, kind.bucket, place, CAPTURED) if view else None
    if own is None or own.median_us < LONG_CALL_US:
        return {}
    return {k: m for k in ids if (m := view.get(k, kind.bucket, place, CAPTURED)) is not None}
