"""Checkpoints of recurrent states: which cached prefixes keep the states of the layers that have no KV.

A layer with a recurrent state (Mamba, gated delta net) keeps one state per row in the place of KV per token. A row can
continue behind a cached prefix only where a copy of that state was saved: a checkpoint. SGLang calls this the Mamba
radix cache, vLLM the Mamba state of a block.

One slot holds the states of all such layers after one prefix. The last page of a prefix names it, as every page of the
tree belongs to one prefix only, so the owner of a page also owns its checkpoint, and splits of the tree change nothing.
A hit ends at a page with a checkpoint. A checkpoint can be evicted without its page: the prefix then ends at an earlier
one. It is never required: if no slot can be had, none is saved, so checkpoints hold up no row.

The slot of a page that is private to a row is not evictable: the step that writes it may be in flight.
"""

from collections.abc import Callable, Iterator

import numpy as np

from tokenyard.base import Int32Array, Int64Array
from tokenyard.cache.allocator import PageAllocator


class StateCheckpoints:
    """The checkpoint slot of each page, for the layers of a model with a recurrent state.

    interval: a decoding row saves its state every so many tokens (SGLang's `mamba_track_interval`), a multiple of the
        page size.
    of: int32[num_pages + 1], the slot (from 1 on) of the state after the prefix that ends with each page, 0 for none.
    users: int32[num_pages + 1], how many rows own that slot or are about to read it.
    evictable: slots of the tree without users.
    listeners: called with pages of the tree (int32[n]) that have gained or lost a checkpoint.
    """

    def __init__(self, page_size: int, num_pages: int, num_slots: int, interval: int, pool_rows: int) -> None:
        if interval < 1 or interval % page_size:
            raise ValueError(f"a row cannot save its state every {interval} tokens with pages of {page_size}")
        self.page_size = page_size
        self.num_slots = num_slots
        self.interval = interval
        self.allocator = PageAllocator(num_slots)
        self.of: Int32Array = np.zeros(num_pages + 1, np.int32)
        self.users: Int32Array = np.zeros(num_pages + 1, np.int32)
        self.evictable = 0
        self.listeners: list[Callable[[Int32Array], None]] = []
        # Ranks are unique, so the order of eviction is deterministic.
        self.rank: Int64Array = np.zeros(num_pages + 1, np.int64)
        self._tick = 0
        self._pool_rows = pool_rows
        # The pages of the last two states that each pool row saved while it decoded, 0 for none.
        self._tracked: Int32Array = np.zeros((pool_rows, 2), np.int32)

    @property
    def used(self) -> int:
        """Slots that hold a checkpoint."""
        return self.num_slots - self.allocator.available

    def slot(self, page: int) -> int:
        """The slot of a page's checkpoint as the executor counts: the working states of all pool rows come first."""
        return self._pool_rows - 1 + int(self.of[page])

    # ---- prefixes --------------------------------------------------------------------------------------------------

    def usable_pages(self, runs: Iterator[Int32Array], count: int) -> int:
        """How many of a prefix's `count` pages are a hit: up to its last page with a checkpoint.

        runs: the pages in parts (int32[n] each), the last part first.
        """
        for pages in runs:
            present = np.flatnonzero(self.of[pages])
            if len(present):
                return count - len(pages) + int(present[-1]) + 1
            count -= len(pages)
        return 0

    def retain(self, page: int) -> None:
        """A row will read the checkpoint of `page`, which is in the tree."""
        self.evictable -= int(self.users[page] == 0)
        self.users[page] += 1
        self._touch(page)

    def release(self, page: int) -> None:
        """Undo one `retain`."""
        self.users[page] -= 1
        self.evictable += int(self.users[page] == 0)

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def save(self, page: int) -> bool:
        """Take a slot for the state after `page`, which is private to a row; False if no slot can be had."""
        if not self.of[page]:
            if not self.allocator.available:
                self._evict_one()
            if not self.allocator.available:
                return False
            self.of[page] = self.allocator.alloc(1)[0]
            self.users[page] = 1
        self._touch(page)
        return True

    def track(self, pool_row: int, page: int) -> bool:
        """`save` for a row that decodes, which keeps the last two of such states.

        The step in flight may turn out to lie behind a stop, so the last state alone may be one token too late.
        """
        superseded, last = self._tracked[pool_row].tolist()
        if superseded and self.of[superseded]:
            self.free_pages(np.array([superseded], np.int32))
        self._tracked[pool_row] = last, 0
        if not self.save(page):
            return False
        self._tracked[pool_row, 1] = page
        return True

    def start_row(self, pool_row: int) -> None:
        """A pool row changes owner."""
        self._tracked[pool_row] = 0

    def join_tree(self, pages: Int32Array) -> None:
        """Private `pages` (int32[n]) of a row are now pages of the tree."""
        present = pages[self.of[pages] > 0]
        self.users[present] -= 1
        self.evictable += int(np.count_nonzero(self.users[present] == 0))

    def replace(self, own: Int32Array, found: Int32Array) -> None:
        """`found` pages of the tree replace a row's `own` pages with the same tokens (both int32[n]).

        Where a found page has no checkpoint, it takes that of the row's own page.
        """
        gained = (self.of[own] > 0) & (self.of[found] == 0)
        giving, taking = own[gained], found[gained]
        if not len(taking):
            return
        self.of[taking], self.rank[taking] = self.of[giving], self.rank[giving]
        self.of[giving] = self.users[giving] = 0
        self.evictable += len(taking)
        self._tell(taking)

    def free_pages(self, pages: Int32Array) -> None:
        """Free the checkpoints of `pages` (int32[n]), which were freed."""
        present = pages[self.of[pages] > 0]
        if not len(present):
            return
        self.evictable -= int(np.count_nonzero(self.users[present] == 0))
        self.allocator.free(self.of[present])
        self.of[present] = self.users[present] = 0

    def check(self, users: Int32Array) -> None:
        """Raise AssertionError if the accounting is wrong. O(pages); for tests.

        users: int32[num_pages + 1], how many rows should own or read the checkpoint of each page.
        """
        present = self.of > 0
        assert (self.users == np.where(present, users, 0)).all(), "users of checkpoints are miscounted"
        idle = int(np.count_nonzero(present & (self.users == 0)))
        assert idle == self.evictable, f"{idle} checkpoints can be evicted, {self.evictable} are counted"
        self.allocator.check()
        assert len(np.unique(self.of[present])) == np.count_nonzero(present), "a checkpoint has two pages"
        assert self.allocator.available + np.count_nonzero(present) == self.num_slots, "checkpoints are lost"

    def _evict_one(self) -> None:
        """Evict the checkpoint that was used least recently; its page stays in the tree."""
        idle = np.flatnonzero((self.of > 0) & (self.users == 0)).astype(np.int32)
        if not len(idle):
            return
        page = idle[np.argmin(self.rank[idle])][None]
        self.free_pages(page)
        self._tell(page)

    def _touch(self, page: int) -> None:
        self._tick += 1
        self.rank[page] = self._tick

    def _tell(self, pages: Int32Array) -> None:
        for listener in self.listeners:
            listener(pages)


class CheckpointedAllocator(PageAllocator):
    """A PageAllocator that frees the checkpoint of each page with the page."""

    def __init__(self, num_pages: int, states: StateCheckpoints) -> None:
        super().__init__(num_pages)
        self._states = states

    def free(self, pages: Int32Array) -> None:
        """Free pages and their checkpoints; see PageAllocator."""
        super().free(pages)
        self._states.free_pages(pages)
