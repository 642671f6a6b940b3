"""Watches the clock over code of the user's, which the scheduler core cannot do: it has none."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tokenyard.base import NS_PER_S

MOST_MISTAKES = 3
WINDOW_CALLS = 100
STALL_NS = NS_PER_S // 20
"""What a policy may take for one step."""

Clock = Callable[[], int]


class Mistakes:
    """Says when there have been too many: the third within a hundred calls.

    A window, since a busy machine makes any call slow now and then.
    """

    def __init__(self) -> None:
        self._calls = 0
        self._latest: deque[int] = deque(maxlen=MOST_MISTAKES)

    def count(self, mistaken: bool) -> bool:
        """Count one call; True if it is one mistake too many."""
        self._calls += 1
        if not mistaken:
            return False
        self._latest.append(self._calls)
        return len(self._latest) == MOST_MISTAKES and self._calls - self._latest[0] < WINDOW_CALLS


class StallGuard:
    """Measures how long the scheduler takes under a policy of the user's own."""

    def __init__(self, clock: Clock = time.monotonic_ns) -> None:
        self._clock = clock
        self._watched = False
        self._mistakes = Mistakes()
        self.stalled = False

    def begin(self, policy: str) -> None:
        """From now on the policy is the one that is described so; only those of a package (module:name) are watched."""
        self._watched = ":" in policy
        self._mistakes = Mistakes()
        self.stalled = False

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Around a call of the scheduler; `stalled` then says whether the policy has been too slow too often."""
        if not self._watched:
            yield
            return
        begin_ns = self._clock()
        yield
        self.stalled |= self._mistakes.count(self._clock() - begin_ns > STALL_NS)
