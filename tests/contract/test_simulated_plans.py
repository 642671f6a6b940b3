"""The simulator and an engine on the mock executor make the very same plans when their steps take the same time."""

from dataclasses import replace

import numpy as np
import pytest

from tests.sim.small_workloads import setup, workload
from tokenyard.base import NS_PER_S, StepPlan, Submit
from tokenyard.executor.mock import MockExecutor
from tokenyard.scheduler import Scheduler
from tokenyard.sim.simulate import Setup, executor_info, simulate
from tokenyard.sim.traces.synthetic import synthetic
from tokenyard.sim.traces.workload import Workload

OUTPUT_TOKENS = 24
"""All answers have this length: the mock does not know the workload's own."""


def traffic() -> Workload:
    made = synthetic("shared-prefix", 60, 25.0, seed=9)
    return replace(made, output_tokens=np.full(60, OUTPUT_TOKENS, np.int32))


def columns(plan: StepPlan) -> tuple[bytes, ...]:
    parts = (plan.pool_rows, plan.epochs, plan.starts, plan.counts, plan.page_rows, plan.page_columns, plan.page_ids)
    return tuple(part.tobytes() for part in parts)


def simulated(requests: Workload, chosen: Setup) -> list[tuple[int, tuple[bytes, ...]]]:
    seen: list[tuple[int, tuple[bytes, ...]]] = []
    simulate(requests, chosen, lambda begin, end, plan, work, scheduler: seen.append((end, columns(plan))))
    return seen


def driven(requests: Workload, chosen: Setup) -> list[tuple[int, tuple[bytes, ...]]]:
    """A loop without overlap around the scheduler and the mock, on a clock that the mock's seconds move on."""
    info, cost = executor_info(chosen), chosen.profile.cost()
    scheduler, executor = Scheduler(chosen.settings, info, cost), MockExecutor(info, cost, sleep=False)
    pending = [requests.request(index) for index in range(len(requests))]
    seen, now = [], 0
    while pending or scheduler.has_work:
        while pending and pending[0].arrival_ns <= now:
            request = pending.pop(0)
            scheduler.apply(Submit(request), request.arrival_ns)
        plan = scheduler.plan(now)
        if plan is None:
            now = pending[0].arrival_ns
            continue
        result = executor.collect(executor.launch(plan))
        now += round(result.seconds * NS_PER_S)
        while pending and pending[0].arrival_ns <= now:
            request = pending.pop(0)
            scheduler.apply(Submit(request), request.arrival_ns)
        scheduler.commit(result, now)
        seen.append((now, columns(plan)))
    return seen


@pytest.mark.part(3)
@pytest.mark.parametrize("name", ["sglang-default", "sglang-lpm", "vllm-default", "sarathi"])
@pytest.mark.parametrize("pool_tokens", [None, 24_000])
def test_simulator_and_mock_make_the_same_plans(name, pool_tokens):
    chosen = setup(name, settings={"disable_radix_cache": False}, kv_pool_tokens=pool_tokens)
    requests = traffic()
    assert simulated(requests, chosen) == driven(requests, chosen)


def test_the_comparison_can_fail():
    requests = workload((0.0, 100, OUTPUT_TOKENS), (0.05, 3000, OUTPUT_TOKENS))
    assert simulated(requests, setup()) != driven(requests, setup("sarathi"))
