"""What a router knows of its targets' load: pure bookkeeping, shared by the proxy and the simulator.

A target is a worker, or one data-parallel rank of a worker. Load is counted when a request is sent, not when its answer
begins, and given back exactly once.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

PRIOR_BASE_S = 0.01
PRIOR_TOKEN_S = 1.0 / 8000.0
PRIOR_WEIGHT = 4.0
PRIOR_TOKENS = 2000.0
DECAY = 0.98
MAX_CHANGE = 100.0
MAX_SLOWNESS = 4.0
SLOWNESS_STEP = 0.03
SLOWNESS_PRIOR = 4.0
SLOWNESS_PRIOR_DEVIATION = 0.4
CREDIT_STEP = 0.1
MIN_CREDIT = 0.05
NOISE_S = 0.005


class TtftModel:
    """Seconds to the first token as a line in the prompt tokens to compute: `base_s + token_s * tokens`.

    Fitted by least squares over what answers show, older ones weighing less; it begins with a prior, so that it is a
    line from the first request on. Targets of one model share it.
    """

    def __init__(self) -> None:
        self.base_s, self.token_s = PRIOR_BASE_S, PRIOR_TOKEN_S
        self._count = self._x = self._xx = self._y = self._xy = 0.0
        for tokens in (0.0, PRIOR_TOKENS):
            self._take(tokens, PRIOR_BASE_S + PRIOR_TOKEN_S * tokens, PRIOR_WEIGHT / 2)

    def predict_s(self, tokens: float) -> float:
        """Seconds to the first token when `tokens` prompt tokens are to be computed, other requests' included."""
        return self.base_s + self.token_s * tokens

    def observe(self, tokens: float, seconds: float) -> None:
        """A request saw its first token after `seconds`, when `tokens` had to be computed before it."""
        self._count, self._x, self._xx = self._count * DECAY, self._x * DECAY, self._xx * DECAY
        self._y, self._xy = self._y * DECAY, self._xy * DECAY
        self._take(tokens, seconds, 1.0)
        spread = self._count * self._xx - self._x * self._x
        if spread > 0.0:
            slope = (self._count * self._xy - self._x * self._y) / spread
            self.token_s = min(max(slope, PRIOR_TOKEN_S / MAX_CHANGE), PRIOR_TOKEN_S * MAX_CHANGE)
        self.base_s = max((self._y - self.token_s * self._x) / self._count, 0.0)

    def _take(self, tokens: float, seconds: float, weight: float) -> None:
        self._count += weight
        self._x += weight * tokens
        self._xx += weight * tokens * tokens
        self._y += weight * seconds
        self._xy += weight * tokens * seconds


@dataclass(slots=True)
class TargetLoad:
    """What a policy may look at.

    requests: sent and not ended. prefill_tokens: uncached prompt tokens of those without a first token. context_tokens:
    prompt tokens of all of them. served: requests sent so far. credit: the share of predicted cache hits that came
    true. slowness: how many times longer first tokens take than `speed` says, and slowness_error, the standard error of
    its logarithm. room: most requests at a time, 0 for any
    number. salt: 64 bits that stand for the name. kv_tokens: tokens whose KV it can hold, 0 if that is unknown.
    """

    name: str
    speed: TtftModel = field(default_factory=TtftModel)
    requests: int = 0
    prefill_tokens: float = 0.0
    context_tokens: float = 0.0
    served: int = 0
    credit: float = 1.0
    slowness: float = 1.0
    slowness_error: float = SLOWNESS_PRIOR_DEVIATION / SLOWNESS_PRIOR**0.5
    room: int = 0
    salt: int = 0
    kv_tokens: int = 0
    _ratios: float = SLOWNESS_PRIOR
    _log_mean: float = 0.0
    _log_variance: float = SLOWNESS_PRIOR_DEVIATION**2

    def __post_init__(self) -> None:
        self.salt = int.from_bytes(blake2b(self.name.encode(), digest_size=8).digest(), "little")

    @property
    def full(self) -> bool:
        """Whether it has as many requests as it may have."""
        return 0 < self.room <= self.requests

    def forget(self) -> None:
        """The worker has started anew: what was learnt of it holds no longer. Open requests stay counted."""
        self.credit = self.slowness = 1.0
        self._ratios, self._log_mean, self._log_variance = SLOWNESS_PRIOR, 0.0, SLOWNESS_PRIOR_DEVIATION**2
        self.slowness_error = SLOWNESS_PRIOR_DEVIATION / SLOWNESS_PRIOR**0.5

    def took(self, seconds: float, expected_s: float) -> None:
        """A first token came after `seconds` instead of `expected_s`. The mean over the first ones becomes one in which
        older ones count less and less.
        """
        ratio = (seconds + NOISE_S) / (expected_s + NOISE_S)
        beyond = math.log(min(max(ratio, 1.0 / MAX_SLOWNESS), MAX_SLOWNESS)) - self._log_mean
        self._ratios += 1.0
        step = max(1.0 / self._ratios, SLOWNESS_STEP)
        self._log_mean += step * beyond
        self._log_variance = (1.0 - step) * (self._log_variance + step * beyond * beyond)
        self.slowness = math.exp(self._log_mean)
        self.slowness_error = math.sqrt(self._log_variance * max(1.0 / self._ratios, SLOWNESS_STEP / 2.0))


class DispatchedRequest:
    """One request at one target, from its dispatch on."""

    __slots__ = ("_began_s", "_ended", "_prefilling", "_state", "_work", "predicted", "tokens", "uncached")

    def __init__(self, state: TargetLoad, tokens: int, predicted: int, now_s: float, *, prefills: bool = True) -> None:
        """Count a request with a prompt of `tokens`, of which `predicted` should be in the target's cache; the target
        computes none of it unless it `prefills`, as another one does.
        """
        self.tokens, self.predicted = tokens, predicted
        self.uncached = max(tokens - predicted * state.credit, 1.0) if prefills else 0.0
        self._state, self._began_s = state, now_s
        self._work = state.prefill_tokens + self.uncached
        self._prefilling, self._ended = prefills, False
        state.requests += 1
        state.served += 1
        state.prefill_tokens += self.uncached
        state.context_tokens += tokens

    def first_token(self, now_s: float) -> None:
        """The answer begins: its prompt is no work any more, and the target's speed is seen."""
        if not self._prefilling:
            return
        self._stop_prefilling()
        state, seconds = self._state, max(now_s - self._began_s, 0.0)
        state.took(seconds, state.speed.predict_s(self._work))
        state.speed.observe(self._work, seconds)

    def expected_s(self) -> float:
        """Seconds from the dispatch to the first token, as the model's speed has it."""
        return self._state.slowness * self._state.speed.predict_s(self._work)

    def prefilled(self) -> None:
        """The first token should be there by now; for answers that come whole, in which it is not seen."""
        if self._prefilling:
            self._stop_prefilling()

    def hit(self, cached: int) -> None:
        """The answer says that `cached` tokens of its prompt were in the cache."""
        if self.predicted > 0:
            accuracy = min(cached / self.predicted, 1.0)
            credit = self._state.credit + CREDIT_STEP * (accuracy - self._state.credit)
            self._state.credit = max(credit, MIN_CREDIT)

    def end(self) -> None:
        """The request has ended, however; further calls change nothing."""
        if self._ended:
            return
        self._ended = True
        if self._prefilling:
            self._stop_prefilling()
        self._state.requests -= 1
        self._state.context_tokens -= self.tokens

    def _stop_prefilling(self) -> None:
        self._prefilling = False
        self._state.prefill_tokens -= self.uncached
        if self._state.requests == 0:
            self._state.prefill_tokens = 0.0


def target_has_capacity(state: TargetLoad, levels: Mapping[int, int], margin: int | None, priority: int) -> bool:
    """Whether a request of `priority` finds a place: a free one, or one that the engine takes from a lesser one.

    levels: the target's open requests by priority. margin: see `preempts_by`.
    """
    if not 0 < state.room <= state.requests:
        return True
    if margin is None:
        return False
    return sum([count for level, count in levels.items() if priority - level < margin]) < state.room


def preempts_by(info: Mapping[str, Any]) -> int | None:
    """By how much the priority of a request must be higher for an engine to give it the place of one that runs; None if
    it never does. Engines of SGLang and ours tell it by the names of their settings.
    """
    if info.get("enable_priority_scheduling") is not True or info.get("disable_priority_preemption") is True:
        return None
    margin = info.get("priority_scheduling_preemption_threshold")
    high_first = info.get("schedule_low_priority_values_first") is not True
    return max(margin, 1) if type(margin) is int and high_first else None
