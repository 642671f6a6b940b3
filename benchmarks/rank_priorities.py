"""Whether the most urgent requests overtake all others at every rank of an engine, however busy it is.

Starts `tokenyard serve --dp-size N --enable-priority-scheduling` on the mock executor with steps of one length. Urgent
requests (priority 20) come at the same times in two rounds: alone, and together with others (priority 0) that arrive
ten times as fast and long, so that every rank has more than it can run. Prints one JSON line for each round with the
time to the first token of the urgent ones, and whether the goal is met: with load the 99th percentile is at most 1.2
times that without plus one step. Steps do not overlap here, as on a CPU: with overlap a request whose place another one
must give up first waits for the steps in flight as well.

Run: python -m benchmarks.rank_priorities [--ranks 4] [--seconds 20]
"""

import argparse
import asyncio
import json
import time

import numpy as np

from benchmarks.mock_server import AnyServer, open_completion

URGENT_TOKENS, OTHER_TOKENS = 8, 100
URGENCY = ("--enable-priority-scheduling", "--priority-aging-s", "0", "--disable-overlap-schedule")
RATE_PER_RANK = 2.0
TIMES_THE_LOAD = 10


async def first_token_s(address, tokens, prompt, priority):
    """Seconds until the first chunk of one stream, which is read to its end."""
    begin = time.perf_counter()
    reader, writer = await open_completion(address, tokens, prompt, priority=priority)
    data = b""
    while b"data: " not in data:
        piece = await reader.read(1 << 16)
        if not piece:
            raise RuntimeError(f"no answer but {data[-300:]!r}")
        data += piece
    seconds = time.perf_counter() - begin
    while b"[DONE]" not in data[-200:] and (piece := await reader.read(1 << 16)):
        data = data[-200:] + piece
    writer.close()
    return seconds


async def at_times(address, times, tokens, name, priority):
    """Open a stream at each of `times` (seconds from now); their seconds to the first token."""

    async def one(number, at):
        await asyncio.sleep(at)
        return await first_token_s(address, tokens, f"{name} {number}", priority)

    return await asyncio.gather(*(one(number, at) for number, at in enumerate(times)))


async def run_round(address, options, loaded):
    """The seconds to the first token of the urgent requests."""
    rng = np.random.default_rng(7)
    rate = RATE_PER_RANK * options.ranks
    urgent = np.cumsum(rng.exponential(1 / rate, int(rate * options.seconds)))
    load = []
    if loaded:
        count = int(TIMES_THE_LOAD * rate * options.seconds)
        others = np.cumsum(rng.exponential(1 / (TIMES_THE_LOAD * rate), count))
        load = [asyncio.create_task(at_times(address, others, OTHER_TOKENS, "Other", 0))]
        await asyncio.sleep(1.0)
    seconds = await at_times(address, urgent, URGENT_TOKENS, "Urgent", 20)
    for task in load:
        task.cancel()
    await asyncio.gather(*load, return_exceptions=True)
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--step-ms", type=float, default=20.0)
    options = parser.parse_args()
    flags = ("--executor", "mock", "--mock-step-ms", str(options.step_ms), "--dp-size", str(options.ranks))
    places = ("--max-running-requests", str(8 * options.ranks), "--max-total-tokens", "1m")
    p99 = {}
    with AnyServer(*flags, *places, *URGENCY) as address:
        asyncio.run(first_token_s(address, 2, "Warm up", 0))
        for name in ("alone", "loaded"):
            seconds = asyncio.run(run_round(address, options, name == "loaded"))
            p50, p99[name] = np.percentile(seconds, [50, 99]) * 1000
            print(
                json.dumps(
                    {"round": name, "requests": len(seconds), "p50_ms": round(p50, 1), "p99_ms": round(p99[name], 1)}
                )
            )
    goal = 1.2 * p99["alone"] + options.step_ms
    print(json.dumps({"goal_p99_ms": round(goal, 1), "met": bool(p99["loaded"] <= goal)}))


if __name__ == "__main__":
    main()
