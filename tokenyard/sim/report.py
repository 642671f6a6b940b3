"""A run, or several beside each other, as one HTML page with charts."""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from tokenyard.base import Float64Array
from tokenyard.sim.charts import STYLE, Chart
from tokenyard.sim.engine import Outcome
from tokenyard.sim.fairness import gap_bound, service_gap
from tokenyard.sim.metrics import length_classes, summary, wait_s
from tokenyard.sim.timeline import Timeline

CDF_POINTS = 300
SCATTER_POINTS = 1500
LENGTH_SLICES = 20
SHORTEST_S = 1e-6
"""Shorter waits are rounding errors; the axis begins here."""
MOST_TENANTS = 64

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #111827; max-width: 1320px; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin-top: 2em } p { max-width: 60em }
.table { overflow-x: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 14px }
td, th { padding: .25em .5em; text-align: right } td { white-space: nowrap }
th { vertical-align: bottom; border-bottom: 2px solid #111827 }
td { border-bottom: 1px solid #e5e7eb } td:first-child { text-align: left }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(540px, 1fr)); gap: 1em }
svg { width: 100%; background: #fff; border: 1px solid #e5e7eb; border-radius: 6px }
"""

_COLUMNS: tuple[tuple[str, Callable[[Mapping[str, Any]], str]], ...] = (
    ("SLO met", lambda s: _percent(s["slo_attainment"])),
    ("longest quarter", lambda s: _percent(s["slo_attainment_by_length"]["longest_quarter"])),
    ("longest 5\N{NO-BREAK SPACE}%", lambda s: _percent(s["slo_attainment_by_length"]["longest_5_percent"])),
    ("rejected", lambda s: f"{s['rejected']}"),
    ("TTFT p50 / p99 (s)", lambda s: _pair(s["ttft_s"], "p50", "p99")),
    ("TPOT p50 / p99 (ms)", lambda s: _pair(s["tpot_s"], "p50", "p99", 1000.0)),
    ("wait p99.9 / max (s)", lambda s: _pair(s["wait_s"], "p999", "max")),
    ("late p99.9 / max (s)", lambda s: _pair(s["late_s"], "p999", "max")),
    ("tokens/s out", lambda s: f"{s['throughput_tokens_per_s']:.0f}"),
    ("hit rate", lambda s: _percent(s["prefix_hit_rate"])),
    ("preemptions", lambda s: f"{s['preemptions']}"),
    ("busy", lambda s: _percent(s["utilisation"])),
)


def write_report(
    path: Path, outcomes: Mapping[str, Outcome], timelines: Mapping[str, Timeline] | None = None, title: str = ""
) -> None:
    """Write the page for `outcomes` (name of the setting -> outcome of the same workload)."""
    sections = [
        _section("Service quality by kind of request", _quality_charts(outcomes)),
        _section("Latencies", _latency_charts(outcomes)),
    ]
    gaps = _gap_charts(outcomes)
    if gaps:
        sections.append(_section("Fairness between tenants", gaps))
    for name, timeline in (timelines or {}).items():
        replicas = outcomes[name].setup.replicas
        which = f" (the first of {replicas} replicas)" if replicas > 1 else ""
        sections.append(_section(f"Over time: {name}{which}", timeline_charts(timeline)))
    first = next(iter(outcomes.values()))
    heading = title or f"{first.workload.name} on {first.setup.profile.name}"
    lead = _facts(first) + _table({name: summary(one) for name, one in outcomes.items()}) + _notes(outcomes)
    page = _page(heading, lead, sections)
    path.write_text(page, encoding="utf-8")


def write_curves(
    path: Path,
    curves: Mapping[str, Sequence[tuple[float, float]]],
    found: Mapping[str, Mapping[str, float]],
    title: str,
    rate: float,
) -> None:
    """Write a page with goodput curves: per policy the (rate scale, SLO attainment) points that were run.

    `rate` is the trace's own, in requests a second. `found` are the largest scales: policy -> target -> scale.
    """
    load = f"rate scale of the trace (1 is {rate:.3g} requests/s)"
    chart = Chart("Goodput: SLO attainment against load", load, "requests that met their SLO (%)")
    for name, points in curves.items():
        ordered = sorted(points)
        chart.line([scale for scale, _ in ordered], [100.0 * share for _, share in ordered], name)
    scales = [scale for points in curves.values() for scale, _ in points]
    targets = sorted({100.0 * float(target) for scales_of in found.values() for target in scales_of})
    names = " and ".join(f"{target:g} %" for target in targets)
    for target in targets:
        chart.line([min(scales), max(scales)], [target, target], names if target == targets[0] else "", dashed=True)
    head = "".join(f"<th>largest scale at {target:g} %</th>" for target in targets)
    rows = "".join(
        f"<tr><td>{escape(name)}</td>" + "".join(f"<td>{scale:.2f}</td>" for _, scale in sorted(one.items())) + "</tr>"
        for name, one in found.items()
    )
    lead = f'<div class="table"><table><tr><th></th>{head}</tr>{rows}</table></div>'
    path.write_text(_page(title, lead, [_section("Against load", [chart])]), encoding="utf-8")


def _quality_charts(outcomes: Mapping[str, Outcome]) -> list[Chart]:
    by_length = Chart("SLO attainment by prompt length", "", "met (%)", y_from_zero=True)
    payers = Chart("Who pays: TTFT by prompt length", "prompt tokens", "TTFT (s)", x_log=True, y_log=True)
    waits = Chart("Wait: TTFT beyond the unloaded prefill", "wait (s)", "waiting this long or longer (%)", True, True)
    late = Chart("Late: first token or end beyond its target", "late (s)", "this late or later (%)", True, True)
    late.empty = "no request was late"
    for name, outcome in outcomes.items():
        classes = length_classes(outcome)
        shares = [100.0 * float(outcome.met[mask].mean()) if mask.any() else 0.0 for mask in classes.values()]
        by_length.bars([key.replace("_percent", " %").replace("_", " ") for key in classes], shares, name)
        if len(outcomes) == 1:
            shown = _some(len(outcome.workload), SCATTER_POINTS)
            payers.dots(outcome.workload.prompt_tokens[shown], outcome.ttft_s[shown], name)
        payers.line(*_p99_by_length(outcome), f"{name}: p99")
        waits.line(*_beyond(wait_s(outcome)), name)
        late.line(*_beyond(outcome.late_s), name)
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
                chart.line(*_cdf(values), label)
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
    """How far the service of two waiting tenants drifts apart, with the bound of virtual token counters."""
    first = next(iter(outcomes.values()))
    if not 2 <= len(np.unique(first.workload.tenant)) <= MOST_TENANTS:
        return []
    title = "Service gap between two tenants since both have requests waiting"
    chart = Chart(title, "time (s)", "weighted tokens", y_from_zero=True)
    for name, outcome in outcomes.items():
        chart.line(*service_gap(outcome), name)
    bound = gap_bound(first.workload, first.setup.kv_pool_tokens or first.setup.profile.kv_pool_tokens)
    chart.line([0.0, first.sim_seconds], [bound, bound], "bound of virtual token counters", dashed=True)
    return [chart]


def timeline_charts(timeline: Timeline) -> list[Chart]:
    """Queue, KV, batch and step time over time."""
    samples = timeline.samples
    at = [sample.at_s for sample in samples]
    queue = Chart("Queue and running requests", "time (s)", "requests")
    queue.area(*_held(at, [sample.waiting for sample in samples]), "waiting")
    queue.line(*_held(at, [sample.running for sample in samples]), "running")
    kv = Chart("KV pool", "time (s)", "tokens held by requests")
    kv.area(*_held(at, [sample.kv_tokens for sample in samples]), "held")
    if samples:
        kv.line([at[0], at[-1]], [timeline.total_kv_tokens] * 2, "pool", dashed=True)
    batch = Chart("Batch: what a step computes", "time (s)", "tokens in the step", y_from_zero=True)
    batch.dots(at, [sample.prefill_tokens or np.nan for sample in samples], "prefill")
    batch.dots(at, [sample.decode_rows or np.nan for sample in samples], "decode")
    step = Chart("Step time", "time (s)", "milliseconds", y_from_zero=True)
    step.dots(at, [1000.0 * sample.step_s for sample in samples], "step")
    return [queue, kv, batch, step]


def _held(at: Sequence[float], values: Sequence[int]) -> tuple[Float64Array, Float64Array]:
    """Points of a line on which each value stays until the next one."""
    return np.repeat(np.array(at, np.float64), 2)[1:], np.repeat(np.array(values, np.float64), 2)[:-1]


def _cdf(values: Float64Array) -> tuple[Float64Array, Float64Array]:
    known = np.sort(values[~np.isnan(values)])
    if not len(known):
        return known, known
    shares = np.linspace(0.0, 1.0, CDF_POINTS)
    return np.quantile(known, shares), 100.0 * shares


def _beyond(values: Float64Array) -> tuple[Float64Array, Float64Array]:
    """Value against the share of all requests with at least that; those that did not finish count as the largest."""
    known = np.sort(values[~np.isnan(values)])
    if not len(known):
        return known, known
    known[known < SHORTEST_S] = 0.0
    shares = 100.0 * (len(values) - np.arange(len(known))) / len(values)
    shown = np.unique(np.concatenate((_some(len(known), CDF_POINTS), np.arange(max(len(known) - 200, 0), len(known)))))
    return known[shown], shares[shown]


def _some(count: int, most: int) -> Any:
    """At most `most` indices below `count`, evenly apart."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(np.int64))


def _facts(outcome: Outcome) -> str:
    slo, workload = outcome.setup.slo, outcome.workload
    return (
        f"<p>{len(workload)} requests over {workload.arrival_s[-1]:.0f} s, {outcome.setup.replicas} replica(s) of "
        f"{escape(outcome.setup.profile.name)} (numbers: {escape(outcome.setup.profile.source)}). A request meets its "
        f"SLO if its first token comes within max({slo.ttft_s:g} s, {slo.ttft_scale:g} x the unloaded prefill of its "
        f"whole prompt) and its mean time per output token is at most {1000 * slo.tpot_s:g} ms; rejected and "
        "unfinished requests are misses, and count as waiting for ever. Targets and deadlines of a request's own come "
        "before these.</p>"
    )


def _table(summaries: Mapping[str, Mapping[str, Any]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name, _ in _COLUMNS)
    rows = "".join(
        f"<tr><td>{escape(name)}</td>" + "".join(f"<td>{cell(one)}</td>" for _, cell in _COLUMNS) + "</tr>"
        for name, one in summaries.items()
    )
    return f'<div class="table"><table><tr><th></th>{head}</tr>{rows}</table></div>'


def _notes(outcomes: Mapping[str, Outcome]) -> str:
    """What the trace lacks, and which settings ran under another policy than they name."""
    warnings = dict.fromkeys(outcome.setup.profile.warning for outcome in outcomes.values())
    notes = [f"Warning: {warning}" for warning in warnings if warning]
    notes += dict.fromkeys(note for outcome in outcomes.values() for note in outcome.workload.notes)
    notes += [f"Note on {name}: {outcome.policy_note}" for name, outcome in outcomes.items() if outcome.policy_note]
    return "".join(f"<p>{escape(note)}</p>" for note in notes)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100.0 * value:.1f} %"


def _pair(values: Mapping[str, float | None], low: str, high: str, scale: float = 1.0) -> str:
    cells = [values[low], values[high]]
    return " / ".join("-" if cell is None else f"{scale * cell:.3g}" for cell in cells)


def _section(title: str, charts: Sequence[Chart]) -> str:
    return f'<h2>{escape(title)}</h2><div class="charts">{"".join(chart.svg() for chart in charts)}</div>'


def _page(title: str, lead: str, sections: Sequence[str]) -> str:
    style = f"<style>{_STYLE}{STYLE}</style>"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>{style}'
        f"<h1>{escape(title)}</h1>{lead}{''.join(sections)}</html>\n"
    )
