"""Several tokens of one text in a CUDA graph: the rows of a step in the buffers of captured.py.

The cache lies in the buffers that its single tokens use; all rows read the same pages, each up to
its own position. Rows can also be branches of a tree, chains that begin after the first row: their
keys and values lie one after the other, and each row has a table of the tokens that it sees, which
are pages of one token. Without a CUDA device the same steps run one by one, as in captured.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .....operate import graphs
from .....spec.errors import NoKernelFoundError
from ...decoders.recognition import DecoderParts
from ..decode_step import DecodeStep
from .captured import CapturedSteps, FixedBuffers, Uncapturable, whole_buffers


class FixedRows:
    """A graph of `step.batch` rows over the buffers of one cache, and their `StepKV`."""

    def __init__(self, step: DecodeStep, parts: DecoderParts, buffers: FixedBuffers,
                 branches: int = 1) -> None:
        self.step, self.parts, self.buffers, self.branches = step, parts, buffers, branches
        rows, device = step.batch, parts.weights.device
        self._order = torch.arange(rows, device=device)
        # how many tokens after the first row each is
        self.depths = depths(rows, branches).to(device)
        self._position, self._lengths = self.depths.clone(), self.depths + 1
        self._slots, self._pages = self._position, buffers._pages      # where keys are written
        self._table = buffers._table.expand(rows, -1).contiguous()
        if branches > 1:
            self._slots = self._order.clone()
            self._pages = [tuple(b.view(-1, 1, *b.shape[2:]) for b in pair)
                           for pair in buffers.kv_buffers]
            tokens = torch.arange(buffers.size, dtype=torch.int32, device=device)
            self._table = tokens.expand(rows, -1).contiguous()
            self._seen = _ancestors(rows, branches).to(device)
        self._end = self._lengths[-1:]         # the keys that the last row sees
        self._step_input = torch.zeros((rows, 1), dtype=torch.int64, device=device)
        self._fused = step.fast if self._fit() else None
        self._runs = ([self._bound(i) for i in range(len(step.layers))] if self._fused is None
                      else [])
        if self._fused is not None:
            step.bind.kernels["attention, verified"] = self._fused.ROWS
        self._replay: Any = None
        self._out: Tensor | None = None

    def _fit(self) -> bool:
        """Can the kernels of triton_step.py serve all layers, the rows of a head in one tile?"""
        rows, fast = self.step.batch, self.step.fast
        return fast is not None and self.branches == 1 and self.buffers._fit() and all(
            rows * bound.heads // bound.kv_heads <= fast.MAX_ROWS for bound in self.step.layers)

    def _bound(self, layer: int) -> Any:
        bound, pages = self.step.layers[layer], self._pages[layer]
        query = pages[0].new_zeros((self.step.batch, bound.heads, bound.head_dim))
        try:
            run = self.step.bind("attention, verified", "paged_attention", query, *pages,
                                 self._table, self._lengths, scale=bound.scale,
                                 softcap=bound.softcap)
        except NoKernelFoundError:             # as in captured.py
            if bound.softcap:
                raise
            if self.branches > 1:
                return self._whole_tree(layer)
            whole = whole_buffers(self.step, layer, *self.buffers.kv_buffers[layer])
            return lambda rows: whole(rows.transpose(0, 1)[None], self._lengths[None])[0].transpose(
                0, 1)
        return lambda query: run(query, *pages, self._table, self._lengths)

    def _whole_tree(self, layer: int) -> Any:
        """Returns torch's attention over all of the buffers, of which each row sees its part."""
        scale, size = self.step.layers[layer].scale, self.buffers.size
        keys, values = (b.transpose(1, 2) for b in self.buffers.kv_buffers[layer])
        after = torch.arange(size, device=keys.device)
        mine = torch.zeros((len(self._order), len(self._order)), dtype=torch.bool,
                           device=keys.device)
        for row, depth in enumerate(self.depths.tolist()):
            mine[row, self._seen[row, :depth + 1]] = True

        def run(rows: Tensor) -> Tensor:
            place = after - self._position[:1]
            seen = (place < 0) | ((place < len(mine)) & mine[:, place.clamp(0, len(mine) - 1)])
            return F.scaled_dot_product_attention(
                rows.transpose(0, 1)[None], keys, values, seen[None, None], scale=scale,
                enable_gqa=True)[0].transpose(0, 1)

        return run

    def attend(self, layer: int, qk: Tensor, value: Tensor) -> Tensor:
        keys, values = self.buffers.kv_buffers[layer]
        if self._fused is not None:
            bound = self.step.layers[layer]
            query = self._fused.rotate_and_store(
                qk, value, self.buffers._angles[bound.angles or 0], self._position, keys, values)
            out: Tensor = self._fused.attend_rows(query, keys, values, self._end, bound.scale,
                                                  bound.softcap)
            return out.flatten(1).unsqueeze(1)
        queries = qk.shape[2] - value.shape[2]
        keys.index_copy_(1, self._slots, qk[:, 0, queries:][None])
        values.index_copy_(1, self._slots, value[:, 0][None])
        return self._runs[layer](qk[:, 0, :queries]).flatten(1).unsqueeze(1)  # type: ignore[no-any-return]

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Where the rows read their tokens (rows, 1), and how many come before and with each."""
        return self._step_input, self._position, self._lengths

    def _show_branches(self) -> Tensor:
        """Let each row see the first one, and then its own branch. Returns the columns of the table
        that say so, which have to be restored."""
        start = self._position[:1]
        torch.add(self._order, start, out=self._slots)
        columns = start + self._order[:self._seen.shape[1]]
        self._table.index_copy_(1, columns, (self._seen + start).to(torch.int32))
        return columns

    def run(self) -> Tensor:
        """Computes the logits (rows, 1, vocab) of the rows as the inputs say."""
        angles: Any = None
        if self._fused is None:
            angles = tuple(table.index_select(0, self._position)[:, None].chunk(2, -1)
                           for table in self.buffers._angles)
        columns = self._show_branches() if self.branches > 1 else None
        x = self.parts.first_input(self.parts.embedded(self._step_input), self._position[:, None])
        out = self.step(x, angles, self)       # type: ignore[arg-type]
        if columns is not None:
            self._table.index_copy_(1, columns, columns.to(torch.int32).expand(len(self._table),
                                                                               -1))
        return out

    def _set_position(self, length: int) -> None:
        torch.add(self._order, length, out=self._position)
        torch.add(self._order, length + 1, out=self._lengths)

    def capture(self, length: int) -> None:
        """Capture the graph. The warm-up writes after `length` tokens, where nothing is yet."""
        if not self._step_input.is_cuda:
            return
        self._set_position(length)
        trial = graphs.attempt(self.run, overlap=True)
        if trial.problems:
            raise Uncapturable(f"the rows cannot be captured: {trial.problems[0]}")
        self._out, self._replay = trial.result, trial.graph.replay

    def __call__(self, tokens: Tensor, length: int) -> Tensor:
        """Returns logits (rows, vocab), which stay until the next call."""
        self._step_input.copy_(tokens[:, None])
        self._set_position(length)
        if self._replay is None:
            return self.run()[:, 0]
        self._replay()
        assert self._out is not None
        return self._out[:, 0]


def depths(rows: int, branches: int) -> Tensor:
    """Returns how many tokens after the first row each row is: branches are equally long."""
    order = torch.arange(rows)
    return torch.where(order > 0, (order - 1) % ((rows - 1) // branches) + 1, 0)


def _ancestors(rows: int, branches: int) -> Tensor:
    """Returns the rows that each row sees, (rows, 1 + length of a branch): the first, and its own
    branch, of which it sees as many as it is deep."""
    length, order = (rows - 1) // branches, torch.arange(rows)
    begin = (order - 1).clamp_min(0) // length * length
    after = torch.arange(length + 1)
    return torch.where(after > 0, begin[:, None] + after, 0)


class CapturedRows:
    """The graphs of one model's rows."""

    def __init__(self, captured: CapturedSteps, parts: DecoderParts) -> None:
        self._captured, self._parts = captured, parts
        self._fixed: dict[tuple[int, int], FixedRows] = {}         # by buffers and rows

    def __call__(self, single_step: DecodeStep, step: DecodeStep, tokens: Tensor, cache: Any,
                 length: int) -> Tensor:
        """Returns the logits of the tokens. `single_step` is the step of one token, in whose
        buffers the cache is."""
        buffers = self._captured.hold(single_step, cache, length, new_tokens=step.batch)
        rows = self._fixed.get((id(buffers), step.batch))
        if rows is None or rows.step is not step or rows.buffers is not buffers:
            with torch.inference_mode(False), torch.no_grad():
                try:
                    rows = FixedRows(step, self._parts, buffers)
                except NoKernelFoundError as e:
                    raise Uncapturable(f"no kernel of its attention can be captured: {e}") from e
                rows.capture(length)
            self._fixed[id(buffers), step.batch] = rows
        out = rows(tokens, length)
        for layer in cache.layers:
            layer.set_end(length + step.batch)
        return out
