"""Several tokens of one text through the decode step at once: rows one after the other, or a tree.

Every product reads its weights once for all of them; only the attention knows what each row sees.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from ....models.speculative import tree_attention_mask, tree_positions
from ....plan.table import Span
from ..decoders.families import NotRecognised
from ..decoding.accelerated import Accelerated
from ..decoding.cuda.captured import Uncapturable
from ..decoding.cuda.captured_rows import CapturedRows
from ..decoding.decode_step import ANY, DecodeStep
from ..decoding.growing_cache import make_growing


class AppendedRows:
    """Rows that were written to a cache, of which some stay."""

    def __init__(self, layers: list[Any], positions: list[int]) -> None:
        self._layers, self._positions = layers, positions

    def undo(self, keep: int = 0) -> None:
        """Take back all rows but the first `keep`."""
        for layer, position in zip(self._layers, self._positions):
            layer.set_end(position + keep)

    def keep(self, nodes: Sequence[int]) -> None:
        """Keep these rows, in this order, and take back the others."""
        if list(nodes) != list(range(len(nodes))):
            for layer, position in zip(self._layers, self._positions):
                kept = torch.tensor(nodes, device=layer.keys.device) + position
                for buffer in (layer.key_buffer, layer.value_buffer):
                    buffer[:, position:position + len(nodes)] = buffer.index_select(1, kept)
        self.undo(len(nodes))


class RowsKV(AppendedRows):
    """Rows of a step that are tokens one after the other, or nodes of a tree, in one cache."""

    def __init__(self, step: DecodeStep, layers: list[Any], length: int, angles: Any,
                 parents: Tensor | None, runs: dict[Any, tuple[Any, Span]]) -> None:
        super().__init__(layers, [layer.reserve(step.batch) for layer in layers])
        self._step, self._rows, self._bound, self.angles = step, step.batch, runs, angles
        self._mask = () if parents is None else (tree_attention_mask(parents, length)[None, None],)

    def attend(self, layer: int, qk: Tensor, value: Tensor) -> Tensor:
        cache, position, rows = self._layers[layer], self._positions[layer], self._rows
        queries = qk.shape[2] - value.shape[2]
        cache.write(position, qk[:, :, queries:].transpose(0, 1), value.transpose(0, 1))
        keys, values = cache.view(0, position + rows)
        query = qk[:, :, :queries].permute(1, 2, 0, 3)           # (1, heads, rows, dim)
        out = self._run(layer, query, keys, values)(query, keys, values, *self._mask)
        return out.permute(2, 0, 1, 3).reshape(rows, 1, -1)  # type: ignore[no-any-return]

    def _run(self, layer: int, query: Tensor, keys: Tensor, values: Tensor) -> Any:
        bound, length = self._step.layers[layer], keys.shape[2]
        key = (self._step, bound.heads, bound.kv_heads, bound.head_dim, bound.scale, bound.softcap,
               len(self._mask))
        run, span = self._bound.get(key, (None, ANY))
        if run is None or not span.covers(length):
            causal = {} if self._mask else {"is_causal": True, "causal_align": "bottom_right"}
            run = self._step.bind("attention, verified", "attention", query, keys, values,
                                  *(self._mask or (None,)), scale=bound.scale,
                                  softcap=bound.softcap, **causal)
            span = dict(run.row.sizes).get("seq_k", ANY)  # type: ignore[attr-defined]
            self._bound[key] = run, span
        return run


class Rows:
    """Several tokens of one text through the decode step of an accelerated model."""

    def __init__(self, accelerated: Accelerated) -> None:
        self.accelerated, parts = accelerated, accelerated.parts
        if parts.head is None:
            raise NotRecognised("the decoder with the step has no head: another model feeds it")
        if any(layer.window for layer in parts.layers):
            raise NotRecognised("its layers have a window, out of which nothing comes back")
        if parts.uncapturable_feature:
            raise NotRecognised(f"it has {parts.uncapturable_feature}")
        self._runs: dict[Any, tuple[Any, Span]] = {}
        self.captured = (None if accelerated._captured is None
                         else CapturedRows(accelerated._captured, parts))
        self.declined: Counter[str] = Counter()

    def __call__(self, tokens: Tensor, cache: DynamicCache,
                 parents: Tensor | None = None) -> tuple[Tensor, AppendedRows]:
        """Returns logits (rows, vocab) of tokens (rows,) after those in the cache, which keeps them
        all until the KV state says otherwise."""
        of, parts, rows = self.accelerated, self.accelerated.parts, len(tokens)
        of._check(cache, 0, {})
        refused = make_growing(cache, of._windows)
        if refused:
            raise NotRecognised(refused)
        length = cache.get_seq_length()
        order = (torch.arange(length, length + rows, device=tokens.device) if parents is None
                 else tree_positions(parents, length).to(tokens.device))
        step, positions = of.step(rows), order[:, None]
        if self.captured is not None and of._captured is not None and parents is None:
            try:
                out = self.captured(of.step(1), step, tokens, cache, length)
                return out, AppendedRows(cache.layers, [length] * len(cache.layers))
            except NotRecognised as why:
                self.declined[f"verified without a graph: {why}"] += 1
                self.captured = None if isinstance(why, Uncapturable) else self.captured
        x = parts.first_input(parts.embedded(tokens[:, None]), positions)
        kv = RowsKV(step, cache.layers, length, parts.angles_at(positions), parents, self._runs)
        try:
            return step(x, kv.angles, kv)[:, 0], kv
        # passed on, an interrupt too: half a round must not stay in the cache
        except BaseException:
            kv.undo()
            raise
