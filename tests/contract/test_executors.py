"""What every executor must do, whatever runs underneath."""

import time
from pathlib import Path

import numpy as np
import pytest

from tests.contract.plans import ALL_LOGPROBS, all_pages, chunk, decode, run
from tokenyard.base import StepWork, TokenyardError
from tokenyard.cost import get_profile
from tokenyard.cost.calibration import quick_calibration
from tokenyard.executor.mock import load_executor as load_mock

PROMPT = list(range(10, 27))


DEMO_MODEL = Path(__file__).resolve().parents[2] / "tokenyard" / "demo_model"


def make_mock(page_size):
    return load_mock(
        vocab_size=1000, page_size=page_size, max_total_tokens=256, max_pool_rows=4, step_ms=0.0, check_kv=True
    )


def make_torch(page_size):
    pytest.importorskip("torch", reason="the package torch is not installed")
    from tokenyard.executor.model_loader import load_executor

    return load_executor(
        str(DEMO_MODEL), device="cpu", dtype="float32", page_size=page_size, max_total_tokens=256, max_pool_rows=4
    )


def make_checked(page_size):
    """Torch once more, with backends that check every layer and every step."""
    pytest.importorskip("torch", reason="the package torch is not installed")
    from tests.executor.checked_backends import load_checked

    return load_checked(
        str(DEMO_MODEL), device="cpu", dtype="float32", page_size=page_size, max_total_tokens=256, max_pool_rows=4
    )


def make_virtual(page_size):
    """A model over two ranks that are threads."""
    pytest.importorskip("torch", reason="the package torch is not installed")
    from tests.executor.thread_ranks import load_virtual

    return load_virtual(
        str(DEMO_MODEL), 2, device="cpu", dtype="float32", page_size=page_size, max_total_tokens=256, max_pool_rows=4
    )


MAKERS = {"mock": make_mock, "torch": make_torch, "checked": make_checked, "virtual": make_virtual}
CASES = [f"{name}-page{size}" for name in MAKERS for size in (1, 4)]


@pytest.fixture(params=[*CASES, "divided", "stages"])
def executor(request):
    if request.param in ("divided", "stages"):
        yield request.getfixturevalue(request.param)
        return
    name, _, page_size = request.param.partition("-page")
    executor = MAKERS[name](int(page_size))
    yield executor
    executor.close()


def two_processes(**size):
    pytest.importorskip("torch", reason="the package torch is not installed")
    from tokenyard.executor.distributed.distributed_loader import load_executor

    options = {"device": "cpu", "dtype": "float32", "page_size": 4, "max_total_tokens": 256, "max_pool_rows": 4}
    executor = load_executor(str(DEMO_MODEL), **size, **options)
    yield executor
    executor.close()


@pytest.fixture(scope="module")
def divided():
    """Two processes, which take seconds to start, so that all tests share them."""
    yield from two_processes(tp_size=2)


@pytest.fixture(scope="module")
def stages():
    yield from two_processes(pp_size=2)


def pages_for(executor, tokens, first=1):
    return all_pages(-(-tokens // executor.info.page_size), first)


def answer(executor, row, chunk_sizes, tokens, first_page):
    """Prefill PROMPT in chunks and decode: the sampled tokens."""
    pages = pages_for(executor, len(PROMPT) + tokens, first_page)
    start, found = 0, []
    for i, size in enumerate(chunk_sizes):
        plan = chunk(i, row, PROMPT, start, size, first=0, pages=pages if not start else ())
        found = run(executor, plan).tokens.tolist()
        start += size
    for i in range(tokens - 1):
        plan = decode(len(chunk_sizes) + i, [row], [len(PROMPT) + i], delay_sampling=bool(i % 2))
        found += run(executor, plan).tokens.tolist()
    return found


def test_chunks_and_rows_do_not_change_the_answer(executor):
    whole = answer(executor, 0, [17], 6, first_page=1)
    assert len(whole) == 6
    assert all(0 <= token < executor.info.vocab_size for token in whole)
    assert answer(executor, 1, [5, 9, 3], 6, first_page=40) == whole


def test_a_chunk_that_samples_nothing_answers_minus_one(executor):
    plan = chunk(0, 0, PROMPT, 0, 8, pages=pages_for(executor, 8))
    assert run(executor, plan).tokens.tolist() == [-1]


def test_steps_in_flight_read_each_others_tokens(executor):
    alone = answer(executor, 0, [17], 3, first_page=1)
    pages = pages_for(executor, 20, first=40)
    plans = [chunk(0, 2, PROMPT, 0, 17, pages=pages), decode(1, [2], [17]), decode(2, [2], [18])]
    tickets = [executor.launch(plan) for plan in plans]
    assert [executor.collect(ticket).tokens.tolist()[0] for ticket in tickets] == alone


def test_a_resumed_row_repeats_itself(executor):
    tokens = answer(executor, 0, [17], 4, first_page=1)
    known = PROMPT + tokens[:2]
    plan = chunk(9, 1, known, 0, len(known), pages=pages_for(executor, 24, first=40))
    plan.row_starts[0].prompt_tokens = len(PROMPT)
    assert run(executor, plan).tokens.tolist() == tokens[2:3]


def test_results_carry_step_and_seconds(executor):
    result = run(executor, chunk(7, 0, PROMPT, 0, 17, pages=pages_for(executor, 17)))
    assert result.step == 7
    assert result.seconds >= 0.0
    assert result.tokens.dtype == np.int32


def test_logprobs_cover_the_prompt_and_the_sampled_token(executor):
    pages = pages_for(executor, 20)
    first = run(executor, chunk(0, 0, PROMPT, 0, 8, first=0, pages=pages, logprobs=ALL_LOGPROBS)).logprobs
    rest = run(executor, chunk(1, 0, PROMPT, 8, 9, first=0)).logprobs
    assert (first[0].position, first[0].tokens) == (1, PROMPT[1:9])
    assert rest[0].position == 9
    assert rest[0].tokens[:-1] == PROMPT[9:]
    assert len(rest[0].logprobs) == len(rest[0].top_tokens) == 9
    assert all(value <= 0.0 for value in rest[0].logprobs)
    assert all(len(best) == 2 and best == sorted(best, reverse=True) for best in rest[0].top_logprobs)


def test_collecting_an_unsampled_step_is_refused(executor):
    run(executor, chunk(0, 0, PROMPT, 0, 17, pages=pages_for(executor, 20)))
    ticket = executor.launch(decode(1, [0], [17], delay_sampling=True))
    with pytest.raises(TokenyardError, match="before it was sampled"):
        executor.collect(ticket)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_prompts_vector_does_not_depend_on_its_chunks(executor, pooling):
    def vector(row, sizes, first_page):
        start, found = 0, []
        pages = pages_for(executor, len(PROMPT), first_page)
        for i, size in enumerate(sizes):
            plan = chunk(i, row, PROMPT, start, size, first=0, pages=pages if not start else (), sampled=False)
            for begun in plan.row_starts:
                begun.pooling = pooling
            found.append(run(executor, plan).vectors)
            start += size
        assert found[:-1] == [{}] * (len(sizes) - 1)
        return np.frombuffer(found[-1][0], np.float32)

    whole = vector(0, [17], 1)
    assert len(whole) > 1
    assert whole.any()
    assert vector(1, [5, 9, 3], 40) == pytest.approx(whole, abs=1e-4)
    plan = chunk(9, 0, PROMPT, 0, 17, pages=pages_for(executor, 17))
    assert run(executor, plan).vectors == {}


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 4])
def test_steps_that_measure_a_device_leave_no_trace(page_size):
    executor = make_torch(page_size)
    before = answer(executor, 1, [17], 6, first_page=1)
    calibrated = quick_calibration(executor, get_profile("cpu", "demo").cost(), time.monotonic)
    assert calibrated.step(StepWork(tokens=1, rows=1, decode_rows=1)) > 0.0
    assert answer(executor, 1, [17], 6, first_page=1) == before
    assert answer(executor, 0, [5, 9, 3], 6, first_page=40) == before
    executor.close()
