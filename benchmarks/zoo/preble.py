"""Preble's E2: exploit a cached prefix if it is most of the prompt, else explore the engine of the least cost."""

from collections.abc import Sequence

import numpy as np

from benchmarks.zoo.entry import Entry
from benchmarks.zoo.prefixes import shared_prefixes
from tokenyard.routing.load import TargetLoad
from tokenyard.routing.policies import CACHED, COLD, SPILLED_FOR_LOAD, Ranking, RequestFeatures, RoutePolicy
from tokenyard.sim import Engine, run

HEAVY = 2.0
"""An engine with so many times the load of the lightest gives its requests away."""

DECODE_TOKENS = 48.0
"""Load of a request that decodes, in prompt tokens."""


class Preble(RoutePolicy):
    """E2 without its eviction cost, as a router does not see what an engine would evict."""

    needs_prefix = True

    def rank(self, request: RequestFeatures, targets: Sequence[TargetLoad]) -> Ranking:
        """Scores are the load with this request, in prompt tokens."""
        matched = list(request.matched or [0] * len(targets))
        loads = [target.prefill_tokens + DECODE_TOKENS * target.requests for target in targets]
        scores = [load + request.tokens - hit for load, hit in zip(loads, matched, strict=True)]
        order = sorted(range(len(targets)), key=lambda place: (scores[place], targets[place].served))
        best = max(range(len(targets)), key=lambda place: (matched[place], -loads[place]))
        if 2 * matched[best] <= request.tokens:
            return Ranking(order, scores, COLD)
        if loads[best] > HEAVY * (min(loads) + request.tokens):
            return Ranking(order, scores, SPILLED_FOR_LOAD)
        return Ranking([best, *(place for place in order if place != best)], scores, CACHED)


def measure() -> str:
    """Prompts that share long beginnings, on four engines, against taking turns."""
    traffic = shared_prefixes(400, clients=40, rate=80.0, seed=1)
    engine, policy = (
        Engine(device="h100", policy="fcfs", kv_pool_tokens=50_000),
        f"{Preble.__module__}:{Preble.__qualname__}",
    )
    plain, ours = (run(traffic, engine, replicas=4, router=name) for name in ("round_robin", policy))
    mean, tail = (
        figure(plain.columns["e2e_s"]) / figure(ours.columns["e2e_s"])
        for figure in (np.nanmean, lambda values: np.nanpercentile(values, 99))
    )
    return f"latency {mean:.2f} times better on average and {tail:.2f} times in p99 than round robin"


ENTRY = Entry(
    "Preble (E2)",
    "Srivatsa et al. 2024, Preble: Efficient Distributed Prompt Scheduling (arXiv 2407.00023)",
    "latency 1.5 to 14.5 times better on average, 2 to 10 times in p99",
    "400 prompts with 40 prefixes, 4 simulated H100 whose pools hold a third each; no eviction cost",
    measure,
)
