"""torch.embedding and index_select: their backward is a dense scatter, or rows added in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ops.embedding import OP as embedding
from ..spec import rules as r
from ..spec.kernel import Direct, Kernel, direct
from ..spec.reason import Code


def _embedding() -> Direct:
    def general(ids: Tensor, weight: Tensor, padding_idx: int | None = None,
                scale: float = 1.0) -> Tensor:
        padding = -1 if padding_idx is None else padding_idx % weight.shape[0]
        rows = torch.embedding(weight, ids, padding)
        return rows if scale == 1.0 else rows.mul_(scale)

    return direct(torch.embedding, "weight", "ids", otherwise=general)


def _index_select() -> Callable[..., Any]:
    def run(ids: Tensor, weight: Tensor, scale: float = 1.0) -> Tensor:
        rows = weight.index_select(0, ids.reshape(-1)).view(*ids.shape, weight.shape[1])
        return rows if scale == 1.0 else rows.mul_(scale)

    return run


KERNELS = (
    Kernel("torch.embedding", embedding, _embedding, prior=8.0, overhead_us=3.0, baseline=True,
           batch_invariant=True, tp_invariant=True, backward_varies_on=("cuda",)),
    Kernel("torch.index_select", embedding, _index_select, prior=8.0, overhead_us=4.0,
           backward_varies_on=("cuda",),
           requires=(r.any_of(r.off("grad"), r.absent("padding_idx", Code.FEATURE_UNSUPPORTED)),),
           note="its backward knows no padding row"),
)
