"""Events that enter the scheduler, and outputs that leave it.

Every input that can change a plan, besides the results of steps, is one of the `Event` classes and reaches the
scheduler with its time (docs/architecture.md). So a tape of events and results replays into the same plans. The output
is one `TokenBatch` per step.
"""

from dataclasses import dataclass, field
from typing import Literal

from tokenyard.base.request import NO_TOKENS, Int32Array, Int64Array, LogprobOptions, Request, TextOptions
from tokenyard.base.timings import AbortCause, RequestTimings, SloTargets

FinishReason = Literal["stop", "length", "abort", "handover"]
INCOMPLETE: tuple[FinishReason, ...] = ("abort", "handover")
"""Reasons of an end after which the whole answer's length is unknown."""

TurnEnd = Literal["tool", "user"]
PauseMode = Literal["abort", "in_place", "retract"]


@dataclass(slots=True)
class Submit:
    """A request arrives.

    accepted: an earlier scheduler process accepted it before it ended, so queue limits do not apply again.
    """

    request: Request
    accepted: bool = False


@dataclass(slots=True)
class Cancel:
    """Abort the requests with these numbers; `numbers` empty means all."""

    numbers: list[int]
    message: str = "the request was aborted"
    cause: AbortCause = "cancelled"


@dataclass(slots=True)
class Update:
    """Change the urgency of a waiting or running request; None leaves a value unchanged.

    boost: levels of urgency that a priority function adds. Larger is more urgent under any setting.
    """

    number: int
    priority: int | None = None
    deadline_ns: int | None = None
    boost: int | None = None


@dataclass(slots=True)
class Pause:
    """Pause single requests or the whole scheduler.

    With `numbers`, those requests are retracted and wait for `Resume`. Without, no step is planned: `abort` ends all
    requests, `in_place` keeps their KV, `retract` sends running ones back to the queue.
    """

    mode: PauseMode = "in_place"
    numbers: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Resume:
    """Undo `Pause`, for the numbered requests or for everything."""

    numbers: list[int] = field(default_factory=list)


@dataclass(slots=True)
class StopFound:
    """The detokenizer found a stop string: the answer keeps its first `keep_tokens` output tokens."""

    number: int
    keep_tokens: int
    matched: str


@dataclass(slots=True)
class OpenGate:
    """Open a gate (one bit of `scheduler.Gate`) that holds back a waiting request."""

    number: int
    gate: int


@dataclass(slots=True)
class KvAvailable:
    """KV of the first `tokens` known tokens of a waiting request can be loaded, from the KV store or another engine.

    Sent only if loading is faster than computing. Opens `Gate.KV`. The rest is ignored if the request no longer waits.

    token: the first token of the answer, sampled where the prompt was computed; -1 for none. It is delivered
    immediately.
    """

    number: int
    tokens: int
    token: int = -1


@dataclass(slots=True)
class KvLoaded:
    """A `Load` has succeeded or failed: the KV of the first `tokens` tokens is in the request's pages.

    Nothing writes to these pages any more. Tokens that did not arrive are computed. A request has one load at a time;
    a request that was retracted during its load does not start again before this event.
    """

    number: int
    tokens: int


@dataclass(slots=True)
class PagesReleased:
    """The reader outside the scheduler no longer uses the pages of a `Handover` or a `Store`."""

    number: int


@dataclass(slots=True)
class SetPolicy:
    """Order the queue by another policy from now on.

    changes: scheduler settings to change with it, out of those that bound a step (`policy.adaptive.CHANGEABLE`). All
    others have their values from the start; the next `SetPolicy` resets these too.
    """

    name: str
    options: dict[str, float | int | str | bool] = field(default_factory=dict)
    changes: dict[str, float | int | str | bool] = field(default_factory=dict)


@dataclass(slots=True)
class Flush:
    """Empty the prefix cache. Refused while requests run or wait."""


@dataclass(slots=True)
class UnloadAdapter:
    """The LoRA adapter `adapter` (`Request.lora`) was unloaded and no request has it any more.

    The scheduler frees its slot and evicts its KV from the prefix cache.
    """

    adapter: str


@dataclass(slots=True)
class TenantUsage:
    """Tenant usage on other data-parallel ranks since their last report. Columns have one entry per tenant.

    tenants: names.
    tokens: tokens that count against the tenant's rate.
    service: service as the fair policies count it, before the tenant's weight.
    """

    tenants: list[str]
    tokens: list[int]
    service: list[float]


@dataclass(slots=True)
class RanksRemaining:
    """`ranks` of the engine's data-parallel ranks remain; the others have ended and do not return.

    The remaining ranks share the tenants' limits from now on. max_queued_requests: this scheduler's share of the
    engine's limit, -1 for no limit.
    """

    ranks: int
    max_queued_requests: int = -1


@dataclass(slots=True)
class TurnEnded:
    """The latest answer of the session `session` of `tenant` has ended.

    kind: what comes next. "tool": the answer called a tool, whose result is the next turn. "user": a person writes.
    ttl_ns: the time within which the next turn is expected; -1 for unknown.
    """

    session: str
    kind: TurnEnd = "user"
    ttl_ns: int = -1
    tenant: str = ""


@dataclass(slots=True)
class SessionEnded:
    """The session `session` of `tenant` has no further turns."""

    session: str
    tenant: str = ""


@dataclass(slots=True)
class WeightsUpdated:
    """The executor uses other weights from now on. No plan is in flight.

    version: version and digest of the weights (`base.request.weights_key`); "" for those that it started with.
    flush: whether KV of earlier weights is evicted. It is never hit by requests of other weights in any case.
    """

    version: str
    flush: bool = True


Event = (
    Submit
    | Cancel
    | Update
    | Pause
    | Resume
    | StopFound
    | OpenGate
    | SetPolicy
    | Flush
    | KvAvailable
    | KvLoaded
    | PagesReleased
    | TenantUsage
    | UnloadAdapter
    | RanksRemaining
    | TurnEnded
    | SessionEnded
    | WeightsUpdated
)


@dataclass(slots=True)
class Load:
    """Load the KV of a request's tokens from `start` on into `pages` (int32[n]), then send `KvLoaded`.

    state_slot: the slot for the recurrent states after the last of these tokens; -1 for a model without such layers.
    """

    number: int
    start: int
    pages: Int32Array
    state_slot: int = -1


@dataclass(slots=True)
class Handover:
    """The KV of a request's first `tokens` tokens is in `pages` (int32[n]), held until `PagesReleased`.

    token: the first token of its answer.
    state_slot: the slot with the recurrent states after those tokens; -1 for none.
    """

    number: int
    tokens: int
    pages: Int32Array
    token: int
    state_slot: int = -1


@dataclass(slots=True)
class Store:
    """The KV of a cached prefix may be written to the KV store. Its pages are held until `PagesReleased(number)`.

    number: the number of this offer, below 0.
    tokens: int32[n], from the root of `namespace` on.
    pages: int32[n / page_size], the pages of these tokens.
    state_slot: the slot with the recurrent states after the last token; -1 for none.
    """

    number: int
    namespace: str
    tokens: Int32Array
    pages: Int32Array
    state_slot: int = -1


KvMove = Load | Handover | Store
"""What the scheduler asks to be done with the KV of some pages."""


@dataclass(slots=True)
class Started:
    """What the detokenizer needs for a request whose first token follows.

    output_ids: int32[n], the part of its answer that came with the request.
    """

    number: int
    prompt_ids: Int32Array
    text: TextOptions
    stop: list[str]
    stop_token_ids: list[int]
    logprobs: LogprobOptions | None = None
    output_ids: Int32Array = field(default_factory=lambda: NO_TOKENS)


@dataclass(slots=True)
class Finish:
    """The end of one request. Each request ends exactly once.

    Times are in nanoseconds on the monotonic clock, 0 where a stage was never reached.

    matched: the token id or string that stopped it.
    message: why it was aborted, in one sentence.
    cause: why it was aborted, in one word; the server maps it to an HTTP status.
    cached_tokens: prompt tokens found in the prefix cache at its first admission.
    timings: how long each stage took.
    slo_targets: the targets that it was served by.
    vector: the prompt's vector as raw float32, if the request has `pooling`.
    draft_tokens: drafts that were verified for it (speculative decoding).
    accepted_draft_tokens: those of them that were right.
    weight_version: that of the weights that the engine used at its end, "" for those that it started with.
    weight_runs: (version, tokens) of each run of the answer that was computed by the same weights, in order; empty if
        the weights never changed while it was answered.
    """

    number: int
    reason: FinishReason
    matched: int | str | None = None
    message: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    retractions: int = 0
    arrival_ns: int = 0
    admitted_ns: int = 0
    first_token_ns: int = 0
    finished_ns: int = 0
    cause: AbortCause = ""
    timings: RequestTimings = field(default_factory=RequestTimings)
    slo_targets: SloTargets = field(default_factory=SloTargets)
    vector: bytes = b""
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    weight_version: str = ""
    weight_runs: list[tuple[str, int]] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether the answer ended by itself, so that its length is known."""
        return self.reason not in INCOMPLETE


@dataclass(slots=True)
class TokenLogprobs:
    """The log-probability of one token, and the most likely tokens at its position.

    position: counts tokens of prompt and answer from 0.
    token: the token at that position.
    top_tokens, top_logprobs: the most likely tokens, best first.
    """

    number: int
    position: int
    token: int
    logprob: float
    top_tokens: list[int] = field(default_factory=list)
    top_logprobs: list[float] = field(default_factory=list)


@dataclass(slots=True)
class TokenBatch:
    """The output of one step, in columns: output token `tokens[i]` belongs to request `numbers[i]`.

    A request may finish without a token in the same batch.

    numbers: int64[n].
    tokens: int32[n].
    hits: int32[n], prompt tokens found in the cache at the request's first admission.
    """

    numbers: Int64Array
    tokens: Int32Array
    hits: Int32Array
    started: list[Started] = field(default_factory=list)
    finished: list[Finish] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to send."""
        return not (len(self.numbers) or self.started or self.finished or self.logprobs)
