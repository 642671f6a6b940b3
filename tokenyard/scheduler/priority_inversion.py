"""Priority inversion: how long requests waited for a place while a less urgent request had one.

It is updated when a request arrives, is admitted, retracted or ends, so it costs nothing per step and nothing per
waiting request.
"""

from collections import Counter

MAX_LEVELS = 64
"""The most levels that are distinguished; the time of others counts for the nearest of them."""


class PriorityInversion:
    """The levels of admitted requests, and how much time has passed with the least urgent of them at each level.

    The inversion time of a waiting request is the growth, since it began to wait, of the times of all levels below its
    own. Levels are whole numbers, larger is more urgent. `enqueued`, `admitted` and `removed` return the inversion time
    of `row` in ns since the last of these calls for it.
    """

    def __init__(self) -> None:
        self._admitted_count: dict[int, int] = {}
        self._held: Counter[int] = Counter()
        self._waiting: dict[int, tuple[int, int]] = {}
        self.spent: dict[int, int] = {}
        self._since_ns = 0

    def enqueued(self, row: int, level: int, now: int) -> int:
        """From `now` (ns) on the request in `row` waits for a place."""
        inverted_ns = self.removed(row, now)
        self._waiting[row] = level, self._below(level)
        return inverted_ns

    def admitted(self, row: int, level: int, now: int) -> int:
        """From `now` (ns) on the request in `row` has a place."""
        inverted_ns = self.removed(row, now)
        self._admitted_count[row] = level
        self._held[level] += 1
        return inverted_ns

    def removed(self, row: int, now: int) -> int:
        """From `now` (ns) on the request in `row` neither waits nor has a place."""
        self._count(now)
        level = self._admitted_count.pop(row, None)
        if level is not None:
            self._held[level] -= 1
            if not self._held[level]:
                del self._held[level]
        if row not in self._waiting:
            return 0
        level, before = self._waiting.pop(row)
        return self._below(level) - before

    def _count(self, now: int) -> None:
        """Count the time since the last change for the least urgent admitted level."""
        if self._held and now > self._since_ns:
            level = min(self._held)
            if level not in self.spent and len(self.spent) >= MAX_LEVELS:
                level = min(self.spent, key=lambda kept: (abs(kept - level), kept))
            self.spent[level] = self.spent.get(level, 0) + now - self._since_ns
        self._since_ns = max(now, self._since_ns)

    def _below(self, level: int) -> int:
        """Time in ns so far in which a request less urgent than `level` had a place."""
        return sum(spent for lowest, spent in self.spent.items() if lowest < level)
