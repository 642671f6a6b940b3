"""Copies pages through a socket, directly from one KV pool into the other, followed by a checksum.

Vectored calls (writev(2), readv(2)) send and receive segments of memory. They create no Python object per piece and
release the interpreter's lock.
"""

import ctypes
import errno
import os
import select
import socket
import struct
import time
from collections.abc import Callable

import numpy as np

from tokenyard.base import Int64Array, TokenyardError
from tokenyard.kv_layout.checksum import Checksum
from tokenyard.kv_layout.layout import IOV_MAX, skip_bytes, total_bytes

BATCH_BYTES = 1 << 20
TRAILER = struct.Struct("<QQ")
"""Number of bytes before it, and their checksum."""


class TransferError(TokenyardError):
    """A transfer of KV failed; the KV is computed instead."""

    code = "transfer_failed"


def send_pages(
    sock: socket.socket, segments: Int64Array, piece_bytes: int, timeout_s: float, valid: Callable[[], bool]
) -> None:
    """Send segments of memory, then length and checksum. `valid` returns whether the memory still holds what was
    offered; it is called before each batch. Raises TransferError if it does not, OSError for a broken connection or a
    receiver that is stuck.
    """
    sock.setblocking(False)
    check = Checksum(piece_bytes)
    for batch in batches(segments):
        if not valid():
            raise TransferError("the lease is over")
        _move(sock, batch, timeout_s, "writev")
        # Overlaps with the reads of the other side.
        check.add(batch)
    sock.settimeout(timeout_s)
    sock.sendall(TRAILER.pack(total_bytes(segments), check.value))


def receive_pages(sock: socket.socket, segments: Int64Array, piece_bytes: int, timeout_s: float) -> None:
    """Receive what `send_pages` sends. Raises TransferError if the checksum differs, OSError for a broken connection or
    a sender that is silent for `timeout_s`.
    """
    sock.setblocking(False)
    check = Checksum(piece_bytes)
    for batch in batches(segments):
        _move(sock, batch, timeout_s, "readv")
        check.add(batch)
    sock.settimeout(timeout_s)
    trailer = b""
    while len(trailer) < TRAILER.size:
        part = sock.recv(TRAILER.size - len(trailer))
        if not part:
            raise TransferError("the sender stopped")
        trailer += part
    if TRAILER.unpack(trailer) != (total_bytes(segments), check.value):
        raise TransferError("checksum")


def batches(segments: Int64Array) -> list[Int64Array]:
    """Split segments into batches of about `BATCH_BYTES`, each with at most the segments that one call accepts."""
    parts, left = [], segments
    while len(left):
        head = left[:IOV_MAX]
        ends = np.cumsum(head[:, 1])
        whole = max(1, int(np.searchsorted(ends, BATCH_BYTES, side="right")))
        parts.append(head[:whole])
        left = left[whole:]
    return parts


def _move(sock: socket.socket, segments: Int64Array, timeout_s: float, name: str) -> None:
    """Write or read all of the segments; wait for the socket if necessary."""
    call = getattr(ctypes.CDLL(None, use_errno=True), name)
    call.restype = ctypes.c_ssize_t
    left = np.ascontiguousarray(segments)
    poller = select.poll()
    poller.register(sock, select.POLLOUT if name == "writev" else select.POLLIN)
    until = time.monotonic() + timeout_s
    while len(left):
        done = call(ctypes.c_int(sock.fileno()), ctypes.c_void_p(left.ctypes.data), ctypes.c_int(len(left)))
        if done > 0:
            left = skip_bytes(left, done)
            until = time.monotonic() + timeout_s
            continue
        error = ctypes.get_errno()
        if done == 0:
            raise TransferError("the other side stopped")
        if error not in (errno.EAGAIN, errno.EINTR):
            raise OSError(error, os.strerror(error))
        if not poller.poll(max(1, int(1000 * (until - time.monotonic())))) or time.monotonic() > until:
            raise TransferError("nothing moves")
