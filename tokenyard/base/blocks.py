"""The name of a block: 64 tokens counted from the root, under one digest that covers everything before it.

The KV store, KV transfer between engines and the router's index use these names, so a prefix has the same name in all
of them. Events of the prefix cache (`cache/kv_events.py`) and lookahead (`scheduler/lookahead_state.py`) use other
hashes. Equal digests mean equal tokens from the root on, in one namespace. The chain is that of prefix caching by
hashed blocks (Kwon et al. 2023), here with 16 bytes of BLAKE2b (RFC 7693).
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from tokenyard.base.request import Int32Array

BLOCK_TOKENS = 64
DIGEST_BYTES = 16
TOKEN_BYTES = 4
LOOKUP_BLOCKS = 32
"""How many blocks are hashed at a time to look them up."""
ROOT = b""
"""The digest that the first block of a prompt follows without a namespace."""


def root_digest(namespace: str) -> bytes:
    """The digest before the first block of a prompt in `namespace` (salt, adapter): `ROOT` for "", else 16 bytes."""
    return blake2b(namespace.encode(), digest_size=DIGEST_BYTES, person=b"namespace").digest() if namespace else ROOT


def link(parent: bytes, content: bytes) -> bytes:
    """The digest (16 bytes) of a block with the bytes `content` that follows the block `parent`."""
    return blake2b(parent + content, digest_size=DIGEST_BYTES).digest()


def block_digests(tokens: Int32Array, parent: bytes = ROOT, block_tokens: int = BLOCK_TOKENS) -> list[bytes]:
    """The digests of the whole blocks of `tokens` (int32[n]), the first of which follows `parent`.

    A last block of fewer than `block_tokens` tokens has no digest. Raises ValueError if `block_tokens` is below 1.
    """
    if block_tokens < 1:
        raise ValueError(f"block_tokens is {block_tokens}; it must be at least 1")
    data = np.ascontiguousarray(tokens, "<i4").tobytes()
    size = block_tokens * TOKEN_BYTES
    return chain(parent, (data[start : start + size] for start in range(0, len(data) - size + 1, size)))


def chain(parent: bytes, contents: Iterable[bytes]) -> list[bytes]:
    """The digests of blocks with these bytes, each of which follows the one before it and the first one `parent`."""
    digests = []
    for content in contents:
        parent = blake2b(parent + content, digest_size=DIGEST_BYTES).digest()
        digests.append(parent)
    return digests


def state_digests(prefix: bytes, count: int) -> list[bytes]:
    """The digests of the `count` blocks with the recurrent states after a prefix, whose last block is `prefix`."""
    return [
        blake2b(prefix + part.to_bytes(4, "little"), digest_size=DIGEST_BYTES, person=b"state").digest()
        for part in range(count)
    ]


def touch_all(order: OrderedDict[bytes, Any], digests: list[bytes]) -> None:
    """Mark `digests` as recently used in an LRU order. The last block of a chain is evicted before the first."""
    for digest in reversed(digests):
        if digest in order:
            order.move_to_end(digest)


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """The part of a sequence that a KV store has."""

    digests: list[bytes]
    """The names of the sequence's blocks, from its beginning to the end of that part at least. With `state_blocks` they
    end there, and those of the states follow."""
    first: int
    """The first block that was looked up."""
    found: int
    """How many consecutive blocks from `first` on the store has, those of states among them."""
    tokens: int
    """How many tokens of the sequence can be loaded, counted from its beginning."""
    fast: int
    """How many of the found blocks, from `first` on, are in host memory."""
    slow: int
    """How many of the found blocks are not in host memory."""
    state_blocks: int = 0
    """The last ones of the found blocks, which have the recurrent states after `tokens` tokens. All or none is loaded
    then."""


def stored_prefix(
    known: Int32Array,
    namespace: str,
    cached: int,
    block_tokens: int,
    count_stored: Callable[[list[bytes]], int],
    find_slow: Callable[[list[bytes]], list[int]],
    state_blocks: int = 0,
) -> StoredPrefix | None:
    """The part of a sequence's `known` tokens (int32[n]) beyond the first `cached` that a KV store has.

    None for less than a block. `count_stored` returns how many blocks of a chain the store has from its beginning on,
    `find_slow` the places of those that are not in host memory. The last token is always left to compute. Tokens are
    hashed in pieces, and no further than the store has them.

    state_blocks: how many blocks the recurrent states of a prefix take, 0 for a model without. A row can continue only
    behind a prefix whose states are there, so the part ends with the last of these.
    """
    if len(known) - 1 - cached < block_tokens:
        return None
    first, whole = cached // block_tokens, len(known) // block_tokens
    digests: list[bytes] = []
    parent, found = root_digest(namespace), first
    while found >= len(digests) < whole:
        end = min(max(len(digests), first) + LOOKUP_BLOCKS, whole)
        digests += block_digests(known[len(digests) * block_tokens : end * block_tokens], parent, block_tokens)
        parent = digests[-1]
        found += count_stored(digests[found:])
    tokens = min(found * block_tokens, len(known) - 1)
    states: list[bytes] = []
    if state_blocks:
        found = min(found, (len(known) - 1) // block_tokens)
        while found > first and not states:
            names = state_digests(digests[found - 1], state_blocks)
            if count_stored(names) == state_blocks:
                states = names
            else:
                found -= 1
        digests, tokens = digests[:found] + states, found * block_tokens
        found += len(states)
    if tokens - cached < block_tokens:
        return None
    slow = find_slow(digests[first:found])
    fast = slow[0] if slow else found - first
    return StoredPrefix(digests, first, found - first, tokens, fast, len(slow), len(states))


def tokens_per_block(page_size: int) -> int:
    """Tokens of a block where pages hold `page_size` tokens: `BLOCK_TOKENS`, rounded up to whole pages."""
    return -(-BLOCK_TOKENS // page_size) * page_size
