"""A guard around user-defined policies, so that their errors affect no request."""

from collections.abc import Callable, Generator, Iterator
from copy import deepcopy
from dataclasses import replace
from operator import index
from traceback import walk_tb
from typing import Any, TypeVar, cast

import numpy as np
from typing_extensions import override

from tokenyard.base import CostModel, Int32Array, Request, SchedulerSettings, StepWork
from tokenyard.policy.base import Policy, chosen_options
from tokenyard.policy.speculation import TpotSlack
from tokenyard.policy.step_budget import StepBudget
from tokenyard.policy.views import Columns, IdleSessions, PrefixBranch, SessionState, Views
from tokenyard.policy.wrappers import Wrapper

T = TypeVar("T")
NO_ROWS: list[int] = []


class ReadOnlyColumns:
    """The columns as a user-defined policy sees them: read-only arrays, and copies of requests.

    Only the columns that `Columns` names exist. Writing to an array raises ValueError.
    """

    def __init__(self, columns: Columns) -> None:
        self._columns = columns

    def __getattr__(self, name: str) -> Any:
        if name not in Columns.__annotations__:
            raise AttributeError(f"there is no column {name!r}; see tokenyard.policy.Columns")
        return read_only(getattr(self._columns, name))

    def request(self, row: int) -> Request:
        """A copy of the request in this row; its token ids are shared and read-only."""
        request = self._columns.request(row)
        ids = {"prompt_ids": read_only(request.prompt_ids), "output_ids": read_only(request.output_ids)}
        others = {name: deepcopy(getattr(request, name)) for name in ("sampling", "text", "logprobs", "slo")}
        return replace(request, **ids, **others)


class ReadOnlyCost:
    """A cost model that a policy can ask but not teach."""

    learns = False

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost

    def step(self, work: StepWork) -> float:
        """Seconds that a step with this work takes."""
        return self._cost.step(work)

    def copy(self, num_bytes: int, link: str) -> float:
        """Seconds to move `num_bytes` over a link."""
        return self._cost.copy(num_bytes, link)

    def learn(self, work: StepWork, seconds: float) -> None:
        """Raise TypeError: the cost model learns from measured steps alone."""
        raise TypeError("a policy cannot teach the cost model")


class ReadOnlyBranch:
    """A read-only `PrefixBranch`."""

    def __init__(self, branch: PrefixBranch) -> None:
        self._branch = branch
        self.birth, self.own, self.weight = branch.birth, branch.own, branch.weight

    def heaviest_first(self) -> Iterator[PrefixBranch]:
        """The branches directly below, the heaviest first."""
        return map(ReadOnlyBranch, self._branch.heaviest_first())

    def rows(self) -> list[int]:
        """The `own` rows, a new list."""
        return self._branch.rows()


class ReadOnlySessions(IdleSessions):
    """Answers questions about idle sessions."""

    def __init__(self, sessions: IdleSessions) -> None:
        self._sessions = sessions

    @override
    def expected_tokens(self, now: int, least_per_s: float) -> int:
        return self._sessions.expected_tokens(now, least_per_s)

    @override
    def retained_tokens(self, now: int) -> dict[tuple[str, str], int]:
        return self._sessions.retained_tokens(now)

    @override
    def best_ttl_s(self, kind: int, worth_s: float) -> float:
        return self._sessions.best_ttl_s(kind, worth_s)


def read_only(array: Any) -> Any:
    """A read-only view of the array."""
    view = array.view()
    view.flags.writeable = False
    return view


def guarded_columns(columns: Columns) -> Columns:
    """What a user-defined policy sees of `columns`."""
    return cast(Columns, ReadOnlyColumns(columns))


def guarded_views(views: Views) -> Views:
    """What a user-defined policy sees of `views`."""
    return replace(
        views,
        columns=guarded_columns(views.columns),
        waiting=read_only(views.waiting),
        prefilling=read_only(views.prefilling),
        running=read_only(views.running),
        loading=read_only(views.loading),
        cost=None if views.cost is None else ReadOnlyCost(views.cost),
        prefixes=None if views.prefixes is None else ReadOnlyBranch(views.prefixes),
        sessions=None if views.sessions is None else ReadOnlySessions(views.sessions),
    )


class GuardedPolicy(Wrapper):
    """Passes on the answers of `inner` as long as they are valid.

    After the first exception of any kind, or the first invalid answer, such as a row that is unknown or named twice,
    fcfs replaces `inner` for good, and `failure` says why. So that the engine never hangs, fcfs also decides if no
    request decodes and `inner` names no candidate or allows no tokens. The time that answers take is measured outside
    the core, where clocks are (`time_answers`). Headroom, urgency and other state belong to the guard.
    """

    def __init__(self, settings: SchedulerSettings, inner: Policy, path: str) -> None:
        super().__init__(settings, inner, "user")
        self.name = path
        self.failure = ""
        self.overtaking = str(inner.overtaking)
        self.needs_cost = bool(inner.needs_cost or getattr(inner.budget_rule, "needs_cost", False))
        self.chosen = chosen_options(type(inner), settings)
        own = Policy(replace(settings, policy_options={}))
        self.budget_rule, self.headroom = own.budget_rule, own.headroom
        self.urgency, self.victim_rule = own.urgency, own.victim_rule
        self._asked: Callable[[], None] = _untimed
        self._answered: Callable[[], None] = _untimed

    @override
    def describe(self) -> str:
        return f"fcfs ({self.name} failed: {self.failure})" if self.failure else self.name

    @override
    def given_up(self) -> str:
        return f"{self.name} failed: {self.failure}" if self.failure else ""

    @override
    def time_answers(self, asked: Callable[[], None], answered: Callable[[], None]) -> None:
        self._asked, self._answered = asked, answered

    @override
    def begin_step(self, views: Views) -> None:
        self.views = views
        self.ask(lambda: self._begin_step(guarded_views(views)), None)

    def _begin_step(self, shown: Views) -> None:
        self.inner.views = shown
        self.inner.begin_step(shown)

    @override
    def candidates(self, views: Views) -> Iterator[int]:
        rows = [*views.prefilling.tolist(), *views.waiting.tolist()]
        return self._checked(rows, lambda: iter(self.inner.candidates(guarded_views(views))))

    @override
    def prefilling_order(self, views: Views) -> Iterator[int]:
        return iter(views.prefilling.tolist())

    @override
    def order(self, views: Views) -> Iterator[int]:
        return self._checked(views.waiting.tolist(), lambda: iter(self.inner.order(guarded_views(views))))

    @override
    def overdue(self) -> list[int]:
        assert self.views is not None
        known = {*self.views.prefilling.tolist(), *self.views.waiting.tolist()}
        rows = self.ask(lambda: [index(row) for row in self.inner.overdue()], NO_ROWS)
        return rows if self._belong(rows, known, "overdue") else []

    @override
    def budget(self) -> StepBudget:
        budget = self.ask(lambda: GuardedBudget(self, self.inner.budget()), None)
        return self.usual_budget() if budget is None else budget

    def usual_budget(self) -> StepBudget:
        """The step's allowance without `inner`."""
        assert self.views is not None
        return self.budget_rule.begin(self.views)

    @override
    def passable(self, row: int, now: int) -> bool:
        return self.ask(lambda: bool(self.inner.passable(row, now)), False)

    @override
    def spared_tokens(self, row: int) -> int:
        return max(self.ask(lambda: index(self.inner.spared_tokens(row)), 0), 0)

    @override
    def retains(self, session: SessionState, now: int) -> bool:
        return self.ask(lambda: bool(self.inner.retains(session.copied(), now)), False)

    @override
    def victims(self, views: Views) -> Iterator[int]:
        """Rows that `inner` leaves out go last."""
        rows = self.ask(lambda: [index(row) for row in self.inner.victims(guarded_views(views))], NO_ROWS)
        if not self._belong(rows, set(views.running.tolist()), "victims"):
            rows = []
        chosen = set(rows)
        return iter([*rows, *(row for row in self.victim_rule.victims(views) if row not in chosen)])

    @override
    def outranked(self, views: Views, preemptor: int) -> Iterator[int]:
        """The rows are drawn all at once, so that a mistake is found before any row is preempted.

        The user's order and right to preempt may disagree. So a row that was preempted before is preempted again only
        after a new token. Each preemption then needs a token, so rows cannot preempt each other without end.
        """
        rows = self.ask(lambda: [index(row) for row in self.inner.outranked(guarded_views(views), preemptor)], NO_ROWS)
        admitted = {*views.running.tolist(), *views.prefilling.tolist()}
        if not self._belong(rows, admitted, "outranked"):
            return iter(())
        columns = views.columns
        return (row for row in rows if not columns.retractions[row] or columns.known[row] > columns.target[row])

    @override
    def pace(self, columns: Columns, rows: Int32Array, now: int) -> TpotSlack | None:
        return self.ask(lambda: self._tpot_slack(columns, rows, now), None)

    def _tpot_slack(self, columns: Columns, rows: Int32Array, now: int) -> TpotSlack | None:
        pace = self.inner.pace(guarded_columns(columns), read_only(rows), now)
        if pace is None:
            return None
        slack_s, tpot_s = np.array(pace.slack_s, float), np.array(pace.tpot_s, float)
        if slack_s.shape != rows.shape or tpot_s.shape != rows.shape:
            raise ValueError("pace must have a number for each row")
        if not (np.isfinite(slack_s).all() and np.isfinite(tpot_s).all() and (tpot_s > 0.0).all()):
            raise ValueError("pace must have finite numbers, and targets above 0")
        return TpotSlack(slack_s, tpot_s)

    @override
    def drain_service(self) -> dict[int, float]:
        nothing: dict[int, float] = {}
        return self.ask(
            lambda: {int(tenant): float(value) for tenant, value in self.inner.drain_service().items()}, nothing
        )

    @override
    def measures(self, rows: Int32Array) -> dict[str, float]:
        nothing: dict[str, float] = {}
        return self.ask(
            lambda: {name: float(value) for name, value in self.inner.measures(read_only(rows)).items()}, nothing
        )

    @override
    def displaced(self, columns: Columns, waiting: Int32Array, newcomer: int) -> int | None:
        row = self.ask(lambda: self._displaced(columns, waiting, newcomer), None)
        return row if row is None or self._belong([row], set(waiting.tolist()), "displaced") else None

    def _displaced(self, columns: Columns, waiting: Int32Array, newcomer: int) -> int | None:
        row = self.inner.displaced(guarded_columns(columns), read_only(waiting), newcomer)
        return None if row is None else index(row)

    @property
    def must_prefill(self) -> bool:
        """Whether a step without prefill would be empty."""
        assert self.views is not None
        return not len(self.views.running)

    def _checked(self, rows: list[int], draw: Callable[[], Iterator[int]]) -> Iterator[int]:
        """The rows that `draw` yields out of `rows`. The rest of them follow after a failure, or if no prefill
        continues and `draw` yields nothing.
        """
        assert self.views is not None
        left, drawn = dict.fromkeys(rows), len(self.views.prefilling) > 0
        nothing: Iterator[int] = iter(())
        source = self.ask(draw, nothing)
        try:
            while (row := self.ask(lambda: _next_row(source), None)) is not None:
                if row not in left:
                    self.fail(f"candidate {row!r} is not a waiting row, or was named twice")
                    break
                del left[row]
                drawn = True
                yield row
        finally:
            # Closing a generator runs the rest of its code; here that is guarded.
            if isinstance(source, Generator):
                self.ask(source.close, None)
        if self.failure or (self.must_prefill and not drawn):
            yield from left

    def _belong(self, rows: list[int], known: set[int], answer: str) -> bool:
        """Whether `rows` are all different and `known`; otherwise `inner` has failed."""
        fine = len(set(rows)) == len(rows) and known.issuperset(rows)
        if not fine:
            self.fail(f"{answer} named a row twice, or a row that is not among those given")
        return fine

    def ask(self, question: Callable[[], T], fallback: T) -> T:
        """What `question` returns; `fallback` if it raises any exception, or if `inner` has failed before."""
        if self.failure:
            return fallback
        try:
            self._asked()
            try:
                return question()
            finally:
                self._answered()
        except BaseException as error:
            self.fail(f"it raised {error!r}{_place(error)}")
            return fallback

    def fail(self, why: str) -> None:
        """Note the reason; `inner` is not asked again."""
        self.failure = why


def _report(name: str) -> Callable[..., None]:
    def report(self: GuardedPolicy, *arguments: Any) -> None:
        shown = [read_only(one) if isinstance(one, np.ndarray) else one for one in arguments]
        self.ask(lambda: getattr(self.inner, name)(*shown), None)

    return report


# What a policy is told; it answers nothing that could be invalid.
for _name in ("admitted", "charge", "charge_decode", "served_elsewhere", "finished", "removed"):
    setattr(GuardedPolicy, _name, _report(_name))


def _untimed() -> None:
    """Do nothing: the time of answers is not measured."""


def _place(error: BaseException) -> str:
    """Where an exception was raised, as ` in FILE, line N (function)`; "" if it did not come out of further code."""
    inside = error.__traceback__ and error.__traceback__.tb_next  # the first frame is that of the guard
    places = [
        (frame.f_code.co_filename, line, frame.f_code.co_name)
        for frame, line in walk_tb(inside)
        if not frame.f_globals.get("__name__", "").startswith("tokenyard.")
    ]
    if not places:
        return ""
    file, line, function = places[-1]
    return f" in {file}, line {line} ({function})"


def _next_row(source: Iterator[Any]) -> int | None:
    row = next(source, None)
    try:
        return None if row is None else index(row)
    except TypeError:
        raise TypeError(f"candidate {row!r} is not a row number") from None


class GuardedBudget(StepBudget):
    """The budget of a user-defined policy; an invalid chunk is a failure and ends the step's prefill.

    So that the engine never hangs, the usual budget gives the first chunk if no request decodes and `inner` allows 0
    tokens. Raises what reading `inner` raises.
    """

    def __init__(self, guard: "GuardedPolicy", inner: StepBudget) -> None:
        self.prefill, self.with_decode = bool(inner.prefill), bool(inner.with_decode)
        # At least one unfinished prefill must be allowed, or a prompt larger than a chunk could never start.
        self.max_requests, self.max_prefilling = index(inner.max_requests), max(index(inner.max_prefilling), 1)
        self._guard = guard
        self._inner = inner
        self._must_go_on = guard.must_prefill
        if self._must_go_on and not (self.prefill and self.max_requests > 0):
            self.prefill, self.max_requests = True, 1

    @override
    def chunk(self, prefix: int, remaining: int) -> int:
        tokens = self._guard.ask(lambda: index(self._inner.chunk(prefix, remaining)), 0)
        if not 0 <= tokens <= remaining:
            self._guard.fail(f"budget gave a chunk of {tokens} out of {remaining} tokens")
            tokens = 0
        if tokens or not self._must_go_on:
            return tokens
        return self._guard.usual_budget().chunk(prefix, remaining)

    @override
    def spend(self, prefix: int, tokens: int) -> None:
        self._must_go_on = False
        self._guard.ask(lambda: self._inner.spend(prefix, tokens), None)


ASK_CODE = GuardedPolicy.ask.__code__
"""The function that calls the user's code and catches its exceptions."""
