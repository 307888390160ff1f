"""Kernels that are wrong, each in one way; and the class that a verdict on it should name.

A fault is a function with the signature of its op. `right` is the op's own formula. Most are wrong
in some calls only: that is what makes them dangerous.
"""

from __future__ import annotations

import functools
import inspect
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import layerzero as lz
from layerzero.ops.formulas.moe import route
from layerzero.spec.kernel import Kernel
from layerzero.spec.op import Op
from layerzero.spec.rules import dtypes


class Fault(NamedTuple):
    name: str
    op: Op
    make: Callable[[], Callable[..., Any]]     # a fresh one: some remember what they have seen
    kinds: tuple[str, ...]                     # the classes that name it rightly
    declared: dict[str, Any]

    def kernel(self) -> Kernel:
        variants = tuple(self.op.patterns) if self.op.variant else ()
        return Kernel(f"broken.{self.name}", self.op, self.make, variants=variants, **self.declared)


class Backward(torch.autograd.Function):
    """The identity, whose backward is a function of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, backward: Any) -> Tensor:
        ctx.backward_function = backward
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.backward_function(grad), None


FAULTS: list[Fault] = []


def fault(op: str, *kinds: str, **declared: Any) -> Callable[[Callable[..., Any]],
                                                             Callable[..., Any]]:
    """Register `wrong(right, **values)`, which is called with every argument by name; or a class
    that makes one."""
    def register(wrong: Any) -> Any:
        contract = lz.op(op)
        signature = inspect.signature(contract.reference)

        def make() -> Callable[..., Any]:
            kernel = wrong() if isinstance(wrong, type) else wrong

            @functools.wraps(contract.reference)
            def run(*args: Any, **kwargs: Any) -> Any:
                bound = signature.bind(*args, **kwargs)
                bound.apply_defaults()
                return kernel(contract.reference, **bound.arguments)

            return run

        FAULTS.append(Fault(wrong.__name__.lower(), contract, make, kinds, declared))
        return wrong

    return register


# Attention: what a library means by an argument.

@fault("attention", "mask")
def ignores_the_mask(right, **v):
    return right(**{**v, "attn_mask": None})


@fault("attention", "mask")
def mask_of_the_first_sample_for_all(right, **v):
    mask = v["attn_mask"]
    if mask is not None and mask.dim() == 4 and mask.shape[0] > 1:
        v["attn_mask"] = mask[:1].expand_as(mask)
    return right(**v)


@fault("attention", "alignment")
def causal_from_the_top_left(right, **v):
    return right(**{**v, "causal_align": "top_left"})


@fault("attention", "alignment")
def causal_from_the_bottom_right(right, **v):
    return right(**{**v, "causal_align": "bottom_right" if v["is_causal"] else v["causal_align"]})


@fault("attention", "head map")
def heads_repeated_in_blocks(right, **v):
    axis = 1 if v["layout"] == "bhsd" else 2
    heads, kv_heads = v["query"].shape[axis], v["key"].shape[axis]
    if 0 < kv_heads < heads:
        order = torch.arange(heads) % kv_heads
        v["key"], v["value"] = v["key"].index_select(axis,
                                                     order), v["value"].index_select(axis, order)
    return right(**v)


@fault("attention", "window")
def window_one_too_wide(right, **v):
    return right(**{**v, "window_left": v["window_left"] + (v["window_left"] >= 0)})


@fault("attention", "window")
def window_right_excludes_its_edge(right, **v):
    return right(**{**v, "window_right": v["window_right"] - (v["window_right"] > 0)})


@fault("attention", "position bias")
def drops_alibi(right, **v):
    return right(**{**v, "alibi_slopes": None})


@fault("attention", "position bias", "alignment")
def alibi_from_the_first_key(right, **v):
    if v["alibi_slopes"] is not None and not v["is_causal"]:
        v["causal_align"] = "top_left"
    return right(**v)


@fault("attention", "scale")
def scale_left_out(right, **v):
    return right(**{**v, "scale": 1.0})


@fault("attention", "scale")
def always_the_default_scale(right, **v):
    return right(**{**v, "scale": None})


@fault("attention", "scale")
def softcap_before_scale(right, **v):
    scale = v["query"].shape[-1] ** -0.5 if v["scale"] is None else v["scale"]
    return right(**{**v, "softcap": v["softcap"] * scale})


@fault("attention", "convention")
def lse_in_base_two(right, **v):
    out = right(**v)
    return (out[0], out[1] / math.log(2)) if v["return_lse"] else out


# Attention: wrong in some calls only.

@fault("attention", "sizes", "mask")
def nan_at_half_a_tile(right, **v):
    out = right(**v)
    if (v["attn_mask"] is not None and not v["return_lse"] and v["layout"] == "bhsd"
        and out.shape[2] % 128 == 64):
        out[:, :, -1] = torch.nan
    return out


# In float32 alone: its size comes last, and until then it passes every case in 16 bits.
@fault("attention", "sizes", requires=(dtypes("float32"),))
def wrong_past_65535_blocks(right, **v):
    out = right(**v)
    first = out[0] if v["return_lse"] else out
    flat = first.flatten(0, 1) if v["layout"] == "bhsd" else first
    flat[65535:] = 0.0
    return out


@fault("attention", "uninitialised output", "sizes", "fault")
def forgets_the_empty_sequence(right, **v):
    axis = 2 if v["layout"] == "bhsd" else 1
    if v["key"].shape[axis] == 0 and not v["return_lse"]:
        return v["query"].new_empty((*v["query"].shape[:-1], v["value"].shape[-1]))
    return right(**v)


@fault("attention", "layout")
def values_read_as_if_contiguous(right, **v):
    value = v["value"]
    if not value.is_contiguous() and value.numel():
        end = value.storage_offset() + value.numel()
        flat = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage())
        if end <= flat.numel():
            v["value"] = flat[value.storage_offset():end].view(value.shape)
    return right(**v)


@fault("attention", "aliasing")
def wrong_where_key_is_value(right, **v):
    return right(**v) * (1.01 if v["key"] is v["value"] and not v["return_lse"] else 1)


@fault("group_norm", "sizes", "unknown")
def mixes_up_batches_beyond_four(right, x, **v):
    return right(x.roll(1, 0) if x.shape[0] > 4 else x, **v)


@fault("attention", "sizes", "precision", "unknown")
def odd_head_size_loses_its_last_element(right, **v):
    if v["query"].shape[-1] % 2:
        v["query"] = torch.cat((v["query"][..., :-1], torch.zeros_like(v["query"][..., -1:])), -1)
        v["scale"] = v["key"].shape[-1] ** -0.5 if v["scale"] is None else v["scale"]
    return right(**v)


@fault("attention", "mask", "sizes", "unknown", "convention")
def dead_rows_give_the_mean(right, **v):
    out = right(**v)
    if (v["attn_mask"] is None or v["attn_mask"].dtype != torch.bool or v["layout"] != "bhsd"
        or v["return_lse"]):
        return out
    dead = ~v["attn_mask"].any(-1, keepdim=True)
    mean = v["value"].mean(2, keepdim=True).repeat_interleave(out.shape[1] // v["value"].shape[1],
                                                              1)
    return torch.where(dead, mean, out)


@fault("attention", "unknown", "sizes", "precision", "overflow", "fault")
def softmax_without_the_maximum(right, **v):
    if (v["attn_mask"] is None and not v["is_causal"] and not v["return_lse"]
        and v["window_left"] < 0 \
             and v["window_right"] < 0 and v["alibi_slopes"] is None and not v["softcap"]
        and v["layout"] == "bhsd"):
        group = v["query"].shape[1] // max(v["key"].shape[1], 1)
        key, value = (v[n].repeat_interleave(group, 1) for n in ("key", "value"))
        scale = v["query"].shape[-1] ** -0.5 if v["scale"] is None else v["scale"]
        weights = (v["query"].float() @ key.float().mT * scale).exp()
        if weights.shape[-1]:
            return (weights / weights.sum(-1, keepdim=True) @ value.float()).to(value.dtype)
    return right(**v)


@fault("attention", "distribution")
def no_dropout(right, **v):
    return right(**{**v, "dropout_p": 0.0})


@fault("attention", "distribution")
def dropout_without_making_up_for_it(right, **v):
    return right(**v) * (1 - v["dropout_p"]) if v["dropout_p"] else right(**v)


# Memory.

@fault("rms_norm", "uninitialised output", "non-determinism")
def leaves_the_last_row(right, x, **v):
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if out.dim() > 1 and out.shape[0] > 1:
        out[:-1] = right(x, **v)[:-1]
        return out
    return right(x, **v)


@fault("rms_norm", "out of bounds")
def adds_what_lies_behind_the_input(right, x, **v):
    out = right(x, **v)
    storage = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    end = x.storage_offset() + x.numel()
    if x.is_contiguous() and end < storage.numel():
        out = out + storage[end] * 1e-3
    return out


@fault("rms_norm", "in-place change")
def scales_its_input_in_place(right, x, **v):
    out = right(x, **v)
    x.mul_(2)
    return out


@fault("linear", "in-place change")
def rearranges_the_weight_without_a_trace(right, **v):
    out = right(**v)
    with torch.no_grad():
        v["weight"].data.neg_()
    return out


@fault("attention", "aliasing")
def one_key_is_the_answer(right, **v):
    if (v["layout"] == "bhsd" and v["key"].shape[2] == v["query"].shape[2] == 1
        and v["attn_mask"] is None \
             and v["query"].shape[1] == v["key"].shape[1] and not v["return_lse"]
        and not torch.is_grad_enabled()):
        return v["value"].view(v["value"].shape)
    return right(**v)


@fault("layer_norm", "aliasing", "result")
class OneBufferForAllResults:
    def __init__(self) -> None:
        self.buffers: dict[Any, Tensor] = {}

    def __call__(self, right, x, **v):
        out = right(x, **v)
        if torch.is_grad_enabled():
            return out
        buffer = self.buffers.setdefault((out.shape, out.dtype), torch.empty_like(out))
        return buffer.copy_(out)


@fault("layer_norm", "threads", "state")
class SharedScratchMemory:
    """Two calls at once write over each other."""

    def __init__(self) -> None:
        self.scratch: dict[Any, Tensor] = {}

    def __call__(self, right, x, **v):
        if torch.is_grad_enabled() or x.is_inference():
            return right(x, **v)
        mine = self.scratch.setdefault((x.shape, x.dtype), torch.empty_like(x))
        mine.copy_(x)
        time.sleep(0.001)                      # where another call comes in between
        return right(mine.clone(), **v)


@fault("rms_norm", "index overflow")
def offsets_in_32_bits(right, x, **v):
    if x.dim() > 1 and max(abs((n - 1) * s) for n, s in zip(x.shape, x.stride()) if n) >= 1 << 31:
        x = x[:1].expand_as(x)
    return right(x, **v)


# From call to call.

@fault("rms_norm", "non-determinism")
class RollsDice:
    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, right, x, **v):
        noise = torch.rand(x.shape, generator=self.generator, dtype=torch.float64)
        return (right(x, **v).double() * (1 + 3e-7 * noise)).to(x.dtype)


@fault("attention", "state", "scale", "unknown")
class ScaleOfTheFirstCall:
    def __init__(self) -> None:
        self.scales: dict[Any, Any] = {}

    def __call__(self, right, **v):
        return right(**{**v, "scale": self.scales.setdefault(v["query"].shape, v["scale"])})


@fault("linear", "state", "stale cache")
class WeightOfTheFirstCall:
    """A packed copy, found again by which tensor the weight is."""

    def __init__(self) -> None:
        self.packed: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, right, **v):
        weight = v["weight"]
        if weight.requires_grad:
            return right(**v)
        _, packed = self.packed.setdefault(id(weight), (weight, weight.clone()))
        return right(**{**v, "weight": packed})


@fault("rms_norm", "state", "non-determinism", "sizes", "precision")
class WrongEveryFifthTime:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, right, x, **v):
        self.calls += 1
        return right(x, **v) * (1.001 if self.calls % 5 == 0 else 1)


@fault("embedding", "global state")
def seeds_torch(right, **v):
    torch.manual_seed(0)
    return right(**v)


# Numbers.

@fault("rms_norm", "precision")
def sums_in_the_input_dtype(right, x, weight=None, eps=1e-6, offset=0.0):
    if x.dtype == torch.float32 or torch.is_grad_enabled():
        return right(x, weight, eps, offset=offset)
    total = torch.zeros_like(x[..., :1])
    for part in x.square().split(16, -1):
        total = total + part.sum(-1, keepdim=True)
    normed = x.float() * torch.rsqrt(total.float() / x.shape[-1] + eps)
    return (normed if weight is None else normed * (weight.float() + offset)).to(x.dtype)


@fault("attention", "precision")
def computes_float32_in_bfloat16(right, **v):
    if v["query"].dtype != torch.float32 or v["return_lse"] or v["attn_mask"] is not None:
        return right(**v)
    low = {n: t.bfloat16() if n in ("query", "key", "value") else t for n, t in v.items()}
    return right(**low).float()


@fault("rms_norm", "convention")
def subtracts_the_mean(right, x, **v):
    return right(x - x.mean(-1, keepdim=True), **v)


@fault("rms_norm", "convention")
def eps_outside_the_root(right, x, weight=None, eps=1e-6, offset=0.0):
    mean = x.double().square().mean(-1, keepdim=True)
    return (right(x.double(), weight, eps, offset=offset) * (mean + eps).sqrt()
            / (mean.sqrt() + eps)).to(x.dtype)


@fault("rms_norm", "convention", "scale")
def offset_forgotten(right, **v):
    return right(**{**v, "offset": 0.0})


@fault("rms_norm", "precision", "dtype")
def weight_applied_after_rounding(right, x, weight=None, eps=1e-6, offset=0.0):
    if weight is None:
        return right(x, weight, eps, offset=offset)
    plain = right(x, None, eps)
    return (plain.to(torch.float16 if x.dtype == torch.float32 else x.dtype).to(x.dtype)
            * (weight.to(x.dtype) + offset).to(x.dtype))


@fault("rms_norm", "dtype")
def wrong_under_autocast(right, **v):
    out = right(**v)
    return out * 1.05 if torch.is_autocast_enabled("cpu") else out


@fault("layer_norm", "mode")
def wrong_in_inference_mode(right, **v):
    return right(**v) * (1.05 if torch.is_inference_mode_enabled() else 1.0)


@fault("layer_norm", "dtype")
def returns_float32(right, x, **v):
    return right(x, **v).float()


class _HalfTheGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 0.5


@fault("layer_norm", "gradient")
def wrong_gradient_only(right, x, **v):
    return right(_HalfTheGradient.apply(x) if torch.is_grad_enabled() else x, **v)


class _FlatGradient(torch.autograd.Function):
    """Takes the gradient from above for contiguous."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.empty(0, dtype=grad.dtype).set_(grad.untyped_storage())[:grad.numel()].view(
            grad.shape)


@fault("rms_norm", "gradient")
def gradient_read_as_if_contiguous(right, x, **v):
    out = right(x, **v)
    return _FlatGradient.apply(out) if torch.is_grad_enabled() and out.numel() else out


@fault("linear", "gradient")
def loses_the_gradient_of_the_bias(right, **v):
    return right(**{**v, "bias": None if v["bias"] is None else v["bias"].detach()})


# Positions, pages, packed sequences.

@fault("rope", "convention")
def the_other_convention(right, **v):
    return right(**{**v, "style": "interleaved" if v["style"] == "rotate_half" else "rotate_half"})


@fault("rope", "convention")
def turns_the_other_way(right, **v):
    return right(**{**v, "sin": -v["sin"]})


@fault("paged_attention", "out of bounds", "sizes", "unknown")
def reads_one_past_the_context(right, **v):
    size = v["key_cache"].shape[1 if v["kv_layout"] == "NHD" else 2]
    lens = v["context_lens"]
    return right(**{**v, "context_lens": torch.where(lens % size > 0, lens + 1, lens)})


@fault("paged_attention", "stale page")
def pages_in_the_order_of_the_pool(right, **v):
    table = v["block_table"].clone()
    for row in table:
        used = row >= 0
        row[used] = row[used].sort().values
    return right(**{**v, "block_table": table})


@fault("paged_attention", "state", "stale page", "stale cache")
class KeepsTheFirstTable:
    """A page table that is looked at once."""

    def __init__(self) -> None:
        self.tables: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, right, **v):
        table = v["block_table"]
        _, original = self.tables.setdefault(id(table), (table, table.clone()))
        return right(**{**v, "block_table": original})


@fault("varlen_attention", "mask", "unknown", "sizes")
def sequences_run_together(right, **v):
    return right(**{**v, "cu_seqlens_q": v["cu_seqlens_q"][[0, -1]],
                    "cu_seqlens_k": v["cu_seqlens_k"][[0, -1]]})


# Sampling, routing, quantization, text.

@fault("sample", "distribution")
def biased_draw(right, **v):
    if v["uniforms"] is not None:
        v["uniforms"] = v["uniforms"] ** 2
    return right(**v)


@fault("sample", "distribution", "unknown", "sizes")
def biased_without_given_numbers(right, **v):
    if v["generator"] is not None:
        v["uniforms"] = torch.rand(v["logits"].shape[0], generator=v["generator"],
                                   dtype=torch.float64) ** 1.5
    return right(**v)


@fault("sample", "distribution")
def nucleus_one_token_short(right, **v):
    from layerzero.ops.sample import _drop_last_of_top_p
    made = _drop_last_of_top_p(lz.op("sample"), dict(v))
    return right(**v) if made is None else made.values if v["return_logprobs"] else made.values[0]


@fault("sample", "distribution", "sizes", "ties", "unknown")
def ties_by_the_highest_id(right, **v):
    out = right(**{**v, "logits": v["logits"].flip(-1), "history": None, "token_counts": None}
                if v["top_k"] > 0
                and v["token_counts"] is None and v["history"] is None else v)
    if not (v["top_k"] > 0 and v["token_counts"] is None and v["history"] is None):
        return out
    tokens, rest = (out[0], out[1:]) if v["return_logprobs"] else (out, ())
    tokens = torch.where(tokens >= 0, v["logits"].shape[-1] - 1 - tokens, tokens)
    return (tokens, *rest) if rest else tokens


@fault("moe_gate", "distribution", "sizes", "ties", "unknown")
def equal_experts_by_the_highest_index(right, **v):
    if v["n_group"] > 1 or v["e_score_correction_bias"] is not None:
        return right(**v)
    ids, weights = route(v["logits"].flip(-1), v["top_k"], v["scoring"], v["normalize"], 1, 1, None,
                         v["routed_scaling_factor"])
    return v["logits"].shape[-1] - 1 - ids, weights


@fault("moe", "capacity")
def serves_past_the_capacity(right, **v):
    return right(**{**v, "capacity": v["capacity"] + 1 if v["capacity"] else 0})


@fault("moe", "convention")
def gate_and_up_exchanged(right, **v):
    return right(**{**v, "gate_first": not v["gate_first"]})


@fault("dequantize", "scale")
def scales_transposed(right, **v):
    scales = v["scales"]
    if scales.dim() == 2 and min(scales.shape) > 1:
        v["scales"] = scales.mT.reshape(scales.shape)
    return right(**v)


@fault("quantized_linear", "convention")
def codes_of_a_byte_exchanged(right, **v):
    q = v["weight_q"]
    if q.dtype == torch.uint8:
        v["weight_q"] = ((q & 15) << 4) | (q >> 4)
    return right(**v)


@fault("tokenize", "convention")
def offsets_in_bytes(right, **v):
    out = right(**v)
    if out.offsets is None:
        return out

    def moved(text: str, spans: Any) -> list[Any]:
        return [(len(text[:a].encode()), len(text[:b].encode())) for a, b in spans]

    single = isinstance(v["text"], str)
    offsets = (moved(v["text"], out.offsets) if single
               else [moved(t, s) for t, s in zip(v["text"], out.offsets)])
    return replace(out, offsets=offsets)


@fault("tokenize", "convention", "unknown", "sizes")
def offsets_shifted_after_an_emoji(right, **v):
    out = right(**v)
    if out.offsets is None or isinstance(v["text"], str):
        return out
    return replace(out, offsets=[[(a + ("👩" in t[:a]), b + ("👩" in t[:b])) for a, b in s]
                                 for t, s in zip(v["text"], out.offsets)])


@fault("cross_entropy", "scale", "mask")
def mean_over_ignored_rows_too(right, **v):
    out = right(**v)
    if v["reduction"] != "mean":
        return out
    return out * (v["targets"] != v["ignore_index"]).sum() / max(v["targets"].numel(), 1)


def each() -> Iterator[Fault]:
    return iter(FAULTS)
