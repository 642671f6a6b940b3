"""The parts of a conversation in the order of its prompt, and the first in which two prompts differ. Pure.

A prefix cache helps up to the first token that differs, so the first part that changed says where the hits of a
session's next turn end. Parts are named as in the request: `tools[0]`, `system`, `messages[3]`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import orjson

from tokenyard.base.sessions import conversation_of, is_answer

DIGEST_BYTES = 8
CACHE_MARKER = "cache_control"
"""Clients move these markers; no prompt has them."""

SALTS = ("cache_salt", "extra_key", "lora_path", "model")
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
CONTEXT_CHARS = 40

_KINDS = (
    ("a billing header", re.compile(r"x-anthropic-billing-header[^\n\"]*")),
    (
        "a date or time",
        re.compile(r"\d(?:\d{3}-\d\d-\d\d(?:[T ]\d\d:\d\d[:\d.Z+-]*)?|(?<!\w\d)\d?:\d\d(?::\d\d)?\b)"),
    ),
    (
        "an id",
        re.compile(r"\b[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b|\b(?:call|toolu|msg|req|chatcmpl)[_-]\w{6,}\b"),
    ),
)
"""What often changes between turns. A pattern that begins with a class of characters is searched for faster."""


HOWS = (
    "reordered: the keys are the same in another order",
    "rewritten: its reasoning was dropped or changed",
    *(f"changed: {kind}" for kind, _ in _KINDS),
)
"""What is told of a part that changed in nothing else."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Where the prompt of a later request leaves that of an earlier one.

    part: the first part that differs.
    how: what happened to it: "changed", "left out", or what else is known of the change.
    before, after: the texts around the first character that differs; "" where there is none.
    """

    part: str
    how: str
    before: str = ""
    after: str = ""


def parts_of(tools: Sequence[Any], messages: Sequence[Any], system: Any = None) -> Iterator[tuple[str, bytes]]:
    """Each part's name and content. Chat templates write tools and system prompts first."""
    for place, tool in enumerate(tools):
        yield f"tools[{place}]", _content(tool)
    if system:
        yield "system", _content(system)
    for place, message in enumerate(messages):
        yield f"messages[{place}]", _content(message)


def parts_of_body(fields: Mapping[str, Any]) -> list[tuple[str, bytes]]:
    """The parts of a body of the chat, Messages or Responses API."""
    tools = fields.get("tools")
    return list(
        parts_of(
            tools if isinstance(tools, list) else [],
            conversation_of(fields),
            fields.get("system") or fields.get("instructions"),
        )
    )


def digest(content: bytes) -> bytes:
    """The digest of a part's content."""
    return blake2b(content, digest_size=DIGEST_BYTES).digest()


def first_difference(before: Sequence[bytes], after: Sequence[bytes]) -> int | None:
    """The first place at which `after` does not continue `before`; None if it begins with all of it."""
    for place, one in enumerate(before):
        if place >= len(after) or after[place] != one:
            return place
    return None


def _content(part: Any) -> bytes:
    return orjson.dumps(_without_markers(part))


def _without_markers(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_markers(inner) for name, inner in value.items() if name != CACHE_MARKER}
    return [_without_markers(inner) for inner in value] if isinstance(value, list) else value


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> Difference | None:
    """How the prompt of the body `after` leaves that of `before`; None if it continues it."""
    for name in SALTS:
        if before.get(name) != after.get(name):
            return Difference(name, "changed: another model, adapter or salt shares no KV", *_both(before, after, name))
    old, new = parts_of_body(before), parts_of_body(after)
    place = first_difference([content for _, content in old], [content for _, content in new])
    if place is None:
        return None
    name, content = old[place]
    if place >= len(new):
        return Difference(name, "left out: the later prompt ends before it")
    other_name, other = new[place]
    if other_name != name:
        return Difference(name, f"left out: {other_name} is in its place")
    how = how_changed(form_digests(content), form_digests(other))
    return Difference(name, how, *_around(content.decode(), other.decode()))


def _both(before: Mapping[str, Any], after: Mapping[str, Any], name: str) -> tuple[str, str]:
    return str(before.get(name)), str(after.get(name))


def how_changed(before: bytes, after: bytes) -> str:
    """What is known of a change, from `form_digests` of the part before and after it."""
    size = DIGEST_BYTES
    if before and len(before) == len(after):
        for place, how in enumerate(HOWS):
            if before[place * size : (place + 1) * size] == after[place * size : (place + 1) * size]:
                return how
    return "changed"


def form_digests(content: bytes) -> bytes:
    """The digests of a part's content without what each of `HOWS` says may change, one after the other."""
    value, text = orjson.loads(content), content.decode()
    in_order = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    forms = [in_order, orjson.dumps(_without_thoughts(value)) if is_answer(value) else content]
    forms += [pattern.sub("", text).encode() for _, pattern in _KINDS]
    return b"".join(map(digest, forms))


def _without_thoughts(message: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in message.items() if name not in THOUGHTS}
    if isinstance(parts := kept.get("content"), list):
        kept["content"] = [part for part in parts if not (isinstance(part, dict) and part.get("type") == "thinking")]
    return kept


def _around(before: str, after: str) -> tuple[str, str]:
    """The texts around the first character that differs."""
    same = next(
        (at for at, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after))
    )
    begin, end = max(same - CONTEXT_CHARS // 2, 0), same + CONTEXT_CHARS
    return before[begin:end], after[begin:end]
