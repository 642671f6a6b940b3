"""The sessions of a run on a page: a table, figures by turn, and a Gantt chart of sessions."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tokenyard.base import NS_PER_S, BoolArray, Float64Array
from tokenyard.sim.outcome import Outcome
from tokenyard.sim.report.html_page import Picture, Row, Section, Table
from tokenyard.sim.report.session_figures import session_figures, turn_times
from tokenyard.sim.report.svg_charts import Chart
from tokenyard.sim.traces.sessions import Sessions

MAX_ROWS = 60
"""Sessions on a Gantt chart, evenly chosen in the order in which they start."""

WIDTH, ROW, LEFT, TOP, BOTTOM = 1200, 9, 8, 26, 26
MIN_PIXELS = 0.05
"""Shorter phases are not drawn."""

TICKS = 8
PHASES = (("tool", "--line", 2), ("waiting", "--s3", 7), ("prefill", "--s1", 7), ("decode", "--s2", 7))
"""Name, colour of the theme, and height in pixels."""

_MEASURES = (
    ("turns / h", "turns_per_hour", "{:.0f}", "more"),
    ("sessions / h", "sessions_per_hour", "{:.1f}", "more"),
    ("mean session (s)", "mean_session_s", "{:.0f}", "less"),
    ("mean slowdown", "mean_slowdown", "{:.2f}", "less"),
    ("longest wait of a turn (s)", "longest_wait_s", "{:.3g}", "less"),
    ("cached prompt tokens (%)", "hit_share", "{:.1%}", "more"),
    ("recomputed tokens", "recomputed_tokens", "{:,}", "less"),
)


def session_section(outcomes: Mapping[str, Outcome]) -> Section | None:
    """The sessions of each setting side by side; None for a workload without sessions."""
    first = next(iter(outcomes.values()))
    if first.workload.sessions is None:
        return None
    figures = {name: session_figures(outcome) for name, outcome in outcomes.items()}
    rows = [_row(figures, *measure) for measure in _MEASURES]
    ttft = Chart("Time to first token (p95) by index of the turn", "", "seconds", y_from_zero=True)
    hits = Chart("Cached prompt tokens by index of the turn", "", "cached (%)", y_from_zero=True)
    names = [group["turns"] for group in next(iter(figures.values()))["by_turn"]]
    for name, found in figures.items():
        groups = found["by_turn"]
        ttft.bars(names, [_or_nan(group["ttft_s"]["p95"]) for group in groups], name)
        hits.bars(names, [100.0 * _or_nan(group["hit_share"]) for group in groups], name)
    pictures = [Picture(f"Sessions over time: {name}", gantt(outcome)) for name, outcome in outcomes.items()]
    count = first.workload.sessions.count
    notes = [f"{MAX_ROWS} of {count} sessions are drawn."] if count > MAX_ROWS else []
    return Section("Sessions", [ttft, hits], [Table("", list(outcomes), rows)], notes, pictures)


def _row(figures: Mapping[str, Mapping[str, Any]], name: str, key: str, form: str, better: str) -> Row:
    values = [found[key] for found in figures.values()]
    return Row(name, ["-" if value is None else form.format(value) for value in values], values, better)


def _or_nan(value: float | None) -> float:
    return np.nan if value is None else value


def gantt(outcome: Outcome) -> str:
    """A Gantt chart as an `<svg>` element: a row per session, and on it each turn's wait, prefill and decode.

    Between turns a thin line says that a tool or a user has the session.
    """
    sessions = outcome.workload.sessions
    assert sessions is not None
    turns = turn_times(outcome)
    rows, shown = _rows(turns.starts_s, outcome, sessions)
    height = TOP + ROW * int(rows.max(initial=0) + 1) + BOTTOM
    last_s = max(outcome.sim_seconds, 1e-9)
    scale = (WIDTH - 2 * LEFT) / last_s
    y = TOP + ROW * (rows[sessions.session] + 0.5)
    times = [column / NS_PER_S for column in (outcome.arrival_ns, outcome.admitted_ns, outcome.first_token_ns)]
    times.append(outcome.finished_ns / NS_PER_S)
    spans = {name: (times[place], times[place + 1]) for place, name in enumerate(("waiting", "prefill", "decode"))}
    parts = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="Sessions over time" class="gantt">']
    starts, lasted, drawn = turns.starts_s, turns.ends_s - turns.starts_s, rows >= 0
    for name, colour, thick in PHASES:
        if name == "tool":
            places = TOP + ROW * (rows + 0.5)
            path = _path(starts[drawn] * scale, lasted[drawn] * scale, places[drawn])
        else:
            begin, end = spans[name]
            mine = shown & (end > begin)
            path = _path(begin[mine] * scale, (end - begin)[mine] * scale, y[mine])
        parts.append(f'<path d="{path}" stroke="var({colour})" stroke-width="{thick}" fill="none"/>')
    parts += _legend() + _ticks(last_s, scale, height)
    return "".join([*parts, "</svg>"])


def _rows(starts: Float64Array, outcome: Outcome, sessions: Sessions) -> tuple[Float64Array, BoolArray]:
    """float64[sessions], the row of each session in the order of their starts, -1 for those that are not drawn; and
    bool[n], the requests that are.
    """
    order = np.argsort(starts, kind="stable")
    chosen = order[np.unique(np.linspace(0, len(order) - 1, min(len(order), MAX_ROWS)).astype(np.int64))]
    rows = np.full(sessions.count, -1.0)
    rows[chosen] = np.arange(len(chosen))
    shown: BoolArray = (rows[sessions.session] >= 0) & outcome.served
    return rows, shown


def _path(x: Float64Array, widths: Float64Array, y: Float64Array) -> str:
    """Horizontal strokes as the data of a path."""
    wide = widths >= MIN_PIXELS
    strokes = zip((LEFT + x[wide]).tolist(), widths[wide].tolist(), y[wide].tolist(), strict=True)
    return "".join(f"M{begin:.2f} {row:g}h{width:.2f}" for begin, width, row in strokes)


def _legend() -> list[str]:
    parts = []
    for place, (name, colour, thick) in enumerate(PHASES):
        x = LEFT + 110 * place
        parts.append(f'<path d="M{x} 12h16" stroke="var({colour})" stroke-width="{thick}"/>')
        parts.append(f'<text x="{x + 22}" y="16" font-size="12" fill="currentColor">{name}</text>')
    return parts


def _ticks(last_s: float, scale: float, height: int) -> list[str]:
    seconds = np.linspace(0.0, last_s, TICKS + 1)
    return [
        f'<text x="{LEFT + at * scale:.0f}" y="{height - 8}" font-size="11" fill="currentColor" '
        f'text-anchor="{"start" if at == 0.0 else "end" if at == last_s else "middle"}">{at:,.0f} s</text>'
        for at in seconds.tolist()
    ]
