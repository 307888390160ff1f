"""Colours of the report for light and dark, and its style sheet."""

from __future__ import annotations

from collections.abc import Mapping

# The limits of the heat map's steps, as a multiple of the fastest time. One hue whose lightness
# only falls or only rises reads the same without colour vision; each cell has its number besides.
STEPS = (1.02, 1.10, 1.25, 1.5, 2.0, 4.0)
HEAT: Mapping[str, tuple[tuple[str, str], ...]] = {    # (background, text), the fastest first
    "light": (("#08519c", "#ffffff"), ("#2068ae", "#ffffff"), ("#6baed6", "#00172e"),
              ("#9ecae1", "#00172e"), ("#c6dbef", "#00172e"), ("#deebf7", "#00172e"),
              ("#f4f8fd", "#00172e")),
    "dark": (("#a6d0ff", "#00172e"), ("#7fb4f2", "#00172e"), ("#2f6aad", "#ffffff"),
             ("#25578f", "#ffffff"), ("#1d4673", "#ffffff"), ("#173657", "#ffffff"),
             ("#14293f", "#ffffff")),
}
COLOURS: Mapping[str, Mapping[str, str]] = {
    "light": {"page": "#ffffff", "card": "#f5f7f9", "text": "#1a1d21", "muted": "#57606a",
              "line": "#d3d9df", "accent": "#0b5cad", "bar": "#2068ae", "other": "#808d9a",
              "warn": "#8a4b00"},
    "dark": {"page": "#11151a", "card": "#1a2027", "text": "#e6e9ee", "muted": "#a3adb8",
             "line": "#37414c", "accent": "#7fb4f2", "bar": "#7fb4f2", "other": "#6f7c8a",
             "warn": "#f0b264"},
}


def heat_step(ratio: float) -> int:
    """Return the heat map step, 0 for the fastest, of a time relative to the fastest."""
    return next((i for i, limit in enumerate(STEPS) if ratio <= limit), len(STEPS))


def style_sheet() -> str:
    dark = "".join(f"  {line}\n" for line in _variables("dark").splitlines())
    heat = "\n".join(f".h{i} {{ background: var(--h{i}); color: var(--t{i}); }}"
                     for i in range(len(STEPS) + 1))
    return (f"{_variables('light')}\n@media (prefers-color-scheme: dark) "
            f"{{\n{dark}}}\n{_RULES}\n{heat}\n")


def _variables(scheme: str) -> str:
    lines = [f"--{name}: {value};" for name, value in COLOURS[scheme].items()]
    lines += [f"--h{i}: {back}; --t{i}: {text};" for i, (back, text) in enumerate(HEAT[scheme])]
    return ":root { " + " ".join(lines) + " }"


_RULES = """
:root { color-scheme: light dark; }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0 auto; max-width: 76rem; padding: 1rem; background: var(--page); color: var(--text);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.2; margin: 0 0 .25rem; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; padding-top: .5rem; border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.5rem 0 .25rem; }
p { margin: .4rem 0; max-width: 46rem; }
a { color: var(--accent); }
code, .name, .sizes { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: .85em; }
.headline { font-size: 1.25rem; font-weight: 600; line-height: 1.35; margin: .75rem 0; }
.muted, caption { color: var(--muted); font-size: .875rem; }
.warn { color: var(--warn); }
nav { display: flex; flex-wrap: wrap; gap: .25rem 1rem; margin: .75rem 0; }
dl.facts { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: .1rem .75rem; margin: .75rem 0;
  font-size: .875rem; }
dl.facts dt { color: var(--muted); }
dl.facts dd { margin: 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .5rem; margin: 1rem 0; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: .5rem .75rem; }
.tile b { display: block; font-size: 1.35rem; line-height: 1.3; }
.tile span { color: var(--muted); font-size: .8125rem; }
.empty { background: var(--card); border: 1px dashed var(--line); border-radius: .5rem; padding: .75rem 1rem; }
.scroll { overflow-x: auto; max-width: 100%; border: 1px solid var(--line); border-radius: .375rem; margin: .5rem 0; }
.scroll:focus-visible { outline: 2px solid var(--accent); }
table { border-collapse: collapse; width: 100%; font-size: .875rem; overflow-wrap: normal; }
th, td { padding: .3rem .55rem; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
tr:last-child > * { border-bottom: 0; }
thead th { background: var(--card); font-weight: 600; vertical-align: bottom; }
th.num, td.num { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
td.wide { min-width: 7rem; overflow-wrap: anywhere; }
td.op { overflow-wrap: anywhere; }
td.kernel { min-width: 6rem; overflow-wrap: anywhere; }
td.rank { color: var(--muted); text-align: right; padding-right: 0; }
tr.sum td { font-weight: 600; }
ol.next { padding-left: 1.5rem; }
ol.next li { margin: .75rem 0; }
pre { margin: 0; padding: .5rem .75rem; background: var(--card); border: 1px solid var(--line);
  border-radius: .375rem; white-space: pre-wrap; }
pre code { user-select: all; }
table.heat { width: auto; min-width: 100%; }
table.heat th[scope=row] { position: sticky; left: 0; background: var(--page); font-weight: 400; min-width: 10rem;
  max-width: 48vw; border-right: 1px solid var(--line); overflow-wrap: anywhere; }
table.heat thead th:first-child { position: sticky; left: 0; border-right: 1px solid var(--line); }
table.heat thead th { max-width: 9rem; min-width: 4.75rem; overflow-wrap: anywhere; }
td.cell { text-align: center; white-space: nowrap; font-variant-numeric: tabular-nums; border: 1px solid var(--page); }
td.best { font-weight: 700; }
td.none { text-align: center; color: var(--muted); }
.fastest { display: block; font-size: .8125rem; font-weight: 600; }
.fastest .name { font-size: .95em; }
.sizes { display: block; color: var(--muted); font-size: .75rem; line-height: 1.35; }
.legend { display: flex; flex-wrap: wrap; gap: .25rem; font-size: .8125rem; margin: .5rem 0; padding: 0;
  list-style: none; }
.legend li { padding: .1rem .5rem; border: 1px solid var(--line); border-radius: .25rem; }
details { margin: .5rem 0; }
summary { cursor: pointer; padding: .35rem 0; }
.kind { margin: .5rem 0 1rem; padding-left: .75rem; border-left: 3px solid var(--line); }
.kind p { font-size: .875rem; }
ol.bars { list-style: none; margin: .25rem 0; padding: 0; }
ol.bars li { display: grid; grid-template-columns: minmax(0, 1fr) max-content; gap: 0 .75rem; margin: .35rem 0;
  font-size: .875rem; }
.track { grid-column: 1 / -1; height: .5rem; background: var(--card); border-radius: .25rem; }
.bar { display: block; height: 100%; min-width: 2px; border-radius: .25rem; background: var(--other); }
.bar.best { background: var(--bar); }
.tag { border: 1px solid var(--line); border-radius: .25rem; padding: 0 .3rem; font-size: .75rem; color: var(--muted); }
.time { font-variant-numeric: tabular-nums; text-align: right; }
.more { grid-column: 1 / -1; color: var(--muted); font-size: .75rem; }
svg { display: block; width: 100%; max-width: 38rem; height: auto; }
svg text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: var(--text); }
svg .axis, svg .grid { stroke: var(--line); stroke-width: 1; fill: none; }
svg .roof { stroke: var(--text); stroke-width: 2; fill: none; }
svg .tick { fill: var(--muted); }
svg .halo { paint-order: stroke; stroke: var(--page); stroke-width: 4px; }
svg circle { fill: var(--bar); fill-opacity: .85; stroke: var(--page); stroke-width: 1; }
svg .letter { font-size: 12px; font-weight: 700; text-anchor: middle; pointer-events: none; }
svg .leader { stroke: var(--muted); stroke-width: 1; }
svg .dashed { stroke-dasharray: 6 4; }
svg .mark { stroke: var(--muted); stroke-width: 1; stroke-dasharray: 2 3; }
svg .series { fill: none; stroke: var(--bar); stroke-width: 2.5; }
svg .series.torch { stroke: var(--other); }
svg circle.torch { fill: var(--other); }
svg .end { font-weight: 600; }
footer { margin: 3rem 0 1rem; color: var(--muted); font-size: .8125rem; }
.opt { display: none; }
@media (min-width: 48rem) {
  span.opt { display: inline; }
  td.opt, th.opt { display: table-cell; }
  ul.opt { display: flex; }
  .narrow { display: none; }
  td.wide { min-width: 14rem; }
  td.kernel { min-width: 8.5rem; }
  ol.bars li { grid-template-columns: 18rem minmax(6rem, 1fr) 7rem; align-items: center; }
  table.heat th[scope=row] { min-width: 16rem; }
  .track { grid-column: 2; grid-row: 1; }
  .time { grid-column: 3; grid-row: 1; }
}
""".strip()
