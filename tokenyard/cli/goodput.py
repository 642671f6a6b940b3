"""`tokenyard goodput`: the largest load at which enough requests still meet their SLO."""

import argparse
from dataclasses import asdict, dataclass, field
from multiprocessing import cpu_count
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tokenyard.base import ConfigError
from tokenyard.base.ranges import MAX_SECONDS, NumberRange
from tokenyard.cli.simulation_arguments import (
    add_run_arguments,
    add_seeds_argument,
    add_setting_names,
    check_named,
    load_workload,
    named_setup,
    of_seed,
    print_notes,
    print_warning,
    profile_of,
    progress_bar,
    write_numbers,
)
from tokenyard.cli.task_pool import TaskPool, add_ray_argument
from tokenyard.cli.terminal import command_line
from tokenyard.sim.planner.trial import largest_scale
from tokenyard.sim.report.comparison import OfferedLoad, facts_of, offered_load, slo_text, trust, write_curves
from tokenyard.sim.report.intervals import interval
from tokenyard.sim.report.summary import summary
from tokenyard.sim.simulate import Outcome, Setup, simulate
from tokenyard.sim.traces.workload import Workload

SEARCH_RANGES = {
    "tolerance": NumberRange(1e-4, 0.5),
    "max_rejected": NumberRange(0, 1),
    "max_wait_s": NumberRange(0, MAX_SECONDS),
}


def add_goodput_arguments(parser: argparse.ArgumentParser) -> None:
    """All arguments of `tokenyard goodput`. The search starts at `--rate-scale`."""
    add_setting_names(parser)
    add_run_arguments(parser)
    group = parser.add_argument_group("search")
    group.add_argument(
        "--targets", default="0.9,0.99", metavar="A,B", help="shares of requests that must meet their SLO [0.9,0.99]"
    )
    group.add_argument(
        "--max-wait-s", type=float, metavar="S", help="also keep the p99.9 wait of served requests below S seconds"
    )
    group.add_argument(
        "--max-rejected",
        type=float,
        default=1.0,
        metavar="F",
        help="also keep the share of rejected requests at or below F [1]",
    )
    group.add_argument(
        "--tolerance", type=float, default=0.01, metavar="F", help="relative precision of the load that is found [0.01]"
    )
    group.add_argument("--json", type=Path, metavar="OUT", help="write the loads found and every run as JSON")
    group.add_argument("--report", type=Path, metavar="OUT", help="write an HTML page with the curves")
    add_seeds_argument(group)
    add_ray_argument(group)
    group.add_argument("--quiet", action="store_true", help="show no progress bar and no table")


@dataclass
class Curve:
    """One setting's runs: rate scale -> summary. Runs are cached, so a second target simulates only new scales."""

    args: argparse.Namespace
    workload: Workload
    name: str
    bar: Progress | None = None
    points: dict[float, dict[str, Any]] = field(default_factory=dict)

    def at(self, scale: float) -> dict[str, Any]:
        """The numbers of a run at `scale`."""
        if scale not in self.points:
            workload = self.workload.scaled(scale)
            setup = named_setup(self.args, workload, self.name)
            self.points[scale] = summary(self._simulated(workload, setup, f"{self.name} x{scale:.3f}"))
        return self.points[scale]

    def _simulated(self, workload: Workload, setup: Setup, what: str) -> Outcome:
        """Simulate one run, and show its progress if there is a bar."""
        if (bar := self.bar) is None:
            return simulate(workload, setup)
        task = bar.add_task(what, total=len(workload))
        outcome = simulate(workload, setup, None, lambda done, _: bar.update(task, completed=done))
        bar.remove_task(task)
        return outcome

    def search(self, targets: list[float]) -> dict[str, float]:
        """The largest scale that holds each target."""
        start, tolerance = self.args.rate_scale, self.args.tolerance
        return {
            f"{target:g}": largest_scale(lambda s, t=target: self.meets(s, t), start, tolerance)  # type: ignore[misc]
            for target in targets
        }

    def meets(self, scale: float, target: float) -> bool:
        """Whether attainment, wait and rejections hold at `scale`."""
        numbers = self.at(scale)
        wait = numbers["wait_s"]["p999"]
        limit = self.args.max_wait_s
        waits = limit is None or (wait is not None and wait <= limit)
        kept = numbers["rejected"] <= self.args.max_rejected * numbers["requests"]
        return bool(numbers["slo_attainment"] >= target and waits and kept)


def run_goodput(args: argparse.Namespace) -> int:
    """Search for every setting and target and write the requested outputs. Returns the exit status."""
    check_named(args)
    if args.concurrent_sessions:
        raise ConfigError(
            "goodput searches for a rate, and --concurrent-sessions has none; give --sessions-per-hour R instead, or "
            "run compare at several values of --concurrent-sessions"
        )
    targets = _targets(args.targets)
    for flag, allowed in SEARCH_RANGES.items():
        allowed.check(f"--{flag.replace('_', '-')}", getattr(args, flag))
    workload = load_workload(argparse.Namespace(**{**vars(args), "rate_scale": 1.0}), profile_of(args).context_length)
    curves = {name: Curve(args, workload, name) for name in args.names}
    found: dict[str, dict[str, float]] = {}
    with progress_bar(args.quiet) as bar:
        if args.ray is not None:
            given = {key: value for key, value in vars(args).items() if not callable(value)}
            jobs = [(given, name, targets) for name in args.names]
            with TaskPool(workload, 1, bar, args.ray) as pool:
                for name, (scales, points) in zip(args.names, pool.each("settings", searched, jobs), strict=True):
                    found[name], curves[name].points = scales, points
        for name, curve in curves.items():
            if args.ray is None:
                curve.bar = bar
                found[name] = curve.search(targets)
    load = offered_load(workload)
    by_seed = _over_seeds(args, workload, found)
    _write(args, found, curves, load, by_seed)
    if not args.quiet:
        setup = named_setup(args, workload, args.names[0])
        title, profile = f"{workload.name} on {setup.replicas} x {setup.profile.name}", setup.profile
        error = trust(profile.error, profile.measured)
        print(f"{title} (cost model error: {error}); SLO: {slo_text(setup.slo)}")
        Console().print(_table(by_seed, load))
        if warning := next(iter(points_of(curves)))["warning"]:
            print_warning(Console(), warning)
        print_notes(workload.notes)
    return 0


Scales = dict[str, dict[str, list[float]]]
"""The largest scale of each seed, by setting and target."""


def _over_seeds(args: argparse.Namespace, workload: Workload, first: dict[str, dict[str, float]]) -> Scales:
    """The scales of all seeds, given those of the first. Each seed is a search of its own."""
    targets = _targets(args.targets)
    jobs = []
    for seed in range(1, args.seeds):
        given, drawn = of_seed(args, workload, seed)
        plain = {key: value for key, value in vars(given).items() if not callable(value)}
        jobs += [(drawn, (plain, name, targets)) for name in args.names]
    with progress_bar(args.quiet) as bar, TaskPool(workload, min(len(jobs) or 1, cpu_count()), bar, args.ray) as pool:
        found = pool.each("seeds", _searched_of_seed, jobs) if jobs else []
    scales: Scales = {name: {target: [scale] for target, scale in of.items()} for name, of in first.items()}
    for (_, (_, name, _)), (of_seed_, _) in zip(jobs, found, strict=True):
        for target, scale in of_seed_.items():
            scales[name][target].append(scale)
    return scales


def _searched_of_seed(
    _: Workload, job: tuple[Workload, tuple[dict[str, Any], str, list[float]]]
) -> tuple[dict[str, float], dict[float, dict[str, Any]]]:
    return searched(*job)


def searched(
    workload: Workload, job: tuple[dict[str, Any], str, list[float]]
) -> tuple[dict[str, float], dict[float, dict[str, Any]]]:
    """The scales of one setting and its runs; the job is the arguments by name, the setting and the targets."""
    given, name, targets = job
    curve = Curve(argparse.Namespace(**given), workload, name)
    return curve.search(targets), curve.points


def points_of(curves: dict[str, Curve]) -> list[dict[str, Any]]:
    """The numbers of all runs."""
    return [numbers for curve in curves.values() for numbers in curve.points.values()]


def _targets(text: str) -> list[float]:
    try:
        targets = [float(word) for word in text.split(",")]
    except ValueError:
        targets = []
    if not targets or not all(0.0 < target <= 1.0 for target in targets):
        raise ConfigError(f"--targets is {text!r}; it must be shares above 0 and at most 1, like 0.9,0.99")
    return targets


def _write(
    args: argparse.Namespace,
    found: dict[str, dict[str, float]],
    curves: dict[str, Curve],
    load: OfferedLoad,
    scales: Scales,
) -> None:
    points = {name: sorted(curve.points.items()) for name, curve in curves.items()}
    numbers: dict[str, Any] = {"largest_scale": found, "points": points}
    if args.seeds > 1:
        numbers["seeds"] = scales
        numbers["intervals"] = {
            name: {target: asdict(interval(values)) for target, values in of.items()} for name, of in scales.items()
        }
    write_numbers(args.json, numbers)
    if args.report is not None:
        lines = {name: [(scale, run["slo_attainment"]) for scale, run in runs] for name, runs in points.items()}
        first = next(iter(curves.values()))
        setup = named_setup(args, first.workload, first.name)
        facts, warning = facts_of(first.workload, setup, command_line()), setup.profile.warning
        title = f"Goodput on {first.workload.name}"
        write_curves(args.report, lines, found, title, load, facts, [warning] if warning else [])


def _table(found: Scales, load: OfferedLoad) -> Table:
    seeds = len(next(iter(next(iter(found.values())).values())))
    over = f", mean of {seeds} seeds ± half of the 95 % interval" if seeds > 1 else ""
    table = Table(title=f"largest rate scale ({load.unit}){over}")
    table.add_column("")
    targets = next(iter(found.values()))
    for target in targets:
        table.add_column(f"{100 * float(target):g} %", justify="right")
    for name, scales in found.items():
        table.add_row(name, *(_scale_text(values, load) for values in scales.values()))
    return table


def _scale_text(values: list[float], load: OfferedLoad) -> str:
    found = interval(values)
    spread = f" ± {found.half:.2f}" if len(values) > 1 else ""
    return f"{found.mean:.2f}{spread} ({found.mean * load.rate:.1f})"
