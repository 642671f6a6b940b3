"""Load of the engine for routers and planners: `/v1/loads` as JSON or Prometheus text."""

from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from tokenyard.base import InvalidRequestError

SECTIONS = ("core", "memory", "queues", "disagg", "spec")
DEFAULT_SECTIONS = "core,queues"
MEMORY = ("used_tokens", "cached_tokens", "total_tokens", "evicted_tokens", "new_token_ratio")
DEFERRED = "deferred"
"""The only measure of a policy that is a counter; the others are gauges."""

DEPRECATED_GAUGES = {"relegated_requests": "deferred_requests"}
DEPRECATED_TOTALS = {"relegated": DEFERRED}
"""Old name -> its new name. Reports carry both names until the next release."""

FORMATS = ("json", "prometheus")


def load_of(snapshot: Mapping[str, Any]) -> dict[str, float]:
    """Gauges by our names, from a scheduler snapshot."""
    used, total = snapshot.get("used_tokens", 0), snapshot.get("total_tokens", 0)
    error = snapshot.get("step_time_error")
    measures = snapshot.get("measures", {})
    return {
        "running_requests": snapshot.get("running", 0),
        "queued_requests": snapshot.get("waiting", 0),
        "used_tokens": used,
        "total_tokens": total,
        "token_usage": used / total if total else 0.0,
        "queued_tokens": snapshot.get("queued_tokens", 0),
        "queued_seconds": snapshot.get("queued_s", 0.0),
        **{name: value for name, value in measures.items() if name != DEFERRED},
        **{old: measures[name] for old, name in DEPRECATED_GAUGES.items() if name in measures},
        **({} if error is None else {"step_time_error_ratio": error}),
    }


def wanted_sections(include: str) -> list[str]:
    """The sections in a comma-separated list; "all" means every one. Raises InvalidRequestError for unknown names."""
    names = [name.strip() for name in include.split(",") if name.strip()]
    for name in names:
        if name not in (*SECTIONS, "all"):
            raise InvalidRequestError(f"include takes {', '.join(SECTIONS)} and all, not {name!r}", param="include")
    return list(SECTIONS) if "all" in names else names


def sections_of(snapshot: Mapping[str, Any], wanted: list[str], rank: int = 0) -> dict[str, Any]:
    """The wanted sections of a rank. Core fields are at the top level; sections that this engine lacks are null."""
    found: dict[str, Any] = {"dp_rank": rank}
    if "core" in wanted:
        found |= load_of(snapshot)
    if "memory" in wanted:
        found["memory"] = {name: snapshot[name] for name in MEMORY if name in snapshot}
    if "queues" in wanted:
        found["queues"] = dict(snapshot)
    found |= {name: None for name in ("disagg", "spec") if name in wanted}
    return found


def as_prometheus(ranks: Sequence[Mapping[str, Any]]) -> bytes:
    """All numbers of each rank's sections as gauges, `tokenyard_load_<section>_<name>`, labelled with the rank."""
    registry, gauges = CollectorRegistry(auto_describe=False), dict[str, Gauge]()
    for sections in ranks:
        for name, value in _numbers(sections, "tokenyard_load"):
            if name not in gauges:
                gauges[name] = Gauge(name, "load of the engine", ["dp_rank"], registry=registry)
            gauges[name].labels(str(sections["dp_rank"])).set(value)
    return generate_latest(registry)


def _numbers(values: Mapping[str, Any], prefix: str) -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            found += _numbers(value, f"{prefix}_{name}")
        elif isinstance(value, int | float) and name != "dp_rank":
            found.append((f"{prefix}_{name}", float(value)))
    return found
