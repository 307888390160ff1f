"""The decode step in a CUDA graph: everything that changes from token to token lies in memory that
stays where it is.

A cache moves into the buffers of a `FixedBuffers`, which has room for a number of tokens; how many
there are is a number on the device, which the graph itself raises by one. The token is copied in,
the graph is replayed, and the logits are where they were the last time. A cache that outgrows its
buffers moves to larger ones with a graph of their own. While a cache is in use its buffers are its
alone; when it is gone, the next one takes them, graph and all.

Without a CUDA device the same steps run one by one; only the graph is missing.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .....backends.cuda.step.plan import PersistentStep
from .....dispatch.background import compiling
from .....operate import graphs
from .....spec.errors import NoKernelFoundError
from .....spec.grid import bucket_top
from ...decoders.families import NotRecognised
from ...decoders.recognition import DecoderParts
from ..decode_step import DecodeStep
from ..growing_cache import MIN_CAPACITY
from . import persistent

MAX_DIM, MAX_GROUP = 256, 16                   # of heads, for the kernels of triton_step.py
PAGE = 64                  # tokens of a page, as which the buffers are read
COMPILE_SECONDS = 60       # that a capture waits for what is compiled in the background
MAX_CACHES = 4             # in use at the same time; more are served without a graph


class FixedBuffers:
    """Buffers, and the graph that works on them. A `StepKV` for the decode step."""

    def __init__(self, step: DecodeStep, parts: DecoderParts, size: int,
                 embeds: bool = False) -> None:
        weights = parts.weights
        self.step, self.parts, self.size = step, parts, -(-size // PAGE) * PAGE
        batch = step.batch
        self.kv_buffers = [(weights.new_zeros(size), weights.new_zeros(size)) for size in (
            (batch, self.size, bound.kv_heads, bound.head_dim) for bound in step.layers)]
        self._pages = [tuple(buffer.view(-1, PAGE, *buffer.shape[2:]) for buffer in pair)
                       for pair in self.kv_buffers]
        device = weights.device
        pages = torch.arange(batch * self.size // PAGE, dtype=torch.int32, device=device)
        self._table = pages.view(batch, -1)
        # How many tokens there are before the new one, and with it, in each row of the batch.
        self._state = torch.zeros(1 + batch, dtype=torch.int64, device=device)
        self._position, self._lengths = self._state[:1], self._state[1:]
        self.embeds = embeds                   # the token comes embedded
        self._step_input = (weights.new_zeros((batch, 1, weights.shape[1])) if embeds else
                            torch.zeros((batch, 1), dtype=torch.int64, device=device))
        self.shift = 0                         # of a position, from the number of tokens before it
        # For each kind of layer cos and sin of every position; of none where positions are learned.
        self._angles = self._tables(0)
        self._fused = step.fast if self._fit() else None
        self._runs = ([self._bound(i) for i in range(len(step.layers))] if self._fused is None
                      else [])
        if self._fused is not None:
            step.bind.kernels["attention, captured"] = "; ".join(sorted({
                self._fused.attention_kernel(
                    weights, bound.head_dim, bound.heads // bound.kv_heads,
                    self._angles[bound.angles or 0].shape[1] // 4, bound.softcap)
                for bound in step.layers}))
        self.length = -1                       # what the state says, as the host knows it
        self.owner: Callable[[], Any] = lambda: None           # the cache whose tokens these are
        # What was captured: the step alone, and with what follows it in a loop on the device
        # (generation/), by its key.
        self._graphs: dict[Hashable, tuple[Callable[[], None], Tensor | None]] = {}
        self.loops: dict[Hashable, Any] = {}
        self._persistent: PersistentStep | None = None         # all of it in one launch
        self._persistent = persistent.faster(step, parts, self.kv_buffers, self._angles,
                                             self._step_input, self._state, self._run)

    def _tables(self, shift: int) -> list[Tensor]:
        positions = torch.arange(shift, self.size + shift, device=self.parts.weights.device)
        angles = self.parts.angles_at(positions.clamp_min(0)[None])
        return [torch.cat(pair, -1)[0].contiguous() for pair in angles]

    def shift_positions(self, shift: int) -> None:
        """Let the token after n others be at position n + shift: pictures count for fewer."""
        if shift != self.shift:
            for table, angles in zip(self._angles, self._tables(shift)):
                table.copy_(angles)
            self.shift = shift

    def _bound(self, layer: int) -> Callable[..., Any]:
        """Returns the attention of a layer as a function of rotated queries."""
        bound, pages = self.step.layers[layer], self._pages[layer]
        query = pages[0].new_zeros((self.step.batch, bound.heads, bound.head_dim))
        try:
            run = self.step.bind("attention, captured", "paged_attention", query, *pages,
                                 self._table, self._lengths, scale=bound.scale,
                                 window_left=bound.window - 1 if bound.window else -1,
                                 softcap=bound.softcap)
        except NoKernelFoundError:             # of float32 on a GPU, for one
            if bound.softcap:
                raise
            whole = whole_buffers(self.step, layer, *self.kv_buffers[layer])
            return lambda query: whole(query[:, :, None], self._lengths[:, None])[:, :, 0]
        return lambda query: run(query, *pages, self._table, self._lengths)

    def _fit(self) -> bool:
        """Can the kernels of triton_step.py serve all layers?"""
        rotates = self.parts.rotation == "rotate_half" and bool(self._angles) and not any(
            bound.norm_last for bound in self.step.layers)
        return rotates and self.parts.weights.dtype in (torch.float16, torch.bfloat16) and all(
            bound.head_dim <= MAX_DIM and bound.heads // bound.kv_heads <= MAX_GROUP
            and bound.scale > 0 and bound.angles is not None for bound in self.step.layers)

    def attend(self, layer: int, qk: Tensor, value: Tensor) -> Tensor:
        keys, values = self.kv_buffers[layer]
        if self._fused is not None:
            bound = self.step.layers[layer]
            out = self._fused.attend_token(qk, value, self._angles[bound.angles or 0],
                                           self._position, self._lengths, keys, values,
                                           bound.scale, bound.window, bound.softcap)
        else:
            queries = qk.shape[2] - value.shape[2]
            keys.index_copy_(1, self._position, qk[:, :, queries:])
            values.index_copy_(1, self._position, value)
            out = self._runs[layer](qk[:, 0, :queries])
        return out.flatten(1).unsqueeze(1)  # type: ignore[no-any-return]

    def _run(self) -> Tensor:
        """Computes the step that is captured."""
        if self._persistent is not None:
            return self._persistent(self._step_input, self._state)
        angles: Any = None
        if self._fused is None:
            angles = tuple(table.index_select(0, self._position).expand(self.step.batch,
                                                                        -1)[:, None].chunk(2, -1)
                           for table in self._angles)
        x = self._step_input if self.embeds else self.parts.embedded(self._step_input)
        out = self.step(self.parts.first_input(x, self._position[None]), angles, self)
        self._state.add_(1)
        return out

    def take(self, cache: Any) -> None:
        """Move the keys and values of a cache here."""
        for layer, (keys, values) in zip(cache.layers, self.kv_buffers):
            length = layer.get_seq_length()
            for buffer, states in ((keys, layer.keys), (values, layer.values)):
                if states.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr():
                    states = states.clone()
                buffer[:, length - states.shape[2]:length] = states.transpose(1, 2)
            layer.move(keys, values, length)
        self.owner, self.length = weakref.ref(cache), -1

    def gave_up(self) -> bool:
        """Did a launch of the whole step end without a result?"""
        return self._persistent is not None and self._persistent.timed_out()

    def holds(self, cache: Any) -> bool:
        """Are all tokens of the cache here? Something else may have given it other tensors."""
        return all(layer.is_backed_by(keys)
                   for layer, (keys, _) in zip(cache.layers, self.kv_buffers))

    @property
    def step_input(self) -> Tensor:
        """The buffer from which the step reads its token, (batch, 1)."""
        return self._step_input

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Where a step reads its tokens (batch, 1), how many come before, (1,), and with each."""
        return self._step_input, self._position, self._lengths

    def go_to(self, length: int) -> None:
        """Let the next token be the one after `length` others."""
        if self.length != length:
            self._state.fill_(length + 1)
            self._position.fill_(length)
        self.length = length

    def __call__(self, token: Tensor, cache: Any, length: int) -> Tensor:
        """Returns logits in the model's precision, as it gives them."""
        return self.logits(token, cache, length).to(self.parts.weights.dtype)

    def logits(self, token: Tensor, cache: Any, length: int) -> Tensor:
        """Returns the logits as precise as the step has them."""
        self._step_input.copy_(token)
        self.go_to(length)
        replay, out = self._graphs.get("step", (None, None))
        self.length = -1                       # should it break
        if replay is None:
            out = self._run()
        else:
            replay()
            assert out is not None
            out = out.clone()                  # the next token overwrites it
        self.length = length + 1
        for layer in cache.layers:
            layer.set_end(length + 1)
        return out

    def step_then(self, key: Hashable, after: Callable[[Tensor], None]) -> Callable[[], None]:
        """Computes one step of the token in `step_input`, and `after` its logits (batch, vocab), as
        one graph; made once for a key, by `capture`."""
        def run() -> None:
            after(self._run()[:, -1])

        captured = self._graphs.get(key)
        replay = run if captured is None else captured[0]

        def once() -> None:
            length, self.length = self.length, -1              # should it break
            replay()
            self.length = length + 1

        return once

    def capture(self, key: Hashable = "step", after: Callable[[Tensor], None] | None = None,
                length: int = 0) -> None:
        """Capture the step and what follows. Warm-up writes after `length` tokens: free places."""
        if not self._step_input.is_cuda or key in self._graphs:
            return
        self.length = -1
        self.go_to(length)
        device = self._step_input.device
        generator = torch.cuda.default_generators[device.index or 0]
        before = generator.get_state()         # a seed gives the same tokens, captured or not
        compiling.wait(COMPILE_SECONDS)        # it allocates memory, which looks like the graph's
        trial = graphs.attempt(self._run if after is None else lambda: after(self._run()[:, -1]),
                               overlap=True)
        generator.set_state(before)
        self.length = -1
        if trial.problems:
            raise Uncapturable(f"the step cannot be captured: {trial.problems[0]}")
        self._graphs[key] = trial.graph.replay, trial.result


def whole_buffers(step: DecodeStep, layer: int, keys: Tensor, values: Tensor) -> Callable[
        [Tensor, Tensor], Tensor]:
    """Returns torch's attention of queries (batch, heads, tokens, dim) over whole buffers (batch,
    size, kv_heads, dim), of which all beyond the lengths (batch, tokens) is masked."""
    bound = step.layers[layer]
    step.bind.kernels["attention, captured"] = "torch.sdpa over all of the buffer"
    positions = torch.arange(keys.shape[1], device=keys.device)
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)

    def run(query: Tensor, lengths: Tensor) -> Tensor:
        seen = positions < lengths[..., None]
        if bound.window:
            seen = seen & (positions >= lengths[..., None] - bound.window)
        return F.scaled_dot_product_attention(query, keys, values, seen[:, None], scale=bound.scale,
                                              enable_gqa=True)

    return run


class Uncapturable(NotRecognised):
    """No graph can be made of the step, now or later."""


class CapturedSteps:
    """The buffers and graphs of one model."""

    def __init__(self, parts: DecoderParts) -> None:
        self._parts = parts
        self._choosing = threading.Lock()
        self._fixed: dict[int, list[FixedBuffers]] = {}        # batch -> those that can serve it
        self.refused: dict[Hashable, str] = {}                 # what follows a step, and why not

    def forget(self, batch: int) -> None:
        self._fixed.pop(batch, None)

    def drop(self, fixed: FixedBuffers) -> None:
        with self._choosing:
            known = self._fixed.get(fixed.step.batch, [])
            known[:] = [f for f in known if f is not fixed]

    def __call__(self, step: DecodeStep, token: Tensor, cache: Any, length: int,
                 shift: int = 0) -> Tensor:
        """Computes one token, its number or embedded; NotRecognised where no graph can do it."""
        fixed = self.hold(step, cache, length, shift, embeds=token.is_floating_point())
        return fixed(token, cache, length)

    def hold(self, step: DecodeStep, cache: Any, length: int, shift: int = 0, *,
             embeds: bool = False, new_tokens: int = 1, wanted: int = 0,
             capture: Callable[[FixedBuffers, int], None] | None = None) -> FixedBuffers:
        """Returns buffers that hold this cache and have room for `new_tokens` after its own; new
        ones are made with room for as many as are wanted. `capture(buffers, length)` makes another
        graph than that of the step alone."""
        with self._choosing:                   # two threads must not take the same buffers
            known = self._fixed.setdefault(step.batch, [])
            fixed = next((f for f in known if f.owner() is cache and f.size >= length + new_tokens
                          and f.embeds == embeds), None)
            if fixed is None:
                fixed = self._free(step, known, length, embeds, new_tokens, wanted)
                _capture(fixed, capture, 0)
                fixed.take(cache)
            else:
                if not fixed.holds(cache):
                    fixed.take(cache)
                _capture(fixed, capture, length)
            if fixed.gave_up():
                fixed = self._replace_buffers(fixed, step, cache, length, new_tokens, wanted,
                                              capture)
        fixed.shift_positions(shift)
        return fixed

    def _replace_buffers(self, lost: FixedBuffers, step: DecodeStep, cache: Any, length: int,
                         new_tokens: int, wanted: int,
                         capture: Callable[[FixedBuffers, int], None] | None) -> FixedBuffers:
        """Replace buffers whose step gave up, and run its last token again in the new ones."""
        persistent.report_timeout(step)
        known = self._fixed[step.batch]
        known.remove(lost)
        fixed = self._free(step, known, length, lost.embeds, new_tokens, wanted)
        _capture(fixed, capture, 0)
        fixed.take(cache)
        fixed.shift_positions(lost.shift)
        fixed(lost.step_input, cache, length - 1)
        return fixed

    def _free(self, step: DecodeStep, known: list[FixedBuffers], length: int, embeds: bool,
              new_tokens: int, wanted: int) -> FixedBuffers:
        least = length + new_tokens
        for lost in [f for f in known if f.owner() is None and f.gave_up()]:
            persistent.report_timeout(lost.step)           # in a step whose token nobody asked for
            known.remove(lost)
        if len(known) >= MAX_CACHES:           # those that are too small for it make room
            known[:] = [f for f in known if f.owner() is not None or f.size >= least]
        fixed = next((f for f in known if f.owner() is None and f.size >= least
                      and f.embeds == embeds), None)
        if fixed is None:
            if len(known) >= MAX_CACHES:
                raise NotRecognised(f"{MAX_CACHES} caches are in use in graphs already")
            # the buffers outlive the caller's mode
            with torch.inference_mode(False), torch.no_grad():
                size = bucket_top(length + max(wanted, MIN_CAPACITY))
                try:
                    fixed = FixedBuffers(step, self._parts, size, embeds)
                except NoKernelFoundError as e:
                    raise Uncapturable(f"no kernel of its attention can be captured: {e}") from e
            known.append(fixed)
        return fixed


def _capture(fixed: FixedBuffers, capture: Callable[[FixedBuffers, int], None] | None,
             length: int) -> None:
    """Captures the step after `length` tokens, 0 where the buffers hold nothing needed."""
    with torch.inference_mode(False), torch.no_grad():
        if capture is not None:
            capture(fixed, length)
        elif fixed.size >= length + graphs.WARM_UPS + 1:       # for what the warm-up writes
            fixed.capture(length=length)
