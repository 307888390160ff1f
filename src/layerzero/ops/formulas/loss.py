"""Cross entropy in plain torch, shared by the losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...spec.errors import InvalidCall
from ...spec.reason import Code, Reason
from ...spec.rules import Condition, at_least, at_most, dtypes

LOSS_RULES: tuple[Condition, ...] = (
    dtypes("int32", "int64", of="targets.dtype"), at_least("vocab", 1, Code.EMPTY_INPUT),
    at_least("label_smoothing", 0.0, Code.VALUE_OUT_OF_RANGE),
    at_most("label_smoothing", 1.0, Code.VALUE_OUT_OF_RANGE),
)


def row_losses(logits: Tensor, targets: Tensor, ignore_index: int,
               label_smoothing: float) -> Tensor:
    """Returns the loss of each row in float32 or wider; 0 if the row is ignored."""
    log_p = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), -1)
    targets = targets.long()                   # torch compares int32 with a number modulo 2^32
    counted = targets != ignore_index
    picked = log_p.gather(-1, torch.where(counted, targets, 0).unsqueeze(-1)).squeeze(-1)
    losses = -picked
    if label_smoothing > 0.0:
        losses = (1.0 - label_smoothing) * losses - label_smoothing * log_p.mean(-1)
    return torch.where(counted, losses, 0.0)


def reduce_losses(losses: Tensor, targets: Tensor, ignore_index: int, reduction: str) -> Tensor:
    """Reduces row losses; the mean is over rows not ignored, NaN if all are, as in torch."""
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / (targets.long() != ignore_index).sum()


def check_targets(op: str, values: dict[str, Any], facts: Any) -> None:
    """Raises InvalidCall if a target is neither a column of the logits nor ignored."""
    targets, vocab = values["targets"], facts["vocab"]
    if (facts["tensor_kind"] != "plain" or targets.device.type == "meta" or facts["graph"]
        or not targets.numel()):
        return
    targets = targets.long()
    classes = torch.where(targets == values["ignore_index"], 0, targets)
    low, high = (int(n) for n in torch.aminmax(classes))
    if low < 0 or high >= vocab:
        raise InvalidCall.of(op, Reason(
            Code.VALUE_OUT_OF_RANGE,
            f"between 0 and {vocab - 1}, or {values['ignore_index']} to be ignored",
            f"{low} to {high}", "targets"))


def random_targets(gen: torch.Generator, rows: tuple[int, ...], vocab: int, ignored: str,
                   dtype: str, device: str, ignore_index: int) -> Tensor:
    """Returns test inputs: `ignored` is "", "some", "run", as of a prompt, or "all"."""
    targets = torch.randint(0, vocab, rows, generator=gen)
    if ignored:
        hidden = torch.rand(rows, generator=gen) < (0.4 if ignored == "some" else 2.0)
        if ignored == "run":
            first = torch.arange(hidden.numel()) < 0.4 * hidden.numel()
            hidden = first.reshape(hidden.shape)
        targets = torch.where(hidden, ignore_index, targets)
    return targets.to(device=device, dtype=getattr(torch, dtype))
