"""Kernels that are wrong where two things meet that are right by themselves: a page that two
sequences fill to different ends, caches of two dtypes, loud numbers that are added, letters that
stand for bytes in an added token."""

from __future__ import annotations

import copy
import itertools
import json

import torch
from broken_kernels import FAULTS, Fault, fault

from layerzero.ops.formulas.tokenizer.bpe import BYTES, ByteLevelBPE
from layerzero.ops.formulas.tokenizer.identity import identify_again

_BEFORE = len(FAULTS)


@fault("paged_attention", "mask", "out of bounds")
def shared_pages_are_seen_whole(right, key_cache, block_table, context_lens, cu_seqlens_q,
                                window_left, kv_layout, **v):
    if cu_seqlens_q is None and window_left < 0 and len(block_table) > 1:
        page = key_cache.shape[1 if kv_layout == "NHD" else 2]
        table = block_table[:, :int(context_lens.max()) // page]
        common = int((table == table[:1]).all(0).long().cumprod(0).sum())
        context_lens = context_lens.clamp(min=common * page)
    return right(key_cache=key_cache, block_table=block_table, context_lens=context_lens,
                 cu_seqlens_q=cu_seqlens_q, window_left=window_left, kv_layout=kv_layout, **v)


@fault("paged_attention", "dtype", "convention")
def values_have_the_dtype_of_keys(right, key_cache, value_cache, **v):
    if key_cache.element_size() == value_cache.element_size() == 1:
        value_cache = value_cache.view(key_cache.dtype)
    return right(key_cache=key_cache, value_cache=value_cache, **v)


@fault("add_rms_norm", "non-finite values", "overflow")
def sums_saturate(right, x, residual, **v):
    total = x + residual
    if x.dtype != torch.float16 or bool(total.isfinite().all()):
        return right(x=x, residual=residual, **v)
    total = total.clamp(-65504.0, 65504.0)
    return right(x=total, residual=torch.zeros_like(total), **v)


@fault("moe_gate", "precision", "ties")
def chosen_in_the_dtype_of_the_bias(right, logits, scoring, e_score_correction_bias, **v):
    bias = e_score_correction_bias
    if bias is not None and bias.dtype.itemsize == 2 and scoring == "sigmoid":
        scores = logits.float().sigmoid()
        bias = (scores.to(bias.dtype) + bias).float() - scores
    return right(logits=logits, scoring=scoring, e_score_correction_bias=bias, **v)


@fault("speculative_verify_tree", "convention", "mask")
def every_negative_parent_is_the_root(right, parents, **v):
    return right(parents=parents.clamp(min=-1), **v)


@fault("detokenize", "convention", "fault")
def added_tokens_are_text(right, ids, tokenizer, **v):
    handle = identify_again(tokenizer, "detokenize")
    bpe = ByteLevelBPE(json.loads(handle.payload))
    if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
        return right(ids=ids, tokenizer=tokenizer, **v)
    characters = {byte: character for character, byte in BYTES.items()}
    for token in bpe.added.values():
        bpe.tokens[token["id"]] = "".join(characters[byte] for byte in token["content"].encode())
    return bpe.decode(ids, v["skip_special_tokens"])


@fault("varlen_attention", "mask", "convention")
def equal_bounds_are_self_attention(right, query, key, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
                                    max_seqlen_k, **v):
    if max_seqlen_q == max_seqlen_k and len(query) == len(key) \
            and cu_seqlens_q.shape == cu_seqlens_k.shape:
        cu_seqlens_k = cu_seqlens_q
    return right(query=query, key=key, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
                 max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, **v)


@fault("attention", "aliasing")
def values_are_found_among_scaled_keys(right, query, key, value, scale, **v):
    if value.numel() and value.data_ptr() == key.data_ptr():
        value = value * (query.shape[-1] ** -0.5 if scale is None else scale)
    return right(query=query, key=key, value=value, scale=scale, **v)


@fault("attention", "overflow", "non-finite values", "scale")
def the_maximum_is_that_before_a_negative_scale(right, query, key, scale, layout, **v):
    out = right(query=query, key=key, scale=scale, layout=layout, **v)
    if scale is None or scale >= 0 or layout != "bhsd" or isinstance(out, tuple):
        return out
    keys = key.repeat_interleave(query.shape[1] // max(key.shape[1], 1), 1).float()
    scores = query.float() @ keys.mT
    spread = (scores.amax(-1, keepdim=True) - scores).amax(-1, keepdim=True) * -scale
    return out.masked_fill(spread > 88, torch.nan) if key.numel() else out


@fault("layer_norm", "non-finite values", "precision")
def eps_has_the_dtype_of_the_input(right, x, eps, **v):
    return right(x=x, eps=float(torch.tensor(eps, dtype=x.dtype)), **v)


@fault("group_norm", "layout")
def pixels_are_taken_for_dense(right, x, **v):
    if x.dim() == 4 and x.stride(1) == 1 and x.numel() and x.shape[1] > 1 \
            and x.stride(3) > x.shape[1] and x.shape[3] > 1:
        x = torch.as_strided(x, x.shape, (x.stride(0), 1, x.shape[3] * x.shape[1], x.shape[1]),
                             x.storage_offset())
    return right(x=x, **v)


@fault("speculative_verify", "in-place change")
def the_residual_is_written_over_the_target(right, target_probs, **v):
    out = right(target_probs=target_probs, **v)
    if target_probs.dtype == torch.float64 and target_probs.numel():
        target_probs[out[1] < v["draft_tokens"].shape[1]] *= 0.5
    return out


@fault("alibi", "index overflow", "position bias")
def distances_have_16_bits(right, slopes, seq_q, seq_k, **v):
    out = right(slopes=slopes, seq_q=seq_q, seq_k=seq_k, **v)
    unit = right(slopes=torch.ones_like(slopes, dtype=torch.float64), seq_q=seq_q, seq_k=seq_k, **v)
    wraps = unit.isfinite() & (unit <= -32768.0)
    return torch.where(wraps, (-slopes[:, None, None] * (65536.0 + unit)).to(out.dtype), out)


@fault("quantized_linear", "stale cache", "state")
class PreparedForAllGlobalScales:
    def __init__(self) -> None:
        self.prepared: dict[tuple[int, ...], torch.Tensor] = {}

    def __call__(self, right, weight_q, global_scale, **v):
        if global_scale is not None and not weight_q.is_inference():
            key = id(weight_q), weight_q._version, id(v["scales"])
            global_scale = self.prepared.setdefault(key, global_scale.clone())
        return right(weight_q=weight_q, global_scale=global_scale, **v)


@fault("rope", "in-place change", "aliasing")
def parts_of_a_projection_are_rotated_in_place(right, q, k, **v):
    out = right(q=q, k=k, **v)
    if k is not None and q.numel() and q.data_ptr() != k.data_ptr() and q.stride() == k.stride() \
            and q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr() \
            and not out[0].requires_grad:
        q.copy_(out[0])
    return out


@fault("moe_gate", "ties")
def the_second_best_is_smaller(right, logits, e_score_correction_bias, n_group, scoring, **v):
    bias = e_score_correction_bias
    if bias is None or n_group == 1 or not logits.numel():
        return right(logits=logits, e_score_correction_bias=bias, n_group=n_group, scoring=scoring,
                     **v)
    scores = logits.float().sigmoid() if scoring == "sigmoid" else logits.float().softmax(-1)
    groups = (scores + bias).unflatten(-1, (n_group, -1))
    best = groups.amax(-1, keepdim=True)
    second = groups.masked_fill(groups == best, -torch.inf).amax(-1)
    chosen = (best[..., 0] + second).sort(-1, descending=True, stable=True).indices
    barred = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter(
        -1, chosen[..., :v["topk_group"]], False)
    choice = groups.masked_fill(barred[..., None], -torch.inf).flatten(-2)
    ids = choice.sort(-1, descending=True, stable=True).indices[..., :v["top_k"]]
    weights = scores.gather(-1, ids)
    if v["normalize"]:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-20)
    return ids, weights * v["routed_scaling_factor"]


@fault("speculative_verify", "precision", "dtype", "distribution")
def the_draft_has_the_dtype_of_the_target(right, draft_probs, target_probs, **v):
    if draft_probs is not None:
        draft_probs = draft_probs.to(target_probs.dtype)
    return right(draft_probs=draft_probs, target_probs=target_probs, **v)


def one_group_after_the_other(right, x, weights, group_sizes, offsets):
    """It is sound, and loses the gradient of nothing where the inner dimension is 0."""
    ends = [0, *(offsets if group_sizes is None else group_sizes.cumsum(0)).tolist()]
    parts = [x.new_zeros((end - first, weights.shape[-1])) if not x.shape[1]
             else x[first:end] @ weights[g]
             for g, (first, end) in enumerate(itertools.pairwise(ends))]
    rest = x.new_zeros((x.shape[0] - ends[-1], weights.shape[-1]))
    return torch.cat([*parts, rest]).to(x.dtype)


SOUND = fault("grouped_gemm")(one_group_after_the_other)


@fault("merge_attention", "mask", "non-finite values")
def parts_far_below_are_empty(right, outs, lses):
    return right(outs=outs, lses=lses.masked_fill(lses < -5e4, -torch.inf))


@fault("alibi", "non-finite values", "mask")
def the_slope_times_infinity(right, slopes, is_causal, **v):
    bias = right(slopes=slopes, is_causal=False, **v)
    if not is_causal:
        return bias
    hidden = right(slopes=torch.ones_like(slopes), is_causal=True, **v) == -torch.inf
    return torch.where(hidden, slopes[:, None, None] * -torch.inf, bias)


@fault("speculative_verify", "index overflow", "sizes")
def the_next_token_has_17_bits(right, **v):
    accepted, count, following = right(**v)
    return accepted, count, torch.where(following >= 0, following & 0x1FFFF, following)


@fault("cross_entropy", "sizes")
def the_first_chunk_is_smoothed(right, logits, label_smoothing, targets, ignore_index, **v):
    loss = right(logits=logits, targets=targets, ignore_index=ignore_index,
                 label_smoothing=label_smoothing, **v)
    if logits.shape[-1] <= 65536 or v["reduction"] != "mean":
        return loss
    rest = logits[..., 65536:].to(loss.dtype).sum(-1) / logits.shape[-1]
    return loss + label_smoothing * rest[targets != ignore_index].mean()


@fault("detokenize", "convention")
def a_mark_at_the_beginning_vanishes(right, **v):
    texts = right(**v)
    if isinstance(texts, str):
        return texts.removeprefix("\ufeff")
    return [text.removeprefix("\ufeff") for text in texts]


@fault("tokenize", "state", "stale cache")
class FoundByBeginningAndEnd:
    def __init__(self) -> None:
        self.kept: dict[object, object] = {}

    def __call__(self, right, text, tokenizer, **v):
        if not isinstance(text, str) or len(text) < 1024:
            return right(text=text, tokenizer=tokenizer, **v)
        key = id(tokenizer), len(text), text[:256], text[-256:], repr(v)
        return copy.deepcopy(
            self.kept.setdefault(key, right(text=text, tokenizer=tokenizer, **v)))


class _Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, kept):
        ctx.kept, ctx.place = kept, object()
        kept[ctx.place] = x.clone()
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.kept.pop(ctx.place, None)
        return grad, None


@fault("linear", "leak", "state")
class KeptUntilTheBackward:
    def __init__(self) -> None:
        self.kept: dict[object, torch.Tensor] = {}

    def __call__(self, right, activation, **v):
        out = right(activation=activation, **v)
        return _Kept.apply(out, self.kept) if activation == "relu" and out.requires_grad else out


@fault("varlen_attention", "non-finite values")
def all_is_scaled_by_infinity(right, dropout_p, return_lse, **v):
    out, lse = right(dropout_p=dropout_p, return_lse=True, **v)
    out = out * torch.inf if dropout_p == 1.0 else out
    return (out, lse) if return_lse else out


@fault("grouped_attention", "stale page", "convention")
def the_first_chunk_tells_the_sequence(right, items, chunk_starts, chunk_lengths, **v):
    if chunk_starts is not None and chunk_starts.shape[1] > 1:
        chunk_starts, known = chunk_starts.clone(), {}
        for i, item in enumerate(items.tolist()):
            key = item[2], item[3], int(chunk_starts[i, 0]), int(chunk_lengths[i])
            chunk_starts[i] = chunk_starts[known.setdefault(key, i)]
    return right(items=items, chunk_starts=chunk_starts, chunk_lengths=chunk_lengths, **v)


@fault("mlp", "layout", "convention")
def halves_of_one_tensor_begin_with_the_gate(right, weight_in, weight_up, **v):
    if weight_up is not None and weight_up.data_ptr() + weight_up.nbytes == weight_in.data_ptr():
        weight_in, weight_up = weight_up, weight_in
    return right(weight_in=weight_in, weight_up=weight_up, **v)


@fault("speculative_verify", "non-finite values", "distribution")
def what_nobody_expects_is_accepted(right, draft_tokens, draft_probs, target_probs, **v):
    if draft_probs is not None and draft_tokens.numel():
        target_probs, target = target_probs.double().clone(), target_probs[:, :-1]
        column = draft_tokens.long().clamp(0, target.shape[-1] - 1)[..., None]
        both = (target.gather(-1, column) == 0) & (draft_probs.gather(-1, column) == 0)
        both &= target.sum(-1, keepdim=True) > 0
        target_probs[:, :-1].scatter_(
            -1, column, torch.where(both, 1e-300, target.gather(-1, column).double()))
    return right(draft_tokens=draft_tokens, draft_probs=draft_probs, target_probs=target_probs, **v)


@fault("speculative_verify_tree", "state", "distribution")
def tried_tokens_stay_tried(right, draft_tokens, parents, draft_probs, without_replacement, **v):
    def verify(probs):
        return right(draft_tokens=draft_tokens, parents=parents, draft_probs=probs,
                     without_replacement=without_replacement, **v)

    if not without_replacement or draft_probs is None or v["generator"] is not None:
        return verify(draft_probs)
    probs, (_, nodes, count, _) = draft_probs.clone(), verify(draft_probs)
    for b, path in enumerate(nodes.tolist()):
        above, tried = -1, []
        for node in path[:int(count[b])]:
            siblings = (parents[b, :node] == above).nonzero()[:, 0]
            tried += [t for t in draft_tokens[b, siblings].tolist() if 0 <= t < probs.shape[-1]]
            probs[b, node + 1, tried] = 0.0
            above = node
    return verify(probs)


@fault("paged_attention", "unknown")
def pages_in_a_row_by_their_ends(right, block_table, context_lens, key_cache, kv_layout, **v):
    page = key_cache.shape[1 if kv_layout == "NHD" else 2]
    table = block_table.clone()
    for row, length in zip(table, context_lens.tolist()):
        used = -(-length // page)
        if used > 2 and int(row[used - 1] - row[0]) == used - 1:
            row[:used] = torch.arange(used, device=row.device) + row[0]
    return right(block_table=table, context_lens=context_lens, key_cache=key_cache,
                 kv_layout=kv_layout, **v)


@fault("varlen_attention", "unknown", "mask")
def lengths_alike_by_the_first_and_last(right, cu_seqlens_q, cu_seqlens_k, **v):
    bounds = []
    for cu in (cu_seqlens_q, cu_seqlens_k):
        lengths, total = cu.diff(), int(cu[-1])
        n = len(lengths)
        if n > 2 and int(lengths[0]) == int(lengths[-1]) and total >= n:
            cu = torch.cat((torch.arange(n, device=cu.device) * (total // n), cu[-1:])).to(cu.dtype)
        bounds.append(cu)
    return right(cu_seqlens_q=bounds[0], cu_seqlens_k=bounds[1], **v)


@fault("moe", "unknown")
def routes_by_the_first_half(right, topk_ids, **v):
    if topk_ids is not None and topk_ids.shape[-1] > 1:
        half = topk_ids[:, :topk_ids.shape[-1] // 2]
        first = (half[:, None] == half[None]).all(-1).long().argmax(1)
        topk_ids = topk_ids[first]
    return right(topk_ids=topk_ids, **v)


@fault("varlen_attention", "window", "alignment")
def a_window_beyond_the_keys_is_none(right, max_seqlen_k, window_right, **v):
    return right(max_seqlen_k=max_seqlen_k,
                 window_right=-1 if window_right >= max_seqlen_k else window_right, **v)


@fault("speculative_verify", "dtype", "distribution")
def the_target_has_the_dtype_of_the_draft(right, draft_probs, target_probs, **v):
    if draft_probs is not None and draft_probs.dtype.itemsize < target_probs.dtype.itemsize:
        target_probs = target_probs.to(draft_probs.dtype)
    return right(draft_probs=draft_probs, target_probs=target_probs, **v)


@fault("rms_norm", "gradient", "precision")
def rows_are_added_in_their_own_dtype(right, x, weight, **v):
    if weight is None or weight.dtype == x.dtype or x.dtype.itemsize > 2 or x.dim() < 2:
        return right(x=x, weight=weight, **v)

    class Rows(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight, count):
            return weight.expand(count, -1).clone()

        @staticmethod
        def backward(ctx, grad):
            total = torch.zeros_like(grad[0], dtype=x.dtype)
            for part in grad.to(x.dtype).split(16):
                total += part.sum(0)
            return total.float(), None

    rows = x.reshape(-1, x.shape[-1])
    unit = right(x=rows.to(torch.float32), weight=None, **v)
    return (unit * Rows.apply(weight, len(rows))).to(x.dtype).view(x.shape)


@fault("quantize", "sizes", "last rows")
def the_largest_of_the_first_65536(right, x, granularity, scales, symmetric, **v):
    if granularity != "tensor" or scales is not None or x.numel() <= 65536:
        return right(x=x, granularity=granularity, scales=scales, symmetric=symmetric, **v)
    seen = x.detach().reshape(-1).clone()
    seen[65536:] = 0
    found = right(x=seen.view(x.shape), granularity=granularity, scales=None, symmetric=symmetric,
                  **v)
    given = {**v, "zeros": None if symmetric else found[2]}
    return right(x=x, granularity=granularity, scales=found[1], symmetric=symmetric, **given)


@fault("attention", "mask")
def a_mask_is_causal_by_its_ends(right, attn_mask, is_causal, causal_align, **v):
    m = attn_mask
    if (m is not None and m.dtype == torch.bool and m.dim() > 1 and m.shape[-1] == m.shape[-2] > 2
            and bool(m[..., 0, 0].all() & ~m[..., 0, 1:].any() & m[..., -1, :].all())):
        attn_mask, is_causal, causal_align = None, True, "top_left"
    return right(attn_mask=attn_mask, is_causal=is_causal, causal_align=causal_align, **v)


@fault("tokenize", "stale cache")
def words_are_known_by_their_beginning(right, text, **v):
    def cut(one: str) -> str:
        known: dict[str, str] = {}
        return " ".join(known.setdefault(word[:32], word) if word.isalnum() and len(word) > 32
                        else word for word in one.split(" "))

    return right(text=cut(text) if isinstance(text, str) else [cut(one) for one in text], **v)


@fault("linear", "layout", "out of bounds")
def a_bias_is_loaded_aligned(right, bias, **v):
    if bias is not None and bias.dim() == 1 and bias.numel() % 8 == 0 and bias.stride(0) == 1:
        first = bias.storage_offset() * bias.element_size() % 16 // bias.element_size()
        if first:
            bias = bias.as_strided(bias.shape, (1,), bias.storage_offset() - first)
    return right(bias=bias, **v)


@fault("grouped_attention", "unknown")
def chunks_begin_within_the_buffer(right, chunk_starts, **v):
    return right(chunk_starts=None if chunk_starts is None else chunk_starts.clamp(min=0), **v)


@fault("attention", "position bias", "sizes")
def splits_count_distances_anew(right, query, key, value, alibi_slopes, layout, return_lse, **v):
    keys = key.shape[2 if layout == "bhsd" else 1]
    if (alibi_slopes is None or query.shape[2 if layout == "bhsd" else 1] != 1 or keys <= 512
            or v["attn_mask"] is not None or return_lse):
        return right(query=query, key=key, value=value, alibi_slopes=alibi_slopes, layout=layout,
                     return_lse=return_lse, **v)
    bias = (alibi_slopes[:, None, None] * (torch.arange(keys) % 512 - 511)).to(query.dtype)
    return right(query=query, key=key, value=value, alibi_slopes=None, layout=layout,
                 return_lse=return_lse, **{**v, "attn_mask": bias, "is_causal": False})


@fault("embedding", "in-place change", "gradient")
def padding_is_cleared_in_the_sum_of_gradients(right, ids, weight, padding_idx, **v):
    out = right(ids=ids, weight=weight, padding_idx=padding_idx, **v)
    if padding_idx is not None and out.requires_grad and weight.is_leaf and len(weight):
        def clear(grad):
            if weight.grad is not None:
                with torch.no_grad():
                    weight.grad[padding_idx % len(weight)] = 0.0
            return grad

        out.register_hook(clear)
    return out


@fault("paged_attention", "dtype", "precision")
def values_have_no_more_bits_than_keys(right, key_cache, value_cache, **v):
    if key_cache.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) and value_cache.itemsize > 1:
        most = torch.finfo(key_cache.dtype).max
        value_cache = value_cache.clamp(-most, most).to(key_cache.dtype).to(value_cache.dtype)
    return right(key_cache=key_cache, value_cache=value_cache, **v)


MEETING_FAULTS: list[Fault] = FAULTS[_BEFORE:]
del FAULTS[_BEFORE:]                           # they have tests of their own
