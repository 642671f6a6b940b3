"""The write-up's table on DP-aware routing, in the simulator: conversations of 3 turns, one engine with 8 ranks, H200.

    python -m benchmarks.fleet_dp_aware [--conversations 384] [--concurrency 1,2,4,...] [--jobs N]

`--concurrency` clients, which start within ten seconds, hold one conversation after the other, each turn as soon as the
last one has ended. Off: the engine's ranks take requests in turn, as SGLang's data-parallel controller does. On: the
router chooses the rank, by what its cache should hold. For comparison W7: the same traffic on 8 engines of one rank,
which should equal 8 ranks of one engine. Exits with 1 if p95 of the time to first token gains less than 14 %, the least
of the write-up, at any concurrency.
"""

import argparse
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import numpy as np

from tokenyard.cost import get_profile
from tokenyard.sim.engine.presets import preset
from tokenyard.sim.fleet.fleet_settings import Fleet
from tokenyard.sim.simulate import Setup, simulate
from tokenyard.sim.traces.prompt_ids import ANSWER_STREAM, SegmentContent
from tokenyard.sim.traces.workload import uniform_columns

RANKS, TURNS, CONTEXT = 8, 3, 32_000
FIRST_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 4000, 1500, 200
MIN_GAIN = 0.14
RAMP_S = 10.0
WAYS = ("off", "on", "8 engines")


def conversations(count, clients, seed):
    """`count` conversations held by `clients`; each request follows the one that its client sent before."""
    rng = np.random.default_rng(seed)
    spread = np.exp(0.3 * rng.standard_normal((count, TURNS, 2)))
    streams, parts, offsets, prompts, outputs, follows = [], [], [0], [], [], []
    for number in range(count):
        history = []
        for turn in range(TURNS):
            index = number * TURNS + turn
            own = int((FIRST_TOKENS if turn == 0 else QUESTION_TOKENS) * spread[number, turn, 0])
            answer = max(int(ANSWER_TOKENS * spread[number, turn, 1]), 2)
            prompt = [*history, (1 + index, own)]
            streams += [stream for stream, _ in prompt]
            parts += [tokens for _, tokens in prompt]
            offsets.append(len(streams))
            prompts.append(sum(tokens for _, tokens in prompt))
            outputs.append(answer)
            last = (number - clients + 1) * TURNS - 1
            follows.append(index - 1 if turn else max(last, -1))
            history = [*prompt, (ANSWER_STREAM + index, answer - 1)]
    content = SegmentContent(np.array(streams, np.int64), np.array(parts, np.int32), np.array(offsets, np.int64))
    times = np.zeros(len(prompts))
    first = times[: clients * TURNS : TURNS]
    first[:] = RAMP_S * np.arange(len(first)) / clients
    columns = (np.array(prompts, np.int32), np.array(outputs, np.int32), content)
    return replace(uniform_columns("3 turns", times, *columns), follows=np.array(follows, np.int32))


def run(way, clients, count, seed):
    """p95 of TTFT and of the time per token (ms), and the hit rate."""
    settings = replace(preset("sglang-default", CONTEXT), disable_radix_cache=False, max_running_requests=2048)
    fleet = Fleet(dp_aware=way != "off", load_balance_method="round_robin")
    engines, ranks = (RANKS, 1) if way == "8 engines" else (1, RANKS)
    profile = get_profile("h200", "llama-3-8b")
    setup = Setup(profile, settings, engines, ranks, "predicted_ttft", seed=seed, fleet=fleet)
    outcome = simulate(conversations(count, clients, seed), setup)
    assert outcome.served.all()
    hit = float(outcome.cached_tokens.sum() / outcome.workload.prompt_tokens.sum())
    return 1e3 * np.percentile(outcome.ttft_s, 95), 1e3 * np.percentile(outcome.tpot_s, 95), hit


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", default="1,2,4,8,16,32,64,128")
    parser.add_argument("--conversations", type=int, default=384)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    levels = [int(word) for word in options.concurrency.split(",")]
    cases = [(way, level) for level in levels for way in WAYS]
    with ProcessPoolExecutor(options.jobs) as pool:
        runs = pool.map(run, *zip(*((w, n, options.conversations, options.seed) for w, n in cases), strict=True))
        found = dict(zip(cases, runs, strict=True))
    print("| clients | TTFT p95 ms off | on | gain | 8 engines | TPOT p95 ms off | on | hits off | on |")
    print("| ---: " * 9 + "|")
    poor = []
    for level in levels:
        off, on, engines = (found[way, level] for way in WAYS)
        gain = 1.0 - on[0] / off[0]
        poor += [level] if gain < MIN_GAIN else []
        print(
            f"| {level} | {off[0]:.1f} | {on[0]:.1f} | {100 * gain:.0f} % | {engines[0]:.1f} | {off[1]:.2f} | "
            f"{on[1]:.2f} | {100 * off[2]:.0f} % | {100 * on[2]:.0f} % |"
        )
    print(f"MISSED at {poor}" if poor else "gains at least 14 % everywhere")
    return 1 if poor else 0


if __name__ == "__main__":
    sys.exit(main())
