"""The ranks that one process starts on its own machine.

Rank 0 starts the other ranks of node 0; the command of another node starts all ranks of that node. Plans reach the
ranks through a ring in shared memory, which also holds their heartbeats.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from tokenyard.base import NS_PER_S, ConfigError, EngineDeadError
from tokenyard.executor.distributed.process_watch import ProcessWatch
from tokenyard.executor.distributed.rank_messages import RankCall, RankReply, RankReport, RankSetup, RankSocket
from tokenyard.executor.distributed.shared_kv import create_memory
from tokenyard.executor.distributed.shm_broadcast import RingWriter, SharedMemory

RANK_PROCESS_MODULE = "tokenyard.executor.distributed.rank_process"
START_TIMEOUT_S = 1800.0
"""How long a rank may take to load its part of the model after rank 0 has loaded its own."""

END_TIMEOUT_S = 2.0
ROOT_CAUSE_WAIT_NS = NS_PER_S // 2
"""How long the end of a rank that has lost another one is not reported: the other's end is the cause."""


@dataclass(slots=True)
class ChildRank:
    """One rank, as the process that started it sees it.

    rank: its number.
    place: its column in the heartbeat table.
    name: its name in messages and logs.
    process: its process.
    wire: the socket to it.
    calls: the socket for calls to it.
    kv: the descriptor of the memory of its KV, -1 where it does not share that.
    end: why it ended, "" while it runs.
    ended_ns: when it was found to have ended.
    lost_peers: whether it ended because it could not reach another rank.
    """

    rank: int
    place: int
    name: str
    process: subprocess.Popen[bytes]
    wire: RankSocket
    calls: RankSocket
    kv: int = -1
    end: str = ""
    ended_ns: int = 0
    lost_peers: bool = False

    def wait_report(self) -> RankReport:
        """Wait for its next report while it starts. Raises EngineDeadError if it ends or is late, ConfigError."""
        try:
            return self.wire.receive(RankReport, START_TIMEOUT_S)
        except TimeoutError:
            raise EngineDeadError(f"{self.name} has not started within {START_TIMEOUT_S:g} s") from None
        except (EOFError, OSError):
            raise EngineDeadError(f"{self.name} {self.how_it_ended()} while it started") from None
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{self.name} speaks another version of Tokenyard: {error}") from None

    def reply(self) -> RankReply:
        """Wait for the reply to a call that was sent. A rank that ends has failed it."""
        try:
            return self.calls.receive(RankReply)
        except (EOFError, OSError):
            return RankReply(failure="it ended")

    def how_it_ended(self) -> str:
        """Return the reason why the process ended."""
        with suppress(EOFError, TimeoutError, OSError, msgspec.MsgspecError):
            report = self.wire.receive(RankReport, 0.1)
            self.lost_peers = report.lost_peers
            if report.failure:
                return f"failed: {report.failure}"
        self.process.kill()
        code = self.process.wait()
        return f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"


class ChildRanks:
    """The processes of some ranks. `check` is called while the ring is full, and raises to give up."""

    def __init__(self, setups: list[RankSetup], check: Callable[[], None]) -> None:
        """Start them. setups: one for each rank, with the places 1, 2, ..."""
        self._memory, memory = SharedMemory.create(len(setups) + 1)
        self._children: list[ChildRank] = []
        bells = []
        for setup in setups:
            child, bell = _start(setup, memory)
            self._children.append(child)
            bells.append(bell)
        os.close(memory)
        self._ring = RingWriter(self._memory, bells, check)

    def __iter__(self) -> Iterator[ChildRank]:
        return iter(self._children)

    def send(self, frame: bytes) -> None:
        """Send a plan to all. Raises OSError if one has ended, and what `check` raises."""
        self._ring.send(frame)

    def call(self, call: RankCall) -> None:
        """Have all do something; each replies."""
        for child in self._children:
            child.calls.send(call)

    def check(self, watch: ProcessWatch) -> str:
        """Write a heartbeat; returns why the ranks cannot continue, "" if all are healthy."""
        now = self._memory.alive_ns[0] = watch.beat()
        for child in self._children:
            if child.process.poll() is not None:
                if not child.end:
                    child.end, child.ended_ns = child.how_it_ended(), now
                if not child.lost_peers or now - child.ended_ns > ROOT_CAUSE_WAIT_NS:
                    return f"{child.name} {child.end}"
            elif watch.is_stalled(child.process.pid, int(self._memory.alive_ns[child.place])):
                return f"{child.name} is stalled"
        return ""

    def begin_step(self, step: int) -> None:
        """Record which step the parent process has begun."""
        self._memory.steps[0] = step

    def describe(self) -> list[dict[str, Any]]:
        """Return pid, step and silence of the parent process, then of each rank."""
        now = time.monotonic_ns()
        pids = [os.getpid(), *(child.process.pid for child in self._children)]
        table = zip(pids, self._memory.steps, self._memory.alive_ns, strict=True)
        return [
            {"pid": pid, "step": int(step), "silent_s": round((now - int(alive)) / 1e9, 1)}
            for pid, step, alive in table
        ]

    def kill(self) -> None:
        """Kill them."""
        for child in self._children:
            child.process.kill()

    def close(self, patience_s: float) -> None:
        """Ask them to end, and kill those that still run after `patience_s`."""
        self._ring.close()
        for child in self._children:
            with suppress(subprocess.TimeoutExpired):
                child.process.wait(patience_s)
            child.process.kill()
            child.process.wait()
            child.wire.close()
            child.calls.close()


def _start(setup: RankSetup, memory: int) -> tuple[ChildRank, int]:
    """Start a rank; returns it and the write end of its bell."""
    ours, theirs = socket.socketpair()
    our_calls, their_calls = socket.socketpair()
    hears, bell = os.pipe()
    kv = create_memory() if setup.share_kv else -1
    with theirs, their_calls:
        fds = (theirs.fileno(), their_calls.fileno(), hears, memory, *([kv] if setup.share_kv else []))
        command = [sys.executable, "-m", RANK_PROCESS_MODULE, *map(str, fds)]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds)
    os.close(hears)
    wire = RankSocket(ours)
    wire.send(setup)
    return ChildRank(setup.rank, setup.place, setup.name, process, wire, RankSocket(our_calls), kv), bell
