"""Which prefixes of the tree go to the KV store, and when: the core's half of a hierarchical cache.

A node of the tree is offered once, as a `Store` of everything from the root to its end, so that stored prefixes have no
gap; the store copies what it lacks. Of a model with recurrent states a checkpoint is offered, with the KV of its prefix
(`StateStoreQueue`). The pages are locked until `PagesReleased`. At most the part `_MAX_SHARE` of the
pool's tokens is locked at a time, or a single larger offer. The rest waits in the tree; if it is evicted meanwhile, it
is not stored.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from tokenyard.base import Int32Array, SchedulerSettings, Store
from tokenyard.base.blocks import tokens_per_block
from tokenyard.cache.tree_node import TOKEN_DTYPE
from tokenyard.scheduler.memory import KvMemory

_MAX_SHARE = 8
"""The part of the pool, as a divisor, that may be locked for stores at a time."""

_LOW_SHARE = 4
"""Under write_back, the next nodes to be evicted are stored while less than this part of the pool is free."""

_MAX_ATTEMPTS = 4
"""Calls of `offer` after which a retracted request's pages are in the tree, or some of them are evicted."""


@dataclass(slots=True)
class SwappedPrefix:
    """The first tokens of a retracted request.

    key: its tokens.
    tokens: how many.
    namespace: of its KV: salt and adapter.
    attempts: how often the tree was searched for it.
    """

    key: bytes
    tokens: int
    namespace: str
    attempts: int = 0


class KvStoreQueue:
    """Nodes that wait to be stored, and those whose pages are locked for it. A `PrefixListener` of the tree.

    By policy a node is offered when it enters the tree (write_through), at its first hit
    (write_through_selective), or when free memory runs low and it is next to be evicted (write_back). Under all
    policies it is also offered when its request is retracted (swap-out): paused, preempted, or out of pages.
    """

    def __init__(self, settings: SchedulerSettings, memory: KvMemory) -> None:
        self.dropped_tokens = 0
        self._memory = memory
        self._policy = settings.hicache_write_policy
        self._block = tokens_per_block(settings.page_size)
        # Ordered sets: what is iterated must not depend on addresses.
        self._waiting: dict[Any, int | None] = {}
        self._offered: set[Any] = set()
        self._locked: dict[int, int] = {}
        self._locked_tokens = 0
        self._swaps: list[SwappedPrefix] = []
        self._last_number = 0
        memory.tree.listeners.append(self)

    @property
    def waiting(self) -> int:
        """Nodes that wait to be offered."""
        return len(self._waiting)

    @property
    def offered(self) -> int:
        """Offers whose pages are locked now."""
        return len(self._locked)

    # ---- changes of the tree ---------------------------------------------------------------------------------------

    def inserted(self, parent: Any, node: Any) -> None:
        """A new node waits if the policy stores everything."""
        if self._policy == "write_through":
            self._enqueue(node)

    def split(self, upper: Any, lower: Any) -> None:
        """Both halves of an offered node count as offered; a waiting lower half's offer covers the upper half."""
        if lower in self._offered:
            self._offered.add(upper)

    def evicted(self, node: Any) -> None:
        """A node that still waits is not stored."""
        self._offered.discard(node)
        if node in self._waiting:
            del self._waiting[node]
            self.dropped_tokens += len(node.pages) * self._memory.page_size
            # A part of it may have been cut off and stay.
            self._enqueue(node.parent)

    def hit(self, node: Any) -> None:
        """A request was admitted with the prefix that ends with `node`."""
        if self._policy == "write_through_selective":
            self._enqueue(node)

    # ---- offers ----------------------------------------------------------------------------------------------------

    def offer(self) -> list[Store]:
        """The next prefixes to store, as far as there is room, with their pages locked."""
        if self._policy == "write_back":
            self._enqueue_next_evicted()
        if self._swaps:
            self._swap_out()
        offers = []
        most = self._memory.num_pages * self._memory.page_size // _MAX_SHARE
        while self._waiting:
            first = next(iter(self._waiting))
            if self._locked and self._locked_tokens + self._tokens(first) > most:
                break
            offers.append(self._lock(first))
        return offers

    def _tokens(self, node: Any) -> int:
        """The tokens of the offer of `node`, which waits."""
        tokens: int = node.depth_tokens
        return tokens

    def enqueue_all(self) -> None:
        """Queue every node that was not offered. Called as the engine ends."""
        for node in self._memory.tree.nodes():
            self._enqueue(node)

    def keep(self, tokens: Int32Array, computed: int, namespace: str) -> None:
        """The request with these tokens (int32[n]) is retracted: offer what it has computed, under any policy.

        Its pages enter the tree once no plan in flight uses them, so the next calls of `offer` search the tree for
        them.
        """
        whole = computed - computed % self._block
        if whole:
            self._swaps.append(SwappedPrefix(tokens[:whole].tobytes(), whole, namespace))

    def _swap_out(self) -> None:
        """Queue retracted sequences that are in the tree by now, or after the last attempt the part that is."""
        left = []
        for swap in self._swaps:
            swap.attempts += 1
            if swap.attempts < _MAX_ATTEMPTS and self._memory.tree.peek(swap.key, swap.namespace) < swap.tokens:
                left.append(swap)
            else:
                self._enqueue_prefix(swap)
        self._swaps = left

    def _enqueue_prefix(self, swap: SwappedPrefix) -> None:
        self._enqueue(self._memory.tree.match(swap.key, swap.namespace).node)

    def ended(self, number: int) -> None:
        """The store has released an offer's pages."""
        self._locked_tokens -= self._locked.pop(number, 0)

    def _enqueue(self, node: Any) -> None:
        """Queue the last node up to `node` in which a block ends, unless it was offered."""
        while node.parent is not None and node.depth_tokens // self._block == node.parent.depth_tokens // self._block:
            node = node.parent
        if node.parent is not None and node not in self._offered:
            self._waiting[node] = None

    def _enqueue_next_evicted(self) -> None:
        """Queue the leaves that are evicted next, if little memory is free."""
        missing = self._memory.num_pages // _LOW_SHARE - self._memory.allocator.available
        if missing > 0:
            for leaf in self._memory.tree.eviction_candidates(missing):
                self._enqueue(leaf)

    def _lock(self, node: Any) -> Store:
        for step in _path(node):
            self._offered.add(step)
            self._waiting.pop(step, None)
        return self._offer(node, node.depth_tokens)

    def _offer(self, node: Any, count: int, checkpoint: int = 0, state_slot: int = -1) -> Store:
        """Hold the pages up to `node` and offer the first `count` tokens.

        checkpoint: their last page, if its checkpoint is offered, which is in `state_slot`.
        """
        self._last_number -= 1
        number, path = self._last_number, _path(node)
        self._memory.hold_tree(number, node, checkpoint)
        self._locked[number] = count
        self._locked_tokens += count
        tokens = np.frombuffer(b"".join(step.key for step in reversed(path)), TOKEN_DTYPE)[:count]
        pages = self._memory.tree.pages(node)[: count // self._memory.page_size]
        return Store(number, path[-1].parent.namespace, tokens, pages, state_slot)


def _path(node: Any) -> list[Any]:
    """`node` and what is above it, without the root."""
    path = []
    while node.parent is not None:
        path.append(node)
        node = node.parent
    return path


class StateStoreQueue(KvStoreQueue):
    """The queue of a model with recurrent states: checkpoints wait in the place of nodes, named by their pages.

    Each is offered with the KV of its prefix. KV behind the last checkpoint is of no use to a request.
    """

    def __init__(self, settings: SchedulerSettings, memory: KvMemory) -> None:
        super().__init__(settings, memory)
        assert memory.states is not None
        self._states = memory.states
        self._states.listeners.append(self.usable_changed)

    def inserted(self, parent: Any, node: Any) -> None:
        """The checkpoints of a new node wait if the policy stores everything."""
        self._gained(node.pages[self._states.of[node.pages] > 0])

    def split(self, upper: Any, lower: Any) -> None:
        """Pages keep their checkpoints."""

    def evicted(self, node: Any) -> None:
        """A checkpoint that still waits is not stored."""
        self._lost(node.pages)

    def usable_changed(self, pages: Int32Array) -> None:
        """Pages (int32[n]) of the tree have gained or lost a checkpoint."""
        self._gained(pages[self._states.of[pages] > 0])
        self._lost(pages[self._states.of[pages] == 0])

    def hit(self, node: Any) -> None:
        """A request was admitted with the prefix that ends with `node`."""
        if self._policy == "write_through_selective" and node.parent is not None:
            self._enqueue(int(node.pages[-1]))

    def enqueue_all(self) -> None:
        """Queue every checkpoint that was not offered. Called as the engine ends."""
        for page in self._states.page[self._states.page > 0].tolist():
            self._enqueue(page)

    def _gained(self, pages: Int32Array) -> None:
        for page in pages.tolist():
            self._offered.discard(page)
            if self._policy == "write_through":
                self._enqueue(page)

    def _lost(self, pages: Int32Array) -> None:
        for page in pages.tolist():
            self._offered.discard(page)
            self.dropped_tokens += self._waiting.pop(page, None) or 0

    def _tokens(self, page: Any) -> int:
        return int(self._states.tokens[self._states.of[page]])

    def _enqueue(self, page: Any) -> None:
        """Queue the checkpoint of a page, if that has one which is in the tree and was not offered."""
        slot = int(self._states.of[page])
        if slot and self._states.nodes[slot] is not None and page not in self._offered:
            self._waiting[page] = self._tokens(page)

    def _enqueue_prefix(self, swap: SwappedPrefix) -> None:
        found = self._memory.tree.find(swap.key, swap.namespace)
        usable = self._memory.usable(found.node, found.tokens) // self._memory.page_size
        if usable:
            self._enqueue(int(self._memory.tree.pages(found.node)[usable - 1]))

    def _enqueue_next_evicted(self) -> None:
        """Queue the checkpoints that are evicted next, if few slots or little memory is free."""
        memory, states = self._memory, self._states
        for page in states.next_evicted(states.num_slots // _LOW_SHARE - states.allocator.available).tolist():
            self._enqueue(page)
        missing = memory.num_pages // _LOW_SHARE - memory.allocator.available
        for leaf in memory.tree.eviction_candidates(missing) if missing > 0 else ():
            for page in leaf.pages[states.of[leaf.pages] > 0].tolist():
                self._enqueue(page)

    def _lock(self, page: Any) -> Store:
        slot = int(self._states.of[page])
        self._offered.add(page)
        del self._waiting[page]
        return self._offer(self._states.nodes[slot], self._tokens(page), page, self._states.slot(page))
