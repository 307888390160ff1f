"""Several continuations of one prompt: beams, and several sequences that are returned.

transformers repeats the prompt for each of them, computes it as often, and keeps its keys and
values as often. Here it is computed once, and beams that go on from others copy what they have not
in common. On the CPU the prompt's keys and values are also kept once, and read once for all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from ....backends.native import build as native_build
from ....backends.native.declaration import DTYPES
from ....backends.native.grouped import load_grouped
from ....spec.errors import LayerZeroError
from .decode_step import DecodeStep
from .growing_cache import MIN_CAPACITY, GrowingLayer, keeps_groups

SHARED = "prompts computed once for several rows"
MIN_PROMPT_TOKENS = 64     # tokens from which one read for all rows is faster than a read for each
# arguments of the model that have a row for each row of the batch, of which every n-th is taken
BY_ROW = ("attention_mask", "position_ids")
KERNEL = "native.grouped_attention"


class SharedLayer(DynamicLayer):  # type: ignore[misc]
    """A DynamicLayer whose rows begin with the same tokens, `copies` rows after each other.

    One buffer (tokens, heads, dim) holds each prompt once, and then `capacity` tokens of each row.
    Whoever asks for `keys` or `values` gets them as they are in a DynamicLayer, copied together;
    whoever sets them has a DynamicLayer from then on.
    """

    def __init__(self, layer: DynamicLayer, copies: int) -> None:
        super().__init__()
        self._set: dict[str, Any] = {}         # keys and values that somebody has put here
        self.copies, self.prompts = copies, layer.keys.shape[0]
        self.prompt, self.own, self.capacity = layer.keys.shape[2], 0, 0
        self.dtype, self.device, self.is_initialized = layer.dtype, layer.device, True
        first = [t.transpose(1, 2).flatten(0, 1) for t in (layer.keys, layer.values)]
        self.buffers = first
        self._grow(MIN_CAPACITY)

    @property
    def rows(self) -> int:
        return self.prompts * self.copies

    @property
    def shared(self) -> bool:
        return not self._set

    def _grow(self, capacity: int) -> None:
        prompt_rows = self.prompts * self.prompt
        before = self._own_tokens() if self.capacity else []
        old, self.buffers = self.buffers, []
        # they may be written to outside of that mode later
        with torch.inference_mode(False), torch.no_grad():
            for t in old:
                self.buffers.append(t.new_empty((prompt_rows + self.rows * capacity, *t.shape[1:])))
        for to, t in zip(self.buffers, old):
            to[:prompt_rows] = t[:prompt_rows]
        self.capacity = capacity
        for to, t in zip(self._own_tokens(), before):
            to.copy_(t)

    def _own_tokens(self) -> list[Tensor]:
        """Returns the keys and values after the prompt, (rows, own, heads, dim)."""
        first = self.prompts * self.prompt
        return [t[first:].unflatten(0, (self.rows, self.capacity))[:, :self.own]
                for t in self.buffers]

    def append(self, key: Tensor, value: Tensor) -> None:
        """Keys and values (rows, tokens, heads, dim) after those there are."""
        more = key.shape[1]
        if self.own + more > self.capacity:
            self._grow(self.own + max(more, MIN_CAPACITY, self.own))
        self.own += more
        for to, t in zip(self._own_tokens(), (key, value)):
            to[:, -more:] = t

    def set_end(self, end: int) -> None:
        """Let it hold `end` tokens."""
        self.own = end - self.prompt

    def items(self) -> tuple[Tensor, Tensor, Tensor]:
        """Items, chunk starts and chunk lengths for lz.grouped_attention of one query per row:
        chunks as long as the prompt, which is the first of them."""
        rows, length = torch.arange(self.rows, dtype=torch.int32), self.prompt + self.own
        items = torch.zeros((self.rows, 4), dtype=torch.int32)
        items[:, 0], items[:, 1], items[:, 3] = rows, 1, length
        after = torch.arange(-(-self.own // self.prompt), dtype=torch.int32) * self.prompt
        own = self.prompts * self.prompt + rows * self.capacity
        starts = torch.cat(((rows // self.copies * self.prompt)[:, None],
                            own[:, None] + after), 1)
        return items, starts, torch.full((self.rows,), self.prompt, dtype=torch.int32)

    # As DynamicLayer has it.

    def _whole(self, name: str) -> Any:
        tensors = self.__dict__.get("_set")
        if tensors is None or tensors:
            return (tensors or {}).get(name)
        index = ("keys", "values").index(name)
        prompt = self.buffers[index][:self.prompts * self.prompt].unflatten(0, (self.prompts, -1))
        whole = torch.cat((prompt.repeat_interleave(self.copies, 0), self._own_tokens()[index]), 1)
        return whole.transpose(1, 2)

    def _replace(self, name: str, value: Any) -> None:
        tensors = self.__dict__.get("_set")
        if tensors is None:                    # by a constructor
            return
        if not tensors:
            tensors.update(keys=self.keys, values=self.values)
            self.buffers = []
        tensors[name] = value

    keys = property(lambda self: self._whole("keys"),
                    lambda self, value: self._replace("keys", value))
    values = property(lambda self: self._whole("values"),
                      lambda self, value: self._replace("values", value))

    def get_seq_length(self, *args: Any) -> int:
        return self.prompt + self.own if self.shared else int(super().get_seq_length(*args))

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any,
               **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.shared or torch.is_grad_enabled():
            return super().update(key_states, value_states, *args, **kwargs)  # type: ignore[no-any-return]
        self.append(key_states.transpose(1, 2), value_states.transpose(1, 2))
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let rows go on from others, of the same prompt: what is their own is copied."""
        if self.shared and len(beam_idx) == self.rows and keeps_groups(beam_idx, self.copies):
            for t in self._own_tokens():
                t.copy_(t.index_select(0, beam_idx))
        else:
            super().reorder_cache(beam_idx)


class SharedPromptKV:
    """Keys and values of one token of each row, in SharedLayers. A `StepKV` for the decode step."""

    def __init__(self, step: DecodeStep, layers: list[SharedLayer], angles: Any) -> None:
        self._step, self._layers, self.angles = step, layers, angles
        self._run: Callable[..., Any] = load_grouped()
        self._length = layers[0].get_seq_length()
        self._items: tuple[Tensor, Tensor, Tensor] | None = None

    def attend(self, layer: int, qk: Tensor, value: Tensor) -> Tensor:
        cache, bound = self._layers[layer], self._step.layers[layer]
        cache.append(qk[:, :, bound.heads:], value)
        if self._items is None:
            self._items = cache.items()         # those of all layers
        items, starts, lengths = self._items
        out = self._run(qk[:, 0, :bound.heads], *cache.buffers, items, 1, self._length + 1,
                        scale=bound.scale, chunk_starts=starts, chunk_lengths=lengths)
        return out.flatten(1).unsqueeze(1)  # type: ignore[no-any-return]

    def undo(self) -> None:
        """Takes this token back, after the step broke."""
        for layer in self._layers:
            layer.set_end(self._length)


def serves(layers: Sequence[Any]) -> bool:
    return all(type(layer) is SharedLayer and layer.shared for layer in layers)


def rows_of(layer: Any) -> int:
    return layer.rows if type(layer) is SharedLayer and layer.shared else len(layer.keys)


def unshare(cache: Any) -> None:
    """Let every row have its own keys and values of the prompt, as DynamicLayer has them."""
    for i, layer in enumerate(cache.layers):
        if type(layer) is SharedLayer:
            cache.layers[i] = plain = DynamicLayer()
            plain.dtype, plain.device, plain.is_initialized = layer.dtype, layer.device, True
            plain.keys, plain.values = layer.keys, layer.values


def _can_share(accelerated: Any, cache: DynamicCache, rows: int) -> bool:
    """Is one read for all rows possible, and faster?"""
    parts = accelerated.parts
    like = parts.weights
    plain = (parts.bias is None and parts.query_scale is None
             and not any(layer.window or layer.latent is not None or layer.sinks is not None
                         or layer.softcap for layer in parts.layers))
    if (not plain or accelerated._captured is not None
            or like.device.type != "cpu" or like.dtype not in DTYPES
            or native_build.is_built() is not True or cache.get_seq_length() < MIN_PROMPT_TOKENS
            or any(type(layer) is not DynamicLayer for layer in cache.layers)):
        return False
    step = accelerated.step(rows)
    items = torch.zeros((rows, 4), dtype=torch.int32)
    for layer in step.layers:
        query = like.new_empty((rows, layer.heads, layer.head_dim))
        keys = like.new_empty((64, layer.kv_heads, layer.head_dim))
        try:
            step.bind("attention over a shared prompt", "grouped_attention", query, keys, keys,
                      items, max_seqlen_q=1, max_seqlen_k=64, scale=layer.scale, backend=KERNEL)
        except LayerZeroError:                 # policy says no
            return False
    return True


def prefill(accelerated: Any, own: Callable[..., Any], input_ids: Tensor, config: Any,
            kwargs: dict[str, Any], is_first_iteration: bool = True) -> Any:
    """Calls `own`, the model's _prefill, once for each prompt."""
    rows = len(input_ids)
    copies = max(config.num_beams or 1, config.num_return_sequences or 1)
    cache: Any = kwargs.get("past_key_values")
    others = [name for name, value in kwargs.items() if isinstance(value, Tensor)
              and name not in BY_ROW]
    if (copies == 1 or rows % copies or accelerated.broken or torch.is_grad_enabled()
            or type(cache) is not DynamicCache or cache.get_seq_length() or others
            or getattr(cache, "offloading", False) or config.prefill_chunk_size is not None
            or accelerated.parts.by_axes or accelerated.model.config.is_encoder_decoder
            or any(kwargs.get(name) is not None and len(kwargs[name]) != rows for name in BY_ROW)
            or not all(_is_repeated(t, copies) for t in (
                input_ids, *(kwargs[name] for name in BY_ROW if kwargs.get(name) is not None)))):
        return own(input_ids, config, kwargs, is_first_iteration=is_first_iteration)
    fewer = {name: value[::copies] if name in BY_ROW and value is not None else value
             for name, value in kwargs.items()}
    outputs = own(input_ids[::copies], config, fewer, is_first_iteration=is_first_iteration)
    cache, mask = outputs.past_key_values, kwargs.get("attention_mask")
    if (mask is None or bool((mask == 1).all())) and _can_share(accelerated, cache, rows):
        cache.layers = [SharedLayer(layer, copies) for layer in cache.layers]
    else:
        cache.batch_repeat_interleave(copies)
        for layer in cache.layers if not accelerated.grow(cache) else ():
            if type(layer) is GrowingLayer:
                layer.reserve(1)
                layer.repeated = copies, layer.get_seq_length()
    outputs.logits = outputs.logits.repeat_interleave(copies, 0)
    accelerated.served[SHARED] += 1
    return outputs


def _is_repeated(t: Tensor, copies: int) -> bool:
    """Are the rows alike in groups of `copies`, one after the other?"""
    each = t.unflatten(0, (-1, copies))
    return bool((each == each[:, :1]).all())
