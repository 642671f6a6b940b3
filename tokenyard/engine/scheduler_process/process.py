"""The scheduler process: one scheduler, one executor, one loop.

It runs as `python -m tokenyard.engine.scheduler_process.process`.
"""

import gc
import logging
import threading
from typing import Any

import setproctitle
import zmq

from tokenyard.base import NS_PER_MS
from tokenyard.engine.processes.child import (
    Inbox,
    ReportReady,
    die_with_parent,
    end_with_parent,
    run_child,
    yield_cores,
)
from tokenyard.engine.processes.engine_config import ChildReport, ChildTask
from tokenyard.engine.processes.ipc import (
    FROM_SCHEDULER,
    TO_SCHEDULER,
    Endpoints,
    ProtocolError,
    pull_socket,
    push_socket,
)
from tokenyard.engine.processes.messages import FromScheduler, Heartbeat, ToScheduler
from tokenyard.engine.scheduler_process.health.liveness import HeartbeatThread
from tokenyard.engine.scheduler_process.health.watchdog import Watchdog
from tokenyard.engine.scheduler_process.scheduler_loop import SchedulerLoop

logger = logging.getLogger(__name__)


class SocketPort:
    """The scheduler's messages over ZeroMQ."""

    def __init__(self, inbox: Inbox, out: zmq.Socket[bytes], source: int) -> None:
        self._inbox = inbox
        self._out = out
        self._source = source

    def receive(self, timeout_ns: int) -> list[ToScheduler] | None:
        """Return received messages, waiting up to `timeout_ns` for a first one; None means stop."""
        frames = self._inbox.wait(-(-timeout_ns // NS_PER_MS))
        if frames is None:
            return None
        messages = []
        for frame in frames:
            try:
                messages.append(TO_SCHEDULER.decode(frame)[0])
            except ProtocolError as error:
                logger.error("dropped a message: %s", error)
        return messages

    def send(self, message: FromScheduler) -> None:
        """Send one message to the text side."""
        self._out.send(FROM_SCHEDULER.encode(message, self._source))


class LockedSender:
    """Sends messages to the scheduler's own inbox from any thread."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._lock = threading.Lock()

    def send(self, message: ToScheduler) -> None:
        """Send one message."""
        with self._lock:
            self._socket.send(TO_SCHEDULER.encode(message))


def run_scheduler(task: ChildTask, report: ReportReady) -> None:
    """Load the model, report that it is ready, and run the event loop until the parent says stop."""
    config = task.config
    if config.ranks > 1:
        setproctitle.setproctitle(f"tokenyard: scheduler {task.rank}")
    if not config.skip_tokenizer_init:
        # The device must be freed even if a step hangs; the detokenizer removes the sockets.
        die_with_parent()
        end_with_parent(task)
    context: zmq.Context[Any] = zmq.Context()
    endpoints = Endpoints(task.socket_directory)
    own_address = endpoints.scheduler(task.source)
    out_address = endpoints.api if config.skip_tokenizer_init else endpoints.detokenizer
    port = SocketPort(Inbox(pull_socket(context, own_address)), push_socket(context, out_address), task.source)
    own_inbox = LockedSender(push_socket(context, own_address))
    loop = SchedulerLoop(config, port, own_inbox.send, rank=task.rank, policy_note=task.policy_note)
    if loop.info.device == "cpu":
        yield_cores()
    # Sockets belong to one thread, so the heartbeat has its own.
    beats = push_socket(context, out_address)
    watchdog = Watchdog(config.watchdog_timeout_s, loop.core, report, loop.flush_tape)
    if loop.divided is not None:
        loop.divided.on_lost(watchdog.device_lost)

    def send_beat(beat: Heartbeat) -> None:
        beats.send(FROM_SCHEDULER.encode(beat, task.source))
        watchdog.check(beat)

    heartbeat = HeartbeatThread(loop.state, send_beat, lambda: end_with_parent(task))
    # Loaded objects stay until the end, and a full collection over them would delay several steps.
    gc.collect()
    gc.freeze()
    report(ChildReport(info=loop.info))
    # Until here the process has loaded, which may take as long as it likes; the watchdog counts from now on.
    loop.state.enter("host")
    heartbeat.start()
    try:
        loop.run()
    finally:
        heartbeat.close()
        loop.close()
        context.destroy(linger=200)


if __name__ == "__main__":
    run_child("scheduler", run_scheduler)
