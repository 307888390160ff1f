"""`lz demo`: one decoder block, three steps, two dtypes: which kernel serves each call and why, and
the gain.

The sizes are the largest that fit the machine; rows that do not fit into the time are listed as
left out.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ....models.decoder import Trace
from ....operate import inspection
from ....spec.errors import ConfigError
from ....spec.plan import Plan
from ....tuning.harness import Timings, in_turns
from ... import show
from ...calls import device_kind
from .fit import SIZES, Fit, LeftOut, ModelStep, Sizes, fit, probe
from .styles import OPS, STYLE_NOTES, STYLES, DecodeLayer

DTYPES = ("float32", "bfloat16")
TIMES_TORCH = 2.0                              # our error may be this many times torch's
MAX_SECONDS = 0.8                              # to measure one operation; the block gets twice that
MEASUREMENT_SHARE = 0.1                        # of the time of a row, for one measurement


@dataclass(frozen=True)
class ServedOp:
    """One operation of one step: its plan, its timings, and the kernels that were counted."""

    plan: Plan
    kernels: tuple[str, ...]
    timings: Timings


@dataclass(frozen=True)
class DemoRow:
    """One step in one dtype."""

    dtype: str
    step: ModelStep
    ops: dict[str, ServedOp]
    block: Timings
    torch_error: float                         # against the block in float64, relative
    lz_error: float

    @property
    def equal(self) -> bool:
        return self.lz_error <= TIMES_TORCH * max(self.torch_error,
                                                  torch.finfo(getattr(torch, self.dtype)).eps / 8)

    def to_json(self) -> dict[str, Any]:
        timed = {**{name: s.timings for name, s in self.ops.items()}, "block": self.block}
        return {
            "dtype": self.dtype, "step": self.step.name, "equal": self.equal,
            "torch_error": self.torch_error,
            "lz_error": self.lz_error,
            "ops": {name: {"served_by": list(s.kernels), "plan": s.plan.to_json()}
                    for name, s in self.ops.items()},
            "timings": {name: {
                "microseconds": {style: t.median(style) for style in STYLES},
                "rounds": len(t.rounds["lz"]),
                "gain": {style: t.gain(style, "lz").to_json() for style in STYLE_NOTES}}
                        for name, t in timed.items()}}


def demo(device: str | None, seconds: float, as_json: bool) -> int:
    kind = device_kind(device)
    if kind not in SIZES:
        if device is not None:
            raise ConfigError(f"lz demo runs on {' or '.join(SIZES)}, got {device!r}")
        kind = "cpu"
    return run_demo(kind, seconds, as_json)


def run_demo(device: str, seconds: float, as_json: bool) -> int:
    """Print the demonstration; returns the exit code, 1 if a result was not equal."""
    start = time.perf_counter()
    end = start + seconds
    diagnosis = inspection.doctor()
    # one core is left to other programs: else the threads of a product wait for the slowest
    if device == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() - 1))
    with torch.no_grad():
        paces = {dtype: probe(device, getattr(torch, dtype)) for dtype in DTYPES}
        chosen = fit(SIZES[device], paces, end - time.perf_counter())
        if not as_json:
            _introduce(diagnosis, chosen.sizes, device)
        columns = (TextColumn("{task.description:<40}", markup=False), BarColumn(),
                   TimeElapsedColumn(), TimeRemainingColumn())
        with show.progress(*columns, total=len(chosen.rows) * (len(OPS) + 1)) as update:
            rows, stopped = _measure_rows(
                chosen, device, end, lambda description: update(description=description, advance=1))
    left_out = (*chosen.left_out, *stopped)
    equal = all(row.equal for row in rows)
    if as_json:
        show.as_json({"ok": equal, "machine": diagnosis.to_json(), "device": device,
                      "sizes": dict(chosen.sizes.__dict__), "styles": STYLE_NOTES,
                      "rows": [row.to_json() for row in rows],
                      "left_out": [dict(left.__dict__) for left in left_out]})
    else:
        if rows:
            _report(rows)
        if left_out:
            show.heading(
                f"What could not be shown within {seconds:.0f} s (lz demo --seconds gives it more "
                "time)")
            for left in left_out:
                show.text(str(left))
        show.text(f"\n{time.perf_counter() - start:.0f} s in all. The same question for any call: "
                  "lz explain attention q=1x16x1x64 k=1x4x4096x64 v=1x4x4096x64")
    return 0 if equal else 1


# measuring

def _measure_rows(chosen: Fit, device: str, end: float,
                  advance: Callable[[str], None]) -> tuple[list[DemoRow], list[LeftOut]]:
    """Give each row an equal share of the time until `end`; a row that needs more is left out."""
    rows: list[DemoRow] = []
    left_out: list[LeftOut] = []
    block, exact = None, None
    for i, (dtype, step) in enumerate(chosen.rows):
        if block is None or exact is None or block.dtype is not getattr(torch, dtype):
            block = DecodeLayer(chosen.sizes, getattr(torch, dtype), device)
            exact = block.to(torch.float64)
        share = (end - time.perf_counter()) / (len(chosen.rows) - i)
        try:
            rows.append(_measure_row(block, exact, dtype, step, time.perf_counter() + share,
                                     advance))
        except _OutOfTime:
            left_out.append(LeftOut(dtype, step.name,
                                    f"its {max(share, 0.0):.1f} s were over before it was "
                                    "measured"))
    return rows, left_out


class _OutOfTime(Exception):
    pass


def _measure_row(block: DecodeLayer, exact: DecodeLayer, dtype: str, step: ModelStep,
                 deadline: float, advance: Callable[[str], None]) -> DemoRow:
    seconds = min(MAX_SECONDS, MEASUREMENT_SHARE * (deadline - time.perf_counter()))

    def timed(functions: Mapping[str, Callable[[], Any]], seconds: float) -> Timings:
        timings = in_turns(functions, seconds, block.device, deadline)
        if timings.rounds.keys() != functions.keys():
            raise _OutOfTime
        return timings

    trace: Trace = {}
    traced_step = block.bind_step(step, STYLES["lz"], trace)
    before = inspection.stats().calls
    for _ in range(3):                         # the first call chooses, the others are counted
        if time.perf_counter() >= deadline:
            raise _OutOfTime
        output = traced_step()
    after = inspection.stats().calls
    ops = {}
    calls = {note.op: note.arguments for note in trace.values() if note.op in OPS
             and note.arguments}
    for name, arguments in calls.items():
        advance(f"{dtype}, {step.name}: {name}")
        counts = {k: n - before.get(name, {}).get(k, 0) for k, n in after[name].items()}
        functions = {style: partial(do.own[name], **arguments) for style, do in STYLES.items()}
        ops[name] = ServedOp(inspection.explain(name, **arguments),
                             tuple(k for k, n in counts.items() if n),
                           timed(functions, seconds))
    advance(f"{dtype}, {step.name}: block")
    blocks = {style: block.bind_step(step, do) for style, do in STYLES.items()}
    timings = timed(blocks, 2 * seconds)
    truth = exact.bind_step(step, STYLES["torch"])()
    return DemoRow(dtype, step, ops, timings, _relative_error(blocks["torch"](), truth),
                   _relative_error(output, truth))


def _relative_error(output: torch.Tensor, truth: torch.Tensor) -> float:
    return float(((output.to(truth.dtype) - truth).norm() / truth.norm()).item())


# printing

def _load_average() -> float:
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def _introduce(diagnosis: inspection.DoctorReport, sizes: Sizes, device: str) -> None:
    show.heading("This machine")
    show.devices(diagnosis.devices)
    path = next(c for c in diagnosis.checks if c.name == "native fast path")
    show.text(f"{path.name}: {path.detail}")
    show.heading(
        f"A decoder block on {device}: hidden {sizes.hidden}, {sizes.heads} heads, "
        f"{sizes.kv_heads} KV heads, head_dim {sizes.head_dim}, ffn {sizes.ffn}, batch 1")
    if device == "cpu":
        show.text(f"On {torch.get_num_threads()} of {diagnosis.devices[0].cores} cores: "
                  "one is left to the rest of the machine, so that the times are steady.")
        if (load := _load_average()) > (diagnosis.devices[0].cores or 1):
            show.text(f"Other programs keep this machine busy (load average {load:.1f}): the times "
                      "are longer, and fewer fit, than on a quiet one.")
    show.text("Three ways to run it, with the same matmuls, rope and SwiGLU in between:")
    show.table(("way", "what it calls"), [("lz", "lz.rms_norm, lz.attention, lz.add_rms_norm"),
                                          *STYLE_NOTES.items()])


def _report(rows: Sequence[DemoRow]) -> None:
    dtypes = tuple(dict.fromkeys(row.dtype for row in rows))
    steps = {dtype: ", ".join(row.step.name for row in rows if row.dtype == dtype)
             for dtype in dtypes}
    show.heading("The place of each kernel in the plans")
    show.text(f"For {'; '.join(f'{dtype}: {names}' for dtype, names in steps.items())}. "
              "1 serves the call, the next one steps in if it fails, - cannot serve.")
    for op in OPS:
        show.heading(f"lz.{op}: who serves it, and why not the others")
        show.table(("kernel", *dtypes, "why"),
                   _verdicts(dtypes, [(row.dtype, row.ops[op].plan) for row in rows]))
    show.heading("Is it equal? Error against the same block in float64")
    show.table(("dtype", "step", "torch", "lz", "verdict"),
               [(row.dtype, row.step.name, f"{row.torch_error:.1e}", f"{row.lz_error:.1e}",
                 "equal" if row.equal else "NOT EQUAL") for row in rows], right=("torch", "lz"))
    show.heading("What is gained: microseconds per call, and how many times faster lz is")
    for row in rows:
        show.text(f"{row.dtype}, {row.step.name}")
        columns = ("call", "served by", "lz", *STYLE_NOTES,
                   *(f"over {style}" for style in STYLE_NOTES), "")
        show.table(columns, _gains(row), right=("lz", *STYLE_NOTES))
    timed = [t for row in rows for t in (*(s.timings for s in row.ops.values()), row.block)]
    for style in STYLE_NOTES:
        verdicts = [t.gain(style, "lz").verdict for t in timed]
        counts = ", ".join(f"{word} in {verdicts.count(word)}"
                           for word in ("faster", "even", "slower"))
        show.text(f"Against {style}: {counts} of {len(timed)}.")
    show.text(
        "Medians over rounds in which each way has its turn, with half the span of the middle half "
        "of the rounds. Faster and slower are said where three quarters of the rounds agree.")


def _gains(row: DemoRow) -> list[tuple[str, ...]]:
    lines = []
    for name, timings in (*((op, s.timings) for op, s in row.ops.items()),
                          ("whole block", row.block)):
        by = ", then ".join(row.ops[name].kernels) if name in row.ops else ""
        lines.append((name, by, *(f"{timings.median(s):.1f}" for s in ("lz", *STYLE_NOTES)),
                      *(str(timings.gain(s, "lz")) for s in STYLE_NOTES),
                      timings.gain("torch", "lz").verdict))
    return lines


class _Standing:
    """The places of one kernel in all plans of an op."""

    def __init__(self, dtypes: Sequence[str]) -> None:
        self.rank = 99
        self.places: dict[str, list[str]] = {dtype: [] for dtype in dtypes}
        self.times: list[float] = []           # expected, as a multiple of the chosen kernel's
        self.sources: set[str] = set()
        self.reasons: list[str] = []

    def reason(self) -> str:
        low, high = f"{min(self.times, default=0):.1f}", f"{max(self.times, default=0):.1f}"
        span = low if low == high else f"{low}-{high}"
        expected = ([f"expected to take {span}x as long ({', '.join(sorted(self.sources))})"]
                    if self.times else [])
        return "; ".join(expected + list(dict.fromkeys(self.reasons)))


def _verdicts(dtypes: Sequence[str], plans: Sequence[tuple[str, Plan]]) -> list[tuple[str, ...]]:
    """Return one line per kernel: its place in each plan, and why it is not chosen."""
    standings: dict[str, _Standing] = defaultdict(lambda: _Standing(dtypes))
    for dtype, plan in plans:
        for place, step in enumerate(plan.steps, 1):
            standing = standings[step.kernel]
            standing.places[dtype].append(str(place))
            standing.rank = min(standing.rank, place)
            if place > 1:
                standing.times.append(step.score.total_us / plan.steps[0].score.total_us)
                standing.sources.add(step.score.source)
        for rejected in plan.rejected:
            standings[rejected.kernel].places[dtype].append("-")
            standings[rejected.kernel].reasons.append(rejected.reasons[0].message)
    return [(kernel, *(" ".join(places) for places in standing.places.values()), standing.reason())
            for kernel, standing in sorted(standings.items(),
                                           key=lambda item: (item[1].rank, item[0]))]
