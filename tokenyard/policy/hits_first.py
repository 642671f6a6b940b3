"""Hits first: requests whose prompt is nearly all in the cache go ahead of those that have to compute most of it."""

from collections.abc import Iterator
from typing import ClassVar

import numpy as np
from typing_extensions import override

from tokenyard.base import NS_PER_MS, NS_PER_S, BoolArray, Int32Array, Int64Array, SchedulerSettings
from tokenyard.policy.base import Option, Policy
from tokenyard.policy.prefill_time import PrefillTime
from tokenyard.policy.queue_orders import best_first
from tokenyard.policy.step_budget import UNLIMITED, StepBudget
from tokenyard.policy.views import Views

DUE, CHEAP, MISS = range(3)
MIN_PREFILLING = 2
"""A cheap request that takes more than one step may start during another's long prefill."""


class HitsFirst(Policy):
    """Cheap requests first, those with at most `cheap_s` seconds of prefill left; then misses; each by arrival.

    Cheap requests also go before the next chunk of a started prompt. A miss starts only while less than one chunk of
    started prompts is left, and a request that does not fit into the free memory is passed over. Where the
    contexts of a few sessions fill the pool, an early start of a cheap request saves its KV from eviction, whereas a
    miss recomputes its prompt in any case. A request that has waited `session_max_wait_s` is due: it goes first, and
    while it does not fit no other starts.
    """

    name = "hits-first"
    uses_hits = True
    needs_cost = True
    retry_ns = 50 * NS_PER_MS
    options: ClassVar[dict[str, Option]] = {"cheap_s": 1.5}
    ranges: ClassVar[dict[str, tuple[float, float]]] = {"cheap_s": (0.0, 3600.0)}

    def __init__(self, settings: SchedulerSettings) -> None:
        super().__init__(settings)
        self._cheap_s = float(self.chosen["cheap_s"])
        self._max_wait_ns = round(settings.session_max_wait_s * NS_PER_S)
        self._chunk_tokens = settings.chunked_prefill_size if settings.chunked_prefill_size > 0 else UNLIMITED
        self._kinds: Int64Array = np.zeros(0, np.int64)
        self.overtaking = f"arrivals of the next {settings.session_max_wait_s:g} s, then none"

    @override
    def begin_step(self, views: Views) -> None:
        super().begin_step(views)
        self._kinds = np.zeros(len(views.columns.seq), np.int64)
        self._kinds[views.waiting] = self._kinds_now(views)

    @override
    def candidates(self, views: Views) -> Iterator[int]:
        """Started prefills that are due, due requests, cheap ones, other started prefills, misses."""
        started, waiting = views.prefilling, views.waiting
        due, kinds = self._due(views, started), self._kinds[waiting]
        yield from started[due].tolist()
        yield from waiting[kinds == DUE].tolist()
        yield from waiting[kinds == CHEAP].tolist()
        yield from started[~due].tolist()
        if self._misses_may_start(views):
            yield from waiting[kinds == MISS].tolist()

    @override
    def order(self, views: Views) -> Iterator[int]:
        waiting, kinds = views.waiting, self._kinds[views.waiting]
        most = MISS if self._misses_may_start(views) else CHEAP
        waiting, kinds = waiting[kinds <= most], kinds[kinds <= most]
        return best_first(waiting, kinds)

    @override
    def budget(self) -> StepBudget:
        budget = super().budget()
        if budget.prefill:
            budget.max_prefilling = max(budget.max_prefilling, MIN_PREFILLING)
        return budget

    @override
    def passable(self, row: int, now: int) -> bool:
        """A request that was retracted waits for the very pages that those behind it would take."""
        assert self.views is not None
        columns = self.views.columns
        return now - int(columns.arrival_ns[row]) < self._max_wait_ns and not columns.retractions[row]

    def _kinds_now(self, views: Views) -> Int64Array:
        """DUE, CHEAP or MISS for each waiting row, int64[n]."""
        assert views.cost is not None
        columns, rows = views.columns, views.waiting
        hit = columns.matchable[rows]
        cheap = PrefillTime.of(views.cost).rest_s(hit, columns.target[rows] - hit) <= self._cheap_s
        kinds: Int64Array = np.where(self._due(views, rows), DUE, np.where(cheap, CHEAP, MISS))
        return kinds

    def _due(self, views: Views, rows: Int32Array) -> BoolArray:
        due: BoolArray = views.now - views.columns.arrival_ns[rows] >= self._max_wait_ns
        return due

    def _misses_may_start(self, views: Views) -> bool:
        rows = views.prefilling
        return int((views.columns.target[rows] - views.columns.planned[rows]).sum()) < self._chunk_tokens


POLICIES: list[type[Policy]] = [HitsFirst]
