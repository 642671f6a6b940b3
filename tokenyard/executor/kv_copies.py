"""Copies of KV between a device's pool and host memory, for the KV store (a `BlockPool`)."""

import threading

import numpy as np
import numpy.typing as npt
import torch

from tokenyard.base import Int32Array
from tokenyard.executor.cuda_streams import copy_stream
from tokenyard.executor.kv_pool import KvPool
from tokenyard.executor.state_pool import StatePool


class _ThreadStaging(threading.local):
    """The stream of a thread, None without a device, and its memory that the device can copy to."""

    def __init__(self, device: torch.device) -> None:
        """Called once in each thread."""
        self.stream = copy_stream(device)
        self._memory = torch.empty(0, dtype=torch.uint8)

    def memory(self, size: int) -> torch.Tensor:
        """uint8[size], the same memory as before unless that is too small."""
        if len(self._memory) < size:
            # Pinned memory belongs to the current device; without the stream that is device 0 on every rank.
            with torch.cuda.stream(self.stream):
                self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=self.stream is not None)
        return self._memory[:size]

    def wait(self) -> None:
        """Wait for the copies of this thread."""
        if self.stream is not None:
            self.stream.synchronize()


class DeviceStates:
    """The slots of recurrent states on a device, copied as `DeviceBlocks` copies pages; see `base.StateSlots`."""

    def __init__(self, states: StatePool) -> None:
        self._tensors = states.conv, states.recurrent
        self._staging = _ThreadStaging(states.conv.device)
        self.slot_bytes = sum(tensor[:, 0].numel() * tensor.itemsize for tensor in self._tensors)

    def read(self, slot: int, content: npt.NDArray[np.uint8]) -> None:
        """Copy the states in a slot into `content` (uint8[at least slot_bytes])."""
        staging = self._staging.memory(self.slot_bytes)
        with torch.cuda.stream(self._staging.stream):
            found = torch.cat([tensor[:, slot].flatten().view(torch.uint8) for tensor in self._tensors])
            staging.copy_(found, non_blocking=True)
        self._staging.wait()
        content[: self.slot_bytes] = staging.numpy()

    def write(self, slot: int, content: npt.NDArray[np.uint8]) -> None:
        """Set the states in a slot from the bytes that `read` gave."""
        staging = self._staging.memory(self.slot_bytes)
        staging.numpy()[:] = content[: self.slot_bytes]
        with torch.cuda.stream(self._staging.stream):
            given = staging.to(self._tensors[0].device, non_blocking=True)
            for tensor in self._tensors:
                size = tensor[:, slot].numel() * tensor.itemsize
                # A copy, because a view of another type needs bytes that are aligned for it.
                tensor[:, slot] = given[:size].clone().view(tensor.dtype).view_as(tensor[:, slot])
                given = given[size:]
        self._staging.wait()


class DeviceBlocks:
    """The pages of a pool on a device, to gather blocks from and to scatter them into. `kv_layout.layout.PoolView`
    defines the layout of a block.

    Copies overlap with steps: no step writes pages that are gathered or reads pages that are scattered into. Each call
    returns when its copy is done. Any thread may call; each has its own stream and staging memory.
    """

    def __init__(self, pool: KvPool) -> None:
        tensor = pool.tensor
        self._pieces = pool.num_pieces
        self._piece_bytes = pool.page_size * tensor.stride(2) * tensor.itemsize
        self._pages = tensor.view(self._pieces, -1).view(torch.uint8).view(self._pieces, -1, self._piece_bytes)
        self._device = tensor.device
        self._staging = _ThreadStaging(self._device)

    @property
    def page_bytes(self) -> int:
        """Bytes of the KV of one page."""
        return self._pieces * self._piece_bytes

    def gather(self, pages: Int32Array, block: npt.NDArray[np.uint8]) -> None:
        """Copy `pages` (int32[n]) into `block` (uint8[at least n * page_bytes])."""
        size = len(pages) * self.page_bytes
        staging = self._staging.memory(size)
        with torch.cuda.stream(self._staging.stream):
            # Running steps do not write these pages.
            found = self._pages.index_select(1, self._index(pages))
            staging.copy_(found.view(-1), non_blocking=True)
        self._staging.wait()
        block[:size] = staging.numpy()

    def scatter(self, block: npt.NDArray[np.uint8], pages_in_block: int, first: int, pages: Int32Array) -> None:
        """Copy pages `first`, `first + 1`, ... of a block of `pages_in_block` into `pages` (int32[n])."""
        if not len(pages):
            return
        size = pages_in_block * self.page_bytes
        staging = self._staging.memory(size)
        staging.numpy()[:] = block[:size]
        with torch.cuda.stream(self._staging.stream):
            source = staging.to(self._device, non_blocking=True).view(self._pieces, pages_in_block, self._piece_bytes)
            self._pages.index_copy_(1, self._index(pages), source[:, first : first + len(pages)])
        self._staging.wait()

    def _index(self, pages: Int32Array) -> torch.Tensor:
        return torch.from_numpy(pages.astype(np.int64)).to(self._device)
