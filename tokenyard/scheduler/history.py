"""When requests first started, and how they ended: enough to explain later which others a request waited for.

It is written once per start and once per end, never per step. Both lists are bounded.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from tokenyard.base import Explanation, Finish, Starts

STARTS_KEPT = 8192
ENDS_KEPT = 1000
NUMBERS_TOLD = 16


@dataclass(frozen=True, slots=True)
class Start:
    """Request `number`, the `seq`-th to arrive, got its first place at `now` (ns) with `tokens` left to compute."""

    now: int
    seq: int
    number: int
    tokens: int


@dataclass(frozen=True, slots=True)
class End:
    """A request that has ended; `seq` is its place in the order of arrival."""

    seq: int
    finish: Finish


class RequestHistory:
    """The latest starts and ends."""

    def __init__(self) -> None:
        self._starts: deque[Start] = deque(maxlen=STARTS_KEPT)
        self._ends: dict[int, End] = {}
        self._forgotten_until_ns = -1

    def started(self, start: Start) -> None:
        """A request got its first place."""
        if len(self._starts) == STARTS_KEPT:
            self._forgotten_until_ns = self._starts[0].now
        self._starts.append(start)

    def ended(self, seq: int, finish: Finish) -> None:
        """A request has ended."""
        self._ends.pop(finish.number, None)
        self._ends[finish.number] = End(seq, finish)
        if len(self._ends) > ENDS_KEPT:
            del self._ends[next(iter(self._ends))]

    def end_of(self, number: int) -> End | None:
        """How a request ended; None if it has not, or if its entry was dropped."""
        return self._ends.get(number)

    def explain(self, end: End) -> Explanation:
        """Where the time of an ended request went."""
        finish = end.finish
        until_ns = finish.admitted_ns or finish.finished_ns
        earlier, later, complete = self.starts_between(end.seq, finish.arrival_ns, until_ns)
        return Explanation(
            number=finish.number,
            stage="ended",
            timings=finish.timings,
            prompt_tokens=finish.prompt_tokens,
            cached_tokens=finish.cached_tokens,
            completion_tokens=finish.completion_tokens,
            earlier=earlier,
            later=later,
            complete=complete,
            reason=finish.reason,
            message=finish.message,
        )

    def starts_between(self, seq: int, arrival_ns: int, until_ns: int) -> tuple[Starts, Starts, bool]:
        """Requests other than the `seq`-th that started from `arrival_ns` to `until_ns`: earlier arrivals, later ones,
        and whether both are complete.
        """
        within = [start for start in self._starts if arrival_ns <= start.now <= until_ns and start.seq != seq]
        earlier = _summed(start for start in within if start.seq < seq)
        later = _summed(start for start in within if start.seq > seq)
        return earlier, later, arrival_ns > self._forgotten_until_ns


def _summed(starts: Iterable[Start]) -> Starts:
    found = list(starts)
    latest = islice(found, max(0, len(found) - NUMBERS_TOLD), None)
    return Starts(len(found), sum(start.tokens for start in found), [start.number for start in latest])
