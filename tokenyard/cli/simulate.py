"""`tokenyard simulate`: a trace through the scheduler in virtual time."""

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from rich.progress import Progress

from tokenyard.base import ConfigError, StepPlan, StepWork
from tokenyard.cli.fleet_table import print_fleets
from tokenyard.cli.kv_arguments import print_transfers
from tokenyard.cli.seeds import all_cores, more_seeds, print_seeds, seed_numbers, write_requests
from tokenyard.cli.simulation_arguments import (
    ORACLE,
    add_oracle_argument,
    add_run_arguments,
    add_table_arguments,
    check_arguments,
    load_workload,
    make_setup,
    print_outcomes,
    profile_of,
    progress_bar,
    write_numbers,
)
from tokenyard.cli.terminal import command_line
from tokenyard.sim.engine.sim_scheduler import StepObserver
from tokenyard.sim.planner.oracle_bounds import attainment_bound, endless_cache, with_oracle
from tokenyard.sim.report.comparison import write_report
from tokenyard.sim.report.summary import fleet_summary
from tokenyard.sim.report.timeline import PerfettoTrace, Timeline
from tokenyard.sim.simulate import Setup, simulate
from tokenyard.sim.traces.workload import Workload
from tokenyard.tape.recorder import Core


def add_simulate_arguments(parser: argparse.ArgumentParser) -> None:
    """All arguments of `tokenyard simulate`."""
    add_run_arguments(parser)
    group = parser.add_argument_group("output")
    group.add_argument("--json", type=Path, metavar="OUT", help="write the numbers as JSON")
    group.add_argument("--report", type=Path, metavar="OUT", help="write an HTML page with charts")
    group.add_argument("--perfetto", type=Path, metavar="OUT", help="write the steps for ui.perfetto.dev")
    group.add_argument(
        "--tape", type=Path, metavar="OUT", help="record a tape of the first scheduler, for `tokenyard replay`"
    )
    add_table_arguments(group)
    group.add_argument("--bound", action="store_true", help="add upper bounds for any scheduler")
    add_oracle_argument(group)
    group.add_argument("--quiet", action="store_true", help="show no progress bar and no table")


def run_simulate(args: argparse.Namespace) -> int:
    """Simulate and write the requested outputs. Returns the exit status."""
    check_arguments(args)
    workload = load_workload(args, profile_of(args).context_length)
    setup = make_setup(args, workload, args.preset)
    name = args.preset or setup.settings.schedule_policy
    timeline = Timeline() if args.report is not None else None
    perfetto = PerfettoTrace() if args.perfetto is not None else None
    observers: list[StepObserver] = [one for one in (timeline, perfetto) if one is not None]
    with progress_bar(args.quiet) as bar, open_tape(args.tape) as tape:
        observer = Observers(observers) if observers else None
        outcomes = {name: simulate(workload, setup, observer, _progress(bar, name, workload), tape)}
        if args.oracle:
            oracle_name = name + ORACLE
            outcomes[oracle_name] = simulate(workload, with_oracle(setup), None, _progress(bar, oracle_name, workload))
    table = {one: fleet_summary(outcome) for one, outcome in outcomes.items()}
    table[name] |= oracle_bounds(workload, setup) if args.bound else {}
    seeds = more_seeds(args, workload, {name: outcomes[name]}, all_cores())
    oracle = {"oracle": table[oracle_name]} if args.oracle else {}
    write_numbers(args.json, table[name] | oracle | seed_numbers(seeds[name]))
    write_requests(args, seeds)
    if timeline is not None:
        write_report(args.report, outcomes, {name: timeline}, command=command_line())
    if perfetto is not None:
        perfetto.write(args.perfetto)
    if not args.quiet:
        print_outcomes(table)
        print_fleets(outcomes)
        print_transfers(outcomes)
        print_seeds(seeds)
    return 0


def _progress(bar: Progress, name: str, workload: Workload) -> Callable[[int, int], None]:
    """Add a line to `bar` and return the function that advances it."""
    task = bar.add_task(name, total=len(workload))
    return lambda done, _: bar.update(task, completed=done)


def open_tape(path: Path | None) -> AbstractContextManager[BinaryIO | None]:
    """A new file for a tape, or nothing for None. Raises ConfigError if it cannot be written."""
    if path is None:
        return nullcontext()
    try:
        return path.open("wb")
    except OSError as error:
        raise ConfigError(f"--tape {path}: {error.strerror}; give a file that can be written") from error


@dataclass(slots=True)
class Observers:
    """Several step observers as one."""

    all: list[StepObserver]

    def __call__(self, begin_ns: int, end_ns: int, plan: StepPlan, work: StepWork, scheduler: Core) -> None:
        """Call each observer."""
        for observer in self.all:
            observer(begin_ns, end_ns, plan, work, scheduler)


def oracle_bounds(workload: Workload, setup: Setup) -> dict[str, float]:
    """Upper bounds for any scheduler on this workload, as fields of the output."""
    cache = endless_cache(workload, setup.settings.page_size)
    cached_tokens = None if setup.settings.disable_radix_cache else cache.shared_tokens
    pooled = attainment_bound(workload, setup.profile, setup.slo, setup.replicas, cached_tokens)
    return {"bound_slo_attainment": round(pooled, 6), "bound_prefix_hit_rate": round(cache.hit_rate, 6)}
