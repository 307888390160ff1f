"""Cross entropy of logits (..., vocab) and class ids (...). Computed, and returned, in float32 or
wider.

Rows whose target is ignore_index do not count; the mean over no row is NaN, as in torch. With
label_smoothing that share of the target's mass is spread evenly over all classes. A target outside
the vocabulary is the caller's error. It is detected in every call on the CPU, and on a GPU when a
shape is first seen; later it triggers the device's own assertion.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from ..spec.mistake import Mistake, Values
from ..spec.op import Op, Tolerance
from ..spec.rules import dtypes
from .formulas.common import FLOATS
from .formulas.loss import LOSS_RULES, check_targets, random_targets, reduce_losses, row_losses
from .formulas.mistakes import change_results, replace_argument


def reference(logits: Tensor, targets: Tensor, *, ignore_index: int = -100,
              label_smoothing: float = 0.0,
              reduction: Literal["mean", "sum", "none"] = "mean") -> Tensor:
    """Returns -log softmax(logits)[target]: the mean or sum over the rows, or one value per row."""
    return reduce_losses(row_losses(logits, targets, ignore_index, label_smoothing), targets,
                         ignore_index, reduction)


def meta(logits: Tensor, targets: Tensor, *, reduction: str = "mean", **kwargs: Any) -> Tensor:
    return logits.new_empty(targets.shape if reduction == "none" else (),
                            dtype=torch.promote_types(logits.dtype, torch.float32))


def inputs(rows: tuple[int, ...] = (7,), vocab: int = 33, ignored: str = "",
           ignore_index: int = -100, smoothing: float = 0.0, reduction: str = "mean",
           targets_dtype: str = "int64", stride: str = "",
           scale: float = 3.0, shift: float = 0.0, masked: bool | str = False,
           dtype: torch.dtype = torch.float32, device: str = "cpu",
           seed: int = 0) -> dict[str, Any]:
    gen = torch.Generator("cpu").manual_seed(seed)
    targets = random_targets(gen, rows, vocab, ignored, targets_dtype, device, ignore_index)
    if vocab == 1:                             # eager is exactly 0, others round a large number
        scale = min(scale, 3.0)
    stored = vocab * 2 if stride == "sparse" else vocab
    logits = torch.randn((*rows, stored), generator=gen) * scale + shift
    if stride == "transposed":
        logits = logits.transpose(0, 1).contiguous().transpose(0, 1)
    if masked == "first":                      # most classes are impossible
        logits[..., :vocab * 9 // 10] = -torch.inf
        targets = targets.clamp(min=vocab * 9 // 10)
    elif masked:                               # the last one, which is no row's target
        logits[..., -1] = -torch.inf
        targets = targets.clamp(max=vocab - 2)
    logits = logits.to(device=device, dtype=dtype)
    return {"logits": logits[..., ::2] if stride == "sparse" else logits, "targets": targets,
            "ignore_index": ignore_index, "label_smoothing": smoothing, "reduction": reduction}


CASES: tuple[dict[str, Any], ...] = (
    {}, {"reduction": "sum"}, {"reduction": "none"}, {"rows": (2, 5)},
    {"rows": (2, 5), "reduction": "none"}, {"rows": ()}, {"rows": (1,)},
    {"rows": (0,), "reduction": "none"}, {"rows": (0,), "reduction": "sum"}, {"vocab": 1},
    {"vocab": 1, "smoothing": 0.3}, {"vocab": 5003, "rows": (3,)}, {"ignored": "some"},
    {"ignored": "run"}, {"ignored": "some", "reduction": "none"},
    {"ignored": "some", "smoothing": 0.1}, {"ignored": "all", "reduction": "sum"},
    {"ignored": "all", "reduction": "none"},
    {"ignored": "some", "ignore_index": 4}, {"ignored": "some", "ignore_index": 0, "rows": (24,)},
    {"ignored": "some", "ignore_index": -1, "targets_dtype": "int32"}, {"smoothing": 0.1},
    {"smoothing": 0.1, "shift": -6.0},
    {"ignored": "some", "ignore_index": 255},      # no class: it is beyond the last
    {"smoothing": 1.0, "reduction": "none"}, {"targets_dtype": "int32"}, {"stride": "sparse"},
    {"stride": "transposed"}, {"scale": 1000.0, "reduction": "none"},
    {"masked": True, "ignored": "some"},
    {"masked": "first", "vocab": 400}, {"masked": "first", "vocab": 5003, "rows": (3,)},
    {"rows": (400,), "vocab": 97},
)


def extra_check(values: dict[str, Any], facts: Any) -> None:
    check_targets("cross_entropy", values, facts)


# Mistakes that a kernel for this op could make.

def _mean_over_all_rows(v: Values, out: tuple[Any, ...]) -> Any:
    counted = (v["targets"] != v["ignore_index"]).sum() / max(v["targets"].numel(), 1)
    return out[0] * counted if v["reduction"] == "mean" else None


MISTAKES: tuple[Mistake, ...] = (
    replace_argument("mask", "ignore_index ignored", "ignore_index", -12345),
    replace_argument("scale", "no label smoothing", "label_smoothing", 0.0),
    change_results("scale", "the mean over all rows, ignored ones too", _mean_over_all_rows))

# ids beyond 2^16; a number that is a class in the 32 bits of the targets
STRESS: tuple[dict[str, Any], ...] = (
    {"vocab": 200_003, "rows": (4,), "reduction": "none", "targets_dtype": "int32"},
    {"vocab": 131_077, "rows": (3,), "smoothing": 0.1, "shift": -6.0, "ignored": "some"},
    {"ignore_index": (1 << 32) + 4, "rows": (40,), "reduction": "none", "targets_dtype": "int32"})

OP = Op(
    name="cross_entropy", family="loss", reference=reference, meta=meta, inputs=inputs,
    cases=CASES, stress=STRESS,
    mistakes=MISTAKES,
    # The same for all dtypes of the logits: the result is at least float32.
    tolerance=Tolerance({"float16": (1e-4, 1e-5), "bfloat16": (1e-4, 1e-5), "float32": (1e-4, 1e-5),
                         "float64": (1e-10, 1e-10)}),
    shapes={"logits": "*rows vocab", "targets": "*rows"},
    returns=("*rows",),                        # no dimensions unless reduction="none"
    exact=("vocab",), requires=(dtypes(*FLOATS), *LOSS_RULES),
    flops="5 * rows * vocab", bytes="itemsize * rows * vocab", differentiable=("logits",),
    extra_check=extra_check,
)
