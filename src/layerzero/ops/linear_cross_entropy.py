"""Fused linear and cross entropy: the loss of the logits hidden @ weight.T + bias, a language
model's last layer.

Logits are rounded to the inputs' dtype, as a linear layer gives them; everything after that, and
the result, is in float32 or wider. A kernel can compute the loss without holding all logits, which
for a large vocabulary are the largest tensor of a training step. Targets, ignore_index,
label_smoothing and reduction are those of lz.cross_entropy.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from ..spec.op import Op, Tolerance
from ..spec.rules import dtypes
from .formulas.common import FLOATS
from .formulas.loss import LOSS_RULES, check_targets, random_targets, reduce_losses, row_losses


def reference(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, *,
              ignore_index: int = -100, label_smoothing: float = 0.0,
              reduction: Literal["mean", "sum", "none"] = "mean") -> Tensor:
    """Returns the cross entropy of hidden @ weight.T + bias; weight is (vocab, width)."""
    logits = hidden @ weight.t()
    logits = logits if bias is None else logits + bias
    return reduce_losses(row_losses(logits, targets, ignore_index, label_smoothing), targets,
                         ignore_index, reduction)


def meta(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, *,
         ignore_index: int = -100, label_smoothing: float = 0.0, reduction: str = "mean") -> Tensor:
    return hidden.new_empty(targets.shape if reduction == "none" else (),
                            dtype=torch.promote_types(hidden.dtype, torch.float32))


def inputs(rows: tuple[int, ...] = (7,), width: int = 24, vocab: int = 33, bias: bool = False,
           ignored: str = "", ignore_index: int = -100, smoothing: float = 0.0,
           reduction: str = "mean", targets_dtype: str = "int64", classes: int = 0,
           stride: str = "", dtype: torch.dtype = torch.float32, device: str = "cpu",
           seed: int = 0) -> dict[str, Any]:
    """`classes`: as few are targets, each many times, as the frequent words of a text are."""
    gen = torch.Generator("cpu").manual_seed(seed)

    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen).to(device=device, dtype=dtype)

    targets = random_targets(gen, rows, min(classes, vocab) or vocab, ignored, targets_dtype,
                             device, ignore_index)
    hidden = rand(*rows, width * 2)[..., ::2] if stride == "sparse" else rand(*rows, width)
    weight = rand(width, vocab).t() if stride == "transposed" else rand(vocab, width)
    return {"hidden": hidden, "weight": weight, "targets": targets, "bias": rand(vocab) if bias
            else None, "ignore_index": ignore_index, "label_smoothing": smoothing,
            "reduction": reduction}


CASES: tuple[dict[str, Any], ...] = (
    {}, {"reduction": "sum"}, {"reduction": "none"}, {"rows": (0,), "reduction": "sum"},
    {"bias": True}, {"rows": (2, 5)}, {"rows": ()}, {"rows": (2, 5), "reduction": "none"},
    {"rows": (1,)}, {"rows": (0,), "reduction": "none"}, {"vocab": 1}, {"width": 1},
    {"vocab": 2003, "rows": (3,)},
    {"ignored": "some"}, {"ignored": "run"}, {"ignored": "some", "reduction": "none", "bias": True},
    {"ignored": "some", "smoothing": 0.1}, {"ignored": "all", "reduction": "sum"},
    {"ignored": "some", "ignore_index": 4}, {"smoothing": 0.1, "bias": True},
    {"ignored": "some", "ignore_index": 255},      # no class: it is beyond the last
    {"targets_dtype": "int32"}, {"stride": "sparse"}, {"stride": "transposed"},
    {"rows": (300,), "vocab": 97},
    # hundreds of classes for each number of a row: the gradient of the weight is added up of many
    {"rows": (1200,), "width": 4, "vocab": 1031, "classes": 2, "reduction": "sum"},
)


def extra_check(values: dict[str, Any], facts: Any) -> None:
    check_targets("linear_cross_entropy", values, facts)


# ids beyond 2^16; a number that is a class in the 32 bits of the targets
STRESS: tuple[dict[str, Any], ...] = (
    {"vocab": 200_003, "width": 2, "rows": (4,), "reduction": "none", "targets_dtype": "int32"},
    {"ignore_index": (1 << 32) + 4, "rows": (40,), "reduction": "none", "targets_dtype": "int32"})

OP = Op(
    name="linear_cross_entropy", family="loss", reference=reference, meta=meta, inputs=inputs,
    cases=CASES, stress=STRESS,
    tolerance=Tolerance({"float16": (1e-3, 1e-3), "bfloat16": (1e-2, 1e-2), "float32": (1e-4, 1e-5),
                         "float64": (1e-10, 1e-10)}),
    shapes={"hidden": "*rows width", "weight": "vocab width", "targets": "*rows", "bias": "vocab"},
    returns=("*rows",),                        # no dimensions unless reduction="none"
    same_dtype=("hidden", "weight", "bias"), exact=("vocab", "width"),
    requires=(dtypes(*FLOATS), *LOSS_RULES), flops="2 * rows * width * vocab",
    bytes="itemsize * (rows * width + vocab * width)",
    differentiable=("hidden", "weight", "bias"), autocast="lower", extra_check=extra_check,
)
