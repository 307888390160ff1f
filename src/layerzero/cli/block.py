"""A Llama-shaped decoder block, written once over three replaceable operations. For `lz demo`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import add_rms_norm, attention, rms_norm

EPS = 1e-5


@dataclass(frozen=True)
class Step:
    """`tokens` new ones after `past` that are in the KV cache."""

    name: str
    tokens: int
    past: int


@dataclass(frozen=True)
class Sizes:
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    prompt: int = 512
    context: int = 4096

    @property
    def steps(self) -> tuple[Step, ...]:
        return (Step(f"prefill {self.prompt}", self.prompt, 0), Step(f"decode at {self.prompt}", 1, self.prompt - 1),
                Step(f"decode at {self.context}", 1, self.context - 1))

    @property
    def parameters(self) -> int:
        """Of the matrices: so many multiplications a token takes beside attention."""
        return self.hidden * (2 * (self.heads + self.kv_heads) * self.head_dim + 3 * self.ffn)


# The largest that fits the machine is taken. That of cuda is Llama 3 8B.
SIZES = {
    "cpu": (Sizes(1024, 16, 4, 64, 2816), Sizes(512, 8, 2, 64, 1408, prompt=256, context=2048),
            Sizes(256, 4, 1, 64, 704, prompt=64, context=1024), Sizes(128, 4, 1, 32, 352, prompt=16, context=256)),
    "cuda": (Sizes(4096, 32, 8, 128, 14336), Sizes(1024, 16, 4, 64, 2816)),
}


class Operations(NamedTuple):
    """What the three styles do differently. `attention` is (query, key, value, is_causal)."""

    rms_norm: Callable[..., Any]
    attention: Callable[..., Any]
    add_rms_norm: Callable[..., Any]


def _lz_attention(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Any:
    return attention(query, key, value, is_causal=is_causal)


def _lz_rms_norm(x: Tensor, weight: Tensor) -> Any:
    return rms_norm(x, weight, EPS)


def _lz_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
    return add_rms_norm(x, residual, weight, EPS)


def _torch_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, EPS)


def _torch_attention(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, enable_gqa=True)


def _torch_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = residual + x
    return _torch_rms_norm(total, weight), total


def _model_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * wide.to(x.dtype)


def _model_attention(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
    batch, kv_heads, seq, dim = key.shape
    group = query.shape[1] // kv_heads

    def repeat_kv(t: Tensor) -> Tensor:
        return t[:, :, None].expand(batch, kv_heads, group, seq, dim).reshape(batch, kv_heads * group, seq, dim)

    return F.scaled_dot_product_attention(query, repeat_kv(key), repeat_kv(value), is_causal=is_causal)


def _model_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = residual + x
    return _model_rms_norm(total, weight), total


STYLES = {
    "lz": Operations(_lz_rms_norm, _lz_attention, _lz_add_rms_norm),
    "torch": Operations(_torch_rms_norm, _torch_attention, _torch_add_rms_norm),
    "model code": Operations(_model_rms_norm, _model_attention, _model_add_rms_norm),
}
STYLE_NOTES = {
    "torch": "F.rms_norm, the residual added before it, F.scaled_dot_product_attention(enable_gqa=True)",
    "model code": "as model libraries write Llama: the RMSNorm formula op by op, repeat_kv before the same SDPA",
}


class Block:
    """Weights, a KV cache and a rotary table; `__call__` runs one step in one of the styles."""

    def __init__(self, sizes: Sizes, dtype: torch.dtype, device: str, seed: int = 0) -> None:
        context = sizes.context
        self.sizes, self.dtype, self.device = sizes, dtype, device
        gen = torch.Generator("cpu").manual_seed(seed)

        def rand(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(shape, generator=gen) * scale).to(device, dtype)

        def weight(rows: int, cols: int) -> Tensor:
            return rand(rows, cols, scale=cols ** -0.5)

        wide, narrow = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        self.weights = {
            "norm1": 1 + rand(sizes.hidden, scale=0.1), "norm2": 1 + rand(sizes.hidden, scale=0.1),
            "q": weight(wide, sizes.hidden), "k": weight(narrow, sizes.hidden), "v": weight(narrow, sizes.hidden),
            "o": weight(sizes.hidden, wide), "gate": weight(sizes.ffn, sizes.hidden),
            "up": weight(sizes.ffn, sizes.hidden), "down": weight(sizes.hidden, sizes.ffn)}
        self.cache = [rand(1, sizes.kv_heads, context, sizes.head_dim) for _ in range(2)]
        self.x = rand(1, sizes.prompt, sizes.hidden)
        angles = torch.outer(torch.arange(context), 1e4 ** (-torch.arange(0, sizes.head_dim, 2) / sizes.head_dim))
        self.cos, self.sin = (f(torch.cat((angles, angles), -1)).to(device, dtype) for f in (torch.cos, torch.sin))

    def to(self, dtype: torch.dtype) -> Block:
        """The same numbers in another dtype."""
        twin = object.__new__(Block)
        twin.sizes, twin.dtype, twin.device = self.sizes, dtype, self.device
        twin.weights = {name: t.to(dtype) for name, t in self.weights.items()}
        twin.cache = [t.to(dtype) for t in self.cache]
        twin.x, twin.cos, twin.sin = (t.to(dtype) for t in (self.x, self.cos, self.sin))
        return twin

    def __call__(self, step: Step, do: Operations) -> Tensor:
        w, end = self.weights, step.past + step.tokens
        residual = self.x[:, :step.tokens]
        h = do.rms_norm(residual, w["norm1"])
        query, key, value = (self._heads(F.linear(h, w[name])) for name in "qkv")
        cos, sin = self.cos[step.past:end], self.sin[step.past:end]
        for cached, new in zip(self.cache, (_rotated(key, cos, sin), value)):
            cached[:, :, step.past:end] = new
        seen = [cached[:, :, :end] for cached in self.cache]
        out = do.attention(_rotated(query, cos, sin), *seen, step.tokens > 1)     # a single token sees all before it
        h, residual = do.add_rms_norm(F.linear(out.transpose(1, 2).flatten(2), w["o"]), residual, w["norm2"])
        return residual + F.linear(F.silu(F.linear(h, w["gate"])) * F.linear(h, w["up"]), w["down"])

    def _heads(self, t: Tensor) -> Tensor:
        return t.unflatten(-1, (-1, self.sizes.head_dim)).transpose(1, 2)


def _rotated(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = t.chunk(2, -1)
    return t * cos + torch.cat((-second, first), -1) * sin


class Recorder:
    """Runs a style and keeps what each operation was called with."""

    def __init__(self, do: Operations) -> None:
        self.calls: dict[str, tuple[Any, ...]] = {}
        self.operations = Operations(*(self._kept(name, fn) for name, fn in do._asdict().items()))

    def _kept(self, name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.calls[name] = args
            return fn(*args)

        return call
