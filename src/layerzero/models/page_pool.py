"""The pages of a KV cache: which are free, and how many sequences share each of the others."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from ..spec.errors import CacheFull, InvalidCall
from ..spec.reason import Code, Reason


class PagePool:
    """The free pages, and a reference count for each of the others. The lowest free page is taken
    first, so that the pages of a sequence tend to be adjacent."""

    def __init__(self, pages: int) -> None:
        self.free = list(range(pages))
        self.uses = [0] * pages

    def take(self, count: int) -> list[int]:
        if count > len(self.free):
            raise CacheFull.of(f"{count} more pages are needed",
                               f"{len(self.free)} of {len(self.uses)} are free")
        pages = [heapq.heappop(self.free) for _ in range(count)]
        for page in pages:
            self.uses[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.uses[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        for page in pages:
            if self.uses[page] == 0:
                raise InvalidCall.of("kv_cache", Reason(
                    Code.BLOCK_TABLE_INVALID, "in use to be released", "free already",
                    f"page {page}"))
            self.uses[page] -= 1
            if self.uses[page] == 0:
                heapq.heappush(self.free, page)

    def grow(self, pages: int) -> None:
        for page in range(len(self.uses), pages):
            heapq.heappush(self.free, page)
            self.uses.append(0)
