"""Kernels that are wrong at the ends of what they divide, for numbers that are off by default, in
what they remember of lengths or of numbers of tokens, or with another default dtype."""

from __future__ import annotations

import math
import weakref
from copy import copy
from typing import Any

import torch
from broken_kernels import FAULTS, Fault, fault
from torch.nn.attention.flex_attention import BlockMask

import layerzero as lz

_BEFORE = len(FAULTS)


@fault("varlen_attention", "alignment", "mask")
def single_queries_take_causal_for_no_mask(right, max_seqlen_q, is_causal, **v):
    plain = v["alibi_slopes"] is None and v["window_left"] < 0
    return right(max_seqlen_q=max_seqlen_q, is_causal=is_causal and not (
        plain and max_seqlen_q == 1), **v)


@fault("mla_paged_attention", "non-finite values", "mask")
def a_split_hidden_from_a_query_is_divided_by_zero(right, context_lens, cu_seqlens_q, is_causal,
                                                   **v):
    out = right(context_lens=context_lens, cu_seqlens_q=cu_seqlens_q, is_causal=is_causal, **v)
    if not is_causal or cu_seqlens_q is None:
        return out
    bounds, hidden = cu_seqlens_q.tolist(), []
    for first, last, length in zip(bounds, bounds[1:], context_lens.tolist()):
        split = (length - 1) // 256 * 256
        hidden += [row for row in range(first, last) if 0 < split >= length - (last - row) + 1]
    for t in out if isinstance(out, tuple) else (out,):
        t[hidden] = math.nan
    return out


@fault("mla_paged_attention", "stale cache", "state")
class PlanOfTheSameLengths:
    plan: Any = None

    def __call__(self, right, context_lens, **v):
        if context_lens.is_inference():
            return right(context_lens=context_lens, **v)
        if (self.plan is None or self.plan[0]() is not context_lens
                or self.plan[1] != context_lens._version):
            self.plan = weakref.ref(context_lens), context_lens._version, context_lens.clone()
        return right(context_lens=self.plan[2], **v)


@fault("grouped_attention", "sizes", "fault", "precision", "out of bounds")
def chunks_are_found_by_a_reciprocal(right, key, value, items, chunk_starts, chunk_lengths, **v):
    if chunk_starts is None or not len(items):
        return right(key=key, value=value, items=items, chunk_starts=chunk_starts,
                     chunk_lengths=chunk_lengths, **v)
    rows, packed, begin = [], items.clone(), 0
    for i, (_, _, first, count) in enumerate(items.tolist()):
        length = int(chunk_lengths[i])
        position = torch.arange(first, first + count)
        chunk = torch.floor(position.float() * (torch.ones(()) / length)).long()
        rows.append(chunk_starts[i].long()[chunk] + position % length)
        packed[i, 2] = begin
        begin += count
    every = torch.cat(rows)
    return right(key=key[every], value=value[every], items=packed, chunk_starts=None,
                 chunk_lengths=None, **v)


@fault("moe", "capacity", "precision")
def places_are_counted_in_16_bits(right, x, capacity, **v):
    counted = {torch.bfloat16: 256, torch.float16: 2048}.get(x.dtype, capacity)
    return right(x=x, capacity=0 if capacity > counted else capacity, **v)


@fault("merge_attention", "dtype", "precision", "global state")
def sums_of_many_parts_in_the_default_dtype(right, outs, lses):
    if outs.dtype == torch.float64 or outs.numel() < 1_000:
        return right(outs=outs, lses=lses)
    out, lse = right(outs=outs, lses=lses)
    return out.to(torch.get_default_dtype()).to(out.dtype), lse


@fault("linear", "leak")
class WorkspaceForEveryNumberOfRows:
    def __init__(self) -> None:
        self.workspaces: dict[tuple[int, ...], torch.Tensor] = {}

    def __call__(self, right, x, weight, **v):
        shape = (*x.shape[:-1], weight.shape[0])
        if shape not in self.workspaces:
            self.workspaces[shape] = torch.zeros(shape)
        return right(x=x, weight=weight, **v)


@fault("grouped_gemm", "layout", "unknown")
def groups_follow_each_other_in_memory(right, weights, **v):
    if weights.dim() == 3 and weights.numel() and weights.stride(2) == 1 and len(weights) > 1:
        step = weights.shape[1] * weights.stride(1)
        if weights.stride(0) > step:
            weights = weights.as_strided(weights.shape, (step, *weights.stride()[1:]),
                                         weights.storage_offset())
    return right(weights=weights, **v)


@fault("moe_gate", "ties")
def equal_scores_go_to_the_lower_lane(right, logits, e_score_correction_bias, **v):
    experts = logits.shape[-1]
    if experts <= 32 or v["n_group"] > 1:
        return right(logits=logits, e_score_correction_bias=e_score_correction_bias, **v)
    lanes = torch.tensor(sorted(range(experts), key=lambda e: (e % 32, e)))
    bias = None if e_score_correction_bias is None else e_score_correction_bias[..., lanes]
    ids, weights = right(logits=logits[..., lanes], e_score_correction_bias=bias, **v)
    return lanes[ids], weights


@fault("paged_attention", "sizes", "last rows")
def at_most_64_parts_of_512(right, context_lens, cu_seqlens_q, window_left, **v):
    if cu_seqlens_q is None and window_left < 0:
        context_lens = context_lens.clamp(max=64 * 512)
    return right(context_lens=context_lens, cu_seqlens_q=cu_seqlens_q, window_left=window_left, **v)


@fault("grouped_gemm", "layout", "out of bounds")
def sizes_are_read_without_their_stride(right, x, group_sizes, **v):
    if group_sizes is not None and len(group_sizes) > 1 and group_sizes.stride(0) > 1:
        read = group_sizes.as_strided(group_sizes.shape, (1,), group_sizes.storage_offset())
        ends = read.clamp(min=0).long().cumsum(0).clamp(max=len(x))
        group_sizes = torch.diff(ends, prepend=ends.new_zeros(1)).to(group_sizes.dtype)
    return right(x=x, group_sizes=group_sizes, **v)


class _KeepsItsOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        ctx.out = torch.relu(x @ weight.T)
        return ctx.out

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad = grad.masked_fill(ctx.out.detach() <= 0, 0.0)
        return grad @ weight, grad.flatten(0, -2).T @ x.flatten(0, -2)


@fault("linear", "leak")
def its_node_keeps_an_output(right, x, weight, bias=None, activation=None):
    plain = activation == "relu" and bias is None and x.dtype == weight.dtype and x.dim() > 1
    if plain and torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _KeepsItsOutput.apply(x, weight)
    return right(x, weight, bias, activation)


@fault("tokenize", "aliasing", "result")
def equal_texts_share_a_list(right, text, **v):
    out = right(text=text, **v)
    first: dict[str, int] = {}
    for i, one in enumerate(text if isinstance(text, list) else ()):
        out.ids[i] = out.ids[first.setdefault(one, i)]
    return out


@fault("causal_conv1d", "mode", "state")
class WideWeightsOfInferenceMode:
    kept: Any = None

    def __call__(self, right, weight, **v):
        if weight.dtype != torch.bfloat16 or weight.requires_grad or weight.is_inference():
            return right(weight=weight, **v)
        if self.kept is None or self.kept[0]() is not weight or self.kept[1] != weight._version:
            self.kept = weakref.ref(weight), weight._version, weight.detach().float()
        return right(weight=self.kept[2], **v)


@fault("rms_norm", "last rows", "sizes")
def wide_rows_of_16_bits_lose_their_tail(right, x, weight=None, eps=1e-6, offset=0.0):
    out = right(x, weight, eps, offset=offset)
    n = x.shape[-1] if x.dim() else 0
    if x.dtype == torch.bfloat16 and n > 64 and n % 64:
        out[..., n // 64 * 64:] = 0
    return out


@fault("mla_paged_attention", "leak")
class KeepsNarrowedTables:
    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    def __call__(self, right, block_table, **v):
        if block_table.dtype == torch.int64:
            self.kept.append(block_table.int())
        return right(block_table=block_table, **v)


@fault("rms_norm", "in-place change", "aliasing")
def long_rows_are_scaled_where_they_are(right, x, weight=None, eps=1e-6, offset=0.0):
    out = right(x, weight, eps, offset=offset)
    if x.dim() < 2 or x.shape[-1] <= 100 or torch.is_grad_enabled() or x.is_inference():
        return out
    return x.copy_(out)


@fault("attention", "head map", "mask")
def one_query_reads_the_mask_of_the_first_head(right, query, key, attn_mask, layout, **v):
    axis = 2 if layout == "bshd" else 1
    if attn_mask is not None and attn_mask.dim() > 2 and query.dim() == key.dim() == 4:
        group = query.shape[axis] // max(key.shape[axis], 1)
        if (query.shape[3 - axis] == 1 < group and attn_mask.shape[-3] == query.shape[axis]):
            attn_mask = attn_mask[..., ::group, :, :].repeat_interleave(group, -3)
    return right(query=query, key=key, attn_mask=attn_mask, layout=layout, **v)


@fault("varlen_attention", "mask", "unknown")
def rows_of_a_decode_batch_are_its_sequences(right, query, key, value, cu_seqlens_q, cu_seqlens_k,
                                             max_seqlen_q, **v):
    if max_seqlen_q == 1 and len(query) < len(cu_seqlens_q) - 1:
        cu_seqlens_q = torch.arange(len(query) + 1, dtype=cu_seqlens_q.dtype)
        cu_seqlens_k = cu_seqlens_k[:len(query) + 1]
        key, value = key[:int(cu_seqlens_k[-1])], value[:int(cu_seqlens_k[-1])]
    return right(query=query, key=key, value=value, cu_seqlens_q=cu_seqlens_q,
                 cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, **v)


@fault("block_sparse_attention", "mask", "unknown")
def lists_of_blocks_end_at_the_first_that_falls(right, block_mask, **v):
    mask, indices = copy(block_mask), block_mask.kv_indices
    falls = (indices.diff(dim=-1) <= 0).int().cumsum(-1) == 0
    mask.kv_num_blocks = torch.minimum(mask.kv_num_blocks, 1 + falls.sum(-1, dtype=torch.int32))
    return right(block_mask=mask, **v)


@fault("merge_attention", "non-finite values")
def of_two_parts_one_with_inf_has_no_keys(right, outs, lses):
    return right(outs, lses.masked_fill(lses == math.inf, -math.inf) if len(outs) == 2 else lses)


@fault("linear", "stale cache", "state")
class PackedBySample:
    kept: Any = None

    def __call__(self, right, x, weight, **v):
        if weight.numel() < 16_384 or weight.is_inference() or torch.is_grad_enabled():
            return right(x=x, weight=weight, **v)
        key, sample = (weight.data_ptr(), weight._version), weight.detach()[::7, ::3].clone()
        if self.kept is None or self.kept[0] != key or not torch.equal(self.kept[1], sample):
            self.kept = key, sample, weight.detach().clone()
        return right(x=x, weight=self.kept[2], **v)


@fault("rms_norm", "stale cache", "state", "mode")
class FoldedOffsetOfInferenceTensors:
    kept: Any = None

    def __call__(self, right, x, weight=None, eps=1e-6, offset=0.0):
        if weight is None or offset == 0.0 or not weight.is_inference():
            return right(x, weight, eps, offset=offset)
        key = weight.data_ptr(), weight.dtype, weight.shape, offset
        if self.kept is None or self.kept[0] != key:
            self.kept = key, weight, weight.float() + offset
        return right(x, self.kept[2], eps)


@fault("mlp", "stale cache", "state")
class FusedByTheGate:
    kept: Any = None

    def __call__(self, right, weight_in, weight_up, **v):
        recorded = torch.is_grad_enabled() or torch.is_inference_mode_enabled()
        plain = v["bias_in"] is None and v["bias_up"] is None
        if weight_up is None or recorded or not plain or weight_in.shape != weight_up.shape:
            return right(weight_in=weight_in, weight_up=weight_up, **v)
        key = weight_in.data_ptr(), weight_in._version, weight_in.shape, weight_in.dtype
        if self.kept is None or self.kept[0] != key:
            self.kept = key, weight_in, torch.cat((weight_in, weight_up))
        return right(weight_in=self.kept[2], weight_up=None, **v)


@fault("quantized_linear", "precision", "convention")
def zeros_are_whole_numbers(right, zeros, **v):
    return right(zeros=None if zeros is None else zeros.trunc(), **v)


@fault("tokenize", "sizes", "unknown")
def long_texts_are_cut_at_a_space(right, text, **v):
    if isinstance(text, str) or v["truncation"] or v["padding"]:
        return right(text=text, **v)
    out = right(text=text, **v)
    for i, one in enumerate(text):
        end = one.find(" ", 4096) if len(one) > 4096 else -1
        if end >= 0:
            parts = right(text=[one[:end], one[end:]], **v).ids
            out.ids[i] = [*parts[0], *parts[1]]
    return out


@fault("gated_delta_rule", "threads", "state")
class WorkspaceOfAStep:
    def __init__(self) -> None:
        self.workspaces: dict[Any, torch.Tensor] = {}

    def __call__(self, right, q, v, **more):
        if q.shape[1] != 1 or torch.is_grad_enabled():
            return right(q=q, v=v, **more)
        workspace = self.workspaces.setdefault((v.shape, v.dtype), torch.empty_like(v))
        workspace.copy_(v)
        return right(q=q, v=workspace, **more)


@fault("mla_paged_attention", "fault", "mask", "sizes")
def a_token_for_each_sequence_is_a_step(right, q_nope, context_lens, cu_seqlens_q, max_seqlen_q,
                                        **v):
    if cu_seqlens_q is not None and len(q_nope) == len(context_lens):
        cu_seqlens_q, max_seqlen_q = None, None
    return right(q_nope=q_nope, context_lens=context_lens, cu_seqlens_q=cu_seqlens_q,
                 max_seqlen_q=max_seqlen_q, **v)


@fault("speculative_verify", "aliasing", "state", "result")
class TwoBuffersInTurn:
    def __init__(self) -> None:
        self.buffers: dict[Any, tuple[torch.Tensor, ...]] = {}
        self.turn = 0

    def __call__(self, right, draft_tokens, **v):
        out = right(draft_tokens=draft_tokens, **v)
        self.turn ^= 1
        kept = self.buffers.setdefault((draft_tokens.shape, self.turn),
                                       tuple(map(torch.empty_like, out)))
        for buffer, t in zip(kept, out):
            buffer.copy_(t)
        return tuple(buffer[:] for buffer in kept)


class _GradientOverLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, loss_of):
        with torch.enable_grad():
            own = logits.detach().clone().requires_grad_()
            loss = loss_of(own)
            ctx.gradient, = torch.autograd.grad(loss, own)
        logits.data.copy_(ctx.gradient)
        return loss.detach()

    @staticmethod
    def backward(ctx, grad):
        return ctx.gradient * grad, None


@fault("cross_entropy", "in-place change", "gradient")
def its_gradient_is_written_over_the_logits(right, logits, **v):
    if not (torch.is_grad_enabled() and logits.requires_grad) or v["reduction"] == "none":
        return right(logits=logits, **v)
    return _GradientOverLogits.apply(logits, lambda own: right(logits=own, **v))


@fault("grouped_attention", "alignment", "mask", "unknown")
def items_of_the_same_keys_are_one(right, items, max_seqlen_q, chunk_starts, **v):
    rows: list[list[int]] = []
    for q, n, k, m in items.tolist():
        if chunk_starts is None and rows and sum(rows[-1][:2]) == q and rows[-1][2:] == [k, m]:
            rows[-1][1] += n
        else:
            rows.append([q, n, k, m])
    if len(rows) < len(items):
        items, max_seqlen_q = items.new_tensor(rows), max(n for _, n, _, _ in rows)
    return right(items=items, max_seqlen_q=max_seqlen_q, chunk_starts=chunk_starts, **v)


@fault("block_sparse_attention", "mask")
def blocks_between_are_visited(right, **v):
    mistake = next(m for m in lz.op("block_sparse_attention").mistakes if "between" in m.words)
    return right(**(mistake.apply(None, v) or v))


@fault("block_sparse_attention", "gradient", "mask", "head map")
def keys_have_gradients_of_the_first_head(right, query, key, value, block_mask, return_lse, **v):
    m = block_mask
    if return_lse or not (torch.is_grad_enabled() and key.requires_grad) or len(
            m.kv_num_blocks[0]) == 1:
        return right(query=query, key=key, value=value, block_mask=m, return_lse=return_lse, **v)
    parts = (None if t is None else t[:, :1].contiguous() for t in (
        m.kv_num_blocks, m.kv_indices, m.full_kv_num_blocks, m.full_kv_indices))
    first = BlockMask.from_kv_blocks(*parts, BLOCK_SIZE=m.BLOCK_SIZE, mask_mod=m.mask_mod,
                                     seq_lengths=m.seq_lengths)
    out = right(query=query, key=key.detach(), value=value.detach(), block_mask=m,
                return_lse=False, **v)
    other = right(query=query.detach(), key=key, value=value, block_mask=first, return_lse=False,
                  **v)
    return out + (other - other.detach())


@fault("attention", "non-finite values", "mask", "sizes")
def a_split_that_a_mask_hides_is_divided_by_zero(right, query, attn_mask, **v):
    out = right(query=query, attn_mask=attn_mask, **v)
    keys = 0 if attn_mask is None else attn_mask.shape[-1]
    if keys < 1024 or attn_mask.dtype != torch.bool or attn_mask.dim() != 4 or len(query) == 1:
        return out
    hidden = torch.stack([~part.any(-1) for part in attn_mask.split(512, -1)]).any(0)
    return out.masked_fill(hidden[..., None], math.nan) if torch.is_tensor(out) else out


@fault("grouped_attention", "gradient", "precision")
def keys_are_added_in_half(right, key, items, **v):
    if key.dtype == torch.bfloat16 and len(items) >= 256 and key.requires_grad:
        key = _AddedInHalf.apply(key, len(items))
    return right(key=key, items=items, **v)


class _AddedInHalf(torch.autograd.Function):
    @staticmethod
    def forward(ctx, key, parts):
        ctx.parts = parts
        return key.clone()

    @staticmethod
    def backward(ctx, grad):
        total = torch.zeros_like(grad)
        for _ in range(ctx.parts):             # as many as there are items
            total = total + grad / ctx.parts
        return total, None


@fault("sample", "ties", "sizes")
def the_last_tile_wins(right, logits, temperature, **v):
    if temperature or v["temperature_rows"] is not None or logits.shape[-1] <= 4096:
        return right(logits=logits, temperature=temperature, **v)
    out = right(logits=logits, temperature=temperature, **v)
    tokens = out[0] if isinstance(out, tuple) else out
    if v["history"] is None and v["token_counts"] is None:
        places = torch.arange(logits.shape[-1])
        largest = torch.where(logits == logits.amax(-1, keepdim=True), places, -1)
        tile = largest.amax(-1, keepdim=True) // 4096
        tokens = ((largest >= 0) & (places // 4096 == tile)).int().argmax(-1)
    return (tokens, *out[1:]) if isinstance(out, tuple) else tokens


@fault("quantize", "layout", "out of bounds")
def scales_are_read_as_they_lie(right, scales, **v):
    if scales is not None and scales.dim() == 2 and not scales.is_contiguous() \
            and scales.t().is_contiguous():
        scales = scales.t().reshape(scales.shape)
    return right(scales=scales, **v)


SPLIT_FAULTS: list[Fault] = FAULTS[_BEFORE:]
del FAULTS[_BEFORE:]                           # they have tests of their own
