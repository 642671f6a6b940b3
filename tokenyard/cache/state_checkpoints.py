"""Checkpoints of recurrent states: which cached prefixes keep the states of the layers that have no KV.

A layer with a recurrent state (Mamba, gated delta net) keeps one state per row in the place of KV per token. A row can
continue behind a cached prefix only where a copy of that state was saved: a checkpoint. SGLang calls this the Mamba
radix cache, vLLM the Mamba state of a block.

One slot holds the states of all such layers after one prefix. The last page of a prefix names it, as every page of the
tree belongs to one prefix only, so the owner of a page also owns its checkpoint. A hit ends at a page with a
checkpoint. A checkpoint can be evicted without its page: the prefix then ends at an earlier one. It is never required:
if no slot can be had, none is saved, so checkpoints hold up no row.

Plans run in order, so a slot may get another owner while a step that writes or reads it is in flight; the later step
overwrites it later. Only a checkpoint that a row is about to read stays. Which one goes is the answer of a
`StateRetention`.
"""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

from tokenyard.base import Float64Array, Int32Array, PrefixListener
from tokenyard.cache.allocator import PageAllocator

PROMPT, ANSWER, BRANCH, SPACED = range(4)
"""Why a checkpoint was saved: the end of a prompt, every interval of an answer, a place where a prompt branches off
from others, every so many tokens of a long prompt.
"""


_UNUSABLE = 1 << 48
ROOMY_SHARE = 0.25
"""With more than this share of the slots free there is room for checkpoints that may be of no use."""


class StateRetention(Protocol):
    """Which prefixes keep a checkpoint. It judges and never allocates.

    ranks_kv: whether KV is evicted by the worth of the checkpoints that make it usable.
    """

    ranks_kv: bool

    def positions(self, start: int, end: int, branch: int, last: int, roomy: bool) -> list[tuple[int, int]]:
        """Where to save the state of a prompt whose tokens from `start` to `end` are computed: (position, kind).

        branch: where the prompt branches off from what the tree has. last: the last page boundary before its last
        token. Both may be outside the tokens computed. roomy: many slots are free.
        """

    def values(self, states: "StateCheckpoints", slots: Int32Array, per_byte: bool) -> Float64Array:
        """What it is worth to keep each of `slots` (int32[n]): float64[n]. The lowest goes first, at equal values the
        one that was used least recently.

        per_byte: per byte that is freed, KV that becomes useless included; else per slot.
        """

    def excess(self, states: "StateCheckpoints", slot: int) -> list[int]:
        """Slots of the tree to evict now that `slot` has joined it."""

    def hit(self, states: "StateCheckpoints", slot: int) -> None:
        """A row continues from `slot`."""

    def lost(self, states: "StateCheckpoints", slot: int) -> None:
        """`slot` is evicted."""


class SharedPages(Protocol):
    """The KV pool, where a checkpoint takes pages of it."""

    def take_state_pages(self, count: int, value: float) -> Int32Array | None:
        """`count` pages (int32), after evicting what is worth less than `value`; None if that is not enough."""

    def free_state_pages(self, pages: Int32Array) -> None:
        """Free the pages (int32[n]) of a checkpoint."""

    @property
    def free_share(self) -> float:
        """Which part of the pool is free."""


class StateCheckpoints(PrefixListener):
    """The checkpoint slot of each page, for the layers of a model with a recurrent state.

    unit: checkpoints lie after multiples of this many tokens, which are whole pages.
    interval: a decoding row saves its state every so many tokens (SGLang's `mamba_track_interval`), a multiple of
        `unit`.
    of: int32[num_pages + 1], the slot (from 1 on) of the state after the prefix that ends with each page, 0 for none.
    users: int32[num_pages + 1], how many rows are about to read that slot.
    evictable: slots without users.
    listeners: called with pages of the tree (int32[n]) that have gained or lost a checkpoint.
    now: the time (ns) of the step that is planned.

    By slot, int64[num_slots + 2] each; the last place is for a newcomer until it has a slot:
    page: the page of a slot, 0 for a free one.
    tokens: the length of its prefix.
    saved: tokens from the checkpoint before it on, which a hit saves.
    before: the slot of that checkpoint in the tree, 0 for none.
    kind: why it was saved.
    hits: rows that continued from it; if another one follows it, since that is there.
    used_ns: when it was saved or hit last.
    rank: order of use.
    """

    def __init__(
        self,
        page_size: int,
        num_pages: int,
        num_slots: int,
        interval: int,
        pool_rows: int,
        retention: StateRetention,
        slot_pages: int = 0,
        shared: SharedPages | None = None,
        unit: int = 0,
    ) -> None:
        """slot_pages: pages of `shared` that a checkpoint takes; 0 where checkpoints have their own memory.
        unit: 0 for one page.
        """
        if interval < 1 or interval % page_size:
            raise ValueError(f"a row cannot save its state every {interval} tokens with pages of {page_size}")
        self.page_size = page_size
        self.unit = unit or page_size
        self.num_slots = num_slots
        self.interval = interval
        self.slot_tokens = slot_pages * page_size
        self._shared = shared if slot_pages else None
        self._pages: Int32Array = np.zeros((num_slots + 1, slot_pages), np.int32)
        self.retention = retention
        self.allocator = PageAllocator(num_slots)
        self.of: Int32Array = np.zeros(num_pages + 1, np.int32)
        self.users: Int32Array = np.zeros(num_pages + 1, np.int32)
        self.evictable = 0
        self.listeners: list[Callable[[Int32Array], None]] = []
        self.now = 0
        self.page, self.tokens, self.saved, self.before, self.kind, self.hits, self.used_ns, self.rank = (
            np.zeros(num_slots + 2, np.int64) for _ in range(8)
        )
        self.nodes: list[Any] = [None] * (num_slots + 2)
        self._tick = 0
        self._pool_rows = pool_rows
        # The pages of the last two states that each pool row saved while it decoded, 0 for none.
        self._tracked: Int32Array = np.zeros((pool_rows, 2), np.int32)
        self._tree: Any = None

    def watch(self, tree: Any) -> None:
        """Follow `tree`, whose leaves are ranked anew when they lose or gain a checkpoint."""
        self._tree = tree
        tree.listeners.append(self)

    def rank_of_leaf(self, leaf: Any) -> int:
        """The order in which KV is evicted by worth: what no checkpoint makes usable first, with ranks below 0, then
        least recently used first.
        """
        useful = self.of[leaf.pages].any()
        rank: int = leaf.last_access_tick
        return rank if useful else rank - _UNUSABLE

    @property
    def used(self) -> int:
        """Slots that hold a checkpoint."""
        return self.num_slots - self.allocator.available

    def slot(self, page: int) -> int:
        """The slot of a page's checkpoint as the executor counts: the working states of all pool rows come first."""
        return self._pool_rows - 1 + int(self.of[page])

    @property
    def roomy(self) -> bool:
        """Whether so many slots are free that a checkpoint need not be sure to be of use."""
        if self._shared is not None:
            return self._shared.free_share > ROOMY_SHARE
        return self.allocator.available > self.num_slots * ROOMY_SHARE

    def pages_of(self, slots: Int32Array) -> Int32Array:
        """The pages of the KV pool that hold the checkpoints in `slots`, as the executor counts: int32[n, slot_pages].

        Of slots that were freed since, those that held them.
        """
        found: Int32Array = self._pages[slots - (self._pool_rows - 1)]
        return found

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
        self.pin(page)
        self._touch(int(self.of[page]))

    def pin(self, page: int) -> None:
        """Keep the checkpoint of `page`, which is in the tree, until `release`."""
        self.evictable -= int(self.users[page] == 0)
        self.users[page] += 1

    def release(self, page: int) -> None:
        """Undo one `retain` or `pin`."""
        self.users[page] -= 1
        self.evictable += int(self.users[page] == 0)

    def hit(self, page: int) -> None:
        """A row is admitted that continues from the checkpoint of `page`."""
        slot = int(self.of[page])
        self.retention.hit(self, slot)
        self.hits[slot] += 1
        self.used_ns[slot] = self.now

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def save(self, page: int, tokens: int = 0, kind: int = PROMPT, saved: int = 0, after: int = 0) -> bool:
        """Take a slot for the state after `page`, which is private to a row; False if none is worth less.

        tokens: of the prefix. saved: those that a hit there saves, compared with the checkpoint of page `after`, which
            it continues; that one is worth less from now on.
        """
        if self.of[page]:
            return True
        self.tokens[-1], self.kind[-1], self.saved[-1], self.used_ns[-1] = tokens, kind, saved, self.now
        previous = int(self.of[after])
        hits = self.hits[previous]
        if previous and not (self.before == previous).any():
            self.hits[previous] = 0
        self.before[-1] = previous
        pages = self._room_for_newcomer()
        self.before[-1] = 0
        if self.of[after] == previous:
            self.hits[previous] = hits
        if pages is not None:
            slot = int(self.allocator.alloc(1)[0])
            self._pages[slot] = pages
            for column in (self.tokens, self.kind, self.saved, self.used_ns):
                column[slot] = column[-1]
            self.page[slot], self.before[slot], self.hits[slot] = page, 0, 0
            self.of[page] = slot
            self.evictable += 1
            self._touch(slot)
        return pages is not None

    def save_cached(self, page: int, tokens: int, node: Any) -> bool:
        """`save` for the state after `page` of the tree; False if that has one, or none is worth less.

        node: of the tree, at `page` or below it.
        """
        if self.of[page] or not self.save(page, tokens, saved=tokens):
            return False
        while node.parent.depth_tokens >= tokens:
            node = node.parent
        self._joined(int(self.of[page]), node)
        self._tell(np.array([page], np.int32))
        return True

    def track(self, pool_row: int, page: int, tokens: int = 0, saved: int = 0, after: int = 0) -> bool:
        """`save` for a row that decodes, which keeps the last two of such states.

        The step in flight may turn out to lie behind a stop, so the last state alone may be one token too late.
        """
        superseded, last = self._tracked[pool_row].tolist()
        if superseded and self.of[superseded]:
            self.free_pages(np.array([superseded], np.int32))
        if not self.save(page, tokens, ANSWER, saved, after):
            self._tracked[pool_row] = 0, last
            return False
        self._tracked[pool_row] = last, page
        return True

    def start_row(self, pool_row: int) -> None:
        """A pool row changes owner."""
        self._tracked[pool_row] = 0

    def replace(self, own: Int32Array, found: Int32Array, node: Any) -> None:
        """`found` pages of the tree replace a row's `own` pages with the same tokens (both int32[n]).

        Where a found page has no checkpoint, it takes that of the row's own page. node: of the tree, at or below them.
        """
        gained = (self.of[own] > 0) & (self.of[found] == 0)
        giving, taking = own[gained], found[gained]
        if not len(taking):
            return
        slots = self.of[giving]
        self.of[taking], self.page[slots] = slots, taking
        self.of[giving] = 0
        for slot in slots.tolist():
            owner = node
            while owner.parent.depth_tokens >= self.tokens[slot]:
                owner = owner.parent
            self._joined(slot, owner)
        self._tell(taking)

    def free_pages(self, pages: Int32Array) -> None:
        """Free the checkpoints of `pages` (int32[n]), which were freed."""
        present = pages[self.of[pages] > 0]
        if not len(present):
            return
        for slot in self.of[present].tolist():
            if self.nodes[slot] is not None:
                self.retention.lost(self, slot)
            self._free(slot)

    def evict(self, per_byte: bool, below: float = np.inf) -> bool:
        """Evict the checkpoint of the lowest value, if that is below `below`. Its page stays.

        per_byte: see `StateRetention.values`; without memory in common with KV, only checkpoints are then considered
        at which evictable KV ends. Returns whether there was one.
        """
        slots = self._idle_slots()
        if per_byte and self._shared is None:
            slots = np.array([slot for slot in slots.tolist() if self._ends_evictable(slot)], np.int32)
        if not len(slots):
            return False
        values = self.retention.values(self, slots, per_byte)
        best = np.lexsort((self.rank[slots], values))[0]
        if values[best] > below:
            return False
        self._evict(int(slots[best]))
        return True

    def next_evicted(self, count: int) -> Int32Array:
        """The pages (int32[at most count]) whose checkpoints are evicted first."""
        slots = self._idle_slots() if count > 0 else np.empty(0, np.int32)
        order = np.lexsort((self.rank[slots], self.retention.values(self, slots, False)))
        found: Int32Array = self.page[slots[order[:count]]].astype(np.int32)
        return found

    def _idle_slots(self) -> Int32Array:
        slots = np.flatnonzero(self.page).astype(np.int32)
        idle: Int32Array = slots[self.users[self.page[slots]] == 0]
        return idle

    def check(self, users: Int32Array) -> None:
        """Raise AssertionError if the accounting is wrong. O(pages); for tests.

        users: int32[num_pages + 1], how many rows are about to read the checkpoint of each page.
        """
        present = self.of > 0
        assert (self.users == np.where(present, users, 0)).all(), "users of checkpoints are miscounted"
        idle = int(np.count_nonzero(present & (self.users == 0)))
        assert idle == self.evictable, f"{idle} checkpoints can be evicted, {self.evictable} are counted"
        self.allocator.check()
        assert len(np.unique(self.of[present])) == np.count_nonzero(present), "a checkpoint has two pages"
        assert self.allocator.available + np.count_nonzero(present) == self.num_slots, "checkpoints are lost"
        for slot in np.flatnonzero(self.page).tolist():
            assert self.of[self.page[slot]] == slot, "a slot does not know its page"
            node = self.nodes[slot]
            if node is not None:
                assert node.pages[self._place(slot, node)] == self.page[slot], "a checkpoint is at another node"
                assert self.before[slot] == self._before(slot), "a checkpoint follows another one"
                saved = self.tokens[slot] - self.tokens[self.before[slot]]
                assert self.saved[slot] == saved, "a checkpoint saves another number of tokens"

    # ---- PrefixListener --------------------------------------------------------------------------------------------

    def inserted(self, parent: Any, node: Any) -> None:
        """`node` is a new leaf: its checkpoints join the tree."""
        slots = self.of[node.pages]
        for slot in slots[slots > 0].tolist():
            self.nodes[slot] = node
            self._link(slot)
            self._drop_excess(slot)

    def split(self, upper: Any, lower: Any) -> None:
        """The front part of the run of `lower` is that of `upper` now."""
        slots = self.of[upper.pages]
        for slot in slots[slots > 0].tolist():
            self.nodes[slot] = upper
        if lower.eviction_rank is not None:
            self._tree.rank_anew(lower)

    def evicted(self, node: Any) -> None:
        """The leaf `node` left the tree; its checkpoints go when its pages are freed."""

    # ---- internals -------------------------------------------------------------------------------------------------

    def _room_for_newcomer(self) -> Int32Array | None:
        """Make room for the newcomer; returns the pages for its checkpoint, None if there is no room."""
        newcomer = np.array([self.num_slots + 1], np.int32)
        if self._shared is not None:
            if not self.num_slots:
                return None
            value = float(self.retention.values(self, newcomer, True)[0])
            return self._shared.take_state_pages(self._pages.shape[1], value)
        if self.allocator.available or self.evict(False, below=float(self.retention.values(self, newcomer, False)[0])):
            return np.empty(0, np.int32)
        return None

    def _ends_evictable(self, slot: int) -> bool:
        node = self.nodes[slot]
        if node is None or node.eviction_rank is None:
            return False
        return not self.of[node.pages[self._place(slot, node) + 1 :]].any()

    def _evict(self, slot: int) -> None:
        page, node = self.page[slot : slot + 1].astype(np.int32), self.nodes[slot]
        self.retention.lost(self, slot)
        place = None if node is None else self._place(slot, node)
        self._free(slot)
        if node is None:
            return
        self._tell(page)
        if node.eviction_rank is not None:
            present = np.flatnonzero(self.of[node.pages])
            if self.retention.ranks_kv and len(present) and present[-1] < place:
                self._tree.cut(node, int(present[-1]) + 1)
            else:
                self._tree.rank_anew(node)

    def _free(self, slot: int) -> None:
        page = int(self.page[slot])
        self.evictable -= int(self.users[page] == 0)
        self.of[page] = self.users[page] = 0
        after = np.flatnonzero(self.before == slot)
        self.before[after] = self.before[slot]
        self.saved[after] = self.tokens[after] - self.tokens[self.before[after]]
        self.page[slot] = self.before[slot] = 0
        self.nodes[slot] = None
        self.allocator.free(np.array([slot], np.int32))
        if self._shared is not None:
            self._shared.free_state_pages(self._pages[slot].copy())

    def _joined(self, slot: int, node: Any) -> None:
        """`slot` is now that of a page in the run of `node`, which was in the tree before."""
        self.nodes[slot] = node
        self._link(slot)
        below = (self.before == self.before[slot]) & (self.tokens > self.tokens[slot]) & (self.page > 0)
        for other in np.flatnonzero(below).tolist():
            if self.nodes[other] is not None:
                self._link(other)
        if node.eviction_rank is not None:
            self._tree.rank_anew(node)
        self._drop_excess(slot)

    def _drop_excess(self, slot: int) -> None:
        for other in self.retention.excess(self, slot):
            self._evict(other)

    def _link(self, slot: int) -> None:
        before = self._before(slot)
        if before and not (self.before == before).any():
            # What hit it so far continues at the deeper one from now on.
            self.hits[before] = 0
        self.before[slot] = before
        self.saved[slot] = self.tokens[slot] - self.tokens[before]

    def _before(self, slot: int) -> int:
        """The slot of the checkpoint before that of `slot`, 0 for none."""
        node = self.nodes[slot]
        end: int | None = self._place(slot, node)
        while node.parent is not None:
            slots = self.of[node.pages[:end]]
            present = np.flatnonzero(slots)
            if len(present):
                return int(slots[present[-1]])
            node, end = node.parent, None
        return 0

    def _place(self, slot: int, node: Any) -> int:
        """Where in the run of `node` the page of `slot` is."""
        start: int = node.parent.depth_tokens
        return (int(self.tokens[slot]) - start) // self.page_size - 1

    def forks(self, slot: int) -> bool:
        """Whether more than one path of the tree, or none, continues right behind the checkpoint in `slot`."""
        node = self.nodes[slot]
        return self._place(slot, node) == len(node.pages) - 1 and len(node.children) != 1

    def _touch(self, slot: int) -> None:
        self._tick += 1
        self.rank[slot] = self._tick

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
