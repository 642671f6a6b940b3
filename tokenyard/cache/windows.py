"""KV of sliding-window layers: separate pages, for the tokens that are still inside a window.

Full-attention layers and sliding-window layers are two groups with a pool each. The tree, the rows and the free pages
hold page ids of the first group. `WindowPages.of` maps each to the page of the second group with the same tokens, if
any. So the owner of a page also owns its window page, and both are always moved together.

A window page is *used* by the rows that may still read it, and by the row that it is private to. A private page that
falls behind its row's window is freed immediately. A page of the tree stays until the pool runs out, and is then
evicted in the order of `rank`: first pages that were never at the end of a prompt or an answer, then the ends, each
least recently used first. A hit at an end needs the last `window` tokens before it, so these pages are worth keeping.
With eager freeing, or one order for all pages, long prompts evict the ends of other sessions (vllm issue 48435).
"""

from collections.abc import Callable, Iterator

import numpy as np

from tokenyard.base import BoolArray, Int32Array, Int64Array
from tokenyard.cache.allocator import OutOfPages, PageAllocator

MARGIN_TOKENS = 32
"""Tokens behind a row's window whose pages it keeps.

A stop string is found a few tokens late, and the next turn may differ in an answer's last tokens. Both make the
reusable prefix shorter, and the window before that shorter end must have its pages too.
"""

_ENDS = np.int64(1) << 62
_BATCH_SHARE = 32
"""An eviction scans all pages, so it frees at least this part of the pool, as a divisor, at a time."""


def max_retained_tokens(window: int, page_size: int) -> int:
    """The most tokens before its next one whose window pages a row keeps."""
    return window - 1 + MARGIN_TOKENS + page_size - 1


def min_window_pages(window: int, page_size: int) -> int:
    """The fewest window pages with which any prompt can be computed one page at a time."""
    return max_retained_tokens(window, page_size) // page_size + 4


class WindowPages:
    """The window page of each page, for one group of layers with one window.

    window: tokens that a token attends to, itself included.
    of: int32[num_pages + 1], the window page of each page, 0 for none.
    users: int32[num_pages + 1], how many rows use that window page.
    first: int32[rows], for each row the first column of the page table whose window page it uses; it uses all later
        ones.
    evictable: window pages of the tree without users.
    listeners: called with pages of the tree (int32[n]) that have gained or lost a window page.
    """

    def __init__(self, window: int, page_size: int, num_pages: int, window_pages: int, rows: int) -> None:
        self.window = window
        self.page_size = page_size
        self.num_pages = window_pages
        self.allocator = PageAllocator(window_pages)
        self.of: Int32Array = np.zeros(num_pages + 1, np.int32)
        self.users: Int32Array = np.zeros(num_pages + 1, np.int32)
        self.first: Int32Array = np.zeros(rows, np.int32)
        self.evictable = 0
        self.listeners: list[Callable[[Int32Array], None]] = []
        # Ranks are unique, so the order of eviction is deterministic.
        self.rank: Int64Array = np.zeros(num_pages + 1, np.int64)
        self._tick = 0

    @property
    def available_pages(self) -> int:
        """Pages that are free or can be evicted."""
        return self.allocator.available + self.evictable

    @property
    def max_retained_tokens(self) -> int:
        """The most tokens before its next one whose window pages a row keeps."""
        return max_retained_tokens(self.window, self.page_size)

    @property
    def max_chunk_tokens(self) -> int:
        """The most tokens of a prompt to compute at a time, in whole pages: two such chunks and a window fit."""
        pages = (self.num_pages - self.max_retained_tokens // self.page_size - 2) // 2
        return max(pages, 1) * self.page_size

    # ---- prefixes --------------------------------------------------------------------------------------------------

    def usable_pages(self, runs: Iterator[Int32Array], count: int) -> int:
        """How many of a prefix's `count` pages are a hit.

        It is the largest number such that the window of the token after them has all its window pages. runs: the pages
        in parts (int32[n] each), the last part first; if all pages are a hit, only the parts in the window are drawn.
        """
        first, seen, parts = count, self.window_start_page(count * self.page_size), []
        while first > seen:
            parts.append(next(runs))
            first -= len(parts[-1])
        if not parts or self.of[np.concatenate(parts[::-1])[seen - first :]].all():
            return count
        pages = np.concatenate([*parts, *runs][::-1])
        ends = np.arange(count + 1)
        # Of the pages before each end, the last one without a window page.
        absent = np.maximum.accumulate(np.concatenate(([-1], np.where(self.of[pages] == 0, ends[:-1], -1))))
        return int(ends[absent < self._window_start_page(ends * self.page_size)][-1])

    def tail(self, pages: Int32Array) -> Int32Array:
        """The end of a prefix's `pages` that is inside the window of the token after them."""
        return pages[self._window_start_page(len(pages) * self.page_size) :]

    def window_start_page(self, tokens: int) -> int:
        """The first page inside the window of the token after `tokens` tokens."""
        return int(self._window_start_page(tokens))

    def retain(self, pages: Int32Array) -> None:
        """One more row uses the window pages of `pages` (int32[n], no page twice), all of which have one."""
        self.evictable -= int(np.count_nonzero(self.users[pages] == 0))
        self.users[pages] += 1

    def release_pages(self, pages: Int32Array) -> None:
        """One row less uses the window pages of `pages` (int32[n]); a page that occurs k times loses k users.

        Window pages of the tree without users become evictable.
        """
        np.subtract.at(self.users, pages, 1)
        idle = np.unique(pages[self.users[pages] == 0])
        self.evictable += int(np.count_nonzero(self.of[idle]))

    def protect_prefix_end(self, pages: Int32Array) -> None:
        """Prompts or answers end with `pages` (int32[n]), which are evicted after pages in the middle."""
        self.rank[pages] = _ENDS + self._ticks(len(pages))

    # ---- allocation ----------------------------------------------------------------------------------------------

    def allocate(self, pages: Int32Array) -> None:
        """Allocate a window page for each of `pages` (int32[n]), which a row has just taken.

        Raises OutOfPages, and takes nothing, if too few are free or evictable.
        """
        missing = len(pages) - self.allocator.available
        if missing > self.evictable:
            raise OutOfPages(
                f"{len(pages)} window pages requested, {self.available_pages} of {self.num_pages} available"
            )
        if missing > 0:
            self.evict(missing)
        self.of[pages] = self.allocator.alloc(len(pages))
        self.users[pages] = 1
        self.rank[pages] = self._ticks(len(pages))

    def free_pages(self, pages: Int32Array) -> None:
        """`pages` (int32[n]) were freed: free their window pages too."""
        present = pages[self.of[pages] > 0]
        self.evictable -= int(np.count_nonzero(self.users[present] == 0))
        self._free(present)
        self.users[pages] = 0

    def replace(self, pool_row: int, column: int, own: Int32Array, found: Int32Array) -> None:
        """From `column` on, `found` pages of the tree replace a row's `own` pages (both int32[n]).

        The row uses the window pages of `found`. Where a found page has none, it takes that of the row's own page.
        """
        behind = max(int(self.first[pool_row]) - column, 0)
        own, found = own[behind:], found[behind:]
        absent = self.of[found] == 0
        bare, giving = found[absent], own[absent]
        self.of[bare], self.rank[bare] = self.of[giving], self.rank[giving]
        self.users[bare] = self.users[giving]
        self.of[giving] = self.users[giving] = 0
        self.retain(found[~absent])
        if len(bare):
            self._tell(bare)

    def advance(
        self, page_table: Int32Array, pool_rows: Int32Array, cached_tokens: Int32Array, computed: Int32Array
    ) -> None:
        """Release the window pages behind the windows of rows; private ones are freed.

        The rows have `computed` tokens, `cached_tokens` of them in the tree (all int32[n]).
        """
        first = self.first[pool_rows]
        ends = np.maximum(np.maximum(computed - self.max_retained_tokens, 0) // self.page_size, first).astype(np.int32)
        counts = ends - first
        total = int(counts.sum())
        if not total:
            return
        self.first[pool_rows] = ends
        columns = np.arange(total) + np.repeat(first - np.cumsum(counts) + counts, counts)
        pages = page_table[np.repeat(pool_rows, counts), columns]
        private: BoolArray = columns >= np.repeat(cached_tokens // self.page_size, counts)
        self.release_pages(pages[~private])
        gone = pages[private]
        self.users[gone] = 0
        self._free(gone)

    # ---- rows ------------------------------------------------------------------------------------------------------

    def allocate_row(self, pool_row: int, pages: Int32Array) -> None:
        """A row begins after a prefix of `pages` (int32[n]), whose tail it uses already.

        The hit shows that this end is worth keeping, so it is evicted late.
        """
        self.first[pool_row] = self._window_start_page(len(pages) * self.page_size)
        self.protect_prefix_end(self.tail(pages))

    def release_row(self, pool_row: int, pages: Int32Array) -> None:
        """A row ends whose first `pages` (int32[n]) are in the tree: release them, and evict their end late."""
        used = pages[int(self.first[pool_row]) :]
        self.protect_prefix_end(used)
        self.release_pages(used)

    def pages_to_be_freed(self, pool_row: int, pages: Int32Array, private_from: int) -> int:
        """How many window pages become free or evictable when a row with `pages` (int32[n]) leaves.

        Pages from the index `private_from` on are private.
        """
        shared = pages[int(self.first[pool_row]) : private_from]
        alone = (self.of[shared] > 0) & (self.users[shared] == 1)
        return int(np.count_nonzero(alone)) + int(np.count_nonzero(self.of[pages[private_from:]]))

    def check(self, users: Int32Array) -> None:
        """Raise AssertionError if the accounting is wrong. O(pages); for tests.

        users: int32[num_pages + 1], how many rows should use each page.
        """
        present = self.of > 0
        assert (self.users == users).all(), f"users are miscounted at pages {np.flatnonzero(self.users != users)}"
        assert present[self.users > 0].all(), "a row uses a page without a window page"
        idle = int(np.count_nonzero(present & (self.users == 0)))
        assert idle == self.evictable, f"{idle} window pages can be evicted, {self.evictable} are counted"
        self.allocator.check()
        assert len(np.unique(self.of[present])) == np.count_nonzero(present), "a window page has two owners"
        assert self.allocator.available + np.count_nonzero(present) == self.num_pages, "window pages are lost"

    def _window_start_page(self, tokens: int | Int64Array) -> Int64Array:
        found: Int64Array = np.maximum(np.asarray(tokens) - (self.window - 1), 0) // self.page_size
        return found

    def _ticks(self, count: int) -> Int64Array:
        self._tick += count
        return np.arange(self._tick - count, self._tick, dtype=np.int64)

    def _free(self, pages: Int32Array) -> None:
        self.allocator.free(self.of[pages])
        self.of[pages] = 0

    def evict(self, least: int) -> None:
        """Free the window pages of at least `least` pages of the tree; the pages themselves stay."""
        idle = np.flatnonzero((self.of > 0) & (self.users == 0)).astype(np.int32)
        count = min(max(least, self.num_pages // _BATCH_SHARE), len(idle))
        order = np.argsort(self.rank[idle])[:count]
        self.evictable -= count
        self._free(idle[order])
        self._tell(idle[order])

    def _tell(self, pages: Int32Array) -> None:
        for listener in self.listeners:
            listener(pages)


class WindowedAllocator(PageAllocator):
    """A PageAllocator that allocates and frees a window page with each page."""

    def __init__(self, num_pages: int, windows: WindowPages) -> None:
        super().__init__(num_pages)
        self._windows = windows

    def alloc(self, n: int) -> Int32Array:
        """Take `n` pages; see PageAllocator. Raises OutOfPages too if there are not as many window pages."""
        if n > self._windows.available_pages:
            raise OutOfPages(f"{n} window pages requested, {self._windows.available_pages} available")
        pages = super().alloc(n)
        self._windows.allocate(pages)
        return pages

    def free(self, pages: Int32Array) -> None:
        """Free pages and their window pages; see PageAllocator."""
        super().free(pages)
        self._windows.free_pages(pages)
