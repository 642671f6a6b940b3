"""When the server collects garbage, and which clients it does not wait for when it drains."""

import asyncio
import contextlib
import time
from collections import Counter
from types import SimpleNamespace

import pytest

from tokenyard.server.http import server as serving
from tokenyard.server.http.server import DUE_COLLECTIONS, MAX_UNCOLLECTED_S, STALLED_S, YOUNG, DrainingServer
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


def test_garbage_is_collected_while_no_request_runs(collector):
    server = DrainingServer(ServerState(ServerOptions()), shutdown_timeout_s=1.0)
    with server.state.open_request("a"):
        server.collect_garbage()
        assert collector.collections == Counter({YOUNG: 1})
    server.collect_garbage()
    assert collector.collections == Counter({YOUNG: 1, 2: 1})


def test_an_idle_server_with_nothing_new_is_left_alone(collector):
    server = DrainingServer(ServerState(ServerOptions()), shutdown_timeout_s=1.0)
    collector.aged = DUE_COLLECTIONS - 1
    server.collect_garbage()
    assert not collector.collections


def test_a_server_that_is_never_idle_collects_now_and_then(collector):
    server = DrainingServer(ServerState(ServerOptions()), shutdown_timeout_s=1.0)
    with server.state.open_request("a"):
        server.collected_s -= MAX_UNCOLLECTED_S + 1.0
        for _ in range(3):
            server.collect_garbage()
    assert collector.collections[2] == 1


class Connection:
    """A connection with bytes that its client has not taken, and perhaps a request."""

    def __init__(self, unread=0, **cycle):
        self.unread, self.aborted = unread, False
        self.transport = SimpleNamespace(
            get_write_buffer_size=lambda: self.unread, abort=self._abort, is_closing=lambda: self.aborted
        )
        self.cycle = SimpleNamespace(**cycle) if cycle else None

    def _abort(self):
        self.aborted = True

    def overdue(self, now, factor):
        return ""


def draining(*connections):
    server = DrainingServer(ServerState(ServerOptions()), shutdown_timeout_s=60.0)
    server.server_state.connections = set(connections)
    return server


def test_a_client_that_takes_nothing_is_not_waited_for():
    stalled, slow, reading = Connection(1000), Connection(1000), Connection(0)
    server, begin = draining(stalled, slow, reading), time.monotonic()
    for second in range(int(STALLED_S) + 2):
        slow.unread -= 100
        server.sweeper.run(server.server_state.connections, begin + second, STALLED_S)
    assert [connection.aborted for connection in (stalled, slow, reading)] == [True, False, False]


@pytest.mark.parametrize(
    ("late", "aborted"), [(False, [True, False, False, False]), (True, [True, True, False, False])]
)
def test_shutdown_does_not_wait_for_what_cannot_arrive(late, aborted):
    connections = [
        Connection(more_body=True, response_complete=False),
        Connection(more_body=False, response_complete=False),
        Connection(more_body=False, response_complete=True),
        Connection(),
    ]
    server = draining(*connections)
    until = time.monotonic() - (60.0 if late else 0.0)
    with server.state.open_request("a") if late else contextlib.nullcontext():
        asyncio.run(server.drain(until))
    assert server.should_exit
    assert [connection.aborted for connection in connections] == aborted
