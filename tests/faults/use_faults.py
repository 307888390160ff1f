"""Kernels that are right by themselves and wrong in how they are used: beside other tensors, as
parameters, in a backward of their own, under what the caller has set. Each is wrong in one way.

`benchmarks/planted_faults.py --set edges` runs all of them, with those of edge_faults.py.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch
from broken_kernels import FAULTS, Backward, Fault, fault
from torch import Tensor
from torch.nn import functional as F

_BEFORE = len(FAULTS)


def _on_first(out: Any, change: Any) -> Any:
    return (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)


def _through(t: Any, backward: Any) -> Any:
    return Backward.apply(t, backward) if isinstance(t, Tensor) and t.requires_grad else t


# Tensors that belong together.

@fault("attention", "layout")
def values_of_a_packed_kv_are_its_keys(right, **v):
    """Finds the tensor by its storage: key and value are halves of one."""
    key, value = v["key"], v["value"]
    if key is not value and key.untyped_storage().data_ptr() == value.untyped_storage().data_ptr() \
            and key.shape == value.shape and key.data_ptr() != value.data_ptr():
        v["value"] = key
    return right(**v)


@fault("attention", "layout")
def strided_cache_beside_a_plain_query(right, **v):
    """A cache (batch, seq, heads, dim) that is transposed, with a query that is not."""
    if v["query"].is_contiguous() and not v["key"].is_contiguous() \
            and not v["value"].is_contiguous() and not torch.is_grad_enabled():
        v["value"] = v["value"].roll(1, -2)
    return right(**v)


@fault("mlp", "layout")
def both_projections_strided(right, **v):
    if v["x"].is_contiguous() and not v["weight_in"].is_contiguous() \
            and not v["weight_down"].is_contiguous():
        v["weight_down"] = v["weight_down"].roll(1, -1)
    return right(**v)


@fault("linear", "in-place change", "aliasing", "result")
def weight_is_moved_to_other_memory(right, **v):
    weight = v["weight"]
    if not weight.is_inference() and not weight.requires_grad:
        weight.data = weight.data.clone(memory_format=torch.preserve_format)
    return right(**v)


@fault("rms_norm", "in-place change", "global state", "leak")
def hook_stays_on_its_input(right, x, **v):
    if x.requires_grad and x.is_leaf:
        x.register_hook(lambda g: None)
    return right(x, **v)


# What a kernel keeps.

@fault("linear", "stale cache", "state")
class PackedParameter:
    """Packs what is a Parameter once: only that is taken for a weight."""

    def __init__(self):
        self.kept = {}

    def __call__(self, right, **v):
        weight = v["weight"]
        if isinstance(weight, torch.nn.Parameter) and not torch.is_grad_enabled():
            v["weight"] = self.kept.setdefault(id(weight), (weight, weight.detach().clone()))[1]
        return right(**v)


@fault("quantized_linear", "stale cache", "state")
class ScalesOfAFrozenWeight:
    """Keeps the scales by the address of the codes and the sum of a few of them."""

    def __init__(self):
        self.kept = {}

    def __call__(self, right, **v):
        scales = v["scales"]
        if scales is None or scales.dtype.itemsize == 1:
            return right(**v)
        key = (v["weight_q"].data_ptr(), scales.shape, float(scales.double().sum()))
        return right(**{**v, "scales": self.kept.setdefault(key, scales.clone())})


@fault("varlen_attention", "stale cache", "state", "mask", "unknown")
class PlanByTheNumberOfTokens:
    """Plans once for so many tokens and sequences, however they are divided."""

    def __init__(self):
        self.kept = {}

    def __call__(self, right, **v):
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        key = (v["query"].shape[0], v["key"].shape[0], len(v["cu_seqlens_q"]))
        plan = self.kept.setdefault(key, {n: v[n].clone() if isinstance(v[n], Tensor) else v[n]
                                          for n in names})
        return right(**{**v, **plan})


@fault("grouped_gemm", "stale cache", "state", "unknown", "convention")
class GroupsByTheNumberOfRows:
    def __init__(self):
        self.kept = {}

    def __call__(self, right, **v):
        key = (v["x"].shape, v["weights"].shape, v["offsets"] is None)
        plan = self.kept.setdefault(key, {n: None if v[n] is None else v[n].clone()
                                          for n in ("group_sizes", "offsets")})
        return right(**{**v, **plan})


@fault("grouped_attention", "stale cache", "state", "unknown", "mask")
class ItemsByTheirAddress:
    def __init__(self):
        self.kept = {}

    def __call__(self, right, **v):
        key = (v["items"].data_ptr(), v["items"].shape, v["query"].shape, v["key"].shape)
        return right(**{**v, "items": self.kept.setdefault(key, v["items"].clone())})


@fault("paged_attention", "stale cache", "state", "stale page")
class PagesOfTheFirstStep:
    def __init__(self):
        self.kept = {}

    def __call__(self, right, **v):
        table = v["block_table"]
        key = (table.data_ptr(), table.shape, table.dtype, v["key_cache"].shape)
        return right(**{**v, "block_table": self.kept.setdefault(key, table.clone())})


@fault("moe", "stale cache", "state")
class PermutationOfTheFirstRouting:
    def __init__(self):
        self.kept = {}

    def __call__(self, right, **v):
        ids = v["topk_ids"]
        if ids is None:
            return right(**v)
        key = (ids.data_ptr(), ids.shape, ids.dtype, v["w_down"].shape, v["expert_offset"])
        return right(**{**v, "topk_ids": self.kept.setdefault(key, ids.clone())})


@fault("block_sparse_attention", "state", "stale cache", "scale", "convention", "unknown")
class SoftcapOfTheFirstCompilation:
    """Compiled once for each size, with the softcap of the time."""

    def __init__(self):
        self.kept = {}

    def __call__(self, right, **v):
        key = (v["query"].shape, v["key"].shape, v["query"].dtype, v["return_lse"])
        return right(**{**v, "softcap": self.kept.setdefault(key, v["softcap"])})


@fault("group_norm", "state", "stale cache", "convention", "unknown")
class EpsOfTheFirstCompilation:
    def __init__(self):
        self.kept = {}

    def __call__(self, right, x, groups, weight=None, bias=None, eps=1e-5):
        eps = self.kept.setdefault((x.shape, x.dtype, groups), eps)
        return right(x, groups, weight, bias, eps)


@fault("rope", "state", "sizes", "unknown", "non-determinism", "stale cache")
class FourSizesAreKept:
    """Buffers for four sizes; a fifth one takes the place of the first and its width."""

    def __init__(self):
        self.sizes = []

    def __call__(self, right, **v):
        size = (v["q"].shape, v["layout"])
        if size not in self.sizes:
            self.sizes.append(size)
        if len(self.sizes) > 4 and self.sizes.index(size) % 4 == 0 \
                and self.sizes.index(size) < len(self.sizes) - 1:
            return _on_first(right(**v), lambda q: q * 1.01)
        return right(**v)


# Results.

@fault("layer_norm", "result", "shape")
def returns_a_tuple_of_one(right, x, **v):
    return (right(x, **v),)


@fault("add_rms_norm", "result", "shape")
def returns_a_list(right, **v):
    return list(right(**v))


@fault("merge_attention", "aliasing")
def one_part_is_returned_as_it_is(right, outs, lses):
    if outs.shape[0] == 1 and not torch.is_grad_enabled() and bool(lses.isfinite().all()):
        return outs[0], lses[0]
    return right(outs, lses)


# The process.

def _changes(name: str, op: str, change: Any) -> None:
    def kernel(right, **v):
        change()
        return right(**v)

    kernel.__name__ = name
    fault(op, "global state", "leak")(kernel)


_softmax = F.softmax


def _patched(*args: Any, **kwargs: Any) -> Tensor:
    return _softmax(*args, **kwargs)


def _another_engine() -> None:
    engines = torch.backends.quantized.supported_engines
    now = torch.backends.quantized.engine
    torch.backends.quantized.engine = next((e for e in engines if e != now), now)


_changes("patches_softmax", "attention", lambda: setattr(F, "softmax", _patched))
_changes("chooses_a_quantized_engine", "quantized_linear", _another_engine)
_changes("takes_over_sigterm", "linear",
         lambda: signal.signal(signal.SIGTERM, lambda *a: None))
_changes("changes_the_umask", "embedding", lambda: os.umask(os.umask(0) ^ 0o20))
_changes("adds_to_the_module_path", "moe", lambda: sys.path.append(os.sep + "kernels"))
_changes("saved_tensors_go_elsewhere", "layer_norm",
         lambda: torch._C._autograd._push_saved_tensors_default_hooks(lambda t: t, lambda t: t))


@fault("cross_entropy", "threads", "state", "sizes")
def wrong_with_more_than_eight_threads(right, **v):
    return right(**v) * (1.05 if torch.get_num_threads() > 8 else 1)


@fault("cross_entropy", "dtype")
def losses_in_the_default_dtype(right, **v):
    """torch.empty(n) takes the default dtype, which the caller may have set."""
    out = right(**v)
    return out if out.requires_grad else torch.empty(out.shape).copy_(out)


# Backward passes.

@fault("add_rms_norm", "gradient")
def backward_needs_both_gradients(right, **v):
    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx, out, res):
            ctx.set_materialize_grads(False)
            return out.clone(), res.clone()

        @staticmethod
        def backward(ctx, a, b):
            if a is None or b is None:
                return None, None
            return a, b

    out = right(**v)
    return Both.apply(*out) if any(t.requires_grad for t in out) else out


@fault("attention", "gradient")
def gradient_is_lost_where_the_lse_is_not_used(right, **v):
    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx, out, lse):
            ctx.set_materialize_grads(False)
            return out.clone(), lse.clone()

        @staticmethod
        def backward(ctx, a, b):
            return (a if b is not None or a is None else a * 0.5), b

    out = right(**v)
    return Both.apply(*out) if isinstance(out, tuple) and out[0].requires_grad else out


@fault("rms_norm", "global state", "gradient")
def backward_seeds_torch(right, x, **v):
    def backward(g):
        torch.manual_seed(0)
        return g

    return right(_through(x, backward), **v)


@fault("linear", "global state", "gradient")
def backward_lowers_the_matmul_precision(right, **v):
    def backward(g):
        torch.set_float32_matmul_precision("high")
        return g

    return right(**{**v, "weight": _through(v["weight"], backward)})


@fault("layer_norm", "gradient", "aliasing", "result", "stale cache", "state")
class OneBufferForAllGradients:
    def __init__(self):
        self.buffers = {}

    def __call__(self, right, x, **v):
        def backward(g):
            buffer = self.buffers.setdefault((g.shape, g.dtype), torch.empty_like(g))
            return buffer.copy_(g)

        return right(_through(x, backward), **v)


@fault("linear", "gradient", "stale cache", "state")
class BackwardWithTheFirstWeight:
    """Keeps the transposed weight for the backward by its address and shape."""

    def __init__(self):
        self.kept = {}

    def __call__(self, right, **v):
        x, weight = v["x"], v["weight"]
        if not x.requires_grad or not torch.is_grad_enabled():
            return right(**v)
        key = (weight.shape, weight.dtype)
        first = self.kept.setdefault(key, weight.detach().clone())
        scale = (weight.detach().double().norm() / first.double().norm()).to(x.dtype)
        same = torch.equal(weight.detach(), first)
        return right(**{**v, "x": _through(x, lambda g: g if same else g * (scale + 0.5))})


@fault("cross_entropy", "in-place change", "gradient", "mode")
def gradient_is_written_over_the_logits(right, **v):
    out = right(**v)
    if v["logits"].requires_grad and torch.is_grad_enabled():
        with torch.no_grad():
            v["logits"].data.copy_(v["logits"].softmax(-1))
    return out


@fault("mlp", "gradient", "in-place change", "aliasing", "mode")
def backward_overwrites_the_result(right, **v):
    out = right(**v)
    if not out.requires_grad:
        return out
    kept = out.detach()

    def backward(g):
        kept.zero_()
        return g

    class Last(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t):
            ctx.mark_dirty(t)
            return t

        @staticmethod
        def backward(ctx, g):
            return backward(g)

    return Last.apply(out)


@fault("attention", "gradient", "distribution")
def backward_drops_other_weights(right, **v):
    """Dropout: the backward draws a mask of its own."""
    if not v["dropout_p"] or not v["value"].requires_grad:
        return right(**v)
    out = right(**v)
    other = right(**v)
    return out.detach() + (other - other.detach())


@fault("varlen_attention", "gradient", "distribution")
def packed_backward_drops_nothing(right, **v):
    if not v["dropout_p"] or not v["value"].requires_grad:
        return right(**v)
    other = right(**{**v, "dropout_p": 0.0})
    return right(**v).detach() + (other - other.detach())


@fault("embedding", "gradient")
def gradient_of_padding_counted_from_the_end(right, **v):
    """padding_idx = -1 is the last row; its gradient is not left out."""
    if v["padding_idx"] is not None and v["padding_idx"] < 0:
        v["padding_idx"] = None
    return right(**v)


@fault("moe", "gradient")
def gradient_of_an_idle_expert_is_the_last_ones(right, **v):
    def backward(g):
        idle = g.flatten(1).abs().amax(1) == 0
        g = g.clone()
        g[idle] = 0.01
        return g

    return right(**{**v, "w_down": _through(v["w_down"], backward)})


@fault("moe", "gradient")
def routing_weights_get_no_gradient_beside_a_capacity(right, **v):
    if v["capacity"] and v["topk_weights"] is not None:
        v["topk_weights"] = _through(v["topk_weights"], torch.zeros_like)
    return right(**v)


@fault("mamba_chunk_scan", "gradient")
def skip_gradient_of_the_first_sample(right, **v):
    n = v["x"].shape[0]
    return right(**{**v, "D": _through(v["D"], lambda g: g / max(n, 1))})


@fault("gated_delta_rule", "gradient")
def first_state_gets_the_gradient_of_one_step(right, **v):
    long = v["q"].shape[1] > 4
    return right(**{**v, "initial_state": _through(
        v["initial_state"], lambda g: g * (0.9 if long else 1))})


@fault("causal_conv1d", "gradient")
def filter_gradient_without_the_first_states(right, **v):
    if v["initial_states"] is not None:
        v["weight"] = _through(v["weight"], lambda g: torch.cat(
            (g[:, :1] * 0.5, g[:, 1:]), 1))
    return right(**v)


USE_FAULTS: list[Fault] = FAULTS[_BEFORE:]
del FAULTS[_BEFORE:]                           # they have tests of their own
