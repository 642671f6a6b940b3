"""Calls a user-defined priority function (`--priority-function`) for waiting requests.

Its answers become `Update` events with a boost, so that they stand on the tape. A request is asked about on arrival and
then every quarter of a second, a few at a time while the device works; a function that fails, answers nonsense or takes
too long is switched off, at once if it does not come back at all.
"""

import logging
import time
from collections import deque
from collections.abc import Mapping

from tokenyard.base import NS_PER_S, Request, TokenBatch, Update
from tokenyard.engine.scheduler_process.attachments.base import Attachment
from tokenyard.engine.scheduler_process.health.liveness import PRIORITY_FUNCTION
from tokenyard.engine.scheduler_process.health.slo_attainment import SloAttainment
from tokenyard.engine.scheduler_process.health.user_code_guards import (
    Clock,
    StalledError,
    ViolationCounter,
    interrupt_after,
)
from tokenyard.policy.priority_function import PriorityFunction, SystemView, load_priority_function, to_boost
from tokenyard.tape.recorder import Core

logger = logging.getLogger(__name__)

PERIOD_NS = NS_PER_S // 4
SLICE_NS = 500_000
"""After this long the rest waits for the next step."""

BUDGET_NS = 50_000
"""What one call may take."""


class PriorityUpdates(Attachment):
    """One priority function at work for one scheduler. `failure` says why it was switched off, if it was."""

    name = PRIORITY_FUNCTION
    optional = True

    def __init__(self, function: PriorityFunction, path: str, core: Core, clock: Clock | None = None) -> None:
        self.failure = ""
        self._function = function
        self._path = path
        self._core = core
        self.clock = clock or time.monotonic_ns
        self._mistakes = ViolationCounter()
        self._attainment = SloAttainment()
        self._boosts: dict[int, int] = {}
        self._new: deque[int] = deque()
        self._round: deque[int] = deque()
        self._next_round_ns = 0

    def describe(self, now: int) -> Mapping[str, str]:
        """The function's path, and why it is off if it is."""
        return {"priority_function": f"off ({self._path} {self.failure})" if self.failure else self._path}

    def accepted(self, request: Request, now: int) -> None:
        """Register a new request."""
        if self.failure:
            return
        self._attainment.submitted(request)
        self._new.extend(range(request.number, request.number + request.sampling.n))

    def on_output(self, batch: TokenBatch) -> None:
        """The scheduler says what became of requests."""
        for finish in batch.finished:
            self._attainment.finished(finish)
            self._boosts.pop(finish.number, None)

    def while_device_runs(self, now: int) -> list[Update]:
        """Ask about the next few waiting requests, new ones first; return what has changed."""
        if self.failure:
            return []
        if not self._round and now >= self._next_round_ns:
            self._next_round_ns = now + PERIOD_NS
            new = set(self._new)
            self._round.extend(number for number in self._core.waiting_numbers() if number not in new)
        updates: list[Update] = []
        queue = self._new or self._round
        if not queue:
            return updates
        system, end_ns = self._system(now), self.clock() + SLICE_NS
        while queue and not self.failure and self.clock() < end_ns:
            number = queue.popleft()
            boost = self._boost(number, system, now)
            if boost is not None and boost != self._boosts.get(number, 0):
                self._boosts[number] = boost
                updates.append(Update(number, boost=boost))
            queue = self._new or self._round
        return updates

    def _system(self, now: int) -> SystemView:
        state = self._core.snapshot(now)
        free = 1.0 - state.used_tokens / max(1, state.total_tokens)
        return SystemView(state.waiting, state.running, free, self._attainment.shares())

    def _boost(self, number: int, system: SystemView, now: int) -> int | None:
        """What the function says of a request; None for one that does not wait any more, and for a mistake."""
        request = self._core.request_view(number, now)
        if request is None:
            return None
        begin_ns, boost, mistake, stalled = self.clock(), None, "", False
        try:
            with interrupt_after():
                boost = to_boost(self._function(request, system))
        except BaseException as error:
            mistake, stalled = f"failed: {error!r}", isinstance(error, StalledError)
        took_ns = self.clock() - begin_ns
        if not mistake and took_ns > BUDGET_NS:
            mistake = f"took {took_ns // 1000} us for one request; {BUDGET_NS // 1000} are allowed"
        if self._mistakes.count(bool(mistake)) or stalled:
            self.failure = mistake
            logger.error("the priority function %s is switched off: it %s", self._path, mistake)
        return boost


def create_priority_updates(path: str, core: Core) -> PriorityUpdates | None:
    """The hook for `module:name`, None for "". Raises ConfigError if there is no such function."""
    return PriorityUpdates(load_priority_function(path), path, core) if path else None
