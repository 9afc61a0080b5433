"""Pages of the key/value cache, counted by reference. Bookkeeping only: no tensors."""

from __future__ import annotations

from collections.abc import Iterable


class OutOfPages(RuntimeError):
    """No free page is left; the scheduler makes room and asks again."""


class PagePool:
    """`total` pages of `size` token slots each. Token j of a list of pages lies in slot pages[j // size] * size + j % size."""

    def __init__(self, total: int, size: int) -> None:
        if total < 1 or size < 1:
            raise ValueError(f"a page pool needs at least one page of one slot; got {total} pages of {size}")
        self.total, self.size = total, size
        self._free = list(range(total - 1, -1, -1))
        self._holders = [0] * total

    @property
    def free(self) -> int:
        return len(self._free)

    def needed(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.size)

    def take(self, count: int) -> list[int]:
        """Take `count` pages, each with one holder, or raise OutOfPages and take none."""
        if count > len(self._free):
            raise OutOfPages(f"{count} pages asked for, {len(self._free)} free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add a holder to each page."""
        for page in pages:
            if self._holders[page] < 1:
                raise ValueError(f"page {page} is free and cannot be shared")
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Remove a holder from each page; a page without holders is free again."""
        for page in pages:
            if self._holders[page] < 1:
                raise ValueError(f"page {page} is released more often than it was held")
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)
