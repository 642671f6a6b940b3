"""When the server collects garbage, and whom it does not wait for when it drains."""

import asyncio
import contextlib
import time
from collections import Counter
from types import SimpleNamespace

import pytest
from uvicorn import Config
from uvicorn.server import ServerState as UvicornState

from tokenyard.server import serving
from tokenyard.server.http import LONGEST_HEAD_BYTES, HttpProtocol
from tokenyard.server.serving import DUE_COLLECTIONS, LONGEST_UNCOLLECTED_S, STALLED_S, YOUNG, DrainingServer
from tokenyard.server.state import ServerOptions, ServerState


class Collector:
    """In place of the interpreter's; remembers how often it collected up to each generation."""

    def __init__(self):
        self.aged, self.collections = DUE_COLLECTIONS, Counter()

    def get_count(self):
        return 0, 0, self.aged

    def collect(self, generation=2):
        self.collections[generation] += 1


@pytest.fixture
def collector(monkeypatch):
    made = Collector()
    monkeypatch.setattr(serving, "gc", made)
    return made


def test_garbage_is_collected_while_nobody_waits_for_an_answer(collector):
    server = DrainingServer(ServerState(ServerOptions()), shutdown_timeout_s=1.0)
    with server.state.open_request("a"):
        server._collect_garbage()
        assert collector.collections == Counter({YOUNG: 1})
    server._collect_garbage()
    assert collector.collections == Counter({YOUNG: 1, 2: 1})


def test_an_idle_server_with_nothing_new_is_left_alone(collector):
    server = DrainingServer(ServerState(ServerOptions()), shutdown_timeout_s=1.0)
    collector.aged = DUE_COLLECTIONS - 1
    server._collect_garbage()
    assert not collector.collections


def test_a_server_that_is_never_idle_collects_now_and_then(collector):
    server = DrainingServer(ServerState(ServerOptions()), shutdown_timeout_s=1.0)
    with server.state.open_request("a"):
        server._collected_s -= LONGEST_UNCOLLECTED_S + 1.0
        for _ in range(3):
            server._collect_garbage()
    assert collector.collections[2] == 1


class Connection:
    """A connection with bytes that its client has not taken, and perhaps a request."""

    def __init__(self, unread=0, **cycle):
        self.unread, self.aborted = unread, False
        self.transport = SimpleNamespace(get_write_buffer_size=lambda: self.unread, abort=self._abort)
        self.cycle = SimpleNamespace(**cycle) if cycle else None

    def _abort(self):
        self.aborted = True


class Transport:
    """A client's end that only collects what is written to it."""

    def __init__(self):
        self.written, self.closed = b"", False

    def write(self, data):
        self.written += data

    def close(self):
        self.closed = True

    def is_closing(self):
        return self.closed

    def pause_reading(self):
        pass

    def get_extra_info(self, name):
        return None


def protocol():
    """One connection of a server that answers nothing."""

    async def app(scope, receive, send):
        await asyncio.Event().wait()

    made = HttpProtocol(Config(app, log_config=None), UvicornState(), {}, asyncio.get_running_loop())
    made.connection_made(Transport())
    return made


@pytest.mark.parametrize("endless", [b"X-Big: " + b"a" * LONGEST_HEAD_BYTES, b"X-A: b\r\n" * LONGEST_HEAD_BYTES])
def test_headers_without_an_end_are_refused(endless):
    async def send():
        connection = protocol()
        for piece in (b"POST /generate HTTP/1.1\r\n", endless, b"more"):
            connection.data_received(piece)
        return connection.transport

    transport = asyncio.run(send())
    assert transport.closed
    assert transport.written.count(b" 431 ") == 1
    assert b"headers_too_large" in transport.written


def test_a_long_body_and_many_requests_on_a_connection_are_no_long_head():
    async def send():
        connection = protocol()
        head = b"POST /generate HTTP/1.1\r\nContent-Length: %d\r\n\r\n"
        for _ in range(3):
            connection.data_received(head[:30])
            connection.data_received(head[30:] % (2 * LONGEST_HEAD_BYTES))
            connection.data_received(b"x" * 2 * LONGEST_HEAD_BYTES)
        assert not connection.transport.closed
        assert not connection.transport.written

    asyncio.run(send())


def draining(*connections):
    server = DrainingServer(ServerState(ServerOptions()), shutdown_timeout_s=60.0)
    server.server_state.connections = set(connections)
    return server


def test_a_client_that_takes_nothing_is_not_waited_for():
    stalled, slow, reading = Connection(1000), Connection(1000), Connection(0)
    server, begin = draining(stalled, slow, reading), time.monotonic()
    for second in range(int(STALLED_S) + 2):
        slow.unread -= 100
        server._drop_stalled(begin + second)
    assert [connection.aborted for connection in (stalled, slow, reading)] == [True, False, False]


@pytest.mark.parametrize(
    ("late", "aborted"), [(False, [True, False, False, False]), (True, [True, True, False, False])]
)
def test_the_end_does_not_wait_for_what_cannot_come(late, aborted):
    connections = [
        Connection(more_body=True, response_complete=False),
        Connection(more_body=False, response_complete=False),
        Connection(more_body=False, response_complete=True),
        Connection(),
    ]
    server = draining(*connections)
    until = time.monotonic() - (60.0 if late else 0.0)
    with server.state.open_request("a") if late else contextlib.nullcontext():
        asyncio.run(server._drain(until))
    assert server.should_exit
    assert [connection.aborted for connection in connections] == aborted
