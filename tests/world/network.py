"""Processes, and TCP between them in memory: bytes in order, cut anywhere, late, or lost with their connection."""

import asyncio
import contextvars
import random
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

from tests.world.clock import NS, Clock

KEEPALIVE_S = 25.0
"""When the kernel gives up a silent peer, on connections with SO_KEEPALIVE and the router's intervals."""

HIGH_WATER = 1 << 16
IN_FLIGHT = 1 << 16
"""Bytes that the network and the receiver's kernel take without the receiver reading them."""


class Process:
    """A process, with the name of its host up to a slash. `alive` ends with a kill; a stopped one does nothing."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive, self.stopped = True, False
        self.signals: dict[int, Callable[[], Any]] = {}
        self.connections: dict[Transport, None] = {}
        self.threads: list[Any] = []
        """Those that were started in it (`LockstepThread`)."""

        self.held: list[Any] = []
        """Calls that wait until the process goes on."""

        self.host = name.partition("/")[0]

    def stop(self) -> None:
        """SIGSTOP. `WorldLoop.resume` lets it go on."""
        self.stopped = True


class FakeSocket:
    """What a server asks of a listening socket."""

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port

    def getsockname(self) -> tuple[str, int]:
        return self._address

    def close(self) -> None:
        pass


class ConnectionSocket:
    """What protocols ask of a connection's socket."""

    family = socket.AF_INET

    def __init__(self, here: str, there: str) -> None:
        self._here, self._there = (here, 1), (there, 1)
        self.keepalive = False

    def getsockname(self) -> tuple[str, int]:
        return self._here

    def getpeername(self) -> tuple[str, int]:
        return self._there

    def setsockopt(self, level: int, option: int, value: int) -> None:
        if (level, option) == (socket.SOL_SOCKET, socket.SO_KEEPALIVE):
            self.keepalive = bool(value)


class Listener:
    """A listening port. Close it to refuse connections."""

    def __init__(self, network: "Network", process: Process, port: int, factory: Callable[[], Any]) -> None:
        self._network, self.process, self.factory = network, process, factory
        self.address = process.host, port
        self.context = contextvars.copy_context()
        self.sockets = [FakeSocket(*self.address)]

    def close(self) -> None:
        if self._network.listeners.get(self.address) is self:
            del self._network.listeners[self.address]

    async def wait_closed(self) -> None:
        pass


class Transport(asyncio.Transport):
    """One side of a connection. What one side writes goes through `_line` to the other side's protocol."""

    def __init__(self, network: "Network", process: Process, peer_name: str, context: contextvars.Context) -> None:
        self.socket = ConnectionSocket(process.host, peer_name)
        super().__init__({"peername": (peer_name, 1), "sockname": (process.host, 1), "socket": self.socket})
        self.network, self.process, self.context = network, process, context
        self.protocol: Any = None
        self.peer: Transport | None = None
        self._unsent = 0
        self._paused_writing = self._paused_reading = self.closing = self.lost = False
        self._high = HIGH_WATER
        self._arrived: deque[bytes] = deque()
        self._eof = False
        self.line_free_ns = 0
        process.connections[self] = None

    # What protocols call.

    def set_protocol(self, protocol: Any) -> None:
        self.protocol = protocol

    def get_protocol(self) -> Any:
        return self.protocol

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = HIGH_WATER if high is None else high

    def get_write_buffer_size(self) -> int:
        return max(0, self._unsent - IN_FLIGHT)

    def is_closing(self) -> bool:
        return self.closing

    def is_reading(self) -> bool:
        return not self._paused_reading

    def pause_reading(self) -> None:
        self._paused_reading = True

    def resume_reading(self) -> None:
        if self._paused_reading:
            self._paused_reading = False
            self._call_soon(self._deliver)

    def write(self, data: Any) -> None:
        if self.closing or not data:
            return
        data = bytes(data)
        self._unsent += len(data)
        for piece in self.network.cut(data):
            self._send("data", piece)
        if self.get_write_buffer_size() > self._high and not self._paused_writing:
            self._paused_writing = True
            self.protocol.pause_writing()

    def writelines(self, parts: Any) -> None:
        self.write(b"".join(parts))

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self._send("eof", b"")

    def close(self) -> None:
        if not self.closing:
            self.closing = True
            self._send("eof", b"")
            self._call_soon(self._finish, None)

    def abort(self) -> None:
        if not self.lost:
            self.closing = True
            self._send("reset", b"")
            self._call_soon(self._finish, None)

    # What the network calls.

    def _call_soon(self, callback: Callable[..., Any], *args: Any) -> None:
        self.network.loop.call_soon(callback, *args, context=self.context)

    def _finish(self, error: Exception | None) -> None:
        if self.lost:
            return
        self.lost = self.closing = True
        self.process.connections.pop(self, None)
        self.protocol.connection_lost(error)

    def _send(self, kind: str, data: bytes) -> None:
        peer = self.peer
        if peer is not None and not peer.lost:
            self.network.send(self, peer, kind, data)

    def arrive(self, kind: str, data: bytes) -> None:
        """Something has come from the other side; called in this side's process."""
        if self.lost:
            if kind == "data" and self.peer is not None and not self.peer.lost:
                self.network.send(self, self.peer, "reset", b"")
            return
        if kind == "reset":
            self._finish(ConnectionResetError(104, "Connection reset by peer"))
            return
        if kind == "eof":
            self._eof = True
        else:
            self._arrived.append(data)
        self._deliver()

    def _deliver(self) -> None:
        while self._arrived and not self._paused_reading and not self.lost:
            data = self._arrived.popleft()
            if self.peer is not None:
                self.peer.acknowledged(len(data))
            self.protocol.data_received(data)
        if self._eof and not self._arrived and not self.lost and not self._paused_reading:
            self._eof = False
            if not self.protocol.eof_received():
                self.close()

    def acknowledged(self, size: int) -> None:
        """The receiver has read `size` bytes."""
        self._unsent -= size
        if self._paused_writing and self.get_write_buffer_size() <= self._high // 4:
            self._paused_writing = False
            self._call_soon(self._resume_writing)

    def _resume_writing(self) -> None:
        if not self.lost:
            self.protocol.resume_writing()


class Network:
    """Latency, partitions and cuts, drawn from the world's seed.

    blocked: pairs (from, to) of hosts between which nothing arrives; TCP sends it again once the pair can talk.
    slow: seconds that each segment to a host takes in addition.
    flips: the chance that a segment from or to a host has a wrong bit, where seals and checksums notice it.
    """

    def __init__(self, clock: Clock, rng: random.Random) -> None:
        self._clock, self.rng = clock, rng
        self.loop: Any = None
        self.listeners: dict[tuple[str, int], Listener] = {}
        self.blocked: set[tuple[str, str]] = set()
        self.slow: dict[str, float] = {}
        self.flips: dict[str, float] = {}
        self._held: list[tuple[Transport, Transport, str, bytes]] = []
        self.segments = 0

    def cut(self, data: bytes) -> list[bytes]:
        """A write as it may arrive: in one piece, or cut anywhere."""
        if len(data) < 2 or self.rng.random() < 0.7:
            return [data]
        at = self.rng.randrange(1, len(data))
        return [data[:at], data[at:]]

    def delay_s(self, source: str, target: str) -> float:
        """How long a segment takes."""
        return self.rng.uniform(0.0001, 0.002) + self.slow.get(source, 0.0) + self.slow.get(target, 0.0)

    def listen(self, process: Process, port: int, factory: Callable[[], Any]) -> Listener:
        """Take connections to a port of the process's host."""
        assert (process.host, port) not in self.listeners, "the address is in use"
        listener = self.listeners[process.host, port] = Listener(self, process, port, factory)
        return listener

    async def connect(self, process: Process, address: tuple[str, int], factory: Callable[[], Any]) -> Any:
        """Open a connection. Raises ConnectionRefusedError; waits without end for a host that does not answer."""
        await asyncio.sleep(2 * self.delay_s(process.host, address[0]))
        while self.cut_off(process.host, address[0]):
            await asyncio.sleep(0.2)
        near = self.join(process, address, factory)
        return near, near.protocol

    def cut_off(self, one: str, other: str) -> bool:
        """Whether two hosts cannot open connections to each other."""
        return (one, other) in self.blocked or (other, one) in self.blocked

    def join(self, process: Process, address: tuple[str, int], factory: Callable[[], Any]) -> Transport:
        """The near side of a new connection. Raises ConnectionRefusedError."""
        listener = self.listeners.get(address)
        if listener is None or not listener.process.alive:
            raise ConnectionRefusedError(111, "Connection refused")
        near = Transport(self, process, address[0], contextvars.copy_context())
        far = Transport(self, listener.process, process.host, listener.context.copy())
        near.peer, far.peer = far, near
        near.protocol = factory()
        self.loop.call_soon(self._accept, far, listener, context=far.context)
        near.protocol.connection_made(near)
        return near

    @staticmethod
    def _accept(far: Transport, listener: Listener) -> None:
        far.protocol = listener.factory()
        far.protocol.connection_made(far)

    def send(self, source: Transport, target: Transport, kind: str, data: bytes) -> None:
        """Bring a segment to the other side, in order."""
        self.segments += 1
        here, there = source.process.host, target.process.host
        if (here, there) in self.blocked:
            self._held.append((source, target, kind, data))
            return
        delay_ns = round(self.delay_s(here, there) * NS)
        source.line_free_ns = due = max(source.line_free_ns, self._clock.now_ns + delay_ns) + 1
        if kind == "data" and max(self.flips.get(here, 0.0), self.flips.get(there, 0.0)):
            data = self._flipped(source, target, data, max(self.flips.get(here, 0.0), self.flips.get(there, 0.0)))
        self.loop.call_at(due / NS, target.arrive, kind, data, context=target.context)

    def _flipped(self, source: Transport, target: Transport, data: bytes, chance: float) -> bytes:
        """The same bytes with one wrong bit, if the connection is one that notices."""
        checked = any(getattr(side.protocol, "checked", False) for side in (source, target))
        if not checked or self.rng.random() >= chance:
            return data
        at = self.rng.randrange(len(data))
        return data[:at] + bytes([data[at] ^ 1 << self.rng.randrange(8)]) + data[at + 1 :]

    def block(self, one: str, other: str, *, both: bool = True) -> None:
        """Nothing arrives at `other` from `one` any more; with `both`, nor the other way."""
        self.blocked.add((one, other))
        if both:
            self.blocked.add((other, one))

    def heal(self) -> None:
        """All hosts reach each other again, and TCP sends what it kept."""
        self.blocked.clear()
        held, self._held = self._held, []
        for source, target, kind, data in held:
            self.send(source, target, kind, data)

    def kill(self, process: Process, *, host: bool = False) -> None:
        """End a process: its peers get a reset. With its `host`, they hear nothing."""
        process.alive = False
        for address, listener in list(self.listeners.items()):
            if listener.process is process:
                del self.listeners[address]
        for transport in list(process.connections):
            transport.lost = transport.closing = True
            peer = transport.peer
            if peer is None or peer.lost:
                continue
            if not host:
                self.send(transport, peer, "reset", b"")
            elif peer.socket.keepalive:
                self.loop.call_later(KEEPALIVE_S, peer.arrive, "reset", b"", context=peer.context)
        process.connections.clear()
