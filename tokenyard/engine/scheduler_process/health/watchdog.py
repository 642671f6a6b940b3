"""Ends a stuck scheduler process, so that its requests continue elsewhere, and logs why."""

import faulthandler
import logging
import os
import sys
import threading
from collections.abc import Callable

from tokenyard.base import NS_PER_S
from tokenyard.engine.processes.engine_config import ChildReport
from tokenyard.engine.processes.messages import Heartbeat
from tokenyard.engine.scheduler_process.health.liveness import USER_CODE
from tokenyard.tape.recorder import Core

logger = logging.getLogger(__name__)

SAVE_TIMEOUT_S = 1.0
USER_CODE_TIMEOUT_NS = 10 * NS_PER_S
"""Limit for user code. By then it was interrupted many times and still runs."""

WHERE = {"step": "the device's work on a step", "host": "the event loop's own work"}
"""What is stuck, by `Heartbeat.doing`; any other is an attachment."""


class Watchdog:
    """Judges heartbeats: a device step or a piece of the loop's own work that takes longer than `timeout_s` is stuck,
    as is a user-defined policy or priority function that takes longer than 10 s.

    Then the stacks of all threads and the state of the queue go to the log, `save` has a moment to keep what it can,
    `report` tells the parent, and the process ends. A `timeout_s` of 0 disables it except for user code.
    """

    def __init__(
        self, timeout_s: float, core: Core, report: Callable[[ChildReport], None], save: Callable[[], None]
    ) -> None:
        self._timeout_ns = int(timeout_s * NS_PER_S)
        self._core = core
        self._report = report
        self._save = save

    def check(self, beat: Heartbeat) -> None:
        """End the process if this heartbeat says that the loop is stuck. For the heartbeat's thread."""
        timeout_ns = USER_CODE_TIMEOUT_NS if beat.doing in USER_CODE else self._timeout_ns
        if timeout_ns and beat.doing != "idle" and beat.doing_ns > timeout_ns:
            self._end(beat)

    def device_lost(self, reason: str) -> None:
        """End the process because part of its device has gone; from any thread."""
        saving = threading.Thread(target=self._save, daemon=True)
        saving.start()
        saving.join(SAVE_TIMEOUT_S)
        self._report(ChildReport(failure=reason))
        os._exit(1)

    def _end(self, beat: Heartbeat) -> None:
        culprit = beat.doing if beat.doing in USER_CODE else ""
        where = f"the user-defined {culprit}" if culprit else WHERE.get(beat.doing, f"the attachment {beat.doing}")
        reason = f"{where} has not ended for {beat.doing_ns / NS_PER_S:.0f} s, after {beat.steps} steps"
        logger.critical("%s (see --watchdog-timeout-s); the stacks of all threads follow", reason)
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        # The tape file or the policy may be what hangs, so saving may hang too.
        saving = threading.Thread(target=self._leave_traces, args=(beat.sent_ns,), daemon=True)
        saving.start()
        saving.join(SAVE_TIMEOUT_S)
        self._report(ChildReport(failure=reason, culprit=culprit))
        os._exit(1)

    def _leave_traces(self, now: int) -> None:
        self._save()
        logger.critical("the queue: %s", self._queue(now))

    def _queue(self, now: int) -> str:
        """The state of the queue in words; the loop is stalled, so it may be read from here."""
        try:
            return str(self._core.snapshot(now))
        except Exception as error:
            return f"not readable: {error!r}"
