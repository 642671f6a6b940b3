"""ASGI responses, server-sent events, and cancellation when a client disconnects."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping, Sequence
from typing import Any, Protocol

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


DIRECT = "tokenyard.direct"
"""The name in a connection's scope of its `DirectWriter`."""


class FlowControl(Protocol):
    """What `DirectWriter` needs of uvicorn's class of this name."""

    write_paused: bool

    async def drain(self) -> None:
        """Wait until the transport takes more."""


class DirectWriter:
    """Writes pieces of a chunked response to a connection's transport, which ASGI's `send` can do from a task alone."""

    def __init__(self, transport: asyncio.Transport, flow: FlowControl) -> None:
        self._transport, self._flow = transport, flow

    def write(self, data: bytes) -> None:
        """Write one chunk. The response's headers were sent."""
        if not self._transport.is_closing():
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    @property
    def slow(self) -> bool:
        """Whether the transport has more than it wants to keep."""
        return self._flow.write_paused and not self._transport.is_closing()

    async def drain(self) -> None:
        """Wait until it has less."""
        await self._flow.drain()


class HttpResponse:
    """One HTTP response over ASGI: a whole body, or a stream that is written by `write` and `drain`.

    direct: writes to the connection; None where the ASGI server offers only `send`, so that `drain` sends all.
    started: whether its first byte was sent.
    """

    def __init__(
        self,
        send: Send,
        headers: Mapping[str, str] | None = None,
        dialect: Dialect = OPENAI,
        direct: DirectWriter | None = None,
    ) -> None:
        self._send = send
        self._dialect = dialect
        self._headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in (headers or {}).items()]
        self._direct = direct
        self._kept: list[bytes] = []
        self._sending = asyncio.Lock()
        self.started = False

    async def whole(self, body: bytes, *, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """Send a complete JSON body."""
        self.started = True
        extra = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in (headers or {}).items()]
        length = (b"content-length", str(len(body)).encode())
        fields = [(b"content-type", b"application/json"), length, *self._headers, *extra]
        await self._send({"type": "http.response.start", "status": status, "headers": fields})
        await self._send({"type": "http.response.body", "body": body})

    def write(self, data: bytes) -> None:
        """Write events of a stream, without waiting."""
        if self._direct is not None and self.started and not self._kept:
            self._direct.write(data)
        else:
            self._kept.append(data)

    @property
    def slow(self) -> bool:
        """Whether `drain` is needed before the next `write`."""
        return bool(self._kept) or (self._direct is not None and self._direct.slow)

    async def drain(self) -> None:
        """Send what could not be written at once, after the headers, and wait for a slow client."""
        async with self._sending:
            if not self.started:
                self.started = True
                fields = [(b"content-type", self._dialect.content_type), *_STREAM_HEADERS, *self._headers]
                await self._send({"type": "http.response.start", "status": 200, "headers": fields})
            while count := len(self._kept):
                # What is written meanwhile goes behind it.
                await self._send({"type": "http.response.body", "body": b"".join(self._kept), "more_body": True})
                del self._kept[:count]
        if self._direct is not None:
            await self._direct.drain()

    async def event(self, data: bytes) -> None:
        """Write an event and wait for the client."""
        self.write(data)
        await self.drain()

    async def end(self) -> None:
        """Close a stream."""
        if self._kept:
            await self.drain()
        await self._send({"type": "http.response.body", "body": b""})

    async def fail(self, error: TokenyardError) -> None:
        """Respond with an error; in a stream that has started, as its last event."""
        body = self._dialect.error(error)
        if not self.started:
            self._kept = []
            status = outcome_of(error).status
            await self.whole(body, status=status, headers=error_headers(status))
            return
        self.write(self._dialect.last(body))
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
