"""Where the time of a request went, and behind whom it waited."""

import pytest

from tests.scheduler.harness import Yard, make_info
from tokenyard.base import Cancel, Pause, Resume, SchedulerSettings
from tokenyard.scheduler import request_history
from tokenyard.scheduler.request_history import AdmissionRecord, RequestHistory
from tokenyard.scheduler.stage_clock import StageClock


def settings(**changes) -> SchedulerSettings:
    return SchedulerSettings(**({"context_length": 64} | changes))


def test_the_clock_divides_time_into_stages():
    clock = StageClock(100)
    clock.enter("prefill", 110)
    clock.hold(True, 115)
    clock.enter("requeued", 118)
    clock.hold(False, 120)
    assert clock.stage == "requeued"
    timings = clock.read(127)
    assert (timings.queue_ns, timings.prefill_ns, timings.paused_ns, timings.requeued_ns) == (10, 5, 5, 7)
    assert timings.total_ns == 27


def test_a_clock_that_is_ahead_costs_nothing():
    clock = StageClock(100)
    clock.enter("prefill", 90)
    clock.enter("decode", 95)
    assert clock.read(130).total_ns == 30


def test_stages_add_up_to_the_life_of_a_request():
    yard = Yard(settings(chunked_prefill_size=4), make_info())
    number = yard.submit(list(range(5, 15)), max_new=4)
    yard.run()
    finish = yard.finished[number]
    timings = finish.timings
    assert timings.prefill_chunks == 3
    assert timings.queue_ns == finish.admitted_ns - finish.arrival_ns
    assert timings.prefill_ns == finish.first_token_ns - finish.admitted_ns
    assert timings.decode_ns == finish.finished_ns - finish.first_token_ns
    assert timings.total_ns == finish.finished_ns - finish.arrival_ns
    assert timings.policy == "fcfs"
    assert "order of their arrival" in timings.overtaking


def test_pages_that_run_out_show_in_the_course():
    yard = Yard(settings(headroom="none"), make_info(pages=12))
    numbers = [yard.submit([5 + index] * 4, max_new=6) for index in range(2)]
    yard.run()
    all_timings = [yard.finished[number].timings for number in numbers]
    victim = max(all_timings, key=lambda timings: timings.page_shortages)
    assert victim.page_shortages >= 1
    assert victim.requeued_ns > 0
    assert victim.recompute_ns > 0
    assert victim.recomputed_tokens >= 1
    for number, timings in zip(numbers, all_timings, strict=True):
        finish = yard.finished[number]
        assert timings.total_ns == finish.finished_ns - finish.arrival_ns
        assert timings.page_shortages + timings.preemptions + timings.pauses == finish.retractions


def test_paused_time_is_separate_from_waiting():
    yard = Yard(settings(), make_info())
    number = yard.submit([5, 6, 7], max_new=6)
    yard.launch()
    yard.commit()
    yard.apply(Pause(numbers=[number]))
    begin = yard.now
    assert yard.scheduler.explain(number, yard.now).stage == "paused"
    yard.now += 1000
    yard.apply(Resume([number]))
    held = yard.now - begin
    yard.run()
    timings = yard.finished[number].timings
    assert (timings.paused_ns, timings.pauses) == (held, 1)
    assert timings.recompute_ns > 0


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_pause_of_everything_counts_for_everyone(mode):
    yard = Yard(settings(), make_info())
    running = yard.submit([5, 6, 7], max_new=6)
    yard.launch()
    yard.apply(Pause(mode))
    yard.commit()
    late = yard.submit([8, 9], max_new=2)
    yard.now += 500
    yard.apply(Resume())
    yard.run()
    for number in (running, late):
        finish = yard.finished[number]
        assert finish.timings.paused_ns >= 500
        assert finish.timings.total_ns == finish.finished_ns - finish.arrival_ns


def test_a_request_paused_by_itself_stays_paused_when_everything_resumes():
    yard = Yard(settings(), make_info())
    number = yard.submit([5, 6, 7], max_new=2)
    yard.apply(Pause(numbers=[number]))
    yard.apply(Pause())
    yard.apply(Resume())
    assert yard.scheduler.explain(number, yard.now).stage == "paused"


def test_requests_that_went_before_are_named():
    yard = Yard(settings(max_running_requests=1, enable_priority_scheduling=True, priority_aging_s=0.0), make_info())
    running = yard.submit([5, 6, 7], max_new=3, priority=0)
    yard.launch()
    earlier = yard.submit([15, 16, 17, 18], max_new=1, priority=0)
    asked = yard.submit([25, 26], max_new=1, priority=0)
    overtaker = yard.submit([35, 36, 37, 38, 39], max_new=1, priority=5)
    waiting = yard.scheduler.explain(asked, yard.now)
    assert (waiting.stage, waiting.timings.waiting_ahead, waiting.timings.admitted_ahead) == ("queue", 1, 1)
    assert (waiting.earlier.requests, waiting.later.requests) == (0, 0)
    assert waiting.timings.policy
    yard.run()
    explained = yard.scheduler.explain(asked, yard.now)
    assert explained.stage == "ended"
    assert (explained.earlier.numbers, explained.earlier.tokens) == ([earlier], 4)
    assert (explained.later.numbers, explained.later.tokens) == ([overtaker], 5)
    assert explained.complete
    assert "more urgent" in explained.timings.overtaking
    assert yard.scheduler.explain(running, yard.now).later.requests == 0


def test_a_refusal_has_a_cause():
    yard = Yard(settings(max_queued_requests=1, max_running_requests=1, queue_timeout_s=1.0), make_info())
    yard.submit([5, 6], max_new=2)
    refused, too_long = yard.submit([7, 8], max_new=2), yard.submit([5] * 64)
    assert yard.finished[refused].cause == "queue_full"
    assert yard.finished[too_long].cause == "too_long"
    cancelled = 1
    yard.apply(Cancel([cancelled]))
    assert yard.finished[cancelled].cause == "cancelled"
    assert yard.scheduler.explain(refused, yard.now).reason == "abort"


def test_what_is_kept_is_bounded(monkeypatch):
    monkeypatch.setattr(request_history, "MAX_FINISH_RECORDS", 3)
    monkeypatch.setattr(request_history, "MAX_ADMISSION_RECORDS", 4)
    monkeypatch.setattr(request_history, "MAX_REPORTED_NUMBERS", 2)
    yard = Yard(settings(), make_info())
    numbers = [yard.submit([5 + index, 6], max_new=1) for index in range(5)]
    yard.run()
    assert [yard.scheduler.explain(number, yard.now) is None for number in numbers] == [True, True, False, False, False]
    book = RequestHistory()
    for seq in range(10):
        book.started(AdmissionRecord(now=seq, seq=seq, number=seq, tokens=2))
    earlier, later, complete = book.admissions_between(8, 4, 9)
    assert (earlier.requests, earlier.tokens, earlier.numbers) == (2, 4, [6, 7])
    assert later.numbers == [9]
    assert not complete
    assert book.admissions_between(8, 6, 9)[2]


def test_an_unknown_number_has_no_record():
    assert Yard(settings(), make_info()).scheduler.explain(99, 0) is None
