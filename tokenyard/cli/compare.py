"""`tokenyard compare`: several settings on one trace, in parallel, into one report."""

import argparse
import multiprocessing
import time
from concurrent.futures import Future, ProcessPoolExecutor
from ctypes import c_int64
from pathlib import Path
from typing import Any

from tokenyard.cli.fleet_table import print_fleets
from tokenyard.cli.seeds import more_seeds, print_seeds, seed_numbers, write_requests
from tokenyard.cli.simulation_arguments import (
    ORACLE,
    add_oracle_argument,
    add_run_arguments,
    add_setting_names,
    add_table_arguments,
    check_named,
    load_workload,
    named_setup,
    print_notes,
    print_outcomes,
    profile_of,
    progress_bar,
    write_numbers,
)
from tokenyard.cli.task_pool import TaskPool, add_ray_argument
from tokenyard.cli.terminal import command_line
from tokenyard.sim.engine.presets import differences
from tokenyard.sim.planner.oracle_bounds import with_oracle
from tokenyard.sim.report.comparison import write_report
from tokenyard.sim.report.summary import fleet_summary
from tokenyard.sim.report.timeline import Timeline
from tokenyard.sim.simulate import Outcome, Setup, simulate
from tokenyard.sim.traces.workload import Workload

REFRESH_S = 0.2

_done: Any = None
"""In a worker process: requests submitted so far, one shared counter per setting."""


def add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    """All arguments of `tokenyard compare`."""
    add_setting_names(parser)
    add_run_arguments(parser)
    group = parser.add_argument_group("output")
    group.add_argument("--json", type=Path, metavar="OUT", help="write the numbers of all settings as JSON")
    group.add_argument("--report", type=Path, metavar="OUT", help="write one HTML page with all settings")
    add_table_arguments(group)
    add_oracle_argument(group)
    group.add_argument("--jobs", type=int, default=multiprocessing.cpu_count(), help="processes at a time [all cores]")
    add_ray_argument(group)
    group.add_argument("--quiet", action="store_true", help="show no progress bar and no table")


def run_compare(args: argparse.Namespace) -> int:
    """Simulate every setting and write the requested outputs. Returns the exit status."""
    check_named(args)
    workload = load_workload(args, profile_of(args).context_length)
    setups = {name: named_setup(args, workload, name) for name in args.names}
    if args.oracle:
        setups |= {f"{name}{ORACLE}": with_oracle(setup) for name, setup in setups.items()}
    if args.ray is None:
        results = simulate_all(workload, setups, args.jobs, args.quiet)
    else:
        with progress_bar(args.quiet) as bar, TaskPool(workload, args.jobs, bar, args.ray) as pool:
            answers = pool.each("settings", simulated, list(setups.values()))
            results = dict(zip(setups, answers, strict=True))
    numbers = {name: fleet_summary(outcome) for name, (outcome, _) in results.items()}
    seeds = more_seeds(args, workload, {name: results[name][0] for name in args.names}, args.jobs, args.ray)
    write_numbers(args.json, {name: one | seed_numbers(seeds.get(name, [])) for name, one in numbers.items()})
    write_requests(args, seeds)
    if args.report is not None:
        outcomes = {name: outcome for name, (outcome, _) in results.items()}
        timelines = {name: timeline for name, (_, timeline) in results.items()}
        write_report(args.report, outcomes, timelines, command=command_line())
    if not args.quiet:
        print_outcomes(numbers)
        print_notes(f"columns differ in {one}" for one in differences({n: s.settings for n, s in setups.items()}))
        print_fleets({name: outcome for name, (outcome, _) in results.items()})
        print_seeds(seeds)
    return 0


def simulate_all(
    workload: Workload, setups: dict[str, Setup], jobs: int, quiet: bool
) -> dict[str, tuple[Outcome, Timeline]]:
    """Simulate every setup, at most `jobs` at once, with a progress bar. Raises the first error."""
    context = multiprocessing.get_context("spawn")
    done = context.Array(c_int64, len(setups), lock=False)
    with (
        ProcessPoolExecutor(min(jobs, len(setups)), context, _share_counters, (done,)) as pool,
        progress_bar(quiet) as bar,
    ):
        tasks = [bar.add_task(name, total=len(workload)) for name in setups]
        futures = [pool.submit(_simulate_one, place, workload, setup) for place, setup in enumerate(setups.values())]
        while not all(future.done() for future in futures) and not _failed(futures):
            time.sleep(REFRESH_S)
            for place, task in enumerate(tasks):
                bar.update(task, completed=done[place])
        if _failed(futures):
            pool.shutdown(cancel_futures=True)
        return {name: future.result() for name, future in zip(setups, futures, strict=True)}


def simulated(workload: Workload, setup: Setup) -> tuple[Outcome, Timeline]:
    """One run, with its timeline."""
    timeline = Timeline()
    return simulate(workload, setup, timeline), timeline


def _failed(futures: list[Future[tuple[Outcome, Timeline]]]) -> bool:
    return any(future.done() and not future.cancelled() and future.exception() is not None for future in futures)


def _share_counters(done: Any) -> None:
    global _done
    _done = done


def _simulate_one(place: int, workload: Workload, setup: Setup) -> tuple[Outcome, Timeline]:
    def progress(done: int, _: int) -> None:
        _done[place] = done

    timeline = Timeline()
    return simulate(workload, setup, timeline, progress), timeline
