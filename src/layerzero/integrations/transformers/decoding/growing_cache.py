"""Layers of transformers' DynamicCache that append in place: a new token is written, nothing is
copied.

`keys` and `values` are those of the layer that is replaced, (batch, heads, tokens, dim), here as
views of buffers with room after them. Everything that transformers does to a cache (crop,
reorder, repeat, deepcopy) works on those two as before; whatever puts another tensor in their place
is noticed at the next append, which then moves into new buffers. Tokens that have left a sliding
window stay in the buffer, before the view, until it is full.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

MIN_CAPACITY = 256         # tokens
# room grows by length // GROWTH: few copies, and little unused memory
GROWTH = 2


class _Growing:
    """The buffers are (batch, capacity, heads, dim), so that one token's rows are contiguous."""

    keys: Any
    values: Any

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.key_buffer: Tensor | None = None
        self.value_buffer: Tensor | None = None
        self.repeated = 1, 0                   # (copies, tokens): each group of rows begins alike
        self.start = 0                         # the place of the first token in `keys`
        self.end = 0                           # the place after what was last written

    def reserve(self, more: int) -> int:
        """Make room for `more` tokens after those that are there; return the place of the first."""
        length = int(self.keys.shape[2])
        buffer = self.key_buffer
        if (buffer is None or not self.is_backed_by(buffer)
                or self.start + length + more > buffer.shape[1]):
            size = length + max(more, MIN_CAPACITY, length // GROWTH)
            self.move(_copy_to_larger(self.keys, size), _copy_to_larger(self.values, size), length)
        return self.start + length

    def is_backed_by(self, buffer: Tensor) -> bool:
        """Are the keys still a part of this buffer, and the values of the other one?"""
        keys, values = self.keys, self.values
        before = self.start * buffer.stride(1) * buffer.element_size() if self.start else 0
        return (self.key_buffer is buffer and keys.data_ptr() == buffer.data_ptr() + before
                and keys.shape[0] == buffer.shape[0]
                and values.data_ptr() == self.value_buffer.data_ptr() + before  # type: ignore[union-attr]
                and keys.shape[2] == values.shape[2] <= self.end - self.start)

    def move(self, key_buffer: Tensor, value_buffer: Tensor, end: int) -> None:
        """Use these buffers, which hold tokens up to this place."""
        if self.key_buffer is None or not self.is_backed_by(self.key_buffer):
            self.repeated = 1, 0               # others have put their tensors here
        self.key_buffer, self.value_buffer = key_buffer, value_buffer
        self._all_keys, self._all_values = key_buffer.transpose(1, 2), value_buffer.transpose(1, 2)
        self.set_end(end)

    def set_end(self, end: int) -> None:
        """Let `keys` and `values` be views that end at this place of the buffers."""
        self.end = end
        self.repeated = self.repeated[0], min(self.repeated[1], end - 1)   # the last may be new
        self.keys, self.values = self.view(self.start, end)

    def view(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Returns keys and values from one place to another."""
        return self._all_keys.narrow(2, start,
                                     end - start), self._all_values.narrow(2, start, end - start)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any,
               **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self._in_place():
            return super().update(key_states, value_states, *args, **kwargs)  # type: ignore[misc,no-any-return]
        position, start = self.reserve(key_states.shape[2]), self.start
        self.write(position, key_states.transpose(1, 2), value_states.transpose(1, 2))
        return self.view(start, self.end)

    def _in_place(self) -> bool:
        """May a token be written in place? Not with gradients, which need the past as it was."""
        return bool(self.is_initialized and self.keys.numel()  # type: ignore[attr-defined]
                    and not torch.is_grad_enabled())

    def write(self, position: int, key: Tensor, value: Tensor) -> None:
        """Write keys and values (batch, tokens, heads, dim) from this position on."""
        more = key.shape[1]
        self.repeated = self.repeated[0], min(self.repeated[1], position)
        self.key_buffer.narrow(1, position, more).copy_(key)  # type: ignore[union-attr]
        self.value_buffer.narrow(1, position, more).copy_(value)  # type: ignore[union-attr]
        self.set_end(position + more)

    def reset(self) -> None:
        super().reset()                        # type: ignore[misc]
        self.key_buffer = self.value_buffer = None
        self.start = self.end = 0


class GrowingLayer(_Growing, DynamicLayer):  # type: ignore[misc]
    """A DynamicLayer that appends in place."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let rows go on from others. What they have in common with these stays where it is."""
        buffer, (copies, common) = self.key_buffer, self.repeated
        if (copies == 1 or buffer is None or not self.is_backed_by(buffer)
                or not keeps_groups(beam_idx, copies)):
            super().reorder_cache(beam_idx)
            return
        for t in (buffer, self.value_buffer):
            own = t[:, common:self.end]        # type: ignore[index]
            own.copy_(own.index_select(0, beam_idx))


_checked: dict[int, tuple[weakref.ref[Tensor], bool]] = {}     # by copies: the last indices


def keeps_groups(beam_idx: Tensor, copies: int) -> bool:
    """Does every row go on from one of the `copies` rows that it belongs to? The layers of a cache
    ask for the same indices in turn, and the device is waited for once."""
    known = _checked.get(copies)
    if known is None or known[0]() is not beam_idx:
        rows = torch.arange(len(beam_idx), device=beam_idx.device)
        known = weakref.ref(beam_idx), torch.equal(beam_idx // copies, rows // copies)
        _checked[copies] = known
    return known[1]


class GrowingWindow(_Growing, DynamicSlidingWindowLayer):  # type: ignore[misc]
    """A DynamicSlidingWindowLayer, whose `keys` are the last tokens that the next one sees."""

    cumulative_length: int

    def move(self, key_buffer: Tensor, value_buffer: Tensor, end: int) -> None:
        # tokens that were before the first place
        self.dropped = self.cumulative_length - end
        super().move(key_buffer, value_buffer, end)

    def set_end(self, end: int) -> None:
        self.start = max(0, end - self.sliding_window + 1)
        self.cumulative_length = self.dropped + end
        super().set_end(end)

    def is_backed_by(self, buffer: Tensor) -> bool:
        return (super().is_backed_by(buffer) and self.cumulative_length == self.dropped + self.start
                + self.keys.shape[2])

    def _in_place(self) -> bool:
        return not self.record_past and super()._in_place()


def _copy_to_larger(states: Tensor, size: int) -> Tensor:
    batch, heads, length, dim = states.shape
    # it may be written to outside of that mode later
    with torch.inference_mode(False), torch.no_grad():
        buffer = torch.empty((batch, size, heads, dim), dtype=states.dtype, device=states.device)
    buffer[:, :length] = states.transpose(1, 2)
    return buffer


def make_growing(cache: DynamicCache, windows: Sequence[int | None]) -> str:
    """Let every layer of the cache append in place, `windows` being the tokens that each layer of
    the model sees. Return what prevents it, or ""."""
    layers = cache.layers
    if len(layers) != len(windows):
        return "a cache for another number of layers"
    for i, (layer, window) in enumerate(zip(layers, windows)):
        kind = type(layer)
        sliding = kind in (GrowingWindow, DynamicSlidingWindowLayer)
        if sliding and layer.record_past:
            return "a cache that keeps what is out of the window, to go back"
        if sliding and layer.sliding_window != window:
            return f"a cache layer that is {kind.__name__} with another window"
        if kind in (GrowingLayer, GrowingWindow) and layer.is_initialized and layer.keys.numel():
            continue
        if (kind not in (DynamicLayer, DynamicSlidingWindowLayer) or not layer.is_initialized
            or not layer.keys.numel()):
            return f"a cache layer that is {kind.__name__}" + (" and empty" if sliding
                                                               or kind is DynamicLayer else "")
        growing: Any = GrowingWindow(layer.sliding_window) if sliding else GrowingLayer()
        growing.__dict__.update(layer.__dict__)
        layers[i] = growing
    return ""
