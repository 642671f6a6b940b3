"""What every policy owes, alone and with what settings put around it: the real scheduler, the mock device."""

import functools

import numpy as np
import pytest

from tests.policy.waiting_order import admissions, make_yard
from tokenyard.base import TenantSettings
from tokenyard.policy import POLICIES, create_policy

AROUND = {
    "": {},
    "priority": {"enable_priority_scheduling": True},
    "strict priority": {
        "enable_priority_scheduling": True,
        "priority_aging_s": 0.0,
        "priority_scheduling_preemption_threshold": 1,
    },
    "levels": {"enable_service_levels": True, "service_level_quantum_tokens": 16},
    "bounded": {"max_overtaken_tokens": 50},
    "all": {"enable_priority_scheduling": True, "enable_service_levels": True, "max_overtaken_tokens": 100},
}
NAMES = [*POLICIES, "priority"]
EVERY = [(name, around) for name in NAMES for around in AROUND]
COUNT = 28
POOLS = {"ample": {"pages": 2000}, "tight": {"pages": 40, "page_size": 4}}


def submit_some(yard, count=COUNT, seed=0):
    draw = np.random.default_rng(seed)
    for index in range(count):
        prompt = [int(draw.integers(5, 9))] * int(draw.integers(1, 30)) + [20 + index] * int(draw.integers(1, 10))
        yard.submit(
            prompt,
            max_new=int(draw.integers(1, 20)),
            priority=[None, 0, 3, 20][draw.integers(4)],
            service_class=[None, "priority", "high", "low"][draw.integers(4)],
            tenant=["", "a", "b"][draw.integers(3)],
            routing_key=[None, "x", "y"][draw.integers(3)],
            deadline_ns=[None, 10**7, 10**9][draw.integers(3)],
        )
        for _ in range(int(draw.integers(0, 3))):
            yard.launch()
            yard.commit()


def run(name, around="", pool="ample", depth=2, **more):
    settings = {"schedule_policy": name, "prefill_max_requests": 3, "max_in_flight": depth, "chunked_prefill_size": 16}
    yard = make_yard(rows=6, answer_tokens=(2, 15), **(settings | POOLS[pool] | AROUND[around] | more))
    submit_some(yard)
    yard.run(depth)
    return yard


@functools.cache
def expected_run():
    return run("fcfs")


@pytest.mark.part(9)
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize(("name", "around"), EVERY)
def test_every_request_gets_its_whole_answer_once_and_events_give_their_plans(name, around, pool):
    yard, expected = run(name, around, pool), expected_run()
    assert yard.tokens == expected.tokens
    assert {n: f.reason for n, f in yard.finished.items()} == {n: f.reason for n, f in expected.finished.items()}
    assert yard.scheduler.idle() is None
    if pool == "ample":
        return
    for one, other in zip(yard.plans, run(name, around, pool).plans, strict=True):
        for column in ("pool_rows", "epochs", "starts", "counts", "tokens", "page_rows", "page_columns", "page_ids"):
            assert np.array_equal(getattr(one, column), getattr(other, column))


@pytest.mark.part(3)
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", [name for name in NAMES if name != "random"])
def test_equal_requests_are_served_in_the_order_of_their_arrival(name, around):
    yard = make_yard(
        rows=2,
        schedule_policy=name,
        disable_radix_cache=not POLICIES.get(name, POLICIES["fcfs"]).needs_tree,
        **AROUND[around],
    )
    numbers = [yard.submit([5] * 20, max_new=3, arrival_ns=1000) for _ in range(12)]
    yard.run()
    assert admissions(yard) == numbers


@pytest.mark.parametrize("name", NAMES)
def test_a_policy_says_what_may_overtake(name):
    from tokenyard.base import SchedulerSettings

    assert create_policy(name, SchedulerSettings(schedule_policy=name)).overtaking


@pytest.mark.parametrize("name", NAMES)
def test_tenants_with_limits_drain_too(name):
    yard = run(name, tenants={"a": TenantSettings(weight=3.0, max_running=2)})
    assert len(yard.finished) == COUNT


@pytest.mark.part(6)
@pytest.mark.parametrize("name", NAMES)
def test_the_queue_length_is_no_limit(name):
    yard = make_yard(rows=4, schedule_policy=name)
    for index in range(150):
        yard.submit([5 + index % 7] * (1 + index % 11), max_new=1 + index % 3)
    yard.run()
    assert len(yard.finished) == 150
