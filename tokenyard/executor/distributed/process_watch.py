"""When a process counts as stalled."""

import time
from collections.abc import Callable
from pathlib import Path

from tokenyard.base import NS_PER_S

HEARTBEAT_INTERVAL_S = 0.1
STOPPED_AFTER_S = 1.0
SILENT_AFTER_S = 10.0
OVERSLEPT_S = 0.5
"""Without a heartbeat for the former time, a process that the kernel says is stopped is given up, any other one for
the latter: a busy machine, a debugger or a long call may keep a healthy one silent for a while.
"""

STOPPED_STATES = ("T", "t")


class ProcessWatch:
    """Decides whether other processes are stalled, once every HEARTBEAT_INTERVAL_S.

    A watcher that missed its own beats (a frozen container, a very busy machine) cannot judge that time, so it counts
    silence from its own return.
    """

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock = clock
        self._awake_ns = self._polled_ns = clock()

    def beat(self) -> int:
        """Start a round of checks; returns the time in ns, which is this process's heartbeat."""
        now = self._clock()
        if now - self._polled_ns > OVERSLEPT_S * NS_PER_S:
            self._awake_ns = now
        self._polled_ns = now
        return now

    def is_stalled(self, pid: int, alive_ns: int) -> bool:
        """Whether a process has been silent for too long; alive_ns: its latest heartbeat, 0 for none yet."""
        silent_s = self._silent_s(alive_ns)
        return silent_s >= STOPPED_AFTER_S and (silent_s > SILENT_AFTER_S or state_of(pid) in STOPPED_STATES)

    def is_silent(self, alive_ns: int) -> bool:
        """Whether a process on another machine, whose kernel state is unknown, has been silent for too long."""
        return self._silent_s(alive_ns) > SILENT_AFTER_S

    def _silent_s(self, alive_ns: int) -> float:
        """Seconds without a heartbeat; 0 before the first one."""
        return (self._polled_ns - max(alive_ns, self._awake_ns)) / NS_PER_S if alive_ns else 0.0


def state_of(pid: int) -> str:
    """Return the kernel's state letter of a process, such as R, S, T (stopped) or Z (ended); "" if unknown."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    # The process name before it may contain any character, parentheses too.
    return stat.rpartition(")")[2].split()[0]
