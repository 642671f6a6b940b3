"""Charts of a fleet: what each scheduler got, what its cache held, and how its queue grew."""

from collections.abc import Mapping

import numpy as np

from tokenyard.sim.charts import Chart
from tokenyard.sim.outcome import Outcome
from tokenyard.sim.page import Section
from tokenyard.sim.workers import load_curve, worker_figures, worker_names

MOST_QUEUES = 8
"""Queues drawn for a setting, the longest ones; more lines cannot be told apart."""


def fleet_section(outcomes: Mapping[str, Outcome]) -> Section | None:
    """The schedulers of each setting beside each other; None where no setting has several."""
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
    cut = len(names) > MOST_QUEUES
    notes = [f"Queues are those of the {MOST_QUEUES} schedulers where most requests waited."] if cut else []
    return Section("The fleet, by scheduler", [share, hits, busy, *queues], notes=notes)


def _queues(name: str, outcome: Outcome) -> Chart:
    """Requests that wait at each scheduler, and at the routers if any did."""
    chart = Chart(f"Waiting requests: {name}", "time (s)", "requests", y_from_zero=True, group="fleet: waiting")
    chart.empty = "no request waited"
    waits_ns = outcome.admitted_ns - outcome.sent_ns
    totals = [int(waits_ns[(outcome.place == one) & outcome.served].sum()) for one in range(len(outcome.schedulers))]
    shown = sorted(np.argsort(totals)[::-1][:MOST_QUEUES].tolist())
    for number in shown:
        here = (outcome.place == number) & outcome.served & (waits_ns > 0)
        chart.line(*load_curve(outcome.sent_ns, outcome.admitted_ns, here), worker_names(outcome)[number])
    held = (outcome.place >= 0) & (outcome.sent_ns > outcome.arrival_ns)
    if held.any():
        chart.line(*load_curve(outcome.arrival_ns, outcome.sent_ns, held), "at the routers")
    return chart
