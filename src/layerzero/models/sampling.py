"""Shorthands for lz.sample with one filter; a parameter is a number, or one for each row."""

from __future__ import annotations

from typing import Any, Union

import torch
from torch import Tensor

from ..dispatch.dispatcher import public_function
from ..ops.sample import OP as _sample

Rows = Union[Tensor, float]


def _argument(name: str, value: Rows) -> dict[str, Any]:
    return {f"{name}_rows": value} if isinstance(value, Tensor) else {name: value}


def _draw(logits: Tensor, name: str, value: Rows, temperature: Rows, seed: int | None, offset: int,
          generator: torch.Generator | None) -> Tensor:
    token: Tensor = public_function(_sample)(logits, **_argument(name, value),
                                             **_argument("temperature", temperature), seed=seed,
                                             offset=offset, generator=generator)
    return token


def sample_topk(logits: Tensor, k: Union[Tensor, int], temperature: Rows = 1.0, *,
                seed: int | None = None,
                offset: int = 0, generator: torch.Generator | None = None) -> Tensor:
    """Draws a token for each row of logits (batch, vocab) from the k likeliest."""
    return _draw(logits, "top_k", k, temperature, seed, offset, generator)


def sample_topp(logits: Tensor, p: Rows, temperature: Rows = 1.0, *, seed: int | None = None,
                offset: int = 0, generator: torch.Generator | None = None) -> Tensor:
    """Draws a token for each row of logits (batch, vocab) from the fewest whose probabilities reach
    p."""
    return _draw(logits, "top_p", p, temperature, seed, offset, generator)


def sample_minp(logits: Tensor, p: Rows, temperature: Rows = 1.0, *, seed: int | None = None,
                offset: int = 0, generator: torch.Generator | None = None) -> Tensor:
    """Draws a token for each row of logits (batch, vocab) from those at least p times as likely as
    the likeliest."""
    return _draw(logits, "min_p", p, temperature, seed, offset, generator)
