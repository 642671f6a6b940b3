"""How urgent a request is, for everybody who asks: the order, preemption, a full queue, and who gives way for pages.

A priority, or the default one, with what a priority function adds, and the age. Aging is a key that never changes,
arrival - aging * level, as all requests age alike.
"""

import numpy as np

from tokenyard.base import NS_PER_S, BoolArray, Int32Array, Int64Array, SchedulerSettings
from tokenyard.policy.views import NO_PRIORITY, Columns

MOST_LEVEL, LEAST_LEVEL = 10**6, -(10**3)
"""With aging, levels beyond these count as these: sums of times must fit an int64, and no single request must push down
those without a priority, who rank below all others, for weeks.
"""

_ROOM_FOR_BOOST = 2**62


class Urgency:
    """Levels and aged keys of rows. One object serves a whole policy, so that all its answers agree.

    level_key: what one level more is worth in a key.
    """

    def __init__(self, settings: SchedulerSettings) -> None:
        self.aging_ns = int(settings.priority_aging_s * NS_PER_S)
        self.level_key = self.aging_ns or 1
        self._default = settings.default_priority_value
        self._low_first = settings.schedule_low_priority_values_first
        self._lowest = 0

    def levels(self, columns: Columns, rows: Int32Array) -> Int64Array:
        """Levels without aging, int64[len(rows)]; larger is more urgent, NO_PRIORITY is "none given"."""
        priority = columns.priority[rows]
        if self._default is not None:
            priority = np.where(is_given(priority), priority, self._default)
        level = _turned(priority) if self._low_first else priority
        boosted = np.clip(level, -_ROOM_FOR_BOOST, _ROOM_FOR_BOOST) + columns.boost[rows]
        return np.where(is_given(level), boosted, NO_PRIORITY)

    def keys(self, columns: Columns, rows: Int32Array) -> Int64Array:
        """Smaller is more urgent, int64[len(rows)]; without a priority, one level below the lowest ever seen."""
        levels = self.levels(columns, rows)
        if not self.aging_ns:
            return ~levels
        given = is_given(levels)
        levels = np.clip(levels, LEAST_LEVEL, MOST_LEVEL)
        self._lowest = min(self._lowest, int(levels.min(initial=0, where=given)))
        levels = np.where(given, levels, self._lowest - 1)
        return columns.arrival_ns[rows] - self.aging_ns * levels


def is_given(priority: Int64Array) -> BoolArray:
    """Which priorities were given at all, bool[n]."""
    given: BoolArray = priority != NO_PRIORITY
    return given


def _turned(priority: Int64Array) -> Int64Array:
    """Priorities of which low ones are urgent, so that high ones are; "none given" stays what it is."""
    turned: Int64Array = np.where(is_given(priority), -np.maximum(priority, NO_PRIORITY + 1), NO_PRIORITY)
    return turned
