import pytest

from tests.policy.waiting_order import line, make_yard, put_into_tree, row
from tokenyard.base import ConfigError, SchedulerSettings, Update
from tokenyard.policy import create_policy

ON = {"enable_priority_scheduling": True}
NO_AGING = ON | {"priority_aging_s": 0.0}
S = 10**9


def admitted(yard):
    state = yard.scheduler.state
    rows = [*state.prefilling.rows.tolist(), *state.running.rows.tolist()]
    return {int(state.table.number[row]) for row in rows}


def run_until_all_run(yard):
    while len(yard.scheduler.state.waiting):
        yard.launch()
        yard.commit()


def test_priorities_are_ignored_unless_they_are_enabled():
    yard = make_yard()
    numbers = [yard.submit([5], priority=priority) for priority in (0, 9)]
    assert line(yard) == numbers


def test_high_values_first_and_none_given_is_the_lowest():
    yard = make_yard(**NO_AGING)
    numbers = [yard.submit([5], priority=priority) for priority in (None, -(2**62), 3, 2**62, 3, None)]
    assert line(yard) == [numbers[i] for i in (3, 2, 4, 1, 0, 5)]


def test_low_values_first_and_none_given_is_still_the_lowest():
    yard = make_yard(**NO_AGING, schedule_low_priority_values_first=True)
    numbers = [yard.submit([5], priority=priority) for priority in (None, 9, -2, 3)]
    assert line(yard) == [numbers[i] for i in (2, 3, 1, 0)]


def test_an_absurdly_low_priority_does_not_hold_up_those_without_one():
    yard = make_yard(**ON)
    absurd = yard.submit([5], priority=-(10**9), arrival_ns=S)
    none, urgent = (yard.submit([5], priority=priority, arrival_ns=2 * S) for priority in (None, 0))
    late = yard.submit([5], priority=0, arrival_ns=2 * S + 1002 * 5 * S)
    assert line(yard) == [urgent, absurd, none, late]


def test_the_policy_named_priority_is_fcfs_with_priorities():
    yard = make_yard(schedule_policy="priority")
    numbers = [yard.submit([5], priority=priority) for priority in (0, 9)]
    assert line(yard) == numbers[::-1]
    assert yard.scheduler.snapshot(1).policy == "priority+fcfs"


def test_default_priority_value_stands_in_for_none():
    yard = make_yard(**NO_AGING, default_priority_value=5)
    numbers = [yard.submit([5], priority=priority) for priority in (4, None, 6)]
    assert line(yard) == numbers[::-1]


def test_among_equals_a_started_prefill_yields_as_the_inner_policy_says():
    yard = make_yard(**NO_AGING, schedule_policy="vtc", chunked_prefill_size=16, max_partial_prefills=2)
    long = yard.submit([5] * 100, max_new=2, tenant="a", priority=1)
    yard.launch()
    yard.commit()
    low = yard.submit([6] * 10, max_new=2, tenant="b", priority=0)
    same, other = (yard.submit([6 + i] * 10, max_new=2, tenant="ab"[i], priority=1) for i in range(2))
    yard.run()
    first = {number: yard.finished[number].first_token_ns for number in (long, low, same, other)}
    assert first[other] < first[long] < first[same] < first[low]


def test_equals_are_ordered_by_the_policy_inside():
    yard = make_yard(**NO_AGING, schedule_policy="lpm")
    put_into_tree(yard, [7] * 50)
    low_hit, low_cold = yard.submit([7] * 50 + [8], priority=0), yard.submit([8] * 50, priority=0)
    high_cold, high_hit = yard.submit([9] * 50, priority=1), yard.submit([7] * 20 + [9], priority=1)
    assert line(yard) == [high_hit, high_cold, low_hit, low_cold]


def test_aging_is_worth_a_level_per_interval():
    yard = make_yard(**ON, priority_aging_s=5.0)
    old = yard.submit([5], priority=0, arrival_ns=1 * S)
    young = yard.submit([5], priority=2, arrival_ns=10 * S)
    late = yard.submit([5], priority=2, arrival_ns=12 * S)
    assert line(yard, 100 * S) == [young, old, late], "two levels are worth ten seconds"
    absent = yard.submit([5], arrival_ns=12 * S)
    assert line(yard, 100 * S)[-1] == absent


def test_aging_cuts_time_into_slots_in_which_another_policy_decides():
    yard = make_yard(**ON, priority_aging_s=5.0, schedule_policy="lpm")
    put_into_tree(yard, [7] * 50)
    request_state = yard.submit([8] * 50, priority=1, arrival_ns=11 * S)
    hit_same_slot = yard.submit([7] * 50, priority=1, arrival_ns=14 * S)
    hit_next_slot = yard.submit([7] * 50, priority=1, arrival_ns=16 * S)
    assert line(yard, 100 * S) == [hit_same_slot, request_state, hit_next_slot]


@pytest.mark.parametrize(("priority", "preempts"), [(10, False), (11, True)])
def test_a_full_batch_is_preempted_from_a_difference_above_the_threshold_of_10(priority, preempts):
    yard = make_yard(rows=2, **NO_AGING)
    first, second = (yard.submit([5, 6 + i], max_new=30, priority=0) for i in range(2))
    run_until_all_run(yard)
    urgent = yard.submit([9, 9], max_new=30, priority=priority)
    yard.launch()
    assert admitted(yard) == ({first, urgent} if preempts else {first, second}), "the latest arrival is preempted"
    yard.run()
    assert all(finish.completion_tokens == 30 for finish in yard.finished.values())
    assert yard.finished[second].retractions == preempts


def test_preemption_can_be_switched_off():
    yard = make_yard(rows=1, **NO_AGING, disable_priority_preemption=True)
    first = yard.submit([5], max_new=30, priority=0)
    run_until_all_run(yard)
    yard.submit([5], max_new=30, priority=1000)
    yard.launch()
    assert admitted(yard) == {first}


def test_the_threshold_acts_on_aged_priorities():
    def urgent_gets_in(arrival_s):
        yard = make_yard(rows=1, **ON, priority_aging_s=5.0)
        yard.submit([5], max_new=30, priority=0, arrival_ns=100 * S)
        run_until_all_run(yard)
        urgent = yard.submit([6], max_new=30, priority=12, arrival_ns=arrival_s * S)
        yard.launch()
        return urgent in admitted(yard)

    assert urgent_gets_in(109), "12 levels less a bit under 2 for coming later"
    assert not urgent_gets_in(110)


@pytest.mark.parametrize("depth", [1, 2])
def test_pages_are_taken_from_the_least_urgent_and_nothing_is_lost(depth):
    yard = make_yard(pages=64, rows=8, **NO_AGING, max_in_flight=depth, prefill_max_requests=-1)
    low = [yard.submit([5 + i] * 14, max_new=4, priority=i) for i in range(4)]
    while admitted(yard) != set(low):
        assert yard.launch()
        yard.commit()
    urgent = yard.submit([50] * 30, max_new=4, priority=100)
    while urgent not in admitted(yard) and urgent not in yard.finished:
        yard.launch()
        yard.check()
        assert yard.commit()
    counters = yard.scheduler.state.observer.counters
    assert [counters.preempted, counters.retracted] == [2, 0]
    assert low[3] in admitted(yard) | set(yard.finished)
    yard.run(depth)
    assert all(len(yard.tokens[number]) == 4 for number in [*low, urgent])
    assert all(yard.finished[number].retractions for number in low[:2])


def test_no_request_is_preempted_if_that_would_not_be_enough():
    yard = make_yard(pages=64, rows=8, **NO_AGING, prefill_max_requests=-1)
    low = yard.submit([5] * 10, max_new=12, priority=0)
    peer = yard.submit([6] * 30, max_new=12, priority=50)
    run_until_all_run(yard)
    yard.submit([7] * 40, max_new=2, priority=55)
    yard.launch()
    assert admitted(yard) == {low, peer}


def test_a_shared_prefix_counts_once_no_other_request_holds_it():
    yard = make_yard(pages=80, rows=8, **NO_AGING, prefill_max_requests=-1)
    first = yard.submit([5] * 40 + [6], max_new=10, priority=0)
    yard.launch()
    yard.commit()
    second = yard.submit([5] * 40 + [7], max_new=10, priority=0)
    run_until_all_run(yard)
    assert admitted(yard) == {first, second}
    urgent = yard.submit([8] * 60, max_new=2, priority=100)
    yard.launch()
    assert admitted(yard) == {urgent}


def test_a_preempted_request_does_not_preempt_back():
    yard = make_yard(rows=1, **NO_AGING, priority_scheduling_preemption_threshold=0)
    low = yard.submit([5], max_new=40, priority=0)
    run_until_all_run(yard)
    for _ in range(3):
        run_until_all_run(yard)
        urgent = yard.submit([6], max_new=5, priority=1)
        while urgent not in yard.finished:
            assert yard.launch()
            yard.commit()
    yard.run()
    assert yard.finished[low].retractions == 3
    assert yard.scheduler.state.observer.counters.preempted == 3


def test_an_urgent_newcomer_goes_before_a_started_prefill_but_an_equal_one_does_not():
    yard = make_yard(**NO_AGING, chunked_prefill_size=16, prefill_max_requests=-1, prefill_decode_interval=0)
    long = yard.submit([5] * 60, priority=5)
    yard.launch()
    yard.commit()
    equal, urgent = yard.submit([6] * 10, max_new=1, priority=5), yard.submit([7] * 10, max_new=1, priority=6)
    yard.launch()
    pool_row = yard.scheduler.state.table.pool_row
    planned = yard.plans[-1].pool_rows.tolist()
    assert planned == [pool_row[row(yard, urgent)], pool_row[row(yard, long)]]
    yard.run()
    assert equal in yard.finished


def test_a_full_queue_gives_up_its_least_urgent_for_a_strictly_more_urgent_one():
    yard = make_yard(**NO_AGING, max_queued_requests=2)
    kept, worst = yard.submit([5], priority=1), yard.submit([6], priority=0)
    same = yard.submit([7], priority=0)
    assert yard.finished[same].cause == "queue_full"
    assert "queue is full" in yard.finished[same].message
    better = yard.submit([8], priority=1)
    assert yard.finished[worst].cause == "displaced"
    assert line(yard) == [kept, better]
    none_given = yard.submit([9])
    assert yard.finished[none_given].cause == "queue_full"


def test_a_full_queue_does_not_drop_a_request_that_has_run():
    yard = make_yard(**NO_AGING, rows=1, max_queued_requests=1)
    low = yard.submit([5], max_new=40, priority=0)
    run_until_all_run(yard)
    yard.submit([6], max_new=5, priority=20)
    yard.launch()
    assert low not in admitted(yard)
    refused = yard.submit([7], priority=50)
    assert yard.finished[refused].cause == "queue_full"
    yard.run()
    assert yard.finished[low].completion_tokens == 40


def test_a_request_with_several_answers_needs_room_for_all():
    from tokenyard.base import SamplingParams

    yard = make_yard(**NO_AGING, max_queued_requests=2)
    low = [yard.submit([5 + i], priority=i) for i in range(2)]
    yard.submit([6], priority=1, sampling=SamplingParams(max_new_tokens=2, n=2))
    assert low[1] not in yard.finished
    assert low[0] not in yard.finished
    both = yard.submit([6], priority=9, sampling=SamplingParams(max_new_tokens=2, n=2))
    assert {yard.finished[number].cause for number in low} == {"displaced"}
    assert both not in yard.finished


def test_priorities_can_be_refused_where_they_are_off():
    yard = make_yard(abort_on_priority_when_disabled=True)
    refused, fine = yard.submit([5], priority=0), yard.submit([5])
    assert yard.finished[refused].cause == "invalid"
    assert "--enable-priority-scheduling" in yard.finished[refused].message
    assert line(yard) == [fine]


def test_priority_and_boost_of_a_waiting_request_can_change():
    yard = make_yard(**ON, default_priority_value=0)
    numbers = [yard.submit([5]) for _ in range(3)]
    yard.apply(Update(numbers[2], priority=1))
    assert line(yard) == [numbers[2], numbers[0], numbers[1]]
    yard.apply(Update(numbers[1], boost=5))
    assert line(yard) == [numbers[1], numbers[2], numbers[0]]
    yard.apply(Update(numbers[1], boost=-(10**12)))
    assert line(yard) == [numbers[2], numbers[0], numbers[1]]


def test_a_boost_raises_urgency_also_where_low_values_come_first():
    yard = make_yard(**NO_AGING, schedule_low_priority_values_first=True)
    numbers = [yard.submit([5], priority=3) for _ in range(2)]
    yard.apply(Update(numbers[1], boost=1))
    assert line(yard) == numbers[::-1]


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"schedule_low_priority_values_first": True}, "--enable-priority-scheduling"),
        (ON | {"abort_on_priority_when_disabled": True}, "drop one of the two"),
        (ON | {"priority_scheduling_preemption_threshold": -1}, "--priority-scheduling-preemption-threshold"),
        (ON | {"priority_aging_s": -1.0}, "--priority-aging-s"),
        ({"max_overtaken_tokens": -2}, "--max-overtaken-tokens"),
        ({"service_level_weights": (1, 2)}, "--service-level-weights"),
        ({"strict_level_share": 0.0}, "--strict-level-share"),
        ({"lpm_degrade_threshold": -1}, "--lpm-degrade-threshold"),
    ],
)
def test_settings_that_make_no_sense_name_their_flag(settings, flag):
    with pytest.raises(ConfigError, match=flag):
        SchedulerSettings(**settings).validate()


def test_a_policy_that_ranks_priorities_itself_is_not_wrapped():
    assert create_policy("edf", SchedulerSettings(enable_priority_scheduling=True)).name == "edf"
