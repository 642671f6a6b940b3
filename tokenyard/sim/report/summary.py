"""The results of a run in numbers: the fields of `OUT.json`."""

from dataclasses import asdict
from typing import Any

import numpy as np

from tokenyard.base import NS_PER_S, BoolArray, Float64Array, Int32Array
from tokenyard.sim.kv.kv_store import KvStoreTotals
from tokenyard.sim.kv.transfer_figures import transfer_figures
from tokenyard.sim.outcome import REJECTED, UNFINISHED, Outcome
from tokenyard.sim.report.scheduler_figures import router_queue, worker_figures
from tokenyard.sim.report.session_figures import session_figures

QUANTILES = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p999", 0.999), ("max", 1.0))


def quantiles(values: Float64Array) -> dict[str, float | None]:
    """mean, p50, p90, p99, p999 and max of the values that are not NaN; None where there is none."""
    known = values[~np.isnan(values)]
    if not len(known):
        return dict.fromkeys(("mean", *(name for name, _ in QUANTILES)))
    found = np.quantile(known, [share for _, share in QUANTILES])
    named = {name: round(float(value), 6) for (name, _), value in zip(QUANTILES, found, strict=True)}
    return {"mean": round(float(known.mean()), 6), **named}


def share(mask: BoolArray) -> float | None:
    """The share of `mask` that is True; None if it is empty."""
    return round(float(mask.mean()), 6) if len(mask) else None


def wait_s(outcome: Outcome) -> Float64Array:
    """float64[n], time to first token beyond the unloaded prefill; NaN for requests that did not finish."""
    return outcome.ttft_s - outcome.unloaded_s


def length_classes(outcome: Outcome) -> dict[str, BoolArray]:
    """Masks over the requests by prompt length: the quartiles, shortest first, and the longest 5 %.

    If more requests than that are as long as the longest, the class is all of them.
    """
    lengths = outcome.workload.prompt_tokens
    low, middle, high, top = np.quantile(lengths, (0.25, 0.5, 0.75, 0.95))
    return {
        "shortest_quarter": lengths <= low,
        "second_quarter": (lengths > low) & (lengths <= middle),
        "third_quarter": (lengths > middle) & (lengths <= high),
        "longest_quarter": _longer(lengths, high),
        "longest_5_percent": _longer(lengths, top),
    }


def _longer(lengths: Int32Array, edge: float) -> BoolArray:
    longer: BoolArray = lengths > edge
    return longer if longer.any() else lengths >= edge


def summary(outcome: Outcome) -> dict[str, Any]:
    """The run as one JSON object. Times are in seconds, shares from 0 to 1, lengths in tokens."""
    workload, counters = outcome.workload, outcome.counters
    seconds = max(outcome.sim_seconds, 1e-9)
    transferred = {} if outcome.transfers is None else {"transfers": transfer_figures(outcome.transfers, seconds)}
    computed = int(outcome.completion_tokens.sum()) + counters["prefill_tokens"]
    return {
        "trace": workload.name,
        "rate_per_s": round(len(workload) / max(workload.span_s, 1e-9), 6),
        "slo": asdict(outcome.setup.slo),
        "profile": outcome.setup.profile.name,
        "profile_error": outcome.setup.profile.error,
        "profile_source": outcome.setup.profile.source,
        "profile_measured": outcome.setup.profile.measured,
        "warning": outcome.setup.profile.warning,
        "policy": outcome.setup.settings.schedule_policy,
        "policy_note": outcome.policy_note,
        "replicas": outcome.setup.replicas,
        **({} if outcome.setup.disagg is None else {"prefill_replicas": outcome.setup.disagg.prefill_replicas}),
        "dp_size": outcome.setup.dp_size,
        "requests": len(workload),
        "unknown_lengths": workload.unknown_lengths,
        "trace_notes": workload.notes + _too_long(outcome),
        "finished": int(outcome.served.sum()),
        "rejected": int((outcome.status == REJECTED).sum()),
        "unfinished": int((outcome.status == UNFINISHED).sum()),
        "cut_short": int((outcome.served & (np.maximum(outcome.completion_tokens, 1) < workload.output_tokens)).sum()),
        "slo_attainment": share(outcome.met),
        "slo_attainment_by_length": {name: share(outcome.met[mask]) for name, mask in length_classes(outcome).items()},
        "slo_attainment_by_class": _by_name(outcome, workload.classes, workload.service_class),
        "slo_attainment_by_tenant": _by_name(outcome, workload.tenants, workload.tenant),
        "ttft_s": quantiles(outcome.ttft_s),
        "tpot_s": quantiles(outcome.tpot_s),
        "e2e_s": quantiles(outcome.e2e_s),
        "wait_s": quantiles(wait_s(outcome)),
        "late_s": quantiles(outcome.late_s),
        "throughput_tokens_per_s": round(float(outcome.completion_tokens.sum()) / seconds, 3),
        "computed_tokens_per_s": round(computed / seconds, 3),
        "prefix_hit_rate": round(hit_rate(outcome), 6),
        "preemptions": counters["preempted"] + counters["retracted"],
        "recomputed_tokens": counters["recomputed_tokens"],
        **_drafts(outcome),
        "utilisation": round(outcome.busy_seconds / seconds / outcome.setup.schedulers, 6),
        "policy_changes": [
            {"at_s": round(one.at_ns / NS_PER_S, 6), "candidate": one.candidate, "reason": one.reason}
            for one in outcome.switches
        ],
        "steps": counters["steps"],
        "sim_seconds": round(outcome.sim_seconds, 6),
        "wall_seconds": round(outcome.wall_seconds, 3),
        "decision_hash": outcome.decision_hash,
        **transferred,
        **_kv_store(outcome),
        **({} if workload.sessions is None else {"sessions": session_figures(outcome)}),
    }


def _too_long(outcome: Outcome) -> list[str]:
    """A sentence on the prompts that do not fit the context, if any."""
    context = outcome.setup.settings.context_length
    count = int((outcome.workload.prompt_tokens >= context).sum())
    fit, are = ("prompt does", "is") if count == 1 else ("prompts do", "are")
    told = f"{count} {fit} not fit the context of {context} tokens and {are} refused (--context-length)"
    return [told] if count else []


def _kv_store(outcome: Outcome) -> dict[str, Any]:
    """The figures of the KV store, repeated under `tiers`, their former key; empty without a KV store."""
    if outcome.kv_store is None:
        return {}
    figures = kv_store_figures(outcome.kv_store, outcome.counters["prompt_tokens"])
    return {"kv_store": figures, "tiers": figures}


def kv_store_figures(kv_store: KvStoreTotals, prompt_tokens: int) -> dict[str, Any]:
    """Figures of the KV store. hit_rate: the share of the prompts' tokens that was loaded from it."""
    return {
        "hit_rate": round(kv_store.loaded / max(prompt_tokens, 1), 6),
        "loaded_tokens": kv_store.loaded,
        "loaded_tokens_from_disk": kv_store.loaded_from_disk,
        "stored_tokens": kv_store.stored,
        "unstored_tokens": kv_store.unstored,
        "hit_requests": kv_store.hit,
        "recomputed_requests": kv_store.recomputed,
        "late_loads": kv_store.late,
        "blocks": kv_store.blocks,
        "evicted_blocks": kv_store.evicted,
    }


def hit_rate(outcome: Outcome) -> float:
    """The share of prompt tokens that hit the prefix cache of the scheduler that computed them.

    KV from a prefill engine is not a hit.
    """
    transfers, runs = outcome.transfers, outcome.schedulers
    if transfers is None:
        return outcome.counters["hit_tokens"] / max(outcome.counters["prompt_tokens"], 1)
    here = outcome.served & (transfers.prefill < 0)
    there = [run.counters for run in runs[outcome.setup.replicas :]]
    hits = int(outcome.cached_tokens[here].sum()) + sum(one["hit_tokens"] for one in there)
    tokens = int(outcome.workload.prompt_tokens[here].sum()) + sum(one["prompt_tokens"] for one in there)
    return hits / max(tokens, 1)


def _drafts(outcome: Outcome) -> dict[str, Any]:
    """Figures of speculative decoding: tokens verified and accepted, and the tokens that a row yields per verifying
    step.

    The last is None if there was no such step.
    """
    if outcome.setup.speculation is None:
        return {}
    rows, accepted = outcome.counters["verify_rows"], outcome.counters["accepted_draft_tokens"]
    return {
        "draft_tokens": outcome.counters["draft_tokens"],
        "accepted_draft_tokens": accepted,
        "tokens_per_verify": round(1.0 + accepted / rows, 6) if rows else None,
    }


def fleet_summary(outcome: Outcome) -> dict[str, Any]:
    """`summary`, with figures per scheduler if there are several, and those of an autoscaler."""
    figures = summary(outcome) | _scaling(outcome)
    if outcome.setup.schedulers == 1:
        return figures
    return figures | {"router_queue": router_queue(outcome), "workers": worker_figures(outcome)}


def _scaling(outcome: Outcome) -> dict[str, Any]:
    """The figures of the autoscaler; empty without one. An engine counts from its start to its end."""
    scaling, settings = outcome.scaling, outcome.setup.fleet.autoscale
    if scaling is None or settings is None:
        return {}
    return {
        "autoscaling": {
            "rule": settings.rule if isinstance(settings.rule, str) else "user-defined",
            "mean_replicas": round(scaling.engine_s / max(outcome.sim_seconds, 1e-9), 4),
            "max_replicas": max(ready + starting for _, ready, starting, _ in scaling.timeline),
            "engine_hours": round(scaling.engine_s / 3600.0, 4),
            "cost": round(scaling.engine_s / 3600.0 * settings.price, 4),
            "starts": scaling.starts,
            "stops": scaling.stops,
            "timeline": [list(point) for point in scaling.timeline],
        }
    }


def _by_name(outcome: Outcome, names: tuple[str, ...], column: Any) -> dict[str, float | None]:
    """Attainment by class or tenant, for those that have requests and a name; at most the first 50."""
    found = {name: column == index for index, name in enumerate(names[:51]) if name}
    return {name: share(outcome.met[mask]) for name, mask in found.items() if mask.any()}
