"""What a router costs, ours, sglang-router and smg in one run: the same mock workers, the same load.

For each router: CPU per request (200 bytes and 16 KB), CPU per streamed chunk, median times at one connection against
the worker itself, the time to the first byte of a paced stream, memory for 10,000 distinct prompts of 4 KB, and 1,000
paced streams at 50 tokens a second. CPU is what the router's process used, by the system's counters.

    python -m benchmarks.router_cpu --sglang-router PYTHON --smg PYTHON

PYTHON is the interpreter of an environment with that package; a peer that is not named is left out.
"""

import argparse
import json
import os
import random
import resource
import socket
import statistics
import subprocess
import sys
import time
import urllib.request

import psutil

from benchmarks.router_load import run

WORKERS = 4
START_S = 60
BOUND_CPU, BOUND_FIRST_MS, BOUND_MEMORY = 0.7, 1.0, 0.5


def cpu_clock(pid):
    """The clock of a process's CPU time (Linux, include/linux/posix-timers_types.h: CPUCLOCK_SCHED)."""
    return (~pid << 3) | 2


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def command(name, python, urls, port, other):
    """How each router is started: its defaults, but for addresses and the log."""
    if name == "tokenyard":
        return [python, "-m", "tokenyard", "route", "--worker-urls", *urls, "--port", str(port), "--log-level", "error"]
    common = ["--worker-urls", *urls, "--host", "127.0.0.1", "--port", str(port), "--log-level", "error"]
    common += ["--policy", "cache_aware", "--prometheus-port", str(other), "--prometheus-host", "127.0.0.1"]
    if name == "smg":
        return [python, "-m", "smg.launch_router", *common]
    return [python, "-m", "sglang_router.launch_router", *common]


class Started:
    """A router in front of the workers, with its process for the counters."""

    def __init__(self, name, python, urls):
        self.name = name
        self.port, other = free_ports(2)
        log = subprocess.DEVNULL if name != "tokenyard" else sys.stderr
        self._process = subprocess.Popen(command(name, python, urls, self.port, other), stdout=log, stderr=log)
        self.process = psutil.Process(self._process.pid)
        end = time.monotonic() + START_S
        while True:
            try:
                run(self.port, [body(0, 10)], 1)
                if not run(self.port, [body(i, 10) for i in range(20)], 2).errors:
                    return
            except OSError:
                pass
            if self._process.poll() is not None or time.monotonic() > end:
                self.close()
                raise RuntimeError(f"{name} did not start")
            time.sleep(0.2)

    def cpu_s(self):
        """User and system time of the process and its children, to the nanosecond."""
        every = [self.process, *self.process.children(recursive=True)]
        return sum(time.clock_gettime(cpu_clock(one.pid)) for one in every)

    def memory_mb(self):
        every = [self.process, *self.process.children(recursive=True)]
        return sum(one.memory_info().rss for one in every) / 1e6

    def close(self):
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()


def body(number, size, **fields):
    """A request whose prompt is one of many, by its number."""
    prompt = f"{number} ".rjust(8, "0") + random.Random(number).choice("abcdefgh") * max(size - 8, 1)
    return json.dumps({"model": "mock", "prompt": prompt, **fields}).encode()


def cpu_us(router, bodies, connections):
    """Microseconds of CPU per request. Other work only adds to it, so the least of several is nearest."""
    before = router.cpu_s()
    times = run(router.port, bodies, connections)
    assert not times.errors, f"{router.name}: {times.errors} errors"
    return (router.cpu_s() - before) / len(bodies) * 1e6


def measure(router, options):
    """All figures of one router."""
    found = {}
    for label, size, connections in (("200 B", 200, 16), ("200 B", 200, 128), ("16 KB", 16_000, 16)):
        bodies = [body(i % 200, size) for i in range(options.requests // options.rounds)]
        run(router.port, bodies[: len(bodies) // 10], connections)
        found[f"us/request {label} c={connections}"] = min(
            cpu_us(router, bodies, connections) for _ in range(options.rounds)
        )
    times = run(router.port, [body(i % 200, 200) for i in range(2000)], 1)
    found["p50 ms c=1"] = statistics.median(times.total) * 1e3
    times = run(router.port, [body(i, 200, stream=True, chunks=8, gap_ms=10) for i in range(60)], 1)
    found["first byte ms c=1"] = statistics.median(times.first_byte) * 1e3
    chunks, streams = 64, 128
    before = router.cpu_s()
    run(router.port, [body(i, 200, stream=True, chunks=chunks, gap_ms=10) for i in range(3 * streams)], streams)
    found["us/chunk paced c=128"] = (router.cpu_s() - before) / (3 * streams * chunks) * 1e6
    before = router.memory_mb()
    run(router.port, [body(i, 4096, x=str(i)) for i in range(10_000)], 16)
    found["MB for 10k x 4 KB"] = router.memory_mb() - before
    found["MB in all"] = router.memory_mb()
    before, began = router.cpu_s(), time.monotonic()
    times = run(
        router.port, [body(i, 200, stream=True, chunks=250, gap_ms=20) for i in range(options.streams)], options.streams
    )
    found[f"% of a core, {options.streams} streams"] = 100 * (router.cpu_s() - before) / (time.monotonic() - began)
    found["late ms p99, of 5 s"] = 1e3 * (sorted(times.total)[int(0.99 * len(times.total))] - 5.0)
    return found


def direct(port, options):
    """The same at a worker itself, as far as it has a meaning there."""
    found = {}
    found["p50 ms c=1"] = statistics.median(run(port, [body(i, 200) for i in range(2000)], 1).total) * 1e3
    times = run(port, [body(i, 200, stream=True, chunks=8, gap_ms=10) for i in range(60)], 1)
    found["first byte ms c=1"] = statistics.median(times.first_byte) * 1e3
    return found


def judge(found):
    """Which of the bounds ours misses, compared with the best peer that ran."""
    ours, base = found["tokenyard"], found["direct"]
    peers = [figures for name, figures in found.items() if name not in ("tokenyard", "direct")]
    missed = []
    if ours["first byte ms c=1"] - base["first byte ms c=1"] > BOUND_FIRST_MS:
        missed.append("the first byte comes more than 1 ms later than direct")
    for key in ours:
        if not peers:
            continue
        best = min(figures[key] for figures in peers)
        if key.startswith("us/") and ours[key] > BOUND_CPU * best:
            missed.append(f"{key}: {ours[key]:.1f} is more than 0.7 of {best:.1f}")
        if key == "p50 ms c=1" and ours[key] > best:
            missed.append(f"{key}: {ours[key]:.3f} is more than {best:.3f}")
        if key.startswith("MB for") and ours[key] > BOUND_MEMORY * best:
            missed.append(f"{key}: {ours[key]:.1f} is more than half of {best:.1f}")
    return missed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sglang-router", metavar="PYTHON")
    parser.add_argument("--smg", metavar="PYTHON")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5, help="parts of the requests, of which the least CPU counts")
    parser.add_argument("--streams", type=int, default=1000)
    options = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536), hard))
    ports = free_ports(WORKERS)
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    pythons = {"tokenyard": sys.executable, "sglang-router": options.sglang_router, "smg": options.smg}
    worker = [sys.executable, "-m", "benchmarks.router_load", *map(str, ports)]
    with subprocess.Popen(worker, stdout=subprocess.PIPE, text=True, env=os.environ) as workers:
        workers.stdout.readline()
        urllib.request.urlopen(urls[0] + "/v1/models", timeout=5).close()
        found = {"direct": direct(ports[0], options)}
        for name, python in pythons.items():
            if python:
                router = Started(name, python, urls)
                found[name] = measure(router, options)
                router.close()
        workers.terminate()
    keys = list(found["tokenyard"])
    print(f"{'':28}" + "".join(f"{name:>16}" for name in found))
    for key in keys:
        print(
            f"{key:28}"
            + "".join(f"{figures[key]:>16.2f}" if key in figures else f"{'-':>16}" for figures in found.values())
        )
    missed = judge(found)
    print("\n".join(f"MISSED {line}" for line in missed) or "every bound is kept")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
