"""Messages on the wire: a tag byte, the number of the scheduler process that sent it, then msgpack. No pickle anywhere.

Numpy arrays travel as their raw bytes. Sockets are ZeroMQ PUSH/PULL over ipc:// files in a private directory.
"""

import shutil
import struct
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
from tokenyard.engine.processes.messages import FromScheduler, ToApi, ToDetokenizer, ToScheduler

Message = TypeVar("Message")
MAX_SOCKET_PATH = 100
MAX_SOCKET_NAME = "/scheduler-1000000"
RECONNECT_MS = 20
HEAD = struct.Struct("<BI")


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
    cls: tag for tag, cls in enumerate(dict.fromkeys(get_args(ToScheduler) + get_args(ToDetokenizer) + get_args(ToApi)))
}
"""One tag for each class in all directions, as the scheduler's messages may also go straight to the API process."""


class Codec(Generic[Message]):
    """Encodes and decodes the messages of one direction, a union of classes; decoded arrays are read-only views."""

    def __init__(self, union: Any) -> None:
        types = get_args(union)
        self._tags = {cls: _TAGS[cls] for cls in types}
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
        self._decoders = {_TAGS[cls]: msgspec.msgpack.Decoder(cls, dec_hook=_decode_array) for cls in types}

    def encode(self, message: Message, source: int = 0) -> bytes:
        """Return the frame of a message from scheduler process `source`.

        Raises ProtocolError for a message that does not go this way.
        """
        tag = self._tags.get(type(message))
        if tag is None:
            raise ProtocolError(f"{type(message).__name__} is not a message of this direction")
        return HEAD.pack(tag, source) + self._encoder.encode(message)

    def decode(self, frame: bytes) -> tuple[Message, int]:
        """Return the message of a frame and its source. Raises ProtocolError for anything that is not a message."""
        tag, source = HEAD.unpack_from(frame) if len(frame) >= HEAD.size else (None, 0)
        decoder = self._decoders.get(tag)
        if decoder is None:
            raise ProtocolError("a frame without a tag of this direction")
        try:
            return decoder.decode(memoryview(frame)[HEAD.size :]), source
        except (msgspec.MsgspecError, ValueError, TypeError) as error:
            raise ProtocolError(f"a frame that does not decode: {error}") from error


TO_SCHEDULER: Codec[ToScheduler] = Codec(ToScheduler)
FROM_SCHEDULER: Codec[FromScheduler] = Codec(FromScheduler)
TO_DETOKENIZER: Codec[ToDetokenizer] = Codec(ToDetokenizer)
TO_API: Codec[ToApi] = Codec(ToApi)


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where each process listens: addresses of socket files in `directory`."""

    directory: str

    @property
    def api(self) -> str:
        """Of the API process."""
        return f"ipc://{self.directory}/api"

    @property
    def detokenizer(self) -> str:
        """Of the detokenizer."""
        return f"ipc://{self.directory}/detokenizer"

    def scheduler(self, source: int) -> str:
        """Of scheduler process `source`: each has its own, so that none gets what was meant for the one before it."""
        return f"ipc://{self.directory}/scheduler-{source}"


class SocketDirectory:
    """A directory that only this user may enter, for socket files; gone when closed."""

    def __init__(self) -> None:
        """Raises ConfigError where the path is too long for a socket."""
        self.path = Path(tempfile.mkdtemp(prefix="tokenyard-"))
        if len(str(self.path)) > MAX_SOCKET_PATH - len(MAX_SOCKET_NAME):
            self.close()
            raise ConfigError(f"the path {self.path} is too long for a socket; set TMPDIR to a shorter one")

    @property
    def endpoints(self) -> Endpoints:
        """The addresses in it."""
        return Endpoints(str(self.path))

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
