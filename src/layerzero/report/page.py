"""The report as one HTML page: no script, loads nothing, for a phone or a desk, light or dark."""

from __future__ import annotations

from string import ascii_uppercase

from .formats import format_plural, format_ratio, format_time
from .overview import CallKind, KernelTiming, Overview
from .roofline import plot, plotted
from .style import STEPS, heat_step
from .templating import FOLDER, render_template


def render(overview: Overview) -> str:
    """Return the whole page; ConfigError if Jinja2 is not installed."""
    facts = {**overview.facts, "Place": overview.place, "Made": overview.created_at}
    if overview.measured_at:
        facts["Measured"] = overview.measured_at
    kinds = plotted(overview.kinds)
    letters = {op: _letter(i) for i, op in enumerate(dict.fromkeys(kind.op for kind in kinds))}
    svg = plot(kinds, overview.rates, letters) if kinds and overview.rates is not None else ""
    context = {"overview": overview, "page_facts": facts, "heat_steps": STEPS, "plotted": kinds,
               "letters": letters, "roofline_svg": svg}
    return render_template(FOLDER / "report.html", context, {
        "bar_width": _bar_width, "heat_step": heat_step,
        "notes": _notes, "verdict": _verdict})


def _letter(i: int) -> str:
    return (ascii_uppercase[i] if i < 26
            else f"{ascii_uppercase[i // 26 - 1]}{ascii_uppercase[i % 26]}")


def _bar_width(candidate: KernelTiming, kind: CallKind) -> str:
    return f"{100 * candidate.us / kind.candidates[-1].us:.2f}"


def _notes(candidate: KernelTiming, kind: CallKind) -> str:
    notes = [format_plural(candidate.samples, "sample")]
    if not candidate.first_look:               # a few samples say nothing of their spread
        notes = [f"spread {candidate.spread:.0%}", f"trust {candidate.trust:.2f}", *notes]
    if candidate.compile_us:
        notes.append(f"compiled in {format_time(candidate.compile_us)} before")
    if candidate.sizes != kind.sizes:
        notes.append(f"timed at {candidate.sizes}")
    return ", ".join(notes)


def _verdict(kind: CallKind) -> str:
    parts = [f"Fastest: {kind.winner.kernel}"]
    if kind.tied:
        parts.append(f"a tie with {', '.join(c.kernel for c in kind.tied)}")
    if kind.gain is not None and kind.baseline is not None and kind.baseline is not kind.winner:
        parts.append(f"{format_ratio(kind.gain)} over {kind.baseline.kernel}")
    if kind.roofline is not None:
        parts.append(f"{kind.roofline:.0%} of the roofline")
    return ", ".join(parts)
