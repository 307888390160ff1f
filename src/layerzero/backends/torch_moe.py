"""Grouped products and mixtures of experts by torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..ops.formulas.moe import gated, places, route, scores_of, weights_of, within_groups
from ..ops.grouped_gemm import OP as grouped_gemm
from ..ops.grouped_gemm import ends_of
from ..ops.moe import OP as moe
from ..ops.moe_gate import OP as moe_gate
from ..spec.kernel import Kernel
from ..spec.reason import Code
from ..spec.rules import (
    Condition,
    aligned,
    any_of,
    at_least,
    contiguous,
    cpu_isa,
    device,
    dtypes,
    multiple_of,
    plain_tensors,
    sm,
    vendor,
)
from ._packing import PACKED

PLAIN = (Tensor, torch.nn.Parameter)
# How oneDNN calls the activation of the gate: (attr, algorithm).
POST_OPS = {"swiglu": ("swish", ""), "geglu": ("gelu", "none"), "geglu_tanh": ("gelu", "tanh"), "reglu": ("relu", "")}


# Grouped products.

def _loop() -> Callable[..., Any]:
    def run(x: Tensor, weights: Tensor, group_sizes: Tensor | None = None, *, offsets: Tensor | None = None) -> Tensor:
        ends = ends_of(x, group_sizes, offsets)
        starts = [0, *ends[:-1]]
        if torch.is_grad_enabled() and (x.requires_grad or weights.requires_grad):
            parts = [x[a:b] @ weights[g] for g, (a, b) in enumerate(zip(starts, ends)) if b > a]
            return torch.cat([*parts, x.new_zeros((len(x) - ends[-1], weights.shape[-1]))])
        out = x.new_empty((len(x), weights.shape[-1]))
        for g, (a, b) in enumerate(zip(starts, ends)):
            if b > a:
                torch.mm(x[a:b], weights[g], out=out[a:b])
        out[ends[-1]:].zero_()
        return out

    return run


def _grouped_mm() -> Callable[..., Any]:
    """One call for all groups. What lies past the last group is left as it was, so it is zeroed here."""
    product = torch._grouped_mm

    def run(x: Tensor, weights: Tensor, group_sizes: Tensor | None = None, *, offsets: Tensor | None = None) -> Tensor:
        if x.device.type == "cpu" and type(x) in PLAIN:
            ends_of(x, group_sizes, offsets)   # costs nothing here; a GPU would have to be waited for
        ends = _ends(group_sizes, offsets)
        out = product(x, weights, ends)
        past = torch.arange(len(x), device=x.device) >= ends[-1]
        return out.masked_fill_(past[:, None], 0.0)  # type: ignore[no-any-return]

    return run


def _ends(group_sizes: Tensor | None, offsets: Tensor | None) -> Tensor:
    if offsets is not None:
        return offsets.int()
    assert group_sizes is not None
    return group_sizes.cumsum(0, dtype=torch.int32)


def _padded() -> Callable[..., Any]:
    """Groups padded to the largest and multiplied as one batch: for many small groups of like size."""
    def run(x: Tensor, weights: Tensor, group_sizes: Tensor | None = None, *, offsets: Tensor | None = None) -> Tensor:
        ends = torch.tensor(ends_of(x, group_sizes, offsets), device=x.device)
        starts = F.pad(ends, (1, 0))[:-1]
        tallest = int((ends - starts).max())
        place = starts[:, None] + torch.arange(tallest, device=x.device)
        inside = place < ends[:, None]
        padded = x[place.clamp(max=max(len(x) - 1, 0))] if len(x) else x.new_zeros((len(ends), 0, x.shape[1]))
        product = torch.bmm(padded, weights)
        return torch.zeros((len(x), weights.shape[-1]), dtype=x.dtype, device=x.device).index_put(
            (place[inside],), product[inside])

    return run


def _masked() -> Callable[..., Any]:
    """Every weight over every row, of which only its own rows are kept: no size is read, so it can be traced."""
    def run(x: Tensor, weights: Tensor, group_sizes: Tensor | None = None, *, offsets: Tensor | None = None) -> Tensor:
        ends = _ends(group_sizes, offsets)
        group = torch.searchsorted(ends, torch.arange(x.shape[0], device=x.device, dtype=ends.dtype), right=True)
        out = x.new_zeros((x.shape[0], weights.shape[-1]))
        for g in range(weights.shape[0]):
            out = torch.where((group == g)[:, None], x @ weights[g], out)
        return out

    return run


# Routing.

def _gate() -> Callable[..., Any]:
    """The best by partial sort over whole numbers: the score's bits first, then the lower index."""
    def run(logits: Tensor, top_k: int, scoring: str = "softmax", normalize: bool = True, *, n_group: int = 1,
            topk_group: int = 1, e_score_correction_bias: Tensor | None = None,
            routed_scaling_factor: float = 1.0) -> tuple[Tensor, Tensor]:
        scores = scores_of(logits, scoring)
        choice = scores if e_score_correction_bias is None else scores + e_score_correction_bias.float()
        if n_group > 1:
            choice = within_groups(choice, n_group, topk_group, e_score_correction_bias is not None)
        bits = (choice.detach() + 0.0).view(torch.int32)       # + 0.0: -0.0 is no less than 0.0
        order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32      # in the order of the floats
        last = choice.shape[-1] - 1
        order |= torch.arange(last, -1, -1, device=choice.device)
        ids = last - (order.topk(top_k, -1).values & 0xFFFFFFFF)
        return ids, weights_of(scores.gather(-1, ids), normalize, routed_scaling_factor)

    return run


# Experts.

def _routed(topk_ids: Tensor | None, topk_weights: Tensor | None, logits: Tensor | None, top_k: int, scoring: str,
            normalize: bool) -> tuple[Tensor, Tensor]:
    if logits is not None:
        return route(logits, top_k, scoring, normalize, 1, 1, None, 1.0)
    assert topk_ids is not None and topk_weights is not None   # the contract asks for them
    return topk_ids, topk_weights


Expert = Callable[[Tensor, int], Tensor]


def _one_by_one(prepare: Callable[[Tensor, Tensor, str, bool], Expert]) -> Callable[..., Any]:
    """One expert after the other, each over all of its tokens. `prepare` gives what runs an expert."""
    def run(
        x: Tensor, w_gate_up: Tensor, w_down: Tensor, topk_ids: Tensor | None = None,
        topk_weights: Tensor | None = None, *, logits: Tensor | None = None, top_k: int = 0, scoring: str = "softmax",
        normalize: bool = True, activation: str = "swiglu", gate_first: bool = True, expert_offset: int = 0,
        capacity: int = 0, weight_on: str = "output",
    ) -> Tensor:
        ids, weights = _routed(topk_ids, topk_weights, logits, top_k, scoring, normalize)
        experts, slots = w_gate_up.shape[0], ids.shape[-1]
        local = places(ids, experts, expert_offset, capacity)
        expert = prepare(w_gate_up, w_down, activation, gate_first)
        flat, wide = x.reshape(-1, x.shape[-1]), torch.promote_types(x.dtype, torch.float32)
        by = weights.reshape(-1, 1).to(wide)
        if len(flat) == 1:                     # one token: nothing to sort, nothing to add up from afar
            found = _one_token(flat, local.tolist(), by, expert, experts, weight_on, wide)
            return found.to(x.dtype).view(x.shape)
        order = local.argsort(stable=True)
        counts = torch.bincount(local, minlength=experts + 1).tolist()
        tokens, by = order // slots, by[order]
        out = torch.zeros(flat.shape, dtype=wide, device=x.device)
        start = 0
        for e, count in enumerate(counts[:experts]):
            if not count:
                continue
            mine, weight = tokens[start:start + count], by[start:start + count]
            start += count
            rows = flat[mine]
            if weight_on == "input":
                rows = (rows.to(wide) * weight).to(x.dtype)
            result = expert(rows, e)
            out = out.index_add(0, mine, result * weight if weight_on == "output" else result.to(wide))
        return out.to(x.dtype).view(x.shape)

    return run


def _one_token(flat: Tensor, local: list[int], by: Tensor, expert: Expert, experts: int, weight_on: str,
               wide: torch.dtype) -> Tensor:
    out = torch.zeros(flat.shape, dtype=wide, device=flat.device)
    for slot, e in enumerate(local):
        if e == experts:
            continue
        if weight_on == "output":
            out = out + expert(flat, e) * by[slot]
        else:
            out = out + expert((flat.to(wide) * by[slot]).to(flat.dtype), e)
    return out


def _experts() -> Callable[..., Any]:
    by_vector = "AVX512" in torch.backends.cpu.get_cpu_capability()        # there a row of bf16 is quicker as a vector

    def prepare(w_gate_up: Tensor, w_down: Tensor, activation: str, gate_first: bool) -> Expert:
        vectors = by_vector and w_down.dtype == torch.bfloat16 and w_down.device.type == "cpu"

        def expert(rows: Tensor, e: int) -> Tensor:
            if vectors and rows.shape[0] == 1:
                return torch.mv(w_down[e], gated(torch.mv(w_gate_up[e], rows[0]), activation, gate_first))[None]
            return F.linear(gated(F.linear(rows, w_gate_up[e]), activation, gate_first), w_down[e])

        return expert

    return _one_by_one(prepare)


def _prepacked_experts() -> Callable[..., Any]:
    product, times = torch.ops.mkldnn._linear_pointwise.default, torch.ops.mkldnn._linear_pointwise.binary
    reorder = torch.ops.mkldnn._reorder_linear_weight.default

    def arranged(weight: Tensor) -> list[Tensor]:
        return [reorder(one, 32) for one in weight.detach()]

    def prepare(w_gate_up: Tensor, w_down: Tensor, activation: str, gate_first: bool) -> Expert:
        inner = w_down.shape[-1]
        first, second = w_gate_up[:, :inner], w_gate_up[:, inner:]
        gates, ups = (PACKED.get("experts", arranged, w) for w in ((first, second) if gate_first else (second, first)))
        downs = PACKED.get("experts", arranged, w_down)
        attr, algorithm = POST_OPS[activation]

        def expert(rows: Tensor, e: int) -> Tensor:
            if gates is None or ups is None or downs is None:
                return F.linear(gated(F.linear(rows, w_gate_up[e]), activation, gate_first), w_down[e])
            gate = product(rows, gates[e], None, attr, [], algorithm)
            return product(times(rows, gate, ups[e], None, "mul"), downs[e], None, "none", [], "")  # type: ignore[no-any-return]

        return expert

    return _one_by_one(prepare)


def _sorted_experts() -> Callable[..., Any]:
    """All experts in two grouped products over the tokens sorted by expert; no size is read back from the device."""
    product = torch._grouped_mm

    def run(
        x: Tensor, w_gate_up: Tensor, w_down: Tensor, topk_ids: Tensor | None = None,
        topk_weights: Tensor | None = None, *, logits: Tensor | None = None, top_k: int = 0, scoring: str = "softmax",
        normalize: bool = True, activation: str = "swiglu", gate_first: bool = True, expert_offset: int = 0,
        capacity: int = 0, weight_on: str = "output",
    ) -> Tensor:
        ids, weights = _routed(topk_ids, topk_weights, logits, top_k, scoring, normalize)
        experts, slots = w_gate_up.shape[0], ids.shape[-1]
        local = places(ids, experts, expert_offset, capacity)
        order = local.argsort(stable=True)
        ends = torch.searchsorted(local[order], torch.arange(experts, device=x.device), right=True).int()
        flat = x.reshape(-1, x.shape[-1])
        wide = torch.promote_types(x.dtype, torch.float32)
        rows = flat[order // slots]
        if weight_on == "input":
            rows = (rows.to(wide) * weights.reshape(-1, 1)[order].to(wide)).to(x.dtype)
        inner = gated(product(rows, w_gate_up.mT, ends), activation, gate_first)
        result = product(inner, w_down.mT, ends)
        back = torch.empty_like(result).index_copy_(0, order, result).view(-1, slots, x.shape[-1])
        nobody = (local == experts).view(-1, slots, 1)         # those rows were never written
        back = back.to(wide).masked_fill(nobody, 0.0)
        if weight_on == "output":
            back = back * weights.reshape(-1, slots, 1).to(wide)
        return back.sum(1).to(x.dtype).view(x.shape)

    return run


def _masked_experts() -> Callable[..., Any]:
    """Every expert over every token, kept where it was chosen: no size is read, so it can be traced."""
    def run(
        x: Tensor, w_gate_up: Tensor, w_down: Tensor, topk_ids: Tensor | None = None,
        topk_weights: Tensor | None = None, *, logits: Tensor | None = None, top_k: int = 0, scoring: str = "softmax",
        normalize: bool = True, activation: str = "swiglu", gate_first: bool = True, expert_offset: int = 0,
        capacity: int = 0, weight_on: str = "output",
    ) -> Tensor:
        ids, weights = _routed(topk_ids, topk_weights, logits, top_k, scoring, normalize)
        experts = w_gate_up.shape[0]
        local = places(ids, experts, expert_offset, capacity).view(-1, ids.shape[-1])
        flat, wide = x.reshape(-1, x.shape[-1]), torch.promote_types(x.dtype, torch.float32)
        by = weights.reshape(local.shape).to(wide)
        out = torch.zeros(flat.shape, dtype=wide, device=x.device)
        for e in range(experts):
            chosen = local == e
            weight = torch.where(chosen, by, 0.0).sum(-1, keepdim=True)
            rows = flat if weight_on == "output" else (flat.to(wide) * weight).to(x.dtype)
            result = F.linear(gated(F.linear(rows, w_gate_up[e]), activation, gate_first), w_down[e]).to(wide)
            result = result * weight if weight_on == "output" else result
            out = torch.where(chosen.any(-1, keepdim=True), out + result, out)     # what overflowed stays out
        return out.to(x.dtype).view(x.shape)

    return run


# Rows of whole 16 bytes, and bf16: other dtypes run on some devices only, and cannot be traced.
GROUPED: tuple[Condition, ...] = (
    device("cpu", "cuda"), any_of(device("cpu"), vendor("nvidia")), any_of(device("cpu"), sm(at_least=90)),
    dtypes("bfloat16"), plain_tensors())

KERNELS = (
    Kernel("torch.grouped_loop", grouped_gemm, _loop, prior=6.0, overhead_us=15.0, baseline=True, graph_safe=False,
           traceable=False,
           note="reads the sizes on the host"),
    Kernel("torch.grouped_mm", grouped_gemm, _grouped_mm, torch=">=2.9", prior=6.0, overhead_us=20.0,
           differentiable=False,
           requires=(*GROUPED, multiple_of("k", 8), multiple_of("n", 8), contiguous("x"), aligned("x", 16),
                     at_least("rows", 1, Code.EMPTY_INPUT),
                     any_of(at_least("weights.stride_last", 2), aligned("weights", 16)),
                     # whole, or a whole one seen transposed: k and n are multiples of 8
                     any_of(at_least("weights.stride_last", 8), contiguous("weights", repair=False))),
           note="its backward refuses gradients that were broadcast, such as those of a sum"),
    Kernel("torch.grouped_bmm", grouped_gemm, _padded, prior=2.0, overhead_us=40.0, graph_safe=False, traceable=False,
           workspace="itemsize * groups * rows * (k + n)", note="pads every group to the largest"),
    Kernel("torch.grouped_masked", grouped_gemm, _masked, prior=0.2, overhead_us=60.0, workspace="itemsize * rows * n",
           note="multiplies every row with every weight; for torch.compile and CUDA graphs"),
    Kernel("torch.moe_gate", moe_gate, _gate, prior=3.0, overhead_us=20.0, baseline=True,
           requires=(any_of(device("cuda"), at_least("rows", 8)),), note="for a few rows a stable sort is as fast"),
    Kernel("torch.moe_experts", moe, _experts, prior=6.0, overhead_us=60.0, baseline=True, graph_safe=False,
           traceable=False,
           note="reads the sizes on the host"),
    Kernel("torch.moe_masked", moe, _masked_experts, prior=0.2, overhead_us=100.0, workspace="16 * rows * wide",
           note="runs every expert on every token; for torch.compile and CUDA graphs"),
    Kernel("torch.moe_prepacked", moe, _prepacked_experts, prior=7.0, overhead_us=70.0, differentiable=False,
           graph_safe=False, traceable=False, workspace="3 * itemsize * experts * hidden * inner",
           requires=(device("cpu"), cpu_isa("avx512f"), dtypes("bfloat16"), plain_tensors(), at_least("rows", 2)),
           note="keeps a second copy of the weights, arranged for oneDNN"),
    Kernel("torch.moe_sorted", moe, _sorted_experts, torch=">=2.9", prior=6.5, overhead_us=90.0, differentiable=False,
           requires=(*GROUPED, at_least("rows", 2), multiple_of("hidden", 8), multiple_of("inner", 8),
                                      contiguous("w_gate_up"), contiguous("w_down"))),
)
