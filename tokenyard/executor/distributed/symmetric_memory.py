"""Small sums over the ranks of a machine in memory that each of them reads (torch's symmetric memory, an alpha).

torch finds the ranks of such memory by the name of a ProcessGroup, which `init_process_group` registers. The group of a
model is not the process's, so a bare ProcessGroup, a store without a backend, is registered under another name.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

logger = logging.getLogger(__name__)
c10d: Any = _distributed_c10d

MAX_BYTES = 256 << 10
"""Of a sum; NCCL has larger ones. torch's own choice (kOneShotThreshBytes in intra_node_comm.cu): each rank reads all
parts whole."""
SIZES = (2, 4, 8)
"""Numbers of ranks for which torch's kernel adds in the order of the ranks, so that all have the same bits."""
DTYPES = (torch.bfloat16, torch.float32)
ALIGNMENT = 16
"""Bytes of a load of the kernel."""


class SymmetricSums:
    """Sums by `one_shot_all_reduce_copy`: one kernel copies a rank's part to its buffer, waits for the others on the
    device, and adds up what all buffers have.

    The host exchanges nothing for a sum, so that it can be captured. If a rank dies, the kernels of the others wait
    until the watchdog of the ranks ends all of them.
    """

    def __init__(self, store: Any, name: str, rank: int, size: int, device: torch.device) -> None:
        """store: by which the ranks find each other; name: the same at all ranks, and no other group's."""
        self._name, self._rank, self._size, self._device = name, rank, size, device
        self._store = store
        self._group: Any = None
        self._buffer = torch.empty(0)

    def allocate(self) -> None:
        """Take this rank's buffer. Raises RuntimeError with the reason where there can be none."""
        if reason := why_not(self._device, self._size):
            raise RuntimeError(reason)
        # torch keeps no reference to a group that is registered.
        self._group = register_group(self._store, self._name, self._rank, self._size)
        self._buffer = allocate(MAX_BYTES, self._device, self._name)

    def share(self) -> None:
        """Exchange buffers; all ranks call it. Raises RuntimeError, also where another rank does not come."""
        share(self._buffer, self._name)

    def check(self) -> None:
        """Compute a sum that is known; all ranks call it. Raises RuntimeError if it is wrong."""
        parts = torch.full((ALIGNMENT,), self._rank + 1.0, device=self._device)
        found, wanted = self(parts).tolist(), self._size * (self._size + 1) / 2
        if found != [wanted] * ALIGNMENT:
            raise RuntimeError(f"a sum of {wanted} was {found[0]}")

    def takes(self, part: torch.Tensor) -> bool:
        """Whether a sum is made here; what all ranks know alike decides."""
        return part.dtype in DTYPES and 0 < part.nbytes <= MAX_BYTES and part.nbytes % ALIGNMENT == 0

    def __call__(self, part: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks of a tensor that `takes` takes, in memory of its own."""
        part = part.contiguous()
        if part.storage_offset() * part.itemsize % ALIGNMENT:
            part = part.clone()
        return one_shot_sum(self._buffer[: part.nbytes].view(part.dtype).view(part.shape), part, self._name)

    def close(self) -> None:
        """Release the buffer."""
        self._buffer = torch.empty(0)
        if self._group is not None:
            c10d._unregister_process_group(self._name)
            self._group = None


def connect_sums(sums: SymmetricSums, agree: Callable[[bool], bool]) -> bool:
    """Connect the ranks' buffers and try a sum; all ranks call it. Returns whether it went well at all ranks.

    agree: returns whether all ranks gave True. Called after each step, so that no rank continues alone.
    """
    for step in (sums.allocate, sums.share, sums.check):
        reason = ""
        try:
            step()
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
        if not agree(not reason):
            sums.close()
            logger.warning(
                "torch's symmetric memory cannot be used, so NCCL computes all sums: %s",
                reason or "another rank cannot",
            )
            return False
    logger.info("sums over ranks of up to %d KiB are computed in torch's symmetric memory", MAX_BYTES >> 10)
    return True


def why_not(device: torch.device, size: int) -> str:
    """Return why the ranks of a machine cannot sum in symmetric memory, "" if they may try."""
    if device.type != "cuda":
        return f"it needs CUDA devices, not {device.type}"
    if size not in SIZES:
        return f"it takes {', '.join(map(str, SIZES))} ranks, not {size}"
    if not hasattr(torch.ops.symm_mem, "one_shot_all_reduce_copy"):
        return f"torch {torch.__version__} has no one_shot_all_reduce_copy"
    return ""


def register_group(store: Any, name: str, rank: int, size: int) -> Any:
    """Return a group that torch finds by its name as long as it is kept."""
    module: Any = dist
    group = module.ProcessGroup(module.PrefixStore("symmetric memory", store), rank, size)
    c10d._register_process_group(name, group)
    return group


def allocate(size: int, device: torch.device, name: str) -> torch.Tensor:
    """Return uint8[size] that the ranks of a group can share. Raises RuntimeError where the device has none."""
    found: torch.Tensor = c10d._SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, device, name)
    return found


def share(buffer: torch.Tensor, name: str) -> None:
    """Let the ranks of a group read each other's buffers. Raises RuntimeError."""
    c10d._SymmetricMemory.rendezvous(buffer, name)


def one_shot_sum(buffer: torch.Tensor, part: torch.Tensor, name: str) -> torch.Tensor:
    """Return the sum of all ranks' parts. buffer: the beginning of the shared one, of the shape and dtype of `part`."""
    found: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(buffer, part, "sum", name)
    return found
