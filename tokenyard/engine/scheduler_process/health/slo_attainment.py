"""Whether requests met their SLO targets (their own or their class's), and the share of each class that did."""

from collections import deque

from tokenyard.base import Finish, Request

WINDOW_REQUESTS = 200
MAX_CLASSES = 32
NO_CLASS = "normal"

ON_PURPOSE = ("cancelled", "client_gone", "paused")
"""Abort causes that are not a failure of the server."""

SAYS_NOTHING = (*ON_PURPOSE, "slow_reader", "draining", "invalid", "too_long", "tenant_limit")


def targets_met(finish: Finish) -> list[tuple[str, bool]]:
    """The latency targets of a request that has ended, each with whether it was met; what never came was late."""
    promise, met = finish.slo_targets, []
    if promise.ttft_ns:
        soon = finish.first_token_ns - finish.arrival_ns <= promise.ttft_ns
        met.append(("ttft", bool(finish.first_token_ns) and soon))
    if promise.tpot_ns and finish.completion_tokens > 1:
        decode_ns = finish.finished_ns - finish.first_token_ns
        met.append(("tpot", decode_ns <= promise.tpot_ns * (finish.completion_tokens - 1)))
    if promise.deadline_ns:
        in_time = finish.finished_ns - finish.arrival_ns <= promise.deadline_ns
        met.append(("deadline", in_time and finish.reason != "abort"))
    return met


def met_slo(finish: Finish) -> bool | None:
    """Whether an answer met all its targets; one that was refused or failed did not.

    None for one that was ended on purpose, for one that could not be served or was beyond its tenant's
    limit, and where there is no target because the request never reached the scheduler.
    """
    if finish.cause in SAYS_NOTHING or not finish.slo_targets.tpot_ns:
        return None
    return finish.reason != "abort" and all(met for _, met in targets_met(finish))


def stage_at_deadline(finish: Finish) -> str:
    """Where a request was when its deadline passed: queue, prefill or decode."""
    due_ns = finish.arrival_ns + finish.slo_targets.deadline_ns
    if not 0 < finish.admitted_ns <= due_ns:
        return "queue"
    return "decode" if 0 < finish.first_token_ns <= due_ns else "prefill"


class SloAttainment:
    """Keeps the class of each open request, and for each class whether its latest requests met their targets."""

    def __init__(self) -> None:
        self._open: dict[int, str] = {}
        self._met: dict[str, deque[bool]] = {}

    def submitted(self, request: Request) -> None:
        """Register a new request; each of its answers counts."""
        for number in range(request.number, request.number + request.sampling.n):
            self._open[number] = request.service_class or NO_CLASS

    def finished(self, finish: Finish) -> None:
        """An answer has ended."""
        name, kept = self._open.pop(finish.number, None), met_slo(finish)
        if name is None or kept is None:
            return
        if name in self._met or len(self._met) < MAX_CLASSES:
            self._met.setdefault(name, deque(maxlen=WINDOW_REQUESTS)).append(kept)

    def shares(self) -> dict[str, float]:
        """Share of the latest requests that met their targets, by class; classes without any yet are left out."""
        return {name: sum(met) / len(met) for name, met in self._met.items()}
