"""A linear layer with a quantized weight: y = x W^T + bias, W dequantized.

`weight_q` and `scales` are what lz.quantize gives for a weight (out_features, in_features): codes
as int8, as int4 two in a byte, or as fp8_e4m3; scales (rows, groups), one group for each
`group_size` inputs or one for the row (group_size=0); rows is out_features, or a divisor of it if
several rows share their scales. `zeros` has the layout of
`scales`: W = (code - zero) * scale; without zeros, zero is 0 for int8 and 8 for int4.

The weight is dequantized in float32 and rounded to x's dtype. With activations="int8" each row of x
is rounded to int8 too, symmetrically by its largest magnitude, and the products are summed exactly
(int8 weights only).
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from ..spec.alteration import Alteration
from ..spec.errors import InvalidCall
from ..spec.op import INT32, Op, Tolerance
from ..spec.reason import Code, Reason
from ..spec.rules import Wording, absent, any_of, at_least, dtypes, equals, one_of, present, when
from .formulas.common import FLOATS, random_rows
from .formulas.mistakes import QUANTIZED, drop_argument, swap_nibbles
from .formulas.quant import FORMATS, TINY, dequantize_codes, encode, expand_scales, make_scales

FormatName = Literal["int8", "int4", "fp8_e4m3"]


def reference(
    x: Tensor, weight_q: Tensor, scales: Tensor, zeros: Tensor | None = None,
    bias: Tensor | None = None, *, format: FormatName, group_size: int = 0,
    activations: Literal["none", "int8"] = "none",
) -> Tensor:
    """x @ dequantize(weight_q, scales, zeros).T + bias."""
    out_features, in_features = weight_q.shape[0], x.shape[-1]
    rows_per_scale = out_features // max(scales.shape[0], 1)
    weight = dequantize_codes(weight_q, scales, zeros, FORMATS[format], in_features,
                              group_size or in_features, rows_per_scale)
    if activations == "int8":
        wide = weight.dtype
        step = (x.to(wide).abs().amax(-1, keepdim=True) / 127.0).clamp(min=TINY)
        codes = (x.to(wide) / step).round().clamp(-127.0, 127.0)
        out = codes @ weight.t() * step
        return (out if bias is None else out + bias.to(wide)).to(x.dtype)
    out = x @ weight.to(x.dtype).t()
    return out if bias is None else out + bias


def meta(
    x: Tensor, weight_q: Tensor, scales: Tensor, zeros: Tensor | None = None,
    bias: Tensor | None = None, *, format: str, group_size: int = 0, activations: str = "none",
) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight_q.shape[0]))


def inputs(
    format: str = "int8", rows: tuple[int, ...] = (5,), k: int = 64, n: int = 48, group: int = 0,
    bias: bool = False, symmetric: bool = True, share: int = 1, scale_dtype: str = "",
    stride: str = "", activations: str = "none", dtype: torch.dtype = torch.float32,
    device: str = "cpu", seed: int = 0,
) -> dict[str, Any]:
    """`share`: number of rows of the weight that share a scale, 0 for all."""
    gen = torch.Generator("cpu").manual_seed(seed)
    x = random_rows(gen, rows, k, stride, dtype, device)
    weight = torch.randn((n, k), generator=gen) / math.sqrt(k)
    fmt, block, share = FORMATS[format], group or k, share or n
    scales, zeros, _ = make_scales(weight, fmt, "block", block, share, symmetric, None)
    q = encode(weight / expand_scales(scales, weight.shape, block, share), fmt,
               None if zeros is None else expand_scales(zeros, weight.shape, block, share))
    scales = scales.to(getattr(torch, scale_dtype)) if scale_dtype else scales
    bias_values = torch.randn(n, generator=gen).to(device=device, dtype=dtype) if bias else None
    return {"x": x, "weight_q": q.to(device), "scales": scales.to(device),
            "zeros": None if zeros is None else zeros.to(device), "bias": bias_values,
            "format": format, "group_size": group, "activations": activations}


CASES: tuple[dict[str, Any], ...] = (
    *({"format": f} for f in ("int8", "int4", "fp8_e4m3")),
    *({"format": f, "group": 32, "bias": True} for f in ("int8", "int4", "fp8_e4m3")),
    *({"format": f, "k": 37, "n": 17, "rows": (2, 3)} for f in ("int8", "int4", "fp8_e4m3")),
    *({"format": f, "symmetric": False, "group": g} for f in ("int8", "int4") for g in (0, 32)),
    *({"format": f, "rows": r} for f in ("int8", "int4") for r in ((), (0,), (1,), (40,))),
    {"format": "int4", "group": 64, "k": 256, "n": 64},
    {"format": "int4", "group": 128, "k": 256, "n": 64, "bias": True},
    {"format": "int4", "group": 16}, {"format": "int4", "group": 32, "k": 100},
    {"k": 4096, "n": 16, "rows": (2,)}, {"format": "int4", "group": 32, "scale_dtype": "bfloat16"},
    {"scale_dtype": "bfloat16", "bias": True}, {"format": "fp8_e4m3", "share": 16, "group": 32},
    {"format": "fp8_e4m3", "share": 0}, {"stride": "sparse"},
    {"format": "int4", "group": 32, "stride": "padded"}, {"activations": "int8"},
    {"k": 33, "n": 7, "activations": "int8"},
    {"activations": "int8", "bias": True, "rows": (2, 20)}, {"activations": "int8", "rows": (0,)},
)


def extra_check(values: dict[str, Any], facts: Any) -> None:
    """Checks the layout of codes and scales; every size it reads is exact in the key."""
    n, k, fmt = facts["out_features"], facts["in_features"], FORMATS[values["format"]]
    stored = k if fmt.bits == 8 else (k + 1) // 2
    if facts["packed"] != stored:
        raise InvalidCall.of("quantized_linear", Reason(
            Code.DIM_MISMATCH, f"{stored} bytes for {k} inputs in {fmt.name}", facts["packed"],
            "weight_q.shape[-1]"))
    groups = math.ceil(k / values["group_size"]) if values["group_size"] else 1
    rows, got = facts["scale_rows"], facts["groups"]
    if got != groups or not rows or n % rows:
        raise InvalidCall.of("quantized_linear", Reason(
            Code.SCALE_LAYOUT_MISMATCH,
            f"scales of shape ({n}, {groups}), or with a divisor of {n} rows "
            f"(group_size {values['group_size']})", f"({rows}, {got})", "scales"))

STRESS: tuple[dict[str, Any], ...] = (
    {"n": 64, "k": 64, "group": 1, "rows": (3,)},
    {"n": 32, "k": 512, "group": 16, "format": "int4"},
    # more than 256 groups, k and n beyond 2^14
    *({"format": f, "k": 16_448, "n": 5, "group": 32, "rows": (2,)}
      for f in ("int8", "int4", "fp8_e4m3")),
    *({"format": f, "k": 16_448, "n": 5, "rows": (1,)} for f in ("int8", "int4")),
    *({"format": f, "k": 32, "n": 16_411, "rows": (2,)} for f in ("int8", "int4")),
    {"k": 16_448, "n": 6, "rows": (1,), "activations": "int8"})

ALTERATIONS: tuple[Alteration, ...] = (
    *QUANTIZED, Alteration("convention", "the two codes of a byte exchanged",
                           swap_nibbles("weight_q")),
    Alteration("convention", "the bias left out", drop_argument("bias")))

OP = Op(
    name="quantized_linear", family="linear", reference=reference, meta=meta, inputs=inputs,
    cases=CASES, stress=STRESS, alterations=ALTERATIONS,
    # In float32 torch's own matmul is off by 1e-6 for some hundred inputs; the eager error is the
    # tighter bound.
    tolerance=Tolerance({"float16": (1e-3, 1e-3), "bfloat16": (1e-2, 1e-2), "float32": (1e-5, 1e-5),
                         "float64": (1e-5, 1e-5)}),       # the weight is dequantized in float32
    shapes={"x": "*rows in_features", "weight_q": "out_features packed",
            "scales": "scale_rows groups",
            "zeros": "scale_rows groups", "bias": "out_features"},
    returns=("*rows out_features",), same_dtype=("x", "bias"),
    derived={"shared_rows": "out_features - scale_rows"},
    words={"shared_rows": Wording(
        "out_features - scale_rows", "{scale_rows} rows of scales, {out_features} of the weight", {
            "0": "every row of the weight must have scales of its own"}),
        "groups": Wording("the scales of a row")},
    exact=("in_features", "out_features", "packed", "scale_rows", "groups", "group_size"),
    ranges={"group_size": INT32},
    requires=(
        dtypes(*FLOATS), at_least("group_size", 0, Code.VALUE_OUT_OF_RANGE),
        at_least("in_features", 1, Code.EMPTY_INPUT), at_least("out_features", 1, Code.EMPTY_INPUT),
        when(one_of("format", "int8"), dtypes("int8", of="weight_q.dtype")),
        when(one_of("format", "int4"), dtypes("uint8", of="weight_q.dtype")),
        when(one_of("format", "fp8_e4m3"), dtypes("float8_e4m3fn", of="weight_q.dtype")),
        one_of("scales.dtype", *FLOATS, code=Code.SCALE_LAYOUT_MISMATCH),
        when(present("zeros.dtype"), one_of("format", "int8", "int4")),
        any_of(equals("activations", "none"), one_of("format", "int8")),
        any_of(equals("activations", "none"), absent("zeros.dtype")),
        any_of(equals("activations", "none"), equals("group_size", 0, Code.SCALE_LAYOUT_MISMATCH)),
    ),
    flops="2 * rows * in_features * out_features",
    bytes="itemsize * rows * (in_features + out_features) + out_features * packed",
    differentiable=("x", "bias"), extra_check=extra_check,
)
