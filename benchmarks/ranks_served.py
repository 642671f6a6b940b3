"""The DP-aware experiment on a CPU: conversations of three turns at an engine with several ranks of the demo model.

The write-up behind it (8 ranks, 3 turns, concurrency 1 to 128) sees the 95th percentile of the time to the first token
fall by 14 to 54 % once requests go to the rank that holds their prefix. Here each conversation asks three times, each
time with all that was said before; as many run at once as `--concurrency` says. One server is started for each
`--load-balance-method`. Prints one JSON line for each method: time to the first token of the later turns, and the share
of their prompts that was cached.

Run: python -m benchmarks.ranks_served [--ranks 4] [--talks 48] [--concurrency 8]
"""

import argparse
import asyncio
import json
import re
import time

import numpy as np

from benchmarks.mock_server import AnyServer, open_completion

METHODS = ("round_robin", "shortest_queue", "cache_aware", "predicted_ttft")
TURNS, ANSWER_TOKENS, FIRST_WORDS, MORE_WORDS = 3, 24, 220, 30
WORDS = ("the", "a", "fox", "dog", "girl", "went", "saw", "lost", "big", "red", "tree", "ball", "rain", "sun", "sad")


def words(rng, count):
    return " ".join(WORDS[number] for number in rng.integers(len(WORDS), size=count))


async def turn(address, prompt):
    """One question: seconds to the first token, tokens of its prompt, how many were cached, and the answer."""
    begin = time.perf_counter()
    reader, writer = await open_completion(address, ANSWER_TOKENS, prompt)
    data, first_s = b"", 0.0
    while b"[DONE]" not in data:
        piece = await reader.read(1 << 16)
        if not piece:
            raise RuntimeError(f"no answer but {data[-300:]!r}")
        data += piece
        if not first_s and b"data: " in data:
            first_s = time.perf_counter() - begin
    writer.close()
    chunks = [json.loads(chunk) for chunk in re.findall(rb"data: (\{.*\})", data)]
    usage = next(chunk["usage"] for chunk in reversed(chunks) if chunk.get("usage"))
    text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    return first_s, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], text


async def talk(address, rng, places, later):
    """One conversation; what its later turns saw goes to `later`."""
    async with places:
        said = words(rng, FIRST_WORDS)
        for number in range(TURNS):
            first_s, prompt, cached, text = await turn(address, said)
            if number:
                later.append((first_s, prompt, cached))
            said += text + " " + words(rng, MORE_WORDS)


async def measure(address, options):
    places, later = asyncio.Semaphore(options.concurrency), []
    rngs = [np.random.default_rng([5, number]) for number in range(options.talks)]
    await asyncio.gather(*(talk(address, rng, places, later) for rng in rngs))
    return np.array(later)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--talks", type=int, default=48)
    parser.add_argument("--concurrency", type=int, default=8)
    options = parser.parse_args()
    for method in METHODS:
        with AnyServer("--device", "cpu", "--dp-size", str(options.ranks), "--load-balance-method", method) as address:
            asyncio.run(turn(address, "Once upon a time"))
            later = asyncio.run(measure(address, options))
        p50, p95 = np.percentile(later[:, 0], [50, 95]) * 1000
        hit = later[:, 2].sum() / later[:, 1].sum()
        found = {"method": method, "turns": len(later), "ttft_p50_ms": round(p50, 1), "ttft_p95_ms": round(p95, 1)}
        print(json.dumps({**found, "cached": round(float(hit), 3)}), flush=True)


if __name__ == "__main__":
    main()
