"""Prefills by deadline, kept sorted from step to step, so that a long queue costs little."""

from collections.abc import Callable, Iterator

import numpy as np

from tokenyard.base import NS_PER_S, BoolArray, CostModel, Int32Array, Int64Array, SchedulerSettings
from tokenyard.cost import unloaded_prefill_s
from tokenyard.policy.output_lengths import OutputLengthPredictor
from tokenyard.policy.slo_targets import class_ttft_ns, tpot_ns
from tokenyard.policy.views import NO_DEADLINE, Columns, Views

FAR_NS = 1 << 61
"""Added to a deadline, it puts a request behind all others and keeps the order among those deferred."""

BLOCK_ROWS = 64
NO_REQUEST = -1

Urgencies = Callable[[Columns, Int32Array], Int64Array]


class DeadlineQueue:
    """Waiting and started prefills by (urgency, key, arrival).

    The key is the deadline, or `deferred_key_ns` for a deferred row. `update` finds which rows are new, left, or have a
    changed deadline or priority, in a handful of array operations a step. `_seen` has the sequence number of the
    request that is in a lane, `_computed_for` of the one that `due_ns` was computed for. A row is in its lane as long
    as its `_mark` is the current tick. Columns by table row:

    due_ns: when the first token is due.
    deferred_key_ns: the key of a deferred row.
    deferred: whether the row is deferred.
    """

    def __init__(
        self, settings: SchedulerSettings, answers: OutputLengthPredictor, urgencies: Urgencies | None
    ) -> None:
        """`urgencies` maps rows to levels (larger is more urgent); None for one level. `answers` predicts answer
        lengths.
        """
        self._settings = settings
        self._answers = answers
        self._urgencies = urgencies
        self._lanes: dict[int, Int32Array] = {}
        self.due_ns = self.deferred_key_ns = self._key = self._given = self._urgent = np.empty(0, np.int64)
        self._seen = self._computed_for = self._mark = np.empty(0, np.int64)
        self.deferred: BoolArray = np.empty(0, np.bool_)
        self._tick = 0

    def update(self, views: Views) -> bool:
        """Update the queue at the start of a step; returns whether a row is new. `views` must have a cost model."""
        columns, rows = views.columns, np.concatenate((views.prefilling, views.waiting))
        self._grow(len(columns.seq))
        # Comparing whole columns is faster than comparing selected rows.
        changed = ((self._seen != columns.seq) | (self._given != columns.deadline_ns))[rows]
        if self._urgencies is not None:
            changed |= self._urgent[rows] != self._urgency(columns, rows)
        fresh = rows[changed]
        self._tick += 1
        self._mark[rows] = self._tick
        self._mark[fresh] = 0
        self._drop_unmarked()
        if len(fresh):
            assert views.cost is not None
            self._place(columns, fresh, views.cost)
        return bool(len(fresh))

    def lanes(self) -> list[Int32Array]:
        """Rows of each urgency, the most urgent first; in each by key."""
        return [self._lanes[urgent] for urgent in sorted(self._lanes, reverse=True)]

    def with_deadline(self, lane: Int32Array) -> Int32Array:
        """The front of a lane, without the rows at its end that were deferred and have no other deadline."""
        return lane[: int(np.searchsorted(self._key[lane], FAR_NS))]

    def rows(self) -> Iterator[int]:
        """All rows, best first, made into Python numbers only as far as they are drawn."""
        for lane in self.lanes():
            yield from one_by_one(lane)

    def only(self, rows: Int32Array) -> Iterator[int]:
        """Those of `rows` that are queued, best first."""
        wanted = np.zeros(len(self._mark), np.bool_)
        wanted[rows] = True
        for lane in self.lanes():
            yield from lane[wanted[lane]].tolist()

    def defer(self, rows: Int32Array) -> None:
        """Put these rows where their `deferred_key_ns` belongs."""
        self.deferred[rows] = True
        self._move(rows, self.deferred_key_ns[rows])

    def restore(self, rows: Int32Array) -> None:
        """Put these rows, which were deferred, back at their deadline."""
        self.deferred[rows] = False
        self._move(rows, self.due_ns[rows])

    def _move(self, rows: Int32Array, keys: Int64Array) -> None:
        self._key[rows] = keys
        seen = self._seen[rows]
        self._mark[rows] = 0
        self._drop_unmarked()
        self._insert(rows)
        self._seen[rows] = seen

    def count_deferred(self, columns: Columns, rows: Int32Array) -> int:
        """How many of `rows` are deferred; rows that came after the last update are not."""
        known = rows[rows < len(self.deferred)]
        return int(np.count_nonzero(self.deferred[known] & (self._computed_for[known] == columns.seq[known])))

    def _place(self, columns: Columns, fresh: Int32Array, cost: CostModel) -> None:
        again = (self._computed_for[fresh] == columns.seq[fresh]) & (self._given[fresh] == columns.deadline_ns[fresh])
        for row in fresh[~again].tolist():
            self._compute_due(columns, row, cost)
        self._computed_for[fresh], self._given[fresh] = columns.seq[fresh], columns.deadline_ns[fresh]
        self._urgent[fresh] = self._urgency(columns, fresh)
        # A row that was held back for a while stays deferred; one that has begun to answer returns to its deadline.
        self.deferred[fresh] &= again & (columns.first_token_ns[fresh] == 0)
        self._key[fresh] = np.where(self.deferred[fresh], self.deferred_key_ns[fresh], self.due_ns[fresh])
        self._insert(fresh[np.argsort(columns.seq[fresh], kind="stable")])
        self._seen[fresh] = columns.seq[fresh]

    def _compute_due(self, columns: Columns, row: int, cost: CostModel) -> None:
        """Work out when the row's first token is due, and the key that it has if it is deferred."""
        settings, arrival, ttft = self._settings, int(columns.arrival_ns[row]), int(columns.ttft_ns[row])
        unloaded = round(unloaded_prefill_s(cost, int(columns.prompt_tokens[row])) * NS_PER_S)
        given = int(columns.deadline_ns[row])
        if given != NO_DEADLINE:
            # The whole answer is due then, so its first token has to come that much earlier.
            token_ns = int(tpot_ns(columns, np.array([row], np.int32), settings)[0])
            given -= self._answers.predict_remaining(columns, row) * token_ns
        elif ttft <= 0:
            ttft = class_ttft_ns(settings, unloaded)
        # Nothing is due before it arrives, or it would pass requests whose deadline is over already, without end.
        due = max(min(given, arrival + ttft if ttft > 0 else FAR_NS, FAR_NS), arrival)
        self.due_ns[row] = due
        wait_s = settings.slo_max_wait_s
        self.deferred_key_ns[row] = arrival + unloaded + round(wait_s * NS_PER_S) if wait_s > 0.0 else due + FAR_NS

    def _insert(self, rows: Int32Array) -> None:
        """Put rows into their lanes, in the given order; among equal keys behind the rows already there."""
        for urgent in np.unique(self._urgent[rows]).tolist():
            new = rows[self._urgent[rows] == urgent]
            new = new[np.argsort(self._key[new], kind="stable")]
            lane = self._lanes.get(urgent)
            if lane is not None:
                new = np.insert(lane, np.searchsorted(self._key[lane], self._key[new], side="right"), new)
            self._lanes[urgent] = new
        self._mark[rows] = self._tick

    def _drop_unmarked(self) -> None:
        for urgent, lane in list(self._lanes.items()):
            stays = self._mark[lane] == self._tick
            if stays.all():
                continue
            self._seen[lane[~stays]] = NO_REQUEST
            if stays.any():
                self._lanes[urgent] = lane[stays]
            else:
                del self._lanes[urgent]

    def _urgency(self, columns: Columns, rows: Int32Array) -> Int64Array:
        return np.zeros(len(rows), np.int64) if self._urgencies is None else self._urgencies(columns, rows)

    def _grow(self, capacity: int) -> None:
        extra = capacity - len(self._mark)
        if extra <= 0:
            return
        for name in ("due_ns", "deferred_key_ns", "_key", "_given", "_urgent", "_mark"):
            setattr(self, name, np.concatenate((getattr(self, name), np.zeros(extra, np.int64))))
        for name in ("_seen", "_computed_for"):
            setattr(self, name, np.concatenate((getattr(self, name), np.full(extra, NO_REQUEST, np.int64))))
        self.deferred = np.concatenate((self.deferred, np.zeros(extra, np.bool_)))


def one_by_one(rows: Int32Array) -> Iterator[int]:
    """The rows as Python numbers, made only as far as they are drawn."""
    for start in range(0, len(rows), BLOCK_ROWS):
        yield from rows[start : start + BLOCK_ROWS].tolist()
