"""Priorities across a fleet, in the simulator: does the top class notice ten times the load?

    python -m benchmarks.fleet_priorities [--seconds 60] [--seeds 3]

Eight engines, late binding at the router. The top class alone is the unloaded run; then the lower class comes with it,
so much that all requests together are ten times as many. The router gives an engine at most `--room` requests at a
time, and more only to a request that the engine gives the place of a lesser one (the classes are further apart than the
threshold for that). Steps are short (`--chunk`), so that a top request waits for little. Prints p99 of the time to
first token of the top class, and exits with 1 if it is above 1.2 times the unloaded one plus a step.
"""

import argparse
import sys
from dataclasses import replace

import numpy as np

from tokenyard.cost import get_profile
from tokenyard.sim.engine.presets import preset
from tokenyard.sim.fleet.fleet_settings import Fleet
from tokenyard.sim.simulate import Setup, simulate
from tokenyard.sim.traces.prompt_ids import UniqueContent
from tokenyard.sim.traces.synthetic import lengths, poisson
from tokenyard.sim.traces.workload import uniform_columns

REPLICAS, CONTEXT, TOP_RATE, LOAD, TOP = 8, 40_000, 12.0, 10, 20


def of_class(count, rate, seed):
    """Arrivals, lengths of prompts and lengths of answers of one class."""
    rng = np.random.default_rng(seed)
    times = poisson(count, rate, rng) if count else np.zeros(0)
    return times, lengths(1000, count, rng, 8000), lengths(200, count, rng, 1000)


def traffic(seconds, load, seed):
    """The top class, the same requests whatever the load, and `load - 1` times as many of the lower one, priority 0."""
    rates = ((load - 1) * TOP_RATE, TOP_RATE)
    classes = [of_class(int(rate * seconds), rate, [seed, place]) for place, rate in enumerate(rates)]
    times, prompts, outputs = (np.concatenate(column) for column in zip(*classes, strict=True))
    order = np.argsort(times, kind="stable")
    made = uniform_columns("two classes", times[order], prompts[order], outputs[order], UniqueContent())
    return replace(made, priority=TOP * (order >= len(classes[0][0])).astype(np.int32))


def run(load, options, seed):
    """p99 of the top class's TTFT, and the longest step, in seconds."""
    settings = replace(
        preset("sglang-default", CONTEXT),
        enable_priority_scheduling=True,
        chunked_prefill_size=options.chunk,
        max_running_requests=options.room,
    )
    fleet = Fleet(max_worker_requests=options.room, queue_size=100_000, queue_timeout_s=1e6, queue_aging_s=0.0)
    profile = get_profile("h100", "llama-3-8b")
    setup = Setup(profile, settings, REPLICAS, router="predicted_ttft", seed=seed, fleet=fleet)
    work = traffic(options.seconds, load, seed)
    outcome = simulate(work, setup)
    top = work.priority == TOP
    assert outcome.served[top].all()
    terms = profile.terms
    step_s = (terms.step_ms + max(terms.floor_ms, terms.dense_ms + terms.token_ms * options.chunk)) / 1e3
    waited = (outcome.sent_ns - outcome.arrival_ns)[top] / 1e9
    return float(np.percentile(outcome.ttft_s[top], 99)), step_s, float(np.percentile(waited, 99))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--room", type=int, default=64)
    options = parser.parse_args()
    wrong = False
    for seed in range(options.seeds):
        alone, step_s, _ = run(1, options, seed)
        loaded, _, waited = run(LOAD, options, seed)
        bound = 1.2 * alone + step_s
        wrong |= loaded > bound
        print(
            f"seed {seed}: top class TTFT p99 {1e3 * alone:.1f} ms alone, {1e3 * loaded:.1f} ms at {LOAD} times the "
            f"load (bound {1e3 * bound:.1f} ms; at the router p99 {1e3 * waited:.1f} ms)"
        )
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
