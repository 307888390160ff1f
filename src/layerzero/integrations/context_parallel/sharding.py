"""Which tokens a rank holds, and which keys its queries attend to.

Every sequence is cut into chunks of equal length. "zigzag": 2W chunks, of which rank r holds r and
2W-1-r, so that under a causal mask all ranks have the same work. "contiguous": W chunks, rank r
holds the r-th. A rank's tokens are packed sequence by sequence, each with its chunks in order;
`cu_seqlens` of a call are the boundaries of these local parts, the same on every rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from ...spec.errors import ConfigError
from .ranks import Exchange, Program, ranks_of

Layout = Literal["zigzag", "contiguous"]
_ATTRIBUTE = "_layerzero_items"                # of cu_seqlens: what was made from it


@dataclass(frozen=True, eq=False)
class Items:
    """The items of one lz.grouped_attention call; see there."""

    items: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    chunk_starts: Tensor | None = None
    chunk_lengths: Tensor | None = None

    def arguments(self) -> dict[str, Any]:
        return {"items": self.items, "max_seqlen_q": self.max_seqlen_q,
                "max_seqlen_k": self.max_seqlen_k, "chunk_starts": self.chunk_starts,
                "chunk_lengths": self.chunk_lengths}


def chunks_of(rank: int, world_size: int, layout: Layout) -> tuple[int, ...]:
    """Returns the numbers of the chunks that a rank holds of every sequence, in order."""
    return (rank, 2 * world_size - 1 - rank) if layout == "zigzag" else (rank,)


@dataclass(frozen=True)
class Sequences:
    """The sequences of one call as every rank sees them: local boundaries on the tensors' device,
    and the length of the longest local part. Nothing here waits for the device."""

    cu_seqlens: Tensor
    max_seqlen: int
    layout: Layout
    world_size: int

    def gathered(self, rank: int, tokens: int, is_causal: bool) -> Items:
        """Returns a rank's queries over the keys of all ranks, gathered and used in place."""
        def build() -> Items:
            rows = [(self._starts(slot), self._visible(chunk, is_causal))
                    for slot, chunk in enumerate(chunks_of(rank, self.world_size, self.layout))]
            return self._make_items(rows, tokens)

        return self._cached(("gathered", rank, tokens, is_causal), build)

    def exchanged(self, tokens: int, is_causal: bool) -> Items:
        """Returns the items after the exchange: all tokens of some heads, queries too rank by
        rank."""
        def build() -> Items:
            owners = sorted((chunk, rank, slot) for rank in range(self.world_size) for slot, chunk
                            in enumerate(chunks_of(rank, self.world_size, self.layout)))
            rows = [(self._starts(slot) + rank * tokens, self._visible(chunk, is_causal))
                    for chunk, rank, slot in owners]
            return self._make_items(rows, tokens)

        return self._cached(("exchanged", tokens, is_causal), build)

    def of_rank(self, rank: int, source: int, is_causal: bool) -> Items | None:
        """Returns a rank's queries over the keys of one rank; None where it sees none of them.
        Causality is in the choice of keys, and a diagonal only where the rank is the source
        itself."""
        def build() -> Items | None:
            source_chunks = chunks_of(source, self.world_size, self.layout)
            queries = enumerate(chunks_of(rank, self.world_size, self.layout))
            rows = [(self._starts(slot), sum(c <= chunk for c in source_chunks) if is_causal
                     else len(source_chunks))
                    for slot, chunk in queries]
            rows = [row for row in rows if row[1]]
            if not rows:
                return None
            starts = self._starts(0)
            items = torch.cat([torch.stack((q, self._length, starts, seen * self._length), 1)
                               for q, seen in rows])
            most = max(seen for _, seen in rows)
            return Items(items.int(), self._longest, most * self._longest)

        return self._cached(("of_rank", rank, source, is_causal), build)

    def _make_items(self, rows: Sequence[tuple[Tensor, int]], tokens: int) -> Items:
        """Makes items. `rows`: where a chunk of every sequence begins, and how many chunks it
        sees."""
        start_of = {chunk: rank * tokens + self._starts(slot) for rank in range(self.world_size)
                 for slot, chunk in enumerate(chunks_of(rank, self.world_size, self.layout))}
        starts = torch.stack([start_of[chunk] for chunk in range(len(start_of))], 1)
        nothing = torch.zeros_like(self._length)
        items = torch.cat([torch.stack((q, self._length, nothing, seen * self._length), 1)
                           for q, seen in rows])
        most = max(seen for _, seen in rows)
        # an empty sequence has no keys to address, but chunks of at least one
        return Items(items.int(), self._longest, most * self._longest,
                     starts.repeat(len(rows), 1).int(),
                     self._length.clamp(min=1).repeat(len(rows)).int())

    def _visible(self, chunk: int, is_causal: bool) -> int:
        return chunk + 1 if is_causal else self.world_size * self._slots

    @property
    def _slots(self) -> int:
        return 2 if self.layout == "zigzag" else 1

    @property
    def _length(self) -> Tensor:
        """The length of a chunk, of every sequence."""
        return (self.cu_seqlens[1:] - self.cu_seqlens[:-1]) // self._slots

    @property
    def _longest(self) -> int:
        return self.max_seqlen // self._slots

    def _starts(self, slot: int) -> Tensor:
        return self.cu_seqlens[:-1] + slot * self._length

    def _cached(self, key: tuple[Any, ...], build: Callable[[], Any]) -> Any:
        return _build_once(self.cu_seqlens,
                           (*key, self.max_seqlen, self.layout, self.world_size), build)


def sequences_of(cu_seqlens: Tensor | Sequence[int], max_seqlen: int | None, layout: Layout,
                 world_size: int, device: torch.device) -> Sequences:
    """Checks what needs no wait for a device. Without max_seqlen, cu_seqlens is on the host."""
    slots = 2 if layout == "zigzag" else 1
    if not isinstance(cu_seqlens, Tensor):
        cu_seqlens = torch.tensor(cu_seqlens, dtype=torch.int32)
    if cu_seqlens.device.type == "cpu":
        lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
        if any(length % slots for length in lengths):
            raise ConfigError(
                f"a rank holds two chunks of equal length of every sequence; local lengths "
                f"{lengths} are not all even. Pad sequences to multiples of 2 x {world_size} "
                f"ranks, and pass the local cu_seqlens (those of the sequences // {world_size})")
        longest = max(lengths, default=0)
        if max_seqlen is not None and max_seqlen < longest:
            raise ConfigError(f"max_seqlen must be at least the longest local part, {longest}, got "
                              f"{max_seqlen}")
        max_seqlen = longest if max_seqlen is None else max_seqlen
    elif max_seqlen is None:
        raise ConfigError("cu_seqlens is on a device and reading it would wait for it: pass "
                          "max_seqlen, the length of the longest local part, too")
    local = cu_seqlens
    if local.device != device:
        local = _build_once(local, device, functools.partial(local.to, device, non_blocking=True))
    return Sequences(local, max_seqlen, layout, world_size)


def _build_once(cu_seqlens: Tensor, key: Any, build: Callable[[], Any]) -> Any:
    """Returns what `build` makes of cu_seqlens, and keeps it with the tensor until that is written
    to: all layers of a model make the same calls."""
    # what was made in inference mode counts no versions
    version = None if cu_seqlens.is_inference() else cu_seqlens._version
    known: Any = getattr(cu_seqlens, _ATTRIBUTE, None)
    if known is None or known[0] != version or version is None:
        known = version, {}
        setattr(cu_seqlens, _ATTRIBUTE, known)
    if key not in known[1]:
        with torch.inference_mode(False):      # a later call may want gradients
            known[1][key] = build()
    return known[1][key]


@functools.lru_cache(maxsize=64)
def equal_lengths(batch: int, length: int, device: torch.device) -> Tensor:
    """Returns the cu_seqlens of a batch of equally long sequences."""
    with torch.inference_mode(False):
        return torch.arange(0, (batch + 1) * length, max(length, 1), dtype=torch.int32,
                            device=device)[:batch + 1]


# for the one who prepares the data

def local_cu_seqlens(cu_seqlens: Tensor, world_size: int) -> Tensor:
    """Returns the boundaries of each sequence's local part from those of the whole sequences."""
    return cu_seqlens // world_size


def shard_indices(cu_seqlens: Tensor | Sequence[int], rank: int, world_size: int,
                  layout: Layout = "zigzag") -> Tensor:
    """Returns the rows of the packed sequences that a rank holds, in its order. `cu_seqlens` are
    the boundaries of the whole sequences, read on the host."""
    bounds = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else list(cu_seqlens)
    count = world_size * (2 if layout == "zigzag" else 1)
    rows = [torch.zeros(0, dtype=torch.long)]
    for first, last in pairwise(bounds):
        if (last - first) % count:
            raise ConfigError(
                f"a sequence of {last - first} tokens cannot be cut into {count} equal chunks; pad "
                f"it to {-(-(last - first) // count) * count}")
        chunk = (last - first) // count
        rows += [torch.arange(first + c * chunk, first + (c + 1) * chunk)
                 for c in chunks_of(rank, world_size, layout)]
    return torch.cat(rows)


def shard(tensor: Tensor, cu_seqlens: Tensor | Sequence[int], rank: int, world_size: int,
          dim: int = 0, layout: Layout = "zigzag") -> Tensor:
    """Returns a rank's part of packed sequences along `dim`."""
    rows = shard_indices(cu_seqlens, rank, world_size, layout)
    return tensor.index_select(dim, rows.to(tensor.device))


def shard_positions(cu_seqlens: Tensor | Sequence[int], rank: int, world_size: int,
                    layout: Layout = "zigzag") -> Tensor:
    """Returns the position of each local token in its own sequence, for rotary embeddings."""
    bounds = torch.as_tensor(cu_seqlens).cpu().long()
    rows = shard_indices(bounds, rank, world_size, layout)
    return rows - bounds[torch.searchsorted(bounds, rows, right=True) - 1]


def unshard(local: Any, cu_seqlens: Tensor | Sequence[int], group: Any = None, dim: int = 0,
            layout: Layout = "zigzag") -> Tensor:
    """Gathers the ranks' parts along `dim` and returns the packed sequences, the same on every
    rank. No gradient flows back. `local`: a list of tensors for SimulatedRanks."""
    ranks = ranks_of(group)

    def program(tensor: Tensor) -> Program[Tensor]:
        pending = yield Exchange("all_gather", tensor.detach().movedim(dim, 0).contiguous())
        return pending.wait()

    gathered = ranks.run([program(t) for t in (local if isinstance(local, (list, tuple))
                                               else [local])])[0]
    order = torch.cat([shard_indices(cu_seqlens, rank, ranks.size, layout)
                       for rank in range(ranks.size)])
    whole = torch.empty_like(gathered)
    whole[order.to(gathered.device)] = gathered
    return whole.movedim(0, dim)


def shard_batch(batch: Mapping[str, Tensor], group: Any = None, rank: int | None = None
                ) -> dict[str, Tensor]:
    """Returns this rank's part of a batch for a causal model of transformers: tensors of (batch,
    seq) in zigzag along seq, with the position_ids of the kept tokens.

    A token's label is the next token, which another rank may hold: with `labels` come
    `shift_labels`, which transformers takes as they are. `rank` is for SimulatedRanks.
    """
    ranks = ranks_of(group)
    rank = ranks.local[0] if rank is None else rank
    tokens = batch["input_ids"]
    rows = shard_indices([0, tokens.shape[1]], rank, ranks.size).to(tokens.device)
    parts = dict(batch)
    if "labels" in parts:
        parts["shift_labels"] = torch.nn.functional.pad(parts["labels"][:, 1:], (0, 1), value=-100)
    mask = parts.pop("attention_mask", None)
    if mask is not None and not bool(mask.all()):
        raise ConfigError("attention_mask hides tokens, and a padded batch cannot be sharded; pack "
                          "the sequences and pass cu_seq_lens_q instead")
    parts.setdefault("position_ids", torch.arange(tokens.shape[1], device=tokens.device)
                     .expand_as(tokens))
    return {name: t.index_select(1, rows) for name, t in parts.items()}
