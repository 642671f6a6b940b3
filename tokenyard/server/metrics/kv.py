"""Metrics of the KV store, of paused requests and of KV transfer between engines."""

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

_STORE_GAUGES = {
    "blocks": "blocks of KV in the KV store",
    "stored_bytes": "bytes that the blocks in the KV store take",
    "storing": "prefixes whose pages are held until their KV is stored",
    "loading": "requests that wait for KV from the store",
    "read_bytes_per_s": "recent read bandwidth of the store",
}
_STORE_TOTALS = {
    "written_bytes": "bytes of KV written to the store",
    "loaded_bytes": "bytes of KV loaded from the store",
    "loaded_tokens": "tokens of KV loaded from the store",
    "hit_requests": "requests with KV in the store that was worth loading",
    "recomputed_requests": "requests whose KV in the store was slower to load than to recompute",
    "swapped_in_requests": "retracted requests whose KV was loaded back from the store",
    "failed_loads": "loads that ended early because a block was gone, damaged or unreadable",
    "late_loads": "loads that took too long",
    "failed_writes": "blocks that could not be written",
    "dropped_blocks": "blocks that were not stored because a write failed",
    "damaged": "blocks in the store that failed their checksum",
    "evicted": "blocks evicted from the store",
}
_PAUSED_GAUGES = {"records": "paused requests that have a record on disk"}
_PAUSED_TOTALS = {
    "kept": "records of paused requests written to disk",
    "resumed": "requests resumed from their records",
    "displaced": "records evicted by newer ones",
    "unusable": "records that were damaged, of another model or of a newer version",
    "failed": "paused requests whose record could not be written",
}
_TRANSFER_GAUGES = {
    "open": "prompts that prefill peers compute for this engine",
    "computing_for_others": "prompts that this engine computes for decode peers",
    "held_for_others": "prompts whose KV is held for decode peers",
}
_TRANSFER_TOTALS = {"moved_bytes": "bytes of KV received from other engines"}


def kv_families(model: str, snapshot: Mapping[str, Any]) -> Iterable[Metric]:
    """Metric families from a scheduler snapshot; none for features that are off."""
    stores, transfers = snapshot.get("kv_store", {}), snapshot.get("transfer", {})
    if stores:
        yield from _families("tokenyard_hicache_", model, stores, _STORE_GAUGES, _STORE_TOTALS)
        name, text = "tokenyard_hicache_unstored_tokens", "tokens of KV that were evicted before they were stored"
        unstored = CounterMetricFamily(name, text, labels=["model"])
        unstored.add_metric([model], snapshot.get("unstored_tokens", 0))
        yield unstored
    if (paused := snapshot.get("paused_requests")) is not None:
        yield from _families("tokenyard_paused_", model, {"rank 0": paused}, _PAUSED_GAUGES, _PAUSED_TOTALS)
    if not transfers:
        return
    yield from _families("tokenyard_kv_transfer_", model, transfers, _TRANSFER_GAUGES, _TRANSFER_TOTALS)
    ends = CounterMetricFamily("tokenyard_kv_transfers", "KV transfers by outcome", labels=["model", "rank", "outcome"])
    for rank, counters in transfers.items():
        for outcome, times in _outcomes(counters).items():
            ends.add_metric([model, _number(rank), outcome], times)
    yield ends


def _outcomes(counters: Mapping[str, Any]) -> dict[str, int]:
    """Transfers of a rank by outcome, without the cause behind a colon, which would be an unbounded label."""
    outcomes: dict[str, int] = {}
    for name, value in counters.items():
        counts = isinstance(value, int) and not isinstance(value, bool)
        if counts and name not in _TRANSFER_GAUGES and name not in _TRANSFER_TOTALS:
            outcome = name.partition(":")[0]
            outcomes[outcome] = outcomes.get(outcome, 0) + value
    return outcomes


def _families(
    prefix: str, model: str, ranks: Mapping[str, Any], gauges: Mapping[str, str], totals: Mapping[str, str]
) -> Iterable[Metric]:
    kinds = ((gauges, GaugeMetricFamily), (totals, CounterMetricFamily))
    for names, kind in kinds:
        for name, text in names.items():
            family = kind(prefix + name, text, labels=["model", "rank"])
            for rank, counters in ranks.items():
                family.add_metric([model, _number(rank)], counters.get(name, 0))
            yield family


def _number(rank: str) -> str:
    return rank.removeprefix("rank ")
