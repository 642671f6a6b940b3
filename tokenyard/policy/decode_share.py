"""A share of the device's time for decodes while prefill waits, around any budget of a step.

While large chunks of prompts run, each decoding request gets one token per chunk. Its answer ends late, and until then
it keeps its KV from others. Where KV is scarce, that costs more hits than the prefill brings.
"""

from dataclasses import dataclass, field

from typing_extensions import override

from tokenyard.base import NS_PER_S, StepWork
from tokenyard.policy.prefill_time import PrefillTime
from tokenyard.policy.step_budget import BudgetRule, StepBudget, TokenBudget
from tokenyard.policy.views import Views

NO_PREFILL = TokenBudget(
    prefill=False, with_decode=True, max_requests=0, max_prefilling=0, input_tokens=0, chunk_tokens=0, page_size=1
)


def kv_is_scarce(views: Views) -> bool:
    """Whether the requests that wait or run need more KV than the pool has."""
    columns = views.columns
    needed = sum(int(columns.target[rows].sum()) for rows in (views.waiting, views.prefilling, views.loading))
    return needed + int(columns.planned[views.running].sum()) > views.total_tokens


@dataclass(slots=True)
class CountedBudget(StepBudget):
    """The allowance `inner`, and the seconds of prefill that were planned within it."""

    inner: StepBudget
    time: PrefillTime
    prefill: bool = field(init=False)
    with_decode: bool = field(init=False)
    max_requests: int = field(init=False)
    max_prefilling: int = field(init=False)
    spent_s: float = 0.0

    def __post_init__(self) -> None:
        self.prefill, self.with_decode = self.inner.prefill, self.inner.with_decode
        self.max_requests, self.max_prefilling = self.inner.max_requests, self.inner.max_prefilling

    @override
    def chunk(self, prefix: int, remaining: int) -> int:
        return self.inner.chunk(prefix, remaining)

    @override
    def spend(self, prefix: int, tokens: int) -> None:
        self.inner.spend(prefix, tokens)
        self.spent_s += self.time.chunk_s(prefix, tokens)


class DecodeShareRule(BudgetRule):
    """After a step with prefill come steps that only decode, until prefill has had `1 - share` of the time.

    The seconds that chunks add to a step count as prefill's, and all others as those of decodes. Decodes are owed at
    most what follows from one step, and nothing once no request decodes or the requests fit into the pool
    (`kv_is_scarce`). The times are those of the cost model.
    """

    needs_cost = True

    def __init__(self, inner: BudgetRule, share: float) -> None:
        self._inner = inner
        self._share = share
        self._last: CountedBudget | None = None
        self._began_ns = 0
        self._resume_ns = 0

    @property
    def limit_s(self) -> float | None:
        """`TimeBudgetRule.limit_s` of the inner rule; None if it does not bound time."""
        limit_s: float | None = getattr(self._inner, "limit_s", None)
        return limit_s

    @property
    @override
    def resume_ns(self) -> int:
        """While requests only decode, the need for KV grows, so a pause of prefill lasts as long as it was planned."""
        return 0 if self._last is not None else self._resume_ns

    @override
    def begin(self, views: Views) -> StepBudget:
        """The views must come with a cost model."""
        assert views.cost is not None
        time = PrefillTime.of(views.cost)
        last, self._last = self._last, None
        if last is not None and last.spent_s > 0.0:
            alone_s = 0.0 if last.with_decode else time.base_s(views.cost, StepWork())
            self._resume_ns = self._began_ns + round((last.spent_s + alone_s) / (1.0 - self._share) * NS_PER_S)
        if views.now < self._resume_ns and len(views.running) and kv_is_scarce(views):
            return NO_PREFILL
        self._last, self._began_ns = CountedBudget(self._inner.begin(views), time), views.now
        return self._last


def share_with_decodes(rule: BudgetRule, share: float) -> BudgetRule:
    """`rule`, inside a `DecodeShareRule` if `share` is above 0."""
    return DecodeShareRule(rule, share) if share > 0.0 else rule
