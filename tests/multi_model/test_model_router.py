"""The router in front of several models, with engines that a test starts and ends."""

import asyncio
import signal
from contextlib import asynccontextmanager

import orjson
import pytest

from tests.multi_model.test_catalog import plan
from tokenyard.base import InvalidRequestError, TokenyardError
from tokenyard.multi_model import model_router
from tokenyard.multi_model.catalog import Catalog
from tokenyard.multi_model.engine_process import EngineProcess
from tokenyard.multi_model.model_router import ModelRouter, ModelRouterSettings
from tokenyard.router.client_connection import ClientRequest
from tokenyard.router.dispatch_driver import OpenRequest
from tokenyard.router.errors import RouterError, status_of
from tokenyard.router.request_features import ParsedRequest
from tokenyard.router.router_settings import RouterSettings

KEEP_ALIVE_NS = 7


class FakeEngine:
    """An engine that starts when the router says so, and ends when the test does."""

    def __init__(self, name, folder, number, *, ended, **options):
        self.url, self.reason, self.ended, self.starts = f"unix:{folder}/{number}", "it is too old", ended, 0

    def start(self, settings):
        self.starts += 1

    def stop(self):
        pass

    async def wait(self):
        pass


class Waiting(OpenRequest):
    """A request that waits for its model."""

    def __init__(self, router, model):
        super().__init__(asked("/v1/completions", {"model": model}), ParsedRequest(model=model))
        self.router, self.error = router, None

    @property
    def status(self):
        return None

    def dispatched(self):
        raise AssertionError("no engine is there")

    def abort(self, error):
        self.error = error
        self.router.ended(self)

    def estimate(self):
        return 0, 0

    def check_time(self, now_s):
        pass


def engine_process(folder, ready=list, ended=list):
    return EngineProcess("a", folder, 0, shutdown_s=1, environment={}, ready=ready, ended=ended)


@asynccontextmanager
async def routing(folder, monkeypatch):
    """(router, the engines by the names of their models)."""
    engines = {}

    def make_engine(name, *args, **kwargs):
        engines[name] = FakeEngine(name, *args, **kwargs)
        return engines[name]

    monkeypatch.setattr(model_router, "EngineProcess", make_engine)
    models = ModelRouterSettings(KEEP_ALIVE_NS, 10, 0, 1.0, {}, folder)
    router = ModelRouter(RouterSettings(), None, Catalog([folder], plan), models, lambda name: {})
    yield router, engines
    await router.close()


def asked(path, fields, method=b"POST"):
    body = orjson.dumps(fields)
    headers = [(b"host", b"localhost")]
    return ClientRequest(method, path.encode(), headers, keep_alive=True, http10=False, body=body, path=path)


def test_an_engine_that_cannot_start_fails_all_that_wait_for_it_and_is_not_started_again(folder, monkeypatch):
    async def body():
        async with routing(folder, monkeypatch) as (router, engines):
            requests = [Waiting(router, "a") for _ in range(3)]
            for request in requests:
                router.arrived(request)
            engine = engines["a"]
            engine.ended()
            assert [request.error.code for request in requests] == ["model_load_failed"] * 3
            assert engine.starts == 1
            router.arrived(Waiting(router, "a"))
            assert engine.starts == 2

    asyncio.run(body())


def test_an_engine_whose_settings_cannot_be_written_ends_like_any_other(tmp_path):
    async def body():
        ended = []
        engine = engine_process(tmp_path / "gone", ended=lambda: ended.append(1))
        engine.start({})
        await engine.wait()
        assert ended == [1]
        assert "cannot be started: No such file" in engine.reason

    asyncio.run(body())


class Front:
    def answer(self, status, body, headers):
        self.status = status

    def fail(self, error, path):
        raise error


def test_a_keep_alive_that_says_nothing_or_comes_without_a_loaded_model_changes_nothing(folder, monkeypatch):
    async def body():
        async with routing(folder, monkeypatch) as (router, _):
            fields = {"model": "a", "keep_alive": None, "prompt": "x"}
            router.resolve_model(asked("/api/generate", fields), ParsedRequest(fields=fields, model="a"))
            front = Front()
            router.handle(front, asked("/api/generate", {"model": "a", "keep_alive": 0}))
            assert front.status == 200
            assert router.residency["a"].keep_alive_ns == KEEP_ALIVE_NS
            fields["keep_alive"] = "soon"
            with pytest.raises(InvalidRequestError, match="keep_alive"):
                router.resolve_model(asked("/api/generate", fields), ParsedRequest(fields=fields, model="a"))

    asyncio.run(body())


def test_it_is_ready_without_a_loaded_model_and_keeps_its_workers(folder, monkeypatch):
    async def body():
        async with routing(folder, monkeypatch) as (router, _):
            assert router.why_not_ready() == ""
            for path, method, status in (("/workers", b"POST", 400), ("/workers/w0", b"DELETE", 409)):
                with pytest.raises(TokenyardError, match="starts its engines itself") as raised:
                    router.handle(Front(), asked(path, {"url": "http://127.0.0.1:1"}, method))
                assert status_of(raised.value) == status
            assert len(router.workers) == 3
            router.draining = True
            assert router.why_not_ready() == "draining"

    asyncio.run(body())


def test_default_is_no_name_as_for_an_engine(folder, monkeypatch):
    async def body():
        parsed = ParsedRequest(fields={"model": "default"}, model="default")
        async with routing(folder, monkeypatch) as (router, _):
            with pytest.raises(RouterError, match="names no model"):
                router.resolve_model(asked("/v1/completions", parsed.fields), parsed)
        async with routing(folder / "a", monkeypatch) as (router, _):
            router.resolve_model(asked("/v1/completions", parsed.fields), parsed)
            assert parsed.model == "a"

    asyncio.run(body())


class FakeProcess:
    """A process that writes `lines` until the test ends it."""

    def __init__(self, lines):
        self.stderr, self.signals, self.returncode = asyncio.StreamReader(), [], 0
        self.stderr.feed_data(lines)

    def send_signal(self, number):
        self.signals.append(number)

    async def wait(self):
        return self.returncode


def test_an_engine_is_ready_once_and_told_to_end_once(tmp_path, monkeypatch):
    """What it logs of requests may say anything, and a second signal would end it before its KV is stored."""
    said = []

    async def body():
        process = FakeProcess(b"Tokenyard is ready at unix:x\nrid=Tokenyard is ready at me\n")

        async def start(*args, **options):
            return process

        monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
        engine = engine_process(tmp_path, ready=lambda: said.append("ready"), ended=lambda: said.append("ended"))
        engine.start({})
        while not said:
            await asyncio.sleep(0)
        engine.stop()
        engine.stop()
        process.stderr.feed_eof()
        await engine.wait()
        assert process.signals == [signal.SIGTERM]

    asyncio.run(body())
    assert said == ["ready", "ended"]


def test_a_model_whose_files_have_changed_is_loaded_as_what_it_is_now(folder, monkeypatch):
    async def body():
        async with routing(folder, monkeypatch) as (router, _):
            assert router.residency["a"].need == 1
            (folder / "a" / "second.safetensors").touch()
            router.resolve_model(asked("/v1/completions", {"model": "a"}), ParsedRequest(model="a"))
            assert router.residency["a"].need == 2

    asyncio.run(body())
