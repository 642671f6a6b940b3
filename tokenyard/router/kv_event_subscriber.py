"""Subscribes to the KV events of workers over ZeroMQ, in the format of vLLM and SGLang.

Frames are [topic, sequence number (8 bytes, big-endian), msgpack of [unix seconds, events, rank]]. Events from before
the subscription and events that were missed are replayed if the worker has a replay socket (ROUTER). Without one they
stay lost: the router's own requests fill the index again, and the `cached_tokens` of responses correct the predictions.
Sequence numbers that start over mean that the engine has restarted.
"""

import asyncio
import logging
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from tokenyard.base import ConfigError
from tokenyard.base.decode_errors import DECODE_ERRORS
from tokenyard.router.dispatch_driver import DispatchDriver
from tokenyard.router.workers import HttpTarget
from tokenyard.routing.prefix_index import BlockHashTranslator, PrefixIndex

log = logging.getLogger(__name__)

NUMBER_BYTES = 8
HIGH_WATER = 100_000
MAX_MESSAGE_BYTES = 64 << 20
CHECK_INTERVAL_S = 1.0

PROBES = {zmq.TCP_KEEPALIVE: 1, zmq.TCP_KEEPALIVE_IDLE: 10, zmq.TCP_KEEPALIVE_INTVL: 5, zmq.TCP_KEEPALIVE_CNT: 3}
"""A subscriber sends nothing: without probes it would listen forever to a machine that has lost its power."""

REPLAY_S = 10.0
END = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)


class KvEventSubscriptions:
    """One subscription per target. `pattern`: the endpoint, with `{host}`; rank n uses the port plus n.

    `replay`: the endpoint of the replay sockets; "" for none.
    """

    def __init__(self, router: DispatchDriver, pattern: str, replay: str = "") -> None:
        """Raises ConfigError for a pattern that is not tcp or has no port."""
        self._router, self._pattern, self._replay = router, pattern, replay
        for flag, given in (("--kv-events", pattern), ("--kv-events-replay", replay or pattern)):
            head, _, port = given.rpartition(":")
            if not port.isdigit() or not head.startswith("tcp://"):
                raise ConfigError(f"{flag} is {given!r}; give an endpoint such as tcp://{{host}}:5557")
        self._tasks: dict[HttpTarget, asyncio.Task[None]] = {}
        self.gaps = 0

    async def run(self) -> None:
        """Subscribe to all targets, including those added later, until cancelled."""
        context = zmq.asyncio.Context()
        try:
            while True:
                present = [target for worker in self._router.workers for target in worker.targets]
                for target in [target for target in present if target not in self._tasks]:
                    self._tasks[target] = asyncio.create_task(self._follow(context, target))
                for target in [target for target in self._tasks if target not in present]:
                    self._tasks.pop(target).cancel()
                await asyncio.sleep(CHECK_INTERVAL_S)
        finally:
            for task in self._tasks.values():
                task.cancel()
            context.destroy(linger=0)

    def endpoint(self, target: HttpTarget, pattern: str = "") -> str:
        """The endpoint of a target by `pattern`, by default the one it publishes on."""
        host = target.worker.url.host
        head, _, port = (pattern or self._pattern).rpartition(":")
        head = head.replace("{host}", f"[{host}]" if ":" in host else host)
        return f"{head}:{int(port) + (target.rank or 0)}"

    async def _follow(self, context: "zmq.asyncio.Context", target: HttpTarget) -> None:
        subscription = context.socket(zmq.SUB)
        subscription.setsockopt(zmq.RCVHWM, HIGH_WATER)
        subscription.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        subscription.setsockopt(zmq.SUBSCRIBE, b"")
        for option, value in PROBES.items():
            subscription.setsockopt(option, value)
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
                if follower.take(frames):
                    target.publishes = True
        except zmq.ZMQError as error:
            log.warning("KV events of %s: %s", target.name, error)
        finally:
            target.publishes = False
            subscription.close(linger=0)

    async def _replay_missed(
        self, context: "zmq.asyncio.Context", target: HttpTarget, follower: "KvEventSubscriber", since: int
    ) -> None:
        """Replay the events from number `since` on, if there is a replay endpoint."""
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
                        follower.take(frames[1:4], replayed=True)
            except TimeoutError:
                log.warning(
                    "KV events of %s: the replay did not finish within %g s; continuing without it",
                    target.name,
                    REPLAY_S,
                )


class KvEventSubscriber:
    """Applies the events of one target to the index, in order."""

    def __init__(self, index: PrefixIndex, name: str, *, from_start: bool = False) -> None:
        """`from_start`: count events before the first message received as missing."""
        self._index, self._name = index, name
        self._blocks = BlockHashTranslator()
        self._from_start = from_start
        self._next = 0 if from_start else None
        """The first number that is not applied."""

        self._heard = -1
        """The last number of the subscription, without what was replayed."""

    def missing(self, frames: list[bytes]) -> int | None:
        """The first missing sequence number before a message of the subscription; None if none is missing."""
        if len(frames) != 3 or len(frames[1]) != NUMBER_BYTES:
            return None
        number = int.from_bytes(frames[1], "big")
        self._notice_restart(number)
        return self._next if self._next is not None and number > self._next else None

    def take(self, frames: list[bytes], *, replayed: bool = False) -> bool:
        """Apply one message, and return whether it was new and could be read. Others are ignored.

        replayed: whether it was asked for, and comes out of the order of the subscription.
        """
        if len(frames) != 3 or len(frames[1]) != NUMBER_BYTES:
            return False
        number = int.from_bytes(frames[1], "big")
        if not replayed:
            self._notice_restart(number)
            self._heard = number
        if self._next is not None and number < self._next:
            return False
        self._next = number + 1
        try:
            payload = msgspec.msgpack.decode(frames[2])
        except DECODE_ERRORS:
            return False
        events = payload[1] if isinstance(payload, list) and len(payload) > 1 else None
        if not isinstance(events, list):
            return False
        for event in events:
            self._apply(event)
        return True

    def _notice_restart(self, number: int) -> None:
        """Begin anew if the numbers of a subscription do: they only rise while an engine lives."""
        if number <= self._heard:
            self._index.clear_target(self._name)
            self._blocks = BlockHashTranslator()
            self._next, self._heard = 0 if self._from_start else None, -1

    def _apply(self, event: Any) -> None:
        stored, removed, cleared = self._blocks.apply(event)
        index = self._index
        if cleared:
            index.clear_target(self._name)
        if stored:
            index.insert(self._name, stored)
        if removed:
            index.remove(self._name, removed)
