"""The feed-forward layer of a transformer.

Gated (swiglu, geglu, geglu_tanh, reglu): down(act(gate(x)) * up(x)). Plain (silu, gelu, gelu_tanh,
relu): down(act(up(x))). In a gated layer `weight_in` (2 * inner, hidden) holds the rows of the gate
first, then those of up; or `weight_in` (inner, hidden) is the gate and `weight_up` (inner, hidden)
is separate. `weight_down` is (out, inner). Each bias has the layout of its weight.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from ..spec.errors import InvalidCall
from ..spec.mistake import Mistake
from ..spec.op import Op, Tolerance
from ..spec.reason import Code, Reason
from ..spec.rules import Wording, absent, at_least, dtypes, one_of, when
from .formulas.common import FLOATS, random_rows
from .formulas.mistakes import ACTIVATIONS, drop_argument
from .formulas.moe import GATED, PLAIN, activate

Activation = Literal["swiglu", "geglu", "geglu_tanh", "reglu", "gelu", "gelu_tanh", "silu", "relu"]


def reference(
    x: Tensor, weight_in: Tensor, weight_down: Tensor, activation: Activation = "swiglu", *,
    weight_up: Tensor | None = None, bias_in: Tensor | None = None, bias_up: Tensor | None = None,
    bias_down: Tensor | None = None,
) -> Tensor:
    """Returns down(act(gate(x)) * up(x)), or down(act(up(x))) for a plain activation."""
    if activation in GATED and weight_up is None:
        weight_in, weight_up = weight_in.chunk(2)
        if bias_in is not None:
            bias_in, bias_up = bias_in.chunk(2)
    inner = activate(_affine(x, weight_in, bias_in), activation)
    if weight_up is not None:
        inner = inner * _affine(x, weight_up, bias_up)
    return _affine(inner, weight_down, bias_down)


def _affine(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = x @ weight.t()
    return out if bias is None else out + bias


def meta(x: Tensor, weight_in: Tensor, weight_down: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight_down.shape[0]))


def inputs(
    rows: tuple[int, ...] = (5,), hidden: int = 32, inner: int = 48, out: int = 0,
    activation: str = "swiglu", separate: bool = False, bias: bool = False, stride: str = "",
    extreme: bool = False, packed: str = "", dtype: torch.dtype = torch.float32,
    device: str = "cpu", seed: int = 0,
) -> dict[str, Any]:
    """`packed`: the separate weights are parts of one tensor, "up" first or "gate" first."""
    gen = torch.Generator("cpu").manual_seed(seed)

    def rand(*shape: int, by: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=gen) * by).to(device=device, dtype=dtype)

    gated = activation in GATED
    wide = 2 * inner if gated and not separate else inner
    has_up = gated and separate
    weight_scale = 1 / math.sqrt(hidden)
    arguments = {
        "x": random_rows(gen, rows, hidden, stride, dtype, device, 20 if extreme else 1),
        "weight_in": rand(wide, hidden, by=weight_scale),
        "weight_up": rand(inner, hidden, by=weight_scale) if has_up else None,
        "weight_down": rand(out or hidden, inner, by=1 / math.sqrt(inner)),
        "activation": activation, "bias_in": rand(wide) if bias else None, "bias_up": rand(inner)
        if bias and has_up else None,
        "bias_down": rand(out or hidden) if bias else None}
    if packed and has_up:
        both = rand(2 * inner, hidden, by=weight_scale)
        first, second = both[:inner], both[inner:]
        arguments |= {"weight_up": first if packed == "up" else second,
                      "weight_in": second if packed == "up" else first}
    return arguments


CASES: tuple[dict[str, Any], ...] = (
    *({"activation": a} for a in (*GATED, *PLAIN)),
    *({"activation": a, "bias": True} for a in ("swiglu", "gelu")),
    {"separate": True}, *({"separate": True, "packed": first} for first in ("up", "gate")),
    {"separate": True, "bias": True, "activation": "geglu"}, {"rows": (1,)},
    {"rows": (2, 7)}, {"rows": ()}, {"rows": (0,)}, {"hidden": 17, "inner": 33},
    {"hidden": 1, "inner": 1}, {"out": 20}, {"hidden": 576, "inner": 1536, "rows": (1,)},
    {"hidden": 96, "inner": 256, "rows": (40,)}, {"stride": "padded"},
    {"stride": "sparse", "activation": "gelu_tanh"}, {"extreme": True},
)


def extra_check(values: dict[str, Any], facts: Any) -> None:
    inner, wide = facts["inner"], facts["wide"]
    fused = values["activation"] in GATED and values["weight_up"] is None
    want = 2 * inner if fused else inner
    if wide != want:
        layout = ("rows of the gate, then of up" if fused
                  else "one row for each column of weight_down")
        raise InvalidCall.of("mlp", Reason(Code.DIM_MISMATCH, f"{want} ({layout})", wide,
                                           "weight_in.shape[0]"))

MISTAKES: tuple[Mistake, ...] = (
    *ACTIVATIONS, *(Mistake("convention", f"{n} left out", drop_argument(n))
    for n in ("bias_in", "bias_up", "bias_down")))

STRESS: tuple[dict[str, Any], ...] = (         # sizes beyond 2^14, rows beyond 2^16
    {"hidden": 5, "inner": 16_411, "rows": (2,)}, {"hidden": 16_411, "inner": 5, "rows": (2,)},
    {"hidden": 3, "inner": 2, "rows": (66_001,)})

OP = Op(
    name="mlp", family="mlp", reference=reference, meta=meta, inputs=inputs,
    cases=CASES, stress=STRESS,
    mistakes=MISTAKES,
    # Twice the tolerance of a linear layer: these are two in sequence.
    batch_dims=("rows",),
    tolerance=Tolerance({"float16": (1e-3, 1e-3), "bfloat16": (1e-2, 1e-2), "float32": (1e-6, 1e-6),
                         "float64": (1e-10, 1e-10)}),
    shapes={"x": "*rows hidden", "weight_in": "wide hidden", "weight_down": "out inner",
            "weight_up": "inner hidden", "bias_in": "wide", "bias_up": "inner", "bias_down": "out"},
    words={"out": Wording("the rows of weight_down"), "inner": Wording("the width of weight_down")},
    returns=("*rows out",), exact=("hidden", "wide", "inner", "out"),
    same_dtype=("x", "weight_in", "weight_down", "weight_up", "bias_in", "bias_up", "bias_down"),
    requires=(
        dtypes(*FLOATS), at_least("hidden", 1, Code.EMPTY_INPUT),
        at_least("inner", 1, Code.EMPTY_INPUT),
        when(one_of("activation", *PLAIN), absent("weight_up.dtype")),
        when(absent("weight_up.dtype"), absent("bias_up.dtype")),
    ),
    flops="2 * rows * hidden * wide + 2 * rows * inner * out",
    bytes="itemsize * (hidden * wide + inner * out + rows * (hidden + out))",
    differentiable=("x", "weight_in", "weight_down", "weight_up", "bias_in", "bias_up",
                    "bias_down"),
    autocast="lower", extra_check=extra_check,
)
