"""The service gap between tenants: by hand, and under policies."""

from types import SimpleNamespace

import numpy as np
import pytest

from tests.sim.small_workloads import setup
from tokenyard.sim.report.service_gap import gap_bound, service_gap
from tokenyard.sim.simulate import simulate
from tokenyard.sim.traces.synthetic import synthetic

NS = 10**9


def test_the_gap_counts_from_when_both_wait():
    # Tenant 0 is served 100 tokens at 1 s, alone; from 2 s on both wait, and it gets 300 more before the other's turn.
    outcome = SimpleNamespace(
        sim_seconds=10.0,
        workload=SimpleNamespace(
            tenant=np.array([0, 0, 0, 1]),
            arrival_s=np.array([0.0, 0.0, 0.0, 2.0]),
            prompt_tokens=np.array([100, 300, 500, 50]),
        ),
        served=np.ones(4, bool),
        admitted_ns=np.array([1, 3 * NS, 8 * NS, 7 * NS]),
        first_token_ns=np.array([1 * NS, 4 * NS, 9 * NS, 8 * NS]),
        finished_ns=np.array([1 * NS, 4 * NS, 9 * NS, 8 * NS]),
        completion_tokens=np.zeros(4, int),
        cached_tokens=np.zeros(4, int),
    )
    times, gap = service_gap(outcome)
    assert (gap[times < 3.9] == 0.0).all()
    assert (gap[(times > 4.1) & (times < 6.9)] == 300.0).all()
    assert (gap[times > 7.1] == 0.0).all()


def test_fair_order_keeps_the_gap_small():
    traffic = synthetic("tenants", 200, 100.0)
    kv_pool_tokens = 60_000
    largest = {}
    for policy in ("fcfs", "vtc"):
        outcome = simulate(traffic, setup("vllm-default", {"schedule_policy": policy}, kv_pool_tokens=kv_pool_tokens))
        largest[policy] = service_gap(outcome)[1].max()
    assert 0.0 < largest["vtc"] < gap_bound(traffic, kv_pool_tokens)
    assert largest["vtc"] < 0.5 * largest["fcfs"]


def test_one_tenant_has_no_gap():
    outcome = simulate(synthetic("plain", 50, 50.0), setup())
    assert service_gap(outcome)[1] == pytest.approx(0.0)
