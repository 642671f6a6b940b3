"""When requests first started, and how they ended: enough to explain later which others a request waited for.

It is written once per start and once per end, never per step. Both lists are bounded.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from tokenyard.base import AdmittedRequests, Explanation, Finish

MAX_ADMISSION_RECORDS = 8192
MAX_FINISH_RECORDS = 1000
MAX_REPORTED_NUMBERS = 16


@dataclass(frozen=True, slots=True)
class AdmissionRecord:
    """Request `number`, the `seq`-th to arrive, got its first place at `now` (ns) with `tokens` left to compute."""

    now: int
    seq: int
    number: int
    tokens: int


@dataclass(frozen=True, slots=True)
class FinishRecord:
    """A request that has ended; `seq` is its place in the order of arrival."""

    seq: int
    finish: Finish


class RequestHistory:
    """The latest starts and ends."""

    def __init__(self) -> None:
        self._starts: deque[AdmissionRecord] = deque(maxlen=MAX_ADMISSION_RECORDS)
        self._ends: dict[int, FinishRecord] = {}
        self._records_complete_from_ns = -1

    def started(self, start: AdmissionRecord) -> None:
        """A request got its first place."""
        if len(self._starts) == MAX_ADMISSION_RECORDS:
            self._records_complete_from_ns = self._starts[0].now
        self._starts.append(start)

    def ended(self, seq: int, finish: Finish) -> None:
        """A request has ended."""
        self._ends.pop(finish.number, None)
        self._ends[finish.number] = FinishRecord(seq, finish)
        if len(self._ends) > MAX_FINISH_RECORDS:
            del self._ends[next(iter(self._ends))]

    def end_of(self, number: int) -> FinishRecord | None:
        """How a request ended; None if it has not, or if its entry was dropped."""
        return self._ends.get(number)

    def explain(self, end: FinishRecord) -> Explanation:
        """Where the time of an ended request went."""
        finish = end.finish
        until_ns = finish.admitted_ns or finish.finished_ns
        earlier, later, complete = self.admissions_between(end.seq, finish.arrival_ns, until_ns)
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
            evicted_for=self.admitted_at(finish.timings.evicted_ns),
            reason=finish.reason,
            message=finish.message,
        )

    def admitted_at(self, now: int) -> list[int]:
        """The requests that started in the step at `now` (ns), the latest `MAX_REPORTED_NUMBERS`; none at 0."""
        found = [start.number for start in self._starts if start.now == now] if now else []
        return found[-MAX_REPORTED_NUMBERS:]

    def admissions_between(
        self, seq: int, arrival_ns: int, until_ns: int
    ) -> tuple[AdmittedRequests, AdmittedRequests, bool]:
        """Requests other than the `seq`-th that started from `arrival_ns` to `until_ns`: earlier arrivals, later ones,
        and whether both are complete.
        """
        within = [start for start in self._starts if arrival_ns <= start.now <= until_ns and start.seq != seq]
        earlier = _summed(start for start in within if start.seq < seq)
        later = _summed(start for start in within if start.seq > seq)
        return earlier, later, arrival_ns > self._records_complete_from_ns


def _summed(starts: Iterable[AdmissionRecord]) -> AdmittedRequests:
    found = list(starts)
    latest = islice(found, max(0, len(found) - MAX_REPORTED_NUMBERS), None)
    return AdmittedRequests(len(found), sum(start.tokens for start in found), [start.number for start in latest])
