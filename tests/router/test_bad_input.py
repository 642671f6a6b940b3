"""Clients and workers that break the protocol: a clear error or safe handling, and no other request is lost."""

import asyncio
import contextlib
import json
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.router.fakes import STREAM_HEAD, FakeWorker, answer, event, parse_answer, routing
from tokenyard.router.client_connection import ClientConnection

POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
SMUGGLING = {
    "a length and chunks": POST + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "two lengths": POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}x",
    "a list of lengths": POST + b"Content-Length: 2, 2\r\n\r\n{}",
    "a signed length": POST + b"Content-Length: +2\r\n\r\n{}",
    "a hexadecimal length": POST + b"Content-Length: 0x2\r\n\r\n{}",
    "an unknown coding": POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "chunks not last": POST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "two codings": POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
    "a space before the colon": POST + b"Content-Length : 2\r\n\r\n{}",
    "a folded header": POST + b"X: a\r\n b\r\nContent-Length: 2\r\n\r\n{}",
    "a bare line feed": POST + b"X: a\nContent-Length: 2\r\n\r\n{}",
    "a bare carriage return": POST + b"X: a\rContent-Length: 2\r\n\r\n{}",
    "a zero byte": POST + b"X: a\x00b\r\nContent-Length: 2\r\n\r\n{}",
    "a name with a zero byte": POST + b"X\x00: ab\r\nContent-Length: 2\r\n\r\n{}",
    "a chunk size that is none": POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n\r\n",
    "a signed chunk size": POST + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n\r\n",
    "a chunk that is too long": POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}extra\r\n0\r\n\r\n",
    "a chunk ended by a line feed": POST + b"Transfer-Encoding: chunked\r\n\r\n2\n{}\n0\n\n",
    "a huge chunk size": POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * 40 + b"\r\n",
    "no method": b" /v1/completions HTTP/1.1\r\n\r\n",
    "junk": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "another protocol": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "an old version": b"POST /v1/completions HTTP/0.9\r\nContent-Length: 2\r\n\r\n{}",
    "a tunnel": b"CONNECT 10.0.0.1:80 HTTP/1.1\r\nHost: x\r\n\r\n",
    "many headers": POST + b"".join(b"x-%d: y\r\n" % i for i in range(500)) + b"\r\n",
    "a long header": POST + b"x: " + b"y" * 200_000 + b"\r\n\r\n",
    "a long address": b"GET /v1/" + b"y" * 200_000 + b" HTTP/1.1\r\n\r\n",
}


def run(coroutine):
    return asyncio.run(coroutine)


@pytest.mark.part(3)
@pytest.mark.parametrize("name", SMUGGLING)
def test_what_two_servers_could_read_in_two_ways_reaches_no_worker(name):
    async def main():
        async with FakeWorker() as worker, routing(worker) as (_, client):
            got = parse_answer(await client.raw(SMUGGLING[name] + client.head("POST", "/v1/completions", body=b"{}")))
            assert 400 <= got.status < 600
            assert "message" in got.json["error"]
            assert worker.asked == []

    run(main())


def test_chunks_become_a_length():
    async def main():
        async with FakeWorker() as worker, routing(worker) as (_, client):
            body = b"3;x=y\r\n{ \n\r\n1\r\n}\r\n0\r\nTrailer: t\r\n\r\n"
            got = await client.raw(POST + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + body)
            assert parse_answer(got).status == 200
            (asked,) = worker.asked
            assert asked.body == b"{ \n}"
            assert asked.headers["content-length"] == "4"
            assert {"transfer-encoding", "trailer"}.isdisjoint(asked.headers)

    run(main())


def test_a_body_that_is_too_large_is_refused_before_it_is_sent():
    async def main():
        async with FakeWorker() as worker, routing(worker, max_body_mb=1) as (_, client):
            got = parse_answer(await client.raw(POST + b"Content-Length: 100000000\r\n\r\n"))
            assert (got.status, got.error) == (413, "body_too_large")
            big = b"100000\r\n" + b"x" * (1 << 20) + b"\r\n"
            got = parse_answer(await client.raw(POST + b"Transfer-Encoding: chunked\r\n\r\n" + big * 3))
            assert got.status == 413
            assert worker.asked == []

    run(main())


@pytest.mark.slow
def test_a_body_of_100_mb_goes_through_where_it_may():
    async def main():
        async with FakeWorker() as worker, routing(worker, max_body_mb=120) as (_, client):
            body = json.dumps({"prompt": "x" * 100_000_000}).encode()
            assert (await client.ask("POST", "/v1/completions", body)).json == {"worker": "w"}
            assert worker.asked[0].body == body

    run(main())


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"[" * 5000, b'{"a":' * 5000])
def test_what_is_no_json_object_is_refused_here(body):
    async def main():
        async with FakeWorker() as worker, routing(worker) as (_, client):
            got = await client.ask("POST", "/v1/chat/completions", body)
            assert (got.status, got.error) == (400, "invalid_json")
            assert worker.asked == []

    run(main())


@pytest.mark.parametrize(
    "fields",
    [
        {"model": 7, "prompt": {"a": [1, None]}, "stream": "yes", "priority": 1e400, "tenant": []},
        {"messages": "no list", "tools": 3, "deadline_ms": "soon", "user": {}},
        {"prompt": [2**40, -1], "cache_salt": 5},
        {"prompt": [1.5, "x", None]},
        {"input_ids": [[1], [2]]},
        {"messages": [None, 1, {"role": 1, "content": [{"type": "text", "text": None}]}]},
    ],
)
def test_fields_of_wrong_types_are_left_to_the_worker(fields):
    async def main():
        async with FakeWorker() as worker, routing(worker) as (_, client):
            body = json.dumps(fields).replace("Infinity", "1").encode()
            assert (await client.ask("POST", "/v1/completions", body)).status == 200
            assert worker.asked[0].body == body

    run(main())


def test_a_client_that_offers_http2_gets_an_answer_all_the_same():
    async def main():
        async with FakeWorker() as worker, routing(worker) as (_, client):
            offer = (
                b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n"
            )
            reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
            writer.write(POST + offer + b"Content-Length: 15\r\n\r\n" + b'{"prompt": "x"}')
            assert b"200 Status" in await reader.readuntil(b"}")
            assert worker.asked[0].json == {"prompt": "x"}
            assert "upgrade" not in worker.asked[0].headers
            writer.write(client.head("GET", "/health"))
            assert b"200 OK" in await reader.read()

    run(main())


def test_expect_100_continue_is_answered():
    async def main():
        async with FakeWorker() as worker, routing(worker) as (_, client):
            reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
            writer.write(POST + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n")
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(b"{}")
            assert b"200" in await reader.readuntil(b"}")
            assert "expect" not in worker.asked[0].headers

    run(main())


def test_a_compressed_body_is_refused():
    async def main():
        async with FakeWorker() as worker, routing(worker) as (_, client):
            got = await client.ask("POST", "/v1/completions", b"\x1f\x8b", ["Content-Encoding: gzip"])
            assert (got.status, got.error) == (415, "unsupported_encoding")

    run(main())


def test_a_client_that_never_ends_its_request_is_disconnected():
    async def main():
        async with FakeWorker() as worker, routing(worker, client_timeout_secs=0.1) as (_, client):
            got = parse_answer(await client.raw(POST + b"Content-Length: 50\r\n\r\n{", timeout_s=5))
            assert (got.status, got.error) == (408, "request_timeout")
            got = parse_answer(await client.raw(POST, timeout_s=5))
            assert got.status == 408
            assert worker.asked == []

    run(main())


def test_an_idle_connection_ends_but_not_one_that_waits_for_its_answer():
    async def main():
        async with FakeWorker(delay_s=0.4) as worker, routing(worker, client_timeout_secs=0.1) as (_, client):
            assert (await client.complete()).json == {"worker": "w"}
            reader, _ = await asyncio.open_connection("127.0.0.1", client.port)
            assert await asyncio.wait_for(reader.read(), 5) == b""

    run(main())


def test_a_client_that_does_not_read_stops_its_worker_and_is_disconnected():
    async def main():
        sent = 0

        async def flood(asked, writer):
            nonlocal sent
            writer.write(STREAM_HEAD)
            for _ in range(100_000):
                writer.write(event({"text": "x" * 10_000}))
                await writer.drain()
                sent += 10_000

        async with FakeWorker(on_request=flood) as worker, routing(worker, client_timeout_secs=0.3) as (router, client):
            _reader, writer = await asyncio.open_connection("127.0.0.1", client.port, limit=1024)
            writer.write(client.head("POST", "/v1/completions", body=b'{"prompt": "x", "stream": true}'))
            async with asyncio.timeout(10):
                while not router.metrics.gone:
                    await asyncio.sleep(0.02)
            assert sent < 50_000_000
            writer.transport.abort()

    run(main())


def test_a_client_that_closes_its_half_counts_as_gone():
    async def main():
        async with FakeWorker(delay_s=5) as worker, routing(worker) as (router, client):
            _, writer = await asyncio.open_connection("127.0.0.1", client.port)
            writer.write(client.head("POST", "/v1/completions", body=b"{}"))
            writer.write_eof()
            async with asyncio.timeout(5):
                while not router.metrics.gone:
                    await asyncio.sleep(0.01)

    run(main())


LIES = {
    "no http": b"SSH-2.0-OpenSSH\r\n\r\n",
    "half a head": b"HTTP/1.1 200 OK\r\nContent-Ty",
    "nothing": b"",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}x",
    "a length and chunks": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "bad chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "too much": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil",
    "another protocol": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n",
    "a header that ends the head": b"HTTP/1.1 200 OK\r\nX: a\nSet-Cookie: b\r\nContent-Length: 0\r\n\r\n",
    "an endless head": b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 20_000,
}


@pytest.mark.parametrize("name", LIES)
def test_a_worker_that_lies_is_passed_over(name):
    async def main():
        async def lie(asked, writer):
            writer.write(LIES[name])
            await writer.drain()
            writer.close()

        async with (
            FakeWorker("a", on_request=lie) as a,
            FakeWorker("b") as b,
            routing(a, b, policy="round_robin") as (router, client),
        ):
            for _ in range(4):
                got = await client.complete()
                assert b"evil" not in got.body
                assert got.json == {"worker": "b"}
            assert router.metrics.worker_errors["w0"] == len(a.asked) > 0

    run(main())


def test_a_worker_that_sends_unasked_is_disconnected_and_fails_no_other_request():
    async def main():
        async def chatty(asked, writer):
            writer.write(answer({"n": 1}))
            await writer.drain()
            await asyncio.sleep(0.01)
            writer.write(answer({"n": "evil"}))

        async with FakeWorker(on_request=chatty) as worker, routing(worker) as (_, client):
            for _ in range(5):
                assert (await client.complete()).json == {"n": 1}
                await asyncio.sleep(0.03)

    run(main())


def test_a_worker_that_never_ends_its_answer_is_cut_off():
    async def main():
        async def endless(asked, writer):
            writer.write(STREAM_HEAD)
            while not writer.is_closing():
                writer.write(event({"text": "more"}))
                await writer.drain()
                await asyncio.sleep(0.01)

        async with FakeWorker(on_request=endless) as worker, routing(worker, request_timeout_secs=0.3) as (_, client):
            got = await client.complete(stream=True)
            assert got.events[-1]["error"]["code"] == "timeout"

    run(main())


def test_a_worker_that_never_answers_is_given_up():
    async def main():
        async with FakeWorker(delay_s=60) as worker, routing(worker, request_timeout_secs=0.2) as (_, client):
            got = await client.complete()
            assert (got.status, got.error) == (504, "timeout")

    run(main())


def test_a_worker_that_falls_silent_in_a_stream_is_given_up():
    async def main():
        async def stall(asked, writer):
            writer.write(STREAM_HEAD + event({"text": "a"}))
            await writer.drain()
            await asyncio.sleep(60)

        async with FakeWorker(on_request=stall) as worker, routing(worker, stall_timeout_secs=0.2) as (_, client):
            got = await client.complete(stream=True)
            assert got.events[-1]["error"]["code"] == "worker_failed"

    run(main())


@pytest.mark.parametrize(
    "info",
    [
        {"dp_size": "many"},
        {"dp_size": -3},
        {"dp_size": True},
        {"dp_size": 1e9},
        {"dp_size": 10**9},
        {"boot_id": {"a": 1}},
        {"continues_output_ids": "yes"},
    ],
)
def test_what_a_worker_reports_is_checked(info):
    async def main():
        async with FakeWorker(info=info) as worker, routing(worker) as (router, client):
            assert (await client.complete()).status == 200
            assert len(router.workers.find("w0").targets) <= 1024

    run(main())


def test_an_unreachable_worker_is_reported_with_the_reason(caplog):
    async def main():
        with socket.socket() as bound:  # and nothing listens
            bound.bind(("127.0.0.1", 0))
            async with routing(ready=False) as (router, _):
                router.add_worker(f"http://127.0.0.1:{bound.getsockname()[1]}", "static")
                async with asyncio.timeout(30):
                    while "does not respond yet: connection refused" not in caplog.text:
                        await asyncio.sleep(0.01)

    run(main())


def test_a_router_that_is_its_own_worker_says_so():
    async def main():
        async with routing(ready=False) as (router, client):
            worker = router.add_worker(f"http://127.0.0.1:{client.port}", "static")
            async with asyncio.timeout(5):
                while not worker.healthy:
                    await asyncio.sleep(0.01)
            got = await client.complete()
            assert (got.status, got.error) == (508, "loop")

    run(main())


def test_routers_may_be_chained():
    async def main():
        async with (
            FakeWorker() as worker,
            routing(worker) as (_, inner),
            routing(f"http://127.0.0.1:{inner.port}") as (_, outer),
        ):
            assert (await outer.complete()).json == {"worker": "w"}
            assert worker.asked[0].headers["x-tokenyard-route"].count(",") == 1

    run(main())


def test_a_worker_that_changes_its_model_is_asked_for_the_new_one():
    async def main():
        async with (
            FakeWorker("a", models=("old",)) as a,
            FakeWorker("b", models=("other",)) as b,
            routing(a, b) as (router, client),
        ):
            assert (await client.complete("x " * 900, model="old")).json == {"worker": "a"}
            assert router.index.blocks_of(str(router.workers.find("w0").url)) > 0
            a.models = ("new",)
            async with asyncio.timeout(5):
                while "new" not in router.workers.find("w0").models:
                    await asyncio.sleep(0.01)
            assert router.index.blocks_of(str(router.workers.find("w0").url)) == 0
            for _ in range(3):
                assert (await client.complete(model="new")).json == {"worker": "a"}
                assert (await client.complete(model="other")).json == {"worker": "b"}

    run(main())


def test_errors_reveal_no_internals():
    async def main():
        async with FakeWorker() as worker, routing(worker, max_retries=0) as (_router, client):
            await worker.stop()
            got = await client.complete()
            assert got.status == 502
            assert "127.0.0.1" not in got.body.decode()
            assert str(worker.port) not in got.body.decode()

    run(main())


@pytest.mark.parametrize("value", [b"a" * 500, b"\xff\xfe", b"a\tb"])
def test_an_odd_request_id_is_replaced(value):
    async def main():
        async with FakeWorker() as worker, routing(worker) as (_, client):
            raw = POST + b"Connection: close\r\nX-Request-Id: " + value + b"\r\nContent-Length: 2\r\n\r\n{}"
            got = parse_answer(await client.raw(raw))
            assert got.headers["x-request-id"] == worker.asked[0].headers["x-request-id"]
            assert got.headers["x-request-id"].isalnum() or "-" in got.headers["x-request-id"]
            assert len(got.headers["x-request-id"]) < 50

    run(main())


def test_a_refused_request_does_not_cost_the_one_before_it():
    """Junk behind a good request: the good one is answered, then the connection ends."""

    async def main():
        async with FakeWorker(delay_s=0.05) as worker, routing(worker) as (_, client):
            good = client.head("POST", "/v1/completions", body=b"{}", close=False)
            raw = await client.raw(good + b"\x00\x01 junk\r\n\r\n")
            assert parse_answer(raw).json == {"worker": "w"}
            assert len(worker.asked) == 1

    run(main())


class Recorded:
    """A transport that keeps what is written."""

    def __init__(self):
        self.written, self.closed = b"", False

    def write(self, data):
        self.written += data

    def close(self):
        self.closed = True

    abort = close

    def is_closing(self):
        return self.closed

    def pause_reading(self):
        pass

    resume_reading = pause_reading

    def set_write_buffer_limits(self, high):
        pass

    def get_extra_info(self, name):
        return None


PIECES = st.one_of(
    st.binary(max_size=60),
    st.sampled_from(
        [POST, b"Content-Length: 3\r\n\r\n{}x", b"\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n", b"2\r\n{}\r\n"]
    ),
    st.sampled_from(
        [b"0\r\n\r\n", b"Upgrade: h2c\r\nConnection: Upgrade\r\n", b"Expect: 100-continue\r\n", b"HTTP/1.1"]
    ),
)


@given(st.lists(PIECES, max_size=12))
def test_any_bytes_are_requests_or_an_error(parts):
    """Whatever comes, the protocol raises nothing and hands on whole requests only."""

    async def main():
        seen = []

        def handler(front, request):
            seen.append(request)
            front.answer(200, b"")

        front, transport = ClientConnection(handler, {}, 1000), Recorded()
        front.connection_made(transport)
        for part in parts:
            front.data_received(part)
        await asyncio.sleep(0)
        assert all(request.method and request.target for request in seen)
        assert transport.written.count(b"HTTP/1.1 ") >= len(seen)
        front.connection_lost(None)

    run(main())


@pytest.mark.parametrize("encoding", [b"gzip, chunked", b"gzip", b"identity", b"chunked, chunked"])
def test_a_transfer_encoding_other_than_chunked_is_refused(encoding):
    async def main():
        async with FakeWorker() as worker, routing(worker) as (_, client):
            got = await client.raw(POST + b"Transfer-Encoding: " + encoding + b"\r\n\r\n5\r\nhello\r\n0\r\n\r\n")
            assert parse_answer(got).status in (400, 501)
            assert worker.asked == []

    run(main())


def test_many_offers_of_another_protocol_in_one_packet_are_all_answered():
    async def main():
        async with routing(ready=False) as (_, client):
            one = b"GET /health HTTP/1.1\r\nHost: r\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
            got = await client.raw(one * 700 + client.head("GET", "/health"))
            assert got.count(b"200 OK") == 701

    run(main())


def test_a_head_that_never_ends_is_refused_however_steadily_it_arrives():
    async def main():
        async with routing(ready=False, client_timeout_secs=0.3) as (_, client):
            reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
            answering = asyncio.create_task(reader.readuntil(b"request_timeout"))
            writer.write(b"GET /health HTTP/1.1\r\nX-Slow: ")
            async with asyncio.timeout(5):
                while not answering.done():
                    writer.write(b"x")
                    await asyncio.sleep(0.01)
            assert b" 408 " in await answering
            writer.close()

    run(main())


def test_silent_connections_beyond_the_limit_make_room_for_new_ones():
    async def main():
        async with FakeWorker(delay_s=0.3) as worker, routing(worker) as (router, client):
            router.max_connections = 4
            busy = asyncio.create_task(client.complete("busy"))
            while not worker.asked:
                await asyncio.sleep(0.005)
            silent = [await asyncio.open_connection("127.0.0.1", client.port) for _ in range(12)]
            silent[-1][1].write(b"GET /health HTTP/1.1\r\nX: ")
            assert (await client.ask("GET", "/health")).status == 200
            assert len(router.connections) <= 4
            assert (await busy).status == 200
            for _, writer in silent:
                writer.close()

    run(main())


def test_busy_connections_are_not_closed_for_new_ones():
    async def main():
        async with FakeWorker(delay_s=0.3) as worker, routing(worker) as (router, client):
            router.max_connections = 3
            busy = [asyncio.create_task(client.complete(f"busy {number}")) for number in range(3)]
            while len(worker.asked) < 3:
                await asyncio.sleep(0.005)
            reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()
            assert [got.status for got in await asyncio.gather(*busy)] == [200, 200, 200]

    run(main())
