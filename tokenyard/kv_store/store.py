"""What a store of KV blocks can do, and the simplest one, in memory."""

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
"""The KV of a block, uint8[block_bytes], laid out as `layout.PoolView` says, and zeros up to `padded` bytes."""


PADDED = 512
"""Buffers for blocks are multiples of so many bytes."""


def padded(block_bytes: int) -> int:
    """The size of a buffer for a block, in bytes."""
    return -(-max(block_bytes, 1) // PADDED) * PADDED


def block_buffer(block_bytes: int) -> Block:
    """A buffer for a block, filled up with zeros."""
    return np.zeros(padded(block_bytes), np.uint8)


def block_checksum(block: Block) -> int:
    """The checksum of a block's buffer, zeros behind the block included."""
    check = Checksum(PADDED)
    check.add(np.array([[block.ctypes.data, block.nbytes]], np.int64))
    return check.value


class StoreFullError(TokenyardError):
    """The store takes no more now: the disk is full, or may not get fuller."""

    code = "store_full"


class BlockFormat(msgspec.Struct, frozen=True):
    """What makes blocks of one engine good for another: the model's digest (weights and config), the dtype of its KV,
    tokens and bytes of a block, and of how many pieces (layers, keys and values) it consists.
    """

    model: str
    dtype: str
    block_tokens: int
    pieces: int
    block_bytes: int


@dataclass(slots=True)
class StoreCounters:
    """What a store did since it was opened, and what it found then.

    found: blocks that were there. damaged: blocks whose bytes were not what had been written; they are gone. evicted:
    blocks that were evicted.
    """

    found: int = 0
    damaged: int = 0
    evicted: int = 0

    def public(self) -> dict[str, Any]:
        """All of them by name."""
        return {item.name: getattr(self, item.name) for item in fields(self)}


class BlockStore(Protocol):
    """Keeps blocks by their digest (`base.blocks`). Methods may be called from any thread.

    The least recently used blocks are evicted for new ones. `put` and `get` may take long, and raise OSError.
    """

    @property
    def counters(self) -> StoreCounters:
        """What it did since it was opened."""

    @property
    def blocks(self) -> int:
        """How many blocks there are."""

    @property
    def stored_bytes(self) -> int:
        """How many bytes they take."""

    def count_stored(self, digests: list[bytes]) -> int:
        """How many of `digests`, from the first on, are there without a gap."""

    def count_maybe_stored(self, digests: list[bytes]) -> int:
        """How many of `digests`, from the first on, may be there, without asking outside of this process. More than
        `count_stored` only for a store that others fill as well.
        """

    def touch(self, digests: list[bytes]) -> None:
        """The blocks of a prompt, in order, were used: the first one stays longest."""

    def put(self, digest: bytes, block: Block) -> bool:
        """Keep a block; False if it was there already. Raises OSError or StoreFullError, and then keeps nothing."""

    def get(self, digest: bytes, block: Block) -> bool:
        """Fill `block` with the bytes of a block; False, and `block` undefined, if it is not there or damaged."""

    def prefetch(self, digest: bytes) -> bool:
        """Make the next `get` of a block fast, waiting until it is; False if the block is not there."""

    def clear(self) -> None:
        """Forget all blocks."""

    def close(self) -> None:
        """Give back what is open. Blocks on a disk stay."""


class MemoryStore:
    """A store of at most `max_blocks` in this process's memory: the host memory store of a GPU."""

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

    def touch(self, digests: list[bytes]) -> None:
        """The blocks of a prompt, in order, were used: the first one stays longest."""
        with self._lock:
            touch_all(self._blocks, digests)

    def put(self, digest: bytes, block: Block) -> bool:
        """Keep a copy of a block; False if it was there already. Raises StoreFullError if there is no place at all."""
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
        """Fill `block` with the bytes of a block; False if it is not there."""
        with self._lock:
            found = self._blocks.get(digest)
        if found is None:
            return False
        block[: len(found)] = found
        return True

    def prefetch(self, digest: bytes) -> bool:
        """Whether a block is there."""
        return digest in self._blocks

    def clear(self) -> None:
        """Forget all blocks."""
        with self._lock:
            self._blocks.clear()

    def close(self) -> None:
        """Nothing is open."""
