"""Multi-level feedback: requests move down a level as they are served, so short ones finish early."""

from collections.abc import Iterator
from typing import ClassVar

import numpy as np
from typing_extensions import override

from tokenyard.base import NS_PER_S, BoolArray, Int32Array, Int64Array, SchedulerSettings
from tokenyard.policy.base import Option, Policy
from tokenyard.policy.queue_orders import best_first
from tokenyard.policy.views import Views

MAX_LEVELS = 16
UNKNOWN = -1


class MultiLevelFeedback(Policy):
    """Skip-join multi-level feedback queues (FastServe, Wu et al. 2023), in tokens.

    The top level lasts `quantum_tokens`, each further one twice as long. A request joins the first level that is long
    enough for the part of its prompt that is not cached on arrival. It moves down as it is served and never up, so a
    preempted request preempts in turn only after the other one was served a quantum. If rows or pages run out, a
    request on a higher level preempts those on lower levels, the lowest first. A request that has waited for
    `promote_s` since it arrived or last ran goes to the front of the queue. Once it starts, it cannot be preempted
    before its prompt and `quantum_tokens` output tokens are done.
    """

    name = "mlfq"
    uses_hits = True
    charges_decode = True
    options: ClassVar[dict[str, Option]] = {"quantum_tokens": 512, "promote_s": 30.0}
    ranges: ClassVar[dict[str, tuple[float, float]]] = {"quantum_tokens": (1, 2**40), "promote_s": (0, 1e6)}

    def __init__(self, settings: SchedulerSettings) -> None:
        super().__init__(settings)
        self._quantum = int(self.chosen["quantum_tokens"])
        self._promote_ns = int(float(self.chosen["promote_s"]) * NS_PER_S)
        self.overtaking = (
            f"arrivals of the next {float(self.chosen['promote_s']):g} s, then none for {self._quantum} output tokens, "
            "each time that it waits"
        )
        self._join = self.served = self.idle_since = self._safe_until = np.zeros(0, np.int64)

    @override
    def begin_step(self, views: Views) -> None:
        super().begin_step(views)
        missing = len(views.columns.seq) - len(self.served)
        if missing > 0:
            for name, value in (("_join", UNKNOWN), ("served", 0), ("idle_since", 0), ("_safe_until", 0)):
                setattr(self, name, np.concatenate((getattr(self, name), np.full(missing, value, np.int64))))
        fresh = views.waiting[self._join[views.waiting] == UNKNOWN]
        if len(fresh):
            uncached = np.maximum(views.columns.target[fresh] - views.columns.matchable[fresh], 1)
            self._join[fresh] = np.ceil(np.log2(np.maximum(uncached / self._quantum, 1.0))).astype(np.int64)

    @override
    def order(self, views: Views) -> Iterator[int]:
        waiting = views.waiting
        return best_first(waiting, np.where(self._promoted(views, waiting), 0, self.levels(waiting)))

    @override
    def outranked(self, views: Views, preemptor: int) -> Iterator[int]:
        """Promotion moves a request to the front of the queue; it does not let it preempt."""
        columns, rows = views.columns, views.running
        levels = self.levels(rows)
        safe = columns.known[rows] < self._safe_until[rows]
        below = (levels > self.levels(np.array([preemptor], np.int32))[0]) & ~safe
        rows, levels = rows[below], levels[below]
        return iter(rows[np.lexsort((-columns.seq[rows], -levels))].tolist())

    @override
    def charge(self, row: int, prefill_tokens: int) -> None:
        assert self.views is not None
        columns = self.views.columns
        since = max(int(self.idle_since[row]), int(columns.arrival_ns[row]))
        if self.views.now - since >= self._promote_ns:
            self._safe_until[row] = int(columns.known[row]) + self._quantum
        self.served[row] += prefill_tokens
        self.idle_since[row] = self.views.now

    @override
    def charge_decode(self, rows: Int32Array) -> None:
        if self.views is None:
            return
        self.served[rows] += 1
        self.idle_since[rows] = self.views.now

    @override
    def removed(self, row: int) -> None:
        if row < len(self.served):
            self._join[row] = UNKNOWN
            self.served[row] = self.idle_since[row] = self._safe_until[row] = 0

    def _promoted(self, views: Views, rows: Int32Array) -> BoolArray:
        since = np.maximum(self.idle_since[rows], views.columns.arrival_ns[rows])
        promoted: BoolArray = views.now - since >= self._promote_ns
        return promoted

    def levels(self, rows: Int32Array) -> Int64Array:
        """Level of each row, int64[len(rows)]; 0 is the top. A row leaves level k after 2^(k+1) - 1 quanta and never
        rises.
        """
        sunk = np.floor(np.log2(self.served[rows] / self._quantum + 1.0)).astype(np.int64)
        levels: Int64Array = np.minimum(np.maximum(self._join[rows], sunk), MAX_LEVELS)
        return levels


POLICIES: list[type[Policy]] = [MultiLevelFeedback]
