"""The interface of KV block stores, and a store in host memory."""

import threading
from collections import OrderedDict
from dataclasses import dataclass, fields
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from tokenyard.base import TokenyardError
from tokenyard.base.blocks import touch_all
from tokenyard.kv_layout.checksum import Checksum

Block = npt.NDArray[np.uint8]
"""The KV of a block, uint8[padded(block_bytes)], in the layout of `kv_layout.layout.PoolView`, then zeros.

Or a part of the recurrent states after a prefix.
"""


PADDED = 512
"""The size of a block's buffer is a multiple of this many bytes."""


def padded(block_bytes: int) -> int:
    """The size of a buffer for a block, in bytes."""
    return -(-max(block_bytes, 1) // PADDED) * PADDED


def block_buffer(block_bytes: int) -> Block:
    """A buffer for a block; bytes past the block are zero."""
    return np.zeros(padded(block_bytes), np.uint8)


def block_checksum(block: Block) -> int:
    """The checksum of a block's buffer, including the zeros past the block."""
    check = Checksum(PADDED)
    check.add(np.array([[block.ctypes.data, block.nbytes]], np.int64))
    return check.value


class StoreFullError(TokenyardError):
    """The store accepts no more blocks now: the disk is full, or at its limit."""

    code = "store_full"


class BlockFormat(msgspec.Struct, frozen=True, omit_defaults=True):
    """The format of blocks. Engines with equal formats can share blocks.

    model: digest of weights and config.
    dtype: of the KV.
    block_tokens: tokens per block.
    pieces: pieces per block (layers, keys and values).
    block_bytes: bytes per block.
    state_bytes: bytes of the recurrent states after a prefix, which take whole blocks; 0 for a model without.
    """

    model: str
    dtype: str
    block_tokens: int
    pieces: int
    block_bytes: int
    state_bytes: int = 0


@dataclass(slots=True)
class StoreCounters:
    """Counters of a store since it was opened.

    found: blocks that it had when it was opened.
    damaged: blocks that failed their checksum and were removed.
    evicted: blocks that were evicted.
    """

    found: int = 0
    damaged: int = 0
    evicted: int = 0

    def public(self) -> dict[str, Any]:
        """All counters by name."""
        return {item.name: getattr(self, item.name) for item in fields(self)}


class BlockStore(Protocol):
    """Stores blocks by digest (`base.blocks`). Methods may be called from any thread. SGLang's `HiCacheStorage`.

    New blocks evict the least recently used ones. `put` and `get` may block for long, and raise OSError.
    """

    @property
    def counters(self) -> StoreCounters:
        """Counters since the store was opened."""

    @property
    def blocks(self) -> int:
        """How many blocks there are."""

    @property
    def stored_bytes(self) -> int:
        """How many bytes they take."""

    def count_stored(self, digests: list[bytes]) -> int:
        """How many of `digests`, from the first on, are there without a gap."""

    def count_maybe_stored(self, digests: list[bytes]) -> int:
        """Length of the longest prefix of `digests` that may be stored, as far as this process knows. Larger than
        `count_stored` only for a store that other engines write to.
        """

    def find_slow(self, digests: list[bytes]) -> list[int]:
        """The places in `digests` of the blocks that are not in host memory. Some may not be stored at all."""

    def lacks(self, digest: bytes) -> bool:
        """Whether `put` would write a block, as far as this process knows."""

    def touch(self, digests: list[bytes]) -> None:
        """The blocks of a prompt, in order, were used: the first one stays longest."""

    @property
    def has_memory_in_front(self) -> bool:
        """Whether there is a store in host memory in front of another one."""

    def put_in_memory(self, digest: bytes, block: Block) -> None:
        """Keep a copy of a block in the store in front, if there is one. Does not block."""

    def get_from_memory(self, digest: bytes, block: Block) -> bool:
        """Fill `block` from the store in front; False if the block is not there. Does not block."""

    def put(self, digest: bytes, block: Block) -> bool:
        """Store a block; False if it was stored already. Raises OSError or StoreFullError, and then stores nothing."""

    def get(self, digest: bytes, block: Block) -> bool:
        """Fill `block` with the bytes of a block; False, and `block` undefined, if it is missing or damaged."""

    def prefetch(self, digest: bytes) -> bool:
        """Bring a block where the next `get` is fast, and wait for it; False if the block is missing."""

    def clear(self) -> None:
        """Forget all blocks."""

    def close(self) -> None:
        """Close the store. Blocks on disk stay."""


class SingleStore:
    """What a BlockStore without another one in front of it says of that."""

    has_memory_in_front = False

    def put_in_memory(self, digest: bytes, block: Block) -> None:
        """Do nothing."""

    def get_from_memory(self, digest: bytes, block: Block) -> bool:
        """False."""
        return False


class MemoryStore(SingleStore):
    """A store of at most `max_blocks` in host memory (SGLang's `HostKVCache`)."""

    def __init__(self, max_blocks: int) -> None:
        self.counters = StoreCounters()
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[bytes, Block] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def blocks(self) -> int:
        """How many blocks there are."""
        return len(self._blocks)

    @property
    def stored_bytes(self) -> int:
        """How many bytes they take."""
        with self._lock:
            return sum(block.nbytes for block in self._blocks.values())

    def count_stored(self, digests: list[bytes]) -> int:
        """How many of `digests`, from the first on, are there without a gap."""
        with self._lock:
            return next((i for i, digest in enumerate(digests) if digest not in self._blocks), len(digests))

    def count_maybe_stored(self, digests: list[bytes]) -> int:
        """The same."""
        return self.count_stored(digests)

    def find_slow(self, digests: list[bytes]) -> list[int]:
        """None is."""
        return []

    def lacks(self, digest: bytes) -> bool:
        """Whether a block is not stored."""
        return digest not in self._blocks

    def touch(self, digests: list[bytes]) -> None:
        """The blocks of a prompt, in order, were used: the first one stays longest."""
        with self._lock:
            touch_all(self._blocks, digests)

    def put(self, digest: bytes, block: Block) -> bool:
        """Store a copy of a block; False if it was stored already. Raises StoreFullError if `max_blocks` is 0."""
        with self._lock:
            if digest in self._blocks:
                return False
            if self._max_blocks < 1:
                raise StoreFullError("the store holds no block")
            if len(self._blocks) >= self._max_blocks:
                self._blocks.popitem(last=False)
                self.counters.evicted += 1
            self._blocks[digest] = block.copy()
            return True

    def get(self, digest: bytes, block: Block) -> bool:
        """Fill `block` with the bytes of a block; False if it is missing."""
        with self._lock:
            found = self._blocks.get(digest)
        if found is None:
            return False
        block[: len(found)] = found
        return True

    def prefetch(self, digest: bytes) -> bool:
        """Whether a block is stored."""
        return digest in self._blocks

    def clear(self) -> None:
        """Forget all blocks."""
        with self._lock:
            self._blocks.clear()

    def close(self) -> None:
        """Nothing is open."""
