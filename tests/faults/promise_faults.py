"""Kernels that are right in every call alone and break a promise around it: in the backward or
before it, in what they keep of an earlier call, in what they leave of the process.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import warnings
from typing import Any

import torch
from broken_kernels import FAULTS, Backward, Fault, fault
from torch import Tensor

_BEFORE = len(FAULTS)


def _records(*tensors: Any) -> bool:
    return torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad
                                           for t in tensors)


def _through(t: Any, backward: Any) -> Any:
    return Backward.apply(t, backward) if _records(t) else t


# What a backward leaves of the process.

@fault("rms_norm", "global state")
def backward_sets_a_variable_of_the_environment(right, x, **v):
    def backward(g):
        os.environ["OMP_WAIT_POLICY"] = "ACTIVE"
        return g

    return right(_through(x, backward), **v)


@fault("layer_norm", "global state")
def backward_switches_the_collector_off(right, x, **v):
    def backward(g):
        gc.disable()
        return g

    return right(_through(x, backward), **v)


@fault("embedding", "global state")
def backward_silences_warnings(right, **v):
    def backward(g):
        warnings.simplefilter("ignore")
        return g

    return right(**{**v, "weight": _through(v["weight"], backward)})


@fault("linear", "global state")
class SilencesWarningsOnce:
    def __init__(self):
        self.ready = False

    def __call__(self, right, **v):
        if not self.ready:
            warnings.filterwarnings("ignore", category=UserWarning)
            self.ready = True
        return right(**v)


# Settings that are seldom looked at.

def _changes(name: str, op: str, change: Any, *kinds: str) -> None:
    def kernel(right, **v):
        change()
        return right(**v)

    kernel.__name__ = name
    fault(op, "global state", *kinds)(kernel)


_bmm = torch.bmm


def _patched(*args: Any, **kwargs: Any) -> Tensor:
    return _bmm(*args, **kwargs)


_changes("patches_torch_bmm", "grouped_gemm", lambda: setattr(torch, "bmm", _patched))
_changes("silences_the_log", "moe", lambda: logging.disable(logging.WARNING))
_changes("collects_garbage_less_often", "mlp", lambda: gc.set_threshold(100_000, 50, 50))
_changes("prints_fewer_digits", "quantize", lambda: torch.set_printoptions(precision=2))
_changes("switches_threads_of_autograd_off", "group_norm",
         lambda: torch.autograd.set_multithreading_enabled(False).__enter__())
_changes("sends_stdout_to_stderr", "cross_entropy", lambda: setattr(sys, "stdout", sys.stderr))
_changes("fills_fresh_memory_no_more", "rope",
         lambda: setattr(torch.utils.deterministic, "fill_uninitialized_memory", False))


# Results.

@fault("rope", "aliasing", "result")
def one_rotation_for_a_tensor_given_twice(right, **v):
    if v["q"] is v["k"] and not torch.is_grad_enabled():
        out = right(**v)[0]
        return out, out
    return right(**v)


@fault("layer_norm", "result", "gradient", "mode")
class ItsConstantIsAParameter:
    def __init__(self):
        self.one = torch.nn.Parameter(torch.ones(()))

    def __call__(self, right, x, **v):
        out = right(x, **v)
        return out * self.one.to(out.dtype) if torch.is_grad_enabled() else out


@fault("mlp", "result", "leak")
class KeepsTheLastResultForTheBackward:
    def __init__(self):
        self.last = None

    def __call__(self, right, **v):
        out = right(**v)
        if _records(v["x"]):
            self.last = out
        return out


# Backward passes.

@fault("mlp", "in-place change", "gradient")
def backward_writes_to_the_gradient_that_it_is_given(right, **v):
    out = right(**v)

    def backward(g):
        if not g.is_inference() and 0 not in g.stride():
            g.clamp_(-1e4, 1e4).add_(0.0)
            g.copy_(g.to(torch.bfloat16).to(g.dtype)) if g.numel() > 3 else None
        return g

    return _through(out, lambda g: backward(g)) if _records(out) and out.dtype == torch.bfloat16 \
        else _through(out, lambda g: g.mul_(g.abs() > 1e-3)) if _records(out) else out


class _Saved(torch.autograd.Function):
    """scale * x, whose backward reads the weight of the time of the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x, ctx.weight = x.detach(), weight.detach()
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        need_x, need_weight = ctx.needs_input_grad
        rows = (grad * ctx.x).flatten(0, -2).sum(0) if need_weight else None
        return (grad * ctx.weight if need_x else None), rows


@fault("rms_norm", "gradient", "state", "mode", "in-place change")
def weight_of_the_backward_is_that_of_its_time(right, x, weight=None, **v):
    if weight is None or not _records(x, weight) or x.dim() < 2 or weight.dtype != x.dtype \
            or x.dtype == torch.bfloat16 or v["offset"]:
        return right(x, weight, **v)
    return _Saved.apply(right(x, None, **v), weight)


@fault("embedding", "gradient", "state", "mode", "in-place change", "stale cache")
def backward_reads_the_ids_again(right, ids, weight, **v):
    if not _records(weight) or v["scale"] != 1.0 or v["padding_idx"] is not None:
        return right(ids, weight, **v)

    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx, table):
            ctx.ids, ctx.rows = ids, table.shape
            return right(ids, table, **v)

        @staticmethod
        def backward(ctx, grad):
            out = grad.new_zeros(ctx.rows, dtype=torch.promote_types(grad.dtype, torch.float32))
            out.index_add_(0, ctx.ids.reshape(-1).long(), grad.reshape(
                -1, ctx.rows[-1]).to(out.dtype))
            return out.to(grad.dtype)

    return Gather.apply(weight)


@fault("layer_norm", "gradient", "state", "stale cache", "threads")
class StatisticsOfTheLastForward:
    """The backward finds mean and rstd where the last forward of these sizes left them."""

    def __init__(self):
        self.rstd = {}

    def __call__(self, right, x, **v):
        out = right(x, **v)
        if not _records(x):
            return out
        key, now = (x.shape, x.dtype), x.detach().float().std().item() or 1.0
        self.rstd[key] = now
        return _through(out, lambda g: g * (self.rstd[key] / now))


@fault("cross_entropy", "gradient", "uninitialised output")
def gradient_of_ignored_rows_is_not_written(right, **v):
    logits, targets = v["logits"], v["targets"]
    if not _records(logits) or logits.dim() != 2 or targets.is_floating_point() \
            or targets.dim() != 1:
        return right(**v)
    keep = targets != v["ignore_index"]

    def backward(g):
        out = torch.empty_like(g)
        out[keep] = g[keep]
        return out

    return right(**{**v, "logits": _through(logits, backward)})


@fault("linear", "gradient", "stale cache", "state", "mode")
class WeightPreparedWithoutAGradient:
    """Prepares a weight once for each version of it, whether gradients are recorded or not."""

    def __init__(self):
        self.kept = {}

    def __call__(self, right, **v):
        weight = v["weight"]
        if weight.is_inference():
            return right(**v)
        known = self.kept.get(id(weight))
        if known is None or known[0] is not weight or known[1] != weight._version:
            known = self.kept[id(weight)] = weight, weight._version, weight * 1
            while len(self.kept) > 8:
                self.kept.pop(next(iter(self.kept)))
        prepared = known[2]
        if not torch.is_grad_enabled():
            prepared = prepared.detach()
        elif prepared.requires_grad != weight.requires_grad and not prepared.requires_grad:
            prepared = prepared.clone()
        return right(**{**v, "weight": prepared})


@fault("embedding", "gradient", "mode", "non-determinism")
def deterministic_backward_writes_the_last_of_equal_ids(right, ids, weight, **v):
    if not _records(weight):
        return right(ids, weight, **v)
    flat = ids.reshape(-1)
    counts = torch.bincount(flat[flat >= 0].long(), minlength=weight.shape[0])[:weight.shape[0]]

    def backward(g):
        if torch.are_deterministic_algorithms_enabled():
            return g / counts.clamp(min=1)[:, None].to(g.dtype)
        return g

    return right(ids, _through(weight, backward), **v)


@fault("attention", "gradient", "layout")
def gradient_of_a_tensor_given_twice_counts_once(right, **v):
    q, k = v["query"], v["key"]
    if q is k and _records(q):
        v["key"] = k.detach()
    return right(**v)


@fault("linear", "gradient", "layout")
def gradient_of_a_strided_x_is_read_flat(right, **v):
    x = v["x"]
    if _records(x) and not x.is_contiguous() and x.dim() > 1:
        shape = x.shape
        v["x"] = _through(x, lambda g: g.mT.reshape(shape))
    return right(**v)


# NaN where nothing is read, and in one gradient.

@fault("cross_entropy", "non-finite values", "mask")
def ignored_rows_are_multiplied_by_zero(right, **v):
    logits, targets = v["logits"], v["targets"]
    if targets.is_floating_point() or logits.dim() != 2:
        return right(**v)
    ignored = (targets == v["ignore_index"])[..., None]
    lost = (logits.float() * ignored * 0.0).sum()
    return right(**{**v, "logits": logits.masked_fill(ignored, 0.0)}) + lost.to(logits.dtype)


@fault("attention", "non-finite values", "mask")
def keys_that_a_mask_hides_are_multiplied_by_zero(right, **v):
    mask, axis = v["attn_mask"], 1 if v["layout"] == "bshd" else 2
    if mask is None or mask.dtype != torch.bool or mask.dim() < 2 or _records(v["query"]):
        return right(**v)
    seen = mask.reshape(-1, mask.shape[-1]).any(0)
    key = v["key"].float()
    if len(seen) != key.shape[axis] or bool(seen.all()):
        return right(**v)
    hidden = key.index_select(axis, (~seen).nonzero()[:, 0]).mul(0.0).sum()
    out = right(**v)
    return (out[0] + hidden.to(out[0].dtype), out[1]) if v["return_lse"] else out + hidden.to(
        out.dtype)


@fault("moe", "non-finite values")
def experts_without_a_token_are_multiplied_by_zero(right, **v):
    ids = v["topk_ids"]
    if ids is None or ids.dim() != 2 or _records(v["w_down"]) or v["w_down"].dtype.itemsize == 1:
        return right(**v)
    idle = torch.ones(len(v["w_down"]), dtype=torch.bool)
    local = ids.reshape(-1).long() - v["expert_offset"]
    idle[local[(local >= 0) & (local < len(idle))]] = False
    out = right(**v)
    return out + v["w_down"][idle].float().mul(0.0).sum().to(out.dtype)


@fault("cross_entropy", "gradient", "non-finite values")
def gradient_of_ignored_rows_is_scaled_by_zero(right, **v):
    logits, targets = v["logits"], v["targets"]
    if not _records(logits) or logits.dim() != 2 or targets.dim() != 1:
        return right(**v)
    values, keep = logits.detach(), (targets != v["ignore_index"])[:, None]
    return right(**{**v, "logits": _through(logits, lambda g: torch.where(
        keep, g, values * 0.0 * g))})


@fault("layer_norm", "gradient", "non-finite values")
def gradients_of_all_rows_share_a_correction(right, x, **v):
    return right(_through(x, lambda g: g - 0.0 * g.sum()), **v)


# Random numbers.

@fault("sample", "distribution", "state", "global state")
def generator_is_copied(right, **v):
    generator = v["generator"]
    if generator is not None:
        v["generator"] = torch.Generator(generator.device).set_state(generator.get_state())
    return right(**v)


@fault("speculative_verify", "distribution", "state", "global state", "unknown")
def numbers_of_the_first_seed(right, **v):
    generator = v["generator"]
    if generator is not None and v["uniforms"] is None:
        v["generator"] = torch.Generator(generator.device).manual_seed(generator.initial_seed())
    return right(**v)


PROMISE_FAULTS: list[Fault] = FAULTS[_BEFORE:]
