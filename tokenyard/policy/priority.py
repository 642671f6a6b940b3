"""Priorities in front of any order, with aging, preemption, and the choice of the request that leaves a full queue.

The flags are SGLang's. Different from SGLang: a waiting request ages, which bounds its wait; the preemption threshold
acts on aged priorities, so a preempted request cannot preempt the one that took its place; a request preempts for pages
as well as for rows.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from typing_extensions import override

from tokenyard.base import Int32Array, Int64Array, SchedulerSettings
from tokenyard.policy.base import Policy
from tokenyard.policy.queue_orders import best_first, in_groups
from tokenyard.policy.views import Columns, Views
from tokenyard.policy.wrappers import Wrapper

_INT64_MAX = 2**63 - 1


class Priority(Wrapper):
    """The most urgent first, `inner` orders equals.

    With aging (see `Urgency`) a request is overtaken only by those that arrive within aging * (highest level - its own)
    after it; where `inner` is not fcfs, that time is cut into slots of one level, in which `inner` decides, and the
    bound is one level longer.
    """

    def __init__(self, settings: SchedulerSettings, inner: Policy) -> None:
        super().__init__(settings, inner, "priority")
        self._plain = type(inner) is Policy
        self._passed_rank: int | None = None
        if self.urgency.aging_ns:
            self.overtaking = f"arrivals of the next {settings.priority_aging_s:g} s per level above its own"
        else:
            self.overtaking = "none: without aging, more urgent requests pass as long as they keep coming"

    @override
    def candidates(self, views: Views) -> Iterator[int]:
        """A started prefill continues before less urgent newcomers. Among equals `inner` decides; by default a started
        one goes first there too. After a row that was passed over only its equals may start.
        """
        self._passed_rank = None
        for row in self._by_rank(views):
            if self._passed_rank is not None and self._rank_of(views.columns, row) > self._passed_rank:
                return
            yield row

    def _by_rank(self, views: Views) -> Iterator[int]:
        waiting, ranks = views.waiting, self.rank(views.columns, views.waiting)
        for prefilling in self._prefilling_groups(views):
            rank = self.rank(views.columns, prefilling[:1])[0]
            ahead, after = ranks < rank, ranks > rank
            yield from self._in_order(views, waiting[ahead], ranks[ahead])
            yield from self.inner.candidates(replace(views, prefilling=prefilling, waiting=waiting[~(ahead | after)]))
            waiting, ranks = waiting[after], ranks[after]
        yield from self._in_order(views, waiting, ranks)

    @override
    def prefilling_order(self, views: Views) -> Iterator[int]:
        for prefilling in self._prefilling_groups(views):
            yield from self.inner.prefilling_order(replace(views, prefilling=prefilling))

    @override
    def order(self, views: Views) -> Iterator[int]:
        return self._in_order(views, views.waiting, self.rank(views.columns, views.waiting))

    @override
    def passable(self, row: int, now: int) -> bool:
        assert self.views is not None
        if not self.inner.passable(row, now):
            return False
        self._passed_rank = self._rank_of(self.views.columns, row)
        return True

    @override
    def outranked(self, views: Views, preemptor: int) -> Iterator[int]:
        """Started prefills are preempted too; among equals the latest arrival goes first.

        Only a row of strictly better rank preempts another: the order of candidates and the right to preempt are
        the same key, which no move of a row changes. So the sum of the ranks that hold a place falls each time.
        """
        if self.settings.disable_priority_preemption:
            return iter(())
        columns, threshold = views.columns, self.settings.priority_scheduling_preemption_threshold
        rows, one = np.concatenate((views.running, views.prefilling)), np.array([preemptor], np.int32)
        keys = self.urgency.keys(columns, rows)
        border = int(self.urgency.keys(columns, one)[0]) + threshold * self.urgency.level_key
        below = (keys > min(border, _INT64_MAX)) & (self.rank(columns, rows) > self.rank(columns, one)[0])
        rows, keys = rows[below], keys[below]
        return iter(rows[np.lexsort((-columns.seq[rows], -keys))].tolist())

    @override
    def victims(self, views: Views) -> Iterator[int]:
        """The least urgent first, equals in the order of `inner`.

        A retracted row that outranks those that take its pages would preempt them. Without preemption the order is that
        of `inner`.
        """
        rows = list(self.inner.victims(views))
        if self.settings.disable_priority_preemption or not rows:
            return iter(rows)
        levels = self.urgency.levels(views.columns, np.array(rows, np.int32))
        return iter([rows[place] for place in np.argsort(levels, kind="stable").tolist()])

    @override
    def displaced(self, columns: Columns, waiting: Int32Array, newcomer: int) -> int | None:
        """The latest arrival among the least urgent rows, if the newcomer is strictly more urgent."""
        fresh = waiting[columns.admitted_ns[waiting] == 0]
        if not len(fresh):
            return None
        levels = self.urgency.levels(columns, fresh)
        worst = int(fresh[np.lexsort((-columns.seq[fresh], levels))[0]])
        own = self.urgency.levels(columns, np.array([newcomer], np.int32))[0]
        return worst if own > levels.min() else None

    def rank(self, columns: Columns, rows: Int32Array) -> Int64Array:
        """The sort key of rows, smaller first, int64[len(rows)]; equal for rows that `inner` orders."""
        keys, aging_ns = self.urgency.keys(columns, rows), self.urgency.aging_ns
        return keys // aging_ns if aging_ns and not self._plain else keys

    def _rank_of(self, columns: Columns, row: int) -> int:
        return int(self.rank(columns, np.array([row], np.int32))[0])

    def _prefilling_groups(self, views: Views) -> Iterator[Int32Array]:
        """Started prefills in groups of equals, the most urgent first."""
        return in_groups(views.prefilling, self.rank(views.columns, views.prefilling))

    def _in_order(self, views: Views, rows: Int32Array, ranks: Int64Array) -> Iterator[int]:
        """Waiting `rows` by their ranks, equals in the order of `inner`."""
        if self._plain:
            yield from best_first(rows, ranks)
            return
        for group in in_groups(rows, ranks):
            yield from self.inner.order(replace(views, waiting=group)) if len(group) > 1 else group.tolist()
