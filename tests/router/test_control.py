"""What the router answers itself, who may ask, the queue in front of full workers, ranks, and discovery."""

import asyncio
import contextlib
import json
import re
import shutil
import ssl
import subprocess

import pytest
from aiohttp import web

from tests.router.fakes import FakeWorker, answer, parse_answer, routing
from tokenyard.base import ConfigError
from tokenyard.base.sessions import derived_session
from tokenyard.cli.main import build_parser
from tokenyard.cli.route import route
from tokenyard.router import discovery
from tokenyard.router.discovery import Discovery, DiscoverySource, read_file, ready_pods, resolve, sources
from tokenyard.router.proxy import Router
from tokenyard.router.router_settings import RouterSettings
from tokenyard.routing.dispatch import Dispatcher


def run(coroutine):
    return asyncio.run(coroutine)


def test_probes():
    async def main():
        async with FakeWorker(health=503) as worker, routing(worker, ready=False) as (router, client):
            assert (await client.ask("GET", "/health")).status == 200
            got = await client.ask("GET", "/ready")
            assert (got.status, got.body) == (503, b"no worker")
            worker.health = 200
            async with asyncio.timeout(5):
                while (await client.ask("GET", "/ready")).status != 200:
                    await asyncio.sleep(0.02)
            router.draining = True
            assert (await client.ask("GET", "/ready")).body == b"draining"
            assert (await client.complete()).error == "draining"
            assert (await client.ask("HEAD", "/health")).body == b""

    run(main())


def test_models_are_those_of_all_workers():
    async def main():
        async with FakeWorker(models=("m", "n")) as a, FakeWorker(models=("m", "o")) as b, routing(a, b) as (_, client):
            got = await client.ask("GET", "/v1/models")
            assert sorted(card["id"] for card in got.json["data"]) == ["m", "n", "o"]
            assert (await client.ask("GET", "/v1/models/n")).json["id"] == "n"
            assert (await client.ask("GET", "/v1/models/x")).error == "model_not_found"

    run(main())


def test_workers_are_added_and_removed_at_run_time():
    async def main():
        async with FakeWorker("a") as a, FakeWorker("b") as b, routing(a) as (router, client):
            got = await client.ask("POST", "/workers", {"url": b.url})
            assert (got.status, got.json["id"]) == (202, "w1")
            assert (await client.ask("POST", "/workers", {"url": b.url + "/"})).status == 409
            assert (await client.ask("POST", "/workers", {"url": b.url.upper().replace("HTTP", "http")})).status == 409
            for wrong in ({"url": "ftp://x"}, {"url": "http://u:p@x"}, {"url": 3}, {}, [1], {"url": "http://x y"}):
                assert (await client.ask("POST", "/workers", wrong)).status == 400
            async with asyncio.timeout(5):
                while not router.workers.find("w1").healthy:
                    await asyncio.sleep(0.01)
            listed = (await client.ask("GET", "/workers")).json["workers"]
            assert [worker["state"] for worker in listed] == ["healthy", "healthy"]
            assert (await client.ask("DELETE", "/workers/w0")).status == 200
            assert {(await client.complete(f"p {i}")).json["worker"] for i in range(4)} == {"b"}
            assert (await client.ask("DELETE", "/workers/w0")).error == "no_such_worker"
            assert (await client.ask("PUT", "/workers/w1")).status == 405

    run(main())


def test_a_draining_worker_finishes_what_it_has_and_gets_nothing_new():
    async def main():
        async with FakeWorker("a", delay_s=0.2) as a, FakeWorker("b") as b, routing(a, b) as (_, client):
            first = asyncio.create_task(client.complete("x " * 900))
            while not a.asked and not b.asked:
                await asyncio.sleep(0.005)
            busy = "w0" if a.asked else "w1"
            assert (await client.ask("POST", f"/workers/{busy}/drain")).json["state"] == "draining"
            for _ in range(3):
                assert (await client.complete("x " * 900)).json["worker"] != (await first).json["worker"]
            assert (await client.ask("POST", f"/workers/{busy}/resume")).json["state"] == "healthy"

    run(main())


def test_an_engine_that_shuts_down_gets_nothing_more_after_its_first_refusal():
    async def main():
        settings = {"policy": "round_robin", "health_check_interval_secs": 60.0, "retry_share": 0.0}
        async with FakeWorker("a") as a, FakeWorker("b") as b, routing(a, b, **settings) as (router, client):

            async def refuse(asked, writer):
                writer.write(answer({"error": {"code": "draining"}}, 503))

            a.info, a.on_request = {"status": "draining"}, refuse
            assert {(await client.complete()).json["worker"] for _ in range(2)} == {"b"}
            async with asyncio.timeout(5):
                while router.workers.eligible("m", None, 0)[0].worker.address == a.url:
                    await asyncio.sleep(0.005)
            refused = len(a.asked)
            assert [(await client.complete()).json["worker"] for _ in range(8)] == ["b"] * 8
            assert (len(a.asked), refused) == (1, 1)

    run(main())


def test_a_worker_can_be_removed_while_it_answers():
    async def main():
        async with FakeWorker("a", delay_s=0.1) as a, routing(a) as (router, client):
            first = asyncio.create_task(client.complete())
            while not a.asked:
                await asyncio.sleep(0.005)
            assert (await client.ask("DELETE", "/workers/w0")).status == 200
            assert (await first).json == {"worker": "a"}
            assert (await client.complete()).error == "no_worker"
            assert len(router.workers) == 0

    run(main())


def test_keys():
    async def main():
        async with (
            FakeWorker() as worker,
            routing(worker, api_key="open", admin_api_key="admin", worker_api_key="inner") as (_, client),
        ):
            assert (await client.complete()).error == "invalid_api_key"
            assert (await client.complete(headers=["Authorization: Bearer admin"])).status == 401
            assert (await client.complete(headers=["Authorization: bearer open"])).status == 200
            assert worker.asked[0].headers["authorization"] == "Bearer inner"
            assert (await client.ask("GET", "/workers", headers=["Authorization: Bearer open"])).status == 401
            assert (await client.ask("GET", "/workers", headers=["Authorization: Bearer admin"])).status == 200
            assert (await client.ask("GET", "/v1/models")).status == 401
            for path in ("/health", "/ready", "/metrics"):
                assert (await client.ask("GET", path)).status == 200

    run(main())


def test_a_clients_key_goes_through_where_the_router_wants_none():
    async def main():
        async with FakeWorker() as worker, routing(worker) as (_, client):
            await client.complete(headers=["Authorization: Bearer theirs"])
            assert worker.asked[0].headers["authorization"] == "Bearer theirs"
        async with FakeWorker() as worker, routing(worker, api_key="mine") as (_, client):
            await client.complete(headers=["Authorization: Bearer mine"])
            assert "authorization" not in worker.asked[0].headers

    run(main())


def test_unknown_paths():
    async def main():
        async with FakeWorker() as worker, routing(worker) as (_, client):
            for path in ("/", "/admin", "/v2/x", "http://other/v1/models", "//v1/models", "/v1"):
                assert (await client.ask("POST", path, b"{}")).status == 404
            assert worker.asked == []

    run(main())


def test_files_and_batches_are_at_engines():
    async def main():
        async with FakeWorker() as worker, routing(worker) as (_, client):
            for path in ("/v1/files", "/v1/files/file-1/content", "/v1/batches", "/v1/batches/batch_1/cancel"):
                got = await client.ask("POST", path, b"{}")
                assert (got.status, got.json["error"]["code"]) == (404, "not_found")
            assert worker.asked == []

    run(main())


@pytest.mark.parametrize("path", ["/flush_cache", "/update_weights_from_disk"])
def test_levers_go_to_all_workers(path):
    async def main():
        async with FakeWorker() as a, FakeWorker() as b, routing(a, b) as (router, client):
            await client.complete("x " * 900)
            assert router.index.bytes > 0
            got = await client.ask("POST", path, b"{}")
            assert got.json["success"] is True
            assert sorted(len(worker.asked) for worker in (a, b)) == [1, 2]
            assert router.index.bytes == 0, "nothing is remembered of caches that were flushed"

    run(main())


@pytest.mark.parametrize(
    ("bodies", "status", "messages"),
    [
        (({"error": {"message": "no folder x"}}, {"success": False, "message": "none"}), 400, ["no folder x", "none"]),
        (({"error": "busy"}, None), 502, ["busy", None]),
    ],
)
def test_a_lever_that_fails_has_the_reason_of_each_worker(bodies, status, messages):
    def refusing(body):
        async def on_request(asked, writer):
            if body is None:
                return False
            writer.write(answer(body, 400))
            return True

        return on_request

    async def main():
        a, b = (FakeWorker(name, on_request=refusing(body)) for name, body in zip("ab", bodies, strict=True))
        async with a, b, routing(a, b) as (_, client):
            got = await client.ask("POST", "/update_weights_from_disk", b"{}")
            assert (got.status, got.json["success"]) == (status, False)
            assert [row.get("message") for row in got.json["workers"]] == messages

    run(main())


def test_a_lever_without_a_worker_is_an_error():
    async def main():
        async with routing() as (_, client):
            got = await client.ask("POST", "/flush_cache", b"{}")
            assert (got.status, got.error) == (503, "no_worker")

    run(main())


def test_metrics_are_prometheus_text():
    async def main():
        async with FakeWorker() as worker, routing(worker) as (router, client):
            for _ in range(3):
                await client.complete("long " * 400)
            router.metrics.reported_tokens = 7
            text = (await client.ask("GET", "/metrics")).body.decode()
            lines = [line for line in text.splitlines() if not line.startswith("#")]
            assert all(
                re.fullmatch(r'[a-z_]+(\{[a-z]+="[^"]*"(,[a-z]+="[^"]*")*\})? [-+.e0-9]+', line) for line in lines
            )
            values = dict(line.rsplit(" ", 1) for line in lines)
            assert values["tokenyard_router_requests_total"] == "3"
            assert values['tokenyard_router_choices_total{reason="cached"}'] == "2"
            assert values['tokenyard_router_worker_state{worker="w0",state="healthy"}'] == "1"
            assert float(values["tokenyard_router_index_bytes"]) > 0
            reported = "tokenyard_router_reported_prompt_tokens_total"
            assert values[reported] == values[reported.replace("reported", "told")] == "7"
            assert len({line.split(" ")[2] for line in text.splitlines() if line.startswith("# TYPE")}) == text.count(
                "# TYPE"
            )

    run(main())


class TestQueue:
    def test_requests_wait_for_room_and_the_urgent_go_first(self):
        async def main():
            order = []
            go = asyncio.Event()

            async def reply(asked, writer):
                order.append(asked.json["prompt"])
                if asked.json["prompt"] == "first":
                    await go.wait()
                writer.write(answer({}))

            async with (
                FakeWorker(on_request=reply) as worker,
                routing(worker, max_worker_requests=1) as (router, client),
            ):
                tasks = [asyncio.create_task(client.complete("first"))]
                await _until(lambda: order)
                for prompt, priority in (("low", 0), ("high", 5), ("mid", 1)):
                    tasks.append(asyncio.create_task(client.complete(prompt, priority=priority)))
                    await _until(lambda: len(router.queue) == len(tasks) - 1)
                go.set()
                assert [(await task).status for task in tasks] == [200] * 4
                assert order == ["first", "high", "mid", "low"]

        run(main())

    def test_the_queue_is_bounded_and_urgent_requests_displace_others(self):
        async def main():
            async with (
                FakeWorker(delay_s=0.3) as worker,
                routing(worker, max_worker_requests=1, queue_size=1) as (router, client),
            ):
                running = asyncio.create_task(client.complete("a"))
                await _until(lambda: worker.asked)
                waiting = asyncio.create_task(client.complete("b"))
                await _until(lambda: len(router.queue) == 1)
                got = await client.complete("c")
                assert (got.status, got.error, got.headers["retry-after"]) == (429, "queue_full", "1")
                urgent = asyncio.create_task(client.complete("d", priority=3))
                assert (await waiting).error == "queue_full"
                assert [(await running).status, (await urgent).status] == [200, 200]

        run(main())

    def test_a_request_that_waits_too_long_is_refused(self):
        async def main():
            async with (
                FakeWorker(delay_s=0.5) as worker,
                routing(worker, max_worker_requests=1, queue_timeout_secs=0.15) as (_, client),
            ):
                running = asyncio.create_task(client.complete("a"))
                await _until(lambda: worker.asked)
                got, late = await asyncio.gather(client.complete("b"), client.complete("c", deadline_ms=50))
                assert (got.status, got.error, got.headers["retry-after"]) == (503, "queue_timeout", "1")
                assert late.error == "deadline"
                assert (await running).status == 200

        run(main())

    def test_a_client_that_disconnects_leaves_the_queue(self):
        async def main():
            async with (
                FakeWorker(delay_s=0.3) as worker,
                routing(worker, max_worker_requests=1) as (router, client),
            ):
                running = asyncio.create_task(client.complete("a"))
                await _until(lambda: worker.asked)
                _, writer = await asyncio.open_connection("127.0.0.1", client.port)
                writer.write(client.head("POST", "/v1/completions", body=b"{}"))
                await _until(lambda: len(router.queue) == 1)
                writer.close()
                await _until(lambda: len(router.queue) == 0)
                assert (await running).status == 200
                assert len(worker.asked) == 1

        run(main())

    def test_requests_wait_for_a_worker_to_return(self):
        async def main():
            async with FakeWorker() as worker, routing(worker, max_retries=1) as (router, client):
                await worker.stop()
                waiting = asyncio.create_task(client.complete())
                await _until(lambda: len(router.queue) == 1)
                await worker.start()
                assert (await waiting).json == {"worker": "w"}

        run(main())

    def test_there_is_a_bound_on_all_requests(self):
        async def main():
            async with FakeWorker(delay_s=0.2) as worker, routing(worker, max_concurrent_requests=2) as (_, client):
                open_ones = [asyncio.create_task(client.complete()) for _ in range(2)]
                await _until(lambda: len(worker.asked) == 2)
                assert (await client.complete()).error == "overloaded"
                assert [(await one).status for one in open_ones] == [200, 200]

        run(main())

    def test_weights_must_be_numbers(self):
        async def main():
            for wrong in ("gold", "gold=", "gold=-1", "gold=x"):
                with pytest.raises(ConfigError, match="tenant-weights"):
                    Router(RouterSettings(tenant_weights=(wrong,)))

        run(main())


async def _until(holds, timeout_s=5.0):
    async with asyncio.timeout(timeout_s):
        while not holds():
            await asyncio.sleep(0.002)


class TestRanks:
    def test_a_worker_with_ranks_is_as_many_targets(self):
        async def main():
            async with (
                FakeWorker(info={"dp_size": 4}) as worker,
                routing(worker, policy="round_robin") as (router, client),
            ):
                assert [target.name for target in router.workers.find("w0").targets] == ["w0@0", "w0@1", "w0@2", "w0@3"]
                for _ in range(4):
                    await client.complete()
                assert sorted(asked.json["data_parallel_rank"] for asked in worker.asked) == [0, 1, 2, 3]
                assert {asked.headers["x-data-parallel-rank"] for asked in worker.asked} == set("0123")

        run(main())

    def test_a_client_may_name_its_rank_but_no_unknown_one(self):
        async def main():
            async with FakeWorker(info={"dp_size": 2}) as worker, routing(worker) as (_, client):
                for _ in range(3):
                    assert (await client.complete(data_parallel_rank=1)).status == 200
                assert {asked.json["data_parallel_rank"] for asked in worker.asked} == {1}
                for wrong in (2, -1, "x", True, 1.5):
                    got = await client.complete(data_parallel_rank=wrong)
                    assert got.status == 400
                assert len(worker.asked) == 3

        run(main())

    def test_a_prefix_stays_on_its_rank(self):
        async def main():
            async with FakeWorker(info={"dp_size": 8}) as worker, routing(worker) as (_, client):
                for _ in range(5):
                    await client.complete("same " * 1000)
                assert len({asked.json["data_parallel_rank"] for asked in worker.asked}) == 1

        run(main())

    def test_an_empty_object_gets_a_rank_too(self):
        async def main():
            async with FakeWorker(info={"dp_size": 2}) as worker, routing(worker) as (_, client):
                await client.ask("POST", "/v1/completions", b"{ }")
                assert json.loads(worker.asked[0].body)["data_parallel_rank"] in (0, 1)

        run(main())

    def test_it_can_be_switched_off(self):
        async def main():
            async with FakeWorker(info={"dp_size": 4}) as worker, routing(worker, dp_aware=False) as (_, client):
                await client.complete()
                assert "data_parallel_rank" not in worker.asked[0].json

        run(main())


def test_a_restarted_worker_is_recognized_by_its_boot_id():
    async def main():
        async with FakeWorker(info={"boot_id": "one"}) as worker, routing(worker) as (router, client):
            await client.complete("x " * 900)
            name = str(router.workers.find("w0").url)
            assert router.index.blocks_of(name) > 0
            worker.info["boot_id"] = "two"
            await _until(lambda: router.index.blocks_of(name) == 0)

    run(main())


def test_sessions_stick():
    async def main():
        async with FakeWorker("a") as a, FakeWorker("b") as b, routing(a, b, policy="round_robin") as (_, client):
            for session in ("one", "two", "three"):
                got = {(await client.complete(headers=[f"X-Session-Id: {session}"])).json["worker"] for _ in range(4)}
                assert len(got) == 1

    run(main())


class TestDiscovery:
    def test_workers_follow_their_source_and_leave_others_alone(self):
        async def main():
            async with FakeWorker() as worker, routing(worker) as (router, _):
                follower = Discovery(router, DiscoverySource("file", lambda: read_file(None)))
                urls = ("http://10.0.0.1:1", "http://10.0.0.2:1/", "10.0.0.2:1", "ftp://no", worker.url)
                follower.apply([("http://10.0.0.3:1", "cook"), *((url, "") for url in urls)])
                assert sorted(str(w.url) for w in router.workers) == [
                    "http://10.0.0.1:1",
                    "http://10.0.0.2:1",
                    worker.url,
                ]
                follower.apply([("http://10.0.0.2:1", "")])
                assert sorted(str(w.url) for w in router.workers) == ["http://10.0.0.2:1", worker.url]

        run(main())

    def test_a_file_and_a_name(self, tmp_path):
        path = tmp_path / "workers"
        path.write_text("http://a:1  # the first\n\n# none\nb:2 prefill\n")
        assert run(read_file(path)) == [("http://a:1", ""), ("b:2", "prefill")]
        assert ("http://127.0.0.1:30000", "") in run(resolve("localhost", 30000))

    def test_pods_that_are_ready(self):
        def pod(ip, ready="True", **metadata):
            return {"status": {"podIP": ip, "conditions": [{"type": "Ready", "status": ready}]}, "metadata": metadata}

        listed = [
            pod("10.0.0.1"),
            pod("10.0.0.2", "False"),
            pod("10.0.0.3", deletionTimestamp="now"),
            pod("fd00::1", labels={"llm-d.ai/role": "decode"}),
            {},
        ]
        assert ready_pods({"items": listed}, 80) == [("http://10.0.0.1:80", ""), ("http://[fd00::1]:80", "decode")]

    @pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
    def test_pods_are_asked_of_the_cluster_that_the_router_runs_in(self, tmp_path, monkeypatch):
        key, certificate = str(tmp_path / "key"), str(tmp_path / "ca.crt")
        named = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
        made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate]
        subprocess.run([*made, *named], check=True, capture_output=True)
        (tmp_path / "token").write_text("secret\n")
        (tmp_path / "namespace").write_text("models\n")
        monkeypatch.setattr(discovery, "SERVICE_ACCOUNT", tmp_path)
        asked = []

        async def main():
            async with FakeWorker() as worker, routing(ready=False, discovery_interval_secs=0.1) as (router, _):

                async def listed(request):
                    asked.append((request.path, dict(request.query), request.headers["Authorization"]))
                    ready = {"podIP": "127.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]}
                    return web.json_response({"items": [{"status": ready}]}, status=200 if len(asked) > 1 else 500)

                app = web.Application()
                app.router.add_get("/{path:.*}", listed)
                context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
                context.load_cert_chain(certificate, key)
                runner = web.AppRunner(app)
                await runner.setup()
                await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
                monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
                monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(runner.addresses[0][1]))
                settings = RouterSettings(worker_selector="app=engine", worker_port=worker.port)
                task = asyncio.create_task(Discovery(router, sources(settings)[0]).run())
                await _until(lambda: any(one.healthy for one in router.workers))
                task.cancel()
                await runner.cleanup()

        run(main())
        assert asked[-1] == ("/api/v1/namespaces/models/pods", {"labelSelector": "app=engine"}, "Bearer secret")

    def test_a_source_that_cannot_be_is_refused(self):
        with pytest.raises(ConfigError, match="host:port"):
            sources(RouterSettings(worker_dns="nowhere"))
        names = RouterSettings(worker_dns="a:1", worker_file="f", worker_selector="app=x")
        assert [source.name for source in sources(names)] == ["file", "dns", "kubernetes"]


def test_a_dead_file_changes_nothing(tmp_path):
    async def main():
        path = tmp_path / "workers"
        async with FakeWorker() as worker, routing(ready=False, discovery_interval_secs=0.1) as (router, _):
            path.write_text(worker.url)
            task = asyncio.create_task(Discovery(router, DiscoverySource("file", lambda: read_file(path))).run())
            await _until(lambda: len(router.workers) == 1)
            path.unlink()
            await asyncio.sleep(0.25)
            assert len(router.workers) == 1
            task.cancel()

    run(main())


def test_a_worker_that_loads_gets_no_requests_yet():
    async def main():
        async with FakeWorker(info={"status": "loading"}) as worker, routing(worker, ready=False) as (router, client):
            await asyncio.sleep(0.2)
            assert (await client.ask("GET", "/ready")).status == 503
            waiting = asyncio.create_task(client.complete())
            await _until(lambda: len(router.queue) == 1)
            worker.info["status"] = "ready"
            assert (await waiting).status == 200

    run(main())


@pytest.mark.parametrize(("given", "room"), [(8, 8), (0, 0), (None, 0), ("many", 0), (True, 0)])
def test_a_target_takes_as_many_requests_as_its_engine_says(given, room):
    async def main():
        async with FakeWorker(info={"max_running_requests": given, "x": 1}) as worker, routing(worker) as (router, _):
            assert router.workers.find("w0").targets[0].state.room == room

    run(main())


PREEMPTING = {"enable_priority_scheduling": True, "priority_scheduling_preemption_threshold": 10}


@pytest.mark.parametrize("preempts", [True, False])
def test_a_top_request_goes_to_a_full_engine_that_preempts(preempts):
    async def main():
        info = {"max_running_requests": 2, **(PREEMPTING if preempts else {})}
        async with FakeWorker(info=info, delay_s=0.4) as worker, routing(worker) as (router, client):
            low = [asyncio.create_task(client.complete(f"low {i}")) for i in range(4)]
            while len(router.queue) < 2:
                await asyncio.sleep(0.005)
            near = asyncio.create_task(client.complete("near", priority=9))
            top = [asyncio.create_task(client.complete(f"top {i}", priority=10)) for i in range(3)]
            await asyncio.sleep(0.1)
            asked = [one.json["prompt"] for one in worker.asked]
            assert asked[2:] == (["top 0", "top 1"] if preempts else []), "places of others, but no more than there are"
            assert len(router.queue) == (4 if preempts else 6)
            assert all(one.status == 200 for one in await asyncio.gather(*low, near, *top))
            assert not router.workers.find("w0").targets[0].levels

    run(main())


def test_a_worker_without_a_health_path_is_healthy_if_it_lists_its_models():
    async def main():
        async with FakeWorker(health=404) as worker, routing(worker) as (_, client):
            assert (await client.complete()).status == 200
        async with FakeWorker(health=500) as worker, routing(worker, ready=False) as (router, _):
            await asyncio.sleep(0.2)
            assert not router.workers.find("w0").healthy

    run(main())


CROSS_SITE = [
    ["Host: evil.example", "Origin: http://evil.example", "Sec-Fetch-Site: cross-site"],
    ["Host: 127.0.0.1", "Origin: http://evil.example"],
    ["Host: 127.0.0.1", "Sec-Fetch-Site: cross-site"],
    ["Host: evil.example"],
]


@pytest.mark.parametrize("headers", CROSS_SITE)
@pytest.mark.parametrize("path", ["/workers", "/workers/w0/drain", "/flush_cache"])
def test_a_page_of_another_site_pulls_no_levers(headers, path):
    async def main():
        async with FakeWorker() as worker, routing(worker) as (router, client):
            body = b'{"url": "http://127.0.0.1:9"}'
            head = f"POST {path} HTTP/1.1\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
            got = parse_answer(await client.raw((head + "\r\n".join(headers)).encode() + b"\r\n\r\n" + body))
            assert (got.status, got.error) == (403, "cross_site")
            assert len(router.workers) == 1
            assert router.workers.find("w0").state == "healthy"

    run(main())


def test_the_routers_own_page_and_clients_with_the_key_pull_them():
    async def main():
        async with FakeWorker() as worker, routing(worker) as (router, client):
            own = ["Origin: http://localhost", "Sec-Fetch-Site: same-origin"]
            assert (await client.ask("POST", "/workers/w0/drain", headers=own)).status == 200
            assert router.workers.find("w0").state == "draining"
        async with FakeWorker() as worker, routing(worker, admin_api_key="k") as (_, client):
            foreign = ["Authorization: Bearer k", "Origin: http://elsewhere.example"]
            assert (await client.ask("POST", "/workers/w0/drain", headers=foreign)).status == 200

    run(main())


def test_an_emptied_file_removes_no_worker_and_a_comment_removes_all(tmp_path):
    async def main():
        path = tmp_path / "workers"
        async with FakeWorker() as worker, routing(ready=False, discovery_interval_secs=0.1) as (router, _):
            path.write_text(worker.url)
            task = asyncio.create_task(Discovery(router, DiscoverySource("file", lambda: read_file(path))).run())
            await _until(lambda: len(router.workers) == 1)
            path.write_text("\n")
            await asyncio.sleep(0.25)
            assert len(router.workers) == 1
            path.write_text("# none\n")
            await _until(lambda: len(router.workers) == 0)
            task.cancel()

    run(main())


CONVERSATION = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
SESSIONS = {
    "session_id": ({"session_id": "s", "prompt_cache_key": "k"}, []),
    "codex": ({"prompt_cache_key": "k"}, ["session-id: s"]),
    "opencode": ({}, ["x-session-affinity: s"]),
    "cache_key": ({"prompt_cache_key": "s"}, []),
    "claude": ({"metadata": {"user_id": "user_1__session_s"}}, []),
    "conversation": ({"messages": CONVERSATION}, []),
}


@pytest.mark.parametrize("how", SESSIONS)
def test_sessions_are_found_as_engines_find_them(how, monkeypatch):
    fields, headers = SESSIONS[how]
    seen = []
    monkeypatch.setattr(Dispatcher, "arrived", lambda machine, request, now: seen.append(request.facts.session) or [])

    async def main(**settings):
        async with routing(ready=False, **settings) as (_, client):
            for tenant in ({}, {"tenant": "acme"}, {"tenant": "t" * 1000}):
                body = {"messages": [], **fields, **tenant}
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(client.ask("POST", "/v1/chat/completions", body, headers), 0.2)

    run(main())
    assert seen[0] == ("s" if how != "conversation" else derived_session(CONVERSATION))
    assert seen[1] == f"acme/{seen[0]}"
    assert len(seen[2]) == 64
    seen.clear()
    run(main(session_header=""))
    assert seen == [""] * 3


def test_long_session_ids_are_kept_as_digests():
    async def main():
        async with FakeWorker("a") as a, FakeWorker("b") as b, routing(a, b, policy="round_robin") as (_, client):
            homes = {}
            for number in (0, 1, 0, 1):
                got = await client.complete("x", [f"X-Session-Id: {number}" + "s" * 30_000])
                homes.setdefault(number, set()).add(got.json["worker"])
            assert all(len(home) == 1 for home in homes.values())

    run(main())


@pytest.mark.parametrize("size", [1, 64, 65, 30_000])
def test_sessions_take_a_bounded_number_of_bytes_each(size, monkeypatch):
    seen = []
    monkeypatch.setattr(Dispatcher, "arrived", lambda machine, request, now: seen.append(request.facts.session) or [])

    async def main():
        async with routing(ready=False) as (_, client):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(client.complete("x", ["X-Session-Id: " + "s" * size]), 0.2)

    run(main())
    assert len(seen[0]) == min(size, 64)


LEVERS = ["/v1/scheduler", "/v1/%73cheduler", "/v1/requests/victim/pause", "/v1/live", "/v1/load_lora_adapter"]


@pytest.mark.parametrize("path", LEVERS)
def test_a_clients_key_pulls_no_levers_of_an_engine(path):
    async def main():
        keys = {"api_key": "CLIENT", "admin_api_key": "ADMIN", "worker_api_key": "ENGINE"}
        async with FakeWorker() as worker, routing(worker, **keys) as (_, client):
            assert (await client.ask("POST", path, {}, ["Authorization: Bearer CLIENT"])).status == 401
            assert worker.asked == []
            assert (await client.ask("POST", path, {}, ["Authorization: Bearer ADMIN"])).status == 200
            assert worker.asked[0].headers["authorization"] == "Bearer ENGINE"

    run(main())


@pytest.mark.parametrize("path", ["/v1/../flush_cache", "/v1/%2e%2e/flush_cache", "/v1/./scheduler", "/v1/x/.."])
def test_paths_with_dot_segments_go_to_no_worker(path):
    async def main():
        async with FakeWorker() as worker, routing(worker) as (_, client):
            assert (await client.ask("POST", path, {})).status == 404
            assert worker.asked == []

    run(main())


class TestSeveralModels:
    def test_an_unknown_model_and_none_are_refused_with_all_names(self):
        async def main():
            async with FakeWorker(models=("m",)) as a, FakeWorker(models=("n",)) as b, routing(a, b) as (_, client):
                for fields, status, code in (
                    ({}, 400, "model_required"),
                    ({"model": "default"}, 400, "model_required"),
                    ({"model": "x"}, 404, "model_not_found"),
                ):
                    got = await client.complete(**fields)
                    assert (got.status, got.error) == (status, code)
                    assert "'m', 'n'" in got.json["error"]["message"]
                assert (await client.complete(model="n")).json
                assert (await client.ask("POST", "/generate", {"text": "x"})).status == 200
                assert not a.asked or not b.asked or len(a.asked) + len(b.asked) == 2

        run(main())

    def test_one_model_under_several_names_needs_none(self):
        async def main():
            names = ("m", "n")
            async with FakeWorker(models=names) as a, FakeWorker(models=names) as b, routing(a, b) as (_, client):
                assert (await client.complete()).status == 200
                assert (await client.complete(model="alias")).status == 200

        run(main())

    def test_an_alias_is_neither_a_model_nor_an_adapter_of_its_own(self):
        async def main():
            async with (
                FakeWorker(models=("m",)) as a,
                FakeWorker(models=("n",)) as b,
                routing(a, b) as (router, client),
            ):
                workers = router.workers
                root = {"root": "m", "object": "model"}
                cards = [{"id": "m", **root}, {"id": "alias", **root}, {"id": "sql", "parent": "m"}]
                workers.set_cards(workers.find("w0"), cards)
                assert workers.base_models == ["m", "n"]
                assert (workers.base_of("alias"), workers.base_of("sql")) == ("m", "m")
                assert workers.adapters == {"sql", "m:sql", "alias:sql"}
                assert (await client.complete(model="alias")).status == 200
                assert [len(a.asked), len(b.asked)] == [1, 0]

        run(main())

    def test_a_model_whose_engine_is_down_is_refused_soon_with_the_reason_while_others_answer(self):
        async def main():
            async with (
                FakeWorker("a", models=("m",)) as a,
                FakeWorker("b", models=("n",)) as b,
                routing(a, b, unavailable_timeout_secs=0.3) as (_, client),
            ):
                await a.stop()
                got = await client.complete(model="m")
                assert (got.status, got.error) == (503, "model_unavailable")
                assert "no healthy worker serves this model" in got.json["error"]["message"]
                assert (await client.complete(model="n")).json == {"worker": "b"}

        run(main())


def test_a_fault_of_a_control_path_is_an_answer(monkeypatch):
    async def main():
        async with FakeWorker() as worker, routing(worker) as (router, client):
            monkeypatch.setattr(type(router.metrics), "usage_rows", lambda _: 1 / 0)
            got = await client.ask("GET", "/usage")
            assert (got.status, got.error) == (500, "internal_error")
            assert (await client.complete()).status == 200

    run(main())


def test_refusals_of_control_paths_are_no_errors_of_requests():
    async def main():
        async with FakeWorker() as worker, routing(worker, api_key="k") as (router, client):
            for _ in range(3):
                assert (await client.ask("GET", "/workers")).status == 401
            assert not router.metrics.errors
            assert (await client.complete()).status == 401
            assert router.metrics.errors == {"invalid_api_key": 1}

    run(main())


@pytest.mark.parametrize(("flags", "warns"), [((), True), (("--api-key", "k"), False), (("--host", "::1"), False)])
def test_a_router_that_others_reach_without_a_key_warns(flags, warns, caplog, monkeypatch):
    async def run_nothing(*arguments, **named):
        pass

    monkeypatch.setattr("tokenyard.router.process.run", run_nothing)
    monkeypatch.setattr("tokenyard.router.process.run_all", lambda settings, run_one: run_one(settings, None, True))
    monkeypatch.setattr("tokenyard.cli.route.set_up_logging", lambda level, form: None)
    words = ["route", "--host", "0.0.0.0", "--worker-urls", "http://127.0.0.1:1", *flags]
    namespace = build_parser("route").parse_strictly(words)
    with caplog.at_level("WARNING"):
        route(namespace)
    assert ("without --api-key" in caplog.text) == warns
