"""Drafts to verify: what they change is the number of steps, never a token, an end or a page."""

import io
import random
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from tests.examples import examples
from tests.scheduler.harness import Yard, make_info
from tokenyard.base import Cancel, Pause, Resume, SamplingParams, SchedulerSettings, StopFound, TenantSettings
from tokenyard.cost import LinearCost, LinearTerms
from tokenyard.executor.mock import FixedStepCost, MockExecutor
from tokenyard.policy import POLICIES
from tokenyard.scheduler.planner import Planner
from tokenyard.tape.codec import Origin, Tape
from tokenyard.tape.recorder import RecordingScheduler
from tokenyard.tape.replay import replay

ANSWERS = (3, 30)


def make_yard(drafts: int, right: float, depth: int = 1, pages: int = 64, page_size: int = 4, **more) -> Yard:
    settings = SchedulerSettings(
        page_size=page_size, max_running_requests=4, context_length=64, max_in_flight=depth, **more
    )
    info = make_info(pages, page_size, 4 + depth, 64)
    cost = FixedStepCost(0.001)
    device = MockExecutor(info, cost, sleep=False, answer_tokens=ANSWERS, drafts=drafts, draft_right=right)
    return Yard(settings, info, executor=device)


def submit_some(yard: Yard, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [
        yard.submit(
            [rng.randint(3, 9) for _ in range(rng.randint(1, 20))],
            sampling=SamplingParams(
                max_new_tokens=rng.choice((1, 5, 17, 40)), temperature=0.0, stop_token_ids=[rng.randint(3, 96)]
            ),
        )
        for _ in range(12)
    ]


def ends(yard: Yard) -> dict:
    return {n: (end.reason, end.matched, end.completion_tokens) for n, end in sorted(yard.finished.items())}


@pytest.mark.part(3)
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(("drafts", "right"), [(1, 1.0), (4, 1.0), (4, 0.0), (3, 0.6), (40, 0.9)])
@pytest.mark.parametrize("page_size", [1, 4])
def test_every_token_and_end_is_the_same(depth, drafts, right, page_size):
    plain, drafting = (make_yard(k, right, depth, 800 // page_size, page_size) for k in (0, drafts))
    for yard in (plain, drafting):
        submit_some(yard)
        while True:
            while len(yard.tickets) < depth and yard.launch():
                pass
            if not yard.commit():
                break
            yard.check()
    assert drafting.tokens == plain.tokens
    assert ends(drafting) == ends(plain)
    assert drafting.scheduler.idle() is None
    steps = [len(yard.plans) for yard in (plain, drafting)]
    if right == 1.0:
        assert steps[1] < steps[0]
    if right == 0.0 and depth == 1:
        assert steps[1] == steps[0], "a refused draft costs no step"


def test_right_drafts_are_all_accepted():
    yard = make_yard(4, 1.0, page_size=4)
    number = yard.submit([5] * 9, sampling=SamplingParams(max_new_tokens=26, ignore_eos=True, temperature=0.0))
    yard.run()
    assert yard.finished[number].completion_tokens == 26
    # One step for the prompt and the first token, then five tokens a step.
    assert len(yard.plans) == 1 + 5
    assert [plan.verify_rows for plan in yard.plans] == [0, 1, 1, 1, 1, 1]
    assert max(int((plan.starts + plan.counts).max()) for plan in yard.plans) == 9 + 25, "cut at the limit"


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_where_memory_is_short_drafts_cost_no_request_its_pages(policy):
    plain, drafting = (make_yard(k, 0.5, 2, 14, 4, schedule_policy=policy, headroom="none") for k in (0, 3))
    for yard in (plain, drafting):
        submit_some(yard, seed=7)
        yard.run(2)
        assert yard.scheduler.idle() is None
    assert drafting.tokens == plain.tokens
    assert ends(drafting) == ends(plain)


@pytest.mark.part(4)
@pytest.mark.parametrize("policy", ["fcfs", "lpm", "mlfq", "vtc"])
@pytest.mark.parametrize("cache", [True, False])
def test_with_one_plan_in_flight_wrong_drafts_leave_each_retraction_as_it_is(policy, cache):
    total = 0
    for seed in range(6):
        retracted = []
        for drafts in (0, 3):
            yard = make_yard(
                drafts, 0.0, pages=14, schedule_policy=policy, headroom="none", disable_radix_cache=not cache
            )
            retracted.append(watch_retractions(yard.scheduler.state))
            submit_some(yard, seed)
            while yard.advance():
                yard.check()
            assert yard.scheduler.idle() is None
        assert retracted[0] == retracted[1]
        total += len(retracted[0])
    assert total > 10


def watch_retractions(state):
    retract, seen = state.retract, []

    def watched(row, why, now):
        seen.append((int(state.table.number[row]), int(state.table.known[row]), why))
        retract(row, why, now)

    state.retract = watched
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_pages_of_wrong_drafts_are_there_for_other_rows(depth):
    """Only the first request has drafts; the second, short one must not lose its place to them."""
    for pages in range(22, 70):
        retracted = []
        for drafts in (0, 7):
            yard = make_yard(drafts, 0.0, depth, pages, 1, headroom="none", disable_radix_cache=True)
            first = yard.submit([5] * 10, sampling=SamplingParams(max_new_tokens=50, ignore_eos=True, temperature=0.0))
            yard.submit([6] * 10, sampling=SamplingParams(max_new_tokens=6, ignore_eos=True, temperature=0.0))
            leave_drafts_to(first, yard)
            yard.run(depth)
            assert yard.scheduler.idle() is None
            retracted.append(yard.scheduler.state.observer.counters.retracted)
        assert retracted[1] <= retracted[0], f"with {pages} pages"


def leave_drafts_to(number, yard):
    collect = yard.executor.collect

    def reported(ticket):
        result = collect(ticket)
        row = yard.scheduler.state.table.row_of(number)
        if result.drafted is not None:
            own = -1 if row is None else yard.scheduler.state.table.pool_row[row]
            result.drafted = np.where(ticket.plan.pool_rows == own, result.drafted, 0).astype(np.int32)
        return result

    yard.executor.collect = reported


@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("policy", ["dlpm", "mlfq", "vtc"])
def test_an_answer_is_charged_its_tokens_whatever_becomes_of_its_drafts(policy, right):
    yard = make_yard(4, right, pages=800, page_size=1, schedule_policy=policy, tenants={"*": TenantSettings()})
    state, charged = yard.scheduler.state, {"policy": Counter(), "limits": Counter()}
    for name, counts in charged.items():
        watch_charges(getattr(state, name), state.table, counts)
    submit_some(yard)
    yard.run()
    # The first token of an answer comes with its prompt.
    tokens = {n: len(own) - 1 for n, own in yard.tokens.items() if len(own) > 1}
    assert charged == {"policy": tokens, "limits": tokens}
    assert any(plan.verify_rows for plan in yard.plans)


def watch_charges(judge, table, counts):
    charge = judge.charge_decode

    def watched(rows):
        assert len(set(rows.tolist())) == len(rows)
        counts.update(table.number[rows].tolist())
        charge(rows)

    judge.charge_decode = watched


def test_a_request_sinks_as_fast_with_drafts_as_without():
    served = []
    for drafts in (0, 7):
        yard = make_yard(
            drafts, 1.0, pages=800, page_size=1, schedule_policy="mlfq", policy_options={"quantum_tokens": 8}
        )
        yard.submit([5], sampling=SamplingParams(max_new_tokens=60, ignore_eos=True))
        later = yard.submit([6] * 8, max_new=1)
        yard.apply(Pause(numbers=[later]))
        while len(yard.tokens.get(1, [])) < 33:
            yard.advance()
        row = yard.scheduler.state.table.row_of(1)
        views = yard.scheduler.state.views(yard.now)
        asker = yard.scheduler.state.table.row_of(later)
        served.append(list(yard.scheduler.state.policy.outranked(views, asker)) == [row])
    assert served == [True, True]


@pytest.mark.parametrize("depth", [2, *(pytest.param(depth, marks=pytest.mark.slow) for depth in (1, 3))])
def test_random_events_lose_no_page(depth):
    rng = random.Random(depth)
    yard = make_yard(5, 0.7, depth, 20, 4, headroom="none")
    turns = max(examples(500), 200)
    for turn in range(turns):
        if turn < turns - 50 and rng.random() < 0.2:
            submit_some(yard, seed=turn)
        number = rng.randint(1, 12 * (turn + 1))
        happens = rng.random()
        if happens < 0.05:
            yard.apply(Cancel([number]))
        elif happens < 0.1:
            yard.apply(StopFound(number, rng.randint(0, 3), "x"))
        elif happens < 0.15:
            yard.apply(Pause(numbers=[number]))
            yard.apply(Resume([number]))
        while len(yard.tickets) < depth and yard.launch():
            pass
        yard.commit()
        yard.check()
    yard.run(depth)
    assert yard.scheduler.idle() is None


def test_a_tape_holds_what_drafts_became():
    settings = SchedulerSettings(page_size=4, max_running_requests=4, context_length=64, max_in_flight=2)
    info = make_info(40, 4, 6, 64)
    yard = make_yard(3, 0.6, 2)
    file = io.BytesIO()
    yard.scheduler = RecordingScheduler(Origin(settings, info), file, b"key", "test")
    submit_some(yard)
    tickets = []
    while True:
        while len(tickets) < 2 and (plan := yard.scheduler.plan(yard.now)) is not None:
            tickets.append(yard.executor.launch(plan))
        if not tickets:
            break
        yard.now += 1000
        yard.scheduler.commit(yard.executor.collect(tickets.pop(0)), yard.now)
    report = replay(Tape(file.getvalue(), "tape"))
    assert report.difference is None
    assert report.plans == report.equal > 20


@pytest.mark.parametrize(("floor_ms", "together"), [(10.0, True), (0.1, False)])
def test_two_groups_verify_together_where_reading_the_weights_takes_the_time(floor_ms, together):
    """The rows of one group are ready, those of the other wait for the commit of their last step."""
    cost = LinearCost(LinearTerms(0.0, floor_ms, 0.0, 0.1, 0.0, 0.0))
    planner = Planner(SimpleNamespace(cost=cost))
    ready, starts = np.array([True, False, False, False]), np.full(4, 50, np.int32)
    assert planner.should_wait_to_verify(np.full(4, 3, np.int32), ready, starts) == together
    # Rows that only decode keep the device busy, so no row waits for others.
    assert not planner.should_wait_to_verify(np.array([0, 3, 3, 3], np.int32), ready, starts)
    assert not planner.should_wait_to_verify(np.full(4, 3, np.int32), np.ones(4, bool), starts)
