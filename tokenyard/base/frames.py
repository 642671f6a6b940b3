"""Frames on a stream of bytes, and what two ends that share a secret prove to each other.

A frame is its length (uint32, big-endian) and its content. Both ends send a first message with a number that is used
once; a proof is an HMAC over both messages, so that no proof serves twice. From the same secret and messages follow the
keys of a `Seal`, which signs what is sent afterwards.
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
    """The other end is none that one can talk to. Trying again is of no use where its settings are wrong."""

    code = "handshake_failed"


def frame(body: bytes) -> bytes:
    """The content of a frame as it travels."""
    return LENGTH.pack(len(body)) + body


def prove(secret: bytes, by: bytes, to: bytes, *, dialled: bool) -> bytes:
    """The proof that the sender of the first message `by` knows the secret; `to` is the other end's first message.

    dialled: whether the sender is the end that opened the connection, so that a proof cannot be sent back.
    """
    return _digest(secret, b"dialled" if dialled else b"answered", by, to)


class Frames:
    """Cuts what a socket brings into frames. `max_frame_bytes` bytes are the largest frame that is taken now."""

    def __init__(self) -> None:
        self.max_frame_bytes = MAX_HELLO_BYTES
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Add what has come."""
        self._buffer += data

    def next(self) -> bytes | None:
        """The next whole frame, None while there is none. Raises HandshakeError for a length beyond the limit."""
        if len(self._buffer) < LENGTH.size:
            return None
        size = LENGTH.unpack_from(self._buffer)[0]
        if size > self.max_frame_bytes:
            raise HandshakeError(f"a frame of {size} bytes; at most {self.max_frame_bytes} are taken")
        end = LENGTH.size + size
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[LENGTH.size : end])
        del self._buffer[:end]
        return body


class Seal:
    """Signs the messages of one end of a connection, or checks them at the other end, in the order in which they go.

    The first messages and `dialled` are as in `prove`, those of the end that signs. A message that was changed, left
    out, doubled or moved does not fit its tag.
    """

    def __init__(self, secret: bytes, by: bytes, to: bytes, *, dialled: bool) -> None:
        self._key = _digest(secret, b"sealed by dialled" if dialled else b"sealed by answered", by, to)
        self._number = 0

    def close(self, body: bytes) -> bytes:
        """The next message with its tag in front."""
        return self._tag(body) + body

    def open(self, sealed: bytes) -> bytes:
        """The next message without its tag. Raises HandshakeError if the tag does not fit."""
        tag, body = sealed[:TAG_BYTES], sealed[TAG_BYTES:]
        if not hmac.compare_digest(tag, self._tag(body)):
            raise HandshakeError("a message that the other end did not sign")
        return body

    def _tag(self, body: bytes) -> bytes:
        number, self._number = self._number, self._number + 1
        return hmac.digest(self._key, _NUMBER.pack(number) + body, "sha256")[:TAG_BYTES]


def _digest(secret: bytes, role: bytes, by: bytes, to: bytes) -> bytes:
    return hmac.new(secret, role + by + to, hashlib.sha256).digest()
