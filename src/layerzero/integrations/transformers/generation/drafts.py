"""Who proposes what comes next: a small model, or the text so far.

Each can propose from the host, token ids after token ids, and as a part of a captured round
(rounds.py), where it reads the text on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from ..decoders.families import NotRecognised
from ..decoding.accelerated import Accelerated
from ..decoding.cuda.captured import FixedBuffers
from .round_state import LONGEST_MATCH
from .rounds import RowsOf
from .verified_rows import Rows


class Draft:
    """A small model that proposes what comes next, greedily."""

    branches = 1

    def __init__(self, model: Any, accelerated: Accelerated | None, count: int) -> None:
        self.model, self.count = model, count
        self._rows = None if accelerated is None else Rows(accelerated)
        self._cache = DynamicCache(config=model.config)

    def begin(self) -> None:
        self._cache = DynamicCache(config=self.model.config)

    @property
    def on_device(self) -> bool:
        """Can its steps be a part of a captured round?"""
        return self._rows is not None and self._rows.accelerated._captured is not None

    @property
    def steps(self) -> tuple[Accelerated, ...]:
        """Returns the models that take part in a round."""
        return () if self._rows is None else (self._rows.accelerated,)

    def hold(self, text: Tensor, more: int, wanted: int) -> RowsOf:
        """Returns its steps in buffers that hold all of the text but the last two tokens, with room
        for `more`; NotRecognised where there are none."""
        assert self._rows is not None
        cache, of = self._cache, self._rows.accelerated
        end, known = max(1, len(text) - 2), cache.get_seq_length()
        if known > end:
            cache.crop(end - known)
        if known < end:
            self.model(text[None, known:end], past_key_values=cache, use_cache=True,
                       logits_to_keep=1)
        refused = of.grow(cache)
        if refused or of._captured is None:
            raise NotRecognised(refused or "no graph of the assistant's step")

        def make(fixed: FixedBuffers, _: int) -> None:
            RowsOf.of(of, fixed, 2)

        fixed = of._captured.hold(of.step(1), cache, end, new_tokens=more + 2, wanted=wanted + 2,
                                  capture=make)
        return RowsOf.of(of, fixed, 2)

    def leave(self, end: int) -> None:
        """After rounds in the buffers of `hold`: that many tokens are in its cache."""
        for layer in self._cache.layers:
            layer.set_end(max(1, end))

    def __call__(self, ids: Tensor, most: int) -> tuple[Tensor, Tensor | None]:
        """Up to `most` tokens after `ids`, (tokens,)."""
        cache, proposed = self._cache, []
        cached_tokens = cache.get_seq_length()
        more = ids[cached_tokens:]
        for _ in range(min(self.count, most)):
            if self._rows is not None and 1 < len(more) <= self.count + 1 and cached_tokens:
                logits = self._rows(more, cache)[0][-1]
            else:
                logits = self.model(more[None], past_key_values=cache, use_cache=True,
                                    logits_to_keep=1).logits[0, -1]
            more = logits.argmax(-1, keepdim=True)
            proposed.append(more)
        return (torch.cat(proposed) if proposed else ids[:0]), None

    def accept(self, length: int) -> None:
        """Crops the draft's cache to a text of `length` tokens, the last of which may be new to
        it."""
        over = self._cache.get_seq_length() - (length - 1)
        if over > 0:
            self._cache.crop(-over)


class Lookup:
    """Drafts what followed the last tokens where they stood before: the longest match, the latest
    first. Two places that go on differently are a tree."""

    def __init__(self, count: int, branches: int = 1) -> None:
        self.count, self.branches = count, branches

    on_device = True                           # the search can be a part of a captured round

    @property
    def steps(self) -> tuple[Accelerated, ...]:
        return ()

    def hold(self, text: Tensor, more: int, wanted: int) -> None:
        """Do nothing: the text is all it needs."""

    def leave(self, end: int) -> None:
        """Do nothing, likewise."""

    def begin(self) -> None:
        """Do nothing: no state is kept between texts."""

    def accept(self, length: int) -> None:
        """Do nothing: no state is kept between rounds."""

    def __call__(self, ids: Tensor, most: int) -> tuple[Tensor, Tensor | None]:
        text, most = ids.tolist(), min(self.count, most)
        chains: list[list[int]] = []
        for size in range(min(LONGEST_MATCH, len(text) - 1), 0, -1):
            last = text[-size:]
            for start in range(len(text) - size - 1, -1, -1):
                if text[start:start + size] == last:
                    after = text[start + size:]
                    # where the text ends it goes on as after the match
                    chain = [after[i % len(after)] for i in range(most)]
                    if chain and all(chain[0] != other[0] for other in chains):
                        chains.append(chain)
                    if len(chains) == self.branches:
                        break
            if len(chains) == self.branches:
                break
        tokens = torch.tensor([t for chain in chains for t in chain], dtype=ids.dtype,
                              device=ids.device)
        if len(chains) < 2:
            return tokens, None
        parents = [-1 if not i else at + i - 1 for at, chain in zip(
            _starts(chains), chains) for i in range(len(chain))]
        return tokens, torch.tensor(parents)


def _starts(chains: Sequence[Sequence[int]]) -> list[int]:
    starts = [0]
    for chain in chains[:-1]:
        starts.append(starts[-1] + len(chain))
    return starts
