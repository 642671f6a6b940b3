"""Timings of single requests: how long each stage took, what delayed it, which requests were admitted before it."""

from dataclasses import dataclass, field
from typing import Literal

Stage = Literal["queue", "loading", "prefill", "decode", "requeued", "recompute", "paused"]
RetractReason = Literal["out of pages", "preempted", "paused"]
AbortCause = Literal[
    "",
    "invalid",
    "too_long",
    "room_in_use",
    "queue_full",
    "tenant_limit",
    "displaced",
    "queue_timeout",
    "run_timeout",
    "overdue",
    "no_memory",
    "paused",
    "cancelled",
    "client_gone",
    "slow_reader",
    "draining",
    "failed",
]
"""Why a request was aborted, as one word; "" for one that was not.

invalid, too_long: it could never be served. room_in_use: another request has, or had, its bootstrap room. queue_full,
tenant_limit, displaced, queue_timeout, run_timeout, overdue, no_memory: the scheduler refused or ended it. cancelled:
a call cancelled it. paused: the engine was paused in mode `abort`. client_gone, slow_reader: its client disconnected,
or read too slowly. draining: the server shuts down. failed: a step or the scheduler failed.
"""


@dataclass(slots=True)
class RequestTimings:
    """The stages of one request in the scheduler. Times are in nanoseconds; all but `inverted_ns` add up to its age.

    queue_ns: waiting for its first admission.
    loading_ns: admitted, while its KV is loaded.
    prefill_ns: admitted, before its first token.
    decode_ns: admitted, after its first token.
    requeued_ns: waiting again after a retraction.
    recompute_ns: recomputing after a retraction that followed its first token.
    paused_ns: held back while it or the whole engine was paused.
    inverted_ns: the part of its waiting in which a less urgent request was admitted (scheduler/priority_inversion.py).
    prefill_chunks: chunks planned.
    preemptions: how often it was preempted for a more urgent request.
    page_shortages: how often it was retracted for lack of pages.
    pauses: how often it was retracted by a pause.
    recomputed_tokens: tokens computed more than once because of these.
    waiting_ahead, admitted_ahead: requests that waited, and that were admitted, when it arrived.
    policy, overtaking: the policy, and its stated bound on overtaking, when it was first admitted.
    evicted_tokens, evicted_ns: tokens of the prompt before it in its session that had been evicted when it was first
        admitted, and when the last of them were (monotonic).
    pool_short_tokens: with so many more tokens in the KV pool none of them would have been evicted, all else being
        equal.
    """

    queue_ns: int = 0
    loading_ns: int = 0
    prefill_ns: int = 0
    decode_ns: int = 0
    requeued_ns: int = 0
    recompute_ns: int = 0
    paused_ns: int = 0
    inverted_ns: int = 0
    prefill_chunks: int = 0
    preemptions: int = 0
    page_shortages: int = 0
    pauses: int = 0
    recomputed_tokens: int = 0
    waiting_ahead: int = 0
    admitted_ahead: int = 0
    policy: str = ""
    overtaking: str = ""
    evicted_tokens: int = 0
    evicted_ns: int = 0
    pool_short_tokens: int = 0

    @property
    def total_ns(self) -> int:
        """From its arrival until now, or until its end."""
        waited = self.queue_ns + self.requeued_ns + self.paused_ns
        return waited + self.loading_ns + self.prefill_ns + self.decode_ns + self.recompute_ns


@dataclass(slots=True)
class SloTargets:
    """The targets of a request in nanoseconds, 0 for none: its own, or else those of its class.

    ttft_ns: from arrival to the first token.
    tpot_ns: every further token, on average.
    deadline_ns: from arrival to the end of the answer. A deadline replaces the class's ttft.
    """

    ttft_ns: int = 0
    tpot_ns: int = 0
    deadline_ns: int = 0


@dataclass(slots=True)
class AdmittedRequests:
    """Requests that were first admitted while another one waited for its first admission.

    requests: how many.
    tokens: prompt tokens that they had to compute.
    numbers: the latest of them, oldest first.
    """

    requests: int = 0
    tokens: int = 0
    numbers: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Explanation:
    """Where the time of one request went, and which requests it waited for.

    stage: where it is now; "ended" when it has ended.
    earlier: the requests that arrived before it and started while it waited for its first place.
    later: those that arrived after it and overtook it.
    complete: whether `earlier` and `later` reach back to its arrival; they are kept for a limited number of starts.
    reason: why it ended, "" while it has not.
    message: the error it ended with, "" for none.
    evicted_for: the requests that started when KV of its session was evicted, see `RequestTimings.evicted_ns`.
    """

    number: int
    stage: Stage | Literal["ended"]
    timings: RequestTimings
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    earlier: AdmittedRequests
    later: AdmittedRequests
    complete: bool
    reason: str = ""
    message: str = ""
    evicted_for: list[int] = field(default_factory=list)
