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
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from tokenyard.base import NS_PER_S, Finish, FinishReason
from tokenyard.engine.frontend.input_processor import LEVEL_NAMES, level_name
from tokenyard.engine.frontend.io_struct import GenerateReqInput, OutputDelta
from tokenyard.engine.scheduler_process.health.slo_attainment import ON_PURPOSE, met_slo, stage_at_deadline, targets_met
from tokenyard.server.metrics.kv import kv_families
from tokenyard.server.metrics.processes import ProcessUsage

THROUGHPUT = "generation_throughput"
GENERATION_TOKENS = ("generation_tokens", ())
THROUGHPUT_OVER_S = 5.0
STARVED_AFTER_NS = 30 * NS_PER_S
REFUSED_ON_ARRIVAL = ("invalid", "too_long", "queue_full", "tenant_limit")
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 300.0)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)

GAUGES = {
    "running_requests": "requests that hold KV pages",
    "queued_requests": "requests that wait in the queue",
    "queued_tokens": "prompt tokens still to be computed, assuming no prefix hits for waiting requests",
    "queued_seconds": "predicted seconds of queued prefill, by the cost model",
    "used_tokens": "KV tokens of running requests",
    "total_tokens": "capacity of the KV pool in tokens",
    "token_usage": "share of the pool in use by running requests",
    "new_token_ratio": "share of max_new_tokens that admission reserves for an answer",
    "cache_hit_rate": "share of all prompt tokens so far that were prefix cache hits",
    "generation_throughput": "output tokens per second, over the last seconds",
    "deferred_requests": "requests that policy slo has deferred and that have no first token yet",
    "relegated_requests": "old name of deferred_requests, to be removed in the next release",
    "service_gap_tokens": "largest difference in weighted service between two waiting tenants, under vtc and dlpm",
    "borrowed_tokens": "KV tokens that tenants hold beyond their own shares",
    "lora_adapters": "LoRA adapters that are loaded",
    "lora_slots": "LoRA adapters that fit into one step",
    "lora_slots_used": "LoRA slots in use by running requests",
    "lora_slots_claimed": "LoRA slots that are being freed for a waiting adapter",
    "window_kv_tokens": "capacity of the KV pool of sliding-window layers in tokens",
    "window_kv_used_tokens": "KV tokens of running requests in the pool of sliding-window layers",
    "step_time_error_ratio": "mean relative error of the online cost model, measured before each update",
}
_RANK_GAUGES = {
    "up": "1 while the rank is healthy, 0 while it is stuck or does not run",
    **{
        name: GAUGES[name]
        for name in ("running_requests", "queued_requests", "used_tokens", "total_tokens", "cache_hit_rate")
    },
}
_TP_RANK_GAUGES = {
    "step": ("step", "latest step that a tensor- or pipeline-parallel rank has begun"),
    "silent_s": ("silent_seconds", "time since the last heartbeat of a tensor- or pipeline-parallel rank"),
}
COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "requests": ("finished requests", ("finished_reason",)),
    "prompt_tokens": ("prompt tokens of finished requests", ()),
    "generation_tokens": ("output tokens", ()),
    "cached_tokens": ("prompt tokens found in the prefix cache", ()),
    "queried_tokens": ("prompt tokens looked up in the prefix cache", ()),
    "targets": ("finished requests by target (ttft, tpot, deadline)", ("class", "target", "met")),
    "slo_requests": ("finished requests by whether they met all their targets", ("class", "met")),
    "goodput_tokens": ("output tokens of requests that met all their targets", ("class",)),
    "deadline_misses": ("requests that missed their deadline, by their stage at the deadline", ("class", "stage")),
    "priority_inversion_seconds": ("time that requests waited while a less urgent one was running", ("class",)),
    "deferred": ("times that policy slo has deferred a request", ()),
    "relegated": ("old name of deferred_total, to be removed in the next release", ()),
    "starvation": ("requests that waited more than 30 s for their first admission", ("class",)),
    "lost_places": ("times that running requests returned to the queue, by reason", ("class", "reason")),
    "rejected_requests": ("requests that were refused or ended by the server", ("reason",)),
    "retractions": ("times a running request was retracted because pages ran out", ()),
    "preemptions": ("times a running request was preempted by a more urgent one", ()),
    "recomputed_tokens": ("tokens computed again after a retraction", ()),
    "spec_verify_rows": ("rows that verified draft tokens, counted in each step", ()),
    "spec_draft_tokens": ("draft tokens verified", ()),
    "spec_accepted_tokens": ("draft tokens accepted", ()),
    "evicted_tokens": ("tokens evicted from the prefix cache", ()),
    "lora_loads": ("LoRA adapters loaded into a slot", ()),
    "scheduler_steps": ("steps planned", ()),
    "aborted_requests": ("requests that ended before their answer was complete", ()),
}
"""Help text and labels of each counter."""

_HISTOGRAMS = {
    "time_to_first_token_seconds": (SECONDS, "seconds from arrival to the first token"),
    "inter_token_latency_seconds": (SECONDS, "seconds between output tokens"),
    "e2e_request_latency_seconds": (SECONDS, "seconds from arrival to the end of the answer"),
    "queue_time_seconds": (SECONDS, "seconds from arrival to admission"),
    "prefill_time_seconds": (SECONDS, "seconds of prefill before the first token"),
    "decode_time_seconds": (SECONDS, "seconds of decode after the first token"),
    "request_prompt_tokens": (TOKENS, "prompt length"),
    "request_generation_tokens": (TOKENS, "output length"),
}

_CLASS_HISTOGRAMS = {
    "queue_wait_seconds": (SECONDS, "seconds that requests waited for their first admission, without pauses"),
}
"""Histograms with one series per service class."""

_LOOKAHEAD_TOTALS = {
    "lookahead_runs": ("looks", "forecasts that policy adaptive has made since it was chosen"),
    "lookahead_looks": ("looks", "old name of lookahead_runs_total, to be removed in the next release"),
    "lookahead_cpu_seconds": ("cpu_s", "CPU time of forecasts"),
    "lookahead_failures": ("failures", "times that the forecasting process was ended because it failed"),
}
_LOOKAHEAD_SCORES = {
    "lookahead_met": ("met", "share of requests that would meet their targets, by the latest forecast"),
    "lookahead_ttft_seconds": ("ttft_s", "mean time to first token, by the latest forecast"),
}
"""Metric -> its key in the report of policy adaptive, and the help text."""

COMPAT: dict[str, dict[str, str]] = {
    "sglang": {
        "running_requests": "sglang:num_running_reqs",
        "queued_requests": "sglang:num_queue_reqs",
        "used_tokens": "sglang:num_used_tokens",
        "total_tokens": "sglang:max_total_num_tokens",
        "token_usage": "sglang:token_usage",
        "new_token_ratio": "sglang:new_token_ratio",
        "cache_hit_rate": "sglang:cache_hit_rate",
        "generation_throughput": "sglang:gen_throughput",
        "aborted_requests": "sglang:num_aborted_requests",
        "requests": "sglang:num_requests",
        "prompt_tokens": "sglang:prompt_tokens",
        "generation_tokens": "sglang:generation_tokens",
        "cached_tokens": "sglang:cached_tokens",
        "time_to_first_token_seconds": "sglang:time_to_first_token_seconds",
        "inter_token_latency_seconds": "sglang:inter_token_latency_seconds",
        "e2e_request_latency_seconds": "sglang:e2e_request_latency_seconds",
        "queue_time_seconds": "sglang:queue_time_seconds",
    },
    "vllm": {
        "running_requests": "vllm:num_requests_running",
        "queued_requests": "vllm:num_requests_waiting",
        "token_usage": "vllm:kv_cache_usage_perc",
        "requests": "vllm:request_success",
        "prompt_tokens": "vllm:prompt_tokens",
        "generation_tokens": "vllm:generation_tokens",
        "cached_tokens": "vllm:prefix_cache_hits",
        "queried_tokens": "vllm:prefix_cache_queries",
        "retractions": "vllm:num_preemptions",
        "time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
        "inter_token_latency_seconds": "vllm:inter_token_latency_seconds",
        "e2e_request_latency_seconds": "vllm:e2e_request_latency_seconds",
        "queue_time_seconds": "vllm:request_queue_time_seconds",
        "prefill_time_seconds": "vllm:request_prefill_time_seconds",
        "decode_time_seconds": "vllm:request_decode_time_seconds",
        "request_prompt_tokens": "vllm:request_prompt_tokens",
        "request_generation_tokens": "vllm:request_generation_tokens",
    },
}

SGLANG_STAGES = {
    "queue": "queue_time_seconds",
    "prefill": "prefill_time_seconds",
    "decode": "decode_time_seconds",
}
"""Stage label of SGLang's histogram -> our histogram."""


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
        default_factory=lambda: {name: Histogram(bounds) for name, (bounds, _) in _HISTOGRAMS.items()}
    )
    class_histograms: dict[tuple[str, str], Histogram] = field(
        default_factory=lambda: {
            (name, level): Histogram(bounds) for name, (bounds, _) in _CLASS_HISTOGRAMS.items() for level in LEVEL_NAMES
        }
    )

    _rated: tuple[float, float] = field(default_factory=lambda: (time.monotonic(), 0.0))
    """Time of the last throughput sample (s, monotonic), and the tokens generated until then."""

    def __post_init__(self) -> None:
        for name, (_, labels) in COUNTERS.items():
            if not labels:
                self.counters[name, ()] = 0.0
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

    def collect(self) -> Iterable[Metric]:
        """Our names first, then those that `--metrics-compat` adds."""
        ours = {name: f"tokenyard_{name}" for name in (*GAUGES, *COUNTERS, *_HISTOGRAMS)}
        yield from self._named(ours, "model")
        yield from self._by_class()
        yield from self._by_rank()
        yield from self._by_tp_rank()
        yield from lookahead_families(self._metrics.model, self._metrics.adaptive)
        yield from kv_families(self._metrics.model, self._metrics.kv)
        yield from self._metrics.processes.families()
        for engine in self._metrics.compat:
            yield from self._named(COMPAT[engine], "model_name")
        if "sglang" in self._metrics.compat:
            yield self._stages()
        if "vllm" in self._metrics.compat:
            yield self._cache_config()

    def _named(self, names: Mapping[str, str], model_label: str) -> Iterable[Metric]:
        """The families that `names` maps to an exported name."""
        metrics, model = self._metrics, self._metrics.model
        for key, text in GAUGES.items():
            if key in names and key in metrics.gauges:
                gauge = GaugeMetricFamily(names[key], text, labels=[model_label])
                gauge.add_metric([model], metrics.gauges[key])
                yield gauge
        for key in (key for key in COUNTERS if key in names):
            yield self._counter(key, names[key], model_label)
        for key, (_, text) in _HISTOGRAMS.items():
            if key in names:
                histogram = metrics.histograms[key]
                family = HistogramMetricFamily(names[key], text, labels=[model_label])
                family.add_metric([model], histogram.buckets(), histogram.total)
                yield family

    def _stages(self) -> Metric:
        """SGLang's histogram of latencies by stage."""
        name, text = "sglang:per_stage_req_latency_seconds", "seconds that requests spent in each stage"
        family = HistogramMetricFamily(name, text, labels=["model_name", "stage"])
        for stage, key in SGLANG_STAGES.items():
            histogram = self._metrics.histograms[key]
            family.add_metric([self._metrics.model, stage], histogram.buckets(), histogram.total)
        return family

    def _cache_config(self) -> Metric:
        """vLLM's gauge from which gateways read the size of the KV pool."""
        pages = int(self._metrics.gauges.get("total_tokens", 0)) // self._metrics.page_size
        labels = {
            "model_name": self._metrics.model,
            "block_size": str(self._metrics.page_size),
            "num_gpu_blocks": str(pages),
        }
        family = GaugeMetricFamily("vllm:cache_config_info", "size of the KV pool", labels=list(labels))
        family.add_metric(list(labels.values()), 1.0)
        return family

    def _by_class(self) -> Iterable[Metric]:
        """Histograms by service class."""
        for key, (_, text) in _CLASS_HISTOGRAMS.items():
            family = HistogramMetricFamily(f"tokenyard_{key}", text, labels=["model", "class"])
            for (name, level), histogram in self._metrics.class_histograms.items():
                if name == key:
                    family.add_metric([self._metrics.model, level], histogram.buckets(), histogram.total)
            yield family

    def _by_rank(self) -> Iterable[Metric]:
        """Gauges by data-parallel rank; a rank that does not run has only `up`, which is 0."""
        for key, text in _RANK_GAUGES.items():
            family = GaugeMetricFamily(f"tokenyard_rank_{key}", text, labels=["model", "dp_rank"])
            for rank, gauges in self._metrics.ranks.items():
                if key in gauges:
                    family.add_metric([self._metrics.model, str(rank)], gauges[key])
            if family.samples:
                yield family

    def _by_tp_rank(self) -> Iterable[Metric]:
        """Gauges by tensor- and pipeline-parallel rank; none for a model on one device."""
        for key, (name, text) in _TP_RANK_GAUGES.items():
            for kind in ("tp_rank", "pp_rank"):
                family = GaugeMetricFamily(f"tokenyard_{kind}_{name}", text, labels=["model", "dp_rank", kind])
                for group, ranks in self._metrics.tp_ranks.items():
                    for rank in ranks:
                        if kind in rank:
                            labels = [self._metrics.model, group.removeprefix("rank "), str(rank[kind])]
                            family.add_metric(labels, rank[key])
                if family.samples:
                    yield family

    def _counter(self, key: str, name: str, model_label: str) -> Metric:
        """A counter with one sample per combination of labels seen so far."""
        text, labels = COUNTERS[key]
        family = CounterMetricFamily(name, text, labels=[model_label, *labels])
        for (counter, values), amount in self._metrics.counters.items():
            if counter == key:
                family.add_metric([self._metrics.model, *values], amount)
        return family


def lookahead_families(model: str, adaptive: Mapping[str, Any]) -> Iterable[Metric]:
    """Metrics from the report of policy adaptive, by candidate; none for an empty report."""
    if not adaptive:
        return
    for name, (key, text) in _LOOKAHEAD_TOTALS.items():
        total = CounterMetricFamily(f"tokenyard_{name}", text, labels=["model"])
        total.add_metric([model], adaptive[key])
        yield total
    for name, (key, text) in _LOOKAHEAD_SCORES.items():
        gauge = GaugeMetricFamily(f"tokenyard_{name}", text, labels=["model", "candidate"])
        for score in adaptive["scores"]:
            gauge.add_metric([model, score["name"]], score[key])
        yield gauge
    switches = CounterMetricFamily(
        "tokenyard_policy_switches", "times that policy adaptive changed to a candidate", labels=["model", "candidate"]
    )
    for switch in adaptive["switches"]:
        switches.add_metric([model, switch["candidate"]], switch["times"])
    yield switches
