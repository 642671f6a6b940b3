"""Follows the KV events of workers over ZeroMQ, in the form in which vLLM and SGLang publish them.

Frames are [topic, sequence number (8 bytes, big-endian), msgpack of [unix seconds, events, rank]]. A gap in the numbers
loses what it loses: requests that the router sends fill the index again, and the `cached_tokens` of answers show what
was believed wrongly. Numbers that begin anew mean that the engine has.
"""

import asyncio
import logging
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from tokenyard.base import ConfigError
from tokenyard.router.dispatch import Dispatcher
from tokenyard.router.index import KvBlocks, PrefixIndex
from tokenyard.router.workers import Target

log = logging.getLogger(__name__)

NUMBER_BYTES = 8
HIGH_WATER = 100_000
LARGEST_MESSAGE = 64 << 20
LOOK_S = 1.0


class KvEvents:
    """One subscription for each target. `pattern` is the endpoint with `{host}` in it; each rank has the next port."""

    def __init__(self, router: Dispatcher, pattern: str) -> None:
        """Raises ConfigError for a pattern that names no port."""
        self._router, self._pattern = router, pattern
        head, _, port = pattern.rpartition(":")
        if not port.isdigit() or not head.startswith("tcp://"):
            raise ConfigError(f"--kv-events is {pattern!r}; give an endpoint such as tcp://{{host}}:5557")
        self._head, self._port = head, int(port)
        self._tasks: dict[Target, asyncio.Task[None]] = {}
        self.gaps = 0

    async def run(self) -> None:
        """Follow all targets, those that come later too."""
        context = zmq.asyncio.Context()
        try:
            while True:
                present = {target for worker in self._router.workers for target in worker.targets}
                for target in present - self._tasks.keys():
                    self._tasks[target] = asyncio.create_task(self._follow(context, target))
                for target in self._tasks.keys() - present:
                    self._tasks.pop(target).cancel()
                await asyncio.sleep(LOOK_S)
        finally:
            for task in self._tasks.values():
                task.cancel()
            context.destroy(linger=0)

    def endpoint(self, target: Target) -> str:
        """Where a target publishes."""
        host = target.worker.url.host
        head = self._head.replace("{host}", f"[{host}]" if ":" in host else host)
        return f"{head}:{self._port + (target.rank or 0)}"

    async def _follow(self, context: "zmq.asyncio.Context", target: Target) -> None:
        subscription = context.socket(zmq.SUB)
        subscription.setsockopt(zmq.RCVHWM, HIGH_WATER)
        subscription.setsockopt(zmq.MAXMSGSIZE, LARGEST_MESSAGE)
        subscription.setsockopt(zmq.SUBSCRIBE, b"")
        try:
            subscription.connect(self.endpoint(target))
            follower = Follower(self, self._router.index, target.state.name)
            while True:
                follower.take(await subscription.recv_multipart())
        except zmq.ZMQError as error:
            log.warning("KV events of %s: %s", target.name, error)
        finally:
            subscription.close(linger=0)


class Follower:
    """What one target has said so far."""

    def __init__(self, events: KvEvents, index: PrefixIndex, name: str) -> None:
        self._events, self._index, self._name = events, index, name
        self._blocks = KvBlocks()
        self._next: int | None = None

    def take(self, frames: list[bytes]) -> None:
        """One message. What is no message of events is ignored."""
        if len(frames) != 3 or len(frames[1]) != NUMBER_BYTES:
            return
        number = int.from_bytes(frames[1], "big")
        if self._next is not None and number < self._next:
            self._index.drop(self._name)
            self._blocks = KvBlocks()
        elif self._next is not None and number > self._next:
            self._events.gaps += 1
        self._next = number + 1
        try:
            payload = msgspec.msgpack.decode(frames[2])
        except (msgspec.DecodeError, UnicodeDecodeError):
            return
        events = payload[1] if isinstance(payload, list) and len(payload) > 1 else None
        for event in events if isinstance(events, list) else ():
            self._apply(event)

    def _apply(self, event: Any) -> None:
        stored, removed, cleared = self._blocks.apply(event)
        index = self._index
        if cleared:
            index.drop(self._name)
        if stored:
            index.insert(self._name, stored)
        if removed:
            index.remove(self._name, removed)
