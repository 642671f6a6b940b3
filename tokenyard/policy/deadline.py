"""Deadlines: `edf` serves who is due first, `slo` also gives up in time on what cannot be met.

Four mechanisms make `slo`; none replaces another (reference notes on goodput, leave one out): a step bounded in time,
deadline order, prefills that give way at the edge of a chunk, and putting last the largest request wherever the
deadlines up to some point cannot all be met.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from tokenyard.base import NS_PER_S, BoolArray, Float64Array, Int32Array, SchedulerSettings
from tokenyard.policy.answers import AnswerPredictor
from tokenyard.policy.base import Policy
from tokenyard.policy.deadline_queue import DeadlineQueue
from tokenyard.policy.prefill_time import PrefillTime
from tokenyard.policy.priority import Priority
from tokenyard.policy.time_budget import TimeBudgetRule
from tokenyard.policy.views import Columns, Views

WALK_INTERVAL_NS = 100_000_000
ANSWER_QUANTILE = 0.9
"""Of the answers before, so many are not longer than the one that a deadline leaves time for."""

MOST_PUT_LAST = 16
"""Requests put last in one walk over a lane; if more have to be, the next step goes on."""


class EarliestDeadline(Policy):
    """The earliest deadline first, started or not, so that a long prefill gives way at the edge of a chunk.

    The first token of a request is due its time to first token after arrival, and so early that the answer can be whole
    by its deadline at its target pace; for that its length is taken to be one that 90 % of the answers before, by the
    same tenant to prompts of like length, did not exceed (nothing, as long as there are few). What brings neither a
    deadline nor a target has its class's: the larger of `slo_ttft_ms` and `slo_ttft_scale` times its unloaded prefill.
    With priorities enabled they come first, without aging. If all deadlines can be met this order meets them (Dertouzos
    1974); if not, it may miss them all.
    """

    name = "edf"
    needs_cost = True
    uses_hits = True
    ranks_priorities = True
    uses_slack = False
    overtaking = "only by requests that arrive before its own deadline"

    def __init__(self, settings: SchedulerSettings) -> None:
        # Without aging: preemption, a full queue and who gives way must agree with an order in which levels are strict.
        strict = replace(settings, priority_aging_s=0.0)
        super().__init__(strict)
        self.time_rule = TimeBudgetRule(settings, use_slack=self.uses_slack)
        if settings.step_budget != "tokens":
            self.budget_rule = self.time_rule
        self._priority = (
            Priority(strict, Policy(replace(strict, policy_options={}))) if settings.uses_priorities else None
        )
        self._answers = AnswerPredictor(ANSWER_QUANTILE)
        self.queue = DeadlineQueue(settings, self._answers, self.urgency.levels if self._priority else None)

    def begin_step(self, views: Views) -> None:
        """See `Policy.begin_step`."""
        super().begin_step(views)
        self.queue.update(views)

    def candidates(self, views: Views) -> Iterator[int]:
        """See `Policy.candidates`; here started prefills have no precedence."""
        return self.queue.rows()

    def unfinished(self, views: Views) -> Iterator[int]:
        """See `Policy.unfinished`."""
        return self.queue.only(views.partial)

    def order(self, views: Views) -> Iterator[int]:
        """See `Policy.order`."""
        return self.queue.only(views.waiting)

    def outranked(self, views: Views, asker: int) -> Iterator[int]:
        """See `Policy.outranked`."""
        return self._priority.outranked(views, asker) if self._priority else super().outranked(views, asker)

    def displaced(self, columns: Columns, waiting: Int32Array, newcomer: int) -> int | None:
        """See `Policy.displaced`."""
        return self._priority.displaced(columns, waiting, newcomer) if self._priority else None

    def finished(self, row: int) -> None:
        """See `Policy.finished`."""
        if self.views is not None:
            self._answers.learn(self.views.columns, row)


class ServiceLevel(EarliestDeadline):
    """Deadline order that meets as many deadlines as it can, by putting the largest request last where not all can be.

    On arrivals and at least every `WALK_INTERVAL_NS` the prefills are walked through in deadline order; where the work
    up to one of them cannot be done by its deadline, the largest so far is put last for good, which leaves the fewest
    requests late (Moore and Hodgson 1968; the same idea as relegation in Niyama). Those put last are served when nobody
    else wants to be. With `slo_max_wait_s` W, they compete again with the deadline arrival + unloaded prefill + W; with
    `slo_reject` they are refused when their deadline comes.
    """

    name = "slo"
    uses_slack = True
    overtaking = (
        "until its deadline by requests that are due earlier; after it without bound, or with slo_max_wait_s only by "
        "requests that are due before arrival + unloaded prefill + that wait"
    )

    def __init__(self, settings: SchedulerSettings) -> None:
        super().__init__(settings)
        self._next_walk_ns = 0
        self._relegated = 0

    def begin_step(self, views: Views) -> None:
        """See `Policy.begin_step`."""
        self.views = views
        if self.queue.update(views) or views.now >= self._next_walk_ns:
            self._next_walk_ns = views.now + WALK_INTERVAL_NS
            self._walk(views)

    def overdue(self) -> list[int]:
        """See `Policy.overdue`."""
        if not self.settings.slo_reject:
            return []
        assert self.views is not None
        now, queue = self.views.now, self.queue
        return [row for lane in queue.lanes() for row in lane[queue.last[lane] & (queue.due_ns[lane] <= now)].tolist()]

    def measures(self, rows: Int32Array) -> dict[str, float]:
        """See `Policy.measures`. relegated: requests put last so far; relegated_requests: those among `rows`."""
        now = 0 if self.views is None else self.queue.count_last(self.views.columns, rows)
        return {"relegated": self._relegated, "relegated_requests": now}

    def _walk(self, views: Views) -> None:
        """Put last whoever has to be, most urgent lane first; the work of more urgent lanes comes before all others."""
        assert views.cost is not None
        time = PrefillTime.of(views.cost)
        times = self.time_rule.step_times(views, time)
        start_ns = views.now + times.target_s * NS_PER_S
        bounded = self.settings.slo_max_wait_s > 0.0
        lanes = self.queue.lanes()
        for lane in lanes:
            # Nobody waits for those at the end of a lane, who have no time by which they must be done.
            rows = lane if bounded else self.queue.with_deadline(lane)
            work_ns = self._work_ns(views.columns, rows, time, times.stretch)
            last, decoded = self.queue.last[rows], views.columns.first_token_ns[rows] > 0
            due_ns = np.where(last, self.queue.own_ns[rows], self.queue.due_ns[rows])
            chosen = _largest_of_late(start_ns, work_ns, np.where(decoded, np.inf, due_ns), ~(last | decoded))
            if lane is not lanes[-1]:
                start_ns += float(self._work_ns(views.columns, lane, time, times.stretch).sum())
            if chosen:
                self.queue.put_last(rows[chosen])
                self._relegated += len(chosen)
            if len(chosen) >= MOST_PUT_LAST:
                self._next_walk_ns = views.now

    def _work_ns(self, columns: Columns, rows: Int32Array, time: PrefillTime, stretch: float) -> Float64Array:
        """How long the steps take that finish each prefill, float64[len(rows)]."""
        done = np.maximum(columns.planned[rows], columns.matchable[rows])
        seconds: Float64Array = time.rest_s(done, columns.target[rows] - done)
        return seconds * (stretch * NS_PER_S)


def _largest_of_late(start_ns: float, work_ns: Float64Array, due_ns: Float64Array, may_wait: BoolArray) -> list[int]:
    """Places to leave out so that the others, done one after the other from `start_ns`, are in time.

    The arrays are in the order of work; only places that `may_wait` are chosen. Who would be late even alone is chosen
    first, since nobody else could help it. At most `MOST_PUT_LAST` others are.
    """
    if not len(work_ns):
        return []
    alone = start_ns + work_ns > due_ns
    chosen: list[int] = np.flatnonzero(alone & may_wait).tolist()
    most = len(chosen) + MOST_PUT_LAST
    size = np.where(may_wait & ~alone, work_ns, -1.0)
    spare = np.where(alone, np.inf, due_ns - start_ns - np.cumsum(np.where(alone & may_wait, 0.0, work_ns)))
    begin = 0
    while len(chosen) < most:
        late = spare[begin:] < 0.0
        first = begin + int(late.argmax())
        if not late[first - begin]:
            break
        largest = int(size[: first + 1].argmax())
        if size[largest] < 0.0:
            # Nobody can make room for who stands before the first place that may wait.
            begin = int((size >= 0.0).argmax())
            if begin <= first:
                break
            continue
        spare[largest:] += size[largest]
        spare[largest], size[largest] = np.inf, -1.0
        chosen.append(largest)
        begin = first
    return chosen


POLICIES: list[type[Policy]] = [EarliestDeadline, ServiceLevel]
