"""Time that requests wait for a row while a less urgent one has one."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.policy.timed_scheduler import make_clocked, prompt
from tokenyard.base import NS_PER_S, Pause, Resume, SetPolicy, Update
from tokenyard.scheduler.priority_inversion import MAX_LEVELS, PriorityInversion

PRIORITIES = {"enable_priority_scheduling": True, "disable_priority_preemption": True, "rows": 1}
VERBS = ("enqueued", "admitted", "removed")
MOVES = st.lists(
    st.tuples(st.integers(0, 5), st.sampled_from(VERBS), st.integers(-2, 2), st.integers(0, 4)),
    max_size=40,
)


@settings(max_examples=examples(200), deadline=None)
@given(MOVES)
def test_it_agrees_with_looking_at_every_request_at_every_moment(moves):
    books, now, reported = PriorityInversion(), 0, {}
    standing, expected = {}, {}
    for row, verb, level, later in moves:
        for _ in range(later):
            seated = [own for kind, own in standing.values() if kind == "admitted"]
            for other, (kind, own) in standing.items():
                if kind == "enqueued" and seated and min(seated) < own:
                    expected[other] = expected.get(other, 0) + 1
        now += later
        arguments = (row, now) if verb == "removed" else (row, level, now)
        reported[row] = reported.get(row, 0) + getattr(books, verb)(*arguments)
        standing[row] = verb, level
    for row in range(6):
        reported[row] = reported.get(row, 0) + books.removed(row, now)
    assert {row: ns for row, ns in reported.items() if ns} == expected


def test_its_state_stays_small_whatever_priorities_arrive():
    books = PriorityInversion()
    for level in range(10 * MAX_LEVELS):
        books.admitted(1, level * 1000, level)
    assert len(books.spent) == MAX_LEVELS
    books.enqueued(2, 10**9, 10_000)
    assert books.removed(2, 10_005) == 5


def inverted(yard, number):
    return yard.finished[number].timings.inverted_ns


def test_only_the_urgent_request_that_waits_for_a_row_counts_as_inverted():
    yard = make_clocked(**PRIORITIES)
    first = yard.submit(prompt(10), max_new=20, priority=1)
    yard.turn()
    high, low, equal = (yard.submit(prompt(10), max_new=5, priority=priority) for priority in (3, 0, 1))
    yard.rest()
    assert inverted(yard, high) == yard.finished[first].finished_ns - yard.finished[high].arrival_ns
    assert [inverted(yard, number) for number in (first, low, equal)] == [0, 0, 0]


def test_without_priorities_there_is_no_inversion():
    yard = make_clocked(rows=1)
    numbers = [yard.submit(prompt(10), max_new=20, priority=priority) for priority in (0, 5)]
    yard.rest()
    assert [inverted(yard, number) for number in numbers] == [0, 0]


def test_a_changed_priority_counts_from_then_on_and_a_pause_does_not_count():
    yard = make_clocked(**PRIORITIES, priority_aging_s=0.0)
    first = yard.submit(prompt(10), max_new=50, priority=1)
    yard.turn()
    late, paused = (yard.submit(prompt(10), max_new=5, priority=priority) for priority in (0, 3))
    yard.scheduler.apply(Pause(numbers=[paused]), yard.now)
    for _ in range(10):
        yard.turn()
    begin = yard.now
    yard.scheduler.apply(Update(late, priority=2), begin)
    for _ in range(10):
        yard.turn()
    assert yard.scheduler.explain(late, yard.now).timings.inverted_ns == yard.now - begin
    yard.scheduler.apply(Resume([paused]), yard.now)
    resumed = yard.now
    yard.rest()
    assert inverted(yard, paused) == yard.finished[first].finished_ns - resumed
    assert inverted(yard, late) == yard.finished[first].finished_ns - begin


def test_priorities_may_stop_counting():
    yard = make_clocked(rows=1, disable_priority_preemption=True, schedule_policy="priority")
    _, high = (yard.submit(prompt(10), max_new=50, priority=priority) for priority in (9, 10))
    yard.turn()
    low = yard.submit(prompt(10), max_new=50, priority=0)
    while not yard.scheduler.state.table.admitted_ns[yard.scheduler.state.table.row_of(low)]:
        yard.turn()
    late = yard.submit(prompt(10), max_new=5, priority=5)
    begin = yard.now
    for _ in range(10):
        yard.turn()
    until = yard.now
    yard.scheduler.apply(SetPolicy("fcfs"), until)
    yard.rest()
    assert inverted(yard, high) == 0
    assert inverted(yard, late) == until - yard.finished[late].arrival_ns <= until - begin


def test_priorities_may_begin_to_count_later():
    yard = make_clocked(rows=1, disable_priority_preemption=True)
    first, high = (yard.submit(prompt(10), max_new=50, priority=priority) for priority in (0, 9))
    for _ in range(5):
        yard.turn()
    begin = yard.now
    yard.scheduler.apply(SetPolicy("priority"), begin)
    yard.rest()
    assert inverted(yard, high) == yard.finished[first].finished_ns - begin
    assert inverted(yard, high) < NS_PER_S
