"""Rank 0 of a model over several ranks: it starts the others, sends them each plan, and samples.

A plan goes to the other ranks as bytes (`base.plan_bytes`) through a ring in shared memory, and all compute along. What
a token was sampled from never leaves rank 0: tokens that only its device knows reach the others as the inputs of the
next step, so that ranks cannot disagree about them.
"""

import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from tokenyard.base import ConfigError, DeviceLostError, EngineDeadError, ExecutorInfo, Int32Array, KvPieces, StepPlan
from tokenyard.base.plan_bytes import encode_plan
from tokenyard.executor.forward_batch import ForwardBatch
from tokenyard.executor.parallel.group import TorchGroup
from tokenyard.executor.parallel.handshake import Agreed, Report, Setup, Wire, check_report
from tokenyard.executor.parallel.life import BEAT_EVERY_S, Watch
from tokenyard.executor.parallel.part import Form, name_of, stage_of
from tokenyard.executor.parallel.ring import RingWriter, SharedMemory
from tokenyard.executor.runner import ModelExecutor, Ticket

logger = logging.getLogger(__name__)

FOLLOWER_MODULE = "tokenyard.executor.parallel.follower"
START_TIMEOUT_S = 1800.0
"""How long a rank may take to load its part of the model after rank 0 has loaded its own."""

REASON_TIMEOUT_S = 2.0
END_TIMEOUT_S = 2.0


@dataclass(slots=True)
class Member:
    """One of the other ranks: its number, what people call it, its process and the socket to it."""

    rank: int
    name: str
    process: subprocess.Popen[bytes]
    wire: Wire

    def how_it_ended(self) -> str:
        """Why a process that has ended did so."""
        with suppress(EOFError, TimeoutError, OSError, msgspec.MsgspecError):
            if failure := self.wire.receive(Report, 0.1).failure:
                return f"failed: {failure}"
        self.process.kill()
        code = self.process.wait()
        return f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"


class Ranks:
    """The other ranks of a model, as rank 0 sees them.

    When one of them ends or stands still, all are ended, and `on_lost` is told why; what is computed then raises
    DeviceLostError.
    """

    def __init__(self, model_path: str, size: int, options: dict[str, Any], form: Form = "tensor") -> None:
        """Start the processes. options: those of `load_executor`, JSON values only. form: how the model is divided."""
        self.size, self.form = size, form
        self.own_name = name_of(form, 0, size)
        self.on_lost: Callable[[str], None] = lambda reason: None
        self.group = TorchGroup(self._connection_failed)
        self._folder = tempfile.TemporaryDirectory(prefix="tokenyard-tp-")
        self._meeting = Path(self._folder.name) / "meeting"
        self._memory, memory = SharedMemory.create(size)
        self._reason = ""
        self._lost = threading.Event()
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="ranks of the model", daemon=True)
        self._members: list[Member] = []
        bells = []
        for rank in range(1, size):
            setup = Setup(model_path, options, rank, size, os.getpid(), str(self._meeting), form)
            member, bell = _start(setup, memory)
            self._members.append(member)
            bells.append(bell)
        os.close(memory)
        self._ring = RingWriter(self._memory, bells, self._check)

    def agree(self, info: ExecutorInfo) -> ExecutorInfo:
        """Wait until all have loaded; returns `info` with the number of pages that every rank has room for.

        Raises ConfigError or EngineDeadError for a rank that failed, is late, or has other settings.
        """
        pages = [check_report(member.name, self._hear(member), info) for member in self._members]
        agreed = replace(info, num_pages=min(info.num_pages, *pages))
        for member in self._members:
            member.wire.send(Agreed(agreed.num_pages))
        return agreed

    def connect(self, device: torch.device) -> None:
        """Connect all ranks once they have memory for KV, and watch over them. Raises as `agree`."""
        for member in self._members:
            report = self._hear(member)
            if report.failure:
                raise EngineDeadError(f"{member.name}: {report.failure}")
        self._watcher.start()
        self.group.connect(self._meeting, 0, self.size, device)
        # Nobody needs the meeting place any more, and this process may be killed.
        self._folder.cleanup()

    def send(self, plan: StepPlan) -> None:
        """Have the other ranks compute a plan. Raises DeviceLostError."""
        self._check()
        self._memory.steps[0] = plan.step
        try:
            self._ring.send(encode_plan(plan))
        except OSError as error:
            raise self._connection_failed(error) from error

    def give_up(self, reason: str) -> DeviceLostError:
        """End all ranks; returns the error to raise. The first reason counts."""
        if not self._reason:
            self._reason = reason
            for member in self._members:
                member.process.kill()
            self._lost.set()
        return DeviceLostError(self._reason)

    def tell_loss(self, tell: Callable[[str], None]) -> None:
        """Call `tell`, from another thread, with the reason when a rank is lost; at once if one is already."""
        self.on_lost = tell
        if self._lost.is_set():
            tell(self._reason)

    def describe(self) -> list[dict[str, Any]]:
        """What people should know of each rank, rank 0 first."""
        now = time.monotonic_ns()
        pids = [os.getpid(), *(member.process.pid for member in self._members)]
        places = [
            {"tp_rank": rank} if self.form == "tensor" else {"pp_rank": stage_of(rank, self.size)}
            for rank in range(self.size)
        ]
        return [
            {**places[rank], "pid": pid, "step": int(step), "silent_s": round((now - int(alive)) / 1e9, 1)}
            for rank, (pid, step, alive) in enumerate(zip(pids, self._memory.steps, self._memory.alive_ns, strict=True))
        ]

    def close(self) -> None:
        """End all ranks; closing again does nothing."""
        if self._closing.is_set():
            return
        self._closing.set()
        if self._watcher.is_alive() and self._watcher is not threading.current_thread():
            self._watcher.join()
        self._ring.close()
        self.group.close()
        for member in self._members:
            with suppress(subprocess.TimeoutExpired):
                member.process.wait(END_TIMEOUT_S if self._watcher.ident and not self._reason else 0)
            member.process.kill()
            member.process.wait()
            member.wire.close()
        self._folder.cleanup()

    def _hear(self, member: Member) -> Report:
        name = member.name
        try:
            return member.wire.receive(Report, START_TIMEOUT_S)
        except TimeoutError:
            raise EngineDeadError(f"{name} has not started within {START_TIMEOUT_S:g} s") from None
        except (EOFError, OSError):
            raise EngineDeadError(f"{name} {member.how_it_ended()} while it started") from None
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{name} speaks another version of Tokenyard: {error}") from None

    def _check(self) -> None:
        if self._reason:
            raise DeviceLostError(self._reason)

    def _connection_failed(self, error: Exception) -> DeviceLostError:
        """The reason why the others cannot be reached, which the watcher finds soon."""
        self._lost.wait(REASON_TIMEOUT_S)
        return self.give_up(f"the ranks of the model lost each other: {error}")

    def _watch(self) -> None:
        """Look after the others, and give signs of life to them."""
        watch = Watch()
        while not self._closing.wait(BEAT_EVERY_S):
            self._memory.alive_ns[0] = watch.look()
            for member in self._members:
                name = member.name
                if member.process.poll() is not None:
                    self.give_up(f"{name} {member.how_it_ended()}")
                elif watch.stands_still(member.process.pid, int(self._memory.alive_ns[member.rank])):
                    self.give_up(f"{name} stands still")
                if self._reason:
                    logger.critical("%s, so all %d ranks of the model end", self._reason, self.size)
                    self.on_lost(self._reason)
                    return


def _start(setup: Setup, memory: int) -> tuple[Member, int]:
    """Start a rank; returns it and the end of its bell to write to."""
    ours, theirs = socket.socketpair()
    hears, bell = os.pipe()
    with theirs:
        fds = (theirs.fileno(), hears, memory)
        command = [sys.executable, "-m", FOLLOWER_MODULE, *map(str, fds)]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds)
    os.close(hears)
    wire = Wire(ours)
    wire.send(setup)
    return Member(setup.rank, setup.name, process, wire), bell


class LeadingExecutor(ModelExecutor):
    """Executor over rank 0's part of a model, with the other ranks."""

    def __init__(self, ranks: Ranks, *parts: Any) -> None:
        super().__init__(*parts)
        self.ranks = ranks

    def pieces(self, pages: Int32Array) -> KvPieces:
        """Refuse: each rank has a part of the KV only. Raises ConfigError."""
        raise ConfigError("the model is divided, and so is its KV: it cannot be moved or stored yet")

    def on_lost(self, tell: Callable[[str], None]) -> None:
        """Call `tell`, from another thread, when a rank is lost; see ParallelExecutor."""
        self.ranks.tell_loss(tell)

    def describe_ranks(self) -> list[dict[str, Any]]:
        """What people should know of each rank; see ParallelExecutor."""
        return self.ranks.describe()

    def close(self) -> None:
        """End the other ranks and give back the device's memory."""
        self.ranks.close()
        super().close()


class TensorParallelExecutor(LeadingExecutor):
    """Executor over rank 0's share of each layer; the other ranks compute along."""

    def _run(self, ticket: Ticket) -> None:
        """Compute a step together. A rank that fails within it is at another place than the others: all end."""
        self.ranks.send(ticket.plan)
        try:
            super()._run(ticket)
        except DeviceLostError:
            raise
        except Exception as error:
            raise self.ranks.give_up(f"{self.ranks.own_name} failed: {type(error).__name__}: {error}") from error

    def _inputs(self, plan: StepPlan, batch: ForwardBatch) -> torch.Tensor:
        tokens = super()._inputs(plan, batch)
        return self.ranks.group.from_first(tokens) if plan.tokens.min() < 0 else tokens
