"""Records of paused requests: what a file holds, how it is damaged, and that an engine resumes from one."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from tests.engine.engines import mock_config
from tests.engine.test_engine import spec, until
from tests.engine.test_lost_schedulers import Reading, begun, read_whole
from tokenyard.base import LogprobOptions, Request, SamplingParams, TextOptions, TokenyardError
from tokenyard.engine.frontend import paused_requests as paused
from tokenyard.engine.frontend.paused_requests import PausedRequests, decode, encode, record_of, specs_of
from tokenyard.engine.frontend.streams import Stream
from tokenyard.engine.processes.launch import running_engine

ANSWER = {7: [11, 12, 13, 14]}


def stream(rid="x", n=1, **fields) -> Stream:
    """A paused request whose client has two of four tokens."""
    sampling = SamplingParams(max_new_tokens=9, n=n, seed=5, logit_bias={3: 1.5})
    made = Stream(Request(7, rid, np.array([1, 2, 3], np.int32), sampling, **fields), client=None)
    made.paused = True
    made.tokens[0] = [11, 12]
    return made


def test_a_record_is_the_request_and_its_progress():
    wanted = stream(text=TextOptions(stream=True), priority=3, deadline_ns=2_000_000, cache_salt="s", tenant="t")
    (made,) = specs_of(decode(encode(record_of(wanted, ANSWER, "m"))))
    assert (made.rid, made.seed, made.sampling.logit_bias) == ("x", 5, {3: 1.5})
    assert (list(made.input_ids), list(made.output_ids)) == ([1, 2, 3], ANSWER[7])
    assert (made.text_options.shown, made.text_options.stream) == (2, True)
    assert (made.priority, made.deadline_ms, made.cache_salt, made.tenant) == (3, 2.0, "s", "t")


def test_several_answers_are_several_requests_and_those_that_ended_none():
    wanted = stream(n=3)
    wanted.open_answers.discard(1)
    made = specs_of(record_of(wanted, {7: [1], 9: []}, "m"))
    assert [(one.rid, one.seed, one.sampling.n, len(one.output_ids)) for one in made] == [
        ("x-0", 5, 1, 1),
        ("x-2", 7, 1, 0),
    ]
    assert record_of(wanted, {}, "m") is None


def test_tokens_whose_logprobs_were_not_delivered_are_computed_again():
    (made,) = specs_of(record_of(stream(logprobs=LogprobOptions(output=True, prompt_from=0)), ANSWER, "m"))
    assert (list(made.output_ids), made.logprobs.prompt_from) == ([11, 12], -1)


async def kept(folder, model="m", **fields) -> PausedRequests:
    records = PausedRequests(str(folder), model)
    await records.keep(stream(**fields), ANSWER)
    return records


def test_records_are_found_again_and_removed(tmp_path):
    async def main():
        await kept(tmp_path, rid="a/b ü")
        (tmp_path / "1-1.tmp").write_bytes(b"half")
        found = PausedRequests(str(tmp_path), "m")
        assert list(found.rids) == ["a/b ü"]
        assert len(await found.specs("a/b ü")) == 1
        found.forget("a/b ü", resumed=True)
        assert not list(tmp_path.iterdir())
        with pytest.raises(TokenyardError, match="never paused") as refusal:
            await found.specs("a/b ü")
        assert refusal.value.code == "request_not_found"

    asyncio.run(main())


def test_a_request_that_resumes_while_its_record_is_written_has_none(tmp_path):
    async def main():
        records = PausedRequests(str(tmp_path), "m")
        wanted = stream()
        writing = asyncio.create_task(records.keep(wanted, ANSWER))
        await asyncio.sleep(0)
        wanted.paused = False
        await writing
        assert not records.rids
        assert not list(tmp_path.iterdir())

    asyncio.run(main())


def test_the_oldest_record_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(paused, "MAX_RECORDS", 2)

    async def main():
        records = PausedRequests(str(tmp_path), "m")
        for rid in "abca":
            await records.keep(stream(rid=rid), ANSWER)
        assert list(records.rids) == ["c", "a"]
        assert records.counters.displaced == 2

    asyncio.run(main())


def newer(data: bytes) -> bytes:
    return data[:8] + (2).to_bytes(4, "little") + data[12:]


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda data: data[:-1], "cut short"),
        (lambda data: data[:20], "cut short"),
        (lambda data: b"", "cut short"),
        (lambda data: b"no record" + data, "no record"),
        (newer, "version 2"),
    ],
)
def test_incomplete_records_are_counted_and_left_alone(tmp_path, caplog, spoil, why):
    async def main():
        await kept(tmp_path)
        (path,) = tmp_path.iterdir()
        path.write_bytes(spoil(path.read_bytes()))
        records = PausedRequests(str(tmp_path), "m")
        assert (list(records.rids), records.counters.unusable) == ([], 1)
        assert why in caplog.text
        assert path.exists()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("spoil", "model", "why"),
    [(lambda data: data[:-1] + bytes([data[-1] ^ 1]), "m", "damaged"), (lambda data: data, "other", "another model")],
)
def test_what_is_wrong_inside_is_found_when_it_is_resumed(tmp_path, spoil, model, why):
    async def main():
        await kept(tmp_path)
        (path,) = tmp_path.iterdir()
        path.write_bytes(spoil(path.read_bytes()))
        records = PausedRequests(str(tmp_path), model)
        with pytest.raises(TokenyardError, match=why) as refusal:
            await records.specs("x")
        assert (refusal.value.code, records.counters.unusable) == ("request_not_found", 1)

    asyncio.run(main())


def test_an_adapter_that_is_not_loaded_is_an_error(tmp_path):
    async def main():
        records = await kept(tmp_path, lora="mine#1")
        with pytest.raises(TokenyardError, match="'mine' is not loaded"):
            await records.specs("x")

    asyncio.run(main())


def test_a_folder_that_cannot_be_written_costs_the_record_only(tmp_path):
    async def main():
        (tmp_path / "file").write_bytes(b"")
        records = await kept(tmp_path / "file")
        assert (list(records.rids), records.counters.failed) == ([], 1)

    asyncio.run(main())


def on_disk(config, folder):
    """The settings with a store in a folder."""
    more = {"enabled": True, "backend": "disk", "folder": str(folder), "max_gb": 0.1, "min_free_gb": 0.0}
    config.kv_store = replace(config.kv_store, **more)
    config.scheduler = replace(config.scheduler, enable_hierarchical_cache=True)
    return config


async def paused_reading(manager, wanted) -> Reading:
    """An answer that is paused in its midst, and what came of it."""
    reading = Reading(manager, wanted)
    if wanted.text_options.stream:
        await begun(reading)
    else:
        await until(lambda: _decodes(manager))
    assert await manager.pause_request(wanted.rid)
    return reading


async def _decodes(manager) -> bool:
    return (await manager.snapshot())["counters"]["generated_tokens"] > 20


@pytest.mark.part(3)
@pytest.mark.parametrize("kind", ["streamed", "whole", "several"])
def test_an_engine_resumes_what_an_earlier_one_paused(tmp_path, kind):
    options = {"tokens": 120, "rid": "held", "temperature": 1.0, "stream": kind != "whole"}
    options |= {"n": 2} if kind == "several" else {}

    def config():
        return on_disk(mock_config(step_ms=3.0), tmp_path)

    async def first():
        async with running_engine(config()) as manager:
            expected = await read_whole(manager, **{**options, "rid": "whole"})
            reading = await paused_reading(manager, spec(**options))
            assert list(manager.records.rids) == ["held"]
            assert (await manager.snapshot())["paused_requests"]["kept"] == 1
            reading.task.cancel()
            await asyncio.gather(reading.task, return_exceptions=True)
            return expected, reading

    async def second():
        async with running_engine(config()) as manager:
            return [await read_whole_of(manager, one) for one in await manager.records.specs("held")]

    expected, before = asyncio.run(first())
    after = asyncio.run(second())
    for index, rest in enumerate(after):
        assert before.tokens(index) + rest.tokens() == expected.tokens(index)
        assert before.text(index) + rest.text() == expected.text(index)
        assert rest.ends()[0] == expected.ends()[index]
    assert any(rest.tokens() for rest in after)


async def read_whole_of(manager, wanted) -> Reading:
    reading = Reading(manager, wanted)
    await asyncio.wait_for(reading.task, 40)
    return reading


def test_a_request_that_resumes_or_ends_has_no_record_any_more(tmp_path):
    async def main():
        async with running_engine(on_disk(mock_config(step_ms=3.0), tmp_path)) as manager:
            expected = await read_whole(manager, tokens=60)
            for verb in (manager.resume_request, manager.abort):
                reading = await paused_reading(manager, spec(tokens=60, rid="held"))
                assert "held" in manager.records.rids
                await verb("held")
                assert not manager.records.rids
                await asyncio.wait_for(reading.task, 20)
                if verb == manager.resume_request:
                    assert reading.tokens() == expected.tokens()
            assert not list((tmp_path / "paused").iterdir())

    asyncio.run(main())
