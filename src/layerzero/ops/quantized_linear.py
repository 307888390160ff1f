"""A linear layer with a quantized weight: y = x W^T + bias, W dequantized.

`weight_q` and `scales` are what lz.quantize gives for a weight (out_features, in_features): codes
as int8, as fp8_e4m3, or two in a byte as int4, nf4, mxfp4, nvfp4; scales (rows, groups), one group
for each `group_size` inputs or one for the row (group_size=0); rows is out_features, or a divisor
of it if several rows share their scales. `zeros` has the layout of
`scales`: W = (code - zero) * scale; without zeros, zero is 0 for int8 and 8 for int4. `group_size`
is 32 for mxfp4 and 16 for nvfp4, whose `global_scale` multiplies all scales.

The weight is dequantized in float32 and rounded to x's dtype. With activations="int8" each row of x
is rounded to int8 too, symmetrically by its largest magnitude, and the products are summed exactly
(int8 weights only). With activations="fp8" each row of x is rounded to fp8_e4m3 by its largest
magnitude (fp8_e4m3 weights only).

The formats of ggml (formulas/ggml.py) keep their scales among the codes: `weight_q` is
(out_features, row_bytes), `scales` is None. With activations="q8" x is rounded in float32 to the
format that ggml rounds it to beside that of the weight (q8_0, q8_1, q8_k, by its
quantize_row_*_ref), and the products are what ggml's vec_dot functions compute, up to the float32
in which they are added.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from ..spec.errors import InvalidCall
from ..spec.mistake import Mistake
from ..spec.op import INT32, Op, Tolerance
from ..spec.reason import Code, Reason
from ..spec.rules import (
    Wording,
    absent,
    any_of,
    at_least,
    dtypes,
    equals,
    multiple_of,
    one_of,
    present,
    when,
)
from .formulas.common import FLOATS, random_rows
from .formulas.ggml import (
    GGML_FORMATS,
    SUBNORMAL,
    GgmlName,
    block_product,
    dequantize_blocks,
    random_blocks,
    rounded_activations,
)
from .formulas.mistakes import QUANTIZED, drop_argument, swap_nibbles
from .formulas.quant import (
    FORMATS,
    TINY,
    dequantize_codes,
    encode,
    expand_scales,
    make_scales,
    with_fractions,
)

FormatName = Literal["int8", "int4", "fp8_e4m3", "nf4", "mxfp4", "nvfp4", GgmlName]


def reference(
    x: Tensor, weight_q: Tensor, scales: Tensor | None = None, zeros: Tensor | None = None,
    bias: Tensor | None = None, *, format: FormatName, group_size: int = 0,
    activations: Literal["none", "int8", "q8", "fp8"] = "none", global_scale: Tensor | None = None,
) -> Tensor:
    """x @ dequantize(weight_q, scales, zeros).T + bias. Where `activations` are rounded, gradients
    pass straight through."""
    if scales is None:
        return ggml_linear(x, weight_q, bias, format, activations)
    out_features, in_features = weight_q.shape[0], x.shape[-1]
    rows_per_scale = out_features // max(scales.shape[0], 1)
    weight = dequantize_codes(weight_q, scales, zeros, FORMATS[format], in_features,
                              group_size or in_features, rows_per_scale, global_scale)
    if activations in ("int8", "fp8"):
        acc_dtype, largest = weight.dtype, 127.0 if activations == "int8" else 448.0
        # whatever the scales are: a number between two codes is rounded as float32 divides it
        values = x.detach().to(torch.promote_types(x.dtype, torch.float32))
        step = (values.abs().amax(-1, keepdim=True) / largest).clamp(min=TINY)
        codes = (values / step).clamp(-largest, largest)
        codes = (codes.round() if activations == "int8"
                 else codes.float().to(torch.float8_e4m3fn)).to(acc_dtype)
        if x.requires_grad:    # zeros: the gradient of a rounded value is that of the value
            codes = codes + ((x.to(values.dtype) - values) / step).to(acc_dtype)
        out = codes @ weight.t() * step.to(acc_dtype)
        return (out if bias is None else out + bias.to(acc_dtype)).to(x.dtype)
    out = x @ weight.to(x.dtype).t()
    return out if bias is None else out + bias


def ggml_linear(x: Tensor, weight_q: Tensor, bias: Tensor | None, format: str,
                activations: str) -> Tensor:
    if activations == "q8":
        out = block_product(*rounded_activations(x, format, torch.float64), weight_q, format)
        return (out if bias is None else out + bias.double()).to(x.dtype)
    out = x @ dequantize_blocks(weight_q, format).to(x.dtype).t()
    return out if bias is None else out + bias


def meta(x: Tensor, weight_q: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight_q.shape[0]))


def inputs(
    format: str = "int8", rows: tuple[int, ...] = (5,), k: int = 64, n: int = 48, group: int = 0,
    bias: bool = False, symmetric: bool = True, share: int = 1, scale_dtype: str = "",
    stride: str = "", activations: str = "none", zero_row: bool = False, zero_dtype: str = "",
    small: bool = False, quiet: bool = False, positive: bool = False,
    dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0,
) -> dict[str, Any]:
    """`share`: number of rows of the weight that share a scale, 0 for all. `zero_dtype`: that of
    zeros that are no whole numbers, as HQQ fits them. `positive`: x has one sign, as after an
    activation."""
    gen = torch.Generator("cpu").manual_seed(seed)
    x = random_rows(gen, rows, k, stride, dtype, device)
    if zero_row:
        x[:1] = 0.0
    if positive:
        x = x.abs()
    if quiet:                                  # the step of such a row is no small number more
        x = x * SUBNORMAL
    weight = torch.randn((n, k), generator=gen) / math.sqrt(k)
    bias_values = torch.randn(n, generator=gen).to(device=device, dtype=dtype) if bias else None
    if format in GGML_FORMATS:
        size = SUBNORMAL if small else 1.0     # of the weight; x is as much larger
        return {"x": x / (size * math.sqrt(k)), "bias": bias_values, "format": format,
                "activations": activations,
                "weight_q": random_blocks(gen, (n,), k, format, size).to(device)}
    fmt, block, share = FORMATS[format], group or k, share or n
    scales, zero, total = make_scales(weight, fmt, "block", block, share, symmetric, None)
    factors = scales.float() if total is None else scales.float() * total
    q = encode(weight / expand_scales(factors, weight.shape, block, share), fmt,
               None if zero is None else expand_scales(zero, weight.shape, block, share))
    if zero is not None and zero_dtype:
        zero = with_fractions(zero, zero_dtype, gen)
    scales = scales.to(getattr(torch, scale_dtype)) if scale_dtype else scales
    return {"x": x, "weight_q": q.to(device), "scales": scales.to(device),
            "zeros": None if zero is None else zero.to(device), "bias": bias_values,
            "format": format, "group_size": group, "activations": activations,
            "global_scale": None if total is None else total.to(device)}


BIASED = ("q4_1", "q4_k")

CASES: tuple[dict[str, Any], ...] = (
    *({"format": f} for f in ("int8", "int4", "fp8_e4m3")),
    *({"format": f, "group": 32, "bias": True} for f in ("int8", "int4", "fp8_e4m3")),
    *({"format": f, "k": 37, "n": 17, "rows": (2, 3)} for f in ("int8", "int4", "fp8_e4m3")),
    *({"format": f, "symmetric": False, "group": g} for f in ("int8", "int4") for g in (0, 32)),
    *({"format": f, "symmetric": False, "group": 32, "zero_dtype": d}
      for f, d in (("int8", "float32"), ("int4", "bfloat16"), ("int4", "float16"))),
    # sums that are many times what is left of them without the zeros
    {"format": "int4", "symmetric": False, "group": 128, "k": 512, "n": 16},
    *({"format": f, "rows": r} for f in ("int8", "int4") for r in ((), (0,), (1,), (40,))),
    {"format": "int4", "group": 64, "k": 256, "n": 64, "rows": (18,)},
    {"format": "int4", "group": 128, "k": 256, "n": 64, "bias": True},
    {"format": "int4", "group": 16}, {"format": "int4", "group": 32, "k": 100},
    {"k": 4096, "n": 16, "rows": (2,)}, {"format": "int4", "group": 32, "scale_dtype": "bfloat16"},
    {"scale_dtype": "bfloat16", "bias": True}, {"format": "fp8_e4m3", "share": 16, "group": 32},
    {"format": "fp8_e4m3", "share": 0}, {"stride": "sparse"},
    {"format": "int4", "group": 32, "stride": "padded"}, {"activations": "int8"},
    {"k": 33, "n": 7, "activations": "int8"},
    {"activations": "int8", "bias": True, "rows": (2, 20)}, {"activations": "int8", "rows": (0,)},
    {"activations": "int8", "zero_row": True},
    # sums of codes beyond 16 bits
    {"activations": "int8", "positive": True, "k": 2048, "n": 16, "rows": (3,)},
    {"activations": "fp8", "format": "fp8_e4m3", "zero_row": True},
    *({"activations": a, "format": f, "quiet": True}
      for a, f in (("int8", "int8"), ("fp8", "fp8_e4m3"))),
    {"activations": "q8", "format": "q8_0", "k": 256, "n": 16, "zero_row": True},
    {"format": "fp8_e4m3", "activations": "fp8", "bias": True, "rows": (2, 20)},
    {"format": "nf4", "group": 64, "k": 128, "bias": True}, {"format": "nf4"},
    {"format": "mxfp4", "group": 32, "k": 100}, {"format": "nvfp4", "group": 16, "bias": True},
    *({"format": f, "k": 256, "n": 16, "rows": (3,), "activations": "q8", "bias": f in BIASED}
      for f in GGML_FORMATS),
    *({"format": f, "k": 512, "n": 16, "rows": (2,), "bias": f in BIASED}
      for f in ("q4_1", "q8_0", "q4_k", "q6_k")),
    *({"format": f, "k": 256, "n": 16, "rows": (2,), "small": True, "activations": a}
      for f, a in (("q4_0", "none"), ("q8_0", "q8"))),
)


def extra_check(values: dict[str, Any], facts: Any) -> None:
    """Checks the layout of codes and scales; every size it reads is exact in the key."""
    n, k, format = facts["out_features"], facts["in_features"], values["format"]
    if format in GGML_FORMATS:
        stored = GGML_FORMATS[format].row_bytes(k)
    else:
        stored = k if FORMATS[format].bits == 8 else (k + 1) // 2
    if facts["packed"] != stored:
        raise InvalidCall.of("quantized_linear", Reason(
            Code.DIM_MISMATCH, f"{stored} bytes for {k} inputs in {format}", facts["packed"],
            "weight_q.shape[-1]"))
    if format in GGML_FORMATS:
        return
    if values["scales"] is None:
        raise InvalidCall.of("quantized_linear", Reason(
            Code.MISSING_METADATA, f"the scales that belong to codes in {format}", None, "scales"))
    if format == "nvfp4" and values["global_scale"] is None:
        raise InvalidCall.of("quantized_linear", Reason(
            Code.MISSING_METADATA, "nvfp4 has one scale for the tensor beside those of its blocks",
            None, "global_scale"))
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
    # more than 2^20 codes
    *({"format": f, "k": 64, "n": 16_411, "group": g, "rows": (r,)} for f, g in (
        ("int8", 0), ("int4", 32)) for r in (1, 2, 3)),
    *({"format": "q8_0", "k": 256, "n": 4_105, "rows": (r,)} for r in (1, 2, 3)),
    {"k": 16_448, "n": 6, "rows": (1,), "activations": "int8"})

MISTAKES: tuple[Mistake, ...] = (
    *QUANTIZED, Mistake("convention", "the two codes of a byte exchanged",
                           swap_nibbles("weight_q")),
    Mistake("convention", "the bias left out", drop_argument("bias")))

OP = Op(
    name="quantized_linear", family="linear", reference=reference, meta=meta, inputs=inputs,
    cases=CASES, stress=STRESS, mistakes=MISTAKES,
    # In float32 torch's matmul is off by 1e-6 for some inputs; the eager error is tighter.
    batch_dims=("rows",),
    tolerance=Tolerance({"float16": (1e-3, 1e-3), "bfloat16": (1e-2, 1e-2), "float32": (1e-5, 1e-5),
                         "float64": (1e-5, 1e-5)}),       # the weight is dequantized in float32
    shapes={"x": "*rows in_features", "weight_q": "out_features packed",
            "scales": "scale_rows groups",
            "zeros": "scale_rows groups", "bias": "out_features", "global_scale": "1 1"},
    returns=("*rows out_features",), same_dtype=("x", "bias"),
    derived={"shared_rows": "out_features - scale_rows",
             "weight_size": "in_features * out_features"},
    words={"shared_rows": Wording(
        "out_features - scale_rows", "{scale_rows} rows of scales, {out_features} of the weight", {
            "0": "every row of the weight must have scales of its own"}),
        "groups": Wording("the scales of a row"),
        "weight_size": Wording("the codes of the weight")},
    exact=("in_features", "out_features", "packed", "scale_rows", "groups", "group_size"),
    ranges={"group_size": INT32},
    requires=(
        dtypes(*FLOATS), at_least("group_size", 0, Code.VALUE_OUT_OF_RANGE),
        at_least("in_features", 1, Code.EMPTY_INPUT), at_least("out_features", 1, Code.EMPTY_INPUT),
        when(one_of("format", "int8"), dtypes("int8", of="weight_q.dtype")),
        when(one_of("format", "int4", "nf4", "mxfp4", "nvfp4"),
             dtypes("uint8", of="weight_q.dtype")),
        when(one_of("format", "fp8_e4m3"), dtypes("float8_e4m3fn", of="weight_q.dtype")),
        *(when(one_of("format", *(f.name for f in GGML_FORMATS.values() if f.block == block)),
               multiple_of("in_features", block)) for block in (32, 256)),
        *(when(one_of("format", *GGML_FORMATS), rule) for rule in (
            dtypes("uint8", of="weight_q.dtype"),
            absent("scales.dtype", Code.SCALE_LAYOUT_MISMATCH),
            equals("group_size", 0, Code.SCALE_LAYOUT_MISMATCH))),
        when(one_of("format", "mxfp4"), equals("group_size", 32, Code.SCALE_LAYOUT_MISMATCH)),
        when(one_of("format", "nvfp4"), equals("group_size", 16, Code.SCALE_LAYOUT_MISMATCH)),
        any_of(absent("global_scale.dtype"), one_of("format", "nvfp4")),
        any_of(one_of("scales.dtype", None, *FLOATS, code=Code.SCALE_LAYOUT_MISMATCH),
               one_of("format", "mxfp4", "nvfp4")),
        one_of("scales.dtype", None, *FLOATS, "float8_e8m0fnu", "float8_e4m3fn",
               code=Code.SCALE_LAYOUT_MISMATCH),
        when(present("zeros.dtype"), one_of("format", "int8", "int4")),
        when(equals("activations", "int8"), one_of("format", "int8")),
        when(equals("activations", "fp8"), one_of("format", "fp8_e4m3")),
        when(equals("activations", "q8"), one_of("format", *GGML_FORMATS)),
        any_of(equals("activations", "none"), absent("zeros.dtype")),
        any_of(equals("activations", "none"), equals("group_size", 0, Code.SCALE_LAYOUT_MISMATCH)),
    ),
    flops="2 * rows * in_features * out_features",
    bytes="itemsize * rows * (in_features + out_features) + out_features * packed",
    differentiable=("x", "bias"), extra_check=extra_check,
)
