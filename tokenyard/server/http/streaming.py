"""ASGI responses, server-sent events, and cancellation when a client disconnects."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping, Sequence
from typing import Any

import orjson

from tokenyard.base import TokenyardError
from tokenyard.server.http.dialects import OPENAI, Dialect
from tokenyard.server.http.errors import HttpError, error_headers, outcome_of

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

DONE = b"data: [DONE]\n\n"
READ_ON_FACTOR = 16
_STREAM_HEADERS = (
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class ClientGoneError(Exception):
    """The client disconnected before its request was read."""


class HttpResponse:
    """One HTTP response over ASGI: a whole body or a stream of events. `started`: whether its first byte was sent."""

    def __init__(self, send: Send, headers: Mapping[str, str] | None = None, dialect: Dialect = OPENAI) -> None:
        self._send = send
        self._dialect = dialect
        self._headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in (headers or {}).items()]
        self.started = False

    async def whole(self, body: bytes, *, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """Send a complete JSON body."""
        self.started = True
        extra = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in (headers or {}).items()]
        length = (b"content-length", str(len(body)).encode())
        fields = [(b"content-type", b"application/json"), length, *self._headers, *extra]
        await self._send({"type": "http.response.start", "status": status, "headers": fields})
        await self._send({"type": "http.response.body", "body": body})

    def event(self, data: bytes) -> Awaitable[None]:
        """Send the bytes of an event; the first call sends the headers first."""
        body = {"type": "http.response.body", "body": data, "more_body": True}
        return self._send(body) if self.started else self._open(body)

    async def _open(self, body: Message) -> None:
        """Send the headers of a stream and its first bytes."""
        self.started = True
        fields = [(b"content-type", self._dialect.content_type), *_STREAM_HEADERS, *self._headers]
        await self._send({"type": "http.response.start", "status": 200, "headers": fields})
        await self._send(body)

    async def end(self) -> None:
        """Close a stream."""
        await self._send({"type": "http.response.body", "body": b""})

    async def fail(self, error: TokenyardError) -> None:
        """Respond with an error; in a stream that has started, as its last event."""
        body = self._dialect.error(error)
        if not self.started:
            status = outcome_of(error).status
            await self.whole(body, status=status, headers=error_headers(status))
            return
        await self.event(self._dialect.last(body))
        await self.end()


async def read_body(receive: Receive, limit_bytes: int) -> bytes:
    """The request's body. Raises HttpError (413) beyond `limit_bytes` and ClientGoneError on a disconnect.

    Most clients read the response only after they have sent the whole body, so the rest of a body that is too large is
    read and discarded, up to `READ_ON_FACTOR` times the limit.
    """
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        part = message.get("body", b"")
        size += len(part)
        more = message.get("more_body", False)
        if size <= limit_bytes:
            parts.append(part)
        elif not more or size > READ_ON_FACTOR * limit_bytes:
            raise HttpError("body_too_large", f"the body is larger than {limit_bytes} bytes")
        if not more:
            return b"".join(parts)


async def _hung_up(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`, and cancel it as soon as the client disconnects. The body must have been read."""
    task, watcher = asyncio.ensure_future(work), asyncio.ensure_future(_hung_up(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


class ChunkWriter:
    """Encodes the chunks of one answer in an OpenAI stream.

    The constant parts of a chunk are encoded once; a plain chunk only encodes its text and joins three pieces.
    `head` has id, object, created and model; `null_usage` adds the `"usage": null` of include_usage.
    """

    def __init__(self, head: Mapping[str, Any], index: int, *, chat: bool, null_usage: bool) -> None:
        opening = b"data: " + orjson.dumps(head)[:-1] + b',"choices":[{"index":%d,' % index
        self._close = b"}" if chat else b""
        self._usage = b',"usage":null' if null_usage else b""
        self._counted = self._close + b',"logprobs":null,"finish_reason":null}],"usage":'
        self._tail = self._close + b',"logprobs":null,"finish_reason":null}]' + self._usage + b"}\n\n"
        self._head = opening + (b'"delta":{"content":' if chat else b'"text":')
        self._choice = opening
        self._role = opening + b'"delta":{"role":"assistant","content":""' + self._tail

    def role(self) -> bytes:
        """The first chunk of a chat answer."""
        return self._role

    def plain(self, text: str) -> bytes:
        """A chunk with text only."""
        return b"".join((self._head, orjson.dumps(text), self._tail))

    def counted(self, text: str, usage: bytes) -> bytes:
        """A chunk with text and the usage so far (JSON), for `continuous_usage_stats`."""
        return b"".join((self._head, orjson.dumps(text), self._counted, usage, b"}\n\n"))

    def delta(
        self,
        delta: Mapping[str, Any],
        *,
        finish_reason: str | None = None,
        matched: int | str | None = None,
        logprobs: Any = None,
        token_ids: list[int] | None = None,
        usage: Mapping[str, Any] | None = None,
    ) -> bytes:
        """A chunk of a chat whose delta has more than content, such as tool calls."""
        choice: dict[str, Any] = {"delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        if finish_reason is not None:
            choice["matched_stop"] = matched
        if token_ids is not None:
            choice["token_ids"] = token_ids
        last = b',"usage":' + orjson.dumps(usage) if usage is not None else self._usage
        return b"".join((self._choice, orjson.dumps(choice)[1:], b"]", last, b"}\n\n"))

    def full(
        self,
        text: str,
        *,
        finish_reason: str | None = None,
        matched: int | str | None = None,
        logprobs: Any = None,
        token_ids: list[int] | None = None,
        usage: Mapping[str, Any] | None = None,
    ) -> bytes:
        """A chunk with all fields."""
        extra = b""
        if finish_reason is not None:
            extra += b',"matched_stop":' + orjson.dumps(matched)
        if token_ids is not None:
            extra += b',"token_ids":' + orjson.dumps(token_ids)
        last = b',"usage":' + orjson.dumps(usage) if usage is not None else self._usage
        return b"".join(
            (
                self._head,
                orjson.dumps(text),
                self._close,
                b',"logprobs":' + orjson.dumps(logprobs),
                b',"finish_reason":' + orjson.dumps(finish_reason),
                extra + b"}]" + last + b"}\n\n",
            )
        )


def with_token_ids(events: bytes, token_ids: Sequence[int]) -> bytes:
    """Events of a stream, of which the last one also has the ids of all their tokens."""
    end = len(events.rstrip(b"\n")) - 1
    return b"".join((events[:end], b',"token_ids":', orjson.dumps(token_ids), events[end:]))


def closing_event(head: Mapping[str, Any], extra: Mapping[str, Any]) -> bytes:
    """The last chunk of a stream, without choices, with `extra` fields such as usage."""
    return b"data: " + orjson.dumps({**head, "choices": [], **extra}) + b"\n\n"
