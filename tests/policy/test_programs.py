import pytest

from tests.policy.waiting_order import line, make_yard
from tokenyard.base import NS_PER_S, Pause, TurnEnded
from tokenyard.policy.prefill_time import PrefillTime
from tokenyard.policy.programs import MAX_PROGRAMS
from tokenyard.policy.return_times import KINDS
from tokenyard.scheduler.session_table import SessionTable


def yard_of(policy, **settings):
    return make_yard(rows=1, schedule_policy=policy, max_queued_requests=-1, headroom="none", **settings)


def serve(yard, session, tokens=4, max_new=2, tenant=""):
    number = yard.submit([5] * tokens, max_new=max_new, session=session, tenant=tenant)
    yard.run()
    return number


def busy(yard):
    yard.submit([9] * 3, max_new=500)
    yard.launch()
    yard.commit()


@pytest.mark.parametrize("policy", ["program-fcfs", "plas"])
def test_requests_without_a_session_go_by_arrival(policy):
    yard = yard_of(policy)
    busy(yard)
    numbers = [yard.submit([5 + index] * (9 - index)) for index in range(4)]
    assert line(yard) == numbers


def test_turns_go_by_the_arrival_of_their_session():
    yard = yard_of("program-fcfs")
    serve(yard, "old")
    serve(yard, "new")
    busy(yard)
    alone = yard.submit([6] * 4)
    new, other = yard.submit([6] * 4, session="new"), yard.submit([6] * 4, session="old", tenant="other")
    old = yard.submit([6] * 4, session="old")
    assert line(yard) == [old, new, alone, other]


@pytest.mark.parametrize("answer", [False, True])
def test_the_session_with_the_least_service_goes_first(answer):
    """Service is tokens of prompts that were computed, and of answers."""
    yard = yard_of("plas", disable_radix_cache=True)
    serve(yard, "much", 4 if answer else 60, 60 if answer else 2)
    serve(yard, "little", 8)
    busy(yard)
    much, little = yard.submit([6] * 4, session="much"), yard.submit([6] * 4, session="little")
    alone = yard.submit([6] * 4)
    assert line(yard) == [alone, little, much]


def test_what_was_cached_is_no_service():
    yard = yard_of("plas")
    for _ in range(6):
        serve(yard, "hits", 40, 1)
    serve(yard, "computes", 100, 1)
    busy(yard)
    computes, hits = yard.submit([6] * 4, session="computes"), yard.submit([6] * 4, session="hits")
    assert line(yard) == [hits, computes]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["program-fcfs", "plas"])
def test_sessions_that_are_remembered_are_bounded(policy):
    """The first session is forgotten after as many others, and starts over."""
    yard = yard_of(policy)
    serve(yard, "first", 8)
    for index in range(MAX_PROGRAMS):
        yard.submit([5], max_new=1, session=f"s{index}")
        if index % 512 == 511:
            yard.run()
    busy(yard)
    last, first = yard.submit([6] * 4, session=f"s{MAX_PROGRAMS - 1}"), yard.submit([6] * 4, session="first")
    assert line(yard) == ([last, first] if policy == "program-fcfs" else [first, last])


def started(yard, number, steps=3):
    for _ in range(steps):
        yard.launch()
        yard.commit()
    return number in yard.tokens


def pool_of(policy, pages=200, **options):
    around = {"prefill_max_requests": -1, "radix_eviction_policy": "reuse", "headroom": "none"}
    return make_yard(pages=pages, schedule_policy=policy, policy_options=options, **around)


def with_gaps(policy, gap_s, turns=8, **options):
    """A session with about 100 tokens in a pool of 200, idle since now after gaps of `gap_s`; another one decodes."""
    yard = pool_of(policy, **options)
    for turn in range(turns):
        yard.submit([7] * (90 + turn), max_new=2, session="s")
        yard.run()
        yard.apply(TurnEnded("s", "tool"))
        yard.now += round(gap_s * NS_PER_S) if turn < turns - 1 else 0
    yard.submit([9] * 20, max_new=70)
    started(yard, 0)
    return yard


def test_within_the_time_to_live_newcomers_leave_kv_alone():
    yard = with_gaps("continuum", 1.0, ttl_s=5.0)
    newcomer = yard.submit([5] * 90, max_new=2)
    assert not started(yard, newcomer)
    back = yard.submit([7] * 99, max_new=2, session="s")
    yard.now += 10 * NS_PER_S
    yard.run()
    assert yard.finished[back].cached_tokens >= 96
    assert yard.finished[newcomer].completion_tokens == 2


def test_after_the_time_to_live_they_take_it():
    yard = with_gaps("continuum", 1.0, ttl_s=5.0)
    yard.now += 6 * NS_PER_S
    assert started(yard, yard.submit([5] * 90, max_new=2))


def test_a_beginning_in_common_is_retained_once():
    yard = pool_of("continuum", ttl_s=100.0)
    for name, token in (("s", 8), ("t", 9)):
        yard.submit([7] * 100 + [token] * 10, max_new=2, session=name)
        yard.run()
    retained = yard.scheduler.state.sessions.retained_tokens(yard.now)
    assert sorted(retained) == [("", "s"), ("", "t")]
    assert sum(retained.values()) == 120


@pytest.mark.parametrize("ttl_s", [0.0, 5.0])
def test_the_best_time_to_live_is_asked_for_the_worth_of_the_context(ttl_s, monkeypatch):
    """The worth of a return is the time to compute the context, over the context's share of the pool."""
    asked = []

    def best_ttl_s(table, kind, worth_s):
        asked.append((kind, worth_s))
        return ttl_s

    monkeypatch.setattr(SessionTable, "best_ttl_s", best_ttl_s)
    yard = with_gaps("continuum", 1.0)
    assert started(yard, yard.submit([5] * 90, max_new=2)) is (ttl_s == 0.0)
    time = PrefillTime.of(yard.scheduler.state.cost)
    kind, worth_s = asked[-1]
    assert kind == KINDS["tool"]
    assert worth_s == pytest.approx(time.chunk_s(0, 97) * 200 / 97, rel=0.2)


def test_nothing_is_retained_while_nothing_runs():
    yard = pool_of("continuum", ttl_s=100.0)
    yard.submit([7] * 150, max_new=2, session="s")
    yard.run()
    assert started(yard, yard.submit([5] * 150, max_new=2))


def paused(idle_s=5.0):
    """Sessions "a" and "b" are active, with 80 tokens each in a pool of 200; "a" runs, "b" is idle."""
    yard = pool_of("pause-idle", idle_s=idle_s)
    yard.submit([8] * 80, max_new=2, session="b")
    yard.run()
    yard.submit([7] * 60, max_new=20, session="a")
    started(yard, 1)
    return yard


def test_a_session_waits_while_the_active_ones_fill_the_pool():
    yard = paused()
    waits = yard.submit([5] * 60, max_new=2, session="c")
    assert not started(yard, waits)
    back = yard.submit([8] * 84, max_new=2, session="b")
    assert started(yard, back)
    yard.run()
    assert yard.finished[back].cached_tokens >= 80
    assert yard.finished[waits].completion_tokens == 2


def test_a_session_that_is_idle_for_long_is_paused_for_it():
    yard = paused()
    yard.now += 6 * NS_PER_S
    assert started(yard, yard.submit([5] * 60, max_new=2, session="c"))
    assert not started(yard, yard.submit([8] * 84, max_new=2, session="b"))


def test_while_nothing_runs_an_idle_session_is_paused_at_once():
    yard = pool_of("pause-idle", idle_s=3600.0)
    yard.submit([8] * 150, max_new=2, session="b")
    yard.run()
    assert started(yard, yard.submit([5] * 150, max_new=2, session="c"))


def test_a_session_whose_request_is_held_back_makes_room():
    yard = pool_of("pause-idle", idle_s=3600.0)
    held = yard.submit([8] * 150, max_new=20, session="b")
    assert started(yard, held)
    yard.apply(Pause(numbers=[held]))
    assert started(yard, yard.submit([5] * 150, max_new=2, session="c"))


def test_requests_without_a_session_are_active_only_while_they_run():
    yard = pool_of("pause-idle", idle_s=3600.0)
    yard.submit([8] * 150, max_new=2)
    yard.run()
    yard.submit([9] * 20, max_new=30)
    started(yard, 1)
    assert started(yard, yard.submit([5] * 150, max_new=2))


def test_sessions_that_are_not_active_start_in_the_order_of_their_turns():
    """A small one that would fit waits behind a large one that does not."""
    yard = paused()
    large, small = (
        yard.submit([token] * tokens, max_new=2, session=f"{token}") for token, tokens in ((5, 60), (4, 10))
    )
    assert not started(yard, small)
    assert line(yard) == []
    yard.run()
    assert yard.finished[large].admitted_ns <= yard.finished[small].admitted_ns
