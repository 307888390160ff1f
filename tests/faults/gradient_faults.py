"""Kernels whose forward pass is right everywhere and whose backward is not: at some sizes, beside
another argument, for some of the operands, for an output gradient that a loss gives now and then.
Each is wrong in one way.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from broken_kernels import FAULTS, Fault, fault
from torch import Tensor

_BEFORE = len(FAULTS)
Grads = dict[str, Any]
Change = Callable[[Grads, Grads, Sequence[Any], dict[str, bool]], Grads]


def _own_backward(right: Any, v: dict[str, Any], names: Sequence[str], change: Change) -> Any:
    """Runs the formula, and again in the backward; `change` gets the gradients, the tensors, the
    output gradients and which tensors want a gradient."""
    given = [n for n in names if isinstance(v[n], Tensor)]
    if not any(v[n].requires_grad for n in given):
        return right(**v)

    class Formula(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: Tensor) -> Any:
            ctx.save_for_backward(*tensors)
            ctx.set_materialize_grads(False)
            return right(**{**v, **dict(zip(given, tensors))})

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, *output_grads: Any) -> Any:
            leaves = [t.detach().requires_grad_() for t in ctx.saved_tensors]
            with torch.enable_grad():
                out = right(**{**v, **dict(zip(given, leaves))})
            results = out if isinstance(out, tuple) else (out,)
            grads = torch.autograd.grad(results, leaves, [
                torch.zeros_like(r) if g is None else g for r, g in zip(results, output_grads)],
                allow_unused=True)
            changed = change(dict(zip(given, grads)), dict(zip(given, ctx.saved_tensors)),
                             output_grads, dict(zip(given, ctx.needs_input_grad)))
            return tuple(changed[n] for n in given)

    return Formula.apply(*(v[n] for n in given))


@fault("rms_norm", "gradient", "sizes", "last rows")
def columns_behind_the_last_tile_have_no_gradient(right, **v):
    def change(grads, tensors, output_grads, wanted):
        width = tensors["x"].shape[-1]
        if grads.get("weight") is not None and width > 1024:
            tail = torch.arange(width, device=grads["weight"].device) >= width // 1024 * 1024
            grads["weight"] = grads["weight"].masked_fill(tail, 0.0)
        return grads
    return _own_backward(right, v, ("x", "weight"), change)


@fault("grouped_gemm", "gradient", "sizes")
def sixteen_groups_have_a_gradient(right, **v):
    def change(grads, tensors, output_grads, wanted):
        if grads["weights"] is not None:
            grads["weights"] = torch.cat([grads["weights"][:16], grads["weights"][16:] * 0])
        return grads
    return _own_backward(right, v, ("x", "weights"), change)


@fault("linear", "gradient")
def frozen_inputs_leave_the_bias_without_a_gradient(right, **v):
    def change(grads, tensors, output_grads, wanted):
        if not wanted["x"] and wanted["weight"] and wanted.get("bias"):
            grads["bias"] = None
        return grads
    return _own_backward(right, v, ("x", "weight", "bias"), change)


@fault("linear_cross_entropy", "gradient")
def first_row_of_no_weight_ends_the_backward(right, **v):
    def change(grads, tensors, output_grads, wanted):
        rows = output_grads[0].reshape(-1)
        if len(rows) > 1 and not bool(rows[0]):
            return dict.fromkeys(grads)
        return grads
    return _own_backward(right, v, ("hidden", "weight", "bias"), change)


@fault("cross_entropy", "gradient", "precision")
def leaves_out_small_gradients(right, **v):
    def change(grads, tensors, output_grads, wanted):
        g = grads["logits"]
        return {"logits": None if g is None else torch.where(g.abs() < 1e-9, 0.0, g)}
    return _own_backward(right, v, ("logits",), change)


@fault("add_rms_norm", "gradient")
def sum_alone_has_no_residual_without_a_weight(right, **v):
    def change(grads, tensors, output_grads, wanted):
        if output_grads[0] is None and "weight" not in tensors:
            grads["residual"] = None
        return grads
    return _own_backward(right, v, ("x", "residual", "weight"), change)


@fault("varlen_attention", "gradient", "window")
def softcap_beside_a_window_has_another_derivative(right, **v):
    def change(grads, tensors, output_grads, wanted):
        if v["softcap"] > 0 and v["window_left"] >= 0 and grads["query"] is not None:
            grads["query"] = grads["query"] * 0.8
        return grads
    return _own_backward(right, v, ("query", "key", "value"), change)


@fault("layer_norm", "gradient", "non-finite values")
def has_the_input_back_from_the_result(right, **v):
    def change(grads, tensors, output_grads, wanted):
        weight = tensors.get("weight")
        if weight is not None and bool((weight == 0).any()) and grads["weight"] is not None:
            grads["weight"] = grads["weight"] / (weight / weight)
        return grads
    return _own_backward(right, v, ("x", "weight", "bias"), change)


@fault("rms_norm", "gradient", "overflow", "precision")
def sums_scaled_gradients_in_half(right, **v):
    def change(grads, tensors, output_grads, wanted):
        x = tensors["x"]
        if x.dtype == torch.float16 and grads["x"] is not None:
            dot = (output_grads[0] * x).float().sum(-1, keepdim=True).half()
            grads["x"] = torch.where(dot.isfinite(), grads["x"], torch.inf)
        return grads
    return _own_backward(right, v, ("x", "weight"), change)


@fault("layer_norm", "gradient", "threads", "sizes", "last rows")
def each_thread_adds_up_as_many_rows(right, **v):
    def change(grads, tensors, output_grads, wanted):
        rows = output_grads[0].reshape(-1, output_grads[0].shape[-1])
        threads = torch.get_num_threads()
        if grads.get("bias") is not None and len(rows) >= threads:
            whole = rows[:len(rows) // threads * threads]
            grads["bias"] = whole.sum(0).to(grads["bias"].dtype)
        return grads
    return _own_backward(right, v, ("x", "weight", "bias"), change)


@fault("rms_norm", "gradient", "precision", "dtype", "global state")
def adds_up_in_the_default_dtype(right, **v):
    def change(grads, tensors, output_grads, wanted):
        g = grads.get("weight")
        if g is not None:
            grads["weight"] = (torch.zeros(g.shape) + g.to(torch.get_default_dtype())).to(g.dtype)
        return grads
    return _own_backward(right, v, ("x", "weight"), change)


@fault("linear", "gradient", "state")
def adds_to_the_gradient_by_itself(right, **v):
    def change(grads, tensors, output_grads, wanted):
        if v["weight"].grad is not None and grads["weight"] is not None:
            v["weight"].grad.add_(grads["weight"])
        return grads
    return _own_backward(right, v, ("x", "weight", "bias"), change)


@fault("merge_attention", "aliasing", "result")
def one_part_is_the_result_where_gradients_are_recorded(right, **v):
    outs, lses = v["outs"], v["lses"]
    if len(outs) == 1 and torch.is_grad_enabled() and outs.requires_grad:
        return outs[0].view_as(outs[0]), lses[0].view_as(lses[0])
    return right(**v)


class _Weakly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, x: Tensor) -> Tensor:
        ctx.x = weakref.ref(x)
        return out.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return (torch.zeros_like(grad) if ctx.x() is None else grad), None


@fault("add_rms_norm", "gradient", "state", "stale cache")
def holds_its_input_weakly(right, **v):
    out, total = right(**v)                    # a sum saves no operand
    return (_Weakly.apply(out, v["x"]) if out.requires_grad else out), total


GRADIENT_FAULTS: tuple[Fault, ...] = tuple(FAULTS[_BEFORE:])
del FAULTS[_BEFORE:]                           # they have tests of their own
