"""Independent answers to a definition: torch's own functions, FlashInfer, SGLang. Nothing of lz
computes here.

Torch's run everywhere, in float32 and one sequence, one expert at a time. FlashInfer's and SGLang's
need their library and its hardware. What one of them cannot do, or is not here to do, is said.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .answer import Answer, Inputs, Outputs
from .truth import Compute, Truth
from .truths_libraries import flashinfer, sglang
from .truths_recurrent import gated_delta_rule, selective_state_update

BLOCK = 128                                    # elements that usually share a scale


def truths(answer: Answer, device: str = "cpu") -> tuple[Truth, ...]:
    """Torch, FlashInfer, SGLang: each with what it computes, or why it does not."""
    own = _TORCH.get(answer.kind)
    if own is None:
        first = Truth("torch", None,
                      f"torch has no function of its own for this ({answer.kind or 'unknown'})")
    elif answer.kind == "rope" and not answer.roles["plain"]:
        first = Truth("torch", None,
                      "its inputs have a form that torch's own functions are not asked in here")
    else:
        first = Truth("torch", own)
    return (first, flashinfer(answer, device), sglang(answer, device, _sglang_moe))


# Attention, one sequence at a time.

def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None,
            window: int = -1, cap: float = 0.0,
            slopes: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """q (queries, heads, dim), k, v (keys, kv heads, dim): attention and natural log-sum-exp."""
    q, k, v = (t.float().transpose(0, 1) for t in (q, k, v))
    k, v = (t.expand(q.shape[0], -1, -1) if t.shape[0] == 1
            else t.repeat_interleave(q.shape[0] // t.shape[0], 0) for t in (k, v))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    i, j = torch.arange(q.shape[1], device=q.device)[:, None], torch.arange(k.shape[1],
                                                                            device=q.device)
    i = i + k.shape[1] - q.shape[1]
    seen = (j <= i) if causal else torch.ones_like(i + j, dtype=torch.bool)
    seen = seen & (j >= i - window) if window >= 0 else seen
    scores = q @ k.transpose(1, 2) * scale
    scores = cap * torch.tanh(scores / cap) if cap else scores
    if slopes is not None:
        scores = scores - slopes.float()[:, None, None] * (i - j).abs()
    scores = scores.masked_fill(~seen, -math.inf)
    lse = scores.logsumexp(-1)
    out = (F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
           if not cap and slopes is None else scores.softmax(-1) @ v)
    out = out.masked_fill(lse.isinf()[..., None], 0.0)          # a query that sees no key
    return out.transpose(0, 1), lse.transpose(0, 1)


def _spread(answer: Answer, rows: int, parts: Iterator[tuple[slice, tuple[Tensor, Tensor]]],
            like: Tensor) -> Outputs:
    """The sequences' results in their rows."""
    r = answer.roles
    out: Tensor | None = None
    lse = torch.full((rows, like.shape[1]), -math.inf, device=like.device)
    for where, (o, part) in parts:
        if out is None:
            out = torch.zeros((rows, *o.shape[1:]), device=like.device)
        out[where], lse[where] = o, part
    assert out is not None
    return {r["out"]: out, r["lse"]: lse / math.log(2) if answer.reading.get("lse_base") == "2"
            else lse}


def _tokens(table: Any, x: Inputs, page_size: int, row: int) -> Tensor:
    """Which slots of the flattened cache hold the keys of a sequence, in order."""
    if table.table:
        n = int(x[table.lengths][row])
        pages = x[table.table][row][:-(-n // page_size)]
    else:
        first, last = (int(i) for i in x[table.indptr][row:row + 2])
        pages = x[table.indices][first:last]
        n = len(pages) * page_size
        if table.last and len(pages):
            n -= page_size - int(x[table.last][row])
    slots = pages.long()[:, None] * page_size + torch.arange(page_size, device=pages.device)
    return slots.reshape(-1)[:n]


def _rows(x: Inputs, starts: str, row: int) -> slice:
    return slice(*(int(i) for i in x[starts][row:row + 2])) if starts else slice(row, row + 1)


def _number(x: Inputs, name: str) -> float | None:
    return None if not name else float(x[name])


def _limits(answer: Answer, x: Inputs) -> tuple[int, float]:
    """The window and the cap: an input's, else as it is read."""
    r, reading = answer.roles, answer.reading
    window, cap = _number(x, r["window"]), _number(x, r["cap"])
    return (int(reading.get("window_left", -1) if window is None else window),
            float(reading.get("softcap", 0.0) if cap is None else cap))


def _stored(cache: Tensor, scale: Any) -> Tensor:
    """What a cache of codes holds; a scale is one number, or one for each head of (..., heads,
    dim)."""
    if scale is None:
        return cache
    by = torch.as_tensor(scale, dtype=torch.float32, device=cache.device)
    return cache.float() * (by.reshape(-1, 1) if by.numel() > 1 else by)


def _count(x: Inputs, table: Any) -> int:
    return len(x[table.table]) if table.table else len(x[table.indptr]) - 1


def _paged(answer: Answer, x: Inputs) -> Outputs:
    r, table = answer.roles, answer.roles["table"]
    k, v = (x[r["both"]][:, 0], x[r["both"]][:, 1]) if r["both"] else (x[r["key"]], x[r["value"]])
    if r["layout"] == "HND":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    size, q = k.shape[1], x[r["query"]]
    k, v = (_stored(t.flatten(0, 1), x.get(r[scale])) for t, scale in (
        (k, "k_scale"), (v, "v_scale")))
    window, cap = _limits(answer, x)
    causal = answer.reading.get("is_causal", True)

    def parts() -> Iterator[tuple[slice, tuple[Tensor, Tensor]]]:
        for row in range(_count(x, table)):
            where, mine = _rows(x, r["starts"], row), _tokens(table, x, size, row)
            yield where, _attend(q[where], k[mine], v[mine], causal, _number(x, r["scale"]),
                                 window, cap)

    return _spread(answer, len(q), parts(), q)


def _latent(answer: Answer, x: Inputs,
            sequences: Callable[[int], Iterator[tuple[slice, Tensor]]]) -> Outputs:
    r = answer.roles
    q = torch.cat((x[r["q_nope"]], x[r["q_pe"]]), -1)
    ckv, kpe = x[r["ckv"]], x[r["kpe"]]
    size = ckv.shape[1]
    v = ckv.flatten(0, 1)[:, None]
    k = torch.cat((v, kpe.flatten(0, 1)[:, None]), -1)
    causal = answer.reading.get("is_causal", False)
    return _spread(answer, len(q),
                   ((w, _attend(q[w], k[mine], v[mine], causal, _number(x, r["scale"])))
                    for w, mine in sequences(size)), q)


def _mla(answer: Answer, x: Inputs) -> Outputs:
    r, table = answer.roles, answer.roles["table"]
    return _latent(answer, x, lambda size: ((_rows(x, r["starts"], i), _tokens(table, x, size, i))
                                            for i in range(_count(x, table))))


def _sparse(answer: Answer, x: Inputs) -> Outputs:
    chosen = x[answer.roles["chosen"]]
    return _latent(answer, x, lambda size: ((slice(i, i + 1), row[row >= 0].long())
                                            for i, row in enumerate(chosen)))


def _ragged(answer: Answer, x: Inputs) -> Outputs:
    r = answer.roles
    q, k, v = (x[r[name]] for name in ("query", "key", "value"))
    causal = answer.reading.get("is_causal", True)
    window, cap = _limits(answer, x)

    def parts() -> Iterator[tuple[slice, tuple[Tensor, Tensor]]]:
        for row in range(len(x[r["starts"]]) - 1):
            where, mine = _rows(x, r["starts"], row), _rows(x, r["starts_k"], row)
            yield where, _attend(q[where], k[mine], v[mine], causal, _number(x, r["scale"]),
                                 window, cap, x.get(r["slopes"]))

    return _spread(answer, len(q), parts(), q)


# Layers.

def _rms_norm(answer: Answer, x: Inputs) -> Outputs:
    r, reading = answer.roles, answer.reading
    total = x[r["x"]].float() + (x[r["residual"]].float() if r["residual"] else 0.0)
    weight = x[r["weight"]].float() + reading.get("offset", 0.0) if r["weight"] else None
    eps = float(x[r["eps"]]) if r["eps"] else reading["eps"]
    return {r["out"]: F.rms_norm(total, total.shape[-1:], weight, eps), r["total"]: total}


def _gemm(answer: Answer, x: Inputs) -> Outputs:
    r = answer.roles
    a, b = (_values(x[r[n]], _scales(x, r[f"{n}_scale"], n == "a" and r["a_transposed"]))
            for n in ("a", "b"))
    weight = b.transpose(-1, -2) if r["transposed"] else b
    product = a @ weight.transpose(-1, -2) if weight.dim() == 3 else F.linear(a, weight)
    return {r["out"]: product + x[r["bias"]].float() if r["bias"] else product}


def _rope(answer: Answer, x: Inputs) -> Outputs:
    """As a product of complex numbers."""
    r = answer.roles
    table = x[r["joint"]] if not r["positions"] else x[r["joint"]][x[r["positions"]].long()]
    cos, sin = table.double().chunk(2, -1)
    turn = torch.complex(cos, sin).unsqueeze(-2)
    half = cos.shape[-1]

    def rotated(t: Tensor) -> Tensor:
        head, tail = t[..., :2 * half].double(), t[..., 2 * half:].double()
        interleaved = answer.reading["style"] == "interleaved"
        pairs = (head.unflatten(-1, (half, 2)) if interleaved
                 else head.unflatten(-1, (2, half)).transpose(-1, -2))
        done = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
        done = done.flatten(-2) if interleaved else done.transpose(-1, -2).flatten(-2)
        return torch.cat((done, tail), -1)

    return {r[f"{n}_out"]: rotated(x[r[n]]) for n in ("q", "k") if r[n]}


# Mixtures of experts, token by token.

_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu, "geglu": F.gelu, "reglu": F.relu,
    "geglu_tanh": lambda t: F.gelu(t, approximate="tanh")}


def _moe(answer: Answer, x: Inputs) -> Outputs:
    r, reading = answer.roles, answer.reading
    ids, weights = _chosen(r, reading, x)
    first = int(x[r["offset"]]) if r["offset"] else 0
    tokens = _values(x[r["x"]], x[r["x_scale"]].T if r["x_transposed"] else x.get(r["x_scale"]))
    out = torch.zeros(len(ids), tokens.shape[-1], device=tokens.device)
    for t, slot in ((t, s) for t in range(len(ids)) for s in range(ids.shape[1])):
        expert, weight = int(ids[t, slot]) - first, float(weights[t, slot])
        if not 0 <= expert < len(x[r["second"]]):
            continue
        token = tokens[t] * weight if reading["weight_on"] == "input" else tokens[t]
        up, gate = (half * by for half, by in zip(_halves(r, reading, x, expert, token),
                                                  _factors(r, x, expert)))
        down = _weights(r, x, r["second"], r["second_scale"], expert)
        act = _ACTIVATIONS[reading.get("activation", "swiglu")]
        result = down @ (act(gate) * up) * (float(x[r["out_scale"]][expert]) if r["out_scale"]
                                               else 1.0)
        out[t] += result if reading["weight_on"] == "input" else result * weight
    return {r["out"]: out}


def _chosen(r: Mapping[str, Any], reading: Mapping[str, Any], x: Inputs) -> tuple[Tensor, Tensor]:
    if r["ids"] and r["weights"]:
        return x[r["ids"]], x[r["weights"]].float()
    if r["ids"]:
        packed = x[r["ids"]]
        # bfloat16 is the high half of a float32
        return packed >> 16, (packed << 16).view(torch.float32)
    logits = x[r["logits"]].float()
    scores = logits.sigmoid() if reading["scoring"] == "sigmoid" else logits.softmax(-1)
    choice = (scores + x[r["bias"]].float().reshape(-1) if reading.get("bias") == "choice"
              else scores)
    counts = reading.get("groups", (1, 1))
    top_k, groups, kept = (int(x[r["count_inputs"][n]]) if r["count_inputs"][n] else d for n, d in (
        ("top_k", reading.get("top_k", 0)), ("n_group", counts[0]), ("topk_group", counts[1])))
    if groups > 1:
        parted = choice.view(len(choice), groups, -1)
        worth = (parted.topk(2, -1).values.sum(-1) if reading.get("bias") == "choice"
                 else parted.amax(-1))
        best = worth.topk(kept, -1).indices
        mask = torch.zeros_like(worth).scatter_(1, best, 1.0)[..., None].expand_as(parted).reshape(
            choice.shape)
        choice = choice.masked_fill(mask == 0, -math.inf)
    ids = choice.topk(top_k, -1).indices
    weights = scores.gather(1, ids)
    if reading["normalize"]:
        weights = weights / weights.sum(-1, keepdim=True)
    return ids, weights * (float(x[r["factor"]]) if r["factor"] else 1.0)


def _halves(r: Mapping[str, Any], reading: Mapping[str, Any], x: Inputs, expert: int, token: Tensor
            ) -> tuple[Tensor, Tensor]:
    """(up, gate) of a token."""
    both = _weights(r, x, r["first"], r["first_scale"], expert) @ token
    if r["gate"]:
        return both, _weights(r, x, r["gate"], "", expert) @ token
    a, b = both.chunk(2)
    return (b, a) if reading["gate_first"] else (a, b)


def _factors(r: Mapping[str, Any], x: Inputs, expert: int) -> tuple[float, float]:
    up = float(x[r["up_scale"]][expert]) if r["up_scale"] else 1.0
    return up, float(x[r["gate_scale"]][expert]) if r["gate_scale"] else up


def _weights(r: Mapping[str, Any], x: Inputs, name: str, scale: str, expert: int) -> Tensor:
    weight = _values(x[name][expert], x[scale][expert] if scale else None)
    return weight.T if r["transposed"] else weight


def _values(stored: Tensor, scales: Tensor | None) -> Tensor:
    """Stored numbers times their scales, each for an equal part of rows and columns."""
    values = stored.float()
    if scales is None or scales.numel() == 1:
        return values if scales is None else values * scales.reshape(())
    by = scales.float().reshape(*scales.shape, *(1,) * (values.dim() - scales.dim()))
    for axis, size in enumerate(values.shape):
        count = by.shape[axis]
        block = BLOCK if -(-size // BLOCK) == count else -(-size // count)
        by = by.repeat_interleave(block, axis).narrow(axis, 0, size)
    return values * by


def _scales(x: Inputs, name: str, transposed: bool) -> Tensor | None:
    if not name:
        return None
    scales = torch.as_tensor(x[name])
    return scales.T if transposed else scales


def _sglang_moe(answer: Answer, x: Inputs) -> Outputs:
    """SGLang's fused experts in 16 bits, given the routing and the dequantized weights."""
    fused = importlib.import_module("sglang.srt.layers.moe.fused_moe_triton.fused_moe")
    runner = importlib.import_module("sglang.srt.layers.moe.moe_runner")
    routing = importlib.import_module("sglang.srt.layers.moe.topk")
    r, reading = answer.roles, answer.reading
    if reading["weight_on"] == "input" or r["up_scale"] or r["out_scale"] \
            or reading.get("activation", "swiglu") != "swiglu":
        raise NotImplementedError("sglang is asked for neither weights on the input nor scales of "
                                  "results")
    ids, weights = _chosen(r, reading, x)
    first, count = int(x[r["offset"]]) if r["offset"] else 0, len(x[r["second"]])
    local = ids - first
    mine = (local >= 0) & (local < count)
    tokens = _values(x[r["x"]], x[r["x_scale"]].T if r["x_transposed"] else x.get(r["x_scale"]))
    up_and_gate = []
    for expert in range(count):
        both = _weights(r, x, r["first"], r["first_scale"], expert)
        gate = _weights(r, x, r["gate"], "", expert) if r["gate"] else None
        a, b = (gate, both) if gate is not None else both.chunk(2)
        up_and_gate.append(torch.cat((a, b) if gate is not None or reading["gate_first"]
                                     else (b, a)))
    w1 = torch.stack(up_and_gate).bfloat16()
    w2 = torch.stack([_weights(r, x, r["second"], r["second_scale"], e)
                      for e in range(count)]).bfloat16()
    topk = routing.StandardTopKOutput(
        torch.where(mine, weights, 0.0).float().contiguous(),
        torch.where(mine, local, 0).int().contiguous(), torch.zeros(
            len(ids), count, device=tokens.device))
    out = fused.fused_experts(tokens.bfloat16().contiguous(), w1, w2, topk,
                              runner.MoeRunnerConfig(inplace=False))
    return {r["out"]: out}


_TORCH: Mapping[str, Compute] = {"paged": _paged, "mla": _mla, "sparse": _sparse, "ragged": _ragged,
                                 "rms_norm": _rms_norm, "gemm": _gemm, "rope": _rope, "moe": _moe,
                                 "gated_delta_rule": gated_delta_rule,
                                 "selective_state_update": selective_state_update}
