"""What a request was promised, by its own targets, and whether it was kept."""

from tokenyard.base import Finish
from tokenyard.engine.spec import GenerateSpec

NS_PER_MS = 1_000_000
ON_PURPOSE = ("cancelled", "paused")
"""Causes of an abort that say nothing about how the server did."""


def targets_met(finish: Finish, spec: GenerateSpec) -> list[tuple[str, bool]]:
    """The latency targets that a finished request brought, each with whether it was met."""
    met = []
    if spec.slo is not None and spec.slo.ttft_ns is not None:
        met.append(("ttft", finish.first_token_ns - finish.arrival_ns <= spec.slo.ttft_ns))
    if spec.slo is not None and spec.slo.tpot_ns is not None and finish.completion_tokens > 1:
        decode_ns = finish.finished_ns - finish.first_token_ns
        met.append(("tpot", decode_ns <= spec.slo.tpot_ns * (finish.completion_tokens - 1)))
    if spec.deadline_ms is not None:
        met.append(("deadline", finish.finished_ns - finish.arrival_ns <= spec.deadline_ms * NS_PER_MS))
    return met


def has_targets(spec: GenerateSpec) -> bool:
    """Whether a request brought any target."""
    own = spec.slo is not None and (spec.slo.ttft_ns is not None or spec.slo.tpot_ns is not None)
    return own or spec.deadline_ms is not None


def kept_its_promise(finish: Finish, spec: GenerateSpec) -> bool | None:
    """Whether an answer met all its targets; one that was refused or failed did not.

    None for a request without targets, and for one that somebody ended on purpose.
    """
    if not has_targets(spec) or finish.cause in ON_PURPOSE:
        return None
    return finish.reason != "abort" and all(met for _, met in targets_met(finish, spec))
