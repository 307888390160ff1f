"""Functions of linear attention that a forward of transformers finds among its module's globals, as
lz computes them: causal convolution, the gated delta rule, and Mamba-2's state space.

Each takes what the stock one takes, and leaves to it what lz does not know. A cache's state is
updated where it lies, as transformers does.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from ..rewiring import public

Function = Callable[..., Any]
ACTIVATIONS = {None: None, "silu": "silu", "swish": "silu"}
# several sequences in one row, which the torch functions of transformers do not know either
PACKED = ("seq_idx", "cu_seqlens")
# relative, in float32: another formula is farther off
CLOSE = 1e-4


def _packs(options: dict[str, Any]) -> bool:
    return any(options.get(name) is not None for name in PACKED)


def _convolve(stock: Function) -> Function:
    conv = public("causal_conv1d")

    def causal_conv1d_fn(hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None,
                         activation: str | None = None, **kwargs: Any) -> Any:
        if activation not in ACTIVATIONS or hidden_states.dtype != weight.dtype or _packs(kwargs):
            return stock(hidden_states, weight, bias, activation=activation, **kwargs)
        return conv(hidden_states, weight, bias, activation=ACTIVATIONS[activation])

    return causal_conv1d_fn


def _convolve_token(stock: Function) -> Function:
    conv = public("causal_conv1d")

    def causal_conv1d_update(hidden_states: Tensor, conv_state: Tensor, weight: Tensor,
                             bias: Tensor | None = None, activation: str | None = None) -> Any:
        if (activation not in ACTIVATIONS or conv_state.shape[-1] < weight.shape[-1] - 1
                or not hidden_states.dtype == conv_state.dtype == weight.dtype):
            return stock(hidden_states, conv_state, weight, bias, activation)
        out, state = conv(hidden_states, weight, bias, conv_state,
                          activation=ACTIVATIONS[activation], return_final_states=True)
        conv_state.copy_(state)
        return out

    return causal_conv1d_update


def _delta_rule(stock: Function) -> Function:
    rule = public("gated_delta_rule")

    def gated_delta_rule(
        query: Tensor, key: Tensor, value: Tensor, *args: Any, initial_state: Tensor | None = None,
        output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, **kwargs: Any,
    ) -> Any:
        if args or _packs(kwargs) or not query.dtype == key.dtype == value.dtype:
            return stock(query, key, value, *args, initial_state=initial_state,
                         output_final_state=output_final_state,
                         use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **kwargs)
        out = rule(query, key, value, kwargs["g"], kwargs["beta"], None, initial_state,
                   output_final_state=output_final_state,
                   use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)
        return out if output_final_state else (out, None)

    return gated_delta_rule


def _update(stock: Function) -> Function:
    update = public("selective_state_update")

    def mamba2_selective_state_update(
        state: Tensor, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
        D: Tensor | None = None, dt_bias: Tensor | None = None, dt_softplus: bool = False,
        z: Tensor | None = None, **kwargs: Any,
    ) -> Any:
        if not hidden_states.dtype == B.dtype == C.dtype:
            return stock(state, hidden_states, dt, A, B, C, D, dt_bias, dt_softplus, z, **kwargs)
        out, new = update(state, hidden_states, dt, A, B, C, D, z, dt_bias, dt_softplus)
        state.copy_(new)
        return out

    return mamba2_selective_state_update


def _scan(stock: Function) -> Function:
    scan = public("mamba_chunk_scan")

    def mamba2_chunk_scan(
        hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int,
        D: Tensor | None = None, dt_bias: Tensor | None = None,
        initial_states: Tensor | None = None, dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, math.inf), return_final_states: bool = False,
        **kwargs: Any,
    ) -> Any:
        low, high = dt_limit
        if _packs(kwargs) or kwargs.get("z") is not None or low < 0:
            return stock(hidden_states, dt, A, B, C, chunk_size, D, dt_bias, initial_states,
                         dt_softplus, dt_limit, return_final_states, **kwargs)
        # in float32, as transformers has it, whatever the model's dtype
        return scan(hidden_states.float(), dt, A, B.float(), C.float(), D, None, dt_bias,
                    initial_states, dt_softplus=dt_softplus, dt_min=float(low),
                    dt_max=None if math.isinf(high) else float(high),
                    return_final_states=return_final_states)

    return mamba2_chunk_scan


# the global -> (the operation, what takes its place)
FUNCTIONS: dict[str, tuple[str, Callable[[Function], Function]]] = {
    "torch_chunk_gated_delta_rule": ("gated_delta_rule", _delta_rule),
    "torch_recurrent_gated_delta_rule": ("gated_delta_rule", _delta_rule),
    "mamba2_selective_state_update": ("selective_state_update", _update),
    "mamba2_chunk_scan": ("mamba_chunk_scan", _scan),
    "causal_conv1d_fn": ("causal_conv1d", _convolve),
    "causal_conv1d_update": ("causal_conv1d", _convolve_token)}


def replacements(forward: FunctionType, names: tuple[str, ...]) -> dict[str, Function]:
    return {name: FUNCTIONS[name][1](forward.__globals__[name]) for name in names}


def called_functions(forward: Any) -> tuple[str, ...]:
    """Returns those of FUNCTIONS that a forward calls, below its decorators, by its globals."""
    plain = inspect.unwrap(forward) if callable(forward) else None
    if not isinstance(plain, FunctionType):
        return ()
    return tuple(name for name in FUNCTIONS if name in plain.__code__.co_names
                 and callable(plain.__globals__.get(name)))


def agrees(name: str, stock: Function) -> bool:
    """Tells whether a function of this name computes what lz does, and leaves the same state."""
    try:
        with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
            # each with tensors of its own: some are written to
            (args, options), (others, same) = _arguments(name), _arguments(name)
            want, got = stock(*args, **options), FUNCTIONS[name][1](_unserved)(*others, **same)
    except torch.OutOfMemoryError:
        raise
    # whatever unknown code says to inputs that it does not expect: then it is something else
    except Exception:
        return False
    pairs = [*zip(*(r if isinstance(r, tuple) else (r,) for r in (want, got))), *zip(args, others)]
    return all(w.shape == g.shape and bool((w - g).abs().max() <= CLOSE * w.abs().max())
               for w, g in pairs if isinstance(w, Tensor))


def _unserved(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("the stock function would have to serve this")


def _arguments(name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns small arguments of a function, the same each time."""
    gen = torch.Generator("cpu").manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen, device="cpu")

    if name == "causal_conv1d_fn":
        return (drawn(2, 6, 9), drawn(6, 4), drawn(6)), {"activation": "silu"}
    if name == "causal_conv1d_update":
        return (drawn(2, 6, 1), drawn(2, 6, 4), drawn(6, 4), drawn(6), "silu"), {}
    if name == "mamba2_selective_state_update":
        return ((drawn(2, 4, 8, 16), drawn(2, 4, 8), drawn(2, 4, 1).expand(2, 4, 8),
                 -drawn(4, 1, 1).abs().expand(4, 8, 16), drawn(2, 2, 16), drawn(2, 2, 16),
                 drawn(4, 1).expand(4, 8)),
                {"dt_bias": drawn(4, 1).expand(4, 8), "dt_softplus": True})
    if name == "mamba2_chunk_scan":
        return ((drawn(2, 9, 4, 8), drawn(2, 9, 4), -drawn(4).abs(), drawn(2, 9, 2, 16),
                 drawn(2, 9, 2, 16)),
                {"chunk_size": 4, "D": drawn(4), "dt_bias": drawn(4), "dt_softplus": True,
                 "initial_states": drawn(2, 4, 8, 16), "dt_limit": (0.1, 1.0),
                 "return_final_states": True})
    return ((drawn(2, 9, 4, 8), drawn(2, 9, 4, 8), drawn(2, 9, 4, 8)),
            {"g": -drawn(2, 9, 4).abs(), "beta": drawn(2, 9, 4).sigmoid(),
             "initial_state": drawn(2, 4, 8, 8), "output_final_state": True,
             "use_qk_l2norm_in_kernel": True})
