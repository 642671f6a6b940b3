"""Charts of a fleet: requests, prefix cache and queue of each scheduler."""

from collections.abc import Mapping

import numpy as np

from tokenyard.base import BoolArray, Float64Array, Int64Array
from tokenyard.sim.outcome import Outcome
from tokenyard.sim.report.html_page import Section
from tokenyard.sim.report.scheduler_figures import load_curve, worker_figures, worker_names
from tokenyard.sim.report.svg_charts import Chart

POINTS = 300
MAX_QUEUES = 8
"""Queues drawn for a setting, the longest ones; more lines cannot be distinguished."""


def fleet_section(outcomes: Mapping[str, Outcome]) -> Section | None:
    """The schedulers of each setting side by side; None where no setting has several."""
    fleets = {name: outcome for name, outcome in outcomes.items() if len(outcome.schedulers) > 1}
    if not fleets:
        return None
    longest = max(fleets.values(), key=lambda outcome: len(outcome.schedulers))
    names = worker_names(longest)
    share = Chart("Share of the requests", "", "requests (%)", y_from_zero=True)
    hits = Chart("Prompt tokens found in the cache", "", "hit rate (%)", y_from_zero=True)
    busy = Chart("Device busy", "", "time (%)", y_from_zero=True)
    for name, outcome in fleets.items():
        figures = {row["name"]: row for row in worker_figures(outcome)}
        for chart, column in ((share, "share"), (hits, "hit_rate"), (busy, "busy")):
            chart.bars(names, [100.0 * figures[one][column] if one in figures else np.nan for one in names], name)
    queues = [_queues(name, outcome) for name, outcome in fleets.items()]
    cut = len(names) > MAX_QUEUES
    notes = [f"Queues are those of the {MAX_QUEUES} schedulers where most requests waited."] if cut else []
    return Section("The fleet, by scheduler", [share, hits, busy, *queues], notes=notes)


def _queues(name: str, outcome: Outcome) -> Chart:
    """Requests that wait at each scheduler, and at the routers if any did."""
    chart = Chart(f"Waiting requests: {name}", "time (s)", "requests", y_from_zero=True, group="fleet: waiting")
    chart.empty = "no request waited"
    waits_ns = outcome.admitted_ns - outcome.sent_ns
    totals = [int(waits_ns[(outcome.place == one) & outcome.served].sum()) for one in range(len(outcome.schedulers))]
    names, seconds = worker_names(outcome), outcome.sim_seconds
    shown = sorted(np.argsort(totals)[::-1][:MAX_QUEUES].tolist())
    for number in shown if any(totals) else ():
        here = (outcome.place == number) & outcome.served & (waits_ns > 0)
        chart.line(*over_time(outcome.sent_ns, outcome.admitted_ns, here, seconds), names[number])
    held = (outcome.place >= 0) & (outcome.sent_ns > outcome.arrival_ns)
    if held.any():
        chart.line(*over_time(outcome.arrival_ns, outcome.sent_ns, held, seconds), "at the routers")
    return chart


def over_time(
    begin_ns: Int64Array, end_ns: Int64Array, which: BoolArray, seconds: float
) -> tuple[Float64Array, Float64Array]:
    """The largest count of `load_curve` in each of `POINTS` equal parts of the run, so that all curves share them."""
    at_s, counts = load_curve(begin_ns, end_ns, which)
    edges = np.linspace(0.0, max(seconds, 1e-9), POINTS + 1)
    place = np.searchsorted(at_s, edges[:-1], side="right")
    most = np.concatenate(([0.0], counts))[place]
    np.maximum.at(most, np.minimum(np.searchsorted(edges, at_s, side="right") - 1, POINTS - 1), counts)
    return edges[:-1], most
