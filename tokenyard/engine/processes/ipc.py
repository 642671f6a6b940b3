"""Messages on the wire: one tag byte, then msgpack; numpy arrays travel as their raw bytes. No pickle anywhere.

Sockets are ZeroMQ PUSH/PULL over ipc:// files in a private directory.
"""

import shutil
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, get_args

import msgspec
import numpy as np
import zmq

from tokenyard.base import ConfigError, TokenyardError
from tokenyard.engine.processes.messages import FromScheduler, ToApi, ToScheduler

Message = TypeVar("Message")
LONGEST_SOCKET_PATH = 100
RECONNECT_MS = 20


class ProtocolError(TokenyardError):
    """A frame is not a message of its direction."""

    code = "protocol_error"


def _encode_array(value: object) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.tobytes()
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"no wire format for {type(value).__name__}")


def _decode_array(wanted: Any, value: Any) -> Any:
    dtype, data = value
    return np.frombuffer(data, dtype=dtype).astype(_item_type(wanted), copy=False)


@cache
def _item_type(array_type: Any) -> Any:
    """Return int32 for `Int32Array`, and so on."""
    return get_args(get_args(array_type)[1])[0]


_TAGS: dict[type, int] = {
    cls: tag for tag, cls in enumerate(dict.fromkeys(get_args(ToScheduler) + get_args(FromScheduler) + get_args(ToApi)))
}
"""One tag for each class in all directions, as the scheduler's messages may also go straight to the API process."""


class Codec(Generic[Message]):
    """Encodes and decodes the messages of one direction, a union of classes; decoded arrays are read-only views."""

    def __init__(self, union: Any) -> None:
        types = get_args(union)
        self._tags = {cls: bytes([_TAGS[cls]]) for cls in types}
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
        self._decoders = {_TAGS[cls]: msgspec.msgpack.Decoder(cls, dec_hook=_decode_array) for cls in types}

    def encode(self, message: Message) -> bytes:
        """Return the frame of a message. Raises ProtocolError for one that does not go this way."""
        tag = self._tags.get(type(message))
        if tag is None:
            raise ProtocolError(f"{type(message).__name__} is not a message of this direction")
        return tag + self._encoder.encode(message)

    def decode(self, frame: bytes) -> Message:
        """Return the message of a frame. Raises ProtocolError for anything that is not one."""
        view = memoryview(frame)
        decoder = self._decoders.get(view[0]) if len(view) else None
        if decoder is None:
            raise ProtocolError("a frame without a tag of this direction")
        try:
            return decoder.decode(view[1:])  # type: ignore[no-any-return]
        except (msgspec.MsgspecError, ValueError, TypeError) as error:
            raise ProtocolError(f"a frame that does not decode: {error}") from error


TO_SCHEDULER: Codec[ToScheduler] = Codec(ToScheduler)
FROM_SCHEDULER: Codec[FromScheduler] = Codec(FromScheduler)
TO_API: Codec[ToApi] = Codec(ToApi)


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where each process listens."""

    scheduler: str
    detokenizer: str
    api: str


class SocketDirectory:
    """A directory that only this user may enter, for socket files; gone when closed."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="tokenyard-"))
        if len(str(self.path)) > LONGEST_SOCKET_PATH - len("/detokenizer"):
            self.close()
            raise ConfigError(f"the path {self.path} is too long for a socket; set TMPDIR to a shorter one")

    @property
    def endpoints(self) -> Endpoints:
        """One address for each process."""
        return Endpoints(*(f"ipc://{self.path}/{name}" for name in ("scheduler", "detokenizer", "api")))

    def close(self) -> None:
        """Remove the directory and what is in it."""
        shutil.rmtree(self.path, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def pull_socket(context: Any, endpoint: str) -> Any:
    """Open the one socket that a process listens on; `context` is a zmq or zmq.asyncio context."""
    return _socket(context, zmq.PULL, endpoint, bind=True)


def push_socket(context: Any, endpoint: str) -> Any:
    """Open a socket to a process that listens, now or later."""
    return _socket(context, zmq.PUSH, endpoint, bind=False)


def _socket(context: Any, kind: int, endpoint: str, *, bind: bool) -> Any:
    socket = context.socket(kind)
    # No high-water mark: a full pipe would block the scheduler. Streams are bounded where they are read.
    socket.set_hwm(0)
    socket.set(zmq.LINGER, 200)
    socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)
    (socket.bind if bind else socket.connect)(endpoint)
    return socket
