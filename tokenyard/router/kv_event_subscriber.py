"""Follows the KV events of workers over ZeroMQ, in the form in which vLLM and SGLang publish them.

Frames are [topic, sequence number (8 bytes, big-endian), msgpack of [unix seconds, events, rank]]. What was said before
the router came, or is missing, is asked for again where workers have a ROUTER socket for that. Without one a gap loses
what it loses: requests that the router sends fill the index again, and the `cached_tokens` of answers show what was
believed wrongly. Numbers that begin anew mean that the engine has.
"""

import asyncio
import logging
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from tokenyard.base import ConfigError
from tokenyard.router.dispatch import Dispatcher
from tokenyard.router.workers import Target
from tokenyard.routing.index import BlockHashTranslator, PrefixIndex

log = logging.getLogger(__name__)

NUMBER_BYTES = 8
HIGH_WATER = 100_000
MAX_MESSAGE_BYTES = 64 << 20
CHECK_INTERVAL_S = 1.0
REPLAY_S = 10.0
END = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)


class KvEventSubscriptions:
    """One subscription for each target. `pattern` is the endpoint with `{host}` in it; each rank has the next port.
    `replay` is where events can be asked for again, "" for nowhere.
    """

    def __init__(self, router: Dispatcher, pattern: str, replay: str = "") -> None:
        """Raises ConfigError for a pattern that names no port."""
        self._router, self._pattern, self._replay = router, pattern, replay
        for flag, given in (("--kv-events", pattern), ("--kv-events-replay", replay or pattern)):
            head, _, port = given.rpartition(":")
            if not port.isdigit() or not head.startswith("tcp://"):
                raise ConfigError(f"{flag} is {given!r}; give an endpoint such as tcp://{{host}}:5557")
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
                await asyncio.sleep(CHECK_INTERVAL_S)
        finally:
            for task in self._tasks.values():
                task.cancel()
            context.destroy(linger=0)

    def endpoint(self, target: Target, pattern: str = "") -> str:
        """Where a target publishes, or the endpoint that another `pattern` names."""
        host = target.worker.url.host
        head, _, port = (pattern or self._pattern).rpartition(":")
        head = head.replace("{host}", f"[{host}]" if ":" in host else host)
        return f"{head}:{int(port) + (target.rank or 0)}"

    async def _follow(self, context: "zmq.asyncio.Context", target: Target) -> None:
        subscription = context.socket(zmq.SUB)
        subscription.setsockopt(zmq.RCVHWM, HIGH_WATER)
        subscription.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        subscription.setsockopt(zmq.SUBSCRIBE, b"")
        try:
            subscription.connect(self.endpoint(target))
            follower = KvEventSubscriber(self._router.index, target.state.name, from_start=bool(self._replay))
            await self._replay_missed(context, target, follower, 0)
            while True:
                frames = await subscription.recv_multipart()
                missing = follower.missing(frames)
                if missing is not None:
                    self.gaps += 1
                    await self._replay_missed(context, target, follower, missing)
                follower.take(frames)
        except zmq.ZMQError as error:
            log.warning("KV events of %s: %s", target.name, error)
        finally:
            subscription.close(linger=0)

    async def _replay_missed(
        self, context: "zmq.asyncio.Context", target: Target, follower: "KvEventSubscriber", since: int
    ) -> None:
        """Take in what the target has said from number `since` on, if it can be asked."""
        if not self._replay:
            return
        with context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(self.endpoint(target, self._replay))
            try:
                async with asyncio.timeout(REPLAY_S):
                    await socket.send_multipart([b"", since.to_bytes(NUMBER_BYTES, "big")])
                    while len(frames := await socket.recv_multipart()) >= 4 and frames[2] != END:
                        follower.take(frames[1:4])
            except TimeoutError:
                log.warning("KV events of %s: nothing was told again within %g s", target.name, REPLAY_S)


class KvEventSubscriber:
    """What one target has said so far."""

    def __init__(self, index: PrefixIndex, name: str, *, from_start: bool = False) -> None:
        """`from_start`: what was said before the first message that is heard is missing, too."""
        self._index, self._name = index, name
        self._blocks = BlockHashTranslator()
        self._next = 0 if from_start else None
        self._latest_s = 0.0

    def missing(self, frames: list[bytes]) -> int | None:
        """The first number that was not heard before a message; None if none is missing."""
        if len(frames) != 3 or len(frames[1]) != NUMBER_BYTES or self._next is None:
            return None
        return self._next if int.from_bytes(frames[1], "big") > self._next else None

    def take(self, frames: list[bytes]) -> None:
        """One message. What is no message of events is ignored, and what was heard before."""
        if len(frames) != 3 or len(frames[1]) != NUMBER_BYTES:
            return
        number = int.from_bytes(frames[1], "big")
        try:
            payload = msgspec.msgpack.decode(frames[2])
        except (msgspec.DecodeError, UnicodeDecodeError):
            payload = None
        told = payload if isinstance(payload, list) and len(payload) > 1 else [None, None]
        said_s = told[0] if isinstance(told[0], float) else self._latest_s
        if self._next is not None and number < self._next:
            if said_s <= self._latest_s:
                return
            self._index.clear_target(self._name)
            self._blocks = BlockHashTranslator()
        self._next, self._latest_s = number + 1, max(said_s, self._latest_s)
        for event in told[1] if isinstance(told[1], list) else ():
            self._apply(event)

    def _apply(self, event: Any) -> None:
        stored, removed, cleared = self._blocks.apply(event)
        index = self._index
        if cleared:
            index.clear_target(self._name)
        if stored:
            index.insert(self._name, stored)
        if removed:
            index.remove(self._name, removed)
