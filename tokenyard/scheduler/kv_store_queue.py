"""Which prefixes of the tree go to the KV store, and when: the core's half of a hierarchical cache.

A node of the tree is offered once, as a `Store` of everything from the root to its end, so that stored prefixes have no
gap; the store copies what it lacks. The pages are locked until `PagesReleased`. At most the part `_MAX_SHARE` of the
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
        self._waiting: dict[Any, None] = {}
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
            node = next(iter(self._waiting))
            if self._locked and self._locked_tokens + node.depth_tokens > most:
                break
            offers.append(self._lock(node))
        return offers

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
                self._enqueue(self._memory.tree.match(swap.key, swap.namespace).node)
        self._swaps = left

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
        self._last_number -= 1
        number, runs = self._last_number, []
        step = node
        while step.parent is not None:
            runs.append(step.key)
            self._offered.add(step)
            self._waiting.pop(step, None)
            step = step.parent
        runs.reverse()
        self._memory.hold_tree(number, node)
        self._locked[number] = node.depth_tokens
        self._locked_tokens += node.depth_tokens
        tokens = np.frombuffer(b"".join(runs), TOKEN_DTYPE)
        return Store(number, step.namespace, tokens, self._memory.tree.pages(node))
