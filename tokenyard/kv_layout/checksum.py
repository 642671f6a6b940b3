"""A checksum over KV in memory."""

import zlib

import numpy as np
import numpy.typing as npt

from tokenyard.base import Int64Array
from tokenyard.kv_layout.layout import memory

MAX_GATHERED_WORDS = 128
"""Pieces of up to this many words are gathered and summed in one call."""

UInt64Array = npt.NDArray[np.uint64]


class Checksum:
    """A 64-bit checksum over pieces of `piece_bytes` (after Fletcher 1982).

    It sums the words of each piece, and then these sums, each times its own odd number. The order of the pieces
    matters, their addresses do not. It detects any single flipped bit; it does not detect deliberate changes.
    """

    def __init__(self, piece_bytes: int) -> None:
        self.value = 0
        self._piece_bytes = piece_bytes
        self._pieces = 0

    def add(self, segments: Int64Array) -> None:
        """Add segments of this process's memory (int64[n, 2]), each of whole pieces."""
        sums = self._sums(segments) if len(segments) else np.empty(0, np.uint64)
        weights = 2 * np.arange(self._pieces, self._pieces + len(sums), dtype=np.uint64) + np.uint64(1)
        self._pieces += len(sums)
        self.value = (self.value + int((sums * weights).sum(dtype=np.uint64))) % 2**64

    def _sums(self, segments: Int64Array) -> UInt64Array:
        """The sum of each piece, uint64[n]."""
        addresses, lengths, size = segments[:, 0], segments[:, 1], self._piece_bytes
        base = int(addresses.min())
        end = int((addresses + lengths).max())
        if size % 8 or (addresses % 8).any():
            data = memory(base, end - base, "|u1")
            places = [at - base + done for at, length in segments.tolist() for done in range(0, length, size)]
            return np.array([zlib.crc32(data[place : place + size].tobytes()) for place in places], np.uint64)
        words, flat = size // 8, memory(base, (end - base) // 8, "<u8")
        firsts = (addresses - base) // 8
        if words <= MAX_GATHERED_WORDS and (lengths == size).all():
            gathered: UInt64Array = flat[firsts[:, None] + np.arange(words)].sum(axis=1, dtype=np.uint64)
            return gathered
        ends = firsts + lengths // 8
        parts = [flat[i:j].reshape(-1, words) for i, j in zip(firsts.tolist(), ends.tolist(), strict=True)]
        return np.concatenate([part.sum(axis=1, dtype=np.uint64) for part in parts])
