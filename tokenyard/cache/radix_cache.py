"""The prefix cache: a compressed radix tree over whole pages of tokens.

The idea is RadixAttention's (Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs", 2024).
Keys are bytes, so one `bytes.startswith` compares a whole run of tokens at memory speed. Evictable leaves are in a
queue, so eviction never walks the whole tree.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from tokenyard.base import Int32Array, PrefixListener
from tokenyard.base.request import weights_of
from tokenyard.cache.eviction import EvictionPolicy, EvictionQueue, Retention, ReuseQueue, get_eviction_policy, reuse
from tokenyard.cache.kv_events import KvEvent, KvEventLog
from tokenyard.cache.tree_node import NO_PAGES, TOKEN_BYTES, TOKEN_DTYPE, TreeNode

_MIN_ROOTS_TO_SWEEP = 1024


def make_key(tokens: Int32Array) -> bytes:
    """The key of int32[n] token ids: 4 bytes each, little-endian."""
    return tokens.astype(TOKEN_DTYPE, copy=False).tobytes()


@dataclass(slots=True)
class MatchResult:
    """The deepest node that a key matches in full, and the tokens from the root to its end.

    branch_tokens: for a match that was cut to what is usable, where the key leaves what the tree has; else 0.
    """

    node: TreeNode
    tokens: int
    branch_tokens: int = 0


@dataclass(slots=True)
class InsertResult:
    """The node at the end of an inserted key, and how many of the key's tokens the tree held before.

    The caller still owns the pages it passed for those tokens; the tree owns the others.
    """

    node: TreeNode
    present_tokens: int


class RadixCache:
    """The radix tree of KV pages that requests may reuse.

    Every page of the tree is either evictable or protected by a lock; both are counted in `evictable_pages` and
    `protected_pages`. A node that `match` or `insert` returns stays valid only until the next call that changes the
    tree, unless it is locked.

    eviction_policy: a name of `EVICTION_POLICIES`, or `module:Class` for reuse; ConfigError otherwise. `match`,
        `insert` and the end of a lock refresh a node's last access. For lfu and slru, a hit is a call of `record_hit`
        (a request was admitted), because a blocked request may match in every step. Under priority, a larger number
        stays longer. Under reuse, `retain_by` sets what KV is worth.
    enable_kv_events: keep a log of blocks stored and removed, which grows until `drain_events` is called.
    rank: ranks leaves in place of that policy.
    listeners: called on every change (see PrefixListener). Clearing the tree evicts node by node, children first.
    """

    enabled = True

    def __init__(
        self,
        page_size: int = 1,
        eviction_policy: str = "lru",
        enable_kv_events: bool = False,
        rank: EvictionPolicy | None = None,
    ) -> None:
        if page_size < 1:
            raise ValueError(f"page_size is {page_size}; it must be at least 1")
        self.page_size = page_size
        self.evictable_pages = 0
        self.protected_pages = 0
        self.listeners: list[PrefixListener] = []
        self._page_bytes = page_size * TOKEN_BYTES
        policy = get_eviction_policy(eviction_policy)
        self._queue = ReuseQueue() if policy is reuse else EvictionQueue(rank or policy)
        self._roots: dict[str, TreeNode] = {}
        self._weights = ""
        self._sweep_at = _MIN_ROOTS_TO_SWEEP
        self._tick = 0
        self._events = KvEventLog(page_size) if enable_kv_events else None
        if self._events is not None:
            self.listeners.append(self._events)

    @property
    def total_pages(self) -> int:
        """The number of pages that the tree owns."""
        return self.evictable_pages + self.protected_pages

    @property
    def tick(self) -> int:
        """The latest tick of the tree's counter."""
        return self._tick

    def retain_by(self, retention: Retention | None) -> None:
        """Rank leaves by these values from now on; only eviction policy "reuse" does."""
        if isinstance(self._queue, ReuseQueue):
            self._queue.retention = retention

    def supersede(self, node: TreeNode) -> None:
        """`node` is not expected to be used again: eviction policy "reuse" evicts it first, until it is matched."""
        node.superseded = True
        if node.eviction_rank is not None:
            self._queue.push(node)

    def rank_anew(self, node: TreeNode) -> None:
        """What the rank of the evictable leaf `node` depends on has changed."""
        self._queue.push(node)

    def cut(self, node: TreeNode, pages: int) -> None:
        """Split the evictable leaf `node` after its first `pages` pages."""
        self._split(node, pages * self._page_bytes)
        self._queue.push(node)

    def match(self, key: bytes, namespace: str = "", max_tokens: int | None = None) -> MatchResult:
        """The longest prefix of `key` in the tree, at most `max_tokens`, in whole pages; the root if there is none.

        Splits a node that matches in part. Refreshes the last access of the path; locks nothing.
        """
        end = len(key) if max_tokens is None else min(len(key), max_tokens * TOKEN_BYTES)
        self._tick += 1
        node = self._descend(self._root(namespace), key, end - end % self._page_bytes)
        node.superseded = False
        if node.eviction_rank is not None:
            self._queue.push(node)
        return MatchResult(node, node.depth_tokens)

    def find(self, key: bytes, namespace: str = "", max_tokens: int | None = None) -> MatchResult:
        """The tokens that `match` would find, without any change to the tree, and the node in whose run they end.

        The run may be longer than the match.
        """
        node = self._roots.get(namespace) or TreeNode(None)
        size = self._page_bytes
        start, end = 0, len(key) if max_tokens is None else min(len(key), max_tokens * TOKEN_BYTES)
        end -= end % size
        while start < end:
            child = node.children.get(key[start : start + size])
            if child is None:
                break
            node = child
            if not key.startswith(node.key, start, end):
                start += self._common_bytes(node.key, key, start, end)
                break
            start += len(node.key)
        return MatchResult(node, start // TOKEN_BYTES)

    def peek(self, key: bytes, namespace: str = "") -> int:
        """The tokens that `match` would find, without any change to the tree."""
        return self.find(key, namespace).tokens

    def pages(self, node: TreeNode) -> Int32Array:
        """Page ids from the root to the end of `node`, int32[node.depth_tokens / page_size], a copy."""
        runs = []
        step: TreeNode | None = node
        while step is not None:
            runs.append(step.pages)
            step = step.parent
        runs.reverse()
        return np.concatenate(runs)

    def insert(self, key: bytes, pages: Int32Array, namespace: str = "", priority: int = 0) -> InsertResult:
        """Put `key` with its `pages` (int32[n], n * page_size tokens) into the tree.

        Raises ValueError, before any change, if key and pages differ in length.
        """
        return self._insert(self._root(namespace), key, pages, priority)

    def extend(self, node: TreeNode, key_suffix: bytes, pages_suffix: Int32Array, priority: int = 0) -> InsertResult:
        """`insert` for a key that continues below `node`, which the caller has locked.

        The result counts tokens of the suffix only. The cost is O(suffix), so a long prompt that is inserted chunk by
        chunk is compared once. Raises ValueError if `node` is not locked.
        """
        if not node.locked:
            raise ValueError("extend needs a locked node; call lock(node) first")
        return self._insert(node, key_suffix, pages_suffix, priority)

    def lock(self, node: TreeNode) -> None:
        """Keep the pages from the root to `node` in the tree until an equal number of calls of `unlock`.

        Each node counts its locked children, so the cost is the length of the part of the path that was not locked.
        """
        newly = not node.locked
        node.lock_ref += 1
        while newly:
            self.evictable_pages -= len(node.pages)
            self.protected_pages += len(node.pages)
            if node.eviction_rank is not None:
                self._queue.discard(node)
            if node.parent is None:
                return
            node = node.parent
            newly = not node.locked
            node.locked_children += 1

    def unlock(self, node: TreeNode) -> None:
        """Undo one `lock`. Raises ValueError if `node` itself has no lock (a lock further down does not count)."""
        if node.lock_ref < 1:
            raise ValueError("unlock of a node that is not locked")
        node.lock_ref -= 1
        self._tick += 1
        while not node.locked:
            self.protected_pages -= len(node.pages)
            self.evictable_pages += len(node.pages)
            node.last_access_tick = self._tick
            if node.parent is None:
                return
            if not node.children:
                self._queue.push(node)
            node = node.parent
            node.locked_children -= 1

    def pages_locked_once(self, node: TreeNode) -> int:
        """Pages that would be evictable without one of the locks on `node`, which must be locked."""
        count = 0
        while node.parent is not None and node.lock_ref + node.locked_children == 1:
            count += len(node.pages)
            node = node.parent
        return count

    def record_hit(self, node: TreeNode) -> None:
        """Count one hit for each node from the root to `node`: a request that matched it was admitted."""
        step: TreeNode | None = node
        while step is not None:
            step.hits += 1
            step = step.parent
        if node.eviction_rank is not None:
            self._queue.push(node)

    def evict(self, num_pages: int) -> Int32Array:
        """Remove exactly min(num_pages, evictable_pages) pages from the tree and return their ids (int32).

        Leaves go in the order of the eviction policy; the last one loses only the tail that is needed.
        """
        missing = min(num_pages, self.evictable_pages)
        taken = [NO_PAGES]
        while missing > 0:
            leaf = self._queue.first()
            if len(leaf.pages) > missing:
                self._split(leaf, len(leaf.key) - missing * self._page_bytes)
            self._remove_leaf(leaf)
            taken.append(leaf.pages)
            missing -= len(leaf.pages)
        return np.concatenate(taken)

    def evict_unusable(self) -> Int32Array:
        """Remove the first leaf if its rank is below 0; returns its pages (int32[n])."""
        leaf = self._queue.first() if self.evictable_pages else None
        if leaf is None or leaf.eviction_rank is None or leaf.eviction_rank >= 0:
            return NO_PAGES
        self._remove_leaf(leaf)
        return leaf.pages

    def evict_namespaces(self, wanted: Callable[[str], bool]) -> Int32Array:
        """Remove the pages of all `wanted` namespaces that are not locked; returns their ids (int32)."""
        taken = [NO_PAGES]
        for root in [root for root in self._roots.values() if wanted(root.namespace)]:
            for node in reversed(list(self.nodes(root))):
                if node.parent is not None and not node.children and not node.locked:
                    self._remove_leaf(node)
                    taken.append(node.pages)
        return np.concatenate(taken)

    def clear(self) -> Int32Array:
        """Empty the tree and return its pages. Raises RuntimeError, before any change, if anything is locked."""
        if any(root.locked for root in self._roots.values()):
            raise RuntimeError("the prefix cache cannot be emptied while requests use it")
        taken = self.evict(self.evictable_pages)
        self._sweep_roots()
        if self._events is not None:
            self._events.cleared()
        return taken

    def drain_events(self) -> list[KvEvent]:
        """Events since the last call, oldest first; an empty list unless KV events are enabled."""
        return [] if self._events is None else self._events.drain()

    def snapshot_events(self) -> list[KvEvent]:
        """Events that build what the weights in use can hit, from an empty cache; an empty list unless KV events are
        enabled.
        """
        if self._events is None:
            return []
        roots = [root for root in self._roots.values() if weights_of(root.namespace) == self._weights]
        return self._events.snapshot(self.nodes(*roots) if roots else ())

    def use_weights(self, weights: str) -> None:
        """Other weights (`Request.weights`) are in use: subscribers to KV events drop what they know, and get what
        these can hit.
        """
        self._weights = weights
        if self._events is not None:
            self._events.restart(self.snapshot_events())

    def check(self) -> None:
        """Raise AssertionError if the tree contradicts itself. Walks the whole tree; for tests."""
        evictable = protected = leaves = 0
        seen: list[Int32Array] = [NO_PAGES]
        for node in self.nodes():
            self._check_node(node)
            seen.append(node.pages)
            evictable += 0 if node.locked else len(node.pages)
            protected += len(node.pages) if node.locked else 0
            leaves += node.eviction_rank is not None
        pages = np.concatenate(seen)
        assert len(np.unique(pages)) == len(pages), "a page is in the tree twice"
        assert (evictable, protected) == (self.evictable_pages, self.protected_pages), "page counts are off"
        assert leaves == len(self._queue), "the queue holds leaves that are not in the tree"
        self._queue.check()

    def _check_node(self, node: TreeNode) -> None:
        size = self._page_bytes
        for first, child in node.children.items():
            assert child.parent is node, "a child does not know its parent"
            assert child.key[:size] == first, "a child is filed under another page"
            assert child.priority <= node.priority or node.parent is None, "a child outranks its parent"
        locked = sum(child.locked for child in node.children.values())
        assert node.locked_children == locked, "locked children are miscounted"
        evictable = node.parent is not None and not node.children and not node.locked
        assert (node.eviction_rank is not None) == evictable, "the eviction queue is wrong about a node"
        if node.parent is not None:
            assert len(node.key) == len(node.pages) * size > 0, "key and pages differ in length"
            assert node.depth_tokens == node.parent.depth_tokens + len(node.pages) * self.page_size, "depth is off"

    def roots(self) -> Iterator[TreeNode]:
        """The root of each namespace, in order of creation. Callers must not change them."""
        return iter(self._roots.values())

    def eviction_candidates(self, num_pages: int) -> list[TreeNode]:
        """The leaves that `evict(num_pages)` would take pages from, in order, without any change to the tree."""
        leaves = []
        for leaf in self._queue.in_order():
            if num_pages <= 0:
                break
            leaves.append(leaf)
            num_pages -= len(leaf.pages)
        return leaves

    def nodes(self, *roots: TreeNode) -> Iterator[TreeNode]:
        """Every node (below `roots` if any are given), parents first.

        Not recursive, because chains can be deeper than Python's recursion limit.
        """
        stack = list(roots or self._roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _root(self, namespace: str) -> TreeNode:
        root = self._roots.get(namespace)
        if root is None:
            if len(self._roots) >= self._sweep_at:
                self._sweep_roots()
            root = self._roots[namespace] = TreeNode(None, namespace=namespace)
        return root

    def _sweep_roots(self) -> None:
        """Drop unused roots; otherwise salts that are used once would fill the memory."""
        self._roots = {name: r for name, r in self._roots.items() if r.children or r.locked or r.tag is not None}
        self._sweep_at = max(_MIN_ROOTS_TO_SWEEP, 2 * len(self._roots))

    def _descend(self, node: TreeNode, key: bytes, end: int) -> TreeNode:
        """Follow `key[:end]` below `node`, split a run that it matches in part, and refresh the path's last access."""
        size, tick, start = self._page_bytes, self._tick, 0
        while start < end:
            child = node.children.get(key[start : start + size])
            if child is None:
                break
            if not key.startswith(child.key, start, end):
                node = self._split(child, self._common_bytes(child.key, key, start, end))
                node.last_access_tick = tick
                break
            node = child
            node.last_access_tick = tick
            start += len(child.key)
        return node

    def _common_bytes(self, run: bytes, key: bytes, start: int, end: int) -> int:
        """Length of the common prefix of `run` and `key[start:end]`, in bytes of whole pages."""
        count = min(len(run), end - start) // TOKEN_BYTES
        ours = np.frombuffer(run, TOKEN_DTYPE, count)
        differ = ours != np.frombuffer(key, TOKEN_DTYPE, count, start)
        first = int(differ.argmax())
        common = first if differ[first] else count
        return (common - common % self.page_size) * TOKEN_BYTES

    def _insert(self, node: TreeNode, key: bytes, pages: Int32Array, priority: int) -> InsertResult:
        if len(key) != len(pages) * self._page_bytes:
            raise ValueError(
                f"the key has {len(key) / TOKEN_BYTES:g} tokens and there are {len(pages)} pages of {self.page_size};"
                " cut both to the same number of whole pages"
            )
        self._tick += 1
        top = node
        node = self._descend(node, key, len(key))
        present = (node.depth_tokens - top.depth_tokens) * TOKEN_BYTES
        if present < len(key):
            node = self._add_leaf(node, key[present:], pages[present // self._page_bytes :].copy(), priority)
        else:
            self._raise_priority(node, priority)
            if node.eviction_rank is not None:
                self._queue.push(node)
        return InsertResult(node, present // TOKEN_BYTES)

    def _raise_priority(self, node: TreeNode, priority: int) -> None:
        """Raise the priority of `node` and its ancestors.

        A parent's priority is at least its children's, so the loop ends at the first ancestor that is high enough.
        """
        while node.parent is not None and node.priority < priority:
            node.priority = priority
            node = node.parent

    def _add_leaf(self, parent: TreeNode, key: bytes, pages: Int32Array, priority: int) -> TreeNode:
        depth = parent.depth_tokens + len(pages) * self.page_size
        node = TreeNode(parent, key, pages, depth, self._tick, priority)
        parent.superseded = False
        if parent.eviction_rank is not None:
            self._queue.discard(parent)
        parent.children[key[: self._page_bytes]] = node
        self._raise_priority(parent, priority)
        self.evictable_pages += len(pages)
        self._queue.push(node)
        for listener in self.listeners:
            listener.inserted(parent, node)
        return node

    def _split(self, lower: TreeNode, cut: int) -> TreeNode:
        """Cut a run after `cut` bytes and return the new upper half.

        `lower` keeps its identity and its locks. The upper half inherits age, hits and priority of the run.
        """
        parent, size = lower.parent, self._page_bytes
        assert parent is not None
        depth = lower.depth_tokens - (len(lower.key) - cut) // TOKEN_BYTES
        upper = TreeNode(
            parent, lower.key[:cut], lower.pages[: cut // size].copy(), depth, lower.creation_tick, lower.priority
        )
        upper.last_access_tick, upper.hits, upper.locked_children = (
            lower.last_access_tick,
            lower.hits,
            int(lower.locked),
        )
        upper.superseded = lower.superseded
        parent.children[lower.key[:size]] = upper
        lower.key, lower.pages, lower.parent = lower.key[cut:], lower.pages[cut // size :].copy(), upper
        upper.children[lower.key[:size]] = lower
        for listener in self.listeners:
            listener.split(upper, lower)
        return upper

    def _remove_leaf(self, leaf: TreeNode) -> None:
        parent = leaf.parent
        assert parent is not None
        self._queue.discard(leaf)
        del parent.children[leaf.key[: self._page_bytes]]
        self.evictable_pages -= len(leaf.pages)
        if not parent.children and not parent.locked and parent.parent is not None:
            self._queue.push(parent)
        for listener in self.listeners:
            listener.evicted(leaf)
