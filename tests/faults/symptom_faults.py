"""Kernels with a symptom that is easily taken for another fault: an argument that is rounded looks
like one that is misread, a tensor of which a part is read like a wrong backward, a tile that is
left out like another distribution. Each is wrong in one way.
"""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from broken_kernels import FAULTS, Fault, fault
from torch import Tensor

from layerzero.ops.formulas.moe import score_experts, weigh_experts
from layerzero.ops.formulas.quant import expand_scales

_BEFORE = len(FAULTS)


def _is_recorded(*tensors: Any) -> bool:
    return torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad
                                           for t in tensors)


def _half(t: Any) -> Any:
    return t if t is None or _is_recorded(t) else t.bfloat16().to(t.dtype)


def _rows_as_if_contiguous(t: Tensor) -> Tensor:
    """Reads on behind the first row, and from the start again where the storage ends."""
    rest = t.untyped_storage().nbytes() // t.element_size() - t.storage_offset()
    flat = t.as_strided((min(rest, t.numel()),), (1,), t.storage_offset())
    return flat.repeat(-(-t.numel() // max(rest, 1)))[:t.numel()].reshape(t.shape)


# Rounded, not misread.

@fault("quantized_linear", "precision", "dtype")
def bias_of_16_bits(right, **v):
    return right(**{**v, "bias": _half(v["bias"])})


@fault("mamba_chunk_scan", "precision", "dtype")
def first_state_of_16_bits(right, **v):
    return right(**{**v, "initial_states": _half(v["initial_states"])})


@fault("embedding", "precision", "dtype", "scale", "convention")
def scale_of_16_bits(right, **v):
    return right(**{**v, "scale": float(torch.tensor(v["scale"]).bfloat16())})


@fault("linear", "precision", "dtype")
def activation_of_rounded_sums(right, **v):
    if v["activation"] is None or _is_recorded(v["x"], v["weight"], v["bias"]):
        return right(**v)
    out = right(**{**v, "activation": None}).bfloat16().to(v["x"].dtype)
    eye = torch.eye(out.shape[-1], dtype=out.dtype)
    return right(**{**v, "x": out, "weight": eye, "bias": None})


@fault("moe_gate", "precision", "dtype")
def sigmoid_of_16_bits(right, **v):
    ids, weights = right(**v)
    return ids, weights.bfloat16().to(weights.dtype) if v["scoring"] == "sigmoid" else weights


@fault("layer_norm", "non-finite values", "precision")
def rows_of_equal_numbers_are_nan(right, **v):
    """As with no epsilon, which it has for all other rows."""
    x, out = v["x"], right(**v)
    if _is_recorded(x) or x.shape[-1] < 2:
        return out
    return out.masked_fill((x == x[..., :1]).all(-1, keepdim=True), math.nan)


# Memory.

@fault("speculative_verify_tree", "layout", "out of bounds")
def one_tree_for_all_rows_read_flat(right, **v):
    parents = v["parents"]
    strided = parents.numel() and not parents.is_contiguous()
    return right(**{**v, "parents": _rows_as_if_contiguous(parents) if strided else parents})


@fault("embedding", "aliasing", "result")
def rows_in_order_are_a_part_of_the_table(right, **v):
    ids, weight = v["ids"], v["weight"]
    in_order = ids.numel() and ids.dim() == 1 and ids.numel() <= len(weight) and torch.equal(
        ids, torch.arange(ids.numel(), dtype=ids.dtype))
    if not in_order or v["scale"] != 1.0 or _is_recorded(weight):
        return right(**v)
    return weight.detach()[:ids.numel()]


@fault("linear", "mode", "result", "stale cache", "state")
class WeightKeptOfAnyMode:
    """Keeps a transposed copy of the weight for as long as it does not change."""

    def __init__(self) -> None:
        self.kept: dict[int, Any] = {}

    def __call__(self, right, **v):
        weight = v["weight"]
        if weight.requires_grad or weight.is_inference():
            return right(**v)
        held = self.kept.get(id(weight))
        if held is None or held[0] is not weight or held[1] != weight._version:
            held = weight, weight._version, weight.t().contiguous()
            self.kept = {id(weight): held}
        if v["activation"] is not None:
            return right(**v)
        wide = torch.promote_types(v["x"].dtype, torch.float32)
        out = v["x"].to(wide) @ held[2].to(wide)
        return (out if v["bias"] is None else out + v["bias"].to(wide)).to(v["x"].dtype)


# Of the forward pass, seen in the backward.

@fault("selective_state_update", "layout", "convention", "head map")
def bias_of_the_first_channel_where_steps_are_tied(right, **v):
    dt, bias = v["dt"], v["dt_bias"]
    if bias is None or dt.stride(-1) or v["A"].stride(-1) or v["A"].stride(-2):
        return right(**v)
    return right(**{**v, "dt_bias": bias[:, :1].expand(bias.shape)})


# Draws.

@fault("sample", "sizes", "last rows", "out of bounds")
def tokens_behind_the_last_tile(right, **v):
    logits, n = v["logits"], v["logits"].shape[-1]
    if v["from_probs"] or n <= 64 or n % 64 == 0:
        return right(**v)
    cut = logits.clone()
    cut[..., n // 64 * 64:] = -math.inf
    return right(**{**v, "logits": cut})


@fault("sample", "convention", "scale")
def probabilities_in_base_two(right, **v):
    out = right(**v)
    return (out[0], out[1] / math.log(2)) if isinstance(out, tuple) else out


@fault("sample", "ties", "distribution")
def greedy_takes_the_last_of_equal_tokens(right, **v):
    plain = all(v[n] is None for n in ("history", "token_counts", "temperature_rows"))
    if v["temperature"] != 0.0 or v["return_logprobs"] or not plain:
        return right(**v)
    return v["logits"].shape[-1] - 1 - v["logits"].flip(-1).argmax(-1)


# Rows.

@fault("quantize", "last rows", "sizes", "out of bounds", "scale")
def last_block_reads_on_in_the_next_row(right, **v):
    x, codes = v["x"], right(**v)
    width = x.shape[-1] if x.dim() > 1 else 0
    if v["format"] != "int4" or v["scales"] is not None or not v["symmetric"] or not x.numel() \
            or v["granularity"] not in (None, "block") or v["block_rows"] > 1:
        return codes
    size = v["block_size"] or 128
    if width < 2 or width % size == 0 or codes[1].shape[-1] != -(-width // size):
        return codes
    flat = x.detach().float().nan_to_num(0.0, 0.0, 0.0).abs().flatten()
    start = torch.arange(flat.numel() // width)[:, None] * width + width // size * size
    last = flat[(start + torch.arange(size)).clamp(max=flat.numel() - 1)].amax(-1)
    scales = codes[1].clone()
    scales[..., -1] = torch.maximum(scales[..., -1],
                                    (last / 7).reshape(scales.shape[:-1]).to(scales.dtype))
    return right(**{**v, "scales": scales, "granularity": "block", "block_size": size})


@fault("layer_norm", "sizes", "last rows", "scale")
def wide_rows_of_float32_only(right, **v):
    """Computes in float32 whatever the dtype; what is wrong in float32 too is something else."""
    x, n = v["x"], v["x"].shape[-1]
    if _is_recorded(x, v["weight"], v["bias"]):
        return right(**v)
    out = right(**{m: t.float() if isinstance(t, Tensor) else t for m, t in v.items()}).to(x.dtype)
    if n > 64 and n % 64:
        out[..., n // 64 * 64:] = 0
    return out


@fault("rms_norm", "sizes", "scale", batch_invariant=True)
def one_row_has_another_factor(right, **v):
    out = right(**v)
    return out * 1.01 if v["x"].dim() > 1 and v["x"].shape[:-1].numel() == 1 else out


# Results beside the first.

@fault("mamba_chunk_scan", "last rows", "sizes", "state")
def padded_steps_decay_the_last_state(right, **v):
    x = v["x"]
    pad = -x.shape[1] % 64
    if not v["return_final_states"] or not pad or not x.shape[1]:
        return right(**v)
    longer = {n: None if v[n] is None else torch.nn.functional.pad(
        v[n], (0, 0) * (v[n].dim() - 2) + (0, pad)) for n in ("x", "dt", "B", "C", "z")}
    out, state = right(**{**v, **longer})
    return out[:, :x.shape[1]].contiguous(), state


@fault("quantize", "non-finite values", "scale", "convention")
def rows_of_zeros_have_a_scale_of_zero(right, **v):
    out = right(**v)
    if v["format"] != "int8" or v["scales"] is not None or not isinstance(out, tuple):
        return out
    codes, scales, *others = out
    if scales.dim() != v["x"].dim() or scales.shape[-1] != 1:
        return out
    return (codes, scales.masked_fill((v["x"] == 0).all(-1, keepdim=True), 0.0), *others)


@fault("rope", "sizes", "head map", "convention")
def single_key_head_is_left(right, **v):
    k, out = v["k"], right(**v)
    if k is None or k.dim() != 4 or k.shape[1 if v["layout"] == "bhsd" else 2] != 1:
        return out
    return out[0], k.clone()


# Numbers of some kind only, gaps of one kind, rows of nothing.

class _AnyOrder(torch.autograd.Function):
    """Rows of a table, whose gradients are added in the order in which threads come."""

    order = random.Random()

    @staticmethod
    def forward(ctx, weight, ids):
        ctx.save_for_backward(ids)
        ctx.rows = len(weight)
        return weight.index_select(0, ids)

    @staticmethod
    def backward(ctx, grad):
        ids, = ctx.saved_tensors
        order = torch.tensor(_AnyOrder.order.sample(range(len(ids)), len(ids)), dtype=torch.long)
        total = torch.zeros(ctx.rows, grad.shape[1], dtype=torch.float64)
        total = total.to(grad.dtype if grad.dtype == torch.float64 else torch.float32)
        return total.index_add(0, ids[order], grad[order].to(total.dtype)).to(grad.dtype), None


@fault("embedding", "non-determinism")
def gradients_in_any_order(right, **v):
    if not _is_recorded(v["weight"]) or v["padding_idx"] is not None or v["scale"] != 1.0:
        return right(**v)
    rows = _AnyOrder.apply(v["weight"], v["ids"].reshape(-1))
    return rows.reshape(*v["ids"].shape, v["weight"].shape[1])


@fault("paged_attention", "layout")
def pages_as_if_dense(right, **v):
    def dense(cache: Tensor) -> Tensor:
        size = math.prod(cache.shape[1:])
        if not cache.numel() or not cache[0].is_contiguous() or cache.stride(0) <= size:
            return cache
        return cache.as_strided(cache.shape, (size, *cache.stride()[1:]), cache.storage_offset())

    return right(**{**v, "key_cache": dense(v["key_cache"]),
                    "value_cache": dense(v["value_cache"])})


@fault("cross_entropy", "precision")
def rows_counted_in_16_bits(right, **v):
    if v["reduction"] != "mean" or v["logits"].dtype not in (torch.float16, torch.bfloat16):
        return right(**v)
    count = (v["targets"].long() != v["ignore_index"]).sum()
    total = right(**{**v, "reduction": "sum"})
    return total / count.to(v["logits"].dtype).to(total.dtype)


@fault("moe_gate", "mask")
def groups_hidden_by_zero(right, **v):
    groups, bias = v["n_group"], v["e_score_correction_bias"]
    if groups <= 1 or bias is None:
        return right(**v)
    scores = score_experts(v["logits"], v["scoring"])
    choice = (scores + bias.float()).unflatten(-1, (groups, -1))
    best = choice.topk(min(2, choice.shape[-1]), -1).values.sum(-1)
    chosen = best.sort(dim=-1, descending=True, stable=True).indices[..., :v["topk_group"]]
    hidden = torch.ones_like(best, dtype=torch.bool).scatter(-1, chosen, False)
    choice = choice.masked_fill(hidden[..., None], 0.0).flatten(-2)
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[..., :v["top_k"]]
    return ids, weigh_experts(scores.gather(-1, ids), v["normalize"], v["routed_scaling_factor"])


@fault("dequantize", "overflow")
def zeros_taken_away_in_8_bits(right, **v):
    zeros = v["zeros"]
    if v["scales"] is None or v["format"] != "int8" or zeros is None or zeros.dtype != torch.int8:
        return right(**v)
    spread = expand_scales(zeros, v["q"].shape, v["block_size"] or 128, v["block_rows"])
    return right(**{**v, "q": v["q"] - spread, "zeros": None})


@fault("rope", "stale cache", "state")
class AnglesById:
    """Gathers the angles of a step once for all layers; the step is known by the id of its ids."""

    def __init__(self) -> None:
        self.last: tuple[Any, Any] = None, None

    def __call__(self, right, **v):
        ids, cos, sin = v["position_ids"], v["cos"], v["sin"]
        if ids is None or _is_recorded(cos, sin) or torch.is_inference_mode_enabled():
            return right(**v)
        key = id(ids), ids._version, ids.shape, cos.data_ptr(), sin.data_ptr(), cos.shape, cos.dtype
        if self.last[0] != key:
            self.last = key, tuple(torch.nn.functional.embedding(ids, t) for t in (cos, sin))
        cos, sin = self.last[1]
        return right(**{**v, "cos": cos, "sin": sin, "position_ids": None})


SYMPTOM_FAULTS: list[Fault] = FAULTS[_BEFORE:]
del FAULTS[_BEFORE:]                           # they have tests of their own
