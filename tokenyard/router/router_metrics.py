"""Metrics of the router: their table, its counters, and their exposition as Prometheus text."""

import csv
import io
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenyard.base.metric import Metric
from tokenyard.routing.dispatch import Dispatcher
from tokenyard.routing.gpu_seconds import TenantUsage
from tokenyard.routing.policies import REASONS
from tokenyard.routing.workers import Workers

TTFT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
STATES = ("starting", "healthy", "unhealthy", "draining")

PREFIX = "tokenyard_router_"
METRICS = (
    Metric("requests_total", "counter", "requests received"),
    Metric("client_gone_total", "counter", "requests whose client disconnected"),
    Metric("retries_total", "counter", "further attempts of requests"),
    Metric("continued_total", "counter", "streams that continued at another worker"),
    Metric("queued_total", "counter", "requests that waited in the queue"),
    Metric("predicted_cached_tokens_total", "counter", "prompt tokens predicted to be cached"),
    Metric("cached_tokens_total", "counter", "prompt tokens that responses report as cached"),
    Metric("reported_prompt_tokens_total", "counter", "prompt tokens of answers that report usage"),
    Metric("told_prompt_tokens_total", "counter", "deprecated: use reported_prompt_tokens_total"),
    Metric("index_evicted_blocks_total", "counter", "blocks evicted from the prefix index"),
    Metric("queue_requests", "gauge", "requests in the queue"),
    Metric("open_requests", "gauge", "requests that have not ended"),
    Metric("index_bytes", "gauge", "memory of the prefix index"),
    Metric("load_imbalance", "gauge", "requests of the busiest target divided by the mean"),
    Metric("choices_total", "counter", "choices by reason", ("reason",)),
    Metric("errors_total", "counter", "errors of the router by code", ("code",)),
    Metric("answers_total", "counter", "responses of workers by status", ("status",)),
    Metric("worker_requests_total", "counter", "requests sent", ("target",)),
    Metric("worker_errors_total", "counter", "failures by target", ("target",)),
    Metric("worker_requests", "gauge", "open requests", ("target",)),
    Metric("worker_prefill_tokens", "gauge", "uncached prompt tokens sent", ("target",)),
    Metric("worker_cache_credit", "gauge", "share of predicted cached tokens that responses confirm", ("target",)),
    Metric("worker_slowness", "gauge", "observed over predicted time to first token", ("target",)),
    Metric("worker_index_blocks", "gauge", "blocks in the prefix index", ("target",)),
    Metric("worker_breaker_open", "gauge", "1 while the circuit breaker is open", ("target",)),
    Metric("worker_state", "gauge", "1 for the current state", ("worker", "state")),
    Metric("ttft_seconds", "histogram", "request to first byte of streams", buckets=TTFT_BUCKETS_S),
    Metric("tenant_requests_total", "counter", "requests with a tenant's key that have ended", ("tenant", "model")),
    Metric("tenant_prompt_tokens_total", "counter", "their prompt tokens", ("tenant", "model")),
    Metric("tenant_cached_tokens_total", "counter", "prompt tokens of theirs that were cached", ("tenant", "model")),
    Metric("tenant_answer_tokens_total", "counter", "tokens of their answers", ("tenant", "model")),
    Metric(
        "tenant_gpu_seconds_total", "counter", "their GPU-seconds, by the cost models of engines", ("tenant", "model")
    ),
    Metric(
        "tenant_unknown_gpu_requests_total",
        "counter",
        "requests of theirs at engines that report no cost model, and so without GPU-seconds",
        ("tenant", "model"),
    ),
    Metric("tenant_limited_total", "counter", "requests refused because of a limit of their key", ("tenant",)),
    Metric("queued_requests", "gauge", "requests in the queue, by the base model that they are for", ("model",)),
    Metric("queued_tokens", "gauge", "prompt tokens of requests in the queue", ("model",)),
    Metric("sent_requests", "gauge", "requests at workers, running or queued there", ("model",)),
    Metric("healthy_workers", "gauge", "healthy workers that do not drain", ("model",)),
    Metric(
        "queue_time_seconds",
        "histogram",
        "seconds that requests waited at the router until they were sent or refused",
        ("model",),
        buckets=TTFT_BUCKETS_S,
    ),
)
"""All metrics, in the order of /metrics."""

USAGE = {
    "tenant_requests_total": "requests",
    "tenant_prompt_tokens_total": "prompt_tokens",
    "tenant_cached_tokens_total": "cached_tokens",
    "tenant_answer_tokens_total": "answer_tokens",
    "tenant_gpu_seconds_total": "gpu_seconds",
    "tenant_unknown_gpu_requests_total": "unknown_gpu_requests",
}
"""Fields of `TenantUsage` by metric."""

Values = Mapping[tuple[str, ...], float]
"""The samples of a metric: label values -> value."""


class Histogram:
    """Counts of observations in the buckets of `TTFT_BUCKETS_S` and beyond the last, and their sum in seconds."""

    def __init__(self) -> None:
        self.counts = [0] * (len(TTFT_BUCKETS_S) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float) -> None:
        """Count one observation."""
        self.counts[bisect_left(TTFT_BUCKETS_S, seconds)] += 1
        self.sum_s += seconds

    def lines(self, name: str, labels: str = "") -> Iterator[str]:
        """The samples of the histogram called `name`; `labels` are those of every sample, as `model="m",`."""
        seen = 0
        for most, count in zip((*map(str, TTFT_BUCKETS_S), "+Inf"), self.counts, strict=True):
            seen += count
            yield f'{name}_bucket{{{labels}le="{most}"}} {seen}'
        outer = "{" + labels.rstrip(",") + "}" if labels else ""
        yield f"{name}_sum{outer} {self.sum_s:.10g}"
        yield f"{name}_count{outer} {seen}"


@dataclass(slots=True)
class RouterMetrics:
    """Counters of one router since its start.

    requests: requests received for workers.
    gone: requests whose client disconnected.
    retries: further attempts of requests.
    continued: streams that continued at another worker.
    reported_tokens: prompt tokens of responses that report their cached tokens.
    predicted_tokens: how many of them the router predicted to be cached.
    cached_tokens: how many of them were cached.
    reasons: choices by `routing.policies.REASONS`.
    errors: errors of the router by code.
    statuses: responses of workers by HTTP status.
    ttft: times to the first byte of streams.
    queue_times: times at the router until a request was sent or refused, by base model.
    usage: by tenant and base model.
    limits_met: requests that were refused because of a limit of their key, by tenant.
    chosen: requests sent per target.
    worker_errors: failures per target.
    """

    requests: int = 0
    gone: int = 0
    retries: int = 0
    continued: int = 0
    predicted_tokens: int = 0
    cached_tokens: int = 0
    reported_tokens: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    ttft: Histogram = field(default_factory=Histogram)
    queue_times: dict[str, Histogram] = field(default_factory=dict)
    usage: dict[tuple[str, ...], TenantUsage] = field(default_factory=dict)
    limits_met: Counter[str] = field(default_factory=Counter)
    chosen: Counter[str] = field(default_factory=Counter)
    worker_errors: Counter[str] = field(default_factory=Counter)

    def failed(self, code: str) -> None:
        """A request ended with an error of the router."""
        self.errors[code] += 1

    def first_byte(self, seconds: float) -> None:
        """A stream began `seconds` after its request arrived."""
        self.ttft.observe(seconds)

    def usage_of(self, tenant: str, model: str) -> TenantUsage:
        """What a tenant has used of a model, to count further requests."""
        return self.usage.setdefault((tenant, model), TenantUsage())

    def limited(self, tenant: str) -> None:
        """A request was refused because of a limit of its key."""
        self.limits_met[tenant] += 1

    def usage_rows(self) -> list[dict[str, Any]]:
        """`usage` as rows, by tenant and model."""
        return [
            {"tenant": tenant, "model": model, **self.usage[tenant, model].row()}
            for tenant, model in sorted(self.usage)
        ]

    def usage_csv(self) -> bytes:
        """`usage` as CSV with a header."""
        out = io.StringIO()
        writer = csv.writer(out)
        writer.writerow(("tenant", "model", *TenantUsage().row()))
        writer.writerows(row.values() for row in self.usage_rows())
        return out.getvalue().encode()

    def waited(self, model: str, seconds: float) -> None:
        """A request for this base model was sent for the first time, or refused, `seconds` after it arrived."""
        self.queue_times.setdefault(model, Histogram()).observe(seconds)

    def exposition(self, machine: Dispatcher[Any, Any], *, open_requests: int) -> bytes:
        """All metrics as Prometheus text."""
        samples = (
            self._totals(machine, open_requests) | self._by_label() | _target_gauges(machine) | _model_gauges(machine)
        )
        lines: list[str] = []
        for metric in METRICS:
            full = PREFIX + metric.name
            lines += (f"# HELP {full} {metric.help}", f"# TYPE {full} {metric.kind}")
            if metric.name == "ttft_seconds":
                lines += self.ttft.lines(full)
            elif metric.kind == "histogram":
                for model in sorted({*machine.workers.base_models, *self.queue_times}):
                    lines += self.queue_times.get(model, Histogram()).lines(full, f"model={_quoted(model)},")
            else:
                lines += (
                    f"{full}{_label_text(metric.labels, labels)} {value:.10g}"
                    for labels, value in samples[metric.name].items()
                )
        return ("\n".join(lines) + "\n").encode()

    def _totals(self, machine: Dispatcher[Any, Any], open_requests: int) -> dict[str, Values]:
        """Metrics without labels."""
        values: dict[str, float] = {
            "requests_total": self.requests,
            "client_gone_total": self.gone,
            "retries_total": self.retries,
            "continued_total": self.continued,
            "queued_total": machine.queued,
            "predicted_cached_tokens_total": self.predicted_tokens,
            "cached_tokens_total": self.cached_tokens,
            "reported_prompt_tokens_total": self.reported_tokens,
            "told_prompt_tokens_total": self.reported_tokens,
            "index_evicted_blocks_total": machine.index.evicted,
            "queue_requests": len(machine.queue),
            "open_requests": open_requests,
            "index_bytes": machine.index.bytes,
            "load_imbalance": _imbalance(machine.workers),
        }
        return {name: {(): value} for name, value in values.items()}

    def _by_label(self) -> dict[str, Values]:
        """Counters with a label."""
        return {
            "choices_total": {(reason,): self.reasons[reason] for reason in REASONS},
            "errors_total": _by(self.errors),
            "answers_total": _by(self.statuses),
            "worker_requests_total": _by(self.chosen),
            "worker_errors_total": _by(self.worker_errors),
            "tenant_limited_total": _by(self.limits_met),
            **self._usage_samples(),
        }

    def _usage_samples(self) -> dict[str, Values]:
        rows = {key: used.row() for key, used in self.usage.items()}
        return {name: {key: row[of] for key, row in rows.items() if row[of] is not None} for name, of in USAGE.items()}


def _target_gauges(machine: Dispatcher[Any, Any]) -> dict[str, Values]:
    """Gauges by target and by worker."""
    targets = {(target.name,): target for worker in machine.workers for target in worker.targets}
    return {
        "worker_requests": {key: t.state.requests for key, t in targets.items()},
        "worker_prefill_tokens": {key: t.state.prefill_tokens for key, t in targets.items()},
        "worker_cache_credit": {key: t.state.credit for key, t in targets.items()},
        "worker_slowness": {key: t.state.slowness for key, t in targets.items()},
        "worker_index_blocks": {key: machine.index.blocks_of(t.state.name) for key, t in targets.items()},
        "worker_breaker_open": {key: float(t.breaker.state == "open") for key, t in targets.items()},
        "worker_state": {(w.name, state): float(w.state == state) for w in machine.workers for state in STATES},
    }


def _model_gauges(machine: Dispatcher[Any, Any]) -> dict[str, Values]:
    """Gauges by base model; every model of a worker has a sample, 0 as well."""
    workers = machine.workers
    models: dict[tuple[str, ...], float] = {(model,): 0.0 for model in workers.base_models}
    queued, tokens, sent, healthy = dict(models), dict(models), dict(models), dict(models)
    for entry in machine.queue:
        key = (workers.base_of(entry.item.facts.model),)
        queued[key] = queued.get(key, 0.0) + 1.0
        tokens[key] = tokens.get(key, 0.0) + entry.tokens
    for worker in workers:
        for base in worker.bases:
            # The requests of a worker of several models are not told apart; the first one has them.
            healthy[(base,)] += bool(worker.healthy and not worker.draining)
        if worker.bases:
            sent[(min(worker.bases),)] += worker.open_requests
    return {"queued_requests": queued, "queued_tokens": tokens, "sent_requests": sent, "healthy_workers": healthy}


def _by(counts: Mapping[Any, int]) -> Values:
    return {(str(key),): count for key, count in sorted(counts.items())}


def _label_text(names: Sequence[str], values: Sequence[str]) -> str:
    if not names:
        return ""
    return "{" + ",".join(f"{name}={_quoted(value)}" for name, value in zip(names, values, strict=True)) + "}"


def _quoted(value: str) -> str:
    """A label's value, which may be a name that a worker chose."""
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def _imbalance(workers: Workers[Any]) -> float:
    loads = [target.state.requests for worker in workers if worker.healthy for target in worker.targets]
    return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0
