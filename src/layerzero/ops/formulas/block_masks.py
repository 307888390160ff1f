"""What a BlockMask of torch.nn.attention.flex_attention hides, in plain tensors.

A BlockMask lists blocks of keys for each block of queries: *full* ones, which are visible as a
whole, and partial ones, within which its mask_mod says what is visible. A block that is in neither
list is hidden, whatever the mask_mod says of it: so do the compiled kernels of flex_attention read
it. Only what torch computes without torch.compile asks the mask_mod alone.
"""

from __future__ import annotations

from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...spec.errors import InvalidCall
from ...spec.reason import Code, Reason


class Blocks(NamedTuple):
    """Which blocks a BlockMask lists, each (batch or 1, heads or 1, rows, columns) of bool."""

    partial: Tensor
    full: Tensor


def is_block_mask(value: Any) -> bool:
    """Returns whether this is a BlockMask, known by its name: its module imports Dynamo."""
    return any((cls.__module__, cls.__name__) == ("torch.nn.attention.flex_attention", "BlockMask")
               for cls in type(value).__mro__)


def copy_block_mask(mask: Any) -> Any:
    """Returns the mask with lists of its own: making one takes torch far longer."""
    copied = copy(mask)
    vars(copied).update({name: v.clone() for name, v in vars(mask).items()
                         if isinstance(v, Tensor)})
    return copied


def check_block_mask(op: str, mask: Any, query: Tensor, key: Tensor, name: str) -> None:
    """Raises InvalidCall unless the mask is one of these (batch, heads, seq, dim) tensors."""
    if not is_block_mask(mask):
        raise InvalidCall.of(op, Reason(Code.WRONG_TYPE, "a BlockMask", type(mask).__name__, name))
    batch, heads, seq_q = query.shape[:3]
    want = (batch, heads, seq_q, key.shape[2])
    shape = tuple(mask.shape)
    fits = len(shape) == 4 and shape[2:] == want[2:] and all(
        n in (1, full) for n, full in zip(shape, want))
    if not fits:
        raise InvalidCall.of(op, Reason(
            Code.MASK_BROADCAST_INVALID,
            f"{want}, as create_block_mask makes it for Q_LEN={want[2]} and KV_LEN={want[3]}",
            f"a BlockMask of {shape}", name))
    device = mask.kv_indices.device
    if device != query.device and not query.is_meta:
        raise InvalidCall.of(op, Reason(Code.MIXED_DEVICES, str(query.device), str(device), name))
    if getattr(mask.mask_mod, "__name__", "") == "_sliced_mask_mod_error":
        raise InvalidCall.of(op, Reason(
            Code.VALUE_OUT_OF_RANGE, "the mask_mod of the BlockMask that was sliced",
            "none: set it on the slice", f"{name}.mask_mod"))


def listed_blocks(mask: Any) -> Blocks:
    """Returns the lists of a BlockMask as tables."""
    rows, columns = (-(-n // size) for n, size in zip(mask.seq_lengths, mask.BLOCK_SIZE))
    partial = _table(mask.kv_num_blocks, mask.kv_indices, rows, columns)
    if mask.full_kv_num_blocks is None:
        return Blocks(partial, torch.zeros_like(partial))
    return Blocks(partial, _table(mask.full_kv_num_blocks, mask.full_kv_indices, rows, columns))


def _table(counts: Tensor, indices: Tensor, rows: int, columns: int) -> Tensor:
    listed = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    table = torch.zeros((*indices.shape[:-1], columns + 1), dtype=torch.bool, device=indices.device)
    # what is behind the count goes to a column of its own
    table.scatter_(-1, torch.where(listed, indices, columns).long(), True)
    return table[..., :rows, :columns]


def dense_mask(mask: Any) -> Tensor:
    """Returns the BlockMask as a bool mask (batch or 1, heads or 1, seq_q, seq_k)."""
    seq_q, seq_k = mask.seq_lengths
    return visible_keys(mask, listed_blocks(mask), range(seq_q), range(seq_k))


def visible_keys(mask: Any, blocks: Blocks, queries: range, keys: range | Tensor) -> Tensor:
    """Returns what these queries see of these keys, (batch or 1, heads or 1, queries, keys). The
    mask_mod is asked anew each time: it may read tensors that change."""
    from torch.nn.attention.flex_attention import create_mask  # imported by whoever has a BlockMask

    device, first = mask.kv_indices.device, queries.start

    def shifted(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Any:
        # an index costs a hundred times the sum
        return mask.mask_mod(b, h, q + first,
                             k + keys.start if isinstance(keys, range) else keys[k])

    batch, heads = mask.shape[:2]
    inside = create_mask(shifted, batch, heads, len(queries), len(keys), device=str(device))
    rows, columns = (torch.arange(n.start, n.stop, device=device) if isinstance(n, range) else n
                     for n in (queries, keys))
    partial, full = (table.index_select(-1, columns // mask.BLOCK_SIZE[1]).index_select(
        -2, rows // mask.BLOCK_SIZE[0]) for table in blocks)
    return (inside & partial) | full
