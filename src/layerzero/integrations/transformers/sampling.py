"""Sampling in generate() by lz.sample: temperature, top-k, top-p and min-p in one pass, where
transformers sorts.

Only where it is asked for: the tokens have the same probabilities, but a seed gives others than it
gave before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.generation import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ..rewiring import public

_sample = public("sample")
# In the order in which lz.sample applies them, and transformers too.
_KINDS = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)
_NAMES = ("temperature", "top_k", "top_p", "min_p")        # what both call it


class Draw(LogitsProcessor):  # type: ignore[misc]
    """Filters and draws. The scores that it gives leave one token, so that the draw that follows
    takes it."""

    def __init__(self, **by: float) -> None:
        self.filters = by

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        token = _sample(scores, **self.filters).unsqueeze(1)
        # as softmax has it of no score at all
        nothing = torch.where(token < 0, torch.nan, 0.0).to(scores.dtype)
        return torch.full_like(scores, -torch.inf).scatter_(1, token.clamp(min=0), nothing)


def with_draw(processors: Any, config: Any) -> Any:
    """Returns the list with its filters at the end replaced by one Draw; as it is where that would
    be seen in the results, or where something stands among them that lz.sample does not know."""
    kinds = [type(p) for p in processors]
    first = next((n for n, kind in enumerate(kinds) if kind in _KINDS), len(kinds))
    places = [_KINDS.index(kind) for kind in kinds[first:] if kind in _KINDS]
    filters = processors[first:]
    if (not config.do_sample or config.output_scores or len(places) != len(filters)
        or places != sorted(set(places))
            or not any(places)                 # a temperature alone needs no sort
            or any(getattr(p, "min_tokens_to_keep", 1) != 1
                   or getattr(p, "filter_value", -torch.inf) != -torch.inf
                   for p in filters)):
        return processors
    by = {_NAMES[place]: getattr(p, _NAMES[place]) for p, place in zip(filters, places)}
    return LogitsProcessorList([*processors[:first], Draw(**by)])


def drawing(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the `_sample` of a model that draws by lz.sample."""
    @functools.wraps(stock)
    def _sample(self: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any,
                generation_config: Any, *args: Any, **kwargs: Any) -> Any:
        return stock(self, input_ids, with_draw(logits_processor, generation_config),
                     stopping_criteria, generation_config, *args, **kwargs)

    return _sample
