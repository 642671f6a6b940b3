"""Which leaf leaves the tree first."""

from collections.abc import Callable
from heapq import heapify, heappop, heappush

from tokenyard.base import ConfigError
from tokenyard.cache.node import Node

EvictionPolicy = Callable[[Node], tuple[int, ...]]
"""A node's rank: the leaf with the smallest tuple is evicted first."""

SLRU_PROTECTED_HITS = 1
"""Admissions after which slru moves a node from probation to the protected segment."""

_SPARE_ENTRIES = 64


def lru(node: Node) -> tuple[int, ...]:
    """Least recently used first."""
    return (node.access,)


def lfu(node: Node) -> tuple[int, ...]:
    """Fewest hits first, then least recently used."""
    return (node.hits, node.access)


def fifo(node: Node) -> tuple[int, ...]:
    """Oldest first, however often used."""
    return (node.created,)


def mru(node: Node) -> tuple[int, ...]:
    """Most recently used first, for scans longer than the cache."""
    return (-node.access,)


def filo(node: Node) -> tuple[int, ...]:
    """Youngest first."""
    return (-node.created,)


def slru(node: Node) -> tuple[int, ...]:
    """Segmented LRU: what was never hit again is on probation and goes before the protected rest.

    After Karedla, Love and Wherry, "Caching strategies to improve disk system performance" (1994), without their
    bound on the protected segment: when probation is empty, the protected leaves go in LRU order.
    """
    return (int(node.hits >= SLRU_PROTECTED_HITS), node.access)


def priority(node: Node) -> tuple[int, ...]:
    """Lowest priority first, then least recently used."""
    return (node.priority, node.access)


EVICTION_POLICIES: dict[str, EvictionPolicy] = {
    "lru": lru,
    "lfu": lfu,
    "fifo": fifo,
    "mru": mru,
    "filo": filo,
    "slru": slru,
    "priority": priority,
}


def get_eviction_policy(name: str) -> EvictionPolicy:
    """The policy of that name. Raises ConfigError naming the choices."""
    try:
        return EVICTION_POLICIES[name]
    except KeyError:
        choices = ", ".join(sorted(EVICTION_POLICIES))
        raise ConfigError(f"--radix-eviction-policy is {name!r}; it must be one of {choices}") from None


class EvictionQueue:
    """The evictable leaves, smallest rank first: a heap that forgives outdated entries.

    A leaf's entry is valid while `node.entry` is that very tuple; a changed rank gets a new entry and the old one is
    dropped when it surfaces. Each push drops up to two outdated entries from the top, and where that is not enough
    (they may hide at the bottom) the heap is rebuilt once more than half of it is outdated. So it holds at most
    twice the leaves plus a constant, and every operation costs O(log leaves), amortised.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._heap: list[tuple[tuple[int, ...], int, Node]] = []
        self._pushes = 0
        self._leaves = 0

    def __len__(self) -> int:
        return self._leaves

    @property
    def entries(self) -> int:
        """Size of the heap, outdated entries included."""
        return len(self._heap)

    def push(self, node: Node) -> None:
        """Let `node` be evicted from now on; if it was in already, rank it anew."""
        heap = self._heap
        if node.entry is None:
            self._leaves += 1
        self._pushes += 1
        node.entry = entry = (self._policy(node), self._pushes, node)
        heappush(heap, entry)
        for _ in range(2):
            if heap[0][2].entry is not heap[0]:
                heappop(heap)
        if len(heap) > 2 * self._leaves + _SPARE_ENTRIES:
            self._rebuild()

    def discard(self, node: Node) -> None:
        """Keep `node` from being evicted. It must be in the queue."""
        node.entry = None
        self._leaves -= 1

    def first(self) -> Node:
        """The leaf to evict next. Raises IndexError if there is none."""
        heap = self._heap
        while heap[0][2].entry is not heap[0]:
            heappop(heap)
        return heap[0][2]

    def _rebuild(self) -> None:
        self._heap = [entry for entry in self._heap if entry[2].entry is entry]
        heapify(self._heap)
