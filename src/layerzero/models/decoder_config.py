"""What a decoder is made of: its sizes and choices, its weights, the activations it may have."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..spec.errors import ConfigError

Weights = dict[str, Tensor]
_ACT: Mapping[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu, "silu": F.silu, "geglu": F.gelu, "gelu": F.gelu, "reglu": F.relu,
    "relu": F.relu, "geglu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}
GATED = ("swiglu", "geglu", "geglu_tanh", "reglu")
_CHOICES = {"norm": ("rms", "layer"), "positions": ("rope", "learned", "none"),
            "activation": tuple(_ACT),
            "rope_style": ("rotate_half", "interleaved")}


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a decoder. Sizes left at 0 are derived from the others."""

    hidden: int
    heads: int
    kv_heads: int = 0                          # default: heads
    layers: int = 2
    head_dim: int = 0                          # default: hidden / heads
    inner: int = 0                             # default: 2 * hidden
    vocab: int = 256
    max_positions: int = 256
    norm: str = "rms"                          # or "layer"
    eps: float = 1e-5
    activation: str = "swiglu"                 # any of lz.mlp
    positions: str = "rope"                    # or "learned", "none"
    rope_style: str = "rotate_half"            # or "interleaved"
    rope_base: float = 10000.0
    window: int = 0                            # keys a token attends to, itself included; 0 for all
    bias: bool = False                         # in projections, MLP and layer norms
    tied: bool = False                         # the head shares the embedding's weight
    rotary_dim: int = 0                        # elements of a head that rope rotates; 0 for all
    # whether each layer has the window; () for all
    window_layers: tuple[bool, ...] = ()
    window_rope_base: float = 0.0              # of the layers with a window; 0: rope_base
    rope_scaling: Mapping[str, Any] | None = None      # of lz.positions.rope_tables; not these
    qk_norm: bool = False                      # RMS norms of query and key heads, before rope
    post_norms: bool = False                   # RMS norms of what attention and MLP add
    embed_scale: float = 1.0
    attention_scale: float = 0.0               # default: head_dim ** -0.5
    softcap: float = 0.0                       # of the attention scores
    logit_softcap: float = 0.0
    experts: int = 0                           # MLPs of a layer, of which a token takes top_k
    top_k: int = 0

    def __post_init__(self) -> None:
        for name, value in (("kv_heads", self.heads),
                            ("head_dim", self.hidden // max(self.heads, 1)),
                            ("inner", 2 * self.hidden)):
            if not getattr(self, name):
                object.__setattr__(self, name, value)
        sizes = ("hidden", "heads", "kv_heads", "layers", "head_dim", "inner", "vocab",
                 "max_positions")
        small = [n for n in sizes if getattr(self, n) < 1]
        if small:
            raise ConfigError(f"a decoder wants {small[0]} >= 1, got {getattr(self, small[0])}")
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"a decoder wants heads to be a multiple of kv_heads, got {self.heads} and "
                f"{self.kv_heads}")
        if self.positions == "rope" and self.rotated % 2:
            raise ConfigError(f"rope wants an even head_dim, got {self.rotated}")
        if not 0 <= self.rotary_dim <= self.head_dim:
            raise ConfigError(f"rope rotates at most the {self.head_dim} elements of a head, got "
                              f"rotary_dim {self.rotary_dim}")
        if self.window_layers and len(self.window_layers) != self.layers:
            raise ConfigError(f"a decoder wants window_layers for each of its {self.layers} "
                              f"layers, got {len(self.window_layers)}")
        if self.experts and not 1 <= self.top_k <= self.experts:
            raise ConfigError(f"a decoder with {self.experts} experts wants top_k from 1 to that, "
                              f"got {self.top_k}")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(
                    f"a decoder's {name} is one of {', '.join(choices)}; got "
                    f"{getattr(self, name)!r}")

    @property
    def rotated(self) -> int:
        """How many elements of a head does rope rotate?"""
        return self.rotary_dim or self.head_dim

    @property
    def window_left(self) -> int:
        return self.window - 1 if self.window else -1

    def has_window(self, layer: int) -> bool:
        return bool(self.window) and (not self.window_layers or self.window_layers[layer])

    def attention_options(self, layer: int) -> dict[str, Any]:
        """Return the arguments of an attention call of this layer beside its tensors."""
        options: dict[str, Any] = {"window_left": self.window_left if self.has_window(layer)
                                   else -1}
        if self.attention_scale:
            options["scale"] = self.attention_scale
        if self.softcap:
            options["softcap"] = self.softcap
        return options

    @property
    def jumps(self) -> bool:
        """Is the derivative of the activation discontinuous?"""
        return self.activation in ("relu", "reglu")

    @property
    def gated(self) -> bool:
        return self.activation in GATED

    def __str__(self) -> str:
        return (
            f"hidden {self.hidden}, heads {self.heads}/{self.kv_heads} x {self.head_dim}, layers "
            f"{self.layers}, MLP {self.inner} {self.activation}, {self.norm} norm, positions "
            f"{self.positions}")


CONFIGS: Mapping[str, DecoderConfig] = {
    "tiny": DecoderConfig(64, 2),
    "gqa": DecoderConfig(128, 8, 2),
    "deep": DecoderConfig(64, 2, layers=6),
    "wide": DecoderConfig(128, 8),
    "no_rope": DecoderConfig(64, 2, positions="learned"),
    "medium": DecoderConfig(256, 4, layers=4),
}


def parse_config(text: str) -> tuple[str, DecoderConfig]:
    """Parses a name of CONFIGS with changes (tiny,layers=3), or hidden=96,heads=6,..."""
    head, *rest = [part.strip() for part in text.split(",") if part.strip()] or [""]
    if head in CONFIGS:
        base, assignments = CONFIGS[head], rest
    else:
        base, assignments = None, [head, *rest]
    known = {f.name: f.type for f in fields(DecoderConfig)}
    changes: dict[str, Any] = {}
    for assignment in assignments:
        name, sign, value = assignment.partition("=")
        if not sign or name not in known:
            raise ConfigError(
                f"--config: wanted one of {', '.join(CONFIGS)}, or name=value of "
                f"{', '.join(known)}; got {assignment!r}")
        changes[name] = _value(name, known[name], value)
    if base is not None:
        # Sizes that depend on the changed ones are derived again.
        derived = {"kv_heads", "head_dim"} if "heads" in changes else set()
        derived |= {"head_dim", "inner"} if "hidden" in changes else set()
        return text, replace(base, **{**dict.fromkeys(derived, 0), **changes})
    missing = [n for n in ("hidden", "heads") if n not in changes]
    if missing:
        raise ConfigError(
            f"--config: a decoder needs hidden= and heads=; {missing[0]} is missing in {text!r}")
    return text, DecoderConfig(**changes)


def _value(name: str, kind: Any, text: str) -> Any:
    try:
        if kind == "bool":
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        return {"int": int, "float": float}.get(str(kind), str)(text)
    except (ValueError, KeyError):
        raise ConfigError(f"--config: {name} wants {kind}, got {text!r}") from None


def plain_weights(c: DecoderConfig) -> Mapping[str, str]:
    """Returns the names of the weights of a layer and their formats: of tensors, ""."""
    names = ["ln1", "qkv", "out", "ln2", *(() if c.experts else ("in", "down"))]
    if c.bias:
        names += [f"{n}.bias" for n in names if c.norm == "layer" or not n.startswith("ln")]
    if c.qk_norm:
        names += ["q_norm", "k_norm"]
    if c.post_norms:
        names += ["post_attention", "post_mlp"]
    return dict.fromkeys(names, "")


def make_weights(c: DecoderConfig, seed: int = 0) -> Weights:
    """Returns random float32 weights, scaled to keep activations near one."""
    gen = torch.Generator().manual_seed(seed)

    def matrix(rows: int, cols: int) -> Tensor:
        return torch.randn(rows, cols, generator=gen) / math.sqrt(cols)

    def around(center: float, size: int) -> Tensor:
        return center + 0.1 * (2 * torch.rand(size, generator=gen) - 1)

    w = {"embed": torch.randn(c.vocab, c.hidden, generator=gen)
         * (c.hidden ** -0.5 if c.tied else 1.0)}
    if c.positions == "learned":
        w["positions"] = 0.5 * torch.randn(c.max_positions, c.hidden, generator=gen)
    for i in range(c.layers):
        layer = {"ln1": around(1.0, c.hidden),
                 "qkv": matrix((c.heads + 2 * c.kv_heads) * c.head_dim, c.hidden),
                 "out": matrix(c.hidden, c.heads * c.head_dim), "ln2": around(1.0, c.hidden),
                 "in": matrix((2 if c.gated else 1) * c.inner, c.hidden),
                 "down": matrix(c.hidden, c.inner)}
        if c.qk_norm:
            layer |= {name: around(1.0, c.head_dim) for name in ("q_norm", "k_norm")}
        if c.post_norms:
            layer |= {name: around(1.0, c.hidden) for name in ("post_attention", "post_mlp")}
        if c.experts:
            layer["router"] = matrix(c.experts, c.hidden)
            for name in ("in", "down"):
                rows, cols = layer.pop(name).shape
                layer[f"experts_{name}"] = torch.stack([matrix(rows, cols)
                                                        for _ in range(c.experts)])
        if c.bias:
            names = ("qkv", "out", "in", "down", *(("ln1", "ln2") if c.norm == "layer" else ()))
            layer |= {f"{name}.bias": around(0.0, layer[name].shape[0]) for name in names}
        w |= {f"{i}.{name}": t for name, t in layer.items()}
    w["norm"] = around(1.0, c.hidden)
    if c.bias and c.norm == "layer":
        w["norm.bias"] = around(0.0, c.hidden)
    if not c.tied:
        w["head"] = matrix(c.vocab, c.hidden)
    return w


def cast(weights: Mapping[str, Tensor], dtype: torch.dtype, device: str | None = None) -> Weights:
    """Returns the weights in another dtype, and on `device` if given."""
    return {name: t.to(device or t.device, dtype) for name, t in weights.items()}


def split_parameter(c: DecoderConfig, name: str, t: Tensor) -> dict[str, Tensor]:
    """Splits a parameter that is stored fused, such as qkv, into parts with their usual names."""
    suffix = ".bias" if name.endswith(".bias") else ""
    layer, _, what = name.removesuffix(".bias").rpartition(".")
    prefix = f"layer.{layer}." if layer else ""
    if what == "qkv":
        q, k, v = t.split([n * c.head_dim for n in (c.heads, c.kv_heads, c.kv_heads)])
        return {f"{prefix}wq{suffix}": q, f"{prefix}wk{suffix}": k, f"{prefix}wv{suffix}": v}
    if what == "in" and c.gated:
        gate, up = t.chunk(2)
        return {f"{prefix}w_gate{suffix}": gate, f"{prefix}w_up{suffix}": up}
    known_name = {"out": "wo", "in": "w_up", "down": "w_down"}.get(what, what)
    return {f"{prefix}{known_name}{suffix}": t}


def activate(c: DecoderConfig, gate_up: Tensor) -> Tensor:
    act = _ACT[c.activation]
    if not c.gated:
        return act(gate_up)
    gate, up = gate_up.chunk(2, -1)
    return act(gate) * up
