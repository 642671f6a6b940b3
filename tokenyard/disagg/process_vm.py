"""Reads the memory of another process on this machine: one copy, without work in that process (process_vm_readv(2)).

Both processes need the same machine, PID namespace and user, and the permission to trace. Reading a random number
(`Probe`) checks that.
"""

import contextlib
import ctypes
import os
import secrets
import socket
import sys
from pathlib import Path

import numpy as np

from tokenyard.base import Int32Array, Int64Array
from tokenyard.kv_layout.layout import IOV_MAX, PageMap, runs, skip_bytes, spans

PR_SET_PTRACER = 0x59616D61
PROBE_BYTES = 32


class Probe:
    """A random number in the memory of this process. A process that can read it can also read the KV."""

    def __init__(self) -> None:
        self.value = secrets.token_bytes(PROBE_BYTES)
        self._place = ctypes.create_string_buffer(self.value, PROBE_BYTES)
        self.address = ctypes.addressof(self._place)


def machine_id() -> str:
    """An id of machine, boot and PID namespace, equal in processes that can see each other; "" if unknown."""
    if not sys.platform.startswith("linux"):
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{socket.gethostname()}/{boot}/{os.stat('/proc/self/ns/pid').st_ino}/{os.getuid()}"
    except OSError:
        return ""


def allow(pid: int) -> None:
    """Let process `pid` read this process's memory, where the kernel restricts that to parents (Yama)."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)


def can_read(pid: int, address: int, value: bytes) -> bool:
    """Whether this process can read the memory of process `pid`, which must hold `value` at `address`."""
    found = ctypes.create_string_buffer(len(value))
    there = np.array([[address, len(value)]], np.int64)
    here = np.array([[ctypes.addressof(found), len(value)]], np.int64)
    try:
        read_segments(pid, there, here)
    except (OSError, AttributeError):
        return False
    return found.raw == value


def read_pages(pid: int, theirs: PageMap, their_pages: Int32Array, ours: PageMap, our_pages: Int32Array) -> int:
    """Copy pages of process `pid` into pages of this one (int32[n] each); returns the bytes copied.

    Raises OSError: ESRCH if the process has ended, EPERM without permission, EFAULT if its memory is unmapped.
    """
    starts = runs(their_pages, our_pages) if len(our_pages) else our_pages
    there, here = spans(theirs, their_pages, starts), spans(ours, our_pages, starts)
    return read_segments(pid, there, here)


def read_segments(pid: int, there: Int64Array, here: Int64Array) -> int:
    """Copy segments of memory (int64[n, 2]: addresses and equal lengths) from process `pid`; return the bytes."""
    call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    call.restype = ctypes.c_ssize_t
    copied = 0
    for first in range(0, len(here), IOV_MAX):
        to, origin = (np.ascontiguousarray(side[first : first + IOV_MAX]) for side in (here, there))
        wanted, count = int(to[:, 1].sum()), ctypes.c_ulong(len(to))
        while wanted:
            addresses = (ctypes.c_void_p(to.ctypes.data), count, ctypes.c_void_p(origin.ctypes.data), count)
            done = call(ctypes.c_int(pid), *addresses, ctypes.c_ulong(0))
            if done <= 0:
                error = ctypes.get_errno()
                raise OSError(error, os.strerror(error))
            copied += done
            wanted -= done
            if wanted:
                # A call ends early at 2 GiB, or at an unmapped page of the other process.
                to, origin = skip_bytes(to, done), skip_bytes(origin, done)
                count = ctypes.c_ulong(len(to))
    return copied
