"""KV of the ranks of a machine in memory that rank 0 maps too, so that it can be stored and moved as KV of one process.

A page's KV is the pieces of all ranks, one rank after the other. Rank 0 copies them without synchronizing with the
other ranks: it copies only pages that no plan is computing, and when rank 0 has finished a step the others have too,
as they take part in its last sum or send its input.
"""

import mmap
import os
import tempfile
from collections.abc import Callable

import msgspec
import numpy as np
import torch

from tokenyard.base import Int32Array, Int64Array, KvPieces
from tokenyard.executor.kv_pool import KvPool

PoolMemory = Callable[[int], torch.Tensor]
"""Makes the memory of a KV pool: uint8[bytes]."""


class KvLayout(msgspec.Struct):
    """Where the KV of pages lies in a rank's memory, in bytes.

    offsets: where the pieces of the first page begin.
    stride: the distance from a page's piece to that of the next page.
    nbytes: the size of a piece.
    """

    offsets: list[int]
    stride: int
    nbytes: int


def create_memory() -> int:
    """Create anonymous memory of size 0; returns the descriptor by which other processes open it."""
    if hasattr(os, "memfd_create"):
        # A container's /dev/shm is often too small for a pool.
        return os.memfd_create("tokenyard-kv")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def pool_memory(fd: int) -> PoolMemory:
    """Return a function that allocates a pool in the memory behind a descriptor."""

    def make(nbytes: int) -> torch.Tensor:
        os.ftruncate(fd, nbytes)
        return torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)

    return make


def layout_of(pool: KvPool) -> KvLayout:
    """Return where the KV of pages lies in a pool."""
    found = pool.pieces(np.arange(2, dtype=np.int32))
    offsets = found.addresses[0] - pool.tensor.data_ptr()
    return KvLayout(offsets.tolist(), int(found.addresses[1, 0] - found.addresses[0, 0]), found.nbytes)


class MappedKv:
    """The KV of another rank, as rank 0 sees it."""

    def __init__(self, fd: int, layout: KvLayout) -> None:
        """Map the memory behind a descriptor, which may be closed afterwards."""
        self._memory = np.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size), np.uint8)
        self._origins = self._memory.ctypes.data + np.array(layout.offsets, np.int64)
        self._stride, self.nbytes = layout.stride, layout.nbytes

    def addresses(self, pages: Int32Array) -> Int64Array:
        """Return the addresses of the pieces of pages in this process: int64[pages, pieces]."""
        return self._origins + pages.astype(np.int64)[:, None] * self._stride


def pieces_of_all_ranks(own: KvPieces, others: list[MappedKv], pages: Int32Array, *, own_last: bool) -> KvPieces:
    """The pieces of all ranks' KV as those of one pool. own_last: whether rank 0's come behind the others'."""
    parts = [own.addresses, *(other.addresses(pages) for other in others)]
    if own_last:
        parts = [*parts[1:], parts[0]]
    return KvPieces(np.concatenate(parts, axis=1), own.nbytes, own.device)
