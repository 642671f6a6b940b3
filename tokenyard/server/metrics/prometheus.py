"""Prometheus metrics of the API process.

Counters come from the output deltas and from the scheduler's snapshot at each scrape. No work is done per waiting
request or per step. Labels are bounded: no request ids and no tenant names, and service classes by their level.
"""

import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric as MetricFamily
from prometheus_client.registry import Collector

from tokenyard.base import NS_PER_S, Finish, FinishReason
from tokenyard.engine.frontend.input_processor import LEVEL_NAMES, level_name
from tokenyard.engine.frontend.io_struct import GenerateReqInput, OutputDelta
from tokenyard.engine.scheduler_process.health.slo_attainment import ON_PURPOSE, met_slo, stage_at_deadline, targets_met
from tokenyard.server.metrics.kv import kv_families
from tokenyard.server.metrics.processes import ProcessUsage
from tokenyard.server.metrics.table import (
    BY_CLASS,
    COMPAT,
    ENGINE,
    LOOKAHEAD,
    PREFIX,
    RANK,
    SGLANG_STAGES,
    TP_RANK,
    VLLM_CACHE_CONFIG,
    family,
)

THROUGHPUT = "generation_throughput"
GENERATION_TOKENS = ("generation_tokens", ())
THROUGHPUT_OVER_S = 5.0
STARVED_AFTER_NS = 30 * NS_PER_S
REFUSED_ON_ARRIVAL = ("invalid", "too_long", "queue_full", "tenant_limit")
STAGES = {"queue": "queue_time_seconds", "prefill": "prefill_time_seconds", "decode": "decode_time_seconds"}
"""Stage label of SGLang's histogram -> our histogram."""

_REPORTED = {
    "lookahead_runs": "looks",
    "lookahead_looks": "looks",
    "lookahead_cpu_seconds": "cpu_s",
    "lookahead_failures": "failures",
    "lookahead_met": "met",
    "lookahead_ttft_seconds": "ttft_s",
}
"""Metric -> its key in the report of policy adaptive."""

_RANK_REPORTED = {"step": "step", "silent_seconds": "silent_s"}
"""Metric of a tensor- or pipeline-parallel rank -> its key in the rank's report."""


class Histogram:
    """Counts per bucket, cheap enough to update with every token."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, weight: int = 1) -> None:
        """Count `value` `weight` times."""
        self.counts[bisect_left(self.bounds, value)] += weight
        self.total += value * weight

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts by upper bound, in Prometheus' form."""
        running, pairs = 0, []
        for bound, count in zip([*map(float, self.bounds), float("inf")], self.counts, strict=True):
            running += count
            pairs.append(("+Inf" if bound == float("inf") else str(bound), float(running)))
        return pairs


@dataclass(slots=True)
class Metrics:
    """All counters, gauges and histograms of the API process.

    counters: value by (name, label values).
    gauges: gauges of all data-parallel ranks together.
    adaptive: the latest report of policy adaptive.
    tp_ranks: tensor- and pipeline-parallel ranks by data-parallel rank.
    kv: the snapshot that `kv_families` reads.
    ranks: gauges by data-parallel rank, empty with a single rank.
    """

    model: str
    compat: Sequence[str] = ()
    page_size: int = 1
    counters: dict[tuple[str, tuple[str, ...]], float] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)
    adaptive: Mapping[str, Any] = field(default_factory=dict)
    tp_ranks: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    kv: Mapping[str, Any] = field(default_factory=dict)
    processes: ProcessUsage = field(default_factory=ProcessUsage)
    ranks: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    histograms: dict[str, Histogram] = field(
        default_factory=lambda: {one.key: Histogram(one.buckets) for one in ENGINE if one.kind == "histogram"}
    )
    class_histograms: dict[tuple[str, str], Histogram] = field(
        default_factory=lambda: {(one.key, level): Histogram(one.buckets) for one in BY_CLASS for level in LEVEL_NAMES}
    )

    _rated: tuple[float, float] = field(default_factory=lambda: (time.monotonic(), 0.0))
    """Time of the last throughput sample (s, monotonic), and the tokens generated until then."""

    def __post_init__(self) -> None:
        for one in ENGINE:
            if one.kind == "counter" and one.labels == ("model",):
                self.counters[one.key, ()] = 0.0
        for reason in get_args(FinishReason):
            self.counters["requests", (reason,)] = 0.0

    def count(self, name: str, amount: float, *labels: str) -> None:
        """Add to a counter."""
        self.counters[name, labels] = self.counters.get((name, labels), 0.0) + amount

    def set_load(self, gauges: Mapping[str, float], totals: Mapping[str, float]) -> None:
        """Replace the gauges and set the totals, both by our names."""
        # Gauges of an earlier policy disappear; the throughput is measured here and stays.
        kept = self.gauges.get(THROUGHPUT)
        self.gauges = dict(gauges) if kept is None else {**gauges, THROUGHPUT: kept}
        self.counters.update({(name, ()): total for name, total in totals.items()})
        since, tokens_then = self._rated
        now, tokens = time.monotonic(), self.counters[GENERATION_TOKENS]
        if now - since >= THROUGHPUT_OVER_S or kept is None:
            self.gauges[THROUGHPUT] = (tokens - tokens_then) / max(now - since, 1e-3)
            self._rated = (now, tokens)

    def tracker(self, spec: GenerateReqInput) -> "LatencyTracker":
        """A tracker for one request, from its arrival on."""
        return LatencyTracker(self, spec)

    def finished(self, finish: Finish, spec: GenerateReqInput) -> None:
        """Count a finished answer."""
        self.count("requests", 1, finish.reason)
        self.count("prompt_tokens", finish.prompt_tokens)
        self.count("cached_tokens", finish.cached_tokens)
        level = level_name(spec.service_class)
        self._count_incidents(finish, level)
        self._count_slo(finish, level)
        if finish.reason == "abort":
            return
        if finish.admitted_ns:
            self.histograms["queue_time_seconds"].observe((finish.admitted_ns - finish.arrival_ns) / NS_PER_S)
        if finish.first_token_ns:
            self.histograms["prefill_time_seconds"].observe(finish.timings.prefill_ns / NS_PER_S)
            self.histograms["decode_time_seconds"].observe(finish.timings.decode_ns / NS_PER_S)
        self.histograms["request_prompt_tokens"].observe(finish.prompt_tokens)
        self.histograms["request_generation_tokens"].observe(finish.completion_tokens)

    def _count_incidents(self, finish: Finish, level: str) -> None:
        """Count queueing, retractions and refusals."""
        timings = finish.timings
        if finish.cause and finish.cause not in ON_PURPOSE:
            self.count("rejected_requests", 1, finish.cause)
        if finish.cause not in REFUSED_ON_ARRIVAL:
            self.class_histograms["queue_wait_seconds", level].observe(timings.queue_ns / NS_PER_S)
            if timings.queue_ns > STARVED_AFTER_NS:
                self.count("starvation", 1, level)
        if timings.inverted_ns:
            self.count("priority_inversion_seconds", timings.inverted_ns / NS_PER_S, level)
        causes = (
            ("preempted", timings.preemptions),
            ("out_of_pages", timings.page_shortages),
            ("paused", timings.pauses),
        )
        for reason, times in causes:
            if times:
                self.count("lost_places", times, level, reason)

    def _count_slo(self, finish: Finish, level: str) -> None:
        """Count SLO attainment and goodput, by the request's own targets or its class's."""
        met_all = met_slo(finish)
        if met_all is None:
            return
        self.count("slo_requests", 1, level, _word(met_all))
        if met_all:
            self.count("goodput_tokens", finish.completion_tokens, level)
        for target, met in targets_met(finish):
            if finish.reason != "abort":
                self.count("targets", 1, level, target, _word(met))
            if target == "deadline" and not met:
                self.count("deadline_misses", 1, level, stage_at_deadline(finish))

    def exposition(self) -> bytes:
        """The Prometheus text."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Families(self))
        return generate_latest(registry)


def _word(met: bool) -> str:
    return "yes" if met else "no"


class LatencyTracker:
    """Feeds the latency histograms from the deltas of one request."""

    __slots__ = ("_arrival", "_between_tokens", "_last", "_metrics", "_spec")

    def __init__(self, metrics: Metrics, spec: GenerateReqInput) -> None:
        self._metrics = metrics
        self._between_tokens = metrics.histograms["inter_token_latency_seconds"]
        self._spec = spec
        self._arrival = time.monotonic()
        self._last: dict[int, float] = {}

    def delta(self, delta: OutputDelta) -> None:
        """Observe a delta."""
        count, now = len(delta.token_ids), time.monotonic()
        if count:
            last = self._last.get(delta.index)
            if last is not None:
                self._between_tokens.observe((now - last) / count, count)
            elif delta.finish is None:
                self._metrics.histograms["time_to_first_token_seconds"].observe(now - self._arrival)
            self._last[delta.index] = now
            self._metrics.counters[GENERATION_TOKENS] += count
        if delta.finish is not None:
            self._end(delta, delta.finish, now)

    def _end(self, delta: OutputDelta, finish: Finish, now: float) -> None:
        """Observe the last delta of an answer."""
        histograms = self._metrics.histograms
        whole = delta.completion_tokens == len(delta.token_ids) > 0
        if whole and finish.first_token_ns:
            first = (finish.first_token_ns - finish.arrival_ns) / NS_PER_S
            histograms["time_to_first_token_seconds"].observe(first)
        if finish.reason != "abort":
            histograms["e2e_request_latency_seconds"].observe(now - self._arrival)
        self._metrics.finished(finish, self._spec)


class _Families(Collector):
    """Turns `Metrics` into Prometheus families when scraped."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[MetricFamily]:
        """Our names first, then those that `--metrics-compat` adds."""
        yield from self._engine({one.key: PREFIX + one.name for one in ENGINE}, "model")
        yield from self._by_class()
        yield from self._by_rank()
        yield from self._by_tp_rank()
        yield from lookahead_families(self._metrics.model, self._metrics.adaptive)
        yield from kv_families(self._metrics.model, self._metrics.kv)
        yield from self._metrics.processes.families()
        for engine in self._metrics.compat:
            yield from self._engine(COMPAT[engine], "model_name")
        if "sglang" in self._metrics.compat:
            yield from self._stages()
        if "vllm" in self._metrics.compat:
            yield from self._cache_config()

    def _engine(self, names: Mapping[str, str], model_label: str) -> Iterable[MetricFamily]:
        """The families that `names` maps to an exported name, without gauges that have no value."""
        metrics, model = self._metrics, self._metrics.model
        for metric in ENGINE:
            key = metric.key
            if key not in names or (metric.kind == "gauge" and key not in metrics.gauges):
                continue
            found = family(metric, names[key], [model_label, *metric.labels[1:]])
            if metric.kind == "gauge":
                found.add_metric([model], metrics.gauges[key])
            elif metric.kind == "histogram":
                found.add_metric([model], metrics.histograms[key].buckets(), metrics.histograms[key].total)
            else:
                for (counter, values), amount in metrics.counters.items():
                    if counter == key:
                        found.add_metric([model, *values], amount)
            yield found

    def _stages(self) -> Iterable[MetricFamily]:
        """SGLang's histogram of latencies by stage."""
        found = family(SGLANG_STAGES, SGLANG_STAGES.name)
        for stage, key in STAGES.items():
            histogram = self._metrics.histograms[key]
            found.add_metric([self._metrics.model, stage], histogram.buckets(), histogram.total)
        yield found

    def _cache_config(self) -> Iterable[MetricFamily]:
        """vLLM's gauge from which gateways read the size of the KV pool."""
        pages = int(self._metrics.gauges.get("total_tokens", 0)) // self._metrics.page_size
        found = family(VLLM_CACHE_CONFIG, VLLM_CACHE_CONFIG.name)
        found.add_metric([self._metrics.model, str(self._metrics.page_size), str(pages)], 1.0)
        yield found

    def _by_class(self) -> Iterable[MetricFamily]:
        """Histograms by service class."""
        for metric in BY_CLASS:
            found = family(metric)
            for (name, level), histogram in self._metrics.class_histograms.items():
                if name == metric.key:
                    found.add_metric([self._metrics.model, level], histogram.buckets(), histogram.total)
            yield found

    def _by_rank(self) -> Iterable[MetricFamily]:
        """Gauges by data-parallel rank; a rank that does not run has only `up`, which is 0."""
        for metric in RANK:
            found, key = family(metric), metric.key.removeprefix("rank_")
            for rank, gauges in self._metrics.ranks.items():
                if key in gauges:
                    found.add_metric([self._metrics.model, str(rank)], gauges[key])
            if found.samples:
                yield found

    def _by_tp_rank(self) -> Iterable[MetricFamily]:
        """Gauges by tensor- and pipeline-parallel rank; none for a model on one device."""
        for metric in TP_RANK:
            found, kind = family(metric), metric.labels[-1]
            name = metric.key.removeprefix(f"{kind}_")
            for group, ranks in self._metrics.tp_ranks.items():
                for rank in ranks:
                    if kind in rank:
                        labels = [self._metrics.model, group.removeprefix("rank "), str(rank[kind])]
                        found.add_metric(labels, rank[_RANK_REPORTED[name]])
            if found.samples:
                yield found


def lookahead_families(model: str, adaptive: Mapping[str, Any]) -> Iterable[MetricFamily]:
    """Metrics from the report of policy adaptive, by candidate; none for an empty report."""
    if not adaptive:
        return
    for metric in LOOKAHEAD:
        found = family(metric)
        if metric.key == "policy_switches":
            for switch in adaptive["switches"]:
                found.add_metric([model, switch["candidate"]], switch["times"])
        elif "candidate" in metric.labels:
            for score in adaptive["scores"]:
                found.add_metric([model, score["name"]], score[_REPORTED[metric.key]])
        else:
            found.add_metric([model], adaptive[_REPORTED[metric.key]])
        yield found
