"""Where the time of a speculation round goes: kernels, launches, waits and host work.

    python benchmarks/speculative_profile.py --shape llama-3.2-1b --device cuda --dtype bfloat16
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import os
import pstats
import time
from collections import Counter
from typing import Any

import torch
from speculative import SHAPES, Scripted, llama, rate

import layerzero as lz
from layerzero.integrations.transformers.accelerate import _speculate


def profiled(what: str, run: Any, lines: int = 28) -> Any:
    profile, start = cProfile.Profile(), time.perf_counter()
    result = profile.runcall(run)
    print(f"{what}: {time.perf_counter() - start:.1f} s")
    for order in ("cumulative", "tottime"):
        text = io.StringIO()
        pstats.Stats(profile, stream=text).sort_stats(order).print_stats(lines)
        kept = [line[:150] for line in text.getvalue().splitlines() if line.strip()][5:]
        print("\n".join(kept))
    return result


def replay_us(replay: Any, times: int = 30) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")
    for _ in range(3):
        replay()
    begin.record()
    for _ in range(times):
        replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / times


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.2-1b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--new", type=int, default=64)
    args = parser.parse_args()
    start = time.perf_counter()
    model = llama(SHAPES[args.shape][0], getattr(torch, args.dtype), args.device)
    print(f"built in {time.perf_counter() - start:.1f} s")
    vocab = model.config.vocab_size
    prompt = torch.randint(3, vocab, (1, 32), generator=torch.Generator().manual_seed(1)).to(
        args.device)
    report = profiled("accelerate", lambda: lz.accelerate(model, measure=False))
    start = time.perf_counter()
    plain, text = rate(model, prompt, args.new, 2)
    print(f"plain {1e6 / plain:.0f} us/token ({time.perf_counter() - start:.1f} s)")
    _speculate(report, "prompt_lookup", None)
    speculation = report._speculation
    draft = speculation.draft = Scripted(text[0], 0.7, 4, None, vocab)

    def generate() -> None:
        model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=args.new,
                       do_sample=False)

    profiled("first speculation", generate, 22)
    start = time.perf_counter()
    before = speculation.stats.rounds
    generate()
    torch.cuda.synchronize()
    seconds, rounds = time.perf_counter() - start, speculation.stats.rounds - before
    print(f"{rounds} rounds, {seconds * 1e6 / rounds:.0f} us/round with the prompt, "
          f"{speculation.stats}")
    profiled("host of one generate", generate, 40)
    kinds = torch.profiler.ProfilerActivity
    before = speculation.stats.rounds
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as trace:
        generate()
        torch.cuda.synchronize()
    rounds = speculation.stats.rounds - before
    calls = Counter(e.name for e in trace.events() if e.name.startswith("cuda"))
    print({name: round(n / rounds, 1) for name, n in calls.most_common(14)}, "a round")
    print(trace.key_averages().table(sort_by="self_cuda_time_total", row_limit=22,
                                     max_name_column_width=60)[:9000])
    rows = {}
    for (_, count), fixed in speculation.rows.captured._fixed.items():
        if fixed._replay is not None:
            fixed._set_position(100)
            rows[count] = replay_us(fixed._replay)
    for count in (2, 8):
        drafted = Scripted(text[0], 1.0, count - 1, None, vocab)
        speculation.draft = drafted
        generate()
        for (_, n), fixed in speculation.rows.captured._fixed.items():
            if n == count and fixed._replay is not None:
                fixed._set_position(100)
                rows[n] = replay_us(fixed._replay)
    print("replays of rows, us:", {n: round(us) for n, us in sorted(rows.items())})
    print(report)
    if "OUT" in os.environ:
        with open(os.path.join(os.environ["OUT"], "profile.json"), "w") as file:
            json.dump({"plain_us": 1e6 / plain, "round_us": seconds * 1e6 / rounds,
                       "rows_us": rows}, file)
        trace.export_chrome_trace(os.path.join(os.environ["OUT"], "trace.json"))
    del draft


if __name__ == "__main__":
    main()
