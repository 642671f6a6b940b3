"""Free KV pages: a stack of page ids."""

import numpy as np

from tokenyard.base import Int32Array


class OutOfPages(RuntimeError):
    """More pages were requested than are free; evict first."""


class PageAllocator:
    """Allocates page ids 1 to `num_pages`. Page 0 is padding and never allocated.

    Free ids are on a preallocated int32 stack, so `alloc` and `free` cost O(pages moved), not O(pool).
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 0:
            raise ValueError(f"num_pages is {num_pages}; it must be at least 0")
        self.num_pages = num_pages
        self._stack: Int32Array = np.empty(num_pages, np.int32)
        self.available = 0
        self.clear()

    def alloc(self, n: int) -> Int32Array:
        """Take `n` pages: int32[n], owned by the caller. Raises OutOfPages, and takes nothing, if fewer are free."""
        if not 0 <= n <= self.available:
            raise OutOfPages(f"{n} pages requested, {self.available} of {self.num_pages} free; evict first")
        top = self.available
        self.available = top - n
        return self._stack[top - n : top][::-1].copy()

    def free(self, pages: Int32Array) -> None:
        """Return `pages` (int32[n]). Raises ValueError if more pages would be free than the pool has."""
        top = self.available + len(pages)
        if top > self.num_pages:
            raise ValueError(f"{len(pages)} pages freed while {self.available} of {self.num_pages} are free")
        # Reversed, as `alloc` reads, so that pages are allocated again in the order in which they were held.
        self._stack[self.available : top] = pages[::-1]
        self.available = top

    def clear(self) -> None:
        """Make every page free, including pages in use."""
        self._stack[:] = np.arange(self.num_pages, 0, -1)
        self.available = self.num_pages

    def check(self) -> None:
        """Raise AssertionError if a page was freed twice or is out of range. O(free pages); for tests."""
        free = self._stack[: self.available]
        if self.available and not (free.min() >= 1 and free.max() <= self.num_pages):
            raise AssertionError(
                f"free pages outside 1..{self.num_pages}: {free[(free < 1) | (free > self.num_pages)]}"
            )
        ids, counts = np.unique(free, return_counts=True)
        if len(ids) != self.available:
            raise AssertionError(f"pages freed more than once: {ids[counts > 1]}")
