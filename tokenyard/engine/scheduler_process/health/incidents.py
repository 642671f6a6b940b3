"""Log lines about requests that were refused or lost their place: at once, then at most every few seconds."""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping

from tokenyard.base import NS_PER_S, Finish

logger = logging.getLogger(__name__)

LOG_INTERVAL_NS = 10 * NS_PER_S
REFUSALS = {
    "queue_full": "refused, as the queue is full (--max-queued-requests)",
    "tenant_limit": "refused, as their tenant has the most waiting requests that it may have",
    "displaced": "refused, as a more urgent request took their place in a full queue",
    "queue_timeout": "refused, as they had waited for too long",
    "overdue": "refused, as their deadline cannot be kept",
    "no_memory": "ended, as the KV pool cannot hold them",
}
LOSSES = {
    "retracted": "retracted for lack of KV pages; they go on later (see --max-total-tokens and --headroom)",
    "preempted": "preempted for more urgent requests; they go on later",
}


class Incidents:
    """Counts what happens to requests by kind, and logs one line a kind with the number since its last one."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._logged_ns: dict[str, int] = {}
        self._totals = dict.fromkeys(LOSSES, 0)

    def on_finished(self, finishes: Iterable[Finish]) -> None:
        """Take in requests that have ended."""
        self._counts.update(finish.cause for finish in finishes if finish.cause in REFUSALS)

    def on_counters(self, counters: Mapping[str, int]) -> None:
        """Take in the scheduler's totals."""
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
