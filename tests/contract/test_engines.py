"""An engine of several processes, one with two ranks, and one within this process: the same front, the same answers."""

import asyncio
from contextlib import aclosing

import pytest

from tests.engine.engines import mock_config, one_for_many
from tests.engine.test_engine import FOR_EVER, collect, spec, until
from tokenyard import LLM
from tokenyard.base import ConfigError, InvalidRequestError, LogprobOptions, SamplingParams
from tokenyard.engine.frontend.io_struct import GenerateReqInput
from tokenyard.engine.processes.in_process import engine_in_process
from tokenyard.engine.processes.launch import running_engine

PROMPT = "Once upon a time"


def two_ranks(config):
    """Each rank has as large a pool as the one rank of the others."""
    config.ranks = 2
    if "max_total_tokens" in config.executor_options:
        config.executor_options["max_total_tokens"] *= 2
    return running_engine(config)


ENGINES = {"processes": running_engine, "two ranks": two_ranks, "in process": engine_in_process}


@pytest.fixture(params=ENGINES, scope="module")
def in_engine(request):
    """Run `work(manager)` in one engine for all tests that leave it as they found it."""
    with one_for_many(ENGINES[request.param](mock_config())) as run:
        yield run


@pytest.fixture(params=ENGINES)
def with_engine(request):
    def run(work, **options):
        with one_for_many(ENGINES[request.param](mock_config(**options))) as run:
            return run(work)

    return run


def of_ids(count, *, seed=7, **options):
    sampling = SamplingParams(**{"max_new_tokens": 100, "ignore_eos": True} | options)
    return GenerateReqInput(input_ids=list(range(5, 5 + count)), sampling=sampling, seed=seed)


def answer_of(deltas):
    """What an answer was, however it came."""
    tokens = [token for delta in deltas for token in delta.token_ids]
    finish = deltas[-1].finish
    return "".join(delta.text for delta in deltas), tokens, finish.reason, finish.matched, finish.completion_tokens


def test_limits_and_refusals_are_the_same(with_engine):
    async def work(manager):
        (whole,) = await collect(manager, of_ids(20))
        assert (len(whole.token_ids), whole.finish.reason) == (45, "length")
        for wrong in (of_ids(65), of_ids(0), of_ids(3, logit_bias={10**6: 1.0}), of_ids(3, temperature=-1.0)):
            with pytest.raises(InvalidRequestError):
                await collect(manager, wrong)
        one, other = [await collect(manager, of_ids(3, seed=None)) for _ in range(2)]
        assert answer_of(one) != answer_of(other)
        assert answer_of(await collect(manager, of_ids(3))) == answer_of(await collect(manager, of_ids(3)))

    with_engine(work, max_total_tokens=64)


def test_control_is_the_same(with_engine):
    async def work(manager):
        async with aclosing(manager.generate(spec(tokens=FOR_EVER, rid="a"))) as deltas:
            await anext(deltas)
            assert not await manager.flush_cache()
            (explanation,) = await manager.explain("a")
            assert explanation.stage == "decode"
            assert await manager.start_profile()
            assert (await manager.snapshot())["running"] == 1
            await manager.abort("a")
            async for delta in deltas:
                last = delta
            assert (last.finish.reason, last.finish.cause) == ("abort", "cancelled")
        assert b"event loop" in await manager.stop_profile()
        await manager.set_policy("lpm", {})
        with pytest.raises(ConfigError, match="did you mean lpm"):
            await manager.set_policy("lmp", {})
        assert (await manager.snapshot())["policy"] == "lpm"

        async def flushed():
            return await manager.flush_cache()

        await until(flushed)
        await manager.pause()
        waiting = asyncio.create_task(collect(manager, spec()))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await manager.continue_()
        assert answer_of(await waiting) == answer_of(await collect(manager, spec()))

    with_engine(work)


def test_a_begun_answer_is_continued(in_engine):
    """Wherever it is cut: text, tokens, stop strings across the border, limits and usage are those of the whole."""

    async def work(manager):
        text = answer_of(await collect(manager, spec(PROMPT, tokens=30)))[0]
        stop = text[len(text) // 2 :][:7]
        assert text.index(stop) == len(text) // 2
        for options in (
            {},
            {"stop": [stop]},
            {"temperature": 1.0},
            {"stream": False},
            {"stream": False, "stop": [stop]},
        ):
            whole = await collect(manager, spec(PROMPT, tokens=30, **options))
            whole_text, whole_tokens, reason, matched, count = answer_of(whole)
            for cut in (1, 7, len(whole_tokens) // 2, len(whole_tokens) - 1):
                begun = await collect(manager, spec(PROMPT, tokens=30, output_ids=whole_tokens[:cut], **options))
                rest_text, rest_tokens, *end = answer_of(begun)
                assert rest_tokens == whole_tokens[cut:]
                assert whole_text.endswith(rest_text)
                assert end == [reason, matched, count]
                assert begun[0].completion_tokens > cut

    in_engine(work)


def test_logprobs_of_a_continued_answer_cover_only_the_new_tokens(in_engine):
    async def work(manager):
        options = {"logprobs": LogprobOptions(output=True, prompt_from=0), "tokens": 12}
        _, tokens, *_ = answer_of(await collect(manager, spec(PROMPT, **options)))
        begun = await collect(manager, spec(PROMPT, output_ids=tokens[:5], **options))
        assert [entry.token for delta in begun for entry in delta.logprobs] == tokens[5:]

    in_engine(work)


def test_a_complete_answer_ends_at_once_and_a_wrong_one_is_refused(in_engine):
    async def work(manager):
        _, tokens, *_ = answer_of(await collect(manager, spec(PROMPT, tokens=8)))
        (end,) = await collect(manager, spec(PROMPT, tokens=8, output_ids=tokens))
        assert (end.token_ids, end.finish.reason, end.finish.completion_tokens) == ([], "length", 8)
        for wrong in ({"output_ids": [10**6]}, {"output_ids": [[1], [2]]}, {"output_ids": tokens, "n": 2}):
            with pytest.raises(InvalidRequestError):
                await collect(manager, spec(PROMPT, **wrong))

    in_engine(work)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.0, "frequency_penalty": 1.5, "presence_penalty": 1.0},
        {"temperature": 0.9, "repetition_penalty": 1.4, "min_new_tokens": 20},
    ],
)
def test_a_continued_answer_equals_the_uninterrupted_one(torch_engine, sampling):
    """Seeds and penalties count from the first token, those that the request brought with it included."""

    def answer(cut=0, tokens=()):
        params = SamplingParams(max_new_tokens=24, **sampling)
        made = GenerateReqInput(text=PROMPT, sampling=params, seed=11, output_ids=list(tokens[:cut]) or None)
        return torch_engine(made)

    _, tokens, *end = answer_of(answer())
    for cut in (1, 9, len(tokens) - 1):
        _, rest, *rest_end = answer_of(answer(cut, tokens))
        assert rest == tokens[cut:]
        assert rest_end == end


@pytest.fixture(scope="module")
def torch_engine():
    """Answers specs by the demo model on the CPU."""
    with LLM(device="cpu", dtype="float32", max_total_tokens=512, threads=1) as llm:
        yield lambda spec: llm.run(collect(llm.manager, spec)).result()


def test_what_a_page_shows_is_the_same(in_engine):
    async def work(manager):
        async with aclosing(manager.generate(spec(tokens=FOR_EVER, rid="a", tenant="acme"))) as deltas:
            await anext(deltas)
            await manager.watch(prefixes=False, bins=240)
            async for _ in deltas:
                views = await manager.watch(prefixes=True, bins=240)
                if any(view["bins"] for view in views):
                    break
        (row,) = [row for view in views for row in view["rows"]]
        (group,) = [group for view in views for group in view["groups"]]
        assert (manager.rid_of(row["number"]), row["state"], row["tenant"]) == ("a", "running", "acme")
        assert (group["requests"], group["tenant"]) == (1, "acme")
        for view in views:
            kv = view["kv"]
            assert kv["total"] == sum(tokens for owner, tokens in kv.items() if owner != "total")
            assert view["counters"]["policy"] == "fcfs"
        assert sum(one["decode"] for view in views for one in view["bins"]) > 0

    in_engine(work)
