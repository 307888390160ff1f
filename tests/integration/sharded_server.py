"""Imported by the server that the processes of sharded.py are forked from: what each of them would
do first, done once."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed.tensor  # torch.testing imports it where there is a group
import torch.fx.experimental.symbolic_shapes  # torch imports it in the first backward

from layerzero.integrations import context_parallel as cp

with contextlib.suppress(ImportError):
    import torch.distributed.tensor.experimental
    import transformers.models.llama.modeling_llama  # noqa: F401

x = torch.zeros(2, 1, 8, dtype=torch.float64)
cp.zigzag_attention([x], [x], [x], [0, 2], group=cp.SimulatedRanks(1))
