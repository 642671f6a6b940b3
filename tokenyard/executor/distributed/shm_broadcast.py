"""Broadcasts frames of bytes from one process to several others on the same machine, through shared memory.

The counterpart of vLLM's ShmRingBuffer. The writer copies a frame into a ring once for all readers, and writes
a byte to each reader's pipe (its *bell*) for each piece. A reader waits for the bell before it reads the ring: the pipe
wakes it, reports the end of the writer, and orders the memory of the two processes on any processor. A frame longer
than the ring goes in pieces.

The same memory holds a table of heartbeats: when each process last was alive, and which step it began.
"""

import mmap
import os
import struct
import tempfile
import time
from collections.abc import Callable

import numpy as np

RING_BYTES = 4 << 20
MAX_PIECE_BYTES = RING_BYTES // 4
SHARED_MEMORY = "/dev/shm"
FULL_PAUSE_S = 0.0002
_PIECE = struct.Struct("=qq")
"""Before each piece: its bytes, and how many of its frame follow in later pieces."""


class SharedMemory:
    """An unnamed file's memory: a table int64[3, ranks] (bytes read, latest heartbeat in ns, step), then the ring.

    The kernel frees it when the last process that has it open ends.
    """

    def __init__(self, fd: int, ranks: int) -> None:
        self._table_bytes = mmap.ALLOCATIONGRANULARITY
        self._map = mmap.mmap(fd, self._table_bytes + RING_BYTES)
        table = np.frombuffer(self._map, np.int64, 3 * ranks).reshape(3, ranks)
        self.read_bytes, self.alive_ns, self.steps = table

    @classmethod
    def create(cls, ranks: int) -> tuple["SharedMemory", int]:
        """Create such memory; returns it and the descriptor by which other processes open it."""
        place = SHARED_MEMORY if os.path.isdir(SHARED_MEMORY) else None
        with tempfile.TemporaryFile(dir=place) as file:
            file.truncate(mmap.ALLOCATIONGRANULARITY + RING_BYTES)
            fd = os.dup(file.fileno())
        return cls(fd, ranks), fd

    def write(self, place: int, data: bytes) -> None:
        """Write at `place`, counted in bytes since the beginning; wraps at the end of the ring."""
        begin = place % RING_BYTES
        first = min(len(data), RING_BYTES - begin)
        start = self._table_bytes + begin
        self._map[start : start + first] = data[:first]
        if first < len(data):
            self._map[self._table_bytes : self._table_bytes + len(data) - first] = data[first:]

    def read(self, place: int, size: int) -> bytes:
        """Read `size` bytes at `place`; see write."""
        begin = place % RING_BYTES
        first = min(size, RING_BYTES - begin)
        start = self._table_bytes + begin
        found = self._map[start : start + first]
        return found + self._map[self._table_bytes : self._table_bytes + size - first] if first < size else found


class RingWriter:
    """Sends frames to the readers 1, 2, ... of a table; `bells` are pipes to them, in that order.

    While the ring is full, `check` is called, which raises if a reader has failed.
    """

    def __init__(self, memory: SharedMemory, bells: list[int], check: Callable[[], None]) -> None:
        self._memory = memory
        self._bells = bells
        self._check = check
        self._written = 0

    def send(self, frame: bytes) -> None:
        """Send a frame to all readers. Raises OSError if one has closed its pipe, and whatever `check` raises."""
        begin, size = 0, len(frame)
        while self._bells and begin < size:
            piece = frame[begin : begin + MAX_PIECE_BYTES]
            begin += len(piece)
            self._send_piece(_PIECE.pack(len(piece), size - begin) + piece)

    def _send_piece(self, data: bytes) -> None:
        end = self._written + len(data)
        while end - int(self._memory.read_bytes[1:].min()) > RING_BYTES:
            self._check()
            time.sleep(FULL_PAUSE_S)
        self._memory.write(self._written, data)
        self._written = end
        for bell in self._bells:
            os.write(bell, b".")

    def close(self) -> None:
        """Signal the readers that no more frames come."""
        for bell in self._bells:
            os.close(bell)
        self._bells = []


class RingReader:
    """Receives the frames as reader `rank` of a table; `bell` is its end of the pipe."""

    def __init__(self, memory: SharedMemory, rank: int, bell: int) -> None:
        self._memory = memory
        self._rank = rank
        self._bell = bell
        self._read = 0

    def receive(self) -> bytes | None:
        """Wait for a frame; None when no more come."""
        frame = b""
        while os.read(self._bell, 1):
            size, left = _PIECE.unpack(self._memory.read(self._read, _PIECE.size))
            piece = self._memory.read(self._read + _PIECE.size, size)
            self._read += _PIECE.size + size
            self._memory.read_bytes[self._rank] = self._read
            frame = frame + piece if frame else piece
            if not left:
                return frame
        return None
