"""One edge of the radix tree and the page run that belongs to it."""

from typing import Any

import numpy as np

from tokenyard.base import Int32Array

TOKEN_BYTES = 4
TOKEN_DTYPE = np.dtype("<i4")
NO_PAGES: Int32Array = np.empty(0, np.int32)
NO_PAGES.flags.writeable = False


class Node:
    """A run of whole pages below `parent`. Roots have no parent and hold nothing.

    key: token ids of this run alone, little-endian int32. pages: int32[n], the page ids of this run alone.
    depth_tokens: tokens from the root to the end of this run. locks: locks taken on this node itself. locked_children:
    children that are locked themselves or have something locked below. access, created: ticks of the tree's counter,
    not times. hits: admissions that used this run. priority: the highest priority with which it or a node below it was
    inserted. namespace: the name space of a root; empty elsewhere. tag: free for a listener; an empty root stays while
    it is tagged. rank: its place in the order of eviction, None while it cannot be evicted.
    """

    __slots__ = (
        "access",
        "children",
        "created",
        "depth_tokens",
        "hits",
        "key",
        "locked_children",
        "locks",
        "namespace",
        "pages",
        "parent",
        "priority",
        "rank",
        "tag",
    )

    def __init__(
        self,
        parent: "Node | None",
        key: bytes = b"",
        pages: Int32Array = NO_PAGES,
        depth_tokens: int = 0,
        tick: int = 0,
        priority: int = 0,
        namespace: str = "",
    ) -> None:
        self.parent = parent
        self.key = key
        self.pages = pages
        self.depth_tokens = depth_tokens
        self.children: dict[bytes, Node] = {}
        self.locks = 0
        self.locked_children = 0
        self.access = tick
        self.created = tick
        self.hits = 0
        self.priority = priority
        self.namespace = namespace
        self.tag: Any = None
        self.rank: int | None = None

    @property
    def locked(self) -> bool:
        """Whether this node or one below it is locked, so that this run must stay."""
        return self.locks > 0 or self.locked_children > 0
