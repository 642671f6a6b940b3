"""A scheduler process ends: its requests continue where they were, on another rank or on the restarted one."""

import asyncio
import os
import signal
import time
from dataclasses import replace

import psutil
import pytest

from tests.engine import slow_to_load
from tests.engine.engines import mock_config
from tests.engine.readers import TakingReader
from tests.engine.test_engine import FOR_EVER, spec, titled, until
from tokenyard.base import LogprobOptions
from tokenyard.engine.frontend import failover
from tokenyard.engine.processes import launch, supervisor
from tokenyard.engine.processes.launch import running_engine

pytestmark = pytest.mark.usefixtures("no_pauses")
ENGINES = {"alone": {}, "one of two": {"ranks": 2}, "ids only": {"skip_tokenizer": True}}


@pytest.fixture
def no_pauses(monkeypatch):
    monkeypatch.setattr(supervisor, "RESTART_PAUSES_S", (0.0,) * 5)


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


async def kill_and_wait(manager):
    """End the only scheduler, and wait until that is known."""
    kill_all()
    await until(lambda: asyncio.sleep(0, not manager.ranks.clients))


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


@pytest.mark.parametrize(
    "kind", [*ENGINES][:1] + [pytest.param(kind, marks=pytest.mark.slow) for kind in [*ENGINES][1:]]
)
def test_streams_continue_without_gap_or_repeat(kind):
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


@pytest.mark.slow
@pytest.mark.parametrize("stop", ["kill", "suspend"])
def test_streams_outlive_the_detokenizer_too(stop, monkeypatch):
    monkeypatch.setattr(launch, "SILENCE_GRACE_S", 0.5)

    async def main():
        config = engine(ranks=2)
        config.watchdog_timeout_s = 1.0
        async with running_engine(config) as manager:
            options = [{"tokens": 120}, {"tokens": 60, "n": 2, "temperature": 1.0}, {"tokens": 60, "stream": False}]
            whole = [await read_whole(manager, **one) for one in options]
            broken = [Reading(manager, wanted(manager, **one)) for one in options]
            await begun(*broken[:2])
            getattr(titled(os.getpid(), "tokenyard: detokenizer"), stop)()
            late = Reading(manager, wanted(manager, **options[0]))
            await asyncio.wait_for(asyncio.gather(late.task, *(one.task for one in broken)), 40)
            for one, other in zip([*whole, whole[0]], [*broken, late], strict=True):
                same(one, other)
            assert manager.open_requests == 0

    asyncio.run(main())


@pytest.mark.slow
def test_a_scheduler_may_end_while_the_detokenizer_is_stalled(monkeypatch):
    monkeypatch.setattr(failover, "FENCE_TIMEOUT_S", 0.5)

    async def main():
        async with running_engine(engine()) as manager:
            whole = await read_whole(manager, tokens=120)
            broken = Reading(manager, spec(tokens=120))
            await begun(broken)
            titled(os.getpid(), "tokenyard: detokenizer").suspend()
            kill_all()
            await asyncio.wait_for(broken.task, 40)
            same(whole, broken)

    asyncio.run(main())


@pytest.mark.slow
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


def with_own_code(**settings):
    config = engine(step_ms=1.0)
    config.priority_function = settings.pop("priority_function", "")
    config.scheduler = replace(config.scheduler, **settings)
    return config


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy", ["Swallows", *(pytest.param(name, marks=pytest.mark.slow) for name in ("Measures", "Exits"))]
)
def test_a_policy_that_ends_or_stops_its_process_is_replaced_by_fcfs(policy, monkeypatch, caplog):
    monkeypatch.setitem(supervisor.CHILD_MODULES, "scheduler", "tests.engine.user_code")

    async def main():
        async with running_engine(with_own_code(schedule_policy=f"tests.engine.user_code:{policy}")) as manager:
            readings = await asyncio.gather(*(read_whole(manager, tokens=400, n=2) for _ in range(3)))
            for reading in readings:
                same(readings[0], reading)
                assert {reason for reason, _, _ in reading.ends().values()} == {"length"}
            counters = await manager.snapshot()
            assert counters["policy"] == "fcfs"
            assert "as they may be why" in counters["policy_note"]

    asyncio.run(main())
    assert "starts again" in caplog.text


@pytest.mark.slow
def test_a_priority_function_that_never_ends_is_left_out():
    async def main():
        own = {"priority_function": "tests.engine.user_code:swallows", "max_running_requests": 1}
        async with running_engine(with_own_code(**own, enable_priority_scheduling=True)) as manager:
            await asyncio.gather(*(read_whole(manager, tokens=20) for _ in range(3)))
            assert "priority_function" not in await manager.snapshot()

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(supervisor.CHILD_MODULES, "scheduler", "tests.engine.user_code")
        asyncio.run(main())


@pytest.mark.slow
def test_a_policy_chosen_while_it_ran_is_not_chosen_again_after_it_hung(monkeypatch):
    monkeypatch.setitem(supervisor.CHILD_MODULES, "scheduler", "tests.engine.user_code")

    async def main():
        async with running_engine(with_own_code(schedule_policy="lpm")) as manager:
            await manager.set_policy("tests.engine.user_code:Swallows", {})
            await read_whole(manager, tokens=20)
            assert (await manager.snapshot())["policy"] == "lpm"

    asyncio.run(main())


@pytest.mark.slow
def test_what_was_chosen_or_paused_holds_for_the_restarted_scheduler():
    async def main():
        async with running_engine(engine()) as manager:
            await manager.set_policy("mlfq", {})
            whole = await read_whole(manager, tokens=60)
            held = Reading(manager, spec(tokens=60, rid="held"))
            await begun(held, tokens=5)
            await manager.pause_request("held")
            kill_all()
            other = await read_whole(manager, tokens=60)
            same(whole, other)
            assert (await manager.snapshot())["policy"] == "mlfq"
            assert not held.task.done()
            await manager.pause()
            await kill_and_wait(manager)
            await manager.resume_request("held")
            late = Reading(manager, spec(tokens=5))
            await until(running_again(manager))
            assert (await manager.snapshot())["paused"]
            assert not late.deltas
            await manager.continue_()
            await asyncio.wait_for(asyncio.gather(held.task, late.task), 40)
            same(whole, held)

    asyncio.run(main())


def running_again(manager):
    async def condition():
        return bool(manager.ranks.clients) and manager.health() < 5.0

    return condition


@pytest.mark.slow
def test_a_full_queue_takes_back_what_was_accepted():
    async def main():
        config = engine(max_pool_rows=3)
        config.scheduler = replace(config.scheduler, max_running_requests=3, max_queued_requests=2)
        async with running_engine(config) as manager:
            whole = await read_whole(manager, tokens=60)
            readings = []
            for _ in range(3):
                readings.append(Reading(manager, spec(tokens=60)))
                await begun(*readings, tokens=1)
            readings += [Reading(manager, spec(tokens=60)) for _ in range(2)]
            await asyncio.sleep(0)
            kill_all()
            await asyncio.wait_for(asyncio.gather(*(reading.task for reading in readings)), 40)
            for reading in readings:
                same(whole, reading)

    asyncio.run(main())


@pytest.mark.slow
def test_a_request_that_ends_its_scheduler_again_and_again_ends_with_an_error(monkeypatch):
    monkeypatch.setattr(failover, "MAX_RESUBMITS", 1)

    async def main():
        async with running_engine(engine()) as manager:
            ended = []
            gone = asyncio.create_task(
                manager.feed(spec(tokens=FOR_EVER), TakingReader(lambda delta: None), ended.append)
            )
            broken = Reading(manager, spec(tokens=FOR_EVER))
            for tokens in (5, 60):
                await begun(broken, tokens=tokens)
                await kill_and_wait(manager)
                await until(running_again(manager))
            await asyncio.wait_for(broken.task, 20)
            finish = broken.deltas[-1].finish
            assert (finish.reason, finish.cause) == ("abort", "failed")
            assert "ended 2 times while this request was there" in finish.message
            assert (await read_whole(manager, tokens=5)).ends()
            await gone
            assert manager.open_requests == 0

    asyncio.run(main())


def test_a_client_that_leaves_while_nothing_runs_gets_the_end():
    async def main():
        async with running_engine(engine()) as manager:
            ended = asyncio.Queue()

            read = []
            reader = TakingReader(read.append)
            feeding = asyncio.create_task(manager.feed(spec(tokens=FOR_EVER), reader, ended.put_nowait))
            await until(lambda: asyncio.sleep(0, len(read) > 5))
            await kill_and_wait(manager)
            feeding.cancel()
            end = await asyncio.wait_for(ended.get(), 20)
            assert end.finish.reason == "abort"
            assert manager.open_requests == 0

    asyncio.run(main())


def test_a_stalled_scheduler_is_ended_and_restarted(monkeypatch, caplog, capfd):
    monkeypatch.setattr(launch, "SILENCE_GRACE_S", 0.5)

    async def main():
        config = engine()
        config.watchdog_timeout_s = 1.0
        async with running_engine(config) as manager:
            whole = await read_whole(manager, tokens=80)
            broken = Reading(manager, spec(tokens=80))
            await begun(broken, tokens=5)
            titled(os.getpid(), "tokenyard: scheduler").suspend()
            await asyncio.wait_for(broken.task, 40)
            same(whole, broken)

    asyncio.run(main())
    assert "last heard" in caplog.text
    assert "no heartbeat from the scheduler" in caplog.text
    assert "Fatal Python error: Aborted" in capfd.readouterr().err


def test_a_load_longer_than_the_watchdogs_timeout_is_not_taken_for_a_hang(monkeypatch):
    monkeypatch.setitem(supervisor.CHILD_MODULES, "scheduler", "tests.engine.slow_to_load")

    async def main():
        config = engine(step_ms=1.0)
        config.watchdog_timeout_s = slow_to_load.LOAD_S - 0.5
        async with running_engine(config) as manager:
            pids = scheduler_pids()
            await read_whole(manager, tokens=20)
            assert scheduler_pids() == pids
            assert manager.ranks.clients[0].age_s(time.monotonic_ns()) < config.watchdog_timeout_s

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("deed", "reason"),
    [
        ("raises", "the attachment broken failed in on_output: out of luck"),
        ("stalls", "the attachment broken has not ended for"),
    ],
)
def test_an_attachment_that_fails_is_named_and_its_requests_continue(deed, reason, tmp_path, monkeypatch, caplog):
    async def main(config):
        async with running_engine(config) as manager:
            return await read_whole(manager, tokens=60)

    undisturbed = asyncio.run(main(engine()))
    monkeypatch.setitem(supervisor.CHILD_MODULES, "scheduler", "tests.engine.broken_attachment")
    config = engine()
    config.watchdog_timeout_s = 2.0
    config.priority_function = f"{deed}:{tmp_path / 'done'}"
    same(asyncio.run(main(config)), undisturbed)
    assert (tmp_path / "done").exists()
    assert reason in caplog.text


@pytest.mark.slow
def test_adapters_are_loaded_into_the_process_that_comes_next(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")

    async def main():
        config = engine()
        config.scheduler = replace(config.scheduler, enable_lora=True)
        config.adapters = {"a": str(tmp_path)}
        async with running_engine(config) as manager:
            base = await read_whole(manager, tokens=40)
            first = await read_whole(manager, tokens=40, lora="a")
            await kill_and_wait(manager)
            same(await read_whole(manager, tokens=40, lora="a"), first)
            assert first.tokens() != base.tokens()

    asyncio.run(main())
