"""What a flaky kernel costs the calls of other operations.

    python benchmarks/flaky.py [--calls 20000] [--rounds 5] [--json FILE]

A kernel of rms_norm fails 0, 1, 5 or 50 % of its calls; layer_norm and a small linear layer, which have nothing to do
with it, are called in between and timed one by one. The rates take turns within a round, so that what the machine does
meanwhile hits them alike; a ratio compares a rate with 0 % of the same round, and the median over the rounds is shown.
`always counted`: the breaker is kept from opening, so that every failure is one, to the end. `no failure`: the kernel
does as much Python work as a recovery takes, and does not fail: what any busy neighbour costs a call, its caches being
cold, is in that row; what failures add is the difference.
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
from layerzero.runtime import world as worlds

RATES = (0.0, 0.01, 0.05, 0.5)
BUSY = {str(i): [i, str(i), {"of": i / 7}] for i in range(40)}     # to write and read: some 150 us


class Flaky:
    """A kernel of rms_norm that fails so many of its calls."""

    def __init__(self) -> None:
        self.rate, self.luck, self.failed, self.fails = 0.0, random.Random(0), 0, True
        self.kernel = lz.Kernel("flaky.rms_norm", lz.op("rms_norm"), self.load, less_work="it is here to be chosen")

    def load(self) -> Any:
        def run(x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6) -> torch.Tensor:
            if self.luck.random() < self.rate:
                self.failed += self.fails
                if self.fails:
                    raise RuntimeError("the kernel failed")
                json.loads(json.dumps(BUSY))
            return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)

        return run


def timed(flaky: Flaky, calls: int) -> list[int]:
    """Nanoseconds of each innocent call."""
    x, weight = torch.randn(4, 64), torch.randn(64, 64)
    lz.layer_norm(x), lz.linear(x, weight), lz.rms_norm(x)
    took, clock = [], time.perf_counter_ns
    for _ in range(calls):
        lz.rms_norm(x)                         # may fail, recover and change what the world knows
        began = clock()
        lz.layer_norm(x)
        between = clock()
        lz.linear(x, weight)
        took += (between - began, clock() - between)
    return took


def p99(took: list[int]) -> float:
    return float(statistics.quantiles(took, n=100)[98])


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--calls", type=int, default=20_000)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    logging.getLogger("layerzero").setLevel(logging.CRITICAL)
    lz.configure(log_level="critical")
    torch.set_num_threads(1)
    found = []
    for breaker in ("as by default", "always counted", "no failure"):
        lz.configure(breaker_threshold=3 if breaker == "as by default" else 10**9, breaker_cooldown=0.05)
        rounds: dict[float, list[tuple[float, float]]] = {rate: [] for rate in RATES}
        failed, epochs = dict.fromkeys(RATES, 0), dict.fromkeys(RATES, 0)
        for _ in range(given.rounds):
            for rate in RATES:
                flaky = Flaky()
                flaky.fails = breaker != "no failure"
                lz.register(flaky.kernel)
                flaky.rate, epoch = rate, worlds.current().epoch
                took = timed(flaky, given.calls)
                failed[rate] += flaky.failed
                epochs[rate] += worlds.current().epoch - epoch
                lz.unregister(flaky.kernel.id)
                rounds[rate].append((statistics.fmean(took), p99(took)))
        for rate, pairs in rounds.items():
            ratios = [(mean / mean0, tail / tail0) for (mean, tail), (mean0, tail0) in zip(pairs, rounds[0.0])]
            found.append({"breaker": breaker, "rate": rate,
                          "failed": failed[rate], "worlds": epochs[rate],
                          "mean_us": statistics.median(m for m, _ in pairs) / 1e3,
                          "p99_us": statistics.median(t for _, t in pairs) / 1e3,
                          "mean_ratio": statistics.median(m for m, _ in ratios),
                          "p99_ratio": statistics.median(t for _, t in ratios)})
    print(f"{'breaker':<16} {'rate':>6} {'faults':>8} {'worlds':>7} {'mean us':>9} {'p99 us':>9} {'mean x':>8} "
          f"{'p99 x':>8}")
    for row in found:
        print(f"{row['breaker']:<16} {row['rate']:>6.0%} {row['failed']:>8} {row['worlds']:>7} {row['mean_us']:>9.2f} "
              f"{row['p99_us']:>9.2f} {row['mean_ratio']:>8.3f} {row['p99_ratio']:>8.3f}")
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
