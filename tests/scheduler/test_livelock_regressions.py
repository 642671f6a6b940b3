"""Defects that an attack on the core has found: rows that take each other's place, and standstills with work waiting.

Each test drives the small program that showed the defect and asserts the quantity that was out of bounds.
"""

import math
import random

import pytest

from tests.scheduler.harness import Yard, make_info
from tokenyard.base import NS_PER_S, Cancel, Pause, SchedulerSettings, StepWork, TenantSettings
from tokenyard.cost import OnlineCost, get_profile

URGENT = 100


def make_yard(pages=4096, rows=8, context=2048, **settings):
    """A yard of `rows` rows over `pages` pages of one token."""
    chosen = SchedulerSettings(context_length=context, max_running_requests=rows, **settings)
    return Yard(chosen, make_info(pages, 1, rows, context))


def submit(yard, tokens, max_new, **fields):
    """Submit a prompt of `tokens` tokens that it shares with no other."""
    return yard.submit([5 + yard.next_number] * tokens, max_new, **fields)


def counters(yard):
    return yard.scheduler.snapshot(yard.now).counters


@pytest.mark.parametrize("sigma", [0.2, 1.0])
@pytest.mark.parametrize("constant_ms", [0.0, 1.0])
def test_noisy_steps_leave_a_cost_model_that_can_be_asked(constant_ms, sigma):
    for seed in range(4):
        draw = random.Random(seed)
        cost = OnlineCost(get_profile("cpu", "smollm2-135m").cost())
        contexts = [draw.randint(10, 900) for _ in range(64)]
        for step in range(1200):
            rows = 1 + int(32 * (1 + math.sin(step / 200)))
            work = StepWork(rows, rows, rows, sum(contexts[:rows]) + step % 50 * rows)
            cost.learn(work, (constant_ms + rows) * 1e-3 * draw.lognormvariate(0, sigma))
            assert cost.step(work) > 0.0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", ["edf", "fcfs", "lpm", "slo"])
def test_a_chunk_that_the_budget_denies_costs_no_row_its_place(policy, depth):
    yard = make_yard(
        rows=1,
        schedule_policy=policy,
        step_budget="auto" if policy in ("edf", "slo") else "time",
        enable_priority_scheduling=True,
        max_in_flight=depth,
    )
    first = submit(yard, 20, 50, priority=0)
    for _ in range(5):
        yard.advance(depth)
    second = submit(yard, 300, 50, priority=URGENT)
    while yard.scheduler.has_work:
        assert yard.advance(depth), "nothing is planned though requests wait"
    assert sorted(yard.finished) == [first, second]
    assert counters(yard).preempted <= 1


@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize(("rows", "pages"), [(2, 4096), (8, 210)])
def test_a_bound_on_overtaking_around_priorities_lets_each_request_keep_its_place(rows, pages, mixed):
    yard = make_yard(
        pages=pages,
        rows=rows,
        enable_priority_scheduling=True,
        max_overtaken_tokens=0,
        max_in_flight=2,
        enable_mixed_chunk=mixed,
    )
    numbers = [submit(yard, 100, 50, priority=0) for _ in range(2)]
    for _ in range(5):
        yard.advance(2)
    numbers.append(submit(yard, 100, 50, priority=URGENT))
    yard.run(2, limit=600)
    assert sorted(yard.finished) == numbers
    assert counters(yard).preempted == 0, "the bound says who starts next, so no row is preempted"


@pytest.mark.part(4)
@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("policy", ["lof", "random", "short-first", "lpm"])
def test_equal_priorities_never_preempt(policy, rows, mixed):
    yard = make_yard(
        rows=rows,
        schedule_policy=policy,
        enable_priority_scheduling=True,
        priority_scheduling_preemption_threshold=0,
        max_in_flight=2,
        enable_mixed_chunk=mixed,
    )
    numbers = [submit(yard, 400, 10 + i, priority=0) for i in range(rows + 1)]
    numbers += [submit(yard, 20, 60 + i, priority=0) for i in range(rows + 1)]
    yard.run(2, limit=1000)
    assert sorted(yard.finished) == numbers
    assert counters(yard).preempted == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_levels_around_priorities_only_order(depth):
    yard = make_yard(rows=1, enable_priority_scheduling=True, enable_service_levels=True, max_in_flight=depth)
    numbers = [submit(yard, 10, 50, priority=0, service_class="high")]
    for _ in range(5):
        yard.advance(depth)
    numbers.append(submit(yard, 10, 50, priority=URGENT, service_class="low"))
    yard.run(depth, limit=200)
    assert sorted(yard.finished) == numbers
    assert counters(yard).preempted == 0


def test_levels_around_mlfq_only_order():
    yard = make_yard(
        pages=64,
        rows=2,
        schedule_policy="mlfq",
        policy_options={"quantum_tokens": 16, "promote_s": 0.02},
        enable_mixed_chunk=True,
        enable_service_levels=True,
        max_in_flight=2,
    )
    numbers = [submit(yard, 30, 1), submit(yard, 35, 1, service_class="priority")]
    yard.run(2, limit=100)
    assert sorted(yard.finished) == numbers
    assert counters(yard).preempted == 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("count", [3, 5])
def test_a_newcomer_does_not_take_the_pages_that_decoding_rows_need(count, depth):
    yard = make_yard(pages=200 * count, rows=64, prefill_decode_interval=0, headroom="none", max_in_flight=depth)
    # Ten tokens too many for each of the long requests.
    numbers = [submit(yard, 150, 60) for _ in range(count)] + [submit(yard, 20, 20) for _ in range(count)]
    tokens = count * (150 + 60 + 20 + 20)
    yard.run(depth, limit=tokens)
    assert sorted(yard.finished) == numbers
    assert counters(yard).recomputed_tokens <= tokens
    assert counters(yard).retracted <= 4 * count


@pytest.mark.parametrize("depth", [1, 2])
def test_mlfq_lets_a_long_request_continue_however_many_short_ones_arrive(depth):
    promote_s, quantum, answer = 0.1, 16, 60
    yard = make_yard(
        pages=800,
        rows=4,
        schedule_policy="mlfq",
        policy_options={"quantum_tokens": quantum, "promote_s": promote_s},
        max_in_flight=depth,
    )
    long, draw = submit(yard, 150, answer), random.Random(1)
    written, idle_since = 0, yard.now
    while long not in yard.finished:
        while len(yard.scheduler.state.waiting) < 6:
            submit(yard, 20, draw.randint(10, 30))
        yard.advance(depth)
        if len(yard.tokens.get(long, ())) > written:
            written, idle_since = len(yard.tokens[long]), yard.now
        # It starts once those that arrived before its promotion have; each of six runs for 30 steps at most.
        assert yard.now - idle_since <= (promote_s + 0.3) * NS_PER_S, "its next token takes longer than the bound"
    assert yard.finished[long].completion_tokens == answer


def claimed(**settings):
    """A yard in which tenant "own" has preempted "flood" and cannot start, as its bucket is empty."""
    yard = make_yard(
        pages=1000,
        rows=8,
        context=4096,
        max_in_flight=2,
        chunked_prefill_size=-1,
        headroom="none",
        tenants={"own": TenantSettings(kv_share=0.6, tokens_per_s=1.0, burst_tokens=16)},
        **settings,
    )
    submit(yard, 10, 400, tenant="own")
    for _ in range(3):
        yard.advance(2)
    submit(yard, 450, 500, tenant="flood")
    submit(yard, 300, 20, tenant="flood")
    for _ in range(4):
        yard.advance(2)
    submit(yard, 300, 5, tenant="own")
    for _ in range(5):
        yard.advance(2)
    return yard


@pytest.mark.part(2)
@pytest.mark.parametrize("policy", ["fcfs", "vtc"])
def test_a_claim_ends_when_its_owner_cannot_start(policy):
    yard = claimed(schedule_policy=policy)
    others = [submit(yard, 5, 5, tenant=name) for name in ("other", "third")]
    for _ in range(1300):
        yard.advance(2)
    assert set(others) <= set(yard.finished), "the claim keeps all others out"
    assert {2, 3} <= set(yard.finished), "the preempted tenant gets its place back"


def test_a_share_claim_and_a_priority_do_not_take_from_each_other():
    yard = make_yard(
        pages=24,
        rows=7,
        enable_priority_scheduling=True,
        max_in_flight=3,
        tenants={"x": TenantSettings(kv_share=0.6)},
    )
    numbers = [submit(yard, 8, 7, priority=URGENT)]
    for _ in range(6):
        yard.advance(3)
    numbers.append(submit(yard, 5, 11, priority=0, tenant="x"))
    yard.run(3, limit=100)
    assert sorted(yard.finished) == numbers
    assert counters(yard).preempted <= 2


@pytest.mark.parametrize("retraction", ["length", "newest", "priority", "slack", "fewest-lost"])
def test_pages_are_not_taken_from_a_row_that_takes_them_back_by_priority(retraction):
    yard = make_yard(
        pages=40,
        rows=5,
        context=200,
        headroom="none",
        enable_priority_scheduling=True,
        priority_scheduling_preemption_threshold=0,
        retraction_policy=retraction,
        max_in_flight=3,
    )
    numbers = [submit(yard, 1, 5)]
    yard.advance(3)
    numbers.append(submit(yard, 34, 3, priority=5))
    yard.run(3, limit=60)
    assert sorted(yard.finished) == numbers
    assert counters(yard).preempted + counters(yard).retracted <= 2


@pytest.mark.parametrize("end", [lambda number: Cancel([number]), lambda number: Pause()])
def test_a_bucket_that_nothing_waits_for_wakes_no_event_loop(end):
    yard = make_yard(tenants={"x": TenantSettings(tokens_per_s=1.0, burst_tokens=1)})
    submit(yard, 5, 3, tenant="x")
    yard.run()
    held_back = submit(yard, 5, 3, tenant="x")
    assert not yard.launch()
    assert yard.scheduler.wakeup_ns() > yard.now
    yard.apply(end(held_back))
    yard.now += 60 * NS_PER_S
    assert not yard.launch()
    assert yard.scheduler.wakeup_ns() is None
