"""The parts of a decoder that has a decode step: what each layer is made of, and with which
numbers.

Which code is known is said by families.py; here the known code's modules are read. Norms, products,
feed-forward layers and experts are told by recognise.py, which computes each beside the formula of
lz, so that the name of an activation or an offset of a norm is never taken on trust.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ....ops.formulas.moe import PLAIN, activate
from ..implementations import DECODED, Implementations
from ..owned_config import is_uncapped
from ..recognise import Recogniser, rotates
from ..replacements import ROTATIONS, Recipe, recipe_of, stock_of
from .families import FunctionCode, NotRecognised, code_of, is_known, known

FIXED_ROPE = ("default", "linear", "llama3", "yarn")       # the angles depend on the position alone

# cos and sin, for each kind of layer that has its own
Angles = tuple[tuple[Tensor, Tensor], ...]


@dataclass(frozen=True)
class Norm:
    op: str                                    # rms_norm or layer_norm
    weights: tuple[Tensor, ...]                # the weight, and the bias, of one that has them
    eps: float
    offset: float                              # what is added to the weight of an RMS norm
    gains: tuple[Linear, ...] = ()             # whose weights, in turn, are those of the heads


@dataclass(frozen=True)
class Linear:
    module: Any
    transposed: bool                           # its weight is kept as (in, out)

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs, inputs."""
        out, into = self.module.weight.shape
        return (into, out) if self.transposed else (out, into)


@dataclass(frozen=True)
class FeedForward:
    """`into` are the layers whose weights, one after the other, are one product: gate and up, or up
    alone."""

    into: tuple[Linear, ...]
    down: Linear
    activation: str                            # as lz.mlp calls it


@dataclass(frozen=True)
class Experts:
    """For each token the best `top_k` of many feed-forward layers; and one, maybe, that serves all
    tokens."""

    router: Tensor
    top_k: int
    normalize: bool
    gate_up: Tensor                            # (experts, 2 * inner, hidden)
    down: Tensor                               # (experts, hidden, inner)
    activation: str
    shared: FeedForward | None
    shared_gate: Linear | None


@dataclass(frozen=True)
class LayerParts:
    """One decoder layer. A norm that is None is not there.

    In turn: x += attn_post(attention(norm(x))), then x += mlp_post(mlp(mlp_norm(x))). Side by side
    (`parallel`): x += attention(norm(x)) + mlp(mlp_norm(x)), where no mlp_norm means that both get
    the same. What is added is times `branch_scale`.
    """

    norm: Norm | None
    # layers whose weights, one after the other, are one product
    qkv: tuple[Linear, ...]
    # query, key and value of a head lie together, head after head
    by_head: bool
    # over each head, or over all of them, as its weight is long
    q_norm: Norm | None
    k_norm: Norm | None
    out: Linear
    attn_post: Norm | None
    mlp_norm: Norm | None
    mlp: FeedForward | Experts
    mlp_post: Norm | None
    parallel: bool
    branch_scale: float
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    softcap: float                             # of the scores; 0.0 is none
    window: int | None                         # tokens that are seen, the new one too
    angles: int | None                         # which of the angles turn it; None: it is not turned


@dataclass(frozen=True)
class DecoderParts:
    """A whole decoder; `head` is None where the model ends with its last norm."""

    base: Any
    embed: nn.Embedding
    embed_scale: Tensor | float | None         # the embedding's is a tensor, the decoder's a number
    positions: nn.Embedding | None             # learned ones, which are added to the token
    first_position: int                        # where the table of these begins
    # a position is the number of tokens before it that the mask shows
    counted: bool
    layers: tuple[LayerParts, ...]
    norm: Norm
    rotary: Any                                # None where positions are learned
    rotation: str                              # one of ROTATIONS
    # of layers with angles of their own; one kind "" where all are alike
    kinds: tuple[str, ...]
    by_axes: bool                              # a position may be three: time, row and column
    head: Linear | None
    softcap: float                             # of the logits; 0.0 is none
    logit_scale: float
    result: Any                                # the class of what the model returns

    @property
    def weights(self) -> Tensor:
        """Of the embedding: what dtype and device the model has."""
        return self.embed.weight.detach()

    @cached_property
    def half(self) -> int:
        """Pairs of a head that are turned."""
        found = self.angles_at(torch.zeros((1, 1), dtype=torch.int64, device=self.weights.device))
        return int(found[0][0].shape[-1]) // 2 if found else 0

    def embedded(self, ids: Tensor) -> Tensor:
        """What the model's embedding gives, and `inputs_embeds` holds."""
        x = F.embedding(ids, self.embed.weight)
        return x * self.embed_scale.to(x.dtype) if isinstance(self.embed_scale, Tensor) else x

    def first_input(self, x: Tensor, positions: Tensor) -> Tensor:
        """What the first layer gets, of embedded tokens."""
        if self.embed_scale is not None and not isinstance(self.embed_scale, Tensor):
            x = x * self.embed_scale
        return x if self.positions is None else x + F.embedding(
            positions + self.first_position if self.first_position else positions,
            self.positions.weight)

    def angles_at(self, positions: Tensor) -> Angles:
        """Cos and sin, (batch, tokens, 2 * half), where the second half is the first again; none
        where positions are learned. The model makes them."""
        if self.rotary is None:
            return ()
        like, twice = self.weights, ROTATIONS[self.rotation][1]
        made = [self.rotary(like, positions, *((kind,) if kind else ())) for kind in self.kinds]
        return tuple((_table(cos, like, twice), _table(sin, like, twice)) for cos, sin in made)


def decoders_in(model: nn.Module) -> list[nn.Module]:
    """The model itself, where it is a decoder that is known or holds none; else those that it
    holds, the largest first: the language model of one that sees or hears."""
    if is_known(model, "head") or is_known(model, "decoder") or hasattr(model, "_orig_mod"):
        return [model]                         # what torch.compile made of a model stays as it is
    found = [m for m in model.modules()
             if hasattr(m, "get_input_embeddings") and is_known(m, "decoder")]
    return sorted(found, key=lambda m: -sum(p.numel() for p in m.parameters())) or [model]


def recognise(model: nn.Module) -> DecoderParts:
    """The parts of a decoder; NotRecognised says what stands in the way."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise NotRecognised("its decoder attends to what an encoder gives as well "
                            "(cross-attention), which the step does not compute")
    base: Any = model
    read = _Reader()
    head, softcap, logit_scale, result = None, 0.0, 1.0, None
    if is_known(model, "head"):
        code = code_of(model)
        base, head = _named_by(model, code, "model", "transformer",
                               "gpt_neox"), read.linear(model, "lm_head")
        base = base.decoder if "decoder" in code.names else base
        result = code.returned
        softcap = _number(getattr(model.config, "final_logit_softcapping", None)
                          if "final_logit_softcapping" in code.names else None)
        if "logits_scaling" in code.names:
            logit_scale = 1.0 / float(model.config.logits_scaling)  # type: ignore[union-attr,arg-type]
        elif "logit_scale" in code.names:
            logit_scale = float(model.logit_scale)  # type: ignore[arg-type]
        if head.transposed:
            raise NotRecognised("its lm_head keeps its weight as (in, out)")
    inner = known(base, "decoder")
    config = base.config
    embed = _named_by(base, inner, "embed_tokens", "embed_in", "wte", "word_embeddings")
    layers = _named_by(base, inner, "layers", "h")
    positions = next((getattr(base, n) for n in ("wpe", "embed_positions") if n in inner.names),
                     None)
    first = (0 if positions is None or type(positions) is nn.Embedding
             else _first_position(positions))
    scale = (base.embedding_multiplier if "embedding_multiplier" in inner.names
             else _embedding_scale(embed))
    for table in (embed, positions):
        if (table is not None and (getattr(table, "max_norm", None) is not None
                                   or not isinstance(table, nn.Embedding))):
            raise NotRecognised(
                f"its embedding is {type(table).__name__}, or renormalises its weight")
    if not isinstance(layers, nn.ModuleList) or not len(layers):
        raise NotRecognised(f"{type(base).__name__} has no list of layers")
    if ("project_in" in inner.names
        and (base.project_in is not None or base.project_out is not None)):
        raise NotRecognised("its embedding is narrower than its layers")
    for name in ("use_bidirectional_attention", "add_cross_attention", "output_router_logits",
                 "clip_qkv", "alibi", "new_decoder_architecture"):
        outside = name == "use_bidirectional_attention" and name not in inner.names
        if getattr(config, name, False) and not outside:       # whose masks are made outside
            raise NotRecognised(f"its configuration says {name}")
    _one_place(model)
    rotary = base.rotary_emb if "rotary_emb" in inner.names else None
    kinds = _rope_kinds(rotary, config)
    return DecoderParts(
        base=base, embed=embed, embed_scale=scale, positions=positions, first_position=first,
        counted="cumsum" in inner.names,
        layers=tuple(read.layer(x, _window(config, inner, i), _kind(kinds, config, i))
                     for i, x in enumerate(layers)),
        norm=read.norm(_named_by(base, inner, "norm", "final_layernorm", "final_layer_norm",
                                 "ln_f")),
        rotary=rotary, rotation="rotate_half" if rotary is None else _rotation(layers[0]),
        kinds=kinds, by_axes=hasattr(rotary, "mrope_section"), head=head, softcap=softcap,
        logit_scale=logit_scale, result=result
        or inner.returned)


def _embedding_scale(embed: Any) -> Tensor | None:
    if type(embed) is nn.Embedding:
        return None
    known(embed, "scaled embedding")
    return embed.embed_scale  # type: ignore[no-any-return]


def _first_position(positions: Any) -> int:
    known(positions, "learned positions")
    return int(positions.offset)


def _window(config: Any, code: FunctionCode, at: int) -> int | None:
    """How far the layer sees: as the model's masks have it."""
    if "layer_types" in code.names:
        kind = config.layer_types[at]
        if kind not in ("full_attention", "sliding_attention"):
            raise NotRecognised(f"its attention is {kind}")
        window = config.sliding_window if kind == "sliding_attention" else None
    else:
        window = config.sliding_window if "sliding_window" in code.names else None
    if window is not None and window < 2:
        raise NotRecognised(f"its attention has a window of {window} tokens")
    return window


def _rope_kinds(rotary: Any, config: Any) -> tuple[str, ...]:
    if rotary is None:
        return ("",)
    code, types = known(rotary, "rotary"), getattr(rotary, "rope_type", "")
    by_layer = "layer_type" in code.names
    for kind in types.values() if isinstance(types, dict) else (types,):
        if kind not in FIXED_ROPE:
            raise NotRecognised(
                f"its rope is of type {kind!r}, whose angles depend on more than the position")
    return tuple(sorted(set(config.layer_types))) if by_layer else ("",)


def _kind(kinds: tuple[str, ...], config: Any, at: int) -> int:
    return 0 if kinds == ("",) else kinds.index(config.layer_types[at])


class _Reader:
    """Reads the modules of one model; of modules alike, one is tried."""

    def __init__(self) -> None:
        self.tried = Recogniser()
        self.implementations = Implementations(DECODED)

    def layer(self, layer: Any, window: int | None, angles: int) -> LayerParts:
        code = known(layer, "layer")
        names = code.names
        attention = _attention_of(layer)
        inner = known(attention, "attention")
        refused = self.implementations.refused(attention)
        if refused:
            raise NotRecognised(refused)
        if getattr(attention, "reorder_and_upcast_attn", False):
            raise NotRecognised(
                "its attention is computed in another order (reorder_and_upcast_attn)")
        if "do_layer_norm_before" in names and not layer.do_layer_norm_before:
            raise NotRecognised("its norms are of the sums (do_layer_norm_before is off)")

        def norm(*called: str) -> Norm | None:
            found = next((getattr(layer, n, None) for n in called if n in names), None)
            return None if found is None else self.norm(found)

        after = "post_feedforward_layernorm" in names              # norms of what a branch gives
        shared = not names & {"post_attention_layernorm", "ln_2", "final_layer_norm"}
        parallel = (shared
                    or ("use_parallel_residual" in names and bool(layer.use_parallel_residual)) or (
             "parallel_attn" in names and bool(layer.config.parallel_attn)))
        split = ("q_proj", "k_proj", "v_proj")
        whole = [n for n in ("qkv_proj", "c_attn", "query_key_value") if n in inner.names]
        qkv = tuple(self.linear(attention, n) for n in whole or split)
        if len({p.module.bias is None for p in qkv}) > 1:
            raise NotRecognised(
                "some of the projections that are made one have a bias and some have none")
        out = self.linear(attention, next(n for n in ("o_proj", "dense", "c_proj", "out_proj")
                                          if n in inner.names))
        dim = int(_named_by(attention, inner, "head_dim", "head_size"))
        heads = out.shape[1] // dim
        q_norm, k_norm = self.head_norms(attention, inner)
        capped = "attn_logit_softcapping" in inner.names and not is_uncapped(attention)
        return LayerParts(
            norm=norm("input_layernorm", "ln_1", "self_attn_layer_norm"),
            qkv=qkv,
            by_head=bool({"query_key_value", "multi_query"} & inner.names) and not getattr(
                attention, "multi_query", False),
            q_norm=q_norm, k_norm=k_norm, out=out,
            attn_post=norm("post_attention_layernorm" if after else "post_self_attn_layernorm"),
            mlp_norm=norm(*(("pre_feedforward_layernorm",) if after else (
                "post_attention_layernorm", "ln_2", "final_layer_norm"))),
            mlp=self.inline(layer) if "fc1" in names
            else self.feed_forward(_named_by(layer, code, "mlp")),
            mlp_post=norm("post_feedforward_layernorm", "post_mlp_layernorm"),
            parallel=parallel,
            branch_scale=float(layer.residual_multiplier) if "residual_multiplier" in names
            else 1.0,
            heads=heads, kv_heads=(sum(p.shape[0] for p in qkv) // dim - heads) // 2, head_dim=dim,
            scale=float(getattr(attention, "scaling", dim ** -0.5)),
            softcap=_number(attention.attn_logit_softcapping if capped else None),
            window=window,
            angles=angles if inner.turns(attention) else None)

    def head_norms(self, attention: Any, code: FunctionCode) -> tuple[Norm | None, Norm | None]:
        asked = next((n for n in ("qk_layernorm", "use_qk_norm") if n in code.names), None)
        if asked is not None and not getattr(attention, asked):
            return None, None
        names = next((pair for pair in (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"))
                      if pair[0] in code.names),
                     None)
        if names is None:
            return None, None
        q_norm, k_norm = (self.head_norm(getattr(attention, n)) for n in names)
        return q_norm, k_norm

    def head_norm(self, found: Any) -> Norm:
        """One norm for all heads, or a layer norm that has a weight for each of them."""
        each = tuple(getattr(found, "norms", (found,)))
        if each == (found,) and getattr(found, "weight", torch.empty(0)).dim() < 2:
            return self.norm(found)
        known(found, "norm of each head")
        if any(getattr(m, "bias", None) is not None for m in each):
            raise NotRecognised("the norms of its heads have a bias")
        eps = next(v for n, v in vars(each[0]).items() if "eps" in n)
        return Norm("layer_norm", (), float(eps), 0.0, tuple(Linear(m, False) for m in each))

    def feed_forward(self, module: Any) -> FeedForward | Experts:
        if is_known(module, "mixture of experts"):
            return self.experts(module)
        if any(recipe_of(m) is not None for m in module.children()):
            raise NotRecognised(f"a {type(module).__name__} computes no MLP that lz has")
        found = self.recipe(module, "mlp")
        layers = tuple(self.linear(module, n) for n in found.names)
        if len({p.module.bias is None for p in layers[:-1]}) > 1:
            raise NotRecognised("one of gate and up has a bias and the other has none")
        return FeedForward(layers[:-1], layers[-1], found.form)

    def inline(self, layer: Any) -> FeedForward:
        """A feed-forward part without a module of its own."""
        x = torch.linspace(-4, 4, 101, dtype=torch.float64, device="cpu")
        form = next((form for form in PLAIN
                     if torch.allclose(layer.activation_fn(x), activate(x, form))), None)
        if form is None:
            raise NotRecognised(
                f"its activation {type(layer.activation_fn).__name__} is none that lz has")
        return FeedForward((self.linear(layer, "fc1"),), self.linear(layer, "fc2"), form)

    def experts(self, module: Any) -> Experts:
        code, router = code_of(module), known(module.gate, "router")
        found = self.recipe(module.experts, "moe")
        gate_up, down = (getattr(module.experts, n).detach() for n in found.names)
        shared = self.feed_forward(module.shared_expert) if "shared_expert" in code.names else None
        assert not isinstance(shared, Experts)
        return Experts(
            module.gate.weight.detach(), int(module.gate.top_k),
            bool(module.gate.norm_topk_prob) if "norm_topk_prob" in router.names else True, gate_up,
            down, found.form, shared, None if shared is None
            else self.linear(module, "shared_expert_gate"))

    def recipe(self, module: Any, *kinds: str) -> Recipe:
        """What a module computes, as it was patched or as it is found to compute now."""
        found = recipe_of(module) if isinstance(module, nn.Module) else None
        verdict = found or (self.tried(module) if isinstance(module, nn.Module) else None)
        if not isinstance(verdict, Recipe) or verdict.kind not in kinds:
            raise NotRecognised(verdict if isinstance(verdict, str) else
                                f"a {type(module).__name__} computes no {' or '.join(kinds)} that "
                                "lz has")
        return verdict

    def linear(self, owner: Any, name: str) -> Linear:
        found = getattr(owner, name, None)
        if (not isinstance(found, nn.Module)
            or type(getattr(found, "weight", None)) is not nn.Parameter):
            raise NotRecognised(
                f"{type(owner).__name__}.{name} is {type(found).__name__}, not a plain nn.Linear")
        if stock_of(found) is nn.Linear:
            return Linear(found, False)
        return Linear(found, self.recipe(found, "linear", "lm_head").transposed == (True,))

    def norm(self, found: Any) -> Norm:
        recipe = self.recipe(found, "rms_norm", "layer_norm")
        weights = tuple(found._parameters[n].detach() for n in recipe.names)
        return Norm(recipe.op, weights, float(getattr(found, recipe.eps)), recipe.offset)


def _attention_of(layer: Any) -> Any:
    return _named_by(layer, code_of(layer), "self_attn", "attention", "attn", "self_attention")


def _named_by(owner: Any, code: FunctionCode, *names: str) -> Any:
    """The first of these attributes that the code of its owner speaks of."""
    found = next((n for n in names if n in code.names and hasattr(owner, n)), None)
    if found is None:
        raise NotRecognised(f"{type(owner).__name__} has none of {', '.join(names)}")
    return getattr(owner, found)


def _number(found: Any) -> float:
    return 0.0 if found is None else float(found)


def _one_place(model: nn.Module) -> None:
    kinds = {(p.device, p.dtype) for p in model.parameters()}
    if len(kinds) != 1:
        raise NotRecognised("its weights are of several dtypes or on several devices: "
                            + ", ".join(sorted(f"{str(t)[6:]} on {d}" for d, t in kinds)))
    device, dtype = next(iter(kinds))
    if not dtype.is_floating_point or device.type == "meta":
        raise NotRecognised(f"its weights are {str(dtype)[6:]} on {device}")


def _rotation(layer: Any) -> str:
    """How the model's own function turns queries and keys. It is told by what it gives, since the
    library `kernels` may have wrapped it."""
    attention = _attention_of(layer)
    turn = getattr(sys.modules[stock_of(attention).__module__], "apply_rotary_pos_emb", None)
    found = (None if turn is None else next((form for form in ROTATIONS if rotates(turn, form)),
                                            None))
    if found is None:
        raise NotRecognised(f"the rope of {stock_of(attention).__module__} is none that lz has")
    return found


def _table(found: Tensor, like: Tensor, twice: bool) -> Tensor:
    found = found.to(like.dtype)
    return found if twice else found[..., ::2].repeat(1, 1, 2)
