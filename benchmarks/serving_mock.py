"""Does the server keep a fast device busy? 256 streams on the mock executor with steps of 10 ms.

Counts, over a window in which all streams run: the steps that the device did against those it could have done, and the
tokens that clients received against those it could have made. Then, over many short streams, the time from the commit of
a request's last token to its arrival at the client: the client's clock minus the server's own end-to-end time, so the
figure contains the way in as well and errs on the high side. Overlap and normal loops run one after the other.

Run: python benchmarks/serving_mock.py
"""

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import time
import urllib.request

STEP_MS = 10.0
SETTLE_S, WINDOW_S = 3.0, 6.0


class Server:
    """`tokenyard serve` on the mock executor, ended with the block."""

    def __init__(self, *flags):
        base = [sys.executable, "-m", "tokenyard", "serve", "--port", "0", "--executor", "mock", "--log-level", "warning"]
        mock = ["--mock-step-ms", str(STEP_MS), "--max-running-requests", "256", "--max-total-tokens", "1m", "--context-length", "8192"]
        environment = {**os.environ, "COLUMNS": "200"}
        self._process = subprocess.Popen([*base, *mock, *flags], stderr=subprocess.PIPE, text=True, env=environment)

    def __enter__(self):
        for line in self._process.stderr:
            match = re.search(r"ready at http://([\d.]+):(\d+)", line)
            if match:
                return match[1], int(match[2])
        sys.exit(f"the server did not start: {self._process.args}")

    def __exit__(self, *_):
        self._process.terminate()
        self._process.communicate()


def steps_done(address):
    with urllib.request.urlopen(f"http://{address[0]}:{address[1]}/server_info") as answer:
        return json.load(answer)["internal_states"][0]["counters"]["steps"]


async def open_stream(address, tokens, prompt):
    reader, writer = await asyncio.open_connection(*address, limit=1 << 20)
    sampling = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0}
    body = json.dumps({"text": prompt, "sampling_params": sampling, "stream": True}).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    writer.write(head + body)
    return reader, writer


class Counter:
    """Chunks received by all clients so far."""

    chunks = 0


async def read_all(stream, counter):
    reader, writer = stream
    tail = b""
    while data := await reader.read(1 << 16):
        counter.chunks += data.count(b"data: ")
        tail = (tail + data)[-2000:]
        if b"[DONE]" in tail:
            break
    writer.close()
    return tail


async def steady(address, streams):
    """Share of possible steps and of possible tokens over the window."""
    counter = Counter()
    tokens = int((SETTLE_S + WINDOW_S) * 1.5 * 1000 / STEP_MS)
    opened = [await open_stream(address, tokens, f"Story {index}") for index in range(streams)]
    readers = [asyncio.create_task(read_all(stream, counter)) for stream in opened]
    await asyncio.sleep(SETTLE_S)
    steps, chunks, begin = await asyncio.to_thread(steps_done, address), counter.chunks, time.monotonic()
    await asyncio.sleep(WINDOW_S)
    steps = await asyncio.to_thread(steps_done, address) - steps
    chunks, seconds = counter.chunks - chunks, time.monotonic() - begin
    for reader in readers:
        reader.cancel()
    for _, writer in opened:
        writer.close()
    possible = seconds * 1000 / STEP_MS
    return steps / possible, chunks / (possible * streams)


async def one_lag(address, tokens, index):
    begin = time.monotonic()
    tail = await read_all(await open_stream(address, tokens, f"Tale {index}"), Counter())
    seconds = time.monotonic() - begin
    latency = re.findall(rb'"e2e_latency":([\d.e-]+)', tail)
    return 1000 * (seconds - float(latency[-1]))


async def lags(address, streams):
    """Milliseconds from the last token's commit to the client, for each of many short streams, `streams` at a time."""

    async def client(index):
        return [await one_lag(address, 40 + (7 * index + round_) % 60, (index, round_)) for round_ in range(4)]

    return sorted(lag for found in await asyncio.gather(*map(client, range(streams))) for lag in found)


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
