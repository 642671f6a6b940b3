"""Routers in front of real engines: hit rates and first tokens with shared prefixes, and what a killed engine costs.

Starts engines with the demo model (or the mock executor), puts each router in front of the same ones and lets clients
hold conversations: every turn's prompt is the last one with its answer and a new question behind it. Prints the tokens
that answers say were cached, p50 and p95 of the time to the first token, and each engine's share of the requests. With
`--kill` an engine is killed in the middle of ours and started again: prints what was lost and when first tokens took as
long as before again. `--sglang-router PYTHON` and `--smg PYTHON` add these, as in benchmarks/router_cpu.py.

    python -m benchmarks.router_served --engines 4 --kill
"""

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
import urllib.request

from benchmarks.router_cpu import command, free_ports

START_S = 120
SYSTEM = "You tell short stories for small children. " * 12
MODEL = "tokenyard-demo"
ANSWER_TOKENS = 24


def healthy(url):
    try:
        urllib.request.urlopen(url + "/ready", timeout=2).close()
    except OSError:
        return False
    return True


def wait_until(holds, what):
    end = time.monotonic() + START_S
    while not holds():
        if time.monotonic() > end:
            sys.exit(f"{what} did not come in time")
        time.sleep(0.2)


def start_engine(port, options):
    flags = ["--port", str(port), "--log-level", "error", "--max-total-tokens", str(options.pool_tokens)]
    if options.mock_step_ms:
        flags += ["--executor", "mock", "--mock-step-ms", str(options.mock_step_ms), "--context-length", "4096"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    call = [sys.executable, "-m", "tokenyard", "serve", *flags]
    return subprocess.Popen(call, env=environment, stderr=subprocess.DEVNULL, start_new_session=True)


async def ask(port, messages, seen):
    """One turn: the answer's text, or None for an answer that did not come to its end."""
    body = {"model": MODEL, "messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
    data = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    began, first, text, done, usage = time.monotonic(), None, "", False, {}
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
        )
        writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        async for line in reader:
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                done = True
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            for choice in event.get("choices", ()):
                content = choice["delta"].get("content") or ""
                if content and first is None:
                    first = time.monotonic() - began
                text += content
        writer.close()
    except (OSError, ValueError):
        done = False
    seen.append((began, first, done, usage))
    return text if done else None


async def converse(port, number, turns, seen):
    """One client's conversation. It goes on after a lost answer with what it has."""
    draw = random.Random(number)
    messages = [{"role": "system", "content": SYSTEM}]
    for turn in range(turns):
        words = " ".join(draw.choice(("fox", "moon", "river", "boat", "owl", "snow", "tree")) for _ in range(20))
        messages.append({"role": "user", "content": f"Story {number}.{turn} about {words}"})
        messages.append({"role": "assistant", "content": await ask(port, messages, seen) or ""})
        await asyncio.sleep(draw.random() * 0.2)


async def load(port, options, disturb=None):
    """All conversations, `options.clients` at a time; `disturb` runs at the same time."""
    seen, gate = [], asyncio.Semaphore(options.clients)

    async def one(number):
        async with gate:
            await converse(port, number, options.turns, seen)

    disturbing = asyncio.create_task(disturb()) if disturb else None
    await asyncio.gather(*(one(number) for number in range(options.conversations)))
    if disturbing is not None:
        await disturbing
    return seen


def report(name, seen, shares):
    firsts = sorted(first for _, first, _, _ in seen if first is not None)
    prompt = sum(usage.get("prompt_tokens", 0) for *_, usage in seen)
    cached = sum((usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0) for *_, usage in seen)
    row = {
        "router": name,
        "requests": len(seen),
        "lost": sum(not done for _, _, done, _ in seen),
        "hit %": round(100 * cached / max(prompt, 1), 1),
        "TTFT p50 ms": round(1e3 * statistics.median(firsts), 1),
        "TTFT p95 ms": round(1e3 * firsts[int(0.95 * len(firsts))], 1),
        "busiest %": round(100 * max(shares) / max(sum(shares), 1), 1),
    }
    print(json.dumps(row), flush=True)


def requests_of(urls):
    """How many requests each engine has had."""
    found = []
    for url in urls:
        with urllib.request.urlopen(url + "/metrics", timeout=10) as answer:
            lines = [
                line for line in answer.read().decode().splitlines() if line.startswith("tokenyard_requests_total")
            ]
        found.append(sum(float(line.rsplit(" ", 1)[1]) for line in lines))
    return found


def flush(urls):
    for url in urls:
        urllib.request.urlopen(urllib.request.Request(url + "/flush_cache", b"{}"), timeout=30).close()


def killing(engines, ports, options):
    """Kills the first engine after a while and starts it again; `when` is set to the time of its death."""
    when = []

    async def disturb():
        await asyncio.sleep(options.kill_after_s)
        os.killpg(engines[0].pid, signal.SIGKILL)
        when.append(time.monotonic())
        await asyncio.sleep(options.down_s)
        engines[0] = await asyncio.to_thread(start_engine, ports[0], options)

    return disturb, when


def recovery(seen, died):
    """Seconds after `died` until the last first token that took more than twice the usual."""
    before = [first for began, first, _, _ in seen if first is not None and began < died]
    usual = sorted(before)[int(0.95 * len(before))] if before else 0.0
    late = [
        began + first - died
        for began, first, _, _ in seen
        if first is not None and began > died - usual and first > 2 * usual
    ]
    return max(late, default=0.0)


def run_router(name, python, urls, options, policy=None):
    """The router's process and port, once it answers."""
    port, other = free_ports(2)
    call = command(name, python, urls, port, other) + (["--policy", policy] if policy else [])
    process = subprocess.Popen(call, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    wait_until(lambda: healthy(address) or answers(address), name)
    return process, port


def answers(url):
    try:
        urllib.request.urlopen(url + "/v1/models", timeout=2).close()
    except OSError:
        return False
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--conversations", type=int, default=60)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--pool-tokens", type=int, default=6000)
    parser.add_argument("--mock-step-ms", type=float, default=0.0, help="the mock executor instead of the demo model")
    parser.add_argument("--policies", nargs="+", default=["predicted_ttft", "cache_aware", "round_robin"])
    parser.add_argument("--sglang-router", metavar="PYTHON")
    parser.add_argument("--smg", metavar="PYTHON")
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--kill-after-s", type=float, default=4.0)
    parser.add_argument("--down-s", type=float, default=3.0)
    options = parser.parse_args()
    ports = free_ports(options.engines)
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    engines = [start_engine(port, options) for port in ports]
    routers = [("tokenyard", sys.executable, policy) for policy in options.policies]
    routers += [(n, p, None) for n, p in (("sglang-router", options.sglang_router), ("smg", options.smg)) if p]
    try:
        wait_until(lambda: all(healthy(url) for url in urls), "an engine")
        for name, python, policy in routers:
            flush(urls)
            process, port = run_router(name, python, urls, options, policy)
            before = requests_of(urls)
            seen = asyncio.run(load(port, options))
            shares = [after - earlier for earlier, after in zip(before, requests_of(urls), strict=True)]
            report(f"{name} {policy or ''}".strip(), seen, shares)
            process.terminate()
            process.wait()
        if options.kill:
            process, port = run_router("tokenyard", sys.executable, urls, options)
            disturb, when = killing(engines, ports, options)
            seen = asyncio.run(load(port, options, disturb))
            report("tokenyard, one engine killed", seen, [1])
            print(json.dumps({"recovery s": round(recovery(seen, when[0]), 2)}))
            process.terminate()
            process.wait()
    finally:
        for engine in engines:
            if engine.poll() is None:
                os.killpg(engine.pid, signal.SIGTERM)


if __name__ == "__main__":
    main()
