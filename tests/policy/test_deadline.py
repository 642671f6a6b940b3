from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.policy.timed_scheduler import MS, S, make_clocked, prompt
from tests.policy.waiting_order import line, row
from tokenyard.base import Cancel, Pause, Resume, SamplingParams, Slo, SloTargets, Update
from tokenyard.cost import LinearCost, LinearTerms
from tokenyard.policy.deadline import MAX_DEFERRED, rows_to_defer, rows_to_restore
from tokenyard.policy.output_lengths import MIN_LENGTHS


def due(ms):
    return {"slo": Slo(ttft_ns=round(ms * MS))}


def defer(yard):
    table, queue = yard.scheduler.state.table, yard.scheduler.state.policy.queue
    return sorted(int(table.number[row]) for lane in queue.lanes() for row in lane[queue.deferred[lane]])


def busy(yard):
    """A request that decodes for a long time, so that steps are short."""
    number = yard.submit(prompt(10), max_new=2000)
    yard.turn()
    return number


# ---- the order ---------------------------------------------------------------------------------------------------


def test_the_earliest_deadline_comes_first_whatever_the_arrival():
    yard = make_clocked(schedule_policy="edf")
    late, early, middle = (yard.submit(prompt(100), **due(ms)) for ms in (900, 300, 600))
    assert line(yard) == [early, middle, late]


def test_targets_come_from_the_request_or_else_from_its_class():
    yard = make_clocked(schedule_policy="edf", slo_ttft_ms=400.0, slo_ttft_scale=5.0)
    # Unloaded, 100 tokens take 11 ms and 1,000 tokens 101 ms: due after 400 ms and 505 ms.
    large = yard.submit(prompt(1000))
    small = yard.submit(prompt(100))
    own = yard.submit(prompt(1000), **due(450))
    explicit = yard.submit(prompt(1000), deadline_ns=10 * MS)
    assert line(yard) == [explicit, small, own, large]
    queue = yard.scheduler.state.policy.queue
    waits = [
        int(queue.due_ns[row(yard, n)] - yard.scheduler.state.table.arrival_ns[row(yard, n)]) for n in (large, small)
    ]
    assert waits == [505 * MS, 400 * MS]


def test_a_changed_deadline_changes_the_order():
    yard = make_clocked(schedule_policy="edf")
    first, second = yard.submit(prompt(50), **due(300)), yard.submit(prompt(50), **due(400))
    assert line(yard) == [first, second]
    yard.apply(Update(second, deadline_ns=100 * MS))
    assert line(yard) == [second, first]


def test_equal_deadlines_keep_the_order_of_arrival():
    yard = make_clocked(schedule_policy="edf")
    numbers = [yard.submit(prompt(50), arrival_ns=1, **due(500)) for _ in range(100)]
    assert line(yard) == numbers


def test_a_long_prefill_yields_at_a_chunk_boundary():
    yard = make_clocked(schedule_policy="edf")
    busy(yard)
    long = yard.submit(prompt(15_000), max_new=1, **due(20_000))
    for _ in range(3):
        yard.turn()
    started = int(yard.scheduler.state.table.planned[row(yard, long)])
    assert started > 0
    short = yard.submit(prompt(100), max_new=1, **due(500))
    yard.turn()
    assert short in yard.finished
    assert yard.scheduler.state.table.planned[row(yard, long)] >= started, "what was computed stays"
    assert yard.scheduler.snapshot(yard.now).counters.preempted == 0


def test_several_answers_of_one_request_stand_together():
    yard = make_clocked(schedule_policy="slo")
    sampling = SamplingParams(max_new_tokens=3, temperature=0.0, n=3)
    number = yard.submit(prompt(50), sampling=sampling)
    yard.rest()
    assert sorted(yard.finished) == [number, number + 1, number + 2]


def test_priorities_come_before_deadlines_and_before_deferral():
    yard = make_clocked(schedule_policy="slo", enable_priority_scheduling=True)
    low = yard.submit(prompt(100), priority=1, **due(2000))
    urgent = yard.submit(prompt(100), priority=2, **due(900))
    hopeless = yard.submit(prompt(5000), priority=2, **due(60))
    none = yard.submit(prompt(100), **due(1800))
    assert line(yard) == [urgent, hopeless, low, none]
    assert defer(yard) == [hopeless]
    yard.apply(Update(none, priority=9))
    assert line(yard) == [none, urgent, hopeless, low]


def test_an_urgent_newcomer_takes_the_place_of_a_decode_and_does_not_lose_it_again():
    yard = make_clocked(schedule_policy="slo", enable_priority_scheduling=True, rows=2)
    low = [yard.submit(prompt(20), max_new=200, priority=0) for _ in range(2)]
    yard.turn()
    urgent = yard.submit(prompt(20), max_new=200, priority=50)
    yard.rest()
    assert yard.finished[urgent].retractions == 0
    assert sorted(yard.finished[number].retractions for number in low) == [0, 1]
    assert yard.finished[urgent].finished_ns < max(yard.finished[number].finished_ns for number in low)


# ---- which requests are deferred ------------------------------------------------------------------------------------


def test_of_requests_that_cannot_all_be_met_the_largest_is_deferred():
    yard = make_clocked(schedule_policy="slo")
    small = [yard.submit(prompt(1000), **due(480 + index)) for index in range(3)]
    large = yard.submit(prompt(3000), **due(470))
    assert line(yard) == [*small, large]
    assert defer(yard) == [large]


def test_no_request_is_deferred_while_all_deadlines_can_be_met():
    yard = make_clocked(schedule_policy="slo")
    for index in range(8):
        yard.submit(prompt(1000), **due(1200 + index))
    line(yard)
    assert defer(yard) == []


def test_a_request_that_cannot_be_met_even_alone_defers_no_other():
    yard = make_clocked(schedule_policy="slo")
    others = [yard.submit(prompt(500), **due(400)) for _ in range(3)]
    hopeless = yard.submit(prompt(3000), **due(450))
    assert line(yard) == [*others, hopeless]
    assert defer(yard) == [hopeless]


def test_deferred_requests_are_served_when_no_other_waits():
    yard = make_clocked(schedule_policy="slo")
    hopeless = yard.submit(prompt(3000), max_new=1, **due(10))
    yard.rest()
    assert yard.finished[hopeless].reason == "length"


def test_the_snapshot_counts_deferred_requests_until_their_prompts_are_done():
    yard = make_clocked(schedule_policy="slo")
    hopeless = [yard.submit(prompt(3000), max_new=3, **due(10)) for _ in range(2)]
    yard.turn()
    assert yard.scheduler.snapshot(yard.now).measures == {"deferred": 2, "deferred_requests": 2}
    while yard.scheduler.state.waiting or yard.scheduler.state.prefilling:
        yard.turn()
    assert yard.scheduler.snapshot(yard.now).measures == {"deferred": 2, "deferred_requests": 0}
    yard.rest()
    assert sorted(yard.finished) == hopeless


def test_an_end_carries_the_policy_that_served_the_request():
    yard = make_clocked(schedule_policy="slo", slo_ttft_ms=100.0, slo_ttft_scale=5.0, slo_tpot_ms=40.0)
    own = Slo(ttft_ns=7 * MS, tpot_ns=3 * MS)
    short, long, brought, late = (
        yard.submit(prompt(10)),
        yard.submit(prompt(1000)),
        yard.submit(prompt(10), slo=own),
        yard.submit(prompt(10), deadline_ns=900 * MS),
    )
    yard.rest()
    promises = [yard.finished[number].slo_targets for number in (short, long, brought, late)]
    assert promises[0] == SloTargets(100 * MS, 40 * MS)
    assert promises[1] == SloTargets(5 * 101 * MS, 40 * MS), "five times its prefill alone, 1 ms and 0.1 ms a token"
    assert promises[2] == SloTargets(7 * MS, 3 * MS)
    assert promises[3] == SloTargets(0, 40 * MS, 900 * MS)


def test_a_request_held_back_for_a_while_stays_deferred():
    yard = make_clocked(schedule_policy="slo")
    busy(yard)
    hopeless = yard.submit(prompt(3000), deadline_ns=MS)
    others = [yard.submit(prompt(100), **due(2000)) for _ in range(2)]
    assert line(yard) == [*others, hopeless]
    yard.apply(Pause(numbers=[hopeless]))
    assert line(yard) == others
    yard.apply(Resume([hopeless]))
    assert line(yard) == [*others, hopeless]
    yard.apply(Update(hopeless, deadline_ns=1000 * MS))
    assert line(yard) == [hopeless, *others]


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 60)), min_size=1, max_size=9))
@settings(max_examples=examples(200), deadline=None)
def test_as_few_as_possible_are_deferred(jobs):
    jobs.sort(key=lambda job: job[1])
    work, deadlines = np.array([job[0] for job in jobs], float), np.array([job[1] for job in jobs], float)
    chosen = rows_to_defer(0.0, work, deadlines, np.ones(len(work), bool))
    kept = [place for place in range(len(jobs)) if place not in chosen]
    assert feasible(work, deadlines, kept)
    assert not any(feasible(work, deadlines, more) for more in combinations(range(len(jobs)), len(kept) + 1))


def feasible(work, deadlines, kept):
    ends = np.cumsum(work[list(kept)])
    return bool((ends <= deadlines[list(kept)]).all())


def test_a_walk_defers_a_bounded_number_and_the_next_step_continues():
    count = 3 * MAX_DEFERRED
    work, deadlines = np.full(count, 10.0), np.full(count, 25.0)
    assert len(rows_to_defer(0.0, work, deadlines, np.ones(len(work), bool))) == MAX_DEFERRED
    yard = make_clocked(schedule_policy="slo")
    for _ in range(count):
        yard.submit(prompt(1000), **due(400))
    line(yard)
    assert len(defer(yard)) == MAX_DEFERRED
    for _ in range(3):
        line(yard)
    assert len(defer(yard)) == count - 3


def test_a_deferred_request_returns_once_its_deadline_can_be_met():
    yard = make_clocked(schedule_policy="slo")
    small = [yard.submit(prompt(1000), **due(600 + index)) for index in range(4)]
    large = yard.submit(prompt(3000), **due(700))
    assert line(yard) == [*small, large]
    yard.now += 100 * MS
    line(yard)
    assert defer(yard) == [large], "as long as there is no time for it"
    for number in small[:3]:
        yard.apply(Cancel([number]))
    yard.now += 100 * MS
    assert line(yard) == [small[3], large]
    assert defer(yard) == []


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 60), st.booleans()), min_size=1, max_size=9),
)
@settings(max_examples=examples(200), deadline=None)
def test_a_request_that_returns_is_in_time_and_makes_no_other_late(jobs):
    jobs.sort(key=lambda job: job[1])
    work, deadlines, left_out = (np.array(column) for column in zip(*jobs, strict=True))
    found = rows_to_restore(0.0, work.astype(float), deadlines.astype(float), left_out)
    assert all(left_out[found])

    def in_time(places):
        places = sorted(places)
        ends = np.cumsum(work[places])
        return {place for place, end in zip(places, ends, strict=True) if end <= deadlines[place]}

    others = set(np.flatnonzero(~left_out).tolist())
    kept = in_time(others)
    assert in_time(others | set(found)) == kept | set(found)
    more = set(np.flatnonzero(left_out).tolist()) - set(found)
    assert not any(in_time(others | set(found) | {one}) == kept | set(found) | {one} for one in more)


def test_a_retracted_decoding_request_is_resumed_first():
    yard = make_clocked(schedule_policy="slo")
    running = busy(yard)
    waiting = [yard.submit(prompt(1000), **due(900)) for _ in range(3)]
    yard.scheduler.state.retract(row(yard, running), "out of pages", 0)
    yard.now += 2 * S
    assert line(yard)[0] == running
    assert running not in defer(yard)
    assert defer(yard) == waiting


# ---- bounded waiting ---------------------------------------------------------------------------------------------


def arrive(yard, every_ms, prompts, **fields):
    """Submit a request every so often, by the clock, and return their numbers."""
    numbers, start = [], yard.now
    for index, tokens in enumerate(prompts):
        at = start + index * every_ms * MS
        yard.until(at)
        numbers.append(yard.submit(prompt(tokens), arrival_ns=at, **fields))
    return numbers


def flood(yard, seconds):
    """Requests that leave hardly any of the device's time to others."""
    return arrive(yard, 84, [800] * (seconds * 1000 // 84), max_new=1, **due(600))


def test_without_a_bound_a_large_request_waits_while_others_arrive():
    yard = make_clocked(schedule_policy="slo")
    busy(yard)
    large = yard.submit(prompt(15_000), max_new=1, **due(1))
    flood(yard, seconds=20)
    assert large not in yard.finished


@pytest.mark.part(2)
@pytest.mark.parametrize("wait_s", [3.0, 8.0])
def test_the_longest_wait_bounds_the_time_of_deferred_requests(wait_s):
    yard = make_clocked(schedule_policy="slo", slo_max_wait_s=wait_s)
    busy(yard)
    large = yard.submit(prompt(15_000), max_new=1, **due(1))
    others = flood(yard, seconds=20)
    unloaded_ms = 1501
    assert yard.ttft_ms(large) <= unloaded_ms + wait_s * 1e3
    met = sum(yard.ttft_ms(number) <= 600 for number in others if number in yard.finished)
    assert met > 0.6 * len(others)


def test_deferred_requests_leave_room_for_those_that_can_be_in_time():
    yard = make_clocked(schedule_policy="slo", pages=12_000, slo_max_wait_s=8.0)
    running = yard.submit(prompt(6000), max_new=2000, **due(5000))
    while yard.scheduler.state.waiting or yard.scheduler.state.prefilling:
        yard.turn()
    late = [yard.submit(prompt(tokens), max_new=1, **due(1)) for tokens in (3000, 3100)]
    assert line(yard) == [], "and who comes behind does not pass"
    other = yard.submit(prompt(3000), max_new=1, **due(5000))
    assert line(yard) == [other]
    yard.apply(Cancel([running]))
    yard.rest()
    assert all(yard.finished[number].reason == "length" for number in (*late, other))


@pytest.mark.parametrize(("wait_s", "start_s"), [(8.0, 4.3), (-1.0, 0.0)])
def test_no_request_waits_for_room_longer_than_half_of_the_longest_wait(wait_s, start_s):
    slow = LinearCost(LinearTerms(step_ms=0.0, floor_ms=40.0, dense_ms=1.0, token_ms=0.1, context_ms=0.0, area_ms=0.0))
    yard = make_clocked(schedule_policy="slo", pages=12_000, slo_max_wait_s=wait_s, cost=slow)
    yard.submit(prompt(6000), max_new=200, **due(5000))
    yard.turn()
    while yard.scheduler.state.prefilling:
        yard.turn()
    late = yard.submit(prompt(3000), max_new=1, **due(1))
    yard.rest()
    finish = yard.finished[late]
    assert start_s <= (finish.admitted_ns - finish.arrival_ns) / S <= start_s + 0.1


def test_a_request_larger_than_what_may_be_taken_starts_when_it_is_alone():
    yard = make_clocked(schedule_policy="slo", pages=4000, slo_max_wait_s=8.0)
    large = yard.submit(prompt(3500), max_new=1, **due(1))
    assert line(yard) == [large]
    yard.rest()
    assert yard.finished[large].reason == "length"


# ---- refusing ----------------------------------------------------------------------------------------------------


def test_slo_reject_refuses_at_the_deadline_and_frees_the_pages():
    yard = make_clocked(schedule_policy="slo", slo_reject=True)
    busy(yard)
    started = yard.submit(prompt(12_000), max_new=1, **due(5000))
    for _ in range(2):
        yard.turn()
    assert yard.scheduler.state.table.planned[row(yard, started)] > 0
    urgent = [yard.submit(prompt(900), max_new=1, **due(1000 + 93 * index)) for index in range(60)]
    yard.until(8 * S)
    finish = yard.finished[started]
    assert (finish.reason, finish.cause) == ("abort", "overdue")
    assert "deadline" in finish.message
    assert finish.finished_ns >= finish.arrival_ns + 5000 * MS
    served = [number for number in urgent if yard.finished[number].reason != "abort"]
    assert len(served) >= 55
    assert all(yard.ttft_ms(number) <= 1000 + 93 * 59 for number in served)
    yard.rest()
    yard.check()
    assert yard.scheduler.idle() is None


def test_a_request_that_decodes_in_time_is_never_refused():
    yard = make_clocked(schedule_policy="slo", slo_reject=True)
    number = yard.submit(prompt(100), max_new=500, **due(200))
    yard.rest()
    assert yard.finished[number].reason == "length"


# ---- all of it ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["edf", "slo"])
@pytest.mark.parametrize("pages", [130, 300])
def test_a_tiny_pool_stalls_no_request(policy, pages):
    yard = make_clocked(schedule_policy=policy, pages=pages, rows=8, headroom="history", answer_tokens=(1, 20))
    numbers = [yard.submit(prompt(40 + 17 * index % 80), max_new=20, **due(50 + 30 * index)) for index in range(30)]
    yard.rest()
    assert sorted(yard.finished) == numbers
    assert all(yard.finished[number].reason in ("length", "stop") for number in numbers)
    assert yard.scheduler.idle() is None


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["edf", "slo"])
def test_the_same_events_make_the_same_plans(policy):
    def plans():
        yard = make_clocked(schedule_policy=policy, slo_max_wait_s=2.0, answer_tokens=(1, 30))
        arrive(yard, 40, [50 + 337 * index % 2000 for index in range(60)], max_new=30)
        yard.rest()
        return [(plan.pool_rows.tolist(), plan.starts.tolist(), plan.counts.tolist()) for plan in yard.plans]

    assert plans() == plans()


def test_slo_meets_more_targets_than_the_others_when_too_much_comes():
    met = {}
    for policy in ("fcfs", "edf", "slo"):
        yard = make_clocked(schedule_policy=policy, slo_ttft_ms=500.0, enable_mixed_chunk=True)
        numbers = arrive(yard, 80, [4000 if index % 10 == 0 else 600 for index in range(150)], max_new=3)
        yard.rest()
        limits = {number: 500 if number % 10 != 1 else 2005 for number in numbers}
        met[policy] = sum(yard.ttft_ms(number) <= limits[number] for number in numbers)
    assert met["slo"] > 1.3 * max(met["fcfs"], met["edf"])


@pytest.mark.parametrize(
    ("work", "due", "may_wait", "chosen"),
    [
        ([], [], [], []),
        ([5, 5, 3], [6, 8, 12], [0, 0, 1], [2]),
        ([5, 5, 3], [6, 8, 14], [0, 0, 1], []),
        ([5, 5, 3], [6, 8, 12], [0, 0, 0], []),
        ([5, 9, 1, 1], [6, 20, 7, 20], [1, 1, 1, 1], [1]),
        ([2, 6, 1, 1], [6, 8, 7, 20], [1, 1, 1, 1], [1]),
        ([4, 1, 1], [3, 1, 2], [1, 1, 1], [0]),
        ([4, 1, 1], [3, 1, 2], [0, 1, 1], [1, 2]),
    ],
)
def test_the_walk_chooses_the_largest_that_may_wait_before_each_late_one(work, due, may_wait, chosen):
    arrays = (np.array(work, float), np.array(due, float), np.array(may_wait, bool))
    assert rows_to_defer(0.0, *arrays) == chosen


def test_a_deadline_leaves_time_for_an_answer_as_long_as_those_before():
    yard = make_clocked(schedule_policy="edf", slo_tpot_ms=10.0)
    for _ in range(MIN_LENGTHS):
        yard.submit(prompt(100), max_new=21)
    yard.rest()
    queue, table = yard.scheduler.state.policy.queue, yard.scheduler.state.table
    both = [
        yard.submit(prompt(100), max_new=most, deadline_ns=1000 * MS, **extra)
        for most, extra in ((50, {}), (11, {}), (50, {"slo": Slo(ttft_ns=700 * MS)}))
    ]
    yard.launch()
    waits = [int(queue.due_ns[row(yard, n)] - table.arrival_ns[row(yard, n)]) for n in both]
    # Answers had 21 tokens, 210 ms at the target time per token; 11 take 110 ms; an own target is due before.
    assert waits == [790 * MS, 890 * MS, 700 * MS]
