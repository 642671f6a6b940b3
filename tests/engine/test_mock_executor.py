"""What only the mock promises: its clock, its eos rule, and the watch it keeps over KV pages."""

import time

import numpy as np
import pytest

from tests.contract.plans import all_pages, chunk, decode, run
from tokenyard.base import ConfigError, SamplingParams
from tokenyard.executor.kv_ownership_check import KvMismatchError
from tokenyard.executor.mock import load_executor

PROMPT = [5, 6, 7, 8]


def make(**options):
    return load_executor(
        **{
            "vocab_size": 100,
            "max_total_tokens": 64,
            "max_pool_rows": 4,
            "step_ms": 0.0,
            "page_size": 2,
            "check_kv": True,
            **options,
        }
    )


def prefill(executor, row, first_page, prompt=PROMPT, **options):
    return run(executor, chunk(0, row, prompt, 0, len(prompt), pages=all_pages(4, first_page), **options))


def test_a_page_given_to_two_rows_is_noticed():
    executor = make()
    prefill(executor, 0, 1)
    prefill(executor, 1, 2, prompt=[9, 9, 9, 9])
    with pytest.raises(KvMismatchError, match="another history at position 2"):
        run(executor, decode(1, [0], [4]))


def test_a_shared_prefix_is_fine():
    executor = make()
    first = prefill(executor, 0, 1).tokens.tolist()
    plan = chunk(1, 1, PROMPT, 2, 2, pages=[(0, 1), (1, 9), (2, 10)])
    assert run(executor, plan).tokens.tolist() == first


def test_a_prefix_of_another_history_is_noticed():
    executor = make()
    prefill(executor, 0, 1)
    with pytest.raises(KvMismatchError, match="1 of 4 slots"):
        run(
            executor,
            chunk(1, 1, [5, 9, 7, 8], 2, 2, pages=[(0, 1), (1, 9)]),
        )


def test_two_writers_of_one_slot_in_one_step_are_noticed():
    executor = make()
    prefill(executor, 0, 1)
    prefill(executor, 1, 9, prompt=[1, 2, 3, 4])
    with pytest.raises(KvMismatchError, match="row 0 finds another history at position 4"):
        run(executor, decode(1, [0, 1], [4, 4], pages=[(0, 2, 20), (1, 2, 20)]))


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (chunk(0, 3, PROMPT, 0, 4, pages=[(0, 1)]), "no page for some of its 4"),
        (chunk(0, 3, PROMPT, 0, 4, pages=[(0, 99)]), "page ids"),
        (decode(0, [2], [4]), "before any RowStart"),
        (chunk(0, 0, [5, 6, 7, 1], 2, 2, first=0), "history has 8"),
        (decode(0, [0], [7]), "only 5 of its tokens"),
        (decode(0, [0], [3]), "last sampled token at position 3"),
    ],
)
def test_wrong_plans_are_named(plan, words):
    executor = make()
    prefill(executor, 0, 1)
    with pytest.raises(KvMismatchError, match=words):
        run(executor, plan)


def test_the_check_changes_no_token():
    def tokens(**options):
        executor = make(**options)
        found = prefill(executor, 0, 1).tokens.tolist()
        return found + [int(run(executor, decode(i, [0], [3 + i])).tokens[0]) for i in range(1, 4)]

    assert tokens(check_kv=True) == tokens(check_kv=False)


def test_seed_matters_unless_greedy():
    def first(seed, temperature):
        sampling = SamplingParams(seed=seed, temperature=temperature)
        return int(prefill(make(vocab_size=10**6), 0, 1, sampling=sampling).tokens[0])

    assert first(1, 1.0) == first(1, 1.0) != first(2, 1.0)
    assert first(1, 0.0) == first(2, 0.0)


def test_eos_comes_once_at_the_length_the_rule_says():
    executor = make(answer_tokens=(3, 3), eos_token_ids=(2, 50))
    found = prefill(executor, 0, 1).tokens.tolist()
    found += [int(run(executor, decode(i, [0], [3 + i])).tokens[0]) for i in range(1, 5)]
    assert [token in (2, 50) for token in found] == [False, False, True, False, False]


def test_min_new_tokens_holds_eos_back():
    executor = make(answer_tokens=(1, 1))
    sampling = SamplingParams(temperature=0.0, min_new_tokens=2)
    found = prefill(executor, 0, 1, sampling=sampling).tokens.tolist()
    found += [int(run(executor, decode(i, [0], [3 + i])).tokens[0]) for i in range(1, 3)]
    assert found.index(2) == 2


def test_the_device_runs_steps_one_after_another():
    executor = make(step_ms=60_000.0, sleep=False)
    tickets = [
        executor.launch(chunk(0, 0, PROMPT, 0, 4, pages=all_pages(4))),
        executor.launch(decode(1, [0], [4])),
    ]
    assert tickets[1].done_ns - tickets[0].done_ns == 60_000_000_000
    assert [executor.collect(ticket).seconds for ticket in tickets] == [60.0, 60.0]


def test_collecting_waits_for_the_device():
    begin = time.monotonic_ns()
    prefill(make(step_ms=20.0), 0, 1)
    assert time.monotonic_ns() - begin >= 20_000_000


def test_without_sleep_the_reported_time_stays():
    executor = make(step_ms=3_600_000.0, sleep=False)
    assert prefill(executor, 0, 1).seconds == 3600.0


@pytest.mark.parametrize(
    "options",
    [
        {"vocab_size": 1},
        {"step_ms": -1.0},
        {"max_total_tokens": 1},
        {"answer_tokens": (0, 3)},
        {"answer_tokens": (3, 2)},
    ],
)
def test_impossible_options_are_refused(options):
    with pytest.raises(ConfigError):
        make(**options)


def test_many_rows_cost_few_calls():
    executor = make(max_pool_rows=300, check_kv=False)
    plan = decode(0, range(300), [4] * 300)
    tokens = run(executor, plan).tokens
    assert tokens.dtype == np.int32
    assert not np.isin(tokens, executor.info.eos_token_ids).any()
