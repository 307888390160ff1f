"""What a GGUF file says its model is, as a DecoderConfig and the weights of a Decoder.

llama.cpp stores the rows of a Llama's query and key projections in the order of interleaved rotary
pairs; they are put back into the order of halves (rotate_half), in which the model was trained.
That and joining q, k, v and gate, up into one product each are copies of blocks; all else is a view
of the mapped file, and nothing is dequantized. Formats whose kernels keep a packed copy of their
own are left apart.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...models.decoder_config import DecoderConfig
from ...models.weights.ggml import GgmlWeight, Weight, format_of, join_rows
from ...ops.formulas.ggml import GGML_FORMATS
from ...spec.errors import DataError
from ...spec.reason import shown
from .reader import FLOATS, GGUFFile

_MAX_LAYERS, _MAX_SIZE, _MAX_POSITIONS = 1024, 1 << 24, 1 << 31


@dataclass(frozen=True)
class Architecture:
    """The facts that llama.cpp knows of an architecture and its files do not state."""

    pairs: bool = False                        # rows of q and k are stored as interleaved pairs
    activation: str = "swiglu"
    qk_norm: bool = False
    post_norms: bool = False
    scaled_embedding: bool = False
    window_period: int = 0                     # every such layer sees all keys; 0: no window
    window: int = 0                            # where the file says nothing
    window_rope_base: float = 0.0
    experts: bool = False
    # the layers of the one size whose scores are scaled by hidden / heads
    scale_by_hidden: int = 0


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(pairs=True, window_period=1), "qwen2": Architecture(),
    "qwen3": Architecture(qk_norm=True),
    "qwen3moe": Architecture(qk_norm=True, experts=True),
    "phi3": Architecture(window_period=1),
    "gemma": Architecture(activation="geglu_tanh", scaled_embedding=True),
    "gemma2": Architecture(activation="geglu_tanh", post_norms=True, scaled_embedding=True,
                           window_period=2, window=4096, scale_by_hidden=46),
    "gemma3": Architecture(activation="geglu_tanh", qk_norm=True, post_norms=True,
                           scaled_embedding=True, window_period=6, window_rope_base=10000.0,
                           scale_by_hidden=62),
}
# What a Decoder lacks for architectures that people ask for.
_MISSING: Mapping[str, str] = {
    "mamba": "state space layers", "mamba2": "state space layers", "jamba": "state space layers",
    "falcon-h1": "state space layers", "granitehybrid": "state space layers",
    "nemotron_h": "state space layers", "rwkv6": "RWKV layers", "rwkv7": "RWKV layers",
    "qwen3next": "gated delta rule layers", "kimi-linear": "gated delta rule layers",
    "deepseek2": "latent attention (MLA) and shared experts", "bert": "attention to both sides",
    "nomic-bert": "attention to both sides", "t5": "an encoder and relative positions",
    "gpt-oss": "attention sinks and clamped experts", "llama4": "chunked attention and NoPE layers",
    "qwen2moe": "shared experts", "gemma3n": "per-layer embeddings", "gemma4": "shared KV layers",
    "gpt2": "layer norms with learned positions", "bloom": "ALiBi", "mpt": "ALiBi",
    "falcon": "parallel attention and MLP", "phi2": "parallel attention and MLP",
    "gptneox": "parallel attention and MLP", "command-r": "parallel attention and MLP",
    "stablelm": "layer norms with partial rope", "starcoder2": "layer norms with biases",
    "olmo2": "norms after the projections", "chatglm": "interleaved partial rope",
    "qwen2vl": "positions of images", "qwen3vl": "positions of images", "clip": "a language model"}


class Facts:
    """The metadata of a model, each value checked as it is read."""

    def __init__(self, file: GGUFFile) -> None:
        self.file, self.values = file, file.metadata
        name = self.values.get("general.architecture")
        if not isinstance(name, str) or name not in ARCHITECTURES:
            lacks = f"; it needs {_MISSING[name]}" if isinstance(name, str) and name in _MISSING \
                else ""
            raise DataError(
                f"{file.path}: wanted the architecture {', '.join(ARCHITECTURES)}; got "
                f"{shown(name, limit=80)}{lacks}. Run it with llama.cpp, or give another model")
        self.name, self.architecture = name, ARCHITECTURES[name]

    def wrong(self, key: str, want: str, got: Any) -> DataError:
        return DataError(f"{self.file.path}: wanted {self.name}.{key} as {want}, got "
                         f"{shown(got, limit=80)}; convert the model again")

    def integer(self, key: str, default: int | None = None, minimum: int = 1,
                maximum: int = _MAX_SIZE) -> int:
        got = self.values.get(f"{self.name}.{key}", default)
        if isinstance(got, list) and got and all(n == got[0] for n in got):    # one for each layer
            got = got[0]
        if type(got) is not int or not minimum <= got <= maximum:
            wanted = f"a whole number from {minimum} to {maximum}, the same in all layers"
            raise self.wrong(key, wanted, got)
        return got

    def number(self, key: str, default: float | None = None, minimum: float = 0.0) -> float:
        got = self.values.get(f"{self.name}.{key}", default)
        if type(got) not in (int, float) or not math.isfinite(got) or got < minimum:  # type: ignore[arg-type]
            raise self.wrong(key, f"a number of at least {minimum:g}", got)
        return float(got)                      # type: ignore[arg-type]

    def floats(self, name: str, count: int) -> list[float] | None:
        """Return the numbers of a small tensor, None without it."""
        if name not in self.file.tensors:
            return None
        values = self.file.floats(name).float()
        if values.shape != (count,) or not bool((values.isfinite() & (values > 0)).all()):
            raise DataError(f"{self.file.path}: wanted {count} positive numbers in the tensor "
                            f"{name}, got {list(values.shape)}")
        return [float(x) for x in values]


def read_model(file: GGUFFile, dtype: torch.dtype,
               apart: Container[str] = ()) -> tuple[DecoderConfig, dict[str, Weight]]:
    """Return shape and weights of the model in a file; formats of `apart` are not joined."""
    facts = Facts(file)
    config = read_config(facts)
    return config, WeightReader(facts, config, dtype, apart).read()


def read_config(facts: Facts) -> DecoderConfig:
    """Return the shape of the model; DataError for one that no Decoder computes."""
    file, kind = facts.file, facts.architecture
    split = file.metadata.get("split.count", 0)
    if split not in (0, 1):
        raise DataError(f"{file.path}: wanted a whole model, got one of {shown(split)} parts; join "
                        "them with llama-gguf-split --merge")
    hidden, heads = facts.integer("embedding_length"), facts.integer("attention.head_count")
    head_dim = facts.integer("attention.key_length", hidden // heads or 1)
    if facts.integer("attention.value_length", head_dim) != head_dim:
        raise facts.wrong("attention.value_length", f"{head_dim}, the key_length",
                          facts.integer("attention.value_length", head_dim))
    kv_heads = facts.integer("attention.head_count_kv", heads)
    if heads % kv_heads:
        raise facts.wrong("attention.head_count_kv", f"a divisor of {heads}", kv_heads)
    rotary = facts.integer("rope.dimension_count", head_dim, maximum=head_dim)
    if rotary % 2:
        raise facts.wrong("rope.dimension_count", "an even number", rotary)
    layers = facts.integer("block_count", maximum=_MAX_LAYERS)
    longest = facts.integer("context_length", maximum=_MAX_POSITIONS)
    experts = facts.integer("expert_count", 0, minimum=0)
    if kind.experts and not experts:
        raise facts.wrong("expert_count", "at least 1", 0)
    if experts and facts.number("expert_weights_scale", 1.0) not in (0.0, 1.0):
        raise facts.wrong("expert_weights_scale", "1", facts.number("expert_weights_scale"))
    inner = facts.integer("expert_feed_forward_length", 0, minimum=0) if experts else 0
    windows, window = _windows(facts, layers)
    embed = file.tensors.get("token_embd.weight")
    scale = (hidden / heads) ** -0.5 if layers == kind.scale_by_hidden else 0.0
    return DecoderConfig(
        hidden, heads, kv_heads, layers, head_dim, inner or facts.integer("feed_forward_length"),
        vocab=embed.shape[0] if embed is not None and len(embed.shape) == 2 else 1,
        max_positions=longest, eps=facts.number("attention.layer_norm_rms_epsilon"),
        activation=kind.activation, rope_base=facts.number("rope.freq_base", 10000.0, 1.0),
        window=window, window_layers=windows, tied="output.weight" not in file.tensors,
        window_rope_base=facts.number("rope.freq_base_swa", kind.window_rope_base, 0.0),
        rotary_dim=0 if rotary == head_dim else rotary,
        rope_scaling=_scaling(facts, rotary, longest), qk_norm=kind.qk_norm,
        post_norms=kind.post_norms, embed_scale=math.sqrt(hidden) if kind.scaled_embedding else 1.0,
        attention_scale=facts.number("attention.scale", scale),
        softcap=facts.number("attn_logit_softcapping", 0.0),
        logit_softcap=facts.number("final_logit_softcapping", 0.0), experts=experts,
        top_k=facts.integer("expert_used_count", maximum=experts) if experts else 0)


def _windows(facts: Facts, layers: int) -> tuple[tuple[bool, ...], int]:
    """Return which layers have a window, () for all, and its size; 0 for none."""
    kind = facts.architecture
    window = facts.integer("attention.sliding_window", kind.window, minimum=0,
                           maximum=_MAX_POSITIONS)
    if not kind.window_period or not window:
        return (), 0
    got = facts.values.get(f"{facts.name}.attention.sliding_window_pattern", kind.window_period)
    if isinstance(got, list):
        if len(got) < layers or not all(type(w) is bool for w in got):
            raise facts.wrong("attention.sliding_window_pattern", f"{layers} booleans", got)
        return tuple(got[:layers]), window
    if type(got) is not int or not 0 < got <= _MAX_LAYERS:
        raise facts.wrong("attention.sliding_window_pattern", "a period", got)
    return () if got == 1 else tuple(i % got < got - 1 for i in range(layers)), window


def _scaling(facts: Facts, rotary: int, longest: int) -> dict[str, Any] | None:
    """Return what lz.positions.rope_tables takes as scaling."""
    kind = facts.values.get(f"{facts.name}.rope.scaling.type", "none")
    factor = facts.number("rope.scaling.factor", 0.0) or facts.number("rope.scale_linear", 0.0)
    original = facts.integer("rope.scaling.original_context_length", longest,
                             maximum=_MAX_POSITIONS)
    amplitude = facts.number("rope.scaling.attn_factor", 1.0)
    short = facts.floats("rope_freqs.weight", rotary // 2)
    long = facts.floats("rope_factors_long.weight", rotary // 2)
    short = short or facts.floats("rope_factors_short.weight", rotary // 2)
    if short:                                  # divisors of the frequencies
        return {"rope_type": "longrope", "short_factor": short, "long_factor": long or short,
                "original_max_position_embeddings": original, "attention_factor": amplitude}
    if kind == "yarn":
        return {"rope_type": "yarn", "factor": factor or 1.0,
                "original_max_position_embeddings": original}
    if kind not in ("none", "linear") or amplitude != 1.0:
        raise facts.wrong("rope.scaling.type", "none, linear, yarn or factors in a tensor", kind)
    return None if factor in (0.0, 1.0) else {"rope_type": "linear", "factor": factor}


# Weights.

_NORMS = {"attn_norm": "ln1", "ffn_norm": "ln2", "attn_q_norm": "q_norm", "attn_k_norm": "k_norm",
          "post_attention_norm": "post_attention", "post_ffw_norm": "post_mlp"}


class WeightReader:
    """Takes the weights of a Decoder from a file; what is left over at the end has no place."""

    def __init__(self, facts: Facts, c: DecoderConfig, dtype: torch.dtype,
                 apart: Container[str] = ()) -> None:
        self.file, self.pairs, self.c, self.apart = facts.file, facts.architecture.pairs, c, apart
        self.dtype, self.unread = dtype, dict.fromkeys(facts.file.tensors)

    def read(self) -> dict[str, Weight]:
        c = self.c
        weights: dict[str, Weight] = {
            "embed": self.take("token_embd.weight", c.vocab, c.hidden),
            "norm": self.take("output_norm.weight", c.hidden)}
        if not c.tied:
            weights["head"] = self.take("output.weight", c.vocab, c.hidden)
        for i in range(c.layers):
            weights |= {f"{i}.{name}": w for name, w in self.layer(f"blk.{i}.")}
        for name in ("rope_freqs", "rope_factors_long", "rope_factors_short"):
            self.unread.pop(f"{name}.weight", None)
        if self.unread:
            raise DataError(f"{self.file.path}: {len(self.unread)} tensors have no place in a "
                            f"decoder of this architecture, such as {next(iter(self.unread))}")
        return weights

    def layer(self, prefix: str) -> Iterator[tuple[str, Weight]]:
        c = self.c
        sizes = {"ln1": c.hidden, "ln2": c.hidden, "post_attention": c.hidden,
                 "post_mlp": c.hidden, "q_norm": c.head_dim, "k_norm": c.head_dim}
        skipped = {"q_norm", "k_norm"} if not c.qk_norm else set()
        skipped |= set() if c.post_norms else {"post_attention", "post_mlp"}
        for stored, name in _NORMS.items():
            if name not in skipped:
                yield name, self.take(f"{prefix}{stored}.weight", sizes[name])
        q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        rows = {"attn_q": q, "attn_k": kv, "attn_v": kv}
        if f"{prefix}attn_qkv.weight" in self.unread:
            yield from self.linear(prefix, "attn_qkv", "qkv", q + 2 * kv, c.hidden)
        else:
            yield from self.joined(prefix, "qkv", ("q", "k", "v"), rows)
        yield from self.linear(prefix, "attn_output", "out", c.hidden, q)
        if c.experts:
            yield "router", self.take(f"{prefix}ffn_gate_inp.weight", c.experts, c.hidden)
            for n in ("gate", "up"):
                yield f"experts_{n}", self.take(f"{prefix}ffn_{n}_exps.weight", c.experts, c.inner,
                                                c.hidden)
            yield "experts_down", self.take(f"{prefix}ffn_down_exps.weight", c.experts, c.hidden,
                                            c.inner)
            return
        if f"{prefix}ffn_gate.weight" in self.unread:
            yield from self.joined(prefix, "in", ("gate", "up"), {"ffn_gate": c.inner,
                                                              "ffn_up": c.inner})
        else:                                  # gate and up in one tensor, gate first
            yield from self.linear(prefix, "ffn_up", "in", 2 * c.inner, c.hidden)
        yield from self.linear(prefix, "ffn_down", "down", c.hidden, c.inner)

    def joined(self, prefix: str, name: str, names: tuple[str, ...],
               rows: Mapping[str, int]) -> Iterator[tuple[str, Weight]]:
        """Yield several weights as one where their format is the same, else one by one."""
        tensors = {}
        for n, (stored, count) in zip(names, rows.items()):
            heads = {"q": self.c.heads, "k": self.c.kv_heads}.get(n, 0) if self.pairs else 0
            for part, w in self.linear(prefix, stored, n, count, self.c.hidden):
                tensors[part] = rows_to_halves(w, heads) if heads else w
        weights = [tensors[n] for n in names]
        formats = {format_of(w) for w in weights}
        if len(formats) > 1 or any(f in self.apart for f in formats):
            yield from tensors.items()
            return
        yield name, join_rows(*weights)
        for stored in rows:
            self.file.release(f"{prefix}{stored}.weight")
        biases = [tensors[f"{n}.bias"] for n in names if f"{n}.bias" in tensors]
        if biases and len(biases) < len(names):
            raise DataError(f"{self.file.path}: wanted a bias for each of {', '.join(rows)} of "
                            f"{prefix}, or for none")
        if biases:
            yield f"{name}.bias", join_rows(*biases)

    def linear(self, prefix: str, stored: str, name: str,
               *shape: int) -> Iterator[tuple[str, Weight]]:
        yield name, self.take(f"{prefix}{stored}.weight", *shape)
        if f"{prefix}{stored}.bias" in self.unread:
            yield f"{name}.bias", self.take(f"{prefix}{stored}.bias", shape[0])

    def take(self, name: str, *shape: int) -> Weight:
        blocks = self.file.blocks(name)
        info = self.file.tensors[name]
        self.unread.pop(name, None)
        if info.shape != shape:
            raise DataError(f"{self.file.path}: wanted the tensor {name} of shape {list(shape)}, "
                            f"got {list(info.shape)}; convert the model again")
        if info.type in FLOATS:
            return blocks.view(FLOATS[info.type]).to(self.dtype)
        if info.type not in GGML_FORMATS or len(shape) == 1:
            raise DataError(f"{self.file.path}: wanted the tensor {name} as one of "
                            f"{', '.join((*FLOATS, *GGML_FORMATS))}, got {info.type}; quantize "
                            "the model to one of them")
        return GgmlWeight(blocks, info.type)


def rows_to_halves(weight: Any, heads: int) -> Any:
    """Reorder rows from interleaved rotary pairs (llama.cpp) to halves (rotate_half)."""
    if isinstance(weight, GgmlWeight):
        return GgmlWeight(rows_to_halves(weight.blocks, heads), weight.format)
    halves: Tensor = weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
    return halves
