"""HTTP/1.1 as workers speak it: response heads and bodies, parsed strictly, and the heads of requests to them.

Only framing is parsed. What a worker may not do (two lengths, a length and chunks, junk after the end) is an error, so
that no worker can put words into another answer.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

MAX_HEAD_BYTES = 65536
MAX_HELD_BYTES = 1 << 20
"""Chunks up to here are passed on whole, so that a stream that breaks off breaks off between two chunks."""

HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-connection proxy-authenticate proxy-authorization te trailer transfer-encoding "
    b"upgrade expect content-length host http2-settings".split()
)
"""Headers of a request that are this connection's own business (RFC 9110, 7.6.1), and those that are written anew."""

LAST_CHUNK = b"0\r\n\r\n"

_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-5]\d\d)(?: ([^\r\n]*))?\Z")
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+\Z")
_LENGTH = re.compile(rb"\d{1,15}\Z")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,12})(?:[ \t]*;[^\r\n]{0,1024})?\r\n")
_BAD_VALUE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_MAX_LINE_BYTES = 1100
_OWN_RESPONSE_HEADERS = frozenset(b"connection keep-alive proxy-connection te trailer upgrade".split())


class WireError(Exception):
    """The worker does not speak HTTP as it must; the text says how."""


@dataclass(slots=True)
class ResponseHead:
    """The head of a response.

    headers: lower-case names and values as they came. length: of the body, None if it is not known before its end.
    chunked: whether the body comes in chunks. keep_alive: whether the connection can take another request after it.
    """

    status: int
    reason: bytes
    headers: list[tuple[bytes, bytes]]
    length: int | None
    chunked: bool
    keep_alive: bool

    def get(self, name: bytes) -> bytes:
        """The value of a header, b"" if there is none."""
        return next((value for known, value in self.headers if known == name), b"")


def parse_head(data: bytes) -> ResponseHead:
    """The head in `data`, which ends before the empty line. Raises WireError for what is no head of HTTP/1."""
    first, *lines = data.split(b"\r\n")
    match = _STATUS.match(first)
    if match is None:
        raise WireError("the worker's answer does not begin as HTTP/1 does")
    headers, length, chunked = [], None, False
    keep_alive = match[1] == b"1"
    for line in lines:
        name, colon, value = line.partition(b":")
        name, value = name.lower(), value.strip(b" \t")
        if not colon or not _NAME.match(name) or _BAD_VALUE.search(value):
            raise WireError("the worker's answer has a header that is none")
        if name == b"content-length":
            if not _LENGTH.match(value) or length not in (None, int(value)):
                raise WireError("the worker's answer has a wrong Content-Length")
            length = int(value)
        elif name == b"transfer-encoding":
            if value.lower() != b"chunked" or chunked:
                raise WireError("the worker's answer has an unknown Transfer-Encoding")
            chunked = True
        elif name == b"connection":
            words = value.lower()
            keep_alive = b"close" not in words and (keep_alive or b"keep-alive" in words)
        if name not in _OWN_RESPONSE_HEADERS:
            headers.append((name, value))
    if chunked and length is not None:
        raise WireError("the worker's answer has both a Content-Length and chunks")
    return ResponseHead(int(match[2]), match[3] or b"", headers, length, chunked, keep_alive)


def as_chunk(data: bytes) -> bytes:
    """The chunk with `data` in it; nothing for none, as an empty chunk would be the last one."""
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""


class LengthBody:
    """A body of known length. `feed` gives what may be passed on; `done` is set at the end."""

    last = b""

    def __init__(self, length: int) -> None:
        self._left = length
        self.done = length == 0

    def feed(self, data: bytes) -> bytes:
        """Take in bytes. Raises WireError for some beyond the end."""
        self._left -= len(data)
        if self._left <= 0:
            if self._left < 0:
                raise WireError("the worker sent more than its answer")
            self.done = True
        return data

    def end(self) -> bool:
        """Whether the connection may end here."""
        return self.done


class EndlessBody:
    """A body that ends with its connection, in chunks of ours unless `unpack`; `last` is what to send at its end."""

    def __init__(self, *, unpack: bool = False) -> None:
        self._unpack = unpack
        self.last = b"" if unpack else LAST_CHUNK
        self.done = False

    def feed(self, data: bytes) -> bytes:
        """One chunk."""
        return data if self._unpack else as_chunk(data)

    def end(self) -> bool:
        """The connection may end anywhere."""
        self.done = True
        return True


class ChunkedBody:
    """A body in chunks, passed on as it is but chunk by chunk: the rest of a chunk is waited for, up to
    `MAX_HELD_BYTES` bytes. Trailers are dropped.

    With `unpack`, `feed` gives what is in the chunks instead.
    """

    last = b""

    def __init__(self, *, unpack: bool = False) -> None:
        self._unpack = unpack
        self._held = b""
        self._left = 0
        self._last = False
        self.done = False

    def feed(self, data: bytes) -> bytes:
        """Take in bytes and return the whole chunks. Raises WireError for what is no chunk, or comes after the last."""
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
        """Where the chunk that begins at `begin` ends; -1 if it is not all there, or is the last one."""
        match = _CHUNK.match(data, begin)
        if match is None:
            if len(data) - begin >= _MAX_LINE_BYTES or b"\n" in data[begin:]:
                raise WireError("the worker's answer has a chunk that is none")
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
            raise WireError("the worker's answer has a chunk without an end")
        if self._unpack:
            contents.append(data[start : end - 2])
        return end

    def _long_chunk(self, data: bytes, contents: list[bytes]) -> int:
        """Pass on what belongs to a chunk that began earlier; returns where it ends in `data`."""
        here = min(self._left, len(data))
        if here:
            before, self._left = self._left, self._left - here
            wanted = b"\r\n"[max(2 - before, 0) : 2 - self._left] if self._left < 2 else b""
            if wanted and data[here - len(wanted) : here] != wanted:
                raise WireError("the worker's answer has a chunk without an end")
            contents.append(data[: here - len(wanted)])
        return here

    def _trailers(self) -> None:
        """Read over what stands behind the last chunk, up to an empty line."""
        while not self.done:
            line, ended, rest = self._held.partition(b"\r\n")
            if not ended:
                if len(line) > MAX_HEAD_BYTES:
                    raise WireError("the worker's answer has endless trailers")
                return
            self._held, self.done = rest, not line
        if self._held:
            raise WireError("the worker sent more than its answer")


def request_head(
    method: bytes, target: bytes, host: bytes, headers: Iterable[tuple[bytes, bytes]], length: int
) -> bytes:
    """The head of a request with a body of `length` bytes. `headers` must be free of `HOP_BY_HOP`."""
    lines = [b"%b %b HTTP/1.1\r\nhost: %b" % (method, target, host)]
    lines += [b"%b: %b" % header for header in headers]
    lines.append(b"content-length: %d\r\n\r\n" % length)
    return b"\r\n".join(lines)
