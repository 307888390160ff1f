"""Linear attention: the gated delta rule and Mamba-2, token by token and in chunks.

A program has one head of one sequence and a block of its values, and keeps its part of the state in
registers from the first token to the last. Chunks are matrix products: for Mamba-2 those of masked
attention, for the delta rule the WY form, whose triangular system is inverted row by row. All
arithmetic is in float32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.gated_delta_rule import L2_EPS
from .launch import Launcher
from .machine import device_size

CHUNK = 64                                     # tokens of a matrix product
MAX_STAGES = 3                                 # of loads in flight, Triton's own number


@triton.jit
def _softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(x)))


@triton.jit
def update_kernel(
    state_ptr, x_ptr, dt_ptr, a_ptr, b_ptr, c_ptr, d_ptr, z_ptr, bias_ptr, out_ptr, new_ptr, heads,
    groups, dt_batch, dt_head, dt_dim, a_head, a_dim, a_state, d_head, d_dim, bias_head, bias_dim,
    DIM: tl.constexpr, STATE: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
    SKIP: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, SOFTPLUS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)            # of (batch, heads)
    batch, head = row // heads, row % heads
    p = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    n = tl.arange(0, WIDE)
    some, whole = p < DIM, (p < DIM)[:, None] & (n < STATE)[None, :]
    x = tl.load(x_ptr + row * DIM + p, mask=some, other=0.0).to(tl.float32)
    dt = tl.load(dt_ptr + batch * dt_batch + head * dt_head + p * dt_dim, mask=some,
                 other=0.0).to(tl.float32)
    if BIAS:
        dt += tl.load(bias_ptr + head * bias_head + p * bias_dim, mask=some,
                      other=0.0).to(tl.float32)
    if SOFTPLUS:
        dt = _softplus(dt)
    a = tl.load(a_ptr + head * a_head + p[:, None] * a_dim + n[None, :] * a_state, mask=whole,
                other=0.0).to(tl.float32)
    group = batch * groups + head // (heads // groups)
    b = tl.load(b_ptr + group * STATE + n, mask=n < STATE, other=0.0).to(tl.float32)
    c = tl.load(c_ptr + group * STATE + n, mask=n < STATE, other=0.0).to(tl.float32)
    offset = row * DIM * STATE + p[:, None] * STATE + n[None, :]
    state = tl.load(state_ptr + offset, mask=whole, other=0.0).to(tl.float32)
    state = state * tl.exp(dt[:, None] * a) + (dt * x)[:, None] * b[None, :]
    tl.store(new_ptr + offset, state.to(new_ptr.dtype.element_ty), mask=whole)
    out = tl.sum(state * c[None, :], 1)
    if SKIP:
        out += x * tl.load(d_ptr + head * d_head + p * d_dim, mask=some, other=0.0).to(tl.float32)
    if GATE:
        z = tl.load(z_ptr + row * DIM + p, mask=some, other=0.0).to(tl.float32)
        out *= z * tl.sigmoid(z)
    tl.store(out_ptr + row * DIM + p, out.to(out_ptr.dtype.element_ty), mask=some)


@triton.jit
def _last(x, t, CHUNK: tl.constexpr):
    return tl.sum(tl.where(t == CHUNK - 1, x, 0.0), 0)


@triton.jit
def _decays(logs, t, CHUNK: tl.constexpr):
    """From the logarithms of the decays of a chunk: their running sum, the decay from each token to
    each later one, and that from each token to the last.

    The difference of two sums of hundreds has few digits left. So the sums are kept in two parts:
    multiples of 2**-10, which are exact up to 2**14, and a rest that stays small. What is below
    -110, infinity too, leaves nothing of a float32 anyway.
    """
    logs = tl.where(logs < -110.0, -110.0, logs)       # NaN stays NaN
    coarse = tl.floor(logs * 1024) * (1 / 1024)
    large, small = tl.cumsum(coarse, 0), tl.cumsum(logs - coarse, 0)
    # the last elements, not second sums, which round otherwise: at the last token it is exactly 0
    left = tl.exp((_last(large, t, CHUNK) - large) + (_last(small, t, CHUNK) - small))
    between = (large[:, None] - large[None, :]) + (small[:, None] - small[None, :])
    decay = tl.exp(tl.where(t[:, None] >= t[None, :], between, -float("inf")))
    return large + small, decay, left


@triton.jit
def scan_kernel(
    x_ptr, dt_ptr, a_ptr, b_ptr, c_ptr, d_ptr, z_ptr, bias_ptr, first_ptr, out_ptr, last_ptr, seq,
    heads, groups, dt_min, dt_max, DIM: tl.constexpr, STATE: tl.constexpr, BLOCK: tl.constexpr,
    WIDE: tl.constexpr, CHUNK: tl.constexpr, SKIP: tl.constexpr, GATE: tl.constexpr,
    BIAS: tl.constexpr, SOFTPLUS: tl.constexpr, LIMITS: tl.constexpr, FIRST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    batch, head = row // heads, row % heads
    p = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    n, t = tl.arange(0, WIDE), tl.arange(0, CHUNK)
    offset = row * DIM * STATE + p[:, None] * STATE + n[None, :]
    whole = (p < DIM)[:, None] & (n < STATE)[None, :]
    state = tl.zeros((BLOCK, WIDE), tl.float32)
    if FIRST:
        state += tl.load(first_ptr + offset, mask=whole, other=0.0).to(tl.float32)
    a = tl.load(a_ptr + head).to(tl.float32)
    for start in range(0, seq, CHUNK):
        inside = start + t < seq
        token = batch * seq + start + t
        dt = tl.load(dt_ptr + token * heads + head, mask=inside, other=0.0).to(tl.float32)
        if BIAS:
            dt += tl.load(bias_ptr + head).to(tl.float32)
        if SOFTPLUS:
            dt = _softplus(dt)
        if LIMITS:
            dt = tl.minimum(tl.maximum(dt, dt_min), dt_max)
        dt = tl.where(inside, dt, 0.0)             # tokens after the last one change nothing
        values = (token[:, None] * heads + head) * DIM + p[None, :]
        mask = inside[:, None] & (p < DIM)[None, :]
        x = tl.load(x_ptr + values, mask=mask, other=0.0).to(tl.float32)
        group = (token[:, None] * groups + head // (heads // groups)) * STATE + n[None, :]
        known = inside[:, None] & (n < STATE)[None, :]
        b = tl.load(b_ptr + group, mask=known, other=0.0).to(tl.float32)
        c = tl.load(c_ptr + group, mask=known, other=0.0).to(tl.float32)
        total, decay, left = _decays(dt * a, t, CHUNK)
        added = x * dt[:, None]
        scores = tl.dot(c, tl.trans(b), input_precision="ieee") * decay
        out = tl.dot(scores, added, input_precision="ieee")
        out += tl.dot(c * tl.exp(total)[:, None], tl.trans(state), input_precision="ieee")
        state = state * _last(tl.exp(total), t, CHUNK) + tl.dot(
            tl.trans(added), b * left[:, None], input_precision="ieee")
        if SKIP:
            out += x * tl.load(d_ptr + head).to(tl.float32)
        if GATE:
            z = tl.load(z_ptr + values, mask=mask, other=0.0).to(tl.float32)
            out *= z * tl.sigmoid(z)
        tl.store(out_ptr + values, out.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(last_ptr + offset, state, mask=whole)


@triton.jit
def _normalized(x, NORM: tl.constexpr, EPS: tl.constexpr):
    if NORM:
        x = x * tl.rsqrt(tl.sum(x * x, 1) + EPS)[:, None]
    return x


@triton.jit
def delta_token_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, first_ptr, out_ptr, last_ptr, seq, heads, value_heads,
    scale, DIM: tl.constexpr, VALUES: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
    NORM: tl.constexpr, EPS: tl.constexpr, FIRST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)            # of (batch, value heads)
    batch, head = row // value_heads, row % value_heads
    d, j = tl.arange(0, WIDE), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    offset = row * DIM * VALUES + d[:, None] * VALUES + j[None, :]
    whole = (d < DIM)[:, None] & (j < VALUES)[None, :]
    state = tl.zeros((WIDE, BLOCK), tl.float32)
    if FIRST:
        state += tl.load(first_ptr + offset, mask=whole, other=0.0).to(tl.float32)
    for s in range(0, seq):
        token = batch * seq + s
        key = (token * heads + head // (value_heads // heads)) * DIM + d
        q = tl.load(q_ptr + key, mask=d < DIM, other=0.0).to(tl.float32)
        k = tl.load(k_ptr + key, mask=d < DIM, other=0.0).to(tl.float32)
        if NORM:
            q = q * tl.rsqrt(tl.sum(q * q, 0) + EPS)
            k = k * tl.rsqrt(tl.sum(k * k, 0) + EPS)
        value = token * value_heads + head
        v = tl.load(v_ptr + value * VALUES + j, mask=j < VALUES, other=0.0).to(tl.float32)
        beta = tl.load(beta_ptr + value).to(tl.float32)
        state = state * tl.exp(tl.load(g_ptr + value).to(tl.float32))
        change = (v - tl.sum(state * k[:, None], 0)) * beta
        state = state + k[:, None] * change[None, :]
        out = tl.sum(state * (q * scale)[:, None], 0)
        tl.store(out_ptr + value * VALUES + j, out.to(out_ptr.dtype.element_ty), mask=j < VALUES)
    tl.store(last_ptr + offset, state, mask=whole)


@triton.jit
def delta_chunk_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, first_ptr, out_ptr, last_ptr, seq, heads, value_heads,
    scale, DIM: tl.constexpr, VALUES: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
    CHUNK: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr, FIRST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    batch, head = row // value_heads, row % value_heads
    d, j = tl.arange(0, WIDE), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    t = tl.arange(0, CHUNK)
    offset = row * DIM * VALUES + d[:, None] * VALUES + j[None, :]
    whole = (d < DIM)[:, None] & (j < VALUES)[None, :]
    state = tl.zeros((WIDE, BLOCK), tl.float32)
    if FIRST:
        state += tl.load(first_ptr + offset, mask=whole, other=0.0).to(tl.float32)
    for start in range(0, seq, CHUNK):
        inside = start + t < seq
        token = batch * seq + start + t
        key = (token[:, None] * heads + head // (value_heads // heads)) * DIM + d[None, :]
        known = inside[:, None] & (d < DIM)[None, :]
        q = _normalized(tl.load(q_ptr + key, mask=known, other=0.0).to(tl.float32), NORM, EPS)
        k = _normalized(tl.load(k_ptr + key, mask=known, other=0.0).to(tl.float32), NORM, EPS)
        value = token * value_heads + head
        values = value[:, None] * VALUES + j[None, :]
        mask = inside[:, None] & (j < VALUES)[None, :]
        v = tl.load(v_ptr + values, mask=mask, other=0.0).to(tl.float32)
        beta = tl.load(beta_ptr + value, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(g_ptr + value, mask=inside, other=0.0).to(tl.float32)
        total, decay, left = _decays(g, t, CHUNK)
        system = tl.dot(k, tl.trans(k), input_precision="ieee") * decay * beta[:, None]
        system = tl.where(t[:, None] > t[None, :], system, 0.0)
        # the inverse of 1 + system: row i from the rows before it
        inverse = tl.where(t[:, None] == t[None, :], 1.0, 0.0)
        for i in range(1, CHUNK):
            line = tl.sum(tl.where(t[:, None] == i, system, 0.0), 0)
            solved = tl.sum(line[:, None] * inverse, 0)
            inverse -= tl.where(t[:, None] == i, solved[None, :], 0.0)
        predicted = tl.dot(k * tl.exp(total)[:, None], state, input_precision="ieee")
        new = tl.dot(inverse, (v - predicted) * beta[:, None], input_precision="ieee")
        q = q * scale
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * decay
        out = tl.dot(scores, new, input_precision="ieee")
        out += tl.dot(q * tl.exp(total)[:, None], state, input_precision="ieee")
        tl.store(out_ptr + values, out.to(out_ptr.dtype.element_ty), mask=mask)
        state = state * _last(tl.exp(total), t, CHUNK) + tl.dot(
            tl.trans(k * left[:, None]), new, input_precision="ieee")
    tl.store(last_ptr + offset, state, mask=whole)


_update, _scan = Launcher(update_kernel), Launcher(scan_kernel)
_delta_token, _delta_chunk = Launcher(delta_token_kernel), Launcher(delta_chunk_kernel)


def _padded(size: int) -> int:
    """Returns the next power of two that a matrix product takes."""
    return max(16, triton.next_power_of_2(size))


def scan_bytes(block: int, wide: int) -> int:
    """Returns the shared memory of `scan_kernel` with one stage: the operands of its products."""
    return 4 * CHUNK * (2 * max(wide, 32) + block)


def scan_stages(block: int, wide: int, itemsize: int, room: int) -> int:
    """Returns how many stages of loads fit; each holds x, B, C and dt of a chunk."""
    stage = CHUNK * (itemsize * (2 * wide + block) + 32)
    return max(1, min(MAX_STAGES, 1 + (room - scan_bytes(block, wide)) // stage))


def selective_state_update(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    z: Tensor | None = None, dt_bias: Tensor | None = None, dt_softplus: bool = False,
) -> tuple[Tensor, Tensor]:
    state, x, B, C = (t.contiguous() for t in (state, x, B, C))
    out, new = torch.empty_like(x), torch.empty_like(state)
    batch, heads, dim = x.shape
    if out.numel():
        block = min(32, triton.next_power_of_2(dim))
        skip, bias = (x[0] if t is None else t for t in (D, dt_bias))
        _update((batch * heads, -(-dim // block)), (
            state, x, dt, A, B, C, skip, x if z is None else z.contiguous(), bias, out, new, heads,
            B.shape[1], *dt.stride(), *A.stride(), *skip.stride(), *bias.stride()), {
            "DIM": dim, "STATE": B.shape[2], "BLOCK": block,
            "WIDE": triton.next_power_of_2(B.shape[2]), "SKIP": D is not None,
            "GATE": z is not None, "BIAS": dt_bias is not None, "SOFTPLUS": dt_softplus,
            "num_warps": 4})
    return out, new


def mamba_chunk_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    z: Tensor | None = None, dt_bias: Tensor | None = None, initial_states: Tensor | None = None, *,
    dt_softplus: bool = False, dt_min: float = 0.0, dt_max: float | None = None,
    return_final_states: bool = False,
) -> Any:
    x, dt, A, B, C = (t.contiguous() for t in (x, dt, A, B, C))
    (batch, seq, heads, dim), (groups, states) = x.shape, B.shape[2:]
    out = torch.empty_like(x)
    last = torch.empty((batch, heads, dim, states), dtype=torch.float32, device=x.device)
    if out.numel():
        block, wide = min(64, _padded(dim)), _padded(states)
        stages = scan_stages(block, wide, x.element_size(), device_size(x.device)[1])
        D_, z_, bias, first = (x if t is None else t.contiguous()
                               for t in (D, z, dt_bias, initial_states))
        _scan((batch * heads, -(-dim // block)), (
            x, dt, A, B, C, D_, z_, bias, first, out, last, seq, heads, groups, float(dt_min),
            torch.finfo(torch.float32).max if dt_max is None else float(dt_max)), {
            "DIM": dim, "STATE": states, "BLOCK": block, "WIDE": wide, "CHUNK": CHUNK,
            "SKIP": D is not None, "GATE": z is not None, "BIAS": dt_bias is not None,
            "SOFTPLUS": dt_softplus, "LIMITS": dt_min > 0.0 or dt_max is not None,
            "FIRST": initial_states is not None, "num_warps": 4, "num_stages": stages})
    return (out, last) if return_final_states else out


def _delta(launch: Any, chunk: dict[str, int], q: Tensor, k: Tensor, v: Tensor, g: Tensor,
           beta: Tensor, scale: float | None, initial_state: Tensor | None, final: bool,
           norm: bool) -> Any:
    q, k, v, g, beta = (t.contiguous() for t in (q, k, v, g, beta))
    (batch, seq, heads, dim), (value_heads, values) = q.shape, v.shape[2:]
    out = torch.empty_like(v)
    last = torch.empty((batch, value_heads, dim, values), dtype=torch.float32, device=v.device)
    if out.numel():
        block = min(64 if chunk else 32, _padded(values))
        launch((batch * value_heads, -(-values // block)), (
            q, k, v, g, beta, q if initial_state is None else initial_state.contiguous(), out, last,
            seq, heads, value_heads, float(dim ** -0.5 if scale is None else scale)), {
            "DIM": dim, "VALUES": values, "WIDE": _padded(dim), "BLOCK": block, **chunk,
            "NORM": norm, "EPS": L2_EPS, "FIRST": initial_state is not None, "num_warps": 4})
    return (out, last) if final else out


def delta_rule_tokens(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, *, output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
) -> Any:
    return _delta(_delta_token, {}, q, k, v, g, beta, scale, initial_state, output_final_state,
                  use_qk_l2norm_in_kernel)


def delta_rule_chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, *, output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
) -> Any:
    return _delta(_delta_chunk, {"CHUNK": CHUNK}, q, k, v, g, beta, scale, initial_state,
                  output_final_state, use_qk_l2norm_in_kernel)
