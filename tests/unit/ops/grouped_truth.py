"""What grouped attention must give, row by row in float64, and the kernels that serve a call."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import layerzero as lz
from layerzero.verify.kernel.contract import refusals
from layerzero.world import snapshot as worlds

Items = Sequence[tuple[int, int, int, int]]


def call(items: Items, hq: int = 4, hkv: int = 2, d: int = 32, dtype: torch.dtype = torch.float32,
         device: str = "cpu", seed: int = 0, size: float = 1.0, **more: Any) -> dict[str, Any]:
    """Arguments of lz.grouped_attention over buffers that just hold the items."""
    gen = torch.Generator(device).manual_seed(seed)

    def rand(tokens: int, heads: int) -> Tensor:
        return (size * torch.randn(tokens, heads, d, generator=gen, device=device)).to(dtype)

    tokens_k = max(k + m for _, _, k, m in items)
    return {"query": rand(max(q + n for q, n, _, _ in items), hq), "key": rand(tokens_k, hkv),
            "value": rand(tokens_k, hkv),
            "items": torch.tensor(items, dtype=torch.int32, device=device).reshape(-1, 4),
            "max_seqlen_q": max(n for _, n, _, _ in items),
            "max_seqlen_k": max(m for _, _, _, m in items), "is_causal": True, **more}


def truth(values: dict[str, Any], rows: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of some query rows, or of all, one row after another."""
    query, key, value = (values[name] for name in ("query", "key", "value"))
    heads, kv_heads = query.shape[1], key.shape[1]
    scale = values.get("scale") or query.shape[2] ** -0.5
    rows = range(len(query)) if rows is None else rows
    outs, lses = [], []
    for row in rows:
        out = query.new_zeros((heads, value.shape[2]), dtype=torch.float64)
        lse = query.new_full((heads,), -math.inf, dtype=torch.float64)
        for q_start, n, k_start, m in values["items"].tolist():
            i = row - q_start
            seen = min(m, i + m - n + 1) if values["is_causal"] else m
            if not 0 <= i < n or seen <= 0:
                continue
            k, v = (t[k_start:k_start + seen].double().repeat_interleave(heads // kv_heads, 1)
                    for t in (key, value))
            scores = torch.einsum("hd,mhd->hm", query[row].double(), k) * scale
            out = torch.einsum("hm,mhd->hd", scores.softmax(-1), v)
            lse = scores.logsumexp(-1)
        outs.append(out)
        lses.append(lse)
    return torch.stack(outs), torch.stack(lses)


def serving(values: dict[str, Any], large: bool = False) -> Iterator[str]:
    """The kernels that take a call here; with `large` only those that write no scores to memory."""
    inputs = {p.name: values.get(p.name, p.default) for p in lz.op("grouped_attention").params}
    wants_grad = any(inputs[name].requires_grad for name in ("query", "key", "value"))
    for kernel in worlds.current().catalog.kernels_of("grouped_attention"):
        writes_scores = kernel.id in ("reference.grouped_attention", "torch.grouped_separate")
        if (not (large and writes_scores) and (kernel.differentiable or not wants_grad)
            and not refusals(kernel, inputs)):
            yield kernel.id


def check(values: dict[str, Any], rows: Sequence[int] | None = None, rtol: float = 1e-5,
          atol: float = 1e-5, large: bool = False) -> None:
    """Every kernel that takes the call gives the truth, log-sum-exp included."""
    values = {**values, "return_lse": True}
    out, lse = truth(values, rows)
    names = [*serving(values, large)]
    assert names
    for name in names:
        result = lz.grouped_attention(**values, backend=name)
        for got, want in zip(result, (out, lse)):
            got = got if rows is None else got[list(rows)]
            torch.testing.assert_close(got.double(), want, rtol=rtol, atol=atol,
                                       msg=lambda text, name=name: f"{name}: {text}")
