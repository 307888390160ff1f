"""Which models have a decode step that we know: those whose code is that of Llama, Mistral, Qwen2, Qwen3 or Phi3.

A model is recognised by what its classes do, not by what they are called: the body of each `forward` is compared with
those of the families above, as they are installed. A model that was copied from one of them is served too, and one
that has the same module names but another formula is left alone.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
import textwrap
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from ...ops.rope import reference as rope_reference
from .replacements import stock_of

FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "phi3": "Phi3"}
ROLES = ("ForCausalLM", "Model", "DecoderLayer", "Attention", "MLP", "RMSNorm", "RotaryEmbedding")
ACTIVATIONS = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh",
               "gelu_new": "geglu_tanh", "relu": "reglu"}
FIXED_ROPE = ("default", "linear", "llama3", "yarn")       # the angles depend on the position alone

References = dict[str, set[str]]


class NotRecognised(Exception):
    """The model, or this state of it, is none that the decode step was written for; the text says what it is."""


@dataclass(frozen=True)
class Norm:
    weight: Tensor
    eps: float


@dataclass(frozen=True)
class LayerParts:
    """One decoder layer. `qkv` and `gate_up` are the layers whose weights, one after the other, are one product."""

    norm: Norm
    qkv: tuple[nn.Linear, ...]
    q_norm: Norm | None
    k_norm: Norm | None
    out: nn.Linear
    post_norm: Norm
    gate_up: tuple[nn.Linear, ...]
    down: nn.Linear
    activation: str
    heads: int
    kv_heads: int
    head_dim: int
    scale: float


@dataclass(frozen=True)
class DecoderParts:
    """A whole decoder; `head` is None where the model ends with its last norm."""

    base: Any
    embed: nn.Embedding
    layers: tuple[LayerParts, ...]
    norm: Norm
    rotary: Any
    head: nn.Linear | None

    @property
    def weights(self) -> Tensor:
        """Of the embedding: what dtype and device the model has."""
        return self.embed.weight.detach()


def recognise(model: nn.Module) -> DecoderParts:
    """The parts of a decoder; NotRecognised says what stands in the way."""
    references = _references()
    base: Any = model
    head = None
    if _code(_forward(model)) in references.get("ForCausalLM", ()):
        base, head = getattr(model, "model", None), _linear(model, "lm_head")
    _same(base, "Model", references)
    embed, layers, config = getattr(base, "embed_tokens", None), getattr(base, "layers", None), base.config
    if type(embed) is not nn.Embedding or not isinstance(layers, nn.ModuleList) or not len(layers):
        raise NotRecognised(f"{_name(base)} has no plain embed_tokens and layers")
    if embed.max_norm is not None:
        raise NotRecognised("its embedding renormalises the weight")
    kinds = getattr(config, "layer_types", None)
    others = [t for t in kinds or () if t != "full_attention"]
    if others or (kinds is None and getattr(config, "sliding_window", None) is not None):
        raise NotRecognised(f"its attention is {others[0]}" if others else
                            f"its attention has a window of {config.sliding_window} tokens")
    rotary = getattr(base, "rotary_emb", None)
    if getattr(rotary, "rope_type", "") not in FIXED_ROPE:
        raise NotRecognised(f"its rope is of type {getattr(rotary, 'rope_type', None)!r}, whose angles depend on more "
                            "than the position")
    _same(rotary, "RotaryEmbedding", references)
    _one_place(model)
    found = DecoderParts(base, embed, tuple(_layer(x, config, references) for x in layers),
                         _norm(base, "norm", references), rotary, head)
    _check_rope(found)
    return found


def _layer(layer: Any, config: Any, references: References) -> LayerParts:
    _same(layer, "DecoderLayer", references)
    attention, mlp = layer.self_attn, layer.mlp
    _same(attention, "Attention", references)
    _same(mlp, "MLP", references)
    activation = ACTIVATIONS.get(getattr(config, "hidden_act", ""))
    if activation is None:
        raise NotRecognised(f"its activation {getattr(config, 'hidden_act', None)!r} has no kernel here")
    names: tuple[str, ...] = ("qkv_proj",) if hasattr(attention, "qkv_proj") else ("q_proj", "k_proj", "v_proj")
    qkv = tuple(_linear(attention, n) for n in names)
    names = ("gate_up_proj",) if hasattr(mlp, "gate_up_proj") else ("gate_proj", "up_proj")
    gate_up = tuple(_linear(mlp, n) for n in names)
    for group in (qkv, gate_up):
        if len({p.bias is None for p in group}) > 1:
            raise NotRecognised("some of the projections that are made one have a bias and some have none")
    out, down, dim = _linear(attention, "o_proj"), _linear(mlp, "down_proj"), int(attention.head_dim)
    heads = out.in_features // dim
    has_norms = hasattr(attention, "q_norm")
    return LayerParts(
        _norm(layer, "input_layernorm", references), qkv,
        _norm(attention, "q_norm", references) if has_norms else None,
        _norm(attention, "k_norm", references) if has_norms else None, out,
        _norm(layer, "post_attention_layernorm", references), gate_up, down, activation, heads,
        (sum(p.out_features for p in qkv) // dim - heads) // 2, dim, float(attention.scaling))


def _linear(owner: Any, name: str) -> nn.Linear:
    found = getattr(owner, name, None)
    if not isinstance(found, nn.Linear) or stock_of(found) is not nn.Linear or type(found.weight) is not nn.Parameter:
        raise NotRecognised(f"{_name(owner)}.{name} is {_name(found)}, not a plain nn.Linear")
    return found


def _norm(owner: Any, name: str, references: References) -> Norm:
    found: Any = getattr(owner, name, None)
    _same(found, "RMSNorm", references)
    return Norm(found.weight.detach(), float(found.variance_epsilon))


def _one_place(model: nn.Module) -> None:
    kinds = {(p.device, p.dtype) for p in model.parameters()}
    if len(kinds) != 1:
        raise NotRecognised("its weights are of several dtypes or on several devices: "
                            + ", ".join(sorted(f"{str(t)[6:]} on {d}" for d, t in kinds)))
    device, dtype = next(iter(kinds))
    if not dtype.is_floating_point or device.type == "meta":
        raise NotRecognised(f"its weights are {str(dtype)[6:]} on {device}")


def _check_rope(parts: DecoderParts) -> None:
    """The model's own function turns queries and keys as ours does. It is compared by what it gives, since the library
    `kernels` may have wrapped it."""
    attention = parts.base.layers[0].self_attn
    turn = getattr(sys.modules[stock_of(attention).__module__], "apply_rotary_pos_emb", None)
    if turn is None:
        raise NotRecognised(f"{stock_of(attention).__module__} has no apply_rotary_pos_emb")
    gen = torch.Generator("cpu").manual_seed(0)
    q, k = (torch.randn(1, 2, 3, parts.layers[0].head_dim, generator=gen, device="cpu") for _ in range(2))
    inverse = parts.rotary.inv_freq.detach().float().cpu()
    angles = torch.arange(3, device="cpu").float()[:, None] * inverse
    cos, sin = (torch.cat((t, t), -1)[None] for t in (angles.cos(), angles.sin()))
    with torch.no_grad():
        theirs = turn(q, k, cos, sin)
        ours = rope_reference(q, k, angles.cos(), angles.sin(), style="rotate_half", rotary_dim=2 * len(inverse))
    if not all(torch.allclose(a, b, atol=1e-5) for a, b in zip(theirs, ours)):
        raise NotRecognised("its rope pairs other elements than the two halves of a head")


def _same(module: Any, role: str, references: References) -> None:
    if not isinstance(module, nn.Module) or _code(_forward(module)) not in references.get(role, ()):
        raise NotRecognised(f"{_name(module)} does not do what the {role} of {', '.join(FAMILIES.values())} does")


@lru_cache(maxsize=1)
def _references() -> References:
    """Role -> the code of its forward in each family."""
    found: References = {}
    for name, prefix in FAMILIES.items():
        try:
            module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        except ImportError:                    # a release that has no such family
            continue
        for role in ROLES:
            kind = getattr(module, prefix + role, None)
            if kind is not None:
                found.setdefault(role, set()).add(_code(kind.forward))
    return found


@lru_cache(maxsize=1024)
def _code(function: Any) -> str:
    """What a function does: its parameters and its body, without annotations and documentation."""
    plain = inspect.unwrap(function)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(plain))).body[0]
    except (OSError, TypeError, SyntaxError):
        return f"no source: {plain!r}"
    if not isinstance(tree, ast.FunctionDef):
        return f"no function: {plain!r}"
    body = tree.body[1:] if ast.get_docstring(tree) is not None else tree.body
    names = [a.arg for a in (*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs)]
    return f"{names[1:]} {[ast.dump(node) for node in body]}"


def _forward(module: nn.Module) -> Any:
    """Its class's own, whether or not the module is patched."""
    kind: Any = stock_of(module)
    return kind.forward


def _name(thing: Any) -> str:
    return type(thing).__name__
