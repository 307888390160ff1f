"""Masks for transformers, which also say what they are.

transformers' own SDPA masks leave a mask out only where `is_causal` alone says it. Ours are the
same tensors, and one that is nothing but causality or a window carries a `Pattern`: the attention
then needs no mask, so that fast kernels qualify. A model that slices, joins or overwrites its mask
loses the pattern with it, never the meaning.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import masking_utils

_ATTRIBUTE = "_layerzero_pattern"
# of an additive mask: the pattern that its values follow
_VALUES = "_layerzero_values"


class Pattern(NamedTuple):
    """The pattern of a mask: keys [first, last) are seen, the last query on the last of them."""

    first: int
    last: int
    is_causal: bool
    window_left: int
    window_right: int


def attention_mask(**arguments: Any) -> Tensor | None:
    """Returns a mask as transformers' `sdpa_mask` makes it, with a pattern where it has one."""
    pattern = _pattern(arguments) if "q_offset" in arguments and not _tracing(arguments) else None
    if pattern is None:
        return masking_utils.sdpa_mask(**arguments)  # type: ignore[no-any-return]
    arguments["attention_mask"] = None              # it hides nothing
    if pattern.last < arguments["kv_length"] and arguments["q_length"] == 1:
        # without a mask, one query would see keys that are not there yet
        arguments["allow_is_causal_skip"] = False
    # Overwriting a mask must be seen; tensors of inference mode do not count versions.
    with torch.inference_mode(False):
        mask: Tensor | None = masking_utils.sdpa_mask(**arguments)
    if mask is not None:
        setattr(mask, _ATTRIBUTE, (pattern, mask._version))
    return mask


def pattern_of(mask: Tensor, queries: int, keys: int) -> Pattern | None:
    """Returns the pattern of a mask for these lengths, if it has one and was not overwritten."""
    noted = getattr(mask, _ATTRIBUTE, None)
    if noted is None or noted[1] != mask._version or mask.shape[-2:] != (queries, keys):
        return None
    return noted[0]  # type: ignore[no-any-return]


def plain_pattern(mask: Tensor, queries: int, keys: int, window: int | None) -> Pattern | None:
    """Returns the pattern that an additive mask follows, if any; looked up once per model."""
    if not mask.is_floating_point() or mask.dim() != 4 or mask.shape[-2:] != (queries, keys):
        return None
    if (masking_utils.is_tracing(mask)
        or (mask.is_cuda and torch.cuda.is_current_stream_capturing())):
        return None                             # its values cannot be looked at
    # counts no versions: an overwritten one would not be noticed
    if mask.is_inference():
        return _follows(mask, queries, keys, window)
    known: Any = getattr(mask, _VALUES, None)
    key = mask._version, queries, keys, window
    if known is None or known[0] != key:
        known = key, _follows(mask, queries, keys, window)
        setattr(mask, _VALUES, known)
    return known[1]  # type: ignore[no-any-return]


def _follows(mask: Tensor, queries: int, keys: int, window: int | None) -> Pattern | None:
    lowest, nothing = mask.new_full((), torch.finfo(mask.dtype).min), mask.new_zeros(())
    rows = torch.arange(keys - queries, keys, device=mask.device)[:, None]
    distance = rows - torch.arange(keys, device=mask.device)   # how far a key is left of each query
    for left in (-1, window - 1) if window else (-1,):
        hidden = (distance < 0) if left < 0 else (distance < 0) | (distance > left)
        if bool((mask == torch.where(hidden, lowest, nothing)).all()):
            return Pattern(0, keys, queries > 1, left, -1)
    return None if bool(mask.any()) else Pattern(0, keys, False, -1, -1)


def _pattern(arguments: dict[str, Any]) -> Pattern | None:
    kind, captured = _anatomy(arguments["mask_function"])
    queries, keys = arguments["q_length"], arguments["kv_length"]
    if kind in (_CAUSAL, _SLIDING):
        offset = arguments["q_offset"]
        if isinstance(offset, Tensor):
            if queries == 1 and offset.device.type != "cpu":
                # one token for a static cache: reading it would wait for the device
                return None
            offset = arguments["q_offset"] = int(offset)
        diagonal = offset - arguments["kv_offset"]         # query 0 stands at this key
        last = diagonal + queries
        if diagonal < 0 or last > keys:
            return None
        first, left = 0, -1
        if kind == _SLIDING:
            window = captured[0]
            first = max(0, diagonal - window + 1)
            left = window - 1 if last - first > window else -1
        pattern = Pattern(first, last, queries > 1, left, -1)
    elif kind == _FULL:
        pattern = Pattern(0, keys, False, -1, -1)
    elif (kind == _SLIDING_BOTH_WAYS and queries == keys
          and arguments["q_offset"] == arguments["kv_offset"] == 0):
        pattern = Pattern(0, keys, False, captured[0], captured[0])
    else:
        return None
    seen = _is_full(arguments["attention_mask"], arguments["kv_offset"], pattern)
    return pattern if seen else None


def _is_full(padding: Tensor | None, kv_offset: int, pattern: Pattern) -> bool:
    """No key of the pattern is padding."""
    if padding is None:
        return True
    end = kv_offset + pattern.last
    return padding.shape[-1] >= end and bool(padding[:, kv_offset + pattern.first:end].all())


def _tracing(arguments: dict[str, Any]) -> bool:
    """Returns whether values cannot be read: then the graph computes the mask."""
    offset = arguments["q_offset"]
    return masking_utils.is_tracing(arguments["attention_mask"]) or (
        isinstance(offset, Tensor) and masking_utils.is_tracing(offset))


def _anatomy(function: Callable[..., Any]) -> tuple[tuple[CodeType, ...], tuple[Any, ...]]:
    """Returns what a mask function is made of: its code, its callees' code, their values."""
    if not isinstance(function, FunctionType):
        return (), ()
    codes: tuple[CodeType, ...] = (function.__code__,)
    captured: tuple[Any, ...] = ()
    for cell in function.__closure__ or ():
        inside = cell.cell_contents
        for part in inside if isinstance(inside, tuple) else (inside,):
            if isinstance(part, FunctionType):
                more, values = _anatomy(part)
                codes, captured = codes + more, captured + values
            else:
                captured += (part,)
    return codes, captured


_CAUSAL = _anatomy(masking_utils.causal_mask_function)[0]
_SLIDING = _anatomy(masking_utils.sliding_window_causal_mask_function(1))[0]
_FULL = _anatomy(masking_utils.bidirectional_mask_function)[0]
_SLIDING_BOTH_WAYS = _anatomy(masking_utils.sliding_window_bidirectional_mask_function(1))[0]
_PLAIN = [_anatomy(function)[0] for plain in (
    masking_utils.causal_mask_function, masking_utils.sliding_window_causal_mask_function(1),
    masking_utils.bidirectional_mask_function) for function in (
        plain, masking_utils.and_masks(plain, masking_utils.packed_sequence_mask_function(
            torch.zeros(0))))]


def is_plain(function: Callable[..., Any]) -> bool:
    """Tells whether a mask function says causality, a sliding window or nothing; it may also tell
    the sequences apart that transformers takes jumping positions for."""
    return _anatomy(function)[0] in _PLAIN
