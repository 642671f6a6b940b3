"""Events that enter the scheduler, and outputs that leave it.

Everything that can change a plan is one of the `Event` classes and reaches the scheduler with its time
(docs/architecture.md), so a tape of events replays into the same plans. The output is a `TokenBatch`, one a step.
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

    accepted: an earlier scheduler, which has ended, had accepted it, so limits of the queue do not apply again.
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
    """Change the urgency of a waiting or running request; None leaves a value as it is.

    `boost` is what a priority function adds: levels of urgency, larger is more urgent under any setting.
    """

    number: int
    priority: int | None = None
    deadline_ns: int | None = None
    boost: int | None = None


@dataclass(slots=True)
class Pause:
    """Stop working. With `numbers`, those requests give up their place and wait for `Resume`; without, everything
    stops: `abort` ends all requests, `in_place` keeps their KV, `retract` sends running ones back to the queue.
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
    """Open a gate (one bit of `lifecycle.Gate`) that holds back a waiting request."""

    number: int
    gate: int


@dataclass(slots=True)
class KvAvailable:
    """KV of the first `tokens` known tokens of a waiting request can be loaded, from a store below or from another
    engine, and loading it is faster than computing it. Opens `Gate.KV`. Ignored if the request no longer waits.

    token: the first token of the answer, sampled where the prompt was computed; -1 for none. It is delivered at once.
    """

    number: int
    tokens: int
    token: int = -1


@dataclass(slots=True)
class KvLoaded:
    """The load that a `Load` asked for has succeeded or failed: the KV of the first `tokens` tokens is in its pages.

    Nothing writes to these pages any more. Tokens that did not arrive are computed. A request has one load at a time:
    one that lost its place meanwhile does not start again before this event.
    """

    number: int
    tokens: int


@dataclass(slots=True)
class PagesReleased:
    """The reader outside has finished with the pages that a request with `handover` left, or those of a `Store`."""

    number: int


@dataclass(slots=True)
class SetPolicy:
    """Order the queue by another policy from now on. `changes` are scheduler settings to change with it, among those
    that bound a step (`policy.adaptive.CHANGEABLE`). All others have their values from the start; the next `SetPolicy`
    resets these too.
    """

    name: str
    options: dict[str, float | int | str | bool] = field(default_factory=dict)
    changes: dict[str, float | int | str | bool] = field(default_factory=dict)


@dataclass(slots=True)
class Flush:
    """Empty the prefix cache. Refused while requests run or wait."""


@dataclass(slots=True)
class UnloadAdapter:
    """The LoRA adapter `adapter` (`Request.lora`) was unloaded, and no request has it any more: its slot and what the
    prefix cache holds of it are freed.
    """

    adapter: str


@dataclass(slots=True)
class TenantUsage:
    """What schedulers of other data-parallel ranks did for tenants since they last said so.

    Columns have one entry per tenant: its name, the tokens that count against its rate, and its service as the fair
    policies weigh it (before its own weight).
    """

    tenants: list[str]
    tokens: list[int]
    service: list[float]


@dataclass(slots=True)
class RanksRemaining:
    """Of the engine's data-parallel ranks only `ranks` are left, as the others are out for good: these keep the limits
    of tenants together from now on. max_queued_requests: this scheduler's part of the engine's, -1 for no limit.
    """

    ranks: int
    max_queued_requests: int = -1


@dataclass(slots=True)
class TurnEnded:
    """The last answer of `session` has ended, and its next turn may come within `ttl_ns` (-1: nobody knows).

    kind: why it ended. "tool": the answer called a tool, whose result is the next turn. "user": a person writes next.
    """

    session: str
    kind: TurnEnd = "user"
    ttl_ns: int = -1


@dataclass(slots=True)
class SessionEnded:
    """No further turn of `session` comes."""

    session: str


@dataclass(slots=True)
class WeightsUpdated:
    """The executor computes with weights of this version from now on, "" for those that it started with."""

    version: str


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
    """Fill `pages` (int32[n]) with the KV of a request's tokens from `start` on, then send `KvLoaded`.

    state_slot: the slot for the recurrent states after the last of these tokens; -1 for a model without such layers.
    """

    number: int
    start: int
    pages: Int32Array
    state_slot: int = -1


@dataclass(slots=True)
class Handover:
    """The KV of a request's first `tokens` tokens is in `pages` (int32[n]), held until `PagesReleased`.

    `token` is the first token of its answer. `state_slot` holds the recurrent states after those tokens, -1 for none.
    """

    number: int
    tokens: int
    pages: Int32Array
    token: int
    state_slot: int = -1


@dataclass(slots=True)
class Store:
    """The KV of a prompt's first tokens may go to the KV store: that of `tokens` (int32[n], from the root of
    `namespace` on) is in `pages` (int32[n / page_size]), held until `PagesReleased(number)`. Numbers are below 0.
    `state_slot` holds the recurrent states after the last of them, -1 for none.
    """

    number: int
    namespace: str
    tokens: Int32Array
    pages: Int32Array
    state_slot: int = -1


KvMove = Load | Handover | Store
"""What the scheduler wants done with the KV of some pages."""


@dataclass(slots=True)
class Started:
    """A request's first token follows: what the detokenizer needs to know of it. `output_ids` (int32[n]) is the part of
    its answer that came with the request, which the client already has.
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

    `matched` is the token id or string that stopped it. `cause` and `message` say why it was aborted, in one word and
    in one sentence; the server maps causes to HTTP statuses. Times are in nanoseconds on the monotonic clock, 0 where a
    stage was never reached. `slo_targets` are the targets that it was served by. `vector` is that of the prompt
    (raw float32), where the request asked for it. `draft_tokens` counts the drafts that were verified for it
    (speculative decoding), `accepted_draft_tokens` those of them that were right.
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

    @property
    def complete(self) -> bool:
        """Whether the answer ended by itself, so that its length is known."""
        return self.reason not in INCOMPLETE


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probabilities of one token: its own and the `top` most likely ones, best first.

    `position` counts tokens of prompt and answer from 0; `token` is the token at that position.
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

    `numbers` is int64[n], `tokens` int32[n] and `hits` int32[n] (prompt tokens found in the cache at first
    admission). A request may finish without a token in the same batch.
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
