"""Connections between the nodes of a model: TCP between ends that share a secret, and the messages on them.

It is a plain connection, not a queue that reconnects: a lost plan cannot be recovered, so the end of a connection ends
the group, and the kernel reports that end immediately.
"""

import secrets
import socket
import struct
import sys
import threading
from typing import Any

import msgspec

from tokenyard.base.decode_errors import DECODE_ERRORS
from tokenyard.base.frames import NONCE_BYTES, Frames, HandshakeError, Seal, frame, prove
from tokenyard.base.version import __version__
from tokenyard.executor.distributed.rank_messages import AgreedNumPages, RankReport

HANDSHAKE_S = 5.0
SEND_S = 10
"""How long a message may wait for a node that reads nothing."""

GIVE_UP_S = 0.5
MAX_MESSAGE_BYTES = 256 << 20
READ_BYTES = 1 << 18
KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 11000}
"""A machine that has gone is missed after eleven seconds, also where nothing is said while models load."""


class NodeHello(msgspec.Struct, tag=True):
    """The first message of each end: node 0, or another node that dials it."""

    version: str
    byte_order: str
    node: int
    nonce: bytes


class Proof(msgspec.Struct, tag=True):
    """Proves that the sender knows the secret; see base.frames."""

    mac: bytes


class Refused(msgspec.Struct, tag=True):
    """Why node 0 refuses a node."""

    why: str


class NodeSettings(msgspec.Struct, tag=True):
    """The settings of a node that must be the same on all nodes, by flag."""

    values: dict[str, Any]


class NodeWelcome(msgspec.Struct, tag=True):
    """All nodes have connected and load their ranks. port: where the ranks connect, at the host of node 0."""

    port: int


class NodeRankReport(msgspec.Struct, tag=True):
    """A report of one of the node's ranks while it starts."""

    report: RankReport


class NodePlan(msgspec.Struct, tag=True):
    """A plan for all ranks, as bytes."""

    data: bytes


class NodeHeartbeat(msgspec.Struct, tag=True):
    """Node 0 is alive."""


class NodeStatus(msgspec.Struct, tag=True):
    """A node's heartbeat, with the state of its ranks."""

    ranks: list[dict[str, Any]]


class NodeEnded(msgspec.Struct, tag=True):
    """The sender ends.

    reason: why; "" from node 0 if it was told to end.
    wrong_settings: whether a retry cannot succeed.
    """

    reason: str
    wrong_settings: bool = False


Opening = NodeHello | Proof
Message = (
    Refused
    | NodeSettings
    | NodeWelcome
    | NodeRankReport
    | AgreedNumPages
    | NodePlan
    | NodeHeartbeat
    | NodeStatus
    | NodeEnded
)

_encoder = msgspec.msgpack.Encoder()
_openings: msgspec.msgpack.Decoder[Opening] = msgspec.msgpack.Decoder(Opening)
_messages: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def own_hello(node: int) -> NodeHello:
    """The first message of a node."""
    return NodeHello(__version__, sys.byteorder, node, secrets.token_bytes(NONCE_BYTES))


class NodeConnection:
    """One end of a connection that is open for messages. One thread receives, any may send."""

    def __init__(self, sock: socket.socket, frames: Frames, own_seal: Seal, peer_seal: Seal) -> None:
        frames.max_frame_bytes = MAX_MESSAGE_BYTES
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", SEND_S, 0))
        self._sock, self._frames = sock, frames
        self._own_seal, self._peer_seal = own_seal, peer_seal
        self._lock = threading.Lock()

    @property
    def own_address(self) -> str:
        """This machine's address, as the other end reaches it."""
        return str(self._sock.getsockname()[0])

    def send(self, message: Message) -> None:
        """Send a message. Raises OSError if the other end has closed, or accepts nothing for SEND_S."""
        body = _encoder.encode(message)
        with self._lock:
            self._sock.sendall(frame(self._own_seal.close(body)))

    def receive(self) -> Message:
        """Wait for a message. Raises EOFError or OSError where the connection has ended, HandshakeError for what is no
        message of the other end.
        """
        body = self._peer_seal.open(_next_frame(self._sock, self._frames))
        try:
            return _messages.decode(body)
        except DECODE_ERRORS as error:
            raise HandshakeError(f"a message that does not decode: {error}") from None

    def leave(self, last: Message) -> None:
        """Send a last message if that does not block."""
        if self._lock.acquire(timeout=GIVE_UP_S):
            try:
                self._sock.send(frame(self._own_seal.close(_encoder.encode(last))), socket.MSG_DONTWAIT)
            except OSError:
                pass
            finally:
                self._lock.release()
        self._shut(socket.SHUT_WR)

    def shut_down(self) -> None:
        """End the connection from any thread: threads that wait for it raise."""
        self._shut(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()

    def _shut(self, how: int) -> None:
        try:
            self._sock.shutdown(how)
        except OSError:
            return


def open_node_connection(
    sock: socket.socket, own: NodeHello, secret: bytes, *, dialled: bool
) -> tuple[NodeConnection, NodeHello]:
    """Shake hands within HANDSHAKE_S; returns the connection and the other end's hello.

    Raises HandshakeError for an incompatible or unauthenticated end, EOFError and OSError for one that has closed.
    """
    sock.settimeout(HANDSHAKE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    frames = Frames()
    ours = _encoder.encode(own)
    sock.sendall(frame(ours))
    theirs = _next_frame(sock, frames)
    hello = _opening(theirs, NodeHello)
    _compare(own, hello)
    sock.sendall(frame(_encoder.encode(Proof(prove(secret, ours, theirs, dialled=dialled)))))
    proof = _opening(_next_frame(sock, frames), Proof)
    if not secrets.compare_digest(proof.mac, prove(secret, theirs, ours, dialled=not dialled)):
        raise HandshakeError("the secret is another one (TOKENYARD_DIST_SECRET)")
    own_seal = Seal(secret, ours, theirs, dialled=dialled)
    peer_seal = Seal(secret, theirs, ours, dialled=not dialled)
    return NodeConnection(sock, frames, own_seal, peer_seal), hello


def _compare(own: NodeHello, theirs: NodeHello) -> None:
    if theirs.version != own.version:
        raise HandshakeError(f"it runs Tokenyard {theirs.version[:40]}, this node runs {own.version}")
    if theirs.byte_order != own.byte_order:
        raise HandshakeError(f"its machine is {theirs.byte_order[:8]}-endian, this one {own.byte_order}-endian")
    if len(theirs.nonce) != NONCE_BYTES or theirs.nonce == own.nonce:
        raise HandshakeError("a hello that makes no sense")


def _opening(body: bytes, kind: Any) -> Any:
    try:
        found = _openings.decode(body)
    except DECODE_ERRORS as error:
        raise HandshakeError(f"not a handshake: {error}") from None
    if not isinstance(found, kind):
        raise HandshakeError("a message that does not belong there")
    return found


def _next_frame(sock: socket.socket, frames: Frames) -> bytes:
    while (body := frames.next()) is None:
        data = sock.recv(READ_BYTES)
        if not data:
            raise EOFError("the other end closed the connection")
        frames.feed(data)
    return body
