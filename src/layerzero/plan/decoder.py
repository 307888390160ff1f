"""The block most models are made of, for plan_block: norm, qkv, rope, attention, projection, norm, MLP.

Values it takes: x (batch, seq, hidden); norm1, norm2 (hidden); qkv (one weight, rows of q, then k, then v); out; gate,
up, down; cos, sin (seq, head_dim / 2). With a cache: past_k, past_v (batch, kv_heads, past, head_dim).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .block import Block, Either, Glue, Stage


def decoder_block(heads: int, kv_heads: int, head_dim: int, *, eps: float = 1e-5, style: str = "rotate_half",
                  cached: bool = False, dtypes: tuple[torch.dtype, ...] = ()) -> Block:
    """A Llama-shaped layer. Its alternatives: add and norm apart or fused, the MLP in parts or fused."""
    def split(qkv: Tensor) -> tuple[Tensor, ...]:
        rows = qkv.view(*qkv.shape[:2], heads + 2 * kv_heads, head_dim)
        parts = rows.split((heads, kv_heads, kv_heads), dim=2)
        return tuple(t.transpose(1, 2) for t in parts)

    def extend(past: Tensor, new: Tensor) -> Tensor:
        return torch.cat((past, new), dim=2)

    cache = (Glue("append k", extend, ("past_k", "k"), ("keys",), is_copy=False),
             Glue("append v", extend, ("past_v", "v"), ("values",), is_copy=False)) if cached else ()
    keys, values = ("keys", "values") if cached else ("k", "v")
    norm = {"eps": eps}
    parts = (
        Stage("rms_norm", {"x": "x", "weight": "norm1"}, ("h",), norm),
        Stage("linear", {"x": "h", "weight": "qkv"}, ("packed",)),
        Glue("split heads", split, ("packed",), ("q0", "k0", "v")),
        Stage("rope", {"q": "q0", "k": "k0", "cos": "cos", "sin": "sin"}, ("q", "k"),
              {"style": style, "layout": "bhsd"}),
        *cache,
        Stage("attention", {"query": "q", "key": keys, "value": values}, ("mixed",),
              {"is_causal": True, "causal_align": "bottom_right"}),
        Glue("join heads", lambda t: t.transpose(1, 2).flatten(2), ("mixed",), ("joined",)),
        Stage("linear", {"x": "joined", "weight": "out"}, ("branch",)),
        Either((
            (Glue("add", torch.add, ("x", "branch"), ("total",), is_copy=False),
             Stage("rms_norm", {"x": "total", "weight": "norm2"}, ("normed",), norm)),
            (Stage("add_rms_norm", {"x": "branch", "residual": "x", "weight": "norm2"}, ("normed", "total"), norm),),
        )),
        Either((
            (Stage("linear", {"x": "normed", "weight": "gate"}, ("g",)),
             Stage("linear", {"x": "normed", "weight": "up"}, ("u",)),
             Glue("silu times", lambda g, u: F.silu(g) * u, ("g", "u"), ("inner",), is_copy=False),
             Stage("linear", {"x": "inner", "weight": "down"}, ("fed",))),
            (Stage("mlp", {"x": "normed", "weight_in": "gate", "weight_up": "up", "weight_down": "down"}, ("fed",),
                   {"activation": "swiglu"}),),
        )),
        Glue("add", torch.add, ("total", "fed"), ("y",), is_copy=False),
    )
    results = ("y", "k", "v") if cached else ("y",)
    return Block(f"decoder {heads}/{kv_heads}x{head_dim}", parts, results, dtypes)


def decoder_values(heads: int, kv_heads: int, head_dim: int, hidden: int, ffn: int, *, batch: int = 1, seq: int = 1,
                   past: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu",
                   seed: int = 0) -> Mapping[str, Any]:
    """Random inputs and weights of that block."""
    gen = torch.Generator("cpu").manual_seed(seed)

    def rand(*shape: int, by: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=gen) * by).to(device, dtype)

    def weight(rows: int, cols: int) -> Tensor:
        return rand(rows, cols, by=cols ** -0.5)

    angles = torch.arange(past, past + seq)[:, None] / 10000 ** (torch.arange(head_dim // 2) * 2 / head_dim)
    values = {
        "x": rand(batch, seq, hidden), "norm1": rand(hidden), "norm2": rand(hidden),
        "qkv": weight((heads + 2 * kv_heads) * head_dim, hidden), "out": weight(hidden, heads * head_dim),
        "gate": weight(ffn, hidden), "up": weight(ffn, hidden), "down": weight(hidden, ffn),
        "cos": angles.cos().to(device, dtype), "sin": angles.sin().to(device, dtype)}
    if past:
        values |= {n: rand(batch, kv_heads, past, head_dim) for n in ("past_k", "past_v")}
    return values
