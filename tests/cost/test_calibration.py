"""What a few steps at the start tell of a device, whatever was believed of it before."""

import itertools

import pytest

from tokenyard.base import ExecutorInfo
from tokenyard.cost import get_profile, unknown_cpu
from tokenyard.cost.calibration import Point, Rig, quick_belief
from tokenyard.executor.mock import MockExecutor

PRIOR = unknown_cpu()
STEPS = (
    Point(rows=1, context=30),
    Point(rows=16, context=300),
    Point(rows=64, context=1000),
    Point(chunk=100),
    Point(chunk=1000),
    Point(chunk=400, prefix=1500),
    Point(rows=8, context=500, chunk=200),
)


def executor(profile, **fields):
    values = {"context_length": 4096, "page_size": 16, "num_pages": 8192, "max_pool_rows": 128, **fields}
    info = ExecutorInfo("m", "cpu", "none", 100, eos_token_ids=(), **values)
    return MockExecutor(info, get_profile(*profile.split("/")).cost(), sleep=False, check_kv=False)


def clock(step_s):
    ticks = itertools.count()
    return lambda: next(ticks) * step_s


@pytest.mark.parametrize("profile", ["h100/llama-3-8b", "a100/llama-2-7b", "cpu/demo", "cpu/smollm2-135m"])
def test_a_few_steps_make_a_belief_right_that_was_far_off(profile):
    belief = quick_belief(executor(profile), PRIOR, clock(0.01))
    rig = Rig(executor(profile))
    for point in STEPS:
        work, seconds = rig.measure(point)
        assert belief.step(work) == pytest.approx(seconds, rel=0.2), point
    assert belief.links == PRIOR.links


def test_a_slow_device_is_asked_about_few_steps_and_still_believed():
    belief = quick_belief(executor("a100/llama-3-70b"), PRIOR, clock(0.2))
    work, seconds = Rig(executor("a100/llama-3-70b")).measure(Point(rows=1, context=16))
    assert belief.step(work) == pytest.approx(seconds, rel=0.2)


def test_a_small_pool_is_asked_about_what_fits_it():
    belief = quick_belief(executor("cpu/demo", context_length=64, num_pages=8, max_pool_rows=2), PRIOR, clock(0.0))
    work, seconds = Rig(executor("cpu/demo")).measure(Point(chunk=16))
    assert belief.step(work) == pytest.approx(seconds, rel=0.3)
