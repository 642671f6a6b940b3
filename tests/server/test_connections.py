"""What a connection may send, how long the server waits for it, and which are answered when there are too many."""

import asyncio
import json
import socket
import time

import pytest
from uvicorn import Config
from uvicorn.server import ServerState as UvicornState

from tokenyard.server.http import uvicorn_protocol
from tokenyard.server.http.connections import MIN_BODY_BYTES_PER_S, SCARCE_FACTOR, ConnectionLimits, ConnectionSweeper
from tokenyard.server.http.streaming import HttpResponse, read_body
from tokenyard.server.http.uvicorn_protocol import MAX_HEADER_BYTES, HttpProtocol

LIMITS = ConnectionLimits()
HEAD = b"POST /generate HTTP/1.1\r\n"
TOO_LONG = HEAD + b"X-Big: " + b"a" * MAX_HEADER_BYTES + b"\r\n\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n"


@pytest.fixture(autouse=True)
def no_lingering(monkeypatch):
    monkeypatch.setattr(uvicorn_protocol, "LINGER_S", 0.001)


class Transport:
    """A client's end that only collects what is written to it."""

    def __init__(self):
        self.written, self.closed, self.unread = b"", False, 0

    def write(self, data):
        self.written += data

    def close(self):
        self.closed = True

    abort = close

    def is_closing(self):
        return self.closed

    def get_write_buffer_size(self):
        return self.unread

    def pause_reading(self):
        pass

    def resume_reading(self):
        pass

    def get_extra_info(self, name):
        return None


async def never(scope, receive, send):
    await asyncio.Event().wait()


async def echo(scope, receive, send):
    await HttpResponse(send).whole(await read_body(receive, 10**9))


def connect(app=never, state=None, limits=LIMITS):
    """One connection of a server of `app`."""
    config = Config(app, log_config=None)
    made = HttpProtocol(config, state or UvicornState(), {}, asyncio.get_running_loop(), limits=limits)
    made.connection_made(Transport())
    return made


@pytest.fixture
def sent():
    """Makes a connection on which some pieces have come, after the server has had its turn."""
    # The loop is stalled in between, so that open requests stay open.
    loop = asyncio.new_event_loop()

    async def send(pieces, app, limits):
        connection = connect(app, limits=limits)
        for piece in pieces:
            connection.data_received(piece)
        await asyncio.sleep(0.01)
        return connection

    yield lambda *pieces, app=never, limits=LIMITS: loop.run_until_complete(send(pieces, app, limits))
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0.01))
    loop.close()


@pytest.mark.parametrize("endless", [b"X-Big: " + b"a" * MAX_HEADER_BYTES, b"X-A: b\r\n" * MAX_HEADER_BYTES])
@pytest.mark.parametrize("begin", [HEAD, CHUNKED + b"0\r\n"])
def test_headers_and_trailers_without_an_end_are_refused(sent, begin, endless):
    connection = sent(begin, *[endless[at : at + 4096] for at in range(0, 2 * MAX_HEADER_BYTES, 4096)])
    assert connection.transport.closed
    assert connection.transport.written.count(b" 431 ") == 1
    assert b"headers_too_large" in connection.transport.written
    assert len(connection.headers) < MAX_HEADER_BYTES / 4


@pytest.mark.parametrize("behind", [b"", HEAD + b"\r\n", b"\x16\x03"])
def test_a_long_head_that_comes_all_at_once_is_refused_too(sent, behind):
    connection = sent(TOO_LONG + behind, app=echo)
    head, body = connection.transport.written.split(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 ")
    assert json.loads(body)["error"]["code"] == "headers_too_large"
    assert connection.transport.closed


def test_a_client_that_still_sends_gets_the_refusal_and_no_reset(monkeypatch):
    monkeypatch.setattr(uvicorn_protocol, "LINGER_S", 0.5)

    def ask(address):
        with socket.create_connection(address) as client:
            # More than the server reads at once.
            client.sendall(HEAD + b"X-Big: " + b"a" * 2**20)
            client.sendall(b"a" * 2**20 + b"\r\n\r\n")
            return b"".join(iter(lambda: client.recv(1 << 16), b""))

    async def main():
        loop, config, state = asyncio.get_running_loop(), Config(never, log_config=None), UvicornState()
        server = await loop.create_server(lambda: HttpProtocol(config, state, {}, loop, limits=LIMITS), "127.0.0.1", 0)
        async with server:
            return await asyncio.to_thread(ask, server.sockets[0].getsockname())

    head, body = asyncio.run(main()).split(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 ")
    assert json.loads(body)["error"]["code"] == "headers_too_large"


@pytest.mark.parametrize(
    "wrong", [b"\x16\x03\x01\x02", b"FOO / HTTP/1.1\r\n\r\n", HEAD + b"Content-Length: -5\r\n\r\n"]
)
def test_what_is_no_http_gets_an_error_like_any_other(sent, wrong):
    connection = sent(wrong)
    head, body = connection.transport.written.split(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["code"] == "invalid_request"
    assert connection.transport.closed


def test_what_is_no_http_behind_a_request_is_not_put_into_its_answer(sent):
    connection = sent(HEAD + b"\r\n", b"\x16\x03\x01\x02")
    assert (connection.transport.closed, connection.transport.written) == (True, b"")


def test_a_chunk_line_without_an_end_is_refused(sent):
    assert sent(CHUNKED, b"5;x=" + b"a" * MAX_HEADER_BYTES).transport.closed


def test_trailers_are_not_kept(sent):
    connection = sent(CHUNKED, b"0\r\nX-A: b\r\nX-C: d\r\n\r\n", app=echo)
    assert connection.transport.written.endswith(b"hello")
    assert [name for name, _ in connection.headers] == [b"transfer-encoding"]


def test_a_long_body_and_many_requests_on_a_connection_are_no_long_head(sent):
    long = HEAD + b"Content-Length: %d\r\n\r\n" % (2 * MAX_HEADER_BYTES)
    body = b"x" * 2 * MAX_HEADER_BYTES
    chunks = CHUNKED + b"1\r\nx\r\n" * MAX_HEADER_BYTES + b"0\r\n\r\n"
    connection = sent(long[:30], long[30:], body, chunks, long, body)
    assert not connection.transport.closed
    assert not connection.transport.written


@pytest.mark.parametrize(
    ("pieces", "timeout_s", "says"),
    [
        ((), LIMITS.idle_timeout_s, b""),
        ((b"\r\n",), LIMITS.idle_timeout_s, b""),
        ((HEAD[:9],), LIMITS.head_timeout_s, b" 408 "),
        ((CHUNKED,), LIMITS.body_timeout_s, b" 408 "),
        ((CHUNKED + b"0\r\n",), LIMITS.body_timeout_s, b" 408 "),
        ((HEAD + b"Content-Length: 5\r\n\r\nhel",), LIMITS.body_timeout_s, b" 408 "),
    ],
)
def test_a_client_that_keeps_the_server_waiting_loses_its_connection(sent, pieces, timeout_s, says):
    connection, now = sent(*pieces), time.monotonic()
    sweep = ConnectionSweeper(LIMITS)
    sweep.run([connection], now + timeout_s - 1)
    assert not connection.transport.closed
    sweep.run([connection], now + timeout_s + 1)
    assert connection.transport.closed
    assert says in connection.transport.written
    assert bool(says) == bool(connection.transport.written)


def test_a_long_answer_is_waited_for_and_silence_after_it_is_not(sent):
    asked = HEAD + b"Content-Length: 2\r\n\r\nhi"
    working, done, now = sent(asked), sent(asked, app=echo), time.monotonic()
    ConnectionSweeper(LIMITS).run([working, done], now + 10**6)
    assert (working.transport.closed, done.transport.closed) == (False, True)


def test_half_a_second_request_does_not_cost_the_answer_to_the_first(sent):
    asked = HEAD + b"Content-Length: 2\r\n\r\nhi"
    for more in (HEAD, CHUNKED):
        connection = sent(asked, more)
        ConnectionSweeper(LIMITS).run([connection], time.monotonic() + 10**6)
        assert not connection.transport.closed
        assert not connection.transport.written


def test_a_large_body_has_the_time_that_it_needs_at_a_low_rate(sent):
    size = 50 * MIN_BODY_BYTES_PER_S
    connection = sent(HEAD + b"Content-Length: %d\r\n\r\n" % (2 * size), b"x" * size)
    sweep, begin = ConnectionSweeper(LIMITS), time.monotonic()
    sweep.run([connection], begin + LIMITS.body_timeout_s + 49)
    assert not connection.transport.closed
    sweep.run([connection], begin + LIMITS.body_timeout_s + 51)
    assert connection.transport.closed


def test_time_outs_are_short_while_connections_are_scarce(sent):
    idle, now = [sent() for _ in range(4)], time.monotonic()
    soon = now + LIMITS.idle_timeout_s * SCARCE_FACTOR + 1
    ConnectionSweeper(ConnectionLimits(max_connections=8)).run(idle, soon)
    assert not any(connection.transport.closed for connection in idle)
    ConnectionSweeper(ConnectionLimits(max_connections=4)).run(idle, soon)
    assert all(connection.transport.closed for connection in idle)


def test_a_client_that_reads_nothing_of_its_answer_loses_its_connection(sent):
    patient = ConnectionLimits(idle_timeout_s=10**9)
    stalled, slow = sent(limits=patient), sent(limits=patient)
    stalled.transport.unread = slow.transport.unread = 1000
    sweep, now = ConnectionSweeper(patient), time.monotonic()
    for second in range(0, int(LIMITS.unread_timeout_s) + 20, 10):
        slow.transport.unread -= 1
        sweep.run([stalled, slow], now + second)
    assert (stalled.transport.closed, slow.transport.closed) == (True, False)


def test_beyond_the_limit_only_probes_are_answered():
    async def ask(path, max_connections):
        state, limits = UvicornState(), ConnectionLimits(max_connections=max_connections)
        silent = connect(state=state, limits=limits)
        late = connect(echo, state, limits)
        late.data_received(b"GET %s HTTP/1.1\r\n\r\n" % path)
        await asyncio.sleep(0.01)
        assert not silent.transport.closed
        return late.transport.written

    assert b" 200 " in asyncio.run(ask(b"/health?x", 1))
    refused = asyncio.run(ask(b"/v1/models", 1))
    assert b" 503 " in refused
    assert b"too_many_connections" in refused
    assert b"connection: close" in refused
    assert b" 200 " in asyncio.run(ask(b"/v1/models", 2))


def test_beyond_the_reserve_the_oldest_silent_connection_makes_room():
    async def crowd():
        state, limits = UvicornState(), ConnectionLimits(max_connections=2, probes=2)
        return [connect(state=state, limits=limits) for _ in range(7)]

    closed = [connection.transport.closed for connection in asyncio.run(crowd())]
    assert closed == [False, False, True, True, True, False, False]


def test_the_limit_leaves_room_for_the_other_files_of_the_process():
    import resource

    limits = ConnectionLimits.of_process()
    assert 0 < limits.max_connections + limits.probes < resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_a_peer_that_vanishes_is_noticed():
    from tokenyard.server.http.server import listen

    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted = listener.accept()[0]
        assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        accepted.close()
