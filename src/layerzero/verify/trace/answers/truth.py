"""One library's own answer to a definition. Nothing of lz computes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .answer import Answer, Inputs, Outputs

Compute = Callable[[Answer, Inputs], Outputs]


@dataclass(frozen=True)
class Truth:
    """One library's answer; `why_not` where it has none here."""

    source: str
    compute: Compute | None = None
    why_not: str = ""

    def __call__(self, answer: Answer, inputs: Inputs) -> dict[str, Tensor]:
        assert self.compute is not None
        with torch.no_grad():
            results = self.compute(answer, inputs)
        return {n: results[n].to(getattr(torch, s.dtype))
                for n, s in answer.definition.outputs.items() if n in results}
