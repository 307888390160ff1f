"""A decoder, written once over calls that can be replaced: served by lz, or computed in plain torch.

A layer is norm -> qkv -> rope -> attention -> projection -> residual -> norm -> MLP -> residual.
`layer_parts` says so as data: `Decoder` runs the parts one call after the other, `decoder_block`
hands them to lz.tables.plan_block. What a Decoder computes on the way is noted under the name of its
stage, so that two runs can be compared stage by stage. Tensors are (batch, seq, ...), heads
(batch, seq, heads, head_dim). With `fused`, residual and norm are one call and the MLP is one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from ..spec.errors import ConfigError
from .block import Block, Either, Glue, Part, Stage
from .kv_cache import kv_cache
from .positions import rope_tables

Weights = dict[str, Tensor]
STAGES = ("ln1_out", "q", "k", "scores", "attn_out", "proj_out", "ln2_out", "fc1", "act", "output")
_ACT: Mapping[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu, "silu": F.silu, "geglu": F.gelu, "gelu": F.gelu, "reglu": F.relu, "relu": F.relu,
    "geglu_tanh": lambda x: F.gelu(x, approximate="tanh"), "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}
GATED = ("swiglu", "geglu", "geglu_tanh", "reglu")
_CHOICES = {"norm": ("rms", "layer"), "positions": ("rope", "learned", "none"), "activation": tuple(_ACT),
            "rope_style": ("rotate_half", "interleaved")}


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a decoder. Sizes left at 0 follow from the others."""

    hidden: int
    heads: int
    kv_heads: int = 0                          # as many as heads
    layers: int = 2
    head_dim: int = 0                          # hidden / heads
    inner: int = 0                             # 2 * hidden
    vocab: int = 256
    max_positions: int = 256
    norm: str = "rms"                          # or "layer"
    eps: float = 1e-5
    activation: str = "swiglu"                 # any of lz.mlp
    positions: str = "rope"                    # or "learned", "none"
    rope_style: str = "rotate_half"            # or "interleaved"
    rope_base: float = 10000.0
    window: int = 0                            # how many keys a token sees, itself included; 0 for all
    bias: bool = False                         # in projections, MLP and layer norms
    tied: bool = False                         # the head is the embedding

    def __post_init__(self) -> None:
        for name, value in (("kv_heads", self.heads), ("head_dim", self.hidden // max(self.heads, 1)),
                            ("inner", 2 * self.hidden)):
            if not getattr(self, name):
                object.__setattr__(self, name, value)
        sizes = ("hidden", "heads", "kv_heads", "layers", "head_dim", "inner", "vocab", "max_positions")
        small = [n for n in sizes if getattr(self, n) < 1]
        if small:
            raise ConfigError(f"a decoder wants {small[0]} >= 1, got {getattr(self, small[0])}")
        if self.heads % self.kv_heads:
            raise ConfigError(f"a decoder wants heads to be a multiple of kv_heads, got {self.heads} and "
                              f"{self.kv_heads}")
        if self.positions == "rope" and self.head_dim % 2:
            raise ConfigError(f"rope wants an even head_dim, got {self.head_dim}")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"a decoder's {name} is one of {', '.join(choices)}; got {getattr(self, name)!r}")

    @property
    def window_left(self) -> int:
        return self.window - 1 if self.window else -1

    @property
    def jumps(self) -> bool:
        """Does the derivative of the activation jump?"""
        return self.activation in ("relu", "reglu")

    @property
    def gated(self) -> bool:
        return self.activation in GATED

    def __str__(self) -> str:
        return (f"hidden {self.hidden}, heads {self.heads}/{self.kv_heads} x {self.head_dim}, layers {self.layers}, "
                f"MLP {self.inner} {self.activation}, {self.norm} norm, positions {self.positions}")


CONFIGS: Mapping[str, DecoderConfig] = {
    "tiny": DecoderConfig(64, 2),
    "gqa": DecoderConfig(128, 8, 2),
    "deep": DecoderConfig(64, 2, layers=6),
    "wide": DecoderConfig(128, 8),
    "no_rope": DecoderConfig(64, 2, positions="learned"),
    "medium": DecoderConfig(256, 4, layers=4),
}


def parse_config(text: str) -> tuple[str, DecoderConfig]:
    """A name of CONFIGS, or hidden=96,heads=6,kv_heads=3,...; a name may be followed by changes: tiny,layers=3."""
    head, *rest = [part.strip() for part in text.split(",") if part.strip()] or [""]
    if head in CONFIGS:
        base, words = CONFIGS[head], rest
    else:
        base, words = None, [head, *rest]
    known = {f.name: f.type for f in fields(DecoderConfig)}
    given: dict[str, Any] = {}
    for word in words:
        name, sign, value = word.partition("=")
        if not sign or name not in known:
            raise ConfigError(f"--config: wanted one of {', '.join(CONFIGS)}, or name=value of {', '.join(known)}; "
                              f"got {word!r}")
        given[name] = _value(name, known[name], value)
    if base is not None:
        # Sizes that followed from the changed ones follow again.
        lost = {"kv_heads", "head_dim"} if "heads" in given else set()
        lost |= {"head_dim", "inner"} if "hidden" in given else set()
        return text, replace(base, **{**dict.fromkeys(lost, 0), **given})
    missing = [n for n in ("hidden", "heads") if n not in given]
    if missing:
        raise ConfigError(f"--config: a decoder needs hidden= and heads=; {missing[0]} is missing in {text!r}")
    return text, DecoderConfig(**given)


def _value(name: str, kind: Any, text: str) -> Any:
    try:
        if kind == "bool":
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        return {"int": int, "float": float}.get(str(kind), str)(text)
    except (ValueError, KeyError):
        raise ConfigError(f"--config: {name} wants {kind}, got {text!r}") from None


def make_weights(c: DecoderConfig, seed: int = 0) -> Weights:
    """Random, float32, of the sizes that keep values near one."""
    gen = torch.Generator().manual_seed(seed)

    def matrix(rows: int, cols: int) -> Tensor:
        return torch.randn(rows, cols, generator=gen) / math.sqrt(cols)

    def near(centre: float, size: int) -> Tensor:
        return centre + 0.1 * (2 * torch.rand(size, generator=gen) - 1)

    w = {"embed": torch.randn(c.vocab, c.hidden, generator=gen) * (c.hidden ** -0.5 if c.tied else 1.0)}
    if c.positions == "learned":
        w["positions"] = 0.5 * torch.randn(c.max_positions, c.hidden, generator=gen)
    for i in range(c.layers):
        made = {"ln1": near(1.0, c.hidden), "qkv": matrix((c.heads + 2 * c.kv_heads) * c.head_dim, c.hidden),
                "out": matrix(c.hidden, c.heads * c.head_dim), "ln2": near(1.0, c.hidden),
                "in": matrix((2 if c.gated else 1) * c.inner, c.hidden), "down": matrix(c.hidden, c.inner)}
        if c.bias:
            names = ("qkv", "out", "in", "down", *(("ln1", "ln2") if c.norm == "layer" else ()))
            made |= {f"{name}.bias": near(0.0, made[name].shape[0]) for name in names}
        w |= {f"{i}.{name}": t for name, t in made.items()}
    w["norm"] = near(1.0, c.hidden)
    if c.bias and c.norm == "layer":
        w["norm.bias"] = near(0.0, c.hidden)
    if not c.tied:
        w["head"] = matrix(c.vocab, c.hidden)
    return w


def cast(weights: Mapping[str, Tensor], dtype: torch.dtype, device: str | None = None) -> Weights:
    """In another dtype, and on another device if one is said."""
    return {name: t.to(device or t.device, dtype) for name, t in weights.items()}


def parts_of(c: DecoderConfig, name: str, t: Tensor) -> dict[str, Tensor]:
    """A parameter by the names people know: what is stored together is told apart."""
    suffix = ".bias" if name.endswith(".bias") else ""
    layer, _, what = name.removesuffix(".bias").rpartition(".")
    lead = f"layer.{layer}." if layer else ""
    if what == "qkv":
        q, k, v = t.split([n * c.head_dim for n in (c.heads, c.kv_heads, c.kv_heads)])
        return {f"{lead}wq{suffix}": q, f"{lead}wk{suffix}": k, f"{lead}wv{suffix}": v}
    if what == "in" and c.gated:
        gate, up = t.chunk(2)
        return {f"{lead}w_gate{suffix}": gate, f"{lead}w_up{suffix}": up}
    known = {"out": "wo", "in": "w_up", "down": "w_down"}.get(what, what)
    return {f"{lead}{known}{suffix}": t}


# What was computed.

@dataclass(frozen=True)
class Note:
    """One stage: its value, and the call it came from, where it came from one."""

    value: Tensor
    op: str = ""
    given: Mapping[str, Any] | None = None
    kernel: str = ""
    result: int = 0                            # which of the call's results


Trace = dict[str, Note]                        # "3.attn_out" -> note, in the order of computing


class Calls(Protocol):
    """Who computes: `kernel` is the name of what served the last call."""

    kernel: str

    def __call__(self, op: str, /, **given: Any) -> Any: ...


class Memory(Protocol):
    """The keys and values of earlier tokens. `length` counts those before this step."""

    length: int

    def attend(self, do: Callable[..., Any], layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


class Grown:
    """Keys and values laid end to end; every step is an lz.attention call of fewer queries than keys."""

    def __init__(self, config: DecoderConfig) -> None:
        self.config, self.length = config, 0
        self._held: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, do: Callable[..., Any], layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer in self._held:
            k, v = (torch.cat(pair, 1) for pair in zip(self._held[layer], (k, v)))
        self._held[layer] = k, v
        out: Tensor = do("attention", query=q, key=k, value=v, is_causal=True, causal_align="bottom_right",
                         window_left=self.config.window_left, layout="bshd")
        return out


class Cached:
    """lz.kv_cache, one for each layer: "contiguous" is read by lz.attention, "paged" by lz.paged_attention."""

    def __init__(self, config: DecoderConfig, kind: str, batch: int, capacity: int, dtype: torch.dtype,
                 device: str | torch.device = "cpu", page_size: int = 16) -> None:
        size = {"contiguous": {"sequences": batch, "max_len": capacity},
                "paged": {"pages": batch * -(-capacity // page_size), "page_size": page_size}}[kind]
        self.config, self.kind, self.length, self.batch = config, kind, 0, batch
        self.caches = [kv_cache(kind, **size, kv_heads=config.kv_heads, head_dim=config.head_dim, dtype=dtype,
                                device=device) for _ in range(config.layers)]
        for cache in self.caches:
            for _ in range(batch):
                cache.add()

    def attend(self, do: Callable[..., Any], layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache, new = self.caches[layer], q.shape[1]
        cache.append(k, v)
        out: Tensor
        if self.kind == "contiguous":
            keys, values = (t[:self.batch, :self.length + new] for t in (cache.key, cache.value))
            out = do("attention", query=q, key=keys, value=values, is_causal=True, causal_align="bottom_right",
                     window_left=self.config.window_left, layout="bshd")
            return out
        starts = torch.arange(0, self.batch * new + 1, new, dtype=torch.int32, device=q.device)
        out = do("paged_attention", query=q.flatten(0, 1), key_cache=cache.key, value_cache=cache.value,
                 block_table=cache.block_table(), context_lens=cache.context_lens(),
                 cu_seqlens_q=None if new == 1 else starts, max_seqlen_q=new, is_causal=True,
                 window_left=self.config.window_left)
        return out.unflatten(0, (self.batch, new))


# The model.

def layer_parts(c: DecoderConfig, attend: Sequence[Part], *,
                layout: Literal["bshd", "bhsd"] = "bshd", indexed: bool = True) -> tuple[Part, ...]:
    """One layer, from "input" to "output". `attend` makes "attn_out" of "q", "k" and "v".

    The other values it reads are the weights ("ln1.weight", "qkv.weight", "qkv.bias", ...) and,
    with rope, the tables "cos" and "sin". They are `indexed` by the "positions" of the tokens, or
    else have one row for each token. Heads go from rope to attention in `layout`.
    """
    def split(packed: Tensor) -> tuple[Tensor, ...]:
        heads = packed.unflatten(-1, (-1, c.head_dim)).split((c.heads, c.kv_heads, c.kv_heads), -2)
        return tuple(t.transpose(1, 2) for t in heads) if layout == "bhsd" else tuple(heads)

    def join(heads: Tensor) -> Tensor:
        return (heads.transpose(1, 2) if layout == "bhsd" else heads).flatten(-2)

    takes = {"q": "q0", "k": "k0", "cos": "cos", "sin": "sin"}
    if indexed:
        takes["position_ids"] = "positions"
    how = {"style": c.rope_style, "layout": layout}
    rope = (Stage("rope", takes, ("q", "k"), how),) if c.positions == "rope" else ()
    add = Glue("add", torch.add, ("input", "proj_out"), ("resid",), is_copy=False)
    second_norm = _norm(c, "resid", "ln2", "ln2_out")
    add_norm = Stage("add_rms_norm", {"x": "proj_out", "residual": "input", "weight": "ln2.weight"},
                     ("ln2_out", "resid"), {"eps": c.eps})
    biases = {"bias_in": "in.bias", "bias_down": "down.bias"} if c.bias else {}
    return (
        _norm(c, "input", "ln1", "ln1_out"),
        _linear(c, "ln1_out", "qkv", "qkv"),
        Glue("split heads", split, ("qkv",), ("q0", "k0", "v") if rope else ("q", "k", "v")),
        *rope,
        *attend,
        Glue("join heads", join, ("attn_out",), ("joined",)),
        _linear(c, "joined", "out", "proj_out"),
        *((Either(((add, second_norm), (add_norm,))),) if c.norm == "rms" else (add, second_norm)),
        Either((
            (_linear(c, "ln2_out", "in", "fc1"),
             Glue("activation", lambda wide: activated(c, wide), ("fc1",), ("act",), is_copy=False),
             _linear(c, "act", "down", "mlp_out")),
            (Stage("mlp", {"x": "ln2_out", "weight_in": "in.weight", "weight_down": "down.weight",
                           **biases}, ("mlp_out",), {"activation": c.activation}),),
        )),
        Glue("add", torch.add, ("resid", "mlp_out"), ("output",), is_copy=False),
    )


def _linear(c: DecoderConfig, x: str, name: str, gives: str) -> Stage:
    bias = {"bias": f"{name}.bias"} if c.bias else {}
    return Stage("linear", {"x": x, "weight": f"{name}.weight", **bias}, (gives,))


def _norm(c: DecoderConfig, x: str, name: str, gives: str) -> Stage:
    bias = {"bias": f"{name}.bias"} if c.bias and c.norm == "layer" else {}
    takes = {"x": x, "weight": f"{name}.weight", **bias}
    return Stage(f"{c.norm}_norm", takes, (gives,), {"eps": c.eps})


def _way(parts: Iterable[Part], fused: bool) -> Iterator[Stage | Glue]:
    """The parts with every choice made: separate calls, or the fused one."""
    for part in parts:
        if isinstance(part, Either):
            yield from _way(part.ways[-1 if fused else 0], fused)
        else:
            yield part


class Decoder:
    """`do` computes the operations, `tables` are the cosines and sines of rope. With `trace` every stage is noted."""

    def __init__(self, config: DecoderConfig, weights: Weights, do: Calls, tables: tuple[Tensor, Tensor] | None = None,
                 *, fused: bool = False, trace: Trace | None = None) -> None:
        self.config, self.weights, self.do, self.tables = config, weights, do, tables
        self.fused, self.trace, self.prefix = fused, trace, ""
        attend = Glue("attend", self._attend, ("layer", "q", "k", "v", "memory"), ("attn_out",))
        self._layer = tuple(_way(layer_parts(config, (attend,)), fused))
        head = Stage("linear", {"x": "norm_out", "weight": "head.weight"}, ("logits",))
        self._head = (_norm(config, "input", "norm", "norm_out"), head)

    def __call__(self, tokens: Tensor, memory: Memory | None = None, *, last: bool = False) -> Tensor:
        """Logits (batch, seq, vocab) of tokens (batch, seq) that follow those in memory; `last`: of the last one."""
        x, positions = self.embed(tokens, memory)
        for i in range(self.config.layers):
            x = self.layer(i, x, positions, memory)
        if memory is not None:
            memory.length += tokens.shape[1]
        return self.head(x[:, -1:] if last else x)

    def embed(self, tokens: Tensor, memory: Memory | None = None) -> tuple[Tensor, Tensor]:
        positions = self.positions(tokens.shape[1], memory)
        x = self._do("", ("embed",), "embedding", ids=tokens, weight=self.weights["embed"])
        if self.config.positions == "learned":
            x = x + self._do("", ("learned",), "embedding", ids=positions, weight=self.weights["positions"])
        return x, positions

    def positions(self, count: int, memory: Memory | None = None) -> Tensor:
        start = memory.length if memory is not None else 0
        return torch.arange(start, start + count, device=self.weights["norm"].device)[None]

    def head(self, x: Tensor) -> Tensor:
        values = {"input": x, **_values(self.weights, ""),
                  "head.weight": self.weights["embed" if self.config.tied else "head"]}
        self._run(self._head, values)
        logits: Tensor = values["logits"]
        return logits

    def layer(self, i: int, x: Tensor, positions: Tensor, memory: Memory | None = None) -> Tensor:
        at = f"{i}."
        values = {"layer": i, "input": x, "positions": positions, "memory": memory,
                  **_values(self.weights, at)}
        if self.config.positions == "rope":
            assert self.tables is not None, "a decoder with rope needs tables"
            values["cos"], values["sin"] = self.tables
        self._note(f"{at}input", x)
        self._run(self._layer, values, at)
        out: Tensor = values["output"]
        return out

    def _run(self, parts: Iterable[Stage | Glue], values: dict[str, Any], at: str = "") -> None:
        """Compute the parts one after the other; what they give joins the values."""
        for part in parts:
            if isinstance(part, Stage):
                given = {param: values[name] for param, name in part.takes.items()}
                out = self._do(at, part.gives, part.op, **given, **part.fixed)
            else:
                out = part.run(*(values[name] for name in part.reads))
            results = out if isinstance(out, tuple) else (out,)
            values.update(zip(part.gives, results))
            if isinstance(part, Glue) and not part.is_copy:    # another order alone is no stage
                for name, value in zip(part.gives, results):
                    self._note(f"{at}{name}", value)

    def _attend(self, i: int, q: Tensor, k: Tensor, v: Tensor, memory: Memory | None) -> Tensor:
        def do(op: str, **given: Any) -> Any:
            return self._do(f"{i}.", ("attn_out",), op, **given)

        if self.config.positions != "rope":
            self._note(f"{i}.q", q)
            self._note(f"{i}.k", k)
        if memory is not None:
            return memory.attend(do, i, q, k, v)
        if self.trace is not None:
            self._note(f"{i}.scores", scores_of(self.config, q, k))
        out: Tensor = do("attention", query=q, key=k, value=v, is_causal=True, window_left=self.config.window_left,
                         layout="bshd")
        return out

    def _do(self, at: str, stages: tuple[str, ...], op: str, **given: Any) -> Any:
        out = self.do(op, **given)
        if self.trace is not None:
            for n, (stage, value) in enumerate(zip(stages, (out,) if isinstance(out, Tensor) else out)):
                self.trace[f"{self.prefix}{at}{stage}"] = Note(value.detach(), op, given, self.do.kernel, n)
        return out

    def _note(self, stage: str, value: Tensor) -> None:
        if self.trace is not None:
            self.trace[self.prefix + stage] = Note(value.detach())


_LAYER_WEIGHTS = ("ln1", "qkv", "out", "ln2", "in", "down")


def _values(weights: Mapping[str, Tensor], at: str) -> dict[str, Any]:
    """The weights of a layer ("3."), or of the last norm (""), by the names that parts know."""
    found = {}
    for name in _LAYER_WEIGHTS if at else ("norm",):
        found[f"{name}.weight"] = weights[at + name]
        if (bias := weights.get(f"{at}{name}.bias")) is not None:
            found[f"{name}.bias"] = bias
    return found


def decoder_block(c: DecoderConfig, *, cached: bool = False,
                  dtypes: tuple[torch.dtype, ...] = ()) -> Block:
    """A layer for lz.tables.plan_block, with heads as (batch, heads, seq, head_dim).

    Its alternatives: add and norm apart or fused, the MLP in parts or fused. With `cached` the
    keys "past_k" and values "past_v" come before the new ones, and the new ones are results too.
    """
    def extend(past: Tensor, new: Tensor) -> Tensor:
        return torch.cat((past, new), dim=2)

    keys, values = ("keys", "values") if cached else ("k", "v")
    append = (Glue("append k", extend, ("past_k", "k"), (keys,), is_copy=False),
              Glue("append v", extend, ("past_v", "v"), (values,), is_copy=False))
    attention = Stage("attention", {"query": "q", "key": keys, "value": values}, ("attn_out",), {
        "is_causal": True, "causal_align": "bottom_right", "window_left": c.window_left})
    attend = (*append, attention) if cached else (attention,)
    parts = layer_parts(c, attend, layout="bhsd", indexed=False)
    results = ("output", "k", "v") if cached else ("output",)
    return Block(f"decoder {c.heads}/{c.kv_heads}x{c.head_dim}", parts, results, dtypes)


def decoder_values(c: DecoderConfig, *, batch: int = 1, seq: int = 1, past: int = 0,
                   dtype: torch.dtype = torch.float32, device: str = "cpu",
                   seed: int = 0) -> dict[str, Tensor]:
    """Random inputs and weights of that block."""
    gen = torch.Generator().manual_seed(seed + 1)
    shapes: dict[str, tuple[int, ...]] = {"input": (batch, seq, c.hidden)}
    if past:
        shapes |= dict.fromkeys(("past_k", "past_v"), (batch, c.kv_heads, past, c.head_dim))
    values = {name: torch.randn(shape, generator=gen) for name, shape in shapes.items()}
    values |= _values(make_weights(replace(c, layers=1), seed), "0.")
    if c.positions == "rope":
        cos, sin = rope_tables(c.head_dim, past + seq, c.rope_base)
        values |= {"cos": cos[past:], "sin": sin[past:]}
    return cast(values, dtype, device)


def activated(c: DecoderConfig, wide: Tensor) -> Tensor:
    act = _ACT[c.activation]
    if not c.gated:
        return act(wide)
    gate, up = wide.chunk(2, -1)
    return act(gate) * up


def scores_of(c: DecoderConfig, q: Tensor, k: Tensor) -> Tensor:
    """(batch, heads, seq, seq) of a whole sequence, zero where a key is not seen. In float64, so that what differs
    between two of them is q and k."""
    q, k = (t.detach().double().transpose(1, 2) for t in (q, k))
    scores = q @ k.repeat_interleave(c.heads // c.kv_heads, 1).transpose(-1, -2) * c.head_dim ** -0.5
    place = torch.arange(q.shape[2], device=q.device)
    distance = place[:, None] - place
    hidden = (distance < 0) | (distance >= (c.window or q.shape[2]))
    return scores.masked_fill(hidden, 0.0)
