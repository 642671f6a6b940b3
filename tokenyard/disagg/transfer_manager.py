"""The thread that communicates with other engines: it runs `DecodePeer` and `PrefillPeer` on sockets and a clock.

Calls from other threads go into its queue (`call`). It passes events for the scheduler to `deliver`. Separate threads
copy pages, so that heartbeats continue during a copy.
"""

import contextlib
import logging
import queue
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from tokenyard.base import Cancel, ConfigError, Event, Int32Array, TokenyardError
from tokenyard.base.frames import HandshakeError
from tokenyard.disagg.connection import Connection
from tokenyard.disagg.handshake import EngineIdentity, Pull, frame
from tokenyard.disagg.process_vm import allow, can_read, read_pages
from tokenyard.disagg.protocol import Close, DecodePeer, Peer, Prefill, PrefillPeer, Read, Send, Timeouts
from tokenyard.disagg.protocol.messages import NS_PER_S, Action, Message, StopRead, unpack_ids
from tokenyard.disagg.tcp import receive_pages, send_pages
from tokenyard.kv_layout.layout import spans

logger = logging.getLogger(__name__)

HANDSHAKE_NS = 5 * NS_PER_S
MAX_CONNECTIONS = 512
MAX_WAIT_NS = NS_PER_S
TRANSFER_THREADS = 4
TICKET_BYTES = 16
BACKENDS = ("auto", "tcp", "process_vm")


@dataclass(slots=True)
class PageRead:
    """A read in progress.

    sock: the socket of a read over TCP, once it is connected.
    stopped: whether its result is no longer needed.
    """

    sock: socket.socket | None = None
    stopped: bool = False

    def stop(self) -> None:
        """Make the read end soon."""
        self.stopped = True
        if self.sock is not None:
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)


class KvTransferManager:
    """Transfers KV between this engine and others (SGLang's KV managers, vLLM's KV connectors).

    host: address to listen on; None to not listen. `address` is where it listens.
    deliver: passes events to the scheduler.
    prefill: makes the event that submits a prompt for another engine.
    """

    def __init__(
        self,
        identity: EngineIdentity,
        timeouts: Timeouts,
        deliver: Callable[[Event], None],
        prefill: Callable[[Prefill], Event],
        *,
        first_number: int,
        host: str | None = None,
        port: int = 0,
        backend: str = "auto",
    ) -> None:
        """Raises ConfigError if it cannot listen on `host` and `port`."""
        self.identity = identity
        self.decode_peer = DecodePeer(timeouts, identity.hello.page_size)
        self.prefill_peer = PrefillPeer(
            timeouts, identity.hello.boot_id, first_number, lambda: secrets.token_bytes(TICKET_BYTES)
        )
        self.address = ""
        self.moved_bytes = 0
        self.healthy_peers: tuple[Peer, ...] = ()
        """The prefill engines that accept requests now; read from any thread."""
        self.offered: tuple[int, ...] = ()
        """See `DecodePeer.offered`; read from any thread."""
        self.failure: Exception | None = None
        """What ended the thread before `close`; read from any thread, after an event that `deliver` passes."""
        self.on_lost: Callable[[str, str], None] = lambda name, why: None
        self._timeouts = timeouts
        self._deliver = deliver
        self._prefill = prefill
        self._backend = backend
        self._commands: queue.SimpleQueue[Callable[[int], None]] = queue.SimpleQueue()
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._selector.register(self._wake_in, selectors.EVENT_READ)
        self._listener = None if host is None else self._listen(host, port)
        self._connections: dict[int, Connection] = {}
        self._next_connection = 1
        self._reads_memory: dict[int, bool] = {}
        self._reads: dict[str, PageRead] = {}
        self._transfer_threads = ThreadPoolExecutor(TRANSFER_THREADS, thread_name_prefix="kv")
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="transfer", daemon=True)

    def _listen(self, host: str, port: int) -> socket.socket:
        try:
            listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        except OSError as error:
            raise ConfigError(f"KV transfer cannot listen at {host}:{port}: {error.strerror}") from error
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        shown = f"[{host}]" if ":" in host else host
        self.address = f"{shown}:{listener.getsockname()[1]}"
        return listener

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def call(self, command: Callable[[int], None]) -> None:
        """Run `command(now)` on the manager's thread. May be called from any thread."""
        self._commands.put(command)
        # A full pipe wakes as well as one byte more.
        with contextlib.suppress(OSError):
            self._wake_out.send(b"x")

    def dialled(self, sock: socket.socket, name: str) -> None:
        """Take over a connected socket to the engine `name`. May be called from any thread."""
        self.call(lambda now: self._add(sock, name, now))

    def close(self) -> None:
        """End all connections and reads, and wait for them: nothing writes to the pool after this returns."""
        if self._thread.is_alive():
            self.call(lambda now: self._stop())
            self._thread.join()
        self._transfer_threads.shutdown(wait=True)
        self._selector.close()

    def _stop(self) -> None:
        self._stopping = True
        for connection in self._connections.values():
            connection.close()
        for page_read in self._reads.values():
            page_read.stop()
        if self._listener is not None:
            self._listener.close()

    # ---- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve_all()
        except Exception as error:
            self.failure = error
            self._deliver(Cancel([0]))  # of no request: it wakes the event loop

    def _serve_all(self) -> None:
        while not self._stopping:
            for key, ready in self._selector.select(self._wait_s()):
                if key.fileobj is self._wake_in:
                    with contextlib.suppress(BlockingIOError):
                        self._wake_in.recv(4096)
                elif key.fileobj is self._listener:
                    self._accept()
                elif key.data in self._connections:
                    self._serve(self._connections[key.data], ready)
            self._turn()

    def _wait_s(self) -> float:
        times = [self.decode_peer.next_ns(), self.prefill_peer.next_ns()]
        times += [connection.until_ns for connection in self._connections.values() if not connection.open]
        now = time.monotonic_ns()
        wait_ns = min((when - now for when in times if when is not None), default=MAX_WAIT_NS)
        return max(0, min(wait_ns, MAX_WAIT_NS)) / NS_PER_S

    def _turn(self) -> None:
        """Run queued calls, tick both peers, and perform their actions."""
        now = time.monotonic_ns()
        with contextlib.suppress(queue.Empty):
            while not self._stopping:
                command = self._commands.get_nowait()
                try:
                    command(now)
                except Exception:
                    logger.exception("a call of KV transfer failed")
        self.decode_peer.tick(now)
        self.prefill_peer.tick(now)
        for connection in list(self._connections.values()):
            if not connection.open and now >= connection.until_ns:
                self._drop(connection, "the handshake took too long")
        while actions := self.decode_peer.take() + self.prefill_peer.take():
            for action in actions:
                self._do(action, now)
        self.offered = tuple(self.decode_peer.offered)
        self.healthy_peers = tuple(self.decode_peer.healthy_peers(now))

    def _do(self, action: Action, now: int) -> None:
        match action:
            case Send():
                self._send(action)
            case Close():
                if (connection := self._connections.get(action.peer)) is not None:
                    self._drop(connection, action.why)
            case Prefill():
                self._submit(action, now)
            case Read():
                self._read(action)
            case StopRead():
                if (page_read := self._reads.get(action.key)) is not None:
                    page_read.stop()
            case _:
                self._deliver(action)

    def _submit(self, action: Prefill, now: int) -> None:
        try:
            self._deliver(self._prefill(action))
        except TokenyardError as error:
            self.prefill_peer.finished(action.number, error.message, -1, now)

    # ---- connections -----------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        assert self._listener is not None
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            if len(self._connections) >= MAX_CONNECTIONS:
                sock.close()
                return
            self._add(sock, "", time.monotonic_ns())

    def _add(self, sock: socket.socket, name: str, now: int) -> None:
        number, self._next_connection = self._next_connection, self._next_connection + 1
        try:
            connection = Connection(sock, number, self.identity, name, now + HANDSHAKE_NS)
        except OSError as error:
            sock.close()
            self.on_lost(name, str(error))
            return
        self._connections[number] = connection
        self._selector.register(sock, selectors.EVENT_READ, number)
        self._watch(connection)

    def _watch(self, connection: Connection) -> None:
        """Register the socket events that the connection waits for."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.wants_to_write else 0)
        self._selector.modify(connection.sock, events, connection.number)

    def _serve(self, connection: Connection, ready: int) -> None:
        try:
            if ready & selectors.EVENT_WRITE:
                connection.flush()
            if ready & selectors.EVENT_READ and connection.read(lambda message: self._take(connection, message)):
                self._opened(connection)
            if connection.pull is not None:
                self._send_pages(connection)
            elif connection.number in self._connections:
                self._watch(connection)
        except (OSError, HandshakeError) as error:
            self._drop(connection, str(error))

    def _take(self, connection: Connection, message: Message) -> None:
        now = time.monotonic_ns()
        if connection.name:
            self.decode_peer.received(connection.number, message, now)
        else:
            self.prefill_peer.received(connection.number, message, now)

    def _opened(self, connection: Connection) -> None:
        hello = connection.handshake.hello
        assert hello is not None
        same_machine = bool(hello.machine) and hello.machine == self.identity.hello.machine
        if not connection.name:
            if same_machine and self._backend != "tcp":
                allow(hello.pid)
            return
        self._reads_memory[connection.number] = same_machine and self._backend != "tcp"
        logger.info("KV comes from %s (%s)", connection.name, "process_vm" if same_machine else "tcp")
        self.decode_peer.joined(connection.number, connection.name, time.monotonic_ns())

    def _send(self, send: Send) -> None:
        connection = self._connections.get(send.peer)
        if connection is None:
            return
        try:
            connection.send(send.message)
            self._watch(connection)
        except OSError as error:
            self._drop(connection, str(error))

    def _drop(self, connection: Connection, why: str) -> None:
        if self._connections.pop(connection.number, None) is None:
            return
        now = time.monotonic_ns()
        self._selector.unregister(connection.sock)
        connection.close()
        self._reads_memory.pop(connection.number, None)
        if connection.name:
            self.decode_peer.lost(connection.number, now)
            self.on_lost(connection.name, why)
        else:
            self.prefill_peer.lost(connection.number, now)

    # ---- pages -----------------------------------------------------------------------------------------------------

    def _send_pages(self, connection: Connection) -> None:
        """Send pages through a connection that requests them, on another thread."""
        pull, sock = connection.pull, connection.sock
        assert pull is not None
        del self._connections[connection.number]
        self._selector.unregister(sock)
        offer = None
        if pull.is_signed(self.identity.secret):
            offer = self.prefill_peer.valid(pull.key, pull.ticket, time.monotonic_ns())
        if offer is None:
            sock.close()
            return
        pages, state_slot = unpack_ids(offer.pages)[pull.first : pull.first + pull.count], offer.state_slot
        if pull.first < 0 or pull.count < 0 or len(pages) != pull.count:
            sock.close()
            return

        def valid() -> bool:
            return self.prefill_peer.valid(pull.key, pull.ticket, time.monotonic_ns()) is not None

        def work() -> None:
            with sock, contextlib.suppress(OSError, TokenyardError):
                ours, timeout_s = self.identity.pages, self._timeouts.silence_ns / NS_PER_S
                send_pages(sock, spans(ours, pages), ours.nbytes, timeout_s, valid)
                if state_slot >= 0:
                    states = self.identity.states
                    send_pages(sock, spans(states, _slot(state_slot)), states.nbytes, timeout_s, valid)

        self._transfer_threads.submit(work)

    def _read(self, read: Read) -> None:
        """Read pages on another thread, which always reports its end."""
        connection = self._connections.get(read.peer)
        page_read = self._reads[read.key] = PageRead()
        if connection is None:
            self._read_ended(read.key, "connection lost")
            return

        def work() -> None:
            try:
                self._move(read, connection, page_read)
                why = ""
            except TokenyardError as error:
                why = error.message
            except OSError as error:
                why = error.strerror or str(error)
            except Exception as error:
                logger.exception("KV could not be read")
                why = str(error)
            self.call(lambda now: self._read_ended(read.key, why))

        self._transfer_threads.submit(work)

    def _read_ended(self, key: str, why: str) -> None:
        del self._reads[key]
        self.decode_peer.read_ended(key, why, time.monotonic_ns())

    def _move(self, read: Read, connection: Connection, page_read: PageRead) -> None:
        """Copy the pages of a read, and its recurrent states, into this engine's memory. Raises OSError or
        TransferError.
        """
        ours, pages = self.identity.pages, read.load.pages
        states, into = self.identity.states, read.load.state_slot
        hello, memory = connection.handshake.hello, connection.handshake.peer_memory
        assert hello is not None
        assert memory is not None
        if self._reads_memory.get(read.peer):
            if can_read(hello.pid, memory.probe_address, memory.probe):
                handshake = connection.handshake
                self.moved_bytes += read_pages(hello.pid, handshake.memory(), read.pages, ours, pages)
                if into >= 0:
                    theirs = _slot(read.state_slot)
                    self.moved_bytes += read_pages(hello.pid, handshake.states(), theirs, states, _slot(into))
                return
            self._reads_memory[read.peer] = False
            if self._backend == "process_vm":
                raise OSError("the memory of the other process cannot be read")
        timeout_s = self._timeouts.silence_ns / NS_PER_S
        with socket.create_connection(connection.sock.getpeername()[:2], timeout_s) as sock:
            page_read.sock = sock
            if page_read.stopped:
                return
            pull = Pull(read.key, read.ticket, read.first, len(pages))
            sock.sendall(frame(pull.signed(self.identity.secret)))
            receive_pages(sock, spans(ours, pages), ours.nbytes, timeout_s)
            self.moved_bytes += len(pages) * ours.page_bytes
            if into >= 0:
                receive_pages(sock, spans(states, _slot(into)), states.nbytes, timeout_s)
                self.moved_bytes += states.page_bytes


def _slot(number: int) -> Int32Array:
    return np.array([number], np.int32)
