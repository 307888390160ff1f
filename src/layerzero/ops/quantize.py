"""Values to codes with few bits, and their scales. formulas/quant.py says how each format is coded and laid out.

The scales are made from the finite values of their block, or given. Everything is computed in float32, so that
every kernel gives the same codes. Values beyond the largest code saturate, infinities too; NaN becomes 0, in the
fp8 formats it stays NaN. A block of zeros gets a tiny scale and comes back as zeros.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from ..spec.errors import InvalidCall
from ..spec.op import INT32, Op, Tolerance
from ..spec.reason import Code, Reason
from ..spec.rules import absent, at_least, dtypes, equals, on, one_of, when
from .formulas.common import FLOATS, random_rows
from .formulas.quant import FORMATS, blocks_of, check_scales, encode, make_scales, spread

FormatName = Literal["int8", "int4", "fp8_e4m3", "fp8_e5m2", "nf4", "mxfp4", "nvfp4"]


def reference(
    x: Tensor, format: FormatName, granularity: Literal["tensor", "channel", "block"] | None = None,
    block_size: int = 0, symmetric: bool = True, *, block_rows: int = 1, scales: Tensor | None = None,
    zeros: Tensor | None = None, global_scale: Tensor | None = None,
) -> Any:
    """(codes, scales), then zeros if symmetric is False, then the global scale of nvfp4.

    granularity: one scale for the tensor, for each row ("channel"), or for each block of a row; None for what is
    usual: blocks for four-bit formats, else rows. block_size: 0 for the format's own. block_rows: rows of a block.
    scales, zeros, global_scale: from calibration, in the layout that would be returned; else made here.
    """
    form = FORMATS[format]
    by = granularity or form.granularity
    block_size = block_size or form.block_size
    wide = x.detach().float()
    if scales is None:
        finite = wide.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        scales, zeros, global_scale = make_scales(
            finite, form, by, block_size, block_rows, symmetric, global_scale)
    else:
        check_given(x, by, block_size, block_rows, scales, zeros, global_scale)
        scales, zeros, global_scale = scales.clone(), cloned(zeros), cloned(global_scale)
    whole = scales.float() if global_scale is None else scales.float() * global_scale.float()
    spread_zeros = None if zeros is None else spread(zeros, x.shape, block_size, block_rows)
    codes = encode(wide / spread(whole, x.shape, block_size, block_rows), form, spread_zeros)
    return tuple(t for t in (codes, scales, zeros, global_scale) if t is not None)


def cloned(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.clone()


def check_given(x: Tensor, granularity: str, block_size: int, block_rows: int, scales: Tensor, zeros: Tensor | None,
                global_scale: Tensor | None) -> None:
    """Given scales must have the layout that would be returned; asked on every call, since it costs next to nothing."""
    want = blocks_of(x.shape, granularity, block_size, block_rows)
    for name, given in (("scales", scales), ("zeros", zeros)):
        if given is not None and given.shape != want:
            raise InvalidCall.of("quantize", Reason(
                Code.SCALE_LAYOUT_MISMATCH, f"{name} of shape {want} (granularity {granularity}, block_size "
                f"{block_size}, block_rows {block_rows}) for x of shape {tuple(x.shape)}", str(tuple(given.shape)),
                name))
    if global_scale is not None:
        check_scales("quantize", "global_scale", global_scale, torch.Size((1,) * x.dim()), 1, 1)


def meta(
    x: Tensor, format: str, granularity: str | None = None, block_size: int = 0, symmetric: bool = True, *,
    block_rows: int = 1, scales: Tensor | None = None, zeros: Tensor | None = None,
    global_scale: Tensor | None = None,
) -> Any:
    form = FORMATS[format]
    layout = blocks_of(x.shape, granularity or form.granularity, block_size or form.block_size, block_rows)
    width = x.shape[-1] if form.bits == 8 else (x.shape[-1] + 1) // 2
    found = [x.new_empty((*x.shape[:-1], width), dtype=form.storage),
             x.new_empty(layout, dtype=form.scale if scales is None else scales.dtype)]
    if not symmetric:
        found.append(x.new_empty(layout, dtype=form.storage))
    if format == "nvfp4":
        found.append(x.new_empty((1,) * x.dim(), dtype=torch.float32))
    return tuple(found)


def inputs(
    format: str = "int8", rows: tuple[int, ...] = (5,), width: int = 64, granularity: str | None = None,
    block_size: int = 0, block_rows: int = 1, symmetric: bool = True, stride: str = "", special: str = "",
    given: bool = False, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0,
) -> dict[str, Any]:
    gen = torch.Generator("cpu").manual_seed(seed)
    x = random_rows(gen, rows, width, stride, dtype, "cpu")
    if special == "zeros":
        x.zero_()
    elif special == "constant":
        x.fill_(0.7)
    elif special == "broken":
        x[..., 0], x[..., 1], x[..., -1] = torch.nan, torch.inf, -torch.inf
    elif special == "integers":
        x = torch.randint(-7, 8, x.shape, generator=gen).to(dtype)
        x[..., 0] = 7.0
    elif special == "denormal":
        x = x * torch.finfo(dtype).tiny / 16
    elif special == "huge":
        x = x / x.abs().amax() * torch.finfo(dtype).max
    values: dict[str, Any] = {"x": x.to(device), "format": format, "granularity": granularity,
                              "block_size": block_size, "block_rows": block_rows, "symmetric": symmetric}
    if given:
        other = torch.randn(x.shape, generator=gen).to(dtype)
        made = reference(other, format, granularity, block_size, symmetric, block_rows=block_rows)  # type: ignore[arg-type]
        names = ["scales", *([] if symmetric else ["zeros"]), *(["global_scale"] if format == "nvfp4" else [])]
        values.update({name: t.to(device) for name, t in zip(names, made[1:])})
    return values


CASES: tuple[dict[str, Any], ...] = (
    *({"format": f} for f in FORMATS),
    *({"format": f, "width": 37, "rows": (2, 3)} for f in FORMATS),
    *({"format": f, "special": s} for f in FORMATS for s in ("zeros", "broken")),
    *({"format": f, "given": True} for f in ("int8", "fp8_e4m3", "mxfp4", "nvfp4")),
    *({"format": f, "symmetric": False, "granularity": g} for f in ("int8", "int4") for g in ("tensor", "block")),
    *({"special": s, "symmetric": y} for s in ("constant", "denormal", "huge") for y in (True, False)),
    {"granularity": "tensor", "rows": (2, 3)}, {"format": "fp8_e4m3", "granularity": "tensor", "rows": ()},
    {"granularity": "block", "block_size": 16}, {"format": "int4", "block_size": 32, "width": 100},
    {"format": "fp8_e4m3", "granularity": "block", "block_size": 32, "block_rows": 4, "rows": (2, 9), "width": 70},
    {"format": "int8", "granularity": "block", "block_size": 8, "block_rows": 2, "symmetric": False, "rows": (6,)},
    {"format": "int4", "given": True, "symmetric": False}, {"special": "integers"}, {"stride": "sparse"},
    {"format": "nf4", "stride": "padded"}, {"format": "int8", "rows": (0,)}, {"format": "mxfp4", "width": 1},
)

def extra_check(values: dict[str, Any], facts: Any) -> None:
    """What must come with given scales."""
    if values["scales"] is None:
        return
    needed = {"zeros": not values["symmetric"], "global_scale": values["format"] == "nvfp4"}
    for name, wanted in needed.items():
        if wanted and values[name] is None:
            raise InvalidCall.of("quantize", Reason(Code.MISSING_METADATA, "it goes with the given scales", None, name))


_FOUR = ("mxfp4", "nvfp4")

OP = Op(
    name="quantize", family="quantization", reference=reference, meta=meta, inputs=inputs, cases=CASES,
    # Codes and scales are equal to the reference's or wrong.
    tolerance=Tolerance({"float32": (0.0, 0.0)}),
    shapes={"x": "*rows width"}, exact=("block_size", "block_rows"),
    ranges={"block_size": INT32, "block_rows": INT32},
    requires=(
        dtypes(*FLOATS), at_least("width", 1, Code.EMPTY_INPUT), at_least("block_size", 0, Code.VALUE_OUT_OF_RANGE),
        at_least("block_rows", 1, Code.VALUE_OUT_OF_RANGE),
        when(one_of("format", *_FOUR), one_of("granularity", None, "block", code=Code.SCALE_LAYOUT_MISMATCH)),
        when(one_of("format", *_FOUR), equals("block_rows", 1, Code.SCALE_LAYOUT_MISMATCH)),
        when(one_of("format", "mxfp4"), one_of("block_size", 0, 32, code=Code.SCALE_LAYOUT_MISMATCH)),
        when(one_of("format", "nvfp4"), one_of("block_size", 0, 16, code=Code.SCALE_LAYOUT_MISMATCH)),
        when(one_of("format", *(f for f in FORMATS if not f.startswith("int"))), on("symmetric")),
        when(absent("scales.dtype"), absent("zeros.dtype")), when(on("symmetric"), absent("zeros.dtype")),
        when(one_of("format", *(f for f in FORMATS if f != "nvfp4")), absent("global_scale.dtype")),
    ),
    flops="4 * rows * width", bytes="2 * itemsize * rows * width", extra_check=extra_check,
    outputs="Tensor[]",
)
