"""Drafts are verified as far as they pay."""

import numpy as np
import pytest

from tokenyard.base import StepWork
from tokenyard.cost import LinearCost, LinearTerms
from tokenyard.policy.speculation import worthwhile_drafts

NO_CHUNKS = StepWork()


def cost_of(floor_ms=10.0, token_ms=0.5, dense_ms=0.0):
    return LinearCost(LinearTerms(1.0, floor_ms, dense_ms, token_ms, 0.0, 0.0))


def chosen(cost, most, chances, chunks=NO_CHUNKS):
    columns = [np.array(column, np.int32) for column in ([100] * len(most), most, chances)]
    return worthwhile_drafts(cost, chunks, *columns).tolist()


def test_below_the_floor_drafts_cost_nothing_and_all_are_verified():
    assert chosen(cost_of(), [8, 0, 4], [300, 0, 900]) == [8, 0, 4]


def test_where_every_token_costs_its_share_none_is_verified():
    cost = cost_of(floor_ms=0.1, token_ms=1.0)
    assert chosen(cost, [8] * 64, [700] * 64) == [0] * 64


def test_the_likeliest_come_first():
    cost = cost_of(floor_ms=10.0, token_ms=1.0)
    drafts = chosen(cost, [8, 8, 8, 8], [950, 100, 500, 0])
    assert drafts[0] > drafts[2] >= drafts[1]
    assert drafts[3] == 0
    assert drafts[0] >= 4


def test_drafts_that_are_never_right_are_left_out_even_where_the_step_is_at_its_floor():
    assert chosen(cost_of(), [8, 8], [0, 0]) == [0, 0]


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
