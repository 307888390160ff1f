"""Cross entropy by torch, and in chunks of rows, so that what is computed in float32 never exists as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..ops.cross_entropy import OP as cross_entropy
from ..ops.linear_cross_entropy import OP as linear_cross_entropy
from ..spec.kernel import Kernel
from ..spec.rules import any_of, off, one_of, plain_tensors

CHUNK_BYTES = 1 << 26      # of float32 logits at a time: enough work to keep a GPU busy
CPU_CHUNK_BYTES = 1 << 21  # there what fits the cache is read again for nothing


def _chunks(rows: int, vocab: int, dtype: torch.dtype, budget: int) -> Iterator[slice]:
    step = max(1, budget // (vocab * dtype.itemsize))
    return (slice(i, min(i + step, rows)) for i in range(0, rows, step))


def _wide(t: Tensor) -> torch.dtype:
    return torch.promote_types(t.dtype, torch.float32)


def _reduced(losses: Tensor, kept: Tensor, reduction: str, shape: torch.Size) -> Tensor:
    if reduction == "none":
        return losses.view(shape)
    return losses.sum() if reduction == "sum" else losses.sum() / kept.sum()


class _Rows:
    """Flat targets: which rows count, and a column for each row that is safe to look up."""

    def __init__(self, targets: Tensor, ignore_index: int) -> None:
        flat = targets.reshape(-1)
        self.kept = flat != ignore_index
        self.columns = torch.where(self.kept, flat, 0).long()[:, None]

    def losses(self, part: slice, log_p: Tensor, label_smoothing: float) -> Tensor:
        losses = -log_p.gather(1, self.columns[part])[:, 0]
        if label_smoothing > 0.0:
            losses = losses.mul_(1.0 - label_smoothing).sub_(log_p.mean(1), alpha=label_smoothing)
        return losses.masked_fill_(~self.kept[part], 0.0)

    def slopes(self, part: slice, p: Tensor, label_smoothing: float, weight: Tensor) -> Tensor:
        """From probabilities, in place, the gradient of each row's loss times its `weight`."""
        columns = self.columns[part]
        p.scatter_add_(1, columns, p.new_full((), label_smoothing - 1.0).expand(columns.shape))
        if label_smoothing > 0.0:
            p.sub_(label_smoothing / p.shape[1])
        return p.mul_(weight[:, None])


def _torch_loss(logits: Tensor, targets: Tensor, ignore_index: int, label_smoothing: float, reduction: str) -> Tensor:
    out = torch.nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).to(_wide(logits)), targets.reshape(-1).long(), ignore_index=ignore_index,
        label_smoothing=label_smoothing, reduction=reduction)
    return out.view(targets.shape) if reduction == "none" else out


def _cross_entropy() -> Callable[..., Any]:
    def run(logits: Tensor, targets: Tensor, *, ignore_index: int = -100, label_smoothing: float = 0.0,
            reduction: str = "mean") -> Tensor:
        return _torch_loss(logits, targets, ignore_index, label_smoothing, reduction)

    return run


def _parts(logits: Tensor) -> Iterator[slice]:
    budget = CPU_CHUNK_BYTES if logits.device.type == "cpu" else CHUNK_BYTES
    return _chunks(logits.shape[0], logits.shape[1], _wide(logits), budget)


def _row_losses(logits: Tensor, rows: _Rows, label_smoothing: float) -> Tensor:
    losses = logits.new_empty(logits.shape[0], dtype=_wide(logits))
    for part in _parts(logits):
        losses[part] = rows.losses(part, torch.log_softmax(logits[part], 1, dtype=_wide(logits)), label_smoothing)
    return losses


class _ChunkedLosses(torch.autograd.Function):
    """The loss of each row. The backward makes the probabilities anew, so that only the logits are kept."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, rows: _Rows, label_smoothing: float) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.rows, ctx.label_smoothing = rows, label_smoothing
        return _row_losses(logits, rows, label_smoothing)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        (logits,), rows = ctx.saved_tensors, ctx.rows
        weight = grad * rows.kept
        out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        for part in _parts(logits):
            p = torch.softmax(logits[part], 1, dtype=_wide(logits))
            out[part] = rows.slopes(part, p, ctx.label_smoothing, weight[part])
        return out, None, None


def _cross_entropy_chunked() -> Callable[..., Any]:
    def run(logits: Tensor, targets: Tensor, *, ignore_index: int = -100, label_smoothing: float = 0.0,
            reduction: str = "mean") -> Tensor:
        rows, flat = _Rows(targets, ignore_index), logits.reshape(-1, logits.shape[-1])
        losses = _ChunkedLosses.apply if torch.is_grad_enabled() and logits.requires_grad else _row_losses
        return _reduced(losses(flat, rows, label_smoothing), rows.kept, reduction, targets.shape)

    return run


def _linear_cross_entropy() -> Callable[..., Any]:
    def run(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, *, ignore_index: int = -100,
            label_smoothing: float = 0.0, reduction: str = "mean") -> Tensor:
        logits = torch.nn.functional.linear(hidden, weight, bias)
        return _torch_loss(logits, targets, ignore_index, label_smoothing, reduction)

    return run


def _added(total: Tensor | None, slopes: Tensor, hidden: Tensor) -> Tensor:
    """A chunk's share of the weight's gradient added to that of those before; sums of half types are in float32."""
    if total is None:
        return slopes.t() @ hidden
    if _wide(hidden) == hidden.dtype:
        return total.addmm_(slopes.t(), hidden)
    return total.to(_wide(hidden)).add_(slopes.t() @ hidden)


class _LinearLoss(torch.autograd.Function):
    """The sum of all losses. While a chunk's logits exist, its share of every gradient is computed as well."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: _Rows,
                label_smoothing: float) -> Tensor:
        wide = _wide(hidden)
        total = hidden.new_zeros((), dtype=wide)
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        of_hidden = torch.empty_like(hidden) if wants_hidden else None
        of_weight = torch.zeros_like(weight) if wants_weight and not len(hidden) else None
        of_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and wants_bias else None
        weight_of_row = rows.kept.to(wide)
        for part in _chunks(hidden.shape[0], weight.shape[0], wide, CHUNK_BYTES):
            logits = torch.nn.functional.linear(hidden[part], weight, bias)
            log_p = torch.log_softmax(logits, 1, dtype=wide)
            total += rows.losses(part, log_p, label_smoothing).sum()
            slopes = rows.slopes(part, log_p.exp_(), label_smoothing, weight_of_row[part])
            if of_bias is not None:
                of_bias += slopes.sum(0)
            slopes = slopes.to(hidden.dtype)
            if of_hidden is not None:
                torch.mm(slopes, weight, out=of_hidden[part])
            if wants_weight:
                of_weight = _added(of_weight, slopes, hidden[part])
        ctx.gradients, ctx.dtype = (of_hidden, of_weight, of_bias), hidden.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        found = (None if g is None else (g * grad).to(ctx.dtype) for g in ctx.gradients)
        return (*found, None, None)


def _linear_cross_entropy_chunked() -> Callable[..., Any]:
    def run(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, *, ignore_index: int = -100,
            label_smoothing: float = 0.0, reduction: str = "mean") -> Tensor:
        rows, flat = _Rows(targets, ignore_index), hidden.reshape(-1, hidden.shape[-1])
        tensors = (hidden, weight) if bias is None else (hidden, weight, bias)
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            total = _LinearLoss.apply(flat, weight, bias, rows, label_smoothing)
            return total if reduction == "sum" else total / rows.kept.sum()
        losses = flat.new_empty(flat.shape[0], dtype=_wide(hidden))
        for part in _chunks(flat.shape[0], weight.shape[0], losses.dtype, CHUNK_BYTES):
            logits = torch.nn.functional.linear(flat[part], weight, bias)
            losses[part] = rows.losses(part, torch.log_softmax(logits, 1, dtype=losses.dtype), label_smoothing)
        return _reduced(losses, rows.kept, reduction, targets.shape)

    return run


KERNELS = (
    Kernel("torch.cross_entropy", cross_entropy, _cross_entropy, prior=2.0, overhead_us=12.0, baseline=True,
           workspace="16 * rows * vocab", note="several copies of the logits, in float32 at least"),
    Kernel("torch.cross_entropy_chunked", cross_entropy, _cross_entropy_chunked, prior=3.0, overhead_us=800.0,
           traceable=False, requires=(plain_tensors(),), workspace="min(8 * rows * vocab, 134217728)",
           less_work="a few rows at a time, which stay in the cache; torch writes several copies of all logits",
           note="keeps nothing but the logits for its backward"),
    Kernel("torch.linear_cross_entropy", linear_cross_entropy, _linear_cross_entropy, prior=2.0, overhead_us=15.0,
           baseline=True, workspace="16 * rows * vocab"),
    Kernel("torch.linear_cross_entropy_chunked", linear_cross_entropy, _linear_cross_entropy_chunked, prior=2.4,
           overhead_us=50.0, traceable=False, workspace="min(8 * rows * vocab, 134217728) + 4 * vocab * width",
           requires=(plain_tensors(), any_of(off("grad"), one_of("reduction", "mean", "sum"))),
           note="computes all gradients in the forward, for one number as the result"),
)
