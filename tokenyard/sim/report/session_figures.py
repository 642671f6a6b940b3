"""The figures of a run of sessions."""

from typing import Any

import numpy as np

from tokenyard.base import NS_PER_S, BoolArray, Float64Array, Int64Array, StepWork
from tokenyard.cost import LinearCost
from tokenyard.sim.outcome import Outcome
from tokenyard.sim.traces.sessions import S_PER_HOUR, Sessions

CHUNK_TOKENS = 8192
"""Chunks of the prefill of a session that has the engine to itself."""

TURN_GROUPS = ((0, 0), (1, 4), (5, 9), (10, 24), (25, 49), (50, None))
"""Turns of a conversation that are reported together, as first and last index; None for no end."""


def session_figures(outcome: Outcome) -> dict[str, Any]:
    """The figures of the sessions of a run. Times are in seconds, shares from 0 to 1.

    Rates count within the time of full load: until the last session has started and the next one has ended. A session
    lasts from the arrival of its first turn to its last token. Its slowdown is that over its time alone on the engine,
    with the same gaps and everything that it sent before still cached. `hit_share` is the share of prompt tokens that
    were cached; `recomputed_tokens` had been sent before in the session and were not cached any more. A turn waits
    from its arrival to its first admission.
    """
    sessions = outcome.workload.sessions
    assert sessions is not None
    served = outcome.served
    spans, whole = session_times_s(outcome, sessions)
    begin_s, end_s = full_load_s(outcome, sessions)
    hours = max(end_s - begin_s, 1e-9) / S_PER_HOUR
    ends_s = outcome.finished_ns / NS_PER_S
    within = served & (ends_s <= end_s)
    ended_s = _session_ends_s(outcome, sessions)[whole]
    alone = alone_s(outcome, sessions)
    cached = np.minimum(outcome.cached_tokens, outcome.workload.prompt_tokens).astype(np.int64)
    waits = ((outcome.admitted_ns - outcome.arrival_ns) / NS_PER_S)[served]
    return {
        "sessions": sessions.count,
        "finished": int(whole.sum()),
        "turns": len(served),
        "turns_per_hour": _rounded(int(within.sum()) / hours),
        "sessions_per_hour": _rounded(int((ended_s <= end_s).sum()) / hours),
        "output_tokens_per_s": _rounded(float(outcome.completion_tokens[within].sum()) / max(end_s - begin_s, 1e-9)),
        "full_load_s": _rounded(end_s - begin_s),
        "mean_session_s": _mean(spans[whole]),
        "session_s": _quantiles(spans[whole]),
        "mean_slowdown": _mean(spans[whole] / np.maximum(alone[whole], 1e-9)),
        "ttft_s": _quantiles(outcome.ttft_s[served]),
        "longest_wait_s": _rounded(float(waits.max(initial=0.0))),
        "hit_share": _hit_share(outcome, served),
        "recomputed_tokens": int(np.maximum(sessions.reusable - cached, 0)[served].sum(dtype=np.int64)),
        "by_turn": [_group(outcome, sessions, first, last) for first, last in TURN_GROUPS],
    }


def session_times_s(outcome: Outcome, sessions: Sessions) -> tuple[Float64Array, BoolArray]:
    """How long each session lasted (float64[sessions]) and whether all its turns were served (bool[sessions])."""
    whole = np.bincount(sessions.session, ~outcome.served, sessions.count) == 0
    return _session_ends_s(outcome, sessions) - _session_starts_s(outcome, sessions), whole


def _session_starts_s(outcome: Outcome, sessions: Sessions) -> Float64Array:
    starts = np.full(sessions.count, np.inf)
    np.minimum.at(starts, sessions.session, outcome.workload.arrival_s)
    return starts


def _session_ends_s(outcome: Outcome, sessions: Sessions) -> Float64Array:
    ends = np.zeros(sessions.count)
    np.maximum.at(ends, sessions.session, outcome.finished_ns / NS_PER_S)
    return ends


def full_load_s(outcome: Outcome, sessions: Sessions) -> tuple[float, float]:
    """From the start of the first session until the last one has started and the next one has ended, in seconds."""
    starts, ends = _session_starts_s(outcome, sessions), _session_ends_s(outcome, sessions)
    return float(starts.min()), float(ends[ends > starts.max()].min())


def alone_s(outcome: Outcome, sessions: Sessions) -> Float64Array:
    """float64[sessions], how long each session lasts alone on the engine, with all that it sent before cached."""
    workload, cost = outcome.workload, outcome.setup.profile.cost()
    ends = np.zeros(len(workload))
    last = np.zeros(sessions.count)
    for index, place in enumerate(sessions.session.tolist()):
        sent = max((ends[one] for one in sessions.waits_for(index)), default=0.0) + sessions.gap_s[index]
        prompt, output = int(workload.prompt_tokens[index]), int(workload.output_tokens[index])
        ends[index] = sent + turn_alone_s(cost, int(sessions.reusable[index]), prompt, output)
        last[place] = max(last[place], ends[index])
    return last


def turn_alone_s(cost: LinearCost, cached: int, prompt: int, output: int) -> float:
    """Seconds of a turn on the idle engine whose first `cached` prompt tokens are cached."""
    seconds = 0.0
    for begin in range(cached, prompt, CHUNK_TOKENS):
        work = StepWork()
        work.add_chunk(begin, min(CHUNK_TOKENS, prompt - begin))
        seconds += cost.step(work)
    contexts: Int64Array = prompt + np.arange(1, output, dtype=np.int64)
    return seconds + (float(cost.decodes(1, contexts).sum()) if len(contexts) else 0.0)


def _group(outcome: Outcome, sessions: Sessions, first: int, last: int | None) -> dict[str, Any]:
    """TTFT and hits of the turns with an index from `first` to `last`."""
    mask = outcome.served & (sessions.turn >= first)
    if last is not None:
        mask &= sessions.turn <= last
    return {
        "turns": f"{first}" if first == last else f"{first}-{last}" if last is not None else f"{first}-",
        "count": int(mask.sum()),
        "ttft_s": _quantiles(outcome.ttft_s[mask]),
        "hit_share": _hit_share(outcome, mask),
    }


def _hit_share(outcome: Outcome, mask: BoolArray) -> float | None:
    """The share of the prompt tokens of these requests that were cached; None for no request."""
    tokens = int(outcome.workload.prompt_tokens[mask].sum(dtype=np.int64))
    return _rounded(int(outcome.cached_tokens[mask].sum(dtype=np.int64)) / tokens) if tokens else None


def _quantiles(values: Float64Array) -> dict[str, float | None]:
    if not len(values):
        return {"p50": None, "p95": None, "p99": None}
    return {f"p{at}": _rounded(float(np.percentile(values, at))) for at in (50, 95, 99)}


def _mean(values: Float64Array) -> float | None:
    return _rounded(float(values.mean())) if len(values) else None


def _rounded(value: float) -> float:
    return round(value, 6)
