"""When a text ends, asked token by token: what transformers' own criteria look at is known to the
host."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.generation import stopping_criteria as stock

NO_END = 1 << 62


class Stops:
    """The stopping criteria of one generate() of one text."""

    def __init__(self, criteria: Any) -> None:
        kinds: dict[type, list[Any]] = {}
        for criterion in criteria or ():
            kinds.setdefault(type(criterion), []).append(criterion)
        lengths = [c.max_length for c in kinds.pop(stock.MaxLengthCriteria, [])]
        self.most = min(lengths, default=NO_END)       # tokens, with those of the prompt
        self._eos = {t for c in kinds.pop(stock.EosTokenCriteria, [])
                     for t in c.eos_token_id.tolist()}
        self._times = kinds.pop(stock.MaxTimeCriteria, [])
        self._others = [c for c in criteria or () if type(c) in kinds]

    def ends(self, token: int, count: int, text: Callable[[], Tensor]) -> bool:
        """Is this the last token, `count` being the number of tokens with it? `text` makes these,
        (tokens,), where a criterion of the user's asks for them."""
        if (count >= self.most or token in self._eos
                or any(time.time() - c.initial_timestamp > c.max_time for c in self._times)):
            return True
        return bool(self._others) and bool(
            stock.StoppingCriteriaList(self._others)(text()[None], None).all())
