"""Does the planner predict fleets of real engines that compute? The demo model behind our router, served and predicted.

    python -m benchmarks.fleet_demo [--engines 2,4] [--runs 5] [--burst-s 6]

The engines compute with one thread each and share the cores of this machine with each other, the router and the
client. So a step takes longer the more of them work, and costs that one engine has alone say nothing. Therefore each
measured burst runs between two calibration bursts of other requests and of the same size, which keep all engines busy
in the same way. From the tapes of all engines in these two come the costs of a step, their mean error (`Profile.error`,
"the stated error" here) and the host's time. Nothing is learnt from the measured burst itself.

It predicts the share of requests whose first token is in time, the times, and requests a second. It simulates with
steps as the profile has them, and faster and slower by its error, as `tokenyard plan` does for its bounds. A served
figure should lie between the last two. Then the planner is asked for the smallest fleet that attains as much as was
served in each burst: that is how many there were, so this should lie between its answers for faster and slower steps.
Rows "own speed" are simulated with the costs of the measured bursts themselves and count for nothing: where they agree
with what was served and the others do not, the machine has changed its speed.

Exits with 1 if a figure lies outside, if the planner's range misses the number of engines in more than one burst of
five, or if the stated error is above 50 %, as then anything would be within. Takes about a minute and a half for each
number of engines.
"""

import argparse
import asyncio
import sys
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.fleet_served import figures, fleet, send
from benchmarks.simulated_vs_served import (
    CALIBRATION_SEED,
    COMMON,
    MEASURED_SEED,
    MODELS,
    WARM_UP,
    Calibrations,
    Run,
    burst,
    end_s,
    flags,
    latencies,
)
from tokenyard.bench.load_generator import ServerClient
from tokenyard.sim.planner.capacity_plan import CapacityPlanner, off_by
from tokenyard.sim.planner.trial import FleetOption, answered
from tokenyard.sim.simulate import simulate

DEMO = MODELS["demo"]
ALONE = ["--threads", "1", "--disable-overlap-schedule"]
"""One thing at a time in an engine: so its tape has all of its time, as the device's or the host's share of a step."""

IN_TIME = 0.7
"""The target of the first token is what this share of the requests had in the first calibration."""

NEVER_MS, WIDEST = 1e9, 0.5
ALLOWED_MISSES = 0.2


@dataclass(frozen=True)
class Served:
    """What was measured: the runs with the times at which requests were really sent, and what calibrations tell."""

    engines: int
    runs: list[Run]
    found: Calibrations
    target_s: float


def serve(engines, count, burst_s):
    """`count` measured bursts of a fleet, each between two calibrations."""
    model, tapes = replace(DEMO, burst_s=burst_s), []

    async def play(url, workers, requests, seed):
        for worker in workers:
            async with ServerClient(worker, {}) as target:
                await target.flush_cache()
        workload = burst(model, requests, seed)
        answers = await send(url, workload)
        sent_s = np.maximum.accumulate(np.array([answer.sent_s for answer in answers]))
        return Run(0, replace(workload, arrival_s=sent_s), answers)

    async def load(url, workers):
        await send(url, burst(model, WARM_UP * engines, CALIBRATION_SEED))
        guess = engines * DEMO.first_guess
        trial = await send(url, burst(model, guess, CALIBRATION_SEED))
        requests = max(round(guess * burst_s / end_s(trial)), 4 * engines)
        print(f"{engines} engines: {count} bursts of {requests} requests", flush=True)
        first = await play(url, workers, requests, CALIBRATION_SEED)
        runs = []
        for number in range(count):
            run = await play(url, workers, requests, MEASURED_SEED + number)
            runs.append(replace(run, number=number))
            await play(url, workers, requests, CALIBRATION_SEED + number + 1)
        return float(np.quantile(latencies([first])[0], IN_TIME)), runs

    with fleet(engines, [*ALONE, *flags(COMMON)], tapes) as (url, workers):
        target_s, runs = asyncio.run(load(url, workers))
    found = Calibrations(tapes[0].header.origin)
    for tape in tapes:
        found.hear(tape)
    return Served(engines, runs, found, target_s)


def option_of(served, history):
    """An engine as a planner's kind of fleet."""
    setup = served.found.setup(history)
    targets = {"slo_ttft_ms": 1e3 * served.target_s, "slo_ttft_scale": 0.0, "slo_tpot_ms": NEVER_MS}
    settings = replace(setup.settings, **targets)
    return FleetOption(replace(setup, settings=settings, router="predicted_ttft"), "fcfs", None, 2 * served.engines)


def as_profiled(error):
    """How many times as long as in the profile steps take."""
    return 1.0


def predicted(served, histories, times=as_profiled):
    """What is compared, of all runs together. times: from the error of a profile, how many times as long steps take."""
    outcomes = []
    for run in served.runs:
        option = option_of(served, histories[run.number])
        outcomes.append(simulate(run.workload, option.fleet(served.engines, times(option.setup.profile.error))))
    ttft = np.concatenate([outcome.ttft_s for outcome in outcomes])
    tpot = np.concatenate([outcome.tpot_s for outcome in outcomes])
    return figures(ttft, tpot, sum(outcome.finished_ns.max() / 1e9 for outcome in outcomes), served.target_s)


def planned(served, run):
    """What the planner says is needed to attain as much as was served in a burst: (faster, as profiled, slower)."""
    workload = run.workload
    share = float((latencies([run])[0] <= served.target_s).mean())

    def each(_, jobs):
        return [answered(workload, job) for job in jobs]

    plan = CapacityPlanner(workload, share, 1, each).plan([option_of(served, served.found.around[run.number])])
    if plan is None:
        return None, None, None
    return plan.bounds.faster[0], plan.finalists[0].replicas, plan.bounds.slower[0]


def compare(served):
    """Print everything; returns whether it is as predicted."""
    engines, around = served.engines, served.found.around
    profiles = [history.profile() for history in around]
    errors = [profile.error for profile in profiles[: len(served.runs)]]
    print(f"{engines} engines: profiles are off by {', '.join(f'{100 * error:.0f}' for error in errors)} % of a step")
    if max(errors) > WIDEST:
        print(f"{engines} engines: with so wide a margin anything is within: the machine is busy with something else")
    drifts = [abs(served.found.drift(run)) for run in served.runs]
    print(f"{engines} engines: calibrations around a burst are {100 * max(drifts):.0f} % apart at most")
    ttft, tpot = latencies(served.runs)
    real = figures(ttft, tpot, sum(end_s(run.answers) for run in served.runs), served.target_s)
    common, own = predicted(served, around), predicted(served, served.found.own)
    faster, slower = (predicted(served, around, lambda error, side=side: off_by(error)[side]) for side in (0, 1))
    outside = 0
    for name, value in real.items():
        low, high = sorted((faster[name], slower[name]))
        outside += not low <= value <= high
        off = common[name] - value if name == "attainment" else common[name] / value - 1.0
        where = "within" if low <= value <= high else "OUTSIDE"
        print(
            f"{engines} engines, {name:>10}: served {value:8.3f}, predicted {common[name]:8.3f} ({100 * off:+.1f} %), "
            f"{where} {low:.3f} to {high:.3f}; own speed {own[name]:.3f}"
        )
    missed = 0
    for run in served.runs:
        least, usual, most = planned(served, run)
        holds = least is not None and least <= engines and (most is None or engines <= most)
        missed += not holds
        print(f"{engines} engines, burst {run.number}: planned {usual}, from {least} to {most}", flush=True)
    return max(errors) <= WIDEST and not outside and missed <= ALLOWED_MISSES * len(served.runs)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default="2,4")
    parser.add_argument("--runs", type=int, default=5, help="measured bursts for each number of engines")
    parser.add_argument("--burst-s", type=float, default=6.0, help="about how long a burst takes")
    options = parser.parse_args()
    good = True
    for engines in (int(word) for word in options.engines.split(",")):
        good = compare(serve(engines, options.runs, options.burst_s)) and good
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
