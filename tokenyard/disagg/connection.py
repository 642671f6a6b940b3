"""One connection of an engine: bytes in, frames out, through handshake to messages. Used by one thread."""

import socket
from collections.abc import Callable

from tokenyard.base.frames import Frames
from tokenyard.disagg.handshake import (
    MAX_FRAME_BYTES,
    EngineIdentity,
    Handshake,
    Pull,
    decode_opening,
)
from tokenyard.disagg.protocol.messages import Message

MAX_UNSENT_BYTES = 64 << 20
READ_BYTES = 1 << 18


class Connection:
    """A socket to another engine.

    name: the address that was dialled; "" if the other side dialled.
    until_ns: deadline of the handshake.
    pull: set if the other side requests pages through this socket, which the thread that sends them then owns.
    """

    def __init__(self, sock: socket.socket, number: int, own: EngineIdentity, name: str, until_ns: int) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.number = number
        self.name = name
        self.until_ns = until_ns
        self.handshake = Handshake(own, dialled=bool(name))
        self.pull: Pull | None = None
        self._frames = Frames()
        self._unsent = bytearray()
        if name:
            self._send_handshake()

    @property
    def open(self) -> bool:
        """Whether the handshake is done, so that messages may be sent and received."""
        return self.handshake.done

    @property
    def wants_to_write(self) -> bool:
        """Whether there are bytes left to send."""
        return bool(self._unsent)

    def send(self, message: Message) -> None:
        """Queue a message and send what the socket accepts. Raises OSError, also if the other side reads nothing."""
        self._unsent += self.handshake.seal(message)
        self.flush()

    def flush(self) -> None:
        """Send queued bytes. Raises OSError."""
        try:
            while self._unsent:
                sent = self.sock.send(self._unsent)
                del self._unsent[:sent]
        except BlockingIOError:
            if len(self._unsent) > MAX_UNSENT_BYTES:
                raise OSError("the other side reads nothing") from None

    def read(self, take: Callable[[Message], None]) -> bool:
        """Pass each received message to `take`; return whether this call completed the handshake.

        Raises OSError if the connection has ended, HandshakeError for an unexpected frame.
        """
        try:
            data = self.sock.recv(READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            raise ConnectionResetError("the other side closed the connection")
        self._frames.feed(data)
        was_open = self.open
        while self.pull is None and (body := self._frames.next()) is not None:
            if self.open:
                take(self.handshake.open(body))
            else:
                self._greet(body)
        return self.open and not was_open

    def close(self) -> None:
        """Close the socket."""
        self.sock.close()

    def _greet(self, body: bytes) -> None:
        if not self.name and self.handshake.hello is None and isinstance(pull := decode_opening(body), Pull):
            self.pull = pull
            return
        try:
            self.handshake.received(body)
        finally:
            # The queued reply may state the reason for the refusal.
            self._send_handshake()
        if self.open:
            self._frames.max_frame_bytes = MAX_FRAME_BYTES

    def _send_handshake(self) -> None:
        for data in self.handshake.to_send:
            self._unsent += data
        self.handshake.to_send.clear()
        self.flush()
