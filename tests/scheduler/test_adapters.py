"""Slots of LoRA adapters: who may start, which slot empties, and what is left when an adapter goes."""

import pytest

from tests.scheduler.harness import STEP_NS, Yard, make_info
from tokenyard.base import Cancel, OpenGate, SchedulerSettings, StepPlan, UnloadAdapter
from tokenyard.scheduler.row_state import Gate

MAX_DENIED_STEPS = 5


def make_yard(slots=2, patience=MAX_DENIED_STEPS, *, rows=8, pages=400, **settings):
    settings = {"max_running_requests": rows, "context_length": 64, **settings}
    wanted = SchedulerSettings(
        enable_lora=True,
        max_loras_per_batch=slots,
        lora_drain_wait_threshold=patience * STEP_NS / 1e9,
        **settings,
    )
    return Yard(wanted, make_info(pages, rows=rows))


def running(yard):
    """Adapters that have a place, by row."""
    table = yard.scheduler.state.table
    return sorted(table.request(int(row)).lora for row in yard.scheduler.state.admitted_rows())


def slots_of(plan: StepPlan):
    return {start.lora: start.slot for start in plan.row_starts}


def test_at_most_as_many_adapters_as_slots_are_in_a_step_and_base_rows_need_none():
    yard = make_yard(2)
    for lora in ("a", "b", "c", "", "a", "", "c"):
        yard.submit([5] * 4, lora=lora, max_new=6)
    yard.advance()
    assert running(yard) == ["", "", "a", "a", "b"]
    assert slots_of(yard.plans[0]) == {"a": 1, "b": 2, "": 0}
    assert yard.plans[0].adapter_loads == 2
    yard.run()
    assert len(yard.finished) == 7
    assert sum(plan.adapter_loads for plan in yard.plans) == 3
    assert yard.scheduler.idle() is None


def test_an_adapter_stays_in_its_slot_until_another_one_needs_it():
    yard = make_yard(2)
    for lora, slot, loads in (
        ("a", 1, 1),
        ("a", 1, 0),
        ("b", 2, 1),
        ("a", 1, 0),
        ("c", 2, 1),
        ("a", 1, 0),
        ("b", 2, 1),
    ):
        yard.submit([5] * 4, lora=lora)
        first = len(yard.plans)
        yard.run()
        assert slots_of(yard.plans[first]) == {lora: slot}
        assert sum(plan.adapter_loads for plan in yard.plans[first:]) == loads


def newcomers(yard, lora, every, until):
    """Let a request with `lora` come every so many steps until `until()`; returns how many steps were made."""
    steps = 0
    while not until():
        if steps % every == 0:
            yard.submit([7] * 4, lora=lora, max_new=12)
        yard.advance()
        steps += 1
        if steps > 400:
            break
    return steps


@pytest.mark.parametrize("patience", [MAX_DENIED_STEPS, 20])
def test_a_request_is_skipped_for_a_stated_time_only(patience):
    # `a` never leaves the one slot by itself: its requests overlap.
    yard = make_yard(1, patience)
    yard.submit([5] * 4, lora="a", max_new=12)
    yard.advance()
    late = yard.submit([6] * 4, lora="b", max_new=2)
    steps = newcomers(yard, "a", 4, lambda: late in yard.finished)
    # The time, then the rest of the answers that run (12 tokens at most), then its own.
    assert patience <= steps <= patience + 12 + 3


def test_without_that_time_it_may_be_skipped_for_ever():
    yard = make_yard(1, 0)
    yard.submit([5] * 4, lora="a", max_new=12)
    yard.advance()
    late = yard.submit([6] * 4, lora="b", max_new=2)
    assert newcomers(yard, "a", 4, lambda: late in yard.finished) > 400


def test_a_claim_ends_with_its_requests_and_the_slot_takes_newcomers_again():
    yard = make_yard(1, 2)
    yard.submit([5] * 4, lora="a", max_new=40)
    yard.advance()
    late = yard.submit([6] * 4, lora="b")
    for _ in range(4):
        yard.advance()
    held_back = yard.submit([8] * 4, lora="a", max_new=2)
    yard.advance()
    assert running(yard) == ["a"]
    yard.apply(Cancel([late]))
    yard.advance()
    assert running(yard) == ["a", "a"]
    yard.run()
    assert {late, held_back} <= yard.finished.keys()


def steps_to_start(yard, number, flood, limit=200):
    """Steps until `number` starts while `flood()` keeps the rows busy."""
    table = yard.scheduler.state.table
    for step in range(limit):
        row = table.row_of(number)
        if row is None or table.admitted_ns[row]:
            return step
        flood()
        yard.advance()
    return limit


def unused_claimed_slot(aging_s=0.0):
    """A yard of two rows and one slot, with `a` in it unused: a claim on it is of a request that finds no row, because
    more urgent requests of the base model take them all; and what keeps these coming.
    """
    yard = make_yard(1, rows=2, enable_priority_scheduling=True, priority_aging_s=aging_s)
    yard.submit([5] * 4, lora="a", max_new=12, priority=5)
    yard.advance()
    late = yard.submit([6] * 4, lora="x", max_new=2, priority=0)
    for _ in range(MAX_DENIED_STEPS + 2):
        yard.advance()
    assert yard.scheduler.snapshot(yard.now).measures["lora_slots_claimed"] == 1

    def flood():
        while len(yard.scheduler.state.waiting) < 5:
            yard.submit([7] * 4, max_new=6, priority=5)

    for _ in range(40):
        flood()
        yard.advance()
    state = yard.scheduler.state
    assert "a" not in running(yard)
    assert state.table.admitted_ns[state.table.row_of(late)] == 0
    return yard, late, flood


@pytest.mark.parametrize("aging_s", [0.0, 1000.0])
def test_the_claim_of_a_request_that_cannot_start_keeps_no_slot_from_a_more_urgent_one(aging_s):
    yard, late, flood = unused_claimed_slot(aging_s)
    urgent = yard.submit([8] * 4, lora="a", max_new=3, priority=9)
    # At most until a row is free: the slot is unused all the time.
    assert steps_to_start(yard, urgent, flood) <= 8
    yard.run()
    assert {late, urgent} <= yard.finished.keys()


def test_a_slot_whose_claim_had_no_effect_is_claimed_again_only_after_use():
    yard, _, flood = unused_claimed_slot()
    for number in range(3):
        yard.submit([9] * 4, lora=f"y{number}", max_new=2, priority=0)
    for _ in range(3 * MAX_DENIED_STEPS):
        flood()
        yard.advance()
        assert yard.scheduler.snapshot(yard.now).measures["lora_slots_claimed"] == 0


def test_a_request_whose_claim_had_no_effect_is_behind_those_skipped_before():
    yard, first, flood = unused_claimed_slot()
    again = yard.submit([5] * 4, lora="a", max_new=40, priority=9)
    assert steps_to_start(yard, again, flood) <= 8
    # Both are passed over now, `second` first: the one before it came earlier, but its claim had no effect.
    second = yard.submit([6] * 4, lora="y", max_new=2, priority=6)
    for _ in range(3):
        yard.advance()
    table = yard.scheduler.state.table
    assert table.skipped_since_ns[table.row_of(first)] == 0 < table.skipped_since_ns[table.row_of(second)]
    table.priority[table.row_of(second)] = 0
    while first not in yard.finished or second not in yard.finished:
        yard.submit([5] * 4, lora="a", max_new=12, priority=9)
        yard.advance()
    assert yard.finished[second].admitted_ns < yard.finished[first].admitted_ns


def test_retracted_and_preempted_rows_release_their_slot_and_resume_in_any():
    yard = make_yard(1, rows=4, enable_priority_scheduling=True, max_running_requests=2)
    low = [yard.submit([5 + place] * 4, lora="a", max_new=20, priority=0) for place in range(2)]
    yard.advance()
    for number in low:
        row = yard.scheduler.state.table.row_of(number)
        yard.scheduler.state.retract(row, "paused", yard.now)
    other = yard.submit([9] * 4, lora="b", max_new=3, priority=99)
    yard.advance()
    assert running(yard) == ["b"]
    yard.run()
    assert {*low, other} == yard.finished.keys()


def test_a_request_waits_behind_a_gate_until_its_adapter_was_read():
    yard = make_yard(2)
    number = yard.submit([5] * 4, lora="a", awaits_adapter=True)
    assert not yard.launch()
    yard.apply(OpenGate(number, Gate.ADAPTER))
    yard.run()
    assert yard.finished[number].reason == "length"


def test_an_unloaded_adapter_leaves_slot_and_cache():
    yard = make_yard(2)
    for lora in ("a", "b", ""):
        yard.submit([5] * 20, lora=lora, cache_salt="salt" if lora == "b" else "")
        yard.run()
    again = yard.submit([5] * 20, lora="a")
    with pytest.raises(ValueError, match="in use"):
        yard.apply(UnloadAdapter("a"))
    yard.run()
    assert yard.finished[again].cached_tokens == 19
    assert not yard.scheduler.uses_adapter("a")
    cached = yard.scheduler.snapshot(yard.now).cached_tokens
    yard.apply(UnloadAdapter("a"))
    yard.apply(UnloadAdapter("never seen"))
    assert yard.scheduler.snapshot(yard.now).cached_tokens < cached - 19
    # Its slot is the first to be taken, and its prefixes are no longer hit; those of others are.
    for lora, hit, slot in (("c", 0, 1), ("a", 0, 2), ("", 19, 0)):
        first = len(yard.plans)
        number = yard.submit([5] * 20, lora=lora)
        yard.run()
        assert yard.finished[number].cached_tokens == hit
        assert slots_of(yard.plans[first]) == {lora: slot}
    assert yard.scheduler.idle() is None


def test_measures_count_the_slots():
    yard = make_yard(3)
    yard.submit([5] * 4, lora="a", max_new=8)
    yard.advance()
    measures = yard.scheduler.snapshot(yard.now).measures
    assert (measures["lora_slots"], measures["lora_slots_used"], measures["lora_slots_claimed"]) == (3, 1, 0)
