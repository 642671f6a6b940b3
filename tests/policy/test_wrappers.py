import inspect
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.policy.waiting_order import admissions, line, make_yard, row, watch_admissions
from tokenyard.base import (
    KvAvailable,
    KvLoaded,
    OpenGate,
    Pause,
    Resume,
    SchedulerSettings,
    TenantSettings,
    WindowGroup,
)
from tokenyard.cache.windows import min_window_pages
from tokenyard.policy import Policy, create_policy
from tokenyard.policy.user_policy import GuardedPolicy
from tokenyard.policy.wrappers import StartedTokens, Wrapper
from tokenyard.scheduler.row_state import Gate


def public(cls):
    return {name for name, member in vars(cls).items() if inspect.isfunction(member) and not name.startswith("_")}


def test_wrappers_pass_on_every_question():
    assert public(Policy) - public(Wrapper) == set()


def test_the_guard_watches_every_question():
    assert public(Policy) - public(GuardedPolicy) == set()


def test_wrappers_are_put_around_in_order():
    chosen = SchedulerSettings(
        schedule_policy="lpm", enable_priority_scheduling=True, enable_service_levels=True, max_overtaken_tokens=9
    )
    policy = create_policy("lpm", chosen)
    assert policy.name == "bounded+levels+priority+lpm"
    assert policy.needs_tree
    assert "9 prompt tokens" in policy.overtaking


def test_overtaking_is_bounded_by_putting_the_longest_waiting_in_front():
    yard = make_yard(schedule_policy="lof", max_overtaken_tokens=25)
    first = yard.submit([5] * 10, max_new=1)
    second = yard.submit([6] * 10, max_new=2)
    third, fourth = (yard.submit([7 + i] * 10, max_new=9) for i in range(2))
    assert line(yard) == [third, fourth, second, first], "no request has started yet"
    for expected in (third, fourth, first, second):
        yard.launch()
        yard.commit()
        assert expected not in line(yard)


def test_nothing_overtakes_with_a_bound_of_zero():
    yard = make_yard(schedule_policy="lof", max_overtaken_tokens=0)
    numbers = [yard.submit([5 + i] * 4, max_new=n) for i, n in enumerate((3, 9, 6))]
    assert line(yard) == numbers


def test_a_row_that_is_put_in_front_is_not_looked_for_again():
    yard = make_yard(
        schedule_policy="dfs-weight", max_overtaken_tokens=0, rows=100, prefill_max_requests=-1, pages=9000
    )
    for index in range(45):
        yard.submit([5 + index] * 9, max_new=1)
    yard.run()
    for index in range(90):
        yard.submit([5 + 7 * index % 45] * 9 + [50 + index % 45], max_new=2)
    yard.run()
    assert len(yard.finished) == 135


def overtaken_tokens(yard):
    """By number of a request, the prompt tokens of later arrivals that start before it although its tenant runs none;
    filled as the yard runs.
    """
    overtaken = Counter()
    state = yard.scheduler.state
    table = state.table

    def look(row, hit, earlier):
        admitted = table.tenant[np.concatenate((state.prefilling.rows, state.running.rows))]
        for other in earlier:
            if not state.settings.tenants or table.tenant[other] not in admitted:
                overtaken[int(table.number[other])] += int(table.target[row]) - hit

    watch_admissions(yard, look)
    return overtaken


@settings(max_examples=examples(60), deadline=None)
@given(
    policy=st.sampled_from(["lpm", "dfs-weight", "lof", "random", "short-first", "hrrn", "routing-key"]),
    bound=st.integers(0, 120),
    arrivals=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12), st.integers(0, 3)), min_size=5, max_size=40),
    every=st.integers(1, 4),
    tenants=st.sampled_from([{}, {"*": TenantSettings(max_running=1)}]),
    windows=st.sampled_from([None, WindowGroup(3, min_window_pages(3, 1) + 20)]),
)
def test_no_order_overtakes_by_more_tokens_than_the_bound(policy, bound, arrivals, every, tenants, windows):
    yard = make_yard(
        schedule_policy=policy,
        max_overtaken_tokens=bound,
        rows=3,
        prefill_max_requests=2,
        schedule_conservativeness=1.0,
        tenants=tenants,
        windows=windows,
    )
    watch = overtaken_tokens(yard)
    for index, (prompt, new, kind) in enumerate(arrivals):
        yard.submit([5 + kind] * prompt + [20 + index], max_new=new, routing_key=str(kind), tenant=str(kind))
        if index % every == 0:
            yard.launch()
            yard.commit()
    yard.run()
    assert len(yard.finished) == len(arrivals)
    assert max(watch.values(), default=0) <= bound


def test_a_request_held_back_by_a_limit_is_not_overtaken_again_each_time():
    yard = make_yard(schedule_policy="lof", max_overtaken_tokens=50, tenants={"t": TenantSettings(max_running=1)})
    held = yard.submit([5] * 10, max_new=1, tenant="t")
    long = [yard.submit([6 + index] * 40, max_new=8, tenant="t") for index in range(6)]
    for index in range(40):
        yard.submit([20 + index], max_new=1 + 2 * (index % 2), tenant="other")
    yard.run()
    before = admissions(yard)[: admissions(yard).index(held)]
    assert [number for number in before if number in long] == long[:1]


def test_without_the_bound_lof_overtakes_by_more():
    yard = make_yard(schedule_policy="lof", rows=1)
    watch = overtaken_tokens(yard)
    yard.submit([5] * 10, max_new=1)
    for index in range(10):
        yard.submit([6 + index] * 10, max_new=2)
    yard.run()
    assert max(watch.values()) == 100


@pytest.mark.parametrize("loaded", [0, 10, 19])
def test_requests_that_begin_with_a_load_overtake_by_their_tokens(loaded):
    """Later requests have 20 tokens, of which `loaded` are to come from elsewhere, and are computed in the end."""
    yard = make_yard(schedule_policy="lof", rows=1, max_overtaken_tokens=30)
    yard.submit([5] * 20, max_new=6)
    yard.advance()
    head = yard.submit([6] * 20, max_new=2)
    for index in range(8):
        number = yard.submit([10 + index] * 20, max_new=4, awaits_kv=True)
        yard.apply(KvAvailable(number, loaded))
    while head not in yard.finished:
        worked = yard.advance()
        loads = yard.scheduler.drain_moves()
        for load in loads:
            yard.apply(KvLoaded(load.number, load.start))
        assert worked or loads
    assert len(yard.finished) == 3, "one other passes, with 20 tokens; a second one would make it 40"


@pytest.mark.parametrize("gate", [Gate.PAUSED, Gate.KV])
def test_a_gate_takes_nothing_from_the_count(gate):
    yard = make_yard(schedule_policy="lof", rows=1, max_overtaken_tokens=30)
    first = yard.submit([6] * 20, max_new=2, awaits_kv=gate == Gate.KV)
    if gate == Gate.PAUSED:
        yard.apply(Pause(numbers=[first]))
    later = [yard.submit([10 + index] * 20, max_new=4) for index in range(2)]
    waits = yard.submit([20] * 5, max_new=1)
    table = yard.scheduler.state.table
    while not table.admitted_ns[row(yard, later[1])]:
        yard.advance()
    yard.launch()
    yard.apply(Resume([first]) if gate == Gate.PAUSED else OpenGate(first, Gate.KV))
    eager = yard.submit([21] * 20, max_new=9)
    yard.run()
    assert admissions(yard) == [*later, first, eager, waits], "40 tokens have passed the first; no more may"


@given(
    limit=st.integers(0, 60),
    calls=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30)), max_size=60),
    forgotten=st.integers(0, 20),
)
def test_started_tokens_are_summed_up_to_the_limit(limit, calls, forgotten):
    started, all_of_them = StartedTokens(limit), []
    for index, (seq, tokens) in enumerate(calls):
        if index == len(calls) // 2:
            started.forget(forgotten)
        started.add(max(seq, forgotten), tokens)
        all_of_them.append((max(seq, forgotten), tokens))
        for border in (seq + forgotten, forgotten, 41):
            expected = sum(count for later, count in all_of_them if later > border)
            assert min(started.after(border), limit + 1) == min(expected, limit + 1)
        assert len(started) <= limit + 1


def test_a_prefix_without_its_window_pages_is_no_hit_and_counts_as_overtaking():
    windows = WindowGroup(8, min_window_pages(8, 1) + 60)
    yard = make_yard(schedule_policy="lpm", rows=1, max_overtaken_tokens=5, windows=windows, chunked_prefill_size=-1)
    known = [11] * 20 + [12] * 20
    yard.submit(known, max_new=1)
    for index in range(12):
        yard.submit([20 + index] * 60, max_new=1)
    yard.run()
    memory = yard.scheduler.state.memory
    key = np.array(known, np.int32).tobytes()
    assert (memory.tree.peek(key), memory.peek(key, "")) == (40, 0)
    yard.submit([50] * 10, max_new=6)
    yard.advance()
    head, again = yard.submit([60] * 10), yard.submit(known)
    yard.run()
    assert admissions(yard)[-2:] == [head, again]
