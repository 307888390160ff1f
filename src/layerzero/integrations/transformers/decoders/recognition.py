"""Which decoders have a decode step: the model's code is known (families.py), its modules are read
(reading.py), and described by the data of parts.py.

Norms, products, feed-forward layers and experts are left to recognise.py, which computes each
beside the formula of lz, so that the name of an activation or an offset of a norm is never taken on
trust.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..recognise import rotates
from ..replacements import ROTATIONS, stock_of
from .families import FunctionCode, NotRecognised, code_of, is_known, known
from .parts import (
    Angles,
    CrossParts,
    DecoderParts,
    Experts,
    FeedForward,
    LatentParts,
    LayerParts,
    Linear,
    Norm,
)
from .reading import Reader, attention_of, named_by, number
from .score_bias import Alibi, BucketBias

__all__ = ["Angles", "CrossParts", "DecoderParts", "Experts", "FeedForward", "LatentParts",
           "LayerParts", "Linear", "Norm", "NotRecognised", "decoders_in", "recognise"]

FIXED_ROPE = ("default", "linear", "llama3", "yarn")       # the angles depend on the position alone
OTHER_ROPE = ("dynamic", "longrope")                       # on how long the sequence is as well
# `... * self.config.logits_scaling`, where other models divide
_MULTIPLIED = ("op=Mult(), right=Attribute(value=Attribute(value=Name(id='self', ctx=Load()), "
               "attr='config', ctx=Load()), attr='logits_scaling'")


def decoders_in(model: nn.Module) -> list[nn.Module]:
    """Returns the model itself, where it is a decoder that is known or holds none; else those that
    it holds, the largest first: the language model of one that sees or hears."""
    if is_known(model, "head") or is_known(model, "decoder") or hasattr(model, "_orig_mod"):
        return [model]                         # what torch.compile made of a model stays as it is
    decoders = [m for m in model.modules() if hasattr(m, "get_input_embeddings")
             and is_known(m, "decoder") and not _encodes(m)]
    return sorted(decoders, key=lambda m: -sum(p.numel() for p in m.parameters())) or [model]


def _encodes(stack: Any) -> bool:
    """T5's encoder is of the class of its decoder."""
    return "is_decoder" in code_of(stack).names and not stack.is_decoder


class _Head(NamedTuple):
    """The decoder in a model, and what its head makes of the decoder's states."""

    base: Any
    linear: Linear | None = None
    softcap: float = 0.0
    logit_scale: float = 1.0
    result: Any = None                         # the class that its forward returns


def _read_head(model: Any, read: Reader) -> _Head:
    code = code_of(model)
    base = named_by(model, code, "model", "transformer", "gpt_neox")
    linear = read.linear(model, "lm_head")
    base = base.decoder if "decoder" in code.names else base
    softcap = number(getattr(model.config, "final_logit_softcapping", None)
                     if "final_logit_softcapping" in code.names else None)
    logit_scale = 1.0
    if "logits_scaling" in code.names:
        logit_scale = float(model.config.logits_scaling)
        logit_scale = logit_scale if _MULTIPLIED in code.text else 1.0 / logit_scale
    elif "logit_scale" in code.names:
        logit_scale = float(model.logit_scale)
    if linear.transposed:
        raise NotRecognised("its lm_head keeps its weight as (in, out)")
    return _Head(base, linear, softcap, logit_scale, code.returned)


def _check_supported(base: Any, inner: FunctionCode, tables: tuple[Any, ...], layers: Any) -> None:
    """Raises NotRecognised for embeddings, layers and settings that the step cannot compute."""
    for table in tables:
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
        if getattr(base.config, name, False) and not outside:  # whose masks are made outside
            raise NotRecognised(f"its configuration says {name}")


def recognise(model: nn.Module) -> DecoderParts:
    """Returns the parts of a decoder; NotRecognised says what stands in the way."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False) and not is_known(
            model, "decoder"):
        raise NotRecognised("its decoder attends to what an encoder gives as well "
                            "(cross-attention), and is none that is known")
    read = Reader()
    head = _read_head(model, read) if is_known(model, "head") else _Head(model)
    base = head.base
    inner = known(base, "decoder")
    config = base.config
    embed: Any = named_by(base, inner, "embed_tokens", "embed_in", "wte", "word_embeddings")
    layers = named_by(base, inner, "layers", "h", "block", "blocks")
    positions = next((getattr(base, n) for n in ("wpe", "embed_positions") if n in inner.names),
                     None)
    if positions is not None and not isinstance(positions, nn.Embedding) and is_known(
            positions, "sinusoidal positions"):
        positions = nn.Embedding.from_pretrained(positions.weights)
    first = (0 if positions is None or type(positions) is nn.Embedding
             else _first_position(positions))
    books: Any = tuple(embed) if isinstance(embed, nn.ModuleList) else ()
    embed = books[0] if books else embed
    by_decoder = next((n for n in ("embedding_multiplier", "embed_scale") if n in inner.names), "")
    multiplied = bool(by_decoder)
    scale = getattr(base, by_decoder) if multiplied else _embedding_scale(embed)
    of_token = 1.0 if multiplied or scale is None or isinstance(scale, Tensor) else float(scale)
    _check_supported(base, inner, (embed, *books, positions), layers)
    _single_module(model)
    rotary = base.rotary_emb if "rotary_emb" in inner.names else None
    kinds = _rope_kinds(rotary, config)
    stacked = layers is getattr(base, "block", None)
    read_layers = tuple(
        read.stacked(x) if stacked else
        read.layer(x, _window(config, inner, i), _kind(kinds, config, i))
        for i, x in enumerate(layers))
    if head.linear is not None:                # which is called without an encoder
        read_layers = tuple(replace(layer, cross=None) for layer in read_layers)
    norms = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "layer_norm", "norm_f")
    ends = not read_layers[-1].normed_sums or bool(inner.names & set(norms))
    latent = read_layers[0].latent is not None
    rotation, single = ("rotate_half", False) if rotary is None or latent else _rotation(layers[0])
    embed_norm = next((n for n in ("layernorm_embedding", "word_embeddings_layernorm")
                       if n in inner.names), "")
    if ends and read_layers[-1].normed_sums:
        raise NotRecognised("its norms are of the sums, and there is one more at the end")
    return DecoderParts(
        base=base, embed=embed, positions=positions, first_position=first,
        counted="cumsum" in inner.names, layers=read_layers,
        norm=read.norm(named_by(base, inner, *norms)) if ends else None, rotary=rotary,
        rotation=rotation, single=single, fixed_rope=_is_fixed(rotary),
        kinds=() if latent else kinds, by_axes=hasattr(rotary, "mrope_section"),
        head=head.linear, softcap=head.softcap, logit_scale=head.logit_scale,
        result=head.result or inner.returned, codebooks=books,
        embed_scale=scale if multiplied or isinstance(scale, Tensor) else None,
        token_scale=of_token,
        embed_norm=read.norm(getattr(base, embed_norm), False) if embed_norm else None,
        bias=_bucket_bias(base, layers) if stacked else _alibi(base, inner),
        query_scale=_query_scale(attention_of(layers[0])) if not stacked else None)


def _query_scale(attention: Any) -> Any:
    """Ministral 3 scales its queries by their position."""
    if "get_llama_4_attn_scale" not in code_of(attention).names:
        return None
    scale = sys.modules[stock_of(attention).__module__].get_llama_4_attn_scale  # type: ignore[attr-defined]
    rope, like = attention.config.rope_parameters, attention.o_proj.weight
    return lambda positions: scale(positions, rope["llama_4_scaling_beta"],
                                   rope["original_max_position_embeddings"]).to(like.dtype)


def _alibi(base: Any, code: FunctionCode) -> Alibi | None:
    if "build_mpt_alibi_tensor" not in code.names and "word_embeddings_layernorm" not in code.names:
        return None
    like = base.get_input_embeddings().weight
    if "build_alibi_tensor" in code.names and "word_embeddings_layernorm" in code.names:
        two = torch.ones((1, 2), device=like.device)
        slopes = base.build_alibi_tensor(two, base.num_heads, torch.float32)[:, 0, 1]
        return Alibi(slopes, like.dtype, False)
    if "build_mpt_alibi_tensor" in code.names:
        table = base.build_mpt_alibi_tensor(base.num_heads, 2, device=like.device)
        return Alibi(-table[:, 0, 0], like.dtype, True, int(base.config.max_seq_len))
    return None


def _bucket_bias(base: Any, blocks: Any) -> BucketBias:
    attention, *others = (block.layer[0].SelfAttention for block in blocks)
    if not attention.has_relative_attention_bias or any(
            a.has_relative_attention_bias for a in others):
        raise NotRecognised("its layers do not share the position bias of the first")
    if base.dtype == torch.float16:
        raise NotRecognised("in float16 its layers clamp what overflows, which the step does not")
    return BucketBias(attention)


def _embedding_scale(embed: Any) -> Tensor | float | None:
    if type(embed) is nn.Embedding:
        return None
    known(embed, "scaled embedding")
    return embed.embed_scale  # type: ignore[no-any-return]


def _first_position(positions: Any) -> int:
    known(positions, "learned positions")
    return int(getattr(positions, "offset", 0))


def _window(config: Any, code: FunctionCode, at: int) -> int | None:
    """Returns how far the layer sees: as the model's masks have it."""
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
        if kind not in (*FIXED_ROPE, *OTHER_ROPE):
            raise NotRecognised(f"its rope is of type {kind!r}, which is not known")
    return tuple(sorted(set(config.layer_types))) if by_layer else ("",)


def _is_fixed(rotary: Any) -> bool:
    types = getattr(rotary, "rope_type", "default")
    return set(types.values() if isinstance(types, dict) else (types,)) <= set(FIXED_ROPE)


def _kind(kinds: tuple[str, ...], config: Any, at: int) -> int:
    return 0 if kinds == ("",) else kinds.index(config.layer_types[at])


def _single_module(model: nn.Module) -> None:
    kinds = {(p.device, p.dtype) for p in model.parameters()}
    if len(kinds) != 1:
        raise NotRecognised("its weights are of several dtypes or on several devices: "
                            + ", ".join(sorted(f"{str(t)[6:]} on {d}" for d, t in kinds)))
    device, dtype = next(iter(kinds))
    if not dtype.is_floating_point or device.type == "meta":
        raise NotRecognised(f"its weights are {str(dtype)[6:]} on {device}")


def _rotation(layer: Any) -> tuple[str, bool]:
    """Returns how the model's own function rotates queries and keys, and whether it takes each
    column of cos and sin once. Its results tell, since the library `kernels` may have wrapped
    it."""
    attention = attention_of(layer)
    rotate = getattr(sys.modules[stock_of(attention).__module__], "apply_rotary_pos_emb", None)
    if rotate is not None:
        def halved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
            half = cos.shape[-1] // 2
            return rotate(q, k, cos[..., :half], sin[..., :half])

        form = next((form for form in ROTATIONS if rotates(rotate, form)), None)
        if form is not None:
            return form, False
        if rotates(halved, "rotate_half"):
            return "rotate_half", True
    raise NotRecognised(f"the rope of {stock_of(attention).__module__} is none that lz has")
