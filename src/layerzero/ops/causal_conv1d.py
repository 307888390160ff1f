"""Causal depthwise convolution over a sequence (Mamba, Gated DeltaNet, LFM2), with its state.

Each channel has a filter of its own, which sees a token and the `width - 1` before it: before the
first token, those of `initial_states`, or zeros. Computed in float32 (float64 stays).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ..spec.mistake import Mistake
from ..spec.op import Op, Tolerance
from ..spec.reason import Code
from ..spec.rules import Wording, at_least, dtypes, one_of
from .formulas.common import FLOATS
from .formulas.mistakes import drop_argument, replace_argument


def reference(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, initial_states: Tensor | None = None, *,
    activation: Literal["silu"] | None = None, return_final_states: bool = False,
) -> Any:
    """Returns the outputs (batch, channels, seq), with return_final_states also the last tokens.

    x: (batch, channels, seq). weight: (channels, width). initial_states: the tokens before x,
    (batch, channels, state_len) with state_len >= width - 1; the final ones are as many, or
    width - 1.
    """
    acc_dtype = torch.promote_types(x.dtype, torch.float32)
    width, length = weight.shape[1], x.shape[2]
    before = x.new_zeros(*x.shape[:2], width - 1) if initial_states is None else initial_states
    tokens = torch.cat((before, x), -1)
    seen = tokens[..., before.shape[-1] - width + 1:].to(acc_dtype)
    out = torch.zeros_like(x, dtype=acc_dtype)
    for i in range(width):
        out = out + seen[..., i:i + length] * weight[:, i, None].to(acc_dtype)
    if bias is not None:
        out = out + bias[:, None].to(acc_dtype)
    out = (F.silu(out) if activation else out).to(x.dtype)
    if not return_final_states:
        return out
    return out, tokens[..., tokens.shape[-1] - before.shape[-1]:].clone()


def meta(x: Tensor, weight: Tensor, bias: Tensor | None = None,
         initial_states: Tensor | None = None, *, return_final_states: bool = False,
         **kwargs: Any) -> Any:
    out = x.new_empty(x.shape)
    kept = weight.shape[1] - 1 if initial_states is None else initial_states.shape[2]
    return (out, x.new_empty((*x.shape[:2], kept))) if return_final_states else out


def inputs(
    b: int = 2, c: int = 24, s: int = 9, width: int = 4, bias: bool = True,
    activation: str | None = "silu", state: int = 0, final: bool = False,
    tokens_first: bool = False, dtype: torch.dtype = torch.float32, device: str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """state: the tokens of initial_states. tokens_first: channels lie side by side in memory."""
    gen = torch.Generator("cpu").manual_seed(seed)
    x = (torch.randn(b, s, c, generator=gen).transpose(1, 2) if tokens_first
         else torch.randn(b, c, s, generator=gen))
    tensors = {
        "x": x.to(dtype), "weight": (torch.randn(c, width, generator=gen) / width ** 0.5).to(dtype),
        "bias": torch.randn(c, generator=gen).to(dtype) if bias else None,
        "initial_states": torch.randn(b, c, state, generator=gen).to(dtype) if state else None}
    return {**{name: t if t is None else t.to(device) for name, t in tensors.items()},
            "activation": activation, "return_final_states": final}


CASES: tuple[dict[str, Any], ...] = (
    {}, {"s": 1, "state": 4, "final": True, "tokens_first": True}, {"s": 2, "final": True},
    {"state": 3, "final": True, "bias": False, "activation": None, "tokens_first": True},
    {"c": 70, "width": 2, "s": 1, "state": 1}, {"width": 1, "b": 1}, {"b": 0, "state": 3},
    {"s": 1, "b": 3, "width": 3, "state": 6, "final": True, "bias": False, "activation": None},
    {"s": 1, "c": 130, "state": 3}, {"s": 0, "state": 3, "final": True},
    {"s": 0, "final": True},
    # as long as the state
    {"s": 3, "final": True}, {"s": 3, "state": 3, "final": True},
)
GRADIENT_CASES: tuple[dict[str, Any], ...] = (
    {"c": 4, "s": 5}, {"c": 4, "s": 3, "state": 4, "final": True, "bias": False})


MISTAKES: tuple[Mistake, ...] = (
    Mistake("convention", "the filter the other way round",
               lambda op, v: {**v, "weight": v["weight"].flip(1)}),
    Mistake("convention", "the tokens before the first ignored",
               lambda op, v: None if v.get("initial_states") is None else {
                   **v, "initial_states": torch.zeros_like(v["initial_states"])}),
    Mistake("convention", "no bias", drop_argument("bias")),
    replace_argument("convention", "no activation", "activation", None))

OP = Op(
    name="causal_conv1d", family="linear_attention", reference=reference, meta=meta,
    inputs=inputs, cases=CASES, gradient_cases=GRADIENT_CASES, mistakes=MISTAKES,
    stress=({"b": 1, "c": 8192, "s": 300, "tokens_first": True, "final": True},
            {"b": 1, "c": 3, "s": 1_100, "state": 5, "final": True}),
    reference_kernel={"overhead_us": 60.0},
    tolerance=Tolerance({"float16": (1e-3, 1e-3), "bfloat16": (1e-2, 1e-2),
                         "float32": (1e-5, 1e-6), "float64": (1e-9, 1e-10)}),
    shapes={"x": "batch channels seq", "weight": "channels width", "bias": "channels",
            "initial_states": "batch channels state_len"},
    returns=("batch channels seq", "batch channels state_len"),
    same_dtype=("x", "weight", "bias", "initial_states"),
    derived={"missing_tokens": "max(width - 1 - state_len, 0)"},
    words={"missing_tokens": Wording(
        "tokens that initial_states lacks", "{state_len} tokens, a filter of width {width}",
        {"0": "initial_states must hold at least width - 1 tokens"})},
    exact=("width",),
    requires=(dtypes(*FLOATS), at_least("width", 1, Code.EMPTY_INPUT),
              one_of("missing_tokens", None, 0, code=Code.SHAPE_UNSUPPORTED)),
    flops="2 * batch * channels * seq * width", bytes="2 * itemsize * batch * channels * seq",
    differentiable=("x", "weight", "bias", "initial_states"), outputs="Tensor[]",
)
