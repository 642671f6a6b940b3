"""Autoscalers: how many engines a fleet runs, decided again and again while the traffic comes.

An engine that is started serves after its cold start; one that is stopped gets no new requests, and ends when it has
none left. It costs money from its start to its end. The rules see what a metrics server would show them.
"""

import difflib
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from tokenyard.base import ConfigError

HPA_TOLERANCE = 0.1
"""Kubernetes' HPA leaves the replicas as they are within this share of the target."""

WVA_KV_FULL, WVA_QUEUE_FULL, WVA_KV_SPARE, WVA_QUEUE_SPARE = 0.80, 5, 0.10, 3
"""kvCacheThreshold, queueLengthThreshold, kvSpareTrigger, queueSpareTrigger of llm-d's workload variant autoscaler."""

IDLE_ATTAINMENT = 0.5
"""`attainment` stops an engine if the others, with its requests, would run fewer than this share of the most they ran
while the target was met."""

FORECAST_WINDOWS = 4
LEAST_EVERY_S = 0.001
NUMBERS = ("target", "start_s", "every_s", "stable_s", "idle_s", "price")
OFF, STARTING, READY, DRAINING, DEAD = "off", "starting", "ready", "draining", "dead"


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What one engine that serves reports: requests that wait and run there, and the share of its KV pool in use."""

    waiting: int
    running: int
    kv_used: float


@dataclass(frozen=True, slots=True)
class FleetLoad:
    """What an autoscaler sees.

    now_s: time since the start.
    engines: the engines that serve.
    starting: engines on their way.
    queued: requests that wait at the routers.
    arrivals: requests that arrived so far.
    attainment: share of the requests of the latest interval whose first token came, or still can come, within its
        target; None if there were none.
    """

    now_s: float
    engines: Sequence[EngineLoad]
    starting: int
    queued: int
    arrivals: int
    attainment: float | None

    @property
    def replicas(self) -> int:
        """Engines that serve or are on their way."""
        return len(self.engines) + self.starting

    @property
    def waiting(self) -> int:
        """Requests that wait, at routers and engines."""
        return self.queued + sum(engine.waiting for engine in self.engines)

    @property
    def open(self) -> int:
        """Requests that wait or run."""
        return self.waiting + sum(engine.running for engine in self.engines)


Rule = Callable[[FleetLoad], int]
"""The number of engines that there should be, before bounds and delays."""


@dataclass(frozen=True, slots=True)
class Autoscale:
    """An autoscaler's settings.

    rule: a name of `RULES`, or any function of a `FleetLoad` that returns a number of engines.
    target: what the rule aims at for each engine: open requests (`queue`), waiting requests (`keda`), requests per
        second (`forecast`); the share of first tokens in time (`attainment`). Not used by `llm-d`.
    min_replicas: fewest engines; 0 stops the last one when nothing is open. The most are the fleet's replicas.
    initial_replicas: engines that serve at the start.
    start_s: cold start of an engine: node, image, loading of the weights, kernels and graphs.
    every_s: seconds between decisions.
    stable_s: an engine is stopped only if the rule wanted fewer for so long.
    idle_s: seconds without an open request before the last engine is stopped.
    price: of one engine for an hour.
    """

    rule: str | Rule = "queue"
    target: float = 16.0
    min_replicas: int = 1
    initial_replicas: int = 1
    start_s: float = 120.0
    every_s: float = 15.0
    stable_s: float = 300.0
    idle_s: float = 300.0
    price: float = 0.0

    def __post_init__(self) -> None:
        """Raise ConfigError for an unknown rule and numbers out of range."""
        if isinstance(self.rule, str) and self.rule not in RULES:
            near = difflib.get_close_matches(self.rule, RULES, n=2)
            hint = f"did you mean {' or '.join(near)}?" if near else f"choose one of {', '.join(RULES)}"
            raise ConfigError(f"there is no autoscaling rule {self.rule!r}; {hint}")
        if not all(math.isfinite(getattr(self, name)) for name in NUMBERS):
            raise ConfigError(f"{', '.join(NUMBERS)} of an autoscaler must be finite numbers")
        if not (self.target > 0.0 and self.every_s >= LEAST_EVERY_S):
            raise ConfigError(f"target of an autoscaler must be above 0, and every_s at least {LEAST_EVERY_S:g}")
        if min(self.min_replicas, self.initial_replicas, self.start_s, self.stable_s, self.idle_s, self.price) < 0:
            raise ConfigError("an autoscaler takes no negative numbers")
        if self.rule == "attainment" and self.target >= 1.0:
            raise ConfigError(f"target of rule attainment is {self.target:g}; it is a share below 1, such as 0.99")

    def check(self, replicas: int) -> None:
        """Raise ConfigError if the fleet is smaller than the fewest engines."""
        if max(self.min_replicas, self.initial_replicas) > replicas:
            raise ConfigError(f"an autoscaler cannot start more engines than the fleet has (--replicas {replicas})")

    def make_rule(self) -> Rule:
        """The rule as a function, with a state of its own."""
        return RULES[self.rule](self) if isinstance(self.rule, str) else self.rule


def queue_rule(settings: Autoscale) -> Rule:
    """As many engines as keep `target` open requests on each."""
    return lambda load: math.ceil(load.open / settings.target)


def keda_rule(settings: Autoscale) -> Rule:
    """KEDA with a Prometheus trigger on waiting requests: the HPA's formula with its tolerance, at most twice or four
    more engines per interval, and the activation of the first engine.

    (Kubernetes' documentation of HorizontalPodAutoscaler; `averageValue` targets divide the sum by the replicas.)
    """

    def desired(load: FleetLoad) -> int:
        current = load.replicas
        if current == 0:
            return 1 if load.waiting else 0
        ratio = load.waiting / (settings.target * current)
        wanted = current if abs(ratio - 1.0) <= HPA_TOLERANCE else math.ceil(ratio * current)
        return min(max(wanted, 1 if load.open else 0), max(2 * current, current + 4))

    return desired


def llm_d_rule(_: Autoscale) -> Rule:
    """llm-d's workload variant autoscaler by saturation: one engine more if those that are not saturated have too
    little spare KV or queue on average; one fewer if the others would still have enough with its load.

    (llm-d-workload-variant-autoscaler, analyzer of saturation, version 1.) It waits for engines on their way.
    """

    def desired(load: FleetLoad) -> int:
        if not load.engines:
            return 1 if load.waiting or load.starting else 0
        spare = [
            (WVA_KV_FULL - engine.kv_used, WVA_QUEUE_FULL - engine.waiting)
            for engine in load.engines
            if engine.kv_used < WVA_KV_FULL and engine.waiting < WVA_QUEUE_FULL
        ]
        count = len(spare)
        kv, queue = (sum(column) / count for column in zip(*spare, strict=True)) if spare else (0.0, 0.0)
        if load.starting:
            return load.replicas
        if kv < WVA_KV_SPARE or queue < WVA_QUEUE_SPARE or load.queued:
            return load.replicas + 1
        # One fewer: the load of those that are not saturated on one engine less.
        fewer = count - 1
        if fewer < 1:
            return load.replicas if load.replicas > 1 or load.open else 0
        kv_then = WVA_KV_FULL - (WVA_KV_FULL - kv) * count / fewer
        queue_then = WVA_QUEUE_FULL - (WVA_QUEUE_FULL - queue) * count / fewer
        return load.replicas - (kv_then >= WVA_KV_SPARE and queue_then >= WVA_QUEUE_SPARE)

    return desired


def attainment_rule(settings: Autoscale) -> Rule:
    """A quarter more engines while fewer first tokens than the `target` share are in time; one fewer if the others
    would run well below what an engine ran when all was well.
    """
    most_well = 0.0

    def desired(load: FleetLoad) -> int:
        nonlocal most_well
        if not load.engines:
            return 1 if load.waiting or load.starting else 0
        each = load.open / len(load.engines)
        if load.attainment is not None and load.attainment < settings.target:
            return load.replicas if load.starting else math.ceil(1.25 * load.replicas)
        most_well = max(most_well, each)
        if len(load.engines) == 1:
            return 1 if load.open else 0
        return load.replicas - (load.open / (len(load.engines) - 1) < IDLE_ATTAINMENT * most_well)

    return desired


def forecast_rule(settings: Autoscale) -> Rule:
    """As many engines as serve the rate that is expected when an engine started now would be ready, at `target`
    requests per second each. The rate follows the line through the latest intervals (least squares), and is not taken
    below the latest one while it rises, nor below its mean while it falls.
    """
    counts: deque[tuple[float, int]] = deque(maxlen=FORECAST_WINDOWS + 1)

    def desired(load: FleetLoad) -> int:
        counts.append((load.now_s, load.arrivals))
        pairs = list(zip(counts, list(counts)[1:], strict=False))
        rates = [((a + b) / 2, (m - n) / (b - a)) for (a, n), (b, m) in pairs if b > a]
        if not rates:
            return load.replicas
        middle = sum(at for at, _ in rates) / len(rates)
        mean = sum(rate for _, rate in rates) / len(rates)
        spread = sum((at - middle) ** 2 for at, _ in rates)
        slope = sum((at - middle) * (rate - mean) for at, rate in rates) / spread if spread else 0.0
        ahead = mean + slope * (load.now_s + settings.start_s - middle)
        least = mean if slope < 0.0 else rates[-1][1]
        return max(math.ceil(max(ahead, least) / settings.target), 1 if load.open else 0)

    return desired


RULES: Mapping[str, Callable[[Autoscale], Rule]] = {
    "queue": queue_rule,
    "attainment": attainment_rule,
    "forecast": forecast_rule,
    "keda": keda_rule,
    "llm-d": llm_d_rule,
}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "queue": {"target": 16.0},
    "attainment": {"target": 0.99},
    "forecast": {"target": 4.0},
    "keda": {"target": 5.0, "every_s": 30.0},
    "llm-d": {"every_s": 60.0},
}
"""Settings of a rule where they differ from the defaults: KEDA polls every 30 s and llm-d every 60 s, as they ship."""


def autoscale(rule: str, **changes: Any) -> Autoscale:
    """The autoscaler of a rule with its usual settings and `changes`. Raises ConfigError for unknown names."""
    known = [item.name for item in fields(Autoscale)]
    unknown = [name for name in changes if name not in known]
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}"
        raise ConfigError(f"an autoscaler has no {unknown[0]!r}; {hint}")
    return Autoscale(rule, **{**PRESETS.get(rule, {}), **changes})


@dataclass(slots=True)
class ScalingRun:
    """What an autoscaler did.

    engine_s: seconds of engines from their starts to their ends, summed; what is paid for.
    starts, stops: engines started after the beginning, and stopped.
    timeline: (time in s, engines that serve, starting, draining) after each change.
    """

    engine_s: float = 0.0
    starts: int = 0
    stops: int = 0
    timeline: list[tuple[float, int, int, int]] = field(default_factory=list)


@dataclass(slots=True)
class _Engine:
    state: str = OFF
    since_s: float = 0.0
    """When it was started."""
    ready_s: float = math.inf


class Autoscaler:
    """The state of a fleet's engines under an autoscaler. It decides; whoever runs the engines performs it.

    run: what it did so far.
    decided_s: when it decided last.
    """

    def __init__(self, settings: Autoscale, replicas: int) -> None:
        self.settings, self.run, self.decided_s = settings, ScalingRun(), 0.0
        self._rule = settings.make_rule()
        self._engines = [_Engine() for _ in range(replicas)]
        self._wanted: deque[tuple[float, int]] = deque()
        self._busy_s = 0.0
        for engine in self._engines[: settings.initial_replicas]:
            engine.state = READY
        self._note(0.0)

    def numbers(self, state: str) -> list[int]:
        """The engines in a state."""
        return [number for number, engine in enumerate(self._engines) if engine.state == state]

    def decide(self, load: FleetLoad) -> tuple[list[int], list[int], list[int]]:
        """The engines to start, to open again (they drain) and to close now."""
        settings, now_s = self.settings, load.now_s
        self.decided_s = now_s
        wanted = min(max(self._rule(load), settings.min_replicas), len(self._engines) - len(self.numbers(DEAD)))
        self._wanted.append((now_s, wanted))
        while self._wanted[0][0] < now_s - settings.stable_s:
            self._wanted.popleft()
        if load.open:
            self._busy_s = now_s
        current = load.replicas
        if wanted > current:
            again = self.numbers(DRAINING)[: wanted - current]
            return self.numbers(OFF)[: wanted - current - len(again)], again, []
        steady = max(count for _, count in self._wanted)
        if current and not steady and now_s - self._busy_s < settings.idle_s:
            steady = 1
        if now_s < settings.stable_s or steady >= current:
            return [], [], []
        ready = self.numbers(READY)
        idle_first = sorted(range(len(ready)), key=lambda i: load.engines[i].running + load.engines[i].waiting)
        # Those that do not serve yet go first, as pods that are not ready do in Kubernetes.
        stoppable = [*self.numbers(STARTING), *(ready[i] for i in idle_first)]
        return [], [], stoppable[: current - steady]

    def started(self, number: int, now_s: float) -> float:
        """The engine starts; returns when it is ready (s)."""
        engine = self._engines[number]
        engine.state, engine.since_s, engine.ready_s = STARTING, now_s, now_s + self.settings.start_s
        self.run.starts += 1
        self._note(now_s)
        return engine.ready_s

    def ready(self, number: int, ready_s: float) -> bool:
        """The cold start that was to end at `ready_s` is over: whether the engine serves now.

        It does not if it died, was stopped or starts anew meanwhile.
        """
        engine = self._engines[number]
        if engine.state != STARTING or engine.ready_s != ready_s:
            return False
        engine.state = READY
        self._note(ready_s)
        return True

    def opened(self, number: int, now_s: float) -> None:
        """A draining engine serves again."""
        self._engines[number].state = READY
        self._note(now_s)

    def closed(self, number: int, now_s: float) -> None:
        """The engine gets no new requests."""
        self._engines[number].state = DRAINING
        self._note(now_s)

    def ended(self, number: int, now_s: float) -> None:
        """A draining engine has no requests left and ends."""
        self._stop(number, OFF, now_s)
        self.run.stops += 1

    def died(self, number: int, now_s: float) -> None:
        """The engine's machine failed; it cannot be started until `repaired`."""
        if self._engines[number].state in (OFF, DEAD):
            self._engines[number].state = DEAD
        else:
            self._stop(number, DEAD, now_s)

    def repaired(self, number: int, now_s: float) -> None:
        """The machine is there again; the rule decides whether an engine starts on it."""
        if self._engines[number].state == DEAD:
            self._engines[number].state = OFF
        self._note(now_s)

    def finish(self, now_s: float) -> ScalingRun:
        """The whole run, which ends now."""
        for engine in self._engines:
            if engine.state in (STARTING, READY, DRAINING):
                self.run.engine_s += now_s - engine.since_s
        return replace(self.run)

    def _stop(self, number: int, state: str, now_s: float) -> None:
        engine = self._engines[number]
        self.run.engine_s += now_s - engine.since_s
        engine.state = state
        self._note(now_s)

    def _note(self, now_s: float) -> None:
        counts = [len(self.numbers(state)) for state in (READY, STARTING, DRAINING)]
        self.run.timeline.append((now_s, counts[0], counts[1], counts[2]))
