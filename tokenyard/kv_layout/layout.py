"""The addresses of the KV of pages, and the segments of memory that a copy between two engines covers."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenyard.base import ConfigError, Int32Array, Int64Array, KvPieces

IOV_MAX = 1024
"""Most segments in one vectored read or write on Linux."""


@dataclass(frozen=True, slots=True)
class PageMap:
    """The addresses of all pages: piece k of page p is at `origins[k] + p * strides[k]`.

    origins, strides: int64[pieces per page], bytes.
    nbytes: bytes per piece.
    """

    origins: Int64Array
    strides: Int64Array
    nbytes: int

    @property
    def page_bytes(self) -> int:
        """Bytes of the KV of one page."""
        return len(self.origins) * self.nbytes


def map_pages(pieces: Callable[[Int32Array], KvPieces]) -> PageMap:
    """The addresses of an executor's pages. Raises ConfigError if they are not in this process's memory or not evenly
    spaced.
    """
    found = pieces(np.arange(3, dtype=np.int32))
    if found.device != "cpu":
        raise ConfigError(f"KV transfer needs the KV pool in host memory; this one is on {found.device}")
    origins, strides = found.addresses[0].copy(), found.addresses[1] - found.addresses[0]
    if not np.array_equal(found.addresses[2], origins + 2 * strides):
        raise ConfigError("KV transfer needs pages that are evenly spaced in memory")
    return PageMap(origins, strides, found.nbytes)


def spans(pages_of: PageMap, pages: Int32Array, starts: Int32Array | None = None) -> Int64Array:
    """The segments of memory of `pages` (int32[m]) as int64[n, 2] (address, length): all pages of the first piece in
    order, then those of the second, and so on.

    Pages that are contiguous in memory form one segment. `starts` (see `runs`) limits the segments, for two sides that
    need the same ones.
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
    """The starts (int32[n]) of runs in which each of `pages` (int32[m] each) increases by one."""
    breaks = np.zeros(len(pages[0]), bool)
    breaks[0] = True
    for column in pages:
        breaks[1:] |= np.diff(column) != 1
    return np.flatnonzero(breaks).astype(np.int32)


def total_bytes(segments: Int64Array) -> int:
    """Total bytes of all segments."""
    return int(segments[:, 1].sum())


def skip_bytes(segments: Int64Array, done: int) -> Int64Array:
    """The rest of segments (int64[n, 2]) after their first `done` bytes."""
    ends = np.cumsum(segments[:, 1])
    first = int(np.searchsorted(ends, done, side="right"))
    left = segments[first:].copy()
    if len(left):
        inside = done - int(ends[first] - segments[first, 1])
        left[0] += (inside, -inside)
    return left


class _MemoryView:
    """A range of memory with numpy's array interface."""

    def __init__(self, address: int, shape: tuple[int, ...], kind: str, strides: tuple[int, ...] | None) -> None:
        writable = strides is not None
        self.__array_interface__ = {
            "data": (address, not writable),
            "shape": shape,
            "typestr": kind,
            "strides": strides,
            "version": 3,
        }


def memory(address: int, length: int, kind: str) -> npt.NDArray[Any]:
    """A read-only view of this process's memory: `length` numbers of numpy type `kind`."""
    return np.asarray(_MemoryView(address, (length,), kind, None))


class PoolView:
    """All pages of a KV pool in this process's memory, to gather blocks from and to scatter them into.

    A block is the KV of consecutive tokens, piece after piece (layer and keys or values), each with all its tokens in
    order. Its bytes do not depend on the page size. A pool may consist of several memory regions. Raises ConfigError
    if pages are not contiguous.
    """

    def __init__(self, pages: PageMap, num_pages: int) -> None:
        if (pages.strides != pages.nbytes).any():
            raise ConfigError("a hierarchical cache needs a KV pool whose pages follow each other in memory")
        self.page_bytes = pages.page_bytes
        self._pieces = len(pages.origins)
        self._kind = f"|V{pages.nbytes}"
        self._pools: list[tuple[slice, npt.NDArray[Any]]] = []
        """Groups of evenly spaced pieces: the slice of their indices, and an array [pieces, pages]."""
        for some in _evenly_spaced(pages.origins):
            origins = pages.origins[some]
            step = int(origins[1] - origins[0]) if len(origins) > 1 else pages.nbytes
            shape, strides = (len(origins), num_pages + 1), (step, pages.nbytes)
            self._pools.append((some, np.asarray(_MemoryView(int(origins[0]), shape, self._kind, strides))))

    def gather(self, pages: Int32Array, block: npt.NDArray[np.uint8]) -> None:
        """Copy `pages` (int32[n]) into `block` (uint8[n * page_bytes])."""
        if not self._pieces:
            return
        target = self._shaped(block, len(pages))
        for some, pool in self._pools:
            # Mode clip writes directly to `out`; no page is out of bounds.
            np.take(pool, pages, axis=1, out=target[some], mode="clip")

    def scatter(self, block: npt.NDArray[np.uint8], pages_in_block: int, first: int, pages: Int32Array) -> None:
        """Copy pages `first`, `first + 1`, ... of a block of `pages_in_block` into `pages` (int32[n])."""
        if not self._pieces or not len(pages):
            return
        source = self._shaped(block, pages_in_block)[:, first : first + len(pages)]
        starts = runs(pages)
        for some, pool in self._pools:
            if 4 * len(starts) > len(pages):
                pool[:, pages] = source[some]
                continue
            for start, end in zip(starts.tolist(), [*starts[1:].tolist(), len(pages)], strict=True):
                page = int(pages[start])
                pool[:, page : page + end - start] = source[some, start:end]

    def _shaped(self, block: npt.NDArray[np.uint8], pages: int) -> npt.NDArray[Any]:
        size = self.page_bytes * pages
        return block[:size].view(self._kind).reshape(self._pieces, pages)


class StateView:
    """The slots of recurrent states in this process's memory, whose bytes are copied out and in; see
    `base.StateSlots`.
    """

    def __init__(self, slots: PageMap) -> None:
        """slots: where the slots lie; each is a page of this map."""
        self.slot_bytes = slots.page_bytes
        breaks = np.flatnonzero(np.diff(slots.origins) != slots.nbytes) + 1
        cuts = [0, *breaks.tolist(), len(slots.origins)]
        # Pieces that follow each other in memory are copied together.
        self._pieces = [
            (int(slots.origins[first]), int(slots.strides[first]), (end - first) * slots.nbytes)
            for first, end in itertools.pairwise(cuts)
            if end > first
        ]

    def read(self, slot: int, content: npt.NDArray[np.uint8]) -> None:
        """Copy the states in a slot into `content` (uint8[at least slot_bytes])."""
        begin = 0
        for run in self._memory(slot):
            content[begin : begin + len(run)] = run
            begin += len(run)

    def write(self, slot: int, content: npt.NDArray[np.uint8]) -> None:
        """Set the states in a slot from the bytes that `read` gave."""
        begin = 0
        for run in self._memory(slot):
            run[:] = content[begin : begin + len(run)]
            begin += len(run)

    def _memory(self, slot: int) -> Iterator[npt.NDArray[np.uint8]]:
        for origin, stride, length in self._pieces:
            yield np.asarray(_MemoryView(origin + slot * stride, (length,), "|u1", (1,)))


def _evenly_spaced(origins: Int64Array) -> list[slice]:
    """Split int64[pieces] into slices of evenly spaced origins."""
    steps, cuts = np.diff(origins), [0]
    for place in range(2, len(origins)):
        if steps[place - 1] != steps[place - 2] and cuts[-1] < place - 1:
            cuts.append(place)
    return [slice(first, end) for first, end in zip(cuts, [*cuts[1:], len(origins)], strict=True) if first < end]
