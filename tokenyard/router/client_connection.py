"""Connections from clients: an asyncio protocol that reads whole requests and streams responses."""

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, cast
from urllib.parse import unquote

import httptools

from tokenyard.base import TokenyardError
from tokenyard.router.errors import RouterError, error_body, error_headers, status_line, status_of

MAX_HEAD_BYTES = 65536
MAX_HEADERS = 200
MAX_WAITING = 8
LINGER_S = 2.0
"""How long to wait before closing on a refused client: most clients read a response only after sending everything."""

WRITE_HIGH_WATER = 1 << 18
UPLOAD_PATH = "/v1/files"
JSON_TYPE = (b"content-type", b"application/json")

_ABOUT_BODY = frozenset((b"content-length", b"content-encoding", b"transfer-encoding", b"expect"))

Headers = list[tuple[bytes, bytes]]


@dataclass(slots=True)
class ClientRequest:
    """A whole request.

    method: as received, such as b"POST".
    target: path and query, not decoded.
    headers: lower-case names and values, in order.
    keep_alive: whether the client accepts another response on this connection.
    http10: whether the client speaks HTTP/1.0.
    body: not decoded.
    path: the decoded path, without the query.
    request_id: value of x-request-id, the client's or the router's.
    peer: the address of the client.
    upload: what has read the body, where it was read as it arrived; `body` is empty then.
    named: the first value of each header.
    """

    method: bytes
    target: bytes
    headers: Headers
    keep_alive: bool
    http10: bool
    body: bytes = b""
    path: str = ""
    request_id: bytes = b""
    peer: str = ""
    upload: "BodyReader | None" = None

    named: dict[bytes, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.named = dict(reversed(self.headers))

    def get(self, name: bytes) -> bytes:
        """The first value of a header; b"" if absent."""
        return self.named.get(name, b"")


class BodyReader(Protocol):
    """What reads the body of a request as it arrives."""

    max_bytes: int
    """The largest body that it takes."""

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""

    def broken(self) -> None:
        """The rest does not arrive."""


class ResponseWriter(Protocol):
    """Where a response goes: a client's connection, or the router's own memory."""

    paused: bool
    """Whether the client reads more slowly than the response arrives."""

    def begin(self, first_line: bytes, headers: Headers, more: bytes = b"") -> None:
        """Send the head of a response, followed by `more`."""

    def write(self, data: bytes) -> None:
        """Send a part of the body."""

    def end(self, *, keep: bool = True) -> None:
        """The response is complete. `keep`: whether another may follow on the same connection."""

    def answer(self, status: int, body: bytes, headers: Headers | None = None) -> None:
        """Send a whole response of the router."""

    def fail(self, error: TokenyardError, path: str = "") -> None:
        """Answer with an error, in the form of the API at `path`."""

    def abort(self) -> None:
        """The response cannot be completed."""


class ClientHandler(Protocol):
    """What answers a request."""

    def client_gone(self) -> None:
        """The client has disconnected."""

    def pause(self) -> None:
        """The client reads more slowly than the response arrives: stop writing."""

    def resume(self) -> None:
        """The client has caught up: continue writing."""


@dataclass(slots=True)
class _Reading:
    """A request that has not arrived completely."""

    url: bytes = b""
    headers: Headers = field(default_factory=list)
    head_bytes: int = 0
    header_bytes: int = 0
    parts: list[bytes] = field(default_factory=list)
    body_bytes: int = 0
    in_body: bool = False
    upload: BodyReader | None = None


Uploads = Callable[["ClientConnection", ClientRequest], BodyReader | None]
"""Gives what reads the body of a `POST` to `UPLOAD_PATH`, given its head; None to keep it in memory. Raises
TokenyardError for a request that is refused.
"""

Handler = Callable[["ClientConnection", ClientRequest], ClientHandler | None]


class ClientConnection(asyncio.Protocol):
    """A client's connection. `handler` is called with one whole request at a time, and responds with `begin`, `write`
    and `end`, or with `answer`.

    `progress` changes when data arrives or the client reads again, so that `check_time` can detect stalled connections.
    """

    def __init__(
        self,
        handler: Handler,
        connections: "dict[ClientConnection, None]",
        max_body_bytes: int,
        max_connections: int = 0,
        uploads: Uploads | None = None,
    ) -> None:
        """`connections`: all open ones, the oldest first; beyond `max_connections` (0: no limit) one is closed."""
        self._uploads = uploads
        self._handler, self._connections, self._max_body = handler, connections, max_body_bytes
        self._max_connections = max_connections
        self._parser = httptools.HttpRequestParser(self)
        self._reading: _Reading | None = None
        self._waiting: deque[ClientRequest] = deque()
        self._closing = False
        self.current: ClientRequest | None = None
        self.job: ClientHandler | None = None
        self.progress = 0
        self._seen, self._stalled_since_s = -1, 0.0
        self._head_since_s: float | None = None
        self.paused = False
        self.transport = cast(asyncio.Transport, None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Disable Nagle's algorithm: the first token of a stream must not wait for an acknowledgement."""
        self.transport = cast(asyncio.Transport, transport)
        self._connections[self] = None
        if 0 < self._max_connections < len(self._connections):
            self._make_room()
        raw = transport.get_extra_info("socket")
        if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.transport.set_write_buffer_limits(WRITE_HIGH_WATER)

    @property
    def idle(self) -> bool:
        """Whether no request has arrived on it that is not answered, not even a head."""
        return self.current is None and (self._reading is None or not self._reading.in_body)

    def _make_room(self) -> None:
        """Close the oldest idle connection, this one if no other is idle."""
        idle = next((other for other in self._connections if other.idle), self)
        del self._connections[idle]
        idle.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has disconnected."""
        self._connections.pop(self, None)
        self._waiting.clear()
        self._drop_upload()
        job, self.job, self._closing = self.job, None, True
        if job is not None:
            job.client_gone()

    def eof_received(self) -> bool:
        """Treat the end of a client's input as a disconnect: most clients that hang up show nothing else."""
        return False

    def pause_writing(self) -> None:
        """The write buffer is full."""
        self.paused = True
        if self.job is not None:
            self.job.pause()

    def resume_writing(self) -> None:
        """The write buffer has drained."""
        self.paused = False
        self.progress += 1
        if self.job is not None:
            self.job.resume()

    def check_time(self, now_s: float, timeout_s: float) -> None:
        """Close a connection that has been idle, or stalled in its request or its response, for `timeout_s`.

        The head of a request must be complete in this time, however steadily it arrives.
        """
        if self._reading is None or self._reading.in_body:
            self._head_since_s = None
        elif self._head_since_s is None:
            self._head_since_s = now_s
        elif now_s - self._head_since_s > timeout_s and self.current is None:
            self.refuse(RouterError(408, "the request did not arrive in time", code="request_timeout"))
            return
        if self.progress != self._seen or (self.current is not None and not self.paused):
            self._seen, self._stalled_since_s = self.progress, now_s
        elif now_s - self._stalled_since_s > timeout_s:
            if self._reading is not None and self.current is None:
                self.refuse(RouterError(408, "the request did not arrive in time", code="request_timeout"))
            else:
                self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Parse received bytes."""
        self.progress += 1
        while data and not self._closing:
            data = self._parse(data)

    def _parse(self, data: bytes) -> bytes:
        """Parse `data`; returns what to parse next, b"" if nothing is left."""
        reading = self._reading
        if reading is not None and not reading.in_body:
            reading.head_bytes += len(data)
        try:
            self._parser.feed_data(data)
            reading = self._reading
            if reading is not None and not reading.in_body and reading.head_bytes > MAX_HEAD_BYTES:
                raise self._long_head()
        except httptools.HttpParserUpgrade as upgrade:
            return self._without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            cause = error.__context__
            if not isinstance(cause, TokenyardError):
                cause = RouterError(400, "invalid HTTP request", code="bad_http")
            self.refuse(cause)
        except TokenyardError as error:
            self.refuse(error)
        return b""

    def on_message_begin(self) -> None:
        """Parser callback: a request begins."""
        self._reading = _Reading()

    def on_url(self, url: bytes) -> None:
        """Parser callback: a part of the request target. Raises RouterError (414) if it is too long."""
        assert self._reading is not None
        self._reading.url += url
        if len(self._reading.url) > MAX_HEAD_BYTES:
            raise RouterError(414, "the address is too long", code="uri_too_long")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Parser callback: one header. Raises RouterError (431) if the head is too long."""
        reading = self._reading
        assert reading is not None
        reading.headers.append((name.lower(), value))
        reading.header_bytes += len(name) + len(value)
        if reading.header_bytes > MAX_HEAD_BYTES:
            raise self._long_head()

    def on_headers_complete(self) -> None:
        """Parser callback: the head is complete. Raises RouterError for a head that is refused."""
        reading = self._reading
        assert reading is not None
        reading.in_body = True
        if len(reading.headers) > MAX_HEADERS:
            raise RouterError(431, f"there are more than {MAX_HEADERS} headers", code="headers_too_large")
        if self._uploads is not None and self._parser.get_method() == b"POST":
            request = self._request(reading)
            if request.path == UPLOAD_PATH:
                reading.upload = self._uploads(self, request)
        most = self._max_body if reading.upload is None else reading.upload.max_bytes
        for name, value in reading.headers:
            if name in _ABOUT_BODY:
                self._about_body(name, value, most)

    def _about_body(self, name: bytes, value: bytes, most: int) -> None:
        """Check a header that describes the body, which may have `most` bytes."""
        if name == b"content-length" and int(value) > most:
            raise self._too_large(most)
        if name == b"content-encoding" and value.lower() not in (b"", b"identity"):
            raise RouterError(415, "the body is compressed; send it uncompressed", code="unsupported_encoding")
        if name == b"transfer-encoding" and value.lower() != b"chunked":
            raise RouterError(501, "the only supported Transfer-Encoding is chunked", code="unsupported_encoding")
        if name == b"expect" and value.lower() == b"100-continue" and self.current is None:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        """Parser callback: a part of the body. Raises RouterError (413) if it is too large."""
        reading = self._reading
        assert reading is not None
        if reading.upload is not None:
            reading.upload.feed(body)
            return
        reading.body_bytes += len(body)
        if reading.body_bytes > self._max_body:
            raise self._too_large(self._max_body)
        reading.parts.append(body)

    def on_message_complete(self) -> None:
        """Parser callback: the request is complete."""
        reading, version = self._reading, self._parser.get_http_version()
        assert reading is not None
        if self._parser.should_upgrade():
            return
        if version not in ("1.0", "1.1"):
            raise RouterError(505, "unsupported HTTP version; use HTTP/1.1", code="bad_http")
        self._reading = None
        request = self._request(reading)
        if self.current is not None:
            self._waiting.append(request)
            if len(self._waiting) >= MAX_WAITING:
                self.transport.pause_reading()
            return
        self._start(request)

    def _request(self, reading: _Reading) -> ClientRequest:
        """The request as far as it has arrived."""
        parts, http10 = reading.parts, self._parser.get_http_version() == "1.0"
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        keep_alive = self._parser.should_keep_alive()
        request = ClientRequest(self._parser.get_method(), reading.url, reading.headers, keep_alive, http10, body)
        path = request.target.partition(b"?")[0].decode("latin-1")
        request.path = unquote(path) if "%" in path else path
        peer = self.transport.get_extra_info("peername")
        request.peer = str(peer[0]) if isinstance(peer, tuple) else ""
        request.upload = reading.upload
        return request

    def _drop_upload(self) -> None:
        """The rest of the request that is being read does not arrive."""
        if self._reading is not None and self._reading.upload is not None:
            self._reading.upload.broken()
        self._reading = None

    def _without_upgrade(self, rest: bytes) -> bytes:
        """Ignore an offer of another protocol (RFC 9110, 7.8): the request without its Upgrade header, and `rest`.

        The parser stops at an upgrade. Java's client offers HTTP/2 with its first request.
        """
        reading, method = self._reading, self._parser.get_method()
        assert reading is not None
        if method == b"CONNECT":
            self.refuse(RouterError(405, "CONNECT is not supported", code="method_not_allowed"))
            return b""
        self._parser = httptools.HttpRequestParser(self)
        kept = [header for header in reading.headers if header[0] not in (b"upgrade", b"connection", b"http2-settings")]
        head = [b"%b %b HTTP/1.1" % (method, reading.url), *[b"%b: %b" % header for header in kept]]
        return b"\r\n".join(head) + b"\r\n\r\n" + rest

    def _long_head(self) -> RouterError:
        return RouterError(431, f"the headers are longer than {MAX_HEAD_BYTES} bytes", code="headers_too_large")

    def _too_large(self, most: int) -> RouterError:
        return RouterError(413, f"the body is larger than {most} bytes", code="body_too_large")

    def _start(self, request: ClientRequest) -> None:
        self.current = request
        self.hand_to(self._handler, request)

    def hand_to(self, handler: Handler, request: ClientRequest) -> None:
        """Have `handler` answer a request, unless its client has left."""
        if self.current is not request:
            return
        job = handler(self, request)
        if self.current is request:
            self.job = job
            if job is not None and self.paused:
                job.pause()

    def begin(self, first_line: bytes, headers: Headers, more: bytes = b"") -> None:
        """Send the head of a response, followed by `more`."""
        request = self.current
        if request is None:
            return
        lines = [first_line, *[b"%b: %b" % header for header in headers]]
        lines.append(b"x-request-id: " + request.request_id)
        if not request.keep_alive or self._closing:
            lines.append(b"connection: close")
        elif request.http10:
            lines.append(b"connection: keep-alive")
        self.transport.write(b"\r\n".join(lines) + b"\r\n\r\n" + more)

    def write(self, data: bytes) -> None:
        """Send a part of the body."""
        self.transport.write(data)

    def end(self, *, keep: bool = True) -> None:
        """The response is complete. The connection is closed if `keep` is False."""
        request, self.current, self.job = self.current, None, None
        if request is None:
            return
        if not keep or not request.keep_alive or self._closing:
            self._closing = True
            self._waiting.clear()
            self.transport.close()
        elif self._waiting:
            following = self._waiting.popleft()
            self.transport.resume_reading()
            asyncio.get_running_loop().call_soon(self._go_on, following)

    def _go_on(self, request: ClientRequest) -> None:
        if not self.transport.is_closing():
            self._start(request)

    def answer(self, status: int, body: bytes, headers: Headers | None = None) -> None:
        """Send a whole response of the router."""
        if self.current is None:
            return
        empty = self.current.method == b"HEAD"
        fields = [*(headers or []), (b"content-length", b"%d" % len(body))]
        self.begin(status_line(status), fields, b"" if empty else body)
        self.end()

    def fail(self, error: TokenyardError, path: str = "") -> None:
        """Answer with an error, in the form of the API at `path`."""
        status = status_of(error)
        self.answer(status, error_body(error, path), [JSON_TYPE, *error_headers(status)])

    def abort(self) -> None:
        """The response cannot be completed: close the connection."""
        self.transport.abort()

    def refuse(self, error: TokenyardError) -> None:
        """Refuse an invalid request and close the connection, after the current response if there is one."""
        self._drop_upload()
        self._closing = True
        self._waiting.clear()
        if self.current is not None:
            return
        body, status = error_body(error), status_of(error)
        fields = [JSON_TYPE, *error_headers(status), (b"content-length", b"%d" % len(body))]
        lines = [status_line(status), *[b"%b: %b" % header for header in fields], b"connection: close"]
        self.transport.write(b"\r\n".join(lines) + b"\r\n\r\n" + body)
        asyncio.get_running_loop().call_later(LINGER_S, self.transport.close)
