"""The arrival times of a workload's requests."""

from dataclasses import replace
from heapq import heappop, heappush

from tokenyard.base import NS_PER_S
from tokenyard.sim.engine.sim_scheduler import NEVER_NS
from tokenyard.sim.traces.workload import Workload, to_ns

ALL = slice(None)


class Arrivals:
    """The order of arrivals: by the workload's times or, for follow-up requests, after the end of another request."""

    def __init__(self, workload: Workload, window: slice = ALL) -> None:
        self.popped = 0
        self._workload = workload
        self._at_ns = [to_ns(seconds) for seconds in workload.arrival_s.tolist()]
        self._after: dict[int, list[int]] = {}
        self._waiting: list[tuple[int, int]] = []
        self._next, self._end, _ = window.indices(len(workload))
        if workload.follows is not None:
            self._next = self._end
            for index, before in enumerate(workload.follows.tolist()):
                if before < 0:
                    heappush(self._waiting, (self._at_ns[index], index))
                else:
                    self._after.setdefault(before, []).append(index)

    @property
    def next_ns(self) -> int:
        """Time (ns) of the next arrival; NEVER_NS for none."""
        if self._next < self._end:
            return self._at_ns[self._next]
        return self._waiting[0][0] if self._waiting else NEVER_NS

    def pop(self) -> int:
        """Remove and return the number of the next request."""
        self.popped += 1
        if self._next < self._end:
            self._next += 1
            return self._next - 1
        return heappop(self._waiting)[1]

    def ended(self, number: int, now: int) -> None:
        """A request has ended: the requests that follow it arrive after their pause."""
        for index in self._after.pop(number, ()):
            self._at_ns[index] += now
            heappush(self._waiting, (self._at_ns[index], index))

    def with_actual_arrivals(self) -> Workload:
        """The workload with the actual arrival times."""
        if self._workload.follows is None:
            return self._workload
        times = self._workload.arrival_s.copy()
        times[:] = [at_ns / NS_PER_S for at_ns in self._at_ns]
        return replace(self._workload, arrival_s=times, follows=None)
