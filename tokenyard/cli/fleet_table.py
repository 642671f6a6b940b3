"""Terminal tables of a fleet: each worker's share, queue, cache and device, and the queues of the routers."""

from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tokenyard.base.percent import percent
from tokenyard.sim.outcome import Outcome
from tokenyard.sim.report.scheduler_figures import router_queue, worker_figures

COLUMNS = ("requests", "share", "SLO", "TTFT s p50/p99", "waiting", "running", "hits", "busy")
MAX_ROWS = 32
"""The most workers shown; a larger fleet shows those with the most requests."""


def print_fleets(outcomes: Mapping[str, Outcome]) -> None:
    """A table for each of `outcomes` that had several schedulers, or one under an autoscaler."""
    for name, outcome in outcomes.items():
        if outcome.setup.schedulers > 1 or outcome.scaling is not None:
            Console().print(fleet_table(name, outcome))


def fleet_table(name: str, outcome: Outcome) -> Table:
    """One row per scheduler. Columns in which nothing differs are left out."""
    rows, queue, setup = worker_figures(outcome), router_queue(outcome), outcome.setup
    optional = {
        "preempted": any(row["preemptions"] for row in rows),
        "restarts": any(row["restarts"] for row in rows),
        "device": len({row["device"] for row in rows}) > 1,
    }
    shown = sorted(rows, key=lambda row: -row["requests"])[:MAX_ROWS] if len(rows) > MAX_ROWS else rows
    caption = (
        "waiting, running: mean/most at a time; shares in %\n"
        f"at the routers: {_load(queue)} waiting, {queue['refused']} refused"
    )
    if (scaling := outcome.scaling) is not None:
        mean = scaling.engine_s / max(outcome.sim_seconds, 1e-9)
        caption += f"\n{mean:.2f} engines on average, {scaling.starts} starts, {scaling.stops} stops"
        if price := outcome.setup.fleet.autoscale and outcome.setup.fleet.autoscale.price:
            caption += f", cost {scaling.engine_s / 3600 * price:.2f}"
    if len(shown) < len(rows):
        caption += f"; the {len(shown)} busiest of {len(rows)}"
    router = setup.router_policy + (f", {setup.fleet.routers} routers" if setup.fleet.routers > 1 else "")
    table = Table(title=f"{escape(name)}: workers by {router}", caption=caption, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", justify="left")
    for column in (*COLUMNS, *(column for column, wanted in optional.items() if wanted)):
        table.add_column(column, justify="right")
    for row in shown:
        more = {"preempted": row["preemptions"], "restarts": row["restarts"], "device": row["device"]}
        table.add_row(
            row["name"],
            f"{row['requests']}",
            _share(row["share"]),
            _share(row["slo_attainment"]),
            f"{_seconds(row['ttft_p50_s'])}/{_seconds(row['ttft_p99_s'])}",
            _load(row["waiting"]),
            _load(row["running"]),
            _share(row["hit_rate"]),
            _share(row["busy"]),
            *(f"{more[column]}" for column, wanted in optional.items() if wanted),
        )
    return table


def _load(load: Mapping[str, Any]) -> str:
    return f"{load['mean']:.1f}/{load['max']:.0f}"


def _share(value: float | None) -> str:
    return "-" if value is None else percent(value)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
