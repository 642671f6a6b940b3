"""What a few steps at the start measure of a device, whatever the prior cost model."""

import itertools

import numpy as np
import pytest

from tokenyard.base import ExecutorInfo, StepWork, WindowGroup
from tokenyard.cost import get_profile, unknown_cpu
from tokenyard.cost.calibration import CalibrationPoint, CalibrationRunner, measure_all, points, quick_calibration
from tokenyard.executor.mock import MockExecutor

PRIOR = unknown_cpu()
STEPS = (
    CalibrationPoint(rows=1, context=30),
    CalibrationPoint(rows=16, context=300),
    CalibrationPoint(rows=64, context=1000),
    CalibrationPoint(chunk=100),
    CalibrationPoint(chunk=1000),
    CalibrationPoint(chunk=400, prefix=1500),
    CalibrationPoint(rows=8, context=500, chunk=200),
)


def executor(profile, **fields):
    values = {"context_length": 4096, "page_size": 16, "num_pages": 8192, "max_pool_rows": 128, **fields}
    info = ExecutorInfo("m", "cpu", "none", 100, eos_token_ids=(), **values)
    return MockExecutor(info, get_profile(*profile.split("/")).cost(), sleep=False, check_kv=False)


def clock(step_s):
    ticks = itertools.count()
    return lambda: next(ticks) * step_s


@pytest.mark.parametrize("profile", ["h100/llama-3-8b", "a100/llama-2-7b", "cpu/demo", "cpu/smollm2-135m"])
def test_a_few_steps_correct_a_prior_that_was_far_off(profile):
    calibrated = quick_calibration(executor(profile), PRIOR, clock(0.01))
    rig = CalibrationRunner(executor(profile))
    for point in STEPS:
        work, seconds = rig.measure(point)
        assert calibrated.step(work) == pytest.approx(seconds, rel=0.2), point
    assert calibrated.links == PRIOR.links


def test_a_slow_device_measures_few_steps_and_is_still_fitted():
    calibrated = quick_calibration(executor("a100/llama-3-70b"), PRIOR, clock(0.2))
    work, seconds = CalibrationRunner(executor("a100/llama-3-70b")).measure(CalibrationPoint(rows=1, context=16))
    assert calibrated.step(work) == pytest.approx(seconds, rel=0.2)


def test_a_small_pool_measures_what_fits_it():
    calibrated = quick_calibration(
        executor("cpu/demo", context_length=64, num_pages=8, max_pool_rows=2), PRIOR, clock(0.0)
    )
    work, seconds = CalibrationRunner(executor("cpu/demo")).measure(CalibrationPoint(chunk=16))
    assert calibrated.step(work) == pytest.approx(seconds, rel=0.3)


class PageTables:
    """An executor that follows the page tables of both groups of layers, and holds each step's reads to them."""

    def __init__(self, inner):
        self.inner, self.info = inner, inner.info
        shape = self.info.max_pool_rows, self.info.context_length // self.info.page_size
        self.groups = [(np.zeros(shape, int), self.info.context_length, self.info.num_pages)]
        if self.info.windows is not None:
            self.groups.append((np.zeros(shape, int), self.info.windows.window, self.info.windows.num_pages))

    def launch(self, plan):
        assert len(plan.window_ids) == (len(plan.page_ids) if self.info.windows is not None else 0)
        for (table, window, most), ids in zip(self.groups, (plan.page_ids, plan.window_ids), strict=False):
            assert (ids <= most).all()
            table[plan.page_rows, plan.page_columns] = ids
            read = []
            for row, start, count in zip(plan.pool_rows, plan.starts, plan.counts, strict=True):
                first = max(int(start) - window + 1, 0) // self.info.page_size
                read += table[row, first : -(-int(start + count) // self.info.page_size)].tolist()
            assert 0 not in read
            assert len(set(read)) == len(read)
        return self.inner.launch(plan)

    def collect(self, ticket):
        return self.inner.collect(ticket)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("windows", [None, WindowGroup(9, 200), WindowGroup(100, 120), WindowGroup(4096, 8000)])
def test_steps_read_separate_pages_in_every_group_of_layers(windows, page_size):
    inner = executor("cpu/demo", page_size=page_size, windows=windows)
    followed = PageTables(inner)
    calibrated = quick_calibration(followed, PRIOR, clock(0.0))
    assert calibrated.step(StepWork(tokens=1, rows=1, decode_rows=1)) > 0.0
    measured = list(measure_all(CalibrationRunner(followed), points(inner.info), clock(0.0), 1.0))
    assert {bool(work.decode_rows) for work, _ in measured} == {True, False}
