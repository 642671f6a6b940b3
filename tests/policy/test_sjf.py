import pytest

from tests.policy.waiting_order import line, make_yard, row
from tokenyard.base import SetPolicy
from tokenyard.policy.output_lengths import MAX_LENGTHS_KEPT, MIN_LENGTHS, OutputLengthHistory


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


@pytest.mark.parametrize("name", ["sjf", "short-first"])
def test_both_names_of_shortest_job_first_give_the_same_order(name):
    yard = make_yard()
    numbers = [yard.submit([5] * prompt, max_new=4) for prompt in (30, 10, 20)]
    yard.apply(SetPolicy(name, {"output_weight": 2.0}))
    assert line(yard) == [numbers[i] for i in (1, 2, 0)]
    assert yard.scheduler.snapshot(0).policy == "short-first"
    started = make_yard(schedule_policy=name, policy_options={"quantile": 0.9})
    assert started.scheduler.state.policy.describe() == "short-first"
