"""One connection of an engine: bytes in, frames out, through handshake to messages. Used by one thread."""

import socket
from collections.abc import Callable

from tokenyard.base.frames import Frames, HandshakeError
from tokenyard.disagg.handshake import (
    MAX_FRAME_BYTES,
    EngineIdentity,
    Handshake,
    Pull,
    decode_message,
    decode_opening,
    frame,
)
from tokenyard.disagg.protocol.messages import Message

MAX_UNSENT_BYTES = 64 << 20
READ_BYTES = 1 << 18


class Connection:
    """A socket to another engine. `name` is what was dialled, "" where the other side did.

    until_ns: when the handshake is given up. pull: set where the other side wants pages through this socket, which
    then belongs to whoever sends them.
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
        """Whether messages may go and come."""
        return self.handshake.done

    @property
    def wants_to_write(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._unsent)

    def send(self, message: Message) -> None:
        """Send a message, as far as the socket takes it now. Raises OSError, also if the other side reads nothing."""
        self._unsent += frame(message)
        self.flush()

    def flush(self) -> None:
        """Send what waits. Raises OSError."""
        try:
            while self._unsent:
                sent = self.sock.send(self._unsent)
                del self._unsent[:sent]
        except BlockingIOError:
            if len(self._unsent) > MAX_UNSENT_BYTES:
                raise OSError("the other side reads nothing") from None

    def read(self, take: Callable[[Message], None]) -> bool:
        """Give `take` each message that has come; returns whether the handshake ended with this.

        Raises OSError where the connection has ended, HandshakeError for what does not belong there.
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
                take(decode_message(body))
            else:
                self._greet(body)
        return self.open and not was_open

    def close(self) -> None:
        """Close the socket."""
        self.sock.close()

    def _greet(self, body: bytes) -> None:
        message = decode_opening(body)
        if isinstance(message, Pull):
            if self.name or self.handshake.hello is not None:
                raise HandshakeError("pages are asked for through a connection of their own")
            self.pull = message
            return
        try:
            self.handshake.received(message)
        finally:
            # What is to be sent may say why not.
            self._send_handshake()
        if self.open:
            self._frames.max_frame_bytes = MAX_FRAME_BYTES

    def _send_handshake(self) -> None:
        for data in self.handshake.to_send:
            self._unsent += data
        self.handshake.to_send.clear()
        self.flush()
