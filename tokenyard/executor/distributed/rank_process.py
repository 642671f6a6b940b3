"""A rank of a model other than rank 0: it computes the plans that rank 0 sends, and nothing else.

It is started by rank 0, or by the command of another node (`worker_node`), which forwards rank 0's messages. It runs
as `python -m tokenyard.executor.distributed.rank_process CONTROL CALLS BELL MEMORY [KV]`, descriptors all. It has no
scheduler and no sampler, and reads the clock only for its heartbeat.
"""

import ctypes
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NoReturn

import setproctitle
import torch

from tokenyard.base import ConfigError, DeviceLostError, ExecutorInfo, TokenyardError
from tokenyard.executor.distributed.partition import ModelPartition
from tokenyard.executor.distributed.pipeline import PipelineStage
from tokenyard.executor.distributed.process_group import TorchProcessGroup
from tokenyard.executor.distributed.process_watch import HEARTBEAT_INTERVAL_S, ProcessWatch
from tokenyard.executor.distributed.rank_messages import (
    DROP_WEIGHTS,
    RELEASE_KV,
    RELEASE_WEIGHTS,
    SWAP_WEIGHTS,
    AgreedNumPages,
    RankCall,
    RankReply,
    RankReport,
    RankSetup,
    RankSocket,
    decode_step,
)
from tokenyard.executor.distributed.shared_kv import layout_of, pool_memory
from tokenyard.executor.distributed.shm_broadcast import RingReader, SharedMemory
from tokenyard.executor.distributed.tensor_parallel import TensorParallelShard
from tokenyard.executor.forward_batch import build_batch
from tokenyard.executor.model_loader import load_executor
from tokenyard.executor.runner import ModelExecutor

PR_SET_PDEATHSIG = 1
CPU_NICE = 5
"""The same increment as MODEL_NICE in engine/processes/child.py."""

ORDERS: dict[bytes, Callable[[ModelExecutor], None]] = {
    SWAP_WEIGHTS: ModelExecutor.swap_weights,
    DROP_WEIGHTS: ModelExecutor.drop_weights,
    RELEASE_WEIGHTS: partial(ModelExecutor.release_memory, weights=True, kv_cache=False),
    RELEASE_KV: partial(ModelExecutor.release_memory, weights=False, kv_cache=True),
}


class RankProcess:
    """One rank, from its start to its end."""

    def __init__(self, wire: RankSocket, calls: int, bell: int, memory: int, kv: int | None = None) -> None:
        self._wire = wire
        self._calls = RankSocket(socket.socket(fileno=calls))
        self._pool_memory = None if kv is None else pool_memory(kv)
        self._setup = setup = wire.receive(RankSetup)
        self._memory = SharedMemory(memory, setup.places)
        self._ring = RingReader(self._memory, setup.place, bell)
        self._group = TorchProcessGroup(
            lambda error: DeviceLostError(f"it lost the other ranks: {error}"),
            pipeline=setup.form != "tensor",
            symmetric=setup.form == "tensor" and setup.options.get("enable_torch_symm_mem", False),
        )
        part = TensorParallelShard if setup.form == "tensor" else PipelineStage
        self._part: ModelPartition = part(setup.rank, setup.size, self._group, self._agree)
        setproctitle.setproctitle(f"tokenyard: {setup.name} of rank {setup.options.get('rank', 0)}")

    def run(self) -> None:
        """Load this rank's part of the model and compute each plan received, until rank 0 closes the ring."""
        die_with_parent(self._setup.parent_pid)
        executor = self._load()
        kv = None if self._pool_memory is None else layout_of(executor.kv_pool)
        self._wire.send(RankReport(info=executor.info, kv=kv))
        threading.Thread(target=self._send_heartbeats, name="heartbeats", daemon=True).start()
        setup = self._setup
        self._group.connect(setup.meeting, setup.rank, setup.size, torch.device(executor.info.device))
        executor.capture()
        threading.Thread(target=self._answer_calls, args=(executor,), name="calls", daemon=True).start()
        with torch.inference_mode():
            while (frame := self._ring.receive()) is not None:
                if order := ORDERS.get(frame):
                    order(executor)
                else:
                    self._compute(executor, frame)

    def _load(self) -> ModelExecutor:
        setup = self._setup
        if setup.options.get("device") in ("cpu", "auto") and not torch.cuda.is_available():
            os.nice(CPU_NICE)
        return load_executor(setup.model_path, **setup.options, part=self._part, pool_memory=self._pool_memory)

    def _agree(self, info: ExecutorInfo) -> ExecutorInfo:
        """Report to rank 0 what was loaded and receive the number of pages."""
        self._wire.send(RankReport(info=info))
        return replace(info, num_pages=self._wire.receive(AgreedNumPages).num_pages)

    def _answer_calls(self, executor: ModelExecutor) -> None:
        """Do what rank 0 calls for, next to the steps, one call after the other."""
        while True:
            try:
                call = self._calls.receive(RankCall)
            except (EOFError, OSError):
                return
            try:
                reply = RankReply(_do(call, executor))
            except ConfigError as error:
                reply = RankReply(failure=error.message)
            except Exception as error:
                reply = RankReply(failure=f"{type(error).__name__}: {error}")
            self._calls.send(reply)

    def _compute(self, executor: ModelExecutor, frame: bytes) -> None:
        plan, ranges = decode_step(frame)
        self._memory.steps[self._setup.place] = plan.step
        executor.pages.write(plan)
        if not len(plan.pool_rows):
            return
        batch = build_batch(plan, executor.pages)
        self._part.compute(executor.model, batch, ranges, open_tokens=bool(plan.tokens.min() < 0))

    def _send_heartbeats(self) -> None:
        """Write heartbeats, and end the parent process if it is stalled: all ranks end together."""
        parent, watch = self._setup.parent_pid, ProcessWatch()
        while True:
            self._memory.alive_ns[self._setup.place] = watch.beat()
            if watch.is_stalled(parent, int(self._memory.alive_ns[0])):
                os.kill(parent, signal.SIGKILL)
                os._exit(1)
            time.sleep(HEARTBEAT_INTERVAL_S)


def _do(call: RankCall, executor: ModelExecutor) -> str:
    """Do what is called for; returns the digest of weights that were read. Raises ConfigError."""
    if call.source is not None:
        return executor.prepare_weights(call.source)
    if call.group is not None:
        executor.join_weight_group(call.group)
    elif call.tensors:
        executor.receive_weights(call.name, call.tensors)
    else:
        executor.leave_weight_group(call.name)
    return ""


def die_with_parent(parent_pid: int) -> None:
    """Make the kernel end this process when its parent ends. On Linux only; elsewhere it does nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def main() -> NoReturn:
    """Run one rank; exits with 1, and the reason on the socket, when it fails."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # Rank 0 ends this process.
        signal.signal(number, signal.SIG_IGN)
    # Rank 0 logs, in the format that the user selects.
    logging.disable(logging.CRITICAL)
    control, *others = map(int, sys.argv[1:])
    wire = RankSocket(socket.socket(fileno=control))
    try:
        RankProcess(wire, *others).run()
    except Exception as error:
        wrong = isinstance(error, ConfigError)
        text = str(error) if isinstance(error, TokenyardError) else f"{type(error).__name__}: {error}"
        wire.send(RankReport(failure=text, wrong_settings=wrong, lost_peers=isinstance(error, DeviceLostError)))
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
