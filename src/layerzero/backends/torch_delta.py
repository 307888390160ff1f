"""The gated delta rule with torch: tokens in chunks, so that most of it is matrix products.

Within a chunk every token's change of the state depends on those before it: a triangular system,
solved for all chunks at once (the WY form of Gated DeltaNet). The state goes from chunk to chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ops.gated_delta_rule import L2_EPS, prepare
from ..ops.gated_delta_rule import OP as gated_delta_rule
from ..spec import rules as r
from ..spec.kernel import Kernel
from ..spec.reason import Code
from ._sequences import decay_between, split_chunks

CHUNK = 64


def _chunked() -> Callable[..., Any]:
    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
            initial_state: Tensor | None = None, *, output_final_state: bool = False,
            use_qk_l2norm_in_kernel: bool = False) -> Any:
        # all of it is in float32, also inside the caller's autocast
        with torch.autocast(q.device.type, enabled=False):
            return compute(q, k, v, g, beta, scale, initial_state, output_final_state,
                           use_qk_l2norm_in_kernel)

    def compute(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None,
                initial_state: Tensor | None, final: bool, normalize: bool) -> Any:
        length = q.shape[1]
        q, k, value, g, beta, state = prepare(q, k, v, g, beta, scale, initial_state, normalize)
        size = min(CHUNK, length)
        q, k, value, g, beta = (split_chunks(t, size) for t in (q, k, value, g, beta))
        decay, total = decay_between(g), g.cumsum(-1)
        system = (beta[..., None] * (k @ k.mT) * decay).tril(-1)
        solved = torch.linalg.solve_triangular(
            system, torch.cat((value, k * total.exp()[..., None]), -1) * beta[..., None],
            upper=False, unitriangular=True)
        change, reads = solved.split((value.shape[-1], k.shape[-1]), -1)
        within = (q @ k.mT) * decay
        from_state = q * total.exp()[..., None]
        to_end = k * decay[..., -1, :, None]
        outputs = []
        for i in range(q.shape[2]):
            new = change[:, :, i] - reads[:, :, i] @ state
            outputs.append(from_state[:, :, i] @ state + within[:, :, i] @ new)
            state = (state * total[:, :, i, -1, None, None].exp() + to_end[:, :, i].mT @ new)
        out = torch.cat(outputs, 2).transpose(1, 2)[:, :length].to(v.dtype).contiguous()
        return (out, state) if final else out

    return run


def _token() -> Callable[..., Any]:
    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
            initial_state: Tensor | None = None, *, output_final_state: bool = False,
            use_qk_l2norm_in_kernel: bool = False) -> Any:
        acc_dtype = torch.promote_types(q.dtype, torch.float32)
        (batch, _, heads, dim), value_heads = q.shape, v.shape[2]
        both = torch.cat((q, k), 1).to(acc_dtype)
        if use_qk_l2norm_in_kernel:
            both = both * torch.rsqrt(both.square().sum(-1, keepdim=True) + L2_EPS)
        both = both.repeat_interleave(value_heads // heads, 2).transpose(1, 2).flatten(0, 1)
        query, key = both[:, :1] * (dim ** -0.5 if scale is None else scale), both[:, 1:]
        value = v.to(acc_dtype).transpose(1, 2).flatten(0, 1)
        strength = beta.to(acc_dtype).reshape(-1, 1, 1)
        with torch.autocast(q.device.type, enabled=False):
            if initial_state is None:
                state = key.mT @ (value * strength)
            else:
                decay = g.to(acc_dtype).exp().reshape(-1, 1, 1)
                state = initial_state.to(acc_dtype).flatten(0, 1) * decay
                state = torch.baddbmm(state, key.mT, (value - key @ state) * strength)
            out = (query @ state).view(batch, value_heads, 1, -1).transpose(1, 2).to(v.dtype)
        state = state.view(batch, value_heads, dim, -1)
        return (out.contiguous(), state) if output_final_state else out.contiguous()

    return run


KERNELS = (
    Kernel("torch.gated_delta_rule_token", gated_delta_rule, _token, prior=6.0, overhead_us=60.0,
           baseline=True, workspace="16 * batch * value_heads * head_dim * value_dim",
           requires=(r.equals("seq", 1), r.at_least("batch", 1, Code.EMPTY_INPUT))),
    Kernel("torch.gated_delta_rule", gated_delta_rule, _chunked, prior=4.0, overhead_us=150.0,
           baseline=True, workspace="16 * batch * seq * value_heads * (64 + head_dim + value_dim)",
           requires=(r.at_least("seq", 1, Code.EMPTY_INPUT),)),
)
