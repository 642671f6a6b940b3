"""Steps summed up in bins, for a page."""

import numpy as np

from tokenyard.base import NS_PER_S, StepPlan
from tokenyard.engine.scheduler_process.health.step_history import BIN_NS, IDLE_TIMEOUT_NS, StepHistory


def plan(prefill, decodes, num_steps=1):
    counts = np.array([1] * decodes + ([prefill] if prefill else []), np.int32)
    none = np.empty(0, np.int32)
    rows = np.arange(len(counts), dtype=np.int32)
    starts, tokens = np.zeros_like(rows), np.zeros(int(counts.sum()), np.int32)
    return StepPlan(1, rows, rows, starts, counts, rows, tokens, none, none, none, [], decodes, num_steps=num_steps)


def test_work_of_a_quarter_second_is_one_bin():
    watch = StepHistory()
    watch.add(plan(32, 2), 0.010, None, 10 * BIN_NS)
    watch.add(plan(0, 4), 0.004, None, 10 * BIN_NS + 5)
    watch.add(plan(0, 3, num_steps=5), 0.010, None, 12 * BIN_NS)
    first, second = watch.latest(8, 13 * BIN_NS)
    assert (first["index"], first["steps"], first["prefill"], first["decode"]) == (10, 2, 32, 6)
    assert round(first["busy_ms"]) == 14
    assert round(first["longest_ms"]) == 10
    assert (second["steps"], second["decode"], round(second["longest_ms"])) == (5, 15, 2)
    assert [one["index"] for one in watch.latest(2, 13 * BIN_NS)] == [12]


def test_it_is_discarded_when_no_one_polls():
    watch = StepHistory()
    watch.latest(1, NS_PER_S)
    assert not watch.expired(NS_PER_S + IDLE_TIMEOUT_NS)
    assert watch.expired(NS_PER_S + IDLE_TIMEOUT_NS + 1)
