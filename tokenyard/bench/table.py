"""The result as a table with SGLang's rows in SGLang's order, labels 40 columns wide."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenyard.base import ConfigError
from tokenyard.base.percent import percent
from tokenyard.bench.backends import RequestFuncOutput

LABEL_WIDTH, WIDTH = 40, 50
MAX_REASONS = 5
LATE_MS = 20.0

_LATENCY_BLOCKS = (
    ("End-to-End Latency", "E2E Latency", "e2e_latency"),
    ("Time to First Token", "TTFT", "ttft"),
    ("Time per Output Token (excl. 1st token)", "TPOT", "tpot"),
    ("Inter-Token Latency", "ITL", "itl"),
)
_STATISTICS = (("Mean", "mean"), ("Median", "median"), ("P90", "p90"), ("P95", "p95"), ("P99", "p99"), ("Max", "max"))


def serving_table(numbers: Mapping[str, Any], *, cache_report: bool) -> str:
    """The table of `bench serve`, from `summarize` and the run's own fields."""
    lines = [_title("Serving Benchmark Result", "="), *_head(numbers), *_throughputs(numbers), *_goodput(numbers)]
    for title, label, key in _LATENCY_BLOCKS:
        lines.append(_title(title, "-"))
        found = ((word, numbers.get(f"{short}_{key}_ms")) for word, short in _STATISTICS)
        lines += [_row(f"{word} {label} (ms):", value) for word, value in found if value is not None]
    if cache_report:
        share = 100.0 * numbers["cached_tokens"] / max(numbers["total_input_tokens"], 1)
        lines += [_title("Cache Hit Details", "-"), _row("Cached input tokens:", numbers["cached_tokens"])]
        lines.append(_row("Cache hit rate (%):", share))
    return "\n".join([*lines, "=" * WIDTH])


def _head(numbers: Mapping[str, Any]) -> list[str]:
    limit = numbers["max_concurrency"]
    rows = [
        _row("Backend:", numbers["backend"]),
        _row("Traffic request rate:", numbers["request_rate"]),
        _row("Max request concurrency:", "not set" if limit is None else limit),
        _row("Successful requests:", numbers["completed"]),
    ]
    if numbers["failed"]:
        rows.append(_row("Failed requests:", numbers["failed"]))
    return rows


def _throughputs(numbers: Mapping[str, Any]) -> list[str]:
    retokenized = numbers["total_output_tokens_retokenized"]
    rows = [
        _row("Benchmark duration (s):", numbers["duration"]),
        _row("Total input tokens:", numbers["total_input_tokens"]),
        _row("Total input text tokens:", numbers["total_input_tokens"]),
        _row("Total input vision tokens:", 0),
        _row("Total generated tokens:", numbers["total_output_tokens"]),
    ]
    if retokenized is not None:
        rows.append(_row("Total generated tokens (retokenized):", retokenized))
    return [
        *rows,
        _row("Request throughput (req/s):", numbers["request_throughput"]),
        _row("Input token throughput (tok/s):", numbers["input_throughput"]),
        _row("Output token throughput (tok/s):", numbers["output_throughput"]),
        _row("Peak output token throughput (tok/s):", numbers["max_output_tokens_per_s"]),
        _row("Peak concurrent requests:", numbers["max_concurrent_requests"]),
        _row("Total token throughput (tok/s):", numbers["total_throughput"]),
        _row("Concurrency:", numbers["concurrency"]),
    ]


def _goodput(numbers: Mapping[str, Any]) -> list[str]:
    rows = [
        _row("Goodput targets (ms):", numbers["goodput_targets"]),
        _row("Request goodput (req/s):", numbers["request_goodput"]),
        _row("Requests within targets (%):", percent(numbers["attainment"], 2)),
    ]
    for name, found in numbers["goodput_by_class"].items():
        rows.append(_row(f"  {name} (req/s):", found["request_goodput"]))
        rows.append(_row(f"  {name} (%):", percent(found["attainment"], 2)))
    return rows


def offline_table(numbers: Mapping[str, Any]) -> str:
    """The table of `bench offline`."""
    rows = (
        ("Backend:", "backend"),
        ("Successful requests:", "completed"),
        ("Benchmark duration (s):", "duration"),
        ("Total input tokens:", "total_input_tokens"),
        ("Total generated tokens:", "total_output_tokens"),
        ("Request throughput (req/s):", "request_throughput"),
        ("Input token throughput (tok/s):", "input_throughput"),
        ("Output token throughput (tok/s):", "output_throughput"),
        ("Total token throughput (tok/s):", "total_throughput"),
    )
    body = [_row(label, numbers[key]) for label, key in rows]
    return "\n".join([_title("Offline Throughput Benchmark Result", "="), *body, "=" * WIDTH])


def remarks(answers: Sequence[RequestFuncOutput], numbers: Mapping[str, Any]) -> list[str]:
    """Remarks below the table: why requests failed, and whether the client sent them in time."""
    reasons = Counter(answer.error for answer in answers if answer.error)
    lines = [f"{count} failed: {reason}" for reason, count in reasons.most_common(MAX_REASONS)]
    late_ms = numbers["p99_send_delay_ms"]
    if late_ms > LATE_MS and numbers["max_concurrency"] is None:
        lines.append(f"the client was late: 1 % of the requests left {late_ms:.0f} ms or more after their time")
    return lines


def _title(text: str, rule: str) -> str:
    return f"{f' {text} ' if rule == '=' else text:{rule}^{WIDTH}}"


def _row(label: str, value: Any) -> str:
    text = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label:<{LABEL_WIDTH}} {text}"


def append_line(path: Path, numbers: Mapping[str, Any]) -> None:
    """Add one JSON line to a file. Raises ConfigError if that fails."""
    try:
        with path.open("a", encoding="utf-8") as file:
            # A rate may be infinity, which JSON cannot represent.
            file.write(json.dumps({**numbers, "request_rate": str(numbers.get("request_rate", "offline"))}) + "\n")
    except OSError as error:
        raise ConfigError(f"--output-file {path} cannot be written: {error.strerror}") from error
