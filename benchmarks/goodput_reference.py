"""The simulator against the reference simulation, point by point, and what each mechanism of `slo` is worth.

    python -m benchmarks.goodput_reference             all points (about half an hour on two cores)
    python -m benchmarks.goodput_reference --ablation  the same policy with one mechanism left out

Setting and targets are those of `benchmarks.goodput`. `reference` is the project's reference simulation, from which
baselines must not differ by more than 1.5 points; the exit status is 1 if one does. `bound` is what no scheduler could
beat (`tokenyard.sim.planner.oracle_bounds`).
"""

import argparse
import json
import statistics
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.goodput import (
    AZURE,
    MOONCAKE,
    POLICIES,
    PROFILE,
    TOLERANCE_POINTS,
    Case,
    interval,
    load,
    missing_traces,
    run,
)
from tokenyard.sim.planner.oracle_bounds import attainment_bound
from tokenyard.sim.simulate import DefaultSlo

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
            interval(met),
            shown,
            f"{quarter:.1f}",
            f"{longest:.1f}",
            f"{rejected:.2f}",
        )
        print("| " + " | ".join((*cells, waits)) + " |")
    return agree


def _mean(runs: list[dict[str, Any]], quantile: str) -> float:
    return statistics.mean(one["wait_s"][quantile] for one in runs)


def print_bounds(points: list[tuple[str, float]]) -> None:
    """What no scheduler could beat."""
    print("\n| trace | scale | bound % |\n| --- | ---: | ---: |")
    for trace, scale in points:
        bound = attainment_bound(load(trace, 0).scaled(scale), PROFILE, DefaultSlo())
        print(f"| {trace} | {scale:g} | {100 * bound:.2f} |")


def make_cases(args: argparse.Namespace) -> list[Case]:
    """The runs that the arguments ask for."""
    if args.ablation:
        points = [(MOONCAKE, 0.25), (AZURE, 3.0)]
        return [
            Case(trace, scale, name, 0, tuple(changes.items()))
            for trace, scale in points
            for name, changes in ABLATIONS.items()
        ]
    points = [point for point in REFERENCE if args.only is None or point[0].startswith(args.only)]
    return [
        Case(trace, scale, name, seed)
        for trace, scale in points
        for name in [*BASELINES, *POLICIES]
        for seed in range(args.seeds if trace == MOONCAKE else 1)
    ]


def main() -> int:
    """Run what was asked for; the exit status is 1 if a baseline is off by more than the tolerance."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ablation", action="store_true", help="leave one mechanism out instead")
    parser.add_argument("--only", choices=("mooncake", "azure"), help="only this trace")
    parser.add_argument("--seeds", type=int, default=3, help="for the spread of Mooncake's time stamps [3]")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once [2]")
    parser.add_argument("--json", type=Path, help="also write every run's numbers")
    args = parser.parse_args()
    missing = missing_traces()
    if missing is not None:
        print(missing)
        return 0
    results = list(run_all(make_cases(args), args.jobs))
    agree = print_table(results)
    if not args.ablation:
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
