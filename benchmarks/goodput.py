"""Goodput: how many requests meet their targets on the recorded traces, against the goals, and which requests pay.

    python -m benchmarks.goodput            all goals, Mooncake over five seeds (about ten minutes on two cores)
    python -m benchmarks.goodput --short    one seed, each trace at its hardest, Azure without a search for capacities
                                            (a minute or two)

Exits with 1 if a goal is missed, or if a baseline is further than 1.5 points from the reference simulation, which would
mean that the simulator is wrong. Without the traces, which are looked for in `../shared`, it says so and exits with 0.

One H100 with Llama-3-8B in the simulator, no prefix cache. A request meets its SLO if its first token comes within
max(1 s, 5 x the unloaded prefill of its whole prompt) and its mean time per output token is at most 50 ms; rejected and
unfinished requests are misses. Policies know no output length. Mooncake's time stamps tick every 3 s, and each seed
spreads them over the tick; its figures are means over seeds with the half width of the 95 % interval (Student's t).
Azure has no seed. `best` is the best result known from elsewhere, wait the time to first token beyond the unloaded
prefill. More points, each against the reference: `python -m benchmarks.goodput_reference`.
"""

import argparse
import statistics
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tokenyard.base import SchedulerSettings
from tokenyard.cost import get_profile
from tokenyard.sim.engine.presets import common_settings, preset, preset_names
from tokenyard.sim.planner.trial import largest_scale
from tokenyard.sim.report.summary import summary
from tokenyard.sim.simulate import Setup, simulate
from tokenyard.sim.traces.formats import read_trace
from tokenyard.sim.traces.read_options import ReadOptions
from tokenyard.sim.traces.workload import Workload

TRACES = Path(__file__).resolve().parents[2] / "shared/traces"
MOONCAKE, AZURE = "mooncake conv", "azure conv"
FILES = {
    MOONCAKE: ("mooncake/conversation_trace.jsonl.gz", "mooncake", 4000),
    AZURE: ("azure2023/AzureLLMInferenceTrace_conv.csv.gz", "azure", None),
}
PROFILE = get_profile("h100", "llama-3-8b")
TOLERANCE_POINTS = 1.5
SEEDS = 5
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}
"""Student's t for the 95 % interval of so many values."""

BASELINE, WAIT, REJECT = "vllm-default", "slo, wait 58 s", "slo, reject"
POLICIES: dict[str, dict[str, Any]] = {
    "fcfs-time": {"step_budget": "time", "max_partial_prefills": 4},
    "edf": {"schedule_policy": "edf"},
    "slo": {"schedule_policy": "slo"},
    WAIT: {"schedule_policy": "slo", "slo_max_wait_s": 58.0},
    "slo, wait 55 s": {"schedule_policy": "slo", "slo_max_wait_s": 55.0},
    REJECT: {"schedule_policy": "slo", "slo_reject": True},
}


@dataclass(frozen=True)
class Case:
    """One run: a trace at a scale under a named setting."""

    trace: str
    scale: float
    name: str
    seed: int
    changes: tuple[tuple[str, Any], ...] | None = None


def load(trace: str, seed: int, folder: Path = TRACES) -> Workload:
    """The trace at its own rate."""
    file, trace_format, limit = FILES[trace]
    return read_trace(folder / file, trace_format, ReadOptions(seed=seed, limit=limit))


def missing_traces() -> str | None:
    """Why there is nothing to measure, or None."""
    missing = [str(TRACES / file) for file, _, _ in FILES.values() if not (TRACES / file).exists()]
    return f"nothing measured: {missing[0]} is not there" if missing else None


def settings_of(name: str, workload: Workload, changes: Mapping[str, Any] | None = None) -> SchedulerSettings:
    """A preset, or our own scheduler with the same pages, rows and headroom as the presets."""
    context = workload.max_prompt_tokens + workload.max_output_tokens + 1
    if name in preset_names():
        return preset(name, context)
    return replace(common_settings(context), headroom="history", **(POLICIES[name] if changes is None else changes))


def run(case: Case) -> dict[str, Any]:
    """Simulate one case."""
    workload = load(case.trace, case.seed).scaled(case.scale)
    changes = None if case.changes is None else dict(case.changes)
    return summary(simulate(workload, Setup(PROFILE, settings_of(case.name, workload, changes))))


# ---- goals -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Limits:
    """What a gain may cost: the p99.9 wait of those who were served, in seconds, and the share that was rejected."""

    wait_s: float = 60.0
    rejected: float = 0.0

    def hold(self, numbers: dict[str, Any]) -> bool:
        """Whether a run kept to them."""
        rejected = numbers["rejected"] <= self.rejected * numbers["requests"]
        return bool(rejected and (numbers["wait_s"]["p999"] or 0.0) <= self.wait_s)


@dataclass(frozen=True)
class Goal:
    """What is to be reached at one point, in %, and what was found elsewhere: by the baseline and at best.

    `part` picks the requests that count: all, or one of the classes by length of `summary`.
    """

    trace: str
    scale: float
    goal: float
    best: float
    baseline: float
    part: str = "all"
    name: str = WAIT
    limits: Limits = Limits()

    def value(self, numbers: dict[str, Any]) -> float:
        """The share of the requests that meet their targets, in %."""
        by_length = numbers["slo_attainment_by_length"]
        return float(100.0 * (numbers["slo_attainment"] if self.part == "all" else by_length[self.part]))

    def cases(self, seeds: int) -> tuple[list[Case], list[Case]]:
        """The runs that show it: ours and the baseline's."""
        used = range(seeds if self.trace == MOONCAKE else 1)
        ours, theirs = ([Case(self.trace, self.scale, name, seed) for seed in used] for name in (self.name, BASELINE))
        return ours, theirs


@dataclass(frozen=True)
class CapacityGoal:
    """The largest scale of Azure conv at which a share of the requests meets its targets, within the usual limits."""

    share: float
    goal: float
    best: float
    baseline: float


GOALS = (
    Goal(MOONCAKE, 0.20, goal=99.0, best=99.7, baseline=77.5),
    Goal(MOONCAKE, 0.25, goal=97.5, best=98.7, baseline=62.8),
    Goal(MOONCAKE, 0.30, goal=92.5, best=94.4, baseline=40.8),
    Goal(AZURE, 3.0, goal=98.5, best=99.1, baseline=80.5),
    Goal(AZURE, 3.0, goal=94.0, best=96.0, baseline=74.0, part="longest_quarter"),
    Goal(AZURE, 3.0, goal=80.0, best=86.0, baseline=56.0, part="longest_5_percent"),
    Goal(AZURE, 4.0, goal=95.0, best=96.4, baseline=7.7, name=REJECT, limits=Limits(wait_s=2.0, rejected=0.05)),
)
CAPACITIES = (
    CapacityGoal(0.90, goal=3.35, best=3.50, baseline=2.78),
    CapacityGoal(0.99, goal=2.90, best=3.02, baseline=2.42),
)


def hardest(goals: Iterable[Goal]) -> list[Goal]:
    """The goals of each trace and policy at its largest scale."""
    largest = {(goal.trace, goal.name): goal.scale for goal in sorted(goals, key=lambda goal: goal.scale)}
    return [goal for goal in goals if goal.scale == largest[goal.trace, goal.name]]


def interval(values: list[float]) -> str:
    """Mean, and the half width of the 95 % interval where there are several values."""
    if len(values) < 2:
        return f"{values[0]:.2f}"
    t = T_95.get(len(values), 2.2)
    return f"{statistics.mean(values):.2f} ± {t * statistics.stdev(values) / len(values) ** 0.5:.2f}"


def print_goals(goals: Iterable[Goal], seeds: int, jobs: int) -> bool:
    """A line per goal. Returns whether all are reached and the baselines are those of the reference."""
    print(f"| trace, scale | who | {BASELINE} | ours % | goal | best | wait p99.9, max s | rejected % | reached |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |")
    wanted = {case: None for goal in goals for cases in goal.cases(seeds) for case in cases}
    with ProcessPoolExecutor(jobs) as pool:
        results = dict(zip(wanted, pool.map(run, wanted), strict=True))
    reached = [_print_goal(goal, seeds, results) for goal in goals]
    return all(reached)


def _print_goal(goal: Goal, seeds: int, results: dict[Case, dict[str, Any]]) -> bool:
    ours, theirs = ([results[case] for case in cases] for cases in goal.cases(seeds))
    values, baseline = [goal.value(one) for one in ours], statistics.mean(goal.value(one) for one in theirs)
    agrees = abs(baseline - goal.baseline) <= TOLERANCE_POINTS
    reached = statistics.mean(values) >= goal.goal and all(goal.limits.hold(one) for one in ours)
    waits = f"{max(one['wait_s']['p999'] for one in ours):.1f}, {max(one['wait_s']['max'] for one in ours):.1f}"
    rejected = statistics.mean(100 * one["rejected"] / one["requests"] for one in ours)
    known = f"{baseline:.1f}" + ("" if agrees else f" (not {goal.baseline})")
    cells = (f"{goal.trace} {goal.scale:g}", goal.part.replace("_", " "), known, interval(values))
    rest = (f"{goal.goal:g}", f"{goal.best:g}", waits, f"{rejected:.2f}", "yes" if reached else "**no**")
    print("| " + " | ".join((*cells, *rest)) + " |", flush=True)
    return reached and agrees


def largest_azure_scale(name: str, share: float, tolerance: float) -> float:
    """The largest scale of Azure conv at which `share` of the requests meets its targets within the usual limits."""
    workload = load(AZURE, 0)

    def meets(scale: float) -> bool:
        scaled = workload.scaled(scale)
        numbers = summary(simulate(scaled, Setup(PROFILE, settings_of(name, scaled))))
        return bool(numbers["slo_attainment"] >= share and Limits().hold(numbers))

    return largest_scale(meets, 2.5, tolerance)


def print_capacities(tolerance: float, jobs: int) -> bool:
    """A line per goal of capacity. Returns whether all are reached."""
    find: Callable[[tuple[str, float]], float] = partial(_find, tolerance)
    wanted = [(name, goal.share) for goal in CAPACITIES for name in (BASELINE, WAIT)]
    print(f"\n| azure conv, largest scale with | {BASELINE} | ours | goal | best | reached |")
    print("| --- | ---: | ---: | ---: | ---: | --- |")
    with ProcessPoolExecutor(jobs) as pool:
        found = dict(zip(wanted, pool.map(find, wanted), strict=True))
    good = True
    for goal in CAPACITIES:
        ours, baseline = found[WAIT, goal.share], found[BASELINE, goal.share]
        reached = ours >= goal.goal
        good &= reached
        print(
            f"| {100 * goal.share:g} % in target | {baseline:.2f} (known: {goal.baseline}) | {ours:.2f} | {goal.goal} "
            f"| {goal.best:.2f} | {'yes' if reached else '**no**'} |"
        )
    return good


def _find(tolerance: float, wanted: tuple[str, float]) -> float:
    return largest_azure_scale(*wanted, tolerance)


def print_at_capacity_goals(jobs: int) -> bool:
    """Instead of searching: whether each share is there at the scale of its goal."""
    print("\n| azure conv at the goal for | scale | ours % | wait p99.9, max s | reached |")
    print("| --- | ---: | ---: | ---: | --- |")
    with ProcessPoolExecutor(jobs) as pool:
        runs = list(pool.map(run, [Case(AZURE, goal.goal, WAIT, 0) for goal in CAPACITIES]))
    good = True
    for goal, numbers in zip(CAPACITIES, runs, strict=True):
        reached = numbers["slo_attainment"] >= goal.share and Limits().hold(numbers)
        good &= reached
        waits = f"{numbers['wait_s']['p999']:.1f}, {numbers['wait_s']['max']:.1f}"
        met = f"{100 * goal.share:g} % | {goal.goal} | {100 * numbers['slo_attainment']:.2f}"
        print(f"| {met} | {waits} | {'yes' if reached else '**no**'} |")
    return good


def main() -> int:
    """Measure; the exit status is 1 if a goal is missed or a baseline is not what it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="one seed, each trace at its hardest, no search")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"for the spread of Mooncake's time stamps [{SEEDS}]")
    parser.add_argument("--tolerance", type=float, default=0.005, help="relative, of a capacity [0.005]")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once [2]")
    args = parser.parse_args()
    missing = missing_traces()
    if missing is not None:
        print(missing)
        return 0
    good = print_goals(*((hardest(GOALS), 1) if args.short else (GOALS, args.seeds)), args.jobs)
    good &= print_at_capacity_goals(args.jobs) if args.short else print_capacities(args.tolerance, args.jobs)
    if not good:
        print(f"\na goal is missed, or a baseline is more than {TOLERANCE_POINTS} points from the reference simulation")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
