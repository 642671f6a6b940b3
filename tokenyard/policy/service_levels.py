"""Service levels: one queue per service class, a strict one on top, and shares of the prefill tokens for the others.

Below the strict level the levels take turns by deficit round robin (Shreedhar and Varghese 1996), counted in the tokens
that a request has to compute, not in requests, because prompts differ in length by a factor of a thousand.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from typing_extensions import override

from tokenyard.base import SchedulerSettings
from tokenyard.policy.base import Policy
from tokenyard.policy.views import Views
from tokenyard.policy.wrappers import NonPreemptive

STRICT, HIGH, NORMAL, LOW = range(4)
SHARED_LEVELS = (HIGH, NORMAL, LOW)

LEVEL_OF_CLASS = {
    "strict": STRICT,
    "priority": STRICT,
    "high": HIGH,
    "scale": HIGH,
    "normal": NORMAL,
    "default": NORMAL,
    "auto": NORMAL,
    "low": LOW,
    "flex": LOW,
    "batch": LOW,
}
"""Names of service classes, those of OpenAI's `service_tier` included."""


def service_level_of(service_class: str | None) -> int:
    """The level of a service class; NORMAL for none and for names that say nothing about urgency."""
    return LEVEL_OF_CLASS.get(service_class or "normal", NORMAL)


SHARES_BOUND = (
    "a share: in a round each level takes its weight in quanta, the strict one at most its part of all tokens"
)


@dataclass(slots=True)
class Turn:
    """The next row, and how many rounds of deficit round robin must pass before it may start."""

    row: int
    level: int
    rounds: int


@dataclass(slots=True)
class DeficitRoundRobin:
    """What each level may still take, in prefill tokens.

    deficit: per shared level, what it may take before the turn passes to the others; debts are negative.
    strict_credit: what the strict level may take ahead of the others; it grows with what they take.
    """

    weights: tuple[int, ...]
    quantum: int
    strict_share: float
    deficit: list[int] = field(default_factory=lambda: [0] * len(SHARED_LEVELS))
    turn: int = 0
    strict_credit: float = 0.0

    def __post_init__(self) -> None:
        self.strict_credit = float(self.quantum)

    def rounds(self, level: int, tokens: int) -> int:
        """Rounds until `level` may take `tokens`."""
        place = level - HIGH
        missing = tokens - self.deficit[place]
        return max(0, -(-missing // (self.quantum * self.weights[place])))

    def distance(self, level: int) -> int:
        """Levels whose turn comes earlier in a round."""
        return (level - HIGH - self.turn) % len(SHARED_LEVELS)

    def take(self, level: int, rounds: int, waiting: list[int]) -> None:
        """`level` has its turn after `rounds`, in which every level in `waiting` earns; the others keep no credit."""
        for place, weight in enumerate(self.weights):
            if place + HIGH in waiting:
                self.deficit[place] += rounds * self.quantum * weight
            else:
                self.deficit[place] = min(self.deficit[place], 0)
        self.turn = level - HIGH

    def spend(self, level: int, tokens: int, others_wait: bool) -> None:
        """`level` took `tokens`; the strict one pays only if it went before others."""
        if level != STRICT:
            self.deficit[level - HIGH] -= tokens
            self.strict_credit = min(self.strict_credit + tokens * self.strict_share, float(self.quantum))
        elif others_wait:
            self.strict_credit -= tokens * (1.0 - self.strict_share)


class ServiceLevels(NonPreemptive):
    """The strict level goes first while it has credit, then high, normal and low by their shares; `inner` orders each.

    A level's head waits for at most ceil(tokens / (quantum * weight)) rounds; in each, another level takes at most
    its quantum * weight and one request more. The strict level takes at most its share of the tokens and one request.
    """

    def __init__(self, settings: SchedulerSettings, inner: Policy) -> None:
        super().__init__(settings, inner, "levels")
        self.overtaking = SHARES_BOUND
        self._shares = DeficitRoundRobin(
            settings.service_level_weights, settings.service_level_quantum_tokens, settings.strict_level_share
        )
        self._turn: Turn | None = None
        self._waiting: list[int] = []
        self._others_wait = False

    @override
    def begin_step(self, views: Views) -> None:
        super().begin_step(views)
        self._turn, self._waiting = None, []
        self._others_wait = bool((views.columns.service_level[views.waiting] != STRICT).any())

    @override
    def candidates(self, views: Views) -> Iterator[int]:
        """Started prefills, then the levels' newcomers."""
        yield from self.inner.prefilling_order(views)
        yield from self.order(views)

    @override
    def passable(self, row: int, now: int) -> bool:
        """No row is passed over: the other levels would take more than their shares meanwhile."""
        return False

    @override
    def order(self, views: Views) -> Iterator[int]:
        levels = views.columns.service_level[views.waiting]
        queues: dict[int, Iterator[int]] = {}
        heads: dict[int, int] = {}
        for level in (STRICT, *SHARED_LEVELS):
            members = views.waiting[levels == level]
            if len(members):
                queues[level] = self.inner.order(replace(views, waiting=members))
                heads[level] = next(queues[level], -1)
        while any(row >= 0 for row in heads.values()):
            self._waiting = [level for level, row in heads.items() if row >= 0]
            turn = self._next(views, heads)
            self._turn = turn
            yield turn.row
            heads[turn.level] = next(queues[turn.level], -1)

    @override
    def charge(self, row: int, prefill_tokens: int) -> None:
        super().charge(row, prefill_tokens)
        assert self.views is not None
        level = int(self.views.columns.service_level[row])
        if self._turn is not None and self._turn.row == row and level != STRICT:
            self._shares.take(level, self._turn.rounds, self._waiting)
        self._turn = None
        self._shares.spend(level, prefill_tokens, self._others_wait)

    def _next(self, views: Views, heads: dict[int, int]) -> Turn:
        strict = heads.get(STRICT, -1)
        if strict >= 0 and (self._shares.strict_credit > 0.0 or self._waiting == [STRICT]):
            return Turn(strict, STRICT, 0)
        turns = []
        for level in self._waiting:
            if level != STRICT:
                row = heads[level]
                tokens = max(1, int(views.columns.target[row] - views.columns.matchable[row]))
                turns.append(Turn(row, level, self._shares.rounds(level, tokens)))
        return min(turns, key=lambda turn: (turn.rounds, self._shares.distance(turn.level)))
