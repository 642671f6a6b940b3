"""Tries to make a request wait longer than its policy says (docs/policies.md), with arrivals of any kind."""

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.policy.waiting_order import make_yard, watch_admissions
from tokenyard.base import TenantSettings, TurnEnded
from tokenyard.policy.service_levels import HIGH, LOW, NORMAL

S = 10**9
PROMPTS = st.integers(1, 40)
ANSWERS = st.integers(1, 12)
GAPS_S = st.sampled_from([0, 0, 1, 3, 10, 40])


def run(yard, arrivals, every, submit):
    """Submit each of `arrivals`, (gap in seconds, prompt, ...), with a step after every so many, then drain."""
    now = S
    for index, (gap, *fields) in enumerate(arrivals):
        now += gap * S
        yard.now = max(yard.now, now)
        submit(index, now, *fields)
        if index % every == 0:
            yard.launch()
            yard.commit()
    yard.run()
    assert len(yard.finished) == len(arrivals)


def mixed(*more):
    return st.lists(st.tuples(GAPS_S, PROMPTS, ANSWERS, *more), min_size=4, max_size=30)


@settings(max_examples=examples(40), deadline=None)
@given(arrivals=mixed(), every=st.integers(1, 4))
def test_fcfs_lets_no_request_overtake(arrivals, every):
    yard = make_yard(rows=3, prefill_max_requests=2)
    watch_admissions(yard, lambda row, hit, earlier: check(not earlier))
    run(yard, arrivals, every, lambda i, now, prompt, new: yard.submit([5 + i] * prompt, new, arrival_ns=now))


@settings(max_examples=examples(80), deadline=None)
@given(
    arrivals=mixed(st.one_of(st.none(), st.integers(0, 4))),
    every=st.integers(1, 4),
    inner=st.sampled_from(["fcfs", "lpm", "lof", "random"]),
    low_first=st.booleans(),
    threshold=st.sampled_from([0, 1, 10]),
)
def test_aging_bounds_overtaking(arrivals, every, inner, low_first, threshold):
    aging = 5
    yard = make_yard(
        rows=3,
        prefill_max_requests=2,
        schedule_policy=inner,
        enable_priority_scheduling=True,
        schedule_low_priority_values_first=low_first,
        priority_aging_s=float(aging),
        priority_scheduling_preemption_threshold=threshold,
        default_priority_value=2,
    )
    table = yard.scheduler.state.table

    def urgency(row):
        priority = table.request(row).priority
        return (2 if priority is None else priority) * (-1 if low_first else 1)

    def look(row, hit, earlier):
        for other in earlier:
            levels = urgency(row) - urgency(other) + (inner != "fcfs")
            assert table.arrival_ns[row] <= table.arrival_ns[other] + levels * aging * S

    watch_admissions(yard, look)
    run(
        yard,
        arrivals,
        every,
        lambda i, now, prompt, new, priority: yard.submit([5 + i] * prompt, new, arrival_ns=now, priority=priority),
    )


@settings(max_examples=examples(40), deadline=None)
@given(arrivals=mixed(), every=st.integers(1, 4))
def test_mlfq_lets_no_request_overtake_that_arrives_after_the_promotion(arrivals, every):
    yard = make_yard(
        rows=2, prefill_max_requests=2, schedule_policy="mlfq", policy_options={"quantum_tokens": 4, "promote_s": 5.0}
    )
    table = yard.scheduler.state.table

    def look(row, hit, earlier):
        for other in earlier:
            if not table.admitted_ns[other]:
                assert table.arrival_ns[row] <= table.arrival_ns[other] + 5 * S or yard.now < 5 * S

    watch_admissions(yard, look)
    run(yard, arrivals, every, lambda i, now, prompt, new: yard.submit([5 + i] * prompt, new, arrival_ns=now))


@settings(max_examples=examples(40), deadline=None)
@given(arrivals=mixed(), every=st.integers(1, 4))
def test_hrrn_lets_only_shorter_requests_overtake(arrivals, every):
    yard = make_yard(rows=2, prefill_max_requests=1, schedule_policy="hrrn")
    table = yard.scheduler.state.table

    def look(row, hit, earlier):
        for other in earlier:
            shorter = table.target[row] - hit < table.target[other] - table.matchable[other]
            assert shorter or table.arrival_ns[row] == table.arrival_ns[other]

    watch_admissions(yard, look)
    run(yard, arrivals, every, lambda i, now, prompt, new: yard.submit([5 + i] * prompt, new, arrival_ns=now))


@settings(max_examples=examples(40), deadline=None)
@given(
    arrivals=mixed(st.sampled_from(["", "a", "b", "c"])),
    every=st.integers(1, 4),
    pages=st.sampled_from([60, 100, 4096]),
    policy=st.sampled_from(["hits-first", "session"]),
)
def test_nobody_passes_who_comes_later_than_the_longest_wait(arrivals, every, pages, policy):
    """Sessions continue their own prompts and come back at any time, which the policy protects as long as it may."""
    options = {"policy_options": {"cheap_s": 0.1}, "session_max_wait_s": 5.0, "headroom": "none"}
    yard = make_yard(pages=pages, rows=2, schedule_policy=policy, **options)
    table = yard.scheduler.state.table

    def look(row, hit, earlier):
        for other in earlier:
            assert table.arrival_ns[row] < table.arrival_ns[other] + 5 * S

    def submit(index, now, prompt, new, session):
        ids = [5 + (ord(session) if session else index)] * prompt
        yard.submit(ids, new, arrival_ns=now, session=session)
        if session:
            yard.apply(TurnEnded(session, "tool"))

    watch_admissions(yard, look)
    run(yard, arrivals, every, submit)


@settings(max_examples=examples(40), deadline=None)
@given(
    turns=st.lists(
        st.tuples(
            st.sampled_from([0, 0, 1, 30, 900, 1800]),
            st.integers(0, 5),
            st.integers(1, 40),
            st.sampled_from(["tool", "user"]),
            st.sampled_from([-1, -1, 60, 10**6]),
        ),
        min_size=4,
        max_size=40,
    ),
    policy=st.sampled_from(["fcfs", "session"]),
)
def test_idle_sessions_keep_no_others_kv_from_being_there_beyond_the_bound(turns, policy):
    """Sessions of three tenants grow, come back and ask for any time to live. No KV goes while there is some
    that was idle for an hour, nor, within its share, KV with a time to live while there is other.
    """
    pool = 120
    tenants = {"a": TenantSettings(kv_share=0.5)}
    yard = make_yard(
        pages=pool, schedule_policy=policy, radix_eviction_policy="reuse", headroom="none", tenants=tenants
    )
    owner = ["a", "a", "b", "b", "", ""]
    length, ended, until = [0] * 6, [0] * 6, [0] * 6

    def kept():
        tokens = [np.full(each, 5 + index, np.int32).tobytes() for index, each in enumerate(length)]
        return [yard.scheduler.state.memory.peek(each, "") if each else 0 for each in tokens]

    def asked(index, now):
        """Tokens with a time to live of all that share the budget of a session's tenant."""
        shares = owner[index] == "a"
        return sum(length[i] for i in range(6) if (owner[i] == "a") == shares and now < until[i])

    for gap, index, more, kind, ttl_s in turns:
        yard.now += gap * S
        length[index] = min(length[index] + more, 80)
        yard.submit([5 + index] * length[index], max_new=1, session=f"s{index}", tenant=owner[index])
        until[index] = 0
        before, now = kept(), yard.now
        yard.run()
        after, others = kept(), [i for i in range(6) if i != index]
        lost = [i for i in others if after[i] < before[i]]
        stale = [i for i in others if ended[i] and now - ended[i] > 3600 * S and after[i]]
        assert not stale or all(now - ended[i] > 3600 * S for i in lost)
        promised = [i for i in lost if now < until[i] and asked(i, now) <= 0.25 * pool]
        assert not promised or not [i for i in others if after[i] and now >= until[i]]
        ended[index] = yard.now
        if ttl_s > 0:
            until[index] = yard.now + min(ttl_s, 3600) * S
        yard.apply(TurnEnded(f"s{index}", kind, ttl_s * S if ttl_s > 0 else -1, owner[index]))


@settings(max_examples=examples(40), deadline=None)
@given(
    sizes=st.lists(st.tuples(st.sampled_from(["high", "normal", "low"]), PROMPTS), min_size=20, max_size=120),
    weights=st.tuples(*[st.integers(1, 8)] * 3),
    quantum=st.integers(1, 64),
)
def test_levels_that_wait_get_their_shares(sizes, weights, quantum):
    """Deficit round robin: service by weight differs by no more than a quantum and a request of each level."""
    yard = make_yard(
        rows=2,
        enable_service_levels=True,
        service_level_weights=weights,
        service_level_quantum_tokens=quantum,
        disable_radix_cache=True,
    )
    table = yard.scheduler.state.table
    taken = dict.fromkeys((HIGH, NORMAL, LOW), 0)
    left = dict.fromkeys((HIGH, NORMAL, LOW), 0)
    for name, prompt in sizes:
        yard.submit([5] * prompt, max_new=1, service_class=name)
    for level in table.service_level[yard.scheduler.state.waiting.rows].tolist():
        left[level] += 1
    backlogged = [level for level in left if left[level]]
    largest = max(prompt for _, prompt in sizes)

    def look(row, hit, earlier):
        level = int(table.service_level[row])
        if all(left[other] for other in backlogged):
            taken[level] += int(table.target[row])
            service = sorted((taken[other] / weights[other - HIGH], other) for other in backlogged)
            for (less, one), (more, two) in pairwise(service):
                assert more - less <= 2 * quantum + largest / weights[one - HIGH] + largest / weights[two - HIGH]
        left[level] -= 1

    watch_admissions(yard, look)
    yard.run()


def check(holds):
    assert holds
