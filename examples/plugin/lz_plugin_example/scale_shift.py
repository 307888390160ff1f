"""Scale and shift: x * scale + shift, one scale and one shift per feature."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layerzero import Op, Tolerance


def reference(x: Tensor, scale: Tensor, shift: Tensor | None = None, *,
              gain: float = 1.0) -> Tensor:
    """x * scale * gain + shift, over the last dimension."""
    out = x * scale * gain
    return out if shift is None else out + shift


def meta(x: Tensor, scale: Tensor, shift: Tensor | None = None, *, gain: float = 1.0) -> Tensor:
    return torch.empty_like(x)


def inputs(rows: int = 3, hidden: int = 8, shifted: bool = True, dtype: torch.dtype = torch.float32,
           device: str = "cpu",
           seed: int = 0) -> dict[str, Any]:
    gen = torch.Generator("cpu").manual_seed(seed)
    x, scale, shift = (torch.randn(s, generator=gen).to(device=device, dtype=dtype)
                       for s in ((rows, hidden), (hidden,), (hidden,)))
    return {"x": x, "scale": scale, "shift": shift if shifted else None}


OP = Op(
    name="scale_shift", family="pointwise", reference=reference, meta=meta, inputs=inputs,
    cases=({}, {"rows": 1}, {"shifted": False}, {"hidden": 33}),
    tolerance=Tolerance({"float32": (1e-6, 1e-6), "float16": (1e-3, 1e-3),
                         "bfloat16": (1e-2, 1e-2)}),
    shapes={"x": "*rows hidden", "scale": "hidden", "shift": "hidden"}, returns=("*rows hidden",),
    same_dtype=("x", "scale", "shift"), exact=("hidden",), flops="3 * rows * hidden",
    bytes="2 * itemsize * rows * hidden", differentiable=("x", "scale", "shift"),
)
