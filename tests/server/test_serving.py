"""When the server collects garbage."""

import pytest

from tokenyard.server import serving
from tokenyard.server.serving import DUE_COLLECTIONS, LONGEST_UNCOLLECTED_S, DrainingServer
from tokenyard.server.state import ServerOptions, ServerState


class Collector:
    """In place of the interpreter's; remembers how often everything was collected."""

    def __init__(self):
        self.aged, self.collections = DUE_COLLECTIONS, 0

    def get_count(self):
        return 0, 0, self.aged

    def collect(self):
        self.collections += 1


@pytest.fixture
def collector(monkeypatch):
    made = Collector()
    monkeypatch.setattr(serving, "gc", made)
    return made


def test_garbage_is_collected_while_nobody_waits_for_an_answer(collector):
    server = DrainingServer(ServerState(ServerOptions()), shutdown_timeout_s=1.0)
    with server.state.open_request("a"):
        server._collect_garbage()
        assert collector.collections == 0
    server._collect_garbage()
    assert collector.collections == 1


def test_an_idle_server_with_nothing_new_is_left_alone(collector):
    server = DrainingServer(ServerState(ServerOptions()), shutdown_timeout_s=1.0)
    collector.aged = DUE_COLLECTIONS - 1
    server._collect_garbage()
    assert collector.collections == 0


def test_a_server_that_is_never_idle_collects_now_and_then(collector):
    server = DrainingServer(ServerState(ServerOptions()), shutdown_timeout_s=1.0)
    with server.state.open_request("a"):
        server._collected_s -= LONGEST_UNCOLLECTED_S + 1.0
        for _ in range(3):
            server._collect_garbage()
    assert collector.collections == 1
