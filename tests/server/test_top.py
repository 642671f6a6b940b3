"""The screen of `tokenyard top`."""

import pytest

from tests.server.fake import HOT
from tests.server.test_live import events as live_events
from tokenyard.base import TokenyardError
from tokenyard.cli.main import main
from tokenyard.cli.top import LiveState, events
from tokenyard.cli.top_screen import screen


def seen_of(server):
    seen = LiveState()
    for tick in live_events(server, 2):
        seen.take(tick)
    return seen


def test_the_screen_shows_queue_steps_memory_and_targets(server):
    server.state.metrics.count("slo_requests", 3, "normal", "yes")
    server.state.metrics.count("slo_requests", 1, "normal", "no")
    seen = seen_of(server)
    seen.bins[seen.tick["now"] - 1] = [seen.tick["now"] - 1, 2, 64, 6, 9.0, 6.0, 8.0]
    text = "\n".join(screen(seen, 120, None))
    for shown in ("fake", "policy fcfs", "running 3", "waiting 2", "40.0 % in use", "75.0 %", "first", "acme", "█"):
        assert shown in text
    assert f"{HOT['hits']} x {HOT['tokens']} tokens *" in text


@pytest.mark.parametrize(("columns", "lines"), [(40, 5), (80, 24), (300, 80)])
def test_it_stays_within_the_terminal(server, columns, lines):
    found = screen(seen_of(server), columns, lines)
    assert len(found) <= lines
    assert max(map(len, found)) <= columns


def test_a_server_that_loads_says_so(start):
    assert "loading" in "\n".join(screen(seen_of(start(loading=True)), 80, None))


def test_once_prints_one_snapshot_and_a_wrong_key_is_an_error(start, capsys):
    server = start(admin_api_key="secret")
    assert main(["top", "--url", server.url, "--key", "secret", "--once"]) == 0
    assert "running 3" in capsys.readouterr().out
    assert main(["top", "--url", server.url, "--once"]) == 2
    assert "key" in capsys.readouterr().err
    with pytest.raises(TokenyardError, match="does not answer"):
        next(events("http://127.0.0.1:9", "", 0.0))
