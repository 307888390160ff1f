"""Merges attention over disjoint sets of keys by their log-sum-exp.

Part p is what attention over some of the keys gave: outs[p] and its log-sum-exp lses[p], natural
log. The result is attention over all of them: sum_p exp(lses[p] - lse) * outs[p] with lse =
logsumexp(lses). A part that saw no key has -inf as its log-sum-exp and counts nothing, whatever its
output holds; where every part is -inf, the result is 0 and -inf. Computed in the wider dtype of
`outs` and `lses`, float32 at least; each result has the dtype of its argument.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..spec.mistake import Mistake
from ..spec.op import Op, Tolerance
from ..spec.reason import Code
from ..spec.rules import at_least, dtypes, one_of
from .formulas.common import FLOATS
from .formulas.mistakes import LSE, change_results, replace_argument


def reference(outs: Tensor, lses: Tensor) -> Any:
    """Attention over all keys from parts over disjoint keys.

    outs: (parts, tokens, heads, head_dim). lses: (parts, tokens, heads), float32 or float64,
    natural log, -inf for a part without keys. Returns the output (tokens, heads, head_dim) and its
    log-sum-exp (tokens, heads), as lz.attention, lz.varlen_attention, lz.paged_attention and
    lz.grouped_attention give with return_lse.
    """
    acc_dtype = torch.promote_types(outs.dtype, lses.dtype)
    weights = merge_weights(wide := lses.to(acc_dtype))[..., None]
    parts = outs.to(acc_dtype).masked_fill((lses == -math.inf)[..., None], 0.0)
    return (weights * parts).sum(0).to(outs.dtype), merge_lses(wide).to(lses.dtype)


def merge_weights(lses: Tensor) -> Tensor:
    """Returns the share that each part has; 0 where none saw a key. By the maximum, not by the sum
    of all: far from zero that has few digits behind the point."""
    nothing = (lses == -math.inf).all(0)
    return torch.softmax(lses.masked_fill(nothing, 0.0), 0).masked_fill(nothing, 0.0)


def merge_lses(lses: Tensor) -> Tensor:
    """Returns the log-sum-exp over all parts. Where none saw a key it is -inf, and its gradient 0:
    that of torch.logsumexp is not a number there."""
    nothing = (lses == -math.inf).all(0)
    return torch.logsumexp(lses.masked_fill(nothing, 0.0), 0).masked_fill(nothing, -math.inf)


def meta(outs: Tensor, lses: Tensor) -> Any:
    return outs.new_empty(outs.shape[1:]), lses.new_empty(lses.shape[1:])


def inputs(parts: int = 3, tokens: int = 9, heads: int = 4, d: int = 32, empty: str = "",
           stride: str = "", spread: float = 3.0, lses_dtype: str = "", level: float = 0.0,
           dtype: torch.dtype = torch.float32, device: str = "cpu",
           seed: int = 0) -> dict[str, Any]:
    """Returns random parts. `empty`: "some" of them saw no key and hold NaN, or "row": one row has
    no key at all. `stride`: each part is "padded". `lses_dtype`: if not that of the sums.
    `level`: what every sum has, as masks of large negative numbers leave it."""
    gen = torch.Generator("cpu").manual_seed(seed)
    outs = torch.randn((parts, tokens, heads, d), generator=gen)
    lses = spread * torch.randn((parts, tokens, heads), generator=gen) + level
    if empty == "some":
        lses[torch.rand(lses.shape, generator=gen) < 0.4] = -math.inf
        lses[0, lses.eq(-math.inf).all(0)] = 0.0
    if empty == "row":
        lses[:, 1] = -math.inf
    outs[lses == -math.inf] = math.nan
    outs = outs.to(device=device, dtype=dtype)
    if stride == "padded":
        outs = torch.nn.functional.pad(outs, (0, 8))[..., :d]
    wide = getattr(torch, lses_dtype) if lses_dtype else torch.promote_types(dtype, torch.float32)
    return {"outs": outs, "lses": lses.to(device=device, dtype=wide)}


CASES: tuple[dict[str, Any], ...] = (
    {}, {"parts": 1}, {"parts": 2, "d": 128}, {"empty": "some"}, {"empty": "row"}, {"tokens": 0},
    {"stride": "padded", "heads": 1}, {"parts": 17, "tokens": 3, "d": 1}, {"spread": 60.0},
    {"level": -1e5}, {"level": -1e9, "spread": 200.0}, {"level": 1e4},
    {"lses_dtype": "float32", "empty": "some"}, {"lses_dtype": "float64", "d": 8})

STRESS: tuple[dict[str, Any], ...] = (
    {"parts": 64, "tokens": 65, "empty": "some"}, {"spread": 500.0}, {"heads": 65, "d": 257})

MISTAKES: tuple[Mistake, ...] = (
    replace_argument("scale", "the parts averaged", "lses", lambda v: torch.zeros_like(v["lses"])),
    replace_argument("convention", "the log-sum-exps taken for base 2", "lses",
                     lambda v: v["lses"] * math.log(2)),
    change_results("convention", "the largest log-sum-exp as that of all",
                   lambda v, out: (out[0], v["lses"].amax(0))), *LSE)

OP = Op(
    name="merge_attention", family="merge", reference=reference, meta=meta, inputs=inputs,
    cases=CASES, stress=STRESS, mistakes=MISTAKES,
    gradient_cases=({}, {"empty": "some"}, {"empty": "row"}, {"parts": 1}),
    reference_kernel={"workspace": "8 * parts * tokens * heads * head_dim"},
    tolerance=Tolerance({"float16": (1e-3, 1e-3), "bfloat16": (1e-2, 1e-2), "float32": (1e-5, 1e-5),
                         "float64": (1e-10, 1e-10)}, chained=True),
    shapes={"outs": "parts tokens heads head_dim", "lses": "parts tokens heads"},
    returns=("tokens heads head_dim", "tokens heads"), exact=("parts", "head_dim"),
    requires=(dtypes(*FLOATS), at_least("parts", 1, Code.EMPTY_INPUT),
              one_of("lses.dtype", "float32", "float64", code=Code.WRONG_TYPE)),
    flops="2 * parts * tokens * heads * head_dim",
    bytes="itemsize * (parts + 1) * tokens * heads * head_dim",
    differentiable=("outs", "lses"), outputs="Tensor[]",
)
