"""DP attention: each data-parallel rank has its own attention and KV; the MLPs are divided among the ranks.

Rank 0 listens on a socket in the engine's folder until all others have connected. When one rank ends, all end, and the
ranks that replace them connect again.
"""

import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from tokenyard.base import ConfigError, DeviceLostError, EngineDeadError, ExecutorInfo
from tokenyard.executor.cuda_devices import use_device
from tokenyard.executor.distributed.process_group import Rendezvous, TorchProcessGroup
from tokenyard.executor.distributed.process_watch import HEARTBEAT_INTERVAL_S, STOPPED_AFTER_S, STOPPED_STATES, state_of
from tokenyard.executor.distributed.rank_messages import RankReport, RankSocket, check_report
from tokenyard.executor.distributed.step_barrier import Participant, StepBarrier
from tokenyard.executor.distributed.tensor_parallel import DpAttentionShard
from tokenyard.executor.layers.parallel import DpTokenRange
from tokenyard.executor.model_loader import load_executor as load_part
from tokenyard.executor.models.model_backend import TorchModel
from tokenyard.executor.runner import ModelExecutor, Ticket
from tokenyard.executor.warm_up import warm_up

RENDEZVOUS_TIMEOUT_S = 1800.0
RETRY_S = 0.1


class JoinRequest(msgspec.Struct):
    """A rank's first message to rank 0: its number, its process and what it loaded."""

    rank: int
    pid: int
    report: RankReport


class JoinReply(msgspec.Struct):
    """Rank 0's answer to a JoinRequest.

    num_pages: how many pages every rank has.
    meeting: the file by which the ranks connect.
    pid: the process of rank 0.
    refusal: why the rank is refused, "" if it is not.
    """

    num_pages: int
    meeting: str
    pid: int
    refusal: str = ""


def name_of(rank: int) -> str:
    """Return the name of a rank in messages and logs."""
    return f"data-parallel rank {rank}"


class DpAttentionRanks:
    """The ranks of a model, as one of them sees the others. place: where the socket of rank 0 is."""

    def __init__(self, place: str, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.places = DpTokenRange(rank)
        self.group = TorchProcessGroup(self._connection_failed)
        self.participant: Participant | None = None
        self._address = place
        self._own_pid = os.getpid()
        self._pids: dict[int, int] = {}
        self._barrier: StepBarrier | None = None
        self._closing = threading.Event()
        # In the engine's folder: only this user may enter it, and the engine removes it.
        self._folder = tempfile.mkdtemp(prefix="ranks-", dir=Path(place).parent) if rank == 0 else ""
        self._ends: list[socket.socket] = []
        self._meeting = ""

    def agree(self, info: ExecutorInfo) -> ExecutorInfo:
        """Meet the others; returns `info` with the number of pages that every rank has room for.

        Raises ConfigError or EngineDeadError for a rank that is late or has loaded something else.
        """
        return self._receive_all(info) if self.rank == 0 else self._join_rank0(info)

    def connect(self, device: torch.device, idle: Callable[[], None]) -> None:
        """Connect all ranks once they have memory for KV, and start the watch thread."""
        self.group.connect(Rendezvous(file=self._meeting), self.rank, self.size, device)
        own = self._ends[0]
        if self.rank == 0:
            own, barrier_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._barrier = StepBarrier([barrier_end, *self._ends], [name_of(rank) for rank in range(self.size)])
        own.settimeout(None)
        self.participant = Participant(own, idle, self.places.set, name_of(self.rank), name_of(0))
        threading.Thread(target=self._watch, name="stopped ranks", daemon=True).start()

    def close(self) -> None:
        """Disconnect from the others."""
        self._closing.set()
        if self.participant is not None:
            self.participant.close()
        else:
            for end in self._ends:
                end.close()
        self.group.close()

    def _receive_all(self, info: ExecutorInfo) -> ExecutorInfo:
        with suppress(FileNotFoundError):
            os.unlink(self._address)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(self._address)
            listener.listen(self.size)
            wires: dict[int, RankSocket] = {}
            ends: dict[int, socket.socket] = {}
            pages, end_s = [info.num_pages], time.monotonic() + RENDEZVOUS_TIMEOUT_S
            while len(wires) < self.size - 1:
                listener.settimeout(max(RETRY_S, end_s - time.monotonic()))
                try:
                    end, _ = listener.accept()
                    hello = (wire := RankSocket(end)).receive(JoinRequest, RENDEZVOUS_TIMEOUT_S)
                except (TimeoutError, EOFError, OSError):
                    missing = [name_of(rank) for rank in range(1, self.size) if rank not in wires]
                    raise EngineDeadError(f"{', '.join(missing)} did not come to the others") from None
                try:
                    pages.append(check_report(name_of(hello.rank), hello.report, info))
                except ConfigError as error:
                    wire.send(JoinReply(0, "", self._own_pid, str(error)))
                    raise
                wires[hello.rank], ends[hello.rank], self._pids[hello.rank] = wire, end, hello.pid
        self._ends = [ends[rank] for rank in sorted(ends)]
        self._meeting = str(Path(self._folder) / "meeting")
        for wire in wires.values():
            wire.send(JoinReply(min(pages), self._meeting, self._own_pid))
        for end in self._ends:
            end.settimeout(None)
        return replace(info, num_pages=min(pages))

    def _join_rank0(self, info: ExecutorInfo) -> ExecutorInfo:
        end_s = time.monotonic() + RENDEZVOUS_TIMEOUT_S
        while True:
            end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                end.connect(self._address)
                wire = RankSocket(end)
                wire.send(JoinRequest(self.rank, self._own_pid, RankReport(info=info)))
                welcome = wire.receive(JoinReply, max(RETRY_S, end_s - time.monotonic()))
                break
            except (OSError, EOFError):
                # Rank 0 does not listen yet, or it has ended and is started again.
                end.close()
                if time.monotonic() > end_s:
                    raise EngineDeadError(f"{name_of(0)} did not come to the others") from None
                time.sleep(RETRY_S)
        if welcome.refusal:
            raise ConfigError(welcome.refusal)
        self._ends, self._meeting, self._pids[0] = [end], welcome.meeting, welcome.pid
        return replace(info, num_pages=welcome.num_pages)

    def _connection_failed(self, error: Exception) -> DeviceLostError:
        return self.participant.lost(error) if self.participant is not None else DeviceLostError(str(error))

    def _watch(self) -> None:
        """End ranks whose processes are stopped: rank 0 checks all others, and each of them checks rank 0."""
        stopped_polls = dict.fromkeys(self._pids, 0)
        while not self._closing.wait(HEARTBEAT_INTERVAL_S):
            for rank, pid in self._pids.items():
                stopped_polls[rank] = stopped_polls[rank] + 1 if state_of(pid) in STOPPED_STATES else 0
                if stopped_polls[rank] * HEARTBEAT_INTERVAL_S > STOPPED_AFTER_S:
                    if self._barrier is not None:
                        self._barrier.reason = f"{name_of(rank)} is stalled"
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                    return


class DpAttentionExecutor(ModelExecutor):
    """Executor of one data-parallel rank whose MLPs are computed with the other ranks."""

    def __init__(self, ranks: DpAttentionRanks, *parts: Any) -> None:
        super().__init__(*parts)
        self.ranks = ranks

    def on_lost(self, tell: Callable[[str], None]) -> None:
        """Call `tell`, from another thread, when a rank is lost; see DistributedExecutor."""
        assert self.ranks.participant is not None
        self.ranks.participant.on_lost(tell)

    def describe_ranks(self) -> list[dict[str, Any]]:
        """Return the state of this rank; see DistributedExecutor."""
        participant = self.ranks.participant
        assert participant is not None
        status = {"tp_rank": self.ranks.rank, "pid": os.getpid(), "step": participant.rounds, "silent_s": 0.0}
        return [status | {"idle_steps": participant.idle_steps}]

    def close(self) -> None:
        """Disconnect from the others and release the device's memory."""
        self.ranks.close()
        super().close()

    @torch.inference_mode()
    def idle(self) -> None:
        """Compute an idle batch in a step of the others, on the thread that listens to rank 0."""
        use_device(self._device)
        assert isinstance(self.model, TorchModel)
        self.model.idle()

    def _run(self, ticket: Ticket) -> None:
        """Compute a step together with all ranks."""
        tokens, participant = len(ticket.plan.tokens), self.ranks.participant
        if not tokens:
            super()._run(ticket)
            return
        assert participant is not None
        participant.begin(tokens)
        try:
            super()._run(ticket)
        except DeviceLostError:
            raise
        except Exception as error:
            # The others are past this point of the step, so this rank cannot rejoin them.
            raise DeviceLostError(f"{name_of(self.ranks.rank)} failed: {type(error).__name__}: {error}") from error
        finally:
            participant.end()


def load_executor(model_path: str, *, meeting: str, rank: int, ranks: int, **options: Any) -> DpAttentionExecutor:
    """Load the part of data-parallel rank `rank` of `ranks`, and wait for the others.

    meeting: the path of rank 0's socket, in a folder that only this user may enter.
    options: those of `model_loader.load_executor`.

    Raises ConfigError and EngineDeadError.
    """
    group = DpAttentionRanks(meeting, rank, ranks)
    part = DpAttentionShard(rank, ranks, group.group, group.agree, group.places)

    def make(*parts: Any) -> ModelExecutor:
        return DpAttentionExecutor(group, *parts)

    try:
        executor = load_part(model_path, **options, rank=rank, ranks=ranks, part=part, make=make)
        assert isinstance(executor, DpAttentionExecutor)
        group.connect(torch.device(executor.info.device), executor.idle)
        if executor.info.device != "cpu":
            warm_up(executor)
    except BaseException:
        group.close()
        raise
    return executor
