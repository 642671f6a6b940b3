"""uvicorn's HTTP protocol with limits on what a connection may send and how long it may take."""

import time
from http import HTTPStatus
from typing import Any, Literal

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tokenyard.server.http.api_keys import OPEN_PATHS
from tokenyard.server.http.connections import MIN_BODY_BYTES_PER_S, ConnectionLimits
from tokenyard.server.http.errors import HttpError, error_body, error_headers, outcome_of
from tokenyard.server.http.streaming import DIRECT, DirectWriter, HttpResponse, Receive, Scope, Send

MAX_HEADER_BYTES = 65536
LINGER_S = 2.0
"""How long a refused connection stays open and discards input. The kernel resets a connection that is closed with
unread bytes, and a client that is still sending would lose the response.
"""

ConnectionStage = Literal["idle", "head", "body", "answer"]


class HttpProtocol(HttpToolsProtocol):
    """Refuses requests whose headers, chunk lines or trailers are too long or too slow, which uvicorn does not limit.

    See `ConnectionLimits` for the limits.
    """

    def __init__(self, *arguments: Any, limits: ConnectionLimits, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._limits = limits
        self._handler = self.app
        self._stage: ConnectionStage = "idle"
        self._since = time.monotonic()
        self._body_bytes = 0
        self._bytes_without_progress = 0
        self._head_bytes = 0
        self._refused = False
        self._for_probes = False

    def connection_made(self, transport: Any) -> None:
        """Accept a connection. Beyond the limit only the latest `probes` connections stay, for probes."""
        super().connection_made(transport)
        max_connections = self._limits.max_connections
        if not max_connections or len(self.connections) <= max_connections:
            return
        self._for_probes = True
        reserve = [other for other in self.connections if isinstance(other, HttpProtocol) and other._for_probes]
        if len(reserve) > self._limits.probes:
            waiting = [other for other in reserve if other._stage != "answer"]
            oldest = min(waiting or reserve, key=lambda other: other._since)
            # connection_lost runs in the loop's next iteration; do not count it until then.
            self.connections.discard(oldest)
            oldest.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Process received bytes."""
        if self._refused:
            return
        self._bytes_without_progress += len(data)
        super().data_received(data)
        if self._bytes_without_progress > MAX_HEADER_BYTES and not self.transport.is_closing():
            self._refuse_head()

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are not HTTP, with an error body as for all errors."""
        self._refuse(HttpError("invalid_request", "this is not a valid HTTP/1.1 request"), LINGER_S)

    def on_message_begin(self) -> None:
        """Start a request."""
        self._enter("head")
        self._head_bytes = 0
        super().on_message_begin()
        self.scope[DIRECT] = DirectWriter(self.transport, self.flow)  # type: ignore[literal-required]

    def on_url(self, url: bytes) -> None:
        """Process a part of the URL."""
        self._head_bytes += len(url)
        super().on_url(url)

    def on_headers_complete(self) -> None:
        """Start the handler, or refuse the request if there are too many connections."""
        if self._head_bytes > MAX_HEADER_BYTES:
            self._refuse_head()
            return
        self._progress()
        self._enter("body")
        self._body_bytes = 0
        crowded = self._for_probes and len(self.connections) > self._limits.max_connections
        path = self.url.split(b"?", 1)[0].decode("latin-1")
        self.app = _refuse_overload if crowded and path not in OPEN_PATHS else self._handler
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Process a part of a body."""
        if self._refused:
            return
        self._progress()
        self._body_bytes += len(body)
        super().on_body(body)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Process a header. Trailers are ignored."""
        if self._stage == "head":
            self._head_bytes += len(name) + len(value)
            super().on_header(name, value)

    def on_message_complete(self) -> None:
        """Note that a request is complete."""
        if self._refused:
            return
        self._progress()
        answered = self.cycle is None or self.cycle.response_complete
        self._enter("idle" if answered else "answer")
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Note that a response is complete; the next request may have arrived."""
        if self._stage == "answer" and not self.pipeline:
            self._enter("idle")
        super().on_response_complete()

    def overdue(self, now: float, factor: float) -> str:
        """See `Connection.overdue`."""
        answering = self.cycle is not None and not self.cycle.response_complete
        if self._refused or self.pipeline or (answering and self._stage == "head"):
            # The connection is closing, or an earlier response is still being written.
            return ""
        limits, waited_s = self._limits, now - self._since
        if self._stage == "idle" and waited_s > factor * limits.idle_timeout_s:
            return "a request"
        if self._stage == "head" and waited_s > factor * limits.head_timeout_s:
            return "the headers"
        allowed_s = factor * limits.body_timeout_s + self._body_bytes / MIN_BODY_BYTES_PER_S
        return "the body" if self._stage == "body" and waited_s > allowed_s else ""

    def end(self, waited_for: str) -> None:
        """Close the connection, with an error response if a request has started."""
        if self._stage == "idle":
            self.transport.close()
        else:
            self._refuse(HttpError("request_timeout", f"{waited_for} did not come in time"))

    def _enter(self, stage: ConnectionStage) -> None:
        self._stage, self._since = stage, time.monotonic()

    def _progress(self) -> None:
        self._bytes_without_progress = 0

    def _refuse_head(self) -> None:
        message = f"the headers are longer than {MAX_HEADER_BYTES} bytes"
        self._refuse(HttpError("headers_too_large", message), LINGER_S)

    def _refuse(self, error: HttpError, linger_s: float = 0.0) -> None:
        """Answer an incomplete request, unless another response is being written, and close `linger_s` later."""
        if self._refused:
            return
        self._refused = True
        cycle = self.cycle
        unanswered = cycle is None or cycle.response_complete or (self._stage == "body" and not cycle.response_started)
        if not unanswered or self.pipeline:
            self.transport.close()
            return
        body, status = error_body(error), outcome_of(error).status
        fields = {
            "content-type": "application/json",
            "connection": "close",
            "content-length": len(body),
            **error_headers(status),
        }
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n{lines}\r\n"
        self.transport.write(head.encode() + body)
        if linger_s:
            self.loop.call_later(linger_s, self.transport.close)
        else:
            self.transport.close()


async def _refuse_overload(scope: Scope, receive: Receive, send: Send) -> None:
    """Refuse a request because there are too many connections."""
    error = HttpError("too_many_connections", "the server has too many connections; try again later")
    await HttpResponse(send, {"connection": "close"}).fail(error)
