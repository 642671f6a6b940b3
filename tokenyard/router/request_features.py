"""What a router reads from a request's body: the prompt as blocks, the tenant, the session and the priority. Pure.

Fields that the worker validates are not validated here: a field of the wrong type counts as absent.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

from tokenyard.base import NS_PER_MS, Int32Array, InvalidRequestError
from tokenyard.base.blocks import root_digest
from tokenyard.routing.dispatch import RequestFacts
from tokenyard.routing.policies import KEY_BYTES, prefix_key
from tokenyard.routing.prefix_index import Prompt, text_prompt, token_prompt

BYTES_PER_TOKEN = 4.0
RANK_FIELDS = ("data_parallel_rank", "routed_dp_rank")
PREFILL_RANK_FIELDS = ("disagg_prefill_dp_rank", "data_parallel_rank")
DECODE_RANK_FIELDS = ("data_parallel_rank_decode", "routed_dp_rank")
PRIORITY_FIELDS = ("priority", "service_tier", "deadline_ms")
TENANT_FIELDS = ("tenant", "user")
SALTS = ("cache_salt", "extra_key")
BEFORE = ("tools", "system", "instructions")
"""What templates put in front of the messages."""

_RARE = frozenset(
    name
    for names in (RANK_FIELDS, PREFILL_RANK_FIELDS, DECODE_RANK_FIELDS, PRIORITY_FIELDS, TENANT_FIELDS)
    for name in names
)
_ODD = frozenset((*BEFORE, "messages"))
PRIORITY_WORDS = {"low": -1, "flex": -1, "normal": 0, "default": 0, "auto": 0, "high": 1, "priority": 1}
MAX_PRIORITY = 1 << 31
MAX_DEADLINE_MS = 1e12

Tokenize = Callable[[Mapping[str, Any]], Int32Array | None]
"""The token ids of a request's prompt, None where they are unknown."""


@dataclass(slots=True)
class ParsedRequest(RequestFacts):
    """A request as the router sees it."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    """The body."""
    counted: bool = False
    """Whether `tokens` is exact, not estimated from the text."""


def parse_body(
    body: bytes,
    *,
    bytes_per_token: float = BYTES_PER_TOKEN,
    tokenize: Tokenize | None = None,
    needs_prefix: bool = True,
    stable: bool = False,
    adapters: Container[str] = (),
) -> ParsedRequest:
    """Parse a request's body.

    adapters: names of models that are adapters. Their prefixes are separate from those of the base model.

    Raises InvalidRequestError unless it is a JSON object.
    """
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"the body is no JSON: {error.msg}", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise InvalidRequestError("the body must be a JSON object", code="invalid_json")
    model = fields.get("model")
    parsed = ParsedRequest(
        fields=fields, model=model if isinstance(model, str) else "", stream=fields.get("stream") is True
    )
    if not fields.keys().isdisjoint(_RARE):
        _read_rare(parsed, fields)
    salts = _salts(fields, adapters)
    ids = _given_ids(fields)
    if ids is None and tokenize is not None:
        ids = tokenize(fields)
    if ids is not None:
        parsed.prompt = token_prompt(ids, root_digest(salts)) if needs_prefix else Prompt(size=len(ids))
        parsed.tokens, parsed.counted = max(len(ids), 1), True
        parsed.key = prefix_key(ids[: KEY_BYTES // 4].tobytes())
    else:
        text = _prompt_text(fields, salts)
        parsed.prompt = text_prompt(text, stable=stable) if needs_prefix else Prompt(size=len(text))
        parsed.tokens = max(int(len(text) / bytes_per_token), 1)
        parsed.key = prefix_key(text)
    return parsed


def _read_rare(parsed: ParsedRequest, fields: Mapping[str, Any]) -> None:
    """Parse the fields that few requests have."""
    get = fields.get
    tenant = get("tenant") or get("user")
    parsed.priority = _priority(get("priority", get("service_tier")))
    parsed.tenant = tenant if isinstance(tenant, str) else ""
    deadline_ms = _positive(get("deadline_ms"))
    parsed.deadline_ns = None if deadline_ms is None else round(min(deadline_ms, MAX_DEADLINE_MS) * NS_PER_MS)
    parsed.rank = _rank(fields, RANK_FIELDS)
    parsed.prefill_rank = _rank(fields, PREFILL_RANK_FIELDS)
    parsed.decode_rank = _rank(fields, DECODE_RANK_FIELDS)


def _prompt_text(fields: Mapping[str, Any], salts: str = "") -> bytes:
    """All text of a body that becomes prompt, in the order of chat templates, so that a conversation's next turn begins
    with its previous one. It begins with `salts`, the cache namespace.
    """
    plain = fields.get("prompt")
    if isinstance(plain, str) and not salts and fields.keys().isdisjoint(_ODD):
        return plain.encode("utf-8", "replace")
    parts = [salts] if salts else []
    messages = fields.get("messages")
    if messages is None:
        messages = fields.get("prompt", fields.get("text", fields.get("input")))
    for name in BEFORE:
        if fields.get(name):
            _collect(fields[name], parts)
    _collect(messages, parts)
    return "\x00".join(parts).encode("utf-8", "replace")


def _collect(value: Any, parts: list[str]) -> None:
    """Collect the texts in a JSON value, in order."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            parts.append(item)
        elif isinstance(item, dict):
            stack.extend(reversed(item.values()))
        elif isinstance(item, list):
            stack.extend(reversed(item))


def _given_ids(fields: Mapping[str, Any]) -> Int32Array | None:
    """The prompt where it is one list of token ids; None for text, several prompts and anything else."""
    ids = fields.get("input_ids", fields.get("prompt"))
    if not isinstance(ids, list) or not ids or not isinstance(ids[0], int):
        return None
    try:
        return np.array(ids, np.int32)
    except (TypeError, ValueError, OverflowError):
        return None


def _salts(fields: Mapping[str, Any], adapters: Container[str]) -> str:
    """The cache namespace of the prompt, "" for the default: salts, then the adapter, by whichever field names it."""
    salts = [salt for name in SALTS if isinstance(salt := fields.get(name), str) and salt]
    adapter, model = fields.get("lora_path"), fields.get("model")
    if not adapter and isinstance(model, str) and model in adapters:
        adapter = model.rpartition(":")[2]
    if isinstance(adapter, str) and adapter:
        salts.append(adapter)
    return "\x00".join(salts)


def _positive(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and value > 0 else None


def _priority(value: object) -> int:
    if isinstance(value, str):
        return PRIORITY_WORDS.get(value, 0)
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < MAX_PRIORITY else 0


def asked_priority(fields: Mapping[str, Any], header: bytes) -> int:
    """The highest priority that a body or the header X-Priority may mean to an engine."""
    word = header.decode("latin-1").strip()
    named = int(word) if word.lstrip("-").isdecimal() else word
    given = [one for one in (fields.get("priority"), fields.get("service_tier"), named) if one not in (None, "")]
    return max(map(_priority, given), default=0)


def _rank(fields: Mapping[str, Any], names: Sequence[str]) -> int | None:
    """The rank that the client asks for in one of the fields `names`. Raises InvalidRequestError for a non-number."""
    for name in names:
        rank = fields.get(name)
        if rank is not None:
            if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
                raise InvalidRequestError(f"{name} is no rank; give a number from 0 on", param=name)
            return rank
    return None
