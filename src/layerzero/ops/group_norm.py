"""Group norm over images (batch, channels, height, width) in any memory format, or with other
trailing dimensions.

The channels are split into `groups` equal groups, and each group of each sample is normalised as a
whole. Accumulates in float32 or wider; the result has the input's dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..spec.errors import InvalidCall
from ..spec.mistake import Mistake
from ..spec.op import INT32, Op, Redirect, Tolerance
from ..spec.reason import Code, Reason
from ..spec.rules import Wording, at_least, dtypes, one_of
from .formulas.common import FLOATS
from .formulas.mistakes import NORM, change_results, drop_argument, replace_argument


def reference(x: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None,
              eps: float = 1e-5) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias; mean and var over each group of channels and
    all pixels."""
    upcast = x.to(torch.promote_types(x.dtype, torch.float32))
    parts = upcast.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])
    inner = tuple(range(2, parts.dim()))
    centred = parts - parts.mean(inner, keepdim=True)
    out = (centred * torch.rsqrt(centred.square().mean(inner, keepdim=True) + eps)).reshape(x.shape)
    per_channel = (1, -1, *(1,) * (x.dim() - 2))
    out = out if weight is None else out * weight.to(upcast.dtype).view(per_channel)
    return (out if bias is None else out + bias.to(upcast.dtype).view(per_channel)).to(x.dtype)


def meta(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return torch.empty_like(x)


def inputs(b: int = 2, c: int = 12, size: tuple[int, ...] = (5, 7), groups: int = 3,
           affine: bool = True, bias_only: bool = False, eps: float = 1e-5, memory: str = "",
           weight_dtype: str = "", extreme: bool = False, dtype: torch.dtype = torch.float32,
           device: str = "cpu", seed: int = 0) -> dict[str, Any]:
    gen = torch.Generator("cpu").manual_seed(seed)
    x = torch.randn((b, c, *size), generator=gen)
    if extreme:                                # a mean far from zero: E[x^2] - E[x]^2 would cancel
        x = x * 30 + 500
    if memory == "sparse":
        x = torch.randn((b, c, *size[:-1], size[-1] * 2), generator=gen)[..., ::2]
    if memory == "channels":
        x = torch.randn((b, c + 5, *size), generator=gen)
    x = x.to(device=device, dtype=dtype)
    if memory.startswith("channels"):
        x = x.contiguous(memory_format=torch.channels_last)
    if memory == "channels":                   # some of those of a wider tensor
        x = x[:, 4:-1]
    parameter_dtype = getattr(torch, weight_dtype or str(dtype)[6:])
    weight, bias = (torch.randn(c, generator=gen).to(device=device, dtype=parameter_dtype)
                    for _ in range(2))
    return {"x": x, "groups": groups, "weight": weight if affine and not bias_only else None,
            "bias": bias if affine else None, "eps": eps}


CASES: tuple[dict[str, Any], ...] = (
    {}, {"groups": 1}, {"groups": 12}, {"b": 1, "c": 1, "groups": 1, "size": (3, 3)},
    {"size": (1, 1)}, {"size": (1, 1), "groups": 12, "eps": 1.0}, {"b": 0}, {"affine": False},
    {"bias_only": True}, {"memory": "channels_last"}, {"memory": "channels"},
    {"memory": "sparse"},
    {"c": 64, "groups": 32, "size": (16, 16)},
    {"c": 64, "groups": 32, "size": (8, 8), "memory": "channels_last"},
    {"weight_dtype": "float32"}, {"weight_dtype": "float32", "memory": "channels_last"},
    {"eps": 1e-3}, {"extreme": True}, {"extreme": True, "memory": "channels_last"},
)


def extra_check(values: dict[str, Any], facts: Any) -> None:
    if facts["channels"] % facts["groups"]:
        raise InvalidCall.of("group_norm", Reason(
            Code.VALUE_OUT_OF_RANGE, f"a divisor of the {facts['channels']} channels",
            facts["groups"], "groups"))


def canonical(values: dict[str, Any]) -> Redirect | None:
    """Rewrites inputs that are not 4-D as images (batch, channels, all the middle, last size)."""
    x = values["x"]
    if x.dim() == 4 or x.dim() < 2:
        return None
    batch, channels, *size = x.shape
    rows = 1
    for n in size[:-1]:
        rows *= n
    image = x.reshape(batch, channels, rows, size[-1] if size else 1)
    return Redirect("group_norm", {**values, "x": image}, lambda out: out.reshape(x.shape))


def _unbiased(v: Any, out: tuple[Any, ...]) -> Any:
    x = v["x"]
    group = x.reshape(x.shape[0], v["groups"], -1)
    if group.shape[-1] < 2:
        return None
    variance = group.var(-1, keepdim=True, correction=0)
    factor = ((variance + v["eps"]) / (group.var(-1, keepdim=True) + v["eps"])).sqrt()
    shape = (1, -1, *(1,) * (x.dim() - 2))
    bias = 0.0 if v.get("bias") is None else v["bias"].reshape(shape)
    return ((out[0] - bias).reshape(group.shape) * factor).reshape(x.shape) + bias


MISTAKES: tuple[Mistake, ...] = (
    *NORM, Mistake("convention", "the bias left out", drop_argument("bias")),
    replace_argument("convention", "one group", "groups", 1),
    change_results("convention", "the variance of a sample: one less in the divisor", _unbiased))

STRESS: tuple[dict[str, Any], ...] = (         # rows beyond 2^16, channels beyond 2^14
    # a mean far from zero in a group of several blocks
    {"b": 1, "c": 8, "groups": 2, "size": (64, 72), "extreme": True},
    {"b": 66_001, "c": 2, "groups": 1, "size": (1, 2)},
    # more numbers in a group than float16 counts
    {"b": 1, "c": 4, "groups": 2, "size": (183, 182)},
    {"b": 1, "c": 4, "groups": 2, "size": (183, 182), "extreme": True},
    {"b": 1, "c": 16_412, "groups": 4, "size": (1, 2)},
    # the channels of a group in a diffusion model: 10, 20, 40 of its UNet, 16 of its decoder
    {"c": 320, "groups": 32, "size": (3, 2)}, {"c": 640, "groups": 32, "size": (2, 3)},
    {"c": 1280, "groups": 32, "size": (1, 3), "memory": "channels_last"},
    {"c": 512, "groups": 32, "size": (3, 3), "memory": "channels_last"})

OP = Op(
    name="group_norm", family="norm", reference=reference, meta=meta, inputs=inputs,
    cases=CASES, stress=STRESS,
    mistakes=MISTAKES,
    tolerance=Tolerance({"float16": (1e-3, 1e-3), "bfloat16": (1e-2, 1e-2), "float32": (1e-6, 1e-6),
                         "float64": (1e-10, 1e-10)}),
    shapes={"x": "batch channels height width", "weight": "channels", "bias": "channels"},
    returns=("batch channels height width",), exact=("channels", "groups"),
    derived={"hidden": "channels * height * width // groups"},
    words={"hidden": Wording("the numbers in a group",
                             "{channels} channels of {height} x {width} in {groups} groups")},
    ranges={"groups": INT32},
    requires=(dtypes(*FLOATS), one_of("weight.dtype", None, *FLOATS, code=Code.DTYPE_UNSUPPORTED),
              one_of("bias.dtype", None, *FLOATS, code=Code.DTYPE_UNSUPPORTED),
              at_least("groups", 1, Code.VALUE_OUT_OF_RANGE),
              at_least("channels", 1, Code.EMPTY_INPUT), at_least("height", 1, Code.EMPTY_INPUT),
              at_least("width", 1, Code.EMPTY_INPUT),
              at_least("eps", 0.0, Code.VALUE_OUT_OF_RANGE)),
    flops="8 * batch * channels * height * width",
    bytes="2 * itemsize * batch * channels * height * width",
    differentiable=("x", "weight", "bias"), canonical=canonical, extra_check=extra_check,
)
