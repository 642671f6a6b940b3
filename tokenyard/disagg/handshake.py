"""The handshake by which two engines check that they may and can exchange KV, and the frames of the protocol.

Both send `Hello`, compare it with their own, and send `Proof` that they know the shared secret: an HMAC over both
hellos. Each hello has a nonce, so that a proof cannot be replayed. Memory addresses are sent with the proof, not before
it. A frame is its length (uint32, big-endian) and msgpack; nothing is unpickled.
"""

import hmac
import secrets
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from tokenyard.base import frames
from tokenyard.base.frames import NONCE_BYTES, HandshakeError, prove
from tokenyard.disagg.process_vm import Probe
from tokenyard.disagg.protocol.messages import Message
from tokenyard.kv_layout.layout import PageMap

MAX_FRAME_BYTES = 64 << 20


class Hello(msgspec.Struct, tag=True, array_like=True):
    """The identity of an engine.

    version: of the protocol.
    boot_id: made up at the start of each process.
    nonce: random bytes, used once.
    model: digest of the weights.
    dtype: of the KV.
    page_size: tokens per page.
    pieces, piece_bytes: number and size of the pieces of a page's KV.
    machine, pid: the machine and the process, for reads of its memory.
    """

    version: int
    boot_id: str
    nonce: bytes
    model: str
    dtype: str
    page_size: int
    pieces: int
    piece_bytes: int
    machine: str = ""
    pid: int = 0


class Proof(msgspec.Struct, tag=True, array_like=True):
    """Proof that an engine knows the secret, with the addresses of its KV.

    mac: HMAC over both hellos.
    origins, strides: of its `PageMap`, as int64 bytes.
    probe_address, probe: a random number in its memory, which the other side tries to read.
    """

    mac: bytes
    origins: bytes
    strides: bytes
    probe_address: int
    probe: bytes


class Refused(msgspec.Struct, tag=True, array_like=True):
    """The reason why an engine rejects the handshake."""

    why: str


class Pull(msgspec.Struct, tag=True, array_like=True):
    """The first frame of a connection that transfers pages: requests `count` pages of an offer, from page `first`."""

    key: str
    ticket: bytes
    first: int
    count: int


Opening = Hello | Proof | Refused | Pull

_encoder = msgspec.msgpack.Encoder()
_openings: msgspec.msgpack.Decoder[Opening] = msgspec.msgpack.Decoder(Opening)
_messages: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """What this engine presents in a handshake.

    hello: its first message.
    pages: where its KV pages lie.
    secret: the secret that all engines share.
    probe: a random number in its memory, which the other side tries to read.
    """

    hello: Hello
    pages: PageMap
    secret: bytes
    probe: Probe


def frame(message: Any) -> bytes:
    """Encode a message as a frame."""
    return frames.frame(_encoder.encode(message))


def decode_message(body: bytes) -> Message:
    """Decode the message in a frame. Raises HandshakeError for anything else."""
    try:
        return _messages.decode(body)
    except msgspec.MsgspecError as error:
        raise HandshakeError(f"a frame that does not decode: {error}") from None


def decode_opening(body: bytes) -> Opening:
    """Decode the opening message in a frame. Raises HandshakeError for anything else."""
    try:
        return _openings.decode(body)
    except msgspec.MsgspecError as error:
        raise HandshakeError(f"not a handshake: {error}") from None


class Handshake:
    """One side of a handshake. `to_send` holds frames to send; `hello` and `proof` are the received ones."""

    def __init__(self, own: EngineIdentity, *, dialled: bool) -> None:
        self._own = own
        self._dialled = dialled
        self._hello = msgspec.structs.replace(own.hello, nonce=secrets.token_bytes(NONCE_BYTES))
        self.to_send = [frame(self._hello)]
        self.hello: Hello | None = None
        self.proof: Proof | None = None

    @property
    def done(self) -> bool:
        """Whether both sides have proved that they know the secret."""
        return self.proof is not None

    def received(self, message: Opening) -> None:
        """Handle the next message. Raises HandshakeError if it is rejected; `to_send` then holds the reason."""
        if isinstance(message, Refused):
            raise HandshakeError(f"it refused: {message.why[:200]}")
        if isinstance(message, Hello) and self.hello is None:
            self._compare(message)
            self.hello = message
            self.to_send.append(frame(self._proof(message)))
        elif isinstance(message, Proof) and self.hello is not None and self.proof is None:
            expected = _mac(self._own.secret, not self._dialled, self.hello, self._hello)
            pieces = self._own.hello.pieces * 8
            if not hmac.compare_digest(message.mac, expected):
                self._refuse("the secret is another one (--disaggregation-secret)")
            if len(message.origins) != pieces or len(message.strides) != pieces:
                self._refuse("the memory does not fit the hello")
            self.proof = message
        else:
            self._refuse("this message does not belong here")

    def memory(self) -> PageMap:
        """The addresses of the other engine's pages."""
        assert self.hello is not None
        assert self.proof is not None
        origins, strides = (np.frombuffer(data, "<i8") for data in (self.proof.origins, self.proof.strides))
        return PageMap(origins, strides, self.hello.piece_bytes)

    def _compare(self, theirs: Hello) -> None:
        ours = self._hello
        for name, shown in (
            ("version", "version of the protocol"),
            ("model", "model"),
            ("dtype", "dtype of the KV"),
            ("page_size", "--page-size"),
            ("pieces", "number of layers or of ranks (--tp-size)"),
            ("piece_bytes", "size of heads"),
        ):
            here, there = getattr(ours, name), getattr(theirs, name)
            if here != there:
                self._refuse(f"another {shown}: {there} there, {here} here")
        if len(theirs.nonce) != NONCE_BYTES or theirs.boot_id == ours.boot_id:
            self._refuse("a hello that makes no sense")

    def _proof(self, theirs: Hello) -> Proof:
        own = self._own
        mac = _mac(own.secret, self._dialled, self._hello, theirs)
        origins, strides = (column.astype("<i8").tobytes() for column in (own.pages.origins, own.pages.strides))
        return Proof(mac, origins, strides, own.probe.address, own.probe.value)

    def _refuse(self, why: str) -> None:
        self.to_send.append(frame(Refused(why)))
        raise HandshakeError(why)


def _mac(secret: bytes, dialled: bool, by: Hello, to: Hello) -> bytes:
    return prove(secret, _encoder.encode(by), _encoder.encode(to), dialled=dialled)
