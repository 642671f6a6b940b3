"""The router as an endpoint picker: what it tells a gateway, spoken over gRPC as Envoy does."""

import asyncio
import contextlib
import json
import socket

import pytest

grpc = pytest.importorskip("grpc", reason="gRPC comes with tokenyard[gateway]")
pytest.importorskip("envoy.service.ext_proc.v3", reason="Envoy's messages come with tokenyard[gateway]")

from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue  # noqa: E402
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode  # noqa: E402
from envoy.service.ext_proc.v3 import external_processor_pb2 as wire  # noqa: E402
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc  # noqa: E402
from grpc_health.v1 import health_pb2, health_pb2_grpc  # noqa: E402

from tests.router.fakes import FakeWorker, routing  # noqa: E402
from tests.router.test_tenant_keys import entry, write  # noqa: E402
from tokenyard.base import ConfigError  # noqa: E402
from tokenyard.router.endpoint_picker import DESTINATION, SUBSET, SUBSET_METADATA, start_picker  # noqa: E402
from tokenyard.router.router_settings import RouterSettings  # noqa: E402

MODES = {"duplex": ProcessingMode.FULL_DUPLEX_STREAMED, "buffered": ProcessingMode.BUFFERED}


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def header_map(**named):
    return HeaderMap(headers=[HeaderValue(key=key, raw_value=value.encode()) for key, value in named.items()])


class Gateway:
    """One request in Envoy's hands."""

    def __init__(self, channel, mode):
        self.call = external_processor_pb2_grpc.ExternalProcessorStub(channel).Process()
        self.mode = mode
        self.headers, self.metadata, self.refused = {}, {}, None

    async def ask(self, body, path="/v1/completions", subset=None, trailers=False, **headers):
        """Send a request as Envoy would, until its endpoint or a refusal is known. Returns the endpoints."""
        method = "POST" if body is not None else "GET"
        pseudo = {":method": method, ":path": path, "content-type": "application/json", **headers}
        first = wire.ProcessingRequest(
            request_headers=wire.HttpHeaders(headers=header_map(**pseudo), end_of_stream=body is None),
            protocol_config=wire.ProtocolConfiguration(request_body_mode=self.mode, response_body_mode=self.mode),
        )
        if subset is not None:
            first.metadata_context.filter_metadata[SUBSET_METADATA].update({SUBSET: subset})
        await self.call.write(first)
        if body is not None:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            if self.mode == ProcessingMode.BUFFERED:
                assert (await self.call.read()).WhichOneof("response") == "request_headers"
                pieces = [data]
            else:
                pieces = [data[at : at + 50_000] for at in range(0, len(data), 50_000)]
            for number, piece in enumerate(pieces, 1):
                last = number == len(pieces) and not trailers
                await self.call.write(
                    wire.ProcessingRequest(request_body=wire.HttpBody(body=piece, end_of_stream=last))
                )
        if trailers:
            await self.call.write(wire.ProcessingRequest(request_trailers=wire.HttpTrailers()))
        answer = await self.call.read()
        if answer.HasField("immediate_response"):
            self.refused = answer.immediate_response
            return []
        self._mutate(getattr(answer, answer.WhichOneof("response")).response.header_mutation)
        self.metadata = answer.dynamic_metadata["envoy.lb"]
        if body is not None and self.mode == ProcessingMode.FULL_DUPLEX_STREAMED:
            passed = b""
            while True:
                piece = (await self.call.read()).request_body.response.body_mutation.streamed_response
                passed += piece.body
                assert len(piece.body) < 64 << 10
                if piece.end_of_stream or (trailers and passed == data):
                    break
            assert passed == data
        return self.headers[DESTINATION].split(",")

    def _mutate(self, mutation):
        self.headers = {one.header.key: one.header.raw_value.decode() for one in mutation.set_headers}
        self.removed = list(mutation.remove_headers)

    async def answer(self, status=200, *pieces):
        """Tell of the response: its status and the pieces of its body."""
        head = wire.HttpHeaders(headers=header_map(**{":status": str(status)}), end_of_stream=not pieces)
        await self.call.write(wire.ProcessingRequest(response_headers=head))
        assert (await self.call.read()).WhichOneof("response") == "response_headers"
        for number, piece in enumerate(pieces, 1):
            last = number == len(pieces)
            await self.call.write(wire.ProcessingRequest(response_body=wire.HttpBody(body=piece, end_of_stream=last)))
            answer = await self.call.read()
            assert answer.WhichOneof("response") == "response_body"
            if self.mode == ProcessingMode.FULL_DUPLEX_STREAMED:
                passed = answer.response_body.response.body_mutation.streamed_response
                assert (passed.body, passed.end_of_stream) == (piece, last)
        await self.call.done_writing()
        assert await self.call.read() is grpc.aio.EOF


@contextlib.asynccontextmanager
async def picking(*workers, mode=ProcessingMode.FULL_DUPLEX_STREAMED, **settings):
    """(router, a function that makes a request in Envoy's hands, channel)."""
    async with routing(*workers, endpoint_picker_port=free_port(), **settings) as (router, _):
        server = await start_picker(router)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{router.settings.endpoint_picker_port}") as channel:
            yield router, lambda: Gateway(channel, mode), channel
        await server.stop(None)


def usage(prompt, cached, output):
    return json.dumps(
        {"usage": {"prompt_tokens": prompt, "completion_tokens": output, "cached_tokens": cached}}
    ).encode()


@pytest.mark.parametrize("mode", MODES)
def test_a_prompt_goes_where_its_beginning_went(mode):
    async def body():
        async with FakeWorker("a") as a, FakeWorker("b") as b, picking(a, b, mode=MODES[mode]) as (router, gateway, _):
            text = "word " * 40_000  # more than one message of a body
            places = []
            for turn in range(4):
                one = gateway()
                places.append(await one.ask({"model": "m", "prompt": text + "x" * turn * 100}))
                assert one.metadata[DESTINATION] == ",".join(places[-1])
                await one.answer(200, b'{"id": "1",', usage(50_000, 40_000, 10))
            assert {place[0] for place in places} == {places[0][0]}
            assert {*places[0]} == {f"127.0.0.1:{worker.port}" for worker in (a, b)}
            assert router.metrics.cached_tokens == 160_000
            assert not a.asked or all(asked.path != "/v1/completions" for asked in a.asked)

    asyncio.run(body())


def test_load_counts_until_the_response_has_ended_and_a_full_fleet_makes_requests_wait():
    async def body():
        settings = {"max_worker_requests": 1, "policy": "least_load"}
        async with FakeWorker("a") as a, FakeWorker("b") as b, picking(a, b, **settings) as (router, gateway, _):
            first, second, third = gateway(), gateway(), gateway()
            places = [await first.ask({"prompt": "one"}), await second.ask({"prompt": "two"})]
            assert places[0][0] != places[1][0]
            waiting = asyncio.create_task(third.ask({"prompt": "three"}))
            while not len(router.queue):
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.05)
            assert not waiting.done()
            await second.answer(200, usage(1, 0, 1))
            assert (await waiting)[0] == places[1][0]
            assert float(third.headers["x-tokenyard-age-ms"]) > 40
            await third.answer(200, usage(1, 0, 1))
            first.call.cancel()  # its client left
            async with asyncio.timeout(5):
                while router.exchanges:
                    await asyncio.sleep(0.01)

    asyncio.run(body())


def test_a_gateway_may_restrict_the_endpoints():
    async def body():
        async with FakeWorker("a") as a, FakeWorker("b") as b, picking(a, b) as (_, gateway, _channel):
            for worker in (a, b, a):
                place = f"127.0.0.1:{worker.port}"
                for subset in ([place], f"127.0.0.1:1,{place}"):
                    one = gateway()
                    assert await one.ask({"prompt": "hello"}, subset=subset) == [place]
                    await one.answer(200, usage(1, 0, 1))

    asyncio.run(body())


def test_a_body_may_come_as_one_long_message():
    async def body():
        async with FakeWorker("a") as a, picking(a, mode=ProcessingMode.BUFFERED) as (_, gateway, _channel):
            one = gateway()
            assert await one.ask({"prompt": "x" * 5_000_000}) == [f"127.0.0.1:{a.port}"]
            await one.answer(200, usage(1, 0, 1))

    asyncio.run(body())


def test_a_body_may_end_with_trailers():
    async def body():
        async with FakeWorker("a") as a, picking(a) as (router, gateway, _):
            one = gateway()
            assert await one.ask({"prompt": "hello"}, trailers=True) == [f"127.0.0.1:{a.port}"]
            assert (await one.call.read()).WhichOneof("response") == "request_trailers"
            await one.answer(200, usage(1, 0, 1))
            assert not router.exchanges

    asyncio.run(asyncio.wait_for(body(), 20))


@pytest.mark.parametrize(
    ("ask", "status", "code"),
    [
        ({"body": b"no json"}, 400, "invalid_json"),
        ({"body": {"prompt": "x"}, "path": "/nothing"}, 404, "not_found"),
        ({"body": {"prompt": "x", "model": "other"}}, 404, "model_not_found"),
        ({"body": b"x" * 200_000}, 413, "body_too_large"),
    ],
    ids=["json", "path", "model", "size"],
)
def test_a_request_that_is_refused_is_answered_by_the_gateway(ask, status, code):
    async def body():
        a, b = FakeWorker("a", models=("m",)), FakeWorker("b", models=("n",))
        async with a, b, picking(a, b, max_body_mb=0.1) as (_, gateway, _channel):
            one = gateway()
            assert await one.ask(**ask) == []
            assert one.refused.status.code == status
            assert json.loads(one.refused.body)["error"]["code"] == code

    asyncio.run(body())


def test_a_model_without_a_healthy_engine_is_refused_in_time():
    async def body():
        async with FakeWorker("a") as a, picking(a, unavailable_timeout_secs=0.1) as (router, gateway, _):
            await a.stop()
            async with asyncio.timeout(5):
                while any(worker.healthy for worker in router.workers):
                    await asyncio.sleep(0.01)
            one = gateway()
            assert await one.ask({"prompt": "hello"}) == []
            assert one.refused.status.code == 503
            assert {h.header.key for h in one.refused.headers.set_headers} == {"content-type", "retry-after"}

    asyncio.run(body())


def test_keys_limit_tenants_and_the_engine_gets_the_routers(tmp_path):
    async def body():
        path = write(tmp_path / "keys.yaml", entry("sk-1", requests_per_minute=1))
        settings = {"keys_file": path, "admin_api_key": "boss", "worker_api_key": "engine"}
        async with FakeWorker("a") as a, picking(a, **settings) as (_, gateway, _channel):
            one = gateway()
            spoofed = {"x-tokenyard-tenant": "gold", "x-data-parallel-rank": "0", "x-tokenyard-age-ms": "9"}
            await one.ask({"prompt": "hello"}, authorization="Bearer sk-1", **spoofed)
            assert one.headers["x-tokenyard-tenant"] == "acme"
            assert one.headers["authorization"] == "Bearer engine"
            assert float(one.headers["x-tokenyard-age-ms"]) < 9
            assert "x-data-parallel-rank" in one.removed
            await one.answer(200, usage(3, 0, 4))
            for key, status in (("sk-1", 429), ("other", 401)):
                refused = gateway()
                assert await refused.ask({"prompt": "hello"}, authorization=f"Bearer {key}") == []
                assert refused.refused.status.code == status

    asyncio.run(body())


@pytest.mark.parametrize(("settings", "kept"), [({"api_key": "sk-1"}, False), ({}, True)])
def test_a_key_for_the_router_stays_with_the_router(settings, kept):
    async def body():
        async with FakeWorker("a") as a, picking(a, **settings) as (_, gateway, _channel):
            one = gateway()
            await one.ask({"prompt": "hello"}, authorization="Bearer sk-1")
            assert ("authorization" not in one.removed) == kept
            await one.answer(200, usage(1, 0, 1))

    asyncio.run(body())


def test_an_engine_that_fails_loses_its_requests_to_the_others():
    async def body():
        settings = {"cb_failure_threshold": 2, "policy": "round_robin"}
        async with FakeWorker("a") as a, FakeWorker("b") as b, picking(a, b, **settings) as (_, gateway, _channel):
            bad = f"127.0.0.1:{a.port}"
            places = []
            for _ in range(8):
                one = gateway()
                places.append((await one.ask({"prompt": "hello"}))[0])
                await one.answer(500 if places[-1] == bad else 200, usage(1, 0, 1))
            assert places.count(bad) == 2

    asyncio.run(body())


def test_lists_of_models_go_to_any_engine():
    async def body():
        async with FakeWorker("a") as a, picking(a) as (_, gateway, _channel):
            one = gateway()
            assert await one.ask(None, path="/v1/models") == [f"127.0.0.1:{a.port}"]
            await one.answer(200, b'{"data": []}')

    asyncio.run(body())


def test_health_is_serving_while_requests_may_come():
    async def body():
        async with FakeWorker("a") as a, picking(a) as (router, _, channel):
            health = health_pb2_grpc.HealthStub(channel)

            async def status():
                return (await health.Check(health_pb2.HealthCheckRequest())).status

            assert await status() == health_pb2.HealthCheckResponse.SERVING
            router.draining = True
            assert await status() == health_pb2.HealthCheckResponse.NOT_SERVING

    asyncio.run(body())


def test_a_port_in_use_and_several_processes_are_refused():
    async def body():
        with socket.create_server(("127.0.0.1", 0)) as taken:
            async with FakeWorker("a") as a, routing(a, endpoint_picker_port=taken.getsockname()[1]) as (router, _):
                with pytest.raises(ConfigError, match="--endpoint-picker-port"):
                    await start_picker(router)

    asyncio.run(body())
    with pytest.raises(ConfigError, match="--processes 1"):
        RouterSettings(endpoint_picker_port=9002, processes=2)
    with pytest.raises(ConfigError, match="prefill and decode engines need a router"):
        RouterSettings(endpoint_picker_port=9002, prefill_urls=("http://a:1",), decode_urls=("http://b:1",))
