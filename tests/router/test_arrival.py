"""What a router tells of a request's wait: its age to the worker, the queue by model in metrics, a line in the log."""

import asyncio
import logging
import re

import pytest

from tests.router.fakes import FakeWorker, answer, routing


def run(coroutine):
    return asyncio.run(coroutine)


def values(text):
    return dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))


async def metrics(client):
    return values((await client.ask("GET", "/metrics")).body.decode())


async def until(holds):
    async with asyncio.timeout(5):
        while not holds():
            await asyncio.sleep(0.005)


def test_a_worker_hears_how_long_a_request_waited_and_nothing_that_a_client_claims():
    async def main():
        go = asyncio.Event()

        async def reply(asked, writer):
            if asked.json["prompt"] == "first":
                await go.wait()
            writer.write(answer({}))

        async with FakeWorker(on_request=reply) as worker, routing(worker, max_worker_requests=1) as (router, client):
            claim = ["X-Tokenyard-Age-Ms: 99999999", "X-Tokenyard-Tenant: boss"]
            first = asyncio.create_task(client.complete("first", claim))
            await until(lambda: worker.asked)
            second = asyncio.create_task(client.complete("second", claim))
            await until(lambda: len(router.queue) == 1)
            await asyncio.sleep(0.1)
            go.set()
            await asyncio.gather(first, second)
            ages = [float(asked.headers["x-tokenyard-age-ms"]) for asked in worker.asked]
            assert ages[0] < 100 <= ages[1] < 5000
            assert all("x-tokenyard-tenant" not in asked.headers for asked in worker.asked)

    run(main())


def test_the_queue_is_shown_by_the_model_that_it_waits_for():
    async def main():
        go = asyncio.Event()

        async def reply(asked, writer):
            await go.wait()
            writer.write(answer({}))

        async with (
            FakeWorker(models=("small",), on_request=reply) as a,
            FakeWorker(models=("large",), on_request=reply) as b,
            routing(a, b, max_worker_requests=1) as (router, client),
        ):
            asked = [asyncio.create_task(client.complete("x " * 40, model="small")) for _ in range(4)]
            asked.append(asyncio.create_task(client.complete("x", model="large")))
            await until(lambda: len(router.queue) == 3 and b.asked)
            now = await metrics(client)
            assert now['tokenyard_router_queued_requests{model="small"}'] == "3"
            assert now['tokenyard_router_queued_requests{model="large"}'] == "0"
            assert now['tokenyard_router_sent_requests{model="large"}'] == "1"
            assert float(now['tokenyard_router_queued_tokens{model="small"}']) == 3 * 20
            assert now['tokenyard_router_healthy_workers{model="large"}'] == "1"
            await asyncio.sleep(0.06)
            go.set()
            await asyncio.gather(*asked)
            now = await metrics(client)
            assert now['tokenyard_router_queue_time_seconds_count{model="small"}'] == "4"
            assert float(now['tokenyard_router_queue_time_seconds_sum{model="small"}']) >= 0.18

    run(main())


def test_a_refused_request_counts_as_having_waited():
    async def main():
        async with (
            FakeWorker(delay_s=0.5) as worker,
            routing(worker, max_worker_requests=1, queue_timeout_secs=0.05) as (_, client),
        ):
            first = asyncio.create_task(client.complete())
            await until(lambda: worker.asked)
            assert (await client.complete()).error == "queue_timeout"
            await first
            now = await metrics(client)
            assert now['tokenyard_router_queue_time_seconds_count{model="m"}'] == "2"
            assert float(now['tokenyard_router_queue_time_seconds_sum{model="m"}']) >= 0.05

    run(main())


@pytest.mark.parametrize(("on", "lines"), [(True, 2), (False, 0)])
def test_a_line_in_the_log_for_every_request(on, lines, caplog):
    caplog.set_level(logging.INFO, logger="tokenyard.requests")

    async def reply(asked, writer):
        usage = {"prompt_tokens": 12, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
        writer.write(answer({"usage": usage}))

    async def main():
        async with (
            FakeWorker(on_request=reply) as worker,
            routing(worker, log_requests=on, queue_timeout_secs=0.1) as (_, client),
        ):
            await client.complete(user="ann", model="m", priority=2, headers=["X-Request-Id: r1"])
            await worker.stop()
            await client.complete("y", model="m", user="eve\nRequest: rid=forged")

    run(main())
    found = [record for record in caplog.records if record.name == "tokenyard.requests"]
    assert len(found) == lines
    if on:
        fields = found[0].fields
        assert (fields["rid"], fields["tenant"], fields["model"], fields["priority"]) == ("r1", "ann", "m", 2)
        assert (fields["outcome"], fields["status"], fields["target"], fields["tries"]) == ("done", 200, "w0", 1)
        assert (fields["prompt_tokens"], fields["cached_tokens"], fields["output_tokens"]) == (12, 4, 3)
        assert 0 <= fields["queue_ms"] <= fields["ttft_ms"] <= fields["e2e_ms"]
        # The health check may or may not have seen that the worker is gone.
        assert found[1].fields["outcome"] in ("queue_timeout", "model_unavailable")
        assert re.search(r"tenant='eve\\nRequest", found[1].getMessage())
