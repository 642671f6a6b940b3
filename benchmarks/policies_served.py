"""Does any policy cost the device time? 256 requests run and 2,000 wait, on the mock executor with steps of 10 ms.

Each client sends its next request as soon as one is answered, with a prefix that many share, and a tenant, priority,
service class and routing key of its own. The policy is changed while they run (`POST /v1/scheduler`); for each, over a
window: the steps that the device did against those it could have done, the tokens that clients received against those
it could have made with 256 running, and for streams that ended in it the time from the commit of the last token to the
client (see serving_mock.py), and the CPU time of the scheduler's process a step, which is less at the mercy of whatever
else the machine does.

Run: python benchmarks/policies_served.py [--short] [--policies slo hrrn] [--running 256] [--window 4]
"""

import argparse
import asyncio
import itertools
import json
import sys
import tempfile
import time
from pathlib import Path

from mock_server import STEP_MS, Counter, Server, call, one_lag, snapshot, steps_done

from tokenyard.policy import POLICIES

ANSWER_TOKENS = 400
FILL_S = 60
CLIENTS_PER_S = 200
"""So many come a second in the beginning, as the lag contains the way in, which is long where all come at once."""

PREFIXES = [f"You are the {word} station master of a small yard. " * 8 for word in ("first", "next", "third", "last")]
TENANTS = {f"tenant {number}": {"weight": 1 + number % 3, "kv_share": 0.1} for number in range(8)}
AROUND = {
    "": ([], list(POLICIES)),
    "priorities": (["--enable-priority-scheduling"], ["fcfs", "lpm", "slo"]),
    "priorities, levels, tenants, bound": (
        ["--enable-priority-scheduling", "--enable-service-levels", "--max-overtaken-tokens", "100k", "--tenants"],
        ["fcfs", "lpm"],
    ),
}


def urgency(number):
    """Who asks and how urgently, different for neighbours."""
    return {
        "priority": number % 5,
        "service_tier": ("default", "flex", "priority")[number % 3],
        "tenant": f"tenant {number % len(TENANTS)}",
        "routing_key": f"key {number % 16}",
    }


class Load:
    """Clients that keep the server full, what they received, and (when it ended, its lag in ms) of each stream."""

    def __init__(self, address, clients):
        self._address = address
        self._numbers = itertools.count()
        self.counter = Counter()
        self.ends = []
        self.tasks = [asyncio.create_task(self._client(place / CLIENTS_PER_S)) for place in range(clients)]

    async def _client(self, delay_s):
        await asyncio.sleep(delay_s)
        while True:
            number = next(self._numbers)
            prompt = f"{PREFIXES[number % len(PREFIXES)]} Train {number}"
            tokens = ANSWER_TOKENS // 2 + 37 * number % ANSWER_TOKENS
            lag = await one_lag(self._address, self.counter, tokens, prompt, **urgency(number))
            self.ends.append((time.monotonic(), lag))

    def check(self):
        """Raise what a client died of, as the others would not fill the server without it."""
        for task in self.tasks:
            if task.done():
                task.result()

    async def stop(self):
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def fill(address, load, options):
    """Wait until everybody is there."""
    state, begin = {"waiting": 0, "running": 0}, time.monotonic()
    while state["waiting"] < 0.95 * options.waiting or state["running"] < 0.9 * options.running:
        if time.monotonic() - begin > FILL_S:
            sys.exit(f"after {FILL_S} s only {state['waiting']} requests wait and {state['running']} run")
        await asyncio.sleep(0.2)
        load.check()
        state = await asyncio.to_thread(snapshot, address)


async def window(server, address, load, options):
    """Shares of possible steps and tokens, the scheduler's CPU ms a step, and the sorted lags of streams that ended."""
    steps, received, begin = await asyncio.to_thread(steps_done, address), load.counter.tokens, time.monotonic()
    cpu_s = server.cpu_s("scheduler")
    await asyncio.sleep(options.window)
    steps = await asyncio.to_thread(steps_done, address) - steps
    received, seconds = load.counter.tokens - received, time.monotonic() - begin
    cpu_ms = 1000 * (server.cpu_s("scheduler") - cpu_s) / max(steps, 1)
    possible = seconds * 1000 / STEP_MS
    lags = sorted(lag for end, lag in load.ends if end >= begin)
    return steps / possible, received / (possible * options.running), cpu_ms, lags


async def measure(server, address, around, names, options):
    load = Load(address, options.running + options.waiting)
    await fill(address, load, options)
    for name in names:
        described = await asyncio.to_thread(call, address, "/v1/scheduler", {"policy": name})
        await asyncio.sleep(options.settle)
        steps, tokens, cpu_ms, lags = await window(server, address, load, options)
        load.check()
        state = await asyncio.to_thread(snapshot, address)
        assert name == "adaptive" or state["policy"] == described["policy"], state["policy_note"]
        p50, p99 = (lags[int(len(lags) * share)] for share in (0.5, 0.99)) if lags else (float("nan"),) * 2
        row = f"{name:12} {around:36} {100 * steps:6.1f} % {100 * tokens:6.1f} % {p50:6.1f} ms {p99:6.1f} ms"
        print(f"{row} {cpu_ms:5.2f} ms {state['running']:7} {state['waiting']:7}", flush=True)
    await load.stop()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--waiting", type=int, default=2000)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--settle", type=float, default=1.0, help="seconds between a change of policy and its window")
    parser.add_argument("--window", type=float, default=4.0, help="seconds")
    parser.add_argument("--policies", nargs="*", help="only these")
    parser.add_argument("--short", action="store_true", help="64 running, four policies: half a minute a setting")
    options = parser.parse_args()
    if options.short:
        options.running, options.policies = 64, ["fcfs", "lpm", "hrrn", "slo"]
    print(f"{'policy':12} {'with':36}    steps   tokens   lag p50       p99  CPU/step running waiting")
    with tempfile.TemporaryDirectory() as folder:
        tenants = Path(folder) / "tenants.json"
        tenants.write_text(json.dumps(TENANTS))
        for around, (flags, names) in AROUND.items():
            chosen = [name for name in names if not options.policies or name in options.policies]
            files = [str(tenants)] if "--tenants" in flags else []
            if not chosen:
                continue
            server = Server("--enable-mixed-chunk", "--max-running-requests", str(options.running), *flags, *files)
            with server as address:
                asyncio.run(measure(server, address, around, chosen, options))


if __name__ == "__main__":
    main()
