"""What moves KV beside the steps, as metrics: the KV store, and transfer between engines."""

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

_TIER_GAUGES = {
    "blocks": "blocks of KV in the KV store",
    "stored_bytes": "bytes that they take",
    "storing": "prefixes whose pages are held until they are stored",
    "loading": "requests that wait for KV from the store",
    "read_bytes_per_s": "speed at which KV was read from the store lately",
}
_TIER_TOTALS = {
    "written_bytes": "bytes of KV written to the store",
    "loaded_bytes": "bytes of KV loaded from the store",
    "loaded_tokens": "tokens of KV loaded from the store",
    "hit_requests": "requests of which the store held KV that was worth loading",
    "recomputed_requests": "requests of which it held KV that was faster to compute",
    "swapped_in_requests": "requests that had lost their place and got their KV back from the store",
    "failed_loads": "loads that ended early because a block was gone, damaged or unreadable",
    "late_loads": "loads that took too long",
    "failed_writes": "blocks that could not be written",
    "dropped_blocks": "blocks that were not stored because of that",
    "damaged": "blocks in the store whose bytes were not what had been written",
    "evicted": "blocks that made way for others",
}
_PAUSED_GAUGES = {"records": "paused requests that have a record on disk"}
_PAUSED_TOTALS = {
    "kept": "records written of paused requests",
    "resumed": "requests resumed from their records",
    "displaced": "records that made way for others",
    "unusable": "records that were damaged, of another model or of a newer version",
    "failed": "paused requests whose record could not be written",
}
_TRANSFER_GAUGES = {
    "open": "prompts that other engines compute for this one",
    "computing_for_others": "prompts that this engine computes for others",
    "held_for_others": "prompts whose KV is kept for others",
}
_TRANSFER_TOTALS = {"moved_bytes": "bytes of KV that came from other engines"}


def kv_families(model: str, snapshot: Mapping[str, Any]) -> Iterable[Metric]:
    """The families for what a snapshot says of the KV store and of transfers; none for what is switched off."""
    tiers, transfers = snapshot.get("tiers", {}), snapshot.get("transfer", {})
    if tiers:
        yield from _families("tokenyard_hicache_", model, tiers, _TIER_GAUGES, _TIER_TOTALS)
        name, text = "tokenyard_hicache_unstored_tokens", "tokens of KV that were evicted before they were stored"
        unstored = CounterMetricFamily(name, text, labels=["model"])
        unstored.add_metric([model], snapshot.get("unstored_tokens", 0))
        yield unstored
    if (paused := snapshot.get("paused_requests")) is not None:
        yield from _families("tokenyard_paused_", model, {"rank 0": paused}, _PAUSED_GAUGES, _PAUSED_TOTALS)
    if not transfers:
        return
    yield from _families("tokenyard_kv_transfer_", model, transfers, _TRANSFER_GAUGES, _TRANSFER_TOTALS)
    ends = CounterMetricFamily(
        "tokenyard_kv_transfers", "prompts by what came of asking or being asked", labels=["model", "rank", "outcome"]
    )
    for rank, told in transfers.items():
        for outcome, times in _outcomes(told).items():
            ends.add_metric([model, _number(rank), outcome], times)
    yield ends


def _outcomes(told: Mapping[str, Any]) -> dict[str, int]:
    """What became of the prompts of a rank; causes of failures, which are any text, are one outcome."""
    outcomes: dict[str, int] = {}
    for name, value in told.items():
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
            for rank, told in ranks.items():
                family.add_metric([model, _number(rank)], told.get(name, 0))
            yield family


def _number(rank: str) -> str:
    return rank.removeprefix("rank ")
