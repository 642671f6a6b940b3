"""`adaptive`: picks, among a few candidate settings, the one that would serve the recent traffic best.

The policy itself is fcfs. Outside the core, every few seconds, the simulator (sim/engine/lookahead.py) forecasts the
next seconds under each candidate, and `CandidateSelector` decides whether to change. A change is a `SetPolicy` event.
"""

import difflib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from tokenyard.base import NS_PER_S, ConfigError, SchedulerSettings, SetPolicy
from tokenyard.policy.base import Option, Policy, chosen_options

MARGIN = 0.03
"""A candidate is clearly better if its score exceeds the current one's by this share."""

MIN_GAIN_S = 0.1
"""The least gain in mean time to first token that counts; users do not notice a smaller one."""

MAX_SWITCHES_KEPT = 16
MAX_SAVED_S = 4.0
"""The most CPU time that quiet periods save up for several forecasts in a row."""

CHANGEABLE = ("chunked_prefill_size", "enable_mixed_chunk", "step_budget")

CANDIDATES = {
    "slo": SetPolicy("slo"),
    "short-first": SetPolicy("short-first", changes={"step_budget": "time"}),
    "lpm-time": SetPolicy("lpm", changes={"step_budget": "time"}),
    "lpm": SetPolicy("lpm"),
    "fcfs-time": SetPolicy("fcfs", changes={"step_budget": "time"}),
    "fcfs": SetPolicy("fcfs"),
}
"""What can be chosen: an order of the queue, and whether steps are bounded in time. The policy begins with the first
one that is usable; those that did best on recorded traffic come first.
"""

NEED_TREE = ("lpm", "lpm-time")
SEPARATOR = "+"


class AdaptivePolicy(Policy):
    """fcfs, until a forecast finds a clearly better candidate.

    Options: `interval_s` from one forecast to the next; `horizon_s`, the forecast time; `cpu_share` of one core that
    forecasts may take on average, for which the interval gets longer; `among`, the candidates by name, joined by `+`.
    """

    name = "adaptive"
    needs_cost = True
    options: ClassVar[dict[str, Option]] = {
        "interval_s": 5.0,
        "horizon_s": 10.0,
        "cpu_share": 0.05,
        "among": SEPARATOR.join(CANDIDATES),
    }
    ranges: ClassVar[dict[str, tuple[float, float]]] = {
        "interval_s": (0.1, 3600.0),
        "horizon_s": (0.1, 60.0),
        "cpu_share": (0.001, 1.0),
    }
    overtaking = "as the policy in use says; before the first change none: requests start in the order of their arrival"

    def __init__(self, settings: SchedulerSettings) -> None:
        super().__init__(settings)
        AdaptiveOptions.of(settings)


@dataclass(frozen=True, slots=True)
class AdaptiveOptions:
    """The parsed options of `adaptive`; see `AdaptivePolicy`."""

    candidates: tuple[str, ...]
    interval_s: float
    horizon_s: float
    cpu_share: float

    @classmethod
    def of(cls, settings: SchedulerSettings) -> "AdaptiveOptions":
        """The options in settings with the policy `adaptive`.

        Raises ConfigError for unknown candidates, and if none can be used with the other settings.
        """
        options = chosen_options(AdaptivePolicy, settings)
        names = [name.strip() for name in str(options["among"]).split(SEPARATOR)]
        for name in names:
            if name not in CANDIDATES:
                near = difflib.get_close_matches(name, CANDIDATES, n=2)
                hint = f"did you mean {' or '.join(near)}?" if near else f"choose among {SEPARATOR.join(CANDIDATES)}"
                raise ConfigError(f"adaptive knows no candidate {name!r}; {hint}")
        usable = tuple(name for name in dict.fromkeys(names) if _usable(name, settings))
        if not usable:
            raise ConfigError(f"none of adaptive's candidates {', '.join(names)} can be used with the other settings")
        return cls(usable, float(options["interval_s"]), float(options["horizon_s"]), float(options["cpu_share"]))


def changed(settings: SchedulerSettings, event: SetPolicy) -> SchedulerSettings:
    """`settings` with the event's changes. Raises ConfigError for a setting that cannot be changed while the scheduler
    runs, and for settings that contradict each other.
    """
    for name in event.changes:
        if name not in CHANGEABLE:
            raise ConfigError(f"{name} cannot be changed while the scheduler runs; only {', '.join(CHANGEABLE)} can")
    changes: dict[str, Any] = dict(event.changes)
    found = replace(settings, schedule_policy=event.name, policy_options=event.options, **changes)
    found.validate()
    return found


def _usable(name: str, settings: SchedulerSettings) -> bool:
    if name in NEED_TREE and settings.disable_radix_cache:
        return False
    try:
        changed(settings, CANDIDATES[name])
    except ConfigError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class CandidateScore:
    """The result of a candidate in a forecast.

    met: the share of the judged `requests` that met their targets. Requests that cannot be judged by the end of the
        forecast are left out.
    ttft_s: mean time to first token in seconds; a request without a first token counts with its wait so far.
    steps: simulated steps.
    """

    name: str
    met: float
    ttft_s: float
    requests: int = 0
    steps: int = 0

    def clearly_better(self, than: "CandidateScore") -> bool:
        """Whether the share that met its targets is larger by `MARGIN`; if both shares are equal, whether first tokens
        come sooner by `MARGIN` and by at least `MIN_GAIN_S`.
        """
        if self.met != than.met:
            return self.met > than.met * (1.0 + MARGIN)
        return self.ttft_s < min(than.ttft_s * (1.0 - MARGIN), than.ttft_s - MIN_GAIN_S)

    @property
    def beatable(self) -> bool:
        """Whether any score could be clearly better."""
        return CandidateScore("", 1.0, 0.0).clearly_better(self) or CandidateScore("", self.met, 0.0).clearly_better(
            self
        )


@dataclass(slots=True)
class PolicySwitch:
    """A change that was made at `at_ns`, and its reason in one line."""

    at_ns: int
    candidate: str
    reason: str


@dataclass(slots=True)
class CandidateSelector:
    """Keeps the current candidate until another one is clearly better in two forecasts in a row."""

    candidates: Sequence[str]
    current: str = ""
    looks: int = 0
    switches: dict[str, int] = field(default_factory=dict)
    latest: deque[PolicySwitch] = field(default_factory=lambda: deque(maxlen=MAX_SWITCHES_KEPT))
    scores: list[CandidateScore] = field(default_factory=list)
    _better: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.current = self.current or self.candidates[0]

    def begin(self) -> SetPolicy:
        """The current candidate's policy."""
        return CANDIDATES[self.current]

    def wanted(self) -> list[str]:
        """The candidates to score in the next forecast.

        The current one, then those that were clearly better in the previous forecast, or all others if none was.
        """
        return [self.current, *(self._better or (name for name in self.candidates if name != self.current))]

    def take(self, scores: Sequence[CandidateScore], now: int) -> SetPolicy | None:
        """Judge the scores of the `wanted` candidates, or of the first alone if no score can beat it. Returns the
        change to make, or None. Raises ValueError for scores of other candidates and for scores out of range.
        """
        names = [score.name for score in scores]
        if names not in (self.wanted(), [self.current]) or not all(_sensible(score) for score in scores):
            raise ValueError("the scores of a forecast are out of range, or are not those of the requested candidates")
        self.looks += 1
        self.scores = list(scores)
        present, confirmed = scores[0], bool(self._better)
        better = [score for score in scores[1:] if score.clearly_better(present)]
        if not better or not confirmed:
            self._better = [score.name for score in better]
            return None
        self._better = []
        best = max(better, key=lambda score: (score.met, -score.ttft_s))
        self.latest.append(PolicySwitch(now, best.name, _reason(best, present)))
        self.switches[best.name] = self.switches.get(best.name, 0) + 1
        self.current = best.name
        return CANDIDATES[best.name]


class LookaheadPacer:
    """When the next forecast may start.

    It is `interval_s` after the previous one, and later if forecasts would take more than `cpu_share` of a core on
    average. Unused CPU time is saved up, to `MAX_SAVED_S`.
    """

    def __init__(self, adaptive_options: AdaptiveOptions, now: int) -> None:
        self._interval_ns = round(adaptive_options.interval_s * NS_PER_S)
        self._share = adaptive_options.cpu_share
        self._saved_s = 0.0
        self._as_of_ns = now
        self.next_ns = now + self._interval_ns

    def record_lookahead(self, began_ns: int, cpu_s: float) -> None:
        """Record that a forecast that began at `began_ns` took `cpu_s` seconds of CPU time."""
        self._saved_s += self._share * max(began_ns - self._as_of_ns, 0) / NS_PER_S
        self._saved_s = min(self._saved_s, MAX_SAVED_S) - cpu_s
        self._as_of_ns = began_ns
        pause_ns = max(self._interval_ns, round(-self._saved_s / self._share * NS_PER_S))
        self.next_ns = began_ns + pause_ns


def _sensible(score: CandidateScore) -> bool:
    # Comparisons with NaN are false.
    return 0.0 <= score.met <= 1.0 and 0.0 <= score.ttft_s < 1e9


def _reason(best: CandidateScore, present: CandidateScore) -> str:
    """The reason for a switch from `present` to `best`, in one line."""
    if best.met != present.met:
        return f"{best.name} lets {best.met:.1%} of the requests meet their targets, {present.name} {present.met:.1%}"
    return f"{best.name} gives first tokens after {best.ttft_s:.2f} s on average, {present.name} {present.ttft_s:.2f} s"


POLICIES: list[type[Policy]] = [AdaptivePolicy]
