from dataclasses import replace

import pytest

from tests.policy.timed_scheduler import MS, make_clocked, prompt
from tests.policy.waiting_order import row
from tokenyard.base import NS_PER_S, ConfigError, SchedulerSettings, Slo, Update
from tokenyard.policy import create_policy
from tokenyard.policy.retraction import create_victim_rule
from tokenyard.policy.urgency import Urgency


@pytest.fixture
def yard():
    """Three decoding requests: prompts of 30, 10 and 20 tokens that started one step after the other."""
    yard = make_clocked(enable_mixed_chunk=True, prefill_max_requests=1)
    yard.numbers = [
        yard.submit(prompt(30), max_new=100, priority=5, slo=Slo(tpot_ns=20 * MS)),
        yard.submit(prompt(10), max_new=100, priority=1, slo=Slo(tpot_ns=90 * MS)),
        yard.submit(prompt(20), max_new=100, slo=Slo(tpot_ns=30 * MS)),
    ]
    for _ in range(3):
        yard.turn()
    assert len(yard.scheduler.state.running) == 3
    return yard


def order(yard, **settings):
    chosen = replace(yard.scheduler.state.settings, **settings)
    rule = create_victim_rule(chosen, Urgency(chosen))
    rows = [row(yard, number) for number in yard.numbers]
    return [rows.index(victim) for victim in rule.victims(yard.scheduler.state.views(yard.now))]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("length", [2, 1, 0]),
        ("newest", [2, 1, 0]),
        ("priority", [2, 1, 0]),
        ("slack", [1, 0, 2]),
        ("fewest-lost", [1, 2, 0]),
    ],
)
def test_the_order_of_victims(yard, rule, expected):
    assert order(yard, retraction_policy=rule) == expected


def test_low_values_first_turns_the_priorities_but_none_given_stays_lowest(yard):
    chosen = {"enable_priority_scheduling": True, "schedule_low_priority_values_first": True}
    assert order(yard, retraction_policy="priority", **chosen) == [2, 0, 1]


def test_a_default_priority_and_a_boost_count_as_they_do_in_the_queue(yard):
    assert order(yard, retraction_policy="priority", default_priority_value=3) == [1, 2, 0]
    yard.scheduler.apply(Update(yard.numbers[1], boost=8), yard.now)
    assert order(yard, retraction_policy="priority") == [2, 0, 1]


def aged(*priorities):
    """Requests with these priorities that run, each arrived two seconds after the one before."""
    yard = make_clocked(enable_mixed_chunk=True)
    yard.numbers = []
    for priority in priorities:
        yard.numbers.append(yard.submit(prompt(10), max_new=100, priority=priority))
        yard.turn()
        yard.now += 2 * NS_PER_S
    yard.turn()
    assert len(yard.scheduler.state.running) == len(priorities)
    return yard


@pytest.mark.parametrize(("aging_s", "expected"), [(0.0, [0, 1]), (1.0, [1, 0]), (5.0, [0, 1])])
def test_age_counts_as_it_does_in_the_queue(aging_s, expected):
    assert order(aged(0, 1), retraction_policy="priority", priority_aging_s=aging_s) == expected


def test_under_edf_levels_are_strict_in_the_queue_and_for_pages():
    yard, settings = aged(0, 1), {"retraction_policy": "priority", "priority_aging_s": 1.0}
    policy = create_policy("edf", SchedulerSettings(enable_priority_scheduling=True, **settings))
    rows = [row(yard, number) for number in yard.numbers]
    assert list(policy.victims(yard.scheduler.state.views(yard.now))) == rows


def test_the_rule_is_used_when_pages_run_out():
    retractions = {}
    for rule in ("newest", "fewest-lost"):
        yard = make_clocked(pages=100, retraction_policy=rule, enable_mixed_chunk=True)
        old = yard.submit(prompt(10), max_new=60)
        new = yard.submit(prompt(30), max_new=60)
        yard.rest()
        retractions[rule] = yard.finished[old].retractions, yard.finished[new].retractions
    assert retractions["newest"] == (0, 1)
    assert retractions["fewest-lost"] == (1, 0)


def test_an_unknown_name_is_refused_with_the_choices():
    with pytest.raises(ConfigError, match="fewest-lost"):
        create_victim_rule(replace(SchedulerSettings(), retraction_policy="guess"), Urgency(SchedulerSettings()))
