import inspect
from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.policy.lines import admissions, line, make_yard, watch_admissions
from tokenyard.base import SchedulerSettings, TenantSettings
from tokenyard.policy import Policy, create_policy
from tokenyard.policy.compose import Wrapper
from tokenyard.policy.user_policy import Guarded


def public(cls):
    return {name for name, member in vars(cls).items() if inspect.isfunction(member) and not name.startswith("_")}


def test_wrappers_pass_on_every_question():
    assert public(Policy) - public(Wrapper) == set()


def test_the_guard_watches_every_question():
    assert public(Policy) - public(Guarded) == set()


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
    assert line(yard) == [third, fourth, second, first], "nobody has started yet"
    for expected in (third, fourth, first, second):
        yard.launch()
        yard.commit()
        assert expected not in line(yard)


def test_nothing_may_pass_with_a_bound_of_zero():
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
    """By number of a request, the prompt tokens of later arrivals that start before it although its tenant has nobody
    running; filled as the yard runs.
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
)
def test_no_order_passes_more_tokens_than_the_bound(policy, bound, arrivals, every, tenants):
    yard = make_yard(
        schedule_policy=policy,
        max_overtaken_tokens=bound,
        rows=3,
        prefill_max_requests=2,
        schedule_conservativeness=1.0,
        tenants=tenants,
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


def test_who_is_held_back_by_a_limit_is_not_passed_anew_each_time():
    yard = make_yard(schedule_policy="lof", max_overtaken_tokens=50, tenants={"t": TenantSettings(max_running=1)})
    held = yard.submit([5] * 10, max_new=1, tenant="t")
    long = [yard.submit([6 + index] * 40, max_new=8, tenant="t") for index in range(6)]
    for index in range(40):
        yard.submit([20 + index], max_new=1 + 2 * (index % 2), tenant="other")
    yard.run()
    before = admissions(yard)[: admissions(yard).index(held)]
    assert [number for number in before if number in long] == long[:1]


def test_without_the_bound_lof_passes_more():
    yard = make_yard(schedule_policy="lof", rows=1)
    watch = overtaken_tokens(yard)
    yard.submit([5] * 10, max_new=1)
    for index in range(10):
        yard.submit([6 + index] * 10, max_new=2)
    yard.run()
    assert max(watch.values()) == 100
