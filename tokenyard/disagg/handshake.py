"""The handshake by which two engines check that they may and can exchange KV, and the sealed frames after it.

Both send `Hello` and compare it with their own. The engine that dialled sends `Proof` that it knows the shared secret,
an HMAC over both hellos; the other one answers with its proof only if that is right. Each hello has a nonce, so that a
proof cannot be replayed. From then on every frame carries a tag (`base.frames.Seal`): a message that was changed,
dropped, repeated or reordered ends the connection. `Memory`, which has addresses, is the first sealed message of each.
A frame is its length (uint32, big-endian) and msgpack; nothing is unpickled.
"""

import hmac
import secrets
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from tokenyard.base import frames
from tokenyard.base.decode_errors import DECODE_ERRORS
from tokenyard.base.frames import NONCE_BYTES, HandshakeError, Seal, prove
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
    state_pieces, state_piece_bytes: the same of a slot of recurrent states; 0 for a model without.
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
    state_pieces: int = 0
    state_piece_bytes: int = 0


class Proof(msgspec.Struct, tag=True, array_like=True):
    """Proof that an engine knows the secret.

    mac: HMAC over both hellos.
    """

    mac: bytes


class Memory(msgspec.Struct, tag=True, array_like=True):
    """Where an engine's KV lies.

    origins, strides: of its `PageMap`, as int64 bytes.
    probe_address, probe: a random number in its memory, which the other side tries to read.
    state_origins, state_strides: of the `PageMap` of its slots of recurrent states.
    """

    origins: bytes
    strides: bytes
    probe_address: int
    probe: bytes
    state_origins: bytes = b""
    state_strides: bytes = b""


class Refused(msgspec.Struct, tag=True, array_like=True):
    """The reason why an engine rejects the handshake."""

    why: str


class Pull(msgspec.Struct, tag=True, array_like=True):
    """The only frame of a connection that transfers pages: requests `count` pages of an offer, from page `first`.

    mac: HMAC over the other fields. A replay gets the same pages, while the offer lasts.
    """

    key: str
    ticket: bytes
    first: int
    count: int
    mac: bytes = b""

    def signed(self, secret: bytes) -> "Pull":
        """The same request with its HMAC."""
        return msgspec.structs.replace(self, mac=self._mac(secret))

    def is_signed(self, secret: bytes) -> bool:
        """Whether the HMAC is right."""
        return hmac.compare_digest(self.mac, self._mac(secret))

    def _mac(self, secret: bytes) -> bytes:
        return hmac.digest(secret, b"pull" + _encoder.encode(msgspec.structs.replace(self, mac=b"")), "sha256")


NO_PAGES = PageMap(np.empty(0, np.int64), np.empty(0, np.int64), 0)

Opening = Hello | Proof | Memory | Refused | Pull

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
    states: where its slots of recurrent states lie.
    """

    hello: Hello
    pages: PageMap
    secret: bytes
    probe: Probe
    states: PageMap = NO_PAGES


def frame(message: Any) -> bytes:
    """Encode a message as a frame."""
    return frames.frame(_encoder.encode(message))


def decode_message(body: bytes) -> Message:
    """Decode the message in a frame. Raises HandshakeError for anything else."""
    try:
        return _messages.decode(body)
    except DECODE_ERRORS as error:
        raise HandshakeError(f"a frame that does not decode: {error}") from None


def decode_opening(body: bytes) -> Opening:
    """Decode the opening message in a frame. Raises HandshakeError for anything else."""
    try:
        return _openings.decode(body)
    except DECODE_ERRORS as error:
        raise HandshakeError(f"not a handshake: {error}") from None


class Handshake:
    """One side of a handshake, and the seals of the connection after it.

    to_send: frames to send.
    hello: the other side's, None before it came.
    peer_memory: the other side's, None before the handshake is done.
    """

    def __init__(self, own: EngineIdentity, *, dialled: bool) -> None:
        self._own = own
        self._dialled = dialled
        self._hello = msgspec.structs.replace(own.hello, nonce=secrets.token_bytes(NONCE_BYTES))
        self._own_seal: Seal | None = None
        self._peer_seal: Seal | None = None
        self.to_send = [frame(self._hello)]
        self.hello: Hello | None = None
        self.peer_memory: Memory | None = None

    @property
    def done(self) -> bool:
        """Whether both sides have proved that they know the secret, so that messages may be sent."""
        return self.peer_memory is not None

    def received(self, body: bytes) -> None:
        """Handle the next frame. Raises HandshakeError if it is rejected; `to_send` then holds the reason."""
        message = decode_opening(body if self._peer_seal is None else self._peer_seal.open(body))
        if isinstance(message, Refused):
            raise HandshakeError(f"it refused: {message.why[:200]}")
        if isinstance(message, Hello) and self.hello is None:
            self._compare(message)
            self.hello = message
            if self._dialled:
                self.to_send.append(frame(self._proof(message)))
        elif isinstance(message, Proof) and self.hello is not None and self._peer_seal is None:
            self._verify(message, self.hello)
        elif isinstance(message, Memory) and self._peer_seal is not None and self.peer_memory is None:
            hello = self._own.hello
            sizes = {len(message.origins) - hello.pieces * 8, len(message.strides) - hello.pieces * 8}
            sizes |= {len(one) - hello.state_pieces * 8 for one in (message.state_origins, message.state_strides)}
            if sizes != {0}:
                self._refuse("the memory does not fit the hello")
            self.peer_memory = message
        else:
            self._refuse("this message does not belong here")

    def seal(self, message: Any) -> bytes:
        """A frame with a message and its tag; they must be sent in the order in which they were sealed."""
        assert self._own_seal is not None
        return frames.frame(self._own_seal.close(_encoder.encode(message)))

    def open(self, body: bytes) -> Message:
        """The message in the next sealed frame. Raises HandshakeError if the tag or the message is wrong."""
        assert self._peer_seal is not None
        return decode_message(self._peer_seal.open(body))

    def memory(self) -> PageMap:
        """The addresses of the other engine's pages."""
        assert self.hello is not None
        assert self.peer_memory is not None
        return _page_map(self.peer_memory.origins, self.peer_memory.strides, self.hello.piece_bytes)

    def states(self) -> PageMap:
        """The addresses of the other engine's slots of recurrent states."""
        assert self.hello is not None
        assert self.peer_memory is not None
        memory = self.peer_memory
        return _page_map(memory.state_origins, memory.state_strides, self.hello.state_piece_bytes)

    def _verify(self, proof: Proof, theirs: Hello) -> None:
        """Check the other side's proof and answer it."""
        secret = self._own.secret
        if not hmac.compare_digest(proof.mac, _mac(secret, not self._dialled, theirs, self._hello)):
            self._refuse("the secret is another one (--disaggregation-secret)")
        if not self._dialled:
            self.to_send.append(frame(self._proof(theirs)))
        by, to = _encoder.encode(self._hello), _encoder.encode(theirs)
        self._own_seal = Seal(secret, by, to, dialled=self._dialled)
        self._peer_seal = Seal(secret, to, by, dialled=not self._dialled)
        pages, states, probe = self._own.pages, self._own.states, self._own.probe
        columns = pages.origins, pages.strides, states.origins, states.strides
        origins, strides, *of_states = (column.astype("<i8").tobytes() for column in columns)
        self.to_send.append(self.seal(Memory(origins, strides, probe.address, probe.value, *of_states)))

    def _compare(self, theirs: Hello) -> None:
        ours = self._hello
        for name, shown in (
            ("version", "version of the protocol"),
            ("model", "model"),
            ("dtype", "dtype of the KV"),
            ("page_size", "--page-size"),
            ("pieces", "number of layers or of ranks (--tp-size)"),
            ("piece_bytes", "size of heads"),
            ("state_pieces", "number of layers with recurrent states"),
            ("state_piece_bytes", "size of recurrent states"),
        ):
            here, there = getattr(ours, name), getattr(theirs, name)
            if here != there:
                self._refuse(f"another {shown}: {there} there, {here} here")
        if len(theirs.nonce) != NONCE_BYTES or theirs.boot_id == ours.boot_id:
            self._refuse("a hello that makes no sense")

    def _proof(self, theirs: Hello) -> Proof:
        return Proof(_mac(self._own.secret, self._dialled, self._hello, theirs))

    def _refuse(self, why: str) -> None:
        refusal = Refused(why)
        self.to_send.append(frame(refusal) if self._own_seal is None else self.seal(refusal))
        raise HandshakeError(why)


def _page_map(origins: bytes, strides: bytes, nbytes: int) -> PageMap:
    return PageMap(np.frombuffer(origins, "<i8"), np.frombuffer(strides, "<i8"), nbytes)


def _mac(secret: bytes, dialled: bool, by: Hello, to: Hello) -> bytes:
    return prove(secret, _encoder.encode(by), _encoder.encode(to), dialled=dialled)
