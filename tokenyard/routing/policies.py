"""Routing policies: rank the targets of a request. Pure; the router, engines with several ranks and the simulator
share it.

A target is what a policy chooses: a worker, or one data-parallel rank of a worker that has several. (A worker is the
router's view of an engine. Inside an engine, the targets are its own ranks.)

A policy sees the features of the request and the state of each target (`routing.load`). It does not see the prefix
index: the caller looks up how much of the prompt each target should hold and passes it as a feature.
"""

import math
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

import numpy as np
from typing_extensions import override

from tokenyard.routing.load import TargetLoad

CACHE_THRESHOLD = 0.3
BALANCE_ABS_THRESHOLD = 64
BALANCE_REL_THRESHOLD = 1.5
BOUNDED_LOAD = 1.25
MAX_SESSIONS = 1 << 17
KEY_BLOCKS = 4
KEY_BYTES = 1024

COLD, CACHED, SPILLED_FOR_LOAD, SPILLED_BY_BOUND, BALANCED, STICKY = (
    "cold",
    "cached",
    "spilled_for_load",
    "spilled_by_bound",
    "balanced",
    "sticky",
)
REASONS = (COLD, CACHED, SPILLED_FOR_LOAD, SPILLED_BY_BOUND, BALANCED, STICKY)
"""Why the first target of a ranking is first.

cold: no target holds any of the prompt, or not enough of it.
cached: no target holds more of the prompt; with a hash policy, the target that the key prefers.
spilled_for_load: another target holds more of the prompt but would answer later.
spilled_by_bound: another target is preferred but is over the bound on its load.
balanced: the policy looks at load alone, or at nothing.
sticky: the target of the session.
"""

_MASK = (1 << 64) - 1
SMALL_FLEET = 16
"""Fewer numbers than this are mixed one by one; for more, arrays are faster."""


@dataclass(slots=True)
class RequestFeatures:
    """The request as a policy sees it.

    tokens: prompt length in tokens, estimated if only the text is known.
    matched: per target, in the order of the targets, prompt tokens that its cache should hold; empty if unknown.
    key: 64-bit hash of the beginning of the prompt.
    session: requests with the same session go to the same target; "" for none.
    now_ns: the time.
    tenant, priority: the request's.
    """

    tokens: int
    matched: Sequence[int] = ()
    key: int = 0
    session: str = ""
    now_ns: int = 0
    tenant: str = ""
    priority: int = 0


@dataclass(slots=True)
class Ranking:
    """What a policy returns.

    order: indices into the targets, the best first.
    scores: per target, in the order of the targets, in the policy's unit; lower is better.
    reason: one of `REASONS`, for the first target.
    """

    order: list[int]
    scores: list[float]
    reason: str


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """Options of policies.

    seed: of policies that draw at random.
    cache_threshold: `cache_aware`: share of the prompt that a match must exceed.
    balance_abs_threshold: `cache_aware`: difference in requests above which load decides.
    balance_rel_threshold: `cache_aware`: ratio of requests above which load decides.
    """

    seed: int = 0
    cache_threshold: float = CACHE_THRESHOLD
    balance_abs_threshold: int = BALANCE_ABS_THRESHOLD
    balance_rel_threshold: float = BALANCE_REL_THRESHOLD


class RoutePolicy(ABC):
    """Base of all policies. `needs_prefix` says whether `rank` reads `RequestFeatures.matched`."""

    name = ""
    needs_prefix = False

    def __init__(self, options: PolicyOptions) -> None:
        self.options = options

    @abstractmethod
    def rank(self, request: RequestFeatures, targets: Sequence[TargetLoad]) -> Ranking:
        """The order in which to try `targets`, which must not be empty."""

    def sent(self, request: RequestFeatures, target: TargetLoad) -> None:  # noqa: B027 - most policies learn nothing from it
        """The request was sent to `target`, which need not be the first of its ranking."""


def splitmix64(x: int) -> int:
    """A 64-bit hash of a 64-bit number: the finalizer of SplitMix64 (Steele et al. 2014)."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _mixed(key: int, salts: list[int]) -> list[int]:
    """`splitmix64(key ^ salt)` for each 64-bit salt."""
    if len(salts) < SMALL_FLEET:
        return [splitmix64(key ^ salt) for salt in salts]
    x = np.array(salts, np.uint64) ^ np.uint64(key)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: list[int] = (x ^ (x >> np.uint64(31))).tolist()
    return mixed


class _SplitMix64:
    """A seeded generator of 64-bit numbers (SplitMix64): cheap, and the same on every platform."""

    def __init__(self, seed: int) -> None:
        self._state = splitmix64(seed & _MASK)

    def below(self, count: int) -> int:
        """A number from 0 to `count` - 1."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        return splitmix64(self._state) % count


def _by(scores: list[float]) -> list[int]:
    return sorted(range(len(scores)), key=scores.__getitem__)


def _requests(targets: Sequence[TargetLoad]) -> list[float]:
    return [float(target.requests) for target in targets]


class Random(RoutePolicy):
    """A random target, each with equal probability."""

    name = "random"

    def __init__(self, options: PolicyOptions) -> None:
        super().__init__(options)
        self._draws = _SplitMix64(options.seed)

    @override
    def rank(self, request: RequestFeatures, targets: Sequence[TargetLoad]) -> Ranking:
        """The other targets follow the drawn one in cyclic order."""
        first, count = self._draws.below(len(targets)), len(targets)
        return Ranking([(first + i) % count for i in range(count)], [0.0] * count, BALANCED)


class RoundRobin(RoutePolicy):
    """Each target in turn."""

    name = "round_robin"

    def __init__(self, options: PolicyOptions) -> None:
        super().__init__(options)
        self._next = 0

    @override
    def rank(self, request: RequestFeatures, targets: Sequence[TargetLoad]) -> Ranking:
        count = len(targets)
        first = self._next % count
        self._next = first + 1
        return Ranking([(first + i) % count for i in range(count)], [0.0] * count, BALANCED)


class PowerOfTwo(RoutePolicy):
    """Of two targets drawn at random, the one with fewer requests (Mitzenmacher 2001)."""

    name = "power_of_two"

    def __init__(self, options: PolicyOptions) -> None:
        super().__init__(options)
        self._draws = _SplitMix64(options.seed)

    @override
    def rank(self, request: RequestFeatures, targets: Sequence[TargetLoad]) -> Ranking:
        count, loads = len(targets), _requests(targets)
        order = _by(loads)
        if count > 1:
            one, other = self._draws.below(count), self._draws.below(count - 1)
            other += other >= one
            first = one if loads[one] <= loads[other] else other
            order.remove(first)
            order.insert(0, first)
        return Ranking(order, loads, BALANCED)


class LeastLoad(RoutePolicy):
    """The target with the least queued prefill work in seconds, whatever its cache holds."""

    name = "least_load"

    @override
    def rank(self, request: RequestFeatures, targets: Sequence[TargetLoad]) -> Ranking:
        """Scores are seconds of queued prefill work; the fewest requests break ties."""
        scores = [t.prefill_tokens * t.speed.token_s * t.slowness for t in targets]
        order = sorted(range(len(scores)), key=lambda i: (scores[i], targets[i].requests, targets[i].served))
        return Ranking(order, scores, BALANCED)


class ShortestQueue(RoutePolicy):
    """The target with the fewest open requests."""

    name = "shortest_queue"

    @override
    def rank(self, request: RequestFeatures, targets: Sequence[TargetLoad]) -> Ranking:
        """The fewest requests served so far break ties."""
        order = sorted(range(len(targets)), key=lambda i: (targets[i].requests, targets[i].served))
        return Ranking(order, _requests(targets), BALANCED)


class TotalTokens(RoutePolicy):
    """The target whose open requests have the fewest prompt tokens."""

    name = "total_tokens"

    @override
    def rank(self, request: RequestFeatures, targets: Sequence[TargetLoad]) -> Ranking:
        """The fewest requests break ties."""
        scores = [target.context_tokens for target in targets]
        order = sorted(range(len(scores)), key=lambda i: (scores[i], targets[i].requests, targets[i].served))
        return Ranking(order, scores, BALANCED)


class KvUsage(RoutePolicy):
    """The target whose KV pool is filled least by the prompts in flight. The default for workers that only decode."""

    name = "kv_usage"

    @override
    def rank(self, request: RequestFeatures, targets: Sequence[TargetLoad]) -> Ranking:
        """Scores are shares of the pools, or tokens where the size of one is unknown."""
        known = all(t.kv_tokens for t in targets)
        scores = [(t.context_tokens + request.tokens) / (t.kv_tokens if known else 1) for t in targets]
        order = sorted(range(len(scores)), key=lambda i: (scores[i], targets[i].requests, targets[i].served))
        return Ranking(order, scores, BALANCED)


class CacheAware(RoutePolicy):
    """The rule of sgl-router, with its thresholds.

    Let `most` and `least` be the highest and the lowest number of requests of a target. If `most - least` exceeds
    `balance_abs_threshold` and `most` exceeds `balance_rel_threshold * least`, the least loaded target is chosen.
    Otherwise the best match is chosen if it covers more than `cache_threshold` of the prompt, else the least loaded
    target (as upstream since its pull request 14650; before, the target with the smallest tree).
    """

    name = "cache_aware"
    needs_prefix = True

    @override
    def rank(self, request: RequestFeatures, targets: Sequence[TargetLoad]) -> Ranking:
        loads = _requests(targets)
        order = sorted(range(len(loads)), key=lambda i: (loads[i], targets[i].served))
        least, most = min(loads), max(loads)
        options = self.options
        if most - least > options.balance_abs_threshold and most > options.balance_rel_threshold * least:
            return Ranking(order, loads, SPILLED_BY_BOUND)
        matched = request.matched
        best = max(order, key=lambda i: matched[i], default=0) if matched else order[0]
        if not matched or matched[best] <= options.cache_threshold * request.tokens:
            return Ranking(order, loads, COLD)
        order.remove(best)
        return Ranking([best, *order], loads, CACHED)


def prefix_key(prompt: bytes) -> int:
    """`RequestFeatures.key` of a prompt, from the first 1024 bytes of its text or of its int32 token ids (256 tokens).

    It is the same in every process.
    """
    return splitmix64(crc32(prompt[:KEY_BYTES]))


def prompt_key(digests: Sequence[bytes | int]) -> int:
    """`RequestFeatures.key` of a prompt, from the digest of its first four blocks (256 tokens)."""
    first = digests[min(KEY_BLOCKS, len(digests)) - 1] if digests else b""
    return splitmix64(int.from_bytes(first[:8], "little")) if isinstance(first, bytes) else 0


def rendezvous(key: int, targets: Sequence[TargetLoad]) -> list[int]:
    """Target indices in the order in which `key` prefers them (highest random weight, Thaler and Ravishankar 1998).

    Adding or removing a target moves only the keys that prefer it.
    """
    weights = [splitmix64(key ^ target.salt) for target in targets]
    return sorted(range(len(weights)), key=weights.__getitem__, reverse=True)


def _within_bound(preferred: list[int], targets: Sequence[TargetLoad]) -> Ranking:
    """`preferred`, with targets over 1.25 times the mean load moved to the end (Mirrokni et al. 2018)."""
    loads = _requests(targets)
    bound = -(-BOUNDED_LOAD * (sum(loads) + 1.0) // len(loads))
    within = [i for i in preferred if loads[i] < bound]
    beyond = sorted((i for i in preferred if loads[i] >= bound), key=lambda i: loads[i])
    reason = CACHED if within and within[0] == preferred[0] else SPILLED_BY_BOUND
    return Ranking(within + beyond, loads, reason)


class PrefixHash(RoutePolicy):
    """The target that the beginning of the prompt hashes to, with bounded load."""

    name = "prefix_hash"

    @override
    def rank(self, request: RequestFeatures, targets: Sequence[TargetLoad]) -> Ranking:
        return _within_bound(rendezvous(request.key, targets), targets)


class ConsistentHash(RoutePolicy):
    """The target that the session hashes to, or without one the beginning of the prompt, with bounded load."""

    name = "consistent_hash"

    @override
    def rank(self, request: RequestFeatures, targets: Sequence[TargetLoad]) -> Ranking:
        key = text_key(request.session) if request.session else request.key
        return _within_bound(rendezvous(key, targets), targets)


def text_key(text: str) -> int:
    """A 64-bit hash of a text, the same in every process (FNV-1a over UTF-8, then `splitmix64`)."""
    value = 0xCBF29CE484222325
    for byte in text.encode("utf-8", "surrogatepass"):
        value = ((value ^ byte) * 0x100000001B3) & _MASK
    return splitmix64(value)


class PredictedTtft(RoutePolicy):
    """The target with the lowest predicted time to first token, within a bound on its share of the load.

    The prediction covers the uncached tokens of this prompt, those of requests that still wait for their first token,
    and a cost per request in flight. Targets whose predictions are nearly equal are ordered by their number of
    requests. A target that would exceed `over` times its share of the requests in flight, plus `over_requests`, comes
    last. If another target is far below its share (`starving`), the bound is the share itself. So a popular prefix
    spreads to more targets once those that hold it are busy. A slower target has a smaller share.
    """

    name = "predicted_ttft"
    needs_prefix = True
    decode_tokens = 48.0
    """Cost of each request in flight at the target, in prompt tokens."""

    near, near_s = 0.02, 0.001
    noticeably_slow, errors_apart = 1.2, 3.0
    over, over_requests = 2.0, 4.0
    starving, starving_requests = 0.25, 1.0

    @override
    def rank(self, request: RequestFeatures, targets: Sequence[TargetLoad]) -> Ranking:
        """Scores are seconds."""
        matched = request.matched or [0] * len(targets)
        slowness = self._slowness(targets)
        scores = self._scores(request.tokens, matched, targets, slowness)
        order, beyond = _by(scores), self._beyond(targets, slowness)
        if beyond:
            order.sort(key=beyond.__contains__)
        near, window = 0, scores[order[0]] * (1.0 + self.near) + self.near_s
        while near < len(order) and scores[order[near]] <= window and order[near] not in beyond:
            near += 1
        if near > 1:
            first = order[:near]
            mixed = _mixed(request.key, [targets[i].salt for i in first])
            loads = [(targets[i].requests * slowness[i], -m, i) for i, m in zip(first, mixed, strict=True)]
            order[:near] = [i for _, _, i in sorted(loads)]
        return Ranking(order, scores, self._reason(order[0], matched, beyond))

    def seconds(self, tokens: int, matched: Sequence[int], targets: Sequence[TargetLoad]) -> list[float]:
        """Predicted seconds to the first token of a prompt at each target, which holds `matched` tokens of it."""
        return self._scores(tokens, matched, targets, self._slowness(targets))

    def _scores(
        self, tokens: int, matched: Sequence[int], targets: Sequence[TargetLoad], slowness: list[float]
    ) -> list[float]:
        """Predicted seconds to the first token at each target."""
        decode, scores = self.decode_tokens, []
        for target, hit, slow in zip(targets, matched, slowness, strict=True):
            speed, uncached = target.speed, tokens - hit * target.credit
            work = target.prefill_tokens + (uncached if uncached > 1.0 else 1.0) + decode * target.requests
            scores.append(slow * (speed.base_s + speed.token_s * work))
        return scores

    def _slowness(self, targets: Sequence[TargetLoad]) -> list[float]:
        """How many times slower each target is than the median; 1 if the difference is small or not significant."""
        times = [target.slowness for target in targets]
        if max(times) <= self.noticeably_slow * min(times):
            return [1.0] * len(times)
        usual = sorted(times)[(len(times) - 1) // 2]
        least = math.log(self.noticeably_slow)
        return [
            time / usual if math.log(time / usual) > max(least, self.errors_apart * target.slowness_error) else 1.0
            for time, target in zip(times, targets, strict=True)
        ]

    def _beyond(self, targets: Sequence[TargetLoad], slowness: list[float]) -> set[int]:
        """Targets that would exceed the bound on their share of the requests in flight with this request."""
        requests, even = [target.requests for target in targets], max(slowness) == 1.0
        least, most, over, more = self.starving, self.starving_requests, self.over, self.over_requests
        fair = (sum(requests) + 1) / (len(requests) if even else sum([1.0 / slow for slow in slowness]))
        if even and max(requests) + 1 <= over * fair + more and min(requests) >= least * fair - most:
            return set()
        shares = [fair / slow for slow in slowness]
        if any(count < least * share - most for count, share in zip(requests, shares, strict=True)):
            over, more = 1.0, 0.0
        pairs = enumerate(zip(requests, shares, strict=True))
        return {i for i, (count, share) in pairs if count + 1 > over * share + more}

    def _reason(self, first: int, matched: Sequence[int], beyond: set[int]) -> str:
        most = max(matched)
        if not most:
            return COLD
        if matched[first] == most:
            return CACHED
        return SPILLED_BY_BOUND if matched.index(most) in beyond else SPILLED_FOR_LOAD


class LMetric(PredictedTtft):
    """The target with the lowest product of prompt tokens to compute and batch size.

    The tokens are those of this prompt that the target does not hold and those of the requests there that still wait
    for their first token; the batch is the target's open requests with this one. After LMetric (arXiv 2603.15202).
    """

    name = "lmetric"

    @override
    def rank(self, request: RequestFeatures, targets: Sequence[TargetLoad]) -> Ranking:
        """Scores are tokens times requests."""
        matched = request.matched or [0] * len(targets)
        scores = []
        for target, hit in zip(targets, matched, strict=True):
            uncached = max(request.tokens - hit * target.credit, 1.0)
            scores.append((target.prefill_tokens + uncached) * (target.requests + 1))
        order = sorted(range(len(scores)), key=lambda i: (scores[i], targets[i].served))
        return Ranking(order, scores, self._reason(order[0], matched, set()))


@dataclass(slots=True)
class SessionHome:
    """Where a session's KV is: the target of its latest request, whose prompt had so many tokens."""

    target: str
    tokens: int


class SessionAffinity(RoutePolicy):
    """Ranks the home of a session first, the target of its latest turn. Requests without a session follow the inner
    policy.

    A session moves when waiting at home costs more than computing its prompt again elsewhere, in seconds as
    `PredictedTtft` predicts them. A session without a home, or whose home is gone, goes to the home of the fewest
    sessions among the targets that answer about as soon as the best one, so that the sessions of an engine that has
    ended spread over the others. At most `MAX_SESSIONS` sessions are kept; the least recently used are dropped first.
    """

    worth_moving, worth_moving_s = 1.2, 0.01
    """A target answers sooner than another if that one takes longer by this factor and so many seconds."""

    def __init__(self, options: PolicyOptions, inner: RoutePolicy) -> None:
        super().__init__(options)
        self.name, self.needs_prefix = inner.name, inner.needs_prefix
        self._inner = inner
        self._predicted = PredictedTtft(options)
        self._sessions: OrderedDict[str, SessionHome] = OrderedDict()
        self._homes: Counter[str] = Counter()

    @override
    def rank(self, request: RequestFeatures, targets: Sequence[TargetLoad]) -> Ranking:
        ranking = self._inner.rank(request, targets)
        if not request.session:
            return ranking
        home = self._sessions.get(request.session)
        here = None if home is None else next((i for i, one in enumerate(targets) if one.name == home.target), None)
        matched = list(request.matched or [0] * len(targets))
        if home is not None and here is not None and not request.matched:
            matched[here] = min(home.tokens, request.tokens)
        seconds = self._predicted.seconds(request.tokens, matched, targets)
        soon = self.worth_moving * min(seconds) + self.worth_moving_s
        if here is not None and seconds[here] <= soon:
            return self._first(here, ranking, STICKY)
        if here is None and home is None:
            return ranking
        near = [i for i in ranking.order if seconds[i] <= soon]
        first = min(near, key=lambda i: self._homes[targets[i].name])
        return self._first(first, ranking, ranking.reason if here is None else SPILLED_FOR_LOAD)

    @staticmethod
    def _first(first: int, ranking: Ranking, reason: str) -> Ranking:
        return Ranking([first, *(i for i in ranking.order if i != first)], ranking.scores, reason)

    @override
    def sent(self, request: RequestFeatures, target: TargetLoad) -> None:
        self._inner.sent(request, target)
        if not request.session:
            return
        home = self._sessions.pop(request.session, None)
        stays = home is not None and home.target == target.name
        tokens = max(home.tokens, request.tokens) if home is not None and stays else request.tokens
        self._sessions[request.session] = SessionHome(target.name, tokens)
        self._homes[target.name] += 1
        if home is not None:
            self._leave(home)
        if len(self._sessions) > MAX_SESSIONS:
            self._leave(self._sessions.popitem(last=False)[1])

    def _leave(self, home: SessionHome) -> None:
        """Count one session less at a target."""
        self._homes[home.target] -= 1
        if not self._homes[home.target]:
            del self._homes[home.target]
