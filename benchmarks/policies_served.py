"""Does any policy cost the device time? 256 requests run and 2,000 wait, on the mock executor with steps of 10 ms.

Each client sends its next request as soon as one is answered, with a prefix that many share, and its own tenant,
priority, service class and routing key. They represent other machines, so they run in one process of a lower
priority that does as little as it can (see light_clients.py). The policy is changed while they run (`POST
/v1/scheduler`); for each, over a window: the steps that the device did against those it could have done, the tokens
that clients received against those it could have made with 256 running, for streams that ended in it the time from the
commit of the last token to the client, the CPU time a step of the scheduler's process, the API process, the detokenizer
and the clients, which is less at the mercy of whatever else the machine does, and the fewest that ran and waited.

Run: python benchmarks/policies_served.py [--short] [--policies slo hrrn] [--running 256] [--window 4]
"""

import argparse
import json
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from light_clients import Clients
from mock_server import STEP_MS, Server, call, snapshot

from tokenyard.policy import POLICIES

ANSWER_TOKENS = 400
FILL_S = 120
SPARE = 96
"""Clients beyond those that run and wait: some are always between two requests."""

POLL_INTERVAL_S = 0.5
MIN_SHARE, MAX_LAG_MS = 0.97, 50.0
PROCESSES = ("scheduler", "api", "detokenizer")

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


def body(number):
    """What the client with this number asks for."""
    return {
        "prompt": f"{PREFIXES[number % len(PREFIXES)]} Train {number}",
        "max_tokens": ANSWER_TOKENS // 2 + 37 * number % ANSWER_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "return_x_sched": True,
        **urgency(number),
    }


@dataclass
class Window:
    """What happened in `seconds`: snapshots from begin to end, tokens that clients received, the sorted lags (ms) of
    streams that ended, and the CPU seconds of `PROCESSES` and the clients.
    """

    seconds: float
    states: list
    tokens: int
    lags: list
    cpu_s: list


def fill(address, clients, options):
    """Wait until everybody is there."""
    state, begin = {"waiting": 0, "running": 0}, time.monotonic()
    while state["waiting"] < options.waiting or state["running"] < 0.9 * options.running:
        if time.monotonic() - begin > FILL_S:
            sys.exit(f"after {FILL_S} s only {state['waiting']} requests wait and {state['running']} run")
        time.sleep(0.2)
        clients.take()
        state = snapshot(address)


def window(server, address, clients, options):
    """Look on for as long as a window lasts."""
    clients.take()
    begin, cpu_s = time.monotonic(), [server.cpu_s(process) for process in PROCESSES]
    states = [snapshot(address)]
    while (left := begin + options.window - time.monotonic()) > 0:
        time.sleep(min(left, POLL_INTERVAL_S))
        states.append(snapshot(address))
    tokens, lags, clients_s = clients.take()
    seconds = time.monotonic() - begin
    used = [server.cpu_s(process) - before for process, before in zip(PROCESSES, cpu_s, strict=True)]
    return Window(seconds, states, tokens, sorted(lags), [*used, clients_s])


def measure(server, address, around, names, options):
    with closing(Clients(address, options.running + options.waiting + SPARE, body)) as clients:
        fill(address, clients, options)
        for name in names:
            described = call(address, "/v1/scheduler", {"policy": name})
            time.sleep(options.settle)
            found = window(server, address, clients, options)
            last = found.states[-1]
            assert name == "adaptive" or last["policy"] == described["policy"], last["policy_note"]
            print(f"{name:12} {around:36} {row(found, options)}", flush=True)


def row(found, options):
    """The figures of one window, and whether it met its targets."""
    first, last = found.states[0], found.states[-1]
    steps = last["counters"]["steps"] - first["counters"]["steps"]
    step_share = steps * STEP_MS * 1e6 / (last["now"] - first["now"])
    token_share = found.tokens * STEP_MS / (found.seconds * 1000 * options.running)
    p50, p99 = (
        (found.lags[int(len(found.lags) * share)] for share in (0.5, 0.99)) if found.lags else (float("nan"),) * 2
    )
    cpu_ms = " ".join(f"{1000 * used / max(steps, 1):6.2f}" for used in found.cpu_s)
    running, waiting = (min(state[kind] for state in found.states) for kind in ("running", "waiting"))
    met = step_share >= MIN_SHARE and token_share >= MIN_SHARE and p99 < MAX_LAG_MS
    verdict = "met" if met else "MISSED"
    if waiting < options.waiting:
        verdict = "too few waited"
    shares = f"{100 * step_share:6.1f} % {100 * token_share:6.1f} %"
    return f"{shares} {p50:6.1f} ms {p99:6.1f} ms {cpu_ms} {running:7} {waiting:7}  {verdict}"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--waiting", type=int, default=2000)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--settle", type=float, default=2.0, help="seconds between a change of policy and its window")
    parser.add_argument("--window", type=float, default=4.0, help="seconds")
    parser.add_argument("--policies", nargs="*", help="only these")
    parser.add_argument("--short", action="store_true", help="64 running, four policies: half a minute a setting")
    options = parser.parse_args()
    if options.short:
        options.running, options.policies = 64, ["fcfs", "lpm", "hrrn", "slo"]
    print(f"{'':12} {'':36} {'':37} CPU ms a step of            fewest")
    print(
        f"{'policy':12} {'with':36}    steps   tokens   lag p50       p99  sched    api  detok client running waiting"
    )
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
                measure(server, address, around, chosen, options)


if __name__ == "__main__":
    main()
