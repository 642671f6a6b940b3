"""Does the server keep a fast device busy? 256 streams on the mock executor with steps of 10 ms.

Counts, over a window in which all streams run: the steps that the device did against those it could have done, and
the tokens that clients received against those it could have made. Then, over short streams among many long ones, the
time from the commit of a request's last token, which the answer names, to its arrival at the client. Overlap and normal
loops run one after the other.

Run: python benchmarks/serving_mock.py
"""

import argparse
import asyncio
import time

from mock_server import STEP_MS, Counter, Server, one_lag, open_completion, read_all, steps_done

SETTLE_S, WINDOW_S = 3.0, 6.0
PROBES, PROBE_ROUNDS = 16, 16


async def steady(address, streams):
    """Share of possible steps and of possible tokens over the window."""
    counter = Counter()
    tokens = int((SETTLE_S + WINDOW_S) * 1.5 * 1000 / STEP_MS)
    opened = [await open_completion(address, tokens, f"Story {index}") for index in range(streams)]
    readers = [asyncio.create_task(read_all(stream, counter)) for stream in opened]
    await asyncio.sleep(SETTLE_S)
    steps, received, begin = await asyncio.to_thread(steps_done, address), counter.tokens, time.monotonic()
    await asyncio.sleep(WINDOW_S)
    steps = await asyncio.to_thread(steps_done, address) - steps
    received, seconds = counter.tokens - received, time.monotonic() - begin
    for reader in readers:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    possible = seconds * 1000 / STEP_MS
    return steps / possible, received / (possible * streams)


async def lags(address, streams):
    """Milliseconds from the last token's commit to the client, of short streams among many long ones."""
    tokens = 8000
    opened = [await open_completion(address, tokens, f"Long {index}") for index in range(streams - PROBES)]
    readers = [asyncio.create_task(read_all(stream, Counter())) for stream in opened]
    await asyncio.sleep(SETTLE_S)

    async def probe(index):
        tales = [(20 + (7 * index + round_) % 20, f"Tale {index} {round_}") for round_ in range(PROBE_ROUNDS)]
        return [await one_lag(address, Counter(), tokens, prompt) for tokens, prompt in tales]

    found = await asyncio.gather(*map(probe, range(PROBES)))
    for reader in readers:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    return sorted(lag for lags in found for lag in lags)


def measure(streams, *flags):
    with Server(*flags) as address:
        steps, tokens = asyncio.run(steady(address, streams))
        time.sleep(1.5)
        found = asyncio.run(lags(address, streams))
    return steps, tokens, found[len(found) // 2], found[int(len(found) * 0.99)]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("flags", nargs="*", help="further flags of the server, after --")
    options = parser.parse_args()
    print(f"{options.streams} streams, {STEP_MS:g} ms steps      steps   tokens   commit to client p50    p99")
    for name, more in (("overlap", []), ("normal", ["--disable-overlap-schedule"])):
        steps, tokens, p50, p99 = measure(options.streams, *more, *options.flags)
        print(f"{name:24} {100 * steps:11.1f} %  {100 * tokens:5.1f} %  {p50:17.1f} ms  {p99:5.1f} ms")


if __name__ == "__main__":
    main()
