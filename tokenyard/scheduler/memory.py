"""KV pages and their owners. `KvMemory` joins the allocator, the tree and the page table.

Four owners have pages: the allocator (free), the tree (`tree.evictable_pages`, `tree.protected_pages`), rows (private)
and holds (for a reader or writer outside the plans, until it has ended; not counted as pages that will be freed).
A row's first `cached` tokens are on pages of the tree that the row has locked; its other pages are private. Plans in
flight may still read pages of a row that has left, so these are freed once the last plan that contains the row has
committed (`Release`, `free_after`).

If sliding-window layers have a separate pool, a page may also have a window page (`cache.windows`), and if layers have
a recurrent state, a checkpoint of it (`cache.state_checkpoints`). The owner of the page owns them too.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tokenyard.base import Int32Array, SchedulerSettings, StateGroup, UsableListener, WindowGroup
from tokenyard.base.request import adapter_of, weights_of
from tokenyard.cache.allocator import PageAllocator
from tokenyard.cache.no_cache import NoCache
from tokenyard.cache.radix_cache import MatchResult, RadixCache
from tokenyard.cache.req_to_token import ReqToTokenPool
from tokenyard.cache.state_checkpoints import CheckpointedAllocator, StateCheckpoints, StateRetention
from tokenyard.cache.windows import WindowedAllocator, WindowPages

NO_PAGES = np.empty(0, np.int32)
NO_WINDOWS = "no layers have a window where KV moves"
UNLIMITED = 2**31 - 1


@dataclass(slots=True)
class Release:
    """Pages and pool row of a request that ended or was retracted, freed once plan `last_step` has committed.

    node: the tree node that the row has locked.
    cached: tokens on pages of the tree.
    computed: tokens with KV; whole pages of those beyond `cached` go into the tree.
    held: tokens with pages.
    priority: the priority of the pages in the tree.
    window_pages: window pages that will be free or evictable again.
    """

    last_step: int
    pool_row: int
    node: Any
    cached: int
    computed: int
    held: int
    priority: int
    window_pages: int = 0


@dataclass(slots=True)
class PageHold:
    """What a reader or writer outside the plans still uses: private pages, and the tree's up to the locked `node`.

    checkpoint: the page of the tree whose checkpoint is read, 0 for none.
    pool_row: the pool row whose working state is read or written, -1 for none.
    """

    pages: Int32Array
    node: Any = None
    checkpoint: int = 0
    pool_row: int = -1


class KvMemory:
    """Allocator, tree and ReqToTokenPool together, and what the other groups of layers keep.

    windows: the layers with a separate pool for their window, None if there are none.
    states: the layers with a recurrent state, None if there are none. A model has one such group at most.
    evicts_by_time: whether the time decides what is evicted, with `settings.evicts_by_value`.
    evicted_tokens: tokens evicted from the tree so far.
    draft_pages: pages that rows hold only for drafts in flight. They are freed if the drafts are wrong.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        num_pages: int,
        pool_rows: int,
        windows: WindowGroup | None = None,
        states: StateGroup | None = None,
        retention: StateRetention | None = None,
    ) -> None:
        """retention: which prefixes keep a checkpoint of `states`."""
        self.page_size = settings.page_size
        self.num_pages = num_pages
        self.windows: WindowPages | None = None
        self.allocator = PageAllocator(num_pages)
        if windows is not None:
            self.windows = WindowPages(windows.window, settings.page_size, num_pages, windows.num_pages, pool_rows)
            self.allocator = WindowedAllocator(num_pages, self.windows)
        self.states: StateCheckpoints | None = None
        self._slot_pages = 0
        if states is not None:
            assert windows is None, "a model has layers with a window or with a recurrent state, not both"
            unit = settings.checkpoint_unit
            assert retention is not None
            sizes = (settings.page_size, num_pages, states.num_slots, -(-states.track_interval // unit) * unit)
            self.states = StateCheckpoints(*sizes, pool_rows, retention, states.slot_pages, self, unit)
            self._slot_pages = states.slot_pages
            self.allocator = CheckpointedAllocator(num_pages, self.states)
        by_worth = self.states is not None and self.states.retention.ranks_kv
        self._evicts_by_worth = by_worth and settings.radix_eviction_policy == "lru"
        rank = self.states.rank_of_leaf if self.states is not None and self._evicts_by_worth else None
        self.tree: Any = (
            NoCache(settings.page_size)
            if settings.disable_radix_cache
            else RadixCache(settings.page_size, settings.radix_eviction_policy, settings.enable_kv_events, rank)
        )
        if self.states is not None:
            self.states.watch(self.tree)
        self.evicts_by_time = settings.evicts_by_value or self._evicts_by_worth
        self.pool = ReqToTokenPool(pool_rows, settings.context_length, settings.page_size)
        self.evicted_tokens = 0
        self.draft_pages = 0
        self.releases: deque[Release] = deque()
        self._releasing_pages = 0
        self.pending_window_pages = 0
        self.pending_frees: deque[tuple[int, Int32Array]] = deque()
        self._committed = -1
        self._holds: dict[int, PageHold] = {}

    @property
    def free_tokens(self) -> int:
        """Tokens whose pages are free, evictable, or will be once the plans in flight have committed.

        Drafts in flight count as wrong.
        """
        # Counted at each call, because a row that has started since the release may have locked the same pages.
        unlocking = sum(self.tree.pages_locked_once(release.node) for release in self.releases)
        pages_to_be_freed = self._releasing_pages + unlocking + self.draft_pages
        pages: int = self.allocator.available + self._evictable_pages + pages_to_be_freed
        return self.page_size * pages

    @property
    def free_window_tokens(self) -> int:
        """`free_tokens` of the layers with a window; without such a group, `free_tokens`."""
        if self.windows is None:
            return self.free_tokens
        return self.page_size * (self.windows.available_pages + self.pending_window_pages + self.draft_pages)

    @property
    def available_pages(self) -> int:
        """The most pages that `take_pages` can take now."""
        pages: int = self.allocator.available + self._evictable_pages
        return pages if self.windows is None else min(pages, self.windows.available_pages)

    @property
    def state_pages(self) -> int:
        """Pages that hold checkpoints of recurrent states in the place of KV."""
        return 0 if self.states is None else self.states.used * self._slot_pages

    @property
    def _evictable_pages(self) -> int:
        pages: int = self.tree.evictable_pages
        return pages if self.states is None else pages + self.states.evictable * self._slot_pages

    @property
    def max_chunk_tokens(self) -> int:
        """Most tokens of a prompt to compute at a time."""
        return UNLIMITED if self.windows is None else self.windows.max_chunk_tokens

    @property
    def releasing_pages(self) -> int:
        """Private pages of rows that have left, which plans in flight may still read."""
        return self._releasing_pages

    @property
    def held_pages(self) -> int:
        """Private pages of holds."""
        return sum(len(hold.pages) for hold in self._holds.values())

    @property
    def held_rows(self) -> int:
        """Pool rows whose working state holds keep."""
        return sum(hold.pool_row >= 0 for hold in self._holds.values())

    @property
    def held_checkpoints(self) -> list[int]:
        """The pages of the tree whose checkpoints holds keep."""
        return [hold.checkpoint for hold in self._holds.values() if hold.checkpoint]

    @property
    def holds(self) -> int:
        """How many readers and writers outside the plans hold pages."""
        return len(self._holds)

    def pages_for(self, tokens: int) -> int:
        """Pages that `tokens` tokens fill."""
        return -(-tokens // self.page_size)

    def take_pages(self, count: int) -> Int32Array | None:
        """`count` free pages, after evicting the shortfall; None, and nothing changed, if there are not enough now."""
        if self.windows is not None and count > self.windows.available_pages:
            return None
        shortfall = count - self.allocator.available
        if shortfall > 0:
            if shortfall > self._evictable_pages:
                return None
            self._evict_pages(count)
        pages: Int32Array = self.allocator.alloc(count)
        return pages

    def _evict_pages(self, count: int) -> None:
        """Evict until `count` pages are free; there must be enough."""
        while (missing := count - self.allocator.available) > 0:
            if self._evict_by_worth():
                continue
            evicted = self.tree.evict(missing)
            if not len(evicted):
                assert self.states is not None
                self.states.evict(per_byte=True)
            self.evicted_tokens += len(evicted) * self.page_size
            self.allocator.free(evicted)

    def _evict_by_worth(self, below: float = np.inf) -> bool:
        """Evict KV that no checkpoint makes usable, or else a checkpoint worth less than `below`; False for neither."""
        if self.states is None or not self._evicts_by_worth:
            return False
        evicted = self.tree.evict_unusable()
        self.evicted_tokens += len(evicted) * self.page_size
        self.allocator.free(evicted)
        return len(evicted) > 0 or self.states.evict(per_byte=True, below=below)

    def take_state_pages(self, count: int, value: float) -> Int32Array | None:
        """See `cache.state_checkpoints.SharedPages`."""
        while self.allocator.available < count:
            if not self._evict_by_worth(below=value):
                return None
        return self.allocator.alloc(count)

    def free_state_pages(self, pages: Int32Array) -> None:
        """See `cache.state_checkpoints.SharedPages`."""
        self.allocator.free(pages)

    @property
    def free_share(self) -> float:
        """Which part of the pool is free."""
        return self.allocator.available / self.num_pages

    def take_pages_per_step(self, counts: list[int]) -> Int32Array:
        """The pages that one `take_pages` per entry of `counts` would give. There must be enough."""
        total = sum(counts)
        if total <= self.allocator.available:
            # The allocator is a stack: one large allocation gives the same pages as the small ones in order.
            return self.allocator.alloc(total)
        taken = [self.take_pages(count) for count in counts]
        return np.concatenate([pages for pages in taken if pages is not None])

    # ---- prefixes ------------------------------------------------------------------------------------------------

    def usable(self, node: Any, tokens: int) -> int:
        """How many of a prefix's `tokens` tokens, whole pages that end in the run of `node`, a row can reuse.

        The tree has KV of the first group of layers. For layers with a window, a row also needs the KV of all tokens
        inside the window of its first token; for layers with a recurrent state, a checkpoint where it begins. `match`,
        `peek` and the waiting index all use this function. A listener (`watch`) is called when the result may have
        changed.
        """
        group = self.windows or self.states
        if group is None:
            return tokens
        count = tokens // self.page_size
        return group.usable_pages(self._runs(node, count), count) * self.page_size

    @property
    def all_usable(self) -> bool:
        """Whether all of a prefix in the tree is usable."""
        return self.windows is None and self.states is None

    def needed_from(self, tokens: int) -> int:
        """The first page of a prefix that matters to `usable` for a row that begins after `tokens` tokens or more."""
        if self.states is not None:
            return tokens // self.page_size
        return 0 if self.windows is None else self.windows.window_start_page(tokens)

    def _runs(self, node: Any, count: int) -> Iterator[Int32Array]:
        """The first `count` pages of the path to `node`, run by run, the last one first."""
        while node.parent is not None:
            first = node.parent.depth_tokens // self.page_size
            yield node.pages[: count - first]
            node, count = node.parent, first

    def watch(self, listener: UsableListener) -> None:
        """Notify `listener` of all changes of the tree and of what is usable in it, until `unwatch`."""
        self.tree.listeners.append(listener)
        group = self.windows or self.states
        if group is not None:
            group.listeners.append(listener.usable_changed)

    def unwatch(self, listener: UsableListener) -> None:
        """End `watch`."""
        self.tree.listeners.remove(listener)
        group = self.windows or self.states
        if group is not None:
            group.listeners.remove(listener.usable_changed)

    def match(self, ids: bytes, namespace: str, max_tokens: int) -> MatchResult:
        """The longest usable prefix of `ids`, locked (`unlock` undoes it)."""
        match: MatchResult = self.tree.match(ids, namespace, max_tokens=max_tokens)
        present = match.tokens
        usable = self.usable(match.node, present)
        if usable < present:
            # Behind a leaf the prompt goes on, and does not branch off.
            branch = present if match.node.children else 0
            match = self.tree.match(ids, namespace, max_tokens=usable)
            match.branch_tokens = branch
        if self.windows is not None:
            self.windows.retain(self.windows.tail(self.tree.pages(match.node)))
        if self.states is not None and match.tokens:
            self.states.retain(int(match.node.pages[-1]))
        self.tree.lock(match.node)
        return match

    def peek(self, ids: bytes, namespace: str, max_tokens: int | None = None) -> int:
        """The tokens that `match` would find, without any change to the tree."""
        found: MatchResult = self.tree.find(ids, namespace, max_tokens)
        return self.usable(found.node, found.tokens)

    def unlock(self, match: MatchResult) -> None:
        """Undo a `match` that no row has used."""
        if self.windows is not None:
            self.windows.release_pages(self.windows.tail(self.tree.pages(match.node)))
        if self.states is not None and match.tokens:
            self.states.release(int(match.node.pages[-1]))
        self.tree.unlock(match.node)

    def allocate_row(self, known_ids: Int32Array, node: Any, cached: int) -> tuple[int, Int32Array]:
        """Allocate a pool row and write the tokens and the pages of the locked prefix to it: (pool row, pages)."""
        self.tree.record_hit(node)
        pool_row = self.pool.alloc_row()
        self.pool.token_ids[pool_row, : len(known_ids)] = known_ids
        pages: Int32Array = self.tree.pages(node) if cached else NO_PAGES
        self.pool.page_table[pool_row, : len(pages)] = pages
        if self.windows is not None:
            self.windows.allocate_row(pool_row, pages)
        if self.states is not None:
            self.states.start_row(pool_row)
            if cached:
                self.states.hit(int(pages[-1]))
        return pool_row, pages

    def advance(self, pool_rows: Int32Array, cached: Int32Array, computed: Int32Array) -> None:
        """Release window pages behind the windows of rows that have `computed` tokens with KV (all int32[n])."""
        if self.windows is not None and len(pool_rows):
            self.windows.advance(self.pool.page_table, pool_rows, cached, computed)

    def prompt_computed(self, pool_row: int, computed: int) -> None:
        """A row has computed its prompt of `computed` tokens: keep its end, where other requests may continue."""
        if self.windows is not None and self.tree.enabled:
            last = computed // self.page_size
            first = max(last * self.page_size - self.windows.max_retained_tokens, 0) // self.page_size
            self.windows.protect_prefix_end(self.pool.page_table[pool_row, first:last])

    def measures(self) -> dict[str, float]:
        """Gauges for metrics, by name: those of layers with a separate pool for their window or a recurrent state."""
        if self.states is not None:
            return {"state_slots": self.states.num_slots, "state_slots_used": self.states.used}
        if self.windows is None:
            return {}
        used = self.windows.num_pages - self.windows.available_pages
        return {
            "window_kv_tokens": self.windows.num_pages * self.page_size,
            "window_kv_used_tokens": used * self.page_size,
        }

    def window_ids(self, pages: Int32Array) -> Int32Array:
        """The window page of each of `pages`, int32[n], 0 for none; int32[0] where no layers have such pages."""
        return NO_PAGES if self.windows is None else self.windows.of[pages]

    def insert_prefix(self, ids: Int32Array) -> None:
        """Insert the whole pages of `ids` into the tree as if a request had computed them, if there is room."""
        count = len(ids) // self.page_size
        pages = self.take_pages(count)
        if pages is not None:
            inserted = self.tree.insert(ids[: count * self.page_size].tobytes(), pages)
            present = inserted.present_tokens // self.page_size
            self.allocator.free(pages[:present])
            if self.windows is not None:
                self.windows.release_pages(pages[present:])

    def cache_unfinished(
        self, pool_row: int, node: Any, cached: int, computed: int, priority: int, last_step: int
    ) -> tuple[Any, int, Int32Array]:
        """Insert the whole pages among tokens `cached .. computed` of an admitted row into the tree.

        Returns the node that the row has locked instead of `node`, its new `cached`, and the pages (int32, may be
        empty) that replace its own in the page table from page `cached / page_size` on. For tokens that the tree
        already has, its pages replace the row's own, which are freed once `last_step` has committed.
        """
        end = computed - computed % self.page_size
        if end <= cached or not self.tree.enabled:
            return node, cached, NO_PAGES
        first, last = cached // self.page_size, end // self.page_size
        table = self.pool.page_table[pool_row]
        inserted = self.tree.extend(node, self._key(pool_row, cached, end), table[first:last].copy(), priority)
        present = inserted.present_tokens // self.page_size
        self.tree.lock(inserted.node)
        self.tree.unlock(node)
        if not present:
            return inserted.node, end, NO_PAGES
        own = table[first : first + present].copy()
        deduplicated: Int32Array = self.tree.pages(inserted.node)[first : first + present]
        table[first : first + present] = deduplicated
        if self.windows is not None:
            self.windows.replace(pool_row, first, own, deduplicated)
        if self.states is not None:
            self.states.replace(own, deduplicated, inserted.node)
        self.free_after(last_step, own)
        return inserted.node, end, deduplicated

    def release(self, release: Release) -> None:
        """Free what a row held, once no plan in flight reads it."""
        if release.last_step <= self._committed:
            self._give_back(release)
            return
        self.releases.append(release)
        self._releasing_pages += self._private_pages(release)
        if self.windows is not None:
            pages = self.pool.page_table[release.pool_row, : self.pages_for(release.held)]
            release.window_pages = self.windows.pages_to_be_freed(
                release.pool_row, pages, release.cached // self.page_size
            )
            self.pending_window_pages += release.window_pages

    def shrink(self, pool_rows: Int32Array, held: Int32Array, tokens: Int32Array) -> None:
        """Rows with pages for `held` tokens keep those of their first `tokens` tokens (all int32[n]).

        No plan in flight reads the other pages, which are freed immediately.
        """
        kept = -(-tokens // self.page_size)
        counts = -(-held // self.page_size) - kept
        total = int(counts.sum())
        if total:
            columns = np.arange(total) + np.repeat(kept - np.cumsum(counts) + counts, counts)
            self.allocator.free(self.pool.page_table[np.repeat(pool_rows, counts), columns])

    def free_after(self, last_step: int, pages: Int32Array) -> None:
        """Free `pages` once plan `last_step` has committed."""
        if last_step <= self._committed:
            self.allocator.free(pages)
            return
        self.pending_frees.append((last_step, pages))
        self._releasing_pages += len(pages)
        self.pending_window_pages += int(np.count_nonzero(self.window_ids(pages)))

    def committed(self, step: int) -> None:
        """Plan `step` has committed: free the pages that waited for it."""
        self._committed = step
        for _ in range(len(self.releases)):
            release = self.releases.popleft()
            if release.last_step <= step:
                self._releasing_pages -= self._private_pages(release)
                self.pending_window_pages -= release.window_pages
                self._give_back(release)
            else:
                self.releases.append(release)
        for _ in range(len(self.pending_frees)):
            last_step, pages = self.pending_frees.popleft()
            if last_step <= step:
                self._releasing_pages -= len(pages)
                self.pending_window_pages -= int(np.count_nonzero(self.window_ids(pages)))
                self.allocator.free(pages)
            else:
                self.pending_frees.append((last_step, pages))

    def hold_written(self, number: int, release: Release) -> None:
        """A row ended while its pages beyond `cached`, and its working state, are being written: hold them, and free
        the rest.
        """
        assert self.windows is None, NO_WINDOWS
        assert number not in self._holds, f"the pages of {number} are held already"
        size = self.page_size
        first, last = release.cached // size, self.pages_for(release.held)
        hold = self._holds[number] = PageHold(self.pool.page_table[release.pool_row, first:last].copy())
        self.tree.unlock(release.node)
        if self.states is None:
            self.pool.free_row(release.pool_row)
        else:
            hold.pool_row = release.pool_row

    def hold_read(self, number: int, release: Release) -> Int32Array:
        """A row ended whose KV will be read: insert whole pages into the tree and lock them, hold a partial last page
        and its working state.

        Returns all its pages (int32[n]). No plan in flight may contain the row.
        """
        assert self.windows is None, NO_WINDOWS
        size, table = self.page_size, self.pool.page_table[release.pool_row]
        whole, last = release.computed // size, self.pages_for(release.computed)
        partial = table[whole:last].copy()
        pages: Int32Array = table[:last].copy()
        node = release.node
        if self.tree.enabled:
            key = self._key(release.pool_row, release.cached, whole * size)
            first = release.cached // size
            inserted = self.tree.extend(node, key, table[first:whole].copy(), release.priority)
            duplicates = first + inserted.present_tokens // size
            own = table[first:duplicates].copy()
            if self.states is not None:
                self.states.replace(own, self.tree.pages(inserted.node)[first:duplicates], inserted.node)
            self.allocator.free(own)
            self.tree.lock(inserted.node)
            self.tree.unlock(node)
            node = inserted.node
            pages[:whole] = self.tree.pages(node)[:whole]
        else:
            partial = pages[release.cached // size :]
        self.allocator.free(table[last : self.pages_for(release.held)].copy())
        hold = self._holds[number] = PageHold(partial, node)
        if self.states is None:
            self.pool.free_row(release.pool_row)
        else:
            hold.pool_row = release.pool_row
        return pages

    def hold_tree(self, number: int, node: Any, checkpoint: int = 0) -> None:
        """Keep the tree's pages up to `node` from being evicted while a reader outside uses them.

        checkpoint: the page among them whose checkpoint is read too, 0 for none.
        """
        self.tree.lock(node)
        self._holds[number] = PageHold(NO_PAGES, node, checkpoint)
        if checkpoint:
            assert self.states is not None
            self.states.pin(checkpoint)

    def end_hold(self, number: int) -> None:
        """The reader or writer of `number` has ended; unknown numbers are ignored."""
        hold = self._holds.pop(number, None)
        if hold is None:
            return
        if hold.checkpoint:
            assert self.states is not None
            self.states.release(hold.checkpoint)
        self.allocator.free(hold.pages)
        if hold.node is not None:
            self.tree.unlock(hold.node)
        if hold.pool_row >= 0:
            self.pool.free_row(hold.pool_row)

    def evict_adapter(self, adapter: str) -> None:
        """Evict the KV of prompts with this adapter from the tree, except locked pages."""
        self._evict_namespaces(lambda namespace: adapter_of(namespace) == adapter)

    def evict_other_weights(self, weights: str) -> None:
        """Evict the KV of all weights (`Request.weights`) but these from the tree, except locked pages."""
        self._evict_namespaces(lambda namespace: weights_of(namespace) != weights)

    def _evict_namespaces(self, wanted: Callable[[str], bool]) -> None:
        pages = self.tree.evict_namespaces(wanted)
        self.evicted_tokens += len(pages) * self.page_size
        self.allocator.free(pages)

    def flush(self) -> None:
        """Empty the tree. No row and no hold may have pages."""
        self.allocator.free(self.tree.clear())

    def find_leak(self) -> str | None:
        """With no request left: a description of leaked pages or rows, or None."""
        found = []
        held = self.allocator.available + self.tree.evictable_pages + self.held_pages + self.state_pages
        if self._holds:
            held += self.tree.protected_pages
        if held != self.num_pages:
            found.append(f"{held} of {self.num_pages} pages accounted for")
        if self.tree.protected_pages and not self._holds:
            found.append(f"{self.tree.protected_pages} pages still locked")
        if self.windows is not None and self.windows.available_pages != self.windows.num_pages and not self._holds:
            found.append(f"{self.windows.available_pages} of {self.windows.num_pages} window pages accounted for")
        if self.states is not None and self.states.used != self.states.evictable and not self._holds:
            found.append(f"{self.states.used - self.states.evictable} checkpoints of states still in use")
        if self.pool.available_rows + self.held_rows != self.pool.rows:
            found.append(f"{self.pool.available_rows} of {self.pool.rows} pool rows free")
        return "; ".join(found) or None

    def _key(self, pool_row: int, start: int, end: int) -> bytes:
        key: bytes = self.pool.token_ids[pool_row, start:end].tobytes()
        return key

    def _private_pages(self, release: Release) -> int:
        return self.pages_for(release.held) - release.cached // self.page_size

    def _give_back(self, release: Release) -> None:
        size = self.page_size
        first, held = release.cached // size, self.pages_for(release.held)
        end = release.computed // size
        table = self.pool.page_table[release.pool_row]
        if self.tree.enabled and end > first:
            key = self._key(release.pool_row, release.cached, end * size)
            inserted = self.tree.extend(release.node, key, table[first:end].copy(), release.priority)
            duplicates = first + inserted.present_tokens // size
            own = table[first:duplicates].copy()
            if self.windows is not None:
                pages = self.tree.pages(inserted.node)
                self.windows.replace(release.pool_row, first, own, pages[first:duplicates])
                self.windows.release_row(release.pool_row, pages)
            if self.states is not None:
                self.states.replace(own, self.tree.pages(inserted.node)[first:duplicates], inserted.node)
            self.allocator.free(np.concatenate((own, table[end:held])))
        else:
            if self.windows is not None:
                self.windows.release_row(release.pool_row, table[:first])
            self.allocator.free(table[first:held].copy())
        self.tree.unlock(release.node)
        self.pool.free_row(release.pool_row)
