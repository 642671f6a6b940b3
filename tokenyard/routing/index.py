"""Which target holds which prefix: pure, bounded in bytes, shared by the router and the simulator.

A prompt is a chain of digests, each of which covers everything before it (`base.blocks`). Over tokens a block is 64
tokens. Over text, where no tokenizer is given, blocks begin with 256 bytes and grow with their place, so that a prompt
of any length has few digests and its match is known to about an eighth.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from tokenyard.base.blocks import BLOCK_TOKENS, ROOT, block_digests, chain, link, root_digest
from tokenyard.base.request import Int32Array

ENTRY_BYTES = 160
"""What one entry costs at most: a digest of 16 bytes as an object, and its place in a dictionary."""

FIRST_TEXT_BLOCK = 256
BLOCKS_PER_OCTAVE = 8
MAX_TEXT_BYTES = 1 << 26
MIN_ENTRIES = 256

MAX_ENGINE_BLOCKS = 1 << 22

Digest = bytes | int
Hash = int | bytes | str
"""What an engine calls a block."""

_ARRAY_FIELDS = {
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    "BlockRemoved": ("block_hashes", "medium"),
}


@dataclass(slots=True)
class Prompt:
    """A prompt as the index sees it: `digests[i]` names everything up to `ends[i]`, of `size` in all.

    `ends` and `size` are tokens, or bytes of text; `ends` may be longer than `digests`.
    """

    digests: Sequence[Digest] = ()
    ends: Sequence[int] = ()
    size: int = 0

    def share(self, blocks: int) -> float:
        """The part of the prompt that the first `blocks` blocks are."""
        return self.ends[blocks - 1] / self.size if blocks else 0.0

    def blocks_within(self, share: float) -> int:
        """How many whole blocks the first `share` of the prompt holds."""
        covered = share * self.size
        blocks = 0
        while blocks < len(self.digests) and self.ends[blocks] <= covered:
            blocks += 1
        return blocks


def _text_ends() -> list[int]:
    """Where the blocks of a text end: 16 of 256 bytes, then 8 for each doubling of the place."""
    ends = list(range(FIRST_TEXT_BLOCK, 2 * BLOCKS_PER_OCTAVE * FIRST_TEXT_BLOCK + 1, FIRST_TEXT_BLOCK))
    while ends[-1] < MAX_TEXT_BYTES:
        size = ends[-1] // BLOCKS_PER_OCTAVE
        ends += [ends[-1] + size * (place + 1) for place in range(BLOCKS_PER_OCTAVE)]
    return ends


_TEXT_ENDS = _text_ends()


def text_prompt(text: bytes, *, stable: bool = False) -> Prompt:
    """The blocks of a text. `stable` digests are the same in every process; the others are cheaper and keyed anew in
    each process, so that no client can make two texts meet.
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
    """The blocks of one target, the least recently used first, and its own bound (0: none)."""

    blocks: dict[Digest, None] = field(default_factory=dict)
    most: int = 0


class PrefixIndex:
    """Which blocks each target holds, as far as the router knows.

    Of a chain, later blocks go before earlier ones, so what a target holds of a chain is always its beginning. What
    goes beyond `max_bytes` is dropped at once, from the target that has most.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_blocks = max(max_bytes // ENTRY_BYTES, MIN_ENTRIES)
        self._held: dict[str, _TargetBlocks] = {}
        self._entries = 0
        self.evicted = 0

    @property
    def bytes(self) -> int:
        """Memory in use, as an upper estimate."""
        return self._entries * ENTRY_BYTES

    def blocks_of(self, target: str) -> int:
        """How many blocks the target holds."""
        held = self._held.get(target)
        return len(held.blocks) if held is not None else 0

    def limit(self, target: str, blocks: int) -> None:
        """The target holds at most `blocks` blocks (0: any number), as its engine's cache does."""
        held = self._held.setdefault(target, _TargetBlocks())
        held.most = blocks
        self._shrink(held)

    def matches(self, targets: Iterable[str], digests: Sequence[Digest]) -> list[int]:
        """`match` for each of several targets; most hold nothing of a chain, which its first block tells."""
        if not digests:
            return [0 for _ in targets]
        first, held = digests[0], self._held
        return [self.match(name, digests) if name in held and first in held[name].blocks else 0 for name in targets]

    def match(self, target: str, digests: Sequence[Digest]) -> int:
        """How many leading blocks of a chain the target holds."""
        held = self._held.get(target)
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
        """The target holds, or will soon hold, this chain; it is the last one to be dropped now."""
        held = self._held.get(target)
        if held is None:
            held = self._held[target] = _TargetBlocks()
        blocks = held.blocks
        before = len(blocks)
        for digest in reversed(digests):
            blocks.pop(digest, None)
            blocks[digest] = None
        self._entries += len(blocks) - before
        self._shrink(held)

    def remove(self, target: str, digests: Iterable[Digest]) -> None:
        """The target holds these blocks no longer."""
        held = self._held.get(target)
        if held is None:
            return
        before = len(held.blocks)
        for digest in digests:
            held.blocks.pop(digest, None)
        self._entries -= before - len(held.blocks)

    def clear_target(self, target: str) -> None:
        """The target holds nothing: it has started anew, failed or gone."""
        held = self._held.get(target)
        if held is not None:
            self._entries -= len(held.blocks)
            held.blocks = {}

    def remove_target(self, target: str) -> None:
        """There is no such target any more."""
        self.clear_target(target)
        self._held.pop(target, None)

    def _shrink(self, held: _TargetBlocks) -> None:
        """Keep within the bounds. Entries go in batches, because finding a dictionary's first one can take long."""
        if held.most and len(held.blocks) > held.most:
            self._evict(held, len(held.blocks) - held.most)
        while self._entries > self._max_blocks:
            largest = max(self._held.values(), key=lambda other: len(other.blocks))
            self._evict(largest, self._entries - self._max_blocks)

    def _evict(self, held: _TargetBlocks, count: int) -> None:
        count = min(max(count, len(held.blocks) >> 10), len(held.blocks))
        for digest in list(islice(held.blocks, count)):
            del held.blocks[digest]
        self._entries -= count
        self.evicted += count


class BlockHashTranslator:
    """Turns what one engine says of its cache, block by block in its own hashes, into our digests. Pure.

    Engines name blocks by hashes of their own, of any page size, so a block of ours is known by the tokens that events
    bring. It is held while every engine block that it lies in is. Events are arrays or maps (see `apply`), as vLLM and
    SGLang have sent them; hashes are taken as they come. A prompt's first block follows none.
    """

    def __init__(self) -> None:
        self._after: dict[Hash, _BlockPosition] = {}
        self._covers: dict[Hash, list[bytes]] = {}

    def apply(self, event: Any) -> tuple[list[bytes], list[bytes], bool]:
        """An event as (digests stored, digests removed, whether everything is gone).

        An array has its name first and then its fields in order, a map has it under `type`. What is no such event, or
        follows an unknown block, changes nothing.
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
        place = _BlockPosition(_root(fields), b"", ()) if parent is None else self._after.get(parent)
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
        """Where one is after an engine block; digests of ours that it completes are `stored`."""
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
    """After an engine block: the last whole block of ours, what follows it, and the engine blocks that lies in."""

    digest: bytes
    rest: bytes
    within: tuple[Hash, ...]


def _root(fields: Mapping[str, Any]) -> bytes:
    """What the first block of a prompt follows: one name for each salt and adapter, as for requests (`features`)."""
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
