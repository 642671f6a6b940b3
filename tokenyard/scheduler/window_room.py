"""Room for newcomers in the layers with a window: what a row takes there is bounded, however long it gets."""

import numpy as np

from tokenyard.cache.windows import WindowPages
from tokenyard.policy import Views
from tokenyard.scheduler.scheduler_state import SchedulerState


class WindowBudget:
    """How many window tokens a newcomer lacks beside what is reserved, and what victims would give."""

    def __init__(self, state: SchedulerState, windows: WindowPages) -> None:
        self._table, self._memory, self._windows = state.table, state.memory, windows
        chunk = state.settings.chunked_prefill_size
        chunk = min(chunk, windows.max_chunk_tokens) if chunk > 0 else windows.max_chunk_tokens
        self._max_chunk_tokens = windows.max_retained_tokens + chunk + 2 * windows.page_size

    def missing(self, hit: int, further: int, views: Views, chunk_rows: list[int], reserved: int) -> int:
        """Tokens of windows that a row lacks which begins behind `hit` tokens and grows by `further`.

        reserved: tokens that the admitted rows, those of `chunk_rows` among them, are expected to grow by.
        """
        seen = hit - self._windows.window_start_page(hit) * self._windows.page_size
        rows = np.unique(np.concatenate((views.running, views.prefilling, np.array(chunk_rows, np.int32))))
        held = self._table.held[rows] - self._table.verifying[rows]
        growing = int(np.maximum(self._max_chunk_tokens - held, 0).sum())
        need = min(seen + further, self._max_chunk_tokens) - seen
        return need - (self._memory.free_window_tokens - min(reserved, growing))

    def gained(self, victims: list[int]) -> int:
        """Tokens of windows that become free or evictable if all `victims` leave, which no two of them count twice."""
        table, windows, pages, shared = self._table, self._windows, 0, [np.empty(0, np.int32)]
        for row in victims:
            pool_row, cached = int(table.pool_row[row]), int(table.cached[row]) // windows.page_size
            tokens = int(table.held[row] - table.verifying[row])
            held = self._memory.pool.page_table[pool_row, : self._memory.pages_for(tokens)]
            pages += int(np.count_nonzero(windows.of[held[cached:]]))
            shared.append(held[int(windows.first[pool_row]) : cached])
        ids, counts = np.unique(np.concatenate(shared), return_counts=True)
        return windows.page_size * (pages + int(np.count_nonzero(windows.users[ids] == counts)))
