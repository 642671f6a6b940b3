"""Lengths of unfinished answers: drawn from similar finished ones that are longer (survival analysis)."""

import numpy as np
import pytest

from tokenyard.sim.traces.censored_lengths import MIN_SIMILAR, draw_lengths, survival_weights


def columns(*values):
    return np.array(values, np.int32)


def test_the_weights_are_the_product_limit_estimate():
    # Worked by hand: 1 of 4 ends at 2; one leaves at 3; 1 of 2 ends at 5; the last ends at 8.
    weights = survival_weights(columns(5, 2, 8, 3), np.array([True, True, True, False]))
    assert weights.tolist() == pytest.approx([0.375, 0.25, 0.375, 0.0])
    # Where the largest is only a bound, what is left over goes to none.
    assert survival_weights(columns(2, 9), np.array([True, False])).sum() == pytest.approx(0.5)


def test_refused_requests_change_no_weight():
    lengths, ended = columns(1, 4, 4, 1, 1), np.array([False, True, True, False, False])
    assert survival_weights(lengths, ended)[[1, 2]].tolist() == pytest.approx([0.5, 0.5])


def test_a_draw_is_one_of_the_known_lengths_beyond_what_was_seen():
    seen = columns(*[-1] * 40, *[0] * 500, *[25] * 500, 90)
    lengths = columns(*range(1, 41), *[1] * 500, *[25] * 500, 90)
    drawn = draw_lengths(seen, lengths, [], seed=3)
    assert drawn[:40].tolist() == lengths[:40].tolist()
    assert set(drawn[40:540].tolist()) <= set(range(1, 41))
    assert min(drawn[540:1040]) > 25
    assert drawn[1040] == 90  # nothing like it was longer
    # Clients leave long answers more often; a plain mean of those that ended would be 20.5.
    assert drawn[40:540].mean() > 25
    assert drawn.tolist() == draw_lengths(seen, lengths, [], seed=3).tolist()


def test_similar_answers_are_those_of_the_class_and_of_the_tenant_where_enough_are_known():
    many = MIN_SIMILAR
    lengths = columns(*[10] * many, *[200] * many, *[3000] * 2, 1, 1, 1)
    seen = columns(*[-1] * (2 * many + 2), 0, 0, 0)
    classes = columns(*[0] * many, *[1] * (many + 2), 0, 1, 1)
    tenants = columns(*[0] * (2 * many), 7, 7, 0, 0, 7)
    for seed in range(20):
        drawn = draw_lengths(seen, lengths, [classes, tenants], seed)[-3:]
        assert drawn[:2].tolist() == [10, 200]
        assert drawn[2] in (200, 3000)
