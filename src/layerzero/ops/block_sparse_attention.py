"""Attention of which a BlockMask says what each query sees.

The BlockMask is torch's (`torch.nn.attention.flex_attention.create_block_mask`), for these lengths,
on the device of the tensors, with one batch and one head or as many as the query has. A block of
keys that it does not list is hidden, and where its batch or its heads are one, its mask_mod is
asked for batch or head 0. `lz.attention(..., attn_mask=block_mask)` comes here.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..spec.mistake import Mistake, Results, Values
from ..spec.op import Op, Tolerance
from ..spec.reason import Code
from ..spec.rules import at_least, dtypes, equals
from .formulas.block_masks import check_block_mask, copy_block_mask, dense_mask
from .formulas.common import FLOATS, HEAD_WORDS, attend
from .formulas.mistakes import LSE, SCORES, SOFTCAP


def reference(
    query: Tensor, key: Tensor, value: Tensor, block_mask: Any, scale: float | None = None, *,
    softcap: float = 0.0, return_lse: bool = False,
) -> Any:
    """Attention under a BlockMask of torch; tensors are (batch, heads, seq, dim).

    The query may have a multiple of the key's heads. A query that sees no key gives zeros, and -inf
    as its log-sum-exp. scale, softcap, return_lse: as in lz.attention.
    """
    out, lse = attend(query, key, value, dense_mask(block_mask), 0.0, False, scale, None, -1, -1,
                      None, softcap)
    return (out, lse) if return_lse else out


def meta(query: Tensor, key: Tensor, value: Tensor, block_mask: Any, scale: float | None = None, *,
         softcap: float = 0.0, return_lse: bool = False) -> Any:
    out = query.new_empty((*query.shape[:-1], value.shape[-1]))
    if not return_lse:
        return out
    return out, query.new_empty(query.shape[:-1],
                                dtype=torch.promote_types(query.dtype, torch.float32))


def read(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the facts of the mask; raises InvalidCall for one that is not of these tensors."""
    query, key, mask = (values[name] for name in ("query", "key", "block_mask"))
    if not query.dim() == key.dim() == 4:      # the reader of sizes says so
        return dict.fromkeys(READS)
    check_block_mask("block_sparse_attention", mask, query, key, "block_mask")
    return {"mask_batch": mask.shape[0], "mask_heads": mask.shape[1],
            "block_q": mask.BLOCK_SIZE[0], "block_k": mask.BLOCK_SIZE[1]}


READS = ("mask_batch", "mask_heads", "block_q", "block_k")


def inputs(
    b: int = 2, hq: int = 4, hkv: int = 4, sq: int = 64, sk: int = 64, d: int = 64, dv: int = 0,
    mask: str = "causal", blocks: str = "16x16", per: str = "", softcap: float = 0.0,
    scale: float | None = None, lse: bool = False, stride: str = "",
    dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0,
) -> dict[str, Any]:
    """Returns random arguments for one case. `per`: what the mask differs over, "batch", "heads" or
    "batch heads"; `stride`: "transposed" storage, "sparse" last dim."""
    gen = torch.Generator("cpu").manual_seed(seed)

    def tensor(heads: int, seq: int, dim: int) -> Tensor:
        shape = {"transposed": (b, seq, heads, dim), "sparse": (b, heads, seq, dim * 2)}.get(
            stride, (b, heads, seq, dim))
        t = torch.randn(shape, generator=gen).to(device=device, dtype=dtype)
        return t.transpose(1, 2) if stride == "transposed" else (t[..., ::2] if stride == "sparse"
                                                                 else t)

    return {"query": tensor(hq, sq, d), "key": tensor(hkv, sk, d),
            "value": tensor(hkv, sk, dv or d),
            "block_mask": copy_block_mask(_block_mask(
                mask, blocks, b if "batch" in per else None, hq if "heads" in per else None, sq,
                sk, device, seed % 3)),
            "scale": scale, "softcap": softcap, "return_lse": lse}


@lru_cache(maxsize=512)
def _block_mask(kind: str, blocks: str, batch: int | None, heads: int | None, seq_q: int,
                seq_k: int, device: str, shift: int = 0) -> Any:
    """Returns a mask as users make them; `tables` lists fewer blocks than its mask_mod shows,
    `partial` has no list of full blocks, and -1 behind those that it lists; `unsorted` lists the
    last block first, as a choice of the best blocks may; `chosen` leaves blocks out between others.
    `shift` is a number that functions of the same code have apart, as those of two calls have."""
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask

    # as packed sequences: of three lengths, and the same for queries as for keys
    of_query, of_key = (torch.arange(n, device=device) * 3 // max(n, 1) for n in (seq_q, seq_k))
    mods = {
        "causal": lambda b, h, q, k: k <= q + (seq_k - seq_q) + shift + b + h,
        "window": lambda b, h, q, k: (k <= q + (seq_k - seq_q)) & (
            k + 11 + shift + b + h > q + (seq_k - seq_q)),
        "document": lambda b, h, q, k: of_query[q] == (of_key[k] + b + h) % 3,
        "prefix": lambda b, h, q, k: (k < 5 + shift + b + h) | (k <= q),
        "all": lambda b, h, q, k: k >= 0,
        "strided": lambda b, h, q, k: (k + b + h) % 3 == q % 3,
        # rows that see nothing: one in each block, the first block, all but one
        "dead_rows": lambda b, h, q, k: (q % 16 != 3) & (k <= q),
        "dead_block": lambda b, h, q, k: (q >= 20 + b + h) & (k <= q),
        "one_row": lambda b, h, q, k: (q == seq_q - 1) & (k % 2 == 0),
        "tables": lambda b, h, q, k: (k + q) % 5 != 0,
        "partial": lambda b, h, q, k: (k <= q + shift) | (k + b + h + 3 >= seq_k),
        "unsorted": lambda b, h, q, k: (k < 37 + shift + b + h) | (k <= q),
        # whole blocks alone, of each head others
        "whole": lambda b, h, q, k: k // 16 <= q // 16 + (b + h) % 2,
        "chosen": lambda b, h, q, k: (k + q + b + h) % 5 != shift}
    block_q, block_k = blocks.split("x")
    size = int(block_q), int(block_k)
    mask = create_block_mask(mods[kind], batch, heads, seq_q, seq_k, device=device, BLOCK_SIZE=size)
    if kind == "partial":
        counts, indices = (t.clone() for t in (mask.kv_num_blocks, mask.kv_indices))
        indices[torch.arange(indices.shape[-1], device=device) >= counts[..., None]] = -1
        return BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=size, mask_mod=mods[kind],
                                        seq_lengths=(seq_q, seq_k))
    if kind == "unsorted":
        return BlockMask.from_kv_blocks(
            mask.kv_num_blocks, _turned(mask.kv_num_blocks, mask.kv_indices),
            mask.full_kv_num_blocks, _turned(mask.full_kv_num_blocks, mask.full_kv_indices),
            BLOCK_SIZE=size, mask_mod=mods[kind], seq_lengths=(seq_q, seq_k))
    if kind == "chosen":
        row, column = (torch.arange(n, device=device) for n in mask.kv_indices.shape[-2:])
        head = torch.arange(mask.kv_indices.shape[1], device=device)[:, None, None]
        kept = ((column + row[:, None] + head + shift) % 3 != 1).expand(mask.kv_indices.shape)
        full = kept & (column % 4 == 2)
        return BlockMask.from_kv_blocks(*_lists(kept & ~full), *_lists(full), BLOCK_SIZE=size,
                                        mask_mod=mods[kind], seq_lengths=(seq_q, seq_k))
    if kind != "tables":
        return mask
    # the first of the partial blocks of each row is hidden, the last is full
    counts, indices = mask.kv_num_blocks, mask.kv_indices
    last = indices.gather(-1, (counts.long() - 1).clamp(min=0)[..., None])
    return BlockMask.from_kv_blocks(
        (counts - 2).clamp(min=0), indices.roll(-1, -1).contiguous(), (counts > 0).to(counts.dtype),
        torch.cat((last.to(indices.dtype), torch.zeros_like(indices[..., 1:])), -1).contiguous(),
        BLOCK_SIZE=size, mask_mod=mods[kind], seq_lengths=(seq_q, seq_k))


def _lists(blocks: Any) -> tuple[Any, Any]:
    """Returns how many blocks of each row are listed, and which; those behind them come last."""
    hidden = (~blocks).to(torch.uint8)
    return blocks.sum(-1).to(torch.int32), hidden.argsort(dim=-1, stable=True).to(torch.int32)


def _table(counts: Any, indices: Any) -> Any:
    """Returns for each row which blocks are listed."""
    columns = indices.shape[-1]
    places = torch.arange(columns, device=indices.device)
    known = torch.where(places < counts[..., None], indices, columns).long()
    table = torch.zeros((*indices.shape[:-1], columns + 1), dtype=torch.bool, device=places.device)
    return table.scatter(-1, known, True)[..., :-1]


def _turned(counts: Any, indices: Any) -> Any:
    """Returns the lists with their last block first; None where there are none."""
    if counts is None:
        return None
    places = (counts[..., None] - 1 - torch.arange(indices.shape[-1], device=indices.device))
    return indices.gather(-1, places.clamp(min=0).long()).contiguous()


CASES: tuple[dict[str, Any], ...] = (
    {}, {"mask": "document", "sq": 70, "sk": 70}, {"mask": "window", "hkv": 2},
    {"mask": "window", "sq": 5, "sk": 90, "hkv": 1}, {"mask": "prefix", "sq": 33, "sk": 41},
    {"mask": "all", "d": 24, "dv": 40}, {"mask": "strided", "blocks": "32x16", "sq": 45, "sk": 77},
    {"mask": "dead_rows"}, {"mask": "dead_block", "hkv": 2}, {"mask": "one_row", "sq": 50},
    {"mask": "partial", "sq": 40, "sk": 50, "d": 8}, {"mask": "unsorted", "sq": 70, "sk": 90},
    {"mask": "chosen", "sq": 60, "sk": 110}, {"mask": "chosen", "per": "heads", "sk": 100},
    {"mask": "whole", "per": "heads", "hkv": 2},
    {"mask": "tables", "sq": 60, "sk": 90}, {"mask": "tables", "blocks": "16x32", "per": "heads"},
    {"per": "batch"}, {"per": "batch heads", "mask": "document", "hkv": 2},
    {"per": "heads", "mask": "window", "hkv": 1}, {"lse": True, "mask": "document"},
    {"lse": True, "mask": "dead_rows", "hkv": 2}, {"softcap": 5.0},
    {"scale": 0.3, "mask": "prefix"},
    {"softcap": 3.0, "scale": 0.7, "lse": True}, {"stride": "transposed", "mask": "document"},
    {"stride": "sparse", "hkv": 2}, {"sq": 1, "sk": 130, "blocks": "128x128", "hkv": 2},
    {"sq": 200, "sk": 200, "blocks": "128x128", "mask": "document", "b": 1, "hq": 2, "hkv": 1},
    {"sq": 17, "sk": 3}, {"d": 1}, {"b": 1, "hq": 1, "hkv": 1, "sq": 1, "sk": 1}, {"b": 0},
)

STRESS: tuple[dict[str, Any], ...] = (
    {"b": 1, "hq": 2, "hkv": 1, "sq": 3, "sk": 8_269, "d": 16, "blocks": "128x128"},
    {"b": 1, "hq": 1, "hkv": 1, "sq": 2_100, "sk": 70, "d": 8, "mask": "strided",
     "blocks": "128x128"},
    {"b": 1, "hq": 2, "hkv": 1, "sq": 700, "sk": 700, "d": 16, "mask": "document",
     "blocks": "128x128"},
    {"b": 3, "hq": 6, "hkv": 3, "per": "batch heads", "mask": "window", "sq": 45, "sk": 61},
    {"mask": "tables", "per": "batch heads", "sq": 100, "sk": 140, "blocks": "32x16"},
    {"mask": "one_row", "lse": True, "sq": 40}, {"mask": "dead_block", "lse": True})

GRADIENT_CASES: tuple[dict[str, Any], ...] = (
    {}, {"mask": "document", "hkv": 2}, {"mask": "window", "sq": 5, "sk": 90},
    {"mask": "dead_rows"}, {"mask": "one_row", "sq": 40}, {"mask": "tables", "per": "heads"},
    {"mask": "document", "per": "batch heads", "hkv": 2}, {"mask": "chosen", "per": "heads"},
    {"lse": True}, {"d": 24, "dv": 40}, {"softcap": 5.0}, {"scale": 0.3}, {"stride": "transposed"})


# Mistakes that a kernel for this op could make.

def _with_blocks(partial: bool, full: bool) -> Any:
    """Returns an mistake that takes all listed blocks for full ones, or hides the full ones."""
    def apply(op: Any, v: Values) -> Values | None:
        from torch.nn.attention.flex_attention import BlockMask, noop_mask

        mask = v["block_mask"]
        mod = noop_mask if partial else mask.mask_mod
        counts, indices = ((mask.full_kv_num_blocks, mask.full_kv_indices) if full
                           else (None, None))
        return {**v, "block_mask": BlockMask.from_kv_blocks(
            mask.kv_num_blocks, mask.kv_indices, counts, indices, BLOCK_SIZE=mask.BLOCK_SIZE,
            mask_mod=mod, seq_lengths=mask.seq_lengths)}

    return apply


def _mask_mod_alone(op: Any, v: Values) -> Values | None:
    from torch.nn.attention.flex_attention import create_block_mask

    mask = v["block_mask"]
    batch, heads, seq_q, seq_k = mask.shape
    return {**v, "block_mask": create_block_mask(
        mask.mask_mod, batch, heads, seq_q, seq_k, device=str(mask.kv_indices.device),
        BLOCK_SIZE=mask.BLOCK_SIZE)}


def _gaps_visited(op: Any, v: Values) -> Values | None:
    """All blocks from the first listed one to the last."""
    from torch.nn.attention.flex_attention import BlockMask

    mask = v["block_mask"]
    listed, of_full = _table(mask.kv_num_blocks, mask.kv_indices), mask.full_kv_num_blocks
    whole = (listed.cumsum(-1) > 0) & (listed.flip(-1).cumsum(-1).flip(-1) > 0)
    whole = whole if of_full is None else whole & ~_table(of_full, mask.full_kv_indices)
    return None if torch.equal(whole, listed) else {**v, "block_mask": BlockMask.from_kv_blocks(
        *_lists(whole), of_full, mask.full_kv_indices, BLOCK_SIZE=mask.BLOCK_SIZE,
        mask_mod=mask.mask_mod, seq_lengths=mask.seq_lengths)}


def _mask_of_the_first(batch: bool) -> Any:
    """Returns an mistake that takes the mask of the first sample, or of the first head."""
    def apply(op: Any, v: Values) -> Results | None:
        mask = v["block_mask"]
        if mask.shape[0 if batch else 1] == 1:
            return None
        seen = dense_mask(mask)
        seen = (seen[:1] if batch else seen[:, :1]).expand_as(seen)
        out = attend(v["query"], v["key"], v["value"], seen, 0.0, False, v["scale"], None, -1, -1,
                     None, v["softcap"])
        return Results(out if v["return_lse"] else out[:1])

    return apply


MISTAKES: tuple[Mistake, ...] = (
    Mistake("mask", "the mask of the first sample for all", _mask_of_the_first(True)),
    Mistake("mask", "the mask of the first head for all", _mask_of_the_first(False)),
    Mistake("mask", "the mask_mod ignored within blocks", _with_blocks(True, True)),
    Mistake("mask", "the full blocks hidden", _with_blocks(False, False)),
    Mistake("mask", "blocks between those that are listed visited too", _gaps_visited),
    Mistake("mask", "the mask_mod asked alone, whatever blocks are listed", _mask_mod_alone),
    *SCORES, *SOFTCAP, *LSE)

OP = Op(
    name="block_sparse_attention", family="attention", reference=reference, meta=meta,
    inputs=inputs, cases=CASES, gradient_cases=GRADIENT_CASES, stress=STRESS,
    mistakes=MISTAKES,
    reference_kernel={"workspace": "4 * itemsize * elements", "graph_safe": False},
    batch_dims=("batch",), shard_dims=("heads", "kv_heads"),
    tolerance=Tolerance({"float16": (1e-3, 1e-3), "bfloat16": (1e-2, 1e-2), "float32": (1e-5, 1e-5),
                         "float64": (1e-8, 1e-8)}),
    shapes={"query": "batch heads seq_q head_dim", "key": "batch kv_heads seq_k head_dim",
            "value": "batch kv_heads seq_k head_dim_v"},
    returns=("batch heads seq_q head_dim_v", "batch heads seq_q"),
    same_dtype=("query", "key", "value"),
    derived={"group": "heads // kv_heads", "group_rest": "heads % kv_heads",
             "head_dim_gap": "head_dim - head_dim_v", "elements": "batch * heads * seq_q * seq_k"},
    words=HEAD_WORDS, exact=("heads", "kv_heads", "head_dim", "head_dim_v"),
    requires=(dtypes(*FLOATS), equals("group_rest", 0, Code.HEADS_NOT_DIVISIBLE),
              at_least("kv_heads", 1, Code.EMPTY_INPUT), at_least("seq_q", 1, Code.EMPTY_INPUT),
              at_least("seq_k", 1, Code.EMPTY_INPUT), at_least("head_dim", 1, Code.EMPTY_INPUT),
              at_least("head_dim_v", 1, Code.EMPTY_INPUT),
              at_least("softcap", 0.0, Code.VALUE_OUT_OF_RANGE)),
    flops="2 * batch * heads * seq_q * seq_k * (head_dim + head_dim_v)",
    bytes="itemsize * batch * (head_dim + head_dim_v) * (heads * seq_q + kv_heads * seq_k)",
    differentiable=("query", "key", "value"), autocast="lower", read=read, reads=READS,
    outputs="Tensor[]", sdpa_switches=True,
)
