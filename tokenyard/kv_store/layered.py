"""Combines two stores: a fast one in host memory, and a larger or shared one behind it."""

import threading
from collections.abc import Callable

from tokenyard.kv_store.store import Block, BlockStore, MemoryStore, StoreCounters, block_buffer


class LayeredStore:
    """Keeps blocks in `upper` and writes them to `lower`; one that is only in `lower` is copied to `upper` when read.

    See `store.BlockStore`.
    """

    def __init__(self, upper: MemoryStore, lower: BlockStore, block_bytes: int) -> None:
        self._upper = upper
        self._lower = lower
        self._block_bytes = block_bytes
        self._buffers = threading.local()

    @property
    def counters(self) -> StoreCounters:
        """The counters of the lower store."""
        return self._lower.counters

    @property
    def blocks(self) -> int:
        """How many blocks the lower store has, or the upper one if it has more."""
        return max(self._upper.blocks, self._lower.blocks)

    @property
    def stored_bytes(self) -> int:
        """Bytes that blocks take in the lower store."""
        return self._lower.stored_bytes

    def count_stored(self, digests: list[bytes]) -> int:
        """Length of the longest prefix of `digests` that is stored."""
        return self._count(digests, self._lower.count_stored)

    def count_maybe_stored(self, digests: list[bytes]) -> int:
        """Length of the longest prefix of `digests` that may be stored, as far as this process knows."""
        return self._count(digests, self._lower.count_maybe_stored)

    def find_slow(self, digests: list[bytes]) -> list[int]:
        """The places in `digests` of the blocks that are not in the upper store."""
        return [place for place, digest in enumerate(digests) if self._upper.lacks(digest)]

    def lacks(self, digest: bytes) -> bool:
        """Whether the lower store lacks a block."""
        return self._lower.lacks(digest)

    def touch(self, digests: list[bytes]) -> None:
        """Mark the blocks of a prompt (in order) as used; the first is evicted last."""
        self._upper.touch(digests)
        self._lower.touch(digests)

    @property
    def has_memory_in_front(self) -> bool:
        """Yes, the upper store."""
        return True

    def put_in_memory(self, digest: bytes, block: Block) -> None:
        """Store a block in the upper store."""
        self._upper.put(digest, block)

    def get_from_memory(self, digest: bytes, block: Block) -> bool:
        """Fill `block` from the upper store; False if it is not there."""
        return self._upper.get(digest, block)

    def put(self, digest: bytes, block: Block) -> bool:
        """Store a block in the lower store; False if it had it. Raises what that raises."""
        return self._lower.put(digest, block)

    def get(self, digest: bytes, block: Block) -> bool:
        """Fill `block` with the bytes of a block; False, and `block` undefined, if it is in neither."""
        if self._upper.get(digest, block):
            return True
        found = self._lower.get(digest, block)
        if found:
            self._upper.put(digest, block)
        return found

    def prefetch(self, digest: bytes) -> bool:
        """Copy a block to the upper store and wait for it; False if it is in neither."""
        if self._upper.prefetch(digest):
            return True
        if not hasattr(self._buffers, "block"):
            self._buffers.block = block_buffer(self._block_bytes)
        return self.get(digest, self._buffers.block)

    def clear(self) -> None:
        """Remove all blocks."""
        self._upper.clear()
        self._lower.clear()

    def close(self) -> None:
        """Close both stores."""
        self._upper.close()
        self._lower.close()

    def _count(self, digests: list[bytes], count_lower: Callable[[list[bytes]], int]) -> int:
        found = 0
        while found < len(digests):
            more = self._upper.count_stored(digests[found:])
            more += count_lower(digests[found + more :])
            if not more:
                break
            found += more
        return found
