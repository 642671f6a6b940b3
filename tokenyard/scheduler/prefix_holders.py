"""Which rows hold which parts of the prefix tree, to account for KV that several rows share.

A row holds the path from the root to the node that it has locked. Each node on it counts its rows, so a row that takes,
extends or gives up its prefix costs the length of that path, and no step walks the tree. The index is active only
while a headroom or a tenant's share needs it.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from typing_extensions import override

from tokenyard.base import Int64Array, PrefixListener
from tokenyard.cache.radix_cache import RadixCache
from tokenyard.policy.views import TenantPrefixes
from tokenyard.scheduler.request_table import RequestTable


class NodeUse:
    """The rows that hold one node: their count, the sum of their row numbers, and their count by tenant.

    If one row is left, the sum is that row.
    """

    __slots__ = ("rows", "sum", "tenants")

    def __init__(self, rows: int = 0, total: int = 0, tenants: dict[int, int] | None = None) -> None:
        self.rows, self.sum = rows, total
        self.tenants = {} if tenants is None else tenants


class PrefixHolders(TenantPrefixes, PrefixListener):
    """Keeps the column `shared` of the table, and the tokens of the tree that each tenant's rows hold."""

    def __init__(self, table: RequestTable, tree: RadixCache) -> None:
        self._table = table
        self._page_size = tree.page_size
        self._uses: dict[Any, NodeUse] = {}
        self._nodes: dict[int, Any] = {}
        self._held = np.zeros(0, np.int64)
        tree.listeners.append(self)

    def hold(self, row: int, node: Any) -> None:
        """`row` holds the prefix up to `node`, at or below the node that it held before."""
        table, tenant = self._table, int(self._table.tenant[row])
        if tenant >= len(self._held):
            self._held = np.concatenate((self._held, np.zeros(tenant + 1 - len(self._held), np.int64)))
        above, self._nodes[row] = self._nodes.get(row), node
        while node is not above and node.parent is not None:
            use, tokens = self._uses.setdefault(node, NodeUse()), len(node.pages) * self._page_size
            if use.rows == 1:
                table.shared[use.sum] += tokens
            if use.rows:
                table.shared[row] += tokens
            use.rows += 1
            use.sum += row
            of_tenant = use.tenants.get(tenant, 0)
            use.tenants[tenant] = of_tenant + 1
            self._held[tenant] += 0 if of_tenant else tokens
            node = node.parent

    def release(self, row: int) -> None:
        """`row` no longer holds a prefix."""
        table, tenant, node = self._table, int(self._table.tenant[row]), self._nodes.pop(row, None)
        table.shared[row] = 0
        while node is not None and node.parent is not None:
            use, tokens = self._uses[node], len(node.pages) * self._page_size
            use.rows -= 1
            use.sum -= row
            if use.rows == 1:
                table.shared[use.sum] -= tokens
            use.tenants[tenant] -= 1
            if not use.tenants[tenant]:
                del use.tenants[tenant]
                self._held[tenant] -= tokens
            if not use.rows:
                del self._uses[node]
            node = node.parent

    @override
    def held(self, tenants: int) -> Int64Array:
        held = np.zeros(tenants, np.int64)
        known = min(tenants, len(self._held))
        held[:known] = self._held[:known]
        return held

    @override
    def leaving(self) -> Callable[[int], int]:
        gone: dict[Any, dict[int, int]] = {}

        def leave(row: int) -> int:
            tenant, node, tokens = int(self._table.tenant[row]), self._nodes.get(row), 0
            while node is not None and node.parent is not None:
                left = gone.setdefault(node, {})
                left[tenant] = left.get(tenant, 0) + 1
                if left[tenant] == self._uses[node].tenants[tenant]:
                    tokens += len(node.pages) * self._page_size
                node = node.parent
            return tokens

        return leave

    @override
    def inserted(self, parent: Any, node: Any) -> None:
        pass

    @override
    def split(self, upper: Any, lower: Any) -> None:
        use = self._uses.get(lower)
        if use is not None:
            self._uses[upper] = NodeUse(use.rows, use.sum, dict(use.tenants))

    @override
    def evicted(self, node: Any) -> None:
        pass
