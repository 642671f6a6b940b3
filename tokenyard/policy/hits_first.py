"""Hits first: requests whose prompt is nearly all in the cache go ahead of those that have to compute most of it."""

from collections.abc import Iterator
from typing import ClassVar

import numpy as np
from typing_extensions import override

from tokenyard.base import NS_PER_S, BoolArray, Int32Array, Int64Array, SchedulerSettings
from tokenyard.policy.base import Option, Policy
from tokenyard.policy.prefill_time import PrefillTime
from tokenyard.policy.queue_orders import best_first
from tokenyard.policy.step_budget import UNLIMITED
from tokenyard.policy.views import Views

DUE, CHEAP, MISS = range(3)


class HitsFirst(Policy):
    """Cheap requests first, those with at most `cheap_s` seconds of prefill left; then misses; each by arrival.

    A miss starts only while less than one chunk of started prompts is left, and a request that does not fit into the
    free memory is passed over. Where the contexts of a few sessions fill the pool, an early start of a cheap request
    saves its KV from eviction, whereas a miss recomputes its prompt in any case. A request that has waited
    `session_max_wait_s` is due: it goes first, and while it does not fit no other starts.
    """

    name = "hits-first"
    uses_hits = True
    needs_cost = True
    options: ClassVar[dict[str, Option]] = {"cheap_s": 1.5}
    ranges: ClassVar[dict[str, tuple[float, float]]] = {"cheap_s": (0.0, 3600.0)}

    def __init__(self, settings: SchedulerSettings) -> None:
        super().__init__(settings)
        self._cheap_s = float(self.chosen["cheap_s"])
        self._max_wait_ns = round(settings.session_max_wait_s * NS_PER_S)
        self._chunk_tokens = settings.chunked_prefill_size if settings.chunked_prefill_size > 0 else UNLIMITED
        self.overtaking = f"arrivals of the next {settings.session_max_wait_s:g} s, then none"

    @override
    def order(self, views: Views) -> Iterator[int]:
        kind = self.kinds(views, views.waiting)
        waiting = views.waiting
        if self._unfinished_tokens(views) >= self._chunk_tokens:
            waiting, kind = waiting[kind != MISS], kind[kind != MISS]
        return best_first(waiting, kind)

    @override
    def passable(self, row: int, now: int) -> bool:
        """A request that was retracted waits for the very pages that those behind it would take."""
        assert self.views is not None
        columns = self.views.columns
        return now - int(columns.arrival_ns[row]) < self._max_wait_ns and not columns.retractions[row]

    def kinds(self, views: Views, rows: Int32Array) -> Int64Array:
        """DUE, CHEAP or MISS for each of the waiting `rows`, int64[n]."""
        kinds: Int64Array = np.where(self._cheap(views, rows), CHEAP, MISS).astype(np.int64)
        kinds[views.now - views.columns.arrival_ns[rows] >= self._max_wait_ns] = DUE
        return kinds

    def _cheap(self, views: Views, rows: Int32Array) -> BoolArray:
        assert views.cost is not None
        done = np.maximum(views.columns.matchable[rows], views.columns.planned[rows])
        cheap: BoolArray = PrefillTime.of(views.cost).rest_s(done, views.columns.target[rows] - done) <= self._cheap_s
        return cheap

    def _unfinished_tokens(self, views: Views) -> int:
        rows = views.prefilling
        return int((views.columns.target[rows] - views.columns.planned[rows]).sum())


POLICIES: list[type[Policy]] = [HitsFirst]
