"""Which attention a module of transformers computes, and whether lz knows that one.

A configuration names it: "sdpa", "eager" (a function beside the model's own code), or whatever was
registered under a name. Known are transformers' own functions, and an eager function that gives
what lz.attention gives. Any other is the choice of the user: it is left as it is, and the report
says so.
"""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ..rewiring import mentions, replaced_sdpa
from . import NAME
from .recognise import NOWHERE, random
from .replacements import stock_of

INTERFACE = "ALL_ATTENTION_FUNCTIONS"
PATCHED = ("sdpa", "eager")                    # what lz.patch computes instead
# What the decode step computes instead: one token with a plain cache is the same by each of these.
DECODED = (*PATCHED, "flash_attention_2", "flash_attention_3", "flash_attention_4",
           "flex_attention")
# that an eager function may name
EAGER_PARAMETERS = frozenset(("scaling", "dropout", "softcap", "position_bias"))
# relative: another formula is farther off, another rounding is not
CLOSE = 1e-3


def interface_forward(module: nn.Module) -> FunctionType | None:
    """Returns the forward of a module that asks transformers' interface for its attention."""
    forward = getattr(stock_of(module), "forward", None)
    plain = inspect.unwrap(forward) if callable(forward) else None
    if isinstance(plain, FunctionType) and mentions(plain.__code__, INTERFACE):
        return plain if is_configuration(getattr(module, "config", None)) else None
    return None


def is_configuration(value: Any) -> bool:
    return ("transformers" in sys.modules
            and isinstance(value, sys.modules["transformers"].PreTrainedConfig))


class Implementations:
    """Judges the attention of the modules of one model; of modules alike, one is tried."""

    def __init__(self, served: tuple[str, ...] = PATCHED) -> None:
        self._served = served
        self._verdicts: dict[Any, str] = {}

    def refused(self, module: Any) -> str:
        """Returns why lz leaves this module's attention alone; "" where it knows it."""
        forward = interface_forward(module)
        if forward is None:
            # it calls torch's attention by itself, or nothing that lz computes
            return replaced_sdpa()
        name = module.config._attn_implementation
        if name == NAME:
            return ""
        if name is None:
            return "its configuration names no attention implementation"
        if name not in self._served or not _is_stock(forward, name):
            return (f"attn_implementation={name!r} was chosen for it and stays; "
                    "lz takes the place of transformers' own 'sdpa' and 'eager'")
        return (self._refused_eager(module, forward) if name == "eager" else replaced_sdpa()
                if name == "sdpa" else "")

    def _refused_eager(self, module: Any, forward: FunctionType) -> str:
        name, stock = eager_name(forward), stock_of(module)
        if not name or forward is not stock.forward:  # type: ignore[attr-defined]
            return "its eager attention is called in a way that lz does not know"
        if next(module.parameters(), NOWHERE).device.type == "meta":
            return "its weights are on the meta device; patch once they are loaded"
        sizes = _sizes(module)
        key = stock, name, sizes
        if key not in self._verdicts:
            agrees = sizes is not None and _agrees(forward.__globals__[name], module, *sizes)
            self._verdicts[key] = ("" if agrees
                                   else f"its {name} computes something else than lz.attention")
        return self._verdicts[key]


def eager_name(forward: FunctionType) -> str:
    """Returns the global through which a forward finds its eager attention; "" if not one."""
    names = [n for n in forward.__code__.co_names if "eager" in n
             and callable(forward.__globals__.get(n))]
    return names[0] if len(names) == 1 else ""


def _is_stock(forward: FunctionType, name: str) -> bool:
    """Tells whether transformers' own function, and its own masks, go by this name."""
    # not at the top: modules of other libraries need neither
    from transformers import masking_utils, modeling_utils

    functions = forward.__globals__.get(INTERFACE, modeling_utils.ALL_ATTENTION_FUNCTIONS)
    masks = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    if name == "eager":
        return name not in functions and masks.get(name) is masking_utils.eager_mask
    package = name if name == "flex_attention" else f"{name.partition('_attention')[0]}_attention"
    module = sys.modules.get(f"transformers.integrations.{package}")
    own = getattr(module, f"{package}_forward", None)
    return (functions.get(name) is own
            and (name != "sdpa" or masks.get(name) is masking_utils.sdpa_mask))


def _sizes(module: Any) -> tuple[int, int, int] | None:
    """Heads, key heads and head dimension to try an eager function of this module with."""
    groups, sinks, dim = (getattr(module, n, None)
                          for n in ("num_key_value_groups", "sinks", "head_dim"))
    groups, dim = (value if isinstance(value, int) else default
                   for value, default in ((groups, 1), (dim, 8)))
    heads = len(sinks) if isinstance(sinks, Tensor) else 2 * groups
    return None if heads % groups else (heads, heads // groups, dim)


def _reads_more(eager: Any) -> bool:
    """Tells whether a function does something with arguments that it does not name."""
    rest = inspect.getfullargspec(eager).varkw
    return any(i.argval == rest for i in dis.get_instructions(eager.__code__)
               if i.opname.startswith("LOAD_FAST"))


@torch.no_grad()
def _agrees(eager: Callable[..., Any], module: Any, heads: int, kv_heads: int, dim: int) -> bool:
    """Tells whether an eager function gives what lz gives: with the scale, mask, softcap, bias and
    sinks that it knows, and for a query that sees no key, as that of padding."""
    # imports transformers, which is there by now
    from .attention import eager_attend, eager_parameters

    like = torch.empty(0, dtype=torch.float32, device=next(module.parameters(), NOWHERE).device)
    query, key, value = (random(like, 2, n, 5, dim, seed=i)
                         for i, n in enumerate((heads, kv_heads, kv_heads)))
    mask = torch.full((2, 1, 5, 5), torch.finfo(like.dtype).min, device=like.device).triu(1)
    mask[1, :, 0] = torch.finfo(like.dtype).min
    extra = {"softcap": 2.0, "position_bias": random(like, 1, heads, 5, 5, seed=3)}
    try:
        parameters = eager_parameters(eager)
        if not parameters <= EAGER_PARAMETERS or _reads_more(eager):
            return False
        options = {"scaling": 0.3, "dropout": 0.0,
                   **{n: v for n, v in extra.items() if n in parameters}}
        with torch.inference_mode(False), torch.autocast(like.device.type, enabled=False):
            eager_out = eager(module, query, key, value, mask, **options)[0]
            out = eager_attend(parameters, module, query, key, value, mask, **options)
    except torch.OutOfMemoryError:
        raise
    # whatever unknown code says to inputs that it does not expect: then it is something else
    except Exception:
        return False
    if not isinstance(eager_out, Tensor) or eager_out.shape != out.shape:
        return False
    return bool((eager_out.float() - out.float()).abs().max() <= CLOSE * eager_out.abs().max())
