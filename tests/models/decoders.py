"""Small decoder models, each twice: in plain torch without a cache, and from lz calls with one.

One description serves all of them: Llama (RMSNorm, RoPE, GQA, SwiGLU), GPT (LayerNorm, learned
positions, GELU), a mixture of experts, and multi-head latent attention. `plain_logits` computes a
whole sequence at once with formulas written here, in the dtype of its weights: in float64 it is the
truth, in a narrower dtype what eager torch is off by. `Decoder` is the same model from lz calls; a
*memory* decides how tokens are laid out and how the past is kept.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import layerzero as lz

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Config:
    vocab: int = 320
    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    inner: int = 96
    max_positions: int = 1200
    window: int | None = None      # how many keys a token sees, itself included
    norm: str = "rms"              # or "layer"
    positions: str = "rope"        # or "learned"
    bias: bool = False             # in the norms, the projections and the feed-forward layer
    tied: bool = False             # the head is the embedding
    experts: int = 0               # 0: one dense feed-forward layer
    top_k: int = 2
    # > 1: DeepSeek's routing, by sigmoid, with groups, a correction and a shared expert
    groups: int = 1
    # > 0: multi-head latent attention with keys and values compressed to this width
    latent: int = 0
    # of latent attention: the part of a head that carries the position
    rope_dim: int = 8

    @property
    def key_dim(self) -> int:
        return self.head_dim + self.rope_dim if self.latent else self.head_dim

    @property
    def window_left(self) -> int:
        return -1 if self.window is None else self.window - 1


SHAPES = {
    "llama": Config(),
    "gpt": Config(norm="layer", positions="learned", kv_heads=4, bias=True, tied=True),
    "moe": Config(experts=8),
    "mla": Config(latent=32, kv_heads=4),
    "deepseek": Config(latent=32, kv_heads=4, experts=8, groups=4),
}


# Weights.

def make_weights(c: Config, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> Weights:
    gen = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen) / math.sqrt(shape[-1])

    def near(centre: float, *shape: int) -> Tensor:
        return centre + 0.1 * (2 * torch.rand(shape, generator=gen) - 1)

    # Of a tied embedding the layers must outweigh what a token adds of itself, or every token would
    # be its own echo.
    w = {"embed": torch.randn(c.vocab, c.hidden, generator=gen) * (0.1 if c.tied else 1.0),
         "norm": near(1.0, c.hidden)}
    if not c.tied:
        w["head"] = matrix(c.vocab, c.hidden)
    if c.positions == "learned":
        w["positions"] = 0.5 * torch.randn(c.max_positions, c.hidden, generator=gen)
    for i in range(c.layers):
        made = {"attn_norm": near(1.0, c.hidden), "mlp_norm": near(1.0, c.hidden),
                "out": matrix(c.hidden, c.heads * c.head_dim)}
        if c.latent:
            made |= {"q": matrix(c.heads * c.key_dim, c.hidden),
                     "kv_down": matrix(c.latent + c.rope_dim, c.hidden),
                     "kv_norm": near(1.0, c.latent),
                     "kv_up": matrix(c.heads, 2 * c.head_dim, c.latent)}
        else:
            made["qkv"] = matrix((c.heads + 2 * c.kv_heads) * c.head_dim, c.hidden)
        if c.experts:
            made |= {"router": matrix(c.experts, c.hidden),
                     "experts_in": matrix(c.experts, 2 * c.inner, c.hidden),
                     "experts_down": matrix(c.experts, c.hidden, c.inner)}
        if c.groups > 1:
            made["correction"] = near(0.0, c.experts)
        if not c.experts or c.groups > 1:
            made |= {"in": matrix(c.inner if c.bias else 2 * c.inner, c.hidden),
                     "down": matrix(c.hidden, c.inner)}
        if c.bias:
            made |= {f"{name}.bias": near(0.0, made[name].shape[0])
                     for name in ("attn_norm", "mlp_norm", "qkv", "out", "in", "down")}
        w |= {f"{i}.{name}": t for name, t in made.items()}
    if c.bias:
        w["norm.bias"] = near(0.0, c.hidden)
    if c.experts and c.groups == 1:
        _separate_experts(c, w, gen)
    return {name: t.to(device=device, dtype=dtype) for name, t in w.items()}


def _separate_experts(c: Config, w: Weights, gen: torch.Generator) -> None:
    """Which expert serves a token is a step function: a rounding that flips a choice changes the
    logits by any amount, in eager torch as well. So the first columns of the stream hold each
    token's taste in experts, far apart, and no layer writes to them; the router of every layer
    reads them in another order."""
    taste = torch.linspace(-2.0, 2.0, c.experts)
    w["embed"][:, :c.experts] = torch.stack([taste[torch.randperm(c.experts, generator=gen)]
                                             for _ in range(c.vocab)])
    for i in range(c.layers):
        w[f"{i}.router"].zero_()
        w[f"{i}.router"][:, :c.experts] = torch.eye(c.experts).roll(i, 0)
        w[f"{i}.out"][:c.experts] = 0.0
        w[f"{i}.experts_down"][:, :c.experts] = 0.0


# The model in plain torch.

def plain_logits(c: Config, w: Weights, tokens: Sequence[int]) -> Tensor:
    """(tokens, vocab): the whole of one sequence at once, without a cache."""
    x = w["embed"][torch.tensor(tokens, device=w["embed"].device)]
    if c.positions == "learned":
        x = x + w["positions"][:len(tokens)]
    for i in range(c.layers):
        layer = {name.removeprefix(f"{i}."): t for name, t in w.items() if name.startswith(f"{i}.")}
        normed = _plain_norm(c, x, layer, "attn_norm")
        q, k, v = _plain_latent(c, layer, normed) if c.latent else _plain_heads(c, layer, normed)
        x = x + F.linear(_plain_attention(c, q, k, v).flatten(1), layer["out"],
                         layer.get("out.bias"))
        x = x + _plain_feed_forward(c, layer, _plain_norm(c, x, layer, "mlp_norm"))
    return F.linear(_plain_norm(c, x, w, "norm"), w["embed"] if c.tied else w["head"])


def _plain_norm(c: Config, x: Tensor, w: Weights, name: str) -> Tensor:
    if c.norm == "rms":
        return F.rms_norm(x, x.shape[-1:], w[name], 1e-6)
    return F.layer_norm(x, x.shape[-1:], w[name], w.get(f"{name}.bias"), 1e-5)


def _plain_heads(c: Config, w: Weights, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = F.linear(x, w["qkv"], w.get("qkv.bias")).unflatten(-1, (-1, c.head_dim))
    q, k, v = rows.split((c.heads, c.kv_heads, c.kv_heads), 1)
    if c.positions == "rope":
        half = c.head_dim // 2
        q, k = (_plain_turn(t, t[..., :half], t[..., half:], lambda a, b: torch.cat((a, b), -1))
                for t in (q, k))
    return q, *(t.repeat_interleave(c.heads // c.kv_heads, 1) for t in (k, v))


def _plain_latent(c: Config, w: Weights, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q = F.linear(x, w["q"]).unflatten(-1, (c.heads, c.key_dim))
    compressed, shared = F.linear(x, w["kv_down"]).split((c.latent, c.rope_dim), -1)
    compressed = F.rms_norm(compressed, (c.latent,), w["kv_norm"], 1e-6)
    k, v = torch.einsum("tl,hdl->thd", compressed, w["kv_up"]).chunk(2, -1)
    q_pe, k_pe = (_plain_turn(t, t[..., 0::2], t[..., 1::2],
                              lambda a, b: torch.stack((a, b), -1).flatten(-2))
                  for t in (q[..., c.head_dim:], shared[:, None]))
    return torch.cat((q[..., :c.head_dim], q_pe), -1), torch.cat((k, k_pe.expand(-1, c.heads, -1)),
                                                                 -1), v


def _plain_turn(x: Tensor, first: Tensor, second: Tensor,
                joined: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """RoPE of (tokens, heads, dim).

    The angles are float32, as they are where models are trained.
    """
    half = x.shape[-1] // 2
    turns = 1.0 / (10000.0 ** (torch.arange(0, 2 * half, 2).float() / (2 * half)))
    angles = torch.arange(len(x)).float()[:, None, None] * turns
    cos, sin = angles.cos().to(x.device), angles.sin().to(x.device)
    return joined(first * cos - second * sin, second * cos + first * sin).to(x.dtype)


def _plain_attention(c: Config, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    positions = torch.arange(len(q), device=q.device)
    distance = positions[:, None] - positions
    seen = (distance >= 0) & (distance < (c.window or len(q)))
    scores = torch.einsum("qhd,khd->hqk", q, k) * c.key_dim ** -0.5
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def _plain_feed_forward(c: Config, w: Weights, x: Tensor) -> Tensor:
    if c.bias:
        return F.linear(F.gelu(F.linear(x, w["in"], w["in.bias"]), approximate="tanh"), w["down"],
                        w["down.bias"])
    if not c.experts:
        return _plain_swiglu(x, w["in"], w["down"])
    ids, shares = _plain_routing(c, w, x)
    out = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
    for e in range(c.experts):
        token, slot = (ids == e).nonzero(as_tuple=True)
        served = _plain_swiglu(x[token], w["experts_in"][e], w["experts_down"][e])
        out.index_add_(0, token, (served * shares[token, slot, None]).to(out.dtype))
    out = out.to(x.dtype)
    return out + _plain_swiglu(x, w["in"], w["down"]) if c.groups > 1 else out


def _plain_swiglu(x: Tensor, weight_in: Tensor, weight_down: Tensor) -> Tensor:
    gate, up = F.linear(x, weight_in).chunk(2, -1)
    return F.linear(F.silu(gate) * up, weight_down)


def _plain_routing(c: Config, w: Weights, x: Tensor) -> tuple[Tensor, Tensor]:
    logits = F.linear(x, w["router"])
    logits = logits.to(torch.promote_types(x.dtype, torch.float32))
    if c.groups == 1:
        scores = choice = logits.softmax(-1)
    # the two best of four groups, each as good as its two best experts
    else:
        scores = logits.sigmoid()
        choice = scores + w["correction"]
        grouped = choice.unflatten(-1, (c.groups, -1))
        kept = grouped.topk(2, -1).values.sum(-1).topk(2, -1).indices
        hidden = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(-1, kept, False)
        choice = grouped.masked_fill(hidden[..., None], -math.inf).flatten(-2)
    ids = choice.topk(c.top_k, -1).indices
    chosen = scores.gather(-1, ids)
    return ids, chosen / chosen.sum(-1, keepdim=True) * (1.0 if c.groups == 1 else 2.5)


# The model from lz calls.

class Decoder:
    """The same model: lz calls, and views and sums between them.

    Weights and cache have one dtype.
    """

    def __init__(self, config: Config, weights: Weights) -> None:
        self.config, self.weights = config, weights
        self.cos, self.sin = lz.positions.rope_tables(config.rope_dim if config.latent
                                                      else config.head_dim,
                                                      config.max_positions, device=self.device)

    @property
    def dtype(self) -> torch.dtype:
        return self.weights["embed"].dtype

    @property
    def device(self) -> torch.device:
        return self.weights["embed"].device

    def __call__(self, tokens: Tensor, positions: Tensor, memory: Memory) -> Tensor:
        """Logits of new tokens, (tokens,) or (batch, seq) as the memory arranged them."""
        c, w = self.config, self.weights
        residual = lz.embedding(tokens, w["embed"])
        if c.positions == "learned":
            residual = residual + lz.embedding(positions, w["positions"])
        x = self._norm(residual, "0.attn_norm")
        for i in range(c.layers):
            attend = self._latent if c.latent else self._heads
            x, residual = self._add_norm(attend(i, x, positions, memory), residual, f"{i}.mlp_norm")
            x = self._feed_forward(i, x)
            after = f"{i + 1}.attn_norm" if i + 1 < c.layers else "norm"
            x, residual = self._add_norm(x, residual, after)
        return lz.linear(x, w["embed"] if c.tied else w["head"])

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return lz.linear(x, self.weights[name], self.weights.get(f"{name}.bias"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        if self.config.norm == "rms":
            return lz.rms_norm(x, self.weights[name])
        return lz.layer_norm(x, self.weights[name], self.weights.get(f"{name}.bias"))

    def _add_norm(self, x: Tensor, residual: Tensor, name: str) -> tuple[Tensor, Tensor]:
        if self.config.norm == "rms":
            return lz.add_rms_norm(x, residual, self.weights[name])
        residual = residual + x
        return self._norm(residual, name), residual

    def _heads(self, i: int, x: Tensor, positions: Tensor, memory: Memory) -> Tensor:
        c = self.config
        rows = self._linear(x, f"{i}.qkv").unflatten(-1, (-1, c.head_dim))
        q, k, v = rows.split((c.heads, c.kv_heads, c.kv_heads), -2)
        if c.positions == "rope":
            q, k = lz.rope(q, k, self.cos, self.sin, positions, style="rotate_half", layout="bshd")
        return self._linear(memory.attend(i, q, k, v).flatten(-2), f"{i}.out")

    def _latent(self, i: int, x: Tensor, positions: Tensor, memory: Memory) -> Tensor:
        c, w = self.config, self.weights
        q, q_pe = self._linear(x, f"{i}.q").unflatten(-1, (c.heads, c.key_dim)).split(
            (c.head_dim, c.rope_dim), -1)
        compressed, k_pe = self._linear(x, f"{i}.kv_down").split((c.latent, c.rope_dim), -1)
        compressed = lz.rms_norm(compressed, w[f"{i}.kv_norm"])
        q_pe, k_pe = lz.rope(q_pe, k_pe.unsqueeze(-2), self.cos, self.sin, positions,
                             style="interleaved",
                             layout="bshd")
        up = w[f"{i}.kv_up"]
        # only what is compressed is kept: the products with `up` are absorbed
        if isinstance(memory, Latent):
            key_up, value_up = up.chunk(2, 1)
            out = memory.attend_latent(i, _per_head(q, key_up), q_pe, compressed, k_pe.squeeze(-2))
            out = _per_head(out, value_up.transpose(1, 2))
        else:                                  # keys and values are kept for every head
            k, v = lz.linear(compressed, up.flatten(0, 1)).unflatten(-1, (c.heads, -1)).chunk(2, -1)
            k = torch.cat((k, k_pe.expand(*k.shape[:-1], -1)), -1)
            out = memory.attend(i, torch.cat((q, q_pe), -1), k, v)
        return self._linear(out.flatten(-2), f"{i}.out")

    def _feed_forward(self, i: int, x: Tensor) -> Tensor:
        c, w = self.config, {name: self.weights.get(f"{i}.{name}") for name in (
            "in", "down", "in.bias", "down.bias", "router", "correction", "experts_in",
            "experts_down")}
        if not c.experts:
            return lz.mlp(x, w["in"], w["down"], "gelu_tanh" if c.bias else "swiglu",
                          bias_in=w["in.bias"],
                          bias_down=w["down.bias"])
        logits = lz.linear(x, w["router"])
        if c.groups == 1:
            return lz.moe(x, w["experts_in"], w["experts_down"], logits=logits, top_k=c.top_k)
        ids, shares = lz.moe_gate(logits, c.top_k, "sigmoid", n_group=c.groups, topk_group=2,
                                  e_score_correction_bias=w["correction"],
                                  routed_scaling_factor=2.5)
        return lz.moe(x, w["experts_in"], w["experts_down"], ids,
                      shares) + lz.mlp(x, w["in"], w["down"])


def _per_head(rows: Tensor, weights: Tensor) -> Tensor:
    """Each head's rows times its own matrix: (tokens, heads, k) by (heads, k, n)."""
    tokens, heads, _ = rows.shape
    product = lz.grouped_gemm(rows.transpose(0, 1).flatten(0, 1), weights,
                              torch.full((heads,), tokens, dtype=torch.int32, device=rows.device))
    return product.unflatten(0, (heads, tokens)).transpose(0, 1)


# How tokens are laid out, and how the past is kept.

class Memory:
    """Packed tokens, (tokens,): those of the first sequence, then those of the second, and so on.
    """

    def __init__(self, model: Decoder, capacity: Sequence[int]) -> None:
        """`capacity`: how long each sequence may get."""
        self.config, self.dtype, self.device = model.config, model.dtype, model.device
        self.held = [0] * len(capacity)        # tokens of each sequence before this step
        self.new = [0] * len(capacity)         # its tokens of this step

    def arrange(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """The next tokens of every sequence, as the model takes them, and their positions."""
        self.held = [a + b for a, b in zip(self.held, self.new)]
        self.new = [len(row) for row in rows]
        return self._packed(rows)

    def _packed(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        positions = [n for start, count in zip(self.held, self.new)
                     for n in range(start, start + count)]
        return self.tensor([token for row in rows for token in row]), self.tensor(positions)

    def divided(self, logits: Tensor) -> list[Tensor]:
        """The logits of each sequence's new tokens."""
        return list(logits.split(self.new))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of the new tokens, (..., heads, dim), over all of their sequence."""
        raise NotImplementedError

    def tensor(self, values: Any, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    @property
    def starts(self) -> Tensor:
        """Where the new tokens of each sequence begin, as cu_seqlens."""
        return self.tensor([0, *itertools.accumulate(self.new)], torch.int32)


class Cached(Memory):
    """lz.kv_cache of some kind, one for each layer. Sequences may come and go."""

    def __init__(self, model: Decoder, capacity: Sequence[int], kind: str, **options: Any) -> None:
        super().__init__(model, capacity)
        size: dict[str, int] = {
            "contiguous": {"sequences": len(capacity), "max_len": max(capacity)},
            "paged": {"pages": sum(-(-n // 16) for n in capacity), "page_size": 16},
            "chunked": {"chunk_size": 64},
        }[kind]
        self.caches = [lz.kv_cache(kind, **size, **self.entry(), dtype=self.dtype,
                                   device=self.device, **options)
                       for _ in range(self.config.layers)]
        self.names = [self.add() for _ in capacity]

    def entry(self) -> dict[str, int]:
        """What is kept of one token."""
        c = self.config
        return {"kv_heads": c.kv_heads, "head_dim": c.key_dim, "head_dim_v": c.head_dim}

    def add(self) -> int:
        first, *_ = [cache.add() for cache in self.caches]                 # the same number in all
        return first

    def fork(self, name: int) -> int:
        first, *_ = [cache.fork(name) for cache in self.caches]
        return first

    def remove(self, name: int) -> None:
        for cache in self.caches:
            cache.remove(name)

    def arrange(self, rows: Sequence[Sequence[int]],
                names: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        """`names`: whose these tokens are; every sequence's if not said."""
        self.names = list(self.caches[0].sequences if names is None else names)
        self.held = [self.caches[0].length(name) for name in self.names]
        self.new = [len(row) for row in rows]
        return self._packed(rows)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache = self.caches[layer]
        cache.append(k, v, self.names, self.new)
        return cache.attend(q, self.names, self.new, window_left=self.config.window_left)


class Latent(Cached):
    """What latent attention compresses to, in the pages of lz.kv_cache: one entry for all heads,
    and no window."""

    def entry(self) -> dict[str, int]:
        assert self.config.window is None, "lz.mla_paged_attention has no window"
        return {"kv_heads": 1, "head_dim": self.config.latent, "head_dim_v": self.config.rope_dim}

    def attend_latent(self, layer: int, q_nope: Tensor, q_pe: Tensor, compressed: Tensor,
                      k_pe: Tensor) -> Tensor:
        cache = self.caches[layer]
        cache.append(compressed[:, None], k_pe[:, None], self.names, self.new)
        return lz.mla_paged_attention(
            q_nope, q_pe, cache.key.squeeze(2), cache.value.squeeze(2),
            cache.block_table(self.names), cache.context_lens(self.names), self.starts,
            is_causal=True, scale=self.config.key_dim ** -0.5)


class Pages(Memory):
    """Pages kept by hand, in a shuffled pool that is NaN where nothing was written. The prompts are
    attended to with lz.varlen_attention, what follows with lz.paged_attention."""

    def __init__(self, model: Decoder, capacity: Sequence[int], kv_layout: str = "NHD") -> None:
        super().__init__(model, capacity)
        c = self.config
        counts = [-(-n // 16) for n in capacity]
        shuffled = iter(torch.randperm(sum(counts),
                                       generator=torch.Generator().manual_seed(1)).tolist())
        rows = [[next(shuffled) for _ in range(n)] + [0] * (max(counts) - n) for n in counts]
        self.table, self.kv_layout = self.tensor(rows, torch.int32), kv_layout
        inner = (16, c.kv_heads) if kv_layout == "NHD" else (c.kv_heads, 16)
        self.pools = [[torch.full((sum(counts), *inner, dim), math.nan, dtype=self.dtype,
                                  device=self.device)
                       for dim in (c.key_dim, c.head_dim)] for _ in range(c.layers)]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        where = [(int(self.table[i, n // 16]), n % 16)
                 for i, (start, count) in enumerate(zip(self.held, self.new))
                 for n in range(start, start + count)]
        page, slot = self.tensor(where).unbind(1)
        for pool, rows in zip(self.pools[layer], (k, v)):
            (pool if self.kv_layout == "NHD" else pool.transpose(1, 2))[page, slot] = rows
        if not any(self.held):
            longest = max(self.new)
            return lz.varlen_attention(q, k, v, self.starts, self.starts, longest, longest,
                                       is_causal=True,
                                       causal_align="bottom_right",
                                       window_left=self.config.window_left)
        lengths = self.tensor([a + b for a, b in zip(self.held, self.new)], torch.int32)
        return lz.paged_attention(q, *self.pools[layer], self.table, lengths, self.starts,
                                  is_causal=True,
                                  window_left=self.config.window_left, kv_layout=self.kv_layout)


class Padded(Memory):
    """A batch (batch, seq) padded on the left, and a mask over the keys: what lz.attention takes.
    """

    def __init__(self, model: Decoder, capacity: Sequence[int]) -> None:
        super().__init__(model, capacity)
        c = self.config
        self.kept = [[torch.empty(len(capacity), 0, c.kv_heads, dim, dtype=self.dtype,
                                  device=self.device)
                      for dim in (c.key_dim, c.head_dim)] for _ in range(c.layers)]
        self.real = torch.empty(len(capacity), 0, dtype=torch.bool, device=self.device)

    def arrange(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        super().arrange(rows)
        width = max(self.new)
        assert not any(self.held) or min(self.new) == width, "only the prompts are padded"
        real = self.tensor([[False] * (width - n) + [True] * n for n in self.new], torch.bool)
        self.real = torch.cat((self.real, real), 1)
        positions = (self.real.cumsum(1) - 1).clamp(min=0)[:, -width:]
        return self.tensor([[0] * (width - len(row)) + list(row) for row in rows]), positions

    def divided(self, logits: Tensor) -> list[Tensor]:
        return [row[len(row) - n:] for row, n in zip(logits, self.new)]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.kept[layer] = [torch.cat((past, new), 1)
                            for past, new in zip(self.kept[layer], (k, v))]
        # As in torch, a mask and is_causal exclude each other; a window that ends at the diagonal
        # is causal too.
        return lz.attention(q, *self.kept[layer], attn_mask=self.real[:, None, None],
                            causal_align="bottom_right", window_left=self.config.window_left,
                            window_right=0, layout="bshd")


# Generation.

def greedy(logits: Tensor, step: int) -> Tensor:
    return lz.sample(logits, temperature=0.0)


@dataclass(frozen=True)
class Generated:
    tokens: list[list[int]]                    # what each sequence went on with
    # of its prompt and of all of these but the last: (tokens, vocab)
    logits: list[Tensor]


def generate(model: Decoder, prompts: Sequence[Sequence[int]], memory: Memory, steps: int,
             pick: Callable[[Tensor, int], Tensor] = greedy) -> Generated:
    """All prompts at once, then one token for each sequence and step."""
    tokens: list[list[int]] = [[] for _ in prompts]
    logits: list[list[Tensor]] = [[] for _ in prompts]
    rows: Sequence[Sequence[int]] = prompts
    for step in range(steps):
        new = memory.divided(model(*memory.arrange(rows), memory))
        rows = pick(torch.stack([part[-1] for part in new]), step)[:, None].tolist()
        for i, part in enumerate(new):
            logits[i].append(part)
            tokens[i] += rows[i]
    return Generated(tokens, [torch.cat(parts) for parts in logits])
