"""ALiBi: the bias -slope * |distance| that each head adds to its attention scores.

The distance of key j from query i is relative to the *diagonal*, as in lz.attention: query i is
aligned with key i for causal_align="top_left", and the last query with the last key for
"bottom_right", as decoding with a KV cache needs. With is_causal later keys get -inf, so that the
bias alone makes attention causal. There is one slope per head (lz.positions.alibi_slopes;
lz.positions.alibi_bias takes the number of heads instead);
the result has their dtype and is computed in float32 or wider.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, Literal

import torch
from torch import Tensor

from ..spec.errors import CausalAlignmentWarning
from ..spec.mistake import Mistake
from ..spec.op import INT32, Op, Tolerance
from ..spec.reason import Code
from ..spec.rules import at_least, dtypes
from .formulas.common import FLOATS, position_terms
from .formulas.mistakes import change_results, flip_alignment, replace_argument


def reference(slopes: Tensor, seq_q: int, seq_k: int, *,
              causal_align: Literal["top_left", "bottom_right"] | None = None,
              is_causal: bool = False) -> Tensor:
    """Returns the bias (heads, seq_q, seq_k) to add to attention scores."""
    upcast = slopes.to(torch.promote_types(slopes.dtype, torch.float32))
    bias, hidden = position_terms(seq_q, seq_k, is_causal, causal_align, -1, -1, upcast,
                                  slopes.device)
    assert bias is not None                    # there are slopes
    return (bias[0] if hidden is None else bias[0].masked_fill(hidden, -math.inf)).to(slopes.dtype)


def meta(slopes: Tensor, seq_q: int, seq_k: int, **kwargs: Any) -> Tensor:
    return slopes.new_empty((slopes.shape[0], seq_q, seq_k))


def default_slopes(heads: int) -> list[float]:
    """Returns the paper's slopes: 2^(-8/n), 2^(-16/n), ... for n heads. If n is not a power of two:
    those of the next lower power, then every second one of the next higher."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8.0 * i / power) for i in range(1, power + 1)]
    return slopes + [2.0 ** (-4.0 * i / power) for i in range(1, 2 * (heads - power), 2)]


def inputs(heads: int = 4, sq: int = 17, sk: int = 17, align: str | None = None,
           causal: bool = False, zero: bool = False, dtype: torch.dtype = torch.float32,
           device: str = "cpu", seed: int = 0) -> dict[str, Any]:
    """`zero`: every other head has no bias."""
    slopes = torch.tensor(default_slopes(heads) if heads else []).to(device=device, dtype=dtype)
    if zero:
        slopes[::2] = 0.0
    return {"slopes": slopes, "seq_q": sq, "seq_k": sk, "causal_align": align, "is_causal": causal}


CASES: tuple[dict[str, Any], ...] = (
    {}, {"causal": True}, {"heads": 1}, {"heads": 12}, {"heads": 0}, {"sq": 1, "sk": 1}, {"sq": 0},
    {"sk": 0}, {"sq": 1, "sk": 65, "align": "bottom_right"},
    {"sq": 5, "sk": 9, "align": "top_left", "causal": True},
    {"sq": 5, "sk": 9, "align": "bottom_right", "causal": True},
    {"sq": 9, "sk": 5, "align": "bottom_right"},
    {"sq": 9, "sk": 5, "align": "top_left", "causal": True}, {"sq": 0, "sk": 0},
    {"heads": 2, "sq": 1, "sk": 3000, "align": "bottom_right"},
    {"zero": True}, {"zero": True, "causal": True},
    {"heads": 2, "sq": 300, "sk": 300},        # positions that bfloat16 does not have
)


def extra_check(values: dict[str, Any], facts: Any) -> None:
    if facts["causal_align"] is None and facts["seq_q"] != facts["seq_k"]:
        warnings.warn(
            f"lz.alibi: query and key lengths differ ({facts['seq_q']} and {facts['seq_k']}) and "
            "causal_align is not given: 'top_left' is used. Decoding with a KV cache wants "
            "causal_align='bottom_right'.",
            CausalAlignmentWarning, stacklevel=6)

def _signed_distance(v: Any, out: tuple[Any, ...]) -> Any:
    """The bias of keys behind the query with the other sign."""
    offset = v["seq_k"] - v["seq_q"] if v["causal_align"] == "bottom_right" else 0
    later = torch.ones_like(out[0], dtype=torch.bool).triu(1 + offset)
    return None if v["is_causal"] else (torch.where(later, -out[0], out[0]),)


MISTAKES: tuple[Mistake, ...] = (
    Mistake("alignment", "the diagonal at the other corner", flip_alignment),
    replace_argument("mask", "causality ignored", "is_causal", False),
    replace_argument("position bias", "the other sign", "slopes", lambda v: -v["slopes"]),
    change_results("position bias", "later keys at a negative distance", _signed_distance))

STRESS: tuple[dict[str, Any], ...] = ({"heads": 1, "sq": 3, "sk": 66_013},)

OP = Op(
    name="alibi", family="position", reference=reference, meta=meta, inputs=inputs,
    cases=CASES, stress=STRESS,
    mistakes=MISTAKES,
    tolerance=Tolerance({"float16": (1e-4, 1e-4), "bfloat16": (1e-3, 1e-3), "float32": (1e-6, 1e-6),
                         "float64": (1e-10, 1e-10)}),
    shapes={"slopes": "heads"}, returns=("heads seq_q seq_k",),
    ranges={"seq_q": INT32, "seq_k": INT32},
    requires=(dtypes(*FLOATS), at_least("seq_q", 0, Code.VALUE_OUT_OF_RANGE),
              at_least("seq_k", 0, Code.VALUE_OUT_OF_RANGE)),
    flops="2 * heads * seq_q * seq_k", bytes="itemsize * heads * seq_q * seq_k",
    differentiable=("slopes",), extra_check=extra_check,
)
