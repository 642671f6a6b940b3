"""How the ranks of a model exchange tensors."""

import logging
import socket
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import msgspec
import torch
import torch.distributed as dist

from tokenyard.executor.distributed.symmetric_memory import SymmetricSums, connect_sums

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
MAX_PENDING_SENDS = 8
"""Tensors that a rank has sent and that are not received yet; more than there are plans in flight."""

RENDEZVOUS_TIMEOUT = timedelta(seconds=60)
"""For ranks that have all loaded: one that does not come now has ended."""


class Rendezvous(msgspec.Struct):
    """How the ranks find each other.

    file: on one machine, a file in a folder that only this user may enter.
    host, port: on several machines, where rank 0 keeps a store.
    address: where the other ranks reach this machine.
    """

    file: str = ""
    host: str = ""
    port: int = 0
    address: str = LOOPBACK


class ProcessGroup(Protocol):
    """The ranks of a model, as one of them sees the others."""

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' tensors of this shape, the same bits at every rank; `part` may be changed."""

    def broadcast_from_rank0(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return rank 0's tensor; the others give one of the same shape and dtype, which may be changed."""

    def gather_to_rank0(self, part: torch.Tensor) -> list[torch.Tensor]:
        """Return all ranks' tensors of this shape, by rank, at rank 0, and none elsewhere."""


class TorchProcessGroup:
    """Ranks that are processes, by torch.distributed: gloo between CPUs, NCCL between CUDA devices.

    failed: turns an error of the connection into the one that is raised.
    pipeline: whether each rank also sends to the next one, and the last to the first.
    symmetric: whether small sums are made in torch's symmetric memory where it can be had.
    """

    def __init__(
        self, failed: Callable[[Exception], Exception], *, pipeline: bool = False, symmetric: bool = False
    ) -> None:
        self._failed = failed
        self._pipeline, self._symmetric = pipeline, symmetric
        self._sums: SymmetricSums | None = None
        self._group: Any = None
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()

    def connect(
        self, meeting: Rendezvous, rank: int, size: int, device: torch.device, listener: socket.socket | None = None
    ) -> None:
        """Connect to the other ranks and wait for all of them. listener: the socket of rank 0's store, if any."""
        try:
            store = _store(meeting, size, listener)
        except RuntimeError as error:
            raise self._failed(error) from error
        if device.type == "cuda":
            nccl = dist.ProcessGroupNCCL.Options()
            self._group = dist.ProcessGroupNCCL(store, rank, size, nccl)
        else:
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            options._devices = [gloo.create_device(hostname=meeting.address)]
            try:
                self._group = gloo(store, rank, size, options)
            except RuntimeError as error:
                raise self._failed(error) from error
        # The connections are made by the first exchange.
        self.all_reduce(torch.zeros(1, device=device))
        if self._pipeline:
            self._connect_neighbours(torch.zeros(1, device=device))
        if self._symmetric:
            self._connect_sums(store, meeting, rank, size, device)

    def _connect_sums(self, store: Any, meeting: Rendezvous, rank: int, size: int, device: torch.device) -> None:
        if not meeting.file:
            logger.warning("enable_torch_symm_mem takes ranks of one machine, so NCCL makes all sums")
            return
        sums = SymmetricSums(store, f"tokenyard {meeting.file}", rank, size, device)

        def agree(fine: bool) -> bool:
            return float(self.all_reduce(torch.full((1,), float(fine), device=device))) == size

        if connect_sums(sums, agree):
            self._sums = sums

    def _connect_neighbours(self, one: torch.Tensor) -> None:
        """Exchange one element between neighbouring ranks, in the same order of pairs on all of them.

        NCCL makes a communicator for a pair at its first send, by way of the store, and the store's file is removed
        once all ranks are connected.
        """
        rank, size = self._group.rank(), self._group.size()
        pairs = {(min(low, high), max(low, high)) for low, high in ((k, (k + 1) % size) for k in range(size))}
        for low, high in sorted(pairs):
            if rank == low:
                self.send(one, high)
            elif rank == high:
                self.receive(torch.empty_like(one), low)

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks; see ProcessGroup."""
        try:
            if self._sums is not None and self._sums.takes(part):
                return self._sums(part)
            self._group.allreduce([part]).wait()
        except RuntimeError as error:
            raise self._failed(error) from error
        return part

    def broadcast_from_rank0(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return rank 0's tensor; see ProcessGroup."""
        try:
            self._group.broadcast(tensor, 0).wait()
        except RuntimeError as error:
            raise self._failed(error) from error
        return tensor

    def gather_to_rank0(self, part: torch.Tensor) -> list[torch.Tensor]:
        """Return all tensors at rank 0; see ProcessGroup."""
        parts = [torch.empty_like(part) for _ in range(self._group.size())] if not self._group.rank() else []
        try:
            self._group.gather(parts, part.contiguous(), 0).wait()
        except RuntimeError as error:
            raise self._failed(error) from error
        return parts

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Send a tensor to a rank, which receives those of this rank in the same order.

        The send is asynchronous, so the tensor must not be changed afterwards; waits while more than MAX_PENDING_SENDS
        are pending.
        """
        try:
            self._sent.append((self._group.send([tensor], to, 0), tensor))
            while len(self._sent) > MAX_PENDING_SENDS:
                self._sent[0][0].wait()
                self._sent.popleft()
        except RuntimeError as error:
            raise self._failed(error) from error

    def receive(self, memory: torch.Tensor, sender: int) -> torch.Tensor:
        """Receive a tensor of the shape and dtype of `memory`, which holds it afterwards and is returned."""
        try:
            self._group.recv([memory], sender, 0).wait()
        except RuntimeError as error:
            raise self._failed(error) from error
        return memory

    def close(self) -> None:
        """Release the connections."""
        if self._sums is not None:
            self._sums.close()
        self._group = self._sums = None


def _store(meeting: Rendezvous, size: int, listener: socket.socket | None) -> Any:
    """Where each rank leaves its address for the others. torch would listen for all of a store's clients at every
    address of the machine, but takes a socket that listens at one.
    """
    store: Any
    module: Any = dist
    if meeting.file:
        store = module.FileStore(meeting.file, size)
        store.set_timeout(RENDEZVOUS_TIMEOUT)
        return store
    place: dict[str, Any] = {"is_master": False}
    if listener is not None:
        place = {"is_master": True, "master_listen_fd": listener.detach()}
    port = meeting.port
    return module.TCPStore(meeting.host, port, size, timeout=RENDEZVOUS_TIMEOUT, wait_for_workers=False, **place)
