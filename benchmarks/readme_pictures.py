"""The pictures of the README: what the policy `slo` gains on the Azure conv trace, who pays for it, and a plan.

    python -m benchmarks.readme_pictures [--jobs N] [--limit N] [--out docs/img]
    python -m benchmarks.readme_pictures --sessions FILE  # of sessions, from `benchmarks.agents --json FILE`

Settings and trace are those of `benchmarks.goodput`. Writes `gain.svg`, `price.svg` and `plan.svg` (`--plan` only this
one) and prints the figures in them. The plan is that of `tokenyard plan` for the first 3,000 requests of the trace at
twelve times its rate.
"""

import argparse
import json
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.goodput import AZURE, PROFILE, load, settings_of
from benchmarks.simulator_speed import AZURE as AZURE_FILE
from tokenyard.cli.capacity_plan import add_capacity_plan_arguments, make_options, planner_on
from tokenyard.cli.capacity_plan_report import capacity_plan_charts, capacity_plan_document
from tokenyard.cli.simulation_arguments import load_workload, progress_bar
from tokenyard.cli.task_pool import TaskPool
from tokenyard.sim.report.summary import summary
from tokenyard.sim.report.svg_charts import Chart, picture
from tokenyard.sim.simulate import Setup, simulate

NAMES = ("sglang-default", "vllm-default", "slo, wait 58 s", "slo, reject")
SCALES = (2.0, 2.4, 2.8, 3.0, 3.2, 3.6, 4.0)
PRICE_SCALE = 3.0
PLAN_SCALE = 12.0
PLAN_FLAGS = ("--limit", "3000", "--devices", "h100,a100", "--policies", "vllm-default,slo", "--seeds", "2")
LENGTHS = ("shortest_quarter", "second_quarter", "third_quarter", "longest_quarter", "longest_5_percent")

Results = dict[tuple[str, float], dict[str, Any]]


def run(name: str, scale: float, limit: int | None) -> dict[str, Any]:
    """The numbers of one setting at one scale of the trace."""
    workload = load(AZURE, seed=0).limited(limit).scaled(scale)
    numbers = summary(simulate(workload, Setup(PROFILE, settings_of(name, workload))))
    return {**numbers, "rate": len(workload) / float(workload.arrival_s[-1])}


def gain(results: Results) -> list[Chart]:
    """Attainment against load."""
    chart = Chart("Requests that meet their SLO, against load", "requests a second", "met (%)", y_from_zero=True)
    for name in NAMES:
        runs = [results[name, scale] for scale in SCALES]
        chart.line([one["rate"] for one in runs], [100.0 * one["slo_attainment"] for one in runs], name)
    return [chart]


def price(results: Results) -> list[Chart]:
    """Attainment by prompt length, and the longest waits, at one load."""
    rate = f"at {results[NAMES[0], PRICE_SCALE]['rate']:.1f} requests a second"
    lengths = Chart(f"Who gains: SLO met by prompt length, {rate}", "", "met (%)")
    waits = Chart(f"Who pays: the longest waits, {rate}", "", "wait beyond the unloaded prefill (s)")
    for name in NAMES:
        numbers = results[name, PRICE_SCALE]
        shares = [100.0 * numbers["slo_attainment_by_length"][key] for key in LENGTHS]
        lengths.bars([key.replace("_percent", " %").replace("_", " ") for key in LENGTHS], shares, name)
        waits.bars(["p99", "p99.9", "max"], [numbers["wait_s"][key] for key in ("p99", "p999", "max")], name)
    return [lengths, waits]


def sessions_picture(path: Path) -> list[Chart]:
    """Sessions of coding agents under several policies, means over seeds: what they gain, and what it costs."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    turns = Chart(f"{lines[0]['load']} sessions of coding agents: turns an hour", "", "turns an hour")
    waits = Chart("The price: time to the first token", "", "seconds")
    for row in dict.fromkeys(line["row"] for line in lines):
        runs = [line for line in lines if line["row"] == row]
        name = row.replace(" --radix-eviction-policy", ",")
        turns.bars(["mean", "lowest"], [total([run["turns_per_hour"] for run in runs]) for total in (mean, min)], name)
        ttft = [mean(run["ttft_s"][key] for run in runs) for key in ("p50", "p95")]
        waits.bars(["p50", "p95", "longest wait"], [*ttft, max(run["longest_wait_s"] for run in runs)], name)
    return [turns, waits]


def plan_picture(jobs: int, limit: int | None) -> list[Chart]:
    """What serves the trace at twelve times its rate, on two devices, and how sure that is."""
    parser = argparse.ArgumentParser()
    add_capacity_plan_arguments(parser)
    words = ["--trace", str(AZURE_FILE), "--trace-format", "azure", "--rate-scale", f"{PLAN_SCALE:g}", *PLAN_FLAGS]
    args = parser.parse_args([*words, *(["--limit", str(limit)] if limit else [])])
    workload = load_workload(args)
    with progress_bar(False) as bar, TaskPool(workload, jobs, bar) as pool:
        plan = planner_on(pool, workload, args).plan(make_options(args, workload))
    assert plan is not None
    print(json.dumps(capacity_plan_document(plan, workload, args.target), indent=2))
    return capacity_plan_charts(plan)


def main() -> None:
    """Run everything, write the pictures, print a line per run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--limit", type=int)
    parser.add_argument("--out", type=Path, default=Path("docs/img"))
    parser.add_argument("--plan", action="store_true", help="only the picture of the plan")
    parser.add_argument("--sessions", type=Path, metavar="FILE", help="only the picture of sessions, from these runs")
    args = parser.parse_args()
    if args.sessions:
        charts = sessions_picture(args.sessions)
        (args.out / "sessions.svg").write_text(picture(charts), encoding="utf-8")
        return
    (args.out / "plan.svg").write_text(picture(plan_picture(args.jobs, args.limit)), encoding="utf-8")
    if args.plan:
        return
    cases = [(name, scale) for name in NAMES for scale in SCALES]
    with ProcessPoolExecutor(args.jobs) as pool:
        runs = pool.map(run, *zip(*cases, strict=True), [args.limit] * len(cases))
        results = dict(zip(cases, runs, strict=True))
    for (name, scale), numbers in results.items():
        shares = [f"{100 * numbers['slo_attainment_by_length'][key]:.1f}" for key in LENGTHS]
        waits = numbers["wait_s"]
        print(
            f"x{scale:g} ({numbers['rate']:.1f}/s) {name}: "
            f"met {100 * numbers['slo_attainment']:.1f} %, by length {' '.join(shares)}, rejected "
            f"{100 * numbers['rejected'] / numbers['requests']:.1f} %, wait p99.9 {waits['p999']:.1f} s, max "
            f"{waits['max']:.1f} s"
        )
    for name, charts in (("gain", gain(results)), ("price", price(results))):
        (args.out / f"{name}.svg").write_text(picture(charts), encoding="utf-8")


if __name__ == "__main__":
    main()
