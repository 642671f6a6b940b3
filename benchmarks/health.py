"""How fast do probes and scrapes come while the server is busy?

First `/health` while prompts of 4,000 tokens are prefilled on the CPU, one after another without a pause (torch
executor, the shape of SmolLM2-135M with random weights); the share of the window in which the device worked is read
from the server's timeline. Then `/metrics` with 1,000 streams running on the mock executor. Wall time at the client,
one request at a time with a pause between, new connections as probes make them.

Run: python benchmarks/health.py [--seconds 5]
"""

import argparse
import asyncio
import json
import multiprocessing
import tempfile
import time
import urllib.request
from pathlib import Path

import numpy as np
from mock_server import AnyServer, snapshot
from serving_mock import open_completion
from smollm2 import SHAPE

PROMPT_TOKENS, PREFILLS_AT_ONCE = 4000, 2
RUNNING = 1000
DEVICE_TRACK = 2
HEALTH_TARGET_MS, METRICS_TARGET_MS = 10.0, 20.0
PAUSE_S = 0.02


async def ask(address, path):
    """Milliseconds that a GET takes on a separate connection. Raises ValueError for an answer that is not 200."""
    begin = time.perf_counter()
    reader, writer = await asyncio.open_connection(*address, limit=1 << 20)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    answer = await reader.read(-1)
    took_ms = 1000 * (time.perf_counter() - begin)
    writer.close()
    if not answer.startswith(b"HTTP/1.1 200"):
        raise ValueError(f"{path}: {answer[:200]!r}")
    return took_ms


async def probe(address, path, seconds):
    """Milliseconds of all requests in a window, sorted."""
    found, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        found.append(await ask(address, path))
        await asyncio.sleep(PAUSE_S)
    return sorted(found)


async def prefill_for_ever(address, seed):
    """Prompts that no cache knows, one after the other."""
    draw = np.random.default_rng(seed)
    while True:
        ids = draw.integers(3, SHAPE["vocab_size"], PROMPT_TOKENS).tolist()
        reader, writer = await asyncio.open_connection(*address, limit=1 << 20)
        body = json.dumps({"input_ids": ids, "sampling_params": {"max_new_tokens": 1, "ignore_eos": True}}).encode()
        head = f"POST /generate HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        answer = await reader.read(-1)
        writer.close()
        if not answer.startswith(b"HTTP/1.1 200"):
            raise ValueError(answer[:300])


def post(address, path):
    """The JSON that a POST answers."""
    request = urllib.request.Request(f"http://{address[0]}:{address[1]}{path}", method="POST")
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def busy_share(timeline):
    """Share of the time between the first and the last step of a timeline in which a step ran on the device."""
    steps = [event for event in timeline["traceEvents"] if event.get("tid") == DEVICE_TRACK and "dur" in event]
    begin, end = steps[0]["ts"], max(step["ts"] + step["dur"] for step in steps)
    return sum(step["dur"] for step in steps) / (end - begin), len(steps)


async def health(address, seconds):
    """Latencies of /health during prefills, the share of the window in which those ran, and in how many steps."""
    prefills = [asyncio.create_task(prefill_for_ever(address, seed)) for seed in range(PREFILLS_AT_ONCE)]
    await asyncio.sleep(5.0)
    await asyncio.to_thread(post, address, "/start_profile")
    found = await probe(address, "/health", seconds)
    timeline = await asyncio.to_thread(post, address, "/stop_profile")
    if failed := [task for task in prefills if task.done()]:
        failed[0].result()
    for task in prefills:
        task.cancel()
    await asyncio.gather(*prefills, return_exceptions=True)
    return found, *busy_share(timeline)


def read_streams(address):
    """Open `RUNNING` streams and throw away what they bring, in a separate process so that no probe waits for it."""

    async def drain():
        opened = [await open_completion(address, 100_000, f"Story {index}") for index in range(RUNNING)]
        await asyncio.gather(*(drain_one(reader) for reader, _ in opened))

    asyncio.run(drain())


async def drain_one(reader):
    while await reader.read(1 << 16):
        pass


def metrics(address, seconds):
    """Latencies of /metrics with running streams, and how many ran."""
    load = multiprocessing.get_context("spawn").Process(target=read_streams, args=(address,), daemon=True)
    load.start()
    while snapshot(address)["running"] < RUNNING:
        time.sleep(0.5)
    time.sleep(2.0)
    found = asyncio.run(probe(address, "/metrics", seconds))
    running = snapshot(address)["running"]
    load.terminate()
    return found, running


def show(name, found, target_ms, note):
    """One line of the table."""
    p50, p99 = found[len(found) // 2], found[min(int(len(found) * 0.99), len(found) - 1)]
    figures = f"p50 {p50:6.2f} ms   p99 {p99:6.2f} ms   max {found[-1]:6.2f} ms"
    print(f"{name:10} {figures}   target p99 {target_ms:g} ms   {len(found)} asked, {note}", flush=True)


def measure_health(options):
    """The first figure, with a separate server."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPE))
        model = ["--model-path", folder, "--load-format", "dummy", "--skip-tokenizer-init", "--disable-radix-cache"]
        with AnyServer(*model, "--max-total-tokens", "16384", "--threads", str(options.threads)) as address:
            found, share, steps = asyncio.run(health(address, options.seconds))
    show("/health", found, HEALTH_TARGET_MS, f"prefills ran {100 * share:.1f} % of the time, {steps} steps")


def measure_metrics(options):
    """The second one."""
    mock = ["--executor", "mock", "--mock-step-ms", str(options.step_ms), "--context-length", "128k"]
    room = ["--max-running-requests", str(RUNNING), "--max-total-tokens", "100m"]
    with AnyServer(*mock, *room) as address:
        found, running = metrics(address, options.seconds)
    show("/metrics", found, METRICS_TARGET_MS, f"{running} running, steps of {options.step_ms:g} ms")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="length of each window")
    parser.add_argument("--only", choices=["health", "metrics"], help="one of the two")
    parser.add_argument("--threads", type=int, default=0, help="torch's threads; 0 takes its default")
    parser.add_argument("--step-ms", type=float, default=100.0, help="steps of the mock executor under /metrics")
    options = parser.parse_args()
    if options.only != "metrics":
        measure_health(options)
    if options.only != "health":
        measure_metrics(options)


if __name__ == "__main__":
    main()
