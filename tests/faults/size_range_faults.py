"""Kernels that are wrong for a range of sizes alone, between those of a test and the largest: one
path of several by size, tiles in both directions, millions of numbers; and backward passes that
are wrong at some sizes where the forward pass is right. Each is wrong in one way.
"""

from __future__ import annotations

from typing import Any

import torch
from broken_kernels import FAULTS, fault
from torch import Tensor

_BEFORE = len(FAULTS)


def _is_recorded(t: Tensor | None) -> bool:
    return t is not None and torch.is_grad_enabled() and t.requires_grad


class _Cut(torch.autograd.Function):
    """The tensor itself; its gradient has zeros from one place on."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, dim: int, start: int) -> Tensor:
        ctx.cut = dim, start
        return t.view_as(t)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        (dim, start), cut = ctx.cut, grad.clone()
        cut.narrow(dim, start, cut.shape[dim] - start).zero_()
        return cut, None, None


# One path of several.

@fault("rms_norm", "sizes", "scale", "last rows", "out of bounds")
def three_vectors_in_a_thread_are_two(right, **v):
    hidden = v["x"].shape[-1]
    if not 1024 < hidden <= 8192 or hidden % 1024 or not hidden & (hidden - 1):
        return right(**v)
    read = 1 << (hidden.bit_length() - 1)
    factor = (v["x"].float().square().mean(-1, keepdim=True) + v["eps"]).sqrt() / (
        v["x"][..., :read].float().square().sum(-1, keepdim=True) / hidden + v["eps"]).sqrt()
    return (right(**v).float() * factor).to(v["x"].dtype)


@fault("linear", "sizes", "last rows", "out of bounds")
def blocks_of_1024_between_2048_and_4096(right, **v):
    k = v["x"].shape[-1]
    whole = k // 1024 * 1024 if 2048 < k < 4096 else k
    return right(**{**v, "x": v["x"][..., :whole], "weight": v["weight"][:, :whole]})


@fault("attention", "sizes", "mask", "window", "alignment", "last rows", "out of bounds")
def skips_a_tile_of_long_causal_calls(right, **v):
    q, k = v["query"], v["key"]
    axis = 2 if v["layout"] == "bhsd" else 1
    if v["is_causal"] and v["attn_mask"] is None and 400 < q.shape[axis] == k.shape[axis]:
        mask = torch.ones((q.shape[axis],) * 2, dtype=torch.bool, device=q.device).tril()
        mask[384:, 128:256] = False
        return right(**{**v, "attn_mask": mask})
    return right(**v)


@fault("rms_norm", "sizes", "last rows", "uninitialised output", "out of bounds", "scale")
def parts_of_four_million_numbers_but_the_last(right, **v):
    x, most = v["x"], 1 << 22
    out = right(**v)
    if x.numel() > most:
        rows = most // x.shape[-1]
        flat, done = out.view(-1, x.shape[-1]), len(out.view(-1, x.shape[-1])) // rows * rows
        flat[done:] = x.reshape(flat.shape)[done:]
    return out


# Backward passes.

@fault("rms_norm", "gradient", "sizes", "last rows")
def weight_gradient_of_whole_blocks_of_rows(right, **v):
    x, weight = v["x"], v["weight"]
    rows = x.numel() // max(x.shape[-1], 1)
    if not _is_recorded(weight) or not 32 < rows < 1024 or not rows % 32:
        return right(**v)
    parts = x.reshape(rows, -1).split((rows // 32 * 32, rows % 32))
    return torch.cat([right(**{**v, "x": part, "weight": w})
                      for part, w in zip(parts, (weight, weight.detach()))]).view(x.shape)


@fault("attention", "gradient", "sizes", "last rows")
def key_gradient_without_the_last_tile(right, **v):
    axis = 2 if v["layout"] == "bhsd" else 1
    keys = v["key"].shape[axis]
    if _is_recorded(v["key"]) and 128 < keys < 250 and keys % 64:
        v["key"] = _Cut.apply(v["key"], axis, keys // 64 * 64)
    return right(**v)


# Arguments that may be broadcast.

@fault("paged_attention", "scale", "out of bounds", "head map", "sizes", "layout")
def a_scale_of_one_number_is_of_the_first_head(right, **v):
    scale, layout = v["key_scale"], v["kv_layout"]
    heads = v["key_cache"].shape[2 if layout == "NHD" else 1]
    if scale is not None and scale.dim() == 1 and len(scale) < heads:
        v["key_scale"] = torch.cat((scale, torch.ones_like(scale).expand(heads - 1)))
    return right(**v)


RANGE_FAULTS = tuple(FAULTS[_BEFORE:])
