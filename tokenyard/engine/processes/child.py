"""What the engine's child processes have in common: title, logs, signals, and never outliving their parent."""

import contextlib
import ctypes
import faulthandler
import logging
import os
import shutil
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

import setproctitle
import zmq

from tokenyard.base import ConfigError, TokenyardError
from tokenyard.engine.processes.engine_config import ChildReport, ChildTask, decode_task, encode_line
from tokenyard.engine.processes.logs import set_up_logging

PR_SET_PDEATHSIG = 1
STDIN = 0
MODEL_NICE = 5
MAX_FRAMES_PER_POLL = 256
"""Most frames per poll, so that a flood of requests cannot delay the running ones."""

LIBRARY_ENVIRONMENT = {
    "GOMP_SPINCOUNT": "2000",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
    "LRU_CACHE_CAPACITY": "128",
}
"""OpenMP threads yield their core soon: by default they spin for milliseconds, which on a machine whose cores the model
shares with the rest of the server made it many times slower (benchmarks/results/gsm8k.md). oneDNN, and torch's layer
above it once more, keep a compiled kernel per shape, and almost every step has a new shape: fewer of them bound the
memory.
"""

logger = logging.getLogger(__name__)

ReportReady = Callable[[ChildReport], None]


def child_environment() -> dict[str, str]:
    """The environment of a process that will load the model; what the user has set wins."""
    return LIBRARY_ENVIRONMENT | os.environ


def set_library_environment() -> None:
    """The same for this process. A library that was loaded before has read its part already and keeps its defaults."""
    for name, value in LIBRARY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def run_child(title: str, work: Callable[[ChildTask, ReportReady], None]) -> NoReturn:
    """Read the task from standard input, run `work(task, report)` and exit: 0, or 1 after reporting the reason.

    `work` calls `report` when it is ready, and returns when there is something to read on standard input, which
    `Inbox` sees: a message if the parent asks it to end, or end of file if the parent ended and left its socket files.
    """
    setproctitle.setproctitle(f"tokenyard: {title}")
    report_fd = int(sys.argv[1])
    # The parent handles the signal, which reaches the whole group: it drains open requests first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Shows where a process hangs or dies whose Python cannot say so any more.
    faulthandler.enable()
    task = decode_task(read_line(STDIN))
    set_up_logging(task.config.log_level, task.config.log_format)
    try:
        work(task, lambda message: _report(report_fd, message))
    except Exception as error:
        known = isinstance(error, TokenyardError)
        reason = str(error) if known else f"{type(error).__name__}: {error}"
        if not known:
            logger.exception("the %s ends", title)
        _report(report_fd, ChildReport(failure=reason, wrong_settings=isinstance(error, ConfigError)))
        sys.exit(1)
    if not os.read(STDIN, 1):
        shutil.rmtree(task.socket_directory, ignore_errors=True)
    sys.exit(0)


def _report(fd: int, message: ChildReport) -> None:
    os.write(fd, encode_line(message))


def read_line(fd: int) -> bytes:
    """Read exactly one line, byte by byte: what follows it is the word to stop, which `Inbox` must still see."""
    line = bytearray()
    while not line.endswith(b"\n") and (byte := os.read(fd, 1)):
        line += byte
    return bytes(line)


def yield_cores() -> None:
    """Lower the priority of all threads of this process below the rest of the server; only on Linux.

    A model that computes on the CPU would otherwise keep probes and streams waiting for a core.
    """
    if sys.platform == "linux":
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
                now = os.getpriority(os.PRIO_PROCESS, int(thread))
                os.setpriority(os.PRIO_PROCESS, int(thread), now + MODEL_NICE)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, even if it hangs; only on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def end_with_parent(task: ChildTask) -> None:
    """End this process at once if its parent is gone, and remove the socket files that the parent left."""
    if os.getppid() != task.parent_pid:
        shutil.rmtree(task.socket_directory, ignore_errors=True)
        os._exit(1)


class Inbox:
    """Waits for frames on a socket, and for anything on standard input, which means stop."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(STDIN, zmq.POLLIN)

    def wait(self, timeout_ms: int) -> list[bytes] | None:
        """Return the frames that are there, waiting up to `timeout_ms` for a first one; None means stop."""
        for source, _ in self._poller.poll(timeout_ms):
            if source == STDIN:
                return None
        return receive_all(self._socket)


def receive_all(socket: zmq.Socket[bytes]) -> list[bytes]:
    """Return the frames that are there, at most MAX_FRAMES_PER_POLL, without waiting."""
    frames: list[bytes] = []
    try:
        while len(frames) < MAX_FRAMES_PER_POLL:
            frames.append(socket.recv(zmq.NOBLOCK))
    except zmq.Again:
        pass
    return frames
