"""Prompt lookup, the record of what was right, and which tokens drafts leave of a step's samples."""

import random
from dataclasses import replace

import numpy as np
import pytest

from tokenyard.base import DRAFT, LAST_SAMPLED, AcceptanceRate, LogprobOptions, RowStart, SamplingParams, StepPlan
from tokenyard.executor.drafter import NgramDrafter, NgramIndex, accepted_runs, count_accepted


def ints(*values):
    return np.array(values, np.int32)


def plan_of(counts, samples, decode_rows, verify_rows, row_starts=()):
    rows = len(counts)
    empty = ints()
    tokens = [LAST_SAMPLED if i == 0 else DRAFT for count in counts for i in range(count)]
    return StepPlan(
        step=0,
        pool_rows=np.arange(rows, dtype=np.int32),
        epochs=np.zeros(rows, np.int32),
        starts=np.full(rows, 10, np.int32),
        counts=ints(*counts),
        samples=ints(*samples),
        tokens=ints(*tokens),
        page_rows=empty,
        page_columns=empty,
        page_ids=empty,
        row_starts=list(row_starts),
        decode_rows=decode_rows,
        verify_rows=verify_rows,
    )


def slow_proposal(ids, most):
    """What a reader expects: the longest match of 2 to 8 tokens, the latest one, continued by its own copy."""
    for length in range(8, 1, -1):
        for end in range(len(ids) - 1, length - 1, -1):
            if len(ids) > length and ids[end - length : end] == ids[-length:]:
                drafts = list(ids[end:])
                while len(drafts) < most:
                    drafts.append(drafts[len(drafts) - (len(ids) - end)])
                return drafts[:most]
    return []


def test_a_proposal_is_what_followed_the_longest_and_latest_match():
    rng = random.Random(3)
    found = 0
    for _ in range(400):
        ids = [rng.randint(0, 3) for _ in range(rng.randint(1, 30))]
        lookup = NgramIndex(ints(*ids[:1]))
        lookup.append(ids[1:])
        most = rng.randint(1, 9)
        expected = slow_proposal(ids, most)
        assert lookup.propose(most).tolist() == expected
        found += bool(expected)
    assert found > 200


@pytest.mark.parametrize("ids", [[], [5], [5, 5], [1, 2, 3, 4, 5]])
def test_what_never_occurred_before_has_no_drafts(ids):
    assert not len(NgramIndex(ints(*ids)).propose(4))


def test_the_record_follows_what_was_sampled_whether_verified_or_not():
    record = AcceptanceRate()
    for _ in range(50):
        record.observe(*count_accepted(ints(1, 2, 3), ints(1, 2, 3, 9)))
    assert record.chance > 950
    for _ in range(50):
        record.observe(*count_accepted(ints(1, 2, 3), ints(7)))
    assert record.chance < 20
    before = record.chance
    record.observe(*count_accepted(ints(), ints(7)))
    assert record.chance == before, "a step without drafts changes no acceptance rate"
    for _ in range(50):
        record.observe(*count_accepted(ints(1, 2, 3), ints(1)))
    assert record.chance > 950, "a row that went without drafts gets them back"


def test_a_row_yields_the_samples_that_confirm_its_drafts_and_the_one_after():
    plan = plan_of([1, 4, 3, 5], [1, 4, 3, 1], 1, 2)
    inputs = ints(7, 20, 21, 22, 23, 30, 31, 32, 40, 41, 42, 43, 44)
    sampled = ints(8, 21, 22, 99, 50, 98, 32, 33, 45)
    tokens, accepted = accepted_runs(plan, inputs, sampled)
    assert accepted.tolist() == [1, 3, 1, 1]
    assert tokens.tolist() == [8, 21, 22, 99, 98, 45]


def test_a_chunk_that_is_not_the_last_yields_nothing():
    plan = plan_of([2, 4], [2, 0], 0, 1)
    tokens, accepted = accepted_runs(plan, ints(1, 5, 9, 9, 9, 9), ints(5, 6))
    assert accepted.tolist() == [2, 0]
    assert tokens.tolist() == [5, 6]


def free(pool_row, proposed, most):
    return proposed, False


def test_rows_with_log_probabilities_have_no_drafts():
    known = ints(1, 2, 3, 1, 2)
    starts = [RowStart(row, SamplingParams(), known, 5) for row in range(2)]
    starts[1].logprobs = LogprobOptions()
    drafter = NgramDrafter(4)
    plan = plan_of([5, 5], [1, 1], 0, 0, starts)
    drafter.take(plan)
    drafted, chances = drafter.draft(plan, ints(3, 3), ints(1, 1), free, 0.0)
    assert drafted.tolist() == [4, 0]
    assert chances.tolist() == [500, 0]


def test_an_answer_that_begins_as_predicted_continues_as_predicted():
    drafter = NgramDrafter(3)
    known, predicted = ints(1, 2, 3, 4, 5, 6), ints(20, 21, 22, 23, 24)
    starts = [RowStart(row, SamplingParams(), known, 6, prediction=predicted) for row in range(3)]
    drafter.take(plan_of([6, 6, 6], [1, 1, 1], 0, 0, starts))
    step = plan_of([1, 1, 1], [1, 1, 1], 3, 0)
    drafter.draft(step, ints(20, 30, 30), ints(1, 1, 1), free, 0.0)
    drafted, _ = drafter.draft(step, ints(21, 22, 31), ints(1, 1, 1), free, 0.0)
    assert drafted.tolist() == [3, 0, 0]
    assert drafter.fill_in(plan_of([4], [4], 0, 1))[1:].tolist() == [22, 23, 24]
    # One that departed from it finds its way back.
    assert drafter.draft(step, ints(99, 23, 31), ints(1, 1, 1), free, 0.0)[0].tolist() == [0, 3, 0]


def test_forced_drafts_have_a_separate_record():
    def forced(pool_row, proposed, most):
        return ints(7, 8)[:most], True

    drafter = NgramDrafter(4)
    plan = plan_of([5], [1], 0, 0, [RowStart(0, SamplingParams(), ints(1, 2, 3, 1, 2), 5)])
    drafter.take(plan)
    for _ in range(30):
        drafted, chances = drafter.draft(plan, ints(7, 8), ints(2), forced, 0.0)
    assert drafted.tolist() == [2]
    assert chances[0] > 950
    assert drafter.draft(plan, ints(7, 8), ints(2), free, 0.0)[1].tolist() == [500]


def test_a_result_of_an_earlier_owner_is_not_taken_for_the_rows_own():
    drafter = NgramDrafter(4)
    plan = plan_of([5], [1], 0, 0, [RowStart(0, SamplingParams(), ints(1, 2, 3, 1, 2), 5)])
    drafter.take(plan)
    plan.epochs += 1
    assert drafter.draft(plan, ints(3), ints(1), free, 0.0)[0].tolist() == [0]


def test_a_row_that_is_handed_out_without_work_drafts_nothing():
    """A calibration before the first request does that."""
    drafter = NgramDrafter(4)
    start = RowStart(3, SamplingParams(), ints(5, 6, 7, 5, 6), 5)
    drafter.take(plan_of([], [], 0, 0, [start]))
    plan = replace(plan_of([1], [1], 1, 0), pool_rows=ints(3))
    drafted, _ = drafter.draft(plan, ints(7), ints(1), lambda row, drafts, most: (drafts, False), 0.0)
    assert drafted.tolist() == [0]
