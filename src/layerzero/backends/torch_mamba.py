"""Mamba-2 with torch: its convolution, a token, and tokens in chunks.

Within a chunk every output is a product of C and B of two tokens, times the decay between them, as
attention with a mask: matrix products. The state goes from chunk to chunk (state space duality).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..ops.causal_conv1d import OP as causal_conv1d
from ..ops.mamba_chunk_scan import OP as mamba_chunk_scan
from ..ops.mamba_chunk_scan import finish, prepare
from ..ops.selective_state_update import OP as selective_state_update
from ..spec import rules as r
from ..spec.kernel import Kernel
from ..spec.reason import Code
from ._sequences import decay_between, split_chunks

CHUNK = 64


def _convolve() -> Callable[..., Any]:
    def run(x: Tensor, weight: Tensor, bias: Tensor | None = None,
            initial_states: Tensor | None = None, *, activation: str | None = None,
            return_final_states: bool = False) -> Any:
        width, kept = weight.shape[1], weight.shape[1] - 1
        if initial_states is None and not return_final_states:
            return outputs(x, weight, bias, activation, width - 1)
        if initial_states is None:
            tokens = F.pad(x, (width - 1, 0))
        else:
            kept = initial_states.shape[2]
            tokens = torch.cat((initial_states, x), -1)
        out = outputs(tokens[..., kept - width + 1:], weight, bias, activation, 0)
        if not return_final_states:
            return out
        return out, tokens[..., tokens.shape[-1] - kept:].contiguous()

    def outputs(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None,
                padding: int) -> Tensor:
        acc_dtype = torch.promote_types(x.dtype, torch.float32)
        width, inputs = weight.shape[1], x.to(acc_dtype)
        with torch.autocast(x.device.type, enabled=False):
            if x.shape[2] == width and not padding:    # a token: torch's takes longer to begin
                out = (inputs * weight.to(acc_dtype)).sum(-1, keepdim=True)
                out = out if bias is None else out + bias.to(acc_dtype)[:, None]
            elif x.device.type == "cpu" or by_cudnn(inputs):
                out = _sum_of_products(F.pad(inputs, (padding, 0)) if padding else inputs,
                                       weight.to(acc_dtype), bias)
            else:
                out = F.conv1d(inputs, weight.to(acc_dtype)[:, None],
                               None if bias is None else bias.to(acc_dtype), padding=padding,
                               groups=len(weight))[..., :x.shape[2]]
        return (F.silu(out) if activation else out).to(x.dtype).contiguous()

    return run


def by_cudnn(x: Tensor) -> bool:
    """Returns whether torch leaves a convolution on CUDA to cuDNN, which rounds float32 to TF32:
    one channel is no depthwise convolution to it, and its own kernel counts in 32 bits."""
    return x.shape[1] == 1 or x.numel() >= 1 << 31


def _sum_of_products(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns the convolution as products of shifted inputs. On ARM torch's own is wrong where two
    threads call it at once with the same sizes (oneDNN shares what it compiled, with its state),
    and takes 2 to 18 times as long."""
    length = x.shape[2] - weight.shape[1] + 1
    out = x[..., :length] * weight[:, :1]
    for i in range(1, weight.shape[1]):
        out = torch.addcmul(out, x[..., i:i + length], weight[:, i:i + 1])
    return out if bias is None else out + bias.to(out.dtype)[:, None]


def _update() -> Callable[..., Any]:
    def run(state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
            D: Tensor | None = None, z: Tensor | None = None, dt_bias: Tensor | None = None,
            dt_softplus: bool = False) -> tuple[Tensor, Tensor]:
        acc_dtype = torch.promote_types(x.dtype, torch.float32)
        batch, heads, _ = x.shape
        groups = B.shape[1]
        inputs, step, decay = x.to(acc_dtype), dt.to(acc_dtype), A.to(acc_dtype)
        # of a whole head: one number instead of head_dim * state_dim; a gradient has them all
        shared = [dt, A] if dt_bias is None else [dt, A, dt_bias]
        wants_grad = torch.is_grad_enabled() and any(t.requires_grad for t in shared)
        if not wants_grad and A.stride(1) == 0 and all(t.stride(-1) == 0 for t in shared):
            step, decay = step[..., :1], decay[:, :1, :1]
            dt_bias = None if dt_bias is None else dt_bias[:, :1]
        if dt_bias is not None:
            step = step + dt_bias.to(acc_dtype)
        if dt_softplus:
            step = F.softplus(step)
        keys, queries = (t.to(acc_dtype)[:, :, None].expand(-1, -1, heads // groups, -1)
                         .reshape(batch, heads, t.shape[-1]) for t in (B, C))
        new = torch.addcmul(state.to(acc_dtype) * (step[..., None] * decay).exp(),
                            (step * inputs)[..., None], keys[:, :, None])
        with torch.autocast(x.device.type, enabled=False):
            out = (new @ queries[..., None])[..., 0]
        if D is not None:
            out = out + D.to(acc_dtype) * inputs
        if z is not None:
            out = out * F.silu(z.to(acc_dtype))
        return out.to(x.dtype), new.to(state.dtype)

    return run


def _scan() -> Callable[..., Any]:
    def run(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
            z: Tensor | None = None, dt_bias: Tensor | None = None,
            initial_states: Tensor | None = None, *, dt_softplus: bool = False, dt_min: float = 0.0,
            dt_max: float | None = None, return_final_states: bool = False) -> Any:
        # all of it is in float32, also inside the caller's autocast
        with torch.autocast(x.device.type, enabled=False):
            out, state = compute(*prepare(x, dt, A, B, C, dt_bias, initial_states, dt_softplus,
                                          dt_min, dt_max))
            out = finish(out, x.to(out.dtype), D, z).to(x.dtype).contiguous()
        return (out, state) if return_final_states else out

    def compute(x: Tensor, step: Tensor, decay: Tensor, B: Tensor, C: Tensor,
                state: Tensor) -> tuple[Tensor, Tensor]:
        length = x.shape[1]
        size = min(CHUNK, length)
        values, keys, queries, decay = (split_chunks(t, size)
                                        for t in (x * step[..., None], B, C, decay))
        between, total = decay_between(decay), decay.cumsum(-1)
        within = ((queries @ keys.mT) * between) @ values
        from_state = queries * total.exp()[..., None]
        to_end = keys * between[..., -1, :, None]
        added, whole = values.mT @ to_end, total[..., -1].exp()
        outputs = []
        for i in range(values.shape[2]):
            outputs.append(within[:, :, i] + from_state[:, :, i] @ state.mT)
            state = state * whole[:, :, i, None, None] + added[:, :, i]
        return torch.cat(outputs, 2).transpose(1, 2)[:, :length], state

    return run


KERNELS = (
    Kernel("torch.causal_conv1d", causal_conv1d, _convolve, prior=4.0, overhead_us=30.0,
           baseline=True, workspace="12 * batch * channels * seq",
           requires=(r.at_least("seq", 1, Code.EMPTY_INPUT),)),
    Kernel("torch.selective_state_update", selective_state_update, _update, prior=4.0,
           overhead_us=60.0, baseline=True,
           workspace="8 * batch * heads * head_dim * state_dim"),
    Kernel("torch.mamba_chunk_scan", mamba_chunk_scan, _scan, prior=4.0, overhead_us=150.0,
           baseline=True, workspace="16 * batch * seq * heads * (64 + head_dim + state_dim)",
           # cuBLAS adds up this many products in float32 one by one: ten times the eager error
           requires=(r.at_least("seq", 1, Code.EMPTY_INPUT),
                     r.when(r.device("cuda"), r.at_most("state_dim", 1024)))),
)
