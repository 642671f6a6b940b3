"""A policy of the user's own, watched over: what it gets wrong harms nobody else."""

from collections.abc import Callable, Iterator
from typing import TypeVar

from tokenyard.base import Int32Array, SchedulerSettings
from tokenyard.policy.base import Policy
from tokenyard.policy.budget import StepBudget
from tokenyard.policy.compose import Wrapper
from tokenyard.policy.views import Columns, Views

Answer = TypeVar("Answer")
NOBODY: list[int] = []


class Guarded(Wrapper):
    """Passes on what `inner` says as long as it makes sense.

    The first exception, or an answer with rows that do not belong there or come twice, puts fcfs in its place for good;
    `failure` then says why. So that nothing hangs, fcfs also steps in where nobody runs and `inner` names no candidate.
    How long answers take is watched outside the core, where clocks are.
    """

    def __init__(self, settings: SchedulerSettings, inner: Policy, path: str) -> None:
        super().__init__(settings, inner, "own")
        self.name = path
        self.failure = ""

    def describe(self) -> str:
        """See `Policy.describe`."""
        return f"fcfs ({self.name} failed: {self.failure})" if self.failure else self.name

    def begin_step(self, views: Views) -> None:
        """See `Policy.begin_step`."""
        self.views = views
        self._ask(lambda: self.inner.begin_step(views), None)

    def candidates(self) -> Iterator[int]:
        """See `Policy.candidates`."""
        assert self.views is not None
        views = self.views
        rows = [*views.partial.tolist(), *views.waiting.tolist()]
        idle = not len(views.running) and not len(views.partial)
        return self._checked(rows, lambda: iter(self.inner.candidates()), complete=idle)

    def unfinished(self) -> Iterator[int]:
        """See `Policy.unfinished`."""
        assert self.views is not None
        return iter(self.views.partial.tolist())

    def order(self, views: Views) -> Iterator[int]:
        """See `Policy.order`."""
        return self._checked(views.waiting.tolist(), lambda: iter(self.inner.order(views)), complete=False)

    def overdue(self) -> list[int]:
        """See `Policy.overdue`."""
        assert self.views is not None
        known = {*self.views.partial.tolist(), *self.views.waiting.tolist()}
        rows = self._ask(lambda: [int(row) for row in self.inner.overdue()], NOBODY)
        return rows if self._belong(rows, known, "overdue") else []

    def budget(self) -> StepBudget:
        """See `Policy.budget`."""
        assert self.views is not None
        budget = self._ask(self.inner.budget, None)
        return self.budget_rule.begin(self.views) if budget is None else budget

    def victims(self, views: Views) -> Iterator[int]:
        """See `Policy.victims`. Rows that `inner` leaves out go last."""
        rows = self._ask(lambda: [int(row) for row in self.inner.victims(views)], NOBODY)
        if not self._belong(rows, set(views.running.tolist()), "victims"):
            rows = []
        chosen = set(rows)
        return iter([*rows, *(row for row in self.victim_rule.victims(views) if row not in chosen)])

    def outranked(self, views: Views, asker: int) -> Iterator[int]:
        """See `Policy.outranked`. All at once, so that a mistake is found before anybody gives way."""
        rows = self._ask(lambda: [int(row) for row in self.inner.outranked(views, asker)], NOBODY)
        seated = {*views.running.tolist(), *views.partial.tolist()}
        return iter(rows if self._belong(rows, seated, "outranked") else [])

    def charge(self, row: int, prefill_tokens: int) -> None:
        """See `Policy.charge`."""
        self._ask(lambda: self.inner.charge(row, prefill_tokens), None)

    def charge_decode(self, rows: Int32Array) -> None:
        """See `Policy.charge_decode`."""
        self._ask(lambda: self.inner.charge_decode(rows), None)

    def measures(self, rows: Int32Array) -> dict[str, float]:
        """See `Policy.measures`."""
        return self._ask(lambda: self.inner.measures(rows), {})

    def displaced(self, columns: Columns, waiting: Int32Array, newcomer: int) -> int | None:
        """See `Policy.displaced`."""
        row = self._ask(lambda: self.inner.displaced(columns, waiting, newcomer), None)
        return row if row is None or self._belong([row], set(waiting.tolist()), "displaced") else None

    def finished(self, row: int) -> None:
        """See `Policy.finished`."""
        self._ask(lambda: self.inner.finished(row), None)

    def removed(self, row: int) -> None:
        """See `Policy.removed`."""
        self._ask(lambda: self.inner.removed(row), None)

    def _checked(self, rows: list[int], draw: Callable[[], Iterator[int]], complete: bool) -> Iterator[int]:
        """What `draw` yields out of `rows`; what is left of them follows after a failure, or if nothing else comes and
        `complete` wants somebody.
        """
        left, drawn = dict.fromkeys(rows), False
        nothing: Iterator[int] = iter(())
        source = self._ask(draw, nothing)
        while (row := self._ask(lambda: next(source, None), None)) is not None:
            if row not in left:
                self._fail(f"candidate {row!r} is no waiting row, or came twice")
                break
            del left[row]
            drawn = True
            yield int(row)
        if self.failure or (complete and not drawn):
            yield from left

    def _belong(self, rows: list[int], known: set[int], answer: str) -> bool:
        """Whether `rows` are all different and `known`; otherwise `inner` is done with."""
        fine = len(set(rows)) == len(rows) and known.issuperset(rows)
        if not fine:
            self._fail(f"{answer} named a row twice, or one that does not belong there")
        return fine

    def _ask(self, question: Callable[[], Answer], fallback: Answer) -> Answer:
        if self.failure:
            return fallback
        try:
            return question()
        except Exception as error:
            self._fail(f"it raised {error!r}")
            return fallback

    def _fail(self, why: str) -> None:
        self.failure = why


ASKS = Guarded._ask.__code__
"""The function that calls the user's: an exception in what it calls, wherever it comes from, harms nobody else."""
