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
    ("a date or time", re.compile(r"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d[:\d.Z+-]*)?|\b\d\d?:\d\d(?::\d\d)?\b")),
    (
        "an id",
        re.compile(r"\b[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b|\b(?:call|toolu|msg|req|chatcmpl)[_-]\w{6,}\b"),
    ),
)


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
    one, two = orjson.loads(content), orjson.loads(other)
    return Difference(
        name, _how(one, two, content.decode(), other.decode()), *_around(content.decode(), other.decode())
    )


def _both(before: Mapping[str, Any], after: Mapping[str, Any], name: str) -> tuple[str, str]:
    return str(before.get(name)), str(after.get(name))


def _how(one: Any, two: Any, before: str, after: str) -> str:
    """What is known of a change."""
    if orjson.dumps(one, option=orjson.OPT_SORT_KEYS) == orjson.dumps(two, option=orjson.OPT_SORT_KEYS):
        return "reordered: the keys are the same in another order"
    if is_answer(one) and _thoughts(one) and not _thoughts(two):
        return "rewritten: its reasoning was dropped"
    for kind, pattern in _KINDS:
        if pattern.search(before) and pattern.sub("", before) == pattern.sub("", after):
            return f"changed: {kind}"
    return "changed"


def _thoughts(message: Any) -> bool:
    parts = message.get("content") if isinstance(message, Mapping) else None
    kinds = [part.get("type") for part in parts if isinstance(part, Mapping)] if isinstance(parts, list) else []
    return "thinking" in kinds or (isinstance(message, Mapping) and any(message.get(name) for name in THOUGHTS))


def _around(before: str, after: str) -> tuple[str, str]:
    """The texts around the first character that differs."""
    same = next(
        (at for at, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after))
    )
    begin, end = max(same - CONTEXT_CHARS // 2, 0), same + CONTEXT_CHARS
    return before[begin:end], after[begin:end]
