"""Drafts are verified as far as they pay."""

import numpy as np
import pytest

from tokenyard.base import StepWork
from tokenyard.cost import LinearCost, LinearTerms
from tokenyard.policy.speculation import TpotSlack, drafts_to_verify

NO_CHUNKS = StepWork()


def cost_of(floor_ms=10.0, token_ms=0.5, dense_ms=0.0):
    return LinearCost(LinearTerms(1.0, floor_ms, dense_ms, token_ms, 0.0, 0.0))


def chosen(cost, most, chances, chunks=NO_CHUNKS, ahead_ms=None, tpot_ms=50.0):
    columns = [np.array(column, np.int32) for column in ([100] * len(most), most, chances)]
    pace = None
    if ahead_ms is not None:
        pace = TpotSlack(np.array(ahead_ms) / 1e3, np.full(len(most), tpot_ms / 1e3))
    return drafts_to_verify(cost, chunks, *columns, pace).tolist()


def test_below_the_floor_drafts_cost_nothing_and_all_are_verified():
    assert chosen(cost_of(), [8, 0, 4], [300, 0, 900]) == [8, 0, 4]


def test_where_every_token_costs_its_share_none_is_verified():
    cost = cost_of(floor_ms=0.1, token_ms=1.0)
    assert chosen(cost, [8] * 64, [700] * 64) == [0] * 64


def test_the_likeliest_drafts_are_verified_first():
    cost = cost_of(floor_ms=10.0, token_ms=1.0)
    drafts = chosen(cost, [8, 8, 8, 8], [950, 100, 500, 0])
    assert drafts[0] > drafts[2] >= drafts[1]
    assert drafts[3] == 0
    assert drafts[0] >= 4


def test_drafts_that_are_never_right_are_left_out_even_where_the_step_is_at_its_floor():
    assert chosen(cost_of(), [8, 8], [0, 0]) == [0, 0]


def test_a_row_whose_chance_is_0_gives_its_drafts_to_no_other_row():
    # Eight drafts are right sometimes; the next number that is tried after 8 is that of all drafts.
    assert chosen(cost_of(), [0, 8, 8], [900, 0, 900]) == [0, 0, 8]
    assert chosen(cost_of(), [0, 3, 3], [900, 0, 900], ahead_ms=[-20.0, -20.0, -20.0]) == [0, 0, 3]


@pytest.mark.parametrize("late", [False, True])
def test_no_row_verifies_more_drafts_than_it_has_nor_one_whose_chance_is_0(late):
    rng = np.random.default_rng(3)
    for _ in range(300):
        rows = int(rng.integers(1, 9))
        most, chances = rng.integers(0, 9, rows), rng.choice([0, 1, 500, 900, 1000], rows)
        ahead_ms = rng.uniform(-50, 50, rows).tolist() if late else None
        drafts = np.array(chosen(cost_of(float(rng.uniform(0.1, 30))), most, chances, ahead_ms=ahead_ms))
        assert (drafts <= np.where(chances > 0, most, 0)).all(), (most, chances)


def test_behind_a_chunk_a_draft_costs_what_it_adds():
    chunk = StepWork()
    chunk.add_chunk(0, 512)
    cost = cost_of(floor_ms=10.0, token_ms=1.0)
    assert sum(chosen(cost, [8], [300])) > sum(chosen(cost, [8], [300], chunk)) > 0


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_the_choice_is_near_the_best_rate(rows):
    rng = np.random.default_rng(rows)
    for _ in range(50):
        cost = cost_of(float(rng.uniform(1, 30)), float(rng.uniform(0.01, 1)))
        most, chances = rng.integers(0, 9, rows), rng.integers(0, 991, rows)

        def rate(drafts, cost=cost, chances=chances):
            expected = sum(sum((c / 1000) ** d for d in range(1, k + 1)) for c, k in zip(chances, drafts, strict=True))
            total = int(sum(drafts))
            return (rows + expected) / cost.step(StepWork(rows + total, rows, rows, 100 * rows + total))

        found = rate(chosen(cost, most, chances))
        assert found >= rate([0] * rows)
        alternatives = [[min(k, cap) for k in most] for cap in range(9)]
        assert found >= 0.93 * max(map(rate, alternatives))


EVERY_TOKEN_COSTS = cost_of(floor_ms=0.1, token_ms=1.0)
"""A step of n tokens takes n + 1 ms: 8 rows without drafts 9 ms."""


def test_rows_in_time_verify_what_they_would_without_targets():
    cost = cost_of(floor_ms=10.0, token_ms=1.0)
    plain = chosen(cost, [8, 8, 8, 8], [950, 100, 500, 0])
    assert chosen(cost, [8, 8, 8, 8], [950, 100, 500, 0], ahead_ms=[100.0] * 4) == plain


def test_a_row_behind_its_time_per_token_verifies_what_it_needs_though_the_step_as_a_whole_loses():
    assert chosen(EVERY_TOKEN_COSTS, [8] * 8, [800] * 8) == [0] * 8
    drafts = chosen(EVERY_TOKEN_COSTS, [8] * 8, [800] * 8, ahead_ms=[-60.0] + [100.0] * 7, tpot_ms=50.0)
    assert drafts[1:] == [0] * 7
    # It is 69 ms late when the step ends, which two further tokens make up for; 0.8 + 0.64 + 0.51 are expected of 3.
    assert 1 <= drafts[0] <= 4


def test_it_takes_no_more_time_than_the_other_rows_can_spare():
    ahead_ms = [-500.0] + [10.0] * 7
    assert chosen(EVERY_TOKEN_COSTS, [8] * 8, [800] * 8, ahead_ms=ahead_ms) == [1] + [0] * 7
    ahead_ms[3] = 9.5
    assert chosen(EVERY_TOKEN_COSTS, [8] * 8, [800] * 8, ahead_ms=ahead_ms) == [0] * 8


def test_among_equal_rows_those_behind_come_first():
    cost = cost_of(floor_ms=12.0, token_ms=1.0)
    drafts = chosen(cost, [2, 2, 2, 2], [700] * 4, ahead_ms=[100.0, 100.0, -20.0, -20.0], tpot_ms=10.0)
    assert min(drafts[2:]) >= max(drafts[:2])
    assert sum(drafts[2:]) == 4


def test_where_all_are_behind_the_step_brings_as_many_tokens_as_without_targets():
    rng = np.random.default_rng(5)
    for _ in range(50):
        cost = cost_of(float(rng.uniform(1, 30)), float(rng.uniform(0.01, 1)))
        most, chances = rng.integers(1, 9, 12).tolist(), [int(rng.integers(0, 991))] * 12
        late = chosen(cost, most, chances, ahead_ms=[-1e6] * 12)
        assert sum(late) == sum(chosen(cost, most, chances))


def test_late_rows_whose_drafts_are_never_right_verify_none():
    assert chosen(cost_of(), [8, 8], [0, 0], ahead_ms=[-100.0, -100.0]) == [0, 0]
