"""Many adapters over few slots: nothing is lost, and no request waits for a slot beyond the stated bound."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.scheduler.harness import STEP_NS, Yard, make_info
from tokenyard.base import SchedulerSettings

ADAPTERS, SLOTS = 32, 4
ANSWER, ROWS = 6, 64
PATIENCE = 4


def make_yard(patience: int, policy: str) -> Yard:
    wanted = SchedulerSettings(
        enable_lora=True,
        max_loras_per_batch=SLOTS,
        lora_drain_wait_threshold=patience * STEP_NS / 1e9,
        max_running_requests=ROWS,
        context_length=64,
        schedule_policy=policy,
    )
    return Yard(wanted, make_info(pages=2000, rows=ROWS))


def longest_wait(seed: int, patience: int, requests: int, policy: str = "fcfs", rate: int = 1) -> int:
    """Let `rate` requests come in each step, its adapter drawn by a Zipf law; returns the most steps that any took."""
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


@settings(max_examples=examples(60), deadline=None)
@given(
    seed=st.integers(0, 10**6), patience=st.sampled_from([1, 4, 16]), policy=st.sampled_from(["fcfs", "routing-key"])
)
def test_no_request_waits_for_a_slot_beyond_the_bound(seed, patience, policy):
    assert longest_wait(seed, patience, 150, policy, rate=3) <= bound(patience)


def test_without_claims_some_requests_wait_longer_than_that():
    # Popular adapters keep their slots for as long as their requests overlap.
    assert longest_wait(0, 0, 400, rate=3) > bound(PATIENCE) >= longest_wait(0, PATIENCE, 400, rate=3)
