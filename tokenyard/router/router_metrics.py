"""What a router counts, and how it tells it: Prometheus text written by hand, as it is asked for often."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from tokenyard.router.workers import Workers
from tokenyard.routing.choice import REASONS
from tokenyard.routing.index import PrefixIndex

TTFT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
STATES = ("starting", "healthy", "unhealthy", "draining")

Labels = Mapping[str, str]
MetricSample = tuple[str, Labels, float]


@dataclass(slots=True)
class RouterMetrics:
    """Counters of one router, all since its start.

    predicted_tokens, cached_tokens: of prompts whose answers told how many were cached, what the router had expected
    and what came true, out of told_tokens.
    """

    requests: int = 0
    gone: int = 0
    retries: int = 0
    continued: int = 0
    queued: int = 0
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
        """A request ended with an error of ours."""
        self.errors[code] += 1

    def first_byte(self, seconds: float) -> None:
        """A stream began so long after its request had come."""
        place = next((i for i, most in enumerate(TTFT_BUCKETS_S) if seconds <= most), len(TTFT_BUCKETS_S))
        self.ttft_counts[place] += 1
        self.ttft_sum_s += seconds

    def exposition(self, workers: Workers, index: PrefixIndex, *, waiting: int, open_requests: int) -> bytes:
        """Prometheus text."""
        lines = _Exposition()
        counters: tuple[tuple[str, str, float], ...] = (
            ("requests_total", "requests that came", self.requests),
            ("client_gone_total", "requests whose client disconnected", self.gone),
            ("retries_total", "tries on another target", self.retries),
            ("continued_total", "streams that went on at another worker", self.continued),
            ("queued_total", "requests that had to wait for room", self.queued),
            ("predicted_cached_tokens_total", "prompt tokens expected in a cache", self.predicted_tokens),
            ("cached_tokens_total", "prompt tokens that answers say were cached", self.cached_tokens),
            (
                "reported_prompt_tokens_total",
                "prompt tokens of answers that report usage",
                self.reported_tokens,
            ),
            ("told_prompt_tokens_total", "deprecated: use reported_prompt_tokens_total", self.reported_tokens),
            ("index_evicted_blocks_total", "blocks dropped from the index for room", index.evicted),
        )
        gauges: tuple[tuple[str, str, float], ...] = (
            ("queue_requests", "requests that wait here", waiting),
            ("open_requests", "requests that are not answered in full", open_requests),
            ("index_bytes", "memory of the prefix index", index.bytes),
            ("load_imbalance", "requests of the busiest target over the mean", _imbalance(workers)),
        )
        for kind, rows in (("counter", counters), ("gauge", gauges)):
            for name, text, value in rows:
                lines.add(kind, name, text, [({}, value)])
        lines.add("counter", "choices_total", "choices by reason", [({"reason": r}, self.reasons[r]) for r in REASONS])
        lines.add("counter", "errors_total", "errors of ours by code", _by("code", self.errors))
        lines.add("counter", "answers_total", "answers of workers by status", _by("status", self.statuses))
        lines.add("counter", "worker_requests_total", "requests sent", _by("target", self.chosen))
        lines.add("counter", "worker_errors_total", "failures by target", _by("target", self.worker_errors))
        self._targets(lines, workers, index)
        lines.histogram("ttft_seconds", "request to first byte of streams", self.ttft_counts, self.ttft_sum_s)
        return lines.text()

    def _targets(self, lines: "_Exposition", workers: Workers, index: PrefixIndex) -> None:
        targets = [target for worker in workers for target in worker.targets]
        for name, text, values in (
            ("worker_requests", "open requests", [target.state.requests for target in targets]),
            (
                "worker_prefill_tokens",
                "uncached prompt tokens sent",
                [target.state.prefill_tokens for target in targets],
            ),
            ("worker_cache_credit", "share of predicted hits that came true", [t.state.credit for t in targets]),
            ("worker_slowness", "first tokens against those predicted", [t.state.slowness for t in targets]),
            ("worker_index_blocks", "blocks it should hold", [index.blocks_of(t.state.name) for t in targets]),
            ("worker_breaker_open", "1 while it gets no requests", [t.breaker.state == "open" for t in targets]),
        ):
            samples = [({"target": t.name}, float(v)) for t, v in zip(targets, values, strict=True)]
            lines.add("gauge", name, text, samples)
        states = [({"worker": w.name, "state": s}, float(w.state == s)) for w in workers for s in STATES]
        lines.add("gauge", "worker_state", "1 for the state that it is in", states)


class _Exposition:
    """Collects the lines of an exposition."""

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
        """All of it."""
        return ("\n".join(self._lines) + "\n").encode()


def _by(label: str, counts: Mapping[str, int] | Mapping[int, int]) -> Iterator[tuple[Labels, float]]:
    return (({label: str(key)}, count) for key, count in sorted(counts.items()))


def _label_text(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}"


def _imbalance(workers: Workers) -> float:
    loads = [target.state.requests for worker in workers if worker.healthy for target in worker.targets]
    return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0
