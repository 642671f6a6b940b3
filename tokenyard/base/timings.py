"""Timings of single requests: how long each stage took, what delayed it, which requests started before it."""

from dataclasses import dataclass, field
from typing import Literal

Stage = Literal["queue", "loading", "prefill", "decode", "requeued", "recompute", "paused"]
RetractReason = Literal["out of pages", "preempted", "paused"]
AbortCause = Literal[
    "",
    "invalid",
    "too_long",
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

invalid, too_long: it could never be served. queue_full, tenant_limit, displaced, queue_timeout, run_timeout, overdue,
no_memory: the scheduler refused it or gave it up. cancelled: it was cancelled by a call. paused: the engine was paused
in the mode `abort`. client_gone, slow_reader: its client disconnected, or read too slowly. draining: the server shuts
down. failed: a step or the scheduler failed.
"""


@dataclass(slots=True)
class RequestTimings:
    """The stages of one request in the scheduler. Times are in nanoseconds and add up to its age.

    queue_ns: waiting for its first place. loading_ns: in place, while its KV was loaded from elsewhere. prefill_ns: in
    place, before its first token. decode_ns: in place after that. requeued_ns: waiting again after a retraction.
    recompute_ns: recomputing after a retraction, after its first token. paused_ns: held back while it or the whole
    engine was paused. inverted_ns: the part of its waiting in which a less urgent request had a place
    (scheduler/priority_inversion.py).

    prefill_chunks: chunks planned. preemptions, page_shortages, pauses: how often it lost its place to a more urgent
    request, for lack of pages, or to a pause. recomputed_tokens: tokens computed more than once because of these.
    waiting_ahead, admitted_ahead: requests that waited and that had a place when it arrived. policy, overtaking: the
    order of the queue and its stated bound on overtaking when it got its first place.
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

    @property
    def total_ns(self) -> int:
        """From its arrival until now, or until its end."""
        waited = self.queue_ns + self.requeued_ns + self.paused_ns
        return waited + self.loading_ns + self.prefill_ns + self.decode_ns + self.recompute_ns


@dataclass(slots=True)
class SloTargets:
    """The targets of a request in nanoseconds, 0 for none: its own, or else those of its class.

    ttft_ns: from arrival to the first token. tpot_ns: every further token, on average. deadline_ns: from arrival to the
    end, for requests with a deadline, which replaces the class's ttft.
    """

    ttft_ns: int = 0
    tpot_ns: int = 0
    deadline_ns: int = 0


@dataclass(slots=True)
class AdmittedRequests:
    """Requests that got their first place while another one waited for its own.

    tokens: prompt tokens that they had to compute. numbers: the latest of them, oldest first.
    """

    requests: int = 0
    tokens: int = 0
    numbers: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Explanation:
    """Where the time of one request went, and which requests it waited for.

    stage: where it is now; "ended" when it has ended. earlier, later: the requests that started while it waited for its
    first place, those that arrived before it and those that overtook it. complete: whether these lists reach back to
    its arrival; they are kept for a limited number of starts.
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
