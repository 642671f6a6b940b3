"""How much one step may do: the mix of prefill and decode, and the size of chunks."""

from dataclasses import dataclass
from typing import Protocol

from typing_extensions import override

from tokenyard.base import SchedulerSettings
from tokenyard.policy.prefill_time import PrefillTime
from tokenyard.policy.views import Views

UNLIMITED = 2**31 - 1
MIN_CHUNK_TOKENS = 64


class StepBudget(Protocol):
    """One step's allowance. The scheduler asks `chunk` for each prefill in order and reports what it took.

    prefill: whether chunks may be planned at all. with_decode: whether decoding rows run in the same step.
    max_requests: prefills this step, chunks of longer prompts included. max_prefilling: prefills left unfinished after
    the step.
    """

    prefill: bool
    with_decode: bool
    max_requests: int
    max_prefilling: int

    def chunk(self, prefix: int, remaining: int) -> int:
        """How many of the `remaining` tokens after `prefix` may be computed now; 0 ends the step's prefill."""

    def spend(self, prefix: int, tokens: int) -> None:
        """A chunk of `tokens` after `prefix` was planned."""


class BudgetRule(Protocol):
    """Makes one `StepBudget` at the start of each step in which a request needs prefill."""

    @property
    def needs_cost(self) -> bool:
        """Whether the views must come with a cost model."""

    @property
    def resume_ns(self) -> int:
        """After a `begin` without prefill: further steps that begin before this time (ns) would have none either, while
        no request joins or leaves. 0 where that is not known.
        """
        return 0

    def begin(self, views: Views) -> StepBudget:
        """The allowance of the step about to be planned."""


@dataclass(slots=True)
class TokenBudget(StepBudget):
    """SGLang's PrefillAdder budgets: `input_tokens` bounds whole prompts and `chunk_tokens` what a step computes.

    The first prompt may exceed `input_tokens` (else it could never run); a prompt that exceeds `chunk_tokens` is cut,
    to whole pages. Only page-ceiled sizes are counted. With a `pace`, chunks further into a prompt are smaller.
    """

    prefill: bool
    with_decode: bool
    max_requests: int
    max_prefilling: int
    input_tokens: int
    chunk_tokens: int
    page_size: int
    pace: "DynamicChunking | None" = None
    first: bool = True

    @override
    def chunk(self, prefix: int, remaining: int) -> int:
        if self.chunk_tokens <= 0 or self.input_tokens <= 0:
            return 0
        if not self.first and remaining > self.input_tokens:
            return 0
        most = self.chunk_tokens
        if self.pace is not None:
            most = min(most, max(self.pace.tokens(prefix), self.page_size))
        if remaining <= most:
            return remaining
        # A cut must end on a page border; the tokens up to it include what `prefix` already put on its last page.
        end = (prefix + most) // self.page_size * self.page_size
        return max(end - prefix, 0)

    @override
    def spend(self, prefix: int, tokens: int) -> None:
        pages = -(-tokens // self.page_size)
        self.chunk_tokens -= pages * self.page_size
        self.input_tokens -= pages * self.page_size
        self.first = False


@dataclass(frozen=True, slots=True)
class DynamicChunking:
    """Chunks of equal time: after a prefix, as many tokens as take `chunk_s`, but at least `MIN_CHUNK_TOKENS`.

    A fixed number of tokens takes longer and longer along a prompt, as attention reads what is there already (SGLang's
    dynamic chunking, made for pipelines).
    """

    time: PrefillTime
    chunk_s: float

    def tokens(self, prefix: int) -> int:
        """Tokens of the chunk after `prefix`."""
        return max(self.time.tokens(prefix, self.chunk_s), MIN_CHUNK_TOKENS)


@dataclass(slots=True)
class PrefillFirst(BudgetRule):
    """SGLang's default: any prefill goes before decode, but after `prefill_decode_interval` prefill steps in a row
    comes a decode step.

    Without the interval sustained arrivals starve decode (SGLang issue 32549).
    """

    settings: SchedulerSettings

    @property
    @override
    def needs_cost(self) -> bool:
        return self.settings.enable_dynamic_chunking

    @override
    def begin(self, views: Views) -> TokenBudget:
        interval = self.settings.prefill_decode_interval
        decode_due = interval > 0 and len(views.running) > 0 and views.prefill_steps_in_row >= interval
        return _token_budget(views, self.settings, prefill=not decode_due, with_decode=False, decode_tokens=0)


@dataclass(slots=True)
class MixedChunk(BudgetRule):
    """Decoding rows run in every step, and prefill chunks fill the rest of its tokens (Sarathi-Serve, vLLM)."""

    settings: SchedulerSettings

    @property
    @override
    def needs_cost(self) -> bool:
        return self.settings.enable_dynamic_chunking

    @override
    def begin(self, views: Views) -> TokenBudget:
        return _token_budget(views, self.settings, prefill=True, with_decode=True, decode_tokens=len(views.running))


def _token_budget(
    views: Views, settings: SchedulerSettings, prefill: bool, with_decode: bool, decode_tokens: int
) -> TokenBudget:
    chunk = settings.chunked_prefill_size
    limit = settings.prefill_max_requests
    return TokenBudget(
        prefill=prefill,
        with_decode=with_decode,
        max_requests=limit if limit > 0 else UNLIMITED,
        max_prefilling=settings.max_partial_prefills,
        input_tokens=max(settings.max_prefill_tokens - decode_tokens, settings.page_size),
        # At least a page, or many decoding rows would starve prefill in a mixed step.
        chunk_tokens=max((chunk if chunk > 0 else UNLIMITED) - decode_tokens, settings.page_size),
        page_size=settings.page_size,
        pace=_dynamic_chunking(views, settings),
    )


def _dynamic_chunking(views: Views, settings: SchedulerSettings) -> DynamicChunking | None:
    if not settings.enable_dynamic_chunking or settings.chunked_prefill_size <= 0:
        return None
    assert views.cost is not None
    time = PrefillTime.of(views.cost)
    return DynamicChunking(time, time.chunk_s(0, settings.chunked_prefill_size))


def default_budget(settings: SchedulerSettings) -> BudgetRule:
    """The rule that bounds steps in tokens as the settings ask for."""
    return MixedChunk(settings) if settings.enable_mixed_chunk else PrefillFirst(settings)
