"""The table of the server's metrics: each row is stated once, and /metrics and docs/metrics.md are made from it."""

from collections.abc import Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from tokenyard.base.metric import Metric

PREFIX = "tokenyard_"
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 300.0)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)

_FAMILIES: dict[str, Any] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


def family(metric: Metric, name: str = "", labels: Sequence[str] = ()) -> Any:
    """The Prometheus family of a metric, without samples yet; name and labels are the metric's own by default."""
    return _FAMILIES[metric.kind](name or PREFIX + metric.name, metric.help, labels=labels or metric.labels)


def _gauge(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, "gauge", text, ("model", *labels))


def _counter(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, "counter", text, ("model", *labels))


def _histogram(name: str, text: str, buckets: Sequence[float], *labels: str) -> Metric:
    return Metric(name, "histogram", text, ("model", *labels), tuple(buckets))


ENGINE = (
    _gauge("running_requests", "requests that hold KV pages"),
    _gauge("queued_requests", "requests that wait in the queue"),
    _gauge("queued_tokens", "prompt tokens still to be computed, assuming no prefix hits for waiting requests"),
    _gauge("queued_seconds", "predicted seconds of queued prefill, by the cost model"),
    _gauge("used_tokens", "KV tokens of running requests"),
    _gauge("total_tokens", "capacity of the KV pool in tokens"),
    _gauge("token_usage", "share of the pool in use by running requests"),
    _gauge("new_token_ratio", "share of max_new_tokens that admission reserves for an answer"),
    _gauge("cache_hit_rate", "share of all prompt tokens so far that were prefix cache hits"),
    _gauge("generation_throughput", "output tokens per second, over the last seconds"),
    _gauge("deferred_requests", "requests that policy slo has deferred and that have no first token yet"),
    _gauge("relegated_requests", "old name of deferred_requests, to be removed in the next release"),
    _gauge(
        "service_gap_tokens", "largest difference in weighted service between two waiting tenants, under vtc and dlpm"
    ),
    _gauge("borrowed_tokens", "KV tokens that tenants hold beyond their own shares"),
    _gauge("active_sessions", "sessions with a turn that waits or runs"),
    _gauge("resident_sessions", "idle sessions whose latest prompt is all in the prefix cache"),
    _gauge("lora_adapters", "LoRA adapters that are loaded"),
    _gauge("lora_slots", "LoRA adapters that fit into one step"),
    _gauge("lora_slots_used", "LoRA slots in use by running requests"),
    _gauge("lora_slots_claimed", "LoRA slots that are being freed for a waiting adapter"),
    _gauge("window_kv_tokens", "capacity of the KV pool of sliding-window layers in tokens"),
    _gauge("window_kv_used_tokens", "KV tokens of running requests in the pool of sliding-window layers"),
    _gauge("state_slots", "checkpoints of recurrent states that fit"),
    _gauge("state_slots_used", "checkpoints of recurrent states that are kept"),
    _gauge("step_time_error_ratio", "mean relative error of the online cost model, measured before each update"),
    _counter("requests_total", "finished requests", "finished_reason"),
    _counter("prompt_tokens_total", "prompt tokens of finished requests"),
    _counter("generation_tokens_total", "output tokens"),
    _counter("cached_tokens_total", "prompt tokens found in the prefix cache"),
    _counter("queried_tokens_total", "prompt tokens looked up in the prefix cache"),
    _counter("targets_total", "finished requests by target (ttft, tpot, deadline)", "class", "target", "met"),
    _counter("slo_requests_total", "finished requests by whether they met all their targets", "class", "met"),
    _counter("goodput_tokens_total", "output tokens of requests that met all their targets", "class"),
    _counter(
        "deadline_misses_total", "requests that missed their deadline, by their stage at the deadline", "class", "stage"
    ),
    _counter(
        "priority_inversion_seconds_total", "time that requests waited while a less urgent one was running", "class"
    ),
    _counter("deferred_total", "times that policy slo has deferred a request"),
    _counter("relegated_total", "old name of deferred_total, to be removed in the next release"),
    _counter("starvation_total", "requests that waited more than 30 s for their first admission", "class"),
    _counter("lost_places_total", "times that running requests returned to the queue, by reason", "class", "reason"),
    _counter("rejected_requests_total", "requests that were refused or ended by the server", "reason"),
    _counter("retractions_total", "times a running request was retracted because pages ran out"),
    _counter("preemptions_total", "times a running request was preempted by a more urgent one"),
    _counter("recomputed_tokens_total", "tokens computed again after a retraction"),
    _counter("spec_verify_rows_total", "rows that verified draft tokens, counted in each step"),
    _counter("spec_draft_tokens_total", "draft tokens verified"),
    _counter("spec_accepted_tokens_total", "draft tokens accepted"),
    _counter("evicted_tokens_total", "tokens evicted from the prefix cache"),
    _counter("evicted_sessions_total", "idle sessions that lost KV to eviction before their next turn"),
    _counter("lora_loads_total", "LoRA adapters loaded into a slot"),
    _counter("scheduler_steps_total", "steps planned"),
    _counter("aborted_requests_total", "requests that ended before their answer was complete"),
    _histogram("time_to_first_token_seconds", "seconds from arrival to the first token", SECONDS),
    _histogram("inter_token_latency_seconds", "seconds between output tokens", SECONDS),
    _histogram("e2e_request_latency_seconds", "seconds from arrival to the end of the answer", SECONDS),
    _histogram("queue_time_seconds", "seconds from arrival to admission", SECONDS),
    _histogram("prefill_time_seconds", "seconds of prefill before the first token", SECONDS),
    _histogram("decode_time_seconds", "seconds of decode after the first token", SECONDS),
    _histogram("request_prompt_tokens", "prompt length", TOKENS),
    _histogram("request_generation_tokens", "output length", TOKENS),
)
"""Of the whole engine. `--metrics-compat` exports some of them under other names too."""

BY_CLASS = (
    _histogram(
        "queue_wait_seconds", "seconds that requests waited for their first admission, without pauses", SECONDS, "class"
    ),
)
RANK = (
    _gauge("rank_up", "1 while the rank is healthy, 0 while it is stuck or does not run", "dp_rank"),
    *(
        _gauge(f"rank_{metric.name}", metric.help, "dp_rank")
        for metric in ENGINE
        if metric.name in ("running_requests", "queued_requests", "used_tokens", "total_tokens", "cache_hit_rate")
    ),
)
"""By data-parallel rank, where there are several."""

TP_RANK = (
    _gauge("tp_rank_step", "latest step that a tensor- or pipeline-parallel rank has begun", "dp_rank", "tp_rank"),
    _gauge("pp_rank_step", "latest step that a tensor- or pipeline-parallel rank has begun", "dp_rank", "pp_rank"),
    _gauge(
        "tp_rank_silent_seconds",
        "time since the last heartbeat of a tensor- or pipeline-parallel rank",
        "dp_rank",
        "tp_rank",
    ),
    _gauge(
        "pp_rank_silent_seconds",
        "time since the last heartbeat of a tensor- or pipeline-parallel rank",
        "dp_rank",
        "pp_rank",
    ),
)
"""By tensor- and pipeline-parallel rank."""

LOOKAHEAD = (
    _counter("lookahead_runs_total", "forecasts that policy adaptive has made since it was chosen"),
    _counter("lookahead_looks_total", "old name of lookahead_runs_total, to be removed in the next release"),
    _counter("lookahead_cpu_seconds_total", "CPU time of forecasts"),
    _counter("lookahead_failures_total", "times that the forecasting process was ended because it failed"),
    _gauge("lookahead_met", "share of requests that would meet their targets, by the latest forecast", "candidate"),
    _gauge("lookahead_ttft_seconds", "mean time to first token, by the latest forecast", "candidate"),
    _counter("policy_switches_total", "times that policy adaptive changed to a candidate", "candidate"),
)
"""Of policy adaptive."""

KV_STORE = (
    _gauge("hicache_blocks", "blocks of KV in the KV store", "rank"),
    _gauge("hicache_stored_bytes", "bytes that the blocks in the KV store take", "rank"),
    _gauge("hicache_storing", "prefixes whose pages are held until their KV is stored", "rank"),
    _gauge("hicache_loading", "requests that wait for KV from the store", "rank"),
    _gauge("hicache_read_bytes_per_s", "recent read bandwidth of the store", "rank"),
    _counter("hicache_written_bytes_total", "bytes of KV written to the store", "rank"),
    _counter("hicache_loaded_bytes_total", "bytes of KV loaded from the store", "rank"),
    _counter("hicache_loaded_tokens_total", "tokens of KV loaded from the store", "rank"),
    _counter("hicache_hit_requests_total", "requests with KV in the store that was worth loading", "rank"),
    _counter(
        "hicache_recomputed_requests_total",
        "requests whose KV in the store was slower to load than to recompute",
        "rank",
    ),
    _counter("hicache_swapped_in_requests_total", "retracted requests whose KV was loaded back from the store", "rank"),
    _counter(
        "hicache_failed_loads_total", "loads that ended early because a block was gone, damaged or unreadable", "rank"
    ),
    _counter("hicache_late_loads_total", "loads that took too long", "rank"),
    _counter("hicache_failed_writes_total", "blocks that could not be written", "rank"),
    _counter("hicache_dropped_blocks_total", "blocks that were not stored because a write failed", "rank"),
    _counter("hicache_damaged_total", "blocks in the store that failed their checksum", "rank"),
    _counter("hicache_evicted_total", "blocks evicted from the store", "rank"),
    _counter("hicache_unstored_tokens_total", "tokens of KV that were evicted before they were stored"),
)
PAUSED = (
    _gauge("paused_records", "paused requests that have a record on disk", "rank"),
    _counter("paused_kept_total", "records of paused requests written to disk", "rank"),
    _counter("paused_resumed_total", "requests resumed from their records", "rank"),
    _counter("paused_displaced_total", "records evicted by newer ones", "rank"),
    _counter("paused_unusable_total", "records that were damaged, of another model or of a newer version", "rank"),
    _counter("paused_failed_total", "paused requests whose record could not be written", "rank"),
)
KV_TRANSFER = (
    _gauge("kv_transfer_open", "prompts that prefill peers compute for this engine", "rank"),
    _gauge("kv_transfer_computing_for_others", "prompts that this engine computes for decode peers", "rank"),
    _gauge("kv_transfer_held_for_others", "prompts whose KV is held for decode peers", "rank"),
    _counter("kv_transfer_moved_bytes_total", "bytes of KV received from other engines", "rank"),
    _counter("kv_transfers_total", "KV transfers by outcome", "rank", "outcome"),
)
PROCESS = (
    Metric("process_cpu_seconds_total", "counter", "CPU time of a process", ("process",)),
    Metric("process_resident_memory_bytes", "gauge", "resident memory", ("process",)),
)
"""Of each process of the server: api, scheduler, detokenizer."""

METRICS = (
    *ENGINE,
    *BY_CLASS,
    *RANK,
    *TP_RANK,
    *LOOKAHEAD,
    *KV_STORE,
    *PAUSED,
    *KV_TRANSFER,
    *PROCESS,
)
"""All metrics, in the order of /metrics."""

SGLANG_STAGES = Metric(
    "sglang:per_stage_req_latency_seconds",
    "histogram",
    "seconds that requests spent in each stage",
    ("model_name", "stage"),
    SECONDS,
)
VLLM_CACHE_CONFIG = Metric(
    "vllm:cache_config_info", "gauge", "size of the KV pool", ("model_name", "block_size", "num_gpu_blocks")
)
"""Metrics that only `--metrics-compat` exports; their names are whole."""

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
"""Exported names that `--metrics-compat` adds, by engine and by `Metric.key`."""
