"""`GET /v1/requests/{id}/explain`: where a request's time went, behind whom it waited and by which rule."""

import time
from collections.abc import Callable
from typing import Any

from tokenyard.base import NS_PER_MS, NS_PER_S, Course, Explanation, Starts

STAGES = ("queue", "prefill", "decode", "requeued", "recompute", "paused")

RidOf = Callable[[int], str | None]


def explained(told: Explanation, rid_of: RidOf) -> dict[str, Any]:
    """One answer's explanation as JSON; times in milliseconds, requests by their ids (or #number if unknown)."""
    course = told.course
    return {
        "state": told.stage,
        "finish_reason": told.reason or None,
        "message": told.message,
        "total_ms": course.total_ns / NS_PER_MS,
        "stages_ms": stages_ms(course),
        "prompt_tokens": told.prompt_tokens,
        "cached_tokens": told.cached_tokens,
        "completion_tokens": told.completion_tokens,
        "prefill_chunks": course.prefill_chunks,
        "lost_its_place": {
            "preempted": course.preemptions,
            "out_of_pages": course.page_shortages,
            "paused": course.pauses,
            "recomputed_tokens": course.recomputed_tokens,
        },
        "waited_behind": {
            "policy": course.policy,
            "overtaking": course.overtaking,
            "placed_at_arrival": course.placed_ahead,
            "waiting_at_arrival": course.waiting_ahead,
            "earlier": _starts(told.earlier, rid_of),
            "later": _starts(told.later, rid_of),
            "complete": told.complete,
            "less_urgent_in_place_ms": course.inverted_ns / NS_PER_MS,
        },
        "summary": summary(told),
    }


def stages_ms(course: Course) -> dict[str, float]:
    """Milliseconds of each stage; they add up to the request's age."""
    return {stage: getattr(course, f"{stage}_ns") / NS_PER_MS for stage in STAGES}


def wall_s(stamp_ns: int) -> float:
    """A stamp of the monotonic clock, on which the engine's processes agree, as seconds of Unix time."""
    return round(time.time() - (time.monotonic_ns() - stamp_ns) / NS_PER_S, 6)


def summary(told: Explanation) -> str:
    """The same in a few words."""
    course, stages = told.course, stages_ms(told.course)
    longest = max(STAGES, key=lambda stage: stages[stage])
    text = f"{course.total_ns / NS_PER_MS:.1f} ms, most of it {longest} ({stages[longest]:.1f} ms)"
    if told.earlier.requests or told.later.requests:
        text += f"; {told.earlier.requests} earlier and {told.later.requests} later requests started before it"
    lost = course.preemptions + course.page_shortages + course.pauses
    if lost:
        text += f"; it lost its place {lost} times"
    if told.cached_tokens:
        text += f"; {told.cached_tokens} of {told.prompt_tokens} prompt tokens came from the cache"
    return text


def _starts(starts: Starts, rid_of: RidOf) -> dict[str, Any]:
    """Requests that started before another one, the latest of them by id."""
    ids = [rid_of(number) or f"#{number}" for number in starts.numbers]
    return {"requests": starts.requests, "tokens": starts.tokens, "latest_ids": list(dict.fromkeys(ids))}
