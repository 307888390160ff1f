"""Is what LayerZero picks the fastest, and is it ever slower than the plain formula?

    python benchmarks/ops.py  every operation, some minutes; a table, and results/local/ops.json
    python benchmarks/ops.py --op rope --dtype bfloat16 --threads 1,2
    python benchmarks/ops.py --quick              the smallest shape of each; its numbers say little
    python benchmarks/ops.py --jit                kernels that compile on first use take part too

For each shape of shapes.py, in turns: the formula of the contract run eagerly, what one would write
in torch, every kernel that can serve the call, and lz itself. README.md says how to read it.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from shapes import SHAPES, WRITTEN, Shape

import layerzero as lz
from layerzero.dispatch.dispatcher import dispatchers
from layerzero.machine.loading import LoadFailed
from layerzero.tuning.harness import Race, Ratio, stopwatch
from layerzero.verify.kernel.contract import case_values, results_of

OUT = Path(__file__).parent / "results" / "local" / "ops.json"
EAGER, TORCH, LZ = "eager", "torch", "lz"
# of the formula's speed: below this it is called slower
LOSS = 0.97
# of the chosen one's time: what takes less should have been chosen
NEARLY = 0.9
# rounds: before the slow ones leave, at least, at most
LOOK, MIN_TURNS, MAX_TURNS = 5, 9, 300
SHORT_US = 1e3
# times slower than lz: clear after three calls, after the first look
HOPELESS_AT_ONCE, HOPELESS = 8.0, 2.5
# of the largest result: the same thing was computed
CLOSE = {"float32": 2e-3, "bfloat16": 6e-2, "float16": 1e-2}


@dataclass
class Row:
    """One shape at one dtype: microseconds of everyone, and how many times faster than the formula.
    """

    op: str
    shape: str
    dtype: str
    threads: int
    chosen: str
    why: str                                   # prior | measured | interpolated
    us: dict[str, float]
    over_eager: dict[str, Ratio]
    over_torch: dict[str, Ratio]
    samples: int
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def slower(self) -> bool:
        """Is lz slower than the formula, and by more than the noise of this run?"""
        return _loses(self.over_eager[LZ])

    @property
    def best(self) -> str:
        """The fastest kernel; the formula is one too."""
        kernels = {name: us for name, us in self.us.items() if "." in name}
        return min(kernels, key=lambda name: kernels[name])

    def __str__(self) -> str:
        speeds = ", ".join(f"{name} {ratio.median:.2f}" for name, ratio in self.over_eager.items()
                           if name != EAGER)
        return (f"{self.op}, {self.shape}, {self.dtype}: {self.us[EAGER]:.0f} us; * {self.chosen}; "
                f"{speeds}")

    def to_json(self) -> dict[str, Any]:
        ratios = {name: {k: ratio.to_json() for k, ratio in found.items()} for name, found in
                  (("over_eager", self.over_eager), ("over_torch", self.over_torch))}
        return {**dataclasses.asdict(self), **ratios, "slower_than_eager": self.slower,
                "best": self.best}


def _loses(ratio: Ratio) -> bool:
    return ratio.median < LOSS and ratio.high < 1.0


def measure(shape: Shape, dtype: str, device: str, seconds: float) -> Row:
    op = lz.op(shape.op)
    values = case_values(op, shape.sizes, dtype, device)
    plan = lz.explain(shape.op, **values)
    race = Race(stopwatch(device), (RuntimeError, LoadFailed))
    ways = dict(_ways(shape, dtype, values, plan))
    once = 0.0                                 # of lz, which enters first
    for name, way in ways.items():
        took = race.enter(name, way)
        # again, warm: it decides how many calls make a sample
        if took is not None and took[1] < SHORT_US:
            took = race.enter(name, way) and race.enter(name, way)
        once = once or (took[1] if took is not None else 0.0)
        if took is not None and took[1] > max(HOPELESS_AT_ONCE * once, 1e4):
            race.run(1, only=name)
            race.drop(name)
    race.run(LOOK)
    found = race.timings
    for name in race.running:
        if found.median(name) > HOPELESS * found.median(LZ):
            race.drop(name)
    end, turns = time.perf_counter() + seconds, LOOK
    while turns < MIN_TURNS or (turns < MAX_TURNS and time.perf_counter() < end):
        race.run()
        turns += 1
    found = race.timings
    return Row(shape.op, shape.name, dtype, torch.get_num_threads(), plan.steps[0].kernel,
               plan.steps[0].score.source,
               {name: round(found.median(name), 2) for name in found.rounds},
               {name: found.gain(EAGER, name) for name in found.rounds},
               {name: found.gain(TORCH, name) for name in found.rounds if TORCH in found.rounds},
               turns,
               {name: str(error)[:200] for name, error in race.failed.items()})


def _ways(shape: Shape, dtype: str, values: Mapping[str, Any],
          plan: Any) -> Iterator[tuple[str, Any]]:
    """lz first: it makes the choice and loads what it chose."""
    op, call = lz.op(shape.op), getattr(lz, shape.op)
    positional = [values[p.name] for p in op.params if not p.keyword_only]
    named = {p.name: values[p.name] for p in op.params if p.keyword_only
             and values[p.name] is not p.default}
    yield LZ, lambda: call(*positional, **named)
    yield EAGER, lambda: op.reference(*positional, **named)
    written = WRITTEN[shape.op](**values) if shape.op in WRITTEN else None
    if written is not None:
        if (wrong := _differs(written(), op.reference(**values), dtype)):
            raise SystemExit(f"{shape.op}, {shape.name}, {dtype}: what is written in torch {wrong}")
        yield TORCH, written
    dispatcher, arguments = dispatchers[shape.op], [values[p.name] for p in op.params]
    for step in plan.steps:
        kernel = next(k for k in dispatcher.world.kernels(shape.op) if k.id == step.kernel)  # type: ignore[union-attr]
        try:
            run = dispatcher.bind(kernel, step, plan.facts, {}).run
        except LoadFailed:
            continue
        yield kernel.id, lambda run=run: run(*arguments)


def _differs(got: Any, want: Any, dtype: str) -> str:
    """A fast wrong answer is no answer.

    Loosely: what one writes rounds more often, and codes may differ by one.
    """
    numbers = [(a, b) for a, b in zip(results_of(got), results_of(want)) if b.is_floating_point()
               and b.itemsize > 1]
    for a, b in numbers:
        if a.shape != b.shape:
            return f"gives {tuple(a.shape)} where the formula gives {tuple(b.shape)}"
        gap, size = float((a.double() - b.double()).abs().max()), float(b.abs().max())
        if not gap <= CLOSE.get(dtype, 2e-2) * max(size, 1e-6):
            return f"is {gap:.3g} off where the largest result is {size:.3g}"
    return ""


# what it says

def table(rows: list[Row], title: str) -> Table:
    found = Table(title=title, title_justify="left")
    for name, justify in (("op", "left"), ("shape", "left"), ("dtype", "left"),
                          ("eager us", "right"), ("lz us", "right"), ("x eager", "right"),
                          ("x torch", "right"), ("chosen", "left"),
                          ("x eager of each kernel", "left")):
        found.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    last = ""
    for row in rows:
        kernels = sorted((k for k in row.us if "." in k), key=lambda k: row.us[k])
        each = ", ".join(_kernel(row, k) for k in kernels)
        over = row.over_torch.get(LZ)
        mark = " [bold red]slower than eager[/]" if row.slower else ""
        found.add_row(row.op if row.op != last else "", row.shape, row.dtype,
                      f"{row.us[EAGER]:.0f}", f"{row.us[LZ]:.0f}",
                      f"{row.over_eager[LZ].median:.2f}", f"{over.median:.2f}" if over else "-",
                      f"{row.chosen}{mark}", each)
        last = row.op
    return found


def _kernel(row: Row, kernel: str) -> str:
    text = f"{kernel} {row.over_eager[kernel].median:.2f}"
    if kernel == row.chosen:
        return f"[bold]*{text}[/]"
    return f"[red]{text}[/]" if _loses(row.over_eager[kernel]) else text


def verdict(rows: list[Row]) -> list[str]:
    """The two questions, answered in words."""
    slower = [r for r in rows if r.slower]
    lines = [f"{r.op}, {r.shape}, {r.dtype}, {r.threads} threads: {r.chosen} runs at "
             f"{r.over_eager[LZ].median:.2f} of the formula's speed" for r in slower]
    lines = lines or ["nothing that was chosen is slower than the formula"]
    missed = [r for r in rows if r.chosen in r.us and r.us[r.best] < NEARLY * r.us[r.chosen]]
    lines += [f"{r.op}, {r.shape}, {r.dtype}, {r.threads} threads: {r.best} would be "
              f"{r.us[r.chosen] / r.us[r.best]:.2f} times as fast as {r.chosen}" for r in missed]
    return lines


def environment() -> dict[str, Any]:
    return {"python": platform.python_version(), "torch": torch.__version__,
            "layerzero": lz.__version__, "machine": platform.machine(), "cores": os.cpu_count(),
            "date": datetime.date.today().isoformat(),
            "cpu": torch.backends.cpu.get_cpu_capability(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "load_average": os.getloadavg() if hasattr(os, "getloadavg") else None}


def chosen(args: argparse.Namespace) -> list[tuple[Shape, str]]:
    known = tuple(dict.fromkeys(s.op for s in SHAPES))
    wanted = args.op.split(",") if args.op else known
    unknown = sorted(set(wanted) - set(known))
    if unknown:
        raise SystemExit(f"--op {', '.join(unknown)}: there are {', '.join(known)}")
    cells = []
    for name in wanted:
        shapes = [s for s in SHAPES if s.op == name and args.shape in s.name]
        for shape in shapes[:1] if args.quick else shapes:
            given = (args.dtype.split(",") if args.dtype else shape.dtypes[:1] if args.quick
                     else shape.dtypes)
            cells += [(shape, dtype) for dtype in given]
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--op", default="", help="only these operations, by comma")
    parser.add_argument("--shape", default="", help="only shapes whose name contains this")
    parser.add_argument("--dtype", default="",
                        help="only these dtypes, by comma (float32,bfloat16)")
    parser.add_argument("--threads", default="",
                        help="numbers of threads, by comma; else as torch has it")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=0.6, help="for each shape and dtype")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--jit", action="store_true",
                        help="allow kernels that compile on first use")
    parser.add_argument("--json", type=Path, default=OUT, help="where to write the result")
    args = parser.parse_args()
    if args.jit:
        lz.configure(jit="in_request")
    rows: list[Row] = []
    start, before = time.perf_counter(), environment()
    console = Console(width=None if sys.stdout.isatty() else 220)
    for threads in [int(n) for n in args.threads.split(",")] if args.threads else [
            torch.get_num_threads()]:
        torch.set_num_threads(threads)
        lz.clear_cache()                       # the choice may depend on it
        part: list[Row] = []
        with torch.no_grad():
            for shape, dtype in chosen(args):
                part.append(measure(shape, dtype, args.device, 0.02 if args.quick
                                    else args.seconds))
                # so that a run that is stopped has said something
                print(part[-1], file=sys.stderr, flush=True)
        rows += part
        console.print(table(part,
                            f"{args.device}, {threads} threads; * is what lz chose; x is how many "
                            "times as fast"))
    lines = verdict(rows)
    console.print("\n".join(lines), highlight=False)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps({
        "environment": {**before, "load_average_after": os.getloadavg() if hasattr(os, "getloadavg")
                        else None},
        "device": args.device, "quick": args.quick, "jit": args.jit,
        "seconds": round(time.perf_counter() - start),
        "verdict": lines, "rows": [row.to_json() for row in rows]}, indent=1))
    print(f"{time.perf_counter() - start:.0f} s; written to {args.json}", file=sys.stderr)


if __name__ == "__main__":
    main()
