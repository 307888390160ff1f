"""Our own CPU kernels beside torch's, on the sizes of a Llama-like layer.

    OMP_NUM_THREADS=1 python benchmarks/cpu_kernels.py
        some minutes; a table, and a JSON under results/local
    OMP_NUM_THREADS=1 python benchmarks/cpu_kernels.py --quick
        shows that everything runs, its numbers say little

All contestants of a case take turns in short rounds, in an order that is shuffled each time. What
counts is the median over the rounds of the ratio of two neighbours in time, which a busy machine
disturbs least. "read" is how long torch takes to sum up the keys and values once: no kernel can be
much faster than that.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from timing import Contestant, Spread, compiled

from layerzero.backends import native
from layerzero.dispatch.binding import bind
from layerzero.machine import loading
from layerzero.spec.kernel import Kernel
from layerzero.spec.op import Op
from layerzero.verify.kernel.contract import case_values, refusals

OUT = Path(__file__).parent / "results" / "local"
RIVALS = ("torch_sdpa", "torch_norm", "torch_positions")
READ = "read"


@dataclass(frozen=True)
class Case:
    name: str
    ours: str
    rivals: tuple[str, ...]                    # the first is what torch itself would run
    dtype: str
    sizes: Mapping[str, Any]
    rounds: int
    calls: int


def cases(quick: bool) -> Iterator[Case]:
    few = 3 if quick else 0
    for dtype in ("float32", "bfloat16"):
        for keys, rounds in ((128, 200), (1024, 100), (4096, 60), (32768, 15)):
            if quick and keys > 1024:
                continue
            calls = max(1, 4096 // keys)
            heads = {"b": 1, "hq": 32, "hkv": 8, "sk": keys, "d": 128}
            yield Case(f"decode, context {keys}", "attention_decode",
                       ("torch.sdpa", "torch.sdpa_flash_packed"), dtype, {**heads, "sq": 1},
                       few or rounds, calls)
            if keys == 4096:
                yield Case(f"4 tokens, context {keys}", "attention_decode", ("torch.sdpa",), dtype,
                           {**heads, "sq": 4}, few or 30, 1)
                yield Case(f"decode without GQA, context {keys}", "attention_decode_mha",
                           ("torch.sdpa",), dtype, {**heads, "sq": 1, "hq": 8}, few or 30, 1)
        for rows in (1, 16, 512):
            size, calls = {"rows": (rows,), "hidden": 4096}, max(2, 64 // rows)
            yield Case(f"rms_norm {rows} x 4096", "rms_norm", ("torch.rms_norm",), dtype, size,
                       few or 60, calls)
            yield Case(f"add_rms_norm {rows} x 4096", "add_rms_norm", ("torch.add_rms_norm",),
                       dtype, size,
                       few or 60, calls)
        for tokens in (1, 16, 512):
            for style in ("rotate_half", "interleaved"):
                yield Case(f"rope {style}, {tokens} tokens", "rope",
                           ("torch.rope", "torch.rope_buffered" if style == "rotate_half"
                            else "torch.rope_complex"),
                           dtype, {"b": 1, "hq": 32, "hkv": 8, "s": tokens, "d": 128,
                                   "style": style},
                           few or 60, max(2, 64 // tokens))


def kernels() -> dict[str, Kernel]:
    modules = [native, *(importlib.import_module(f"layerzero.backends.{name}") for name in RIVALS)]
    return {k.id: k for module in modules for k in module.KERNELS}


def contestants(case: Case, known: Mapping[str, Kernel]) -> list[Contestant]:
    ours = known[f"native.{case.ours}"]
    values = case_values(ours.op, case.sizes, case.dtype)
    found = []
    for kernel in (ours, *(known[name] for name in case.rivals)):
        if not refusals(kernel, values):
            found.append(_contestant(kernel.op, kernel, values))
    if case.ours.startswith("attention_decode"):
        scope = {n: values[n].view(torch.int64) for n in ("key", "value")}
        found.append(Contestant(READ, "out = key.sum(), value.sum()", scope))
    return found


def _contestant(op: Op, kernel: Kernel, values: Mapping[str, Any]) -> Contestant:
    run = bind(op, kernel, loading.load(kernel), (), values[op.variant] if op.variant else "").run
    names = [p.name for p in op.params]
    return Contestant(kernel.id, f"out = run({', '.join(names)})",
                      {"run": run, **{n: values[n] for n in names}})


def measure(case: Case, people: list[Contestant], seed: int) -> dict[str, Any]:
    loops: dict[str, Callable[[int], tuple[int, int, Any]]] = {c.name: compiled(c.call, c.scope)
                                                               for c in people}
    samples: dict[str, list[float]] = {name: [] for name in loops}
    order, chance = list(loops), random.Random(seed)
    for loop in loops.values():
        loop(2)
    for _ in range(case.rounds):
        chance.shuffle(order)
        for name in order:
            start, ended, _ = loops[name](case.calls)
            samples[name].append((ended - start) / case.calls)
    ours = f"native.{case.ours}"
    return {"case": case.name, "dtype": case.dtype,
            "us": {n: Spread.of([x / 1e3 for x in s]).to_json()
                                                           for n, s in samples.items()},
            "times_faster_than": {
                n: round(statistics.median(b / a for a, b in zip(samples[ours], samples[n])), 2)
                for n in samples if n not in (ours, READ)},
            "over_read": round(statistics.median(a / b
                                                 for a, b in zip(samples[ours], samples[READ])), 2)
            if READ in samples else None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    threads = torch.get_num_threads()
    known, rows = kernels(), []
    try:
        native.build.module()
    except ImportError as e:
        raise SystemExit(str(e)) from e
    print(f"{'case':34} {'dtype':9} {'us':>9}  {'over read':>9}  times faster than", flush=True)
    with torch.no_grad():
        for i, case in enumerate(c for c in cases(args.quick) if args.only in c.name):
            row = measure(case, contestants(case, known), i)
            rows.append(row)
            faster = ", ".join(f"{n} {x:.2f}" for n, x in row["times_faster_than"].items())
            read = "" if row["over_read"] is None else f"{row['over_read']:.2f}"
            us = row["us"][f"native.{case.ours}"]["median"]
            print(f"{case.name:34} {case.dtype:9} {us:9.1f}  {read:>9}  {faster}", flush=True)
    out = args.out or OUT / f"cpu_kernels-{threads}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"threads": threads, "quick": args.quick, "torch": torch.__version__,
                               "python": platform.python_version(), "cores": os.cpu_count(),
                               "load_average": os.getloadavg() if hasattr(os, "getloadavg")
                               else None, "rows": rows}, indent=1))
    print(f"written to {out}", file=sys.stderr)


if __name__ == "__main__":
    main()
