import numpy as np
import pytest

from tests.policy.waiting_order import make_yard, row
from tokenyard.base import NS_PER_S, SessionEnded, TurnEnded
from tokenyard.policy.return_times import BORDERS_S, KINDS, CheckedReturnTimes, ReturnTimes
from tokenyard.scheduler import RowState
from tokenyard.scheduler.session_table import MAX_NAME_BYTES, MAX_SESSIONS

S = NS_PER_S


def index(returns, kind, *idle_s):
    kinds = np.full(len(idle_s), KINDS[kind], np.int32)
    return returns.index(kinds, (np.array(idle_s) * S).astype(np.int64)).tolist()


def test_the_index_falls_once_most_sessions_would_have_come_back():
    returns = ReturnTimes()
    for _ in range(200):
        returns.came_back(KINDS["tool"], 4 * S)
    for _ in range(50):
        returns.lost(KINDS["tool"], 3000 * S)
    fresh, soon, late = index(returns, "tool", 0.0, 3.0, 60.0)
    assert fresh > 1 / 60
    assert soon > fresh
    assert late < 1 / 60


@pytest.mark.parametrize(("worth_s", "least_s", "most_s"), [(1.0, 0.0, 0.0), (30.0, 4.0, 8.0), (5000.0, 500.0, 1200.0)])
def test_the_best_time_to_live_grows_with_what_a_return_saves(worth_s, least_s, most_s):
    """Half of the sessions are back after 4 s, a quarter after 500 s."""
    returns = ReturnTimes()
    for _ in range(100):
        returns.came_back(KINDS["tool"], 4 * S)
        returns.came_back(KINDS["tool"], 4 * S)
        returns.came_back(KINDS["tool"], 500 * S)
        returns.lost(KINDS["tool"], 3000 * S)
    assert least_s <= returns.best_ttl_s(KINDS["tool"], worth_s) <= most_s


def test_kinds_of_stops_are_told_apart_and_new_gaps_replace_old_ones():
    returns = ReturnTimes()
    for _ in range(300):
        returns.came_back(KINDS["tool"], 2 * S)
        returns.came_back(KINDS["user"], 500 * S)
    tool, user = index(returns, "tool", 1.0)[0], index(returns, "user", 1.0)[0]
    assert tool > 10 * user
    for _ in range(30_000):
        returns.came_back(KINDS["tool"], 500 * S)
    assert index(returns, "tool", 1.0)[0] == pytest.approx(user, rel=0.5)


@pytest.mark.parametrize("scrambled", [False, True])
def test_predictions_that_are_wrong_give_way_until_they_are_right_again(scrambled):
    """Tools take 2 s and people 500 s; the other way round is expected, for a while."""

    class Swapped(CheckedReturnTimes):
        wrong = scrambled

        def indices(self):
            found = super().indices()
            return found[[0, 2, 1, 3, 4]] if self.wrong else found

    returns = Swapped()

    def see(gaps):
        for gap in range(gaps):
            kind, gap_s = ("user", 500) if gap % 5 == 4 else ("tool", 2)
            returns.came_back(KINDS[kind], gap_s * S)

    see(100)
    assert returns.trusted is not scrambled
    for kind in ("tool", "user") if scrambled else ():
        assert index(returns, kind, 5.0, 100.0) == pytest.approx([1 / BORDERS_S[6], 1 / BORDERS_S[13]])
    returns.wrong = False
    see(1500)
    assert returns.trusted
    assert index(returns, "tool", 1.0)[0] > 10 * index(returns, "user", 1.0)[0]


def test_a_session_idle_for_hours_is_in_the_last_interval():
    assert index(ReturnTimes(), "", 1e6) == index(ReturnTimes(), "", float(BORDERS_S[-1]))


def with_idle_session(tenant="a", pages=200, turns=6, **settings):
    """A session whose tool takes a second has come back several times, and has 101 tokens in the tree."""
    options = {"policy_options": {"cheap_s": 0.05}, "decode_share": 0.0, "headroom": "none"}
    around = {"schedule_policy": "session", "prefill_max_requests": -1, "session_max_wait_s": 100.0}
    yard = make_yard(pages=pages, **{**options, **around, **settings})
    for turn in range(turns):
        yard.submit([7] * (95 + turn), max_new=2, arrival_ns=yard.now, session="s", tenant=tenant, turn=turn)
        yard.run()
        yard.apply(TurnEnded("s", "tool", -1, tenant))
        yard.now += S
    return yard


def kept(yard):
    return yard.scheduler.state.memory.peek(np.full(100, 7, np.int32).tobytes(), "")


def busy(yard, prompt=30, max_new=60):
    """Another request decodes, so that none may start just because nothing runs."""
    number = yard.submit([9] * prompt, max_new=max_new, arrival_ns=yard.now)
    for _ in range(3):
        yard.launch()
        yard.commit()
    return number


def waits(yard, number):
    for _ in range(3):
        yard.launch()
        yard.commit()
    return number not in yard.tokens


def test_a_miss_leaves_kv_that_is_expected_back_soon():
    yard = with_idle_session()
    busy(yard)
    miss = yard.submit([5] * 90, max_new=2, arrival_ns=yard.now)
    assert waits(yard, miss)
    assert kept(yard) == 100
    back = yard.submit([7] * 102, max_new=2, arrival_ns=yard.now, session="s", tenant="a")
    yard.run()
    assert yard.finished[back].cached_tokens >= 99
    assert yard.finished[miss].completion_tokens == 2


def test_hits_first_takes_it():
    yard = with_idle_session(schedule_policy="hits-first")
    busy(yard)
    assert not waits(yard, yard.submit([5] * 90, max_new=2, arrival_ns=yard.now))


def test_a_miss_that_is_due_takes_it():
    yard = with_idle_session(session_max_wait_s=1.0)
    busy(yard)
    miss = yard.submit([5] * 90, max_new=2, arrival_ns=yard.now)
    assert waits(yard, miss)
    yard.now += S
    assert not waits(yard, miss)


def test_a_session_that_has_ended_keeps_nothing():
    yard = with_idle_session()
    yard.apply(SessionEnded("s", "a"))
    busy(yard)
    assert not waits(yard, yard.submit([5] * 90, max_new=2, arrival_ns=yard.now))


def test_another_tenant_ends_no_session():
    yard = with_idle_session()
    yard.apply(SessionEnded("s", "b"))
    yard.apply(TurnEnded("s", "user", -1, "b"))
    busy(yard)
    assert waits(yard, yard.submit([5] * 90, max_new=2, arrival_ns=yard.now))


def test_a_miss_starts_where_nothing_runs():
    yard = with_idle_session()
    assert not waits(yard, yard.submit([5] * 150, max_new=2, arrival_ns=yard.now))


def test_a_running_request_takes_what_is_kept():
    yard = with_idle_session(pages=150)
    number = busy(yard, prompt=30, max_new=100)
    yard.run()
    assert yard.finished[number].completion_tokens == 100
    assert kept(yard) < 100


def test_the_same_id_of_another_tenant_is_another_session():
    yard = with_idle_session(tenant="a")
    sessions = yard.scheduler.state.sessions
    before = sessions.expected_tokens(yard.now, 1 / 60)
    yard.submit([6] * 4, max_new=1, arrival_ns=yard.now, session="s", tenant="b")
    assert len(sessions) == 2
    assert sessions.expected_tokens(yard.now, 1 / 60) == before > 0


@pytest.mark.slow
def test_the_table_is_bounded():
    yard = make_yard(rows=2, schedule_policy="session", max_queued_requests=-1)
    sessions = yard.scheduler.state.sessions
    for number in range(MAX_SESSIONS + 50):
        yard.submit([5], max_new=1, session=f"s{number}")
        if number % 512 == 0:
            yard.run()
    yard.submit([5], max_new=1, session="x" * (MAX_NAME_BYTES + 1))
    assert len(sessions) == MAX_SESSIONS
    yard.run()
    assert len(yard.finished) == MAX_SESSIONS + 51


def test_a_change_of_policy_starts_and_ends_the_table():
    from tokenyard.base import SetPolicy

    yard = make_yard(schedule_policy="fcfs")
    assert yard.scheduler.state.sessions is None
    number = yard.submit([5] * 20, max_new=4, session="s")
    yard.apply(SetPolicy("session"))
    yard.run()
    assert len(yard.scheduler.state.sessions) == 1
    assert yard.scheduler.state.sessions.expected_tokens(yard.now, 0.0) >= 19
    yard.apply(SetPolicy("fcfs"))
    assert yard.scheduler.state.sessions is None
    assert number in yard.finished
    assert row(yard, number) is None
    assert RowState.WAITING not in yard.scheduler.state.table.state
