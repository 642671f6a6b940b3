"""The steps of the last minute in bins of a quarter second, for a live page.

Steps are recorded only while a page polls: the first poll starts it, and it stops some seconds after the last one.
"""

from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

from tokenyard.base import NS_PER_S, CostModel, StepPlan, step_work

BIN_NS = NS_PER_S // 4
MAX_BINS = 240
IDLE_TIMEOUT_NS = 5 * NS_PER_S


@dataclass(slots=True)
class StepBin:
    """The steps that ended in a quarter second.

    index: bin number on the monotonic clock.
    prefill, decode: tokens computed.
    busy_ms: device time of all steps.
    longest_ms: device time of the longest step.
    predicted_ms: prediction of the scheduler's cost model, 0 without one.
    """

    index: int
    steps: int = 0
    prefill: int = 0
    decode: int = 0
    busy_ms: float = 0.0
    longest_ms: float = 0.0
    predicted_ms: float = 0.0


class StepHistory:
    """Sums up steps as they end."""

    def __init__(self) -> None:
        self._bins: deque[StepBin] = deque(maxlen=MAX_BINS)
        self._asked_ns = 0

    def add(self, plan: StepPlan, seconds: float, cost: CostModel | None, now: int) -> None:
        """A step (or several, of a multi-step plan) of `seconds` has ended at `now` (ns)."""
        index = now // BIN_NS
        if not self._bins or self._bins[-1].index != index:
            self._bins.append(StepBin(index))
        one, work = self._bins[-1], step_work(plan)
        one.steps += plan.num_steps
        one.prefill += work.prefill_tokens
        one.decode += (work.tokens - work.prefill_tokens) * plan.num_steps
        one.busy_ms += seconds * 1000.0
        one.longest_ms = max(one.longest_ms, seconds * 1000.0 / plan.num_steps)
        if cost is not None:
            one.predicted_ms += cost.step(work) * 1000.0 * plan.num_steps

    def latest(self, max_bins: int, now: int) -> list[dict[str, Any]]:
        """The bins of the last `max_bins` quarter seconds that had steps, oldest first, as plain data."""
        self._asked_ns = now
        first = now // BIN_NS - max_bins
        return [asdict(one) for one in self._bins if one.index > first]

    def expired(self, now: int) -> bool:
        """Whether the last poll was more than `IDLE_TIMEOUT_NS` ago."""
        return now - self._asked_ns > IDLE_TIMEOUT_NS
