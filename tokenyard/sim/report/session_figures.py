"""The figures of a run of sessions."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from tokenyard.base import NS_PER_S, BoolArray, Float64Array, Int32Array, Int64Array, StepWork
from tokenyard.cost import LinearCost
from tokenyard.sim.outcome import Outcome
from tokenyard.sim.traces.sessions import S_PER_HOUR, Sessions

CHUNK_TOKENS = 8192
"""Chunks of the prefill of a session that has the engine to itself."""

TURN_GROUPS = ((0, 0), (1, 4), (5, 9), (10, 24), (25, 49), (50, None))
"""Turns of a conversation that are reported together, as first and last index; None for no end."""


@dataclass(frozen=True, slots=True)
class TurnTimes:
    """What became of each turn of a run, simulated or on a server, as columns by request."""

    sessions: Sessions
    """The sessions that ran."""
    prompt_tokens: Int32Array
    """int32[n]."""
    completion_tokens: Int32Array
    """int32[n], tokens of the answers."""
    cached_tokens: Int32Array
    """int32[n], prompt tokens that were cached."""
    served: BoolArray
    """bool[n], whether the answer is complete."""
    arrival_s: Float64Array
    """float64[n], when the turn was sent."""
    first_token_s: Float64Array
    """float64[n], when its first token came."""
    finished_s: Float64Array
    """float64[n], when it ended."""

    @property
    def starts_s(self) -> Float64Array:
        """float64[sessions], the arrival of each session's first turn."""
        starts = np.full(self.sessions.count, np.inf)
        np.minimum.at(starts, self.sessions.session, self.arrival_s)
        return starts

    @property
    def ends_s(self) -> Float64Array:
        """float64[sessions], the end of each session's last turn."""
        ends = np.zeros(self.sessions.count)
        np.maximum.at(ends, self.sessions.session, self.finished_s)
        return ends

    @property
    def whole(self) -> BoolArray:
        """bool[sessions], whether all turns of a session were served."""
        whole: BoolArray = np.bincount(self.sessions.session, ~self.served, self.sessions.count) == 0
        return whole

    @property
    def full_load_s(self) -> tuple[float, float]:
        """From the start of the first session until the last one has started and the next one has ended, in seconds."""
        starts, ends = self.starts_s, self.ends_s
        later = ends[ends > starts.max()]
        return float(starts.min()), float(later.min() if len(later) else ends.max())


def turn_times(outcome: Outcome) -> TurnTimes:
    """The turns of a simulated run of sessions."""
    sessions = outcome.workload.sessions
    assert sessions is not None
    return TurnTimes(
        sessions,
        outcome.workload.prompt_tokens,
        outcome.completion_tokens,
        outcome.cached_tokens,
        outcome.served,
        outcome.workload.arrival_s,
        outcome.first_token_ns / NS_PER_S,
        outcome.finished_ns / NS_PER_S,
    )


def session_figures(outcome: Outcome) -> dict[str, Any]:
    """`figures_of` a simulated run, with what a server does not tell.

    A session's slowdown is its time over that alone on the engine, with the same gaps and everything that it sent
    before still cached. A turn waits from its arrival to its first admission.
    """
    turns = turn_times(outcome)
    alone, whole = alone_s(outcome, turns.sessions), turns.whole
    waits = ((outcome.admitted_ns - outcome.arrival_ns) / NS_PER_S)[outcome.served]
    return {
        **figures_of(turns),
        "mean_slowdown": _mean((turns.ends_s - turns.starts_s)[whole] / np.maximum(alone[whole], 1e-9)),
        "longest_wait_s": _rounded(float(waits.max(initial=0.0))),
    }


def figures_of(turns: TurnTimes) -> dict[str, Any]:
    """The figures of the sessions of a run. Times are in seconds, shares from 0 to 1.

    Rates count within the time of full load: until the last session has started and the next one has ended. A session
    lasts from the arrival of its first turn to its last token. `hit_share` is the share of prompt tokens that were
    cached; `recomputed_tokens` had been sent before in the session and were not cached any more.
    """
    sessions, served, whole = turns.sessions, turns.served, turns.whole
    spans, ends = (turns.ends_s - turns.starts_s)[whole], turns.ends_s[whole]
    begin_s, end_s = turns.full_load_s
    seconds = max(end_s - begin_s, 1e-9)
    within = served & (turns.finished_s <= end_s)
    cached = np.minimum(turns.cached_tokens, turns.prompt_tokens).astype(np.int64)
    return {
        "sessions": sessions.count,
        "finished": int(whole.sum()),
        "turns": len(served),
        "turns_per_hour": _rounded(int(within.sum()) / seconds * S_PER_HOUR),
        "sessions_per_hour": _rounded(int((ends <= end_s).sum()) / seconds * S_PER_HOUR),
        "output_tokens_per_s": _rounded(float(turns.completion_tokens[within].sum()) / seconds),
        "full_load_s": _rounded(end_s - begin_s),
        "mean_session_s": _mean(spans),
        "session_s": _quantiles(spans),
        "ttft_s": _quantiles((turns.first_token_s - turns.arrival_s)[served]),
        "hit_share": _hit_share(turns, served),
        "recomputed_tokens": int(np.maximum(sessions.reusable - cached, 0)[served].sum(dtype=np.int64)),
        "by_turn": [_group(turns, first, last) for first, last in TURN_GROUPS],
    }


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


def _group(turns: TurnTimes, first: int, last: int | None) -> dict[str, Any]:
    """TTFT and hits of the turns with an index from `first` to `last`."""
    mask = turns.served & (turns.sessions.turn >= first)
    if last is not None:
        mask &= turns.sessions.turn <= last
    return {
        "turns": f"{first}" if first == last else f"{first}-{last}" if last is not None else f"{first}-",
        "count": int(mask.sum()),
        "ttft_s": _quantiles((turns.first_token_s - turns.arrival_s)[mask]),
        "hit_share": _hit_share(turns, mask),
    }


def _hit_share(turns: TurnTimes, mask: BoolArray) -> float | None:
    """The share of the prompt tokens of these requests that were cached; None for no request."""
    tokens = int(turns.prompt_tokens[mask].sum(dtype=np.int64))
    return _rounded(int(turns.cached_tokens[mask].sum(dtype=np.int64)) / tokens) if tokens else None


def _quantiles(values: Float64Array) -> dict[str, float | None]:
    if not len(values):
        return {"p50": None, "p95": None, "p99": None}
    return {f"p{at}": _rounded(float(np.percentile(values, at))) for at in (50, 95, 99)}


def _mean(values: Float64Array) -> float | None:
    return _rounded(float(values.mean())) if len(values) else None


def _rounded(value: float) -> float:
    return round(value, 6)
