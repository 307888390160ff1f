"""The report as one HTML page: no script, nothing loaded from anywhere, for a phone or a desk, light or dark."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from string import ascii_uppercase

from .markup import Content, Html, breakable, el, join
from .overview import Candidate, Gain, Kind, Overview, Refused, Regret, Replayed, gain_of, sizes_of
from .roofline import achieved, intensity, plot, plotted, rate_text
from .style import STEPS, step_of, style

NOTHING = join("Nothing is measured yet: run ", el("code", "lz tune"), ", then ", el("code", "lz report"), " again.")
WORST = 25                                     # rows of the regret table
SECTIONS = (("winners", "Winners"), ("gain", "Gain over torch"), ("roofline", "Roofline"), ("regret", "Regret"),
            ("rejected", "Rejected kernels"))
WIDTHS = {"kernel": "kernel", "chosen": "kernel", "best": "kernel", **dict.fromkeys(
    ("why", "what to do", "note", "call", "winner for", "fastest kernels (kinds)"), "wide")}
# The page may load nothing at all, whatever the names and notes of a plugin hold.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


def render(found: Overview) -> str:
    """The whole page."""
    head = el(
        "head", el("meta", charset="utf-8"), el("meta", http_equiv="Content-Security-Policy", content=POLICY),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"), el("link", rel="icon", href="data:,"),
        el("title", f"LayerZero report: {found.device}"), el("style", Html(style())))
    bodies = {"winners": _winners(found), "gain": _gains(found), "roofline": _roofline(found),
              "regret": _regret(found), "rejected": _rejected(found.refused)}
    body = el("body", _header(found), el("main", *(
        el("section", el("h2", title, id=name), bodies[name]) for name, title in SECTIONS)),
        el("footer", "Made by ", el("code", "lz report"), ". A kind of call is its dtype and switches and its sizes in "
           "buckets; ", el("code", "lz explain"), " tells the whole decision for one call."))
    return f"<!DOCTYPE html>\n{el('html', head, body, lang='en')}\n"


# header

def _header(found: Overview) -> Html:
    facts = {**found.facts, "Place": found.place, "Made": found.made_at}
    if found.measured:
        facts["Measured"] = found.measured
    left_out = el("p", f"{found.elsewhere} measurements of other devices or numbers of threads are not shown.",
                  class_="muted") if found.elsewhere else None
    return el("header", el("h1", "LayerZero report"), el("p", found.device),
              el("dl", *(join(el("dt", name), el("dd", text)) for name, text in facts.items()), class_="facts"),
              _tiles(found), left_out,
              el("nav", *(el("a", title, href=f"#{name}") for name, title in SECTIONS), aria_label="Sections"))


def _tiles(found: Overview) -> Html:
    gain = gain_of(found.kinds)
    tiles = [(str(found.measurements), "measurements"), (str(len(found.kinds)), "kinds of call"),
             (f"{len(found.by_op())} of {found.ops}", "operations measured"),
             (ratio_text(gain.mean) if gain else "-", "over torch, geometric mean"),
             (f"{found.regret.median:.1%}" if found.regret else "-", "median regret"),
             (str(len(found.refused)), "kernels rejected here")]
    return el("div", *(el("div", el("b", number), el("span", what), class_="tile") for number, what in tiles),
              class_="tiles")


# winners

def _winners(found: Overview) -> Html:
    if not found.kinds:
        return _empty(NOTHING)
    limits = [f"★ = up to {STEPS[0]:g}x", *(f"up to {limit:g}x" for limit in STEPS[1:]), f"over {STEPS[-1]:g}x"]
    legend = [el("li", text, class_=f"h{i}") for i, text in enumerate(limits)]
    return join(
        el("p", "Each row is a kind of call, each column a kernel. The number is its median time relative to the "
           "fastest of the row, which has a star; = is a tie with it (within 2 %), ~ a noisy measurement, - none. "
           "Over 100 % of the roofline: the data came from a cache, not from memory."),
        el("ul", *legend, class_="legend", aria_label="Steps of the heat map"),
        *(_op(op, kinds) for op, kinds in found.by_op().items()))


def _op(op: str, kinds: Sequence[Kind]) -> Html:
    wins = Counter(kind.winner.kernel for kind in kinds)
    names = {c.kernel for kind in kinds for c in kind.candidates}
    columns = sorted(names, key=lambda name: (-wins[name], name))
    shared = _shared_sizes(kinds)
    head = el("tr", el("th", "kind of call", scope="col"),
              *(el("th", el("span", breakable(name), class_="name"), scope="col") for name in columns),
              *(el("th", text, scope="col", class_="num") for text in ("over torch", "of roofline")))
    rows = [el("tr", el("th", _kind_name(kind, shared), _fastest(kind), scope="row"),
               *(_cell(kind, name) for name in columns), el("td", _gain_text(kind), class_="num"),
               el("td", _share(kind.roofline), class_="num")) for kind in kinds]
    constant = el("p", "Everywhere: ", el("code", " ".join(f"{n}={v}" for n, v in shared.items())),
                  class_="muted") if shared else None
    return join(el("h3", op, id=f"op-{op}"), constant,
                _scroll(f"Heat map of {op}", el("table", el("thead", head), el("tbody", *rows), class_="heat")),
                el("details", el("summary", f"All times of {op}: {_count(len(kinds), 'kind')} of call"),
                   *map(_candidates, kinds)))


def _shared_sizes(kinds: Sequence[Kind]) -> dict[str, str]:
    """Sizes that are the same in every row: said once."""
    if len(kinds) < 2:
        return {}
    rows = [sizes_of(kind.sizes) for kind in kinds]
    return {n: v for n, v in rows[0].items() if all(row.get(n) == v for row in rows)}


def _kind_name(kind: Kind, shared: Iterable[str] = ()) -> Html:
    own = " ".join(f"{n}={v}" for n, v in sizes_of(kind.sizes).items() if n not in shared)
    return join(breakable(kind.family), el("span", own, class_="sizes"))


def _fastest(kind: Kind) -> Html:
    return el("span", "★ ", breakable(kind.winner.kernel), " ", time_text(kind.winner.us), class_="fastest")


def _cell(kind: Kind, kernel: str) -> Html:
    ratio = kind.ratio(kernel)
    if ratio is None:
        return el("td", "-", class_="none", title=f"{kernel}: not measured")
    candidate = next(c for c in kind.candidates if c.kernel == kernel)
    best = candidate is kind.winner
    mark = "★ " if best else "= " if candidate in kind.tied else ""
    return el("td", mark, _number(ratio), "~" if candidate.noisy else None,
              class_=f"cell h{step_of(ratio)}{' best' if best else ''}",
              title=f"{kernel}: {time_text(candidate.us)}, spread {candidate.spread:.0%}")


def _candidates(kind: Kind) -> Html:
    winner, slowest = kind.winner, kind.candidates[-1].us
    told = [f"Fastest: {winner.kernel}"]
    if kind.tied:
        told.append(f"a tie with {', '.join(c.kernel for c in kind.tied)}")
    if kind.gain is not None and kind.baseline is not None and kind.baseline is not winner:
        told.append(f"{ratio_text(kind.gain)} over {kind.baseline.kernel}")
    if kind.roofline is not None:
        told.append(f"{kind.roofline:.0%} of the roofline")
    return el("div", el("p", _kind_name(kind)), el("p", ", ".join(told), "."),
              el("ol", *(_bar(c, kind, slowest) for c in kind.candidates), class_="bars"), class_="kind")


def _bar(c: Candidate, kind: Kind, slowest: float) -> Html:
    best = c is kind.winner
    more = [_count(c.samples, "sample")]
    if not c.first_look:                       # a few samples say nothing of their spread
        more = [f"spread {c.spread:.0%}", f"trust {c.trust:.2f}", *more]
    if c.compile_us:
        more.append(f"compiled in {time_text(c.compile_us)} before")
    if c.sizes != kind.sizes:
        more.append(f"timed at {c.sizes}")
    tags = [el("span", text, class_="tag") for text, given in (
        ("torch's own", c.baseline), ("noisy", c.noisy), ("first look only", c.first_look)) if given]
    return el("li", el("span", "★ " if best else None, el("span", breakable(c.kernel), class_="name"), " ",
                       join(*tags, between=" ")),
              el("span", f"{time_text(c.us)}", class_="time"),
              el("span", el("span", class_="bar best" if best else "bar", style=f"width:{100 * c.us / slowest:.2f}%"),
                 class_="track"),
              el("span", ", ".join(more), class_="more"))


# gain

def _gains(found: Overview) -> Html:
    if not found.kinds:
        return _empty(NOTHING)
    rows = []
    for op, kinds in found.by_op().items():
        wins = Counter(kind.winner.kernel for kind in kinds).most_common()
        rows.append((el("a", op, href=f"#op-{op}"), *_gain_cells(gain_of(kinds), len(kinds)),
                     ", ".join(f"{kernel} ({n})" for kernel, n in wins)))
    rows.append((el("b", "all"), *_gain_cells(gain_of(found.kinds), len(found.kinds)), ""))
    numbers = ("geometric mean", "lowest", "highest", "compared")
    return join(
        el("p", "How many times faster the fastest kernel is than the one torch itself would run. 1.00x where torch's "
           "own is the fastest; kinds where it was not timed cannot be compared."),
        _table("Gain per operation", ("operation", *numbers, "fastest kernels (kinds)"), rows, numbers))


def _gain_cells(gain: Gain | None, kinds: int) -> tuple[str, ...]:
    if gain is None:
        return "-", "-", "-", f"0 of {_count(kinds, 'kind')}"
    numbers = (ratio_text(value) for value in (gain.mean, gain.low, gain.high))
    return *numbers, f"{gain.kinds} of {_count(kinds, 'kind')}"


# roofline

def _roofline(found: Overview) -> Html:
    if not found.kinds:
        return _empty(NOTHING)
    if found.rates is None:
        return _empty(join("The ceilings of this device are not measured: ", el("code", "lz tune"), " does that."))
    kinds = plotted(found.kinds)
    ceilings = el("p", "Measured here at best: ", rate_text(found.rates.flops_per_us * 1e6, "FLOP"), " in a matmul, ",
                  rate_text(found.rates.bytes_per_us * 1e6, "B"), " from memory. A point above the slope read its data "
                  "from a cache. The compute ceiling is that of the fastest dtype.")
    if not kinds:
        return join(ceilings, _empty(join("No measured kind of call has both work and bytes to show.")))
    ops = list(dict.fromkeys(kind.op for kind in kinds))
    letters = {op: _letter(i) for i, op in enumerate(ops)}
    left = len(found.kinds) - len(kinds)
    rows = [(join(el("b", letters[kind.op]), " ", kind.op, " ", _kind_name(kind)),
             el("span", breakable(kind.winner.kernel), class_="name"), f"{intensity(kind):.3g}",
             rate_text(achieved(kind), "FLOP"), rate_text(kind.bytes / kind.winner.us * 1e6, "B"),
             _share(kind.roofline)) for kind in kinds]
    numbers = ("FLOP/byte", "work", "memory", "of roofline")
    table = _table("Points of the roofline plot", ("winner for", "kernel", *numbers), rows, numbers)
    return join(
        ceilings, plot(kinds, found.rates, letters),
        el("p", "Each point is the winner of one kind of call: ",
           join(*(join(el("b", letter), " ", op) for op, letter in letters.items()), between=", "), "."),
        el("p", f"Not shown: {_count(left, 'kind')} of call with gradients, without FLOPs or without bytes.",
           class_="muted") if left else None,
        el("details", el("summary", f"The {_count(len(kinds), 'point')} in numbers"), table))


def _letter(i: int) -> str:
    return ascii_uppercase[i] if i < 26 else f"{ascii_uppercase[i // 26 - 1]}{ascii_uppercase[i % 26]}"


# regret

def _regret(found: Overview) -> Html:
    regret = found.regret
    if regret is None:
        return _empty(join("No regret was given: run ", el("code", "lz regret --json > regret.json"), ", then ",
                           el("code", "lz report --regret regret.json"), "."))
    other = el("p", f"It was measured at another place, {regret.place}.", class_="warn") \
        if regret.place != found.place else None
    numbers = (("median regret", f"{regret.median:.1%}"), ("95th percentile", f"{regret.p95:.1%}"),
               ("time lost in all", f"{regret.lost:.1%}"), ("served faster by torch", f"{regret.worse:.1%}"),
               ("over torch, geometric mean", ratio_text(regret.gain)),
               (f"flips, {regret.flips_that_matter} between unequal kernels", f"{regret.flips} of {len(regret.rows)}"))
    tiles = el("div", *(el("div", el("b", n), el("span", what), class_="tile") for what, n in numbers), class_="tiles")
    return join(
        el("p", "What the choices cost: the time of the chosen kernel over that of the best, less one. A flip is a "
           "call whose winner is another one in the second half of the rounds."), other, tiles,
        *(el("p", f"!! {problem}", class_="warn") for problem in regret.problems), _worst(regret), _skipped(regret))


def _worst(regret: Regret) -> Html:
    if not regret.rows:
        return _empty(join("No call could be replayed."))
    shown = regret.rows[:WORST]
    title = f"The {_count(len(shown), 'call')} with the greatest regret" if len(shown) < len(regret.rows) else \
        f"All {_count(len(shown), 'call')}"
    failed = {(kernel, text) for row in regret.rows for kernel, text in row.failed.items()}
    return join(el("h3", title), _table(
        title, ("call", "regret", "chosen", "best", "over torch", "times", "flip"), map(_replayed, shown),
        numbers=("times", "regret", "over torch")),
        *(el("p", f"{kernel} failed: {text}", class_="muted") for kernel, text in sorted(failed)))


def _replayed(row: Replayed) -> tuple[Content, ...]:
    def timed(kernel: str, us: float) -> Html:
        return join(el("span", breakable(kernel), class_="name"), el("span", time_text(us), class_="sizes"))

    best = "the same" if row.best == row.chosen else timed(row.best, row.best_us)
    return (row.label, f"{row.regret:.1%}", timed(row.chosen, row.chosen_us), best,
            "-" if row.gain is None else ratio_text(row.gain), str(row.count), " then ".join(row.flip) or "no")


def _skipped(regret: Regret) -> Html | None:
    if not regret.skipped:
        return None
    return el("details", el("summary", f"{_count(len(regret.skipped), 'call')} skipped"),
              _table("Skipped calls", ("operation", "why"), regret.skipped))


# rejected

def _rejected(refused: Sequence[Refused]) -> Html:
    if not refused:
        return _empty(join("None: every kernel may serve some call on this device."))
    groups: dict[str, list[Refused]] = {}
    for r in refused:
        groups.setdefault(r.why[0].code, []).append(r)
    parts: list[Content] = [el("p", "These serve no call on this device, or none unasked. What a single call rules out "
                                    "depends on the call: ", el("code", "lz explain"), " says it.")]
    for code, members in sorted(groups.items(), key=lambda group: (-len(group[1]), group[0])):
        rows = [(el("span", breakable(r.kernel), class_="name"), "; ".join(w.message for w in r.why),
                 "; ".join(dict.fromkeys(w.advice for w in r.why if w.advice)) or "-", r.op, r.note or "-")
                for r in members]
        parts.append(el("details", el("summary", el("b", code), f" {_count(len(members), 'kernel')}"),
                        _table(f"Kernels rejected: {code}", ("kernel", "why", "what to do", "operation", "note"), rows),
                        open=""))
    return join(*parts)


# parts

def _empty(text: Html) -> Html:
    return el("p", text, class_="empty")


def _scroll(what: str, table: Html) -> Html:
    """Whatever is too wide scrolls here; the page never does. The keyboard reaches it too."""
    return el("div", table, class_="scroll", tabindex="0", role="region", aria_label=what)


def _table(what: str, columns: Sequence[str], rows: Iterable[Sequence[Content]], numbers: Sequence[str] = ()) -> Html:
    classes = ["num" if name in numbers else WIDTHS.get(name) for name in columns]
    head = el("tr", *(el("th", name, scope="col", class_="num" if name in numbers else None) for name in columns))
    body = (el("tr", *(el("td", cell, class_=kind) for cell, kind in zip(row, classes))) for row in rows)
    return _scroll(what, el("table", el("thead", head), el("tbody", *body)))


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def _gain_text(kind: Kind) -> str:
    return "-" if kind.gain is None else ratio_text(kind.gain)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}" if value >= 0.01 else f"{value:.1%}"


def time_text(us: float) -> str:
    for limit, size, unit in ((1e3, 1.0, "µs"), (1e6, 1e3, "ms")):
        if us < limit:
            return f"{us / size:.3g}\N{NO-BREAK SPACE}{unit}"
    return f"{us / 1e6:.3g}\N{NO-BREAK SPACE}s"


def ratio_text(value: float) -> str:
    return f"{_number(value)}x"


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"
