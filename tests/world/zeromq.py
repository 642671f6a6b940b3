"""ZeroMQ of the world: sockets that publish and that subscribe, over its network, for events of prefix caches.

As the real one: a subscriber that is too slow loses messages, and one that has lost its connection makes another, where
it notices; it says nothing of either.
"""

import asyncio
from collections import deque
from typing import Any

import msgspec
import zmq

from tests.world.loop import current
from tests.world.network import Transport
from tests.world.threads import Waiters
from tokenyard.base.frames import LENGTH, Frames, frame
from tokenyard.engine.scheduler_process.attachments import kv_events
from tokenyard.router import kv_event_subscriber

RECONNECT_S = 0.1
UNREAD = 1 << 12
"""Bytes that a subscriber may have left unread before it loses messages."""


class _Connection(asyncio.Protocol):
    """One side of a connection between two sockets. Messages are lists of bytes."""

    def __init__(self, owner: Any) -> None:
        self._owner, self._frames = owner, Frames()
        self._frames.max_frame_bytes = 1 << 8 * LENGTH.size
        self.transport: Transport | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self._owner.opened(self)

    def data_received(self, data: bytes) -> None:
        self._frames.feed(data)
        while (body := self._frames.next()) is not None:
            self._owner.arrived(self, msgspec.msgpack.decode(body))

    def connection_lost(self, error: Exception | None) -> None:
        self._owner.closed(self)

    def send(self, parts: list[bytes]) -> None:
        """Send a message."""
        assert self.transport is not None
        self.transport.write(frame(msgspec.msgpack.encode(parts)))


class BoundSocket:
    """PUB and ROUTER, which bind; used by threads."""

    def __init__(self, world: Any, kind: int) -> None:
        self._world, self._kind = world, kind
        self._waiters = Waiters(world.clock)
        self._connections: dict[bytes, _Connection] = {}
        self._received: deque[list[bytes]] = deque()
        self._endpoint, self._listener = "", None

    def setsockopt(self, option: int, value: Any) -> None:
        pass

    def getsockopt_string(self, option: int) -> str:
        return self._endpoint

    def bind(self, endpoint: str) -> None:
        process = current.get()
        assert process is not None
        self._endpoint = endpoint
        port = int(endpoint.rpartition(":")[2])
        self._listener = self._world.network.listen(process, port, lambda: _Connection(self))

    def send_multipart(self, parts: list[bytes]) -> None:
        if self._kind == zmq.ROUTER:
            if (asked := self._connections.get(parts[0])) is not None:
                asked.send(parts[1:])
            return
        for connection in list(self._connections.values()):
            assert connection.transport is not None
            if connection.transport.get_write_buffer_size() < UNREAD:
                connection.send(parts)

    def poll(self, timeout_ms: float) -> bool:
        if not self._received:
            self._waiters.wait(timeout_ms / 1000)
        return bool(self._received)

    def recv_multipart(self) -> list[bytes]:
        return self._received.popleft()

    def close(self, linger: int = 0) -> None:
        """Stop listening, and end all connections."""
        if self._listener is not None:
            self._listener.close()
        for connection in list(self._connections.values()):
            assert connection.transport is not None
            connection.transport.abort()

    # What connections call.

    def opened(self, connection: _Connection) -> None:
        self._connections[self._name(connection)] = connection

    def arrived(self, connection: _Connection, parts: list[bytes]) -> None:
        self._received.append([self._name(connection), *parts])
        self._waiters.wake()

    def closed(self, connection: _Connection) -> None:
        self._connections.pop(self._name(connection), None)

    @staticmethod
    def _name(connection: _Connection) -> bytes:
        return id(connection).to_bytes(8, "big")


class ConnectedSocket:
    """SUB and DEALER, which connect; used on the event loop."""

    def __init__(self, world: Any) -> None:
        self._world, self._probes = world, False
        self._received: asyncio.Queue[list[bytes]] = asyncio.Queue()
        self._unsent: list[list[bytes]] = []
        self._connection: _Connection | None = None
        self._lost = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def setsockopt(self, option: int, value: Any) -> None:
        if option == zmq.TCP_KEEPALIVE:
            self._probes = bool(value)

    def connect(self, endpoint: str) -> None:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self._task = asyncio.get_running_loop().create_task(self._stay_connected((host, int(port))))

    async def _stay_connected(self, address: tuple[str, int]) -> None:
        while True:
            self._lost.clear()
            try:
                await self._world.loop.create_connection(lambda: _Connection(self), *address)
                await self._lost.wait()
            except OSError:
                pass
            await asyncio.sleep(RECONNECT_S)

    async def send_multipart(self, parts: list[bytes]) -> None:
        if self._connection is None:
            self._unsent.append(parts)
        else:
            self._connection.send(parts)

    async def recv_multipart(self) -> list[bytes]:
        return await self._received.get()

    def close(self, linger: int = 0) -> None:
        """End the connection."""
        if self._task is not None:
            self._task.cancel()
        if self._connection is not None and self._connection.transport is not None:
            self._connection.transport.abort()

    def __enter__(self) -> "ConnectedSocket":
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    # What connections call.

    def opened(self, connection: _Connection) -> None:
        assert connection.transport is not None
        connection.transport.socket.keepalive = self._probes
        self._connection = connection
        unsent, self._unsent = self._unsent, []
        for parts in unsent:
            connection.send(parts)

    def arrived(self, connection: _Connection, parts: list[bytes]) -> None:
        self._received.put_nowait(parts)

    def closed(self, connection: _Connection) -> None:
        self._connection = None
        self._lost.set()


class Context:
    """zmq.Context and zmq.asyncio.Context."""

    def __init__(self, world: Any) -> None:
        self._world = world
        self._sockets: list[Any] = []

    def socket(self, kind: int) -> Any:
        """A socket of a kind."""
        bound = kind in (zmq.PUB, zmq.ROUTER)
        self._sockets.append(BoundSocket(self._world, kind) if bound else ConnectedSocket(self._world))
        return self._sockets[-1]

    def destroy(self, linger: int = 0) -> None:
        """Close all sockets."""
        for socket in self._sockets:
            socket.close()


class _Zmq:
    """The modules `zmq` and `zmq.asyncio` as the product finds them."""

    def __init__(self, world: Any) -> None:
        self._world, self.asyncio = world, self

    def __getattr__(self, name: str) -> Any:
        return getattr(zmq, name)

    def Context(self) -> Context:
        return Context(self._world)


def patches(world: Any) -> dict[tuple[Any, str], Any]:
    """What modules of the product find under which names while the world runs."""
    return {(module, "zmq"): _Zmq(world) for module in (kv_events, kv_event_subscriber)}
