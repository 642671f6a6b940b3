"""Does any policy cost the device time? 256 requests run and 2,000 wait, on the mock executor with steps of 10 ms.

Each client sends its next request as soon as one is answered, with a prefix that many share, and a tenant, priority,
service class and routing key of its own. The policy is changed while they run (`POST /v1/scheduler`); for each, over a
window: the steps that the device did against those it could have done, the tokens that clients received against those
it could have made with 256 running, and for streams that ended in it the time from the commit of the last token to the
client (see serving_mock.py).

Run: python benchmarks/policies_served.py
"""

import argparse
import asyncio
import itertools
import json
import tempfile
import time
from pathlib import Path

from mock_server import STEP_MS, Counter, Server, call, one_lag, snapshot, steps_done

from tokenyard.policy import POLICIES

RUNNING = 256
ANSWER_TOKENS = 400
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
        self.tasks = [asyncio.create_task(self._client()) for _ in range(clients)]

    async def _client(self):
        while True:
            number = next(self._numbers)
            prompt = f"{PREFIXES[number % len(PREFIXES)]} Train {number}"
            tokens = ANSWER_TOKENS // 2 + 37 * number % ANSWER_TOKENS
            lag = await one_lag(self._address, self.counter, tokens, prompt, **urgency(number))
            self.ends.append((time.monotonic(), lag))

    async def stop(self):
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def fill(address, waiting):
    """Wait until everybody is there."""
    state = {"waiting": 0, "running": 0}
    while state["waiting"] < 0.95 * waiting or state["running"] < 0.9 * RUNNING:
        await asyncio.sleep(0.2)
        state = await asyncio.to_thread(snapshot, address)


async def window(address, load, window_s):
    """Shares of possible steps and tokens, and the sorted lags of streams that ended."""
    steps, received, begin = await asyncio.to_thread(steps_done, address), load.counter.tokens, time.monotonic()
    await asyncio.sleep(window_s)
    steps = await asyncio.to_thread(steps_done, address) - steps
    received, seconds = load.counter.tokens - received, time.monotonic() - begin
    possible = seconds * 1000 / STEP_MS
    lags = sorted(lag for end, lag in load.ends if end >= begin)
    return steps / possible, received / (possible * RUNNING), lags


async def measure(address, around, names, options):
    load = Load(address, RUNNING + options.waiting)
    await fill(address, options.waiting)
    for name in names:
        described = await asyncio.to_thread(call, address, "/v1/scheduler", {"policy": name})
        await asyncio.sleep(options.settle)
        steps, tokens, lags = await window(address, load, options.window)
        state = await asyncio.to_thread(snapshot, address)
        assert state["policy"] == described["policy"], state["policy_note"]
        p50, p99 = (lags[int(len(lags) * share)] for share in (0.5, 0.99)) if lags else (float("nan"),) * 2
        row = f"{name:12} {around:36} {100 * steps:6.1f} % {100 * tokens:6.1f} % {p50:6.1f} ms {p99:6.1f} ms"
        print(f"{row}  {state['running']:4} {state['waiting']:5}", flush=True)
    await load.stop()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--waiting", type=int, default=2000)
    parser.add_argument("--settle", type=float, default=1.0, help="seconds between a change of policy and its window")
    parser.add_argument("--window", type=float, default=4.0, help="seconds")
    parser.add_argument("--policies", nargs="*", help="only these")
    options = parser.parse_args()
    print(f"{'policy':12} {'with':36}    steps   tokens  lag p50    p99   running waiting")
    with tempfile.TemporaryDirectory() as folder:
        tenants = Path(folder) / "tenants.json"
        tenants.write_text(json.dumps(TENANTS))
        for around, (flags, names) in AROUND.items():
            chosen = [name for name in names if not options.policies or name in options.policies]
            files = [str(tenants)] if "--tenants" in flags else []
            with Server("--enable-mixed-chunk", *flags, *files) as address:
                asyncio.run(measure(address, around, chosen, options))


if __name__ == "__main__":
    main()
