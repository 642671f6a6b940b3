"""Router policies against each other in the simulator, over workloads W1 to W6.

Each policy serves the same traffic on the same four engines; only the choice differs. Prints p95 of the time to first
token for each workload and policy, its ratio to the best policy of that workload (the median over seeds, with a
bootstrap interval of paired ratios), and each policy's worst ratio: its minimax regret, which is what a default must
keep low. Then the busiest worker's share of one shared prompt (W3), and for disturbances what was lost and how long the
fleet took to recover.

    python -m benchmarks.router_quality --seeds 10 --json out.json
"""

import argparse
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import numpy as np

from benchmarks.router_workloads import REPLICAS, cases
from tokenyard.cost import get_profile
from tokenyard.routing.registry import POLICIES
from tokenyard.sim.engine.presets import preset
from tokenyard.sim.simulate import Setup, simulate

CONTEXT = 40_000
ALLOWED = 1.05
MAX_SHARE = 0.30
RESAMPLES = 2000
WINDOW_S = 1.0


def run(case, policy, seed):
    """The figures of one run."""
    traffic = case.make(seed)
    settings = replace(preset("sglang-default", CONTEXT), disable_radix_cache=False)
    setup = Setup(
        get_profile("h100", "llama-3-8b"),
        settings,
        replicas=REPLICAS,
        router=policy,
        seed=seed,
        kv_pool_tokens=case.pool_tokens,
        fleet=replace(case.fleet, assumed_pool_tokens=case.assumed_pool_tokens),
    )
    outcome = simulate(traffic, setup)
    shares = np.bincount(outcome.replica, minlength=REPLICAS) / len(traffic)
    return {
        "p50": float(np.percentile(outcome.ttft_s, 50)),
        "p95": float(np.percentile(outcome.ttft_s, 95)),
        "tpot95": float(np.percentile(outcome.tpot_s, 95)),
        "hit": float(outcome.cached_tokens.sum() / traffic.prompt_tokens.sum()),
        "predicted": outcome.predicted_cached_tokens / float(traffic.prompt_tokens.sum()),
        "share": float(shares.max()),
        "lost": int(np.count_nonzero(~outcome.served)),
        "in_flight": float(np.nansum(outcome.e2e_s) / traffic.arrival_s[-1]),
        "recovery": recovery_s(case, outcome),
    }


def recovery_s(case, outcome):
    """Seconds after the first fault until first tokens of a second's arrivals take no longer than twice the median
    before it; 0 without faults, NaN if that never comes.
    """
    if not case.fleet.faults:
        return 0.0
    begin = max(case.fleet.faults[0].at_s, WINDOW_S)
    arrived = outcome.arrival_ns / 1e9
    usual = np.median(outcome.ttft_s[arrived < begin]) if (arrived < begin).any() else np.median(outcome.ttft_s)
    last_bad = 0.0
    for start in np.arange(begin, arrived[-1], WINDOW_S):
        here = (arrived >= start) & (arrived < start + WINDOW_S)
        if here.any() and np.median(outcome.ttft_s[here]) > 2 * usual:
            last_bad = start + WINDOW_S - begin
    return float(last_bad)


def one(job):
    name, policy, seed = job
    case = next(case for case in cases() if case.name == name)
    return job, run(case, policy, seed)


def interval(ratios):
    """The median of paired ratios with its 95 % bootstrap interval."""
    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(ratios, (RESAMPLES, len(ratios))), axis=1)
    return float(np.median(ratios)), *(float(x) for x in np.percentile(medians, (2.5, 97.5)))


def table(found, names, policies, seeds):
    """Prints p95 TTFT in ms and the ratio to the best, and returns the worst ratios and the failures."""
    regret, failures = dict.fromkeys(policies, 1.0), []
    print("p95 TTFT in ms (ratio to the best policy of the row, median over seeds)")
    print(f"{'':12}" + "".join(f"{policy[:15]:>18}" for policy in policies))
    for name in names:
        p95 = {policy: np.array([found[name, policy, seed]["p95"] for seed in seeds]) for policy in policies}
        best = min(policies, key=lambda policy: float(np.median(p95[policy])))
        cells = []
        for policy in policies:
            ratio, low, _ = interval(p95[policy] / p95[best])
            regret[policy] = max(regret[policy], ratio)
            if ratio > ALLOWED and low > 1.0:
                failures.append((policy, name, ratio))
            cells.append(f"{1e3 * np.median(p95[policy]):>10.0f} ({ratio:4.2f})")
        print(f"{name:12}" + "".join(f"{cell:>18}" for cell in cells))
    print(f"{'regret':12}" + "".join(f"{regret[policy]:>18.2f}" for policy in policies))
    return regret, failures


def other_tables(found, names, policies, seeds):
    """Hit rates, W3's shares and W6's losses."""
    for title, key, wanted, scale in (
        ("token hit rate, %", "hit", names, 100),
        ("predicted hit rate, %", "predicted", names, 100),
        ("p95 time per token, ms", "tpot95", names, 1000),
        ("busiest worker's share, %", "share", [n for n in names if n.startswith("W3")], 100),
        ("requests in flight", "in_flight", [n for n in names if n.startswith("W3")], 1),
        ("recovery, s", "recovery", [n for n in names if n in ("W6 kill", "W6 join", "W6 slow")], 1),
        ("requests lost", "lost", [n for n in names if n.startswith("W6")], 1),
    ):
        if not wanted:
            continue
        print(f"\n{title}")
        for name in wanted:
            means = [np.mean([found[name, policy, seed][key] for seed in seeds]) for policy in policies]
            print(f"{name:12}" + "".join(f"{scale * mean:>18.1f}" for mean in means))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=list(POLICIES))
    parser.add_argument("--only", default="", help="rows whose names begin so")
    parser.add_argument("--ours", default="predicted_ttft", help="the policy that must keep to the bounds")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--json", help="write all figures there")
    options = parser.parse_args()
    names = [case.name for case in cases() if case.name.startswith(options.only)]
    seeds = range(options.seeds)
    jobs = [(name, policy, seed) for name in names for policy in options.policies for seed in seeds]
    with ProcessPoolExecutor(options.jobs) as pool:
        found = dict(pool.map(one, jobs))
    _, failures = table(found, names, options.policies, seeds)
    other_tables(found, names, options.policies, seeds)
    wrong = [
        f"{name}: {100 * (ratio - 1):.0f} % worse than the best" for p, name, ratio in failures if p == options.ours
    ]
    for name in (n for n in names if n.startswith("W3") and n != "W3 8"):
        share = (
            np.mean([found[name, options.ours, seed]["share"] for seed in seeds])
            if options.ours in options.policies
            else 0
        )
        if share > MAX_SHARE:
            wrong.append(f"{name}: the busiest worker has {100 * share:.0f} %")
    print("\n" + ("\n".join(f"MISSED {line}" for line in wrong) or f"{options.ours} keeps every bound"))
    if options.json:
        with open(options.json, "w") as file:
            json.dump([{"case": c, "policy": p, "seed": s, **row} for (c, p, s), row in found.items()], file)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
