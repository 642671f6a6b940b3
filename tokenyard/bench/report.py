"""`tokenyard bench serve --report`: a measured run as a page, in the style of the simulator's."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tokenyard.base import Float64Array
from tokenyard.base.percent import percent
from tokenyard.bench.backends import RequestFuncOutput
from tokenyard.bench.load_generator import BenchResult
from tokenyard.bench.results import MS, Targets, tpot_s
from tokenyard.sim.report.comparison import distribution
from tokenyard.sim.report.html_page import Report, Row, Section, Table, write_page
from tokenyard.sim.report.svg_charts import Chart

MEASURED = "measured"
BINS = 200
DOTS = 4000

_LATENCIES = (
    ("first token (ms)", "ttft"),
    ("time per token (ms)", "tpot"),
    ("between tokens (ms)", "itl"),
    ("end to end (ms)", "e2e_latency"),
)
_COLUMNS = (("mean", "mean"), ("median", "median"), ("p90", "p90"), ("p95", "p95"), ("p99", "p99"))


def write_bench_page(
    path: Path,
    run: BenchResult,
    targets: Targets,
    numbers: Mapping[str, Any],
    facts: Mapping[str, str],
    notes: Sequence[str],
) -> None:
    """Write the page of a run. `numbers` are those of `summarize`; `facts` describe the run."""
    good = [answer for answer in run.answers if not answer.error]
    sections = [
        Section("Result", tables=[_throughputs(numbers), _latencies(numbers)], notes=notes),
        Section("Which target was missed, and by whom", tables=_misses(run, targets)),
    ]
    if good:
        sections.append(Section("Latencies", [_cdf("First token", [one.ttft_s for one in good]), *_further(good)]))
        sections.append(Section("Over time", _over_time(good)))
    write_page(path, Report(f"Measured: {facts.get('server', 'a server')}", facts, sections, [MEASURED]))


def _throughputs(numbers: Mapping[str, Any]) -> Table:
    rows = [
        Row("requests/s", [f"{numbers['request_throughput']:.2f}"]),
        Row("goodput, requests/s within targets", [f"{numbers['request_goodput']:.2f}"]),
        Row("within targets", [f"{percent(numbers['attainment'])} %"]),
        Row("output tokens/s", [f"{numbers['output_throughput']:.0f}"]),
        Row("input tokens/s", [f"{numbers['input_throughput']:.0f}"]),
        Row("succeeded, failed", [f"{numbers['completed']}, {numbers['failed']}"]),
        Row("most at once", [f"{numbers['max_concurrent_requests']}"]),
        Row("prompt tokens from the cache", [f"{numbers['cached_tokens']} of {numbers['total_input_tokens']}"]),
    ]
    return Table("", [MEASURED], rows)


def _latencies(numbers: Mapping[str, Any]) -> Table:
    rows = [Row(name, [f"{numbers[f'{short}_{key}_ms']:.1f}" for _, short in _COLUMNS]) for name, key in _LATENCIES]
    return Table("Latencies", [name for name, _ in _COLUMNS], rows)


def _misses(run: BenchResult, targets: Targets) -> list[Table]:
    """Requests that failed or missed a target, in total and by class."""
    classes = sorted({answer.service_class for answer in run.answers})
    groups: dict[str, list[RequestFuncOutput]] = {"all": list(run.answers)}
    if len(classes) > 1:
        groups |= {name or "no class": [a for a in run.answers if a.service_class == name] for name in classes}
    names = {"ttft": "first token", "tpot": "time per token", "e2el": "end to end"}
    rows = []
    for name, max_ms in targets.max_ms.items():
        late = [sum(targets.beyond(name, answer) for answer in group) for group in groups.values()]
        rows.append(_counts(f"{names[name]} beyond {max_ms:g} ms", late, groups))
    rows.append(_counts("failed", [sum(bool(a.error) for a in group) for group in groups.values()], groups))
    missed = [sum(not targets.met(a) for a in group) for group in groups.values()]
    return [Table("", list(groups), [*rows, _counts("missed any", missed, groups)])]


def _counts(name: str, counts: Sequence[int], groups: Mapping[str, Sequence[RequestFuncOutput]]) -> Row:
    sizes = [max(len(group), 1) for group in groups.values()]
    return Row(name, [f"{n} ({100.0 * n / size:.1f} %)" for n, size in zip(counts, sizes, strict=True)])


def _cdf(title: str, seconds: Sequence[float]) -> Chart:
    chart = Chart(f"{title}: distribution", "milliseconds", "requests (%)", x_log=True)
    chart.line(*distribution(np.array(seconds, np.float64) * MS), MEASURED)
    return chart


def _further(good: Sequence[RequestFuncOutput]) -> list[Chart]:
    per_token = [time for answer in good if (time := tpot_s(answer)) is not None]
    return [_cdf("Time per output token", per_token), _cdf("End to end", [answer.latency_s for answer in good])]


def _over_time(good: Sequence[RequestFuncOutput]) -> list[Chart]:
    sent = np.array([answer.sent_s for answer in good])
    some = np.unique(np.linspace(0, len(good) - 1, min(len(good), DOTS)).astype(np.int64))
    first = Chart("First token", "sent at (s)", "milliseconds", y_from_zero=True, group="sent")
    first.dots(sent[some], np.array([answer.ttft_s for answer in good])[some] * MS, MEASURED)
    arrived = [(answer.sent_s + at, tokens) for answer in good for at, tokens in answer.arrivals]
    tokens = Chart("Output tokens per second", "time (s)", "tokens/s", y_from_zero=True)
    tokens.line(*_rates(np.array(arrived, np.float64)), MEASURED)
    open_ = Chart("Open requests", "time (s)", "requests", y_from_zero=True)
    open_.line(*_open(sent, sent + np.array([answer.latency_s for answer in good])), MEASURED)
    return [first, tokens, open_]


def _rates(arrived: Float64Array) -> tuple[Float64Array, Float64Array]:
    """Tokens a second in up to `BINS` bins of at least half a second. `arrived`: float64[n, 2], time and tokens."""
    if not len(arrived):
        return np.empty(0), np.empty(0)
    end = float(arrived[:, 0].max())
    width = max(0.5, end / BINS)
    counts = np.bincount((arrived[:, 0] / width).astype(np.int64), arrived[:, 1])
    middles = (np.arange(len(counts), dtype=np.float64) + 0.5) * width
    return middles, counts / width


def _open(begin: Float64Array, end: Float64Array) -> tuple[Float64Array, Float64Array]:
    """How many requests are open, at up to 4 x `BINS` moments."""
    at = np.linspace(0.0, float(end.max()), 4 * BINS)
    began, ended = np.searchsorted(np.sort(begin), at, "right"), np.searchsorted(np.sort(end), at, "right")
    return at, (began - ended).astype(np.float64)
