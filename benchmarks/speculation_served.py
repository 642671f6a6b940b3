"""Does the simulator predict what speculative decoding brings? The same bursts, with drafts and without, both ways.

Run from the repository root: `python -m benchmarks.speculation_served [--executors mock demo] [--runs 4]`. About
40 s for each setting with four runs.

Bursts, calibrations and targets are those of `benchmarks.simulated_vs_served`: each measured burst is simulated with
the step costs, the host time and the marks of drafts (which were right, and of which tokens there were none) that the
tape has of the bursts before and after it, which are of other requests. The mock executor keeps to the cost profile of
an H100 and is configured with the share of drafts that are right; the demo model computes, and drafts come from prompt
lookup.

A target cuts through many answers that are close to it: with fcfs, from which the targets come, 30 % of the first
tokens are late by construction, and a few per cent of time move many requests across. So a goodput is the mean over
targets from 0.8 to 1.25 times those that the schedulers go by, for served and predicted alike.

A third row, which counts for nothing, is simulated with the costs of the measured runs themselves: where it agrees with
the server and the second row does not, the machine changed its speed between a run and the bursts around it.

Exits with 1 if tokens a second or goodput of a setting are off by more than 10 %.
"""

import argparse
import sys

from benchmarks.simulated_vs_served import (
    COMMON,
    MODELS,
    SPARE_SHARE,
    Calibrations,
    Run,
    calibrated,
    fitting_size,
    measured_numbers,
    serve,
    simulated_numbers,
    targets_seen,
)
from tokenyard.sim.simulate import Outcome, simulate

WORST_ERROR = 0.10
TARGET_SCALES = (0.8, 0.9, 1.0, 1.12, 1.25)
DRAFTS = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4}
EXECUTORS = {
    "mock": ["--executor", "mock", "--context-length", "1024"],
    "demo": [],
}
MOCK_RATES = (0.3, 0.8)
MODEL = MODELS["demo"]


def settings_of(executor: str) -> dict[str, dict]:
    """What is served, by name: first come first served, which gives the targets, then `slo` without and with drafts."""
    slo = {"schedule_policy": "slo"}
    plain = {"fcfs": {}, "slo": slo}
    if executor == "mock":
        drafting = {f"slo, {rate:g} right": {**slo, **DRAFTS, "mock_draft_acceptance": rate} for rate in MOCK_RATES}
    else:
        drafting = {"slo, NGRAM": {**slo, **DRAFTS}}
    return {**plain, **drafting}


def tokens_per_verify(outcomes: list[Outcome]) -> str:
    """Tokens that a row yields in a verifying step of simulated runs."""
    rows, right = (sum(one.counters[name] for one in outcomes) for name in ("verify_rows", "accepted_draft_tokens"))
    return f"{1 + right / rows:.2f}" if rows else "-"


def compare(name: str, runs: list[Run], found: Calibrations, targets: dict[str, float]) -> float:
    """Print a setting's figures, served and predicted; returns the larger error of tokens a second and goodput."""
    common, own = (
        [simulate(run.workload, found.setup(heard[run.number])) for run in runs] for heard in (found.around, found.own)
    )
    tokens = sum(int(run.workload.output_tokens.sum()) for run in runs)
    scaled = [{key: scale * value for key, value in targets.items()} for scale in TARGET_SCALES]
    rows = {
        "served": [measured_numbers(runs, one) for one in scaled],
        "predicted": [simulated_numbers(common, one) for one in scaled],
        "at own speed": [simulated_numbers(own, one) for one in scaled],
    }
    figures: dict[str, dict[str, float]] = {}
    for what, by_scale in rows.items():
        row = by_scale[TARGET_SCALES.index(1.0)]
        row["goodput"] = sum(one["goodput"] for one in by_scale) / len(by_scale)
        row["tokens_per_s"] = tokens / row["seconds"]
        shown = ("tokens_per_s", "goodput", "attainment", "ttft_p50_ms", "tpot_p50_ms", "tpot_p90_ms")
        print(f"{name:>16} {what:>12}: " + ", ".join(f"{key} {row[key]:.3g}" for key in shown), flush=True)
        figures[what] = row
    served, predicted = figures["served"], figures["predicted"]
    errors = [abs(predicted[key] / served[key] - 1.0) for key in ("tokens_per_s", "goodput")]
    print(
        f"{name:>16}: off by {100 * errors[0]:.1f} % (tokens/s) and {100 * errors[1]:.1f} % (goodput); predicted are "
        f"{tokens_per_verify(common)} tokens per verifying step"
    )
    return max(errors)


def main() -> None:
    """Serve and simulate all settings of the chosen executors."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--executors", nargs="+", choices=list(EXECUTORS), default=list(EXECUTORS))
    parser.add_argument("--runs", type=int, default=4, help="bursts that count, of each setting")
    options = parser.parse_args()
    worst = 0.0
    for executor in options.executors:
        command = EXECUTORS[executor]
        first = calibrated(serve(command, MODEL, COMMON, MODEL.first_guess, 1)[1])
        requests = fitting_size(MODEL, first.setup(first.around[0]))
        print(f"{executor}: bursts of {requests} requests")
        targets: dict[str, float] = {}
        for name, settings in settings_of(executor).items():
            count = round(options.runs * (1.0 + SPARE_SHARE))
            runs, tape = serve(command, MODEL, {**COMMON, **targets, **settings}, requests, count)
            found = calibrated(tape)
            steadiest = sorted(runs, key=lambda run: abs(found.drift(run)))[: options.runs]
            targets = targets or targets_seen(steadiest)
            worst = max(worst, compare(name, steadiest, found, targets))
    print(f"the worst is off by {100 * worst:.1f} %")
    sys.exit(worst > WORST_ERROR)


if __name__ == "__main__":
    main()
