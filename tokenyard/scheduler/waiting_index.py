"""What each waiting row would hit in the tree now, kept as the `matchable` column."""

from tokenyard.base import Int32Array
from tokenyard.scheduler.memory import KvMemory
from tokenyard.scheduler.table import RequestTable


class WaitingIndex:
    """Refreshes the column for policies that need the tree."""

    def __init__(self, table: RequestTable, memory: KvMemory) -> None:
        self._table = table
        self._memory = memory

    def refresh(self, rows: Int32Array) -> None:
        """Set `matchable` of waiting `rows` to what admission would find."""
        for row in rows.tolist():
            cold = self._table.cold(row)
            key = cold.known_ids[: int(self._table.known[row]) - 1].tobytes()
            self._table.matchable[row] = self._memory.tree.peek(key, cold.request.namespace)
