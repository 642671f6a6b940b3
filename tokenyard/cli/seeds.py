"""Runs of several seeds: what `simulate` and `compare` do with `--seeds`, and the tables with intervals."""

import argparse
import multiprocessing
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tokenyard.base.percent import percent
from tokenyard.cli.simulation_arguments import named_setup, of_seed, progress_bar
from tokenyard.cli.task_pool import TaskPool
from tokenyard.sim.report.intervals import Interval, figure, interval, over_seeds, share_bounds
from tokenyard.sim.report.request_table import request_columns, stacked, write_table
from tokenyard.sim.report.summary import fleet_summary
from tokenyard.sim.simulate import Outcome, Setup, simulate
from tokenyard.sim.traces.workload import Workload

ATTAINMENT = "slo_attainment"
ROWS = (
    ("SLO attainment (%)", ATTAINMENT, 100.0),
    ("TTFT mean (s)", "ttft_s.mean", 1.0),
    ("TTFT p50 (s)", "ttft_s.p50", 1.0),
    ("TTFT p99 (s)", "ttft_s.p99", 1.0),
    ("TPOT p50 (ms)", "tpot_s.p50", 1e3),
    ("TPOT p99 (ms)", "tpot_s.p99", 1e3),
    ("output tokens/s", "throughput_tokens_per_s", 1.0),
    ("prefix hit rate (%)", "prefix_hit_rate", 100.0),
    ("preemptions", "preemptions", 1.0),
)
"""What the table of several seeds shows: label, figure of the summary, factor."""

Outcomes = dict[str, list[Outcome]]
"""By name of the setting, one per seed."""


def more_seeds(
    args: argparse.Namespace, workload: Workload, firsts: Mapping[str, Outcome], jobs: int, ray: str | None = None
) -> Outcomes:
    """The outcomes of all seeds; `firsts` are those of the first, by name of the setting (see `named_setup`)."""
    runs: list[tuple[Workload, Setup]] = []
    for seed in range(1, args.seeds):
        given, drawn = of_seed(args, workload, seed)
        runs += [(drawn, named_setup(given, drawn, name)) for name in firsts]
    with progress_bar(args.quiet) as bar, TaskPool(workload, min(jobs, max(len(runs), 1)), bar, ray) as pool:
        outcomes = pool.each("seeds", _simulated, runs) if runs else []
    places = range(0, len(outcomes), len(firsts))
    return {name: [one, *(outcomes[at + place] for at in places)] for place, (name, one) in enumerate(firsts.items())}


def all_cores() -> int:
    """Number of cores."""
    return multiprocessing.cpu_count()


def _simulated(_: Workload, run: tuple[Workload, Setup]) -> Outcome:
    workload, setup = run
    return simulate(workload, setup)


def seed_numbers(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What JSON has of several seeds: each summary and `over_seeds` of them; empty for at most one."""
    if len(outcomes) <= 1:
        return {}
    summaries = [fleet_summary(outcome) for outcome in outcomes]
    return {"seeds": summaries, "intervals": over_seeds(summaries)}


def write_requests(args: argparse.Namespace, outcomes: Outcomes) -> None:
    """Write the table of requests, if asked for. Columns `setting` and `seed` come first where there are several."""
    if args.requests_out is None:
        return
    tables = {}
    for name, runs in outcomes.items():
        columns = {str(args.seed + place): request_columns(outcome) for place, outcome in enumerate(runs)}
        tables[name] = stacked(columns, "seed") if len(runs) > 1 else request_columns(runs[0])
    write_table(args.requests_out, stacked(tables, "setting") if len(tables) > 1 else next(iter(tables.values())))


def print_seeds(outcomes: Outcomes) -> None:
    """Print means over the seeds with half of their 95 % intervals, and the differences to the first setting."""
    runs = {name: [fleet_summary(outcome) for outcome in of_name] for name, of_name in outcomes.items()}
    seeds = len(next(iter(runs.values())))
    if seeds == 1:
        return
    table = Table(title=f"mean of {seeds} seeds ± half of the 95 % interval", title_justify="left")
    table.add_column("")
    for name in runs:
        table.add_column(escape(name), justify="right")
    first = next(iter(runs))
    for label, path, factor in ROWS:
        cells = [_text(_values(of_name, path, factor)) for of_name in runs.values()]
        if path == ATTAINMENT:
            cells = [_share(of_name) for of_name in runs.values()]
        if any(cell != "-" for cell in cells):
            table.add_row(label, *cells)
        if len(runs) > 1:
            base = _values(runs[first], path, factor)
            others = [
                _difference(_values(of_name, path, factor), base) for name, of_name in runs.items() if name != first
            ]
            table.add_row(escape(f"  beyond {first}"), "", *others)
    Console().print(table)


def _values(summaries: Sequence[Mapping[str, Any]], path: str, factor: float) -> list[float | None]:
    found = [figure(numbers, path) for numbers in summaries]
    return [None if value is None else factor * value for value in found]


def _share(summaries: Sequence[Mapping[str, Any]]) -> str:
    """The attainment with its interval, which is not symmetric: a share of 100 % can only be less."""
    values = [value for value in _values(summaries, ATTAINMENT, 1.0) if value is not None]
    if not values:
        return "-"
    low, high = share_bounds(values, summaries[0]["requests"])
    return f"{percent(mean(values), 2)} ({percent(low, 2)} to {percent(high, 2)})"


def _text(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return _cell(interval(known)) if known else "-"


def _difference(values: Sequence[float | None], base: Sequence[float | None]) -> str:
    """The mean of the differences of each seed: both settings serve the same requests."""
    pairs = zip(values, base, strict=True)
    known = [one - other for one, other in pairs if one is not None and other is not None]
    return f"{_cell(interval(known), '+')}" if known else "-"


def _cell(found: Interval, sign: str = "") -> str:
    half = found.half
    return f"{found.mean:{sign}.4g}" if half != half else f"{found.mean:{sign}.4g} ± {half:.2g}"
