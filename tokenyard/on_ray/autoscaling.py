"""How many engines there should be, by the work that waits at them and by how full they are."""

import math
from typing import Any

FULL = 0.8
"""More of an engine's places or KV pool should not be taken on average, so that a burst finds room."""


class PrefillQueueAutoscaling:
    """Serve's autoscaling policy: as many engines as leave each at most `target_s` of prefill waiting, and room.

    Serve applies its own bounds and delays to the answer.
    """

    def __init__(self, target_s: float) -> None:
        self._target_s = target_s

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """Engines wanted, and a state that is not used. `context` is an AutoscalingContext."""
        metrics = context.aggregated_metrics or {}
        if not metrics.get("queued_s"):
            return context.target_num_replicas, {}
        return engines_wanted(
            list(metrics["queued_s"].values()), list(metrics["fullness"].values()), self._target_s
        ), {}


def engines_wanted(queued_s: list[float], fullness: list[float], target_s: float) -> int:
    """Engines that the load of those that run asks for, by seconds of prefill that wait at each and the share of each
    that is taken, or more than 1 where requests wait for a place.
    """
    return max(math.ceil(sum(queued_s) / target_s), math.ceil(sum(fullness) / FULL), 1)
