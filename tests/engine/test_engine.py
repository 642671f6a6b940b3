"""A whole engine of real processes answers, cancels, pauses, and ends well or badly."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tests.engine.engines import mock_config, one_for_many
from tests.engine.readers import TakingReader
from tokenyard.base import (
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    LogprobOptions,
    SamplingParams,
    TextOptions,
    TokenyardError,
)
from tokenyard.engine.frontend.io_struct import GenerateReqInput
from tokenyard.engine.processes import supervisor
from tokenyard.engine.processes.launch import running_engine
from tokenyard.engine.processes.supervisor import CHILD_MODULES

ROOT = Path(__file__).resolve().parents[2]
FOR_EVER = 900


def spec(text="Once upon a time", *, tokens=12, stream=True, **options):
    sampling = {name: options.pop(name) for name in ("n", "stop", "temperature") if name in options}
    return GenerateReqInput(
        text=text,
        sampling=SamplingParams(max_new_tokens=tokens, ignore_eos=True, **sampling),
        text_options=TextOptions(stream=stream),
        seed=7,
        **options,
    )


async def collect(manager, wanted):
    return [delta async for delta in manager.generate(wanted)]


async def text_of(manager, wanted):
    return "".join(delta.text for delta in await collect(manager, wanted))


async def read_on(stream):
    async for _ in stream:
        pass


async def until(condition, timeout_s=20.0):
    end = time.monotonic() + timeout_s
    while not await condition():
        assert time.monotonic() < end, "the condition did not come true"
        await asyncio.sleep(0.02)


def with_engine(work, **options):
    async def main():
        async with running_engine(mock_config(**options)) as manager:
            return await asyncio.wait_for(work(manager), 60)

    return asyncio.run(main())


@pytest.fixture(scope="module")
def in_engine():
    """Run `work(manager)` in one engine for all tests that leave it as they found it."""
    with one_for_many(running_engine(mock_config(page_size=4))) as run:
        yield run


def test_answers_are_the_same_streamed_or_not_and_count_right(in_engine):
    async def work(manager):
        streamed = await collect(manager, spec())
        (whole,) = await collect(manager, spec(stream=False))
        tokens = [token for delta in streamed for token in delta.token_ids]
        assert tokens == whole.token_ids
        assert "".join(delta.text for delta in streamed) == whole.text == manager.tokenizer.decode(tokens)
        assert [delta.finish is not None for delta in streamed] == [False] * (len(streamed) - 1) + [True]
        last = streamed[-1]
        assert (last.finish.reason, last.completion_tokens, last.finish.completion_tokens) == ("length", 12, 12)
        assert last.prompt_tokens == last.finish.prompt_tokens == len(manager.tokenizer.encode("Once upon a time").ids)
        assert whole.cached_tokens == whole.finish.cached_tokens > 0
        return tokens

    assert in_engine(work) == with_engine(work, overlap=False)


def test_a_stalled_process_gets_what_it_missed_in_one_piece(in_engine):
    async def work(manager):
        options = {"n": 2, "logprobs": LogprobOptions(output=True), "tokens": 200}
        whole = await collect(manager, spec(stream=False, **options))
        read = []

        def take(delta):
            if not read:
                time.sleep(0.15)
            read.append(delta)

        await manager.feed(spec(**options), TakingReader(take), read.append)
        for index in range(2):
            (expected,) = [delta for delta in whole if delta.index == index]
            deltas = [delta for delta in read if delta.index == index]
            assert "".join(delta.text for delta in deltas) == expected.text
            assert [token for delta in deltas for token in delta.token_ids] == expected.token_ids
            reported = [(entry.position, entry.token) for delta in deltas for entry in delta.logprobs]
            assert reported == [(entry.position, entry.token) for entry in expected.logprobs]
            assert [delta.finish is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
            assert deltas[-1].completion_tokens == 200
            assert max(len(delta.token_ids) for delta in deltas) > 10

    in_engine(work)


def test_a_client_that_leaves_is_followed_to_the_end(in_engine):
    async def work(manager):
        read, ends = [], asyncio.Queue()

        reader = TakingReader(read.append)
        feeding = asyncio.create_task(manager.feed(spec(n=2, tokens=2000), reader, ends.put_nowait))
        while len(read) < 10:
            await asyncio.sleep(0.01)
        feeding.cancel()
        reported = [await asyncio.wait_for(ends.get(), 5.0) for _ in range(2)]
        assert sorted(delta.index for delta in reported) == [0, 1]
        for delta in reported:
            assert (delta.finish.reason, delta.finish.cause) == ("abort", "client_gone")
            assert 0 < delta.completion_tokens < 2000
        assert manager.open_requests == 0

    in_engine(work)


def test_a_client_that_leaves_before_its_last_token_is_written_gets_the_end(in_engine):
    async def work(manager):
        read, ends = [], []
        finished = (await manager.snapshot())["counters"]["finished"]

        def take(delta):
            read.append(delta)
            reader.free.clear()  # the client takes nothing more

        reader = TakingReader(take)
        feeding = asyncio.create_task(manager.feed(spec(tokens=30), reader, ends.append))

        async def ended():
            return (await manager.snapshot())["counters"]["finished"] == finished + 1

        await until(ended)
        await asyncio.sleep(0.1)
        feeding.cancel()
        await asyncio.gather(feeding, return_exceptions=True)
        assert [delta.finish for delta in read] == [None]
        assert [(delta.finish.reason, delta.completion_tokens) for delta in ends] == [("length", 30)]

    in_engine(work)


def test_many_requests_at_once_each_get_their_own(in_engine):
    async def work(manager):
        texts = [f"Story number {i}, with more words" for i in range(40)]
        alone = [await text_of(manager, spec(text)) for text in texts[:5]]
        together = await asyncio.gather(*(text_of(manager, spec(text)) for text in texts))
        assert together[:5] == alone
        assert len(set(together)) == len(texts)

    in_engine(work)


def test_n_answers_have_their_own_numbers_and_ends(in_engine):
    async def work(manager):
        deltas = await collect(manager, spec(n=3, temperature=1.0))
        ends = sorted(delta.index for delta in deltas if delta.finish)
        texts = {index: "".join(d.text for d in deltas if d.index == index) for index in range(3)}
        assert ends == [0, 1, 2]
        assert len(set(texts.values())) == 3
        assert len(await collect(manager, spec())) > 0

    in_engine(work)


def test_stop_strings_end_the_request_everywhere(in_engine):
    async def work(manager):
        text = await text_of(manager, spec(tokens=40))
        stop = text[len(text) // 2 :][:6]
        deltas = await collect(manager, spec(tokens=FOR_EVER, stop=[stop]))
        shown = "".join(delta.text for delta in deltas)
        finish = deltas[-1].finish
        assert shown == text[: text.index(stop)]
        assert (finish.reason, finish.matched) == ("stop", stop)
        kept = [token for delta in deltas for token in delta.token_ids]
        assert finish.completion_tokens == len(kept) < 40
        assert manager.open_requests == 0

        async def idle():
            return (await manager.snapshot())["running"] == 0

        await until(idle)

    in_engine(work)


def test_logprobs_come_with_their_tokens(in_engine):
    async def work(manager):
        deltas = await collect(manager, spec(tokens=4, logprobs=LogprobOptions(output=True, top=2, prompt_from=0)))
        entries = [entry for delta in deltas for entry in delta.logprobs]
        prompt = manager.tokenizer.encode("Once upon a time").ids
        tokens = [token for delta in deltas for token in delta.token_ids]
        assert [entry.token for entry in entries] == prompt[1:] + tokens
        assert [entry.position for entry in entries] == list(range(1, len(prompt) + 4))
        assert all(len(entry.top_tokens) == 2 for entry in entries)

    in_engine(work)


def test_a_client_that_goes_away_frees_its_place(in_engine):
    async def work(manager):
        async with aclosing(manager.generate(spec(tokens=FOR_EVER))) as deltas:
            async for _ in deltas:
                break

        async def idle():
            state = await manager.snapshot()
            return state["running"] == 0 and state["used_tokens"] == 0

        await until(idle)
        assert manager.open_requests == 0
        assert await manager.flush_cache()

    in_engine(work)


def test_abort_pause_continue_and_flush():
    async def work(manager):
        open_one = asyncio.create_task(collect(manager, spec(tokens=FOR_EVER, rid="a")))
        other = asyncio.create_task(collect(manager, spec(tokens=FOR_EVER, rid="b")))

        async def running():
            return (await manager.snapshot())["running"] == 2

        await until(running)
        assert not await manager.flush_cache()
        await manager.abort("a")
        end = (await open_one)[-1].finish
        assert (end.reason, end.cause) == ("abort", "cancelled")
        assert not other.done()
        assert await manager.update("b", priority=3)
        assert not await manager.update("gone", priority=3)
        await manager.abort()
        assert (await other)[-1].finish.reason == "abort"
        await manager.pause()
        assert (await manager.snapshot())["paused"]
        waiting = asyncio.create_task(collect(manager, spec()))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await manager.continue_()
        assert (await waiting)[-1].finish.reason == "length"
        assert await manager.flush_cache()

    with_engine(work, step_ms=3.0)


def test_a_flush_is_tried_again_where_no_request_is_open(monkeypatch):
    async def work(manager):
        flush, refusals = manager.ranks.call, 2

        async def call(verb, *arguments, **named):
            nonlocal refusals
            refusals -= verb == "flush"
            return [False] if verb == "flush" and refusals >= 0 else await flush(verb, *arguments, **named)

        monkeypatch.setattr(manager.ranks, "call", call)
        assert await manager.flush_cache()
        assert refusals == -1
        refusals = 1
        async with aclosing(manager.generate(spec(tokens=FOR_EVER))) as deltas:
            async for _ in deltas:
                break
            assert not await manager.flush_cache()
            assert refusals == 0

    with_engine(work, step_ms=3.0)


def test_a_call_to_a_feature_that_is_off_is_refused(in_engine):
    async def work(manager):
        with pytest.raises(ConfigError, match="clear_store: the feature is off in this engine"):
            await manager.clear_store()

    in_engine(work)


def test_wrong_requests_cost_no_other_request(in_engine):
    async def work(manager):
        for wrong in (GenerateReqInput(input_ids=[]), GenerateReqInput(input_ids=[10**6]), spec("word " * 2000)):
            with pytest.raises(InvalidRequestError):
                await collect(manager, wrong)
        assert await text_of(manager, spec())

    in_engine(work)


def test_token_ids_alone_need_no_detokenizer(before):
    async def work(manager):
        assert manager.tokenizer is None
        wanted = GenerateReqInput(input_ids=[5, 6, 7], sampling=SamplingParams(max_new_tokens=6, ignore_eos=True))
        wanted.text_options.stream = True
        deltas = await collect(manager, wanted)
        assert sum(len(delta.token_ids) for delta in deltas) == 6
        assert {delta.text for delta in deltas} == {""}
        with pytest.raises(InvalidRequestError, match="no tokenizer"):
            await collect(manager, spec())
        with pytest.raises(InvalidRequestError, match="no chat template"):
            await manager.render_chat([{"role": "user", "content": "Hi"}])
        assert len(new_children(before)) == 1

    with_engine(work, skip_tokenizer=True)


def children():
    """Our processes below this one; other tests may run servers too."""
    return [child for child in psutil.Process(os.getpid()).children() if is_engines(child)]


def is_engines(child):
    try:
        return child.cmdline()[1:2] == ["-m"] or "tokenyard:" in child.name()
    except psutil.Error:  # another test's process, which has just ended
        return False


@pytest.fixture
def before():
    return children()


def new_children(before):
    return [child for child in children() if child not in before]


def titled(pid, title):
    """The newest child of a process with this title."""
    found = [child for child in psutil.Process(pid).children() if title in " ".join(child.cmdline())]
    assert found, f"no child {title!r}"
    return max(found, key=lambda child: child.create_time())


@pytest.mark.slow
def test_an_engine_whose_detokenizer_cannot_start_again_ends_every_stream(before, monkeypatch):
    monkeypatch.setattr(supervisor, "RESTART_PAUSES_S", ())

    async def main():
        reasons = []
        async with running_engine(mock_config(), reasons.append) as manager:
            streams = [manager.generate(spec(tokens=FOR_EVER)) for _ in range(2)]
            for stream in streams:
                await anext(stream)
            titled(os.getpid(), "tokenyard: detokenizer").send_signal(signal.SIGKILL)
            for stream in streams:
                with pytest.raises(EngineDeadError, match="killed by signal 9"):
                    await asyncio.wait_for(read_on(stream), 20)
            assert manager.health() == float("inf")
            with pytest.raises(EngineDeadError):
                await anext(manager.generate(spec()))
        assert len(reasons) == 1

    asyncio.run(main())
    assert new_children(before) == []


@pytest.fixture
def short_path():
    """A folder whose path leaves room for the names of sockets; pytest's own may be too long."""
    with tempfile.TemporaryDirectory(prefix="ty-") as folder:
        yield Path(folder)


@pytest.mark.part(2)
@pytest.mark.parametrize(
    ("options", "reason"),
    [({"max_total_tokens": 1, "page_size": 2}, "does not hold one page"), ({"colour": "red"}, "colour")],
)
def test_an_engine_that_cannot_start_says_why(options, reason, monkeypatch, short_path, before):
    monkeypatch.setattr("tempfile.tempdir", str(short_path))

    async def main():
        with pytest.raises(TokenyardError, match=reason):
            async with running_engine(mock_config(**options)):
                pass

    asyncio.run(main())
    assert new_children(before) == []
    assert list(short_path.iterdir()) == []


@pytest.mark.slow
def test_a_device_that_stays_broken_ends_the_engine_and_clients_get_the_reason(monkeypatch):
    monkeypatch.setitem(CHILD_MODULES, "scheduler", "tests.engine.broken_child")
    monkeypatch.setattr(supervisor, "RESTART_PAUSES_S", (0.0, 0.1))
    reasons = []

    async def main():
        async with running_engine(mock_config(), reasons.append) as manager:
            with pytest.raises(EngineDeadError, match="the scheduler failed: the device is on fire"):
                await asyncio.wait_for(collect(manager, spec()), 20)

    asyncio.run(main())
    assert reasons == ["the scheduler failed: the device is on fire"]


class Heard:
    def __init__(self):
        self.reported = []

    def rank_abandoned(self, rank):
        self.reported.append(f"rank {rank}")

    def engine_dead(self, reason):
        self.reported.append(reason)


@pytest.mark.parametrize(("together", "reported"), [(False, "rank 1"), (True, "it cannot load")])
def test_ranks_that_compute_together_end_with_the_first_that_is_given_up(together, reported):
    heard = Heard()
    watched = supervisor.Supervisor(replace(mock_config(), ranks=2, enable_dp_attention=together), None)
    watched.watch(heard)
    watched.give_up(1, "it cannot load")
    assert heard.reported == [reported]


def test_a_child_that_dies_before_it_gets_its_task_is_one_that_did_not_start(monkeypatch):
    """The pipe to it is closed then. uvloop refuses to write to it, where asyncio only warns."""
    uvloop = pytest.importorskip("uvloop")
    begin = asyncio.create_subprocess_exec

    async def begin_and_wait(*command, **options):
        process = await begin(*command, **options)
        await process.wait()
        while not process.stdin.is_closing():
            await asyncio.sleep(0.001)
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", begin_and_wait)
    monkeypatch.setitem(CHILD_MODULES, "scheduler", "keyword")
    watched = supervisor.Supervisor(mock_config(skip_tokenizer=True), SimpleNamespace(path="nowhere"))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, pytest.raises(EngineDeadError, match="report"):
        runner.run(watched.start())


PARENT = """
import asyncio, sys
from tests.engine.engines import mock_config, one_for_many
from tokenyard.engine.processes.launch import running_engine
async def main():
    async with running_engine(mock_config(skip_tokenizer=sys.argv[1] == "ids")):
        print("up", flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""


@pytest.mark.part(2)
@pytest.mark.parametrize("mode", ["text", "ids"])
def test_children_and_sockets_are_gone_after_the_parent_is_killed(mode, short_path):
    environment = {**os.environ, "TMPDIR": str(short_path), "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen([sys.executable, "-c", PARENT, mode], stdout=subprocess.PIPE, env=environment, cwd=ROOT)
    assert parent.stdout.readline() == b"up\n"
    children = psutil.Process(parent.pid).children()
    assert len(children) == (2 if mode == "text" else 1)
    assert len(list(short_path.iterdir())) == 1
    parent.kill()
    parent.wait()
    parent.stdout.close()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert alive == []
    assert list(short_path.iterdir()) == []
