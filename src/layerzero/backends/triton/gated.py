"""The feed-forward layer: torch's matmuls, and between them activation and gating in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear

from .dependent import wait_for_previous, waits
from .launch import Launcher

BLOCK = 2048
KINDS = {"swiglu": 0, "geglu": 1, "geglu_tanh": 2, "reglu": 3}


@triton.jit
def _activate(x, KIND: tl.constexpr):
    if KIND == 0:
        return x * tl.sigmoid(x)
    if KIND == 1:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    if KIND == 2:                                  # 0.5 (1 + tanh(y)) = sigmoid(2 y)
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return tl.maximum(x, 0.0)


@triton.jit
def gate_kernel(gate_ptr, up_ptr, out_ptr, gate_row, up_row, inner, KIND: tl.constexpr,
                BLOCK: tl.constexpr, WAIT: tl.constexpr):
    wait_for_previous(WAIT)
    # the first axis of a grid alone may be longer than 65,535
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    gate = tl.load(gate_ptr + row * gate_row + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_row + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * inner + column,
             (_activate(gate, KIND) * up).to(out_ptr.dtype.element_ty), mask=inside)


_launch = Launcher(gate_kernel)


def gate(gates: Tensor, ups: Tensor, activation: str, block: int = BLOCK, warps: int = 4) -> Tensor:
    """Returns act(gates) * ups for two (rows, inner) tensors with dense rows."""
    rows, inner = gates.shape
    out = torch.empty((rows, inner), dtype=gates.dtype, device=gates.device)
    if out.numel():
        block = min(block, triton.next_power_of_2(inner))
        _launch((rows, -(-inner // block)), (gates, ups, out, gates.stride(0), ups.stride(0),
                                             inner),
                {"KIND": KINDS[activation], "BLOCK": block, "WAIT": waits(gates.device),
                 "num_warps": warps})
    return out


def mlp(x: Tensor, weight_in: Tensor, weight_down: Tensor, activation: str = "swiglu", *,
        weight_up: Tensor | None = None, bias_in: Tensor | None = None,
        bias_up: Tensor | None = None, bias_down: Tensor | None = None) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    first = linear(flat, weight_in, bias_in)
    gates, ups = (first.chunk(2, -1) if weight_up is None
                  else (first, linear(flat, weight_up, bias_up)))
    return linear(gate(gates, ups, activation), weight_down,
                  bias_down).view(*x.shape[:-1], weight_down.shape[0])
