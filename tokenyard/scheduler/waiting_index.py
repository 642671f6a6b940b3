"""What each waiting row would hit in the prefix tree now, updated as the tree changes, never by matching again.

A waiting row belongs to the deepest tree node that it matches in full, in a bucket named by its next page of tokens. A
new leaf affects only the bucket of its first page, a split only the bucket of the run that was cut, an eviction only
the rows at the evicted leaf. So no change moves all rows that share a system prompt, except the one that inserts the
end of this prompt. Policies read two things from it: the column `matchable`, and for dfs-weight the number of waiting
rows in each part of the tree.
"""

import heapq
from collections.abc import Iterator
from typing import Any

import numpy as np

from tokenyard.base import Int32Array
from tokenyard.scheduler.interner import Interner
from tokenyard.scheduler.memory import KvMemory
from tokenyard.scheduler.table import NO_GROUP, RequestTable

TOKEN_BYTES = 4
NO_PAGE = b""
_FEWEST_STALE = 64
_FEW_CHILDREN = 8


class Branch:
    """A tree node with waiting rows at it or below it; the node's `tag`. See `policy.PrefixBranch` for its readers.

    buckets: rows that belong here, by their next page (NO_PAGE: nothing left to match). weight: rows here and below.
    heap: (-weight, birth, child) for each child, and stale entries, which are not their child's `entry` any more.
    """

    __slots__ = ("_fresh_length", "birth", "buckets", "entry", "heap", "node", "own", "weight")

    def __init__(self, node: Any, birth: int) -> None:
        self.node = node
        self.birth = birth
        self.buckets: dict[bytes, dict[int, None]] = {}
        self.own = 0
        self.weight = 0
        self.heap: list[tuple[int, int, Branch]] = []
        self.entry: tuple[int, int, Branch] | None = None
        self._fresh_length = 0

    def heaviest_first(self) -> "Iterator[Branch]":
        """Children by falling weight, among equals the oldest. Lazy, O(log n) each, where there are many."""
        if len(self.heap) <= _FEW_CHILDREN:
            return iter([entry[2] for entry in sorted(self.heap) if entry[2].entry is entry])
        return self._heaviest_of_many()

    def _heaviest_of_many(self) -> "Iterator[Branch]":
        heap = self.heap
        ahead = [(heap[0], 0)] if heap else []
        while ahead:
            entry, place = heapq.heappop(ahead)
            for below in (2 * place + 1, 2 * place + 2):
                if below < len(heap):
                    heapq.heappush(ahead, (heap[below], below))
            if entry[2].entry is entry:
                yield entry[2]

    def rows(self) -> list[int]:
        """Rows that belong to this node, not to one below, in no particular order."""
        return [row for bucket in self.buckets.values() for row in bucket]

    def weigh_child(self, child: "Branch") -> None:
        """Update the heap entry of a child after a change of its weight."""
        child.entry = (-child.weight, child.birth, child)
        heapq.heappush(self.heap, child.entry)
        if len(self.heap) > 2 * self._fresh_length + _FEWEST_STALE:
            self.heap = [entry for entry in self.heap if entry[2].entry is entry]
            heapq.heapify(self.heap)
            self._fresh_length = len(self.heap)


class WaitingIndex:
    """Keeps `matchable`, `branch` and `prefix_group` of waiting rows while it is `active`; a `base.PrefixListener`.

    The state reports rows that start and stop waiting, the tree reports its changes. `forest` is above the roots of all
    name spaces. Rows of one `prefix_group` share their first `group_tokens` tokens and their name space.
    """

    def __init__(self, table: RequestTable, group_tokens: int) -> None:
        self.active = False
        self.forest = Branch(None, 0)
        self._table = table
        self._group_tokens = group_tokens
        self._groups = Interner()
        self._births = 0
        self._places: dict[int, tuple[Branch, bytes]] = {}
        self._keys: dict[int, tuple[Int32Array, int]] = {}

    # ---- switching ---------------------------------------------------------------------------------------------

    def activate(self, memory: KvMemory, waiting: list[int]) -> None:
        """Watch the tree of `memory` and match all `waiting` rows, once."""
        self.deactivate()
        self.active = True
        self._tree = memory.tree
        self._page_size = memory.page_size
        self._tree.listeners.append(self)
        for row in waiting:
            self.add(row)

    def deactivate(self) -> None:
        """Stop watching the tree and drop all rows."""
        if not self.active:
            return
        for row in list(self._places):
            self.remove(row)
        self._tree.listeners.remove(self)
        self._groups = Interner()
        self._table.prefix_group[:] = NO_GROUP
        self.active = False

    # ---- waiting rows ------------------------------------------------------------------------------------------

    def add(self, row: int) -> None:
        """`row` waits from now on, for the first time or again."""
        if not self.active:
            return
        table = self._table
        request, ids = table.request(row), table.request_state(row).known_ids
        usable = table.usable_tokens(row)
        self._keys[row] = ids, usable - usable % self._page_size
        if table.prefix_group[row] == NO_GROUP and len(ids) >= self._group_tokens:
            name = (request.namespace, ids[: self._group_tokens].tobytes())
            table.prefix_group[row] = self._groups.take(name)
        self._stand(row, self._tree.match(NO_PAGE, request.namespace).node)

    def remove(self, row: int) -> None:
        """`row` waits no longer."""
        place = self._places.pop(row, None)
        if place is None:
            return
        del self._keys[row]
        branch, page = place
        _take_out(branch, page, row)
        self._lose(branch, 1)

    def forget(self, row: int) -> None:
        """The request in `row` has ended."""
        self.remove(row)
        if self._table.prefix_group[row] != NO_GROUP:
            self._groups.drop(int(self._table.prefix_group[row]))
            self._table.prefix_group[row] = NO_GROUP

    # ---- base.PrefixListener ------------------------------------------------------------------------------------

    def inserted(self, parent: Any, node: Any) -> None:
        """A new leaf: rows at its parent that continue with its first page match all or a part of it."""
        above: Branch | None = parent.tag
        if above is None:
            return
        page = self._first_page(node)
        start, end, whole = parent.depth_tokens, node.depth_tokens, []
        for row in above.buckets.get(page, ()):
            ids, usable = self._keys[row]
            if end <= usable and ids[start:end].tobytes() == node.key:
                whole.append(row)
            else:
                self._table.matchable[row] = start + self._common(node.key, ids, start, usable)
        if whole:
            self._sink(above, page, whole, node)
            self._table.matchable[whole] = end

    def split(self, upper: Any, lower: Any) -> None:
        """A run was cut: rows that matched it up to the cut or further now belong to the upper half."""
        above: Branch | None = upper.parent.tag
        if above is None:
            return
        below: Branch | None = lower.tag
        if below is not None:
            upper.tag = branch = self._branch(upper)
            branch.weight = below.weight
            branch.weigh_child(below)
            above.weigh_child(branch)
        page = self._first_page(upper)
        depth = upper.depth_tokens
        bucket = list(above.buckets.get(page, ()))
        matched = self._table.matchable[bucket] if bucket else ()
        reach = [row for row, tokens in zip(bucket, matched, strict=True) if tokens >= depth]
        if reach:
            self._sink(above, page, reach, upper)

    def evicted(self, node: Any) -> None:
        """A leaf was evicted: rows that belonged to it, or matched a part of it, belong to its parent."""
        above: Branch | None = node.parent.tag
        if above is None:
            return
        page, depth = self._first_page(node), node.parent.depth_tokens
        branch: Branch | None = node.tag
        if branch is not None:
            bucket = above.buckets.setdefault(page, {})
            for row in branch.rows():
                bucket[row] = None
                self._places[row] = above, page
            above.own += branch.own
            branch.entry = node.tag = None
        rows = list(above.buckets.get(page, ()))
        self._table.matchable[rows] = depth
        self._table.branch[rows] = above.birth

    # ---- moves -------------------------------------------------------------------------------------------------

    def _stand(self, row: int, node: Any) -> None:
        """Put `row` at the deepest node that it matches, from `node` downwards."""
        ids, usable = self._keys[row]
        size = self._page_size
        start, matched, page = node.depth_tokens, 0, NO_PAGE
        while start < usable:
            page = ids[start : start + size].tobytes()
            child = node.children.get(page)
            if child is None:
                break
            if child.depth_tokens > usable or ids[start : child.depth_tokens].tobytes() != child.key:
                matched = self._common(child.key, ids, start, usable)
                break
            node, page = child, NO_PAGE
            start = node.depth_tokens
        self._gain(node)
        branch: Branch = node.tag
        branch.buckets.setdefault(page, {})[row] = None
        branch.own += 1
        self._places[row] = branch, page
        self._table.branch[row] = branch.birth
        self._table.matchable[row] = start + matched

    def _sink(self, above: Branch, page: bytes, rows: list[int], node: Any) -> None:
        """Move `rows` from a bucket of `above` to `node`, a child of its node."""
        branch: Branch | None = node.tag
        if branch is None:
            branch = node.tag = self._branch(node)
        size, depth = self._page_size, node.depth_tokens
        old = above.buckets[page]
        for row in rows:
            ids, usable = self._keys[row]
            following = ids[depth : depth + size].tobytes() if depth < usable else NO_PAGE
            del old[row]
            branch.buckets.setdefault(following, {})[row] = None
            self._places[row] = branch, following
        if not old:
            del above.buckets[page]
        self._table.branch[rows] = branch.birth
        above.own -= len(rows)
        branch.own += len(rows)
        branch.weight += len(rows)
        above.weigh_child(branch)

    def _gain(self, node: Any) -> None:
        """Add one row at `node`: the weight of it and of all branches above grows by one."""
        while True:
            branch: Branch | None = node.tag
            if branch is None:
                branch = node.tag = self._branch(node)
            branch.weight += 1
            if node.parent is None:
                break
            parent = node.parent
            if parent.tag is None:
                parent.tag = self._branch(parent)
            parent.tag.weigh_child(branch)
            node = parent
        self.forest.weight += 1
        self.forest.weigh_child(branch)

    def _lose(self, branch: Branch, rows: int) -> None:
        """Remove `rows` rows at `branch`: the weight of it and of all above falls; a branch of weight 0 is dropped."""
        while True:
            node = branch.node
            parent: Branch = self.forest if node.parent is None else node.parent.tag
            branch.weight -= rows
            if branch.weight:
                parent.weigh_child(branch)
            else:
                branch.entry = node.tag = None
            if node.parent is None:
                break
            branch = parent
        self.forest.weight -= rows

    def _branch(self, node: Any) -> Branch:
        self._births += 1
        return Branch(node, self._births)

    def _first_page(self, node: Any) -> bytes:
        page: bytes = node.key[: self._page_size * TOKEN_BYTES]
        return page

    def _common(self, run: bytes, ids: Int32Array, start: int, usable: int) -> int:
        """Tokens that `run` and `ids[start:usable]` have in common at their front, in whole pages."""
        theirs = np.frombuffer(run, np.int32)[: usable - start]
        differ = theirs != ids[start : start + len(theirs)]
        first = int(differ.argmax())
        common = first if differ[first] else len(theirs)
        return common - common % self._page_size


def _take_out(branch: Branch, page: bytes, row: int) -> None:
    bucket = branch.buckets[page]
    del bucket[row]
    if not bucket:
        del branch.buckets[page]
    branch.own -= 1
