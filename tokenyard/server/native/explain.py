"""`GET /v1/requests/{id}/explain`: where a request's time went, and which requests ran before it under which policy."""

import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from tokenyard.base import NS_PER_MS, NS_PER_S, AdmittedRequests, Explanation, RequestTimings
from tokenyard.server.http.prompt_history import CacheReport

CAUSES = {
    "first": "no earlier turn of this session is known here",
    "other_salt": "the turn before had another cache salt",
    "other_adapter": "the turn before had another adapter",
    "hit": "all of the turn before was cached",
    "elsewhere": "earlier turns were answered by another engine, before a restart or too long ago",
    "template": "the turn before is in this request, but the chat template writes it differently now, for instance "
    "without earlier reasoning",
    "lost": "the turn before stands in this prompt, but its KV is at another engine or rank",
    "unknown": "the answer has not ended",
}
"""What each cause of a `CacheReport` means, but for those that need its other fields."""

STAGES = ("queue", "prefill", "decode", "requeued", "recompute", "paused")

RidOf = Callable[[int], str | None]


def explained(explanation: Explanation, rid_of: RidOf) -> dict[str, Any]:
    """The explanation of one answer as JSON: times in milliseconds, requests by id, or #number if the id is unknown."""
    timings = explanation.timings
    retracted = {
        "preempted": timings.preemptions,
        "out_of_pages": timings.page_shortages,
        "paused": timings.pauses,
        "recomputed_tokens": timings.recomputed_tokens,
    }
    inversion_ms = timings.inverted_ns / NS_PER_MS
    return {
        "state": explanation.stage,
        "finish_reason": explanation.reason or None,
        "message": explanation.message,
        "total_ms": timings.total_ns / NS_PER_MS,
        "stages_ms": stages_ms(timings),
        "prompt_tokens": explanation.prompt_tokens,
        "cached_tokens": explanation.cached_tokens,
        "completion_tokens": explanation.completion_tokens,
        "prefill_chunks": timings.prefill_chunks,
        "retracted": retracted,
        # The old name, to be removed in the next release.
        "lost_its_place": retracted,
        "waited_behind": {
            "policy": timings.policy,
            "overtaking": timings.overtaking,
            "admitted_at_arrival": timings.admitted_ahead,
            "waiting_at_arrival": timings.waiting_ahead,
            "earlier": _starts(explanation.earlier, rid_of),
            "later": _starts(explanation.later, rid_of),
            "complete": explanation.complete,
            "priority_inversion_ms": inversion_ms,
            # The old name, to be removed in the next release.
            "less_urgent_in_place_ms": inversion_ms,
        },
        "summary": summary(explanation),
    }


def cache_report(report: CacheReport, explanation: Explanation, rid_of: RidOf) -> dict[str, Any]:
    """Why a turn's prompt was cached as far as it was, as JSON. `evicted_at` is Unix time in seconds, `evicted_for` are
    the requests that started in that step; without any, answers of running requests took the place.
    """
    timings = explanation.timings
    found = report.with_evicted(timings).describe()
    if timings.evicted_tokens:
        numbers = explanation.evicted_for
        ids = [rid_of(number) or f"#{number}" for number in numbers]
        found |= {"evicted_at": wall_s(timings.evicted_ns), "evicted_for": list(dict.fromkeys(ids))}
    return found | {"summary": cache_summary(found)}


def cache_summary(cache: Mapping[str, Any]) -> str:
    """One sentence that says why a turn's prompt was cached as far as it was."""
    tokens = f"{cache['cached_tokens']} of {cache['prompt_tokens']} prompt tokens were cached"
    if cache["cause"] == "evicted":
        return f"{tokens}; {_eviction(cache)}"
    how = f" ({cache['how']})" if cache["how"] else ""
    why = CAUSES.get(cache["cause"]) or f"{cache['part']} differs from the turn before, {cache['before']}{how}"
    return f"{tokens}; {why}"


def _eviction(cache: Mapping[str, Any]) -> str:
    """When KV of the turn before was evicted and for which requests, and what keeps it longer."""
    at = datetime.fromtimestamp(cache["evicted_at"]).strftime("%H:%M:%S")
    started = ", ".join(cache["evicted_for"])
    return (
        f"{cache['evicted_tokens']} of {cache['before_tokens']} tokens of the turn before were evicted until {at}"
        + (f", when {started} started" if started else ", when running answers grew")
        + f"; a KV pool of {cache['pool_short_tokens']} more tokens would have kept them, --schedule-policy session "
        "lets fewer sessions take turns at once, and --radix-eviction-policy reuse evicts by the expected return"
    )


def stages_ms(timings: RequestTimings) -> dict[str, float]:
    """Milliseconds of each stage; they add up to the request's age."""
    return {stage: getattr(timings, f"{stage}_ns") / NS_PER_MS for stage in STAGES}


def wall_s(stamp_ns: int) -> float:
    """A monotonic timestamp (ns), which the engine's processes share, as Unix time in seconds."""
    return round(time.time() - (time.monotonic_ns() - stamp_ns) / NS_PER_S, 6)


def summary(explanation: Explanation) -> str:
    """A one-line summary."""
    timings, stages = explanation.timings, stages_ms(explanation.timings)
    longest = max(STAGES, key=lambda stage: stages[stage])
    text = f"{timings.total_ns / NS_PER_MS:.1f} ms, most of it {longest} ({stages[longest]:.1f} ms)"
    if explanation.earlier.requests or explanation.later.requests:
        earlier, later = explanation.earlier.requests, explanation.later.requests
        text += f"; {earlier} earlier and {later} later requests started before it"
    retractions = timings.preemptions + timings.page_shortages + timings.pauses
    if retractions:
        text += f"; it was retracted {retractions} times"
    if explanation.cached_tokens:
        text += f"; {explanation.cached_tokens} of {explanation.prompt_tokens} prompt tokens came from the cache"
    return text


def _starts(starts: AdmittedRequests, rid_of: RidOf) -> dict[str, Any]:
    """Requests that started earlier: their number, their tokens and the latest ids."""
    ids = [rid_of(number) or f"#{number}" for number in starts.numbers]
    return {"requests": starts.requests, "tokens": starts.tokens, "latest_ids": list(dict.fromkeys(ids))}
