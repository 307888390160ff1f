"""An untuned process under mixed traffic that learns while it serves: what it finds, how soon, and
what that costs.

    python benchmarks/learning.py --device cuda        90 seconds
    python benchmarks/learning.py --device cpu
    python benchmarks/learning.py --seconds 5          does everything run?

The traffic is a shuffled stream of the calls of a decoder: mostly decode steps, some prefill. It
runs for --seconds with learn on; what exploring cost is taken by the second. On CUDA the kernels
that compile are compiled before, because learning never waits for a compiler. Then each kind of
call is replayed: its regret is how much slower the kernel that was learned is than the fastest,
timed in turns. At last the same stream runs in turns, in short windows, with what was learned, with
learn off and nothing measured, and with torch's own kernels only. Measurements are kept in
memory: no store is read or changed. Results go to results/learning-<device>-<cores>-cores.json, or
--out FILE.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("LAYERZERO_PERFDB", "off")       # before the library reads it
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import torch
from regret import environment

import layerzero as lz
from layerzero.dispatch.background import learning
from layerzero.operate import calls as written
from layerzero.operate.inspection import dispatcher_of
from layerzero.perf.record import PerfView, kind_of
from layerzero.spec.call import Call
from layerzero.spec.event import Event, Learned, LearningStarted
from layerzero.tuning import regret
from layerzero.tuning.contest import eligible_plan
from layerzero.world import snapshot as worlds

WITHIN_CALLS, MAX_REGRET, MAX_SHARE = 200, 0.03, 0.02
# a decode call comes so many times as often as one of prefill
DECODE_WEIGHT = 4
CHUNK_SECONDS = 1.0
OWN = ("cuda.", "triton.")                     # what is compiled before, on CUDA


@dataclass(frozen=True)
class Sizes:
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    contexts: tuple[int, int]
    prompt: int
    vocab: int
    dtype: str


LARGE = Sizes(4096, 14336, 32, 8, 128, (1024, 8192), 1024, 128256, "bfloat16")     # llama-3-8b
SMALL = Sizes(512, 1536, 8, 2, 64, (256, 1024), 128, 8192, "float32")


def stream(s: Sizes) -> list[tuple[str, Call, int]]:
    """Label, call and weight of each kind."""
    heads: dict[str, Any] = {"hq": s.heads, "hkv": s.kv_heads, "d": s.head_dim}
    late = {"causal": True, "align": "bottom_right"}
    decode: list[tuple[str, str, dict[str, Any]]] = [
        *((f"attention, context {n}", "attention", {**heads, "b": 1, "sq": 1, "sk": n})
          for n in s.contexts),
        ("attention, batch 8", "attention", {**heads, "b": 8, "sq": 1, "sk": s.contexts[0]}),
        ("rms_norm", "rms_norm", {"rows": (1,), "hidden": s.hidden}),
        ("add_rms_norm", "add_rms_norm", {"rows": (8,), "hidden": s.hidden}),
        ("rope", "rope", {**heads, "b": 8, "s": 1}),
        ("linear", "linear", {"rows": (1,), "k": s.hidden, "n": s.hidden, "bias": False}),
        ("mlp", "mlp", {"rows": (1,), "hidden": s.hidden, "inner": s.inner}),
        ("sample", "sample", {"batch": 8, "vocab": s.vocab, "logprobs": False, "top_k": 50})]
    prefill: list[tuple[str, str, dict[str, Any]]] = [
        ("attention", "attention", {**heads, "b": 1, "sq": s.prompt, "sk": s.prompt,
                                    "causal": True}),
        ("attention, chunk", "attention", {**heads, **late, "b": 1, "sq": s.prompt // 4,
                                           "sk": s.contexts[0]}),
        ("rms_norm", "rms_norm", {"rows": (s.prompt,), "hidden": s.hidden}),
        ("linear", "linear", {"rows": (s.prompt,), "k": s.hidden, "n": s.inner, "bias": False})]
    found = []
    for step, weight, kinds in (("decode", DECODE_WEIGHT, decode), ("prefill", 1, prefill)):
        found += [(f"{step} {label}", Call(op, case=case, dtype=s.dtype), weight)
                  for label, op, case in kinds]
    return found


class Traffic:
    """The kinds of call with their tensors, in an endless shuffled order."""

    def __init__(self, kinds: Sequence[tuple[str, Call, int]], device: str) -> None:
        self.labels, self.device = [label for label, _, _ in kinds], device
        self.calls = [call for _, call, _ in kinds]
        self.weights = [weight for _, _, weight in kinds]
        self.ways: list[Callable[[], Any]] = []
        self.buckets: list[tuple[str, str]] = []
        for call in self.calls:
            found = dispatcher_of(call.op)
            values = written.make_values(found.op, call, device)
            facts = found.facts(tuple(values[n] for n in found.names), worlds.current())
            self.buckets.append((call.op, kind_of(found.op, facts).bucket))
            self.ways.append(_way(found.public, values))
        self._order = self._shuffled()

    def _shuffled(self) -> Iterator[int]:
        chance = random.Random(0)
        while True:
            yield from chance.choices(range(len(self.calls)), self.weights, k=1024)

    def run(self, seconds: float) -> tuple[float, Counter[int]]:
        """The stream for about so long: the seconds, and how often each kind came."""
        count: Counter[int] = Counter()
        start = time.perf_counter()
        while time.perf_counter() - start < seconds:
            for _ in range(16):
                i = next(self._order)
                count[i] += 1
                self.ways[i]()
        self.wait()
        return time.perf_counter() - start, count

    def each(self, times: int = 2) -> None:
        for way in self.ways * times:
            way()
        self.wait()

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def _way(public: Callable[..., Any], values: Mapping[str, Any]) -> Callable[[], Any]:
    return lambda: public(**values)


def compile_ahead(traffic: Traffic, seconds: float) -> list[str]:
    """Our own kernels that compile, for every kind; those that there was no time for."""
    end, late = time.perf_counter() + seconds, []
    for call in traffic.calls:
        found = dispatcher_of(call.op)
        values = written.make_values(found.op, call, traffic.device)
        world = worlds.current()
        plan = eligible_plan(world, found.op,
                             found.facts(tuple(values[n] for n in found.names), world))
        for name in [s.kernel for s in plan.steps if s.kernel.startswith(OWN)
                     and world.catalog.by_id[s.kernel].jit]:
            if time.perf_counter() > end:
                late.append(name)
                continue
            with lz.prefer(name, op=call.op):
                lz.warmup([call], background=False, device=traffic.device)
    return late


def learn(traffic: Traffic,
          seconds: float) -> tuple[list[dict[str, float]], dict[tuple[str, str], Learned | None],
                                   Counter[int]]:
    """The stream with learn on, by the second; what was learned of each kind that there was
    something to learn of; how often each kind came."""
    events: dict[tuple[str, str], Learned | None] = {}

    def hear(event: Event) -> None:
        if isinstance(event, LearningStarted):
            events.setdefault((event.op, event.kind), None)
        elif isinstance(event, Learned):
            events[event.op, event.kind] = event

    stop = lz.subscribe(hear)
    lz.configure(learn=True)
    timeline, total, before, spent = [], Counter[int](), learning.status(), 0.0
    while spent < seconds:
        took, count = traffic.run(min(CHUNK_SECONDS, seconds - spent))
        now = learning.status()
        spent += took
        total += count
        timeline.append({"at": spent, "seconds": took, "calls": count.total(),
                         "learning": now.learning,
                         "explored": now.explored - before.explored,
                         "cost": now.seconds - before.seconds})
        before = now
    learning.flush()
    stop()
    return timeline, events, total


def in_turns(traffic: Traffic, found: PerfView, seconds: float) -> dict[str, list[float]]:
    """Microseconds per call of the same stream: with what was learned, with nothing measured, and
    torch's own."""
    ways = {"learned": (found, {}), "learn off": (PerfView(), {}),
            "torch's own": (PerfView(), {"disabled": True})}
    took: dict[str, list[float]] = {name: [] for name in ways}
    lz.configure(learn=False)
    rounds = 6
    for _ in range(rounds):
        order = list(ways)
        random.shuffle(order)
        for name in order:
            perf, settings = ways[name]
            lz.configure(disabled=bool(settings))
            worlds.publish(lambda w, perf=perf: w.replace(perf=perf), "benchmark")
            traffic.each()                     # makes the entries
            traffic._order = traffic._shuffled()
            window, count = traffic.run(seconds / rounds / len(ways))
            took[name].append(window * 1e6 / count.total())
    lz.configure(disabled=False)
    worlds.publish(lambda w: w.replace(perf=found), "benchmark")
    return took


def table(rows: Sequence[Sequence[Any]], head: Sequence[str]) -> None:
    texts = [list(map(str, row)) for row in (head, *rows)]
    widths = [max(len(row[i]) for row in texts) for i in range(len(head))]
    for row in texts:
        print("  ".join(cell.ljust(w) if i == 0 else cell.rjust(w)
                        for i, (cell, w) in enumerate(zip(row, widths))))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu",
                        choices=("cpu", "cuda"))
    parser.add_argument("--seconds", type=float, default=60.0, help="of traffic with learn on")
    parser.add_argument("--compile-seconds", type=float, default=120.0,
                        help="on CUDA, for kernels that compile")
    parser.add_argument("--replay-seconds", type=float, default=0.5,
                        help="for the regret of each kind")
    parser.add_argument("--no-shipped", action="store_true",
                        help="without the measurements that come with the package")
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    args = parser.parse_args(argv)
    if args.no_shipped:
        lz.configure(shipped_measurements=False)
    torch.set_grad_enabled(False)
    env = environment(args.device)
    traffic = Traffic(stream(LARGE if args.device == "cuda" else SMALL), args.device)
    print(
        f"{len(traffic.calls)} kinds of call on "
        f"{env['gpu'] if args.device == 'cuda' else env['cpu']}, {env['torch_threads']} threads, "
        f"load average {env['load_average']}")
    late = compile_ahead(traffic, args.compile_seconds) if args.device == "cuda" else []
    traffic.each()
    timeline, events, counts = learn(traffic, args.seconds)
    status, learned = learning.status(), worlds.current().perf
    report = regret.replay(traffic.calls, seconds=args.replay_seconds, device=args.device)
    replayed = {id(row.call): row for row in report.rows}
    windows = in_turns(traffic, learned, max(args.seconds / 4, 3.0))

    kinds = []
    for i, (label, call) in enumerate(zip(traffic.labels, traffic.calls)):
        event, row = events.get(traffic.buckets[i]), replayed.get(id(call))
        kinds.append({
            "kind": label, "calls": counts[i], "to_learn": traffic.buckets[i] in events,
            "settled_after": event.calls if event else None,
            "samples": event.samples if event else None, "clear": event.clear if event else None,
            "cost_seconds": event.cost if event else None, "chosen": row.chosen if row else None,
            "best": row.best if row else None, "regret": row.regret if row else None,
            "gain": row.gain if row else None})
    table([(k["kind"], k["calls"], k["settled_after"] or ("not" if k["to_learn"] else "one kernel"),
            k["samples"] or "", f"{k['cost_seconds'] * 1e3:.2f}" if k["cost_seconds"] is not None
            else "", k["chosen"], "" if k["regret"] is None else f"{k['regret']:.1%}",
            "" if k["gain"] is None else f"{k['gain']:.2f}")
           for k in kinds],
          ("kind of call", "calls", "settled after", "samples", "cost ms", "serves", "regret",
           "gain over torch"))

    first = [t for t in timeline if t["at"] <= 60.0]
    ended = max((t["at"] for t in timeline if t["explored"]), default=0.0)
    after = [t for t in timeline if t["at"] > ended]
    shares = {name: sum(t["cost"] for t in part) / (sum(t["seconds"] for t in part) or 1.0)
              for name, part in (("first_minute", first), ("afterwards", after))}
    us = {name: statistics.median(found) for name, found in windows.items()}
    gains = {name: statistics.median(b / a for a, b in zip(windows["learned"], windows[name]))
             for name in ("learn off", "torch's own")}
    settled = [k for k in kinds if k["settled_after"] is not None
               and k["settled_after"] <= WITHIN_CALLS]
    worst = [k for k in kinds if k["regret"] is not None and k["regret"] > MAX_REGRET]
    print(
        f"\nexploring cost {shares['first_minute']:.2%} of the first "
        f"{sum(t['seconds'] for t in first):.0f} s (wanted at most {MAX_SHARE:.0%}); the last call "
        f"was explored after {ended:.0f} s, and since then it cost {shares['afterwards']:.2%} of "
        f"{sum(t['seconds'] for t in after):.0f} s")
    several = sum(k["to_learn"] for k in kinds)
    print(
        f"{len(settled)} of {several} kinds with several kernels were settled within "
        f"{WITHIN_CALLS} calls; regret above {MAX_REGRET:.0%}: "
        f"{', '.join(k['kind'] for k in worst) or 'none'}")
    print("the same stream in turns, us per call: "
          + ", ".join(f"{name} {value:.1f}" for name, value in us.items())
          + "; learned is " + ", ".join(f"{g:.2f} times as fast as {name}"
                                        for name, g in gains.items()))
    if late:
        print(f"no time to compile: {', '.join(sorted(set(late)))}")
    out = (args.out or Path(__file__).parent / "results"
           / f"learning-{args.device}-{env['cores']}-cores.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({
        "benchmark": "learning", "environment": env, "seconds": args.seconds,
        "shipped": not args.no_shipped, "kinds": kinds, "timeline": timeline, "cost_share": shares,
        "status": status._asdict(), "stream_us": us, "stream_gain": gains,
        "stream_windows_us": windows, "not_compiled": late,
        "skipped": [s.to_json() for s in report.skipped]}, indent=1) + "\n")
    print(f"\nwritten to {out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
