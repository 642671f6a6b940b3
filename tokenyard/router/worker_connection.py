"""Connections to workers: asyncio protocols with keep-alive, one request at a time on each."""

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

UNIX = "unix"
MAX_IDLE = 512
SWITCHING_PROTOCOLS = 101
HEAD_END = b"\r\n\r\n"

_KEEPALIVE = [
    (getattr(socket, name), value)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
    if hasattr(socket, name)
]
"""Probe after 10 s of silence, every 5 s; three unanswered probes break the connection."""

Body = LengthBody | ChunkedBody | EndlessBody


class ResponseReader(Protocol):
    """Receives a response. To stop early, a reader calls `UpstreamConnection.drop`."""

    def on_head(self, head: ResponseHead) -> Body | None:
        """The head has arrived. Returns how to read the body, or None if the reader has dropped the connection."""

    def on_body(self, data: bytes, done: bool) -> None:
        """A part of the body. `done`: the response is complete and the connection no longer belongs to the reader."""

    def on_broken(self, why: str, *, stale: bool) -> None:
        """The response failed. `stale`: the connection was a reused one on which nothing arrived."""


@dataclass(frozen=True, slots=True)
class WorkerUrl:
    """The URL of a worker.

    host: of a Unix socket, its path.
    path: prefix of every path, "" or like "/llm".
    """

    scheme: str
    host: str
    port: int
    path: str

    @classmethod
    def parse(cls, text: str) -> "WorkerUrl":
        """Parse an http or https URL, host:port, or unix: and a path. Raises ConfigError for anything else."""
        if text.startswith(f"{UNIX}:/"):
            return cls(UNIX, text.removeprefix(f"{UNIX}:"), 0, "")
        try:
            parts = urlsplit(text.strip() if "://" in text else f"http://{text.strip()}")
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"{text!r} is not a URL: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ConfigError(f"{text!r} is not a worker; give a URL such as http://127.0.0.1:30000")
        if parts.username is not None or any(ord(letter) <= 32 or ord(letter) > 126 for letter in text.strip()):
            raise ConfigError(f"{text!r} is not a worker; its URL must be printable ASCII without a user name")
        usual = 443 if parts.scheme == "https" else 80
        return cls(parts.scheme, parts.hostname, port or usual, parts.path.rstrip("/"))

    @property
    def authority(self) -> str:
        """Host and port as in a Host header."""
        if self.scheme == UNIX:
            return "localhost"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{UNIX}:{self.host}" if self.scheme == UNIX else f"{self.scheme}://{self.authority}{self.path}"


def body_of(head: ResponseHead, *, unpack: bool = False, empty: bool = False) -> Body:
    """The parser of the body after `head`. `unpack`: return chunk contents. `empty`: a response to HEAD."""
    if empty or head.status in (204, 304):
        return LengthBody(0)
    if head.chunked:
        return ChunkedBody(unpack=unpack)
    return LengthBody(head.length) if head.length is not None else EndlessBody(unpack=unpack)


class UpstreamConnection(asyncio.Protocol):
    """A connection to a worker. `send` sends a request, and its reader receives the response."""

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
        """Disable Nagle's algorithm, as small requests must not wait for an acknowledgement, and have the kernel probe
        a silent worker.

        A machine that loses power and returns before a health check fails has forgotten the connection. Without probes
        an answer that is not a stream would be awaited until `request_timeout_secs`.
        """
        self.transport = cast(asyncio.Transport, transport)
        raw = transport.get_extra_info("socket")
        if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE:
                raw.setsockopt(socket.IPPROTO_TCP, option, value)

    def send(self, reader: ResponseReader, data: bytes, *, keep: bool = True) -> None:
        """Send a whole request; `reader` receives the response. `keep`: reuse the connection after it."""
        self._reader, self._body, self._head, self._heard, self._keep = reader, None, b"", False, keep
        self.transport.write(data)

    def drop(self, reader: ResponseReader) -> None:
        """Abort the response to `reader`. No effect if the connection serves another reader by now."""
        if self._reader is reader:
            self._reader = None
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Parse received bytes and pass them to the reader."""
        reader, body = self._reader, self._body
        if reader is None:
            # No request is open: the worker must not send anything.
            self.transport.abort()
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
        """Consume a part of the head. Once it is complete, pass it to the reader and return the bytes after it."""
        self._head += data
        while True:
            head_bytes, found, rest = self._head.partition(HEAD_END)
            if not found:
                if len(self._head) > MAX_HEAD_BYTES:
                    raise WireError("the worker's response has a head that is too long")
                return None
            head = parse_head(head_bytes)
            if head.status == SWITCHING_PROTOCOLS:
                raise WireError("the worker switched protocols without being asked")
            self._head = rest
            if head.status >= 200:
                break
        self._head, self._keep_alive = b"", head.keep_alive
        self._body = reader.on_head(head)
        return rest

    def eof_received(self) -> bool:
        """The worker closed its side; `connection_lost` follows."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Report a failure to the reader, or the end of a body that ends with its connection."""
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
        """The response is complete: return the connection to the pool, or close it if it cannot be reused."""
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
        """Take the most recently used idle connection; None if there is none."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.transport.is_closing():
                connection.transport.resume_reading()
                return connection
        return None

    def put(self, connection: UpstreamConnection) -> None:
        """Return an idle connection; it is closed if the pool is full."""
        if len(self._idle) < MAX_IDLE:
            self._idle.append(connection)
        else:
            connection.transport.close()

    def lost(self, connection: UpstreamConnection) -> None:
        """A connection was closed."""
        if connection in self._idle:
            self._idle.remove(connection)

    async def connect(self) -> UpstreamConnection:
        """Open a connection. Raises OSError, of which TimeoutError is one, if that fails."""
        protocol = UpstreamConnection(self)
        # Not wait_for, which before Python 3.12 loses a cancellation that comes as the connection is made: the try that
        # was given up would go on beside the next one.
        async with asyncio.timeout(self._timeout_s):
            await self._open(protocol)
        return protocol

    async def _open(self, protocol: UpstreamConnection) -> None:
        loop, url = asyncio.get_running_loop(), self._url
        if url.scheme == UNIX:
            await loop.create_unix_connection(lambda: protocol, url.host)
        else:
            await loop.create_connection(lambda: protocol, url.host, url.port, ssl=self._context)

    def close(self) -> None:
        """Close all idle connections."""
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.transport.abort()
