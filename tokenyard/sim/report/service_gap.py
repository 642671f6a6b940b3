"""The service gap between tenants, and the bound of virtual token counters (Sheng et al. 2024)."""

from collections.abc import Iterator
from itertools import combinations

import numpy as np

from tokenyard.base import BoolArray, Float64Array, Int64Array
from tokenyard.sim.simulate import Outcome
from tokenyard.sim.traces.workload import Workload

POINTS = 1500
PREFILL_WEIGHT, DECODE_WEIGHT = 1.0, 2.0


def service_gap(outcome: Outcome) -> tuple[Float64Array, Float64Array]:
    """Times, and the service gap at each, both float64[POINTS].

    The gap is how far the service of two tenants has drifted apart since both have waiting requests: the largest of all
        pairs, in weighted tokens, 0 if no two tenants wait. A prompt counts at its first token, an answer evenly
        between its first token and its end.
    """
    times = np.linspace(0.0, outcome.sim_seconds, POINTS)
    tenants = [np.flatnonzero(outcome.workload.tenant == tenant) for tenant in np.unique(outcome.workload.tenant)]
    service = [_service(outcome, mine, times) for mine in tenants]
    waits = [_waits(outcome, mine, times) for mine in tenants]
    gap: Float64Array = np.zeros(POINTS)
    for one, other in combinations(range(len(tenants)), 2):
        disagg = service[one] - service[other]
        for part in _runs(waits[one] & waits[other]):
            drift = np.maximum.accumulate(disagg[part]) - np.minimum.accumulate(disagg[part])
            gap[part] = np.maximum(gap[part], drift)
    return times, gap


def gap_bound(workload: Workload, kv_pool_tokens: int) -> float:
    """The bound on the gap of virtual token counters, in weighted tokens: twice the largest prompt or full pool."""
    return 2.0 * max(PREFILL_WEIGHT * workload.max_prompt_tokens, DECODE_WEIGHT * kv_pool_tokens)


def _service(outcome: Outcome, mine: Int64Array, times: Float64Array) -> Float64Array:
    """Weighted tokens that the requests `mine` had received at each of `times`."""
    mine = mine[outcome.served[mine]]
    first, last = outcome.first_token_ns[mine] / 1e9, outcome.finished_ns[mine] / 1e9
    prompts = PREFILL_WEIGHT * (outcome.workload.prompt_tokens[mine] - outcome.cached_tokens[mine])
    answers = DECODE_WEIGHT * outcome.completion_tokens[mine]
    span = np.maximum(last - first, 1e-9)
    return np.array([(prompts * (first <= t) + answers * np.clip((t - first) / span, 0.0, 1.0)).sum() for t in times])


def _waits(outcome: Outcome, mine: Int64Array, times: Float64Array) -> BoolArray:
    """Whether any of the requests `mine` had arrived but was not yet admitted at each of `times`."""
    mine = mine[outcome.admitted_ns[mine] > 0]
    arrived, admitted = np.sort(outcome.workload.arrival_s[mine]), np.sort(outcome.admitted_ns[mine] / 1e9)
    waiting: BoolArray = np.searchsorted(arrived, times, "right") > np.searchsorted(admitted, times, "right")
    return waiting


def _runs(mask: BoolArray) -> Iterator[Int64Array]:
    """Indices of each unbroken stretch of True."""
    places = np.flatnonzero(mask)
    if len(places):
        yield from np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)
