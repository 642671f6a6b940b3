"""The token ids that end each running row, as one matrix, so that a step checks all rows at once."""

import numpy as np

from tokenyard.base import BoolArray, Int32Array

NO_TOKEN = -1


class StopTokens:
    """Stop token ids by pool row, padded with NO_TOKEN; as wide as the longest list seen."""

    def __init__(self, pool_rows: int) -> None:
        self._ids = np.full((pool_rows, 4), NO_TOKEN, np.int32)

    def write(self, pool_row: int, token_ids: set[int]) -> None:
        """Set what ends `pool_row` from now on."""
        missing = len(token_ids) - self._ids.shape[1]
        if missing > 0:
            self._ids = np.pad(self._ids, ((0, 0), (0, missing)), constant_values=NO_TOKEN)
        self._ids[pool_row] = NO_TOKEN
        self._ids[pool_row, : len(token_ids)] = sorted(token_ids)

    def hit(self, pool_rows: Int32Array, tokens: Int32Array) -> BoolArray:
        """Whether `tokens[..., i]` ends row `pool_rows[i]`; as many bools as there are tokens."""
        found: BoolArray = (self._ids[pool_rows] == tokens[..., None]).any(axis=-1)
        return found
