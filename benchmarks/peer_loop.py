"""What benchmarks.peers and its peers share. In a peer's own environment this file alone can be imported."""

import argparse
import json
import time
from typing import NamedTuple


class Best(NamedTuple):
    """The least that any round took, by the clock and in processor time of the whole process: first, to answer one
    token; all, to answer whole ones.
    """

    first_s: float
    all_s: float
    first_cpu_s: float
    all_cpu_s: float


def read_options():
    """The options that benchmarks.peers gives a peer."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--batches", type=int, nargs="+", required=True)
    for name in ("--prompt-tokens", "--new-tokens", "--rounds", "--threads", "--vocabulary"):
        parser.add_argument(name, type=int, required=True)
    return parser.parse_args()


def best_seconds(seconds, batch, vocabulary, options, rng):
    """The least times of rounds that answer one token, and of those that answer whole ones; see Best.

    `seconds(prompts, new_tokens)` says how long prompts int[batch, tokens] take together. A short answer comes first
    and does not count: an engine's first step touches its weights and its memory for the first time.
    """
    seconds(rng.integers(3, vocabulary, (batch, options.prompt_tokens)), 2)
    best = [float("inf")] * 4
    for _ in range(options.rounds):
        for place, tokens in enumerate((1, options.new_tokens)):
            prompts = rng.integers(3, vocabulary, (batch, options.prompt_tokens))
            begin_s = time.process_time()
            taken_s = seconds(prompts, tokens)
            best[place] = min(best[place], taken_s)
            best[2 + place] = min(best[2 + place], time.process_time() - begin_s)
    return Best(*best)


def report(seconds, batch, options, rng):
    """Print a JSON line for a batch of a peer: its number and what Best has."""
    best = best_seconds(seconds, batch, options.vocabulary, options, rng)
    print(json.dumps({"batch": batch, **best._asdict()}), flush=True)
