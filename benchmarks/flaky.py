"""What a flaky kernel costs the calls of other operations.

    python benchmarks/flaky.py [--calls 20000] [--rounds 5] [--json FILE]

A kernel of rms_norm fails 1, 5 or 50 % of its calls; layer_norm and a small linear layer, which
have nothing to do with it, are called in between and timed one by one. Beside each failing kernel
stands a busy neighbour: the same kernel, which at the same rate does as much Python work as a
recovery takes on this machine (measured at the start), and never fails. What any busy neighbour
costs a call, its caches being cold, is in both; what failures add is the difference.

All of these take turns in short slices within a round, so that what the machine does meanwhile hits
them alike. A ratio compares the mean or the p99 of one round with the neighbour's, or the quiet
kernel's, of the same round; the median over the rounds is shown. `always counted`: the breaker is
kept from opening, so that every failure is one, to the end.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import layerzero as lz

RATES = (0.01, 0.05, 0.5)
SLICES = 20                                    # of a round: how often all of them take turns
BREAKERS = {"as by default": 3, "always counted": 10**9}
QUIET, BUSY, FAILING = "quiet", "busy", "failing"


class Flaky:
    """A kernel of rms_norm that fails so many of its calls, or does so much work in them."""

    def __init__(self) -> None:
        self.rate, self.luck, self.failed, self.fails, self.work = 0.0, random.Random(0), 0, True, 0
        self.kernel = lz.Kernel("flaky.rms_norm", lz.op("rms_norm"), self.load,
                                less_work="it is here to be chosen")

    def load(self) -> Any:
        def run(x: torch.Tensor, weight: torch.Tensor | None = None,
                eps: float = 1e-6) -> torch.Tensor:
            if self.luck.random() < self.rate:
                self.failed += self.fails
                if self.fails:
                    raise RuntimeError("the kernel failed")
                busy(self.work)
            return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)

        return run


def busy(work: int) -> None:
    """Python work of the kind a recovery does: dicts, tuples, small objects."""
    for i in range(work):
        {str(n): (n, [i, n]) for n in range(8)}


def timed(calls: int) -> list[int]:
    """Nanoseconds of each innocent call."""
    x, weight = torch.randn(4, 64), torch.randn(64, 64)
    lz.layer_norm(x), lz.linear(x, weight), lz.rms_norm(x)
    took, clock = [], time.perf_counter_ns
    for _ in range(calls):
        lz.rms_norm(x)                         # may fail, recover and change what the world knows
        start = clock()
        lz.layer_norm(x)
        between = clock()
        lz.linear(x, weight)
        took += (between - start, clock() - between)
    return took


def work_of_a_recovery(flaky: Flaky) -> int:
    """How many turns of `busy` take as long as a recovery, by the CPU time of this thread."""
    def us(rate: float, calls: int = 300) -> float:
        flaky.rate, x = rate, torch.randn(4, 64)
        lz.rms_norm(x)
        start = time.thread_time()
        for _ in range(calls):
            lz.rms_norm(x)
        return (time.thread_time() - start) / calls * 1e6

    extra = statistics.median(us(1.0) - us(0.0) for _ in range(5))
    start = time.thread_time()
    busy(2000)
    return max(round(extra / ((time.thread_time() - start) / 2000 * 1e6)), 1)


def p99(took: list[int]) -> float:
    return float(statistics.quantiles(took, n=100)[98])


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__,
                                      formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--calls", type=int, default=20_000)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    logging.getLogger("layerzero").setLevel(logging.CRITICAL)
    lz.configure(log_level="critical")
    torch.set_num_threads(1)
    lz.configure(breaker_threshold=10**9)
    flaky = Flaky()
    lz.register(flaky.kernel)
    flaky.work = work_of_a_recovery(flaky)
    print(f"a recovery takes as long as {flaky.work} turns of the neighbour's work")
    found = []
    for breaker, threshold in BREAKERS.items():
        lz.configure(breaker_threshold=threshold, breaker_cooldown=0.05)
        cases = [(QUIET, 0.0), *((kind, rate) for rate in RATES for kind in (BUSY, FAILING))]
        rounds: dict[tuple[str, float], list[tuple[float, float]]] = {case: [] for case in cases}
        failed = dict.fromkeys(cases, 0)
        for _ in range(given.rounds):
            took: dict[tuple[str, float], list[int]] = {case: [] for case in cases}
            for _ in range(SLICES):
                for case in cases:
                    flaky.fails, flaky.rate, before = case[0] == FAILING, case[1], flaky.failed
                    took[case] += timed(max(given.calls // SLICES, 1))
                    failed[case] += flaky.failed - before
            for case in cases:
                rounds[case].append((statistics.fmean(took[case]), p99(took[case])))

        def against(case: tuple[str, float], other: tuple[str, float], which: int,
                    rounds: dict[tuple[str, float], list[tuple[float, float]]] = rounds) -> float:
            return statistics.median(a[which] / b[which]
                                     for a, b in zip(rounds[case], rounds[other]))

        for kind, rate in cases[1:]:
            case, quiet, neighbour = (kind, rate), (QUIET, 0.0), (BUSY, rate)
            found.append({
                "breaker": breaker, "kind": kind, "rate": rate, "failed": failed[case],
                "mean_us": statistics.median(m for m, _ in rounds[case]) / 1e3,
                "p99_us": statistics.median(t for _, t in rounds[case]) / 1e3,
                "mean_vs_quiet": against(case, quiet, 0), "p99_vs_quiet": against(case, quiet, 1),
                "mean_vs_busy": against(case, neighbour, 0),
                "p99_vs_busy": against(case, neighbour, 1)})
    lz.unregister(flaky.kernel.id)
    print(
        f"{'breaker':<16} {'neighbour':<9} {'rate':>5} {'faults':>7} {'mean us':>8} {'p99 us':>8}  "
        f" of the quiet one: {'mean':>6} {'p99':>6}   of the busy one: {'mean':>6} {'p99':>6}")
    for row in found:
        print(
            f"{row['breaker']:<16} {row['kind']:<9} {row['rate']:>5.0%} {row['failed']:>7} "
            f"{row['mean_us']:>8.2f} {row['p99_us']:>8.2f} {row['mean_vs_quiet']:>26.3f} "
            f"{row['p99_vs_quiet']:>6.3f} {row['mean_vs_busy']:>25.3f} {row['p99_vs_busy']:>6.3f}")
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
