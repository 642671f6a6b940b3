"""Metrics of the KV store, of paused requests and of KV transfer between engines."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prometheus_client.core import Metric as MetricFamily

from tokenyard.base.metric import Metric
from tokenyard.server.metrics.table import KV_STORE, KV_TRANSFER, PAUSED, family

_TRANSFERS = "kv_transfer_"
_NO_OUTCOMES = {metric.key.removeprefix(_TRANSFERS) for metric in KV_TRANSFER}


def kv_families(model: str, snapshot: Mapping[str, Any]) -> Iterable[MetricFamily]:
    """Metric families from a scheduler snapshot; none for features that are off."""
    stores, transfers = snapshot.get("kv_store", {}), snapshot.get("transfer", {})
    if stores:
        *by_rank, unstored = KV_STORE
        yield from _families("hicache_", model, stores, by_rank)
        found = family(unstored)
        found.add_metric([model], snapshot.get("unstored_tokens", 0))
        yield found
    if (paused := snapshot.get("paused_requests")) is not None:
        yield from _families("paused_", model, {"rank 0": paused}, PAUSED)
    if not transfers:
        return
    *by_rank, by_outcome = KV_TRANSFER
    yield from _families(_TRANSFERS, model, transfers, by_rank)
    ends = family(by_outcome)
    for rank, counters in transfers.items():
        for outcome, times in _outcomes(counters).items():
            ends.add_metric([model, _number(rank), outcome], times)
    yield ends


def _outcomes(counters: Mapping[str, Any]) -> dict[str, int]:
    """Transfers of a rank by outcome, without the cause behind a colon, which would be an unbounded label."""
    outcomes: dict[str, int] = {}
    for name, value in counters.items():
        counts = isinstance(value, int) and not isinstance(value, bool)
        if counts and name not in _NO_OUTCOMES:
            outcome = name.partition(":")[0]
            outcomes[outcome] = outcomes.get(outcome, 0) + value
    return outcomes


def _families(prefix: str, model: str, ranks: Mapping[str, Any], metrics: Sequence[Metric]) -> Iterable[MetricFamily]:
    """One family per metric, with the value that each rank reports under the metric's key without `prefix`."""
    for metric in metrics:
        found, key = family(metric), metric.key.removeprefix(prefix)
        for rank, counters in ranks.items():
            found.add_metric([model, _number(rank)], counters.get(key, 0))
        yield found


def _number(rank: str) -> str:
    return rank.removeprefix("rank ")
