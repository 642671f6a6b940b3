import numpy as np
import pytest

from tests.policy.waiting_order import line, make_yard, row
from tokenyard.base import SetPolicy
from tokenyard.policy.output_lengths import MAX_LENGTHS_KEPT, MIN_LENGTHS, OutputLengthHistory

S = 10**9


def run_until_all_run(yard):
    while len(yard.scheduler.state.waiting):
        yard.launch()
        yard.commit()


def test_history_predicts_a_quantile_of_answers_longer_than_what_is_written():
    history = OutputLengthHistory(0.5)
    for tokens in range(MIN_LENGTHS - 1):
        history.add(10 * tokens)
    assert history.predict(-1) is None, "too few to judge"
    history.add(1000)
    assert history.predict(-1) == 40
    assert history.predict(15) is None
    for _ in range(MAX_LENGTHS_KEPT):
        history.add(7)
    assert history.predict(0) == 7, "old answers are forgotten"


def test_short_first_weighs_uncached_prompt_and_answer():
    yard = make_yard(schedule_policy="short-first")
    numbers = [yard.submit([5 + i] * prompt, max_new=new) for i, (prompt, new) in enumerate(((9, 9), (3, 20), (10, 7)))]
    assert line(yard) == [numbers[i] for i in (2, 0, 1)]


def test_short_first_learns_the_answers_of_each_tenant():
    yard = make_yard(schedule_policy="short-first", answer_tokens=(3, 3), disable_radix_cache=True)
    for index in range(MIN_LENGTHS):
        yard.submit([5 + index] * 4, max_new=100, tenant="terse")
    yard.run()
    unknown = yard.submit([5] * 4, max_new=20, tenant="new")
    known = yard.submit([6] * 4, max_new=100, tenant="terse")
    capped = yard.submit([7] * 4, max_new=2, tenant="terse")
    other_length = yard.submit([8] * 40, max_new=100, tenant="terse")
    assert line(yard) == [capped, known, unknown, other_length]


def test_short_first_judges_a_resumed_request_by_what_is_still_to_come():
    yard = make_yard(schedule_policy="short-first", disable_radix_cache=True)
    resumed = yard.submit([5] * 4, max_new=30)
    for _ in range(21):
        yard.launch()
        yard.commit()
    yard.scheduler.state.retract(row(yard, resumed), "paused", 0)
    fresh = yard.submit([6] * 4, max_new=30)
    longer = yard.submit([6] * 8, max_new=30)
    assert line(yard) == [resumed, fresh, longer]


def mlfq(**more):
    options = {"quantum_tokens": 8, "promote_s": 30.0}
    return make_yard(schedule_policy="mlfq", policy_options=options, disable_radix_cache=True, **more)


def test_mlfq_joins_the_level_that_lasts_for_its_prompt():
    yard = mlfq()
    numbers = [yard.submit([5] * prompt) for prompt in (33, 17, 9, 8, 1, 16)]
    assert line(yard) == [numbers[i] for i in (3, 4, 2, 5, 1, 0)]


def test_mlfq_lets_who_was_served_sink_and_a_fresh_one_take_his_row():
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


def test_mlfq_promotes_who_has_waited_for_long_and_then_only_earlier_ones_pass():
    yard = mlfq()
    now = 100 * S
    old = yard.submit([5] * 100, arrival_ns=now - 30 * S)
    almost = yard.submit([5] * 100, arrival_ns=now - 29 * S)
    short = yard.submit([5], arrival_ns=now)
    assert line(yard, now) == [old, short, almost]


def test_mlfq_can_take_over_while_others_run():
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
def test_mlfq_forgets_who_has_ended(seed):
    yard = mlfq(rows=2)
    rng = np.random.default_rng(seed)
    for _ in range(30):
        yard.submit([5] * int(rng.integers(1, 40)), max_new=int(rng.integers(1, 30)))
    yard.run()
    policy = yard.scheduler.state.policy
    assert not policy._served.any()
    assert not policy._idle_since.any()
