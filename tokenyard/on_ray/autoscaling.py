"""Autoscaling policy: the number of engines by queued prefill work and utilization."""

import math
from typing import Any

FULL = 0.8
"""Target utilization of the engines' running slots and KV pools, which leaves capacity for bursts."""


class PrefillQueueAutoscaling:
    """Serve autoscaling policy: keep queued prefill work per engine within `target_s`, and utilization within `FULL`.

    Serve applies its own bounds and delays to the result.
    """

    def __init__(self, target_s: float) -> None:
        self._target_s = target_s

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """Returns (number of engines, unused state). `context`: Serve's AutoscalingContext."""
        metrics = context.aggregated_metrics or {}
        if not metrics.get("queued_s"):
            return context.target_num_replicas, {}
        return engines_wanted(
            list(metrics["queued_s"].values()), list(metrics["fullness"].values()), self._target_s
        ), {}


def engines_wanted(queued_s: list[float], fullness: list[float], target_s: float) -> int:
    """The number of engines for a load.

    queued_s: seconds of queued prefill work per engine.
    fullness: utilization per engine; above 1 if requests wait.
    target_s: queued seconds per engine to aim for.
    """
    return max(math.ceil(sum(queued_s) / target_s), math.ceil(sum(fullness) / FULL), 1)
