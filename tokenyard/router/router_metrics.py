"""Counters of the router, and their exposition as Prometheus text."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenyard.routing.dispatch import Dispatcher
from tokenyard.routing.policies import REASONS
from tokenyard.routing.prefix_index import PrefixIndex
from tokenyard.routing.workers import Workers

TTFT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
STATES = ("starting", "healthy", "unhealthy", "draining")

Labels = Mapping[str, str]
MetricSample = tuple[str, Labels, float]


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
    ttft_counts: streams per bucket of `TTFT_BUCKETS_S`, and beyond the last.
    ttft_sum_s: sum of their times to first byte.
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
    ttft_counts: list[int] = field(default_factory=lambda: [0] * (len(TTFT_BUCKETS_S) + 1))
    ttft_sum_s: float = 0.0
    chosen: Counter[str] = field(default_factory=Counter)
    worker_errors: Counter[str] = field(default_factory=Counter)

    def failed(self, code: str) -> None:
        """A request ended with an error of the router."""
        self.errors[code] += 1

    def first_byte(self, seconds: float) -> None:
        """A stream began `seconds` after its request arrived."""
        place = next((i for i, most in enumerate(TTFT_BUCKETS_S) if seconds <= most), len(TTFT_BUCKETS_S))
        self.ttft_counts[place] += 1
        self.ttft_sum_s += seconds

    def exposition(self, machine: Dispatcher[Any, Any], *, open_requests: int) -> bytes:
        """All metrics as Prometheus text."""
        lines, workers, index = _Exposition(), machine.workers, machine.index
        counters: tuple[tuple[str, str, float], ...] = (
            ("requests_total", "requests received", self.requests),
            ("client_gone_total", "requests whose client disconnected", self.gone),
            ("retries_total", "further attempts of requests", self.retries),
            ("continued_total", "streams that continued at another worker", self.continued),
            ("queued_total", "requests that waited in the queue", machine.queued),
            ("predicted_cached_tokens_total", "prompt tokens predicted to be cached", self.predicted_tokens),
            ("cached_tokens_total", "prompt tokens that responses report as cached", self.cached_tokens),
            (
                "reported_prompt_tokens_total",
                "prompt tokens of answers that report usage",
                self.reported_tokens,
            ),
            ("told_prompt_tokens_total", "deprecated: use reported_prompt_tokens_total", self.reported_tokens),
            ("index_evicted_blocks_total", "blocks evicted from the prefix index", index.evicted),
        )
        gauges: tuple[tuple[str, str, float], ...] = (
            ("queue_requests", "requests in the queue", len(machine.queue)),
            ("open_requests", "requests that have not ended", open_requests),
            ("index_bytes", "memory of the prefix index", index.bytes),
            ("load_imbalance", "requests of the busiest target divided by the mean", _imbalance(workers)),
        )
        for kind, rows in (("counter", counters), ("gauge", gauges)):
            for name, text, value in rows:
                lines.add(kind, name, text, [({}, value)])
        lines.add("counter", "choices_total", "choices by reason", [({"reason": r}, self.reasons[r]) for r in REASONS])
        lines.add("counter", "errors_total", "errors of the router by code", _by("code", self.errors))
        lines.add("counter", "answers_total", "responses of workers by status", _by("status", self.statuses))
        lines.add("counter", "worker_requests_total", "requests sent", _by("target", self.chosen))
        lines.add("counter", "worker_errors_total", "failures by target", _by("target", self.worker_errors))
        self._targets(lines, workers, index)
        lines.histogram("ttft_seconds", "request to first byte of streams", self.ttft_counts, self.ttft_sum_s)
        return lines.text()

    def _targets(self, lines: "_Exposition", workers: Workers[Any], index: PrefixIndex) -> None:
        targets = [target for worker in workers for target in worker.targets]
        for name, text, values in (
            ("worker_requests", "open requests", [target.state.requests for target in targets]),
            (
                "worker_prefill_tokens",
                "uncached prompt tokens sent",
                [target.state.prefill_tokens for target in targets],
            ),
            (
                "worker_cache_credit",
                "share of predicted cached tokens that responses confirm",
                [t.state.credit for t in targets],
            ),
            ("worker_slowness", "observed over predicted time to first token", [t.state.slowness for t in targets]),
            ("worker_index_blocks", "blocks in the prefix index", [index.blocks_of(t.state.name) for t in targets]),
            (
                "worker_breaker_open",
                "1 while the circuit breaker is open",
                [t.breaker.state == "open" for t in targets],
            ),
        ):
            samples = [({"target": t.name}, float(v)) for t, v in zip(targets, values, strict=True)]
            lines.add("gauge", name, text, samples)
        states = [({"worker": w.name, "state": s}, float(w.state == s)) for w in workers for s in STATES]
        lines.add("gauge", "worker_state", "1 for the current state", states)


class _Exposition:
    """The lines of an exposition."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def add(self, kind: str, name: str, text: str, samples: Iterable[tuple[Labels, float]]) -> None:
        """One metric with all its samples."""
        full = f"tokenyard_router_{name}"
        self._lines += [f"# HELP {full} {text}", f"# TYPE {full} {kind}"]
        self._lines += [f"{full}{_label_text(labels)} {value:.10g}" for labels, value in samples]

    def histogram(self, name: str, text: str, counts: list[int], total: float) -> None:
        """One histogram over `TTFT_BUCKETS_S`."""
        full = f"tokenyard_router_{name}"
        self._lines += [f"# HELP {full} {text}", f"# TYPE {full} histogram"]
        seen = 0
        for most, count in zip((*map(str, TTFT_BUCKETS_S), "+Inf"), counts, strict=True):
            seen += count
            self._lines.append(f'{full}_bucket{{le="{most}"}} {seen}')
        self._lines += [f"{full}_sum {total:.10g}", f"{full}_count {seen}"]

    def text(self) -> bytes:
        """The exposition, encoded."""
        return ("\n".join(self._lines) + "\n").encode()


def _by(label: str, counts: Mapping[str, int] | Mapping[int, int]) -> Iterator[tuple[Labels, float]]:
    return (({label: str(key)}, count) for key, count in sorted(counts.items()))


def _label_text(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}"


def _imbalance(workers: Workers[Any]) -> float:
    loads = [target.state.requests for worker in workers if worker.healthy for target in worker.targets]
    return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0
