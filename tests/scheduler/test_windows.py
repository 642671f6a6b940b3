"""A group of layers with a window: its pages are freed behind rows, and hits need what the next token sees."""

import random

import numpy as np
import pytest

from tests.scheduler.harness import Yard, make_info
from tokenyard.base import Cancel, Pause, Resume, SamplingParams, SchedulerSettings, StopFound, WindowGroup
from tokenyard.cache import windows
from tokenyard.executor.mock import FixedStepCost, MockExecutor
from tokenyard.scheduler import Scheduler

WINDOW = 8


@pytest.fixture(autouse=True)
def small_margin(monkeypatch):
    monkeypatch.setattr(windows, "MARGIN_TOKENS", 2)


def make_yard(
    window_pages,
    tokens=400,
    page_size=1,
    keep_all=False,
    depth=1,
    answer_tokens=None,
    drafts=0,
    check_kv=True,
    **fields,
):
    """A yard whose device notices KV that is not a row's own."""
    group = None if keep_all else WindowGroup(WINDOW, window_pages)
    info = make_info(tokens // page_size, page_size, rows=8, context=240, windows=group)
    settings = SchedulerSettings(
        page_size=page_size,
        context_length=240,
        max_running_requests=6,
        max_in_flight=depth,
        **{"schedule_conservativeness": 0.1, "chunked_prefill_size": 16} | fields,
    )
    executor = MockExecutor(
        *(info, FixedStepCost(0.001)),
        sleep=False,
        answer_tokens=answer_tokens,
        check_kv=check_kv,
        drafts=drafts,
        draft_right=0.6,
    )
    return Yard(settings, info, executor=executor)


def hit_of(yard, prompt):
    number = yard.submit(prompt, max_new=1)
    yard.run()
    return yard.finished[number].cached_tokens


def prompt_of(seed, tokens):
    return np.random.default_rng(seed).integers(3, 90, tokens).tolist()


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_row_longer_than_the_window_pool_runs(page_size):
    yard = make_yard(window_pages=60 // page_size, page_size=page_size)
    number, seen = yard.submit(prompt_of(1, 120), max_new=80), 0
    while yard.advance():
        yard.check()
        assert yard.scheduler.state.memory.windows.users.sum() <= (WINDOW + 2 + 16) // page_size + 3
        measures = yard.scheduler.snapshot(yard.now).measures
        assert measures["window_kv_used_tokens"] <= measures["window_kv_tokens"]
        seen = max(seen, measures["window_kv_used_tokens"])
    assert seen >= WINDOW
    assert yard.scheduler.snapshot(yard.now).measures["window_kv_used_tokens"] == 0
    assert yard.finished[number].completion_tokens == len(yard.tokens[number]) > 1
    assert yard.scheduler.idle() is None


def test_a_hit_ends_where_the_window_before_it_is_there():
    yard = make_yard(window_pages=200)
    first = prompt_of(1, 60)
    yard.submit(first, max_new=40)
    yard.run()
    group = yard.scheduler.state.memory.windows
    assert hit_of(yard, first + prompt_of(2, 5)) == 60
    # No request ended at 30, and nothing was evicted yet: the middle of a prompt is a hit too.
    assert hit_of(yard, first[:30] + prompt_of(3, 5)) == 30
    # What was never an end goes first.
    group.evict(group.evictable - 60)
    assert hit_of(yard, first[:20] + prompt_of(4, 5)) == 0
    assert hit_of(yard, first + prompt_of(5, 5)) == 60
    group.evict(group.evictable)
    assert hit_of(yard, first + prompt_of(6, 5)) == 0
    assert yard.scheduler.idle() is None


def test_ends_of_turns_outlive_long_prompts():
    """vllm issue 48435: with room for their ends, sessions keep their hits next to longer prompts."""
    yard = make_yard(window_pages=180, tokens=2000)
    talks = {}
    for session in range(5):
        number = yard.submit(prompt_of(session, 30), max_new=20)
        yard.run()
        talks[session] = prompt_of(session, 30) + yard.tokens[number]
    for turn in range(3):
        yard.submit(prompt_of(100 + turn, 200), max_new=2)
        yard.run()
        for session, known in talks.items():
            number = yard.submit(known + prompt_of(1000 + turn, 6), max_new=10)
            yard.run()
            # All that has KV: the last token of an answer never has.
            assert yard.finished[number].cached_tokens == len(known) - 1
            talks[session] = known + prompt_of(1000 + turn, 6) + yard.tokens[number]
    assert yard.scheduler.idle() is None


def test_the_end_of_a_prompt_stays_a_hit():
    """A next turn whose template drops the answer's thoughts parts from the first one where its prompt ends."""
    yard = make_yard(window_pages=90, tokens=2000)
    yard.submit(prompt_of(1, 60), max_new=50)
    yard.run()
    yard.submit(prompt_of(2, 200), max_new=2)
    yard.run()
    assert hit_of(yard, prompt_of(1, 60) + prompt_of(3, 10)) == 60


def test_a_stop_string_found_late_leaves_a_hit():
    yard = make_yard(window_pages=100)
    number = yard.submit(prompt_of(1, 20), max_new=60)
    while len(yard.tokens.get(number, ())) < 30:
        yard.advance()
    known = prompt_of(1, 20) + yard.tokens[number][:28]
    yard.apply(StopFound(number, 28, "x"))
    yard.run()
    assert hit_of(yard, known + prompt_of(2, 4)) == len(known)


def test_a_prefix_that_was_put_into_the_tree_is_a_hit():
    # There was no KV to begin with, as in a forecast.
    yard = make_yard(window_pages=60, check_kv=False)
    memory = yard.scheduler.state.memory
    for ids in (prompt_of(1, 30), prompt_of(1, 45)):
        memory.insert_prefix(np.array(ids, np.int32))
        yard.check()
    assert hit_of(yard, [*prompt_of(1, 45), 5, 6]) == 45
    assert yard.scheduler.idle() is None


def test_a_group_of_windows_and_stores_below_exclude_each_other():
    info = make_info(windows=WindowGroup(WINDOW, 40))
    with pytest.raises(Exception, match="swa-full-tokens-ratio"):
        Scheduler(SchedulerSettings(enable_hierarchical_cache=True), info)


@pytest.mark.part(3)
@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 6))])
def test_random_traffic_gives_the_tokens_of_a_pool_that_keeps_all(seed):
    rng = random.Random(seed)
    page_size, depth = rng.choice([1, 4]), rng.choice([1, 2, 3])
    least = windows.min_window_pages(WINDOW, page_size)
    options = {
        "tokens": rng.choice([160, 240, 600]),
        "page_size": page_size,
        "depth": depth,
        "drafts": rng.choice([0, 0, 4]),
        "answer_tokens": (3, 60),
        "schedule_policy": rng.choice(["fcfs", "lpm", "priority"]),
        "enable_mixed_chunk": rng.random() < 0.5,
        "disable_radix_cache": rng.random() < 0.15,
        "chunked_prefill_size": rng.choice([8, 16, -1]),
        "enable_priority_scheduling": True,
        "priority_scheduling_preemption_threshold": 0,
    }
    kept = make_yard(0, keep_all=True, **options)
    yard = make_yard(least + rng.choice([0, 2, 20, 60]), **options)
    families = [prompt_of(family, 80) for family in range(3)]
    for _ in range(16):
        prompt = rng.choice(families)[: rng.randint(0, 80)] + prompt_of(rng.randint(0, 10**6), rng.randint(1, 30))
        n, urgent = rng.choice([1, 1, 1, 3]), rng.choice([0, 5])
        for one in (kept, yard):
            one.submit(
                prompt, max_new=40, priority=urgent, sampling=SamplingParams(max_new_tokens=40, temperature=0.0, n=n)
            )
        for _ in range(rng.randint(0, 12)):
            yard.advance(depth)
        if rng.random() < 0.1:
            yard.apply(Pause("retract"))
            yard.apply(Resume())
        if rng.random() < 0.1:
            number = rng.randint(1, yard.next_number - 1)
            kept.apply(Cancel([number]))
            yard.apply(Cancel([number]))
        yard.check()
    yard.run(depth)
    kept.run(depth)
    assert sorted(yard.finished) == sorted(kept.finished)
    for number, tokens in yard.tokens.items():
        others = kept.tokens.get(number, [])
        shorter = min(len(tokens), len(others))
        assert tokens[:shorter] == others[:shorter]
        if "abort" not in (yard.finished[number].reason, kept.finished[number].reason):
            assert tokens == others
    assert not [one for one in yard.finished.values() if one.cause == "no_memory"]
    assert yard.scheduler.idle() is None
