"""Weights that change between steps: whose KV a request may use, and what its answer says of them."""

import random

import numpy as np
import pytest

from tests.scheduler.harness import Yard, make_info
from tokenyard.base import KvAvailable, KvLoaded, Pause, Resume, SchedulerSettings, WeightsUpdated
from tokenyard.executor.mock import FixedStepCost, MockExecutor

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]


class WeightsYard(Yard):
    """A yard whose executor changes its weights with the scheduler and checks that a row reads KV of its own only."""

    def __init__(self, *, pages=64, rows=8, page_size=4, **settings):
        info = make_info(pages, page_size, rows)
        executor = MockExecutor(info, FixedStepCost(0.001), sleep=False, check_kv=True)
        settings = SchedulerSettings(page_size=page_size, context_length=64, **settings)
        super().__init__(settings, info, executor=executor)

    def update(self, version, flush=True):
        while self.commit():
            pass
        self.executor.weights = version
        self.apply(WeightsUpdated(version, flush))


def test_a_newer_request_never_hits_kv_of_older_weights():
    yard = WeightsYard()
    for flush in (True, False):
        yard.submit(PROMPT)
        yard.run()
        yard.update(f"v{flush}#1", flush)
        number = yard.submit(PROMPT)
        yard.run()
        assert yard.finished[number].cached_tokens == 0
        again = yard.submit(PROMPT)
        yard.run()
        assert yard.finished[again].cached_tokens == 8


def test_kept_kv_is_hit_again_by_the_same_weights():
    yard = WeightsYard()
    yard.update("v1#1")
    yard.submit(PROMPT)
    yard.run()
    yard.update("v2#2", flush=False)
    yard.update("v1#1", flush=False)
    number = yard.submit(PROMPT)
    yard.run()
    assert yard.finished[number].cached_tokens == 8


def test_a_running_request_goes_on_and_says_which_weights_made_which_tokens():
    yard = WeightsYard()
    number = yard.submit(PROMPT, 12)
    for _ in range(4):
        yard.advance()
    yard.update("v2#2")
    made = len(yard.tokens[number])
    for _ in range(2):
        yard.advance()
    yard.update("v3#3")
    yard.run()
    finish = yard.finished[number]
    assert finish.weight_runs == [("", made), ("v2", 2), ("v3", 10 - made)]
    assert (finish.weight_version, finish.completion_tokens) == ("v3", 12)
    # Its KV is of three weights, so nobody hits it.
    for version in ("", "v2#2", "v3#3"):
        yard.update(version, flush=False)
        later = yard.submit(PROMPT + yard.tokens[number])
        yard.run()
        assert yard.finished[later].cached_tokens <= 8
    yard.check()


def test_requests_that_wait_are_computed_by_the_new_weights_alone():
    yard = WeightsYard()
    running = yard.submit(PROMPT, 8)
    for _ in range(3):
        yard.advance()
    yard.apply(Pause("retract"))
    yard.update("v2#2")
    yard.apply(Resume())
    yard.run()
    fresh = WeightsYard()
    fresh.executor.weights = "v2#2"
    same = fresh.submit(PROMPT + yard.tokens[running][:3], 5)
    fresh.run()
    assert len(yard.tokens[running]) == 8
    assert yard.finished[running].weight_runs == [("", 3), ("v2", 5)]
    assert len(fresh.tokens[same]) == 5


def test_kv_found_elsewhere_before_the_change_is_not_loaded():
    yard = WeightsYard(enable_hierarchical_cache=True)
    number = yard.submit(PROMPT, awaits_kv=True)
    yard.update("v2#2")
    yard.apply(KvAvailable(number, 8, 17))
    yard.run()
    assert yard.finished[number].completion_tokens == 4
    assert not any(move for move in yard.scheduler.drain_moves() if getattr(move, "number", 0) == number)


def test_kv_that_was_loaded_before_the_change_and_not_used_yet_is_computed_again():
    yard = WeightsYard(enable_hierarchical_cache=True)
    number = yard.submit(PROMPT, awaits_kv=True)
    yard.apply(KvAvailable(number, 8, -1))
    yard.launch()
    (load,) = yard.scheduler.drain_moves()
    yard.apply(KvLoaded(number, load.start + 8))
    yard.update("v2#2")
    yard.run()
    assert yard.finished[number].completion_tokens == 4


def test_no_change_while_a_plan_is_in_flight():
    yard = WeightsYard(max_in_flight=2)
    yard.submit(PROMPT)
    yard.launch()
    with pytest.raises(ValueError, match="between steps"):
        yard.apply(WeightsUpdated("v2#2"))


@pytest.mark.parametrize("seed", range(8))
def test_random_changes_leave_no_page_and_no_wrong_kv(seed):
    draw = random.Random(seed)
    depth = draw.choice((1, 2))
    yard = WeightsYard(
        pages=draw.choice((12, 40)),
        rows=6,
        page_size=draw.choice((1, 4)),
        max_in_flight=depth,
        chunked_prefill_size=draw.choice((-1, 8)),
        enable_mixed_chunk=draw.random() < 0.5,
        schedule_policy=draw.choice(("fcfs", "lpm")),
        enable_kv_events=draw.random() < 0.5,
        schedule_conservativeness=0.1,
        max_running_requests=4,
    )
    for step in range(60):
        match draw.randrange(6):
            case 0 | 1 | 2:
                yard.submit([*PROMPT[: draw.randint(1, 9)], draw.randrange(3, 90)], draw.randint(1, 8))
            case 3:
                yard.update(f"v{step}#{draw.randrange(3)}", draw.random() < 0.5)
            case 4:
                yard.apply(Pause(draw.choice(("in_place", "retract"))))
                yard.apply(Resume())
            case _:
                yard.advance(depth)
        yard.check()
        yard.check_hits()
    yard.run(depth)
    assert all(finish.reason in ("length", "stop", "abort") for finish in yard.finished.values())
    for finish in yard.finished.values():
        if finish.weight_runs:
            assert sum(tokens for _, tokens in finish.weight_runs) == finish.completion_tokens
    assert yard.scheduler.idle() is None
    assert np.all(yard.scheduler.state.table.numbers() == [])
