"""What each class of requests sees on a real server with the demo model, when other clients overload it.

Three scenes, each under several settings of the scheduler:
- a few interactive requests during a flood of batch requests,
- three tenants, one of which floods,
- three priorities over a KV pool that is too small for them.

For each group of requests: how many were sent and were answered within the time, the time to first token (a request
that still waits at the end counts with its wait so far), the share with a first token within a second, the mean time
per further token, and the output tokens a second.

Run: python benchmarks/classes_served.py [--short]
"""

import argparse
import asyncio
import json
import time
from dataclasses import dataclass, field

import numpy as np
from mock_server import AnyServer, snapshot

TARGET_S = 1.0
PLAIN_TOKENS = (100, 2000)
"""Token ids to draw prompts from."""


@dataclass
class Ask:
    """One request of a scene, and what became of it; times in seconds since the scene began."""

    at: float
    group: str
    prompt_tokens: int
    answer_tokens: int
    fields: dict = field(default_factory=dict)
    events: list[float] = field(default_factory=list)
    done: bool = False


def batch_flood(seconds):
    flood = [Ask(0.0, "batch", 600, 64, {"service_tier": "flex", "priority": 0}) for _ in range(int(40 * seconds))]
    urgent = {"service_tier": "priority", "priority": 20, "slo": {"ttft_ms": 1000 * TARGET_S, "tpot_ms": 100}}
    return flood + [Ask(0.5 + 0.4 * i, "interactive", 60, 16, urgent) for i in range(int(seconds / 0.4) - 2)]


def flooding_tenant(seconds):
    flood = [Ask(0.0, "flooding tenant", 600, 64, {"tenant": "flood"}) for _ in range(int(40 * seconds))]
    calm = [
        Ask(0.5 + 0.8 * i + 0.4 * (name == "second"), f"{name} tenant", 150, 32, {"tenant": name})
        for name in ("first", "second")
        for i in range(int(seconds / 0.8) - 1)
    ]
    return flood + calm


def small_pool(seconds):
    return [
        Ask(0.1 * i, f"priority {priority}", 300, 200, {"priority": priority})
        for i in range(int(seconds / 0.1) - 4)
        for priority in [(0, 0, 20, 40)[i % 4]]
    ]


SCENES = {
    "an interactive class next to a batch flood": (
        batch_flood,
        {
            "fcfs": [],
            "priorities": ["--enable-priority-scheduling"],
            "levels": ["--enable-service-levels"],
            "slo": ["--schedule-policy", "slo"],
        },
    ),
    "three tenants, one of which floods": (
        flooding_tenant,
        {
            "fcfs": [],
            "vtc": ["--schedule-policy", "vtc"],
            "dlpm": ["--schedule-policy", "dlpm", "--policy-options", "quantum_tokens=2000"],
        },
    ),
    "priorities over a pool of 2,000 tokens": (
        small_pool,
        {
            "fcfs": ["--max-total-tokens", "2000", "--headroom", "none"],
            "priorities": ["--max-total-tokens", "2000", "--headroom", "none", "--enable-priority-scheduling"],
        },
    ),
}


async def send(address, ask, begin, prompt):
    """Send one request at its time and note when its tokens come."""
    await asyncio.sleep(max(0.0, begin + ask.at - time.monotonic()))
    reader, writer = await asyncio.open_connection(*address, limit=1 << 20)
    try:
        body = {"prompt": prompt, "max_tokens": ask.answer_tokens, "stream": True, "ignore_eos": True, **ask.fields}
        data = json.dumps(body).encode()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
        while chunk := await reader.read(1 << 16):
            ask.events += [time.monotonic() - begin] * chunk.count(b'"text":')
            if b"[DONE]" in chunk:
                ask.done = True
                return
    finally:
        writer.close()


async def play(address, asks, seconds):
    """Send all requests; after `seconds`, hang up on those that are not answered."""
    draw, begin = np.random.default_rng(1), time.monotonic()
    prompts = [draw.integers(*PLAIN_TOKENS, ask.prompt_tokens).tolist() for ask in asks]
    tasks = [asyncio.create_task(send(address, ask, begin, prompt)) for ask, prompt in zip(asks, prompts, strict=True)]
    _, late = await asyncio.wait(tasks, timeout=seconds)
    state = await asyncio.to_thread(snapshot, address)
    for task in late:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, Exception):
            raise outcome
    return state


def rows(asks, seconds):
    """One line a group."""
    for group in dict.fromkeys(ask.group for ask in asks):
        mine = [ask for ask in asks if ask.group == group]
        waits = np.array([(ask.events[0] if ask.events else seconds) - ask.at for ask in mine])
        gaps = [(ask.events[-1] - ask.events[0]) / (len(ask.events) - 1) for ask in mine if len(ask.events) > 1]
        tokens = sum(len(ask.events) for ask in mine) / seconds
        p50, p95 = np.percentile(waits, (50, 95))
        soon = 100 * np.mean((waits <= TARGET_S) & np.array([bool(ask.events) for ask in mine]))
        pace = 1000 * np.mean(gaps) if gaps else float("nan")
        answered = sum(ask.done for ask in mine)
        times = f"{p50:7.2f} s {p95:6.2f} s {soon:7.0f} % {pace:7.0f} ms"
        yield f"{group:16} {len(mine):5} {answered:8} {times} {tokens:8.0f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=12.0, help="length of a scene under one setting")
    parser.add_argument("--threads", default="1", help="CPU threads of the executor")
    parser.add_argument("--short", action="store_true", help="scenes of 6 seconds")
    options = parser.parse_args()
    if options.short:
        options.seconds = 6.0
    for title, (scene, settings) in SCENES.items():
        print(f"\n{title}\n{'setting':12} {'group':16}  sent answered TTFT p50     p95  in 1 s  per token tokens/s")
        for name, flags in settings.items():
            asks = scene(options.seconds)
            with AnyServer("--device", "cpu", "--threads", options.threads, "--enable-mixed-chunk", *flags) as address:
                state = asyncio.run(play(address, asks, options.seconds))
            for row in rows(asks, options.seconds):
                print(f"{name:12} {row}")
            counters = state["counters"]
            print(f"{'':12} {counters['preempted']} preemptions, {counters['retracted']} retractions", flush=True)


if __name__ == "__main__":
    main()
