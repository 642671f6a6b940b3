"""Priorities in front of any order, with aging, preemption and a full queue's choice of whom to send away.

The flags are SGLang's. Different from SGLang: a waiting request ages, which bounds its wait; the preemption threshold
acts on aged priorities, so that who was preempted cannot preempt back; pages count as well as rows.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from tokenyard.base import NS_PER_S, Int32Array, Int64Array, SchedulerSettings
from tokenyard.policy.base import Policy
from tokenyard.policy.compose import Wrapper
from tokenyard.policy.order import best_first, in_groups
from tokenyard.policy.views import NO_PRIORITY, Columns, Views, is_given, urgency

MOST_LEVELS = 10**6
"""With aging, priorities beyond this count as this, so that sums of times fit an int64."""

_ROOM_FOR_BOOST = 2**62
_INT64_MAX = 2**63 - 1


class Priority(Wrapper):
    """The most urgent first, `inner` orders equals.

    Aging is a key that never changes, arrival - aging * urgency, since all waiting requests age alike. A request is
    overtaken only by those that arrive within aging * (highest urgency - its own) after it; where `inner` is not fcfs,
    that time is cut into slots of one level, in which `inner` decides, and the bound is one level longer.
    """

    def __init__(self, settings: SchedulerSettings, inner: Policy) -> None:
        super().__init__(settings, inner, "priority")
        self._aging_ns = int(settings.priority_aging_s * NS_PER_S)
        self._plain = type(inner) is Policy
        self._lowest = 0
        if self._aging_ns:
            self.overtaking = f"arrivals of the next {settings.priority_aging_s:g} s per level above its own"
        else:
            self.overtaking = "none: without aging, more urgent requests pass as long as they keep coming"

    def candidates(self) -> Iterator[int]:
        """See `Policy.candidates`. A started prefill goes on before newcomers that are no more urgent."""
        assert self.views is not None
        waiting, ranks, started = self.views.waiting, self._waiting_ranks(self.views), self._started(self.views)
        for row, rank in zip(started, self.rank(self.views.columns, started).tolist(), strict=True):
            ahead = ranks < rank
            if ahead.any():
                yield from self._in_order(self.views, waiting[ahead], ranks[ahead])
                waiting, ranks = waiting[~ahead], ranks[~ahead]
            yield int(row)
        yield from self._in_order(self.views, waiting, ranks)

    def unfinished(self) -> Iterator[int]:
        """See `Policy.unfinished`."""
        assert self.views is not None
        return iter(self._started(self.views).tolist())

    def order(self, views: Views) -> Iterator[int]:
        """See `Policy.order`."""
        return self._in_order(views, views.waiting, self._waiting_ranks(views))

    def outranked(self, views: Views, asker: int) -> Iterator[int]:
        """See `Policy.outranked`. Started prefills give way too; among equals the latest arrival goes first."""
        if self.settings.disable_priority_preemption:
            return iter(())
        columns, threshold = views.columns, self.settings.priority_scheduling_preemption_threshold
        rows = np.concatenate((views.running, views.partial))
        keys = self._keys(columns, rows)
        border = int(self._keys(columns, np.array([asker], np.int32))[0]) + threshold * (self._aging_ns or 1)
        below = keys > min(border, _INT64_MAX)
        rows, keys = rows[below], keys[below]
        return iter(rows[np.lexsort((-columns.seq[rows], -keys))].tolist())

    def displaced(self, columns: Columns, waiting: Int32Array, newcomer: int) -> int | None:
        """See `Policy.displaced`. The latest of the least urgent, if the newcomer is strictly more urgent."""
        fresh = waiting[columns.admitted_ns[waiting] == 0]
        if not len(fresh):
            return None
        urgent = self.urgencies(columns, fresh)
        worst = int(fresh[np.lexsort((-columns.seq[fresh], urgent))[0]])
        own = self.urgencies(columns, np.array([newcomer], np.int32))[0]
        return worst if own > urgent.min() else None

    def urgencies(self, columns: Columns, rows: Int32Array) -> Int64Array:
        """Levels of urgency without aging, int64[len(rows)]; larger is more urgent, NO_PRIORITY is "none given"."""
        default, priority = self.settings.default_priority_value, columns.priority[rows]
        if default is not None:
            priority = np.where(is_given(priority), priority, default)
        level = urgency(priority, self.settings.schedule_low_priority_values_first)
        boosted = np.clip(level, -_ROOM_FOR_BOOST, _ROOM_FOR_BOOST) + columns.boost[rows]
        return np.where(is_given(level), boosted, NO_PRIORITY)

    def rank(self, columns: Columns, rows: Int32Array) -> Int64Array:
        """What rows are ordered by, smaller first, int64[len(rows)]; equal where `inner` is to decide."""
        return self._slots(self._keys(columns, rows))

    def _slots(self, keys: Int64Array) -> Int64Array:
        return keys // self._aging_ns if self._aging_ns and not self._plain else keys

    def _waiting_ranks(self, views: Views) -> Int64Array:
        """Ranks of the waiting rows; whoever has no priority ranks below the lowest that was ever seen."""
        levels = self.urgencies(views.columns, views.waiting)
        self._lowest = min(self._lowest, int(levels.min(initial=0, where=is_given(levels))))
        return self._slots(self._aged(views.columns, views.waiting, levels))

    def _keys(self, columns: Columns, rows: Int32Array) -> Int64Array:
        return self._aged(columns, rows, self.urgencies(columns, rows))

    def _aged(self, columns: Columns, rows: Int32Array, levels: Int64Array) -> Int64Array:
        """Smaller is more urgent: a level is worth `aging_ns`, or without aging 1."""
        if not self._aging_ns:
            return ~levels
        levels = np.where(is_given(levels), levels, self._lowest - 1)
        return columns.arrival_ns[rows] - self._aging_ns * np.clip(levels, -MOST_LEVELS, MOST_LEVELS)

    def _started(self, views: Views) -> Int32Array:
        ranks = self.rank(views.columns, views.partial)
        return views.partial[np.argsort(ranks, kind="stable")]

    def _in_order(self, views: Views, rows: Int32Array, ranks: Int64Array) -> Iterator[int]:
        """Waiting `rows` by their ranks, equals as `inner` has them."""
        if self._plain:
            yield from best_first(rows, ranks)
            return
        for group in in_groups(rows, ranks):
            yield from self.inner.order(replace(views, waiting=group)) if len(group) > 1 else group.tolist()
