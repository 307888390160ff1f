"""One command on a machine with a GPU: who is fastest for which call, what is chosen, and what that
costs.

    python benchmarks/gpu.py  tune, replay, compare with transformers, goals: some minutes
    python benchmarks/gpu.py --quick           a few shapes: does everything run?
    python benchmarks/gpu.py --goals           the goals alone (gpu_goals.py): less than a minute

Every time is that of a replayed CUDA graph with one call in it, after more than the L2 cache was
read. First every kernel that may serve a shape is timed and the measurements are recorded (in
memory: no store is read or changed); then selection chooses by them, and the choice is timed
against every candidate anew: its regret. Another table has what stock transformers runs for an
operation beside the lz call, which is tuned before, as a user would: a kernel that compiles is
never chosen for a kind of call it was not compiled for. FlashInfer's kernels take part where its
cache has them compiled, or with --compile. Results go to results/gpu-<device>.json or --out.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("LAYERZERO_PERFDB", "off")       # before the library reads it
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import torch
import torch.nn.functional as F
from gpu_goals import goals
from gpu_libraries import uncompiled
from regret import environment, keep
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import layerzero as lz
from layerzero.operate.graphs import hits, since
from layerzero.spec.call import Call
from layerzero.tuning import regret
from layerzero.tuning.harness import GraphWatch, Race
from layerzero.tuning.report import Tuned
from layerzero.tuning.tuner import tune
from layerzero.tuning.workload import calls_for
from layerzero.world import snapshot as worlds

BF16 = torch.bfloat16
MAX_BEHIND = 0.03
LLAMA = {"hq": 32, "hkv": 8, "d": 128}
LATE = {"causal": True, "align": "bottom_right"}


def shapes() -> list[tuple[str, dict[str, Any]]]:
    """Operation and sizes, as the operation's own input generator takes them."""
    found: list[tuple[str, dict[str, Any]]] = []
    for b, k in ((1, 1024), (1, 4096), (8, 4096), (32, 4096), (1, 32768), (4, 512), (16, 2048),
                 (64, 1024), (2, 16384)):
        found.append(("attention", {**LLAMA, "b": b, "sq": 1, "sk": k}))
    for b, q, k in ((4, 8, 8192), (1, 4, 4096), (8, 4, 1024)):
        found.append(("attention", {**LLAMA, **LATE, "b": b, "sq": q, "sk": k}))
    for b, s in ((1, 2048), (1, 8192), (8, 512), (1, 256), (4, 1024), (16, 128)):
        found.append(("attention", {**LLAMA, "b": b, "sq": s, "sk": s, "causal": True}))
    found += [("attention", {"b": 2, "hq": 10, "hkv": 10, "d": 64, "sq": 4096, "sk": 77}),
              ("attention", {"b": 2, "hq": 10, "hkv": 10, "d": 64, "sq": 4096, "sk": 4096}),
              ("attention", {"b": 8, "hq": 12, "hkv": 12, "d": 64, "sq": 197, "sk": 197}),
              ("attention", {"b": 1, "hq": 24, "hkv": 24, "d": 128, "sq": 4608, "sk": 4608}),
              ("attention", {**LLAMA, **LATE, "b": 1, "sq": 512, "sk": 4608}),
              ("attention", {**LLAMA, "b": 1, "sq": 2048, "sk": 2048, "causal": True,
                             "window": (511, 0)})]
    for context in ((4096,), (4096,) * 8, tuple(512 + 112 * i for i in range(32)), (1000,) * 64,
                    (130, 7000, 20, 900)):
        found.append(("paged_attention", {"context": context, "hq": 32, "hkv": 8, "d": 128}))
    for rows in (1, 4, 16, 128, 512, 4096):
        found += [("rms_norm", {"rows": (rows,), "hidden": 4096}),
                  ("add_rms_norm", {"rows": (rows,), "hidden": 4096})]
    found += [("rms_norm", {"rows": (rows, 32), "hidden": 128}) for rows in (1, 512, 4096)]
    found += [("layer_norm", {"rows": (rows,), "hidden": 1280}) for rows in (1, 197, 8192)]
    found += [("rope", {**LLAMA, "b": b, "s": s})
              for b, s in ((1, 1), (32, 1), (1, 512), (1, 4096))]
    for rows in (1, 4, 16, 128, 2048):
        found += [("linear", {"rows": (rows,), "k": 4096, "n": n, "bias": False})
                  for n in (14336, 6144)]
    for form, group in (("int8", 0), ("fp8_e4m3", 0), ("int4", 128)):
        found += [("quantized_linear", {"format": form, "rows": (rows,), "k": 4096, "n": 14336,
                                        "group": group})
                  for rows in (1, 8, 512)]
    found += [("mlp", {"rows": (rows,), "hidden": 4096, "inner": 14336}) for rows in (1, 16, 2048)]
    for batch in (1, 64):
        found += [("sample", {"batch": batch, "vocab": 128256, "logprobs": False, **by}) for by in (
            {"top_p": 0.9}, {"top_k": 50}, {"top_k": 50, "top_p": 0.9, "temperature": 0.8},
            {"temperature": 0.7}, {"temperature": 0.0})]
    found += [("quantize", {"format": form, "rows": (rows,), "width": 4096})
              for form in ("int8", "fp8_e4m3")
              for rows in (1, 4096)]
    return found


def made(op: str, sizes: Mapping[str, Any]) -> Call:
    # how long it takes depends on how the scores are spread
    if op == "sample":
        return Call(op, case=sizes)
    # values do not matter
    with nullcontext() if op in ("paged_attention", "quantized_linear") else FakeTensorMode():
        values = lz.op(op).inputs(**sizes, dtype=BF16, device="cpu")
        [call] = calls_for(op, arguments=values)
    return call


def short(sizes: Mapping[str, Any]) -> str:
    def text(value: Any) -> str:
        if isinstance(value, tuple) and len(value) > 3:
            return f"{min(value)}..{max(value)} ({len(value)})"
        return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)

    return " ".join(f"{name}={text(value)}" for name, value in sizes.items())


# what stock transformers runs

@dataclass(frozen=True, eq=False)
class Stock:
    """What transformers' own code does for something, and the lz call on the same tensors."""

    name: str
    theirs: Callable[[], Any]
    op: str
    arguments: Mapping[str, Any]
    ours: Callable[[], Any] | None = None      # what is no operation of its own
    # that the operation's own input generator makes the arguments of
    case: Mapping[str, Any] | None = None
    counts: bool = True                        # in the mean over what runs per operation

    @property
    def calls(self) -> tuple[Call, ...]:
        if self.ours is not None:
            return ()
        return ((Call(self.op, case=self.case),) if self.case
                else calls_for(self.op, arguments=self.arguments))

    def run(self) -> Any:
        return self.ours() if self.ours is not None else getattr(lz, self.op)(**self.arguments)


def stock() -> Iterator[Stock]:
    from layerzero.backends.triton.gated import gate

    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.float32).to(BF16)

    def repeated(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        k, v = (t[:, :, None].expand(-1, -1, q.shape[1] // t.shape[1], -1, -1).reshape(
            t.shape[0], q.shape[1], t.shape[2], t.shape[3]) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)

    for b, k in ((1, 4096), (32, 4096), (8, 1024)):
        q, key, value = rand(b, 32, 1, 128), rand(b, 8, k, 128), rand(b, 8, k, 128)
        mask = torch.ones(b, 1, 1, k, dtype=torch.bool, device="cuda")
        yield Stock(f"attention decode B{b} K{k}", partial(repeated, q, key, value, mask, False),
                    "attention",
                    {"query": q, "key": key, "value": value})
    for b, s in ((1, 2048), (8, 512)):
        q, key, value = rand(b, 32, s, 128), rand(b, 8, s, 128), rand(b, 8, s, 128)
        yield Stock(f"attention prefill B{b} S{s}", partial(repeated, q, key, value, None, True),
                    "attention",
                    {"query": q, "key": key, "value": value, "is_causal": True})
    for rows in (1, 32, 4096):
        x, w = rand(rows, 4096), rand(4096)

        def norm(x: Tensor = x, w: Tensor = w) -> Tensor:
            wide = x.to(torch.float32)
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
            return w * wide.to(x.dtype)

        yield Stock(f"RMSNorm {rows}x4096", norm, "rms_norm", {"x": x, "weight": w, "eps": 1e-6})
    for b, s in ((1, 1), (32, 1), (1, 2048)):
        q, key = rand(b, 32, s, 128), rand(b, 8, s, 128)
        angle = torch.rand(s, 64, device="cuda") * 6
        cos, sin = (torch.cat((t, t), -1).to(BF16)[None] for t in (angle.cos(), angle.sin()))

        def turned(q: Tensor = q, k: Tensor = key, cos: Tensor = cos,
                   sin: Tensor = sin) -> tuple[Tensor, ...]:
            cos, sin = cos[:, None], sin[:, None]
            return tuple(t * cos + torch.cat((-t[..., 64:], t[..., :64]), -1) * sin for t in (q, k))

        yield Stock(f"RoPE B{b} S{s}", turned, "rope", {
            "q": q, "k": key, "cos": angle.cos().to(BF16), "sin": angle.sin().to(BF16),
            "style": "rotate_half"})
    for rows in (1, 32, 2048):
        gates, ups = rand(rows, 14336), rand(rows, 14336)
        yield Stock(f"SwiGLU {rows}x14336", lambda g=gates, u=ups: F.silu(g) * u, "mlp", {},
                    partial(gate, gates, ups, "swiglu"))
    for batch in (1, 64):
        case = {"batch": batch, "vocab": 128256, "top_p": 0.9, "random": "seed", "logprobs": False}
        given = lz.op("sample").inputs(**case, dtype=torch.float32, device="cuda")

        def nucleus(logits: Tensor = given["logits"]) -> Tensor:
            ordered, places = logits.sort()
            beyond = ordered.softmax(-1).cumsum(-1) <= 0.1
            beyond[..., -1:] = False
            scores = logits.masked_fill(beyond.scatter(1, places, beyond), -torch.inf)
            return torch.multinomial(scores.softmax(-1), 1)

        yield Stock(f"top-p sampling {batch}x128256", nucleus, "sample", given, case=case)
    for rows in (1, 32, 2048):
        x, wg, wu, wd = rand(rows, 4096), rand(14336, 4096) / 64, rand(14336, 4096) / 64, rand(
            4096, 14336) / 120
        yield Stock(f"whole SwiGLU MLP {rows}x4096", lambda a=(x, wg, wu, wd): F.linear(
            F.silu(F.linear(a[0], a[1])) * F.linear(a[0], a[2]), a[3]), "mlp",
            {"x": x, "weight_in": wg, "weight_down": wd, "weight_up": wu}, counts=False)


def against_stock(rounds: int) -> list[dict[str, Any]]:
    rows = []
    for one in stock():
        tune(one.calls, device="cuda", mode="captured", rounds=rounds, save=keep)
        race = Race(GraphWatch(), (RuntimeError, lz.errors.LayerZeroError))
        before = hits()
        for label, way in (("stock", one.theirs), ("lz", one.run)):
            race.enter(label, way)
        race.run(rounds)
        served = (sorted(k for kernels in since(before).values() for k in kernels)
                  or ["the gate of triton.mlp"])
        row: dict[str, Any] = {"name": one.name, "op": one.op, "counts": one.counts,
                               "served": served}
        if race.failed:
            rows.append({**row, "failed": {k: f"{type(e).__name__}: {e}"[:200]
                                           for k, e in race.failed.items()}})
            continue
        timings = race.timings
        rows.append({**row, "stock_us": timings.median("stock"), "lz_us": timings.median("lz"),
                     "ratio": timings.gain("stock", "lz").median})
    return rows


def show_stock(rows: Sequence[Mapping[str, Any]]) -> None:
    print(f"\n{'stock transformers':34} {'stock us':>9} {'lz us':>9} {'ratio':>7}  served by")
    for r in rows:
        told = f"failed: {r['failed']}" if "failed" in r else (
            f"{r['stock_us']:9.2f} {r['lz_us']:9.2f} {r['ratio']:6.2f}x")
        print(f"{r['name']:34} {told}  {', '.join(r['served'])}"
              + ("" if r["counts"] else "  (not in the mean)"))
    if rows:
        print(
            "SwiGLU is the activation and product between the matrix products; the whole layer, "
            "which the products bound, is shown and not in the mean.")


# the report

def row_of(op: str, sizes: Mapping[str, Any], tuned: Tuned | None,
           replayed: regret.Replayed) -> dict[str, Any]:
    best = replayed.best
    return {"op": op, "sizes": short(sizes), "chosen": replayed.chosen, "best": best,
            "default": replayed.default, "chosen_us": replayed.us(replayed.chosen),
            "best_us": replayed.us(best), "regret": replayed.regret,
            "over_default": replayed.gain, "tuned": tuned is not None,
            "roofline": None if tuned is None else tuned.roofline,
            "candidates": {**{k: replayed.us(k) for k in replayed.rounds}, **replayed.far_slower},
            "failed": dict(replayed.failed)}


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    print(f"{'call':64} {'chosen':34} {'us':>8} {'regret':>7} {'default':>8} {'roofline':>8}")
    for r in rows:
        over = "" if r["over_default"] is None else f"{r['over_default']:.2f}x"
        roof = "" if r["roofline"] is None else f"{r['roofline']:.0%}"
        print(
            f"{r['op'] + ' ' + r['sizes']:64.64} {r['chosen']:34.34} {r['chosen_us']:8.2f} "
            f"{r['regret']:7.1%} {over:>8} {roof:>8}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="every tenth shape")
    parser.add_argument("--goals", action="store_true", help="the goals alone")
    parser.add_argument("--compile", action="store_true",
                        help="also FlashInfer's kernels that nvcc has to compile")
    parser.add_argument("--seconds", type=float, default=480.0,
                        help="stop tuning after about so long")
    parser.add_argument("--seconds-per-call", type=float, default=0.15, help="of the replay")
    parser.add_argument("--match", default="",
                        help="only calls whose text matches this regular expression")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("benchmarks/gpu.py needs a CUDA device; this torch sees none", file=sys.stderr)
        return 2
    if not args.compile:
        windows = lz.PolicyRule.of("deny", "flashinfer.*", ("attention", "paged_attention"),
                                   {"window_left": ">= 0"})
        lz.configure(rules=(windows, *(lz.PolicyRule.of("deny", name) for name in uncompiled())))
    env = environment("cuda")
    name = re.sub(r"\W+", "-", str(env["gpu"]).lower())
    file = f"gpu-{'goals-' * args.goals}{name}.json"
    out = args.out or Path(os.environ.get("OUT", str(Path(__file__).parent / "results"))) / file
    out.parent.mkdir(parents=True, exist_ok=True)

    def write(found: Mapping[str, Any]) -> None:
        rates = {place: tuple(r) for place, r in worlds.current().perf.rates.items()}
        out.write_text(json.dumps({"benchmark": "gpu", "environment": env, "rates": rates, **found},
                                  indent=1) + "\n")
        print(f"written to {out}")

    found: dict[str, Any] = {} if args.goals else whole(args)
    if found:
        # the goals take another minute or two: this much is kept
        write(found)
    if args.goals or not (args.match or args.quick):
        write({**found, "goals": goals(args.compile, found.get("summary"))})
    return 0


def whole(args: argparse.Namespace) -> dict[str, Any]:
    wanted = [(op, s) for op, s in shapes() if re.search(args.match, f"{op} {short(s)}")][
        ::10 if args.quick else 1]
    calls = [made(op, sizes) for op, sizes in wanted]
    start = time.perf_counter()
    report = tune(calls, device="cuda", mode="captured", rounds=20, seconds=args.seconds, save=keep,
                  progress=lambda done, total, what: print(f"tuning {done}/{total} {what[:90]}",
                                                           file=sys.stderr))
    print(f"\n{len(report.tuned)} kinds in {time.perf_counter() - start:.0f} s", file=sys.stderr)
    failed = [f"{t.label}: {k}: {r.message}"[:240] for t in report.tuned
              for k, r in t.failed.items()]
    watch, rows, skipped = GraphWatch(), [], [f"{s.call.op}: {s.reason}" for s in report.skipped]
    for (op, sizes), call in zip(wanted, calls):
        found = regret.replay([call], seconds=args.seconds_per_call, device="cuda", watch=watch,
                              mode="captured")
        for r in found.rows:
            rows.append(row_of(op, sizes, next((t for t in report.tuned if t.call == call), None),
                               r))
        skipped += [f"{op} {short(sizes)}: {s.why[:160]}" for s in found.skipped]
    beside = [] if args.match else against_stock(20)
    show(rows)
    for title, texts in (("failed when tuned, so no candidates", failed), ("skipped", skipped)):
        for text in texts:
            print(f"{title}: {text}")
    show_stock(beside)
    ratios = [b["ratio"] for b in beside if "ratio" in b and b["counts"]]
    regrets = [r["regret"] for r in rows]
    behind = [r for r in rows if r["over_default"] is not None and r["over_default"] < 1
              / (1 + MAX_BEHIND)]
    summary = {
        "shapes": len(rows), "not_tuned": sum(not r["tuned"] for r in rows),
        "median_regret": statistics.median(regrets) if regrets else None,
        "p95_regret": regret.quantile(regrets, 0.95) if regrets else None,
        "behind_default": [f"{r['op']} {r['sizes']} {r['over_default']:.2f}x" for r in behind],
        "gain_over_default": math.exp(statistics.fmean(math.log(r["over_default"]) for r in rows
                                                       if r["over_default"]))
        if rows else None, "gain_over_stock": math.exp(statistics.fmean(map(math.log, ratios)))
        if ratios else None}
    print("\n" + json.dumps(summary, indent=1) + "\n")
    if summary["not_tuned"]:
        print(
            f"{summary['not_tuned']} calls were not tuned within --seconds: their choices are "
            "guesses\n")
    return {"summary": summary, "rows": rows, "stock": beside, "failed": failed, "skipped": skipped}


if __name__ == "__main__":
    raise SystemExit(main())
