"""How urgent a request is. The order, preemption, a full queue and the choice of victims all use it.

Urgency is the priority, or the default one, plus what a priority function adds, plus the age. All requests age alike,
so aging is a key that never changes: arrival - aging * level.
"""

import numpy as np

from tokenyard.base import NS_PER_S, BoolArray, Int32Array, Int64Array, SchedulerSettings
from tokenyard.policy.views import NO_PRIORITY, Columns

MAX_LEVEL, MIN_LEVEL = 10**6, -(10**3)
"""With aging, levels are cut to these bounds: sums of times must fit an int64, and requests without a priority, which
rank below all others, must not wait for weeks because of a single very low priority.
"""

_ROOM_FOR_BOOST = 2**62


class Urgency:
    """Levels and aged keys of rows. One object serves a whole policy, so that its decisions agree.

    level_key: the difference between the keys of two neighbouring levels.
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
            priority = np.where(has_priority(priority), priority, self._default)
        level = _turned(priority) if self._low_first else priority
        boosted = _between(level, -_ROOM_FOR_BOOST, _ROOM_FOR_BOOST) + columns.boost[rows]
        return np.where(has_priority(level), boosted, NO_PRIORITY)

    def keys(self, columns: Columns, rows: Int32Array) -> Int64Array:
        """Smaller is more urgent, int64[len(rows)]; without a priority, one level below the lowest ever seen."""
        levels = self.levels(columns, rows)
        if not self.aging_ns:
            return ~levels
        given = has_priority(levels)
        levels = _between(levels, MIN_LEVEL, MAX_LEVEL)
        self._lowest = min(self._lowest, int(levels.min(initial=0, where=given)))
        levels = np.where(given, levels, self._lowest - 1)
        return columns.arrival_ns[rows] - self.aging_ns * levels


def has_priority(priority: Int64Array) -> BoolArray:
    """Which priorities were given, bool[n]."""
    given: BoolArray = priority != NO_PRIORITY
    return given


def _between(levels: Int64Array, least: int, most: int) -> Int64Array:
    """Levels cut to the bounds; `np.clip` does the same and takes several times as long over a few rows."""
    return np.minimum(np.maximum(levels, least), most)


def _turned(priority: Int64Array) -> Int64Array:
    """Priorities where low ones are urgent, negated so that high ones are; "none given" stays the same."""
    turned: Int64Array = np.where(has_priority(priority), -np.maximum(priority, NO_PRIORITY + 1), NO_PRIORITY)
    return turned
