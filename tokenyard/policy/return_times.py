"""When an idle session sends its next turn, learned from the gaps between turns."""

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from typing_extensions import override

from tokenyard.base import NS_PER_S, Float64Array, Int32Array, Int64Array

BORDERS_S = np.concatenate(([0.0], np.geomspace(0.5, 3600.0, 22)))
"""Where the intervals of idle time begin; the last one has no end."""

_BORDERS: list[float] = BORDERS_S.tolist()
WIDTHS_S = np.diff(BORDERS_S, append=2 * BORDERS_S[-1])
KINDS = {"": 0, "tool": 1, "user": 2}
"""What a turn ended with: not known, a call of a tool, an answer to a person."""

NO_SESSION = len(KINDS)
"""The kind of KV of requests without a session, which is idle since its last use; the next one is that of KV that was
hit before.
"""

PRIOR_WEIGHT = 0.25
"""Gaps that each interval counts before any was seen: returns become rarer with the logarithm of the idle time."""

RARE = 1e-3
HALVE_AT = 4096
"""Gaps of one kind after which old ones count half, so that the estimate follows the traffic."""

SOON_PER_S = 1 / 60
"""KV with at least so many returns per second of keeping it (`ReturnTimes.index`) is expected back soon."""

RECENCY = 1.0 / np.maximum(BORDERS_S, BORDERS_S[1])
"""An index that needs no learning: who was idle for t seconds comes back within about as many again."""

TRUST = 0.9
"""What the predictions must gain of what `RECENCY` gains."""

JUDGED_GAPS = 512
"""About so many of the latest gaps say which of both gains more."""


class ReturnTimes:
    """How often sessions that were idle for so long came back, by the kind of their last stop."""

    def __init__(self, kinds: int = len(KINDS) + 2, rare: Sequence[int] = ()) -> None:
        """rare: kinds that come back so rarely (`RARE`) as long as nothing is known."""
        shape = (kinds, len(BORDERS_S))
        self._back: Float64Array = np.full(shape, PRIOR_WEIGHT)
        self._back[list(rare)] *= RARE
        self._gone: Float64Array = np.full(shape, PRIOR_WEIGHT / 4)
        self._index: Float64Array | None = None

    def came_back(self, kind: int, idle_ns: int) -> None:
        """A session came back after `idle_ns`."""
        self._count(self._back, kind, idle_ns)

    def lost(self, kind: int, idle_ns: int) -> None:
        """A session ended, or was dropped, that had not come back after `idle_ns`."""
        self._count(self._gone, kind, idle_ns)

    def index(self, kinds: Int32Array, idle_ns: Int64Array) -> Float64Array:
        """The value of keeping the KV of idle sessions: returns per second of keeping it, float64[n].

        It is max over t of P(back within t) / E[min(rest of the gap, t)], the index of Gittins (1979) for a job that
        may be given up at any time.
        """
        found: Float64Array = self._used_indices()[kinds, _interval(idle_ns)]
        return found

    def index_of(self, kind: int, idle_ns: int) -> float:
        """`index` of one session, at a fraction of the time."""
        return float(self._used_indices()[kind, _interval_of(idle_ns)])

    def best_ttl_s(self, kind: int, worth_s: float) -> float:
        """The idle time t after which to give up a session's KV: the t that maximises
        P(back within t) * `worth_s` - E[min(gap, t)]; 0 if no t is worth it.

        The time to live of Continuum (arXiv 2511.02230). `worth_s` is what a return saves, in seconds of keeping
        the KV.
        """
        left = self._back[kind] + self._gone[kind]
        alive = np.cumsum(left[::-1])[::-1]
        gain = np.cumsum(self._back[kind] * worth_s - (alive - left / 2) * WIDTHS_S)
        best = int(gain.argmax())
        return float(BORDERS_S[best] + WIDTHS_S[best]) if gain[best] > 0.0 else 0.0

    def _used_indices(self) -> Float64Array:
        if self._index is None:
            self._index = self.indices()
        return self._index

    def _count(self, counts: Float64Array, kind: int, idle_ns: int) -> None:
        counts[kind, _interval_of(idle_ns)] += 1.0
        if counts[kind].sum() > HALVE_AT:
            self._back[kind] /= 2
            self._gone[kind] /= 2
        self._index = None

    def indices(self) -> Float64Array:
        """`index` by kind and interval of idle time, float64[kinds, intervals].

        Those who leave in an interval count as present for half of it.
        """
        left = self._back + self._gone
        alive = np.cumsum(left[:, ::-1], axis=1)[:, ::-1]
        seconds = (alive - left / 2) * WIDTHS_S
        best = np.zeros_like(self._back)
        for begin in range(len(BORDERS_S)):
            back, spent = np.cumsum(self._back[:, begin:], axis=1), np.cumsum(seconds[:, begin:], axis=1)
            best[:, begin] = (back / spent).max(axis=1)
        return best


class CheckedReturnTimes(ReturnTimes):
    """`ReturnTimes` of sessions, whose index gives way to `RECENCY` while that would have gained clearly more.

    Each gap is judged by what was known before it: a return while the KV is expected soon counts 1, and a second
    of expecting it soon costs `SOON_PER_S`. So predictions that are wrong, for whatever reason, cost no more than
    the gaps that it takes to see it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._gains: Float64Array = np.zeros(2)

    @property
    def trusted(self) -> bool:
        """Whether the predictions count."""
        learned, recency = self._gains.tolist()
        return bool(learned >= TRUST * recency)

    @override
    def came_back(self, kind: int, idle_ns: int) -> None:
        self._judge(kind, idle_ns, returned=True)
        super().came_back(kind, idle_ns)

    @override
    def lost(self, kind: int, idle_ns: int) -> None:
        self._judge(kind, idle_ns, returned=False)
        super().lost(kind, idle_ns)

    @override
    def _used_indices(self) -> Float64Array:
        if self._index is None:
            self._learned = self.indices()
            self._index = self._learned
            if not self.trusted:
                self._index = self._learned.copy()
                self._index[: len(KINDS)] = RECENCY
        return self._index

    def _judge(self, kind: int, idle_ns: int, *, returned: bool) -> None:
        if kind >= len(KINDS):
            return
        self._used_indices()
        seconds = np.clip(idle_ns / NS_PER_S - BORDERS_S, 0.0, WIDTHS_S)
        soon = np.array((self._learned[kind], RECENCY)) >= SOON_PER_S
        self._gains *= 1.0 - 1.0 / JUDGED_GAPS
        self._gains += returned * soon[:, _interval_of(idle_ns)] - SOON_PER_S * (soon @ seconds)


def _interval(idle_ns: Int64Array) -> Int64Array:
    found: Int64Array = np.searchsorted(BORDERS_S, idle_ns / NS_PER_S, side="right") - 1
    return np.maximum(found, 0)


def _interval_of(idle_ns: int) -> int:
    """`_interval` of one session."""
    return max(bisect_right(_BORDERS, idle_ns / NS_PER_S) - 1, 0)
