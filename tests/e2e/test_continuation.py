"""Every kind of stream continues at another engine when its engine dies in the middle, through a router."""

import asyncio
import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from tests.e2e.servers import Server
from tests.e2e.test_fleet import Route
from tests.router.fakes import routing
from tests.server.conftest import Running
from tests.server.fake import FakeManager
from tests.server.test_continuation import FORMS, Form, responses_client
from tests.server.test_tool_calls import HERMES
from tokenyard.base import EngineDeadError
from tokenyard.engine.frontend.io_struct import GenerateReqInput
from tokenyard.server.state import ServerOptions


class Engine(FakeManager):
    """An engine whose `dies_after`-th token and what follows never come."""

    def __init__(self, answer: str, dies_after: int | None = None) -> None:
        super().__init__()
        self.template_sources = {"default": HERMES}
        self.answer = [answer[at : at + 3] for at in range(0, len(answer), 3)]
        self.delay_s = 0.001
        self.fail_after, self.failure = dies_after, EngineDeadError("the engine stopped: a test")


class Cut(Engine):
    """Its connections break instead of an error."""

    running: Running

    async def feed(self, spec: GenerateReqInput, *arguments: Any) -> None:
        try:
            await super().feed(spec, *arguments)
        except EngineDeadError:
            self.running.break_connections()
            await asyncio.sleep(30)


def events_of(body: bytes) -> list[Any]:
    lines = [line.removeprefix(b"data: ") for line in body.splitlines()]
    return [json.loads(line) for line in lines if line.startswith(b"{")]


def as_client(form: Form, events: list[Any]) -> Any:
    """What a client has, without what two requests never have in common."""
    if form.client is responses_client:
        deltas, items, response = responses_client(events)
        names = {response["id"]: "response"}
        names |= {item["id"]: f"item {place}" for place, item in enumerate(response["output"])}
        calls = [item["call_id"] for item in response["output"] if "call_id" in item]
        names |= {call: f"call {place}" for place, call in enumerate(calls)}
        text = json.dumps([deltas, items, {**response, "created_at": 0}])
        for name, plain in names.items():
            text = text.replace(name, plain)
        return json.loads(text)
    return form.client(events)


@pytest.mark.part(6)
@pytest.mark.parametrize("how", [Engine, Cut], ids=["error", "cut"])
@pytest.mark.parametrize("name", FORMS)
def test_a_stream_whose_engine_dies_is_completed(name: str, how: type[Engine]):
    form = FORMS[name]

    async def main() -> None:
        whole = Running(ServerOptions(model_name="fake"), Engine(form.answer))
        body = {**form.body, "stream": True}
        expected = as_client(form, events_of(whole.client.post(form.path, json=body).content))
        size = len(Engine(form.answer).answer or [])
        for after in (1, size // 2, size - 1):
            manager = how(form.answer, after)
            dying = Running(ServerOptions(model_name="fake"), manager)
            manager.running = dying
            async with routing(dying.url, whole.url, policy="round_robin") as (router, client):
                got = await client.ask("POST", form.path, body)
                assert got.status == 200
                assert as_client(form, events_of(got.body)) == expected, f"cut after {after}"
                assert b'"token_ids"' not in got.body
                # A stream of which the client has nothing yet is begun again.
                assert router.metrics.continued + router.metrics.retries == 1
                assert router.metrics.continued or after < size // 2
            dying.close()
        whole.close()

    asyncio.run(main())


def body_of(form: Form) -> dict[str, Any]:
    """A request for a real model: long, greedy, and without the fake's options."""
    body = {**form.body, "stream": True}
    body.pop("rid", None)
    if "sampling_params" in body or form.path == "/generate":
        return {**body, "sampling_params": {**body.get("sampling_params", {}), "temperature": 0, "max_new_tokens": 120}}
    if form.path.startswith("/api/"):
        return {**body, "options": {"temperature": 0, "num_predict": 120}}
    limit = "max_output_tokens" if form.path == "/v1/responses" else "max_tokens"
    return {**body, "temperature": 0, limit: 120} | ({"tool_choice": "required"} if name_of_tools(form) else {})


def name_of_tools(form: Form) -> bool:
    return form.path == "/v1/chat/completions" and "tools" in form.body


def without_cache(value: Any) -> Any:
    """What a client has, without ids of requests and without what depends on earlier requests."""
    names = {"id", "cached_tokens", "cache_read_input_tokens", "input_tokens"}
    if isinstance(value, dict):
        return {key: without_cache(item) for key, item in value.items() if key not in names}
    return [without_cache(item) for item in value] if isinstance(value, list | tuple) else value


@pytest.mark.slow
def test_streams_of_all_kinds_outlive_the_engine_they_run_on():
    """Two real engines behind a router; one is killed while a stream of each kind runs."""
    flags = ("--executor", "mock", "--mock-step-ms", "40")
    engines = [Server(*flags), Server(*flags)]
    route = Route(*(engine.url for engine in engines), flags=("--policy", "round_robin"))
    forms = list(FORMS.values())

    def ask(url: str, form: Form) -> Any:
        answer = httpx2.post(url + form.path, json=body_of(form), timeout=120)
        assert answer.status_code == 200, answer.text
        return without_cache(as_client(form, events_of(answer.content)))

    try:
        with ThreadPoolExecutor(2 * len(forms)) as pool:
            asked = [pool.submit(ask, route.url, form) for form in forms for _ in range(2)]
            while route.get("/workers")["workers"][0]["open_requests"] < len(forms) // 2:
                time.sleep(0.05)
            time.sleep(1.0)
            for pid in (*engines[0].children(), engines[0].process.pid):
                os.kill(pid, signal.SIGKILL)
            found = [answer.result() for answer in asked]
            expected = list(pool.map(lambda form: ask(engines[1].url, form), forms))
        for form, one, other, whole in zip(forms, found[::2], found[1::2], expected, strict=True):
            assert one == other == whole, form
        lines = httpx2.get(route.url + "/metrics").text.splitlines()
        (continued,) = [line for line in lines if line.startswith("tokenyard_router_continued_total ")]
        assert int(continued.split()[-1]) > len(forms) // 2
    finally:
        route.close()
        engines[1].close()
        engines[0].process.wait()
