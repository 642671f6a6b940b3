"""Where the KV of pages lies in memory, and how the pages of two engines are lined up for a copy."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tokenyard.base import ConfigError, Int32Array, Int64Array, KvPieces

IOV_MAX = 1024
"""Most pieces in one call of Linux's vectored reads and writes."""


@dataclass(frozen=True, slots=True)
class PageMap:
    """The addresses of all pages: piece k of page p lies at `origins[k] + p * strides[k]` and has `nbytes` bytes.

    origins, strides: int64[pieces of a page].
    """

    origins: Int64Array
    strides: Int64Array
    nbytes: int

    @property
    def page_bytes(self) -> int:
        """Bytes of the KV of one page."""
        return len(self.origins) * self.nbytes


def map_pages(pieces: Callable[[Int32Array], KvPieces]) -> PageMap:
    """The addresses of an executor's pages. Raises ConfigError where they are not in this process's memory or not
    evenly spaced.
    """
    found = pieces(np.arange(3, dtype=np.int32))
    if found.device != "cpu":
        raise ConfigError(f"KV transfer needs the KV pool in host memory; this one is on {found.device}")
    origins, strides = found.addresses[0].copy(), found.addresses[1] - found.addresses[0]
    if not np.array_equal(found.addresses[2], origins + 2 * strides):
        raise ConfigError("KV transfer needs pages that are evenly spaced in memory")
    return PageMap(origins, strides, found.nbytes)


def spans(pages_of: PageMap, pages: Int32Array, starts: Int32Array | None = None) -> Int64Array:
    """int64[n, 2], the address and the length of each stretch of memory that `pages` (int32[m]) lie in: all pages of
    the first piece in order, then those of the second, and so on.

    Neighbouring pages are one stretch where their memory is; `starts` (see `runs`) bounds the stretches, for two sides
    that must have the same ones.
    """
    if not len(pages) or not len(pages_of.origins):
        return np.empty((0, 2), np.int64)
    first = runs(pages) if starts is None else starts
    dense = bool((pages_of.strides == pages_of.nbytes).all())
    if not dense:
        first = np.arange(len(pages), dtype=np.int32)
    counts = np.diff(np.append(first, len(pages))).astype(np.int64)
    begins = pages[first].astype(np.int64)
    addresses = pages_of.origins[:, None] + begins * pages_of.strides[:, None]
    lengths = np.broadcast_to(counts * pages_of.nbytes, addresses.shape)
    return np.stack((addresses.ravel(), lengths.ravel()), axis=1)


def runs(*pages: Int32Array) -> Int32Array:
    """int32[n], where runs begin in which every one of `pages` (int32[m] each) counts up by one."""
    breaks = np.zeros(len(pages[0]), bool)
    breaks[0] = True
    for column in pages:
        breaks[1:] |= np.diff(column) != 1
    return np.flatnonzero(breaks).astype(np.int32)


def total_bytes(stretches: Int64Array) -> int:
    """Bytes in all stretches together."""
    return int(stretches[:, 1].sum())


def advance(stretches: Int64Array, done: int) -> Int64Array:
    """What is left of stretches (int64[n, 2]) after their first `done` bytes."""
    ends = np.cumsum(stretches[:, 1])
    first = int(np.searchsorted(ends, done, side="right"))
    left = stretches[first:].copy()
    if len(left):
        inside = done - int(ends[first] - stretches[first, 1])
        left[0] += (inside, -inside)
    return left
