"""Pages that compare runs, and pages with goodput curves (see `sim.report.html_page`)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tokenyard.base import BoolArray, Float64Array
from tokenyard.base.percent import percent
from tokenyard.sim.report.fleet_charts import fleet_section
from tokenyard.sim.report.html_page import Report, Row, Section, Table, write_page
from tokenyard.sim.report.service_gap import gap_bound, service_gap
from tokenyard.sim.report.session_charts import session_section
from tokenyard.sim.report.slo_misses import MISSES, kinds_of, missed
from tokenyard.sim.report.summary import length_classes, summary, wait_s
from tokenyard.sim.report.svg_charts import Chart
from tokenyard.sim.report.timeline import Timeline
from tokenyard.sim.simulate import DefaultSlo, Outcome, Setup
from tokenyard.sim.traces.sessions import S_PER_HOUR
from tokenyard.sim.traces.workload import Workload

CDF_POINTS = 300
SCATTER_POINTS = 1500
LENGTH_SLICES = 20
MIN_SECONDS = 1e-6
"""Shorter waits are rounding errors; the axis begins here."""
MAX_TENANTS = 64

TIMELINE_POINTS = 6000
"""Points of one measure over time on a page, shared by its settings."""

Cell = Callable[[Mapping[str, Any]], str]
Value = Callable[[Mapping[str, Any]], float | None]


@dataclass(frozen=True)
class _Measure:
    """A row of the main table: its text and value for a setting's summary, and which value is better."""

    name: str
    text: Cell
    value: Value
    better: str


def _share_of(name: str, read: Value, better: str = "more") -> _Measure:
    return _Measure(name, lambda s: _percent(read(s)), read, better)


def _spread_of(name: str, key: str, low: str, high: str, scale: float = 1.0) -> _Measure:
    """Two quantiles; the second decides which setting is best."""
    return _Measure(name, lambda s: _pair(s[key], low, high, scale), lambda s: s[key][high], "less")


def _speed(numbers: Mapping[str, Any]) -> float:
    return float(numbers["throughput_tokens_per_s"])


_MEASURES = (
    _share_of("SLO met", lambda s: s["slo_attainment"]),
    _share_of("longest quarter of the prompts", lambda s: s["slo_attainment_by_length"]["longest_quarter"]),
    _share_of("longest 5 % of the prompts", lambda s: s["slo_attainment_by_length"]["longest_5_percent"]),
    _Measure("refused", lambda s: str(s["rejected"]), lambda s: s["rejected"], "less"),
    _spread_of("first token p50 / p99 (s)", "ttft_s", "p50", "p99"),
    _spread_of("time per token p50 / p99 (ms)", "tpot_s", "p50", "p99", 1000.0),
    _spread_of("wait p99.9 / max (s)", "wait_s", "p999", "max"),
    _spread_of("late p99.9 / max (s)", "late_s", "p999", "max"),
    _Measure(
        "output tokens/s",
        lambda s: f"{s['throughput_tokens_per_s']:.0f}",
        lambda s: s["throughput_tokens_per_s"],
        "more",
    ),
    _share_of("hit rate", lambda s: s["prefix_hit_rate"]),
    _Measure("preemptions", lambda s: str(s["preemptions"]), lambda s: s["preemptions"], ""),
    _share_of("device busy", lambda s: s["utilisation"], ""),
    _Measure("error of the cost model", lambda s: _known(s["profile_error"]), lambda s: None, ""),
)


def write_report(
    path: Path,
    outcomes: Mapping[str, Outcome],
    timelines: Mapping[str, Timeline] | None = None,
    title: str = "",
    command: str = "",
) -> None:
    """Write the page for `outcomes` (name of the setting -> outcome of the same workload)."""
    first = next(iter(outcomes.values()))
    numbers = {name: summary(one) for name, one in outcomes.items()}
    notes = [f"Note on {name}: {one.policy_note}" for name, one in outcomes.items() if one.policy_note]
    sections = [
        Section("Side by side", (), [_main_table(numbers)], [*notes, *first.workload.notes]),
        _miss_section(outcomes),
        Section("Service quality by kind of request", _quality_charts(outcomes)),
        Section("Latencies", _latency_charts(outcomes)),
    ]
    if sessions := session_section(outcomes):
        sections.insert(1, sessions)
    if fleet := fleet_section(outcomes):
        sections.append(fleet)
    gaps = _gap_charts(outcomes)
    if gaps:
        sections.append(Section("Fairness between tenants", gaps))
    for name, timeline in (timelines or {}).items():
        replicas = outcomes[name].setup.replicas
        which = f" (the first of {replicas} replicas)" if replicas > 1 else ""
        charts = timeline_charts(timeline, TIMELINE_POINTS // len(timelines or {}))
        sections.append(Section(f"Over time: {name}{which}", charts))
    heading = title or f"{first.workload.name} on {first.setup.profile.name}"
    warnings = list(dict.fromkeys(one["warning"] for one in numbers.values() if one["warning"]))
    write_page(
        path, Report(heading, facts_of(first.workload, first.setup, command), sections, list(outcomes), warnings)
    )


def facts_of(workload: Workload, setup: Setup, command: str = "") -> dict[str, str]:
    """The facts about a run that every page shows."""
    load, sessions = offered_load(workload), workload.sessions
    where = f"in {sessions.count} sessions" if sessions and not workload.span_s else f"over {workload.span_s:.0f} s"
    return {
        "command": command,
        "trace": f"{workload.name}: {len(workload)} requests {where}",
        "rate": f"{load.rate:.4g} {load.unit}",
        "device": f"{setup.replicas} x {setup.profile.name}",
        "cost model": f"{setup.profile.source}; error: {trust(setup.profile.error, setup.profile.measured)}",
        "SLO": slo_text(setup.slo),
        "seed": str(setup.seed),
    }


def rate_of(workload: Workload) -> float:
    """Requests per second over the whole trace."""
    return len(workload) / max(workload.span_s, 1e-9)


def slo_text(slo: DefaultSlo) -> str:
    """The targets of requests without their own, in one line."""
    return (
        f"first token within max({slo.ttft_s:g} s, {slo.ttft_scale:g} x its unloaded prefill), "
        f"{1000 * slo.tpot_s:g} ms per further token; own targets and deadlines come first"
    )


def trust(error: float | None, measured: str = "") -> str:
    """The error of predicted times: `measured` in words, the mean relative error of a step, or that it is not known."""
    if measured:
        return measured
    return "unknown" if error is None else f"{100.0 * error:.1f} % of a step on average"


def _main_table(numbers: Mapping[str, Mapping[str, Any]]) -> Table:
    rows = [
        Row(one.name, [one.text(s) for s in numbers.values()], [one.value(s) for s in numbers.values()], one.better)
        for one in _MEASURES
    ]
    return Table("", list(numbers), rows)


def _miss_section(outcomes: Mapping[str, Outcome]) -> Section:
    title = "Which target was missed, and by whom"
    if all(outcome.met.all() for outcome in outcomes.values()):
        return Section(title, notes=["Every request met its targets under every setting."])
    return Section(title, tables=_miss_tables(outcomes))


def _miss_tables(outcomes: Mapping[str, Outcome]) -> list[Table]:
    """Number of requests that missed their targets, by target and by kind of request."""
    first = next(iter(outcomes.values()))
    found = {name: missed(outcome) for name, outcome in outcomes.items()}
    tables = [
        Table(
            "By target",
            list(outcomes),
            [_count_row(text, [found[name][kind] for name in outcomes]) for kind, text in MISSES.items()],
        )
    ]
    for title, kinds in kinds_of(first):
        rows = []
        for kind, mask in kinds.items():
            shares = [_miss_share(found[name], mask) for name in outcomes]
            rows.append(Row(kind, [_blame(found[name], mask) for name in outcomes], shares, "less"))
        note = "Share of the requests of that kind that missed: first token / time per token / refused or unfinished."
        tables.append(Table(title, list(outcomes), rows, note))
    return tables


def _count_row(name: str, masks: Sequence[BoolArray]) -> Row:
    counts = [int(mask.sum()) for mask in masks]
    texts = [f"{count} ({_percent(count / max(len(mask), 1))})" for count, mask in zip(counts, masks, strict=True)]
    return Row(name, texts, counts, "less")


def _miss_share(found: Mapping[str, BoolArray], mask: BoolArray) -> float:
    return float(found["any"][mask].mean())


def _blame(found: Mapping[str, BoolArray], mask: BoolArray) -> str:
    shares = [100.0 * float(found[kind][mask].mean()) for kind in ("first", "token", "unserved")]
    whole = 100.0 * _miss_share(found, mask)
    return f"{whole:.1f} %: " + " / ".join(f"{share:.1f}" for share in shares) if whole else "0 %"


@dataclass(frozen=True, slots=True)
class OfferedLoad:
    """The load of a trace, at rate scale 1."""

    rate: float
    """A number of `unit`."""
    unit: str
    """Requests or sessions, per time."""


def offered_load(workload: Workload) -> OfferedLoad:
    """Requests per second, or sessions per hour where only a run tells when their turns arrive."""
    sessions = workload.sessions
    if sessions is None or workload.span_s:
        return OfferedLoad(rate_of(workload), "requests/s")
    span_s = max(float(sessions.start_s.max()), 1e-9)
    return OfferedLoad(S_PER_HOUR * sessions.count / span_s, "sessions/h")


def write_curves(
    path: Path,
    curves: Mapping[str, Sequence[tuple[float, float]]],
    found: Mapping[str, Mapping[str, float]],
    title: str,
    load: OfferedLoad,
    facts: Mapping[str, str] | None = None,
    warnings: Sequence[str] = (),
) -> None:
    """Write a page with goodput curves: per policy the (rate scale, SLO attainment) points that were run.

    `load` is the trace's own. `found` holds the largest scales: policy -> target -> scale.
    """
    axis = f"rate scale of the trace (1 is {load.rate:.3g} {load.unit})"
    chart = Chart("Goodput: SLO attainment against load", axis, "requests that met their SLO (%)")
    for name, points in curves.items():
        ordered = sorted(points)
        chart.line([scale for scale, _ in ordered], [100.0 * share for _, share in ordered], name)
    scales = [scale for points in curves.values() for scale, _ in points]
    targets = sorted({float(target) for scales_of in found.values() for target in scales_of})
    for target in targets:
        chart.line([min(scales), max(scales)], [100.0 * target] * 2, f"{100.0 * target:g} %", dashed=True)
    rows = []
    for target in targets:
        largest = [found[name].get(f"{target:g}") for name in found]
        texts = ["-" if one is None else f"{one:.2f} ({one * load.rate:.3g})" for one in largest]
        rows.append(Row(f"at {100.0 * target:g} %", texts, largest, "more"))
    table = Table(f"Largest rate scale ({load.unit})", list(found), rows)
    write_page(path, Report(title, facts or {}, [Section("Against load", [chart], [table])], list(curves), warnings))


_LENGTH_NAMES = {
    "shortest_quarter": "1st \N{VULGAR FRACTION ONE QUARTER}",
    "second_quarter": "2nd \N{VULGAR FRACTION ONE QUARTER}",
    "third_quarter": "3rd \N{VULGAR FRACTION ONE QUARTER}",
    "longest_quarter": "4th \N{VULGAR FRACTION ONE QUARTER}",
    "longest_5_percent": "top 5 %",
}


def _quality_charts(outcomes: Mapping[str, Outcome]) -> list[Chart]:
    by_length = Chart("SLO attainment by prompt length", "", "met (%)", y_from_zero=True)
    payers = Chart("Who pays: TTFT by prompt length", "prompt tokens", "TTFT (s)", x_log=True, y_log=True)
    waits = Chart("Wait: TTFT beyond the unloaded prefill", "wait (s)", "waiting this long or longer (%)", True, True)
    late = Chart("Late: first token or end beyond its target", "late (s)", "this late or later (%)", True, True)
    late.empty = "no request was late"
    for name, outcome in outcomes.items():
        classes = length_classes(outcome)
        shares = [100.0 * float(outcome.met[mask].mean()) if mask.any() else 0.0 for mask in classes.values()]
        by_length.bars([_LENGTH_NAMES.get(key, key) for key in classes], shares, name)
        if len(outcomes) == 1:
            shown = _some(len(outcome.workload), SCATTER_POINTS)
            payers.dots(outcome.workload.prompt_tokens[shown], outcome.ttft_s[shown], name)
        payers.line(*_p99_by_length(outcome), f"{name}: p99")
        waits.line(*beyond(wait_s(outcome)), name)
        late.line(*beyond(outcome.late_s), name)
    first = next(iter(outcomes.values()))
    order = np.argsort(first.workload.prompt_tokens)[_some(len(first.workload), CDF_POINTS)]
    order = order[np.isfinite(first.ttft_slo_s[order])]
    payers.line(first.workload.prompt_tokens[order], first.ttft_slo_s[order], "target", dashed=True)
    return [by_length, payers, waits, late]


def _p99_by_length(outcome: Outcome) -> tuple[Float64Array, Float64Array]:
    """Mean prompt length and p99 of TTFT of slices with equally many served requests, shortest prompts first."""
    served = np.flatnonzero(outcome.served)
    ordered = served[np.argsort(outcome.workload.prompt_tokens[served], kind="stable")]
    slices = [part for part in np.array_split(ordered, LENGTH_SLICES) if len(part)]
    ttft_s = outcome.ttft_s
    lengths = np.array([outcome.workload.prompt_tokens[part].mean() for part in slices])
    return lengths, np.array([np.quantile(ttft_s[part], 0.99) for part in slices])


def _latency_charts(outcomes: Mapping[str, Outcome]) -> list[Chart]:
    charts = []
    for title, column in (("TTFT", "ttft_s"), ("Time per output token", "tpot_s"), ("End to end", "e2e_s")):
        chart = Chart(f"{title}: distribution", "seconds", "requests (%)", x_log=True)
        for name, outcome in outcomes.items():
            for label, values in _by_class(outcome, getattr(outcome, column), name):
                chart.line(*distribution(values), label)
        charts.append(chart)
    return charts


def _by_class(outcome: Outcome, values: Float64Array, name: str) -> list[tuple[str, Float64Array]]:
    """The values of each service class that occurs, or all together where there is only one."""
    column, names = outcome.workload.service_class, outcome.workload.classes
    present = np.unique(column)
    if len(present) < 2:
        return [(name, values)]
    return [(f"{name}: {names[index] or 'no class'}", values[column == index]) for index in present]


def _gap_charts(outcomes: Mapping[str, Outcome]) -> list[Chart]:
    """The service gap between two waiting tenants over time, with the bound of virtual token counters."""
    first = next(iter(outcomes.values()))
    if not 2 <= len(np.unique(first.workload.tenant)) <= MAX_TENANTS:
        return []
    title = "Service gap between two tenants since both have requests waiting"
    chart = Chart(title, "time (s)", "weighted tokens", y_from_zero=True)
    for name, outcome in outcomes.items():
        chart.line(*service_gap(outcome), name)
    bound = gap_bound(first.workload, first.setup.kv_pool_tokens or first.setup.profile.kv_pool_tokens)
    chart.line([0.0, first.sim_seconds], [bound, bound], "bound of virtual token counters", dashed=True)
    return [chart]


def timeline_charts(timeline: Timeline, most: int = TIMELINE_POINTS) -> list[Chart]:
    """Queue, KV, batch and step time over time, of at most `most` samples."""
    samples = timeline.samples[:: max(1, -(-len(timeline.samples) // max(most, 1)))]
    at = [sample.at_s for sample in samples]
    queue = Chart("Queue and running requests", "time (s)", "requests", group="over time: requests")
    queue.area(at, [sample.waiting for sample in samples], "waiting")
    queue.line(at, [sample.running for sample in samples], "running")
    kv = Chart("KV pool", "time (s)", "tokens held by requests", group="over time: kv")
    kv.area(at, [sample.kv_tokens for sample in samples], "held")
    if samples:
        kv.line([at[0], at[-1]], [timeline.total_kv_tokens] * 2, "pool", dashed=True)
    title = "Batch: what a step computes"
    batch = Chart(title, "time (s)", "tokens in the step", y_from_zero=True, group="over time: batch")
    batch.dots(at, [sample.prefill_tokens or np.nan for sample in samples], "prefill")
    batch.dots(at, [sample.decode_rows or np.nan for sample in samples], "decode")
    step = Chart("Step time", "time (s)", "milliseconds", y_from_zero=True, group="over time: step")
    step.dots(at, [1000.0 * sample.step_s for sample in samples], "step")
    return [queue, kv, batch, step]


def distribution(values: Float64Array) -> tuple[Float64Array, Float64Array]:
    """Points of the cumulative distribution: values, and the share (%) of those known that are at most as large."""
    known = np.sort(values[~np.isnan(values)])
    if not len(known):
        return known, known
    shares = np.linspace(0.0, 1.0, CDF_POINTS)
    return np.quantile(known, shares), 100.0 * shares


def beyond(values: Float64Array) -> tuple[Float64Array, Float64Array]:
    """Value against the share of all requests with at least that; those that did not finish count as the largest."""
    known = np.sort(values[~np.isnan(values)])
    if not len(known):
        return known, known
    known[known < MIN_SECONDS] = 0.0
    shares = 100.0 * (len(values) - np.arange(len(known))) / len(values)
    shown = np.unique(np.concatenate((_some(len(known), CDF_POINTS), np.arange(max(len(known) - 200, 0), len(known)))))
    return known[shown], shares[shown]


def _some(count: int, most: int) -> Any:
    """At most `most` indices below `count`, evenly spaced."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(np.int64))


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{percent(value)} %"


def _known(share: float | None) -> str:
    return "unknown" if share is None else _percent(share)


def _pair(values: Mapping[str, float | None], low: str, high: str, scale: float = 1.0) -> str:
    cells = [values[low], values[high]]
    return " / ".join("-" if cell is None else f"{scale * cell:.3g}" for cell in cells)
