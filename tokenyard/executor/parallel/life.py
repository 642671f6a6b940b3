"""When a process of the same machine counts as standing still."""

import time
from pathlib import Path

BEAT_EVERY_S = 0.1
STOPPED_AFTER_S = 1.0
SILENT_AFTER_S = 10.0
"""Without a sign of life for the former time, a process that the kernel says is stopped is given up, any other one for
the latter: a busy machine, a debugger or a long call may keep a healthy one silent for a while.
"""

STOPPED_STATES = ("T", "t")


def stands_still(pid: int, alive_ns: int) -> bool:
    """Whether a process has been silent for too long; alive_ns: its latest sign of life, 0 for none yet."""
    silent_s = (time.monotonic_ns() - alive_ns) / 1e9
    if not alive_ns or silent_s < STOPPED_AFTER_S:
        return False
    return silent_s > SILENT_AFTER_S or state_of(pid) in STOPPED_STATES


def state_of(pid: int) -> str:
    """The kernel's letter for what a process does, such as R, S, T (stopped) or Z (ended); "" where none is known."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    # The name before it may hold anything, parentheses too.
    return stat.rpartition(")")[2].split()[0]
