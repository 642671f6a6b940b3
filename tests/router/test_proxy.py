"""The router over real sockets: what goes through, where it goes, and what becomes of it when workers fail."""

import asyncio
import json
import socket

import pytest

from tests.router.fakes import DONE, LAST, STREAM_HEAD, FakeWorker, answer, event, routing
from tokenyard.base.response_ids import new_response_id


def run(coroutine):
    return asyncio.run(coroutine)


async def streaming(asked, writer):
    """Answers with a stream of three events."""
    writer.write(STREAM_HEAD)
    for word in ("a", "b", "c"):
        writer.write(event({"choices": [{"index": 0, "text": word}]}))
        await writer.drain()
        await asyncio.sleep(0.002)
    writer.write(DONE + LAST)


def test_an_answer_comes_through_untouched():
    body = json.dumps({"text": "grüße", "n": [1, 2.50]}).encode() + b" \n"

    async def reply(asked, writer):
        writer.write(answer(body, 201, ["X-Odd: Value", "Connection: keep-alive"]))

    async def main():
        async with FakeWorker(on_request=reply) as worker, routing(worker) as (_, client):
            got = await client.ask("POST", "/v1/completions?a=b", b'{"prompt": "x", "odd":  1}', ["X-Mine: yes"])
            assert (got.status, got.body, got.headers["x-odd"]) == (201, body, "Value")
            (asked,) = worker.asked
            assert (asked.method, asked.path, asked.body) == (
                "POST",
                "/v1/completions?a=b",
                b'{"prompt": "x", "odd":  1}',
            )
            assert asked.headers["x-mine"] == "yes"
            assert asked.headers["host"] == f"127.0.0.1:{worker.port}"

    run(main())


def test_the_kernel_probes_silent_workers():
    async def main():
        async with FakeWorker() as worker, routing(worker) as (router, client):
            await client.complete()
            (known,) = router.workers
            connection = await known.pool.connect()
            raw = connection.transport.get_extra_info("socket")
            assert raw.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            if hasattr(socket, "TCP_KEEPIDLE"):
                names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
                idle, interval, count = (raw.getsockopt(socket.IPPROTO_TCP, name) for name in names)
                assert idle + interval * count == 25
            connection.transport.abort()

    run(main())


def test_a_connection_that_is_given_up_while_it_is_made_does_not_end_the_next_try():
    async def main():
        tried, refused, go = [], asyncio.Event(), asyncio.Event()

        async def connect():
            tried.append(True)
            await refused.wait()
            raise OSError("it cannot be reached after all")

        async def reply(asked, writer):
            writer.write(STREAM_HEAD + event({"first": 1}))
            await asyncio.sleep(0.05)  # the answer arrives first
            refused.set()
            await go.wait()
            writer.write(DONE + LAST)

        a, b = FakeWorker("a"), FakeWorker("b", on_request=reply)
        settings = {"policy": "round_robin", "stall_timeout_secs": 0.1, "health_check_timeout_secs": 0.3}
        async with a, b, routing(a, b, **settings) as (router, client):
            far, _ = router.workers
            far.pool.connect = connect
            while not tried:  # which of two free workers comes first is drawn
                refused.clear()
                go.clear()
                asked = asyncio.create_task(client.complete(stream=True))
                await refused.wait()
                await asyncio.sleep(0.02)
                go.set()
                assert (await asked).body.endswith(b"data: [DONE]\n\n")

    run(main())


def test_a_stream_comes_through_event_by_event():
    async def main():
        go = asyncio.Event()

        async def reply(asked, writer):
            writer.write(STREAM_HEAD + event({"first": 1}))
            await go.wait()
            writer.write(DONE + LAST)

        async with FakeWorker(on_request=reply) as worker, routing(worker) as (router, client):
            reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
            writer.write(client.head("POST", "/v1/completions", body=b'{"prompt": "x", "stream": true}', close=False))
            begun = await reader.readuntil(b'{"first":1}\n\n\r\n')
            assert b"transfer-encoding: chunked" in begun
            assert len(router.exchanges) == 1
            assert sum(router.metrics.ttft.counts) == 1
            go.set()
            assert await reader.readuntil(LAST) == DONE + LAST
            writer.write(client.head("GET", "/health"))
            assert b"200 OK" in await reader.read()

    run(main())


def test_connections_to_workers_are_used_again():
    async def main():
        async with FakeWorker() as worker, routing(worker, health_check_interval_secs=60) as (_, client):
            await asyncio.sleep(0.05)
            before = worker.open_connections
            for _ in range(5):
                assert (await client.complete()).json == {"worker": "w"}
            assert worker.open_connections == before + 1

    run(main())


def test_requests_of_one_connection_are_answered_in_their_order():
    async def main():
        async def reply(asked, writer):
            await asyncio.sleep(0.02 if asked.json["prompt"] == "0" else 0)
            writer.write(answer({"prompt": asked.json["prompt"]}))

        async with FakeWorker(on_request=reply) as worker, routing(worker) as (_, client):
            heads = [
                client.head("POST", "/v1/completions", body=b'{"prompt": "%d"}' % i, close=i == 19) for i in range(20)
            ]
            raw = await client.raw(b"".join(heads))
            assert [json.loads(part.partition(b"\r\n\r\n")[2])["prompt"] for part in raw.split(b"HTTP/1.1 ")[1:]] == [
                str(i) for i in range(20)
            ]

    run(main())


def test_a_prefix_goes_where_it_was():
    async def main():
        async with FakeWorker("a") as a, FakeWorker("b") as b, routing(a, b) as (router, client):
            prompts = ["one " * 2000, "two " * 2000, "six " * 2000]
            homes = {prompt: (await client.complete(prompt)).json["worker"] for prompt in prompts}
            for _ in range(3):
                for prompt in prompts:
                    assert (await client.complete(prompt + " and more")).json["worker"] == homes[prompt]
            assert router.metrics.reasons["cached"] == 9

    run(main())


def test_a_dead_worker_costs_no_request():
    async def main():
        async with FakeWorker("a") as a, FakeWorker("b") as b, routing(a, b, policy="round_robin") as (router, client):
            await a.stop()
            got = [await client.complete() for _ in range(6)]
            assert [answer.json["worker"] for answer in got] == ["b"] * 6
            assert router.workers.find("w0").healthy is False

    run(main())


def test_a_worker_that_returns_gets_requests_again():
    async def main():
        async with FakeWorker("a") as a, FakeWorker("b") as b, routing(a, b, policy="round_robin") as (router, client):
            await a.stop()
            await client.complete()
            await client.complete()
            await a.start()
            async with asyncio.timeout(5):
                while not router.workers.find("w0").healthy:
                    await asyncio.sleep(0.01)
            assert {(await client.complete()).json["worker"] for _ in range(4)} == {"a", "b"}
            assert router.workers.find("w0").restarts >= 1

    run(main())


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_errors_that_another_worker_may_not_have_lead_there(status):
    async def main():
        async def refuse(asked, writer):
            writer.write(answer({"error": "no"}, status))

        async with (
            FakeWorker("a", on_request=refuse) as a,
            FakeWorker("b") as b,
            routing(a, b, policy="round_robin") as (router, client),
        ):
            for _ in range(4):
                assert (await client.complete()).json == {"worker": "b"}
            assert router.metrics.retries == len(a.asked) > 0

    run(main())


def test_a_try_whose_predecessor_still_runs_at_its_worker_is_made_again():
    async def main():
        statuses = [503, 409, 409, 200]

        async def reply(asked, writer):
            status = statuses.pop(0)
            writer.write(answer({"status": status}, status))

        async with FakeWorker(on_request=reply) as worker, routing(worker) as (_, client):
            assert (await client.complete()).json == {"status": 200}
            statuses.append(409)
            assert (await client.complete()).status == 409, "the client gave two requests one id"
            assert len(worker.asked) == 5

    run(main())


def test_an_error_of_the_request_is_passed_on():
    async def main():
        async def refuse(asked, writer):
            writer.write(answer({"error": {"message": "bad"}}, 400))

        async with (
            FakeWorker("a", on_request=refuse) as a,
            FakeWorker("b", on_request=refuse) as b,
            routing(a, b) as (router, client),
        ):
            got = await client.complete()
            assert (got.status, got.json) == (400, {"error": {"message": "bad"}})
            assert len(a.asked) + len(b.asked) == 1
            assert router.metrics.retries == 0

    run(main())


def test_when_all_refuse_the_last_answer_is_passed_on():
    async def main():
        async def refuse(asked, writer):
            writer.write(answer({"error": {"message": "full"}}, 503, ["Retry-After: 7"]))

        async with FakeWorker(on_request=refuse) as worker, routing(worker, max_retries=2) as (_, client):
            got = await client.complete()
            assert (got.status, got.headers["retry-after"]) == (503, "7")
            assert len(worker.asked) == 3

    run(main())


def test_retries_have_a_budget():
    async def main():
        async def refuse(asked, writer):
            writer.write(answer({}, 500))

        async with (
            FakeWorker(on_request=refuse) as worker,
            routing(worker, retry_share=0.1, cb_failure_threshold=1000) as (_router, client),
        ):
            for _ in range(40):
                assert (await client.complete()).status == 500
            assert len(worker.asked) - 40 <= 10 + 0.1 * 40

    run(main())


def test_a_request_that_fails_everywhere_is_a_502_that_names_no_worker():
    async def main():
        async def hang_up(asked, writer):
            writer.transport.abort()

        async with FakeWorker(on_request=hang_up) as worker, routing(worker, max_retries=1) as (_, client):
            got = await client.complete()
            assert (got.status, got.error) == (502, "worker_failed")
            assert str(worker.port) not in got.body.decode()

    run(main())


def test_a_stream_that_breaks_off_ends_with_an_error_event():
    async def main():
        async def die(asked, writer):
            writer.write(STREAM_HEAD + event({"text": "a"}) + b"20\r\nhalf an eve")
            await writer.drain()
            await asyncio.sleep(0.02)
            writer.transport.abort()

        async with FakeWorker(on_request=die) as worker, routing(worker) as (_, client):
            got = await client.complete(stream=True)
            assert got.status == 200
            assert got.events[0] == {"text": "a"}
            assert got.events[1]["error"]["code"] == "worker_failed"
            assert len(got.events) == 2

    run(main())


async def break_off(asked, writer):
    """Sends the first half of what was asked for."""
    body = b"x" * asked.json["size"]
    writer.write(answer(body)[: -(len(body) // 2)])
    await writer.drain()
    writer.transport.abort()


def test_a_whole_answer_that_breaks_off_is_given_by_another_worker():
    async def main():
        a, b = FakeWorker("a", on_request=break_off), FakeWorker("b")
        async with a, b, routing(a, b, policy="round_robin") as (_, client):
            for _ in range(4):
                assert (await client.complete(size=1000)).json == {"worker": "b"}
            assert a.asked

    run(main())


def test_a_whole_answer_that_breaks_off_everywhere_is_an_error():
    async def main():
        async with FakeWorker(on_request=break_off) as worker, routing(worker) as (_, client):
            assert (await client.complete(size=1000)).error == "worker_failed"

    run(main())


def test_an_answer_of_megabytes_does_not_wait_for_its_end():
    async def main():
        async with FakeWorker(on_request=break_off) as worker, routing(worker) as (_, client):
            body = json.dumps({"prompt": "x", "size": 6_000_000}).encode()
            got = await client.raw(client.head("POST", "/v1/completions", body=body))
            begun = got.partition(b"\r\n\r\n")[2]
            assert 1_000_000 < len(begun) < 6_000_000
            assert not begun.strip(b"x")

    run(main())


def test_a_client_that_goes_away_frees_its_worker():
    async def main():
        hung_up = asyncio.Event()

        async def endless(asked, writer):
            writer.write(STREAM_HEAD)
            try:
                while True:
                    writer.write(event({"text": "on and on"}))
                    await writer.drain()
                    await asyncio.sleep(0.005)
            except ConnectionError:
                hung_up.set()
                raise

        async with FakeWorker(on_request=endless) as worker, routing(worker) as (router, client):
            reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
            writer.write(client.head("POST", "/v1/completions", body=b'{"prompt": "x", "stream": true}'))
            await reader.readuntil(b"on and on")
            writer.transport.abort()
            async with asyncio.timeout(5):
                await hung_up.wait()
            assert router.metrics.gone == 1

    run(main())


def test_old_clients_get_an_answer_they_understand():
    async def main():
        async with FakeWorker(on_request=streaming) as worker, routing(worker) as (_, client):
            raw = await client.raw(b'POST /v1/completions HTTP/1.0\r\nContent-Length: 15\r\n\r\n{"stream":true}')
            head, _, body = raw.partition(b"\r\n\r\n")
            assert b"chunked" not in head
            assert body.startswith(b"data: ")
            assert body.endswith(b"data: [DONE]\n\n")

    run(main())


def test_old_workers_are_understood():
    async def main():
        async def old(asked, writer):
            writer.write(b"HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\nall of it")
            writer.close()

        async with FakeWorker(on_request=old) as worker, routing(worker) as (_, client):
            for _ in range(3):
                assert (await client.complete()).body == b"all of it"

    run(main())


def test_a_worker_that_closes_idle_connections_costs_nothing():
    async def main():
        async def once(asked, writer):
            writer.write(answer({"n": 1}))
            await writer.drain()
            await asyncio.sleep(0.01)
            writer.close()

        async with FakeWorker(on_request=once) as worker, routing(worker, cb_failure_threshold=1) as (router, client):
            for pause in (0, 0.005, 0.01, 0.012, 0.015, 0.02):
                assert (await client.complete()).status == 200
                await asyncio.sleep(pause)
            assert router.workers.find("w0").targets[0].breaker.state == "closed"

    run(main())


def test_headers_of_a_connection_stay_on_it():
    async def main():
        async def reply(asked, writer):
            writer.write(answer({}, headers=["Keep-Alive: timeout=1", "Upgrade: h2c", "X-Request-Id: theirs"]))

        async with FakeWorker(on_request=reply) as worker, routing(worker) as (_, client):
            headers = ["Connection: X-Private", "X-Private: 1", "TE: trailers", "X-Request-Id: mine", "X-Kept: 2"]
            got = await client.raw(
                client.head("POST", "/v1/completions", headers, b"{}", close=False) + client.head("GET", "/health")
            )
            assert b"keep-alive: timeout" not in got.lower()
            assert b"upgrade" not in got.lower()
            assert b"x-request-id: mine" in got
            asked = worker.asked[0].headers
            assert {"x-private", "te", "connection"}.isdisjoint(asked)
            assert (asked["x-kept"], asked["x-request-id"]) == ("2", "mine")

    run(main())


CUT_OFF = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n{"


@pytest.mark.parametrize("failure", [answer({}, 500), CUT_OFF], ids=["error", "cut off"])
def test_a_worker_that_fails_gets_nothing_for_a_while_and_is_on_trial_then(failure):
    async def main():
        failing = True

        async def reply(asked, writer):
            writer.write(failure if failing else answer({}))
            if failing:
                await writer.drain()
                writer.close()

        breaker = {"cb_failure_threshold": 2, "cb_success_threshold": 2, "cb_timeout_secs": 3600}
        async with (
            FakeWorker("a", on_request=reply) as a,
            FakeWorker("b") as b,
            routing(a, b, policy="round_robin", retry_share=10, **breaker) as (router, client),
        ):
            target = router.workers.find("w0").targets[0]
            for _ in range(8):
                assert (await client.complete()).json == {"worker": "b"}
            assert len(a.asked) == 2
            assert target.breaker.state == "open"
            failing, target.breaker.open_until_ns = False, 0
            while target.breaker.state == "open":
                assert len(a.asked) <= 4
                await client.complete()
            assert len(a.asked) == 4, "as many as must go well"
            target.breaker.failed(router.now_ns())
            assert target.breaker.state == "closed", "one failure after another success opens nothing"

    run(main())


def test_a_worker_that_returns_begins_with_a_closed_breaker():
    async def main():
        async with FakeWorker() as worker, routing(worker, cb_failure_threshold=1, cb_timeout_secs=3600) as (router, _):
            target = router.workers.find("w0").targets[0]
            target.breaker.failed(router.now_ns())
            assert target.breaker.state == "open"
            await worker.stop()
            while router.workers.find("w0").healthy:
                await asyncio.sleep(0.005)
            await worker.start()
            while not router.workers.find("w0").healthy:
                await asyncio.sleep(0.005)
            assert target.breaker.state == "closed"

    run(main())


def test_a_choice_can_be_explained():
    async def main():
        async with FakeWorker() as a, FakeWorker() as b, routing(a, b) as (_, client):
            got = await client.complete("long " * 500, ["X-Route-Debug: 1"])
            debug = json.loads(got.headers["x-route-debug"])
            assert debug["policy"] == "predicted_ttft"
            assert set(debug["scores"]) == {"w0", "w1"}
            assert "127.0.0.1" not in got.headers["x-route-debug"]
            assert "x-route-debug" not in (await client.complete()).headers
            assert all("x-route-debug" not in asked.headers for asked in a.asked + b.asked)

    run(main())


def test_cache_hits_in_answers_are_learned():
    async def main():
        async def forgetful(asked, writer):
            writer.write(answer({"usage": {"prompt_tokens": 1000, "prompt_tokens_details": {"cached_tokens": 0}}}))

        async with FakeWorker(on_request=forgetful) as worker, routing(worker) as (router, client):
            for _ in range(20):
                await client.complete("word " * 800)
            assert router.workers.find("w0").targets[0].state.credit < 0.2
            assert router.metrics.reported_tokens == 20_000
            assert router.metrics.predicted_tokens > 10_000
            assert router.metrics.cached_tokens == 0

    run(main())


def test_a_failed_probe_fails_no_request():
    """A probe's connection must not be given to a request, as the probe closes it when it has its answer."""

    async def main():
        async with (
            FakeWorker(on_request=lambda asked, writer: asyncio.sleep(0, False)) as worker,
            routing(worker, health_check_interval_secs=0.05) as (router, client),
        ):
            for _ in range(150):
                router.health.check_now(router.workers.find("w0"))
                assert (await client.complete()).status == 200
            assert router.metrics.retries == 0

    run(main())


@pytest.mark.parametrize("unhealthy", [False, True])
def test_a_stream_that_does_not_begin_is_tried_elsewhere(unhealthy):
    async def main():
        async def never(asked, writer):
            stuck.health = 503 if unhealthy else 200
            await asyncio.Event().wait()

        limits = {"health_check_timeout_secs": 0.1} if unhealthy else {"first_byte_timeout_secs": 0.2}
        async with (
            FakeWorker("stuck", on_request=never) as stuck,
            FakeWorker("good") as good,
            routing(stuck, good, policy="round_robin", **limits) as (router, client),
        ):
            asked = {"stream": not unhealthy}
            answers = [client.complete(f"p {i}", **asked) for i in range(2)]
            assert [one.json["worker"] for one in await asyncio.gather(*answers)] == ["good", "good"]
            assert stuck.asked
            assert router.metrics.retries == 1

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_stored_response_is_asked_for_at_its_engine():
    async def main():
        boots = {"a": "a1" * 16, "b": "b2" * 16}
        workers = [FakeWorker(name, info={"boot_id": f"{boot}-0"}) for name, boot in boots.items()]
        async with workers[0] as a, workers[1] as b, routing(a, b, policy="round_robin") as (router, client):

            async def ask(name, method="POST", path=""):
                response_id = new_response_id(boots[name])
                body = {"input": "x", "previous_response_id": response_id} if not path else None
                return await client.ask(method, "/v1/responses" + path.format(response_id), body)

            for name in "aabbab":
                assert (await ask(name)).json["worker"] == name
                assert (await ask(name, "GET", "/{}")).json["worker"] == name
                assert (await ask(name, "GET", "/{}/input_items")).json["worker"] == name
                assert (await ask(name, "DELETE", "/{}")).json["worker"] == name
            # An id that names no engine, and one whose engine gets no requests: any engine says that it has none.
            unknown = {"input": "x", "previous_response_id": "resp_1"}
            answers = [await client.ask("POST", "/v1/responses", unknown) for _ in range(2)]
            assert {answer.json["worker"] for answer in answers} == {"a", "b"}
            router.drain_worker(router.workers.find("w0"), draining=True)
            assert (await ask("a")).json["worker"] == "b"
            router.drain_worker(router.workers.find("w0"), draining=False)
            await a.stop()
            assert (await ask("a")).json["worker"] == "b"

    run(main())
