"""A decoder over replaceable op calls: served by lz, or computed in plain torch.

A layer is norm -> qkv -> rope -> attention -> projection -> residual -> norm -> MLP -> residual.
`layer_parts` declares it as data: `Decoder` runs the parts one call after the other,
`decoder_block` passes them to lz.tables.plan_block. A Decoder records each intermediate value under
the name of its stage, so that two runs can be compared stage by stage. Tensors are (batch, seq,
...), heads (batch, seq, heads, head_dim). With `fused`, residual and norm are one call and the MLP
is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from .block import Block, Either, Glue, Part, Stage
from .decoder_config import DecoderConfig, Weights, activate, cast, make_weights
from .kv_cache import kv_cache
from .positions import rope_tables

STAGES = ("ln1_out", "q", "k", "scores", "attn_out", "proj_out", "ln2_out", "fc1", "act", "output")


# Recorded stages, and who computes them.

@dataclass(frozen=True)
class StageValue:
    """The value of one stage, and the op call that computed it, if one did."""

    value: Tensor
    op: str = ""
    arguments: Mapping[str, Any] | None = None
    kernel: str = ""
    result: int = 0                            # index among the call's results


Trace = dict[str, StageValue]                  # "3.attn_out" -> value, in the order of computing


class OpCaller(Protocol):
    """Runs an op by name; `kernel` names what served the last call."""

    kernel: str

    def __call__(self, op: str, /, **arguments: Any) -> Any: ...


class PastKV(Protocol):
    """The keys and values of `length` earlier tokens, for every layer."""

    length: int

    def attend(self, do: Callable[..., Any], layer: int, q: Tensor, k: Tensor,
               v: Tensor) -> Tensor: ...


class ConcatKV:
    """Concatenates keys and values; a step is an lz.attention call of fewer queries than keys."""

    def __init__(self, config: DecoderConfig) -> None:
        self.config, self.length = config, 0
        self._kv: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, do: Callable[..., Any], layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer in self._kv:
            k, v = (torch.cat(pair, 1) for pair in zip(self._kv[layer], (k, v)))
        self._kv[layer] = k, v
        out: Tensor = do("attention", query=q, key=k, value=v, is_causal=True,
                         causal_align="bottom_right",
                         window_left=self.config.window_left, layout="bshd")
        return out


class CachedKV:
    """One lz.kv_cache per layer, read by lz.attention ("contiguous") or lz.paged_attention."""

    def __init__(self, config: DecoderConfig, kind: str, batch: int, capacity: int,
                 dtype: torch.dtype,
                 device: str | torch.device = "cpu", page_size: int = 16) -> None:
        size = {"contiguous": {"sequences": batch, "max_len": capacity},
                "paged": {"pages": batch * -(-capacity // page_size), "page_size": page_size}}[kind]
        self.config, self.kind, self.length, self.batch = config, kind, 0, batch
        self.caches = [kv_cache(kind, **size, kv_heads=config.kv_heads, head_dim=config.head_dim,
                                dtype=dtype,
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
            out = do("attention", query=q, key=keys, value=values, is_causal=True,
                     causal_align="bottom_right",
                     window_left=self.config.window_left, layout="bshd")
            return out
        starts = torch.arange(0, self.batch * new + 1, new, dtype=torch.int32, device=q.device)
        out = do("paged_attention", query=q.flatten(0, 1), key_cache=cache.key,
                 value_cache=cache.value, block_table=cache.block_table(),
                 context_lens=cache.context_lens(), cu_seqlens_q=None if new == 1 else starts,
                 max_seqlen_q=new, is_causal=True, window_left=self.config.window_left)
        return out.unflatten(0, (self.batch, new))


# The model.

def layer_parts(c: DecoderConfig, attend: Sequence[Part], *,
                layout: Literal["bshd", "bhsd"] = "bshd", indexed: bool = True) -> tuple[Part, ...]:
    """Returns one layer, from "input" to "output". `attend` computes "attn_out" from "q", "k" and
    "v".

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
    options = {"style": c.rope_style, "layout": layout}
    rope = (Stage("rope", takes, ("q", "k"), options),) if c.positions == "rope" else ()
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
             Glue("activation", lambda wide: activate(c, wide), ("fc1",), ("act",), is_copy=False),
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


def _chosen_parts(parts: Iterable[Part], fused: bool) -> Iterator[Stage | Glue]:
    """Yields the parts with every alternative resolved: separate calls, or the fused one."""
    for part in parts:
        if isinstance(part, Either):
            yield from _chosen_parts(part.ways[-1 if fused else 0], fused)
        else:
            yield part


class Decoder:
    """`do` runs the ops, `tables` are cos and sin of rope. With `trace` every stage is recorded."""

    def __init__(self, config: DecoderConfig, weights: Weights, do: OpCaller,
                 tables: tuple[Tensor, Tensor] | None = None,
                 *, fused: bool = False, trace: Trace | None = None) -> None:
        self.config, self.weights, self.do, self.tables = config, weights, do, tables
        self.fused, self.trace, self.prefix = fused, trace, ""
        attend = Glue("attend", self._attend, ("layer", "q", "k", "v", "past"), ("attn_out",))
        self._layer = tuple(_chosen_parts(layer_parts(config, (attend,)), fused))
        head = Stage("linear", {"x": "norm_out", "weight": "head.weight"}, ("logits",))
        self._head = (_norm(config, "input", "norm", "norm_out"), head)

    def __call__(self, tokens: Tensor, past: PastKV | None = None, *, last: bool = False) -> Tensor:
        """Returns logits (batch, seq, vocab) of tokens (batch, seq) after those in `past`; `last`:
        only the last."""
        x, positions = self.embed(tokens, past)
        for i in range(self.config.layers):
            x = self.layer(i, x, positions, past)
        if past is not None:
            past.length += tokens.shape[1]
        return self.head(x[:, -1:] if last else x)

    def embed(self, tokens: Tensor, past: PastKV | None = None) -> tuple[Tensor, Tensor]:
        positions = self.positions(tokens.shape[1], past)
        x = self._do("", ("embed",), "embedding", ids=tokens, weight=self.weights["embed"])
        if self.config.positions == "learned":
            x = x + self._do("", ("learned",), "embedding", ids=positions,
                             weight=self.weights["positions"])
        return x, positions

    def positions(self, count: int, past: PastKV | None = None) -> Tensor:
        start = past.length if past is not None else 0
        return torch.arange(start, start + count, device=self.weights["norm"].device)[None]

    def head(self, x: Tensor) -> Tensor:
        values = {"input": x, **_values(self.weights, ""),
                  "head.weight": self.weights["embed" if self.config.tied else "head"]}
        self._run(self._head, values)
        logits: Tensor = values["logits"]
        return logits

    def layer(self, i: int, x: Tensor, positions: Tensor, past: PastKV | None = None) -> Tensor:
        at = f"{i}."
        values = {"layer": i, "input": x, "positions": positions, "past": past,
                  **_values(self.weights, at)}
        if self.config.positions == "rope":
            assert self.tables is not None, "a decoder with rope needs tables"
            values["cos"], values["sin"] = self.tables
        self._record(f"{at}input", x)
        self._run(self._layer, values, at)
        out: Tensor = values["output"]
        return out

    def _run(self, parts: Iterable[Stage | Glue], values: dict[str, Any], at: str = "") -> None:
        """Computes the parts in order and adds their results to `values`."""
        for part in parts:
            if isinstance(part, Stage):
                arguments = {param: values[name] for param, name in part.takes.items()}
                out = self._do(at, part.gives, part.op, **arguments, **part.fixed)
            else:
                out = part.run(*(values[name] for name in part.reads))
            results = out if isinstance(out, tuple) else (out,)
            values.update(zip(part.gives, results))
            if isinstance(part, Glue) and not part.is_copy:    # a rearranged copy is no stage
                for name, value in zip(part.gives, results):
                    self._record(f"{at}{name}", value)

    def _attend(self, i: int, q: Tensor, k: Tensor, v: Tensor, past: PastKV | None) -> Tensor:
        def do(op: str, **arguments: Any) -> Any:
            return self._do(f"{i}.", ("attn_out",), op, **arguments)

        if self.config.positions != "rope":
            self._record(f"{i}.q", q)
            self._record(f"{i}.k", k)
        if past is not None:
            return past.attend(do, i, q, k, v)
        if self.trace is not None:
            self._record(f"{i}.scores", attention_scores(self.config, q, k))
        out: Tensor = do("attention", query=q, key=k, value=v, is_causal=True,
                         window_left=self.config.window_left,
                         layout="bshd")
        return out

    def _do(self, at: str, stages: tuple[str, ...], op: str, **arguments: Any) -> Any:
        out = self.do(op, **arguments)
        if self.trace is not None:
            for n, (stage, value) in enumerate(zip(stages, (out,) if isinstance(out, Tensor)
                                                   else out)):
                self.trace[f"{self.prefix}{at}{stage}"] = StageValue(value.detach(), op, arguments,
                                                                     self.do.kernel, n)
        return out

    def _record(self, stage: str, value: Tensor) -> None:
        if self.trace is not None:
            self.trace[self.prefix + stage] = StageValue(value.detach())


_LAYER_WEIGHTS = ("ln1", "qkv", "out", "ln2", "in", "down")


def _values(weights: Mapping[str, Tensor], at: str) -> dict[str, Any]:
    """Returns the weights of a layer ("3.") or of the last norm ("") by their names in parts."""
    values = {}
    for name in _LAYER_WEIGHTS if at else ("norm",):
        values[f"{name}.weight"] = weights[at + name]
        if (bias := weights.get(f"{at}{name}.bias")) is not None:
            values[f"{name}.bias"] = bias
    return values


def decoder_block(c: DecoderConfig, *, cached: bool = False,
                  dtypes: tuple[torch.dtype, ...] = ()) -> Block:
    """Returns a layer for lz.tables.plan_block, with heads as (batch, heads, seq, head_dim).

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
    """Returns random inputs and weights for decoder_block."""
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


def attention_scores(c: DecoderConfig, q: Tensor, k: Tensor) -> Tensor:
    """Returns the scores (batch, heads, seq, seq) of a whole sequence, zero where a key is masked.

    They are computed in float64, so that two of them differ only by q and k.
    """
    q, k = (t.detach().double().transpose(1, 2) for t in (q, k))
    scores = q @ k.repeat_interleave(c.heads // c.kv_heads,
                                     1).transpose(-1, -2) * c.head_dim ** -0.5
    positions = torch.arange(q.shape[2], device=q.device)
    distance = positions[:, None] - positions
    masked = (distance < 0) | (distance >= (c.window or q.shape[2]))
    return scores.masked_fill(masked, 0.0)
