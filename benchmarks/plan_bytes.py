"""What it takes to tell the other ranks of a model what to compute: plans as bytes through the ring in shared memory.

`python -m benchmarks.plan_bytes [--rows 256] [--plans 2000] [--ranks 2] [--node]`. Other processes take the plans as
the ranks of a model do; plans come `--pause-ms` apart, so that each finds its readers asleep, as after a step. The
way of a plan is the time from before it is encoded to after it is decoded at the last rank. Decodes of all rows, each
fifth with a new page, and once a chunk of 8,192 tokens. With `--node` the other ranks are on another node: a process
there takes each plan from a connection on which every message is signed, and puts it into the ring. That node is on
this machine too, so that the network costs nothing.
"""

import argparse
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

from benchmarks.step_plans import EqualRows
from tokenyard.base import ExecutorInfo, StepPlan
from tokenyard.base.plan_bytes import decode_plan, encode_plan
from tokenyard.executor.distributed.node_connection import (
    NodeEnded,
    NodeHeartbeat,
    NodePlan,
    open_node_connection,
    own_hello,
)
from tokenyard.executor.distributed.process_group import LOOPBACK
from tokenyard.executor.distributed.shm_broadcast import RingReader, RingWriter, SharedMemory

CHUNK_TOKENS = 8192
ROUNDS = 1000


def read_plans(memory: int, bell: int, times_out: int, rank: int, ranks: int) -> None:
    """Be a rank: take plans to the end, then tell when each was decoded (int64 ns)."""
    ring, times = RingReader(SharedMemory(memory, ranks), rank, bell), []
    while (frame := ring.receive()) is not None:
        decode_plan(frame)
        times.append(time.monotonic_ns())
    with os.fdopen(times_out, "wb") as out:
        out.write(np.array(times, np.int64).tobytes())


def start_reader(memory: int, rank: int, ranks: int) -> tuple[int, int]:
    """Start one; returns the bell's end to write to and the one to read its times from."""
    (hears, bell), (times, times_out) = os.pipe(), os.pipe()
    fds = (memory, hears, times_out)
    command = [sys.executable, "-m", "benchmarks.plan_bytes", "--reader", *map(str, (*fds, rank, ranks))]
    subprocess.Popen(command, pass_fds=fds)
    os.close(hears)
    os.close(times_out)
    return bell, times


class Connected:
    """Plans to another node, as rank 0 sends them."""

    def __init__(self, ranks: int, first: bytes) -> None:
        with socket.create_server((LOOPBACK, 0)) as door:
            self.times, times_out = os.pipe()
            place = map(str, (times_out, door.getsockname()[1], ranks))
            subprocess.Popen([sys.executable, "-m", "benchmarks.plan_bytes", "--relay", *place], pass_fds=(times_out,))
            os.close(times_out)
            self._link, _ = open_node_connection(door.accept()[0], own_hello(0), b"", dialled=False)
        self.send(first)
        assert isinstance(self._link.receive(), NodeHeartbeat)

    def send(self, data: bytes) -> None:
        """Send a plan."""
        self._link.send(NodePlan(data))

    def close(self) -> None:
        """No more come."""
        self._link.leave(NodeEnded(""))


def relay(times_out: int, port: int, ranks: int) -> None:
    """Be another node: pass on what comes, then tell when its ranks had it."""
    link, _ = open_node_connection(socket.create_connection((LOOPBACK, port)), own_hello(1), b"", dialled=True)
    first = link.receive()
    assert isinstance(first, NodePlan)
    ring, times = start_ring(ranks, first.data)
    link.send(NodeHeartbeat())
    while isinstance(message := link.receive(), NodePlan):
        ring.send(message.data)
    ring.close()
    arrived = []
    for pipe in times:
        with os.fdopen(pipe, "rb") as found:
            arrived.append(np.frombuffer(found.read(), np.int64))
    with os.fdopen(times_out, "wb") as out:
        out.write(np.max(arrived, axis=0).tobytes())


def start_ring(ranks: int, first: bytes) -> tuple[RingWriter, list[int]]:
    """A ring with its readers, and the pipes to read their times from. They have had the frame `first`."""
    memory, fd = SharedMemory.create(ranks)
    readers = [start_reader(fd, rank, ranks) for rank in range(1, ranks)]
    os.close(fd)
    ring = RingWriter(memory, [bell for bell, _ in readers], lambda: None)
    ring.send(first)
    while (memory.read_bytes[1:] == 0).any():
        time.sleep(0.01)
    return ring, [times for _, times in readers]


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


def measure(plan: StepPlan, plans: int, ranks: int, pause_s: float, *, node: bool) -> None:
    """Send a plan again and again, and print what it took."""
    way_out: Connected | RingWriter
    if node:
        way_out = Connected(ranks, encode_plan(plan))
        readers = [way_out.times]
    else:
        way_out, readers = start_ring(ranks, encode_plan(plan))
    begun, sent = [], []
    for _ in range(plans):
        # Awake, as the scheduler that has just made the plan.
        while time.monotonic_ns() < (sent[-1] if sent else 0) + pause_s * 1e9:
            pass
        begun.append(time.monotonic_ns())
        way_out.send(encode_plan(plan))
        sent.append(time.monotonic_ns())
    way_out.close()
    arrived = []
    for times in readers:
        with os.fdopen(times, "rb") as times_out:
            # The first to a ring is sent before anyone has started, and does not count.
            arrived.append(np.frombuffer(times_out.read(), np.int64)[-plans:])
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
    parser.add_argument("--node", action="store_true", help="the other ranks are on another node")
    parser.add_argument("--relay", type=int, nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--reader", type=int, nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.reader:
        memory, bell, times_out, rank, ranks = args.reader
        read_plans(memory, bell, times_out, rank, ranks)
        return
    if args.relay:
        relay(*args.relay)
        return
    measure(make_plan(args.rows, 0), args.plans, args.ranks, args.pause_ms / 1000, node=args.node)
    measure(make_plan(1, CHUNK_TOKENS), args.plans, args.ranks, args.pause_ms / 1000, node=args.node)


if __name__ == "__main__":
    main()
