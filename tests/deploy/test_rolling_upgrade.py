"""A rolling upgrade under load, as the manifests do it: no request is lost, and no answer changes.

TOKENYARD_OLD_VERSION names a checkout of another version that the engines are upgraded from; by default it is this one.
"""

import asyncio
import os
import signal

import openai
import pytest

from tests.deploy.test_running_pair import Router
from tests.e2e.servers import ROOT, Server

pytestmark = pytest.mark.slow
OLD_ROOT = os.environ.get("TOKENYARD_OLD_VERSION", str(ROOT))
FLAGS = ("--executor", "mock", "--mock-step-ms", "30", "--shutdown-timeout", "1")
PRE_STOP_S = 1.0
TOKENS, CLIENTS = 40, 8
"""An answer takes longer than `--shutdown-timeout`: some have to continue on another engine."""


def write_workers(path, engines):
    path.with_suffix(".new").write_text("".join(f"{engine.url}\n" for engine in engines))
    path.with_suffix(".new").replace(path)


@pytest.mark.timeout(180)
def test_engines_are_replaced_one_by_one_under_load(tmp_path):
    workers = tmp_path / "workers"
    engines = [Server(*FLAGS, prefix=("env", "-C", OLD_ROOT, f"PYTHONPATH={OLD_ROOT}")) for _ in range(2)]
    write_workers(workers, engines)
    fast = ("--discovery-interval-secs", "0.1", "--health-check-interval-secs", "0.2")
    router = Router("--worker-file", str(workers), *fast)
    client = openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0)
    answers, done = {}, asyncio.Event()

    async def one_client(number):
        asked = {"prompt": f"Client {number}", "temperature": 0, "max_tokens": TOKENS}
        whole = {"ignore_eos": True}
        while not done.is_set():
            stream = await client.completions.create(model="default", stream=True, extra_body=whole, **asked)
            text = "".join([piece.choices[0].text async for piece in stream if piece.choices])
            answers.setdefault(number, []).append(text)

    async def upgrade():
        for number in range(2):
            old = engines[number]
            engines[number] = new = await asyncio.to_thread(Server, *FLAGS)
            write_workers(workers, [*engines, old])
            await asyncio.sleep(1.0)
            write_workers(workers, engines)  # the pod is no longer ready
            await asyncio.sleep(PRE_STOP_S)
            old.signal(signal.SIGTERM)
            assert await asyncio.to_thread(old.wait) == 0
            assert new.process.poll() is None
        await asyncio.sleep(1.0)
        done.set()

    async def scenario():
        async with asyncio.TaskGroup() as group:
            for number in range(CLIENTS):
                group.create_task(one_client(number))
            group.create_task(upgrade())

    try:
        asyncio.run(scenario())
    finally:
        router.close()
        for engine in engines:
            engine.close()
    assert {number: len(set(texts)) for number, texts in answers.items()} == dict.fromkeys(range(CLIENTS), 1)
    assert min(map(len, answers.values())) > 2
