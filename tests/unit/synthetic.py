"""An op made to be awkward: every kind of parameter, shape and rule that a declaration can have,
all at once.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from layerzero.spec.kernel import Kernel
from layerzero.spec.op import Op, Tolerance
from layerzero.spec.reason import Code
from layerzero.spec.rules import (
    Rule,
    absent,
    aligned,
    any_of,
    at_least,
    at_most,
    contiguous,
    differs,
    equals,
    multiple_of,
    off,
    on,
    one_of,
    present,
    unit_stride,
    when,
)


def reference(
    x: Tensor, y: Tensor, steps: int = 4, mask: Tensor | None = None, table: Tensor | None = None,
    slots: Tensor | None = None, extra: Tensor | None = None, *, limit: int | None = None,
    gain: float | None = None, eps: float = 1e-5, mode: Literal["plain", "wide"] | None = None,
    order: Literal["sw", "ws"] = "sw", flag: bool = False, groups: int = 1,
) -> Tensor:
    """Adds up all it is given."""
    out = x.sum() + y.sum() * (2.0 if flag
                               else 1.0) + steps + (limit or 0) + (gain or 0.0) + eps + groups
    for t in (mask, table, slots, extra):
        out = out if t is None else out + t.sum()
    return out.to(x.dtype)


def meta(x: Tensor, y: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return x.new_empty(())


def inputs(dtype: torch.dtype = torch.float32, device: str = "cpu",
           seed: int = 0) -> dict[str, Any]:
    return {"x": torch.ones(2, 3, 4, dtype=dtype, device=device),
            "y": torch.ones(2, 3, 5, dtype=dtype, device=device)}


SHAPES = {
    "x": "*rows seq width", "y": "*rows seq depth", "mask": "~seq ~width", "table": "pages 2",
    "slots": "pages", "extra": "*rows seq width"}

OP = Op(
    name="synthetic", family="test", reference=reference, meta=meta, inputs=inputs, cases=({},),
    tolerance=Tolerance({"float32": (1e-5, 1e-5)}), variant="order",
    shapes={"sw": SHAPES, "ws": {**SHAPES, "x": "*rows width seq", "extra": "*rows width seq"}},
    returns={"sw": ("",), "ws": ("",)}, same_dtype=("x", "y"),
    derived={
        "area": "seq * depth", "gap": "seq - depth", "square": "seq == depth",
        "share": "seq % max(depth, 2)", "doubled": "limit * 2", "chain": "area + gap",
        "chained": "chain % 7", "linked": "chained + steps",
        "spread_pages": "pages * seq", "group_width": "width // groups"},
    exact=("width", "groups"),
    requires=(at_least("width", 1), at_most("eps", 1.0, Code.VALUE_OUT_OF_RANGE)),
    flops="rows * seq * width * steps", bytes="itemsize * rows * seq * (width + depth)",
    differentiable=("x", "y"),
)

# One rule, or one combination, per kind of test and kind of fact.
RULES = (
    at_most("seq", 700), at_least("seq", 100), multiple_of("seq", 7), equals("seq", 333),
    differs("seq", 40), one_of("seq", 17, 18, 500),
    Rule("seq", "not_in", (19, 96, 97), Code.SHAPE_UNSUPPORTED), multiple_of("width", 8),
    at_most("rows", 12.5), at_most("area", 5000), at_least("area", 64.5), multiple_of("area", 3),
    equals("gap", 0), at_least("gap", -3), on("square"), off("square"), one_of("square", True),
    equals("share", 1), at_least("doubled", 9),
    absent("doubled"), at_most("chained", 2), multiple_of("linked", 2),
    at_least("spread_pages", 50), equals("group_width", 2), at_least("steps", -2),
    equals("steps", -1), multiple_of("steps", 3), at_most("steps", 40),
    present("limit"), one_of("limit", None, 3), at_most("limit", 5), equals("limit", -1),
    absent("gain"), at_most("gain", 2.5), equals("gain", 0.25), at_least("gain", -0.5),
    differs("gain", 0.75), at_most("eps", 0.1), equals("pages", 4), present("pages"),
    one_of("mode", None, "wide"), on("flag"), equals("order", "sw"),
    one_of("dtype", "float16", "float32"), one_of("table.dtype", None, "float32"), off("grad"),
    Rule("y.requires_grad", "eq", False, Code.BACKWARD_UNSUPPORTED),
    differs("mask.requires_grad", True), unit_stride("x"), contiguous("y"), contiguous("slots"),
    aligned("x", 32), one_of("x.ndim", 2, 3), one_of("mask.ndim", None, 1),
    one_of("mask.broadcast", None, "", "seq"), equals("x.device", "cpu"),
    when(at_most("seq", 64), multiple_of("depth", 4)), when(present("limit"), at_most("depth", 65)),
    any_of(at_most("depth", 31), equals("depth", 77), on("flag")),
    any_of(at_most("rows", 3), when(on("flag"), at_least("gap", 1))),
    off("deterministic"), equals("itemsize", 4),
)


def _load() -> Any:
    return reference


def kernel(id: str = "synthetic.plain", **declared: Any) -> Kernel:
    return Kernel(id, OP, _load, **declared)


# The rules stand on a kernel each, so that a verdict is a choice; the last one takes every call.
KERNELS = (*(kernel(f"synthetic.rule{i}", requires=(rule,), prior=2.0 + i)
             for i, rule in enumerate(RULES)), kernel())
