"""Events for blocks that enter and leave the prefix cache, for routers that keep an index of it.

A block is one page of tokens. Its hash covers the block, the hash of the block before it and so on up to the name space
at the root, so equal hashes mean equal prefixes.
"""

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from tokenyard.base import Int32Array
from tokenyard.cache.node import TOKEN_BYTES, TOKEN_DTYPE, Node

HASH_BYTES = 8


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Consecutive blocks can be reused from now on: the first follows `parent_hash`, each other one the block before
    it.

    `token_ids` is int32[len(hashes) * page_size], the tokens block after block. For blocks at the start of a prompt,
    `parent_hash` is `root_hash` of the name space.
    """

    hashes: list[int]
    parent_hash: int
    token_ids: Int32Array
    page_size: int


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """These blocks were evicted."""

    hashes: list[int]


@dataclass(frozen=True, slots=True)
class BlocksCleared:
    """The cache was emptied."""


KvEvent = BlocksStored | BlocksRemoved | BlocksCleared


KvRecord = list[Any]
"""An event in the wire form of vLLM and SGLang: its name, then its fields in order."""


def kv_record(event: KvEvent) -> KvRecord:
    """The wire form of an event."""
    match event:
        case BlocksStored():
            adapter = None
            return [
                "BlockStored",
                event.hashes,
                event.parent_hash,
                event.token_ids.tolist(),
                event.page_size,
                adapter,
            ]
        case BlocksRemoved():
            return ["BlockRemoved", event.hashes]
        case BlocksCleared():
            return ["AllBlocksCleared"]


def root_hash(namespace: str) -> int:
    """The 64-bit hash that the first block of a prompt follows."""
    return int.from_bytes(blake2b(namespace.encode(), digest_size=HASH_BYTES).digest(), "little")


def block_hashes(key: bytes, page_size: int, parent_hash: int) -> list[int]:
    """64-bit hashes of the whole pages of `key` (see `make_key`), which follow the block `parent_hash`."""
    size = page_size * TOKEN_BYTES
    previous = parent_hash.to_bytes(HASH_BYTES, "little")
    hashes = []
    for start in range(0, len(key) - size + 1, size):
        previous = blake2b(previous + key[start : start + size], digest_size=HASH_BYTES).digest()
        hashes.append(int.from_bytes(previous, "little"))
    return hashes


class KvEventLog:
    """A listener of the tree that keeps the hashes of every node and records events."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._hashes: dict[Node, list[int]] = {}
        self._events: list[KvEvent] = []

    def inserted(self, parent: Any, node: Any) -> None:
        """Hash the new blocks and report them stored."""
        before = root_hash(parent.namespace) if parent.parent is None else self._hashes[parent][-1]
        hashes = self._hashes[node] = block_hashes(node.key, self._page_size, before)
        tokens = np.frombuffer(node.key, TOKEN_DTYPE)
        self._events.append(BlocksStored(list(hashes), before, tokens, self._page_size))

    def split(self, upper: Any, lower: Any) -> None:
        """Divide the hashes between both halves; no block enters or leaves."""
        hashes = self._hashes[lower]
        self._hashes[upper] = hashes[: len(upper.pages)]
        self._hashes[lower] = hashes[len(upper.pages) :]

    def evicted(self, node: Any) -> None:
        """Report the node's blocks removed."""
        self._events.append(BlocksRemoved(self._hashes.pop(node)))

    def cleared(self) -> None:
        """Report an empty tree; events before it are dropped."""
        self._events = [BlocksCleared()]

    def drain(self) -> list[KvEvent]:
        """The events since the last call, oldest first."""
        events, self._events = self._events, []
        return events
