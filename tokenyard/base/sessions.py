"""Which session a request is a turn of, from its body and headers. Pure; the server and the router share it.

The first of these that a request has names its session (docs/agents.md):

1. `session_id` in the body, as SGLang has it;
2. the headers in `SESSION_HEADERS`, in that order;
3. `nvext.agent_context.session_id`, `nvext.agent_hints.session_id`;
4. `conversation`, a name or an object with an `id`;
5. `previous_response_id`: the session of that response;
6. `prompt_cache_key`;
7. `metadata.user_id` of Anthropic's API, if it has a session in it: after `session_`, or as `session_id` of an object
   in JSON. Any other user id names a user, who may have many sessions.

Without any, a conversation that holds an answer already is named after its beginning up to the first answer, so all its
later turns have one name, on every engine and after every restart.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b
from typing import Any

import orjson

SESSION_HEADERS = (
    "x-session-id",
    "x-claude-code-session-id",
    "x-dynamo-session-id",
    "session-id",
    "session_id",
    "x-session-affinity",
)
"""`session-id` and `session_id` are those of Codex, `x-session-affinity` that of opencode."""

MAX_SESSION_CHARS = 64
"""Longer ids are kept as their digest, because servers and routers keep many."""

DERIVED = "auto-"
"""Prefix of the name of a session that its client did not name."""

MAX_OPENING_MESSAGES = 64
"""Conversations whose first answer comes later than this have no derived name."""

_PART_OF_USER = re.compile(r"session_([\w-]+)$")
_SYSTEM = ("system", "developer")

Lookup = Callable[[str], str | None]


def named_session(fields: Mapping[str, Any], header: Lookup, of_response: Callable[[str], str] = str) -> str:
    """The session that a request names, "" for none. Values that are no texts count as absent.

    header: the value of a header by its lower-case name, None or "" if the request does not have it.
    of_response: the session of a response by its id.
    """
    for name in _given(fields, header, of_response):
        if isinstance(name, str) and name:
            return short_session(name)
    return ""


def _given(fields: Mapping[str, Any], header: Lookup, of_response: Callable[[str], str]) -> Iterator[Any]:
    yield fields.get("session_id")
    for name in SESSION_HEADERS:
        yield header(name)
    extension = fields.get("nvext")
    for part in ("agent_context", "agent_hints"):
        yield _inner(_inner(extension, part), "session_id")
    conversation = fields.get("conversation")
    yield conversation if isinstance(conversation, str) else _inner(conversation, "id")
    previous = fields.get("previous_response_id")
    yield of_response(previous) if isinstance(previous, str) and previous else None
    yield fields.get("prompt_cache_key")
    user = _inner(fields.get("metadata"), "user_id")
    yield split_user(user)[1] if isinstance(user, str) else None


def _inner(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else None


def split_user(user: str) -> tuple[str, str]:
    """A user id of Anthropic's API without the session in it, and that session, "" if it has none."""
    if not user.startswith("{"):
        found = _PART_OF_USER.search(user)
        return (user[: found.start()].rstrip("_"), found[1]) if found else (user, "")
    try:
        fields = orjson.loads(user)
    except orjson.JSONDecodeError:
        return user, ""
    session = _inner(fields, "session_id")
    if not isinstance(session, str):
        return user, ""
    del fields["session_id"]
    return orjson.dumps(fields, option=orjson.OPT_SORT_KEYS).decode(), session


def short_session(name: str) -> str:
    """A session's id in at most `MAX_SESSION_CHARS` characters: itself, or its digest."""
    if len(name) <= MAX_SESSION_CHARS:
        return name
    return blake2b(name.encode("utf-8", "surrogatepass"), digest_size=MAX_SESSION_CHARS // 2).hexdigest()


def tenant_session(tenant: str, session: str) -> str:
    """One name for the session of a tenant, "" for no session."""
    return f"{tenant}/{session}" if tenant and session else session


def conversation_of(fields: Mapping[str, Any]) -> list[Any]:
    """The messages of a body of the chat, Messages or Responses API, [] for another."""
    for name in ("messages", "input"):
        if isinstance(messages := fields.get(name), list):
            return messages
    return []


def derived_session(messages: list[Any]) -> str:
    """The name of the session of a conversation that holds an answer, "" for one that does not.

    It covers what users and tools said before the first answer, and that answer: no system prompt, which may have a
    date in it, and no cache markers, which clients move. Conversations that begin with the same prompt and the same
    answer have the same name.
    """
    digest = blake2b(digest_size=12)
    for message in messages[:MAX_OPENING_MESSAGES]:
        if not isinstance(message, Mapping):
            return ""
        role = message.get("role")
        if role in _SYSTEM:
            continue
        for text in _texts(message):
            data = text.encode("utf-8", "surrogatepass")
            digest.update(b"%d:%b" % (len(data), data))
        if is_answer(message):
            return DERIVED + digest.hexdigest()
    return ""


def turn_of(messages: list[Any]) -> int:
    """How many answers a conversation holds, each with its tool calls: the index of the turn that it asks for."""
    turns, inside = 0, False
    for message in messages:
        answer = is_answer(message)
        turns += answer and not inside
        inside = answer
    return turns


def is_answer(message: Any) -> bool:
    """Whether a message, or an item of the Responses API, is the model's."""
    kind = _inner(message, "type")
    return _inner(message, "role") == "assistant" or kind in ("function_call", "reasoning", "custom_tool_call")


def _texts(message: Mapping[str, Any]) -> Iterator[str]:
    """What a message says and which tools it calls."""
    content = message.get("content")
    if isinstance(content, str):
        yield content
    for part in content if isinstance(content, list) else ():
        for name in ("text", "name", "content"):
            if isinstance(text := _inner(part, name), str):
                yield text
    for call in calls if isinstance(calls := message.get("tool_calls"), list) else ():
        for name in ("name", "arguments"):
            if isinstance(text := _inner(_inner(call, "function"), name), str):
                yield text
    for name in ("name", "arguments", "output"):
        if isinstance(text := message.get(name), str):
            yield text
