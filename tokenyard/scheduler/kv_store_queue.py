"""Which prefixes of the tree go to the KV store, and when: the core's half of a hierarchical cache.

A node of the tree is offered once, as a `Store` of everything from the root to its end, so that what a store holds has
no gap; the store takes what it lacks. The pages are locked until `PagesReleased`. As many tokens as `_MAX_SHARE` of the
pool are offered at a time; the rest waits in the tree, and what is evicted meanwhile is not stored.
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
"""Under write_back what is next to be evicted is stored while less than this part of the pool is free."""


_MAX_ATTEMPTS = 4
"""Offers after which a request that lost its place has its pages in the tree, or has lost some of them."""


@dataclass(slots=True)
class SwappedPrefix:
    """The first `tokens` tokens (`key`) of a request that lost its place, and how often they were looked for."""

    key: bytes
    tokens: int
    namespace: str
    attempts: int = 0


class KvStoreQueue:
    """Nodes that wait to be stored, and those whose pages are locked for it. A `PrefixListener` of the tree.

    By policy a node is offered when it enters the tree (write_through), at its first hit
    (write_through_selective), or when free memory runs low and it is next to be evicted (write_back); by all of them
    when its request loses its place (swap-out): it is paused, preempted, or pages have run out.
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

    # ---- what the tree tells ---------------------------------------------------------------------------------------

    def inserted(self, parent: Any, node: Any) -> None:
        """A new node: it waits, if the policy stores everything."""
        if self._policy == "write_through":
            self._enqueue(node)

    def split(self, upper: Any, lower: Any) -> None:
        """Both halves of a node that was offered were offered; of one that waits, the lower one brings the upper."""
        if lower in self._offered:
            self._offered.add(upper)

    def evicted(self, node: Any) -> None:
        """A node that still waits is lost to the store."""
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
        """The next prefixes to store, as far as there is room; their pages are locked from now on."""
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
        """Let every node that was never offered wait, as the engine ends."""
        for node in self._memory.tree.nodes():
            self._enqueue(node)

    def keep(self, tokens: Int32Array, computed: int, namespace: str) -> None:
        """The request with these tokens loses its place: what it has computed goes down, by whatever policy.

        Its pages enter the tree once no plan in flight uses them, so that they are looked for in the next offers.
        """
        whole = computed - computed % self._block
        if whole:
            self._swaps.append(SwappedPrefix(tokens[:whole].tobytes(), whole, namespace))

    def _swap_out(self) -> None:
        """Let those sequences wait that are in the tree by now, or as much of them as is there."""
        left = []
        for swap in self._swaps:
            swap.attempts += 1
            if swap.attempts < _MAX_ATTEMPTS and self._memory.tree.peek(swap.key, swap.namespace) < swap.tokens:
                left.append(swap)
            else:
                self._enqueue(self._memory.tree.match(swap.key, swap.namespace).node)
        self._swaps = left

    def ended(self, number: int) -> None:
        """The store has let go of an offer's pages."""
        self._locked_tokens -= self._locked.pop(number, 0)

    def _enqueue(self, node: Any) -> None:
        """Let the last node up to `node` wait in which a block ends, unless it was offered."""
        while node.parent is not None and node.depth_tokens // self._block == node.parent.depth_tokens // self._block:
            node = node.parent
        if node.parent is not None and node not in self._offered:
            self._waiting[node] = None

    def _enqueue_next_evicted(self) -> None:
        """Let those leaves wait that go next, while little memory is free."""
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
