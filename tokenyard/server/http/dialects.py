"""How the families of APIs write errors and streams; the rest is the same for all."""

from collections.abc import Callable
from dataclasses import dataclass

import orjson

from tokenyard.base import ContextLengthError, TokenyardError
from tokenyard.server.http.errors import error_body, outcome_of

SERVER_SENT = b"text/event-stream; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Dialect:
    """How an API writes errors and streams.

    content_type: content type of streams.
    error: an error as a whole body.
    last: an error body as the last event of a stream.
    """

    content_type: bytes
    error: Callable[[TokenyardError], bytes]
    last: Callable[[bytes], bytes]


_ANTHROPIC_TYPES = {503: "overloaded_error", 429: "rate_limit_error", 500: "api_error", 504: "api_error"}


def _anthropic_error(error: TokenyardError) -> bytes:
    outcome = outcome_of(error)
    kind = _ANTHROPIC_TYPES.get(outcome.status, outcome.type)
    message = _anthropic_too_long(error) if outcome.code == "context_length_exceeded" else error.message
    return orjson.dumps({"type": "error", "error": {"type": kind, "message": message}})


def _anthropic_too_long(error: TokenyardError) -> str:
    """What does not fit, in Anthropic's words: Claude Code reads the numbers, asks for less or compacts the session."""
    if not isinstance(error, ContextLengthError) or error.prompt_tokens is None:
        return f"prompt is too long: {error.message}"
    if error.answer_tokens is None:
        return f"prompt is too long: {error.prompt_tokens} tokens > {error.most} maximum"
    return (
        f"input length and `max_tokens` exceed context limit: {error.prompt_tokens} + {error.answer_tokens} >"
        f" {error.most}, decrease input length or `max_tokens` and try again"
    )


def _responses_error(body: bytes) -> dict[str, object]:
    """The error event of a stream of responses, from an error body: its `type` is that of the event."""
    return orjson.loads(body)["error"] | {"type": "error"}  # type: ignore[no-any-return]


def _ollama_error(error: TokenyardError) -> bytes:
    return orjson.dumps({"error": error.message, "code": outcome_of(error).code})


OPENAI = Dialect(SERVER_SENT, error_body, lambda body: b"data: " + body + b"\n\n")
ANTHROPIC = Dialect(SERVER_SENT, _anthropic_error, lambda body: b"event: error\ndata: " + body + b"\n\n")
RESPONSES = Dialect(SERVER_SENT, error_body, lambda body: named_event("error", _responses_error(body)))
OLLAMA = Dialect(b"application/x-ndjson", _ollama_error, lambda body: body + b"\n")


def dialect_of(path: str) -> Dialect:
    """The dialect of the API at a path."""
    for prefix, dialect in (("/v1/messages", ANTHROPIC), ("/v1/responses", RESPONSES), ("/api/", OLLAMA)):
        if path.startswith(prefix):
            return dialect
    return OPENAI


def named_event(name: str, payload: object) -> bytes:
    """A named server-sent event."""
    return b"event: " + name.encode() + b"\ndata: " + orjson.dumps(payload) + b"\n\n"
