"""`tokenyard plan` against brute force over small grids: is its fleet the cheapest that meets the target?

    python -m benchmarks.plan_check [--cases 10] [--first 0] [--requests 400] [--shortest 50]

Each case draws traffic, targets and prices. Brute force simulates every kind of fleet with every number of replicas up
to `--most`, over the same seeds, and takes the cheapest that meets the target on average. Prints a line per case, and
exits with 1 unless the planner is right in nine of ten: the same price, and the same number of devices. The planner
simulates parts of a trace from `--shortest` requests on, where it usually takes 1,500: so small traces have parts, too.
"""

import argparse
import sys
from dataclasses import replace

import numpy as np

from tokenyard.cost import get_profile
from tokenyard.sim.engine.presets import preset
from tokenyard.sim.planner import capacity_plan, trial
from tokenyard.sim.planner.trial import FleetOption, Trial, TrialTraffic, answered, attained
from tokenyard.sim.simulate import Setup
from tokenyard.sim.traces.synthetic import synthetic

CONTEXT, SEEDS, RIGHT = 40_000, 2, 0.9
KINDS = ("plain", "shared-prefix", "multi-turn", "bursts")


def case_of(number, requests, most):
    """The traffic, the options and the target of a case."""
    rng = np.random.default_rng(number)
    traffic = synthetic(KINDS[number % len(KINDS)], requests, float(rng.uniform(30, 90)), number)
    options = []
    for device, least, largest in (("h100", 2.0, 3.0), ("a100", 0.8, 1.6)):
        price = round(float(rng.uniform(least, largest)), 2)
        for policy in ("fcfs", "slo"):
            settings = replace(
                preset("sglang-default", CONTEXT),
                schedule_policy=policy,
                disable_radix_cache=False,
                slo_ttft_ms=float(rng.choice((300.0, 600.0, 1000.0))),
                slo_ttft_scale=0.0,
            )
            setup = Setup(get_profile(device, "llama-3-8b"), settings, router="predicted_ttft")
            options.append(FleetOption(setup, policy, price, most))
    return traffic, options, float(rng.choice((0.9, 0.95, 0.99)))


def meets(traffic, option, replicas, target):
    """Whether the mean over the seeds does; as soon as one alone shows that it cannot, the others are not run."""
    least, shares = 1.0 - SEEDS * (1.0 - target), []
    for seed in range(SEEDS):
        shares.append(attained(traffic, Trial(option, replicas, TrialTraffic(0, len(traffic), seed)), least))
        if shares[-1] < least:
            return False
    return np.mean(shares) >= target


def brute_force(traffic, options, target, most):
    """The least (price, devices) that meets the target, None for none."""
    found = []
    for option in options:
        for replicas in range(1, most + 1):
            if meets(traffic, option, replicas, target):
                found.append((option.cost(replicas), option.devices(replicas)))
                break
    return min(found, default=None)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--most", type=int, default=16)
    parser.add_argument("--shortest", type=int, default=50)
    args = parser.parse_args()
    capacity_plan.MIN_PART_REQUESTS = trial.MIN_PART_REQUESTS = args.shortest
    right = 0
    for number in range(args.first, args.first + args.cases):
        traffic, options, target = case_of(number, args.requests, args.most)

        def each(_, jobs, traffic=traffic):
            return [answered(traffic, job) for job in jobs]

        found = capacity_plan.CapacityPlanner(traffic, target, SEEDS, each).plan(options)
        best = found.finalists[found.cheapest] if found else None
        ours, true = (best.cost, best.devices) if best else None, brute_force(traffic, options, target, args.most)
        right += ours == true
        print(f"{number}: {traffic.name}, {100 * target:g} %: planned {ours}, brute force {true}", flush=True)
    print(f"right in {right} of {args.cases}")
    return int(right < RIGHT * args.cases)


if __name__ == "__main__":
    sys.exit(main())
