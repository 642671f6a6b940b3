"""Load and speed of targets, as the router counts and learns them. Pure; shared with the engine and the simulator.

A request is counted when it is sent, not when its response begins, and is discounted exactly once.
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
    """Time to first token, linear in the prompt tokens to compute: `base_s + token_s * tokens`, in seconds.

    Fitted by least squares with exponential forgetting (`DECAY` per observation), starting from a prior. Targets of one
    model share it.
    """

    def __init__(self) -> None:
        self.base_s, self.token_s = PRIOR_BASE_S, PRIOR_TOKEN_S
        self._count = self._x = self._xx = self._y = self._xy = 0.0
        for tokens in (0.0, PRIOR_TOKENS):
            self._take(tokens, PRIOR_BASE_S + PRIOR_TOKEN_S * tokens, PRIOR_WEIGHT / 2)

    def predict_s(self, tokens: float) -> float:
        """Predicted seconds to first token with `tokens` prompt tokens to compute, including other requests'."""
        return self.base_s + self.token_s * tokens

    def observe(self, tokens: float, seconds: float) -> None:
        """Fit to one observation: the first token came after `seconds`, with `tokens` prompt tokens to compute."""
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
    """The state of a target that policies read.

    name: unique among the targets.
    speed: model of its time to first token.
    requests: requests sent and not ended.
    prefill_tokens: uncached prompt tokens of the requests without a first token.
    context_tokens: prompt tokens of all open requests.
    served: requests sent so far.
    credit: share of predicted cached tokens that responses confirm, from `MIN_CREDIT` to 1.
    slowness: observed time to first token over that of `speed` (geometric mean).
    slowness_error: standard error of the logarithm of `slowness`.
    room: maximum number of open requests; 0 for no limit.
    salt: 64-bit hash of the name.
    kv_tokens: capacity of its KV pool in tokens; 0 if unknown.
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
        """Whether it has reached its maximum number of requests."""
        return 0 < self.room <= self.requests

    def forget(self) -> None:
        """The worker has restarted: reset what was learnt about it. Open requests stay counted."""
        self.credit = self.slowness = 1.0
        self._ratios, self._log_mean, self._log_variance = SLOWNESS_PRIOR, 0.0, SLOWNESS_PRIOR_DEVIATION**2
        self.slowness_error = SLOWNESS_PRIOR_DEVIATION / SLOWNESS_PRIOR**0.5

    def took(self, seconds: float, expected_s: float) -> None:
        """Update `slowness`: a first token came after `seconds` instead of `expected_s`.

        The mean is arithmetic over the first observations, and exponential with step `SLOWNESS_STEP` after that.
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
    """One request at one target, from dispatch to `end`."""

    __slots__ = ("_began_s", "_ended", "_prefilling", "_state", "_work", "predicted", "tokens", "uncached")

    def __init__(self, state: TargetLoad, tokens: int, predicted: int, now_s: float, *, prefills: bool = True) -> None:
        """Count a request with a prompt of `tokens`, of which `predicted` should be cached at the target.

        `prefills`: False if another target computes the prompt.
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
        """The response begins at `now_s`: discount its prefill work and learn the target's speed."""
        if not self._prefilling:
            return
        self._stop_prefilling()
        state, seconds = self._state, max(now_s - self._began_s, 0.0)
        state.took(seconds, state.speed.predict_s(self._work))
        state.speed.observe(self._work, seconds)

    def expected_s(self) -> float:
        """Predicted seconds from dispatch to the first token."""
        return self._state.slowness * self._state.speed.predict_s(self._work)

    def prefilled(self) -> None:
        """Assume the first token now; for responses without streaming, in which it cannot be observed."""
        if self._prefilling:
            self._stop_prefilling()

    def hit(self, cached: int) -> None:
        """The response reports that `cached` tokens of its prompt were cached."""
        if self.predicted > 0:
            accuracy = min(cached / self.predicted, 1.0)
            credit = self._state.credit + CREDIT_STEP * (accuracy - self._state.credit)
            self._state.credit = max(credit, MIN_CREDIT)

    def end(self) -> None:
        """The request has ended, with or without an error. Further calls have no effect."""
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
    """The priority margin above which an engine preempts a running request; None if it never preempts.

    `info` is the engine's /server_info. SGLang and Tokenyard report the margin under the names of their settings.
    """
    if info.get("enable_priority_scheduling") is not True or info.get("disable_priority_preemption") is True:
        return None
    margin = info.get("priority_scheduling_preemption_threshold")
    high_first = info.get("schedule_low_priority_values_first") is not True
    return max(margin, 1) if type(margin) is int and high_first else None
