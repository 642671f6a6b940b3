"""What benchmarks.peers and its peers share. In a peer's own environment this file alone can be imported."""

import argparse
import json


def read_options():
    """The options that benchmarks.peers gives a peer."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--batches", type=int, nargs="+", required=True)
    for name in ("--prompt-tokens", "--new-tokens", "--rounds", "--threads", "--vocabulary"):
        parser.add_argument(name, type=int, required=True)
    return parser.parse_args()


def best_seconds(seconds, batch, vocabulary, options, rng):
    """The best seconds of rounds that answer one token, and of those that answer whole ones.

    `seconds(prompts, new_tokens)` says how long prompts int[batch, tokens] take together.
    """
    best = [float("inf")] * 2
    for _ in range(options.rounds):
        for place, tokens in enumerate((1, options.new_tokens)):
            prompts = rng.integers(3, vocabulary, (batch, options.prompt_tokens))
            best[place] = min(best[place], seconds(prompts, tokens))
    return best[0], best[1]


def report(seconds, batch, options, rng):
    """Print a JSON line for a batch of a peer: the best seconds of a prefill alone, and of whole answers."""
    first_s, all_s = best_seconds(seconds, batch, options.vocabulary, options, rng)
    print(json.dumps({"batch": batch, "first_s": first_s, "all_s": all_s}), flush=True)
