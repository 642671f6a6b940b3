"""Figures per scheduler of a fleet: its share of the requests, its queue, its cache, its device."""

from typing import Any

import numpy as np

from tokenyard.base import NS_PER_S, BoolArray, Float64Array, Int64Array
from tokenyard.sim.outcome import Outcome

CURVE_POINTS = 400


def worker_names(outcome: Outcome) -> list[str]:
    """Names of a fleet's schedulers: r0, r1, ... or, with several ranks, r0@0, r0@1, ..., then prefill engines p0, p1,
    ...
    """
    setup = outcome.setup
    prefill = [] if setup.disagg is None else [f"p{number}" for number in range(setup.disagg.prefill_replicas)]
    ranks = [f"@{rank}" for rank in range(setup.dp_size)] if setup.dp_size > 1 else [""]
    return [f"r{replica}{rank}" for replica in range(setup.replicas) for rank in ranks] + prefill


def worker_figures(outcome: Outcome) -> list[dict[str, Any]]:
    """One row of figures per scheduler. Shares are from 0 to 1, times in seconds; None where it served nothing.

    waiting and running are its requests, on average over the run and at most. A retracted request counts as running.
    For a prefill engine they are the prompts assigned to it.
    """
    seconds = max(outcome.sim_seconds, 1e-9)
    rows = []
    for number, (name, run) in enumerate(zip(worker_names(outcome), outcome.schedulers, strict=True)):
        replica = number // outcome.setup.dp_size
        here, sent_ns, admitted_ns, ended_ns = _times_at(outcome, number)
        served = here & outcome.served & (admitted_ns > 0)
        rows.append(
            {
                "name": name,
                "device": outcome.setup.profile_of(replica).name,
                "requests": int(here.sum()),
                "share": float(here.sum()) / max(int((outcome.place >= 0).sum()), 1),
                "hit_rate": run.counters["hit_tokens"] / max(run.counters["prompt_tokens"], 1),
                "busy": run.busy_s / seconds,
                "ttft_p50_s": _quantile(outcome.ttft_s[served], 0.5),
                "ttft_p99_s": _quantile(outcome.ttft_s[served], 0.99),
                "slo_attainment": float(outcome.met[here].mean()) if here.any() else None,
                "waiting": _load(sent_ns, admitted_ns, served, seconds),
                "running": _load(admitted_ns, ended_ns, served, seconds),
                "preemptions": run.counters["preempted"] + run.counters["retracted"],
                "restarts": run.restarts,
            }
        )
    return rows


def _times_at(outcome: Outcome, number: int) -> tuple[BoolArray, Int64Array, Int64Array, Int64Array]:
    """The requests of a scheduler, and when they arrived, were admitted and ended there."""
    transfers = outcome.transfers
    if transfers is None or number < outcome.setup.replicas * outcome.setup.dp_size:
        return outcome.place == number, outcome.sent_ns, outcome.admitted_ns, outcome.finished_ns
    return transfers.prefill == number, transfers.sent_ns, transfers.admitted_ns, transfers.computed_ns


def router_queue(outcome: Outcome) -> dict[str, float | int]:
    """Number of requests that waited at the routers, on average over the run and at most, and of those that were
    refused.
    """
    sent = outcome.place >= 0
    waited = sent & (outcome.sent_ns > outcome.arrival_ns)
    load = _load(outcome.arrival_ns, outcome.sent_ns, waited, max(outcome.sim_seconds, 1e-9))
    return {**load, "waited": int(waited.sum()), "refused": int((~sent & (outcome.finished_ns > 0)).sum())}


def load_curve(begin_ns: Int64Array, end_ns: Int64Array, which: BoolArray) -> tuple[Float64Array, Float64Array]:
    """Number of the requests `which` that are between begin and end, over time.

    Returns (seconds, count), at most 400 points, each the largest count since the point before.
    """
    times = np.concatenate((begin_ns[which], end_ns[which]))
    steps = np.concatenate((np.ones(int(which.sum())), -np.ones(int(which.sum()))))
    order = np.lexsort((steps, times))
    at_s: Float64Array = times[order] / NS_PER_S
    counts: Float64Array = np.cumsum(steps[order])
    if len(at_s) <= CURVE_POINTS:
        return at_s, counts
    cuts = np.unique(np.linspace(0, len(at_s), CURVE_POINTS, endpoint=False).astype(np.int64))
    most: Float64Array = np.maximum.reduceat(counts, cuts)
    return at_s[cuts], most


def _load(begin_ns: Int64Array, end_ns: Int64Array, which: BoolArray, seconds: float) -> dict[str, float]:
    """Mean and maximum of `load_curve`."""
    _, counts = load_curve(begin_ns, end_ns, which)
    mean = float((end_ns - begin_ns)[which].sum()) / NS_PER_S / seconds
    return {"mean": mean, "max": float(counts.max()) if len(counts) else 0.0}


def _quantile(values: Float64Array, share: float) -> float | None:
    return float(np.quantile(values, share)) if len(values) else None
