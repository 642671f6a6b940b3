"""A scheduler process ends: its requests go on, where they were, on another one or on the one started in its place."""

import asyncio
import os
import signal

import psutil
import pytest

from tests.engine.engines import mock_config
from tests.engine.test_engine import spec, until
from tokenyard.base import LogprobOptions
from tokenyard.engine.processes.launch import running_engine

ENGINES = {"alone": {}, "one of two": {"ranks": 2}, "ids only": {"skip_tokenizer": True}}


def engine(*, ranks=1, **options):
    config = mock_config(**{"step_ms": 5.0, **options})
    config.ranks = ranks
    return config


def scheduler_pids():
    """Process ids of the schedulers of this process's engine, in the order of their start."""
    children = psutil.Process(os.getpid()).children()
    found = [child for child in children if "tokenyard: scheduler" in " ".join(child.cmdline())]
    return [child.pid for child in sorted(found, key=lambda child: child.create_time())]


def kill_all():
    for pid in scheduler_pids():
        os.kill(pid, signal.SIGKILL)


def wanted(manager, **options):
    if manager.tokenizer is not None:
        return spec(**options)
    made = spec(**options)
    made.text, made.input_ids = None, [5, 6, 7]
    return made


class Reading:
    """Reads an answer in the background."""

    def __init__(self, manager, wanted):
        self.deltas = []
        self.task = asyncio.create_task(self._read(manager, wanted))

    async def _read(self, manager, wanted):
        async for delta in manager.generate(wanted):
            self.deltas.append(delta)

    def text(self, index=0):
        return "".join(delta.text for delta in self.deltas if delta.index == index)

    def tokens(self, index=0):
        return [token for delta in self.deltas if delta.index == index for token in delta.token_ids]

    def logprobs(self):
        return [(entry.position, entry.token) for delta in self.deltas for entry in delta.logprobs]

    def ends(self):
        ends = [(delta.index, delta.finish) for delta in self.deltas if delta.finish]
        return {index: (finish.reason, finish.matched, finish.completion_tokens) for index, finish in ends}


async def read_whole(manager, **options):
    reading = Reading(manager, wanted(manager, **options))
    await asyncio.wait_for(reading.task, 40)
    return reading


def same(one, other):
    indices = range(max(one.ends()) + 1)
    assert [one.tokens(i) for i in indices] == [other.tokens(i) for i in indices]
    assert [one.text(i) for i in indices] == [other.text(i) for i in indices]
    assert one.ends() == other.ends()
    assert one.logprobs() == other.logprobs()


async def begun(*readings, tokens=20):
    async def all_begun():
        return all(len(reading.tokens()) > tokens for reading in readings)

    await until(all_begun)


@pytest.mark.parametrize("kind", ENGINES)
def test_streams_go_on_without_gap_or_repeat(kind):
    options = [
        {"tokens": 200},
        {"tokens": 200, "n": 3, "temperature": 1.0},
        {"tokens": 60, "logprobs": LogprobOptions(output=True, prompt_from=1)},
        {"tokens": 120, "stream": False},
    ]

    async def main():
        async with running_engine(engine(**ENGINES[kind])) as manager:
            whole = [await read_whole(manager, **one) for one in options]
            broken = [Reading(manager, wanted(manager, **one)) for one in options]
            await begun(*broken[:3])
            os.kill(scheduler_pids()[0], signal.SIGKILL)
            late = Reading(manager, wanted(manager, **options[0]))
            await asyncio.wait_for(asyncio.gather(late.task, *(one.task for one in broken)), 40)
            for one, other in zip([*whole, whole[0]], [*broken, late], strict=True):
                same(one, other)
            ranks = ENGINES[kind].get("ranks", 1)

            async def all_back():
                return len(manager.ranks.clients) == ranks and manager.health() < 5.0

            await until(all_back)
            same(whole[0], await read_whole(manager, **options[0]))
            assert manager.open_requests == 0
            snapshot = await manager.snapshot()
            assert (snapshot["running"], snapshot["used_tokens"]) == (0, 0)

    asyncio.run(main())


def test_two_deaths_in_a_row_lose_nothing_either():
    async def main():
        async with running_engine(engine()) as manager:
            whole = await read_whole(manager, tokens=300)
            broken = Reading(manager, spec(tokens=300))
            for tokens in (20, 100):
                await begun(broken, tokens=tokens)
                kill_all()
            await asyncio.wait_for(broken.task, 40)
            same(whole, broken)

    asyncio.run(main())
