"""The disabled prefix cache: it finds nothing and keeps nothing."""

from collections.abc import Callable, Iterator

from tokenyard.base import Int32Array, PrefixListener
from tokenyard.cache.eviction import Retention
from tokenyard.cache.kv_events import KvEvent
from tokenyard.cache.radix_cache import InsertResult, MatchResult
from tokenyard.cache.tree_node import NO_PAGES, TreeNode


class NoCache:
    """The methods of `RadixCache` for a cache that is always empty. The caller keeps ownership of all pages."""

    enabled = False
    evictable_pages = 0
    protected_pages = 0
    total_pages = 0

    def __init__(self, page_size: int = 1) -> None:
        self.page_size = page_size
        self.listeners: list[PrefixListener] = []
        self._root = TreeNode(None)

    def match(self, key: bytes, namespace: str = "", max_tokens: int | None = None) -> MatchResult:
        """No tokens, at the root."""
        return MatchResult(self._root, 0)

    def find(self, key: bytes, namespace: str = "", max_tokens: int | None = None) -> MatchResult:
        """No tokens, at the root."""
        return MatchResult(self._root, 0)

    def peek(self, key: bytes, namespace: str = "") -> int:
        """0 tokens."""
        return 0

    def pages(self, node: TreeNode) -> Int32Array:
        """No pages."""
        return NO_PAGES.copy()

    def insert(self, key: bytes, pages: Int32Array, namespace: str = "", priority: int = 0) -> InsertResult:
        """Keep nothing: all pages stay the caller's."""
        return InsertResult(self._root, 0)

    def extend(self, node: TreeNode, key_suffix: bytes, pages_suffix: Int32Array, priority: int = 0) -> InsertResult:
        """Keep nothing: all pages stay the caller's."""
        return InsertResult(self._root, 0)

    def lock(self, node: TreeNode) -> None:
        """Do nothing."""

    def unlock(self, node: TreeNode) -> None:
        """Do nothing."""

    def pages_locked_once(self, node: TreeNode) -> int:
        """0 pages."""
        return 0

    def roots(self) -> Iterator[TreeNode]:
        """No roots."""
        return iter(())

    def nodes(self, *roots: TreeNode) -> Iterator[TreeNode]:
        """No nodes."""
        return iter(())

    def eviction_candidates(self, num_pages: int) -> list[TreeNode]:
        """No leaves."""
        return []

    def retain_by(self, retention: Retention | None) -> None:
        """Nothing is kept."""

    def supersede(self, node: TreeNode) -> None:
        """Nothing is kept."""

    def rank_anew(self, node: TreeNode) -> None:
        """Nothing is kept."""

    def cut(self, node: TreeNode, pages: int) -> None:
        """Nothing is kept."""

    def record_hit(self, node: TreeNode) -> None:
        """Do nothing."""

    def evict(self, num_pages: int) -> Int32Array:
        """No pages."""
        return NO_PAGES.copy()

    def evict_unusable(self) -> Int32Array:
        """No pages."""
        return NO_PAGES.copy()

    def evict_namespaces(self, wanted: Callable[[str], bool]) -> Int32Array:
        """No pages."""
        return NO_PAGES.copy()

    def clear(self) -> Int32Array:
        """No pages."""
        return NO_PAGES.copy()

    def use_weights(self, weights: str) -> None:
        """Nothing is cached."""

    def snapshot_events(self) -> list[KvEvent]:
        """Nothing is cached."""
        return []

    def drain_events(self) -> list[KvEvent]:
        """No events."""
        return []

    def check(self) -> None:
        """There is nothing to check."""
