"""The figures that README.md and docs/ quote, read from benchmarks/results: tables and one chart.

Nothing here is typed: a run that replaces a file there changes what these functions return, and
`docs/generate.py --check` names the pages that must follow.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
OURS = ("cuda", "triton", "native")
FAMILIES = {                                     # kernels by prefix, with the colour in the chart
    "LayerZero's kernels": (OURS, "#1d4ed8"), "torch's choice": ((), "#6b7280"),
    "FlashAttention 4": (("flash_attn",), "#d97706"), "FlashInfer": (("flashinfer",), "#15803d"),
    "Liger": (("liger",), "#be185d"), "QuACK": (("quack",), "#7c3aed"),
}
CASES = {                                        # what gpu.py calls a row -> what a reader would
    "attention hq=32 hkv=8 d=128 b=1 sq=1 sk=4096": "decode, 1 sequence, 4096 keys",
    "attention hq=32 hkv=8 d=128 causal=True align=bottom_right b=4 sq=8 sk=8192":
        "verify 8 tokens of 4 sequences, 8192 keys",
    "paged_attention context=512..3984 (32) hq=32 hkv=8 d=128": "decode, 32 sequences in pages",
    "attention hq=32 hkv=8 d=128 b=1 sq=2048 sk=2048 causal=True": "prefill, 2048 tokens",
    "attention hq=32 hkv=8 d=128 b=8 sq=512 sk=512 causal=True": "prefill, 8 x 512 tokens",
    "add_rms_norm rows=1 hidden=4096": "add and RMSNorm, 1 x 4096",
    "rope hq=32 hkv=8 d=128 b=1 s=4096": "RoPE, 4096 tokens",
    "sample batch=64 vocab=128256 logprobs=False top_p=0.9": "top-p, 64 x 128256 logits",
}


@cache
def load(name: str) -> Any:
    path = RESULTS / f"{name}.json"
    if not path.exists():
        raise SystemExit(f"{path.name} must be in benchmarks/results, and is not; "
                         "benchmarks/README.md says which script writes it")
    return json.loads(path.read_text("utf-8"))


def table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    lines = ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |"
             for line in (tuple(head), *rows)]
    lines.insert(1, "|" + "---|" * lines[0].count(" | ") + "---|")
    return "\n".join(lines) + "\n"


def us(value: float) -> str:
    """Microseconds as one would say them: three digits, none of them noise."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def prefix(kernel: str) -> str:
    return kernel.partition(".")[0]


def is_ours(kernel: str) -> bool:
    return prefix(kernel) in OURS or kernel in ("as given", "expanded", "lz.attention")


# The chart

def family_times(row: dict[str, Any]) -> dict[str, tuple[str, float]]:
    """The fastest kernel of each family in a row of gpu.py, and its time."""
    times = {kernel: time for kernel, time in row["candidates"].items() if time}
    torch_kernel = row["default"] if row["default"] in times else min(
        (k for k in times if prefix(k) == "torch"), key=times.__getitem__, default="")
    fastest: dict[str, tuple[str, float]] = {}
    for family, (prefixes, _) in FAMILIES.items():
        kernels = [k for k in times if prefix(k) in prefixes] or (
            [torch_kernel] if torch_kernel and not prefixes else [])
        if kernels:
            best = min(kernels, key=times.__getitem__)
            fastest[family] = best, times[best]
    return fastest


def chart_rows() -> list[tuple[str, str, float, dict[str, float]]]:
    """Title, chosen family, its time, and every family's time over the fastest, for each case."""
    rows = {f"{row['op']} {row['sizes']}": row for row in load("gpu-h200")["rows"]}
    found = []
    for name, title in CASES.items():
        if name not in rows or not rows[name]["chosen_us"]:
            continue
        times = family_times(rows[name])
        chosen = next((family for family, (prefixes, _) in FAMILIES.items()
                       if prefix(rows[name]["chosen"]) in prefixes), "torch's choice")
        floor = min(time for _, time in times.values())
        found.append((title, chosen, rows[name]["chosen_us"],
                      {family: time / floor for family, (_, time) in times.items()}))
    if len(found) < 5:
        raise SystemExit("gpu-h200.json must have at least 5 of the rows in docs/figures.py CASES, "
                         f"got {len(found)}; name the rows of benchmarks/gpu.py anew there")
    return found


WIDTH, LEFT, STEP, TOP = 680, 20, 56, 104
SPAN = 5                                         # octaves on the axis: 1x to 32x


def chart() -> str:
    """An SVG: a row for each case, a dot for each family, a ring around what was chosen."""
    rows = chart_rows()
    height = TOP + STEP * len(rows) + 54
    environment = load("gpu-h200")["environment"]

    def x(ratio: float) -> float:
        return LEFT + 8 + min(math.log2(max(ratio, 1.0)), SPAN) * (WIDTH - 2 * LEFT - 30) / SPAN

    def text(left: float, top: float, said: str, extra: str = "") -> str:
        return f'<text x="{left:.0f}" y="{top:.0f}"{extra}>{escape(said)}</text>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img" font-family="system-ui, sans-serif" '
        'font-size="15" fill="#111827">',
        "<title>How many times the fastest kernel's time each library takes</title>",
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff" stroke="#d1d5db"/>',
        text(LEFT, 30, f"No library is fastest everywhere ({environment['gpu']}, bfloat16)",
             ' font-size="18" font-weight="600"')]
    for number, (family, (_, colour)) in enumerate(FAMILIES.items()):
        left, top = LEFT + 6 + number % 3 * 180, 54 + number // 3 * 22
        parts += [f'<circle cx="{left}" cy="{top - 5}" r="6" fill="{colour}"/>',
                  text(left + 12, top, family, ' font-size="14"')]
    left = LEFT + 6 + 3 * 180 - 12
    parts += [f'<circle cx="{left}" cy="49" r="9" fill="none" stroke="#111827" stroke-width="2"/>',
              text(left + 14, 54, "chosen by lz", ' font-size="14"')]
    bottom = TOP + STEP * len(rows)
    for octave in range(SPAN + 1):
        at = x(2 ** octave)
        parts += [f'<line x1="{at:.1f}" y1="{TOP - 8}" x2="{at:.1f}" y2="{bottom}" '
                  'stroke="#e5e7eb"/>',
                  text(at, bottom + 20, f"{2 ** octave}x", ' font-size="14" text-anchor="middle"')]
    parts.append(text(WIDTH / 2, bottom + 42, "time over the fastest of the row, after lz tune",
                      ' font-size="14" text-anchor="middle"'))
    for number, (title, chosen, time, ratios) in enumerate(rows):
        top = TOP + STEP * number
        parts += [text(LEFT, top + 10, title, ' font-weight="600"'),
                  text(WIDTH - LEFT, top + 10, f"{chosen}, {us(time)} us", ' text-anchor="end"')]
        placed: list[tuple[float, float]] = []
        for family, ratio in sorted(ratios.items(), key=lambda item: (item[0] != chosen, item[1])):
            at, level = x(ratio), top + 25
            while any(abs(at - a) < 12 and level == b for a, b in placed):
                level += 9                       # below a dot of nearly the same time
            placed.append((at, level))
            parts.append(f'<circle cx="{at:.1f}" cy="{level}" r="5" fill="{FAMILIES[family][1]}"/>')
            if family == chosen:
                parts.append(f'<circle cx="{at:.1f}" cy="{level}" r="8" fill="none" '
                             'stroke="#111827" stroke-width="2"/>')
    return "\n".join([*parts, "</svg>", ""])


# Tables

def goals() -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in load("gpu-h200")["goals"]}


SAID = {"torch.sdpa_cudnn": "cuDNN", "torch.sdpa": "SDPA", "torch.linear": "`F.linear`",
        "torch.sample_sort": "sorting", "FlashInfer's own sampler": "FlashInfer",
        "flash_attn": "FlashAttention 4", "flashinfer": "FlashInfer", "liger": "Liger",
        "quack": "QuACK", "torch": "torch"}


def said(kernel: str) -> str:
    return SAID.get(kernel) or SAID.get(prefix(kernel)) or kernel


def best_other(row: dict[str, Any]) -> tuple[str, float]:
    others = {kernel: time for kernel, time in row["us"].items()
              if not is_ours(kernel) and " / " not in kernel}      # "F.linear / 2.8" is a goal
    kernel = min(others, key=others.__getitem__)
    return said(kernel), others[kernel]


def layer() -> dict[str, float]:
    return {name: row["us"] for name, row in load("accelerated-h200")["rows"].items()}


def results() -> str:
    """The table of README.md: the fastest other way that ran beside ours."""
    rows: list[tuple[str, str, str]] = []
    times = layer()
    rows.append(("one Llama-3-8B layer, a decode step at 4096 tokens, H200",
                 f"**{us(times['lz.accelerate'])} us**",
                 f"{us(times['torch.compile, static cache'])} `torch.compile` with a static cache, "
                 f"{us(times['transformers'])} stock transformers"))
    for name, title in (("decode B1 K1024", "decode attention, 1024 keys, H200"),
                        ("decode B32 512-4096, pages of 16",
                         "decode attention, 32 ragged sequences in pages, H200"),
                        ("top-p 64x128256", "top-p over 64 x 128256 logits, H200")):
        if (row := goals().get(name)) is not None:
            other, time = best_other(row)
            rows.append((title, f"**{us(row['ours'])} us**", f"{us(time)} {other}"))
    xeon = load("accelerated-cpu-2-cores")["one_thread"]["rows"]
    rows.append(("SmolLM2-135M in bfloat16, one core of a Xeon",
                 f"**{xeon['lz.accelerate']['tokens_per_s']:.1f} tokens/s**",
                 f"{xeon['transformers']['tokens_per_s']:.1f} stock transformers"))
    arm = load("cpu-half-neoverse-n1-2-cores")["model"]["rows"]
    rows.append(("the same, one core of a Neoverse-N1 (no bfloat16 arithmetic)",
                 f"**{arm['lz.accelerate, bfloat16']['tokens_per_s']:.1f} tokens/s**",
                 f"{arm['transformers, bfloat16']['tokens_per_s']:.1f} stock transformers; "
                 f"{arm['transformers, float32']['tokens_per_s']:.1f} in float32"))
    return table(("measured", "LayerZero", "the fastest other way in the same run"), rows)


def libraries() -> str:
    """Every case of gpu.py --goals with a column for each library."""
    columns: dict[str, Callable[[str], bool]] = {
        "lz's own": is_ours,
        "torch": lambda k: prefix(k) == "torch" and "cudnn" not in k,
        "cuDNN": lambda k: k == "torch.sdpa_cudnn",
        "FlashInfer": lambda k: prefix(k) == "flashinfer" or k.startswith("FlashInfer"),
        "FA4": lambda k: prefix(k) == "flash_attn", "Liger": lambda k: prefix(k) == "liger",
        "QuACK": lambda k: prefix(k) == "quack"}
    rows = []
    for row in load("gpu-h200")["goals"]:
        times = {k: t for k, t in row["us"].items() if " / " not in k}
        if len({prefix(k) for k in times}) < 2 or "expanded" in row["name"]:
            continue
        best = min(times.values())
        cells = []
        for wanted in columns.values():
            found = [time for kernel, time in times.items() if wanted(kernel)]
            said_as = us(min(found)) if found else ""
            cells.append(f"**{said_as}**" if found and min(found) == best else said_as)
        if sum(map(bool, cells)) > 1:
            rows.append((row["name"], *cells))
    return table(("microseconds", *columns), rows)


def stock() -> str:
    rows = [(row["name"], us(row["stock_us"]), us(row["lz_us"]), f"{row['ratio']:.1f}x",
             ", ".join(f"`{k}`" if "." in k and " " not in k else k for k in row["served"]))
            for row in load("gpu-h200")["stock"]]
    summary = load("gpu-h200")["summary"]
    return table(("operation", "transformers, us", "lz, us", "gain", "served by"), rows) + (
        f"\nGeometric mean of those that count: {summary['gain_over_stock']:.1f}x. Over all "
        f"{summary['shapes']} kinds of call, against torch's own default: "
        f"{summary['gain_over_default']:.2f}x; {len(summary['behind_default'])} behind it; regret "
        f"(chosen against the fastest) median {summary['median_regret']:.1%}, 95th percentile "
        f"{summary['p95_regret']:.1%}.\n")


def untuned() -> str:
    summary = load("untuned-h200")["summary"]
    modes = {"eager": "eager", "captured": "captured in a CUDA graph"}
    text = table(("", *modes.values()), [
        ("calls", *(summary[m]["rows"] for m in modes)),
        ("geometric mean of torch's time over lz's",
         *(f"{summary[m]['geometric_mean']:.2f}" for m in modes)),
        ("more than 3 % behind torch", *(len(summary[m]["behind"]) for m in modes)),
        ("worst", *(f"{summary[m]['worst']:.2f}" for m in modes))])
    behind: dict[str, list[float]] = {}
    for line in summary["eager"]["behind"]:
        behind.setdefault(line.split()[0], []).append(float(line.rpartition(": ")[2]))
    named = ", ".join(f"`{op}` " + " / ".join(f"{ratio:.2f}" for ratio in sorted(ratios))
                      for op, ratios in behind.items())
    cpu, drawn = (load(f"untuned-{name}neoverse-n1-1-thread")["summary"]["eager"]
                  for name in ("", "drawn-"))
    return text + (
        f"\nBehind, eagerly: {named or 'none'}.\n\nOn one core of a Neoverse-N1, in float32: "
        f"{cpu['geometric_mean']:.2f} over {cpu['rows']} calls, worst {cpu['worst']:.2f}; "
        f"{drawn['geometric_mean']:.2f} over {drawn['rows']} drawn at random, worst "
        f"{drawn['worst']:.2f}.\n")


def cost() -> str:
    """What layers add to the call they end in, from dispatch.py."""
    names = {"lz.attention, native": "`lz.attention`, compiled call path",
             "lz.attention, pure Python": "`lz.attention`, pure Python",
             "diffusers dispatch_attention_fn": "diffusers' `dispatch_attention_fn`",
             "transformers attention interface": "transformers' attention interface",
             "with sdpa_kernel([...]) around F.sdpa": "`with sdpa_kernel([...])` around each call",
             "flashinfer-bench apply, hit": "flashinfer-bench's `apply`, a hit"}
    over = {row["name"]: row["over"] for row in
            load("dispatch-xeon-2-cores")["devices"]["cpu"]["rows"]}
    return table(("microseconds over its own target", "median", "10th to 90th percentile"), [
        (said_as, f"{over[name]['median'] / 1000:.1f}",
         f"{over[name]['p10'] / 1000:.1f} to {over[name]['p90'] / 1000:.1f}")
        for name, said_as in names.items() if over.get(name)])


def cpu() -> str:
    xeon, arm = load("accelerated-cpu-2-cores"), load("cpu-half-neoverse-n1-2-cores")["model"]
    rows = [(f"Xeon with AMX, {number} thread{'s' * (number > 1)}, bfloat16",
             f"{xeon[key]['rows']['lz.accelerate']['tokens_per_s']:.1f}",
             f"{xeon[key]['rows']['transformers']['tokens_per_s']:.1f}")
            for number, key in ((1, "one_thread"), (2, "two_threads"))]
    rows += [(f"Neoverse-N1, 1 thread, {dtype}",
              f"{arm['rows'][f'lz.accelerate, {dtype}']['tokens_per_s']:.1f}",
              f"{arm['rows'][f'transformers, {dtype}']['tokens_per_s']:.1f}")
             for dtype in ("float32", "bfloat16")]
    regret = load("regret-cpu-2-cores")
    head = "SmolLM2-135M, tokens a second", "`lz.accelerate`", "stock transformers"
    return table(head, rows) + (
        f"\nSingle calls on a Xeon, after `lz tune`: {regret['gain_over_torch']:.2f} times as fast "
        f"as torch's own choice over {regret['calls']} kinds of call (geometric mean), "
        f"{regret['worse_than_torch']:.1%} of them slower than it.\n")
