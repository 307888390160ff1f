"""Linear layers of a model with codes in the place of their weights: weight-only quantization that
can be undone.

A layer gets another class, made here, whose `forward` is lz.quantized_linear; the codes are an
attribute of the module, so names and parameters stay what they are. Its weight stays the parameter
that it was and holds the weight as it was, in the memory of the CPU where the layer is on a device
that has its own: a state dict, a checkpoint, a copy and a pickle of the model are those of the
model as it was, and `undo` gives the bits back. Where the originals were dropped these are refused,
and `undo` leaves what the codes say.

Layers whose weights belong to one product (query, key and value; gate and up) are encoded as one
weight, and each has its rows of the codes.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from ...models.weights.codes import WeightCodes, WeightOnly, why_not_held
from ...models.weights.packing import forget_packed
from ...ops.formulas.ggml import GGML_FORMATS
from ...ops.formulas.quant import FORMATS
from ...spec.errors import ConfigError
from ..rewiring import public
from .replacements import stock_of

CODES = "_layerzero_codes"                     # of a quantized layer: its _QuantizedState
MIN_FEATURES = 32                              # inputs and outputs of a weight that is worth it

_quantize, _dequantize = public("quantize"), public("dequantize")
_linear = public("quantized_linear")
_autocast = torch._C._is_any_autocast_enabled


@dataclass(frozen=True, eq=False)
class _QuantizedState:
    """The state of a quantized layer beside its weight."""

    codes: WeightCodes
    joined: WeightCodes                        # of all layers of its product
    transposed: bool                           # the weight is kept as (in, out)
    stock_class: type                          # the class that it had
    dropped: bool                              # the weight as it was is gone

    def dequantized(self, like: Tensor) -> Tensor:
        """Returns the weight that the codes stand for."""
        c = self.codes
        value: Tensor = (
            _dequantize(c.codes, format=c.format) if c.scales is None else _dequantize(
                c.codes, c.scales, format=c.format, block_size=c.group_size or c.inputs,
                global_scale=c.global_scale, size=c.inputs))
        return (value.t() if self.transposed else value).to(like.dtype).contiguous()


def codes_of(module: Any) -> WeightCodes | None:
    """Returns the codes of a quantized layer; None for any other module."""
    quantized = vars(module).get(CODES)
    return None if quantized is None else quantized.codes


def joined_codes(modules: Sequence[Any]) -> WeightCodes | None:
    """Returns the codes of layers whose rows follow one another, as one weight, or None."""
    quantized = [vars(module).get(CODES) for module in modules]
    if any(h is None or h.joined is not quantized[0].joined for h in quantized):
        return None
    codes: WeightCodes = quantized[0].joined
    return codes if codes.shape[0] == sum(h.codes.shape[0] for h in quantized) else None


def encode(weight: Tensor, wanted: WeightOnly) -> WeightCodes:
    """Returns a weight (outputs, inputs) in the wanted format, or its stand-in on this device."""
    inputs, on_cpu = weight.shape[1], weight.device.type == "cpu"
    name, size = wanted.stored_format(weight.device, inputs), wanted.group_size
    if name in GGML_FORMATS:
        return WeightCodes(_quantize(weight, name), None, None, name, 0, "q8" if on_cpu else "none",
                           inputs)
    by_row = not size and name in ("int8", "fp8_e4m3")
    layout = {"granularity": "channel"} if by_row else {"granularity": "block", "block_size": size}
    codes, scales, *more = _quantize(weight, name, **layout)
    if name == "int4" and weight.dtype == torch.bfloat16:
        # half the bytes to read; codes are those of the scales as they are stored
        codes, scales, *more = _quantize(weight, name, **layout, scales=scales.bfloat16())
    group = 0 if by_row else size or FORMATS[name].block_size
    return WeightCodes(codes, scales, more[0] if more else None, name, group, "none", inputs,
                       wanted.activations)


def quantize_layers(model: nn.Module, wanted: WeightOnly, parts: Any) -> QuantizedLayers:
    """Quantizes the linear layers of a model; `parts` says which belong to one product."""
    groups: list[list[Any]] = []
    for layer in () if parts is None else parts.layers:
        dense = getattr(layer.mlp, "shared", layer.mlp)    # of experts, what all tokens go through
        gate_up = getattr(dense, "gate_up", ())
        groups += [[linear.module for linear in group] for group in (layer.qkv, gate_up)
                   if len(group) > 1]
    holders: list[Any] = [m for m in model.modules() if hasattr(m, "get_output_embeddings")]
    heads = [m.get_output_embeddings() for m in holders]
    conv = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    layers = QuantizedLayers(wanted)
    layers.apply(model, groups, () if conv is None else (conv,), heads)
    return layers


class QuantizedLayers:
    """The layers of a model that were quantized, and how to make them what they were."""

    def __init__(self, wanted: WeightOnly) -> None:
        self.config, self.modules = wanted, []  # type: WeightOnly, list[Any]
        self.left: Counter[str] = Counter()    # layers that stay as they are, by reason
        self.stock_bytes = 0
        self._moved: dict[nn.Parameter, torch.device] = {}

    @property
    def nbytes(self) -> int:
        return sum(vars(m)[CODES].codes.nbytes for m in self.modules)

    @property
    def formats(self) -> dict[str, int]:
        """Format -> layers."""
        return dict(Counter(vars(m)[CODES].codes.format for m in self.modules))

    @property
    def rounds_activations(self) -> bool:
        """Are the inputs of some layers rounded too?"""
        codes = [vars(m)[CODES].codes for m in self.modules]
        return any((c.activations, c.prompts) != ("none", "none") for c in codes)

    def __len__(self) -> int:
        return len(self.modules)

    def apply(self, model: nn.Module, groups: Iterable[Sequence[Any]], conv: tuple[type, ...],
              heads: Iterable[Any]) -> None:
        """Quantizes all linear layers of the model, or changes nothing.

        groups: layers of one product each. conv: classes that keep weights as (in, out). heads:
        layers that give logits.
        """
        known = _candidates(model, self.config, conv, {id(h) for h in heads}, self.left)
        shared = Counter(id(p) for m in model.modules() for p in m._parameters.values()
                         if p is not None)
        together = [list(group) for group in groups if all(id(m) in known for m in group)]
        seen = {id(m) for group in together for m in group}
        together += [[m] for m in known.values() if id(m) not in seen]
        try:
            # weights like any other, whoever asks for it
            with torch.inference_mode(False), torch.no_grad():
                for group in together:
                    self._quantize(group, conv, shared)
        # an interrupt too: half a model is not left quantized
        except BaseException:
            self.undo()
            raise

    def _quantize(self, group: list[Any], conv: tuple[type, ...], shared: Counter[int]) -> None:
        transposed_layers = [isinstance(m, conv) for m in group]
        weights = [m.weight.detach().t() if transposed else m.weight.detach()
                   for m, transposed in zip(group, transposed_layers)]
        whole = encode(weights[0].contiguous() if len(group) == 1 else torch.cat(weights),
                       self.config)
        first = 0
        for module, weight, transposed in zip(group, weights, transposed_layers):
            codes = whole.rows(first, first + len(weight))
            first += len(weight)
            own = shared[id(module.weight)] == 1
            drop = own and self.config.originals == "drop"
            vars(module)[CODES] = _QuantizedState(codes, whole, transposed, type(module), drop)
            module.__class__ = quantized_class(stock_of(module))
            self.modules.append(module)
            self.stock_bytes += weight.nbytes
            if own:
                self._store_original(module.weight)

    def _store_original(self, parameter: nn.Parameter) -> None:
        """Moves a weight as it was to where it is kept."""
        self._moved[parameter] = parameter.device
        if self.config.originals == "drop":
            parameter.data = _nothing(parameter, parameter.dtype)
        elif self.config.originals == "cpu":
            parameter.data = parameter.detach().to("cpu")

    def undo(self) -> None:
        """Gives the layers their class and weight back; the bits, unless they were dropped."""
        with torch.inference_mode(False), torch.no_grad():
            for module in self.modules:
                quantized = vars(module).pop(CODES, None)
                if quantized is None:
                    continue
                module.__class__ = quantized.stock_class
                weight, device = module.weight, quantized.codes.codes.device
                if quantized.dropped:
                    weight.data = quantized.dequantized(weight)
                elif weight in self._moved and weight.device != device:
                    weight.data = weight.detach().to(device)
                forget_packed(quantized.codes.codes)
        self.modules.clear()
        self._moved.clear()


def _candidates(model: nn.Module, wanted: WeightOnly, conv: tuple[type, ...], heads: set[int],
                left: Counter[str]) -> dict[int, Any]:
    """Returns the layers that can be quantized, by id; why others cannot is counted in `left`."""
    modules: dict[int, Any] = {}
    for path, module in model.named_modules():
        if not issubclass(stock_of(module), (nn.Linear, *conv)) or id(module) in modules:
            continue
        reason = _why_not_quantized(path, module, wanted, conv, id(module) in heads)
        if reason:
            left[reason] += 1
        else:
            modules[id(module)] = module
    return modules


def _why_not_quantized(path: str, module: Any, wanted: WeightOnly, conv: tuple[type, ...],
                    is_head: bool) -> str:
    weight = module._parameters.get("weight")
    if stock_of(module) not in (nn.Linear, *conv):
        return f"{stock_of(module).__name__} is a linear layer with more to it"
    if weight is None or type(weight) is not nn.Parameter or weight.is_meta:
        return "its weight is no plain parameter"
    if is_head and not wanted.head:
        return "the head, which stays as it is (WeightOnly(head=True) quantizes it)"
    if wanted.skips(path):
        return "named by skip"
    if not weight.is_floating_point() or weight.element_size() == 1:
        return f"its weight is {str(weight.dtype)[6:]}"
    inputs = weight.shape[0] if isinstance(module, conv) else weight.shape[1]
    if min(weight.shape) < MIN_FEATURES:
        return f"fewer than {MIN_FEATURES} inputs or outputs"
    return why_not_held(wanted, weight.device, inputs)


@lru_cache(maxsize=None)
def quantized_class(stock: type) -> type:
    """Returns the subclass of a linear layer's class that multiplies with codes."""

    def forward(self: Any, input: Tensor) -> Tensor:
        layer_codes, bias = vars(self)[CODES], self._parameters.get("bias")
        if _autocast():
            lowered = torch.get_autocast_dtype(input.device.type)
            input, bias = input.to(lowered), None if bias is None else bias.to(lowered)
        codes: WeightCodes = layer_codes.codes
        out: Tensor = _linear(input, codes.codes, codes.scales, None, bias,
                              **codes.options(input.numel() // codes.inputs))
        return out

    def apply(self: Any, fn: Any, recurse: bool = True) -> Any:
        """Let `.to` move the codes to a device, and cast the weight as it was to the dtype."""
        layer_codes, weight = vars(self)[CODES], self.weight
        like = fn(torch.empty(0, dtype=weight.dtype, device=layer_codes.codes.codes.device))

        def convert(tensor: Tensor) -> Tensor:
            if tensor is not weight:
                return fn(tensor)  # type: ignore[no-any-return]
            return (_nothing(weight, like.dtype) if layer_codes.dropped
                    else weight.detach().to(like.dtype))

        result = super(quantized, self)._apply(convert, recurse)
        if like.device != layer_codes.codes.codes.device:
            moved = layer_codes.codes.to(like.device)
            vars(self)[CODES] = replace(layer_codes, codes=moved, joined=moved)
        return result

    def save(self: Any, destination: Any, prefix: str, keep_vars: bool) -> None:
        check_not_dropped(self, "a state dict of it")
        super(quantized, self)._save_to_state_dict(destination, prefix, keep_vars)

    def load(self: Any, *args: Any, **kwargs: Any) -> None:
        raise ConfigError("load_state_dict wants weights to write to, and this layer computes with "
                          f"{vars(self)[CODES].codes.format} codes: lz.unaccelerate(model) first")

    def reduce(self: Any, protocol: Any) -> Any:
        """Lets a copy or a pickle be that of the layer before it was quantized."""
        check_not_dropped(self, "a copy or a pickle of it")
        layer_codes, state = vars(self)[CODES], dict(vars(self))
        del state[CODES]
        weight, device = self._parameters["weight"], layer_codes.codes.codes.device
        if weight.device != device:
            moved_weight = nn.Parameter(weight.detach().to(device), weight.requires_grad)
            state["_parameters"] = {**self._parameters, "weight": moved_weight}
        return _empty, (stock,), state

    def describe(self: Any) -> str:
        return f"{super(quantized, self).extra_repr()}, weights={vars(self)[CODES].codes.format}"

    quantized: Any = type(stock)(stock.__name__, (stock,), {
        "forward": forward, "_apply": apply, "_save_to_state_dict": save,
        "_load_from_state_dict": load, "__reduce_ex__": reduce, "extra_repr": describe,
        "__module__": stock.__module__, "__qualname__": stock.__qualname__,
        "__doc__": stock.__doc__, "_layerzero_stock": stock})
    return quantized  # type: ignore[no-any-return]


def _nothing(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a number that no one takes for a weight, in the shape of this one."""
    return torch.full((), float("nan"), dtype=dtype, device=weight.device).expand(weight.shape)


def _empty(stock: Any) -> Any:
    """Returns a module of this class, as unpickling fills it."""
    return stock.__new__(stock)


def check_not_dropped(module: Any, what: str) -> None:
    if vars(module)[CODES].dropped:
        raise ConfigError(
            f"{what} wants weights as they were, and lz.accelerate(weights=WeightOnly(..., "
            "originals='drop')) dropped them: lz.unaccelerate(model) puts what the codes stand for "
            "in their place")
