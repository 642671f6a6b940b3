"""Goodput: how many requests meet their targets under each setting, and what that costs whom.

    python benchmarks/goodput.py            the table on the recorded traces (about half an hour on two cores)
    python benchmarks/goodput.py --short    one point per trace, for CI (under two minutes)
    python benchmarks/goodput.py --capacity the largest scale of Azure conv at 90 and 99 % attainment
    python benchmarks/goodput.py --ablation the same policy with one mechanism left out

One H100 with Llama-3-8B in the simulator, no prefix cache. A request meets its SLO if its first token comes within
max(1 s, 5 x the unloaded prefill of its whole prompt) and its mean time per output token is at most 50 ms; rejected and
unfinished requests are misses. Policies know no output length. `reference` is the project's reference simulation, from
which baselines must not differ by more than 1.5 points. Mooncake's time stamps tick every 3 s and are spread over the
tick by each seed; its columns are means over seeds, with the half width of the 95 % interval. Azure has no seed.
`bound` is what no scheduler could beat (`tokenyard.sim.bounds`).
"""

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenyard.base import SchedulerSettings
from tokenyard.cost import get_profile
from tokenyard.sim.bounds import attainment_bound
from tokenyard.sim.engine import Setup, SloTargets, simulate
from tokenyard.sim.metrics import summary
from tokenyard.sim.presets import common_settings, preset, preset_names
from tokenyard.sim.search import largest_scale
from tokenyard.sim.traces import ReadOptions, read_trace
from tokenyard.sim.workload import Workload

TRACES = Path(__file__).resolve().parents[2] / "shared/traces"
MOONCAKE, AZURE = "mooncake conv", "azure conv"
FILES = {
    MOONCAKE: ("mooncake/conversation_trace.jsonl.gz", "mooncake", 4000),
    AZURE: ("azure2023/AzureLLMInferenceTrace_conv.csv.gz", "azure", None),
}
PROFILE = get_profile("h100", "llama-3-8b")
TOLERANCE_POINTS = 1.5
MOST_WAIT_S = 60.0

POLICIES: dict[str, dict[str, Any]] = {
    "fcfs-time": {"step_budget": "time", "max_partial_prefills": 4},
    "edf": {"schedule_policy": "edf"},
    "slo": {"schedule_policy": "slo"},
    "slo, wait 58 s": {"schedule_policy": "slo", "slo_max_wait_s": 58.0},
    "slo, wait 55 s": {"schedule_policy": "slo", "slo_max_wait_s": 55.0},
    "slo, reject": {"schedule_policy": "slo", "slo_reject": True},
}
ABLATIONS: dict[str, dict[str, Any]] = {
    "all": POLICIES["slo, wait 58 s"],
    "without the step-time budget": {**POLICIES["slo, wait 58 s"], "step_budget": "tokens", "enable_mixed_chunk": True},
    "without relegation": POLICIES["edf"],
    "without deadline order": POLICIES["fcfs-time"],
}

REFERENCE: dict[tuple[str, float], dict[str, float]] = {
    (MOONCAKE, 0.15): {"sglang-default": 85.5, "vllm-default": 85.6, "fcfs-time": 88.4, "edf": 99.9, "slo": 100.0},
    (MOONCAKE, 0.20): {"sglang-default": 77.3, "vllm-default": 77.5, "fcfs-time": 80.3, "edf": 99.0, "slo": 99.7},
    (MOONCAKE, 0.25): {"sglang-default": 62.7, "vllm-default": 62.8, "fcfs-time": 66.7, "edf": 96.0, "slo": 98.6},
    (MOONCAKE, 0.30): {"sglang-default": 39.9, "vllm-default": 40.8, "fcfs-time": 44.0, "edf": 78.6, "slo": 94.8},
    (AZURE, 2.8): {"sglang-default": 82.2, "vllm-default": 89.5, "fcfs-time": 87.8, "edf": 87.8, "slo": 99.7},
    (AZURE, 3.0): {"sglang-default": 74.2, "vllm-default": 80.5, "fcfs-time": 79.0, "edf": 79.0, "slo": 99.3},
    (AZURE, 3.5): {"sglang-default": 46.3, "vllm-default": 60.6, "fcfs-time": 49.6, "edf": 49.6, "slo": 98.1},
    (AZURE, 4.0): {"sglang-default": 3.3, "vllm-default": 7.7, "fcfs-time": 8.6, "edf": 8.6, "slo": 96.1},
}
REFERENCE_WAIT_58 = {0.15: 100.0, 0.20: 99.7, 0.25: 98.7, 0.30: 94.4, 2.8: 99.7, 3.0: 99.1, 3.5: 90.1, 4.0: 54.0}
REFERENCE_REJECT = {0.15: 100.0, 0.20: 99.7, 0.25: 99.0, 0.30: 97.7, 2.8: 99.8, 3.0: 99.4, 3.5: 98.2, 4.0: 96.4}
BASELINES = ("sglang-default", "vllm-default")


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


def run_all(cases: list[Case], jobs: int) -> Iterator[tuple[Case, dict[str, Any]]]:
    """Simulate all cases, `jobs` at once, in order."""
    with ProcessPoolExecutor(jobs) as pool:
        yield from zip(cases, pool.map(run, cases), strict=True)


def reference(trace: str, scale: float, name: str) -> float | None:
    """What the reference simulation says, in %."""
    if name == "slo, wait 58 s":
        return REFERENCE_WAIT_58.get(scale)
    if name == "slo, reject":
        return REFERENCE_REJECT.get(scale)
    return REFERENCE.get((trace, scale), {}).get(name)


def print_table(results: list[tuple[Case, dict[str, Any]]]) -> bool:
    """One line per trace, scale and setting, seeds together. Returns whether all baselines are within tolerance."""
    print(
        "| trace | scale | setting | met % | reference | longest quarter | longest 5 % | rejected % | wait p99.9, max |"
    )
    print("| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    grouped: dict[tuple[str, float, str], list[dict[str, Any]]] = {}
    for case, numbers in results:
        grouped.setdefault((case.trace, case.scale, case.name), []).append(numbers)
    agree = True
    for (trace, scale, name), runs in grouped.items():
        met = [100 * one["slo_attainment"] for one in runs]
        known = reference(trace, scale, name)
        if name in BASELINES and known is not None:
            agree &= abs(statistics.mean(met) - known) <= TOLERANCE_POINTS
        lengths = [one["slo_attainment_by_length"] for one in runs]
        quarter = statistics.mean(100 * one["longest_quarter"] for one in lengths)
        longest = statistics.mean(100 * one["longest_5_percent"] for one in lengths)
        rejected = statistics.mean(100 * one["rejected"] / one["requests"] for one in runs)
        waits = f"{_mean(runs, 'p999'):.1f}, {max(one['wait_s']['max'] for one in runs):.1f}"
        shown = "" if known is None else f"{known:.1f}"
        cells = (
            trace,
            f"{scale:g}",
            name,
            _interval(met),
            shown,
            f"{quarter:.1f}",
            f"{longest:.1f}",
            f"{rejected:.2f}",
        )
        print("| " + " | ".join((*cells, waits)) + " |")
    return agree


def _mean(runs: list[dict[str, Any]], quantile: str) -> float:
    return statistics.mean(one["wait_s"][quantile] for one in runs)


def _interval(values: list[float]) -> str:
    """Mean, and the half width of the 95 % interval (Student's t) where there are several values."""
    if len(values) < 2:
        return f"{values[0]:.2f}"
    t = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}.get(len(values), 2.3)
    return f"{statistics.mean(values):.2f} ± {t * statistics.stdev(values) / len(values) ** 0.5:.2f}"


def print_bounds(points: list[tuple[str, float]]) -> None:
    """What no scheduler could beat."""
    print("\n| trace | scale | bound % |\n| --- | ---: | ---: |")
    for trace, scale in points:
        bound = attainment_bound(load(trace, 0).scaled(scale), PROFILE, SloTargets())
        print(f"| {trace} | {scale:g} | {100 * bound:.2f} |")


def capacity(name: str, target: float, tolerance: float) -> float:
    """The largest scale of Azure conv with `target` attainment and a p99.9 wait of at most `MOST_WAIT_S`."""
    workload = load(AZURE, 0)

    def meets(scale: float) -> bool:
        scaled = workload.scaled(scale)
        numbers = summary(simulate(scaled, Setup(PROFILE, settings_of(name, scaled))))
        return bool(numbers["slo_attainment"] >= target and (numbers["wait_s"]["p999"] or 0.0) <= MOST_WAIT_S)

    return largest_scale(meets, 2.5, tolerance)


def print_capacity(names: list[str], tolerance: float) -> None:
    """Largest scales at 90 and 99 %."""
    print(f"| setting, p99.9 wait <= {MOST_WAIT_S:g} s | at 90 % | at 99 % |\n| --- | ---: | ---: |")
    for name in names:
        print(f"| {name} | {capacity(name, 0.9, tolerance):.2f} | {capacity(name, 0.99, tolerance):.2f} |", flush=True)


def make_cases(args: argparse.Namespace) -> list[Case]:
    """The runs that the arguments ask for."""
    names = [*BASELINES, *POLICIES]
    if args.short:
        points, names, seeds = [(AZURE, 3.0), (MOONCAKE, 0.30)], [*BASELINES, "slo, wait 58 s"], 1
    else:
        points, seeds = list(REFERENCE), args.seeds
    if args.ablation:
        points = [(MOONCAKE, 0.25), (AZURE, 3.0)]
        return [
            Case(trace, scale, name, 0, tuple(changes.items()))
            for trace, scale in points
            for name, changes in ABLATIONS.items()
        ]
    if args.only is not None:
        points = [point for point in points if point[0].startswith(args.only)]
    return [
        Case(trace, scale, name, seed)
        for trace, scale in points
        for name in names
        for seed in range(seeds if trace == MOONCAKE else 1)
    ]


def main() -> int:
    """Run what was asked for; the exit status is 1 if a baseline is off by more than the tolerance."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="one point per trace")
    parser.add_argument("--capacity", action="store_true", help="bisect the scale instead")
    parser.add_argument("--ablation", action="store_true", help="leave one mechanism out instead")
    parser.add_argument("--only", choices=("mooncake", "azure"), help="only this trace")
    parser.add_argument("--seeds", type=int, default=3, help="for the spread of Mooncake's time stamps [3]")
    parser.add_argument("--tolerance", type=float, default=0.005, help="relative, of a capacity [0.005]")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once [2]")
    parser.add_argument("--json", type=Path, help="also write every run's numbers")
    args = parser.parse_args()
    if args.capacity:
        print_capacity([*BASELINES, *(name for name in POLICIES if name.startswith("slo"))], args.tolerance)
        return 0
    results = list(run_all(make_cases(args), args.jobs))
    agree = print_table(results)
    if not args.short and not args.ablation:
        print_bounds(sorted({(case.trace, case.scale) for case, _ in results}))
    if args.json is not None:
        rows = [
            {"trace": case.trace, "scale": case.scale, "setting": case.name, "seed": case.seed, **numbers}
            for case, numbers in results
        ]
        args.json.write_text(json.dumps(rows, indent=2) + "\n")
    if not agree:
        print(f"\na baseline differs from the reference by more than {TOLERANCE_POINTS} points")
    return 0 if agree else 1


if __name__ == "__main__":
    raise SystemExit(main())
