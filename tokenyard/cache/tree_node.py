"""The nodes of the radix tree."""

from typing import Any

import numpy as np

from tokenyard.base import Int32Array

TOKEN_BYTES = 4
TOKEN_DTYPE = np.dtype("<i4")
NO_PAGES: Int32Array = np.empty(0, np.int32)
NO_PAGES.flags.writeable = False


class TreeNode:
    """A run of whole pages below `parent`. Roots have no parent and no pages.

    key: token ids of this run alone, little-endian int32.
    pages: int32[n], the page ids of this run alone.
    depth_tokens: tokens from the root to the end of this run.
    children: the nodes below, by the bytes of their first page.
    lock_ref: locks taken on this node itself.
    locked_children: children that are locked or have a locked descendant.
    last_access_tick, creation_tick: ticks of the tree's counter, not times.
    hits: admissions that used this run.
    priority: the highest priority with which it or a node below it was inserted.
    namespace: the namespace of a root; empty elsewhere.
    superseded: it is not expected to be used again; only eviction policy "reuse" reads it.
    tag: for use by a listener. An empty root stays while it is tagged.
    eviction_rank: its rank in the eviction queue; None while it cannot be evicted.
    """

    __slots__ = (
        "children",
        "creation_tick",
        "depth_tokens",
        "eviction_rank",
        "hits",
        "key",
        "last_access_tick",
        "lock_ref",
        "locked_children",
        "namespace",
        "pages",
        "parent",
        "priority",
        "superseded",
        "tag",
    )

    def __init__(
        self,
        parent: "TreeNode | None",
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
        self.children: dict[bytes, TreeNode] = {}
        self.lock_ref = 0
        self.locked_children = 0
        self.last_access_tick = tick
        self.creation_tick = tick
        self.hits = 0
        self.priority = priority
        self.namespace = namespace
        self.superseded = False
        self.tag: Any = None
        self.eviction_rank: int | None = None

    @property
    def locked(self) -> bool:
        """Whether this node or one below it is locked, so that this run must stay."""
        return self.lock_ref > 0 or self.locked_children > 0
