"""Log lines about refused, retracted and preempted requests: the first immediately, then at most every 10 s."""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping

from tokenyard.base import NS_PER_S, Finish

logger = logging.getLogger(__name__)

LOG_INTERVAL_NS = 10 * NS_PER_S
REFUSALS = {
    "queue_full": "refused, as the queue is full (--max-queued-requests)",
    "tenant_limit": "refused, as their tenant has the most waiting requests that it may have",
    "displaced": "refused, as a more urgent request displaced them from a full queue",
    "queue_timeout": "refused, as they had waited for too long",
    "overdue": "refused, as their deadline cannot be kept",
    "no_memory": "ended, as the KV pool cannot hold them",
}
LOSSES = {
    "retracted": "retracted for lack of KV pages; they continue later (see --max-total-tokens and --headroom)",
    "preempted": "preempted for more urgent requests; they continue later",
}


class Incidents:
    """Counts what happens to requests by kind, and logs one line a kind with the number since its last one."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._logged_ns: dict[str, int] = {}
        self._totals = dict.fromkeys(LOSSES, 0)

    def on_finished(self, finishes: Iterable[Finish]) -> None:
        """Count ended requests by cause."""
        self._counts.update(finish.cause for finish in finishes if finish.cause in REFUSALS)

    def on_counters(self, counters: Mapping[str, int]) -> None:
        """Count the growth of the scheduler's totals."""
        for name, before in self._totals.items():
            total = counters.get(name, 0)
            self._counts[name] += max(total - before, 0)
            self._totals[name] = total

    def log_due(self, now: int) -> None:
        """Write the lines that are due at `now` (ns)."""
        for kind, count in self._counts.items():
            if count and now - self._logged_ns.get(kind, -LOG_INTERVAL_NS) >= LOG_INTERVAL_NS:
                logger.warning("%d requests were %s", count, REFUSALS.get(kind) or LOSSES[kind])
                self._logged_ns[kind] = now
                self._counts[kind] = 0
