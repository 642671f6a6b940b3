"""Blocking code on the world's network: `socket` and `selectors` whose waits take virtual time.

Threads of a process use these (PD, shared stores); asyncio has the transports themselves.
"""

import ctypes
import errno
import http.client
import io
import itertools
import selectors
import socket
from collections import deque
from functools import partial
from typing import Any

from tests.world.clock import NS
from tests.world.lockstep import LockstepThread, running
from tests.world.loop import current
from tests.world.network import Process, Transport
from tests.world.threads import ThreadPoolExecutor, Waiters
from tokenyard.base import Int64Array
from tokenyard.disagg import connection, peer_discovery, tcp, transfer_manager
from tokenyard.engine.scheduler_process.attachments import disagg
from tokenyard.kv_store import remote, resp

READ_AHEAD = 1 << 16
"""Bytes that a socket holds before its sender has to wait."""

FIRST_PORT = 40000
BATCH_BYTES = 512
"""Bytes of pages between two looks at their lease; few, as the mock's pages are small."""


class _Pollable:
    """What a selector can watch."""

    def __init__(self, world: Any) -> None:
        self._world = world
        self._waiters = Waiters(world.clock)
        self._number = next(world.sockets.numbers)
        self.watchers: list[Selector] = []

    def fileno(self) -> int:
        return self._number

    def ready(self) -> int:
        """The events that a selector would report."""
        raise NotImplementedError

    def _changed(self) -> None:
        self._waiters.wake()
        for watcher in self.watchers:
            watcher.waiters.wake()


class Socket(_Pollable):
    """socket.socket of a connection: the protocol of a transport, or one of a pair.

    checked: that what arrives is guarded by seals or checksums, so that its bits may flip on the way.
    """

    checked = True

    def __init__(self, world: Any, address: tuple[str, int] = ("", 0)) -> None:
        super().__init__(world)
        self.transport: Transport | None = None
        self.other: Socket | None = None
        self._address = address
        self._received = bytearray()
        self._eof = self._full = self._closed = False
        self._error: Exception | None = None
        self._timeout_s: float | None = None
        self._files = 0

    # What the transport calls.

    def connection_made(self, transport: Transport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        if len(self._received) > READ_AHEAD and self.transport is not None:
            self.transport.pause_reading()
        self._changed()

    def eof_received(self) -> bool:
        self._eof = True
        self._changed()
        return True

    def connection_lost(self, error: Exception | None) -> None:
        self._eof, self._error = True, error
        self._changed()

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        self._changed()

    def ready(self) -> int:
        reads = selectors.EVENT_READ if self._received or self._eof else 0
        return reads | (0 if self._full else selectors.EVENT_WRITE)

    # What threads call.

    def setblocking(self, flag: bool) -> None:
        self._timeout_s = None if flag else 0.0

    def settimeout(self, seconds: float | None) -> None:
        self._timeout_s = seconds

    def setsockopt(self, level: int, option: int, value: int) -> None:
        if self.transport is not None:
            self.transport.socket.setsockopt(level, option, value)

    def getpeername(self) -> tuple[str, int]:
        return self._address

    def wait(self, event: int) -> None:
        """Wait until it is ready for that, as long as its timeout allows."""
        if self._timeout_s == 0.0 and not self.ready() & event:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        until_ns = None if self._timeout_s is None else self._world.clock.now_ns + round(self._timeout_s * NS)
        while not self.ready() & event:
            left_s = None if until_ns is None else (until_ns - self._world.clock.now_ns) / NS
            if left_s is not None and left_s <= 0:
                raise TimeoutError("timed out")
            self._waiters.wait(left_s)

    def recv(self, size: int) -> bytes:
        self.wait(selectors.EVENT_READ)
        if not self._received:
            if self._error is not None:
                raise self._error
            return b""
        data = bytes(self._received[:size])
        del self._received[:size]
        if self.transport is not None:
            self.transport.resume_reading()
        return data

    def send(self, data: Any) -> int:
        self.wait(selectors.EVENT_WRITE)
        if self._error is not None or self._closed:
            raise self._error or BrokenPipeError(errno.EPIPE, "Broken pipe")
        data = bytes(data[:READ_AHEAD])
        if self.other is not None:
            self.other.data_received(data)
        else:
            assert self.transport is not None
            self.transport.write(data)
        return len(data)

    def sendall(self, data: Any) -> None:
        left = memoryview(data).cast("B")
        while len(left):
            left = left[self.send(left) :]

    def shutdown(self, how: int) -> None:
        self._shut()

    def close(self) -> None:
        self._closed = True
        if not self._files:
            self._shut()

    def _shut(self) -> None:
        self._closed = self._eof = True
        if self.transport is not None:
            self.transport.close()
        self._changed()

    def makefile(self, mode: str) -> io.BufferedReader:
        self._files += 1
        return io.BufferedReader(_File(self))

    def file_closed(self) -> None:
        """A file that was made of it is closed."""
        self._files -= 1
        if self._closed and not self._files:
            self._shut()

    def __enter__(self) -> "Socket":
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


class _File(io.RawIOBase):
    """The file of a socket, for reading."""

    def __init__(self, sock: Socket) -> None:
        super().__init__()
        self._sock = sock

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._sock.recv(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._sock.file_closed()
        super().close()


class Listener(_Pollable):
    """socket.socket that listens."""

    def __init__(self, world: Any, process: Process, port: int) -> None:
        super().__init__(world)
        self._world = world
        self._arrived: deque[Socket] = deque()
        self._listener = world.network.listen(process, port or next(world.sockets.ports), self._accepted)

    def _accepted(self) -> Socket:
        sock = Socket(self._world)
        self._arrived.append(sock)
        self._changed()
        return sock

    def ready(self) -> int:
        return selectors.EVENT_READ if self._arrived else 0

    def setblocking(self, flag: bool) -> None:
        pass

    def getsockname(self) -> tuple[str, int]:
        return self._listener.address

    def accept(self) -> tuple[Socket, tuple[str, int]]:
        if not self._arrived:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        sock = self._arrived.popleft()
        return sock, sock.getpeername()

    def close(self) -> None:
        self._listener.close()


class Selector:
    """selectors.DefaultSelector."""

    def __init__(self, world: Any) -> None:
        self._keys: dict[_Pollable, selectors.SelectorKey] = {}
        self._clock = world.clock
        self.waiters = Waiters(world.clock)

    def register(self, watched: _Pollable, events: int, data: Any = None) -> None:
        self._keys[watched] = selectors.SelectorKey(watched, watched.fileno(), events, data)
        watched.watchers.append(self)

    def modify(self, watched: _Pollable, events: int, data: Any = None) -> None:
        self._keys[watched] = selectors.SelectorKey(watched, watched.fileno(), events, data)

    def unregister(self, watched: _Pollable) -> None:
        del self._keys[watched]
        watched.watchers.remove(self)

    def select(self, timeout: float) -> list[tuple[selectors.SelectorKey, int]]:
        until_ns = self._clock.now_ns + round(timeout * NS)
        while not (found := self._ready()) and self._clock.now_ns < until_ns:
            self.waiters.wait((until_ns - self._clock.now_ns) / NS)
        return found

    def _ready(self) -> list[tuple[selectors.SelectorKey, int]]:
        keys = self._keys.items()
        return [(key, ready) for watched, key in keys if (ready := watched.ready() & key.events)]

    def close(self) -> None:
        pass


class Sockets:
    """The module `socket` as the product finds it in a process of the world; the real one outside of them."""

    def __init__(self, world: Any) -> None:
        self._world = world
        self.numbers, self.ports = itertools.count(1000), itertools.count(FIRST_PORT)

    def __getattr__(self, name: str) -> Any:
        return getattr(socket, name)

    def socketpair(self) -> tuple[Any, Any]:
        one, other = Socket(self._world), Socket(self._world)
        one.other, other.other = other, one
        return one, other

    def create_server(self, address: tuple[str, int], **options: Any) -> Listener:
        process = current.get()
        assert process is not None
        return Listener(self._world, process, address[1])

    def create_connection(self, address: tuple[str, int], timeout: float | None = None, source: Any = None) -> Socket:
        """Raises OSError, TimeoutError among them."""
        process, thread, network, clock = current.get(), running.get(), self._world.network, self._world.clock
        assert process is not None
        assert thread is not None, "the event loop would block"
        begin_ns, sock = clock.now_ns, Socket(self._world, address)
        _pass(thread, clock.now_ns, 2 * network.delay_s(process.host, address[0]))
        while network.cut_off(process.host, address[0]):
            if timeout is not None and clock.now_ns - begin_ns >= timeout * NS:
                raise TimeoutError("timed out")
            _pass(thread, clock.now_ns, 0.2)
        network.join(process, address, lambda: sock)
        sock.settimeout(timeout)
        return sock


def _pass(thread: LockstepThread, now_ns: int, seconds: float) -> None:
    thread.wait_until(now_ns + round(seconds * NS), wakes_early=False)


class _Selectors:
    """The module `selectors`."""

    EVENT_READ, EVENT_WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE

    def __init__(self, world: Any) -> None:
        self._world = world

    def DefaultSelector(self) -> Selector:
        return Selector(self._world)


def move(sock: Socket, segments: Int64Array, timeout_s: float, name: str) -> None:
    """`disagg.tcp._move`: write or read segments of memory, as much at a time as there is."""
    sock.settimeout(timeout_s)
    for address, size in segments.tolist():
        done = 0
        while done < size:
            try:
                if name == "writev":
                    done += sock.send(ctypes.string_at(address + done, size - done))
                    continue
                data = sock.recv(size - done)
            except TimeoutError:
                raise tcp.TransferError("nothing moves") from None
            if not data:
                raise tcp.TransferError("the other side stopped")
            ctypes.memmove(address + done, data, len(data))
            done += len(data)


def patches(world: Any) -> dict[tuple[Any, str], Any]:
    """What modules of the product find under which names while the world runs."""
    sockets = world.sockets
    users = (connection, peer_discovery, tcp, transfer_manager, resp, http.client)
    return {(module, "socket"): sockets for module in users} | {
        (transfer_manager, "selectors"): _Selectors(world),
        (transfer_manager, "ThreadPoolExecutor"): lambda workers, **named: ThreadPoolExecutor(world, workers),
        (tcp, "_move"): move,
        (tcp, "BATCH_BYTES"): BATCH_BYTES,
        # Its clock is an argument, whose default is the real one.
        (remote, "StoreCircuitBreaker"): partial(remote.StoreCircuitBreaker, clock=lambda: world.clock.now_ns / NS),
        # Engines of one world run in one process, which does not make them hosts of one machine.
        (disagg, "machine_id"): lambda: "",
    }
