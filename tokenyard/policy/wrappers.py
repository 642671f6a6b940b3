"""Policies made out of others: a wrapper changes some answers of its inner policy and passes on the rest."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

from typing_extensions import override

from tokenyard.base import SchedulerSettings
from tokenyard.policy.base import Policy
from tokenyard.policy.views import Columns, Views


class Wrapper(Policy):
    """Passes all calls on to `inner`. Subclasses override what they change and call `super` for the rest."""

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
        self.needs_sessions = inner.needs_sessions
        self.ranks_priorities = inner.ranks_priorities
        self.charges_decode = inner.charges_decode
        self.retry_ns = inner.retry_ns
        self.chosen = inner.chosen
        self.budget_rule = inner.budget_rule
        self.headroom = inner.headroom
        self.urgency = inner.urgency
        self.victim_rule = inner.victim_rule

    @override
    def describe(self) -> str:
        return f"{self._prefix}+{self.inner.describe()}"

    @override
    def begin_step(self, views: Views) -> None:
        self.views = views
        self.inner.begin_step(views)


def _pass_on(name: str) -> Callable[..., Any]:
    def passed_on(self: Wrapper, *arguments: Any) -> Any:
        return getattr(self.inner, name)(*arguments)

    return passed_on


for _name, _method in vars(Policy).items():
    if isinstance(_method, FunctionType) and _name not in vars(Wrapper):
        setattr(Wrapper, _name, _pass_on(_name))


class StartedTokens:
    """Prompt tokens of started requests, in order of arrival. The cost of a sum over later arrivals grows with the
    distance between its border and the border of the last sum.

    Sums count up to `limit`: entries before which later ones alone exceed it make no difference, and are dropped. So a
    request may wait for as long as it likes, and no more than `limit` tokens and one request are kept.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._seqs: list[int] = []
        self._tokens: list[int] = []
        self._sum = 0
        self._border_seq = -1
        self._border = 0
        self._after = 0

    def __len__(self) -> int:
        return len(self._seqs)

    def add(self, seq: int, tokens: int) -> None:
        """Record that the `seq`-th request to arrive has started with `tokens` prompt tokens."""
        place = bisect_right(self._seqs, seq)
        self._seqs.insert(place, seq)
        self._tokens.insert(place, tokens)
        self._sum += tokens
        if seq > self._border_seq:
            self._after += tokens
        else:
            self._border += 1
        needless = 0
        while self._sum - self._tokens[needless] > self._limit:
            self._sum -= self._tokens[needless]
            needless += 1
        self._drop(needless)

    def after(self, seq: int) -> int:
        """Tokens of all started requests that arrived after the `seq`-th; of more than `limit`, more than `limit`."""
        border = bisect_right(self._seqs, seq)
        self._after += sum(self._tokens[border : self._border]) - sum(self._tokens[self._border : border])
        self._border_seq, self._border = seq, border
        return self._after

    def forget(self, seq: int) -> None:
        """Drop requests before the `seq`-th; `after` is not called with an earlier one any more."""
        place = bisect_left(self._seqs, seq)
        self._sum -= sum(self._tokens[:place])
        self._drop(place)

    def _drop(self, count: int) -> None:
        """Drop the first `count` entries, which `_sum` does not count any more."""
        if not count:
            return
        self._after -= sum(self._tokens[self._border : count])
        del self._seqs[:count], self._tokens[:count]
        self._border = max(self._border - count, 0)


class NonPreemptive(Wrapper):
    """A wrapper that changes the order of candidates and therefore lets no row preempt another by urgency.

    The right to preempt rests on the key of `inner`. Where another order decides what starts next, the victim could
    come first again, and the two would preempt each other without end. Shares of tenants still preempt.
    """

    @override
    def outranked(self, views: Views, preemptor: int) -> Iterator[int]:
        return iter(())


class BoundedOvertaking(NonPreemptive):
    """Any order, but at most `max_overtaken_tokens` prompt tokens of later arrivals start before a waiting request.

    Tokens count when their request is admitted, whether they are computed or loaded, but not those in the cache. It
    is enough to watch the request that has waited longest among those that may start: a later arrival was overtaken by
    no more. For this to hold, what starts while a limit or a gate holds a request back counts as overtaking it too.
    Otherwise it could be overtaken by the full bound again each time.
    """

    def __init__(self, settings: SchedulerSettings, inner: Policy) -> None:
        super().__init__(settings, inner, "bounded")
        self.overtaking = f"{settings.max_overtaken_tokens} prompt tokens of later arrivals"
        self._limit = settings.max_overtaken_tokens
        self._starts = StartedTokens(self._limit)
        self._passed: set[int] = set()

    @override
    def begin_step(self, views: Views) -> None:
        super().begin_step(views)
        self._starts.forget(views.first_seq)
        self._passed.clear()

    @override
    def candidates(self, views: Views) -> Iterator[int]:
        """The row that has waited longest goes before every row that may not overtake it any more.

        If it does not fit and was passed over, no such row starts.
        """
        columns, waiting = views.columns, views.waiting
        prefilling, place = set(views.prefilling.tolist()), 0
        drawn: set[int] = set()
        for row in self.inner.candidates(views):
            if row in prefilling:
                yield row
                continue
            while row not in drawn:
                while int(waiting[place]) in drawn and int(waiting[place]) not in self._passed:
                    place += 1
                head = int(waiting[place])
                chosen = row if row == head or self._may_overtake(columns, row, head) else head
                if chosen in drawn:
                    return
                drawn.add(chosen)
                yield chosen

    @override
    def passable(self, row: int, now: int) -> bool:
        if not super().passable(row, now):
            return False
        self._passed.add(row)
        return True

    @override
    def admitted(self, row: int) -> None:
        super().admitted(row)
        assert self.views is not None
        columns = self.views.columns
        self._starts.add(int(columns.seq[row]), int(columns.target[row]) - int(columns.planned[row]))

    def _may_overtake(self, columns: Columns, row: int, head: int) -> bool:
        """Whether `row` may start although `head` arrived earlier and still waits."""
        tokens = int(columns.target[row]) - int(columns.matchable[row])
        return self._starts.after(int(columns.seq[head])) + tokens <= self._limit
