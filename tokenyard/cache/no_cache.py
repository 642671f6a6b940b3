"""The disabled prefix cache: it finds nothing and keeps nothing."""

from collections.abc import Callable, Iterator

from tokenyard.base import Int32Array, PrefixListener
from tokenyard.cache.kv_events import KvEvent
from tokenyard.cache.node import NO_PAGES, Node
from tokenyard.cache.radix import Insert, Match


class NoCache:
    """The methods of `RadixCache` for a cache that is always empty. With `enabled` False the caller keeps all pages."""

    enabled = False
    evictable_pages = 0
    protected_pages = 0
    total_pages = 0

    def __init__(self, page_size: int = 1) -> None:
        self.page_size = page_size
        self.listeners: list[PrefixListener] = []
        self._root = Node(None)

    def match(self, key: bytes, namespace: str = "", max_tokens: int | None = None) -> Match:
        """No tokens, at the root."""
        return Match(self._root, 0)

    def find(self, key: bytes, namespace: str = "", max_tokens: int | None = None) -> Match:
        """No tokens, at the root."""
        return Match(self._root, 0)

    def peek(self, key: bytes, namespace: str = "") -> int:
        """0 tokens."""
        return 0

    def pages(self, node: Node) -> Int32Array:
        """No pages."""
        return NO_PAGES.copy()

    def insert(self, key: bytes, pages: Int32Array, namespace: str = "", priority: int = 0) -> Insert:
        """Keep nothing: all pages stay the caller's."""
        return Insert(self._root, 0)

    def extend(self, node: Node, key_suffix: bytes, pages_suffix: Int32Array, priority: int = 0) -> Insert:
        """Keep nothing: all pages stay the caller's."""
        return Insert(self._root, 0)

    def lock(self, node: Node) -> None:
        """Do nothing."""

    def unlock(self, node: Node) -> None:
        """Do nothing."""

    def roots(self) -> Iterator[Node]:
        """No roots."""
        return iter(())

    def nodes(self, *roots: Node) -> Iterator[Node]:
        """No nodes."""
        return iter(())

    def next_to_go(self, num_pages: int) -> list[Node]:
        """No leaves."""
        return []

    def record_hit(self, node: Node) -> None:
        """Do nothing."""

    def evict(self, num_pages: int) -> Int32Array:
        """No pages."""
        return NO_PAGES.copy()

    def evict_namespaces(self, wanted: Callable[[str], bool]) -> Int32Array:
        """No pages."""
        return NO_PAGES.copy()

    def clear(self) -> Int32Array:
        """No pages."""
        return NO_PAGES.copy()

    def snapshot_events(self) -> list[KvEvent]:
        """Nothing is cached."""
        return []

    def drain_events(self) -> list[KvEvent]:
        """No events."""
        return []

    def check(self) -> None:
        """There is nothing to check."""
