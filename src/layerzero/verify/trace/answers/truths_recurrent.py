"""Recurrent layers by torch's own functions, in float32 and one token at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .answer import Answer, Inputs, Outputs, number


def gated_delta_rule(answer: Answer, x: Inputs) -> Outputs:
    """Each token decays the state, replaces what the state holds for its key, and reads it."""
    r, reading = answer.roles, answer.reading
    q, k, v = (x[r[n]].float() for n in ("query", "key", "value"))
    if reading.get("l2norm"):
        q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (q, k))
    q, k = (t.repeat_interleave(v.shape[-2] // t.shape[-2], -2) for t in (q, k))
    shift = x[r["shift"]].float() if r["shift"] else 0.0
    decay = torch.exp(-x[r["log_decay"]].float().exp() * F.softplus(x[r["decay"]].float() + shift))
    tokens = (q * (number(x, r["scale"]) or 1 / math.sqrt(q.shape[-1])), k, v, decay,
              x[r["beta"]].float().sigmoid())
    pool = x[r["state"]].float() if r["state"] else None
    if pool is not None and reading["state"] == "k_last":
        pool = pool.transpose(-1, -2)
    if r["starts"]:
        outputs, states = _packed(tokens, pool, x[r["starts"]].tolist())
    else:
        slots = x[r["indices"]].long() if r["indices"] else slice(None)
        outputs, states = _recur(tokens, pool[slots] if pool is not None else None)
        if r["indices"] and pool is not None:
            updated = pool.clone()
            updated[slots] = states
            states = updated if reading.get("pool") == "updated" else pool
    states = states.transpose(-1, -2) if reading["state"] == "k_last" else states
    return {r["out"]: outputs, r["last"]: states}


def _packed(tokens: tuple[Tensor, ...], pool: Tensor | None,
            starts: list[int]) -> tuple[Tensor, Tensor]:
    done = [_recur(tuple(t[i:j][None] for t in tokens), None if pool is None else pool[n:n + 1])
            for n, (i, j) in enumerate(pairwise(starts))]
    return torch.cat([o[0] for o, _ in done]), torch.cat([s for _, s in done])


def _recur(tokens: tuple[Tensor, ...], state: Tensor | None) -> tuple[Tensor, Tensor]:
    """q, k (batch, tokens, heads, dim), v, decay and beta (batch, tokens, heads); a state is
    (batch, heads, key dim, value dim)."""
    q, k, v, decay, beta = tokens
    if state is None:
        state = q.new_zeros(q.shape[0], v.shape[2], k.shape[-1], v.shape[-1])
    outputs = []
    for t in range(q.shape[1]):
        state = state * decay[:, t, :, None, None]
        held = torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        change = (v[:, t] - held) * beta[:, t, :, None]
        state = state + k[:, t, :, :, None] * change[:, :, None, :]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(outputs, 1) if outputs else torch.zeros_like(v), state


def selective_state_update(answer: Answer, x: Inputs) -> Outputs:
    """One token of Mamba-2 for each sequence; a slot below zero stands for none."""
    r = answer.roles
    tokens = x[r["x"]].float()
    if tokens.dim() != 3:
        raise NotImplementedError("torch is asked for inputs with heads only")
    heads = tokens.shape[1]
    step = _wide(x[r["dt"]], 3) + (_wide(x[r["shift"]], 2) if r["shift"] else 0.0)
    step = F.softplus(step) if answer.reading["softplus"] else step
    decay = torch.exp(step[..., None] * _wide(x[r["decay"]], 3))
    b, c = (x[r[n]].float().repeat_interleave(heads // x[r[n]].shape[1], 1) for n in ("b", "c"))
    outputs, pool = torch.zeros_like(tokens), x[r["state"]].clone()
    slots = x[r["indices"]].tolist() if r["indices"] else list(range(len(tokens)))
    for i, slot in enumerate(slots):
        if slot < 0:
            continue
        state = (pool[slot].float() * decay[i]
                 + (step[i] * tokens[i])[..., None] * b[i][:, None, :])
        outputs[i] = torch.einsum("hds,hs->hd", state, c[i])
        pool[slot] = state.to(pool.dtype)
    outputs = _finish(outputs, tokens, r, x)
    used = torch.tensor([slot >= 0 for slot in slots], device=tokens.device)
    return {r["out"]: outputs.masked_fill(~used[:, None, None], 0.0), r["last"]: pool}


def _finish(outputs: Tensor, tokens: Tensor, r: Mapping[str, Any], x: Inputs) -> Tensor:
    if r["skip"]:
        outputs = outputs + tokens * _wide(x[r["skip"]], 2)
    return outputs * F.silu(x[r["z"]].float()) if r["z"] else outputs


def _wide(t: Tensor, dims: int) -> Tensor:
    """One number for each head, or for each of its elements too: with so many dimensions."""
    return t.float().reshape(*t.shape, *(1,) * (dims - t.dim()))
