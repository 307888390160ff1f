"""Kernels that are right in every call by itself: what one call keeps is wrong for another, of
another thread, of other contents, of another mode."""

from __future__ import annotations

import torch
from broken_kernels import FAULTS, Fault, fault

_BEFORE = len(FAULTS)


@fault("rms_norm", "threads", "state")
class StagingBySize:
    """Its short calls hardly ever overlap."""

    def __init__(self):
        self.staging = {}

    def __call__(self, right, **v):
        out = right(**v)
        if out.requires_grad:
            return out
        with torch.inference_mode(False):
            staging = self.staging.setdefault((out.shape, out.dtype),
                                              torch.empty(out.shape, dtype=out.dtype))
        staging.copy_(out)
        return staging.clone()


@fault("paged_attention", "leak", "state")
class ScoresForEveryTotal:
    """Keeps a buffer for each sum of the lengths that there was."""

    def __init__(self):
        self.scores = {}

    def __call__(self, right, context_lens, **v):
        total = int(context_lens.sum())
        self.scores.setdefault(total, torch.empty(total))
        return right(context_lens=context_lens, **v)


@fault("layer_norm", "mode", "state", "fault")
class OnesOfAnyMode:
    """Without a weight it has ones, kept by size: of inference mode autograd refuses them."""

    def __init__(self):
        self.ones = {}

    def __call__(self, right, x, weight, **v):
        if weight is None:
            key = x.shape[-1], x.dtype
            if key not in self.ones:
                self.ones[key] = torch.ones(key[0], dtype=key[1])
            weight = self.ones[key]
        return right(x=x, weight=weight, **v)


CALL_FAULTS: list[Fault] = FAULTS[_BEFORE:]
del FAULTS[_BEFORE:]                           # they have tests of their own
