"""Which leaf of the prefix tree is evicted first."""

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from itertools import chain, islice, pairwise
from typing import Protocol

from typing_extensions import override

from tokenyard.base import ConfigError
from tokenyard.cache.tree_node import TreeNode

EvictionPolicy = Callable[[TreeNode], int]
"""Maps a node to its rank: the leaf with the smallest rank is evicted first. No two leaves may share a rank.

Ranks made of `last_access_tick` or `creation_tick` are unique, because each tick of the tree stamps one path, and one
path ends in one leaf.
"""

SLRU_PROTECTED_HITS = 1
"""Admissions after which slru moves a node from probation to the protected segment."""

MAX_RANKED = 64
"""Leaves that "reuse" ranks by value at a time: the least recently used ones."""

_TICK_BITS = 48
_BUCKET = 512
_FEW = 64


def lru(node: TreeNode) -> int:
    """Least recently used first."""
    return node.last_access_tick


def lfu(node: TreeNode) -> int:
    """Fewest hits first, then least recently used."""
    return (node.hits << _TICK_BITS) + node.last_access_tick


def fifo(node: TreeNode) -> int:
    """Oldest first, however often used."""
    return node.creation_tick


def mru(node: TreeNode) -> int:
    """Most recently used first, for scans longer than the cache."""
    return -node.last_access_tick


def filo(node: TreeNode) -> int:
    """Youngest first."""
    return -node.creation_tick


def slru(node: TreeNode) -> int:
    """Segmented LRU: nodes that were never hit again are on probation and are evicted before the protected ones.

    After Karedla, Love and Wherry, "Caching strategies to improve disk system performance" (1994), without their
    bound on the protected segment: when probation is empty, the protected leaves go in LRU order.
    """
    return (int(node.hits >= SLRU_PROTECTED_HITS) << _TICK_BITS) + node.last_access_tick


def priority(node: TreeNode) -> int:
    """Lowest priority first, then least recently used."""
    return (node.priority << _TICK_BITS) + node.last_access_tick


def reuse(node: TreeNode) -> int:
    """Superseded prefixes first, then least recently used; `ReuseQueue` ranks the first of these by value."""
    return node.last_access_tick - (int(node.superseded) << _TICK_BITS)


EVICTION_POLICIES: dict[str, EvictionPolicy] = {
    "lru": lru,
    "lfu": lfu,
    "fifo": fifo,
    "mru": mru,
    "filo": filo,
    "slru": slru,
    "priority": priority,
    "reuse": reuse,
}


def get_eviction_policy(name: str) -> EvictionPolicy:
    """The policy of that name, `reuse` for `module:Class`. Raises ConfigError naming the choices."""
    try:
        return reuse if ":" in name else EVICTION_POLICIES[name]
    except KeyError:
        choices = ", ".join(sorted(EVICTION_POLICIES))
        raise ConfigError(
            f"--radix-eviction-policy is {name!r}; it must be one of {choices}, or module:Class"
        ) from None


class EvictionQueue:
    """The evictable leaves in order of rank: sorted lists of at most `_BUCKET` leaves each.

    `push` and `discard` take a bisection and a short move of memory. Unlike a heap with changing ranks, the queue has
    no outdated entries to skip or sweep, so no single call is slow.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._ranks: list[list[int]] = [[]]
        self._leaves: list[list[TreeNode]] = [[]]
        # Ranks in bucket b are at least bounds[b - 1] and below bounds[b].
        self._bounds: list[int] = []

    def __len__(self) -> int:
        return sum(map(len, self._ranks))

    def push(self, node: TreeNode) -> None:
        """Make `node` evictable; update its rank if it already is."""
        if node.eviction_rank is not None:
            self.discard(node)
        node.eviction_rank = eviction_rank = self._policy(node)
        bucket = bisect_right(self._bounds, eviction_rank)
        ranks = self._ranks[bucket]
        position = bisect_left(ranks, eviction_rank)
        ranks.insert(position, eviction_rank)
        self._leaves[bucket].insert(position, node)
        if len(ranks) > _BUCKET:
            self._divide(bucket)

    def discard(self, node: TreeNode) -> None:
        """Remove `node`, which must be in the queue."""
        assert node.eviction_rank is not None
        bucket = bisect_right(self._bounds, node.eviction_rank)
        ranks = self._ranks[bucket]
        position = bisect_left(ranks, node.eviction_rank)
        del ranks[position], self._leaves[bucket][position]
        node.eviction_rank = None
        if len(ranks) < _FEW and self._bounds:
            self._merge(max(bucket - 1, 0))

    def first(self) -> TreeNode:
        """The leaf to evict next. Raises IndexError if there is none."""
        return self._leaves[0][0]

    def in_order(self) -> Iterator[TreeNode]:
        """All leaves, the one to evict next first; the queue must not change meanwhile."""
        return chain.from_iterable(self._leaves)

    def check(self) -> None:
        """Raise AssertionError if a leaf is out of order or a bucket has a wrong size. Walks all leaves; for tests."""
        ranks = [eviction_rank for bucket in self._ranks for eviction_rank in bucket]
        leaves = [leaf for bucket in self._leaves for leaf in bucket]
        assert [leaf.eviction_rank for leaf in leaves] == ranks, "a leaf is filed under another rank"
        assert [self._policy(leaf) for leaf in leaves] == ranks, "a leaf's rank is outdated"
        assert all(low < high for low, high in pairwise(ranks)), "ranks are not in order"
        assert all(len(bucket) <= _BUCKET for bucket in self._ranks), "a bucket is too long"
        assert len(self._ranks) <= 1 or min(map(len, self._ranks)) >= _FEW, "a bucket is too short"

    def _divide(self, bucket: int) -> None:
        half = len(self._ranks[bucket]) // 2
        ranks, leaves = self._ranks[bucket], self._leaves[bucket]
        self._ranks[bucket : bucket + 1] = [ranks[:half], ranks[half:]]
        self._leaves[bucket : bucket + 1] = [leaves[:half], leaves[half:]]
        self._bounds.insert(bucket, self._ranks[bucket + 1][0])

    def _merge(self, bucket: int) -> None:
        """Join a bucket with the next one, so that there are never many tiny buckets."""
        self._ranks[bucket] += self._ranks.pop(bucket + 1)
        self._leaves[bucket] += self._leaves.pop(bucket + 1)
        del self._bounds[bucket]
        if len(self._ranks[bucket]) > _BUCKET:
            self._divide(bucket)


class Retention(Protocol):
    """What it is worth to keep KV, for eviction policy "reuse"."""

    @property
    def stamp(self) -> int:
        """Values hold as long as this stays the same."""

    def held(self) -> set[TreeNode]:
        """Leaves that go last, as their clients asked for a time to live. Called before `values`, once per stamp."""

    def values(self, leaves: list[TreeNode]) -> list[float]:
        """Seconds of recomputation that keeping a token at the end of each leaf is expected to save per second."""


class ReuseQueue(EvictionQueue):
    """Superseded leaves first, then the one with the lowest value of the `MAX_RANKED` least recently used ones that are
    not held, then those.

    Values change with time, so leaves are ranked anew when one is drawn, at most once per stamp of `retention`.
    Without `retention` it is LRU.
    """

    def __init__(self) -> None:
        super().__init__(reuse)
        self.retention: Retention | None = None
        self._stamp = -1
        self._ranked: list[tuple[float, int, int, TreeNode]] = []
        self._exposed: list[TreeNode] = []
        self._count = 0
        self._held: set[TreeNode] = set()

    @override
    def push(self, node: TreeNode) -> None:
        super().push(node)
        if len(self._exposed) < MAX_RANKED:
            self._exposed.append(node)

    @override
    def first(self) -> TreeNode:
        oldest = super().first()
        if self.retention is None or oldest.superseded:
            return oldest
        self._rank(self.retention)
        while self._ranked:
            _, rank, _, node = self._ranked[0]
            if node.eviction_rank == rank:
                return node
            heapq.heappop(self._ranked)
        self._stamp = -1
        self._rank(self.retention)
        return self._ranked[0][3]

    @override
    def in_order(self) -> Iterator[TreeNode]:
        leaves = list(super().in_order())
        if self.retention is None or not leaves:
            return iter(leaves)
        first, held = sum(1 for leaf in leaves if leaf.superseded), self.retention.held()
        leaves[first:] = sorted(leaves[first:], key=lambda leaf: leaf in held)
        oldest = leaves[first : first + MAX_RANKED]
        values = dict(zip(map(id, oldest), self.retention.values(oldest), strict=True))
        oldest.sort(key=lambda leaf: (values[id(leaf)], leaf.last_access_tick))
        return iter(leaves[:first] + oldest + leaves[first + MAX_RANKED :])

    def _rank(self, retention: Retention) -> None:
        """Rank the oldest leaves, or, if that was done at this stamp, add those that have come since."""
        if retention.stamp != self._stamp or len(self._exposed) >= MAX_RANKED:
            self._stamp, self._ranked, self._held = retention.stamp, [], retention.held()
            others = (node for node in super().in_order() if node not in self._held)
            found = list(islice(others, MAX_RANKED)) or list(islice(super().in_order(), MAX_RANKED))
        else:
            found = [node for node in self._exposed if node.eviction_rank is not None and node not in self._held]
        self._exposed = []
        for value, node in zip(retention.values(found), found, strict=True):
            assert node.eviction_rank is not None
            self._count += 1
            heapq.heappush(self._ranked, (value, node.eviction_rank, self._count, node))
