"""Formulas of feed-forward layers and mixtures of experts: activations, routing, dispatch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ...spec.errors import InvalidCall
from ...spec.reason import Code, Reason

GATED = ("swiglu", "geglu", "geglu_tanh", "reglu")
PLAIN = ("silu", "gelu", "gelu_tanh", "relu")
_GATE_ACTIVATION = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu"}


def activate(x: Tensor, activation: str) -> Tensor:
    """Applies silu, gelu, gelu_tanh or relu; for a gated activation, the one of the gate."""
    name = _GATE_ACTIVATION.get(activation, activation)
    if name == "silu":
        return F.silu(x)
    if name == "relu":
        return F.relu(x)
    return F.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")


def activate_gated(product: Tensor, activation: str, gate_first: bool) -> Tensor:
    """Returns act(gate) * up, where gate and up are the halves of the last dimension."""
    first, second = product.chunk(2, -1)
    gate, up = (first, second) if gate_first else (second, first)
    return activate(gate, activation) * up


# Routing.

def route(
    logits: Tensor, top_k: int, scoring: str, normalize: bool, n_group: int, topk_group: int,
    bias: Tensor | None, routed_scaling_factor: float,
) -> tuple[Tensor, Tensor]:
    """Returns the experts of each token, best first, and weights; ties go to the lower index."""
    scores = score_experts(logits, scoring)
    choice = scores if bias is None else scores + bias.float()
    if n_group > 1:
        choice = mask_groups(choice, n_group, topk_group, bias is not None)
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]
    return ids, weigh_experts(scores.gather(-1, ids), normalize, routed_scaling_factor)


def score_experts(logits: Tensor, scoring: str) -> Tensor:
    upcast = logits.float()
    return upcast.sigmoid() if scoring == "sigmoid" else upcast.softmax(-1)


def weigh_experts(chosen: Tensor, normalize: bool, routed_scaling_factor: float) -> Tensor:
    if normalize:
        chosen = chosen / chosen.sum(-1, keepdim=True).clamp(min=1e-20)
    return chosen * routed_scaling_factor


def mask_groups(choice: Tensor, n_group: int, topk_group: int, two_best: bool) -> Tensor:
    """Sets the scores of all but the best groups to -inf. The score of a group is that of its best
    expert, or with a bias correction the sum of its two best (DeepSeek-V3)."""
    groups = choice.unflatten(-1, (n_group, -1))
    best = groups.topk(min(2, groups.shape[-1]), -1).values.sum(-1) if two_best else groups.amax(-1)
    chosen = best.sort(dim=-1, descending=True, stable=True).indices[..., :topk_group]
    hidden = torch.ones_like(best, dtype=torch.bool).scatter(-1, chosen, False)
    return groups.masked_fill(hidden[..., None], -torch.inf).flatten(-2)


# Dispatch.

def assign_experts(ids: Tensor, experts: int, offset: int, capacity: int) -> Tensor:
    """Returns for each (token, slot) the local expert that serves it, or `experts` if none does.

    Experts outside [offset, offset + experts) are on another device. With a capacity, an expert
    serves the first `capacity` of its (token, slot) pairs in token order; the rest are dropped.
    """
    local = ids.reshape(-1).long() - offset
    local = torch.where((local >= 0) & (local < experts), local, experts)
    if capacity <= 0:
        return local
    order = local.argsort(stable=True)
    sorted_experts = local[order]
    starts = torch.searchsorted(sorted_experts, torch.arange(experts + 1, device=ids.device))
    rank = torch.arange(len(local), device=ids.device) - starts[sorted_experts]
    within = torch.empty_like(rank).index_copy_(0, order, rank) < capacity
    return torch.where(within, local, experts)


def check_routing(op: str, topk_ids: Tensor | None, topk_weights: Tensor | None,
                  logits: Tensor | None) -> None:
    """Raises InvalidCall unless either ids and weights or logits are given."""
    if logits is None and (topk_ids is None or topk_weights is None):
        raise InvalidCall.of(op, Reason(
            Code.MISSING_METADATA,
            "give topk_ids and topk_weights (from lz.moe_gate), or logits and top_k", None,
            "topk_ids" if topk_ids is None else "topk_weights"))
    if logits is not None and (topk_ids is not None or topk_weights is not None):
        raise InvalidCall.of(op, Reason(
            Code.FEATURE_UNSUPPORTED, "absent where topk_ids and topk_weights are given",
            "a tensor", "logits"))
