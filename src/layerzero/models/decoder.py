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
from typing import Any, Literal, Protocol, Union

import torch
from torch import Tensor

from .block import Block, Either, Glue, Part, Stage
from .decoder_config import DecoderConfig, activate, cast, make_weights, plain_weights
from .kv_cache import kv_cache
from .positions import rope_tables
from .weights.ggml import GgmlWeight, Weight, format_of, raw_tensor, weight_formats

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

    def attend(self, call_op: Callable[..., Any], layer: int, q: Tensor, k: Tensor,
               v: Tensor) -> Tensor: ...


class ConcatKV:
    """Concatenates keys and values; a step is an lz.attention call of fewer queries than keys."""

    def __init__(self, config: DecoderConfig) -> None:
        self.config, self.length = config, 0
        self._kv: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, call_op: Callable[..., Any], layer: int, q: Tensor, k: Tensor,
               v: Tensor) -> Tensor:
        if layer in self._kv:
            k, v = (torch.cat(pair, 1) for pair in zip(self._kv[layer], (k, v)))
        self._kv[layer] = k, v
        out: Tensor = call_op("attention", query=q, key=k, value=v, is_causal=True,
                         causal_align="bottom_right", layout="bshd",
                         **self.config.attention_options(layer))
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
                                dtype=dtype, device=device) for _ in range(config.layers)]
        for cache in self.caches:
            for _ in range(batch):
                cache.add()

    def attend(self, call_op: Callable[..., Any], layer: int, q: Tensor, k: Tensor,
               v: Tensor) -> Tensor:
        cache, new = self.caches[layer], q.shape[1]
        cache.append(k, v)
        out: Tensor
        if self.kind == "contiguous":
            keys, values = (t[:self.batch, :self.length + new] for t in (cache.key, cache.value))
            out = call_op("attention", query=q, key=keys, value=values, is_causal=True,
                     causal_align="bottom_right", layout="bshd",
                     **self.config.attention_options(layer))
            return out
        starts = torch.arange(0, self.batch * new + 1, new, dtype=torch.int32, device=q.device)
        out = call_op("paged_attention", query=q.flatten(0, 1), key_cache=cache.key,
                 value_cache=cache.value, block_table=cache.block_table(),
                 context_lens=cache.context_lens(), cu_seqlens_q=None if new == 1 else starts,
                 max_seqlen_q=new, is_causal=True, **self.config.attention_options(layer))
        return out.unflatten(0, (self.batch, new))


# The model.

def layer_parts(c: DecoderConfig, attend: Sequence[Part], *, experts: Sequence[Part] = (),
                layout: Literal["bshd", "bhsd"] = "bshd", indexed: bool = True,
                formats: Mapping[str, str] | None = None,
                activations: str = "none") -> tuple[Part, ...]:
    """Returns one layer, from "input" to "output". `attend` computes "attn_out" from "q", "k" and
    "v", `experts` "mlp_out" from "ln2_out" where the layer has them.

    The other values it reads are the weights ("ln1.weight", "qkv.weight", "qkv.bias", ...) and,
    with rope, the tables "cos" and "sin". They are `indexed` by the "positions" of the tokens, or
    else have one row for each token. Heads go from rope to attention in `layout`. `formats` maps
    the names of the weights to their formats, "" for tensors; `activations` is
    lz.quantized_linear's.
    """
    formats = plain_weights(c) if formats is None else formats

    def split(packed: Tensor) -> tuple[Tensor, ...]:
        heads = packed.unflatten(-1, (-1, c.head_dim)).split((c.heads, c.kv_heads, c.kv_heads), -2)
        return tuple(t.transpose(1, 2) for t in heads) if layout == "bhsd" else tuple(heads)

    def join(heads: Tensor) -> Tensor:
        return (heads.transpose(1, 2) if layout == "bhsd" else heads).flatten(-2)

    def linear(x: str, name: str, gives: str) -> Iterator[Part]:
        return _linear(formats, activations, x, name, gives)

    def norm(x: str, name: str, gives: str) -> Stage:
        return _norm(c, x, name, gives, formats)

    raw = ("q0", "k0") if c.positions == "rope" else ("q", "k")
    fresh = ("q1", "k1") if c.qk_norm else raw
    normed = [Stage("rms_norm", {"x": f"{n}1", "weight": f"{n}_norm.weight"}, (product,),
                    {"eps": c.eps}) for n, product in zip("qk", raw)] if c.qk_norm else []
    takes = {"q": "q0", "k": "k0", "cos": "cos", "sin": "sin"}
    if indexed:
        takes["position_ids"] = "positions"
    options: dict[str, Any] = {"style": c.rope_style, "layout": layout}
    if c.rotated != c.head_dim:
        options["rotary_dim"] = c.rotated
    rope = (Stage("rope", takes, ("q", "k"), options),) if c.positions == "rope" else ()
    return (
        norm("input", "ln1", "ln1_out"),
        *linear("ln1_out", "qkv", "qkv"),
        Glue("split heads", split, ("qkv",), (*fresh, "v")),
        *normed,
        *rope,
        *attend,
        Glue("join heads", join, ("attn_out",), ("joined",)),
        *linear("joined", "out", "proj_out"),
        *_residual_norm(c, formats),
        *(experts if c.experts else _mlp_parts(c, formats, linear)),
        *((norm("mlp_out", "post_mlp", "mlp_normed"),) if c.post_norms else ()),
        Glue("add", torch.add, ("resid", "mlp_normed" if c.post_norms else "mlp_out"), ("output",),
             is_copy=False),
    )


def _residual_norm(c: DecoderConfig, formats: Mapping[str, str]) -> Iterator[Part]:
    """Yields "resid" and "ln2_out" from "input" and "proj_out"."""
    branch = "proj_normed" if c.post_norms else "proj_out"
    if c.post_norms:
        yield _norm(c, "proj_out", "post_attention", branch, formats)
    add = Glue("add", torch.add, ("input", branch), ("resid",), is_copy=False)
    second = _norm(c, "resid", "ln2", "ln2_out", formats)
    if c.norm == "rms":
        yield Either(((add, second), (Stage(
            "add_rms_norm", {"x": branch, "residual": "input", "weight": "ln2.weight"},
            ("ln2_out", "resid"), {"eps": c.eps}),)))
    else:
        yield from (add, second)


def _mlp_parts(c: DecoderConfig, formats: Mapping[str, str],
               linear: Callable[[str, str, str], Iterator[Part]]) -> Iterator[Part]:
    """Yields "mlp_out" from "ln2_out"."""
    apart = (*linear("ln2_out", "in", "fc1"),
             Glue("activation", lambda x: activate(c, x), ("fc1",), ("act",), is_copy=False),
             *linear("act", "down", "mlp_out"))
    if formats.get("in", "-") or formats["down"]:  # quantized, or gate and up in two weights
        yield from apart
        return
    biases = {f"bias_{n}": f"{n}.bias" for n in ("in", "down") if f"{n}.bias" in formats}
    yield Either((apart, (Stage(
        "mlp", {"x": "ln2_out", "weight_in": "in.weight", "weight_down": "down.weight", **biases},
        ("mlp_out",), {"activation": c.activation}),)))


# A weight that may be there as several, whose results follow one another.
APART = {"qkv": ("q", "k", "v"), "in": ("gate", "up")}


def _linear(formats: Mapping[str, str], activations: str, x: str, name: str,
            gives: str) -> Iterator[Part]:
    if name not in formats:
        parts = [f"{gives}.{n}" for n in APART[name]]
        for n, part in zip(APART[name], parts):
            yield from _linear(formats, activations, x, n, part)
        yield Glue("join", lambda *outs: torch.cat(outs, -1), tuple(parts), (gives,))
        return
    bias = {"bias": f"{name}.bias"} if f"{name}.bias" in formats else {}
    if formats[name]:
        yield Stage("quantized_linear", {"x": x, "weight_q": f"{name}.weight", **bias}, (gives,),
                    {"scales": None, "format": formats[name], "activations": activations})
    else:
        yield Stage("linear", {"x": x, "weight": f"{name}.weight", **bias}, (gives,))


def _norm(c: DecoderConfig, x: str, name: str, gives: str, formats: Mapping[str, str]) -> Stage:
    bias = {"bias": f"{name}.bias"} if f"{name}.bias" in formats else {}
    takes = {"x": x, "weight": f"{name}.weight", **bias}
    return Stage(f"{c.norm}_norm", takes, (gives,), {"eps": c.eps})


def _chosen_parts(parts: Iterable[Part], fused: bool) -> Iterator[Stage | Glue]:
    """Yields the parts with every alternative resolved: separate calls, or the fused one."""
    for part in parts:
        if isinstance(part, Either):
            yield from _chosen_parts(part.ways[-1 if fused else 0], fused)
        else:
            yield part


Parts = tuple[Union[Stage, Glue], ...]         # with every alternative resolved


class Decoder:
    """A decoder. `call_op` runs its ops, `tables` are cos and sin of rope; with `trace` every stage
    is recorded.

    `window_tables` are those of the layers with a window, where they differ. `activations` is what
    lz.quantized_linear rounds the inputs of quantized weights to.
    """

    def __init__(self, config: DecoderConfig, weights: Mapping[str, Weight], call_op: OpCaller,
                 tables: tuple[Tensor, Tensor] | None = None, *, fused: bool = False,
                 trace: Trace | None = None, window_tables: tuple[Tensor, Tensor] | None = None,
                 activations: str = "none") -> None:
        self.config, self.weights, self.call_op, self.tables = config, weights, call_op, tables
        self.fused, self.trace, self.prefix = fused, trace, ""
        self.window_tables, self.activations = window_tables or tables, activations
        self._parts: dict[tuple[tuple[str, str], ...], Parts] = {}     # weights of a layer -> parts
        self._layers: dict[int, tuple[Parts, dict[str, Any]]] = {}

    def _layer(self, i: int) -> tuple[Parts, dict[str, Any]]:
        """Returns the parts and the weights of a layer."""
        if i not in self._layers:
            formats = weight_formats(self.weights, f"{i}.")
            kind = tuple(sorted(formats.items()))
            if kind not in self._parts:
                attend = Glue("attend", self._attend, ("layer", "q", "k", "v", "past"),
                              ("attn_out",))
                experts = Glue("experts", self.run_experts, ("layer", "ln2_out"), ("mlp_out",))
                self._parts[kind] = tuple(_chosen_parts(layer_parts(
                    self.config, (attend,), experts=(experts,), formats=formats,
                    activations=self.activations), self.fused))
            self._layers[i] = self._parts[kind], layer_values(self.weights, f"{i}.")
        return self._layers[i]

    def __call__(self, tokens: Tensor, past: PastKV | None = None, *, last: bool = False) -> Tensor:
        """Returns logits (batch, seq, vocab) of tokens after `past`; `last`: only the last."""
        x, positions = self.embed(tokens, past)
        for i in range(self.config.layers):
            x = self.layer(i, x, positions, past)
        if past is not None:
            past.length += tokens.shape[1]
        return self.head(x[:, -1:] if last else x)

    def embed(self, tokens: Tensor, past: PastKV | None = None) -> tuple[Tensor, Tensor]:
        positions, weight = self.positions(tokens.shape[1], past), self.weights["embed"]
        if isinstance(weight, GgmlWeight):
            x = weight.rows(tokens).to(raw_tensor(self.weights["norm"]).dtype)
            self._record("embed", x)
        else:
            x = self._call("", ("embed",), "embedding", ids=tokens, weight=weight)
        if self.config.embed_scale != 1.0:
            x = x * self.config.embed_scale
        if self.config.positions == "learned":
            x = x + self._call("", ("learned",), "embedding", ids=positions,
                             weight=self.weights["positions"])
        return x, positions

    def positions(self, count: int, past: PastKV | None = None) -> Tensor:
        start = past.length if past is not None else 0
        return torch.arange(start, start + count, device=self.weights["norm"].device)[None]

    def head(self, x: Tensor) -> Tensor:
        weight = self.weights["embed" if self.config.tied else "head"]
        values = {"input": x, "head.weight": raw_tensor(weight), **layer_values(self.weights, "")}
        formats = {**weight_formats(self.weights, ""), "head": format_of(weight)}
        parts = (_norm(self.config, "input", "norm", "norm_out", formats),
                 *_linear(formats, self.activations, "norm_out", "head", "logits"))
        self._run(_chosen_parts(parts, self.fused), values)
        logits: Tensor = values["logits"]
        cap = self.config.logit_softcap
        return torch.tanh(logits / cap) * cap if cap else logits

    def layer(self, i: int, x: Tensor, positions: Tensor, past: PastKV | None = None) -> Tensor:
        layer = f"{i}."
        parts, weights = self._layer(i)
        values = {"layer": i, "input": x, "positions": positions, "past": past, **weights}
        if self.config.positions == "rope":
            tables = self.window_tables if self.config.has_window(i) else self.tables
            assert tables is not None, "a decoder with rope needs tables"
            values["cos"], values["sin"] = tables
        self._record(f"{layer}input", x)
        self._run(parts, values, layer)
        out: Tensor = values["output"]
        return out

    def _run(self, parts: Iterable[Stage | Glue], values: dict[str, Any], layer: str = "") -> None:
        """Computes the parts in order and adds their results to `values`."""
        for part in parts:
            if isinstance(part, Stage):
                arguments = {param: values[name] for param, name in part.takes.items()}
                out = self._call(layer, part.gives, part.op, **arguments, **part.fixed)
            else:
                out = part.run(*(values[name] for name in part.reads))
            results = out if isinstance(out, tuple) else (out,)
            values.update(zip(part.gives, results))
            if isinstance(part, Glue) and not part.is_copy:    # a rearranged copy is no stage
                for name, value in zip(part.gives, results):
                    self._record(f"{layer}{name}", value)

    def _attend(self, i: int, q: Tensor, k: Tensor, v: Tensor, past: PastKV | None) -> Tensor:
        def traced_call(op: str, **arguments: Any) -> Any:
            return self._call(f"{i}.", ("attn_out",), op, **arguments)

        if self.config.positions != "rope":
            self._record(f"{i}.q", q)
            self._record(f"{i}.k", k)
        if past is not None:
            return past.attend(traced_call, i, q, k, v)
        if self.trace is not None:
            self._record(f"{i}.scores", attention_scores(self.config, q, k, i))
        out: Tensor = traced_call("attention", query=q, key=k, value=v, is_causal=True,
                                  layout="bshd", **self.config.attention_options(i))
        return out

    def run_experts(self, i: int, x: Tensor) -> Tensor:
        """Runs each token through its experts, an expert at a time, and sums by weight."""
        c, weights = self.config, self.weights
        names = (f"{i}.experts_in", f"{i}.experts_down")
        gate_up = ((weights[names[0]],) if names[0] in weights
                   else (weights[f"{i}.experts_gate"], weights[f"{i}.experts_up"]))
        down, rows = weights[names[1]], x.reshape(-1, x.shape[-1])
        logits = self._product(rows, weights[f"{i}.router"])
        ids, share = self.call_op("moe_gate", logits=logits, top_k=c.top_k)
        out = torch.zeros_like(rows)
        for expert in ids.unique().tolist():
            token, slot = (ids == expert).nonzero(as_tuple=True)
            inner = torch.cat([self._product(rows[token], w[expert]) for w in gate_up], -1)
            product = self._product(activate(c, inner), down[expert])
            out.index_add_(0, token, product * share[token, slot, None].to(product.dtype))
        return out.view(x.shape)

    def _product(self, x: Tensor, weight: Weight) -> Tensor:
        out: Tensor
        if isinstance(weight, GgmlWeight):
            out = self.call_op("quantized_linear", x=x, weight_q=weight.blocks, scales=None,
                          format=weight.format, activations=self.activations)
        else:
            out = self.call_op("linear", x=x, weight=weight)
        return out

    def _call(self, layer: str, stages: tuple[str, ...], op: str, **arguments: Any) -> Any:
        out = self.call_op(op, **arguments)
        if self.trace is not None:
            for n, (stage, value) in enumerate(zip(stages, (out,) if isinstance(out, Tensor)
                                                   else out)):
                self.trace[f"{self.prefix}{layer}{stage}"] = StageValue(
                    value.detach(), op, arguments, self.call_op.kernel, n)
        return out

    def _record(self, stage: str, value: Tensor) -> None:
        if self.trace is not None:
            self.trace[self.prefix + stage] = StageValue(value.detach())


def layer_values(weights: Mapping[str, Weight], layer: str) -> dict[str, Any]:
    """Returns the weights of a layer ("3.") or of the last norm ("") by their names in parts."""
    names = weight_formats(weights, layer)
    return {name if name.endswith(".bias") else f"{name}.weight": raw_tensor(weights[layer + name])
            for name in names}


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
    values |= layer_values(make_weights(replace(c, layers=1), seed), "0.")
    if c.positions == "rope":
        cos, sin = rope_tables(c.head_dim, past + seq, c.rope_base, c.rope_scaling,
                               rotary_dim=c.rotated)
        values |= {"cos": cos[past:], "sin": sin[past:]}
    return cast(values, dtype, device)


def attention_scores(c: DecoderConfig, q: Tensor, k: Tensor, layer: int = 0) -> Tensor:
    """Returns the scores (batch, heads, seq, seq) of a whole sequence, zero where a key is masked.
    They are computed in float64, so that two of them differ only by q and k."""
    q, k = (t.detach().double().transpose(1, 2) for t in (q, k))
    scores = q @ k.repeat_interleave(c.heads // c.kv_heads,
                                     1).transpose(-1, -2)
    scores = scores * (c.attention_scale or c.head_dim ** -0.5)
    if c.softcap:
        scores = torch.tanh(scores / c.softcap) * c.softcap
    positions = torch.arange(q.shape[2], device=q.device)
    distance = positions[:, None] - positions
    masked = (distance < 0) | (distance >= (c.window if c.has_window(layer) else q.shape[2]))
    return scores.masked_fill(masked, 0.0)
