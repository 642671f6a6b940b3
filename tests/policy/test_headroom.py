from dataclasses import replace

import numpy as np
import pytest

from tests.policy.timed_scheduler import make_clocked, prompt
from tests.policy.waiting_order import row
from tokenyard.base import ConfigError, SchedulerSettings
from tokenyard.policy.headroom import (
    DEFAULT_OUTPUT_TOKENS,
    POOL_SHARE,
    HistoryHeadroom,
    NoHeadroom,
    PastFutureHeadroom,
    create_headroom,
)


def views_of(yard):
    return yard.scheduler.state.views(yard.now)


def running(prompts, max_new=500, **settings):
    """A yard in which requests with these prompt lengths have their first token."""
    yard = make_clocked(schedule_policy="fcfs", enable_mixed_chunk=True, **settings)
    numbers = [yard.submit(prompt(tokens), max_new=max_new) for tokens in prompts]
    yard.turn()
    assert len(yard.scheduler.state.running) == len(prompts)
    return yard, numbers


def test_history_holds_back_the_mean_residual_length_for_each_decode_and_newcomer():
    yard, _ = running([10, 10])
    newcomer = yard.submit(prompt(10), max_new=500)
    headroom, views = HistoryHeadroom(), views_of(yard)
    assert headroom.running_tokens(views) == 2 * DEFAULT_OUTPUT_TOKENS
    for output in (10, 30):
        headroom.finished(output)
    # E[o^2] / (2 E[o]) = (100 + 900) / (2 * 40)
    assert headroom.running_tokens(views) == 2 * 12
    assert headroom.newcomer_tokens(views.columns, row(yard, newcomer)) == 12


def test_history_predicts_no_growth_beyond_the_limit_of_a_request():
    yard, _ = running([10, 10], max_new=5)
    assert HistoryHeadroom().running_tokens(views_of(yard)) == 2 * 4


def test_history_discards_old_samples():
    headroom = HistoryHeadroom()
    for _ in range(1000):
        headroom.finished(900)
    for _ in range(1000):
        headroom.finished(10)
    assert headroom.residual_tokens == 5


def test_past_future_holds_back_the_peak_of_the_forecast():
    yard, _ = running([100, 40])
    headroom, views = PastFutureHeadroom(), views_of(yard)
    for _ in range(50):
        headroom.finished(21)
    # Both have written 1 of 21 tokens: 20 more each, and both end in the same step.
    untouchable = int((1.0 - POOL_SHARE) * views.total_tokens)
    assert headroom.running_tokens(views) == 2 * 20 + untouchable


def test_past_future_counts_what_ends_before_the_peak():
    yard, numbers = running([100, 40])
    table = yard.scheduler.state.table
    table.limit[row(yard, numbers[0])] = 104
    headroom, views = PastFutureHeadroom(), views_of(yard)
    for _ in range(50):
        headroom.finished(201)
    # The first ends after 4 more of its tokens and gives back 101 and 4; until then both grow, later only one does:
    # 41 + 200 at its end is 99 above what is held, which exceeds 4 + 4 at the end of the first.
    assert headroom.running_tokens(views) - int((1.0 - POOL_SHARE) * views.total_tokens) == 241 - 142


def test_past_future_adds_newcomers_of_the_same_step_up():
    yard, _ = running([50])
    first, second = (row(yard, yard.submit(prompt(30), max_new=500)) for _ in range(2))
    headroom, views = PastFutureHeadroom(), views_of(yard)
    for _ in range(20):
        headroom.finished(11)
    headroom.running_tokens(views)
    alone = headroom.newcomer_tokens(views.columns, first)
    headroom.admitted(views.columns, first)
    assert alone == headroom.newcomer_tokens(views.columns, second)
    assert alone > 0


def test_a_forecast_does_not_flicker():
    yard, _ = running([50, 60, 70])
    headroom, views = PastFutureHeadroom(), views_of(yard)
    for output in range(1, 200):
        headroom.finished(output)
    assert headroom.running_tokens(views) == headroom.running_tokens(views)


def test_none_holds_nothing_back():
    yard, _ = running([10, 10])
    assert NoHeadroom().running_tokens(views_of(yard)) == 0


@pytest.mark.parametrize("headroom", ["ratio", "history", "past-future", "limit", "none"])
def test_every_headroom_drains_a_pool_that_is_too_small(headroom):
    yard = make_clocked(pages=400, rows=16, headroom=headroom, answer_tokens=(5, 60), enable_mixed_chunk=True)
    numbers = [yard.submit(prompt(20 + index), max_new=100) for index in range(24)]
    yard.rest()
    assert sorted(yard.finished) == numbers
    assert all(finish.reason != "abort" for finish in yard.finished.values())
    assert yard.scheduler.idle() is None


@pytest.mark.slow
def test_headroom_spares_retractions():
    retracted = {}
    for headroom in ("none", "history", "past-future", "limit"):
        yard = make_clocked(pages=600, rows=32, headroom=headroom, enable_mixed_chunk=True)
        for index in range(60):
            yard.submit(prompt(20 + index % 7), max_new=60)
        yard.rest()
        retracted[headroom] = yard.scheduler.snapshot(yard.now).counters.retracted
    assert retracted["history"] < retracted["none"] / 2
    assert retracted["past-future"] < retracted["none"] / 2
    assert retracted["limit"] == 0


def test_an_unknown_name_is_refused_with_the_choices():
    with pytest.raises(ConfigError, match="past-future"):
        create_headroom(replace(SchedulerSettings(), headroom="guess"))
    with pytest.raises(ConfigError, match="--headroom"):
        replace(SchedulerSettings(), headroom="guess").validate()


def test_growth_is_never_negative():
    headroom = PastFutureHeadroom()
    yard, _ = running([10])
    views = views_of(yard)
    views.running = np.empty(0, np.int32)
    assert headroom.running_tokens(views) == int((1.0 - POOL_SHARE) * views.total_tokens)
