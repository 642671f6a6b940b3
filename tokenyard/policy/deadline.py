"""Deadlines: `edf` serves the request that is due first, `slo` also defers requests that cannot meet theirs.

`slo` combines four mechanisms (docs/policies.md): steps bounded in time, deadline order, prefills that are interrupted
between chunks, and deferral of the largest request wherever the deadlines up to some point cannot all be met.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
from typing_extensions import override

from tokenyard.base import NS_PER_S, BoolArray, Float64Array, Int32Array, SchedulerSettings
from tokenyard.policy.base import Policy
from tokenyard.policy.deadline_queue import DeadlineQueue, one_by_one
from tokenyard.policy.decode_share import share_with_decodes
from tokenyard.policy.output_lengths import OutputLengthPredictor
from tokenyard.policy.prefill_time import PrefillTime
from tokenyard.policy.priority import Priority
from tokenyard.policy.slo_targets import ahead_of_ns, tpot_ns
from tokenyard.policy.speculation import TpotSlack
from tokenyard.policy.time_budget import TimeBudgetRule
from tokenyard.policy.views import Columns, Views

DEFER_INTERVAL_NS = 100_000_000
ANSWER_QUANTILE = 0.9
"""A deadline leaves time for an answer of this quantile of earlier answers' lengths."""

MAX_DEFERRED = 16
"""Requests deferred in one walk over a lane; if more have to be, the next step goes on."""

MAX_RESTORED = 16
"""Deferred requests that one walk checks for whether they can meet their deadline after all."""

ROOM_SHARE = 1 / 3
"""Share of the KV pool that stays free when a deferred request starts in the first half of its longest wait."""

TPOT_SHARE = 0.9
"""Share of the target time per token at which a row counts as late for drafts, so that an answer's last steps, whose
drafts may be wrong, do not make it late.
"""

Work = Callable[[Int32Array], Float64Array]
"""Maps rows (int32[n]) to the time that each one's prefill takes in ns, float64[n]."""


class EarliestDeadlineFirst(Policy):
    """The earliest deadline first, started or not, so that a more urgent prefill can interrupt a long one between
    chunks.

    The first token of a request is due at arrival plus its target time to first token. With a deadline it is also due
    early enough that the whole answer, at its target time per token, ends by the deadline. The answer's length is then
    taken to be one that 90 % of earlier answers to the same tenant's prompts of similar length did not exceed, or 0
    while there are few. A request with neither a deadline nor a target has its class's target: the larger of
    `slo_ttft_ms` and `slo_ttft_scale` times its unloaded prefill. With priorities enabled, more urgent requests come
    first, without aging. If all deadlines can be met this order meets them (Dertouzos 1974); if not, it may miss them
    all.
    """

    name = "edf"
    needs_cost = True
    uses_hits = True
    ranks_priorities = True
    uses_slack = False
    overtaking = "only by requests that arrive before its own deadline"

    def __init__(self, settings: SchedulerSettings) -> None:
        # Without aging: the order keeps levels strict, so preemption, a full queue and victims must do so too.
        strict = replace(settings, priority_aging_s=0.0)
        super().__init__(strict)
        self.time_rule = TimeBudgetRule(settings, use_slack=self.uses_slack)
        if settings.step_budget != "tokens":
            self.budget_rule = share_with_decodes(self.time_rule, settings.share_of_decodes)
        self._priority = (
            Priority(strict, Policy(replace(strict, policy_options={}))) if settings.uses_priorities else None
        )
        self._answers = OutputLengthPredictor(ANSWER_QUANTILE)
        self.queue = DeadlineQueue(settings, self._answers, self.urgency.levels if self._priority else None)

    @override
    def begin_step(self, views: Views) -> None:
        super().begin_step(views)
        self.queue.update(views)

    @override
    def candidates(self, views: Views) -> Iterator[int]:
        """Here started prefills have no precedence."""
        return self.queue.rows()

    @override
    def prefilling_order(self, views: Views) -> Iterator[int]:
        return self.queue.only(views.prefilling)

    @override
    def order(self, views: Views) -> Iterator[int]:
        return self.queue.only(views.waiting)

    @override
    def outranked(self, views: Views, preemptor: int) -> Iterator[int]:
        return self._priority.outranked(views, preemptor) if self._priority else super().outranked(views, preemptor)

    @override
    def victims(self, views: Views) -> Iterator[int]:
        return self._priority.victims(views) if self._priority else super().victims(views)

    @override
    def displaced(self, columns: Columns, waiting: Int32Array, newcomer: int) -> int | None:
        return self._priority.displaced(columns, waiting, newcomer) if self._priority else None

    @override
    def finished(self, row: int) -> None:
        if self.views is not None:
            self._answers.learn(self.views.columns, row)


class SloPolicy(EarliestDeadlineFirst):
    """Deadline order that meets as many deadlines as it can: if not all can be met, the largest requests are deferred.

    On arrivals and at least every `DEFER_INTERVAL_NS` the policy walks through the prefills in deadline order. If the
    work up to one of them cannot be done by its deadline, the largest so far is deferred, which leaves the fewest
    requests late (Moore and Hodgson 1968; the same idea as relegation in Niyama). It returns if a later walk finds that
    it can be in time after all. A deferred request is served when no other waits. With `slo_max_wait_s` W, it competes
    again with the deadline arrival + unloaded prefill + W. Until W / 2 before that, it starts only if a share of the KV
    pool stays free, because its answer would hold memory that requests still in time need. With `slo_reject` it is
    refused when its deadline passes.
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
        self._deferred_count = 0

    @override
    def begin_step(self, views: Views) -> None:
        self.views = views
        if self.queue.update(views) or views.now >= self._next_walk_ns:
            self._next_walk_ns = views.now + DEFER_INTERVAL_NS
            self._update_deferred(views)

    @override
    def candidates(self, views: Views) -> Iterator[int]:
        """With `slo_max_wait_s`, deferred requests in the least urgent lane wait for memory."""
        lanes = self.queue.lanes()
        for lane in lanes:
            held = lane is lanes[-1] and self.settings.slo_max_wait_s > 0.0
            yield from self._admit_while_fits(views, lane) if held else one_by_one(lane)

    def _admit_while_fits(self, views: Views, lane: Int32Array) -> Iterator[int]:
        """The rows of `lane`. Once a deferred row finds too little room, the rows that can wait are left out."""
        target = views.columns.target
        prefilling = set(views.prefilling.tolist())
        reserved = int((target[views.prefilling] - views.columns.planned[views.prefilling]).sum())
        room = views.free_tokens - reserved - int(ROOM_SHARE * views.total_tokens)
        alone = not prefilling and not len(views.running)
        for place, row in enumerate(one_by_one(lane)):
            if row not in prefilling:
                room -= int(target[row])
                if room < 0 and self.queue.deferred[row] and not alone:
                    rest = lane[place:]
                    yield from one_by_one(rest[~self._can_wait(views, rest)])
                    return
            alone = False
            yield row

    def _can_wait(self, views: Views, rows: Int32Array) -> BoolArray:
        """Which rows are deferred, not started and in the first half of their longest wait, bool[len(rows)]."""
        queue, half_ns = self.queue, self.settings.slo_max_wait_s * NS_PER_S / 2
        early = queue.deferred[rows] & (queue.deferred_key_ns[rows] - views.now > half_ns)
        return early & ~np.isin(rows, views.prefilling)

    @override
    def overdue(self) -> list[int]:
        if not self.settings.slo_reject:
            return []
        assert self.views is not None
        now, queue = self.views.now, self.queue
        return [
            row for lane in queue.lanes() for row in lane[queue.deferred[lane] & (queue.due_ns[lane] <= now)].tolist()
        ]

    @override
    def pace(self, columns: Columns, rows: Int32Array, now: int) -> TpotSlack | None:
        targets_ns = (TPOT_SHARE * tpot_ns(columns, rows, self.settings)).astype(np.int64)
        return TpotSlack(ahead_of_ns(columns, rows, targets_ns, now) / NS_PER_S, targets_ns / NS_PER_S)

    @override
    def measures(self, rows: Int32Array) -> dict[str, float]:
        """deferred: how often requests were deferred so far. deferred_requests: how many of `rows` are."""
        now = 0 if self.views is None else self.queue.count_deferred(self.views.columns, rows)
        return {"deferred": self._deferred_count, "deferred_requests": now}

    def _update_deferred(self, views: Views) -> None:
        """Defer the rows that must be, most urgent lane first; the work of more urgent lanes comes first."""
        assert views.cost is not None
        time = PrefillTime.of(views.cost)
        times = self.time_rule.step_times(views, time)
        work_ns = partial(_work_ns, views.columns, time, times.slowdown)
        start_ns = views.now + times.target_s * NS_PER_S
        bounded = self.settings.slo_max_wait_s > 0.0
        lanes = self.queue.lanes()
        for lane in lanes:
            # Rows at the end of a lane have no time by which they must be done, and delay no other row.
            rows = lane if bounded else self.queue.with_deadline(lane)
            may_wait = ~(self.queue.deferred[rows] | (views.columns.first_token_ns[rows] > 0))
            chosen = rows_to_defer(start_ns, work_ns(rows), self._latest_finish_ns(views.columns, rows), may_wait)
            if chosen:
                self.queue.defer(rows[chosen])
                self._deferred_count += len(chosen)
            else:
                self._restore_deferred(views.columns, lane, rows, start_ns, work_ns)
            if lane is not lanes[-1]:
                start_ns += float(work_ns(lane).sum())
            if len(chosen) >= MAX_DEFERRED:
                self._next_walk_ns = views.now

    def _restore_deferred(
        self, columns: Columns, lane: Int32Array, walked: Int32Array, start_ns: float, work_ns: Work
    ) -> None:
        """Bring back the rows at the end of `lane` that can be in time after all without making a `walked` row late."""
        queue = self.queue
        hopeful = queue.deferred & (queue.due_ns > start_ns)
        back = lane[hopeful[lane]]
        if not len(back):
            return
        rows = np.concatenate((back, walked[~hopeful[walked]]))
        due_ns = np.where(hopeful[rows], queue.due_ns[rows], self._latest_finish_ns(columns, rows))
        order = np.argsort(due_ns, kind="stable")
        rows = rows[order]
        found = rows_to_restore(start_ns, work_ns(rows), due_ns[order], hopeful[rows])
        if found:
            queue.restore(rows[found])

    def _latest_finish_ns(self, columns: Columns, rows: Int32Array) -> Float64Array:
        """When each prefill must be done, float64[len(rows)] in ns; inf for a row that already had its first token."""
        queue = self.queue
        due_ns = np.where(queue.deferred[rows], queue.deferred_key_ns[rows], queue.due_ns[rows])
        must: Float64Array = np.where(columns.first_token_ns[rows] > 0, np.inf, due_ns)
        return must


def _work_ns(columns: Columns, time: PrefillTime, slowdown: float, rows: Int32Array) -> Float64Array:
    """How long the steps take that finish each prefill, float64[len(rows)] in ns."""
    done = np.maximum(columns.planned[rows], columns.matchable[rows])
    seconds: Float64Array = time.rest_s(done, columns.target[rows] - done)
    return seconds * (slowdown * NS_PER_S)


def rows_to_defer(start_ns: float, work_ns: Float64Array, due_ns: Float64Array, may_wait: BoolArray) -> list[int]:
    """Places to leave out so that the others, done one after the other from `start_ns`, are in time.

    The arrays are in the order of work; only places that `may_wait` are chosen. A request that would be late even alone
    is chosen first, as leaving out others cannot help it. At most `MAX_DEFERRED` others are chosen.
    """
    if not len(work_ns):
        return []
    alone = start_ns + work_ns > due_ns
    chosen: list[int] = np.flatnonzero(alone & may_wait).tolist()
    most = len(chosen) + MAX_DEFERRED
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
            # Only earlier places make room; before the first place that may wait there are none to choose.
            begin = int((size >= 0.0).argmax())
            if begin <= first:
                break
            continue
        spare[largest:] += size[largest]
        spare[largest], size[largest] = np.inf, -1.0
        chosen.append(largest)
        begin = first
    return chosen


def rows_to_restore(start_ns: float, work_ns: Float64Array, due_ns: Float64Array, left_out: BoolArray) -> list[int]:
    """Places `left_out` that can be done in time after all without making another place late.

    The arrays are in the order of work. The `MAX_RESTORED` smallest are tried, the smallest first.
    """
    spare = due_ns - start_ns - np.cumsum(np.where(left_out, 0.0, work_ns))
    needed = np.where(left_out | (spare < 0.0), np.inf, spare)
    places = np.flatnonzero(left_out)
    found: list[int] = []
    for place in places[np.argsort(work_ns[places], kind="stable")][:MAX_RESTORED].tolist():
        work = work_ns[place]
        if min(spare[place], needed[place:].min()) >= work:
            spare[place:] -= work
            needed[place:] -= work
            needed[place] = spare[place]
            found.append(place)
    return found


POLICIES: list[type[Policy]] = [EarliestDeadlineFirst, SloPolicy]
