"""A plan that stands for many decode steps leaves the scheduler exactly as the single steps do."""

from collections import deque
from dataclasses import fields
from enum import Enum
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.scheduler.harness import make_info
from tests.sim.small_workloads import setup, workload
from tokenyard.base import (
    Cancel,
    Request,
    SamplingParams,
    SchedulerSettings,
    StepPlan,
    StepResult,
    Submit,
    TenantSettings,
)
from tokenyard.cost import OnlineCost
from tokenyard.policy import POLICIES
from tokenyard.scheduler import Scheduler
from tokenyard.scheduler.request_table import RowList
from tokenyard.scheduler.scheduler_state import prior_cost_model
from tokenyard.sim.simulate import Outcome, Setup, simulate
from tokenyard.sim.traces.synthetic import synthetic
from tokenyard.sim.traces.workload import Workload

CONTEXT, EOS, FILLER, MS = 64, 2, 5, 1_000_000
OTHER_SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"headroom": "history", "disable_radix_cache": True},
    {"headroom": "past-future", "step_budget": "time", "retraction_policy": "newest"},
    {"headroom": "none", "enable_kv_events": True, "enable_priority_scheduling": True},
    {"tenants": {"x": TenantSettings(2.0, 900.0, burst_tokens=20), "": TenantSettings(1.0, 700.0, burst_tokens=9)}},
    {"queue_timeout_s": 0.02, "run_timeout_s": 0.05},
    {"decode_share": 0.9, "headroom": "none"},
)


def state(thing: Any, seen: dict[int, int]) -> Any:
    """Everything reachable from `thing` as nested tuples; objects met before are given by their place."""
    if isinstance(thing, (int, float, str, bytes, bool, type(None), Enum, np.generic)):
        return thing
    if isinstance(thing, np.ndarray):
        return thing.shape, thing.tobytes()
    if callable(thing) and not hasattr(thing, "__dict__"):
        return "callable"
    if id(thing) in seen:
        return "place", seen[id(thing)]
    seen[id(thing)] = len(seen)
    if isinstance(thing, RowList):
        return state(thing.rows, seen)
    if isinstance(thing, dict):
        return tuple((state(key, seen), state(value, seen)) for key, value in thing.items())
    if isinstance(thing, (list, tuple, deque)):
        return tuple(state(one, seen) for one in thing)
    if isinstance(thing, (set, frozenset)):
        return tuple(sorted(map(repr, thing)))
    slots = [name for cls in type(thing).__mro__ for name in getattr(cls, "__slots__", ())]
    fields = [*getattr(thing, "__dict__", {}), *(name for name in slots if hasattr(thing, name))]
    return type(thing).__name__, tuple((name, state(getattr(thing, name), seen)) for name in fields)


def whole_state(scheduler: Scheduler) -> Any:
    return state(scheduler.state, {})


def output_of(scheduler: Scheduler) -> tuple[Any, ...]:
    batch = scheduler.drain()
    columns = (batch.numbers.tolist(), batch.tokens.tolist(), batch.hits.tolist())
    return *columns, state(batch.started, {}), batch.finished, state(scheduler.kv_records(), {})


class Twins:
    """Two schedulers under the same events: one does single steps, the other as many at once as it may."""

    def __init__(self, chosen: SchedulerSettings, pages: int) -> None:
        info = make_info(pages, chosen.page_size, chosen.max_running_requests, CONTEXT)
        self.single, self.repeating = (Scheduler(chosen, info, prior_cost_model(info)) for _ in range(2))
        self.now = 1
        self.most_at_once = 1

    def apply(self, event: Any) -> None:
        self.now += 1
        for scheduler in (self.single, self.repeating):
            scheduler.apply(event, self.now)

    def turn(self, wanted: int, rng: np.random.Generator) -> bool:
        """Some steps, the last of which ends some rows; False if there is nothing to do."""
        durations = rng.integers(MS // 10, MS, wanted)
        launches = self.now + np.concatenate(([0], np.cumsum(durations)[:-1]))
        plan = self.repeating.plan(self.now)
        if plan is None:
            assert self.single.plan(self.now) is None
            return False
        for bound in (self.repeating.wakeup_ns(), self.repeating.repeats_until_ns()):
            if bound is not None:
                wanted = min(wanted, max(1, int(np.searchsorted(launches, bound))))
        times = self.repeating.multi_step(wanted)
        assert 1 <= times <= wanted
        self.most_at_once = max(self.most_at_once, times)
        tokens = np.full((times, len(plan.pool_rows)), FILLER, np.int32)
        tokens[-1] = np.where(rng.random(len(plan.pool_rows)) < 0.2, EOS, FILLER)
        tokens[-1, ~plan.sampled] = -1
        pages = []
        for step in range(times):
            one = self.single.plan(self.now)
            assert one is not None
            assert columns_of(one) == columns_of(plan, step)
            pages += list(zip(one.page_rows.tolist(), one.page_columns.tolist(), one.page_ids.tolist(), strict=True))
            self.now += int(durations[step])
            self.single.commit(StepResult(one.step, tokens[step].copy(), 1e-3), self.now)
        taken = zip(plan.page_rows.tolist(), plan.page_columns.tolist(), plan.page_ids.tolist(), strict=True)
        assert list(taken) == pages
        self.repeating.commit(StepResult(plan.step, tokens.ravel().copy(), 1e-3), self.now)
        return True

    def check(self) -> None:
        assert output_of(self.repeating) == output_of(self.single)
        assert whole_state(self.repeating) == whole_state(self.single)


def columns_of(plan: StepPlan, step: int = 0) -> tuple[Any, ...]:
    starts = (plan.starts + step).tolist()
    return plan.step + step, plan.pool_rows.tolist(), plan.epochs.tolist(), starts, plan.counts.tolist()


def request(number: int, rng: np.random.Generator, longest: int) -> Request:
    prompt = np.concatenate((np.full(rng.integers(0, 9), 7), rng.integers(3, 9, rng.integers(1, 12)))).astype(np.int32)
    return Request(
        number,
        str(number),
        prompt,
        SamplingParams(max_new_tokens=int(rng.integers(1, longest)), temperature=0.0),
        tenant=("", "x")[number % 2],
        priority=None if number % 3 else int(number % 5),
    )


@given(
    seed=st.integers(0, 2**32 - 1),
    policy=st.sampled_from(sorted(POLICIES)),
    others=st.sampled_from(OTHER_SETTINGS),
    page_size=st.sampled_from([1, 4]),
    tokens=st.sampled_from([64, 96, 400]),
    mixed=st.booleans(),
)
@settings(max_examples=examples(30), deadline=None, suppress_health_check=list(HealthCheck))
def test_many_steps_at_once_are_as_many_single_ones(seed, policy, others, page_size, tokens, mixed):
    rng = np.random.default_rng(seed)
    chosen = SchedulerSettings(
        page_size=page_size,
        max_running_requests=4,
        context_length=CONTEXT,
        schedule_policy=policy,
        enable_mixed_chunk=mixed,
        chunked_prefill_size=8,
        prefill_decode_interval=2,
        schedule_conservativeness=0.1,
        **others,
    )
    twins = Twins(chosen, tokens // page_size)
    for number in range(1, 9):
        twins.apply(Submit(request(number, rng, 40)))
        if number % 4 == 0:
            twins.apply(Cancel([number - 2]))
        for _ in range(int(rng.integers(0, 12))):
            twins.turn(int(rng.integers(1, 12)), rng)
            twins.check()
    while twins.turn(int(rng.integers(1, 12)), rng):
        twins.check()


def running(changes: dict[str, Any] | None = None, cost: Any = None, pages: int = 400) -> tuple[Scheduler, StepPlan]:
    """A scheduler with two running rows, and the plan of their next step."""
    info = make_info(pages, 4, 4, CONTEXT)
    scheduler = Scheduler(SchedulerSettings(page_size=4, context_length=CONTEXT, **(changes or {})), info, cost)
    for number in (1, 2):
        prompt = np.full(4 * number, 8 + number, np.int32)
        scheduler.submit(Submit(Request(number, "", prompt, SamplingParams(max_new_tokens=30, temperature=0.0))), 1)
    while True:
        plan = scheduler.plan(2)
        assert plan is not None
        if plan.decode_rows == 2:
            return scheduler, plan
        scheduler.commit(StepResult(plan.step, np.full(len(plan.pool_rows), FILLER, np.int32), 1e-3), 2)


def test_a_plan_is_repeated_up_to_the_first_limit():
    scheduler, plan = running()
    assert scheduler.multi_step(1000) == 29, "the first token came from prefill"
    assert plan.last_step == plan.step + 28


@pytest.mark.parametrize(
    ("changes", "cost"),
    [({"max_in_flight": 2}, None), ({}, OnlineCost(prior_cost_model(make_info())))],
    ids=["overlap", "learning"],
)
def test_what_looks_at_every_step_keeps_single_steps(changes, cost):
    scheduler, _ = running(changes, cost)
    assert scheduler.multi_step(10) == 1


def test_no_plan_repeats_while_a_request_waits():
    scheduler, _ = running()
    scheduler.submit(Submit(Request(3, "", np.full(4, 9, np.int32), SamplingParams(), tenant="")), 2)
    assert scheduler.multi_step(10) == 1


@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("policy", ["hits-first", "session"])
def test_a_plan_repeats_while_prefill_is_paused_or_nothing_that_waits_fits(policy, share):
    """Two rows decode in a pool of 17 pages, and a prompt of 15 pages waits."""
    changes = {"schedule_policy": policy, "headroom": "none", "decode_share": share}
    scheduler, decodes = running(changes, prior_cost_model(make_info()), pages=17)
    scheduler.commit(StepResult(decodes.step, np.full(2, FILLER, np.int32), 1e-3), MS)
    scheduler.submit(Submit(Request(3, "", np.full(60, 9, np.int32), SamplingParams(max_new_tokens=2))), MS)
    plan = scheduler.plan(MS)
    assert plan is not None
    assert plan.decode_rows == 2
    until = scheduler.repeats_until_ns()
    assert until is not None
    assert until == 51 * MS if share == 0.0 else until > MS
    assert scheduler.multi_step(8) == 8
    scheduler.submit(Submit(Request(4, "", np.full(2, 9, np.int32), SamplingParams(max_new_tokens=2))), 2 * MS)
    assert scheduler.repeats_until_ns() == 0, "a request that has just arrived may fit"


def test_repeats_end_where_the_pages_do():
    scheduler, plan = running(changes={"headroom": "none"}, pages=9)
    assert scheduler.multi_step(20) == 12, (
        "in addition to the prompts' 3 pages there are 6: 3 for each row, 4 steps on each"
    )
    assert len(plan.page_ids) == 6


def test_a_row_that_stops_on_the_way_is_an_error():
    scheduler, plan = running()
    assert scheduler.multi_step(3) == 3
    tokens = np.full(6, FILLER, np.int32)
    tokens[2] = EOS
    with pytest.raises(ValueError, match="stopped before the last"):
        scheduler.commit(StepResult(plan.step, tokens, 1e-3), 3)


def test_what_was_cancelled_on_the_way_gets_no_tokens():
    scheduler, plan = running()
    assert scheduler.multi_step(3) == 3
    scheduler.cancel(Cancel([1]), 3)
    scheduler.drain()
    scheduler.commit(StepResult(plan.step, np.full(6, FILLER, np.int32), 1e-3), 4)
    assert scheduler.drain().numbers.tolist() == [2, 2, 2]


# ---- the simulator -------------------------------------------------------------------------------------------------


def same_outcome(requests: Workload, chosen: Setup) -> Outcome:
    """Serve with and without an observer, which sees single steps; both must come out alike."""
    seen: list[int] = []
    repeating = simulate(requests, chosen)
    single = simulate(requests, chosen, lambda begin, end, plan, work, scheduler: seen.append(plan.num_steps))
    assert set(seen) == {1}
    for column in fields(Outcome):
        if column.name != "wall_seconds":
            left, right = (state(getattr(outcome, column.name), {}) for outcome in (repeating, single))
            assert left == right, column.name
    return repeating


@pytest.mark.part(8)
@pytest.mark.parametrize("name", ["sglang-default", "sglang-lpm", "vllm-default", "sarathi"])
@pytest.mark.parametrize("pool_tokens", [None, 16_000])
def test_the_simulator_serves_alike(name, pool_tokens):
    traffic = synthetic("multi-turn", 60, 3.0, seed=7)
    same_outcome(traffic, setup(name, settings={"disable_radix_cache": False}, kv_pool_tokens=pool_tokens))


@pytest.mark.part(2)
@pytest.mark.parametrize("policy", ["fcfs", "session"])
def test_it_does_where_the_time_decides_what_is_evicted(policy):
    changes = {"disable_radix_cache": False, "radix_eviction_policy": "reuse", "schedule_policy": policy}
    same_outcome(synthetic("multi-turn", 60, 3.0, seed=7), setup("sglang-lpm", settings=changes, kv_pool_tokens=16_000))


@pytest.mark.part(3)
@pytest.mark.parametrize(
    "changes",
    [
        {"schedule_policy": "slo", "slo_max_wait_s": 5.0},
        {"schedule_policy": "slo", "slo_reject": True},
        {"schedule_policy": "vtc", "tenants": {"": TenantSettings(tokens_per_s=3000.0, burst_tokens=99)}},
        {"queue_timeout_s": 0.5, "run_timeout_s": 2.0},
        {"max_in_flight": 2},
        {"schedule_policy": "adaptive"},
    ],
)
def test_it_does_under_any_policy(changes):
    same_outcome(synthetic("tenants", 80, 12.0, seed=3), setup("vllm-default", settings=changes, host_s=0.002))


def test_it_does_behind_a_router():
    same_outcome(synthetic("plain", 80, 12.0, seed=3), setup(replicas=2, router="least_load"))


def test_single_steps_are_rare_where_little_happens(monkeypatch):
    planned: list[StepPlan | None] = []
    plan = Scheduler.plan
    monkeypatch.setattr(Scheduler, "plan", lambda self, now: planned.append(plan(self, now)) or planned[-1])
    outcome = same_outcome(workload((0.0, 100, 400), (1.0, 100, 300)), setup("vllm-default"))
    assert outcome.completion_tokens.tolist() == [400, 300]
    plans = [one for one in planned if one is not None]
    assert sum(one.num_steps for one in plans) == 2 * outcome.counters["steps"]
    assert len(plans) < outcome.counters["steps"] + 20
