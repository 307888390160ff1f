"""Cross entropy by torch, and in chunks of rows: the float32 logits never exist as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..ops.cross_entropy import OP as cross_entropy
from ..ops.linear_cross_entropy import OP as linear_cross_entropy
from ..spec import rules as r
from ..spec.kernel import Kernel

CHUNK_BYTES = 1 << 26      # of float32 logits per chunk: enough work for a GPU
LEAST_CHUNK_BYTES = 1 << 22    # of logits beside a small weight, which is read for each chunk
CPU_CHUNK_BYTES = 1 << 21  # a chunk that fits the cache is read again at no cost


def _chunks(rows: int, vocab: int, dtype: torch.dtype, budget: int) -> Iterator[slice]:
    step = max(1, budget // (vocab * dtype.itemsize))
    return (slice(i, min(i + step, rows)) for i in range(0, rows, step))


def _logit_chunks(rows: int, weight: Tensor, dtype: torch.dtype) -> Iterator[slice]:
    """Yields chunks whose logits take about as much as the weight that is read for each."""
    budget = min(CHUNK_BYTES, max(LEAST_CHUNK_BYTES, weight.nbytes))
    return _chunks(rows, weight.shape[0], dtype, budget)


def _acc_dtype(t: Tensor) -> torch.dtype:
    return torch.promote_types(t.dtype, torch.float32)


def _reduce(losses: Tensor, counted: Tensor, reduction: str, shape: torch.Size) -> Tensor:
    if reduction == "none":
        return losses.view(shape)
    return losses.sum() if reduction == "sum" else losses.sum() / counted.sum()


class _Rows:
    """Flat targets: which rows count, and a valid column for each row."""

    def __init__(self, targets: Tensor, ignore_index: int) -> None:
        flat = targets.reshape(-1).long()      # torch compares int32 with a number modulo 2^32
        self.valid = flat != ignore_index
        self.columns = torch.where(self.valid, flat, 0)[:, None]

    def losses(self, part: slice, log_p: Tensor, label_smoothing: float) -> Tensor:
        losses = -log_p.gather(1, self.columns[part])[:, 0]
        if label_smoothing > 0.0:
            losses = losses.mul_(1.0 - label_smoothing).sub_(log_p.mean(1), alpha=label_smoothing)
        return losses.masked_fill_(~self.valid[part], 0.0)

    def gradient(self, part: slice, p: Tensor, label_smoothing: float, weight: Tensor) -> Tensor:
        """Turns probabilities, in place, into the gradients of the row losses times `weight`."""
        columns = self.columns[part]
        p.scatter_add_(1, columns, p.new_full((), label_smoothing - 1.0).expand(columns.shape))
        if label_smoothing > 0.0:
            p.sub_(label_smoothing / p.shape[1])
        return p.mul_(weight[:, None])


def _torch_loss(logits: Tensor, targets: Tensor, ignore_index: int, label_smoothing: float,
                reduction: str) -> Tensor:
    out = torch.nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).to(_acc_dtype(logits)), targets.reshape(-1).long(),
        ignore_index=ignore_index, label_smoothing=label_smoothing, reduction=reduction)
    return out.view(targets.shape) if reduction == "none" else out


def _cross_entropy() -> Callable[..., Any]:
    def run(logits: Tensor, targets: Tensor, *, ignore_index: int = -100,
            label_smoothing: float = 0.0, reduction: str = "mean") -> Tensor:
        return _torch_loss(logits, targets, ignore_index, label_smoothing, reduction)

    return run


def _row_chunks(logits: Tensor) -> Iterator[slice]:
    budget = CPU_CHUNK_BYTES if logits.device.type == "cpu" else CHUNK_BYTES
    return _chunks(logits.shape[0], logits.shape[1], _acc_dtype(logits), budget)


def _row_losses(logits: Tensor, rows: _Rows, label_smoothing: float) -> Tensor:
    losses = logits.new_empty(logits.shape[0], dtype=_acc_dtype(logits))
    for part in _row_chunks(logits):
        losses[part] = rows.losses(part,
                                   torch.log_softmax(logits[part], 1, dtype=_acc_dtype(logits)),
                                   label_smoothing)
    return losses


class _ChunkedLosses(torch.autograd.Function):
    """The loss of each row. The backward recomputes the probabilities; only logits are saved."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, rows: _Rows, label_smoothing: float) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.rows, ctx.label_smoothing = rows, label_smoothing
        return _row_losses(logits, rows, label_smoothing)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        (logits,), rows = ctx.saved_tensors, ctx.rows
        weight = grad * rows.valid
        out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        for part in _row_chunks(logits):
            p = torch.softmax(logits[part], 1, dtype=_acc_dtype(logits))
            out[part] = rows.gradient(part, p, ctx.label_smoothing, weight[part])
        return out, None, None


def _cross_entropy_chunked() -> Callable[..., Any]:
    def run(logits: Tensor, targets: Tensor, *, ignore_index: int = -100,
            label_smoothing: float = 0.0, reduction: str = "mean") -> Tensor:
        rows, flat = _Rows(targets, ignore_index), logits.reshape(-1, logits.shape[-1])
        losses = (_ChunkedLosses.apply if torch.is_grad_enabled() and logits.requires_grad
                  else _row_losses)
        return _reduce(losses(flat, rows, label_smoothing), rows.valid, reduction, targets.shape)

    return run


def _counted(rows: Tensor) -> Tensor:
    """cuBLAS counts in 32 bits: of rows with gaps that span 2^31 elements it reads other memory."""
    if not rows.is_cuda or rows.dim() < 2 or rows.is_contiguous():
        return rows
    return rows.contiguous() if rows.shape[-2] * rows.stride(-2) >= (1 << 31) - 1 else rows


def _linear_cross_entropy() -> Callable[..., Any]:
    def run(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, *,
            ignore_index: int = -100,
            label_smoothing: float = 0.0, reduction: str = "mean") -> Tensor:
        logits = torch.nn.functional.linear(_counted(hidden), _counted(weight), bias)
        return _torch_loss(logits, targets, ignore_index, label_smoothing, reduction)

    return run


def _accumulate(total: Tensor | None, grad_logits: Tensor, hidden: Tensor) -> Tensor:
    """Adds a chunk's gradient of the weight to the total; half types are summed in float32."""
    if total is None:
        return grad_logits.t() @ hidden
    if _acc_dtype(hidden) == hidden.dtype:
        return total.addmm_(grad_logits.t(), hidden)
    return total.to(_acc_dtype(hidden)).add_(grad_logits.t() @ hidden)


class _LinearLoss(torch.autograd.Function):
    """The sum of all losses. The forward computes a chunk's gradients while its logits exist."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: _Rows,
                label_smoothing: float) -> Tensor:
        acc_dtype = _acc_dtype(hidden)
        total = hidden.new_zeros((), dtype=acc_dtype)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight) if needs_weight and not len(hidden) else None
        grad_bias = (torch.zeros_like(bias, dtype=acc_dtype) if bias is not None and needs_bias
                     else None)
        row_weights = rows.valid.to(acc_dtype)
        for part in _logit_chunks(hidden.shape[0], weight, acc_dtype):
            logits = torch.nn.functional.linear(hidden[part], weight, bias)
            log_p = torch.log_softmax(logits, 1, dtype=acc_dtype)
            total += rows.losses(part, log_p, label_smoothing).sum()
            grad_logits = rows.gradient(part, log_p.exp_(), label_smoothing, row_weights[part])
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
            grad_logits = grad_logits.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[part])
            if needs_weight:
                grad_weight = _accumulate(grad_weight, grad_logits, hidden[part])
        ctx.gradients, ctx.dtype = (grad_hidden, grad_weight, grad_bias), hidden.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        scaled = (None if g is None else (g * grad).to(ctx.dtype) for g in ctx.gradients)
        return (*scaled, None, None)


def _linear_cross_entropy_chunked() -> Callable[..., Any]:
    def run(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, *,
            ignore_index: int = -100,
            label_smoothing: float = 0.0, reduction: str = "mean") -> Tensor:
        hidden, weight = _counted(hidden), _counted(weight)
        rows, flat = _Rows(targets, ignore_index), hidden.reshape(-1, hidden.shape[-1])
        tensors = (hidden, weight) if bias is None else (hidden, weight, bias)
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            total = _LinearLoss.apply(flat, weight, bias, rows, label_smoothing)
            return total if reduction == "sum" else total / rows.valid.sum()
        losses = flat.new_empty(flat.shape[0], dtype=_acc_dtype(hidden))
        for part in _logit_chunks(flat.shape[0], weight, losses.dtype):
            logits = torch.nn.functional.linear(flat[part], weight, bias)
            losses[part] = rows.losses(part, torch.log_softmax(logits, 1, dtype=losses.dtype),
                                       label_smoothing)
        return _reduce(losses, rows.valid, reduction, targets.shape)

    return run


KERNELS = (
    Kernel("torch.cross_entropy", cross_entropy, _cross_entropy, prior=2.0, overhead_us=12.0,
           baseline=True, workspace="16 * rows * vocab",
           note="several copies of the logits, in float32 at least"),
    Kernel("torch.cross_entropy_chunked", cross_entropy, _cross_entropy_chunked, prior=3.0,
           overhead_us=800.0, traceable=False, requires=(r.plain_tensors(),),
           workspace="min(8 * rows * vocab, 134217728)",
           less_work="a few rows at a time, which stay in the cache; torch writes several copies "
                     "of all logits",
           # on the CPU the copies cost no more than the chunks do
           less_work_when=(r.device("cuda"),),
           note="keeps nothing but the logits for its backward"),
    Kernel("torch.linear_cross_entropy", linear_cross_entropy, _linear_cross_entropy, prior=2.0,
           overhead_us=15.0, baseline=True, workspace="16 * rows * vocab"),
    Kernel("torch.linear_cross_entropy_chunked", linear_cross_entropy,
           _linear_cross_entropy_chunked, prior=2.4, overhead_us=50.0, traceable=False,
           workspace="min(8 * rows * vocab, 134217728) + 4 * "
                                                        "vocab * width",
           requires=(r.plain_tensors(),
                     r.any_of(r.off("grad"), r.one_of("reduction", "mean", "sum"))),
           note="computes all gradients in the forward, for one number as the result"),
)
