"""Sessions over HTTP: which session a request is a turn of, and how the turn ends (docs/agents.md)."""

import contextlib
import re
from typing import Any

import msgspec

from tokenyard.base import NS_PER_S, TurnEnded
from tokenyard.base.decode_errors import DECODE_ERRORS
from tokenyard.base.sessions import derived_session, named_session, turn_of
from tokenyard.server.http.large_bodies import run_off_loop
from tokenyard.server.http.request_context import RequestContext, Turn

DEFAULT_TTL_S = 300
"""Seconds that `cache_control` without a `ttl` asks for, as in Anthropic's API."""

DETAILS_HEADER = "x-return-cached-tokens-details"
"""For clients that can set headers and no fields; else SGLang's field `return_cached_tokens_details`."""

UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
MAX_TTL_S = 7 * 86_400

_CACHE_CONTROL = re.compile(rb'"cache_control"\s*:\s*(\{[^{}]*\})')
_TTL = re.compile(r"(\d{1,6})([smhd])")


class _TurnFields(msgspec.Struct):
    """What of a body concerns its session. Other fields are skipped without making objects of them."""

    session_id: Any = None
    nvext: Any = None
    conversation: Any = None
    previous_response_id: Any = None
    prompt_cache_key: Any = None
    metadata: Any = None
    prompt_cache_retention: Any = None
    return_cached_tokens_details: Any = None


_DECODER = msgspec.json.Decoder(_TurnFields)


async def read_turn(call: RequestContext) -> Turn:
    """The turn that a request is. Values of the wrong type count as absent."""
    return await run_off_loop(call.body, lambda: _read(call))


def _read(call: RequestContext) -> Turn:
    try:
        found = _DECODER.decode(call.body)
    except DECODE_ERRORS:  # no object, as of a request that is resumed
        return Turn()
    fields = msgspec.structs.asdict(found)
    responses = call.state.responses
    session = named_session(fields, call.headers.get, lambda name: responses.session_of(name, call.tenant))
    session = session or derived_session(call.messages)
    wants = found.return_cached_tokens_details is True or call.headers.get(DETAILS_HEADER) in ("1", "true")
    if not session:
        return Turn(wants_details=wants)
    return Turn(session, turn_of(call.messages), ttl_ns(call.body, found.prompt_cache_retention), wants)


def ttl_ns(body: bytes, retention: Any) -> int:
    """How long a request asks for its KV to be kept: the longest of its cache markers, or `prompt_cache_retention`.

    Quotes within a JSON string are escaped, so text that looks like a marker is none.
    """
    seconds = [_seconds(retention)]
    if b'"cache_control"' in body:
        for found in _CACHE_CONTROL.finditer(body):
            with contextlib.suppress(msgspec.DecodeError):  # cut at a brace within a text
                marker = msgspec.json.decode(found[1])
                seconds.append(_seconds(marker["ttl"]) if "ttl" in marker else DEFAULT_TTL_S)
    longest = max(seconds)
    return -1 if longest < 0 else min(longest, MAX_TTL_S) * NS_PER_S


def _seconds(text: Any) -> int:
    """A time such as "5m" or "24h" in seconds, -1 for anything else ("in_memory" among it)."""
    found = _TTL.fullmatch(text) if isinstance(text, str) else None
    return int(found[1]) * UNIT_S[found[2]] if found else -1


def end_turn(call: RequestContext) -> None:
    """Tell the engine how the answers ended that were turns of a session."""
    turn = call.turn
    if turn is None or not turn.session:
        return
    called = call.reading is not None and call.reading.called_tool
    for rid, tenant in call.ended.items():
        event = TurnEnded(turn.session, "tool" if called else "user", turn.ttl_ns, tenant)
        call.manager.end_turn(rid, event)
