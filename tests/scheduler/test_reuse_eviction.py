"""Eviction policy "reuse": KV of sessions by what it is worth, with a stated bound."""

import numpy as np
import pytest

from tests.policy.timed_scheduler import S
from tests.policy.waiting_order import make_yard
from tokenyard.base import SessionEnded, TenantSettings, TurnEnded

PAGES = 300


def yard_of(**settings):
    return make_yard(pages=PAGES, radix_eviction_policy="reuse", headroom="none", **settings)


def turn(yard, token, length=100, kind="tool", session=None, tenant="", ttl_ns=-1):
    """A turn of the session whose prompts consist of `token`, from its arrival to its end."""
    name = f"s{token}" if session is None else session
    yard.submit([token] * length, max_new=1, arrival_ns=yard.now, session=name, tenant=tenant)
    yard.run()
    if name:
        yard.apply(TurnEnded(name, kind, ttl_ns, tenant))


def kept(yard, token):
    return yard.scheduler.state.memory.peek(np.full(100, token, np.int32).tobytes(), "")


def learn(yard, tool_s=1, user_s=400):
    """Tools take `tool_s`, people `user_s`."""
    for token, kind, gap_s in ((3, "tool", tool_s), (4, "user", user_s)):
        for _ in range(12):
            turn(yard, token, 30, kind)
            yard.now += gap_s * S
    for token in (3, 4):
        yard.apply(SessionEnded(f"s{token}"))


def press(yard, tokens=150):
    """A prompt without a session takes pages from the tree."""
    turn(yard, 9, tokens, session="")


@pytest.mark.parametrize("policy", ["fcfs", "session"])
@pytest.mark.parametrize("first", ["tool", "user"])
def test_what_comes_back_soon_stays(policy, first):
    """LRU would evict the session whose turn ended first, whatever it waits for."""
    yard = yard_of(schedule_policy=policy)
    learn(yard)
    second = "user" if first == "tool" else "tool"
    turn(yard, 5, kind=first)
    turn(yard, 6, kind=second)
    press(yard)
    tool, user = (5, 6) if first == "tool" else (6, 5)
    assert kept(yard, tool) == 100
    assert kept(yard, user) < 100


def test_ended_sessions_go_first():
    yard = yard_of()
    learn(yard)
    turn(yard, 5)
    turn(yard, 6)
    yard.apply(SessionEnded("s6"))
    press(yard)
    assert (kept(yard, 5), kept(yard, 6) < 100) == (100, True)


@pytest.mark.parametrize("again", [False, True])
def test_a_session_that_ends_before_its_answer_has_ends_with_it(again):
    """A client closes its session as it reads the last token, which may be before the scheduler has ended the row."""
    yard = yard_of()
    learn(yard)
    turn(yard, 5)
    yard.submit([6] * 100, max_new=2, arrival_ns=yard.now, session="s6")
    yard.apply(SessionEnded("s6"))
    yard.run()
    if again:
        turn(yard, 6)
    yard.apply(TurnEnded("s6", "tool"))
    assert len(yard.scheduler.state.sessions) == 1 + again
    press(yard)
    assert (kept(yard, 5) < 100, kept(yard, 6) < 100) == (again, not again)


def test_a_superseded_branch_goes_first():
    """A session that compacts its context leaves the old one, which was used last of all but the new one."""
    yard = yard_of()
    learn(yard)
    turn(yard, 5)
    turn(yard, 6)
    turn(yard, 7, 20, session="s6")
    press(yard)
    assert (kept(yard, 5), kept(yard, 7)) == (100, 20)
    assert kept(yard, 6) < 100


def test_a_prefix_of_many_sessions_counts_as_many():
    """The KV of one session that was used last goes before a prefix that four others wait for."""
    yard = yard_of()
    learn(yard)
    for index in range(4):
        turn(yard, 5, session=f"shared {index}")
    turn(yard, 6, 100)
    press(yard)
    assert (kept(yard, 5), kept(yard, 6) < 100) == (100, True)


def test_a_turn_that_waits_keeps_its_kv_but_is_not_pinned():
    yard = yard_of(rows=1)
    learn(yard)
    turn(yard, 5, kind="user")
    turn(yard, 6)
    yard.submit([8] * 150, max_new=1, arrival_ns=yard.now)
    yard.submit([5] * 101, max_new=1, arrival_ns=yard.now, session="s5")
    yard.run()
    assert (kept(yard, 5), kept(yard, 6) < 100) == (100, True)
    turn(yard, 9, 290, session="")
    assert kept(yard, 5) < 20


def test_a_time_to_live_is_kept_within_a_share_of_the_pool():
    """100 of 150 tokens are for KV with a time to live; that of a second session exceeds them."""
    yard = yard_of()
    learn(yard)
    turn(yard, 5, kind="user", ttl_ns=300 * S)
    turn(yard, 6, kind="user", ttl_ns=300 * S)
    turn(yard, 7, 60, "tool")
    press(yard, 130)
    assert kept(yard, 5) == 100
    assert kept(yard, 6) < 100
    assert kept(yard, 7) == 60
    yard.now += 300 * S
    turn(yard, 7, 60, "tool")
    press(yard, 200)
    assert kept(yard, 5) < 100


def test_a_tenants_time_to_live_is_kept_within_its_own_share():
    yard = yard_of(tenants={"a": TenantSettings(kv_share=0.5)})
    learn(yard)
    turn(yard, 5, kind="user", tenant="a", ttl_ns=300 * S)
    turn(yard, 6, kind="tool")
    yard.now += S
    press(yard, 170)
    assert kept(yard, 5) < 100, "half of half of the pool is 75 tokens"
    assert kept(yard, 6) == 100


@pytest.mark.parametrize("ttl_ns", [-1, 10**15])
def test_no_idle_session_keeps_kv_beyond_an_hour(ttl_ns):
    """The bound: whatever was learned or asked for, KV that was idle for an hour goes before all that was not."""
    yard = yard_of(max_queued_requests=-1)
    for _ in range(40):
        turn(yard, 3, 30)
        yard.now += 3599 * S
    turn(yard, 5, ttl_ns=ttl_ns)
    yard.now += 3601 * S
    for index in range(4):
        turn(yard, 6 + index, 40, session="")
        yard.now += 800 * S
        assert kept(yard, 6 + index) == 40
    press(yard, 100)
    assert kept(yard, 5) < 100


def test_without_sessions_prompts_that_come_again_stay():
    """One prompt comes every 10 s; a scan of others does not come again. LRU would evict it during the scan."""
    yard = yard_of(max_queued_requests=-1)
    for index in range(30):
        turn(yard, 5, session="")
        for scan in range(3):
            yard.now += 3 * S
            yard.submit([20 + 3 * index + scan] * (50 if index < 10 else 90), max_new=1, arrival_ns=yard.now)
            yard.run()
        yard.now += S
    assert kept(yard, 5) == 99
    yard.scheduler.state.memory.tree.check()


def test_one_tenants_times_to_live_take_no_others_share():
    """A tenant without a share asks for more than half of the pool; the one with a share still gets its half of it."""
    yard = yard_of(tenants={"a": TenantSettings(kv_share=0.5)})
    learn(yard)
    turn(yard, 6, 70, kind="user", tenant="b", ttl_ns=300 * S)
    turn(yard, 8, 70, kind="user", tenant="b", ttl_ns=300 * S)
    turn(yard, 5, 70, kind="user", tenant="a", ttl_ns=300 * S)
    yard.now += 60 * S
    press(yard, 200)
    assert yard.scheduler.state.memory.peek(np.full(70, 5, np.int32).tobytes(), "") == 70
    assert yard.scheduler.state.memory.peek(np.full(70, 8, np.int32).tobytes(), "") < 70


def test_what_exceeds_a_tenants_share_counts_for_no_other_tenant():
    yard = yard_of(tenants={"a": TenantSettings(kv_share=0.1)})
    learn(yard)
    turn(yard, 6, 140, kind="user", tenant="a", ttl_ns=300 * S)
    turn(yard, 5, kind="user", ttl_ns=300 * S)
    yard.now += 60 * S
    press(yard, 190)
    assert kept(yard, 5) == 100


def test_many_times_to_live_within_the_share_are_all_kept():
    """More sessions than are ranked at a time, all older than KV that nobody asked to keep."""
    yard = yard_of()
    learn(yard)
    for index in range(70):
        turn(yard, 10 + index, 2, kind="user", ttl_ns=300 * S)
    turn(yard, 100, 150, session="")
    turn(yard, 101, 150, session="")
    held = [yard.scheduler.state.memory.peek(np.full(2, 10 + index, np.int32).tobytes(), "") for index in range(70)]
    assert sum(held) == 140


def test_a_turn_that_waits_for_hours_keeps_its_kv_no_longer_than_an_idle_session():
    """Its tenant's other request runs on, so it cannot start: it waits beside prompts that come and go."""
    yard = yard_of(rows=2, context=4096, tenants={"held": TenantSettings(max_running=1)}, max_queued_requests=-1)
    learn(yard)
    turn(yard, 5, tenant="held")
    yard.submit([7] * 5, max_new=100, arrival_ns=yard.now, tenant="held")
    yard.launch()
    yard.commit()
    waiting = yard.submit([5] * 101, max_new=1, arrival_ns=yard.now, session="s5", tenant="held")

    def other(token):
        number = yard.submit([token] * 90, max_new=1, arrival_ns=yard.now, session=f"s{token}")
        while number not in yard.finished:
            yard.launch()
            yard.commit()
        yard.apply(TurnEnded(f"s{token}", "tool"))

    other(6)
    other(8)
    assert kept(yard, 5) == 100
    yard.now += 3601 * S
    other(9)
    other(10)
    assert waiting not in yard.finished
    assert kept(yard, 5) < 100
