"""Our own CPU kernels for one token of linear attention: Mamba-2, the gated delta rule, and the
convolution before both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...ops.causal_conv1d import OP as causal_conv1d
from ...ops.gated_delta_rule import L2_EPS
from ...ops.gated_delta_rule import OP as gated_delta_rule
from ...ops.selective_state_update import OP as selective_state_update
from ...spec import rules as r
from ...spec.reason import Code
from . import build
from .declaration import DTYPES, FLOATS, ONE_PASS, declare

STATE_ONCE = "reads the state from memory once and writes it once, where torch does so at each step"


def _view(t: Tensor | None) -> tuple[int, ...] | None:
    """Returns the dtype, address and strides of a tensor, as kernels.cpp reads them."""
    return None if t is None else (DTYPES[t.dtype], t.data_ptr(), *t.stride())


def _state_update() -> Callable[..., Any]:
    update, threads = build.module().state_update, torch.get_num_threads

    def run(state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
            D: Tensor | None = None, z: Tensor | None = None, dt_bias: Tensor | None = None,
            dt_softplus: bool = False) -> tuple[Tensor, Tensor]:
        out = torch.empty(x.shape, dtype=x.dtype)
        new = torch.empty(state.shape, dtype=state.dtype)
        update(_view(state), _view(x), _view(dt), _view(A), _view(B), _view(C), _view(D), _view(z),
               _view(dt_bias), _view(out), _view(new), *state.shape, B.shape[1], dt_softplus,
               threads())
        return out, new

    return run


def _delta_rule() -> Callable[..., Any]:
    step, threads = build.module().delta_rule, torch.get_num_threads

    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
            initial_state: Tensor | None = None, *, output_final_state: bool = False,
            use_qk_l2norm_in_kernel: bool = False) -> Any:
        (batch, _, heads, dim), (_, _, value_heads, value_dim) = q.shape, v.shape
        out = torch.empty(v.shape, dtype=v.dtype)
        state = (torch.empty((batch, value_heads, dim, value_dim), dtype=torch.float32)
                 if output_final_state else None)
        step(_view(q), _view(k), _view(v), _view(g), _view(beta), _view(initial_state), _view(out),
             _view(state), batch, heads, value_heads, dim, value_dim,
             dim ** -0.5 if scale is None else scale, use_qk_l2norm_in_kernel, L2_EPS, threads())
        return (out, state) if output_final_state else out

    return run


def _convolution() -> Callable[..., Any]:
    convolve, threads = build.module().convolution, torch.get_num_threads

    def run(x: Tensor, weight: Tensor, bias: Tensor | None = None,
            initial_states: Tensor | None = None, *, activation: str | None = None,
            return_final_states: bool = False) -> Any:
        assert initial_states is not None        # a rule says so
        (batch, channels, _), width, kept = x.shape, weight.shape[1], initial_states.shape[2]
        out = torch.empty(x.shape, dtype=x.dtype)
        state = torch.empty((batch, channels, kept), dtype=x.dtype) if return_final_states else None
        convolve(_view(x), _view(weight), _view(bias), _view(initial_states), _view(out),
                 _view(state), batch, channels, width, kept, activation is not None, threads())
        return (out, state) if return_final_states else out

    return run


KERNELS = (
    declare(selective_state_update, _state_update, 12.0, 8.0, r.unit_stride("state"),
            *(r.one_of(f"{name}.dtype", *FLOATS, code=Code.DTYPE_UNSUPPORTED)
              for name in ("state", "dt", "A")),
            *(r.one_of(f"{name}.dtype", None, *FLOATS, code=Code.DTYPE_UNSUPPORTED)
              for name in ("D", "dt_bias")), less_work=STATE_ONCE),
    declare(gated_delta_rule, _delta_rule, 12.0, 8.0,
            r.equals("seq", 1, Code.SEQ_LEN_UNSUPPORTED), r.unit_stride("initial_state"),
            *(r.one_of(f"{name}.dtype", *FLOATS, code=Code.DTYPE_UNSUPPORTED)
              for name in ("g", "beta")),
            r.one_of("initial_state.dtype", None, "float32", code=Code.DTYPE_UNSUPPORTED),
            name="gated_delta_rule_token", less_work=STATE_ONCE),
    declare(causal_conv1d, _convolution, 12.0, 6.0, r.equals("seq", 1, Code.SEQ_LEN_UNSUPPORTED),
            r.present("initial_states.dtype"), name="causal_conv1d_token", less_work=ONE_PASS),
)
