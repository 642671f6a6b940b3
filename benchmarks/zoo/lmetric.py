"""LMetric: the engine with the least product of prompt tokens to compute and requests.

The policy is `lmetric` in `tokenyard.routing.policies`.
"""

import numpy as np

from benchmarks.zoo.entry import Entry
from tokenyard.sim import Engine, run, synthetic


def measure() -> str:
    """Conversations on four engines, against the fewest requests (the rule of vLLM's load balancer)."""
    traffic = synthetic("multi-turn", 400, rate=50, seed=1)
    engine = Engine(device="h100", policy="fcfs")
    plain, ours = (run(traffic, engine, replicas=4, router=name) for name in ("shortest_queue", "lmetric"))
    ttft, tpot = (
        1.0 - np.nanmean(ours.columns[name]) / np.nanmean(plain.columns[name]) for name in ("ttft_s", "tpot_s")
    )
    return f"mean TTFT {100 * ttft:.0f} % less, TPOT {-100 * tpot:+.0f} %, than the fewest requests"


ENTRY = Entry(
    "LMetric",
    "Zhang et al. 2026, LMetric: Simple is Better (arXiv 2603.15202)",
    "TTFT 92 % and TPOT 21 % less than vLLM v1's balancer",
    "400 synthetic conversations on 4 simulated H100; theirs are production traces on 16 GPUs and more",
    measure,
)
