"""HTTP/1.1 towards workers: strict parsers of response heads and bodies, and request heads.

Only framing is parsed. Ambiguous framing (two lengths, a length and chunks, bytes after the end) is an error, so that a
worker cannot smuggle data into another response.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

MAX_HEAD_BYTES = 65536
MAX_HELD_BYTES = 1 << 20
"""Chunks up to this size are forwarded whole, so that a stream that fails ends between two chunks."""

HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-connection proxy-authenticate proxy-authorization te trailer transfer-encoding "
    b"upgrade expect content-length host http2-settings".split()
)
"""Hop-by-hop headers of a request (RFC 9110, 7.6.1), and those that the router writes itself."""

LAST_CHUNK = b"0\r\n\r\n"

_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-5]\d\d)(?: ([^\r\n]*))?\Z")
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+\Z")
_LENGTH = re.compile(rb"\d{1,15}\Z")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,12})(?:[ \t]*;[^\r\n]{0,1024})?\r\n")
_BAD_VALUE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_MAX_LINE_BYTES = 1100
_OWN_RESPONSE_HEADERS = frozenset(b"connection keep-alive proxy-connection te trailer upgrade".split())


class WireError(Exception):
    """The worker violates HTTP/1.1; the message says how."""


@dataclass(slots=True)
class ResponseHead:
    """The head of a response.

    status: HTTP status.
    reason: reason phrase.
    headers: lower-case names and values, in order, without those of the connection.
    length: of the body in bytes; None if unknown.
    chunked: whether the body is chunked.
    keep_alive: whether the connection can be reused after it.
    """

    status: int
    reason: bytes
    headers: list[tuple[bytes, bytes]]
    length: int | None
    chunked: bool
    keep_alive: bool

    def get(self, name: bytes) -> bytes:
        """The first value of a header; b"" if absent."""
        return next((value for known, value in self.headers if known == name), b"")


def parse_head(data: bytes) -> ResponseHead:
    """Parse a response head, without the empty line. Raises WireError if it is invalid."""
    first, *lines = data.split(b"\r\n")
    match = _STATUS.match(first)
    if match is None:
        raise WireError("the worker's response has an invalid status line")
    headers, length, chunked = [], None, False
    keep_alive = match[1] == b"1"
    for line in lines:
        name, colon, value = line.partition(b":")
        name, value = name.lower(), value.strip(b" \t")
        if not colon or not _NAME.match(name) or _BAD_VALUE.search(value):
            raise WireError("the worker's response has an invalid header")
        if name == b"content-length":
            if not _LENGTH.match(value) or length not in (None, int(value)):
                raise WireError("the worker's response has an invalid Content-Length")
            length = int(value)
        elif name == b"transfer-encoding":
            if value.lower() != b"chunked" or chunked:
                raise WireError("the worker's response has an unsupported Transfer-Encoding")
            chunked = True
        elif name == b"connection":
            words = value.lower()
            keep_alive = b"close" not in words and (keep_alive or b"keep-alive" in words)
        if name not in _OWN_RESPONSE_HEADERS:
            headers.append((name, value))
    if chunked and length is not None:
        raise WireError("the worker's response has both Content-Length and Transfer-Encoding")
    return ResponseHead(int(match[2]), match[3] or b"", headers, length, chunked, keep_alive)


def as_chunk(data: bytes) -> bytes:
    """`data` as one chunk; b"" for no data, because an empty chunk ends the body."""
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""


class LengthBody:
    """A body of known length. `feed` returns the bytes to forward; `done` is set at the end."""

    last = b""

    def __init__(self, length: int) -> None:
        self._left = length
        self.done = length == 0

    def feed(self, data: bytes) -> bytes:
        """Consume received bytes. Raises WireError for bytes after the end."""
        self._left -= len(data)
        if self._left <= 0:
            if self._left < 0:
                raise WireError("the worker sent bytes after the end of its response")
            self.done = True
        return data

    def end(self) -> bool:
        """Whether the connection may end here."""
        return self.done


class EndlessBody:
    """A body that ends with its connection. It is forwarded in chunks, or unchanged with `unpack`.

    last: bytes to send at its end.
    """

    def __init__(self, *, unpack: bool = False) -> None:
        self._unpack = unpack
        self.last = b"" if unpack else LAST_CHUNK
        self.done = False

    def feed(self, data: bytes) -> bytes:
        """Consume received bytes and return them as one chunk."""
        return data if self._unpack else as_chunk(data)

    def end(self) -> bool:
        """The connection may end anywhere."""
        self.done = True
        return True


class ChunkedBody:
    """A chunked body, forwarded in whole chunks. Chunks over `MAX_HELD_BYTES` are forwarded as they arrive.

    Trailers are dropped. With `unpack`, `feed` returns the contents of the chunks.
    """

    last = b""

    def __init__(self, *, unpack: bool = False) -> None:
        self._unpack = unpack
        self._held = b""
        self._left = 0
        self._last = False
        self.done = False

    def feed(self, data: bytes) -> bytes:
        """Consume received bytes and return whole chunks. Raises WireError for an invalid body."""
        if self._held:
            data, self._held = self._held + data, b""
        contents: list[bytes] = []
        end = self._long_chunk(data, contents)
        while end < len(data) and not self._left and not self._last:
            after = self._chunk(data, end, contents)
            if after < 0:
                self._held = data[end:]
                break
            end = after
        chunks = b"".join(contents) if self._unpack else data if end == len(data) else data[:end]
        if not self._last:
            return chunks
        if not self._held:
            self._held = data[end:]
        self._trailers()
        return chunks + LAST_CHUNK if self.done and not self._unpack else chunks

    def end(self) -> bool:
        """Whether the connection may end here."""
        return self.done

    def _chunk(self, data: bytes, begin: int, contents: list[bytes]) -> int:
        """The end of the chunk at `begin`; -1 if it is incomplete, and `begin` itself if it is the last chunk."""
        match = _CHUNK.match(data, begin)
        if match is None:
            if len(data) - begin >= _MAX_LINE_BYTES or b"\n" in data[begin:]:
                raise WireError("the worker's response has an invalid chunk header")
            return -1
        size, start = int(match[1], 16), match.end()
        if size == 0:
            self._last = True
            self._held = data[start:]
            return begin
        end = start + size + 2
        if end > len(data):
            if size <= MAX_HELD_BYTES:
                return -1
            self._left = end - len(data)
            contents.append(data[start : start + size])
            return len(data)
        if data[end - 2 : end] != b"\r\n":
            raise WireError("the worker's response has a chunk without a line end")
        if self._unpack:
            contents.append(data[start : end - 2])
        return end

    def _long_chunk(self, data: bytes, contents: list[bytes]) -> int:
        """Forward the rest of a large chunk that began earlier; returns where it ends in `data`."""
        here = min(self._left, len(data))
        if here:
            before, self._left = self._left, self._left - here
            wanted = b"\r\n"[max(2 - before, 0) : 2 - self._left] if self._left < 2 else b""
            if wanted and data[here - len(wanted) : here] != wanted:
                raise WireError("the worker's response has a chunk without a line end")
            contents.append(data[: here - len(wanted)])
        return here

    def _trailers(self) -> None:
        """Skip the trailers after the last chunk, up to the empty line."""
        while not self.done:
            line, ended, rest = self._held.partition(b"\r\n")
            if not ended:
                if len(line) > MAX_HEAD_BYTES:
                    raise WireError("the worker's response has trailers that are too long")
                return
            self._held, self.done = rest, not line
        if self._held:
            raise WireError("the worker sent bytes after the end of its response")


def request_head(
    method: bytes, target: bytes, host: bytes, headers: Iterable[tuple[bytes, bytes]], length: int
) -> bytes:
    """The head of a request with a body of `length` bytes. `headers` must be free of `HOP_BY_HOP`."""
    lines = [b"%b %b HTTP/1.1\r\nhost: %b" % (method, target, host)]
    lines += [b"%b: %b" % header for header in headers]
    lines.append(b"content-length: %d\r\n\r\n" % length)
    return b"\r\n".join(lines)
