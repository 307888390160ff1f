"""Grouped products and mixtures of experts by torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..ops.formulas.moe import (
    activate_gated,
    assign_experts,
    mask_groups,
    route,
    score_experts,
    weigh_experts,
)
from ..ops.grouped_gemm import OP as grouped_gemm
from ..ops.grouped_gemm import read_group_ends
from ..ops.moe import OP as moe
from ..ops.moe_gate import OP as moe_gate
from ..spec import rules as r
from ..spec.kernel import Kernel
from ..spec.reason import Code
from ._packing import PACKED

PLAIN_TENSORS = (Tensor, torch.nn.Parameter)
# oneDNN's names of the gate's activation: (attr, algorithm).
POST_OPS = {"swiglu": ("swish", ""), "geglu": ("gelu", "none"), "geglu_tanh": ("gelu", "tanh"),
            "reglu": ("relu", "")}


# Grouped GEMM.

def _grouped_loop() -> Callable[..., Any]:
    def run(x: Tensor, weights: Tensor, group_sizes: Tensor | None = None, *,
            offsets: Tensor | None = None) -> Tensor:
        ends = read_group_ends(x, group_sizes, offsets)
        starts = [0, *ends[:-1]]
        # on the CPU too: a product into a part of another tensor takes longer than the copy
        if x.device.type == "cpu" or (torch.is_grad_enabled()
                                      and (x.requires_grad or weights.requires_grad)):
            left = len(x) - ends[-1]
            sizes = [b - a for a, b in zip(starts, ends)]
            groups = zip(sizes, x.split([*sizes, left]), weights.unbind())
            parts = [part @ weight for size, part, weight in groups if size]
            return torch.cat([*parts, x.new_zeros((left, weights.shape[-1]))] if left or not parts
                             else parts)
        out = x.new_empty((len(x), weights.shape[-1]))
        for g, (a, b) in enumerate(zip(starts, ends)):
            if b > a:
                torch.mm(x[a:b], weights[g], out=out[a:b])
        out[ends[-1]:].zero_()
        return out

    return run


def _grouped_mm() -> Callable[..., Any]:
    """Multiplies all groups in one call, which leaves rows past the last group unset; these are
    zeroed here."""
    product = torch._grouped_mm

    def run(x: Tensor, weights: Tensor, group_sizes: Tensor | None = None, *,
            offsets: Tensor | None = None) -> Tensor:
        if x.device.type == "cpu" and type(x) in PLAIN_TENSORS:
            # checked on the CPU only: a GPU would be synchronised
            read_group_ends(x, group_sizes, offsets)
        ends = _group_ends(group_sizes, offsets)
        # expanded ones have a stride of 0, which it refuses
        rows = weights if weights.stride(-1) == 1 else weights.mT
        if rows.stride(-1) != 1 or rows.stride(-2) < rows.shape[-1]:
            weights = weights.contiguous()
        out = product(x, weights, ends)
        past = torch.arange(len(x), device=x.device) >= ends[-1]
        return out.masked_fill_(past[:, None], 0.0)  # type: ignore[no-any-return]

    return run


def _group_ends(group_sizes: Tensor | None, offsets: Tensor | None) -> Tensor:
    if offsets is not None:
        return offsets.int().contiguous()      # with gaps torch 2.11 fails the device
    assert group_sizes is not None
    return group_sizes.cumsum(0, dtype=torch.int32)


def _grouped_padded() -> Callable[..., Any]:
    """Pads the groups to the largest and multiplies one batch: for many small, similar groups."""
    def run(x: Tensor, weights: Tensor, group_sizes: Tensor | None = None, *,
            offsets: Tensor | None = None) -> Tensor:
        ends = torch.tensor(read_group_ends(x, group_sizes, offsets), device=x.device)
        starts = F.pad(ends, (1, 0))[:-1]
        max_size = int((ends - starts).max())
        rows = starts[:, None] + torch.arange(max_size, device=x.device)
        inside = rows < ends[:, None]
        padded = (x[rows.clamp(max=max(len(x) - 1, 0))] if len(x)
                  else x.new_zeros((len(ends), 0, x.shape[1])))
        product = torch.bmm(padded, weights)
        return torch.zeros((len(x), weights.shape[-1]), dtype=x.dtype, device=x.device).index_put(
            (rows[inside],), product[inside])

    return run


def _grouped_masked() -> Callable[..., Any]:
    """Multiplies every row by every weight and keeps its own: reads no size, can be traced."""
    def run(x: Tensor, weights: Tensor, group_sizes: Tensor | None = None, *,
            offsets: Tensor | None = None) -> Tensor:
        ends = _group_ends(group_sizes, offsets)
        group = torch.searchsorted(ends, torch.arange(x.shape[0], device=x.device,
                                                      dtype=ends.dtype), right=True)
        out = x.new_zeros((x.shape[0], weights.shape[-1]))
        for g in range(weights.shape[0]):
            out = torch.where((group == g)[:, None], x @ weights[g], out)
        return out

    return run


# Routing.

def _gate() -> Callable[..., Any]:
    """Routes by topk over integers made of the score's bits and, for ties, the index."""
    def run(logits: Tensor, top_k: int, scoring: str = "softmax", normalize: bool = True, *,
            n_group: int = 1, topk_group: int = 1, e_score_correction_bias: Tensor | None = None,
            routed_scaling_factor: float = 1.0) -> tuple[Tensor, Tensor]:
        scores = score_experts(logits, scoring)
        scores_with_bias = (scores if e_score_correction_bias is None
                            else scores + e_score_correction_bias.float())
        if n_group > 1:
            scores_with_bias = mask_groups(scores_with_bias, n_group, topk_group,
                                           e_score_correction_bias is not None)
        ids = _distinct_topk(scores_with_bias, top_k)
        if ids is not None:
            return ids, weigh_experts(scores.gather(-1, ids), normalize, routed_scaling_factor)
        bits = (scores_with_bias.detach() + 0.0).view(torch.int32)       # + 0.0 turns -0.0 into 0.0
        sort_keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32      # ordered like the floats
        last = scores_with_bias.shape[-1] - 1
        sort_keys |= torch.arange(last, -1, -1, device=scores_with_bias.device)
        ids = last - (sort_keys.topk(top_k, -1).values & 0xFFFFFFFF)
        return ids, weigh_experts(scores.gather(-1, ids), normalize, routed_scaling_factor)

    return run


def _distinct_topk(scores: Tensor, top_k: int) -> Tensor | None:
    """Returns the indices of the highest scores by torch.topk if no tie (or NaN) is among them."""
    if (scores.device.type != "cpu" or type(scores) not in PLAIN_TENSORS
        or not top_k < scores.shape[-1] or torch.compiler.is_compiling()):
        return None
    values, ids = scores.detach().topk(top_k + 1, -1)
    distinct = bool((values[..., :-1] > values[..., 1:]).all())
    return ids[..., :top_k].contiguous() if distinct else None


# Experts.

def _routing(topk_ids: Tensor | None, topk_weights: Tensor | None, logits: Tensor | None,
             top_k: int, scoring: str, normalize: bool) -> tuple[Tensor, Tensor]:
    if logits is not None:
        return route(logits, top_k, scoring, normalize, 1, 1, None, 1.0)
    assert topk_ids is not None and topk_weights is not None   # checked by the contract
    return topk_ids, topk_weights


Expert = Callable[[Tensor, int], Tensor]


def _run_experts(prepare: Callable[[Tensor, Tensor, str, bool], Expert]) -> Callable[..., Any]:
    """Returns a kernel that runs one expert after the other, each on all of its tokens."""
    def run(
        x: Tensor, w_gate_up: Tensor, w_down: Tensor, topk_ids: Tensor | None = None,
        topk_weights: Tensor | None = None, *, logits: Tensor | None = None, top_k: int = 0,
        scoring: str = "softmax", normalize: bool = True, activation: str = "swiglu",
        gate_first: bool = True, expert_offset: int = 0,
        capacity: int = 0, weight_on: str = "output",
    ) -> Tensor:
        ids, weights = _routing(topk_ids, topk_weights, logits, top_k, scoring, normalize)
        experts, slots = w_gate_up.shape[0], ids.shape[-1]
        local = assign_experts(ids, experts, expert_offset, capacity)
        expert = prepare(w_gate_up, w_down, activation, gate_first)
        flat, acc_dtype = x.reshape(-1, x.shape[-1]), torch.promote_types(x.dtype, torch.float32)
        routing_weights = weights.reshape(-1, 1).to(acc_dtype)
        if len(flat) == 1:                     # one token: nothing to sort or scatter
            result_of_token = _one_token(flat, local.tolist(), routing_weights, expert, experts,
                                         weight_on, acc_dtype)
            return result_of_token.to(x.dtype).view(x.shape)
        order = local.argsort(stable=True)
        counts = torch.bincount(local, minlength=experts + 1).tolist()
        tokens, routing_weights = order // slots, routing_weights[order]
        out = torch.zeros(flat.shape, dtype=acc_dtype, device=x.device)
        start = 0
        for e, count in enumerate(counts[:experts]):
            if not count:
                continue
            own_tokens, weight = tokens[start:start + count], routing_weights[start:start + count]
            start += count
            rows = flat[own_tokens]
            if weight_on == "input":
                rows = (rows.to(acc_dtype) * weight).to(x.dtype)
            result = expert(rows, e)
            out = out.index_add(0, own_tokens, result * weight if weight_on == "output"
                                else result.to(acc_dtype))
        return out.to(x.dtype).view(x.shape)

    return run


def _one_token(flat: Tensor, local: list[int], routing_weights: Tensor, expert: Expert,
               experts: int, weight_on: str, acc_dtype: torch.dtype) -> Tensor:
    out = torch.zeros(flat.shape, dtype=acc_dtype, device=flat.device)
    for slot, e in enumerate(local):
        if e == experts:
            continue
        if weight_on == "output":
            out = out + expert(flat, e) * routing_weights[slot]
        else:
            out = out + expert((flat.to(acc_dtype) * routing_weights[slot]).to(flat.dtype), e)
    return out


def _experts() -> Callable[..., Any]:
    # matrix-vector products of bf16 are faster there
    fast_matvec = "AVX512" in torch.backends.cpu.get_cpu_capability()

    def prepare(w_gate_up: Tensor, w_down: Tensor, activation: str, gate_first: bool) -> Expert:
        use_matvec = fast_matvec and w_down.dtype == torch.bfloat16 and w_down.device.type == "cpu"

        def expert(rows: Tensor, e: int) -> Tensor:
            if use_matvec and rows.shape[0] == 1:
                return torch.mv(w_down[e], activate_gated(torch.mv(w_gate_up[e], rows[0]),
                                                          activation, gate_first))[None]
            return F.linear(activate_gated(F.linear(rows, w_gate_up[e]), activation, gate_first),
                            w_down[e])

        return expert

    return _run_experts(prepare)


def _prepacked_experts() -> Callable[..., Any]:
    product, product_mul = (torch.ops.mkldnn._linear_pointwise.default,
                            torch.ops.mkldnn._linear_pointwise.binary)
    reorder = torch.ops.mkldnn._reorder_linear_weight.default

    def pack(weight: Tensor) -> list[Tensor]:
        return [reorder(matrix, 32) for matrix in weight.detach()]

    def prepare(w_gate_up: Tensor, w_down: Tensor, activation: str, gate_first: bool) -> Expert:
        inner = w_down.shape[-1]
        first, second = w_gate_up[:, :inner], w_gate_up[:, inner:]
        gates, ups = (PACKED.get("experts", pack, w)
                      for w in ((first, second) if gate_first else (second, first)))
        downs = PACKED.get("experts", pack, w_down)
        attr, algorithm = POST_OPS[activation]

        def expert(rows: Tensor, e: int) -> Tensor:
            if gates is None or ups is None or downs is None:
                return F.linear(activate_gated(F.linear(rows, w_gate_up[e]), activation,
                                               gate_first), w_down[e])
            gate = product(rows, gates[e], None, attr, [], algorithm)
            return product(product_mul(rows, gate, ups[e], None, "mul"), downs[e], None, "none", [],
                           "")  # type: ignore[no-any-return]

        return expert

    return _run_experts(prepare)


def _sorted_experts() -> Callable[..., Any]:
    """Runs all experts in two grouped GEMMs over tokens sorted by expert; reads no size."""
    product = torch._grouped_mm

    def run(
        x: Tensor, w_gate_up: Tensor, w_down: Tensor, topk_ids: Tensor | None = None,
        topk_weights: Tensor | None = None, *, logits: Tensor | None = None, top_k: int = 0,
        scoring: str = "softmax", normalize: bool = True, activation: str = "swiglu",
        gate_first: bool = True, expert_offset: int = 0,
        capacity: int = 0, weight_on: str = "output",
    ) -> Tensor:
        ids, weights = _routing(topk_ids, topk_weights, logits, top_k, scoring, normalize)
        experts, slots = w_gate_up.shape[0], ids.shape[-1]
        local = assign_experts(ids, experts, expert_offset, capacity)
        order = local.argsort(stable=True)
        ends = torch.searchsorted(local[order], torch.arange(experts, device=x.device),
                                  right=True).int()
        flat = x.reshape(-1, x.shape[-1])
        acc_dtype = torch.promote_types(x.dtype, torch.float32)
        rows = flat[order // slots]
        if weight_on == "input":
            rows = (rows.to(acc_dtype) * weights.reshape(-1, 1)[order].to(acc_dtype)).to(x.dtype)
        inner = activate_gated(product(rows, w_gate_up.mT, ends), activation, gate_first)
        result = product(inner, w_down.mT, ends)
        results = torch.empty_like(result).index_copy_(0, order,
                                                       result).view(-1, slots, x.shape[-1])
        unserved = (local == experts).view(-1, slots, 1)       # rows that were never written
        results = results.to(acc_dtype).masked_fill(unserved, 0.0)
        if weight_on == "output":
            results = results * weights.reshape(-1, slots, 1).to(acc_dtype)
        return results.sum(1).to(x.dtype).view(x.shape)

    return run


def _masked_experts() -> Callable[..., Any]:
    """Runs every expert on every token and keeps the chosen: reads no size, can be traced."""
    def run(
        x: Tensor, w_gate_up: Tensor, w_down: Tensor, topk_ids: Tensor | None = None,
        topk_weights: Tensor | None = None, *, logits: Tensor | None = None, top_k: int = 0,
        scoring: str = "softmax", normalize: bool = True, activation: str = "swiglu",
        gate_first: bool = True, expert_offset: int = 0,
        capacity: int = 0, weight_on: str = "output",
    ) -> Tensor:
        ids, weights = _routing(topk_ids, topk_weights, logits, top_k, scoring, normalize)
        experts = w_gate_up.shape[0]
        local = assign_experts(ids, experts, expert_offset, capacity).view(-1, ids.shape[-1])
        flat, acc_dtype = x.reshape(-1, x.shape[-1]), torch.promote_types(x.dtype, torch.float32)
        routing_weights = weights.reshape(local.shape).to(acc_dtype)
        out = torch.zeros(flat.shape, dtype=acc_dtype, device=x.device)
        for e in range(experts):
            chosen = local == e
            weight = torch.where(chosen, routing_weights, 0.0).sum(-1, keepdim=True)
            rows = flat if weight_on == "output" else (flat.to(acc_dtype) * weight).to(x.dtype)
            result = F.linear(activate_gated(F.linear(rows, w_gate_up[e]), activation, gate_first),
                              w_down[e]).to(acc_dtype)
            result = result * weight if weight_on == "output" else result
            # overflows of others stay out
            out = torch.where(chosen.any(-1, keepdim=True), out + result, out)
        return out.to(x.dtype).view(x.shape)

    return run


MAX_GROUPS = 1024                              # of torch._grouped_mm on CUDA
# bf16 only: other dtypes run on some devices only, and cannot be traced.
GROUPED: tuple[r.Condition, ...] = (
    r.device("cpu", "cuda"), r.any_of(r.device("cpu"), r.vendor("nvidia")),
    r.any_of(r.device("cpu"), r.sm(at_least=90)),
    r.dtypes("bfloat16"), r.plain_tensors())

KERNELS = (
    Kernel("torch.grouped_loop", grouped_gemm, _grouped_loop, prior=6.0, overhead_us=15.0,
           baseline=True, graph_safe=False, traceable=False, note="reads the sizes on the host"),
    Kernel("torch.grouped_mm", grouped_gemm, _grouped_mm, torch=">=2.9", prior=6.0,
           overhead_us=20.0,
           differentiable=False,
           requires=(*GROUPED, r.at_least("k", 1, Code.EMPTY_INPUT), r.multiple_of("k", 8),
                     r.at_least("n", 1, Code.EMPTY_INPUT), r.multiple_of("n", 8),
                     r.contiguous("x"), r.aligned("x", 16),
                     r.at_least("rows", 1, Code.EMPTY_INPUT),
                     r.any_of(r.at_least("weights.stride_last", 2), r.aligned("weights", 16)),
                     # contiguous, or a transposed contiguous one: k and n are multiples of 8
                     r.any_of(r.at_least("weights.stride_last", 8),
                              r.contiguous("weights", repair=False)),
                     r.any_of(r.multiple_of("weights.stride_last", 8),
                              r.contiguous("weights", repair=False)),
                     r.when(r.device("cuda"), r.at_most("groups", MAX_GROUPS))),
           note="its backward refuses gradients that were broadcast, such as those of a sum"),
    Kernel("torch.grouped_bmm", grouped_gemm, _grouped_padded, prior=2.0, overhead_us=40.0,
           graph_safe=False, traceable=False,
           workspace="itemsize * groups * rows * (k + n)", note="pads every group to the largest"),
    Kernel("torch.grouped_masked", grouped_gemm, _grouped_masked, prior=0.2, overhead_us=60.0,
           workspace="itemsize * rows * n",
           note="multiplies every row with every weight; for torch.compile and CUDA graphs"),
    Kernel("torch.moe_gate", moe_gate, _gate, prior=3.0, overhead_us=20.0, baseline=True,
           note="on the CPU a tie among the highest takes a search over integers"),
    Kernel("torch.moe_experts", moe, _experts, prior=6.0, overhead_us=60.0, baseline=True,
           graph_safe=False, traceable=False, note="reads the sizes on the host"),
    Kernel("torch.moe_masked", moe, _masked_experts, prior=0.2, overhead_us=100.0,
           workspace="16 * rows * wide",
           note="runs every expert on every token; for torch.compile and CUDA graphs"),
    Kernel("torch.moe_prepacked", moe, _prepacked_experts, prior=7.0, overhead_us=70.0,
           differentiable=False, graph_safe=False, traceable=False,
           workspace="3 * itemsize * experts * hidden * inner",
           requires=(r.device("cpu"), r.cpu_isa("avx512f"), r.dtypes("bfloat16"), r.plain_tensors(),
                     r.at_least("rows", 2)),
           note="keeps a second copy of the weights, arranged for oneDNN"),
    Kernel("torch.moe_sorted", moe, _sorted_experts, torch=">=2.9", prior=6.5, overhead_us=90.0,
           differentiable=False,
           requires=(*GROUPED, r.at_least("rows", 2), r.multiple_of("hidden", 8),
                     r.multiple_of("inner", 8), r.contiguous("w_gate_up"), r.contiguous("w_down"),
                     *(r.when(r.device("cuda"), r.aligned(name, 16))
                       for name in ("w_gate_up", "w_down")),
                     r.when(r.device("cuda"), r.at_most("experts", MAX_GROUPS)))),
)
