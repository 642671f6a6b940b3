"""The detokenizer process: token ids in, text out (`python -m tokenyard.engine.detokenizer.process`)."""

import logging
import time
from typing import Any

import zmq

from tokenyard.base import NS_PER_S, StopFound, TokenBatch
from tokenyard.engine.detokenizer.assembler import TextAssembler
from tokenyard.engine.processes.child import Inbox, ReportReady, run_child
from tokenyard.engine.processes.engine_config import ChildReport, ChildTask
from tokenyard.engine.processes.ipc import (
    TO_API,
    TO_DETOKENIZER,
    TO_SCHEDULER,
    Endpoints,
    ProtocolError,
    pull_socket,
    push_socket,
)
from tokenyard.engine.processes.messages import Fence, Heartbeat, ToDetokenizer
from tokenyard.engine.scheduler_process.health.liveness import HEARTBEAT_INTERVAL_S
from tokenyard.engine.text.tokenizer_files import load_tokenizer

logger = logging.getLogger(__name__)

WAIT_MS = round(1000 * HEARTBEAT_INTERVAL_S)


def run_detokenizer(task: ChildTask, report: ReportReady) -> None:
    """Turn the messages of the schedulers into those for the API process until told to stop."""
    assembler = TextAssembler(load_tokenizer(task.config.tokenizer_path or task.config.model_path))
    context: zmq.Context[Any] = zmq.Context()
    endpoints = Endpoints(task.socket_directory)
    inbox = Inbox(pull_socket(context, endpoints.detokenizer))
    loop = DetokenizerLoop(assembler, context, endpoints, task.source)
    report(ChildReport())
    loop.beat(time.monotonic_ns())
    while (frames := inbox.wait(WAIT_MS)) is not None:
        loop.beat(time.monotonic_ns())
        for frame in frames:
            try:
                loop.take(*TO_DETOKENIZER.decode(frame))
            except ProtocolError as error:
                logger.error("dropped a message: %s", error)
    context.destroy(linger=200)


class DetokenizerLoop:
    """Sends text to the API process and found stop strings to the schedulers (SGLang's `DetokenizerManager`).

    `source` is the number of this process.
    """

    def __init__(
        self, assembler: TextAssembler, context: "zmq.Context[Any]", endpoints: Endpoints, source: int
    ) -> None:
        self._assembler = assembler
        self._source = source
        self._beat_ns = 0
        self._context = context
        self._endpoints = endpoints
        self._to_api = push_socket(context, endpoints.api)
        self._to_scheduler: dict[int, Any] = {}
        self._fenced: set[int] = set()

    def beat(self, now_ns: int) -> None:
        """Send a heartbeat if one is due. The loop that does the work sends it, so that a hang shows."""
        if now_ns - self._beat_ns >= HEARTBEAT_INTERVAL_S * NS_PER_S:
            self._beat_ns = now_ns
            self._to_api.send(TO_API.encode(Heartbeat(now_ns, "idle", 0, 0, {}), self._source))

    def take(self, message: ToDetokenizer, source: int) -> None:
        """Handle a message of scheduler process `source`, or a fence."""
        if isinstance(message, Fence):
            self._fence(message)
        elif source in self._fenced:
            return
        elif isinstance(message, TokenBatch):
            batch, stops = self._assembler.step(message, source)
            for stop in stops:
                self._send_stop(stop, source)
            if not batch.empty:
                self._to_api.send(TO_API.encode(batch, source))
        else:
            self._to_api.send(TO_API.encode(message, source))

    def _fence(self, fence: Fence) -> None:
        self._fenced.add(fence.source)
        socket = self._to_scheduler.pop(fence.source, None)
        if socket is not None:
            socket.close(linger=0)
        self._to_api.send(TO_API.encode(self._assembler.fence(fence)))

    def _send_stop(self, stop: StopFound, source: int) -> None:
        socket = self._to_scheduler.get(source)
        if socket is None:
            socket = self._to_scheduler[source] = push_socket(self._context, self._endpoints.scheduler(source))
        socket.send(TO_SCHEDULER.encode(stop))


if __name__ == "__main__":
    run_child("detokenizer", run_detokenizer)
