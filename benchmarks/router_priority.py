"""What a request of the top class waits for its first token behind the router, alone and under ten times the load.

Two engines with the mock executor and few places; the top class comes at a steady rate, first with as much work as the
engines can easily do, then with ten times that, all of the rest of a low priority. Prints the median and the 99th
percentile of the time to the first token of both classes, and whether the top class keeps to its bound: 1.2 times its
unloaded 99th percentile and one step.

    python -m benchmarks.router_priority [--seconds 20]
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import time

import numpy as np

from benchmarks.router_cpu import free_ports
from benchmarks.router_served import answers, healthy, wait_until

PLACES, TOKENS, PROMPT_WORDS = 8, 30, 60
TOP, LOW = 100, 0
TOP_SHARE, BUSY, FACTOR, BOUND = 0.2, 0.5, 10.0, 1.2


async def ask(port, number, priority, seen):
    """One stream; notes the time to its first token, or None for an answer without one."""
    words = " ".join(random.Random(number).choice(("fox", "moon", "river", "boat")) for _ in range(PROMPT_WORDS))
    fields = {"prompt": f"{number} {words}", "max_tokens": TOKENS, "stream": True, "priority": priority}
    data = json.dumps({**fields, "ignore_eos": True}).encode()
    began, first = time.monotonic(), None
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        async for line in reader:
            if first is None and line.startswith(b"data: {") and b'"error"' not in line:
                first = time.monotonic() - began
        writer.close()
    except OSError:
        first = None
    finally:
        seen.append((priority, first))


async def load(port, options, factor):
    """Both classes as they come; the top class always at the same rate."""
    places = options.engines * PLACES / (TOKENS * options.step_ms / 1e3)
    top_rate = TOP_SHARE * BUSY * places
    low_rate = factor * BUSY * places - top_rate
    rng, seen, tasks, number = random.Random(1), [], [], 0
    due = {TOP: rng.expovariate(top_rate), LOW: rng.expovariate(low_rate)}
    rates, begin = {TOP: top_rate, LOW: low_rate}, time.monotonic()
    while min(due.values()) < options.seconds:
        priority = min(due, key=due.get)
        await asyncio.sleep(max(begin + due[priority] - time.monotonic(), 0.0))
        tasks.append(asyncio.create_task(ask(port, number, priority, seen)))
        due[priority] += rng.expovariate(rates[priority])
        number += 1
    for task in tasks:
        if seen and time.monotonic() - begin > options.seconds + 5.0:
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return seen


def report(name, seen):
    """Prints one scene and returns the 99th percentile of the top class in seconds."""
    row, worst = {"load": name}, 0.0
    for label, priority in (("top", TOP), ("low", LOW)):
        asked = [first for its, first in seen if its == priority]
        firsts = [first for first in asked if first is not None]
        row |= {f"{label} asked": len(asked), f"{label} answered": len(firsts)}
        if firsts:
            p50, p99 = np.percentile(firsts, (50, 99))
            row |= {f"{label} TTFT p50 ms": round(1e3 * p50, 1), f"{label} TTFT p99 ms": round(1e3 * p99, 1)}
            worst = p99 if priority == TOP else worst
    print(json.dumps(row), flush=True)
    return worst


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    *ports, port = free_ports(options.engines + 1)
    urls = [f"http://127.0.0.1:{one}" for one in ports]
    serve = ["--executor", "mock", "--mock-step-ms", str(options.step_ms), "--max-running-requests", str(PLACES)]
    serve += ["--enable-priority-scheduling", "--log-level", "error", "--enable-mixed-chunk"]
    command = [sys.executable, "-m", "tokenyard"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen([*command, "serve", "--port", str(one), *serve], env=environment, stderr=subprocess.DEVNULL)
        for one in ports
    ]
    try:
        wait_until(lambda: all(healthy(url) for url in urls), "an engine")
        route = [*command, "route", "--port", str(port), "--log-level", "error", "--queue-aging-secs", "0"]
        processes.append(subprocess.Popen([*route, "--worker-urls", *urls]))
        wait_until(lambda: answers(f"http://127.0.0.1:{port}"), "the router")
        time.sleep(1.0)
        alone = report("easy", asyncio.run(load(port, options, 1.0)))
        crowded = report(f"{FACTOR:g} times", asyncio.run(load(port, options, FACTOR)))
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait()
    most = BOUND * alone + options.step_ms / 1e3
    kept = crowded <= most
    print(f"top class: {1e3 * crowded:.1f} ms at most {1e3 * most:.1f} ms: {'kept' if kept else 'MISSED'}")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
