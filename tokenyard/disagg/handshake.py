"""How two engines find out that they may and can exchange KV, and the frames that they talk in.

Both send `Hello`, compare it with their own, and prove by `Proof` that they know the shared secret: an HMAC over both
hellos, each with a number that is used once, so that no proof serves twice. The addresses of memory come with the
proof, not before it. A frame is its length (uint32, big-endian) and msgpack; nothing is ever unpickled.
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
    """Who one is. model: digest of the weights. pieces, piece_bytes: of the KV of a page. machine, pid: who may read
    whose memory. boot_id: made up at the start of each process.
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
    """That one knows the secret, and where the KV lies (int64 bytes each), with a number to try reading it by."""

    mac: bytes
    origins: bytes
    strides: bytes
    probe_address: int
    probe: bytes


class Refused(msgspec.Struct, tag=True, array_like=True):
    """Why one will not talk."""

    why: str


class Pull(msgspec.Struct, tag=True, array_like=True):
    """The first frame of a connection for pages: send `count` pages of an offer, from its page `first` on."""

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
    """This engine, as the others see it; `secret` is shared by all."""

    hello: Hello
    pages: PageMap
    secret: bytes
    probe: Probe


def frame(message: Any) -> bytes:
    """A message as it travels."""
    return frames.frame(_encoder.encode(message))


def decode_message(body: bytes) -> Message:
    """The message in a frame. Raises HandshakeError for anything else."""
    try:
        return _messages.decode(body)
    except msgspec.MsgspecError as error:
        raise HandshakeError(f"a frame that does not decode: {error}") from None


def decode_opening(body: bytes) -> Opening:
    """The opening message in a frame. Raises HandshakeError for anything else."""
    try:
        return _openings.decode(body)
    except msgspec.MsgspecError as error:
        raise HandshakeError(f"not a handshake: {error}") from None


class Handshake:
    """One side of a handshake. `to_send` holds frames; `hello` and `proof` are the other's, once they have come."""

    def __init__(self, own: EngineIdentity, *, dialled: bool) -> None:
        self._own = own
        self._dialled = dialled
        self._hello = msgspec.structs.replace(own.hello, nonce=secrets.token_bytes(NONCE_BYTES))
        self.to_send = [frame(self._hello)]
        self.hello: Hello | None = None
        self.proof: Proof | None = None

    @property
    def done(self) -> bool:
        """Whether both have proved themselves."""
        return self.proof is not None

    def received(self, message: Opening) -> None:
        """Take in the other's next message. Raises HandshakeError if it will not do; what is to be sent then says
        why.
        """
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
        """Where the other's pages lie in its memory."""
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
