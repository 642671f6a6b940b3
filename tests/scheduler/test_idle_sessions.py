"""How many sessions there are, and what became of their KV while they were idle, whatever the policy."""

import pytest

from tests.policy.waiting_order import make_yard
from tests.scheduler.test_reuse_eviction import S, press, turn
from tokenyard.base import SessionEnded


def counting_yard(pages=300, **settings):
    yard = make_yard(pages=pages, headroom="none", **settings)
    yard.scheduler.state.counts_sessions = True
    return yard


def counts(yard):
    snapshot = yard.scheduler.snapshot(yard.now)
    measures = snapshot.measures
    return measures["active_sessions"], measures["resident_sessions"], snapshot.counters.evicted_sessions


@pytest.mark.parametrize("settings", [{}, {"schedule_policy": "session", "radix_eviction_policy": "reuse"}])
def test_sessions_are_active_then_resident_then_evicted(settings):
    yard = counting_yard(**settings)
    assert "active_sessions" not in yard.scheduler.snapshot(yard.now).measures or settings
    yard.submit([1] * 100, max_new=1, session="s1")
    assert counts(yard) == (1, 0, 0)
    yard.run()
    turn(yard, 2)
    assert counts(yard) == (0, 2, 0)
    press(yard)
    assert counts(yard) == (0, 1, 1)
    press(yard, 290)
    assert counts(yard) == (0, 0, 2)
    yard.apply(SessionEnded("s1"))
    yard.apply(SessionEnded("s2"))
    assert counts(yard) == (0, 0, 2)


def test_a_turn_learns_when_its_kv_was_evicted_and_for_which_request():
    yard = counting_yard()
    turn(yard, 1)
    turn(yard, 2)
    kept = yard.submit([2] * 100, max_new=1, session="s2")
    yard.run()
    yard.now += 5 * S
    at = yard.now
    number = yard.submit([9] * 150, max_new=1)
    yard.run()
    yard.now += 5 * S
    again = yard.submit([1] * 110, max_new=1, session="s1")
    yard.run()
    explanation = yard.scheduler.explain(kept, yard.now)
    assert (explanation.timings.evicted_tokens, explanation.evicted_for) == (0, [])
    explanation = yard.scheduler.explain(again, yard.now)
    assert explanation.timings.evicted_tokens == 100 - explanation.cached_tokens > 0
    assert at <= explanation.timings.evicted_ns < yard.now - 5 * S
    assert explanation.evicted_for == [number]


def misses(pages, others):
    """Tokens of a session that were evicted before its next turn, and by how many a pool of so many was too small."""
    yard = counting_yard(pages=pages)
    for token in (1, 2, *others):
        turn(yard, token, 70)
    again = yard.submit([1] * 110, max_new=1, session="s1")
    yard.run()
    timings = yard.scheduler.explain(again, yard.now).timings
    return timings.evicted_tokens, timings.pool_short_tokens


@pytest.mark.parametrize("pages", [200, 250, 300, 340])
def test_a_turn_learns_how_large_a_pool_would_have_kept_its_kv(pages):
    evicted, short = misses(pages, (3, 4, 5))
    assert evicted > 0
    assert misses(pages + short, (3, 4, 5)) == (0, 0)
    assert misses(pages + short - 1, (3, 4, 5))[0] > 0
    # What a larger pool would not have to compute again counts too.
    evicted, short = misses(pages, (3, 4, 5, 2, 3))
    assert misses(pages + short, (3, 4, 5, 2, 3)) == (0, 0)


def test_a_flush_evicts_too():
    yard = counting_yard()
    turn(yard, 1)
    yard.scheduler.flush(yard.now)
    assert counts(yard) == (0, 0, 1)
    again = yard.submit([1] * 110, max_new=1, session="s1")
    yard.run()
    assert yard.scheduler.explain(again, yard.now).timings.evicted_tokens == 100


def test_elsewhere_than_in_a_server_sessions_cost_nothing():
    yard = make_yard(pages=300, headroom="none")
    turn(yard, 1)
    assert yard.scheduler.state.sessions is None
