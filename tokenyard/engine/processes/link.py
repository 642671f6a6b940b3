"""The API process's sockets: one that it listens on, one to each scheduler, one to the detokenizer."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

import zmq

from tokenyard.engine.frontend.scheduler_client import Transmit
from tokenyard.engine.processes.ipc import (
    TO_API,
    TO_DETOKENIZER,
    TO_SCHEDULER,
    Endpoints,
    ProtocolError,
    pull_socket,
    push_socket,
)
from tokenyard.engine.processes.messages import Fence, ToApi, ToScheduler

logger = logging.getLogger(__name__)

Receive = Callable[[ToApi, int], None]
"""Handles a message and the number of the scheduler process that sent it."""


class SocketLink:
    """Messages to and from the engine's processes, on the running event loop."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._endpoints = endpoints
        self._context: zmq.Context[Any] = zmq.Context()
        self._inbox = pull_socket(self._context, endpoints.api)
        self._outboxes: dict[int, Any] = {}
        self._to_detokenizer: Any = None
        self._receive: Receive = lambda message, source: None
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._inbox.fileno(), self._read)

    def listen(self, receive: Receive) -> None:
        """Give all messages to `receive` from now on."""
        self._receive = receive

    def connect(self, source: int) -> Transmit:
        """A way to scheduler process `source`."""
        socket = self._outboxes[source] = push_socket(self._context, self._endpoints.scheduler(source))

        def transmit(message: ToScheduler) -> None:
            socket.send(TO_SCHEDULER.encode(message))

        return transmit

    def disconnect(self, source: int) -> None:
        """Drop the messages queued for a process that has ended."""
        self._outboxes.pop(source).close(linger=0)

    def fence(self, fence: Fence) -> None:
        """Make the detokenizer ignore a scheduler process that has ended."""
        if self._to_detokenizer is None:
            self._to_detokenizer = push_socket(self._context, self._endpoints.detokenizer)
        self._to_detokenizer.send(TO_DETOKENIZER.encode(fence))

    def reset_detokenizer(self) -> None:
        """Drop the messages queued for a detokenizer that has ended."""
        if self._to_detokenizer is not None:
            self._to_detokenizer.close(linger=0)
            self._to_detokenizer = None

    def close(self) -> None:
        """Close all sockets."""
        self._loop.remove_reader(self._inbox.fileno())
        self._context.destroy(linger=0)

    def _read(self) -> None:
        """Read all messages: the socket's descriptor signals new ones only after the last is read."""
        with contextlib.suppress(zmq.Again):
            while True:
                self._take(self._inbox.recv(zmq.NOBLOCK))

    def _take(self, frame: bytes) -> None:
        """Handle one message; an error is logged and affects this message only."""
        try:
            self._receive(*TO_API.decode(frame))
        except ProtocolError as error:
            logger.error("dropped a message: %s", error)
        except Exception:
            logger.exception("a message from the engine could not be taken in")
