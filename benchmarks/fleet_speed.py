"""How many requests a simulated fleet serves per second of wall time.

    python -m benchmarks.fleet_speed [--replicas 64] [--requests 6000] [--rate 6] [--router predicted_ttft] [--profile]

Made-up traffic of the Azure conversation trace's lengths, `--rate` requests a second for each replica, with a prefix
cache. `--profile` prints where the time goes.
"""

import argparse
import cProfile
import pstats
import time
from dataclasses import replace

from tokenyard.cost import get_profile
from tokenyard.routing.registry import POLICIES
from tokenyard.sim.engine.presets import preset
from tokenyard.sim.simulate import Setup, simulate
from tokenyard.sim.traces.synthetic import synthetic

CONTEXT = 40_000


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--requests", type=int, default=6000)
    parser.add_argument("--rate", type=float, default=6.0)
    parser.add_argument("--router", choices=list(POLICIES), default="predicted_ttft")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    traffic = synthetic("plain", options.requests, options.rate * options.replicas)
    settings = replace(preset("sglang-default", CONTEXT), disable_radix_cache=False)
    setup = Setup(get_profile("h100", "llama-3-8b"), settings, options.replicas, router=options.router)
    profiler = cProfile.Profile() if options.profile else None
    begin = time.process_time()
    outcome = profiler.runcall(simulate, traffic, setup) if profiler is not None else simulate(traffic, setup)
    cpu_s, wall_s = time.process_time() - begin, outcome.wall_seconds
    print(
        f"{options.replicas} replicas, {options.router}: {len(traffic) / wall_s:.0f} requests/s of wall time, "
        f"{len(traffic) / cpu_s:.0f} of CPU time; {outcome.counters['steps'] / len(traffic):.1f} steps a request, "
        f"devices busy {100 * outcome.busy_seconds / outcome.sim_seconds / options.replicas:.0f} %"
    )
    if profiler is not None:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
