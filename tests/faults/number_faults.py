"""Kernels that are wrong in what they keep, in how they round, in numbers that are not finite and
in single gradients. Each is wrong in one way.

`benchmarks/planted_faults.py --set numbers` runs all of them; the tests run a few.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time

import torch
from broken_kernels import FAULTS, Fault, fault
from process_faults import _WithBackward

_BEFORE = len(FAULTS)


# The process, and what is kept between calls.

@fault("rms_norm", "global state", "mode")
def leaves_gradients_on(right, x, **v):
    out = right(x, **v)
    torch.set_grad_enabled(True)
    return out


@fault("layer_norm", "global state", "dtype")
class DefaultDtypeOnTheSecondCall:
    def __init__(self):
        self.calls = 0

    def __call__(self, right, x, **v):
        self.calls += 1
        out = right(x, **v)
        if self.calls == 2:
            torch.set_default_dtype(torch.float64)
        return out


@fault("linear", "aliasing", "result", "state", "threads")
class ViewOfItsScratch:
    """Computes in scratch memory that it keeps by the address of x, and returns a part of it."""

    def __init__(self):
        self.scratch = {}

    def __call__(self, right, **v):
        out = right(**v)
        key = (v["x"].data_ptr(), out.shape, out.dtype)
        if len(self.scratch) > 64:
            self.scratch.clear()
        scratch = self.scratch.setdefault(key, torch.empty(out.numel() + 64, dtype=out.dtype))
        part = scratch[:out.numel()].view(out.shape)
        with torch.no_grad():
            part.copy_(out)
        return out + (part.detach() - out.detach()) if out.requires_grad else part


@fault("rope", "stale cache", "state")
class TablesByAddress:
    def __init__(self):
        self.kept = {}

    def __call__(self, right, **v):
        key = (v["cos"].data_ptr(), v["sin"].data_ptr(), v["cos"].shape, v["cos"].dtype)
        if len(self.kept) > 64:
            self.kept.clear()
        cos, sin = self.kept.setdefault(key, (v["cos"].clone(), v["sin"].clone()))
        return right(**{**v, "cos": cos, "sin": sin})


@fault("attention", "state", "non-determinism", "threads", "unknown")
class WrongOnTheSecondCallOfASize:
    def __init__(self):
        self.seen = {}

    def __call__(self, right, **v):
        key = (v["query"].shape, v["key"].shape, v["query"].dtype)
        self.seen[key] = self.seen.get(key, 0) + 1
        out = right(**v)
        if self.seen[key] == 2:
            out = (out[0] * 1.1, *out[1:]) if isinstance(out, tuple) else out * 1.1
        return out


@fault("moe", "global state")
def draws_a_random_number(right, **v):
    torch.rand(1)
    return right(**v)


@fault("rms_norm", "threads", "state")
class EpsOfAnotherThread:
    def __init__(self):
        self.x = None

    def __call__(self, right, x, **v):
        self.x = x
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.0005)
        return right(self.x if self.x.shape == x.shape else x, **v)


@fault("linear", "global state")
def matmul_precision_is_left_lower(right, **v):
    torch.set_float32_matmul_precision("medium")
    return right(**v)


@fault("embedding", "global state")
def changes_the_directory(right, **v):
    os.chdir(os.sep)
    return right(**v)


@fault("cross_entropy", "global state")
def demands_deterministic_algorithms(right, **v):
    out = right(**v)
    torch.use_deterministic_algorithms(True, warn_only=True)
    return out


@fault("layer_norm", "out of bounds", "fault")
def writes_a_line_past_its_result(right, x, **v):
    out = right(x, **v)
    if out.numel() and out.dim() > 1 and out.shape[0] % 4 == 3:
        ctypes.memset(out.data_ptr() + out.nbytes, 0x41, 256)
    return out


@fault("embedding", "out of bounds", "uninitialised output", "sizes", "last rows")
def reads_a_row_past_the_table(right, **v):
    weight, ids = v["weight"], v["ids"]
    if weight.is_contiguous() and weight.shape[0] > 1 and ids.numel():
        past = weight.detach().as_strided((weight.shape[0] + 1, weight.shape[1]),
                                          weight.stride(), weight.storage_offset()) if (
            weight.storage_offset() + weight.numel() + weight.shape[1]
            <= weight.untyped_storage().nbytes() // weight.element_size()) else None
        if past is not None:
            out = right(**v)
            return out + past[-1] * 0
    return right(**v)


# Rounding.

@fault("layer_norm", "precision", "dtype")
def halves_rounded_as_bfloat16(right, x, **v):
    out = right(x, **v)
    return out.bfloat16().to(out.dtype) if out.dtype == torch.float16 else out


@fault("layer_norm", "precision", "convention")
def variance_as_a_difference(right, x, weight=None, bias=None, eps=1e-5):
    wide = x.float()
    mean = wide.mean(-1, keepdim=True)
    var = (wide * wide).mean(-1, keepdim=True) - mean * mean
    out = (wide - mean) * torch.rsqrt(var.clamp(min=0) + eps)
    out = out if weight is None else out * weight.float()
    return (out if bias is None else out + bias.float()).to(x.dtype)


@fault("attention", "precision")
def values_in_half_precision(right, **v):
    if v["value"].dtype == torch.float32:
        v["value"] = v["value"].half().float()
    return right(**v)


@fault("add_rms_norm", "precision")
def sum_rounded_to_eight_bits(right, **v):
    return right(**{**v, "x": v["x"].bfloat16().to(v["x"].dtype)})


@fault("quantized_linear", "precision", "scale", "convention", "unknown")
def scales_in_half_precision(right, **v):
    scales = v["scales"]
    if scales is not None and scales.dtype == torch.float32:
        v["scales"] = scales.bfloat16().float()
    return right(**v)


@fault("mlp", "precision")
def inner_activations_in_bfloat16(right, **v):
    if v["x"].dtype != torch.float32:
        return right(**v)
    names = ("x", "weight_in", "weight_up")
    return right(**{**v, **{n: v[n].bfloat16().float() for n in names if v[n] is not None}})


@fault("rms_norm", "overflow", "non-finite values", "precision")
def squares_in_half_precision(right, x, weight=None, eps=1e-6, offset=0.0):
    if x.dtype != torch.float16:
        return right(x, weight, eps, offset=offset)
    mean = (x * x).mean(-1, keepdim=True).float()
    out = x.float() * torch.rsqrt(mean + eps)
    return (out if weight is None else out * (weight.float() + offset)).to(x.dtype)


@fault("gated_delta_rule", "precision", "convention", "sizes", "unknown", "overflow")
def decay_ends_at_e_to_the_minus_two(right, **v):
    return right(**{**v, "g": v["g"].clamp(min=-2.0)})


@fault("merge_attention", "overflow", "non-finite values", "precision", "unknown", "convention")
def weights_without_the_maximum(right, outs, lses):
    weights = lses.float().exp()
    total = weights.sum(0)
    out = (outs.float() * (weights / total)[..., None]).sum(0)
    return out.to(outs.dtype), total.log().to(lses.dtype)


# Numbers that are not finite.

@fault("cross_entropy", "non-finite values", "unknown")
def nan_logits_are_zero(right, **v):
    return right(**{**v, "logits": torch.where(v["logits"].isnan(), 0, v["logits"])})


@fault("rope", "non-finite values")
def infinity_is_cut_by_rope(right, **v):
    q = v["q"]
    return right(**{**v, "q": q.nan_to_num(nan=torch.nan, posinf=torch.finfo(q.dtype).max)})


@fault("attention", "non-finite values", "mask")
def nan_in_a_value_becomes_zero(right, **v):
    return right(**{**v, "value": torch.where(v["value"].isnan(), 0, v["value"])})


@fault("group_norm", "non-finite values")
def nan_pixels_are_skipped(right, x, **v):
    return right(torch.where(x.isnan(), 0, x), **v)


# Single gradients.

@fault("attention", "gradient", "head map")
def value_gradient_of_one_query_head(right, **v):
    axis = 1 if v["layout"] == "bhsd" else 2
    group = v["query"].shape[axis] // max(v["value"].shape[axis], 1)
    if group > 1:
        v["value"] = _WithBackward.apply(v["value"], lambda g: g / group)
    return right(**v)


@fault("layer_norm", "gradient", "precision")
def bias_gradient_summed_in_bfloat16(right, x, weight=None, bias=None, eps=1e-5):
    if bias is not None:
        bias = _WithBackward.apply(bias, lambda g: g.bfloat16().to(g.dtype))
    return right(x, weight, bias, eps)


@fault("rms_norm", "gradient")
def weight_gradient_of_the_first_batch(right, x, weight=None, **v):
    if weight is not None and x.dim() > 2 and x.shape[0] > 1:
        n = x.shape[0]
        weight = _WithBackward.apply(weight, lambda g: g / n)
    return right(x, weight, **v)


@fault("embedding", "gradient")
def gradient_of_repeated_ids_is_not_added(right, **v):
    counts = torch.bincount(v["ids"].reshape(-1).long(), minlength=v["weight"].shape[0]).clamp(
        min=1)
    v["weight"] = _WithBackward.apply(v["weight"], lambda g: (g / counts[:, None]).to(g.dtype))
    return right(**v)


@fault("cross_entropy", "gradient")
def gradient_ignores_what_comes_from_above(right, **v):
    if v["reduction"] == "none":
        return right(**v)
    return _WithBackward.apply(right(**v), torch.ones_like)


@fault("rope", "gradient")
def keys_turn_the_same_way_backward(right, **v):
    k = v["k"]
    if k is not None and k.requires_grad:
        v["k"] = _WithBackward.apply(k, lambda g: g.flip(-1))
    return right(**v)


@fault("linear_cross_entropy", "gradient")
def hidden_gradient_is_one_chunk(right, **v):
    h = v["hidden"]
    if h.requires_grad and h.dim() > 1 and h.shape[0] > 4:
        def fewer(g):
            g = g.clone()
            g[-1] = 0
            return g
        v["hidden"] = _WithBackward.apply(h, fewer)
    return right(**v)


@fault("mlp", "gradient")
def down_gradient_without_its_bias(right, **v):
    if v["bias_down"] is not None:
        v["weight_down"] = _WithBackward.apply(v["weight_down"], lambda g: g * 1.02)
    return right(**v)


NUMBER_FAULTS: list[Fault] = FAULTS[_BEFORE:]
del FAULTS[_BEFORE:]                           # they have tests of their own
