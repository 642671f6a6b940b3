"""The tokens and the page table of admitted requests."""

import mmap

import numpy as np

from tokenyard.base import Int32Array


class OutOfRows(RuntimeError):
    """Every row of the pool is taken."""


class ReqToTokenPool:
    """One row per admitted request.

    The extra position is for the last sampled token, whose KV is never computed. A row that is allocated again still
    has the data of its last owner.

    page_table: int32[rows, ceil((context_length + 1) / page_size)], page ids in order of position.
    token_ids: int32[rows, context_length + 1], prompt and answer.
    """

    def __init__(self, rows: int, context_length: int, page_size: int) -> None:
        if rows < 1 or context_length < 1 or page_size < 1:
            raise ValueError(
                f"rows ({rows}), context_length ({context_length}) and page_size ({page_size}) must be at least 1"
            )
        self.rows = rows
        self.context_length = context_length
        self.page_size = page_size
        self.page_table = _blank(rows, -(-(context_length + 1) // page_size))
        self.token_ids = _blank(rows, context_length + 1)
        self._free: list[int] = []
        self._taken = bytearray(rows)
        self.clear()

    @property
    def available_rows(self) -> int:
        """How many rows are free."""
        return len(self._free)

    def alloc_row(self) -> int:
        """Allocate a row. Raises OutOfRows if none is free."""
        if not self._free:
            raise OutOfRows(f"all {self.rows} rows are taken; free one first")
        row = self._free.pop()
        self._taken[row] = True
        return row

    def free_row(self, row: int) -> None:
        """Free a row. Raises ValueError if it is not allocated."""
        if not (0 <= row < self.rows and self._taken[row]):
            raise ValueError(f"row {row} is not taken")
        self._taken[row] = False
        self._free.append(row)

    def clear(self) -> None:
        """Make every row free, including rows in use."""
        self._free = list(range(self.rows - 1, -1, -1))
        self._taken = bytearray(self.rows)


def _blank(rows: int, columns: int) -> Int32Array:
    """Zeros, int32[rows, columns], in memory that the operating system commits as it is written, in small pages.

    numpy's own arrays request huge pages, of which the few tokens at the start of each long row would take a whole one.
    """
    memory = mmap.mmap(-1, rows * columns * np.dtype(np.int32).itemsize)
    return np.frombuffer(memory, np.int32).reshape(rows, columns)
