"""A scheduler whose steps take the time that a cost model says, on a clock that nothing else moves."""

from dataclasses import replace

from tests.scheduler.harness import Yard, make_info
from tokenyard.base import SchedulerSettings
from tokenyard.cost import LinearCost, LinearTerms
from tokenyard.executor.mock import MockExecutor

MS = 1_000_000
S = 1_000_000_000
COST = LinearCost(LinearTerms(step_ms=0.0, floor_ms=1.0, dense_ms=1.0, token_ms=0.1, context_ms=0.0, area_ms=0.0))
"""A step takes 1 ms and 0.1 ms a token."""


class ClockedYard(Yard):
    """A `Yard` in virtual time: a step ends when its cost is over, and requests may come at any moment."""

    def __init__(self, settings, info, cost=COST, **executor):
        super().__init__(settings, info, cost=cost, executor=MockExecutor(info, cost, False, **executor))
        self.free_ns = 0

    def commit(self):
        if not self.tickets:
            return False
        ticket = self.tickets.popleft()
        self.reads.popleft()
        result = self.executor.collect(ticket)
        self.free_ns = self.now = max(self.now, self.free_ns) + round(result.seconds * S)
        self.scheduler.commit(result, self.now)
        self._collect()
        return True

    def turn(self):
        """One step, or a sleep until the scheduler wants to be asked again; False if nothing will ever happen."""
        if self.launch():
            return self.commit()
        wakeup = self.scheduler.wakeup_ns()
        if wakeup is None or not self.scheduler.has_work:
            return False
        assert wakeup > self.now, "the scheduler asks to be called at a time that is over"
        self.now = wakeup
        return True

    def until(self, now):
        """Run until the clock reads `now` or later, also if there is nothing to do."""
        while self.now < now:
            if not self.turn():
                self.now = now

    def rest(self, limit=100_000):
        """Run until nothing is left to do."""
        for _ in range(limit):
            if not self.turn():
                return
        raise AssertionError("the scheduler does not come to rest")

    def ttft_ms(self, number):
        finish = self.finished[number]
        return (finish.first_token_ns - finish.arrival_ns) / MS


def make_clocked(
    pages=100_000, page_size=1, rows=64, context=20_000, cost=COST, answer_tokens=None, drafts=0, right=1.0, **settings
):
    chosen = SchedulerSettings(page_size=page_size, max_running_requests=rows, context_length=context)
    chosen = replace(chosen, **{"headroom": "none", "disable_radix_cache": True, **settings})
    info = make_info(pages, page_size, rows, context)
    return ClockedYard(chosen, info, cost, answer_tokens=answer_tokens, drafts=drafts, draft_right=right)


def prompt(tokens, start=5):
    return [start + index % 80 for index in range(tokens)]
