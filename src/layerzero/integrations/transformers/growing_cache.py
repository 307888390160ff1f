"""A layer of transformers' DynamicCache that appends in place: a new token is written, nothing is copied.

`keys` and `values` are what they are in a DynamicLayer, (batch, heads, tokens, dim), here as views of buffers with room
after them. Everything that transformers does to a cache (crop, reorder, repeat, deepcopy) works on those two as before;
whatever puts another tensor in their place is noticed at the next append, which then moves into new buffers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

LEAST_ROOM = 256           # tokens
GROWTH = 2                 # a half more than there is: few copies, and little memory that nobody uses


class GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """The buffers are (batch, room, heads, dim): what one token adds is in one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.key_room: Tensor | None = None
        self.value_room: Tensor | None = None
        self.length = 0                        # of what was last written here

    @classmethod
    def of(cls, layer: DynamicLayer) -> GrowingLayer:
        """With the content of another layer."""
        made = cls()
        made.__dict__.update(layer.__dict__)
        return made

    def reserve(self, more: int) -> int:
        """Make sure that `more` tokens can be written after those there are; how many there are."""
        keys: Any = self.keys
        length = int(keys.shape[2])
        room = self.key_room
        if room is None or not self.is_in(room) or length + more > room.shape[1]:
            size = length + max(more, LEAST_ROOM, length // GROWTH)
            self.move(_moved(keys, size), _moved(self.values, size), length)
        return length

    def is_in(self, room: Tensor) -> bool:
        """Are the keys still the beginning of this buffer, and the values of the other one?"""
        keys: Any = self.keys
        values: Any = self.values
        return (self.key_room is room and keys.data_ptr() == room.data_ptr() and keys.shape[0] == room.shape[0]
                and values.data_ptr() == self.value_room.data_ptr()  # type: ignore[union-attr]
                and keys.shape[2] == values.shape[2] <= self.length)

    def move(self, key_room: Tensor, value_room: Tensor, length: int) -> None:
        """Use these buffers, which hold so many tokens."""
        self.key_room, self.value_room = key_room, value_room
        self._all_keys, self._all_values = key_room.transpose(1, 2), value_room.transpose(1, 2)
        self.show(length)

    def show(self, length: int) -> None:
        """Let keys and values be the first so many tokens of the buffers."""
        self.keys = self._all_keys.narrow(2, 0, length)
        self.values = self._all_values.narrow(2, 0, length)
        self.length = length

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized or not self.keys.numel() or torch.is_grad_enabled():     # gradients need the past
            return super().update(key_states, value_states, *args, **kwargs)  # type: ignore[no-any-return]
        self.write(self.reserve(key_states.shape[2]), key_states.transpose(1, 2), value_states.transpose(1, 2))
        return self.keys, self.values

    def write(self, length: int, key: Tensor, value: Tensor) -> None:
        """Keys and values (batch, tokens, heads, dim) after the first `length` ones; there is room for them."""
        more = key.shape[1]
        self.key_room.narrow(1, length, more).copy_(key)  # type: ignore[union-attr]
        self.value_room.narrow(1, length, more).copy_(value)  # type: ignore[union-attr]
        self.show(length + more)

    def reset(self) -> None:
        super().reset()
        self.key_room = self.value_room = None
        self.length = 0


def _moved(states: Tensor, size: int) -> Tensor:
    batch, heads, length, dim = states.shape
    with torch.inference_mode(False), torch.no_grad():         # it may be written to outside of that mode later
        room = torch.empty((batch, size, heads, dim), dtype=states.dtype, device=states.device)
    room[:, :length] = states.transpose(1, 2)
    return room


def growing(cache: DynamicCache) -> str:
    """Let every layer of the cache append in place. What stands in the way, or nothing."""
    layers = cache.layers
    for i, layer in enumerate(layers):
        kind = type(layer)
        if kind is GrowingLayer:
            continue
        if kind is not DynamicLayer or not layer.is_initialized or not layer.keys.numel():
            return f"a cache layer that is {kind.__name__}" + ("" if kind is not DynamicLayer else " and empty")
        layers[i] = GrowingLayer.of(layer)
    return ""
