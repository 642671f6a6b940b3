"""Heartbeats that reflect the loop: a long device step counts as alive, a loop that hangs elsewhere does not."""

import threading
import time
from collections.abc import Callable
from typing import Any

from tokenyard.base import NS_PER_S
from tokenyard.engine.processes.messages import Heartbeat

HEARTBEAT_INTERVAL_S = 0.5
POLICY, PRIORITY_FUNCTION = "policy", "priority function"
USER_CODE = (POLICY, PRIORITY_FUNCTION)
"""Loop states while user code runs."""


class LoopState:
    """What the event loop does, and the scheduler's `counters`; written by the loop, read by the heartbeat thread.

    attachment: name of the attachment in whose hook the loop is, "" for none.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.attachment = ""
        self.counters: dict[str, Any] = {}
        self._doing: tuple[str, int] = ("host", time.monotonic_ns())

    def enter(self, doing: str) -> None:
        """Note that the loop now waits for messages ("idle"), for the device ("step"), for user code (one
        of `USER_CODE`) or works itself ("host").
        """
        self._doing = (doing, time.monotonic_ns())

    def beat(self, now_ns: int) -> Heartbeat:
        """Return the heartbeat of this moment."""
        # In this order: a hook that was entered before `_doing` is read cannot have begun in an older state.
        attachment = self.attachment
        doing, since_ns = self._doing
        return Heartbeat(now_ns, attachment or doing, now_ns - since_ns, self.steps, self.counters)


class HeartbeatThread:
    """Calls `send` with a heartbeat at once and every half second until closed, and `check` before each.

    It does not touch the scheduler, so heartbeats continue during a long step.
    """

    def __init__(self, state: LoopState, send: Callable[[Heartbeat], None], check: Callable[[], None]) -> None:
        self._state = state
        self._send = send
        self._check = check
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

    def close(self) -> None:
        """End the thread and wait for it."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        stopped = False
        while not stopped:
            self._check()
            self._send(self._state.beat(time.monotonic_ns()))
            stopped = self._stop.wait(HEARTBEAT_INTERVAL_S)


def heartbeat_age_s(beat: Heartbeat, now_ns: int) -> float:
    """Return the seconds since the scheduler's loop was known to be well.

    A loop that waits for messages or for the device is well as of its heartbeat; one that does anything else is well
    as of the moment it began to.
    """
    hung_ns = 0 if beat.doing in ("idle", "step") else beat.doing_ns
    return (now_ns - beat.sent_ns + hung_ns) / NS_PER_S
