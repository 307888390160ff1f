"""What of the demonstration fits this machine and the time there is, by a quick probe.

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

from ...models.decoder import DecoderConfig

WIDTH = 1024                                   # of the products that are probed
ROWS = (1, 4, 16, 64, 256)
LENGTHS = (16, 64, 256)                        # of the attention that is probed: 4 heads of 64
ENOUGH = 0.01                                  # seconds: after such a call no larger one is made
CALLS = 20                                     # of the block in one row, with what checks them
SAFETY = 2.0                                   # what is large leaves the caches


@dataclass(frozen=True)
class Step:
    """`tokens` new ones after `past` that are in the KV cache."""

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
    def steps(self) -> tuple[Step, ...]:
        return (Step(f"prefill {self.prompt}", self.prompt, 0),
                Step(f"decode at {self.prompt}", 1, self.prompt - 1),
                Step(f"decode at {self.context}", 1, self.context - 1))

    @property
    def parameters(self) -> int:
        """Of the matrices: so many multiplications a token takes beside attention."""
        return self.hidden * (2 * (self.heads + self.kv_heads) * self.head_dim + 3 * self.ffn)

    @property
    def config(self) -> DecoderConfig:
        return DecoderConfig(self.hidden, self.heads, self.kv_heads, layers=1,
                             head_dim=self.head_dim, inner=self.ffn, max_positions=self.context)


# The largest that fits the machine is taken. That of cuda is Llama 3 8B.
SIZES = {
    "cpu": (Sizes(1024, 16, 4, 64, 2816), Sizes(512, 8, 2, 64, 1408, prompt=256, context=2048),
            Sizes(256, 4, 1, 64, 704, prompt=64, context=1024),
            Sizes(128, 4, 1, 32, 352, prompt=16, context=256)),
    "cuda": (Sizes(4096, 32, 8, 128, 14336), Sizes(1024, 16, 4, 64, 2816)),
}


@dataclass(frozen=True)
class Pace:
    """Seconds per multiplication that torch itself needs in one dtype."""

    one_row: float
    rows: float
    attention: float

    def seconds(self, sizes: Sizes, step: Step) -> float:
        """One call of the block, as far as can be told."""
        products = step.tokens * sizes.parameters
        attended = 2 * sizes.heads * sizes.head_dim * step.tokens * (step.past + step.tokens)
        per_product = self.one_row if step.tokens == 1 else self.rows
        return products * per_product + attended * self.attention


@dataclass(frozen=True)
class LeftOut:
    """What is not shown, and why."""

    dtype: str
    step: str
    why: str

    def __str__(self) -> str:
        return f"{self.dtype}, {self.step}: {self.why}"


@dataclass(frozen=True)
class Fit:
    sizes: Sizes
    rows: tuple[tuple[str, Step], ...]         # dtype and step
    left_out: tuple[LeftOut, ...]


def probe(device: str, dtype: torch.dtype) -> Pace:
    """A tenth of a second or so, growing only while it is quick."""
    weight = torch.ones(WIDTH, WIDTH, dtype=dtype, device=device)
    products = []
    for rows in ROWS:
        took = _took(F.linear, torch.ones(rows, WIDTH, dtype=dtype, device=device), weight)
        products.append(took / (rows * WIDTH * WIDTH))
        if took > ENOUGH:
            break
    attention = 0.0
    for length in LENGTHS:
        heads = torch.ones(1, 4, length, 64, dtype=dtype, device=device)
        took = _took(F.scaled_dot_product_attention, heads, heads, heads)
        attention = took / (2 * 4 * length * length * 64)
        if took > ENOUGH:
            break
    return Pace(products[0], products[-1], attention)


def _took(call: Any, *inputs: torch.Tensor) -> float:
    """Seconds of the second call: the first loads code and starts threads."""
    wait = torch.cuda.synchronize if inputs[0].is_cuda else lambda: None
    call(*inputs)
    wait()
    began = time.perf_counter()
    call(*inputs)
    wait()
    return time.perf_counter() - began


def fit(candidates: Sequence[Sizes], paces: Mapping[str, Pace], seconds: float) -> Fit:
    """The largest sizes of which every step in the first dtype fits into its share of the time,
    else the smallest; and of the other dtypes what fits."""
    first = next(iter(paces))

    def needs(dtype: str, sizes: Sizes, step: Step) -> float:
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
            one, slower = pace.seconds(sizes, step), pace.rows / paces[first].rows
            why = f"one pass is expected to take {one:.2g} s, and {CALLS} do not fit"
            if slower >= 2:
                why += (f"; torch's products take {slower:.0f} times as long as in {first} "
                        "on this machine")
            left_out.append(LeftOut(dtype, step.name, why))
    return Fit(sizes, tuple(rows), tuple(left_out))
