"""The first hour of a new user: nothing tuned, every call beside the torch function one would
write.

    python benchmarks/untuned.py  eager, and on a GPU captured in a CUDA graph too
    python benchmarks/untuned.py --mode eager --other  only shapes that are in no list of ours
    python benchmarks/untuned.py --drawn 60 --seed 7  calls drawn at random from other models
    python benchmarks/untuned.py --rows 'channels last'  only rows whose name contains this
    python benchmarks/untuned.py --no-shipped  without the measurements that came with the package

Before a call is timed it is made twice, as a server would, and what then compiles in the background
may finish: how long that took is in the table. A ratio is torch / lz, of interleaved rounds; below
0.97 lz is behind.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("LAYERZERO_PERFDB", "off")       # before the library reads it

import torch
from gpu import made, shapes, short
from regret import environment
from shapes import SHAPES, WRITTEN

import layerzero as lz
from layerzero.dispatch.background import compiling
from layerzero.operate import calls as written
from layerzero.operate.inspection import dispatcher_of
from layerzero.perf.record import CAPTURED, EAGER
from layerzero.spec.call import Call, TensorSpec
from layerzero.tuning.contest import mode_facts
from layerzero.tuning.harness import Race, stopwatch
from layerzero.tuning.tuner import resolve, survey

BEHIND = 0.97
MAX_BYTES = 1 << 30
WAIT = 30.0            # seconds for what compiles in the background
Row = dict[str, Any]


def other_calls(dtype: str) -> Iterator[Call]:
    """Sizes of models that none of our lists has, and odd ones."""
    def t(*shape: int) -> TensorSpec:
        return TensorSpec(shape, dtype)

    for b, hq, hkv, d, keys in ((1, 24, 8, 128, 700), (3, 40, 8, 128, 3000), (1, 14, 2, 64, 1500),
                                (5, 8, 1, 256, 2500), (12, 28, 4, 128, 900), (1, 64, 8, 128, 20000),
                                (2, 16, 16, 96, 1111)):
        yield Call("attention", {"query": t(b, hq, 1, d), "key": t(b, hkv, keys, d),
                                 "value": t(b, hkv, keys, d)})
    for b, hq, hkv, d, s in ((1, 24, 8, 128, 777), (2, 14, 2, 64, 1500), (1, 16, 16, 96, 300),
                             (6, 32, 8, 128, 100)):
        yield Call("attention", {"query": t(b, hq, s, d), "key": t(b, hkv, s, d),
                                 "value": t(b, hkv, s, d),
                                 "is_causal": True})
    for rows, hidden in ((1, 3584), (3, 896), (37, 5120), (300, 2304), (2500, 3072)):
        yield Call("rms_norm", {"x": t(rows, hidden), "weight": t(hidden)})
        yield Call("add_rms_norm", {"x": t(rows, hidden), "residual": t(rows, hidden),
                                    "weight": t(hidden)})
    for rows, k, n in ((1, 896, 4864), (3, 3584, 3584), (12, 5120, 13824), (60, 2304, 9216),
                       (700, 3072, 3072)):
        yield Call("linear", {"x": t(rows, k), "weight": t(n, k)})
    for rows, hidden, inner in ((1, 896, 4864), (6, 3584, 18944), (200, 2304, 9216)):
        yield Call("mlp", {"x": t(rows, hidden), "weight_in": t(2 * inner, hidden),
                           "weight_down": t(hidden, inner)})
    for b, hq, hkv, d, s in ((1, 24, 8, 128, 1), (7, 14, 2, 64, 1), (1, 28, 4, 128, 900)):
        yield Call("rope", {"q": t(b, hq, s, d), "k": t(b, hkv, s, d), "cos": t(s, d // 2),
                            "sin": t(s, d // 2),
                            "style": "rotate_half"})
    for rows, hidden in ((1, 1024), (50, 1600)):
        yield Call("layer_norm", {"x": t(rows, hidden), "weight": t(hidden), "bias": t(hidden)})
    for batch, how in ((1, {"temperature": 0.6, "top_p": 0.95}), (5, {"top_k": 40}),
                       (20, {"temperature": 0.0})):
        yield Call("sample", {"logits": TensorSpec((batch, 151936), "float32"), "seed": 3, **how})


# hidden, inner, heads, kv_heads, head_dim, vocab: of models that are in no list of ours
MODELS = (
    (2304, 9216, 8, 4, 256, 256000), (2560, 9728, 32, 8, 128, 151936), (3072, 8192, 32, 32, 96, 32064),
    (3072, 12288, 24, 2, 128, 49152), (2048, 5504, 16, 16, 128, 32256), (4096, 11008, 32, 32, 128, 100352),
    (4096, 12800, 32, 8, 128, 49155), (5120, 13824, 40, 8, 128, 152064), (5120, 14336, 32, 8, 128, 131072),
    (7168, 20480, 56, 8, 128, 64000), (1536, 8960, 12, 2, 128, 151936), (960, 2560, 15, 5, 64, 49152))


def drawn_calls(dtype: str, count: int, seed: int, device: str) -> Iterator[Call]:
    """Calls of those models, drawn at random: a decode step of an odd batch, a prompt of an odd
    length, a chunk after a context."""
    chance = random.Random(seed)
    models = MODELS if device == "cuda" else [m for m in MODELS if m[0] <= 2048]
    longest = 6000 if device == "cuda" else 700

    def t(*shape: int) -> TensorSpec:
        return TensorSpec(shape, dtype)

    def around(most: int) -> int:
        """From 1 to `most`, each octave alike."""
        return round(math.exp(chance.uniform(0.0, math.log(most))))

    for i in range(count):
        hidden, inner, hq, hkv, d, vocab = chance.choice(models)
        step = chance.choice(("decode", "decode", "decode", "prompt", "chunk"))
        batch = around(48) if step == "decode" else 1 if step == "chunk" else around(4)
        queries = 1 if step == "decode" else 16 + around(longest // 3 // batch)
        keys = queries if step == "prompt" else queries + 100 + around(longest)
        rows = batch * queries
        kind = ("attention", "attention", "rms_norm", "add_rms_norm", "linear", "mlp", "rope",
                "layer_norm", "sample")[i % 9]
        if kind == "attention":
            late = {"is_causal": True, "causal_align": "bottom_right"}
            yield Call("attention", {
                "query": t(batch, hq, queries, d), "key": t(batch, hkv, keys, d),
                "value": t(batch, hkv, keys, d),
                **({} if step == "decode" else {"is_causal": True} if step == "prompt" else late)})
        elif kind == "rms_norm":
            yield Call(kind, {"x": t(rows, hidden), "weight": t(hidden)})
        elif kind == "add_rms_norm":
            yield Call(kind, {"x": t(rows, hidden), "residual": t(rows, hidden),
                              "weight": t(hidden)})
        elif kind == "layer_norm":
            yield Call(kind, {"x": t(rows, hidden), "weight": t(hidden), "bias": t(hidden)})
        elif kind == "linear":
            inputs, outputs = chance.choice(((hidden, (hq + 2 * hkv) * d), (hq * d, hidden),
                                             (inner, hidden)))
            yield Call(kind, {"x": t(rows, inputs), "weight": t(outputs, inputs)})
        elif kind == "mlp":
            yield Call(kind, {"x": t(rows, hidden), "weight_in": t(2 * inner, hidden),
                              "weight_down": t(hidden, inner)})
        elif kind == "rope":
            yield Call(kind, {"q": t(batch, hq, queries, d), "k": t(batch, hkv, queries, d),
                              "cos": t(queries, d // 2), "sin": t(queries, d // 2),
                              "style": "rotate_half"})
        else:
            how = chance.choice(({"temperature": 0.0}, {"temperature": 0.7}, {"top_k": 40},
                                 {"temperature": 0.8, "top_p": 0.9}))
            yield Call("sample", {"logits": TensorSpec((around(48), vocab), "float32"), "seed": 3,
                                  **how})


def listed(device: str, dtype: str) -> Iterator[Call]:
    if device == "cuda":
        yield from (made(op, sizes) for op, sizes in shapes())
        return
    for shape in SHAPES:
        if dtype in shape.dtypes:
            yield Call(shape.op, case=shape.sizes, dtype=dtype,
                       name=f"{shape.name} {short(shape.sizes)}")


def torch_way(op: str, values: Mapping[str, Any]) -> Callable[[], Any] | None:
    """What one would write in torch; None where torch has nothing of the kind."""
    if op == "attention" and (values["window_left"] >= 0 or values["window_right"] >= 0):
        return None
    return WRITTEN[op](**values) if op in WRITTEN else None


def measured(call: Call, device: str, modes: Sequence[str], seconds: float) -> Row | None:
    op, values = dispatcher_of(call.op).op, written.make_values(dispatcher_of(call.op).op, call,
                                                                device)
    theirs = torch_way(op.name, values)
    if theirs is None:
        return None
    public = dispatcher_of(op.name).public
    given = {p.name: values[p.name] for p in op.params if p.required
             or values[p.name] is not p.default}
    row: Row = {"op": op.name, "call": call.name or survey([call], device)[0][0].kind.sizes_text,
                "modes": {}}
    with torch.no_grad():
        start = time.perf_counter()
        for _ in range(2):
            public(**given)
        compiling.wait(WAIT)
        row["seconds_to_compile"] = time.perf_counter() - start
        found, ordered = resolve(op, values)
        for mode in modes:
            race = Race(stopwatch(device, mode), (RuntimeError, lz.errors.LayerZeroError))
            for name, way in (("torch", theirs), ("lz", lambda: public(**given))):
                race.enter(name, way)
            if race.failed:
                told = {name: f"{type(e).__name__}: {str(e)[:120]}"
                        for name, e in race.failed.items()}
                row["modes"][mode] = {"failed": told}
                continue
            end = time.perf_counter() + seconds
            for turn in range(200):
                if turn >= 15 and time.perf_counter() > end:
                    break
                race.run()
            plan = lz_plan(found, ordered, mode)
            ratio = race.timings.gain("torch", "lz")
            row["modes"][mode] = {
                "torch_us": race.timings.median("torch"), "lz_us": race.timings.median("lz"),
                "ratio": ratio.median, "low": ratio.low, "high": ratio.high, "kernel": plan.kernel,
                "evidence": plan.steps[0].score.origin}
    return row


def lz_plan(found: Any, values: tuple[Any, ...], mode: str) -> Any:
    from layerzero.world import snapshot as worlds
    facts = {**found.facts(values), **mode_facts(mode)}
    return worlds.current().plan(found.op, facts)


def summary(rows: Sequence[Row], mode: str) -> Row:
    ratios = [(r["modes"][mode]["ratio"], r) for r in rows if "ratio" in r["modes"].get(mode, {})]
    behind = [f"{r['op']} {r['call']}: {x:.2f}" for x, r in ratios
              if x < BEHIND and r["modes"][mode]["high"] < 1.0]
    values = [x for x, _ in ratios]
    mean = math.exp(statistics.fmean(map(math.log, values))) if values else None
    return {"rows": len(values), "geometric_mean": mean,
            "worst": min(values, default=None), "behind": behind,
            "not_run": sum("failed" in r["modes"].get(mode, {}) for r in rows)}


def merge(rows: Sequence[Row], before: Sequence[Row], date: str) -> list[Row]:
    """The rows of a run before, with those measured now in the place of theirs."""
    now = {(r["op"], r["call"], r["dtype"]): {**r, "measured": date} for r in rows}
    return [now.pop((r["op"], r["call"], r["dtype"]), r) for r in before] + list(now.values())


def show(rows: Sequence[Row], modes: Sequence[str]) -> None:
    for mode in modes:
        print(f"\n{mode:<74}{'torch us':>10}{'lz us':>10}{'ratio':>8}  kernel (evidence)")
        for r in rows:
            m = r["modes"].get(mode, {})
            if "failed" in m:
                print(f"{r['op'] + ' ' + r['call']:74.74} not run: {m['failed']}")
            elif m:
                mark = " <" if m["ratio"] < BEHIND and m["high"] < 1.0 else ""
                print(
                    f"{r['op'] + ' ' + r['call']:74.74}{m['torch_us']:10.2f}{m['lz_us']:10.2f}{m['ratio']:7.2f}x"
                    f"{mark:2} {m['kernel']} ({m['evidence'][:60]})")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--mode", action="append", choices=(EAGER, CAPTURED))
    parser.add_argument("--dtype", action="append",
                        help="of the shapes; default: bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--threads", type=int, help="of a CPU")
    parser.add_argument("--other", action="store_true",
                        help="only shapes that are in no list of ours")
    parser.add_argument("--drawn", type=int, default=0,
                        help="only so many calls drawn at random from other models")
    parser.add_argument("--seed", type=int, default=7, help="of --drawn")
    parser.add_argument("--no-shipped", action="store_true",
                        help="without what came with the package")
    parser.add_argument("--seconds", type=float, help="stop after about so long")
    parser.add_argument("--seconds-per-call", type=float, default=0.15)
    parser.add_argument("--match", default="", help="only operations whose name contains this")
    parser.add_argument("--rows", default="", help="only calls whose name contains this")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--update", action="store_true",
                        help="measured rows replace those in --out, which keeps the others")
    args = parser.parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    lz.configure(shipped_measurements=not args.no_shipped)
    modes = args.mode or ([EAGER, CAPTURED] if args.device == "cuda" else [EAGER])
    env, start, rows, left = environment(args.device), time.perf_counter(), [], 0
    for dtype in args.dtype or (["bfloat16"] if args.device == "cuda" else ["float32"]):
        calls = (list(drawn_calls(dtype, args.drawn, args.seed, args.device)) if args.drawn else
                 [*other_calls(dtype), *(() if args.other else listed(args.device, dtype))])
        for call in calls:
            if (args.match not in call.op or args.rows not in f"{call.op} {call.name or ''}"
                or call.op not in WRITTEN):
                continue
            if args.seconds and time.perf_counter() - start > args.seconds:
                left += 1
                continue
            if call.case is None and survey([call], args.device)[0][0].nbytes > MAX_BYTES:
                continue
            print(f"{len(rows)} {call.op} {call.name}"[:100], file=sys.stderr)
            row = measured(call, args.device, modes, args.seconds_per_call)
            if row is not None:
                rows.append({**row, "dtype": dtype})
    show(rows, modes)
    if args.update:
        rows = merge(rows, json.loads(args.out.read_text())["rows"], env["date"])
    found = {mode: summary(rows, mode) for mode in modes}
    waits = [r["seconds_to_compile"] for r in rows]
    print("\n" + json.dumps(found, indent=1))
    print(
        f"until nothing compiled any more, per call: median {statistics.median(waits):.2f} s, most "
        f"{max(waits):.2f} s"
        + (f"; {left} calls were not reached" if left else ""))
    name = "h200" if "H200" in str(env["gpu"]) else f"{args.device}-{env['cores']}-cores"
    name = f"drawn-{name}" if args.drawn else name
    out = (args.out or Path(os.environ.get("OUT", Path(__file__).parent / "results"))
           / f"untuned-{name}.json")
    out.write_text(json.dumps({"benchmark": "untuned", "environment": env,
                               "shipped": not args.no_shipped,
                               "drawn": {"count": args.drawn, "seed": args.seed} if args.drawn
                               else None, "summary": found, "rows": rows}, indent=1) + "\n")
    print(f"written to {out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
