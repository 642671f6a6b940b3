"""A scheduler as seen from outside its process: sends events, calls verbs, and receives replies and heartbeats."""

import asyncio
import itertools
import math
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import msgspec

from tokenyard.base import ConfigError, Event, OverloadedError, TokenyardError
from tokenyard.engine.processes.messages import NO_REPLY, Fence, Heartbeat, RpcReply, RpcRequest, ToScheduler
from tokenyard.engine.scheduler_process.health.liveness import heartbeat_age_s

CALL_TIMEOUT_S = 30.0

T = TypeVar("T")
Transmit = Callable[[ToScheduler], None]
"""Carries a message to a scheduler without waiting: over a socket, or to a thread of this process."""


class ProcessLink(Protocol):
    """How messages reach the engine's processes."""

    def connect(self, source: int) -> Transmit:
        """A way to scheduler process `source`."""

    def disconnect(self, source: int) -> None:
        """Drop the connection to a process that has ended."""

    def fence(self, fence: Fence) -> None:
        """Ask the text side's process for the output of answers so far; it replies with `Fenced`."""

    def reset_detokenizer(self) -> None:
        """Drop the connection to the text side's process, which has ended."""

    def close(self) -> None:
        """Close all connections."""


class SchedulerClient:
    """One scheduler. Used from one event loop; its heartbeats and replies go to `handle_message`.

    `rank` is its place in the engine, `source` the number of its process.
    """

    def __init__(self, transmit: Transmit, rank: int = 0, source: int = 0) -> None:
        self.rank = rank
        self.source = source
        self.heartbeat: Heartbeat | None = None
        self._transmit = transmit
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._call_ids = itertools.count(1)
        self._closed: TokenyardError | None = None

    def send(self, event: Event) -> None:
        """Send an event; does nothing once the scheduler has ended."""
        if self._closed is None:
            self._transmit(event)

    def order(self, verb: str, **arguments: Any) -> None:
        """Have the scheduler do `verb` without waiting for a reply."""
        if self._closed is None:
            self._transmit(RpcRequest(NO_REPLY, verb, arguments))

    async def call(self, verb: str, kind: Any, timeout_s: float = CALL_TIMEOUT_S, **arguments: Any) -> Any:
        """Have the scheduler do `verb`; return what it returns, as a `kind`.

        Raises ConfigError if the scheduler refuses, OverloadedError if it does not answer in time, and the error given
        to `close` if it is gone.
        """
        if self._closed is not None:
            raise self._closed
        call_id = next(self._call_ids)
        self._calls[call_id] = reply = asyncio.get_running_loop().create_future()
        self._transmit(RpcRequest(call_id, verb, arguments))
        try:
            answer: RpcReply = await asyncio.wait_for(reply, timeout_s)
        except TimeoutError as error:
            raise OverloadedError(f"the scheduler did not answer within {timeout_s:g} s") from error
        finally:
            del self._calls[call_id]
        if answer.refusal:
            raise ConfigError(answer.refusal)
        return msgspec.convert(answer.value, kind)

    def handle_message(self, message: Heartbeat | RpcReply) -> None:
        """Handle a message of the scheduler."""
        if isinstance(message, Heartbeat):
            self.heartbeat = message
            return
        reply = self._calls.get(message.call_id)
        if reply is not None and not reply.done():
            reply.set_result(message)

    @property
    def counters(self) -> dict[str, Any]:
        """The scheduler's counters of its last heartbeat, without asking; empty before the first."""
        return dict(self.heartbeat.counters) if self.heartbeat is not None else {}

    def age_s(self, now_ns: int) -> float:
        """Seconds since the scheduler was known to be well; infinite before its first heartbeat."""
        return math.inf if self.heartbeat is None else heartbeat_age_s(self.heartbeat, now_ns)

    @property
    def describe_heartbeat(self) -> str:
        """What the scheduler was doing as of its last heartbeat, with its queue, in words."""
        beat = self.heartbeat
        return f"{beat.doing}, {beat.steps} steps done, queue {beat.counters}" if beat is not None else "nothing"

    def close(self, error: TokenyardError) -> None:
        """Handle the end of the scheduler: open and later calls raise `error`."""
        self._closed = error
        for reply in self._calls.values():
            if not reply.done():
                reply.set_exception(error)
