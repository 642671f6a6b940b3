"""The current prefix hit of each waiting row, updated as the tree changes, without matching again.

SGLang's `SchedulePolicy` matches the waiting queue against the tree in every step instead.

A waiting row belongs to the deepest tree node that it matches in full, in a bucket named by its next page of tokens. A
new leaf affects only the bucket of its first page, a split only the bucket of the run that was cut, an eviction only
the rows at the evicted leaf. So no change moves all rows that share a system prompt, except the one that inserts the
end of this prompt. Policies read two things from it: the column `matchable`, and for dfs-weight the number of waiting
rows in each part of the tree.

What the tree has of a row is its column `in_tree`. `matchable` is what is usable of that (`KvMemory.usable`), which may
change while the tree does not, as window pages come and go. Such a change affects rows below the page's node, but none
behind a node whose own answer stays the same and behind which no row needs the page.
"""

import heapq
from collections.abc import Iterator
from typing import Any

import numpy as np

from tokenyard.base import Int32Array
from tokenyard.scheduler.memory import KvMemory
from tokenyard.scheduler.request_table import NO_GROUP, Interner, RequestTable

TOKEN_BYTES = 4
NO_PAGE = b""
_MIN_STALE = 64
_FEW_CHILDREN = 8


class Branch:
    """A tree node with waiting rows at it or below it; the node's `tag`. See `policy.PrefixBranch` for its readers.

    buckets: rows that belong here, by their next page (NO_PAGE: nothing left to match).
    weight: number of rows here and below.
    heap: (-weight, birth, child) for each child, and stale entries, which are no longer their child's `entry`.
    most: the length of `heap` beyond which stale entries are dropped.
    usable: how many of the node's tokens, from the root on, are usable.
    """

    __slots__ = ("birth", "buckets", "entry", "heap", "most", "node", "own", "usable", "weight")

    def __init__(self, node: Any, birth: int, usable: int = 0) -> None:
        self.node = node
        self.birth = birth
        self.usable = usable
        self.buckets: dict[bytes, dict[int, None]] = {}
        self.own = 0
        self.weight = 0
        self.heap: list[tuple[int, int, Branch]] = []
        self.entry: tuple[int, int, Branch] | None = None
        self.most = _MIN_STALE

    def heaviest_first(self) -> "Iterator[Branch]":
        """Children by descending weight, ties by age. Lazy: O(log n) per child when there are many."""
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

    def children(self) -> "list[Branch]":
        """The branches directly below, in no particular order."""
        return [entry[2] for entry in self.heap if entry[2].entry is entry]

    def weigh_child(self, child: "Branch") -> None:
        """Update the heap entry of a child after a change of its weight."""
        child.entry = (-child.weight, child.birth, child)
        heapq.heappush(self.heap, child.entry)
        if len(self.heap) > self.most:
            self.heap = [entry for entry in self.heap if entry[2].entry is entry]
            heapq.heapify(self.heap)
            self.most = 2 * len(self.heap) + _MIN_STALE


class WaitingIndex:
    """Keeps `in_tree`, `matchable`, `branch` and `prefix_group` of waiting rows while it is `active`; a
    `base.UsableListener`.

    The state reports rows that start and stop waiting, the tree reports its changes. `forest` is above the roots of all
    namespaces. Rows of one `prefix_group` share their first `group_tokens` tokens and their namespace.
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
        self._memory = memory
        self._tree = memory.tree
        self._page_size = memory.page_size
        # The node of each page; kept only where changes of what is usable name pages.
        self._nodes = np.full(0 if memory.all_usable else memory.num_pages + 1, None, object)
        for node in self._tree.nodes():
            self._set_node(node.pages, node)
        memory.watch(self)
        for row in waiting:
            self.add(row)

    def deactivate(self) -> None:
        """Stop watching the tree and drop all rows."""
        if not self.active:
            return
        for row in list(self._places):
            self.remove(row)
            self._table.matchable[row] = 0
        self._memory.unwatch(self)
        self._groups = Interner()
        self._table.prefix_group[:] = NO_GROUP
        self.active = False

    # ---- waiting rows ------------------------------------------------------------------------------------------

    def add(self, row: int) -> None:
        """`row` starts to wait, for the first time or again."""
        if not self.active:
            self._table.matchable[row] = 0
            return
        table = self._table
        request, ids = table.request(row), table.request_state(row).known_ids
        usable = table.usable_tokens(row)
        self._keys[row] = ids, usable - usable % self._page_size
        if table.prefix_group[row] == NO_GROUP and len(ids) >= self._group_tokens:
            name = (request.namespace, ids[: self._group_tokens].tobytes())
            table.prefix_group[row] = self._groups.take(name)
        self._place_row(row, self._tree.match(NO_PAGE, request.namespace).node)

    def remove(self, row: int) -> None:
        """`row` stops waiting."""
        place = self._places.pop(row, None)
        if place is None:
            return
        del self._keys[row]
        branch, page = place
        _take_out(branch, page, row)
        self._remove_weight(branch, 1)

    def forget(self, row: int) -> None:
        """The request in `row` has ended."""
        self.remove(row)
        if self._table.prefix_group[row] != NO_GROUP:
            self._groups.release(int(self._table.prefix_group[row]))
            self._table.prefix_group[row] = NO_GROUP

    # ---- base.UsableListener ------------------------------------------------------------------------------------

    def inserted(self, parent: Any, node: Any) -> None:
        """A new leaf: rows at its parent that continue with its first page match all or a part of it."""
        self._set_node(node.pages, node)
        above: Branch | None = parent.tag
        if above is None:
            return
        page = self._first_page(node)
        start, end, whole, part = parent.depth_tokens, node.depth_tokens, [], []
        for row in above.buckets.get(page, ()):
            ids, usable = self._keys[row]
            if end <= usable and ids[start:end].tobytes() == node.key:
                whole.append(row)
            else:
                part.append(row)
                self._table.in_tree[row] = start + self._common(node.key, ids, start, usable)
        self._update_in(node, part)
        if whole:
            self._move_down(above, page, whole, node)
            self._table.in_tree[whole] = end
            self._table.matchable[whole] = node.tag.usable

    def split(self, upper: Any, lower: Any) -> None:
        """A run was cut: rows that matched it up to the cut or further now belong to the upper half."""
        self._set_node(upper.pages, upper)
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
        matched = self._table.in_tree[bucket] if bucket else ()
        reach = [row for row, tokens in zip(bucket, matched, strict=True) if tokens >= depth]
        if reach:
            self._move_down(above, page, reach, upper)

    def evicted(self, node: Any) -> None:
        """A leaf was evicted: rows that belonged to it, or matched a part of it, belong to its parent."""
        self._set_node(node.pages, None)
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
        self._table.in_tree[rows] = depth
        self._table.matchable[rows] = above.usable
        self._table.branch[rows] = above.birth

    def usable_changed(self, pages: Int32Array) -> None:
        """Rows that match these pages may begin behind more or less of what they match."""
        for node in dict.fromkeys(self._nodes[pages].tolist()):
            above: Branch | None = None if node is None else node.parent.tag
            if above is None:
                continue
            first = node.parent.depth_tokens // self._page_size
            last = first + int(np.flatnonzero(np.isin(node.pages, pages))[-1])
            self._update_in(node, list(above.buckets.get(self._first_page(node), ())))
            if node.tag is not None:
                self._update_below(node.tag, last)

    # ---- what is usable ------------------------------------------------------------------------------------------

    def _update_in(self, node: Any, rows: list[int]) -> None:
        """Update `matchable` of those of `rows`, which belong to the parent of `node`, that match a part of its run."""
        table = self._table
        inside = np.array([row for row in rows if table.in_tree[row] > node.parent.depth_tokens], np.int32)
        if self._memory.all_usable:
            table.matchable[inside] = table.in_tree[inside]
            return
        matched = table.in_tree[inside]
        for tokens in np.unique(matched).tolist():
            table.matchable[inside[matched == tokens]] = self._memory.usable(node, tokens)

    def _update_below(self, top: Branch, last: int) -> None:
        """Update `matchable` of rows at `top` and below, after a change at the page with the index `last` or before."""
        stack = [top]
        while stack:
            branch = stack.pop()
            node = branch.node
            usable = self._memory.usable(node, node.depth_tokens)
            if usable == branch.usable and last < self._memory.needed_from(node.depth_tokens):
                continue
            branch.usable = usable
            for page, bucket in branch.buckets.items():
                rows = list(bucket)
                exact = self._table.in_tree[rows] == node.depth_tokens
                self._table.matchable[np.array(rows)[exact]] = usable
                if not exact.all():
                    self._update_in(node.children[page], rows)
            stack += branch.children()

    def _set_node(self, pages: Int32Array, node: Any) -> None:
        if len(self._nodes):
            self._nodes[pages] = node

    # ---- moves -------------------------------------------------------------------------------------------------

    def _place_row(self, row: int, node: Any) -> None:
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
        self._add_weight(node)
        branch: Branch = node.tag
        branch.buckets.setdefault(page, {})[row] = None
        branch.own += 1
        self._places[row] = branch, page
        self._table.branch[row] = branch.birth
        self._table.in_tree[row] = start + matched
        self._table.matchable[row] = branch.usable
        if matched:
            self._update_in(node.children[page], [row])

    def _move_down(self, above: Branch, page: bytes, rows: list[int], node: Any) -> None:
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

    def _add_weight(self, node: Any) -> None:
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

    def _remove_weight(self, branch: Branch, rows: int) -> None:
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
        return Branch(node, self._births, self._memory.usable(node, node.depth_tokens))

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
