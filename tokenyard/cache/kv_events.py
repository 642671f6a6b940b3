"""Events for blocks that enter and leave the prefix cache, for routers that keep an index of it.

A block is one page of tokens. Its hash covers the block, the hash of the block before it and so on up to the namespace
at the root, so equal hashes mean equal prefixes.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from tokenyard.base import Int32Array
from tokenyard.base.request import adapter_name, adapter_of, salt_of
from tokenyard.cache.tree_node import TOKEN_BYTES, TOKEN_DTYPE, TreeNode

HASH_BYTES = 8
"""Not the digests of `base.blocks`: consumers expect one 64-bit integer per page."""


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Consecutive blocks entered the cache: the first follows `parent_hash`, each other one the block before it.

    hashes: the blocks.
    parent_hash: the block before the first; None at the start of a prompt.
    token_ids: int32[len(hashes) * page_size], the tokens block after block.
    namespace: that of the prompts (see `Request.namespace`), "" for the default one.
    """

    hashes: list[int]
    parent_hash: int | None
    token_ids: Int32Array
    page_size: int
    namespace: str = ""


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """These blocks were evicted."""

    hashes: list[int]


@dataclass(frozen=True, slots=True)
class BlocksCleared:
    """The cache was emptied."""


KvEvent = BlocksStored | BlocksRemoved | BlocksCleared


KvRecord = dict[str, Any]
"""An event in the wire form of vLLM and SGLang: its fields by name, and its own name under `type`."""

DEVICE = "GPU"
"""The name in both engines' events for the memory that the model runs from, on any device."""


def kv_record(event: KvEvent) -> KvRecord:
    """The wire form of an event."""
    match event:
        case BlocksStored():
            adapter, salt = adapter_name(adapter_of(event.namespace)), salt_of(event.namespace)
            stored = {
                "type": "BlockStored",
                "block_hashes": event.hashes,
                "parent_block_hash": event.parent_hash,
                "token_ids": event.token_ids.tolist(),
                "block_size": event.page_size,
                "lora_id": None,
                "medium": DEVICE,
                "lora_name": adapter or None,
            }
            return stored | ({"cache_salt": salt, "extra_keys": _extra_keys(event, adapter, salt)} if salt else {})
        case BlocksRemoved():
            return {"type": "BlockRemoved", "block_hashes": event.hashes, "medium": DEVICE}
        case BlocksCleared():
            return {"type": "AllBlocksCleared"}


def _extra_keys(event: BlocksStored, adapter: str, salt: str) -> list[list[str] | None]:
    """What the hash of each block covers in addition to tokens, as in vLLM: the salt only in a prompt's first block."""
    own = [adapter] if adapter else []
    first = [*own, salt] if event.parent_hash is None else own
    return [first or None, *[own or None] * (len(event.hashes) - 1)]


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
        self._hashes: dict[TreeNode, list[int]] = {}
        self._events: list[KvEvent] = []

    def inserted(self, parent: Any, node: Any) -> None:
        """Hash the new blocks and report them stored."""
        namespace, before = self._before(parent)
        self._hashes[node] = block_hashes(node.key, self._page_size, root_hash(namespace) if before is None else before)
        self._events.append(self._stored(node, before, namespace))

    def split(self, upper: Any, lower: Any) -> None:
        """Divide the hashes between both halves. Emits no event."""
        hashes = self._hashes[lower]
        self._hashes[upper] = hashes[: len(upper.pages)]
        self._hashes[lower] = hashes[len(upper.pages) :]

    def evicted(self, node: Any) -> None:
        """Report the node's blocks removed."""
        self._events.append(BlocksRemoved(self._hashes.pop(node)))

    def cleared(self) -> None:
        """Report an empty tree; events before it are dropped."""
        self._events = [BlocksCleared()]

    def restart(self, events: list[KvEvent]) -> None:
        """Report these events, which begin with an empty tree, instead of those since the last `drain`."""
        self._events = events

    def snapshot(self, nodes: Iterable[Any]) -> list[KvEvent]:
        """Events that build all `nodes` of the tree, parents first, from an empty cache."""
        events: list[KvEvent] = [BlocksCleared()]
        for node in nodes:
            if node.parent is not None:
                namespace, before = self._before(node.parent)
                events.append(self._stored(node, before, namespace))
        return events

    def _before(self, parent: Any) -> tuple[str, int | None]:
        """The namespace of a node's children, and the block that they follow, None for none."""
        root = parent
        while root.parent is not None:
            root = root.parent
        return root.namespace, None if parent is root else self._hashes[parent][-1]

    def _stored(self, node: Any, before: int | None, namespace: str) -> BlocksStored:
        tokens = np.frombuffer(node.key, TOKEN_DTYPE)
        return BlocksStored(list(self._hashes[node]), before, tokens, self._page_size, namespace)

    def drain(self) -> list[KvEvent]:
        """The events since the last call, oldest first."""
        events, self._events = self._events, []
        return events
