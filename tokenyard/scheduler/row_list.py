"""An ordered list of rows as one numpy array; it changes mostly at the ends."""

import numpy as np

from tokenyard.base import BoolArray, Int32Array, Int64Array


class RowList:
    """An ordered list of table rows. `rows` is a view; do not keep it over a change."""

    def __init__(self) -> None:
        self._buffer: Int32Array = np.empty(64, np.int32)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def rows(self) -> Int32Array:
        """int32[len(self)], in order."""
        return self._buffer[: self._length]

    def append(self, row: int) -> None:
        """Put a row at the end, in O(1) on average."""
        if self._length == len(self._buffer):
            self._buffer = np.concatenate((self._buffer, np.empty_like(self._buffer)))
        self._buffer[self._length] = row
        self._length += 1

    def insert_by(self, row: int, keys: Int64Array) -> None:
        """Put a row where `keys[row]` belongs among the keys of the others, which ascend. O(len)."""
        place = int(np.searchsorted(keys[self.rows], keys[row]))
        self.append(row)
        self._buffer[place + 1 : self._length] = self._buffer[place : self._length - 1].copy()
        self._buffer[place] = row

    def keep(self, mask: BoolArray) -> None:
        """Keep only the rows where `mask` (bool[len(self)]) holds."""
        kept = self.rows[mask]
        self._buffer[: len(kept)] = kept
        self._length = len(kept)

    def clear(self) -> None:
        """Remove all rows."""
        self._length = 0
