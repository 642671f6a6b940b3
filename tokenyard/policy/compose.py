"""Policies made out of others: a wrapper changes some answers of the policy inside it and passes on the rest."""

import heapq
from collections.abc import Iterator

from tokenyard.base import Int32Array, SchedulerSettings
from tokenyard.policy.base import Policy
from tokenyard.policy.budget import StepBudget
from tokenyard.policy.views import Columns, Views


class Wrapper(Policy):
    """Passes everything on to `inner`. Subclasses override what they change and call `super` for the rest."""

    def __init__(self, settings: SchedulerSettings, inner: Policy, prefix: str) -> None:
        self.settings = settings
        self.inner = inner
        self.views: Views | None = None
        self._prefix = prefix
        self.name = f"{prefix}+{inner.name}"
        self.overtaking = inner.overtaking
        self.needs_tree = inner.needs_tree
        self.uses_hits = inner.uses_hits
        self.needs_cost = inner.needs_cost
        self.ranks_priorities = inner.ranks_priorities
        self.charges_decode = inner.charges_decode
        self.chosen = inner.chosen
        self.budget_rule = inner.budget_rule
        self.headroom = inner.headroom
        self.urgency = inner.urgency
        self.victim_rule = inner.victim_rule

    def describe(self) -> str:
        """See `Policy.describe`."""
        return f"{self._prefix}+{self.inner.describe()}"

    def begin_step(self, views: Views) -> None:
        """See `Policy.begin_step`."""
        self.views = views
        self.inner.begin_step(views)

    def candidates(self) -> Iterator[int]:
        """See `Policy.candidates`."""
        return self.inner.candidates()

    def unfinished(self) -> Iterator[int]:
        """See `Policy.unfinished`."""
        return self.inner.unfinished()

    def overdue(self) -> list[int]:
        """See `Policy.overdue`."""
        return self.inner.overdue()

    def order(self, views: Views) -> Iterator[int]:
        """See `Policy.order`."""
        return self.inner.order(views)

    def budget(self) -> StepBudget:
        """See `Policy.budget`."""
        return self.inner.budget()

    def victims(self, views: Views) -> Iterator[int]:
        """See `Policy.victims`."""
        return self.inner.victims(views)

    def outranked(self, views: Views, asker: int) -> Iterator[int]:
        """See `Policy.outranked`."""
        return self.inner.outranked(views, asker)

    def charge(self, row: int, prefill_tokens: int) -> None:
        """See `Policy.charge`."""
        self.inner.charge(row, prefill_tokens)

    def charge_decode(self, rows: Int32Array) -> None:
        """See `Policy.charge_decode`."""
        self.inner.charge_decode(rows)

    def measures(self, rows: Int32Array) -> dict[str, float]:
        """See `Policy.measures`."""
        return self.inner.measures(rows)

    def displaced(self, columns: Columns, waiting: Int32Array, newcomer: int) -> int | None:
        """See `Policy.displaced`."""
        return self.inner.displaced(columns, waiting, newcomer)

    def finished(self, row: int) -> None:
        """See `Policy.finished`."""
        self.inner.finished(row)

    def removed(self, row: int) -> None:
        """See `Policy.removed`."""
        self.inner.removed(row)


class BoundedOvertaking(Wrapper):
    """Any order, but at most `max_overtaken_tokens` prompt tokens of later arrivals start before a waiting request.

    It is enough to watch the request that has waited for longest: whoever arrived later was overtaken by no more.
    """

    def __init__(self, settings: SchedulerSettings, inner: Policy) -> None:
        super().__init__(settings, inner, "bounded")
        self.overtaking = f"{settings.max_overtaken_tokens} prompt tokens of later arrivals"
        self._limit = settings.max_overtaken_tokens
        self._started: list[tuple[int, int]] = []
        self._started_tokens = 0
        self._offered = -1

    def candidates(self) -> Iterator[int]:
        """See `Policy.candidates`. The longest waiting row is put in front of whoever must not pass it any more."""
        assert self.views is not None
        columns, waiting = self.views.columns, self.views.waiting
        started, place = set(self.views.partial.tolist()), 0
        drawn: set[int] = set()
        for row in self.inner.candidates():
            if row in started:
                yield row
                continue
            while row not in drawn:
                while int(waiting[place]) in drawn:
                    place += 1
                head = int(waiting[place])
                chosen = row if row == head or self._may_pass(columns, row, head) else head
                drawn.add(chosen)
                self._offered = chosen
                yield chosen

    def charge(self, row: int, prefill_tokens: int) -> None:
        """See `Policy.charge`. The first chunk of a row counts for all of its prompt."""
        super().charge(row, prefill_tokens)
        if row == self._offered:
            assert self.views is not None
            columns = self.views.columns
            tokens = int(columns.target[row]) - int(columns.planned[row]) + prefill_tokens
            heapq.heappush(self._started, (int(columns.seq[row]), tokens))
            self._started_tokens += tokens
            self._offered = -1

    def _may_pass(self, columns: Columns, row: int, head: int) -> bool:
        """Whether `row` may start although `head` came earlier and still waits."""
        while self._started and self._started[0][0] < columns.seq[head]:
            self._started_tokens -= heapq.heappop(self._started)[1]
        tokens = int(columns.target[row]) - int(columns.matchable[row])
        return self._started_tokens + tokens <= self._limit
