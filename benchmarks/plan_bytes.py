"""What it takes to tell the other ranks of a model what to compute: plans as bytes through the ring in shared memory.

`python -m benchmarks.plan_bytes [--rows 256] [--plans 2000] [--ranks 2]`. Other processes take the plans as the ranks
of a model do; plans come `--pause-ms` apart, so that each finds its readers asleep, as after a step. The way
of a plan is the time from before it is encoded to after it is decoded at the last rank. Decodes of all rows, each
fifth with a new page, and once a chunk of 8,192 tokens.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

from benchmarks.step_plans import EqualRows
from tokenyard.base import ExecutorInfo, StepPlan
from tokenyard.base.plan_bytes import decode_plan, encode_plan
from tokenyard.executor.parallel.ring import RingReader, RingWriter, SharedMemory

CHUNK_TOKENS = 8192
ROUNDS = 1000


def read_plans(memory: int, bell: int, told: int, rank: int, ranks: int) -> None:
    """Be a rank: take plans to the end, then tell when each was decoded (int64 ns)."""
    ring, times = RingReader(SharedMemory(memory, ranks), rank, bell), []
    while (frame := ring.receive()) is not None:
        decode_plan(frame)
        times.append(time.monotonic_ns())
    with os.fdopen(told, "wb") as out:
        out.write(np.array(times, np.int64).tobytes())


def start_reader(memory: int, rank: int, ranks: int) -> tuple[int, int]:
    """Start one; returns the bell's end to write to and the one to read its times from."""
    (hears, bell), (times, told) = os.pipe(), os.pipe()
    fds = (memory, hears, told)
    command = [sys.executable, "-m", "benchmarks.plan_bytes", "--reader", *map(str, (*fds, rank, ranks))]
    subprocess.Popen(command, pass_fds=fds)
    os.close(hears)
    os.close(told)
    return bell, times


def make_plan(rows: int, chunk: int) -> StepPlan:
    """Decodes of `rows` rows, a new page for each fifth; or one chunk."""
    tokens = chunk or 1024
    info = ExecutorInfo("none", "cpu", "none", 1000, tokens, (), 16, rows * (tokens // 16 + 1), rows)
    made = EqualRows(info, rows, tokens)
    if chunk:
        return made.prefill(0, np.arange(chunk, dtype=np.int32))
    made.pretend(512)
    plan = made.decode()
    plan.page_rows = plan.pool_rows[::5].copy()
    plan.page_columns = plan.page_ids = plan.page_rows
    return plan


def seconds_of(call: Callable[[], object]) -> float:
    """The least of many measurements of a call."""
    best = 1.0
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - begin)
    return best


def measure(plan: StepPlan, plans: int, ranks: int, pause_s: float) -> None:
    """Send a plan again and again, and print what it took."""
    memory, fd = SharedMemory.create(ranks)
    readers = [start_reader(fd, rank, ranks) for rank in range(1, ranks)]
    os.close(fd)
    ring = RingWriter(memory, [bell for bell, _ in readers], lambda: None)
    # The first is sent before anyone has started, and does not count.
    ring.send(encode_plan(plan))
    while (memory.read_bytes[1:] == 0).any():
        time.sleep(0.01)
    begun, sent = [], []
    for _ in range(plans):
        # Awake, as the scheduler that has just made the plan.
        while time.monotonic_ns() < (sent[-1] if sent else 0) + pause_s * 1e9:
            pass
        begun.append(time.monotonic_ns())
        ring.send(encode_plan(plan))
        sent.append(time.monotonic_ns())
    ring.close()
    arrived = []
    for _, times in readers:
        with os.fdopen(times, "rb") as told:
            arrived.append(np.frombuffer(told.read(), np.int64)[1:])
    start = np.array(begun)
    way = (np.max(arrived, axis=0) - start) / 1000
    data = encode_plan(plan)
    encode_us, decode_us = (seconds_of(call) * 1e6 for call in (lambda: encode_plan(plan), lambda: decode_plan(data)))
    print(f"{len(plan.pool_rows)} rows, {len(plan.tokens)} tokens, {len(data)} bytes:")
    print(f"  encode {encode_us:.1f} us, decode {decode_us:.1f} us")
    print(f"  encoded and sent in {np.median(np.array(sent) - start) / 1000:.1f} us")
    spread = f"{np.median(way):.1f} us (p50), {np.percentile(way, 90):.1f} (p90), {way.min():.1f} (least)"
    print(f"  at the last of {ranks - 1} other ranks after {spread}")


def main() -> None:
    """Measure decodes and a chunk."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--plans", type=int, default=2000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pause-ms", type=float, default=2.0)
    parser.add_argument("--reader", type=int, nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.reader:
        memory, bell, told, rank, ranks = args.reader
        read_plans(memory, bell, told, rank, ranks)
        return
    measure(make_plan(args.rows, 0), args.plans, args.ranks, args.pause_ms / 1000)
    measure(make_plan(1, CHUNK_TOKENS), args.plans, args.ranks, args.pause_ms / 1000)


if __name__ == "__main__":
    main()
