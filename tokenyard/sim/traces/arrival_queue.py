"""The arrival times of a workload's requests."""

from collections.abc import Iterable
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count
from math import isnan
from typing import Protocol

import numpy as np
from typing_extensions import override

from tokenyard.base import NS_PER_S, ConfigError
from tokenyard.sim.engine.sim_scheduler import NEVER_NS
from tokenyard.sim.traces.sessions import Sessions
from tokenyard.sim.traces.workload import Workload, to_ns

ALL = slice(None)


class Arrivals(Protocol):
    """The order of arrivals. `popped` is the number of requests that have arrived."""

    popped: int

    @property
    def next_ns(self) -> int:
        """Time (ns) of the next arrival; NEVER_NS for none."""

    def pop(self) -> int:
        """Remove and return the number of the next request."""

    def ended(self, number: int, now: int) -> bool:
        """Request `number` has ended; returns whether its session has ended with it."""

    def with_actual_arrivals(self) -> Workload:
        """The workload with the actual arrival times."""


def make_arrivals(workload: Workload, window: slice = ALL) -> Arrivals:
    """The arrivals of the requests of `window`. Raises ConfigError for a window of a workload of sessions."""
    if workload.sessions is None:
        return TimedArrivals(workload, window)
    if window.indices(len(workload)) != (0, len(workload), 1):
        raise ConfigError(f"{workload.name}: sessions run as a whole; a part of a trace has no meaning for them")
    return SessionArrivals(workload, workload.sessions)


class TimedArrivals(Arrivals):
    """Arrivals at the workload's times."""

    def __init__(self, workload: Workload, window: slice = ALL) -> None:
        self.popped = 0
        self._workload = workload
        self._at_ns = [to_ns(seconds) for seconds in workload.arrival_s.tolist()]
        self._next, self._end, _ = window.indices(len(workload))

    @property
    @override
    def next_ns(self) -> int:
        return self._at_ns[self._next] if self._next < self._end else NEVER_NS

    @override
    def pop(self) -> int:
        self.popped += 1
        self._next += 1
        return self._next - 1

    @override
    def ended(self, number: int, now: int) -> bool:
        return False

    @override
    def with_actual_arrivals(self) -> Workload:
        return self._workload


class SessionArrivals(Arrivals):
    """Arrivals of turns after the ends of those that they wait for, and starts of sessions after ends of others.

    At equal times the request that became due first arrives first.
    """

    def __init__(self, workload: Workload, sessions: Sessions) -> None:
        self.popped = 0
        self._workload, self._session = workload, sessions.session.tolist()
        self._gap_ns = [to_ns(seconds) for seconds in sessions.gap_s.tolist()]
        self._missing: list[int] = np.diff(sessions.offsets).tolist()
        self._at_ns = [0] * len(workload)
        self._followers: list[list[int]] = [[] for _ in range(len(workload))]
        self._roots: list[list[int]] = [[] for _ in range(sessions.count)]
        for index in range(len(workload)):
            for before in sessions.waits_for(index):
                self._followers[before].append(index)
            if not self._missing[index]:
                self._roots[self._session[index]].append(index)
        self._open: list[int] = np.bincount(sessions.session, minlength=sessions.count).tolist()
        self._order = count()
        self._due: list[tuple[int, int, int]] = []
        timed = {place: to_ns(at_s) for place, at_s in enumerate(sessions.start_s.tolist()) if not isnan(at_s)}
        for place, at_ns in timed.items():
            self._start(place, at_ns)
        self._queued: Iterable[int] = iter([place for place in range(sessions.count) if place not in timed])

    @property
    @override
    def next_ns(self) -> int:
        return self._due[0][0] if self._due else NEVER_NS

    @override
    def pop(self) -> int:
        self.popped += 1
        return heappop(self._due)[2]

    @override
    def ended(self, number: int, now: int) -> bool:
        session = self._session[number]
        self._open[session] -= 1
        for index in self._followers[number]:
            self._missing[index] -= 1
            if not self._missing[index]:
                self._send(index, now)
        if self._open[session]:
            return False
        following = next(iter(self._queued), None)
        if following is not None:
            self._start(following, now)
        return True

    def _start(self, session: int, now: int) -> None:
        for index in self._roots[session]:
            self._send(index, now)

    def _send(self, index: int, now: int) -> None:
        """Request `index` arrives after its gap from `now`, the time of the last end that it waited for."""
        self._at_ns[index] = now + self._gap_ns[index]
        heappush(self._due, (self._at_ns[index], next(self._order), index))

    @override
    def with_actual_arrivals(self) -> Workload:
        return replace(self._workload, arrival_s=np.array(self._at_ns) / NS_PER_S)
