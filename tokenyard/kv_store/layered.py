"""Two stores as one: a fast one in host memory above one that holds more, or that others share."""

import threading
from collections.abc import Callable

from tokenyard.kv_store.store import Block, BlockStore, MemoryStore, StoreCounters, block_buffer


class LayeredStore:
    """Blocks in `upper`, and all that was ever put in `lower`, as far as there is room. See `store.BlockStore`.

    What is found in `lower` only is copied to `upper`, so that the next reader finds it there.
    """

    def __init__(self, upper: MemoryStore, lower: BlockStore, block_bytes: int) -> None:
        self._upper = upper
        self._lower = lower
        self._block_bytes = block_bytes
        self._buffers = threading.local()

    @property
    def counters(self) -> StoreCounters:
        """Those of the lower store."""
        return self._lower.counters

    @property
    def blocks(self) -> int:
        """How many blocks the lower store has, or the upper one if it has more."""
        return max(self._upper.blocks, self._lower.blocks)

    @property
    def stored_bytes(self) -> int:
        """How many bytes they take in the lower store."""
        return self._lower.stored_bytes

    def count_stored(self, digests: list[bytes]) -> int:
        """How many of `digests`, from the first on, are there without a gap."""
        return self._count(digests, self._lower.count_stored)

    def count_maybe_stored(self, digests: list[bytes]) -> int:
        """How many of `digests`, from the first on, may be there, without asking outside of this process."""
        return self._count(digests, self._lower.count_maybe_stored)

    def touch(self, digests: list[bytes]) -> None:
        """The blocks of a prompt, in order, were used: the first one stays longest."""
        self._upper.touch(digests)
        self._lower.touch(digests)

    def put(self, digest: bytes, block: Block) -> bool:
        """Keep a block in both; False if the lower one had it. Raises what the lower one raises."""
        self._upper.put(digest, block)
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
        """Bring a block to the upper store, and wait for it; False if it is in neither."""
        if self._upper.prefetch(digest):
            return True
        if not hasattr(self._buffers, "block"):
            self._buffers.block = block_buffer(self._block_bytes)
        return self.get(digest, self._buffers.block)

    def clear(self) -> None:
        """Forget all blocks."""
        self._upper.clear()
        self._lower.clear()

    def close(self) -> None:
        """Give back what is open."""
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
