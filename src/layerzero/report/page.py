"""The report as one HTML page: no script, loads nothing, for a phone or a desk, light or dark."""

from __future__ import annotations

from ..spec.display import plural
from .advice import advise
from .formats import format_ratio, format_time
from .overview import CallKind, KernelTiming, Overview
from .roofline import plot, plotted
from .style import STEPS, heat_step
from .templating import FOLDER, render_template
from .timeline import plot as plot_timeline

TOP = 10                                       # kinds of call that are numbered and listed first
EVEN = 0.005                                   # a gain closer to 1 than this is none


def render(overview: Overview) -> str:
    """Return the whole page; ConfigError if Jinja2 is not installed."""
    facts = {**overview.facts, "Place": overview.place, "Made": overview.created_at}
    if overview.measured_at:
        facts["Measured"] = overview.measured_at
    points = plotted(overview.kinds)
    numbers = {kind: i for i, kind in enumerate(overview.total.kinds[:TOP], 1)}
    roofs = overview.roofs
    svg = plot(points, roofs, numbers) if points and roofs is not None else ""
    timeline = plot_timeline(overview.history) if len(overview.history) > 1 else ""
    context = {
        "overview": overview, "total": overview.total, "page_facts": facts, "heat_steps": STEPS,
        "plotted": points, "numbers": numbers, "roofline_svg": svg, "timeline_svg": timeline,
        "advices": advise(overview), "headline": headline(overview), "top": TOP}
    return render_template(FOLDER / "report.html", context, {
        "bar_width": _bar_width, "heat_step": heat_step, "notes": _notes, "verdict": _verdict})


def headline(overview: Overview) -> tuple[str, str]:
    """Return the gain, and what it is the gain of."""
    total, compared = overview.total, overview.total.compared
    if total.gain is None:
        return ("Nothing can be compared with torch yet" if overview.kinds
                else "Nothing is measured yet"), ""
    name = overview.workload.name if overview.workload else "each measured kind of call once"
    times = f"{format_time(compared.us)} instead of {format_time(total.torch_us)}"
    if len(compared.kinds) < len(total.kinds):
        name += f" ({len(compared.kinds)} of {plural(len(total.kinds), 'kind')})"
    claim = "As fast as torch"
    if abs(total.gain - 1.0) >= EVEN:
        word, ratio = ("faster", total.gain) if total.gain > 1.0 else ("slower", 1.0 / total.gain)
        claim = f"{format_ratio(ratio)} {word} than torch"
    return claim, f"{times} for {name}"


def _bar_width(us: float, longest: float) -> str:
    return f"{100 * us / longest if longest else 0:.2f}"


def _notes(candidate: KernelTiming, kind: CallKind) -> str:
    notes = [plural(candidate.samples, "sample")]
    if not candidate.first_look:               # a few samples say nothing of their spread
        notes = [f"spread {candidate.spread:.0%}", f"trust {candidate.trust:.2f}", *notes]
    if candidate.compile_us:
        notes.append(f"compiled in {format_time(candidate.compile_us)} before")
    if candidate.sizes != kind.sizes:
        notes.append(f"timed at {candidate.sizes}")
    return ", ".join(notes)


def _verdict(kind: CallKind) -> str:
    parts = [f"Fastest: {kind.fastest.kernel}"]
    if kind.tied:
        parts.append(f"a tie with {', '.join(c.kernel for c in kind.tied)}")
    if kind.used is not kind.fastest:
        parts.append(f"{kind.used.kernel} is chosen")
    if kind.gain is not None and kind.baseline is not None and kind.baseline is not kind.used:
        parts.append(f"{format_ratio(kind.gain)} over {kind.baseline.kernel}")
    if kind.roofline is not None:
        parts.append(f"{kind.roofline:.0%} of the roof")
    return ", ".join(parts)
