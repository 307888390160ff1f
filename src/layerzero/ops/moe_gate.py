"""Mixture-of-experts routing: the experts of each token and their weights.

Scores are the softmax or the sigmoid of the logits. The `top_k` best experts are chosen by score
plus `e_score_correction_bias`, best first; their weights are the scores without that bias, divided
by their sum (normalize), times `routed_scaling_factor`. With n_group > 1 (DeepSeek) the experts
form n_group equal groups and only those of the `topk_group` best groups can be chosen; the score of
a group is that of its best expert, or with a bias correction the sum of its two best. Everything is
computed in float32, and of equal scores the lower index wins, so that every kernel chooses the same
experts.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from ..spec.errors import InvalidCall
from ..spec.mistake import Mistake
from ..spec.op import INT32, Op, Tolerance
from ..spec.reason import Code, Reason
from ..spec.rules import at_least, dtypes, one_of
from .formulas.common import FLOATS, random_rows
from .formulas.mistakes import ROUTED, drop_argument, replace_argument
from .formulas.moe import route


def reference(
    logits: Tensor, top_k: int, scoring: Literal["softmax", "sigmoid"] = "softmax",
    normalize: bool = True, *, n_group: int = 1, topk_group: int = 1,
    e_score_correction_bias: Tensor | None = None, routed_scaling_factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Returns (ids int64, weights float32), both (..., top_k), for logits (..., experts)."""
    return route(logits, top_k, scoring, normalize, n_group, topk_group, e_score_correction_bias,
                 routed_scaling_factor)


def meta(logits: Tensor, top_k: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    shape = (*logits.shape[:-1], top_k)
    return logits.new_empty(shape, dtype=torch.int64), logits.new_empty(shape, dtype=torch.float32)


def inputs(
    rows: tuple[int, ...] = (9,), experts: int = 16, top_k: int = 4, scoring: str = "softmax",
    normalize: bool = True, n_group: int = 1, topk_group: int = 1, bias: bool = False,
    bias_dtype: str = "float32", scale: float = 1.0, special: str = "", stride: str = "",
    dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0,
) -> dict[str, Any]:
    gen = torch.Generator("cpu").manual_seed(seed)
    logits = random_rows(gen, rows, experts, stride, dtype, "cpu")
    if special == "ties":
        logits = logits.round()
    elif special == "equal":
        logits = torch.zeros_like(logits)
    elif special == "extreme":
        logits = logits * 300                  # most scores are 0 or 1 in float32
    elif special == "faint":                   # what is divided by a sum of them is not
        logits = logits * 4 - 30
    elif special == "masked":
        logits[..., : experts // 2] = -torch.inf
    correction = torch.randn(experts, generator=gen).to(device) if bias else None
    if correction is not None and special == "below":      # no score is above zero
        correction = correction / 4 - 2.5
    elif correction is not None and special == "barred" and n_group == 1:  # no token may have them
        correction[1::5] = -torch.inf
    elif correction is not None and special == "ties":
        correction = correction.round()
    if correction is not None:
        correction = correction.to(getattr(torch, bias_dtype))
    return {"logits": logits.to(device), "top_k": top_k, "scoring": scoring, "normalize": normalize,
            "n_group": n_group, "topk_group": topk_group, "e_score_correction_bias": correction,
            "routed_scaling_factor": scale}


CASES: tuple[dict[str, Any], ...] = (
    {}, {"scoring": "sigmoid"}, {"normalize": False},
    {"normalize": False, "scoring": "sigmoid", "scale": 2.5},
    {"top_k": 1}, {"top_k": 16}, {"experts": 1, "top_k": 1}, {"rows": ()}, {"rows": (0,)},
    {"rows": (2, 3)}, {"experts": 128, "top_k": 8, "rows": (33,)}, {"bias": True},
    {"bias": True, "scoring": "sigmoid", "scale": 2.827},
    {"n_group": 4, "topk_group": 2, "bias": True, "special": "below", "scoring": "sigmoid"},
    {"n_group": 4, "topk_group": 2}, {"n_group": 4, "topk_group": 2, "bias": True,
                                      "scoring": "sigmoid"},
    {"experts": 256, "top_k": 8, "n_group": 8, "topk_group": 4, "bias": True, "scoring": "sigmoid",
     "scale": 2.5},
    *({"experts": 256, "top_k": 8, "rows": (40,), "bias": True, "bias_dtype": dtype,
       "scoring": "sigmoid"} for dtype in ("bfloat16", "float16")),
    {"n_group": 16, "topk_group": 5}, {"n_group": 16, "topk_group": 5, "bias": True},
    *({"special": s} for s in ("ties", "equal", "extreme", "masked")),
    *({"special": s, "scoring": "sigmoid"} for s in ("ties", "extreme", "masked", "faint")),
    {"special": "barred", "bias": True, "scoring": "sigmoid"}, {"special": "barred", "bias": True},
    {"special": "ties", "n_group": 4, "topk_group": 2}, {"stride": "sparse"},
    *({"special": "ties", "n_group": 4, "topk_group": 2, "bias": True, "scoring": s, "rows": (40,)}
      for s in ("softmax", "sigmoid")),
)


def extra_check(values: dict[str, Any], facts: Any) -> None:
    experts, top_k, n_group, topk_group = (facts[n]
                                           for n in ("experts", "top_k", "n_group", "topk_group"))
    if experts % n_group:
        raise InvalidCall.of("moe_gate", Reason(
            Code.VALUE_OUT_OF_RANGE, f"a divisor of the {experts} experts", n_group, "n_group"))
    if topk_group > n_group:
        raise InvalidCall.of("moe_gate", Reason(Code.VALUE_OUT_OF_RANGE, f"<= n_group ({n_group})",
                                                topk_group, "topk_group"))
    allowed = experts if n_group == 1 else topk_group * (experts // n_group)
    if top_k > allowed:
        raise InvalidCall.of("moe_gate", Reason(
            Code.VALUE_OUT_OF_RANGE, f"<= {allowed}, the experts that may be chosen", top_k,
            "top_k"))

MISTAKES: tuple[Mistake, ...] = (
    *ROUTED, Mistake("convention", "the correction bias left out",
                        drop_argument("e_score_correction_bias")),
    replace_argument("convention", "groups ignored", "n_group", 1))

STRESS: tuple[dict[str, Any], ...] = (         # rows beyond 2^16, experts beyond 256
    {"rows": (66_001,), "experts": 4, "top_k": 1}, {"experts": 384, "top_k": 8, "rows": (3,)},
    # a prompt: more rows than decoding has, with groups, scores below zero, equal scores
    {"rows": (2_050,), "n_group": 4, "topk_group": 2, "bias": True, "special": "below",
     "scoring": "sigmoid"},
    {"rows": (2_050,), "n_group": 8, "topk_group": 3, "special": "ties", "normalize": False,
     "scale": 2.5}, {"n_group": 4, "topk_group": 3, "bias": True, "special": "below"})

OP = Op(
    name="moe_gate", family="moe", reference=reference, meta=meta, inputs=inputs,
    cases=CASES, stress=STRESS,
    mistakes=MISTAKES,
    tolerance=Tolerance({"float32": (1e-5, 1e-6)}),
    shapes={"logits": "*rows experts", "e_score_correction_bias": "experts"},
    exact=("experts", "top_k", "n_group", "topk_group"),
    ranges={"top_k": INT32, "n_group": INT32, "topk_group": INT32},
    requires=(
        dtypes(*FLOATS), at_least("top_k", 1, Code.VALUE_OUT_OF_RANGE),
        at_least("n_group", 1, Code.VALUE_OUT_OF_RANGE),
        at_least("topk_group", 1, Code.VALUE_OUT_OF_RANGE),
        one_of("e_score_correction_bias.dtype", None, *FLOATS, code=Code.DTYPE_UNSUPPORTED),
    ),
    flops="20 * rows * experts", bytes="itemsize * rows * experts", extra_check=extra_check,
    outputs="Tensor[]",
)
