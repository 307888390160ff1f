"""Weights of several linear layers side by side in memory, so that one product computes them all.

Nobody else is to see it: every parameter stays the object it was, with its shape, strides and
values, at the start of a storage of its own that holds nothing else. Only the addresses follow one
another, and `Joined.weight` reads them as one tensor. What is written to a parameter in place is
seen by the product; where a parameter gets other memory (`module.to`, `p.data = ...`) the decode
step notices and serves no more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Union

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from ....models.weights.codes import WeightCodes
from ..decoders.families import NotRecognised
from ..decoders.recognition import Linear
from ..quantized import codes_of, joined_codes

Weight = Union[Tensor, WeightCodes]


class Joined:
    """The weights of linear layers as one (outputs, inputs) tensor; of a single layer it is the
    layer's own. Those of quantized layers are codes already and side by side."""

    def __init__(self, layers: Sequence[Linear]) -> None:
        # parameters that were moved, and their addresses
        self._placed: list[tuple[nn.Parameter, int]] = []
        weights = [layer.module.weight for layer in layers]
        biases = [bias for layer in layers
                  if (bias := getattr(layer.module, "bias", None)) is not None]
        self.weight: Weight
        codes = _codes(layers)
        if codes is not None:
            self.weight = codes
            self.bias = (torch.cat([b.detach() for b in _with_zeros(layers, biases[0])])
                         if biases else None)
            return
        if len(layers) == 1:
            self.weight = weights[0].detach().t() if layers[0].transposed else weights[0].detach()
            self.bias = biases[0].detach() if biases else None
            return
        if any(layer.transposed for layer in layers):
            raise NotRecognised(
                "its projections keep their weights as (in, out), which cannot lie side by side")
        self.weight = self._join(weights)
        try:
            self.bias = self._join(_with_zeros(layers, biases[0])) if biases else None
        except BaseException:
            self.undo()
            raise

    def _join(self, parameters: Sequence[Tensor]) -> Tensor:
        whole = torch.cat([p.detach() for p in parameters])
        # DLPack gives each part a storage of its own length; a view would have the whole's.
        parts = [from_dlpack(part) for part in whole.split([len(p) for p in parameters])]
        for parameter, part in zip(parameters, parts):
            if isinstance(parameter, nn.Parameter):
                parameter.data = part
                self._placed.append((parameter, part.data_ptr()))
        return whole

    def undo(self) -> None:
        """Gives every parameter its own memory again; one that was replaced keeps that."""
        # weights like any other, whoever undoes it where
        with torch.inference_mode(False), torch.no_grad():
            for parameter, address in self._placed:
                if parameter.data_ptr() == address:
                    parameter.data = parameter.detach().clone()
        self._placed.clear()


def _with_zeros(layers: Sequence[Linear], like: Tensor) -> list[Tensor]:
    """Returns the biases of layers, some of which have none: zeros."""
    return [like.new_zeros(layer.shape[0]) if layer.module.bias is None else layer.module.bias
            for layer in layers]


def _codes(layers: Sequence[Linear]) -> WeightCodes | None:
    """Returns the joined codes of layers that are quantized; all of them must be, or none."""
    modules = [layer.module for layer in layers]
    codes = joined_codes(modules)
    if codes is None and any(codes_of(module) is not None for module in modules):
        raise NotRecognised("its projections of one product are not quantized together")
    return codes


def check_movable(model: nn.Module, groups: Iterable[Sequence[Linear]]) -> None:
    """Raises NotRecognised where someone would notice that weights were moved: they share their
    memory with another tensor or process, or are laid out in a way that they would lose."""
    tensors = {id(t): t for t in chain(model.parameters(), model.buffers())}.values()
    sharing = Counter(t.untyped_storage().data_ptr() for t in tensors)
    layers = [layer.module for group in groups
              if len(group) > 1 and joined_codes([linear.module for linear in group]) is None
              for layer in group]
    uses = Counter(id(p) for layer in layers for p in layer.parameters())
    for layer in layers:
        for name, parameter in layer.named_parameters():
            storage = parameter.untyped_storage()
            place = (f"a {name} of {type(layer).__name__} cannot lie beside those of its "
                     "neighbours: ")
            if (sharing[storage.data_ptr()] > 1 or uses[id(parameter)] > 1
                or storage.nbytes() != parameter.nbytes):
                raise NotRecognised(place + "it shares its memory with another tensor")
            if not parameter.is_contiguous():
                raise NotRecognised(place + f"its strides are {parameter.stride()}")
            if parameter.device.type == "cpu" and (parameter.is_shared() or parameter.is_pinned()):
                raise NotRecognised(place + "its memory is pinned or shared with other processes")
