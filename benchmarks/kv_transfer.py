"""What it costs to move KV between two engines of one machine, by each transport, and what the protocol itself costs.

Two processes have KV pools laid out as the executors' are. One reads pages out of the other, which lie as in a fresh
pool (in runs) or as they fall after a while of use (scattered, no two neighbours).

Control cost is the CPU time of both machines of the protocol and of their messages, without sockets.

Run: python -m benchmarks.kv_transfer [--mib 64]
"""

import argparse
import os
import socket
import statistics
import subprocess
import sys
import threading
import time

import numpy as np

from tokenyard.base import Handover, KvPieces, Load, SamplingParams
from tokenyard.base.frames import LENGTH
from tokenyard.disagg.handshake import decode_message, frame
from tokenyard.disagg.process_vm import Probe, allow, read_pages
from tokenyard.disagg.protocol import DecodePeer, Prefill, PrefillPeer, Send, Timeouts, Want
from tokenyard.disagg.protocol.messages import pack_ids
from tokenyard.disagg.tcp import receive_pages, send_pages
from tokenyard.kv_layout.layout import PageMap, map_pages, spans

REPEATS = 7
SHAPES = {
    "8B model, 32 layers, page 16": (32, 16 * 1024 * 2),
    "SmolLM2-135M, 30 layers, page 16": (30, 16 * 3 * 64 * 2),
    "SmolLM2-135M, 30 layers, page 1": (30, 3 * 64 * 2),
}


class Pool:
    """[layer, 2, page, bytes of a page], as in `executor/kv_pool.py`."""

    def __init__(self, layers: int, piece_bytes: int, pages: int) -> None:
        self.data = np.ones((layers, 2, pages, piece_bytes), np.uint8)

    def pieces(self, pages):
        planes = self.data.ctypes.data + np.arange(2 * len(self.data)) * self.data.strides[1]
        addresses = planes + pages.astype(np.int64)[:, None] * self.data.strides[2]
        return KvPieces(addresses, self.data.shape[3], "cpu")


def pages_of(count: int, scattered: bool) -> np.ndarray:
    """`count` pages of a pool twice as large."""
    if not scattered:
        return np.arange(1, count + 1, dtype=np.int32)
    return np.random.default_rng(0).permutation(np.arange(1, 2 * count + 1, 2, dtype=np.int32))


def other(layers: int, piece_bytes: int, count: int, scattered: bool, reader: int, port: int) -> None:
    """The process that is read: says where its pool lies, then sends the pages whenever it is asked."""
    pool, probe = Pool(layers, piece_bytes, 2 * count + 2), Probe()
    allow(reader)
    pages = map_pages(pool.pieces)
    print(*pages.origins, *pages.strides, flush=True)
    stretches = spans(pages, pages_of(count, scattered))
    with socket.create_connection(("127.0.0.1", port)) as sock:
        while sock.recv(1):
            send_pages(sock, stretches, piece_bytes, 10.0, lambda: bool(probe))
            sock.setblocking(True)


def measure(shape: str, mib: float, scattered: bool) -> None:
    """Print the median and the least milliseconds of each transport."""
    layers, piece_bytes = SHAPES[shape]
    count = max(1, round(mib * 2**20 / (2 * layers * piece_bytes)))
    listener = socket.create_server(("127.0.0.1", 0))
    numbers = (layers, piece_bytes, count, int(scattered), os.getpid(), listener.getsockname()[1])
    command = [sys.executable, "-m", "benchmarks.kv_transfer", "--other", *map(str, numbers)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    columns = np.array(child.stdout.readline().split(), np.int64)
    theirs = PageMap(columns[: 2 * layers], columns[2 * layers :], piece_bytes)
    pool = Pool(layers, piece_bytes, 2 * count + 2)
    ours, pages = map_pages(pool.pieces), pages_of(count, scattered)
    sock, _ = listener.accept()

    def by_tcp() -> None:
        sock.setblocking(True)
        sock.send(b"x")
        receive_pages(sock, spans(ours, pages), piece_bytes, 10.0)

    ways = {"process_vm": lambda: read_pages(child.pid, theirs, pages, ours, pages), "tcp": by_tcp}
    for name, way in ways.items():
        took = []
        for _ in range(REPEATS):
            begin = time.perf_counter()
            way()
            took.append(1000 * (time.perf_counter() - begin))
        where = "scattered" if scattered else "in runs"
        median, least = statistics.median(took), min(took)
        print(
            f"{shape:34} {2 * layers * count:7} pieces {where:9} {name:10} median {median:7.1f} least {least:7.1f} ms"
        )
    sock.close()
    child.wait()


def control(tokens: int = 512, page_size: int = 16, transfers: int = 2000) -> None:
    """Print the CPU microseconds of one transfer's messages and both machines, without reading anything."""
    decode_peer, server = DecodePeer(Timeouts(), page_size), PrefillPeer(Timeouts(), "p", 1 << 40, lambda: b"t" * 16)
    decode_peer.joined(1, "p", 0)
    prompt, pages = pack_ids(np.arange(tokens, dtype=np.int32)), np.arange(1, tokens // page_size + 1, dtype=np.int32)

    def carry(to, actions) -> list:
        rest = []
        for action in actions:
            if isinstance(action, Send):
                to.received(1, decode_message(frame(action.message)[LENGTH.size :]), 1)
            else:
                rest.append(action)
        return rest

    begin = time.thread_time_ns()
    for number in range(transfers):
        decode_peer.want(Want(f"d-{number}", prompt, SamplingParams()), [number], "p", 1, 10**10)
        carry(server, decode_peer.take())
        (prefill,) = (action for action in server.take() if isinstance(action, Prefill))
        server.handed_over(Handover(prefill.number, tokens, pages, 5), 1)
        carry(decode_peer, server.take())
        decode_peer.loads(Load(number, 0, pages), 1)
        decode_peer.read_ended(f"d-{number}", "", 1)
        carry(server, decode_peer.take())
        carry(decode_peer, server.take())
        decode_peer.take()
    each = (time.thread_time_ns() - begin) / transfers / 1000
    assert decode_peer.counters["transferred"] == transfers
    print(f"control, {tokens} tokens: {each:.0f} us CPU a transfer, both sides together")


def main() -> None:
    """Measure everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=float, default=64.0)
    parser.add_argument("--other", nargs=6, type=int)
    chosen = parser.parse_args()
    if chosen.other:
        layers, piece_bytes, count, scattered, reader, port = chosen.other
        other(layers, piece_bytes, count, bool(scattered), reader, port)
        return
    print(f"{chosen.mib:g} MiB of KV between two processes, {threading.active_count()} thread each")
    for shape in SHAPES:
        for scattered in (False, True):
            measure(shape, chosen.mib, scattered)
    control()


if __name__ == "__main__":
    main()
