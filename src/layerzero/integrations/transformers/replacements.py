"""Classes whose forward calls lz where the stock one computes by itself.

A module is patched by giving it another class, made here: a subclass of its own, of the same name,
with another `forward`. So weights, hooks, names and identities stay what they were, a deep copy, a
pickle and a replica of a patched module is patched too, and giving the old class back undoes it
exactly. Nothing outside the module changes.

Whatever a forward does not know (more arguments, mixed dtypes, autocast, dropout in training, a
weight that is no parameter any more, a layer that got a hook or was replaced) is computed by the
stock forward, call by call.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module

from ..rewiring import public, rewired, sdpa_aliases
from .linear_attention import replacements

Forward = Callable[..., Any]

_autocast = torch._C._is_any_autocast_enabled
_classes: WeakValueDictionary[tuple[type, Recipe], type] = WeakValueDictionary()


@dataclass(frozen=True)
class Recipe:
    """The computation of a module, in lz's words: all that is needed to make the class again."""

    kind: str                                  # one of KINDS
    op: str
    # of the module's parts, in the order that the kind wants
    names: tuple[str, ...] = ()
    types: tuple[type, ...] = ()               # of the layers among them
    eps: str = ""                              # the name of an attribute
    offset: float = 0.0
    form: str = ""                             # the activation; of rope, which elements form a pair
    transposed: tuple[bool, ...] = ()          # layers that keep their weight as (in, out)
    dropout: bool = False                      # in training the stock forward serves
    # the global by which the forward finds its eager attention, where lz computes that one
    eager: str = ""

    @property
    def only_eager(self) -> bool:
        """Only the eager attention is replaced: the module may follow another recipe as well."""
        return self.kind == "attention" and bool(self.eager)


def patched_class(stock: type, recipe: Recipe) -> type:
    """Returns the subclass of `stock` that follows the recipe; one for all modules alike."""
    key = (stock, recipe)
    known = _classes.get(key)
    if known is not None:
        return known

    def reduce(self: Any, protocol: Any) -> Any:
        """Let copy and pickle, which find a class by name, make this one from its recipe."""
        reduced = super(patched, self).__reduce_ex__(protocol)
        if type(self) is not patched or reduced[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return reduced                        # there is another way already
        return remade, (stock, recipe), *reduced[2:]

    patched: Any = type(stock)(stock.__name__, (stock,), {
        **methods_for(stock, recipe), "__reduce_ex__": reduce,
        "__module__": stock.__module__, "__qualname__": stock.__qualname__,
        "__doc__": stock.__doc__, "_layerzero_stock": stock, "_layerzero_recipe": recipe})
    _classes[key] = patched
    return patched  # type: ignore[no-any-return]


def recipe_of(module: nn.Module) -> Recipe | None:
    """Returns what a patched module follows; None for one that is not patched."""
    recipe: Recipe | None = vars(type(module)).get("_layerzero_recipe")
    return recipe


def restore(module: nn.Module, to: type) -> None:
    """Gives the module this class again; also where someone (accelerate does) keeps our forward in
    an attribute."""
    patched = type(module)
    for name, value in list(vars(module).items()):
        if (getattr(value, "__func__", None) is patched.forward
            and getattr(value, "__self__", None) is module):
            vars(module)[name] = _forward_of(to).__get__(module)
    module.__class__ = to


def stock_of(module: nn.Module) -> type:
    return vars(type(module)).get("_layerzero_stock", type(module))  # type: ignore[no-any-return]


def _forward_of(stock: type) -> Any:
    return stock.forward                       # type: ignore[attr-defined]


def remade(stock: type, recipe: Recipe) -> Any:
    """Returns an empty module of a patched class, as unpickling fills it."""
    cls: Any = patched_class(stock, recipe)
    return cls.__new__(cls)


# Forwards. `stock` serves what ours does not.

def _norm(stock: Forward, recipe: Recipe) -> Forward:
    norm, eps, offset, plain = public(recipe.op), recipe.eps, recipe.offset, torch.float32
    weight_name, bias_name = (*recipe.names, "", "")[:2]

    # Under autocast torch computes norms of halves in float32; of mixed dtypes, class by class.
    @functools.wraps(stock)
    def rms(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 1:
            return stock(self, *args, **kwargs)
        x, weight = args[0], self._parameters.get(weight_name)
        if weight is None or x.dtype != weight.dtype or (x.dtype != plain and _autocast()):
            return stock(self, x)
        return norm(x, weight, getattr(self, eps), offset=offset)

    @functools.wraps(stock)
    def layer(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 1:
            return stock(self, *args, **kwargs)
        x, weights = args[0], self._parameters
        weight = weights.get(weight_name)
        if weight is None or x.dtype != weight.dtype or (x.dtype != plain and _autocast()):
            return stock(self, x)
        return norm(x, weight, weights[bias_name] if bias_name else None, getattr(self, eps))

    @functools.wraps(stock)
    def bare(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 1 or (args[0].dtype != plain and _autocast()):
            return stock(self, *args, **kwargs)
        return norm(args[0], eps=getattr(self, eps))

    return bare if not weight_name else layer if recipe.op == "layer_norm" else rms


def _linear(stock: Forward, recipe: Recipe) -> Forward:
    linear, wanted = public("linear"), len(recipe.names)
    transposed = recipe.transposed == (True,)

    # Under autocast torch keeps the lowered copy of a weight for the whole region.
    @functools.wraps(stock)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 1:
            return stock(self, *args, **kwargs)
        x, weights = args[0], self._parameters
        weight = weights.get("weight")
        if weight is None or len(weights) != wanted or x.dtype != weight.dtype or _autocast():
            return stock(self, x)
        return linear(x, weight.t() if transposed else weight, weights.get("bias"))

    return forward


def _mlp(stock: Forward, recipe: Recipe) -> Forward:
    mlp, activation, dropout = public("mlp"), recipe.form, recipe.dropout
    first, last = recipe.names[0], recipe.names[-1]
    second = recipe.names[1] if len(recipe.names) == 3 else ""
    first_type, last_type, second_type = recipe.types[0], recipe.types[-1], recipe.types[
        len(recipe.types) // 2]
    transposed = recipe.transposed[0]
    compiling = torch.compiler.is_compiling

    @functools.wraps(stock)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 1 or (dropout and self.training) or compiling() or _autocast():
            return stock(self, *args, **kwargs)
        x, layers = args[0], self._modules
        gate, up, down = layers.get(first), layers.get(second), layers.get(last)
        if not is_bare(gate, first_type) or not is_bare(down, last_type) or hooked_everywhere() or (
                second and not is_bare(up, second_type)):
            return stock(self, x)
        weight_in, weight_down = gate.weight, down.weight
        weight_up: Any = up.weight if second else None
        if (not x.dtype == weight_in.dtype == weight_down.dtype
            or (second and weight_up.dtype != x.dtype)):
            return stock(self, x)
        if transposed:
            weight_in, weight_down = weight_in.t(), weight_down.t()
            weight_up = weight_up.t() if second else None
        return mlp(x, weight_in, weight_down, activation, weight_up=weight_up, bias_in=gate.bias,
                   bias_up=up.bias if second else None, bias_down=down.bias)

    return forward


def is_bare(layer: Any, kind: Any) -> bool:
    """Calling this layer does nothing but its own forward, that of the class we know."""
    if type(layer) is not kind or "forward" in vars(layer):
        return False
    return not (layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks
                or layer._backward_pre_hooks)


def hooked_everywhere() -> bool:
    """Someone listens to every module: the calls of inner layers must be seen."""
    return bool(nn_module._global_forward_hooks or nn_module._global_forward_pre_hooks
                or nn_module._global_backward_hooks or nn_module._global_backward_pre_hooks)


def _moe(stock: Forward, recipe: Recipe) -> Forward:
    moe, activation, dropout = public("moe"), recipe.form, recipe.dropout
    gate_up, down = recipe.names
    compiling = torch.compiler.is_compiling

    @functools.wraps(stock)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 3 or (dropout and self.training) or compiling() or _autocast():
            return stock(self, *args, **kwargs)
        x, ids, weights = args
        weight_in, weight_down = getattr(self, gate_up), getattr(self, down)
        if not x.dtype == weight_in.dtype == weight_down.dtype:
            return stock(self, *args)
        return moe(x, weight_in, weight_down, ids, weights, activation=activation)

    return forward


# A function among the globals of a forward is replaced in a copy of that forward alone.

def _rope(stock: Forward, recipe: Recipe) -> Forward:
    assert isinstance(stock, FunctionType)
    rope = {name: rotary(stock.__globals__[name], recipe.form) for name in recipe.names}
    forward = rewired(stock, {**rope, **_eager(stock, recipe)})
    functools.update_wrapper(forward, stock)
    return forward


def _linear_attention(stock: Forward, recipe: Recipe) -> Forward:
    plain, compiling = inspect.unwrap(stock), torch.compiler.is_compiling
    assert isinstance(plain, FunctionType)
    replaced = rewired(plain, replacements(plain, recipe.names))

    # the decorator that is left out calls hooks of accelerate's that move weights between devices
    @functools.wraps(stock)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        moved = any("_hf_hook" in vars(m) for m in self._modules.values() if m is not None)
        return (stock if moved or compiling() else replaced)(self, *args, **kwargs)

    return forward


def _attention(stock: Forward, recipe: Recipe) -> Forward:
    """Returns a forward that calls torch's attention itself, or its model's eager function."""
    assert isinstance(stock, FunctionType)
    if recipe.eager:
        replaced = rewired(stock, _eager(stock, recipe))
        functools.update_wrapper(replaced, stock)
        return replaced
    replaced, compiling = rewired(stock, sdpa_aliases(stock)), torch.compiler.is_compiling

    @functools.wraps(stock)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (stock if compiling() else replaced)(self, *args, **kwargs)

    return forward


def _eager(stock: FunctionType, recipe: Recipe) -> dict[str, Any]:
    """Returns lz's function for the eager attention among the forward's globals, by name; {} if the
    model's own stays."""
    if not recipe.eager:
        return {}
    from .attention import matches_eager  # imports transformers, which is there by now

    return {recipe.eager: matches_eager(stock.__globals__[recipe.eager])}


# Which elements form a pair, and how the tables have each column twice: side by side ("halves") or
# next to each other.
ROTATIONS = {"rotate_half": ("rotate_half", True), "interleaved": ("interleaved", False),
             "interleaved_halves": ("interleaved", True)}


def rotary(stock: Callable[..., Any], form: str) -> Callable[..., Any]:
    """Rotates as transformers' apply_rotary_pos_emb does."""
    rope = public("rope")
    style, halves = ROTATIONS[form]

    def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any,
                             **kwargs: Any) -> Any:
        if args or kwargs or q.dim() != 4 or cos.dim() != 3 or not q.dtype == k.dtype == cos.dtype:
            return stock(q, k, cos, sin, *args, **kwargs)
        width = cos.shape[-1]
        if halves:
            half = width // 2
            cos, sin = cos[..., :half], sin[..., :half]
        else:
            cos, sin = cos[..., ::2], sin[..., ::2]
        return rope(q, k, cos, sin, style=style, rotary_dim=None if width == q.shape[-1] else width)

    return apply_rotary_pos_emb


_MAKERS: dict[str, Callable[[Forward, Recipe], Forward]] = {
    "attention": _attention, "rms_norm": _norm, "layer_norm": _norm, "linear": _linear,
    "lm_head": _linear, "mlp": _mlp, "moe": _moe, "rope": _rope,
    "linear_attention": _linear_attention}
KINDS = tuple(_MAKERS)
# of generate(), for a model as a whole; patched only where it is named
SAMPLING = "sampling"


def methods_for(stock: type, recipe: Recipe) -> dict[str, Any]:
    """Returns what a class that follows the recipe has of its own."""
    if recipe.kind == SAMPLING:
        # transformers is there by then; modules of other libraries need none
        from .sampling import drawing

        return {"_sample": drawing(stock._sample)}  # type: ignore[attr-defined]
    return {"forward": forward_for(_forward_of(stock), recipe)}


def forward_for(stock: Forward, recipe: Recipe) -> Forward:
    return _MAKERS[recipe.kind](stock, recipe)
