"""The sequences of a call: how many there are, how many queries and keys each has.

Lengths differ, so that an offset of the wrong sequence shows. Of the small ones the first has more
queries than keys where that means something, the second no keys where the reference says what that
gives, the third more queries than a tile, the last more keys than a window or a tile.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ....spec.errors import DataError
from ..definition import Definition
from ..readings import chunk_size, skips
from . import drawn as kinds
from .constraints import total_axis

MAX_SEQUENCES = 1 << 20
LONG = 140                                     # keys of one of the small sequences
MAX_CHUNK = 512                               # of queries, that medium inputs exceed
_INDPTR = re.compile(r"indptr|cu_?seq|seq_starts|offsets$")
_PAGES = re.compile(r"(kv|page|block).*(indices|ids)$|^indices$")
_TABLE = re.compile(r"block_tables?|page_tables?")
LENGTHS = re.compile(r"seq_?lens|context_lens|kv_lens?|cache_seqlens|sequence_lengths")
QUERY = re.compile(r"(^|_)(q|qo|query)(_|$)")


@dataclass(frozen=True)
class Size:
    sequences: int
    queries: int                               # the longest, per sequence
    keys: int
    rows: int                                  # of what is not divided into sequences


SIZES = {"small": Size(4, 4, 21, 5), "medium": Size(8, 32, 256, 64),
         "large": Size(16, 256, 2048, 1024)}


@dataclass
class Plan:
    """The sequences of a call: how many, and how long each is."""

    queries: list[int]
    keys: list[int]
    pages: list[int]


class Sequences:
    """Sizes of the variable axes, as far as sequences fix them."""

    def __init__(self, definition: Definition, size: Size, axes: Mapping[str, int],
                 gen: torch.Generator) -> None:
        self.d, self.size, self.gen = definition, size, gen
        self.const = definition.const_axes
        self.sizes: dict[str, int] = dict(axes)
        self.ints = {n: s for n, s in definition.inputs.items() if s.shape
                     and s.dtype in ("int32", "int64")}
        self.indptrs = [n for n, s in self.ints.items() if _INDPTR.search(n)
                        and len(s.shape or ()) == 1]
        self.page_ids = next((n for n, s in self.ints.items() if _PAGES.search(n)
                              and len(s.shape or ()) == 1), "")
        self.table = next((n for n, s in self.ints.items() if _TABLE.search(n)
                           and len(s.shape or ()) == 2), "")
        self.page_size = self.const.get("page_size", self.const.get("block_size", 1))

    def plan(self) -> Plan:
        n = self._count()
        by_query = [i for i in self.indptrs if QUERY.search(i)]
        by_key = [i for i in self.indptrs if i not in by_query]
        total_q = self._total(by_query[0], "q") if by_query else ""
        total_k = self._total(by_key[0], "k") if by_key else ""
        queries = self._queries(n, total_q) if by_query else [1] * n
        paged, small = bool(self.page_ids or self.table), self.size is SIZES["small"]
        free = total_k not in self.sizes
        unseen = False
        # one cu_seqlens for queries and keys
        if not by_query and by_key and not paged and _is_alone(by_key):
            counts = queries = self._cut(self.sizes.get(total_k), n, self.size.keys, 1)
            if counts and free:
                counts[-1] = max(counts[-1], kinds.SHARED)
        else:
            counts = self._counts(queries, total_k)
            if len(counts) > 2 and free and small and (paged or by_query):
                counts[2] = max(counts[2], 2)          # with a last page that is partly used
                if skips(self.d):
                    counts[1] = 0              # which the reference leaves out
                unseen = (bool(by_query) and total_q not in self.sizes
                          and self._unseen(queries, counts))
        pages = counts if paged else []
        keys = [self._length(c, q, full=i == 0) for i, (c, q) in enumerate(zip(counts, queries))
                ] if paged else list(counts)
        if unseen:
            keys[-1] = min(keys[-1], kinds.UNSEEN - 3)
        if len(keys) > 2 and small and free and total_q not in self.sizes:
            for lengths in {id(part): part for part in (queries, counts, keys)}.values():
                lengths[0], lengths[-1] = lengths[-1], lengths[0]  # the longest is not the first
        for axis, amount in ((total_q, sum(queries)), (total_k, sum(counts))):
            if axis in self.d.var_axes:
                self.sizes.setdefault(axis, amount)
        if self.table:
            self.sizes.setdefault((self.ints[self.table].shape or ("", ""))[1],
                                  max(counts, default=0))
        pool = self.pool_axis() if paged else ""
        if pool:
            self.sizes.setdefault(pool, sum(counts) + 2)
        return Plan(queries, keys, pages)

    def _count(self) -> int:
        """How many sequences there are; axes that follow from it are fixed."""
        length = self._axis_of(self.indptrs[0]) if self.indptrs else ""
        rows = self._axis_of(self.table) if self.table else ""
        counted = {"batch_size", "num_seqs", "batch", rows, *self._counted(length)}
        names = [a for a in self.d.var_axes if a in counted and a != length]
        known = [self.sizes[a] for a in names if a in self.sizes]
        known += [self.sizes[length] - 1] if length in self.sizes else []
        n = max(known[0] if known else self.size.sequences, 0)
        if n > MAX_SEQUENCES:
            raise DataError(f"{self.d.name}: wanted at most {MAX_SEQUENCES} sequences, got {n}")
        for axis in names:
            self.sizes.setdefault(axis, n)
        for name in self.indptrs:
            self.sizes.setdefault(self._axis_of(name), n + 1)
        return n

    def _counted(self, length: str) -> set[str]:
        """Axes that count sequences, whatever their name: those of a number for each sequence, of
        queries without offsets, and one less than `length` by a constraint."""
        each = {self._axis_of(n) for n, s in self.ints.items() if len(s.shape or ()) == 1
                and n not in self.indptrs
                and ("last_page_len" in n or LENGTHS.search(n.lower()))}
        if self.indptrs and not any(QUERY.search(n) for n in self.indptrs) and (
                self.page_ids or self.table):
            each |= {(s.shape or ("",))[0] for n, s in self.d.inputs.items()
                     if s.floating and QUERY.search(n)}
        for text in self.d.constraints if length else ():
            match = re.fullmatch(rf"{length} == (\w+) \+ 1|(\w+) \+ 1 == {length}|"
                                 rf"(\w+) == {length} - 1", text.strip())
            each |= {name for name in match.groups() if name} if match else set()
        return each

    def _queries(self, n: int, total: str) -> list[int]:
        queries = self._cut(self.sizes.get(total), n, self.size.queries, 1)
        if not n or total in self.sizes:
            return queries
        chunk = chunk_size(self.d)
        if self.size is SIZES["small"]:
            kinds.many_queries(queries)
        elif queries[0] <= chunk <= MAX_CHUNK:
            queries[0] = chunk + 3             # more than one of the reference's chunks
        return queries

    def _counts(self, queries: list[int], total: str) -> list[int]:
        """Keys of each sequence, or pages; one is longer than a window or a tile may be."""
        paged, small = bool(self.page_ids or self.table), self.size is SIZES["small"]
        least = [math.ceil(q / self.page_size) if paged else q for q in queries]
        most = max(math.ceil(self.size.keys / self.page_size), 2) if paged else self.size.keys
        counts = self._beyond(least, self.sizes.get(total), most)
        if counts and total not in self.sizes:
            longest = max(LONG if small else 0, self._beyond_window())
            counts[0] = max(counts[0], math.ceil(longest / self.page_size))
        return counts

    def _beyond_window(self) -> int:
        """Keys that exceed the window that the definition speaks of."""
        size = kinds.window(self.d)
        return size + kinds.MANY if size else 0

    def _unseen(self, queries: list[int], counts: list[int]) -> bool:
        """Give the last sequence more queries than keys, if the reference says what a query gets
        that sees none, and if a page may be partly used."""
        partly = "last_page_len" in " ".join(self.ints) or self.table or self.page_size == 1
        if len(queries) < 4 or not partly or not kinds.treats_unseen(self.d):
            return False
        queries[-1] = max(queries[-1], kinds.UNSEEN)
        counts[-1] = 1 if self.page_size > 1 else kinds.UNSEEN - 3
        return True

    def _axis_of(self, name: str) -> str:
        return (self.d.inputs[name].shape or ("",))[0]

    def _total(self, indptr: str, kind: str) -> str:
        axis = total_axis(self.d.constraints, indptr)
        if axis:
            return axis
        if kind == "k" and self.page_ids:
            return self._axis_of(self.page_ids)
        tensor = next((n for n, s in self.d.inputs.items() if s.floating and len(s.shape or ()) >= 2
                       and (QUERY.search(n) is not None) == (kind == "q")), "")
        return self._axis_of(tensor) if tensor else ""

    def pool_axis(self) -> str:
        spec = next((s for s in self.d.inputs.values() if s.shape and {"page_size", "block_size"}
                     & set(s.shape)), None)
        return (spec.shape[0] if spec is not None and spec.shape
                and spec.shape[0] in self.d.var_axes else "")

    def _cut(self, total: int | None, n: int, maximum: int, minimum: int) -> list[int]:
        """`n` lengths, random or with this sum."""
        if total is None:
            return [int(torch.randint(minimum, maximum + 1, (), generator=self.gen))
                    for _ in range(n)]
        if n == 0:
            return []
        cuts = sorted(torch.randint(0, total + 1, (n - 1,), generator=self.gen).tolist())
        return [b - a for a, b in zip([0, *cuts], [*cuts, total])]

    def _beyond(self, minimums: list[int], total: int | None, maximum: int) -> list[int]:
        """A length >= least[i] for each, if the sum allows it."""
        if total is None:
            return [max(a, b) for a, b in zip(minimums, self._cut(None, len(minimums), maximum, 1))]
        rest = total - sum(minimums)
        if rest < 0:
            return self._cut(total, len(minimums), maximum, 0)
        return [a + b for a, b in zip(minimums, self._cut(rest, len(minimums), maximum, 0))]

    def _length(self, pages: int, queries: int, full: bool) -> int:
        """Keys of a sequence with so many pages; its last page is full only if it shall be, or has
        to be."""
        if not pages:
            return 0
        most = pages * self.page_size
        low = min(max(most - self.page_size + 1, queries), most)
        drawn = int(torch.randint(low, max(most, low + 1), (), generator=self.gen))
        partly = "last_page_len" in " ".join(self.ints) or self.table
        return drawn if partly and not full else most


def _is_alone(indptrs: list[str]) -> bool:
    return len(indptrs) == 1 and not re.search(r"(^|_)(k|kv)(_|$)", indptrs[0])
