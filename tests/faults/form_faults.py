"""Kernels that are wrong for a legal form of a call that few callers use: integers of the other
width, an option left out or stated though it is the default, one row for a batch, no sequence at
all, a gradient that one optional tensor alone wants. Each is wrong in one way.
"""

from __future__ import annotations

import torch
from broken_kernels import FAULTS, Fault, fault
from torch import Tensor
from torch.nn import functional as F

_BEFORE = len(FAULTS)


def _records(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


# Integers.

@fault("varlen_attention", "mask", "dtype", "layout")
def boundaries_of_64_bits_read_as_32(right, **v):
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        ends = v[name]
        if ends.dtype == torch.int64 and ends.numel() > 1:
            words = ends.contiguous().view(torch.int32)[:ends.numel()].cummax(0).values
            v[name] = torch.cat((words[:-1].long(), ends[-1:]))
    return right(**v)


@fault("speculative_verify_tree", "dtype", "convention", "distribution")
def narrow_parents_are_the_root(right, **v):
    if v["parents"].dtype != v["draft_tokens"].dtype:
        v["parents"] = torch.full_like(v["parents"], -1)
    return right(**v)


@fault("speculative_verify", "dtype", "distribution", "layout")
def uniforms_of_64_bits_read_as_32(right, **v):
    numbers = v["uniforms"]
    if numbers is not None and numbers.dtype == torch.float64:
        words = numbers.contiguous().view(torch.float32).reshape(-1)[:numbers.numel()]
        v["uniforms"] = words.nan_to_num(0.0).view(numbers.shape)
    return right(**v)


@fault("speculative_verify_tree", "sizes", "index overflow", "last rows")
def nodes_in_a_mask_of_64_bits(right, **v):
    nodes = torch.arange(v["draft_tokens"].shape[1])
    return right(**{**v, "draft_tokens": torch.where(nodes < 64, v["draft_tokens"], -1)})


# Options that are left out, or stated.

@fault("paged_attention", "convention", "mask", "fault")
def no_bound_means_one_query(right, **v):
    if v["cu_seqlens_q"] is not None and (v["max_seqlen_q"] or 1) == 1:
        v["query"] = v["query"][(v["cu_seqlens_q"][1:] - 1).clamp(min=0).long()].repeat_interleave(
            v["cu_seqlens_q"].diff(), 0)
    return right(**v)


@fault("rope", "convention", "sizes", "last rows")
def rest_of_a_whole_head_is_the_head(right, **v):
    out, rotated = right(**v), v["rotary_dim"]
    if rotated is None:
        return out

    def joined(x: Tensor, turned: Tensor) -> Tensor:
        rest = x.shape[-1] - rotated           # of none x[..., -0:] is all of it
        return torch.cat((turned[..., :rotated], x[..., -rest:]), -1)[..., -x.shape[-1]:]

    return joined(v["q"], out) if v["k"] is None else (joined(v["q"], out[0]),
                                                       joined(v["k"], out[1]))


@fault("mamba_chunk_scan", "convention")
def largest_step_alone_bounds_nothing_below(right, **v):
    if v["dt_max"] is None or v["dt_min"] > 0.0:
        return right(**v)
    step = v["dt"].to(torch.promote_types(v["x"].dtype, torch.float32))
    step = step if v["dt_bias"] is None else step + v["dt_bias"].to(step.dtype)
    step = (F.softplus(step) if v["dt_softplus"] else step).clamp(max=v["dt_max"])
    return right(**{**v, "dt": step, "dt_bias": None, "dt_softplus": False, "dt_max": None})


# One row for a batch, and none.

@fault("rope", "layout", "convention", "out of bounds")
def angles_of_one_row_are_of_the_first_sequence(right, **v):
    if v["cos"].dim() == 3 and v["q"].dim() == 4 and len(v["cos"]) < len(v["q"]):
        for name in ("cos", "sin"):
            v[name] = F.pad(v[name], (0, 0, 0, 0, 0, len(v["q"]) - 1))
    return right(**v)


@fault("rope", "alignment", "convention", "out of bounds")
def flat_positions_go_on_from_row_to_row(right, **v):
    ids = v["position_ids"]
    if ids is not None and ids.dim() == 1 and v["q"].dim() == 4:
        v["position_ids"] = torch.stack([ids.roll(-i) for i in range(len(v["q"]))]) if len(
            v["q"]) else ids
    return right(**v)


@fault("varlen_attention", "fault", "sizes")
def longest_of_no_sequences(right, **v):
    assert v["cu_seqlens_q"].diff().max() >= 0
    return right(**v)


@fault("gated_delta_rule", "uninitialised output", "sizes", "non-finite values")
def state_of_no_tokens_is_not_written(right, **v):
    out = right(**v)
    if v["q"].shape[1] or v["initial_state"] is not None or not v["output_final_state"]:
        return out
    return out[0], torch.empty_like(out[1])


@fault("selective_state_update", "sizes", "index overflow", "last rows", "uninitialised output")
def heads_of_all_rows_in_a_grid_of_16_bits(right, **v):
    out, state = right(**v)
    rows, heads = out.shape[:2]
    return out * (torch.arange(rows * heads) < 65_535).view(rows, heads, 1), state


# Gradients.

@fault("varlen_attention", "gradient", "non-finite values", "mask")
def gradient_of_a_query_without_keys_is_nan(right, **v):
    if _records(v["query"]):
        sees = right(**{**v, "return_lse": True})[1].detach()[..., None] > -torch.inf
        v["query"] = v["query"].view_as(v["query"])
        v["query"].register_hook(lambda grad: torch.where(sees, grad, torch.nan))
    return right(**v)


@fault("mamba_chunk_scan", "gradient", "mode")
def gradient_of_the_state_alone_is_lost(right, **v):
    with torch.set_grad_enabled(_records(*(v[n] for n in ("x", "dt", "A", "B", "C", "D", "z")))):
        return right(**v)


def _as_if_contiguous(t: Tensor) -> Tensor:
    """Returns what a kernel reads that takes a tensor for contiguous."""
    have = t.untyped_storage().nbytes() // t.element_size() - t.storage_offset()
    flat = t.detach().as_strided((have,), (1,), t.storage_offset())
    return flat.repeat(-(-t.numel() // max(have, 1)))[:t.numel()].view(t.shape)


class _Saved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run, *tensors):
        ctx.run = run
        ctx.save_for_backward(*tensors)
        return run(*tensors)

    @staticmethod
    def backward(ctx, grad):
        leaves = [_as_if_contiguous(t).requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            return None, *torch.autograd.grad(ctx.run(*leaves), leaves, grad)


@fault("varlen_attention", "gradient", "layout")
def backward_reads_saved_tensors_as_contiguous(right, **v):
    names = ("query", "key", "value")
    if v["return_lse"] or v["dropout_p"] or not _records(*(v[n] for n in names)):
        return right(**v)
    return _Saved.apply(lambda q, k, u: right(**{**v, "query": q, "key": k, "value": u}),
                        *(v[n] for n in names))


@fault("paged_attention", "gradient", "stale page")
def gradient_of_a_shared_page_is_that_of_one_sequence(right, **v):
    keys, table = v["key_cache"], v["block_table"]
    if not _records(keys) or v["cu_seqlens_q"] is not None or len(table) < 2:
        return right(**v)
    outs = []
    for i in range(len(table)):
        later = {int(page) for page in table[i + 1:].reshape(-1)}
        kept = torch.tensor([page not in later for page in range(len(keys))])
        one = {n: v[n][i:i + 1] for n in ("query", "block_table", "context_lens")}
        outs.append(right(**{**v, **one, "return_lse": True, "key_cache": torch.where(
            kept.view(-1, 1, 1, 1), keys, keys.detach())}))
    out, lse = (torch.cat(parts) for parts in zip(*outs))
    return (out, lse) if v["return_lse"] else out


FORM_FAULTS: list[Fault] = FAULTS[_BEFORE:]
del FAULTS[_BEFORE:]
