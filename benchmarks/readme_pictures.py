"""The two pictures of the README: what the policy `slo` gains on the Azure conv trace, and who pays for it.

    python -m benchmarks.readme_pictures [--jobs N] [--limit N] [--out docs/img]

Settings and trace are those of `benchmarks.goodput`. Writes `gain.svg` and `price.svg` and prints the figures in them.
"""

import argparse
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.goodput import AZURE, PROFILE, load, settings_of
from tokenyard.sim.charts import Chart, picture
from tokenyard.sim.engine import Setup, simulate
from tokenyard.sim.metrics import summary

NAMES = ("sglang-default", "vllm-default", "slo, wait 58 s", "slo, reject")
SCALES = (2.0, 2.4, 2.8, 3.0, 3.2, 3.6, 4.0)
PRICE_SCALE = 3.0
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


def main() -> None:
    """Run everything, write the pictures, print a line per run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--limit", type=int)
    parser.add_argument("--out", type=Path, default=Path("docs/img"))
    args = parser.parse_args()
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
