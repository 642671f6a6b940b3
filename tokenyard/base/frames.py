"""Frames on a stream of bytes, and mutual authentication of two ends that share a secret.

A frame is its length (uint32, big-endian) and its content. Each end sends a first message with a nonce. A proof is an
HMAC over both messages, so it cannot be replayed. The keys of a `Seal`, which signs later messages, derive from the
same secret and messages.
"""

import hashlib
import hmac
import struct

from tokenyard.base.errors import TokenyardError

NONCE_BYTES = 32
TAG_BYTES = 16
MAX_HELLO_BYTES = 32768
LENGTH = struct.Struct(">I")
_NUMBER = struct.Struct(">Q")


class HandshakeError(TokenyardError):
    """The handshake with the other end failed. A retry does not help if its settings are wrong."""

    code = "handshake_failed"


def frame(body: bytes) -> bytes:
    """`body` as a frame: its length, then its bytes."""
    return LENGTH.pack(len(body)) + body


def prove(secret: bytes, by: bytes, to: bytes, *, dialled: bool) -> bytes:
    """The proof (HMAC) that the sender of the first message `by` knows the secret.

    to: the other end's first message. dialled: whether the sender opened the connection; it enters the HMAC, so the
    other end cannot reflect the proof.
    """
    return _digest(secret, b"dialled" if dialled else b"answered", by, to)


class Frames:
    """Splits received bytes into frames. `max_frame_bytes` is the largest frame accepted at present."""

    def __init__(self) -> None:
        self.max_frame_bytes = MAX_HELLO_BYTES
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Add received bytes."""
        self._buffer += data

    def next(self) -> bytes | None:
        """The content of the next whole frame; None if there is none. Raises HandshakeError for one over the limit."""
        if len(self._buffer) < LENGTH.size:
            return None
        size = LENGTH.unpack_from(self._buffer)[0]
        if size > self.max_frame_bytes:
            raise HandshakeError(f"received a frame of {size} bytes; at most {self.max_frame_bytes} are accepted")
        end = LENGTH.size + size
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[LENGTH.size : end])
        del self._buffer[:end]
        return body


class Seal:
    """Signs the messages that one end of a connection sends, or verifies them at the other end, in order.

    The arguments are as in `prove`, for the end that signs. A message that was changed, dropped, repeated or reordered
    fails verification.
    """

    def __init__(self, secret: bytes, by: bytes, to: bytes, *, dialled: bool) -> None:
        self._key = _digest(secret, b"sealed by dialled" if dialled else b"sealed by answered", by, to)
        self._number = 0

    def close(self, body: bytes) -> bytes:
        """The next message, preceded by its tag."""
        return self._tag(body) + body

    def open(self, sealed: bytes) -> bytes:
        """The next message without its tag. Raises HandshakeError if the tag is wrong."""
        tag, body = sealed[:TAG_BYTES], sealed[TAG_BYTES:]
        if not hmac.compare_digest(tag, self._tag(body)):
            raise HandshakeError("received a message with a wrong signature")
        return body

    def _tag(self, body: bytes) -> bytes:
        number, self._number = self._number, self._number + 1
        return hmac.digest(self._key, _NUMBER.pack(number) + body, "sha256")[:TAG_BYTES]


def _digest(secret: bytes, role: bytes, by: bytes, to: bytes) -> bytes:
    return hmac.new(secret, role + by + to, hashlib.sha256).digest()
