"""Connections to workers: raw protocols with keep-alive, one request at a time on each."""

import asyncio
import socket
import ssl
from dataclasses import dataclass
from typing import Protocol, cast
from urllib.parse import urlsplit

from tokenyard.base import ConfigError
from tokenyard.router.http1 import (
    MAX_HEAD_BYTES,
    ChunkedBody,
    EndlessBody,
    LengthBody,
    ResponseHead,
    WireError,
    parse_head,
)

MAX_IDLE = 512
SWITCHING_PROTOCOLS = 101
HEAD_END = b"\r\n\r\n"

Body = LengthBody | ChunkedBody | EndlessBody


class ResponseReader(Protocol):
    """What takes an answer. A reader that is no longer interested aborts the connection, or drops it."""

    def on_head(self, head: ResponseHead) -> Body | None:
        """The head has come; the reader says how it wants the body, or None if it has dropped the connection."""

    def on_body(self, data: bytes, done: bool) -> None:
        """Body to pass on; with `done` the answer is complete and the connection is no longer the reader's."""

    def on_broken(self, why: str, *, stale: bool) -> None:
        """The answer will not go on. `stale`: the connection was an old one and brought nothing at all."""


@dataclass(frozen=True, slots=True)
class WorkerUrl:
    """Where a worker is. path: what stands before every path, "" or like "/llm"."""

    scheme: str
    host: str
    port: int
    path: str

    @classmethod
    def parse(cls, text: str) -> "WorkerUrl":
        """Raises ConfigError for what is no http or https URL of a server."""
        try:
            parts = urlsplit(text.strip() if "://" in text else f"http://{text.strip()}")
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"{text!r} is no URL: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ConfigError(f"{text!r} is no worker; give a URL such as http://127.0.0.1:30000")
        if parts.username is not None or any(ord(letter) <= 32 or ord(letter) > 126 for letter in text.strip()):
            raise ConfigError(f"{text!r} is no worker; its URL must have no user and no odd characters")
        usual = 443 if parts.scheme == "https" else 80
        return cls(parts.scheme, parts.hostname, port or usual, parts.path.rstrip("/"))

    @property
    def authority(self) -> str:
        """Host and port as in a Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.path}"


def body_of(head: ResponseHead, *, unpack: bool = False, empty: bool = False) -> Body:
    """How the body behind `head` is framed; `empty` for answers to HEAD."""
    if empty or head.status in (204, 304):
        return LengthBody(0)
    if head.chunked:
        return ChunkedBody(unpack=unpack)
    return LengthBody(head.length) if head.length is not None else EndlessBody(unpack=unpack)


class UpstreamConnection(asyncio.Protocol):
    """A connection to a worker. `send` begins a request; its reader then hears of the answer."""

    def __init__(self, pool: "ConnectionPool") -> None:
        self._pool = pool
        self._reader: ResponseReader | None = None
        self._head = b""
        self._body: Body | None = None
        self._keep_alive = False
        self._used = False
        self._keep = True
        self._heard = False
        self.transport = cast(asyncio.Transport, None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send small requests at once: they must not wait for the answer to the last one."""
        self.transport = cast(asyncio.Transport, transport)
        raw = transport.get_extra_info("socket")
        if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, reader: ResponseReader, data: bytes, *, keep: bool = True) -> None:
        """Send a whole request; the answer goes to `reader`. Without `keep` the connection ends with the answer."""
        self._reader, self._body, self._head, self._heard, self._keep = reader, None, b"", False, keep
        self.transport.write(data)

    def drop(self, reader: ResponseReader) -> None:
        """`reader` is not interested any more; nothing happens if the connection is another one's by now."""
        if self._reader is reader:
            self._reader = None
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Pass on what has come."""
        reader, body = self._reader, self._body
        if reader is None:
            self.transport.abort()  # nothing was asked
            return
        self._heard = True
        try:
            if body is None:
                rest = self._read_head(reader, data)
                body = self._body
                if rest is None or body is None:
                    return
                data = rest
            passed = body.feed(data)
        except WireError as error:
            self._break(str(error))
            return
        if body.done:
            self._release()
        if passed or body.done:
            reader.on_body(passed, body.done)

    def _read_head(self, reader: ResponseReader, data: bytes) -> bytes | None:
        """Take in a part of the head; once it is there, tell the reader and return what follows it."""
        self._head += data
        while True:
            head_bytes, found, rest = self._head.partition(HEAD_END)
            if not found:
                if len(self._head) > MAX_HEAD_BYTES:
                    raise WireError("the worker's answer has an endless head")
                return None
            head = parse_head(head_bytes)
            if head.status == SWITCHING_PROTOCOLS:
                raise WireError("the worker wants to switch protocols")
            self._head = rest
            if head.status >= 200:
                break
        self._head, self._keep_alive = b"", head.keep_alive
        self._body = reader.on_head(head)
        return rest

    def eof_received(self) -> bool:
        """The worker sends nothing more; `connection_lost` follows."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the reader, unless the answer ends with the connection."""
        self._pool.lost(self)
        reader, body = self._reader, self._body
        if reader is None:
            return
        if body is not None and body.end() and exc is None:
            self._reader = None
            reader.on_body(body.last, True)
            return
        self._break("the worker closed the connection" if exc is None else "the connection to the worker broke")

    def _break(self, why: str) -> None:
        reader, self._reader = self._reader, None
        self.transport.abort()
        if reader is not None:
            reader.on_broken(why, stale=self._used and not self._heard)

    def _release(self) -> None:
        """The answer is complete: keep the connection for the next request if it can take one."""
        self._reader, self._used = None, True
        if self._keep and self._keep_alive and not isinstance(self._body, EndlessBody):
            self._pool.put(self)
        else:
            self.transport.close()


class ConnectionPool:
    """The connections to one worker."""

    def __init__(self, url: WorkerUrl, context: ssl.SSLContext | None, timeout_s: float) -> None:
        self._url, self._context, self._timeout_s = url, context, timeout_s
        self._idle: list[UpstreamConnection] = []

    def take(self) -> UpstreamConnection | None:
        """A connection that waits for work, the one used last; None if there is none."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.transport.is_closing():
                connection.transport.resume_reading()
                return connection
        return None

    def put(self, connection: UpstreamConnection) -> None:
        """Keep a connection for later."""
        if len(self._idle) < MAX_IDLE:
            self._idle.append(connection)
        else:
            connection.transport.close()

    def lost(self, connection: UpstreamConnection) -> None:
        """A connection has ended."""
        if connection in self._idle:
            self._idle.remove(connection)

    async def connect(self) -> UpstreamConnection:
        """A new connection. Raises OSError (and its TimeoutError) if there is none to be had in time."""
        loop = asyncio.get_running_loop()
        making = loop.create_connection(
            lambda: UpstreamConnection(self), self._url.host, self._url.port, ssl=self._context
        )
        _, protocol = await asyncio.wait_for(making, self._timeout_s)
        return protocol

    def close(self) -> None:
        """Close what waits for work."""
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.transport.abort()
