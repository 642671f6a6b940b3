"""The prefix index: which target holds which blocks. Pure, bounded in bytes; the router, the engine and the simulator
share it.

A prompt is a chain of digests, each of which covers all blocks before it (`base.blocks`). A block of token ids is 64
tokens. Without a tokenizer, blocks are pieces of text: the first 16 have 256 bytes, and 8 follow for each doubling of
the length. So a long prompt has few digests, and the length of a match is known to about an eighth.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from tokenyard.base.blocks import BLOCK_TOKENS, ROOT, block_digests, chain, link, root_digest
from tokenyard.base.request import Int32Array

ENTRY_BYTES = 160
"""Upper bound on the memory of one entry: a 16-byte digest object and its dictionary slot."""

FIRST_TEXT_BLOCK = 256
BLOCKS_PER_OCTAVE = 8
MAX_TEXT_BYTES = 1 << 26
MIN_ENTRIES = 256

MAX_ENGINE_BLOCKS = 1 << 22

Digest = bytes | int
Hash = int | bytes | str
"""The name of a block in an engine's KV events."""

_ARRAY_FIELDS = {
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    "BlockRemoved": ("block_hashes", "medium"),
}


@dataclass(slots=True)
class Prompt:
    """A prompt as a chain of blocks. Lengths are tokens, or bytes of text.

    digests: one per block; `digests[i]` covers the prompt up to `ends[i]`.
    ends: where each block ends; may be longer than `digests`.
    size: length of the prompt.
    """

    digests: Sequence[Digest] = ()
    ends: Sequence[int] = ()
    size: int = 0

    def share(self, blocks: int) -> float:
        """The share of the prompt that the first `blocks` blocks cover, from 0 to 1."""
        return self.ends[blocks - 1] / self.size if blocks else 0.0


def _text_ends() -> list[int]:
    """Where the blocks of a text end, in bytes: 16 blocks of 256, then 8 for each doubling."""
    ends = list(range(FIRST_TEXT_BLOCK, 2 * BLOCKS_PER_OCTAVE * FIRST_TEXT_BLOCK + 1, FIRST_TEXT_BLOCK))
    while ends[-1] < MAX_TEXT_BYTES:
        size = ends[-1] // BLOCKS_PER_OCTAVE
        ends += [ends[-1] + size * (place + 1) for place in range(BLOCKS_PER_OCTAVE)]
    return ends


_TEXT_ENDS = _text_ends()


def text_prompt(text: bytes, *, stable: bool = False) -> Prompt:
    """The blocks of a text.

    `stable` digests are the same in every process. The others are cheaper and use Python's hash, which is salted per
    process, so that a client cannot construct collisions.
    """
    size, begin = len(text), 0
    if stable:
        pieces: list[bytes] = []
        for end in _TEXT_ENDS:
            if end > size:
                break
            pieces.append(text[begin:end])
            begin = end
        return Prompt(chain(ROOT, pieces), _TEXT_ENDS, size)
    digests: list[Digest] = []
    parent = 0
    for end in _TEXT_ENDS:
        if end > size:
            break
        parent = hash((parent, text[begin:end]))
        digests.append(parent)
        begin = end
    return Prompt(digests, _TEXT_ENDS, size)


def token_prompt(tokens: Int32Array, parent: bytes = ROOT) -> Prompt:
    """The blocks of token ids, int32[n], in the namespace whose root is `parent`."""
    digests = block_digests(tokens, parent)
    return Prompt(digests, range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS), len(tokens))


@dataclass(slots=True)
class _TargetBlocks:
    """The blocks of one target, least recently used first. most: its own bound on blocks; 0 for none."""

    blocks: dict[Digest, None] = field(default_factory=dict)
    most: int = 0


class PrefixIndex:
    """The blocks that each target should hold.

    Later blocks of a chain are evicted before earlier ones. Beyond `max_bytes`, blocks are evicted immediately from the
    target that has the most.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_blocks = max(max_bytes // ENTRY_BYTES, MIN_ENTRIES)
        self.held: dict[str, _TargetBlocks] = {}
        self._entries = 0
        self.evicted = 0

    @property
    def bytes(self) -> int:
        """Upper bound on the memory in use."""
        return self._entries * ENTRY_BYTES

    def blocks_of(self, target: str) -> int:
        """The number of blocks in the index for `target`."""
        held = self.held.get(target)
        return len(held.blocks) if held is not None else 0

    def limit(self, target: str, blocks: int) -> None:
        """Bound the blocks of `target` to the capacity of its cache; 0 for no bound."""
        held = self.held.setdefault(target, _TargetBlocks())
        held.most = blocks
        self._shrink(held)

    def matches(self, targets: Iterable[str], digests: Sequence[Digest]) -> list[int]:
        """`match` for each target. A miss of the first block, the common case, is cheap."""
        if not digests:
            return [0 for _ in targets]
        first, held = digests[0], self.held
        return [self.match(name, digests) if name in held and first in held[name].blocks else 0 for name in targets]

    def match(self, target: str, digests: Sequence[Digest]) -> int:
        """How many leading blocks of a chain the target holds."""
        held = self.held.get(target)
        if held is None or not digests:
            return 0
        blocks = held.blocks
        if digests[0] not in blocks:
            return 0
        if digests[-1] in blocks:
            return len(digests)
        low, high = 1, len(digests) - 1
        while low < high:
            middle = (low + high + 1) // 2
            if digests[middle - 1] in blocks:
                low = middle
            else:
                high = middle - 1
        return low

    def insert(self, target: str, digests: Sequence[Digest]) -> None:
        """The target holds, or will soon hold, this chain: make it the most recently used."""
        held = self.held.get(target)
        if held is None:
            held = self.held[target] = _TargetBlocks()
        blocks = held.blocks
        before = len(blocks)
        for digest in reversed(digests):
            blocks.pop(digest, None)
            blocks[digest] = None
        self._entries += len(blocks) - before
        self._shrink(held)

    def remove(self, target: str, digests: Iterable[Digest]) -> None:
        """The target no longer holds these blocks."""
        held = self.held.get(target)
        if held is None:
            return
        before = len(held.blocks)
        for digest in digests:
            held.blocks.pop(digest, None)
        self._entries -= before - len(held.blocks)

    def clear_target(self, target: str) -> None:
        """The target holds nothing: it restarted, failed or was flushed."""
        held = self.held.get(target)
        if held is not None:
            self._entries -= len(held.blocks)
            held.blocks = {}

    def remove_target(self, target: str) -> None:
        """The target does not exist any more."""
        self.clear_target(target)
        self.held.pop(target, None)

    def _shrink(self, held: _TargetBlocks) -> None:
        """Enforce the bounds. Evict in batches, because finding the first key of a large dictionary can be slow."""
        if held.most and len(held.blocks) > held.most:
            self._evict(held, len(held.blocks) - held.most)
        while self._entries > self._max_blocks:
            largest = max(self.held.values(), key=lambda other: len(other.blocks))
            self._evict(largest, self._entries - self._max_blocks)

    def _evict(self, held: _TargetBlocks, count: int) -> None:
        count = min(max(count, len(held.blocks) >> 10), len(held.blocks))
        for digest in list(islice(held.blocks, count)):
            del held.blocks[digest]
        self._entries -= count
        self.evicted += count


class BlockHashTranslator:
    """Translates the KV events of one engine, which name blocks by its own hashes, into digests of the index. Pure.

    Engines hash blocks of any page size, so digests are computed from the token ids in the events. A block of the index
    is held while every engine block that it overlaps is held. Events are arrays or maps (see `apply`), as vLLM and
    SGLang send them. The first block of a prompt has no parent.
    """

    def __init__(self) -> None:
        self._after: dict[Hash, _BlockPosition] = {}
        self._covers: dict[Hash, list[bytes]] = {}

    def apply(self, event: Any) -> tuple[list[bytes], list[bytes], bool]:
        """Returns (digests stored, digests removed, whether the cache was cleared).

        An array has the event's type first, then its fields in order; a map has the type under `type`. Malformed events
        and blocks with an unknown parent are ignored.
        """
        fields = _event_fields(event)
        name, hashes = fields.get("type"), fields.get("block_hashes")
        if name == "AllBlocksCleared":
            self._after, self._covers = {}, {}
            return [], [], True
        if not isinstance(hashes, list) or not all(isinstance(block, Hash) for block in hashes):
            return [], [], False
        if fields.get("medium") not in (None, "GPU"):
            return [], [], False
        if name == "BlockRemoved":
            return [], [digest for block in hashes for digest in self._remove(block)], False
        return self._store(fields, hashes) if name == "BlockStored" else [], [], False

    def _store(self, fields: Mapping[str, Any], hashes: list[Hash]) -> list[bytes]:
        parent, size = fields.get("parent_block_hash"), fields.get("block_size")
        try:
            data = np.array(fields.get("token_ids"), "<i4").tobytes()
        except (TypeError, ValueError, OverflowError):
            return []
        if parent is None:
            place: _BlockPosition | None = _BlockPosition(_root(fields), b"", ())
        else:
            place = self._after.get(parent) if isinstance(parent, Hash) else None
        if place is None or not isinstance(size, int) or len(data) != 4 * size * len(hashes):
            return []
        if len(self._after) + len(hashes) > MAX_ENGINE_BLOCKS:
            self._after, self._covers = {}, {}
        stored: list[bytes] = []
        for number, block in enumerate(hashes):
            place = self._follow(place, block, data[4 * size * number : 4 * size * (number + 1)], stored)
            self._after[block] = place
        return stored

    def _follow(self, place: "_BlockPosition", block: Hash, content: bytes, stored: list[bytes]) -> "_BlockPosition":
        """The position after an engine block. Digests that it completes are appended to `stored`."""
        digest, rest, within = place.digest, place.rest + content, (*place.within, block)
        self._covers[block] = []
        while len(rest) >= 4 * BLOCK_TOKENS:
            digest = link(digest, rest[: 4 * BLOCK_TOKENS])
            rest = rest[4 * BLOCK_TOKENS :]
            stored.append(digest)
            for part in within:
                self._covers.setdefault(part, []).append(digest)
            within = (block,) if rest else ()
        return _BlockPosition(digest, rest, within)

    def _remove(self, block: Hash) -> list[bytes]:
        self._after.pop(block, None)
        return self._covers.pop(block, [])


@dataclass(frozen=True, slots=True)
class _BlockPosition:
    """The position after an engine block.

    digest: of the last whole block of the index.
    rest: token ids after it, as int32 bytes.
    within: the engine blocks that `rest` overlaps.
    """

    digest: bytes
    rest: bytes
    within: tuple[Hash, ...]


def _root(fields: Mapping[str, Any]) -> bytes:
    """The root of a prompt's chain: one per salt and adapter, as in `router.request_features`."""
    adapter, extra = fields.get("lora_name"), fields.get("extra_keys")
    words = extra[0] if isinstance(extra, list) and extra and isinstance(extra[0], list | tuple) else ()
    salts = [fields.get("cache_salt") or next((word for word in words if word != adapter), None), adapter]
    names = [name for name in salts if isinstance(name, str) and name]
    return root_digest("\x00".join(names)) if names else ROOT


def _event_fields(event: Any) -> Mapping[str, Any]:
    if isinstance(event, Mapping):
        return event
    if isinstance(event, list | tuple) and event:
        return dict(zip(("type", *_ARRAY_FIELDS.get(str(event[0]), ())), event, strict=False))
    return {}
