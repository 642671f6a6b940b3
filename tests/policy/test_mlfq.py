import numpy as np
import pytest

from tests.policy.waiting_order import line, make_yard
from tokenyard.base import SetPolicy

S = 10**9


def run_until_all_run(yard):
    while len(yard.scheduler.state.waiting):
        yard.launch()
        yard.commit()


def mlfq(**more):
    options = {"quantum_tokens": 8, "promote_s": 30.0}
    return make_yard(schedule_policy="mlfq", policy_options=options, disable_radix_cache=True, **more)


def test_mlfq_joins_the_level_that_lasts_for_its_prompt():
    yard = mlfq()
    numbers = [yard.submit([5] * prompt) for prompt in (33, 17, 9, 8, 1, 16)]
    assert line(yard) == [numbers[i] for i in (3, 4, 2, 5, 1, 0)]


def test_mlfq_moves_a_served_request_down_and_a_new_one_preempts_it():
    yard = mlfq(rows=1)
    served = yard.submit([5] * 2, max_new=40)
    for _ in range(12):
        yard.launch()
        yard.commit()
    fresh = yard.submit([6] * 2, max_new=3)
    yard.launch()
    state = yard.scheduler.state
    assert [int(state.table.number[r]) for r in state.running.rows] == [fresh]
    assert line(yard) == [served]
    yard.run()
    assert yard.finished[served].completion_tokens == 40


def test_mlfq_promotes_a_request_that_waited_promote_s():
    yard = mlfq()
    now = 100 * S
    old = yard.submit([5] * 100, arrival_ns=now - 30 * S)
    almost = yard.submit([5] * 100, arrival_ns=now - 29 * S)
    short = yard.submit([5], arrival_ns=now)
    assert line(yard, now) == [old, short, almost]


def test_mlfq_can_replace_another_policy_while_requests_run():
    yard = make_yard()
    numbers = [yard.submit([5] * 4, max_new=9) for _ in range(3)]
    run_until_all_run(yard)
    yard.apply(SetPolicy("mlfq"))
    yard.launch()
    yard.commit()
    numbers.append(yard.submit([5] * 4, max_new=9))
    yard.run()
    assert [yard.finished[number].completion_tokens for number in numbers] == [9] * 4


@pytest.mark.parametrize("seed", range(3))
def test_mlfq_drops_the_state_of_ended_requests(seed):
    yard = mlfq(rows=2)
    rng = np.random.default_rng(seed)
    for _ in range(30):
        yard.submit([5] * int(rng.integers(1, 40)), max_new=int(rng.integers(1, 30)))
    yard.run()
    policy = yard.scheduler.state.policy
    assert not policy.served.any()
    assert not policy.idle_since.any()
