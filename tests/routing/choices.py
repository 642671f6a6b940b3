"""A tape of choices, by which tests compare what drives a policy: the router, the simulator, the ranks of an engine."""

from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import override

from tokenyard.routing.load import TargetLoad
from tokenyard.routing.policies import Ranking, RequestFeatures, RoutePolicy


@dataclass(frozen=True, slots=True)
class Choice:
    """One line of a tape of choices: what a policy saw of a request and of its targets, and what it put first.

    Columns have one entry per target, in their order. Two drivers (the router, the simulator, an engine's ranks) that
    are given the same requests at the same times write equal lines.
    """

    tokens: int
    key: int
    matched: tuple[int, ...]
    requests: tuple[int, ...]
    prefill_tokens: tuple[float, ...]
    first: int
    reason: str


class Taped(RoutePolicy):
    """A policy whose choices are written down; it decides nothing itself."""

    def __init__(self, inner: RoutePolicy, tape: list[Choice]) -> None:
        super().__init__(inner.options)
        self.name, self.needs_prefix = inner.name, inner.needs_prefix
        self._inner, self._tape = inner, tape

    @override
    def rank(self, request: RequestFeatures, targets: Sequence[TargetLoad]) -> Ranking:
        ranking = self._inner.rank(request, targets)
        requests = tuple(target.requests for target in targets)
        prefill = tuple(round(target.prefill_tokens, 3) for target in targets)
        first, matched = ranking.order[0], tuple(request.matched)
        self._tape.append(Choice(request.tokens, request.key, matched, requests, prefill, first, ranking.reason))
        return ranking

    @override
    def sent(self, request: RequestFeatures, target: TargetLoad) -> None:
        self._inner.sent(request, target)
