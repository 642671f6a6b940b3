"""The other ranks of a tensor-parallel model, as processes of the world.

How rank 0 starts, feeds, watches and ends them is the product's code, and so is what they run, from `main` on. The
world's are `subprocess`, pipes, pairs of sockets, what the kernel says of a process, and gloo.
"""

import errno
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from tests.world import divided_model
from tests.world.clock import NS
from tests.world.lockstep import Killed, LockstepThread, running
from tests.world.loop import current
from tests.world.network import Process
from tests.world.threads import Waiters
from tokenyard.engine.scheduler_process.health import watchdog
from tokenyard.executor.distributed import (
    child_ranks,
    distributed_loader,
    process_watch,
    rank0,
    rank_process,
    shared_kv,
    shm_broadcast,
)
from tokenyard.executor.distributed.process_watch import ProcessWatch

START_S = 0.3
CONNECT_TIMEOUT_S = 60.0
RING_BYTES = 1 << 14
"""Little, so that plans wrap and wait."""


class _Pipe:
    """Bytes on their way between processes; an end is open as long as one descriptor of it is."""

    def __init__(self, world: Any) -> None:
        self.waiters = Waiters(world.clock)
        self.unread = bytearray()
        self.readers = self.writers = 1

    def read(self, size: int, timeout_s: float | None = None) -> bytes:
        while not self.unread and self.writers:
            if not self.waiters.wait(timeout_s) and timeout_s is not None:
                raise TimeoutError("timed out")
        data = bytes(self.unread[:size])
        del self.unread[:size]
        return data

    def write(self, data: bytes) -> None:
        if not self.readers:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        self.unread += data
        self.waiters.wake()


class _End:
    """A descriptor: of what it reads from, what it writes to, or both."""

    def __init__(self, reads: _Pipe | None = None, writes: _Pipe | None = None) -> None:
        self.reads, self.writes = reads, writes

    def dup(self) -> "_End":
        if self.reads is not None:
            self.reads.readers += 1
        if self.writes is not None:
            self.writes.writers += 1
        return _End(self.reads, self.writes)

    def close(self) -> None:
        if self.reads is not None:
            self.reads.readers -= 1
        if self.writes is not None:
            self.writes.writers -= 1
            self.writes.waiters.wake()


class _Socket:
    """One of a pair of sockets, by its descriptor."""

    def __init__(self, ranks: "Ranks", number: int) -> None:
        self._ranks, self._number = ranks, number
        self._timeout_s: float | None = None

    def fileno(self) -> int:
        return self._number

    def settimeout(self, seconds: float | None) -> None:
        self._timeout_s = seconds

    def recv(self, size: int) -> bytes:
        return self._ranks.ends[self._number].reads.read(size, self._timeout_s)

    def sendall(self, data: bytes) -> None:
        self._ranks.ends[self._number].writes.write(data)

    def close(self) -> None:
        self._ranks.os.close(self._number)

    def __enter__(self) -> "_Socket":
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


class RankProcess:
    """A process that a scheduler has started; also its `subprocess.Popen`.

    dies_with_parent: whether it has asked the kernel for that.
    slow_s: what a step takes in addition.
    """

    def __init__(self, ranks: "Ranks", command: list[str], pass_fds: tuple[int, ...]) -> None:
        parent = current.get()
        assert parent is not None
        self._ranks, self.parent = ranks, parent
        self.pid = next(ranks.pids)
        self.process = Process(f"{parent.name}/{self.pid}")
        self.returncode: int | None = None
        self.dies_with_parent, self.slow_s = False, 0.0
        fds = {fd: ranks.dup(fd, self.process) for fd in pass_fds}
        self.argv = ["rank", *(str(fds[int(word)]) for word in command[3:])]
        self._ended = Waiters(ranks.world.clock)
        ranks.started[self.process] = self
        thread = LockstepThread(ranks.world.loop, ranks.world.clock, self.process, self._main)
        ranks.world.threads.append(thread)

    def _main(self) -> None:
        thread = running.get()
        assert thread is not None
        thread.wait_until(self._ranks.world.clock.now_ns + round(START_S * NS), wakes_early=False)
        rank_process.main()

    def end(self, code: int) -> None:
        """It exits, or is killed by a signal (its number below 0)."""
        if self.returncode is None:
            self.returncode = code
            self.process.alive = self.process.stopped = False
            if running.get() is None:
                self._reap()
            else:
                self._ranks.world.outside(0.0, self._reap)

    def _reap(self) -> None:
        for thread in list(self.process.threads):
            thread.kill()
        self._ranks.ended(self.process)
        self._ended.wake()

    # What rank 0 calls.

    def poll(self) -> int | None:
        return self.returncode

    def kill(self) -> None:
        self.end(-signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._ended.wait(timeout)
        if self.returncode is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired("rank", timeout)
        return self.returncode


class _Os:
    """The module `os` as the product finds it."""

    def __init__(self, ranks: "Ranks") -> None:
        self._ranks = ranks

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def pipe(self) -> tuple[int, int]:
        pipe = _Pipe(self._ranks.world)
        return self._ranks.number(_End(reads=pipe)), self._ranks.number(_End(writes=pipe))

    def read(self, fd: int, size: int) -> bytes:
        return self._ranks.ends[fd].reads.read(size)

    def write(self, fd: int, data: bytes) -> None:
        self._ranks.ends[fd].writes.write(data)

    def dup(self, fd: int) -> int:
        process = current.get()
        return os.dup(fd) if process is None else self._ranks.dup(fd, process)

    def memfd_create(self, name: str) -> int:
        process, fd = current.get(), os.memfd_create(name)
        return fd if process is None else self._ranks.own(fd, process)

    def close(self, fd: int) -> None:
        self._ranks.close(fd)

    def getpid(self) -> int:
        process = current.get()
        return os.getpid() if process is None else self._ranks.pid_of(process)

    def getppid(self) -> int:
        parent = self._ranks.own_process().parent
        return self._ranks.pid_of(parent) if parent.alive else 1

    def kill(self, pid: int, number: int) -> None:
        self._ranks.world.outside(0.0, self._ranks.kill_scheduler, pid)

    def nice(self, increment: int) -> None:
        pass

    def _exit(self, code: int) -> None:
        process = current.get()
        assert process is not None
        if process in self._ranks.started:
            self._ranks.started[process].end(code)
        else:
            process.alive = False
            self._ranks.world.outside(0.0, self._ranks.kill_scheduler, self._ranks.pid_of(process))
        raise Killed


class _Meeting:
    """Where the ranks of a model find each other, and what each has given to each exchange."""

    def __init__(self, ranks: "Ranks", size: int) -> None:
        self.waiters = Waiters(ranks.world.clock)
        self.members: list[Process | None] = [None] * size
        self.given: dict[int, dict[int, torch.Tensor]] = {}


class _Group:
    """TorchProcessGroup over gloo: a rank waits for those whose tensors it needs, and fails where one has ended."""

    def __init__(self, ranks: "Ranks", failed: Callable[[Exception], Exception], **kind: bool) -> None:
        self._ranks, self._failed = ranks, failed
        self._exchanges = 0

    def connect(self, meeting: Any, rank: int, size: int, device: torch.device, listener: Any = None) -> None:
        self._meeting = self._ranks.meetings.setdefault(meeting.file, _Meeting(self._ranks, size))
        self._rank, self._size = rank, size
        self._meeting.members[rank] = current.get()
        self._meeting.waiters.wake()
        until_ns = self._ranks.world.clock.now_ns + round(CONNECT_TIMEOUT_S * NS)
        while None in self._meeting.members:
            left_s = (until_ns - self._ranks.world.clock.now_ns) / NS
            if left_s <= 0:
                raise self._failed(RuntimeError("Timed out waiting for all ranks"))
            self._meeting.waiters.wait(left_s)
        self.all_reduce(torch.zeros(1))

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        parts = self._exchange(part, range(self._size))
        return torch.stack([parts[rank] for rank in range(self._size)]).sum(dim=0)

    def broadcast_from_rank0(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._exchange(tensor, [0])[0]

    def close(self) -> None:
        pass

    def _exchange(self, tensor: torch.Tensor, needed: Any) -> dict[int, torch.Tensor]:
        number, self._exchanges = self._exchanges, self._exchanges + 1
        meeting = self._meeting
        given = meeting.given.setdefault(number, {})
        given[self._rank] = tensor.clone()
        meeting.given.pop(number - 64, None)
        meeting.waiters.wake()
        while any(rank not in given for rank in needed):
            gone = [rank for rank in needed if rank not in given and not meeting.members[rank].alive]
            if gone:
                raise self._failed(RuntimeError(f"Connection closed by peer [rank {gone[0]}]"))
            meeting.waiters.wait()
        return given


class Ranks:
    """All processes of the world that schedulers have started, and the descriptors of both."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.numbers, self.pids = itertools.count(1 << 20), itertools.count(2)
        self.ends: dict[int, Any] = {}
        self.owners: dict[int, Process] = {}
        """Of descriptors, real ones of shared memory among them."""

        self.started: dict[Process, RankProcess] = {}
        self.meetings: dict[str, _Meeting] = {}
        self._pids: dict[Process, int] = {}
        self.os = _Os(self)

    # Descriptors.

    def own(self, fd: int, process: Process) -> int:
        self.owners[fd] = process
        return fd

    def number(self, end: _End, process: Process | None = None) -> int:
        owner = process or current.get()
        assert owner is not None
        fd = next(self.numbers)
        self.ends[fd] = end
        return self.own(fd, owner)

    def dup(self, fd: int, process: Process) -> int:
        """The same for a process."""
        return self.number(self.ends[fd].dup(), process) if fd in self.ends else self.own(os.dup(fd), process)

    def close(self, fd: int) -> None:
        self.owners.pop(fd, None)
        end = self.ends.pop(fd, None)
        os.close(fd) if end is None else end.close()

    def socketpair(self) -> tuple[_Socket, _Socket]:
        one, other = _Pipe(self.world), _Pipe(self.world)
        ends = _End(one, other), _End(other, one)
        return _Socket(self, self.number(ends[0])), _Socket(self, self.number(ends[1]))

    # Processes.

    def own_process(self) -> RankProcess:
        process = current.get()
        assert process is not None
        return self.started[process]

    def pid_of(self, process: Process) -> int:
        if process in self.started:
            return self.started[process].pid
        return self._pids.setdefault(process, next(self.pids))

    def state_of(self, pid: int) -> str:
        """What the kernel says of a process."""
        for process in (*self.started, *self._pids):
            if self.pid_of(process) == pid:
                return "T" if process.stopped else "S"
        return ""

    def of(self, scheduler: Process) -> list[RankProcess]:
        """Those of a scheduler that live."""
        return [rank for rank in self.started.values() if rank.parent is scheduler and rank.returncode is None]

    def kill_scheduler(self, pid: int) -> None:
        """A scheduler process ends; its engine starts another."""
        for engine in self.world.engines:
            for scheduler in list(engine.schedulers.values()):
                if self._pids.get(scheduler.process) == pid:
                    engine.kill_scheduler(scheduler)

    def ended(self, process: Process) -> None:
        """A process has ended: the kernel closes what it had open, and ends those who asked for that."""
        self.started.pop(process, None)
        self._pids.pop(process, None)
        for fd in [fd for fd, owner in self.owners.items() if owner is process]:
            self.close(fd)
        for rank in self.of(process):
            if rank.dies_with_parent:
                rank.kill()
        for meeting in self.meetings.values():
            if process in meeting.members:
                meeting.waiters.wake()

    def slowed_s(self) -> float:
        """What a step takes in addition in the process that asks."""
        process = current.get()
        return self.started[process].slow_s if process in self.started else 0.0

    def left_over(self) -> list[str]:
        """Processes and descriptors whose scheduler has ended."""
        found = [
            f"{rank.process.name} has outlived its scheduler" for rank in self.started.values() if not rank.parent.alive
        ]
        return found + [f"a descriptor of {owner.name} is open" for owner in self.owners.values() if not owner.alive]


def patches(world: Any) -> dict[tuple[Any, str], Any]:
    """What modules of the product find under which names while the world runs."""
    ranks: Ranks = world.ranks
    sockets = SimpleNamespace(
        socketpair=ranks.socketpair, socket=lambda fileno: _Socket(ranks, fileno), create_server=socket.create_server
    )
    kernel = SimpleNamespace(prctl=lambda option, number: setattr(ranks.own_process(), "dies_with_parent", True))

    class Argv:
        platform = sys.platform

        @property
        def argv(self) -> list[str]:
            return ranks.own_process().argv

    names = itertools.count()
    folder = lambda prefix: SimpleNamespace(name=f"{prefix}{next(names)}", cleanup=lambda: None)  # noqa: E731
    load = partial(divided_model.load, ranks.slowed_s)
    popen = SimpleNamespace(
        Popen=lambda command, stdin, pass_fds: RankProcess(ranks, command, pass_fds),
        DEVNULL=subprocess.DEVNULL,
        TimeoutExpired=subprocess.TimeoutExpired,
    )
    modules = (child_ranks, rank0, rank_process, shared_kv, shm_broadcast, watchdog)
    found: dict[tuple[Any, str], Any] = {(module, "os"): ranks.os for module in modules}
    for module in (rank0, rank_process):
        found[module, "TorchProcessGroup"] = partial(_Group, ranks)
        # Its clock is an argument, whose default is the real one.
        found[module, "ProcessWatch"] = partial(ProcessWatch, lambda: world.clock.now_ns)
    return found | {
        (process_watch, "state_of"): ranks.state_of,
        (child_ranks, "subprocess"): popen,
        (child_ranks, "socket"): sockets,
        (rank_process, "socket"): sockets,
        (rank_process, "ctypes"): SimpleNamespace(CDLL=lambda name: kernel),
        (rank_process, "signal"): SimpleNamespace(
            SIGINT=signal.SIGINT,
            SIGTERM=signal.SIGTERM,
            SIGKILL=signal.SIGKILL,
            SIG_IGN=signal.SIG_IGN,
            signal=lambda *given: None,
        ),
        (rank_process, "sys"): Argv(),
        (rank_process, "logging"): SimpleNamespace(CRITICAL=logging.CRITICAL, disable=lambda level: None),
        (rank_process, "setproctitle"): SimpleNamespace(setproctitle=lambda title: None),
        (rank_process, "load_executor"): load,
        (distributed_loader, "load_part"): load,
        (rank0, "tempfile"): SimpleNamespace(TemporaryDirectory=folder),
        (shm_broadcast, "RING_BYTES"): RING_BYTES,
        (shm_broadcast, "MAX_PIECE_BYTES"): RING_BYTES // 4,
    }
