"""The measured peak rates of a device: bandwidth and matmul rate, roofline of percentages."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from ..machine import hardware
from ..machine.faults import OUT_OF_MEMORY
from ..machine.memory import free_bytes
from ..perf.record import Rates
from .harness import Watch, cache_bytes, no_collection, stopwatch

SAMPLES = 8
NOISY = 0.25           # the median sample may be this much slower than the best


class Reading(NamedTuple):
    rates: Rates
    noisy: bool                                # the samples differ so much that the device was busy


def measure_rates(device: str, seconds: float) -> Reading:
    """Measure the best of several samples of each: noise only slows down. Takes about `seconds`."""
    watch, start = stopwatch(device), time.perf_counter()
    spreads: list[float] = []
    with torch.no_grad(), no_collection():
        bandwidth = _bandwidth(watch, device, start + seconds / 2, spreads)
        rates = [_matmul_rate(watch, device, dtype, start + seconds, spreads)
                 for dtype in matmul_dtypes(device)]
    return Reading(Rates(max(rates), bandwidth), max(spreads) > NOISY)


def matmul_dtypes(device: str) -> tuple[torch.dtype, ...]:
    """Return the dtypes to time: 16-bit on a GPU; float32, maybe bfloat16, on a CPU."""
    bf16 = hardware.probe(device).supports_bf16
    if device == "cpu":
        return (torch.float32, torch.bfloat16) if bf16 else (torch.float32,)
    return (torch.bfloat16 if bf16 else torch.float16,)


def _bandwidth(watch: Watch, device: str, end: float, spreads: list[float]) -> float:
    """Measure bytes per microsecond: the better of reading memory and copying half of it."""
    size = min(max(256 << 20, 2 * cache_bytes(device)), free_bytes(device) // 8)
    memory = torch.ones(max(size // 8, 1 << 16) * 2, dtype=torch.float32, device=device)
    source, target = memory.chunk(2)
    nbytes = memory.numel() * memory.element_size()
    contestants: tuple[Callable[[], Any], ...] = (memory.sum, lambda: target.copy_(source))
    return nbytes / min(_best_us(watch, contestant, end, spreads) for contestant in contestants)


def _matmul_rate(watch: Watch, device: str, dtype: torch.dtype, end: float,
                 spreads: list[float]) -> float:
    """Measure FLOPs per microsecond, of the fastest size there is time for."""
    best = 0.0
    for n in _sizes(device):
        start = time.perf_counter()
        try:
            a, b = (torch.ones(n, n, dtype=dtype, device=device) for _ in range(2))
            us = _best_us(watch, lambda a=a, b=b: a @ b, end, spreads)  # type: ignore[misc]
            best = max(best, 2.0 * n ** 3 / us)
        except OUT_OF_MEMORY:
            break
        # the next has eight times the work
        if time.perf_counter() + 8 * (time.perf_counter() - start) > end:
            break
    return best


def _sizes(device: str) -> Iterator[int]:
    # the smallest takes a millisecond: other programs seldom interrupt that
    yield from (256, 512, 1024, 2048, 4096) if device == "cpu" else (2048, 4096, 8192)


def _best_us(watch: Watch, contestant: Callable[[], Any], end: float,
             spreads: list[float]) -> float:
    watch.sample(contestant, 1)                # loads code, starts threads, touches the memory
    samples = [watch.sample(contestant, 1)]
    for _ in range(SAMPLES):
        if time.perf_counter() > end:
            break
        samples.append(watch.sample(contestant, 1))
    best = max(min(samples), 1e-3)
    spreads.append(statistics.median(samples) / best - 1.0)
    return best
