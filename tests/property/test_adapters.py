"""Many adapters over few slots: nothing is lost, and no request waits for a slot beyond the stated bound."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.scheduler.harness import STEP_NS, Yard, make_info
from tokenyard.base import SchedulerSettings

ADAPTERS, SLOTS = 32, 4
ANSWER, ROWS = 6, 64
PATIENCE = 4


def make_yard(patience: int, policy: str, **changes: object) -> Yard:
    wanted = SchedulerSettings(
        enable_lora=True,
        max_loras_per_batch=SLOTS,
        lora_drain_wait_threshold=patience * STEP_NS / 1e9,
        max_running_requests=ROWS,
        context_length=64,
        schedule_policy=policy,
    )
    return Yard(replace(wanted, **changes), make_info(pages=2000, rows=ROWS))


def longest_wait(seed: int, patience: int, requests: int, policy: str = "fcfs", rate: int = 1) -> int:
    """Let `rate` requests arrive per step, their adapters drawn by a Zipf law; returns the most steps that any took."""
    generator = np.random.default_rng(seed)
    weights = 1.0 / np.arange(1, ADAPTERS + 1)
    adapters = generator.choice(ADAPTERS, size=requests, p=weights / weights.sum())
    answers = generator.integers(1, ANSWER + 1, size=requests)
    yard, came, took = make_yard(patience, policy), {}, {}
    for step in range(50 * requests):
        for place in range(rate * step, min(rate * (step + 1), requests)):
            lora = f"a{adapters[place]}"
            number = yard.submit([5, 6, 7, 8], lora=lora, routing_key=lora, max_new=int(answers[place]))
            came[number] = step
        yard.advance()
        assert len({start.lora for plan in yard.plans[-1:] for start in plan.row_starts}) <= SLOTS
        took |= {number: step - came[number] for number in yard.finished.keys() - took.keys()}
        if len(took) == requests:
            break
    yard.check()
    assert len(took) == requests
    assert yard.scheduler.idle() is None
    return max(took.values())


def bound(patience: int) -> int:
    """Steps that a request may take: it is passed over for `patience` steps, then the answers end in the slots of the
    claims before its own, which are of adapters of earlier requests, then in its own; then it runs.
    """
    drain = ANSWER + 2
    return patience + drain * (-(-ADAPTERS // SLOTS) + 1) + ANSWER


@settings(max_examples=examples(30), deadline=None)
@given(
    seed=st.integers(0, 10**6), patience=st.sampled_from([1, 4, 16]), policy=st.sampled_from(["fcfs", "routing-key"])
)
def test_no_request_waits_for_a_slot_beyond_the_bound(seed, patience, policy):
    assert longest_wait(seed, patience, 150, policy, rate=3) <= bound(patience)


def test_without_claims_some_requests_wait_longer_than_that():
    # Popular adapters keep their slots for as long as their requests overlap.
    assert longest_wait(0, 0, 400, rate=3) > bound(PATIENCE) >= longest_wait(0, PATIENCE, 400, rate=3)


@pytest.mark.slow
@settings(max_examples=examples(15), deadline=None)
@given(seed=st.integers(0, 10**6), slots=st.sampled_from([1, 2]), rows=st.sampled_from([2, 4]))
def test_claims_of_requests_that_find_no_row_keep_no_urgent_request_waiting_beyond_the_bound(seed, slots, rows):
    adapters, draw = 4, np.random.default_rng(seed)
    yard = make_yard(
        PATIENCE,
        "fcfs",
        max_loras_per_batch=slots,
        max_running_requests=rows,
        enable_priority_scheduling=True,
        priority_aging_s=0.0,
    )
    urgent, came, table = None, 0, yard.scheduler.state.table
    for step in range(400):
        # At times requests of the base model, which come first, take all rows; at times rows are free, so that requests
        # are passed over for a slot alone.
        waiting = table.adapter[yard.scheduler.state.waiting.rows]
        wanted = {"": 2 * rows if step % 120 >= 20 else 0, f"a{draw.integers(adapters)}": 2}
        for (lora, most), now in zip(wanted.items(), (sum(waiting == 0), sum(waiting > 0)), strict=True):
            for _ in range(most - now):
                yard.submit([5] * 4, lora=lora, priority=int(not lora), max_new=int(draw.integers(1, ANSWER + 1)))
        if urgent is None:
            urgent, came = yard.submit([9] * 4, lora=f"a{draw.integers(adapters)}", priority=5, max_new=2), step
        yard.advance()
        row = table.row_of(urgent)
        if row is None or table.admitted_ns[row]:
            urgent = None
        else:
            # A claim of each other adapter before its own, its own, and a row.
            assert step - came <= PATIENCE + (ANSWER + 2) * (adapters + 1)
