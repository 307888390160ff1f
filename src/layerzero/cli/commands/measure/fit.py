"""Which sizes and dtypes of `lz demo` fit this machine and its time budget, by a quick probe.

Not every CPU multiplies in every dtype: without bfloat16 arithmetic torch takes a hundred times as
long as in float32.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ....models.decoder_config import DecoderConfig

WIDTH = 1024                                   # of the probed matrix products
ROWS = (1, 4, 16, 64, 256)
LENGTHS = (16, 64, 256)                        # of the probed attention: 4 heads of 64
ENOUGH = 0.01                                  # seconds: a call this long ends the probe
PROBES = 5                                     # calls of each probe, if there is time
CALLS = 20                                     # of the block in one row, checks included
SAFETY = 2.0                                   # larger calls no longer fit the caches


@dataclass(frozen=True)
class ModelStep:
    """One step: `tokens` new tokens after `past` tokens in the KV cache."""

    name: str
    tokens: int
    past: int


@dataclass(frozen=True)
class Sizes:
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    prompt: int = 512
    context: int = 4096

    @property
    def steps(self) -> tuple[ModelStep, ...]:
        return (ModelStep(f"prefill {self.prompt}", self.prompt, 0),
                ModelStep(f"decode at {self.prompt}", 1, self.prompt - 1),
                ModelStep(f"decode at {self.context}", 1, self.context - 1))

    @property
    def parameters(self) -> int:
        """Elements of the matrices, which is the multiplications per token outside attention."""
        return self.hidden * (2 * (self.heads + self.kv_heads) * self.head_dim + 3 * self.ffn)

    @property
    def config(self) -> DecoderConfig:
        return DecoderConfig(self.hidden, self.heads, self.kv_heads, layers=1,
                             head_dim=self.head_dim, inner=self.ffn, max_positions=self.context)


# The largest that fits is taken; the first of cuda is Llama 3 8B.
SIZES = {
    "cpu": (Sizes(1024, 16, 4, 64, 2816), Sizes(512, 8, 2, 64, 1408, prompt=256, context=2048),
            Sizes(256, 4, 1, 64, 704, prompt=64, context=1024),
            Sizes(128, 4, 1, 32, 352, prompt=16, context=256)),
    "cuda": (Sizes(4096, 32, 8, 128, 14336), Sizes(1024, 16, 4, 64, 2816)),
}


@dataclass(frozen=True)
class Pace:
    """Seconds per multiplication of plain torch in one dtype."""

    one_row: float
    rows: float
    attention: float

    def seconds(self, sizes: Sizes, step: ModelStep) -> float:
        """Estimate one call of the block."""
        products = step.tokens * sizes.parameters
        attended = 2 * sizes.heads * sizes.head_dim * step.tokens * (step.past + step.tokens)
        per_product = self.one_row if step.tokens == 1 else self.rows
        return products * per_product + attended * self.attention


@dataclass(frozen=True)
class LeftOut:
    """A row that is not shown, and the reason."""

    dtype: str
    step: str
    why: str

    def __str__(self) -> str:
        return f"{self.dtype}, {self.step}: {self.why}"


@dataclass(frozen=True)
class Fit:
    sizes: Sizes
    rows: tuple[tuple[str, ModelStep], ...]         # dtype and step
    left_out: tuple[LeftOut, ...]


def probe(device: str, dtype: torch.dtype) -> Pace:
    """Time growing products and attention for about a tenth of a second."""
    weight = torch.ones(WIDTH, WIDTH, dtype=dtype, device=device)
    products = []
    for rows in ROWS:
        seconds = _seconds(F.linear, torch.ones(rows, WIDTH, dtype=dtype, device=device), weight)
        products.append(seconds / (rows * WIDTH * WIDTH))
        if seconds > ENOUGH:
            break
    attention = 0.0
    for length in LENGTHS:
        heads = torch.ones(1, 4, length, 64, dtype=dtype, device=device)
        seconds = _seconds(F.scaled_dot_product_attention, heads, heads, heads)
        attention = seconds / (2 * 4 * length * length * 64)
        if seconds > ENOUGH:
            break
    return Pace(products[0], products[-1], attention)


def _seconds(call: Any, *inputs: torch.Tensor) -> float:
    """Time some calls after the first, which loads code and starts threads; return the least: on a
    busy machine the others include the turns of other programs."""
    wait = torch.cuda.synchronize if inputs[0].is_cuda else lambda: None
    call(*inputs)
    wait()
    times: list[float] = []
    while len(times) < PROBES and sum(times) < ENOUGH:
        start = time.perf_counter()
        call(*inputs)
        wait()
        times.append(time.perf_counter() - start)
    return min(times)


def fit(candidates: Sequence[Sizes], paces: Mapping[str, Pace], seconds: float) -> Fit:
    """Choose the largest sizes whose every step fits its share of the time in the first dtype, else
    the smallest; of the other dtypes, the steps that fit."""
    first = next(iter(paces))

    def needs(dtype: str, sizes: Sizes, step: ModelStep) -> float:
        return CALLS * SAFETY * paces[dtype].seconds(sizes, step)

    share = seconds / (len(paces) * len(candidates[0].steps))
    fitting = (s for s in candidates if all(needs(first, s, step) <= share for step in s.steps))
    sizes = next(fitting, candidates[-1])
    rows, left_out = [], []
    for dtype, pace in paces.items():
        for step in sizes.steps:
            if needs(dtype, sizes, step) <= share:
                rows.append((dtype, step))
                continue
            expected, slowdown = pace.seconds(sizes, step), pace.rows / paces[first].rows
            reason = f"one pass is expected to take {expected:.2g} s, and {CALLS} do not fit"
            if slowdown >= 2:
                reason += (f"; torch's products take {slowdown:.0f} times as long as in {first} "
                           "on this machine")
            left_out.append(LeftOut(dtype, step.name, reason))
    if not rows:                               # something is shown, if it can be done in the time
        step = min(sizes.steps, key=lambda step: needs(first, sizes, step))
        rows.append((first, step))
        left_out = [left for left in left_out if (left.dtype, left.step) != (first, step.name)]
    return Fit(sizes, tuple(rows), tuple(left_out))
