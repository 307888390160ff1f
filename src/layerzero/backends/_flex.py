"""torch's flex_attention, compiled, for the kernels that are made of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import count
from typing import Any

import torch
from torch import Tensor

_serial = count()
Attend = Callable[..., Any]


def compiled_flex(name: str) -> Callable[..., Attend]:
    """Returns a function that gives one compiled flex_attention per specialization.

    It takes query, key, value, score_mod, block_mask, scale and whether to return the log-sum-exp
    too. Each has a name of its own: torch counts recompilations by name, and past eight it silently
    runs eagerly. fullgraph makes it raise instead.
    """
    from torch.nn.attention import flex_attention as module

    # `return_lse` until torch 2.8, a request object since
    request = getattr(module, "AuxRequest", None)
    lse_option = {"return_lse": True} if request is None else {"return_aux": request(lse=True)}

    @lru_cache(maxsize=None)
    def compiled(*specialization: Any) -> Attend:
        def attend(query: Tensor, key: Tensor, value: Tensor, score: Any, block_mask: Any,
                   scale: float | None, aux: dict[str, Any]) -> Any:
            return module.flex_attention(query, key, value, score, block_mask, scale,
                                         enable_gqa=True, **aux)

        attend.__code__ = attend.__code__.replace(co_name=f"{name}_{next(_serial)}")
        traced = torch.compile(attend, fullgraph=True)

        def run(query: Tensor, key: Tensor, value: Tensor, score: Any, block_mask: Any,
                scale: float | None, return_lse: bool) -> Any:
            if not torch.is_grad_enabled() and (query.requires_grad or key.requires_grad
                                                or value.requires_grad):
                # on a CPU it refuses parameters, recorded or not
                query, key, value = query.detach(), key.detach(), value.detach()
            if not return_lse:
                return traced(query, key, value, score, block_mask, scale, {})
            out, lse = traced(query, key, value, score, block_mask, scale, lse_option)
            return out, lse if isinstance(lse, Tensor) else lse.lse

        return run

    return compiled
