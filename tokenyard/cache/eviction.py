"""Which leaf of the prefix tree is evicted first."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from itertools import chain, pairwise

from tokenyard.base import ConfigError
from tokenyard.cache.tree_node import TreeNode

EvictionPolicy = Callable[[TreeNode], int]
"""Maps a node to its rank: the leaf with the smallest rank is evicted first. No two leaves may share a rank.

Ranks made of `last_access_tick` or `creation_tick` are unique, because each tick of the tree stamps one path, and one
path ends in one leaf.
"""

SLRU_PROTECTED_HITS = 1
"""Admissions after which slru moves a node from probation to the protected segment."""

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
