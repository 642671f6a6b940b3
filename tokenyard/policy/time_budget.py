"""Steps bounded in time instead of tokens: chunks as large as the targets of the decoding requests allow.

The idea is that of Sarathi-Serve and Niyama. The deadline policies build on it; alone its effect is small
(benchmarks/results/simulate.md has figures).
"""

from dataclasses import dataclass, replace

from typing_extensions import override

from tokenyard.base import NS_PER_S, CostModel, SchedulerSettings, StepWork
from tokenyard.policy.decode_share import kv_is_scarce, share_with_decodes
from tokenyard.policy.prefill_time import PrefillTime
from tokenyard.policy.slo_targets import tpot_ns, tpot_slack_ns
from tokenyard.policy.step_budget import UNLIMITED, BudgetRule, StepBudget, default_budget
from tokenyard.policy.views import Views

STEP_SHARE = 0.92
"""A step takes at most this share of the tightest target per token, which leaves room for errors of the cost model."""

MIN_PREFILL_SHARE = 0.1
SAFETY_S = 0.001
MIN_PREFILLING = 4
MAX_DENIED_STEPS = 8
S_PER_MS = 1e-3


@dataclass(slots=True)
class TimeBudget(StepBudget):
    """A step's allowance in seconds (see `step_budget.StepBudget`).

    Chunks that do not complete a prompt are multiples of `multiple`. One chunk of up to `granted_tokens` is allowed
    even without time left, so prefill progresses under any targets.
    """

    max_requests: int
    max_prefilling: int
    time: PrefillTime
    left_s: float
    left_tokens: int
    multiple: int
    granted_tokens: int
    prefill: bool = True
    with_decode: bool = True
    denied: bool = False

    @override
    def chunk(self, prefix: int, remaining: int) -> int:
        most = min(self.time.tokens(prefix, self.left_s), self.left_tokens)
        if remaining <= most:
            return remaining
        whole = most - most % self.multiple
        if whole > 0:
            return whole
        self.denied = not self.granted_tokens
        return min(remaining, self.granted_tokens)

    @override
    def spend(self, prefix: int, tokens: int) -> None:
        self.left_s -= self.time.chunk_s(prefix, tokens)
        self.left_tokens -= tokens
        self.granted_tokens = 0
        self.denied = False


@dataclass(slots=True)
class StepTimes:
    """How long the next step may take, in seconds.

    limit_s: the whole step.
    target_s: the limit without slack.
    base_s: the time of its decodes alone.
    decoding: whether it has decodes.
    stretch: seconds in which decodes leave one second to steps with prefill (`decode_share`).
    """

    limit_s: float
    target_s: float
    base_s: float
    decoding: bool
    stretch: float = 1.0

    @property
    def slowdown(self) -> float:
        """Seconds of steps that a second of prefill work takes under the present load."""
        if not self.decoding:
            return 1.05
        return self.stretch * self.target_s / max(self.target_s - self.base_s, MIN_PREFILL_SHARE * self.target_s)


class TimeBudgetRule(BudgetRule):
    """Bounds steps by the cost model, so that the tightest decoding request keeps its time per token.

    While anything decodes, a step takes at most `STEP_SHARE` of the tightest target. With `use_slack` it may take
    longer, up to `slo_idle_step_ms`, as long as every decoding request stays ahead of its mean target. While nothing
    decodes it takes `slo_idle_step_ms`. If decodes alone take longer than their target allows, that target is missed in
    any case, and prefill gets as much time as they take. A chunk comes at least every `MAX_DENIED_STEPS` of the steps
    that a `decode_share` leaves to prefill.
    """

    needs_cost = True

    def __init__(self, settings: SchedulerSettings, use_slack: bool) -> None:
        self._settings = settings
        self._use_slack = use_slack
        page = settings.page_size
        self._multiple = -(-settings.slo_chunk_tokens // page) * page
        self._last: TimeBudget | None = None
        self._denied_steps = 0
        self._limit_s = 0.0

    @property
    def limit_s(self) -> float | None:
        """Seconds that the latest step with prefill was allowed to take, None before the first."""
        return self._limit_s or None

    @override
    def begin(self, views: Views) -> TimeBudget:
        """The views must come with a cost model."""
        assert views.cost is not None
        self._denied_steps = self._denied_steps + 1 if self._last is not None and self._last.denied else 0
        time = PrefillTime.of(views.cost)
        times = self.step_times(views, time)
        self._limit_s = times.limit_s
        must = not times.decoding or self._denied_steps >= MAX_DENIED_STEPS
        requests = self._settings.prefill_max_requests
        self._last = TimeBudget(
            max_requests=requests if requests > 0 else UNLIMITED,
            max_prefilling=max(self._settings.max_partial_prefills, MIN_PREFILLING),
            time=time,
            left_s=times.limit_s - times.base_s,
            left_tokens=max(self._settings.max_prefill_tokens, self._multiple),
            multiple=self._multiple,
            granted_tokens=self._multiple if must else 0,
        )
        return self._last

    def step_times(self, views: Views, time: PrefillTime) -> StepTimes:
        """How long the step about to be planned may take, and how long its decodes take."""
        assert views.cost is not None
        settings, columns, running = self._settings, views.columns, views.running
        idle_s = settings.slo_idle_step_ms * S_PER_MS
        context = int(columns.planned[running].sum()) + len(running)
        decodes = StepWork(tokens=len(running), rows=len(running), decode_rows=len(running), decode_context=context)
        base_s = time.base_s(views.cost, decodes)
        if not len(running):
            return StepTimes(idle_s, STEP_SHARE * settings.slo_tpot_ms * S_PER_MS, base_s, decoding=False)
        target_s = STEP_SHARE * int(tpot_ns(columns, running, settings).min()) / NS_PER_S
        limit_s = target_s
        if self._use_slack:
            slack_s = int(tpot_slack_ns(columns, running, settings, views.now).min()) / NS_PER_S
            limit_s = max(target_s, min(idle_s, slack_s - self._lag_s(target_s) - SAFETY_S))
        if base_s >= limit_s:
            limit_s = 2.0 * base_s
        share = settings.share_of_decodes
        stretch = 1.0 / (1.0 - share) if share > 0.0 and kv_is_scarce(views) else 1.0
        return StepTimes(limit_s, target_s, base_s, decoding=True, stretch=stretch)

    def _lag_s(self, target_s: float) -> float:
        """Seconds by which the steps in flight, whose tokens are not written yet, exceed the time of these tokens.

        With several steps in flight a step is planned when the device begins the one before it.
        """
        if self._last is None:
            return 0.0
        last_s = self._limit_s - self._last.left_s
        return (self._settings.max_in_flight - 1) * max(last_s - target_s, 0.0)


def prefill_slowdown(views: Views, settings: SchedulerSettings, cost: CostModel) -> float:
    """Seconds that a second of prefill takes on this device, as its decodes need what remains to keep their targets."""
    seen = replace(views, cost=cost)
    return TimeBudgetRule(settings, use_slack=False).step_times(seen, PrefillTime.of(cost)).slowdown


def create_budget_rule(settings: SchedulerSettings) -> BudgetRule:
    """The budget rule that `settings.step_budget` asks for; "auto" means tokens."""
    by_time = settings.step_budget == "time"
    rule = TimeBudgetRule(settings, use_slack=False) if by_time else default_budget(settings)
    return share_with_decodes(rule, settings.share_of_decodes)
