"""What a device can do at best: one bandwidth and one matmul rate, measured. The roof of every percentage."""

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
NOISY = 0.25           # by so much the middle sample may be slower than the best


class Reading(NamedTuple):
    rates: Rates
    noisy: bool                                # the samples differ so much that the device was busy


def measure_rates(device: str, seconds: float = 1.5) -> Reading:
    """The best of several samples of each: noise only ever slows down. Takes about `seconds`."""
    watch, began = stopwatch(device), time.perf_counter()
    spreads: list[float] = []
    with torch.no_grad(), no_collection():
        moved = _bandwidth(watch, device, began + seconds / 2, spreads)
        rates = [_matmul_rate(watch, device, dtype, began + seconds, spreads) for dtype in matmul_dtypes(device)]
    return Reading(Rates(max(rates), moved), max(spreads) > NOISY)


def matmul_dtypes(device: str) -> tuple[torch.dtype, ...]:
    """A GPU's rate is that of its 16-bit matmul; a CPU's the better of float32 and, where it has it, bfloat16."""
    bf16 = hardware.probe(device).supports_bf16
    if device == "cpu":
        return (torch.float32, torch.bfloat16) if bf16 else (torch.float32,)
    return (torch.bfloat16 if bf16 else torch.float16,)


def _bandwidth(watch: Watch, device: str, end: float, spreads: list[float]) -> float:
    """Bytes per microsecond: the better of reading memory and copying half of it to the other half."""
    size = min(max(256 << 20, 2 * cache_bytes(device)), free_bytes(device) // 8)
    memory = torch.ones(max(size // 8, 1 << 16) * 2, dtype=torch.float32, device=device)
    source, target = memory.chunk(2)
    moved = memory.numel() * memory.element_size()
    ways: tuple[Callable[[], Any], ...] = (memory.sum, lambda: target.copy_(source))
    return moved / min(_best_us(watch, way, end, spreads) for way in ways)


def _matmul_rate(watch: Watch, device: str, dtype: torch.dtype, end: float, spreads: list[float]) -> float:
    """FLOPs per microsecond, of the size that is fastest among those there is time for."""
    best = 0.0
    for n in _sizes(device):
        began = time.perf_counter()
        try:
            a, b = (torch.ones(n, n, dtype=dtype, device=device) for _ in range(2))
            us = _best_us(watch, lambda a=a, b=b: a @ b, end, spreads)  # type: ignore[misc]
            best = max(best, 2.0 * n ** 3 / us)
        except OUT_OF_MEMORY:
            break
        if time.perf_counter() + 8 * (time.perf_counter() - began) > end:      # the next has eight times the work
            break
    return best


def _sizes(device: str) -> Iterator[int]:
    yield from (512, 1024, 2048, 4096) if device == "cpu" else (2048, 4096, 8192)


def _best_us(watch: Watch, way: Callable[[], Any], end: float, spreads: list[float]) -> float:
    watch.sample(way, 1)                       # loads code, starts threads, touches the memory
    samples = [watch.sample(way, 1)]
    for _ in range(SAMPLES):
        if time.perf_counter() > end:
            break
        samples.append(watch.sample(way, 1))
    best = max(min(samples), 1e-3)
    spreads.append(statistics.median(samples) / best - 1.0)
    return best
