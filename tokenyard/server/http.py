"""HTTP as uvicorn speaks it, with a bound on how long the head of a request may be."""

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tokenyard.server.errors import HttpError, error_body

LONGEST_HEAD_BYTES = 65536


class HttpProtocol(HttpToolsProtocol):
    """Refuses a request whose address and headers do not come to an end: uvicorn would keep them all in memory."""

    _in_head = False
    _head_bytes = 0

    def data_received(self, data: bytes) -> None:
        """Take in what has come on the connection."""
        super().data_received(data)
        if not self._in_head:
            self._head_bytes = 0
            return
        self._head_bytes += len(data)
        if self._head_bytes > LONGEST_HEAD_BYTES and not self.transport.is_closing():
            self._refuse()

    def on_message_begin(self) -> None:
        """A request begins."""
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """All headers of a request are there."""
        self._in_head = False
        super().on_headers_complete()

    def _refuse(self) -> None:
        message = f"the headers are longer than {LONGEST_HEAD_BYTES} bytes"
        body = error_body(HttpError("headers_too_large", message))
        head = (
            "HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Type: application/json\r\nConnection: close\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
