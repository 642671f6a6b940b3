"""State that several routers share through Valkey or Redis: which prefix and which session went to which target.

It is soft state, published without acknowledgement between routers. A router that starts late, or has no connection to
the store, routes by its own requests; requests never wait for the store. The protocol is RESP 2 (AUTH, SUBSCRIBE,
PUBLISH).
"""

import asyncio
import logging
from collections.abc import Sequence
from urllib.parse import unquote, urlsplit

import msgspec

from tokenyard.base import ConfigError
from tokenyard.base.decode_errors import DECODE_ERRORS
from tokenyard.router.workers import HttpWorkers
from tokenyard.routing.policies import RequestFeatures, RoutePolicy
from tokenyard.routing.prefix_index import Digest, PrefixIndex

log = logging.getLogger(__name__)

CHANNEL = b"tokenyard-router-1"
BATCH_S = 0.05
RETRY_S = 1.0
MAX_PENDING = 2000
REPLY_S = 5.0
MAX_REPLY_BYTES, MAX_REPLY_DEPTH = 64 << 20, 3


class SharedUpdate(msgspec.Struct, array_like=True):
    """One batch of a router's choices, as published.

    router: id of the publisher.
    prefixes: (target name, digests) of requests sent.
    sessions: (session, target name).
    """

    router: str
    prefixes: list[tuple[str, list[bytes]]]
    sessions: list[tuple[str, str]]


def command(*words: bytes) -> bytes:
    """Encode a command as an array of bulk strings."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


async def read_reply(reader: asyncio.StreamReader, depth: int = 0) -> bytes | list[object] | None:
    """Read one reply: a line, a string or an array of these. Raises ConnectionError for an error reply too."""
    line = await reader.readline()
    if not line.endswith(b"\r\n"):
        raise ConnectionError("the store closed the connection")
    kind, rest = line[:1], line[1:-2]
    if kind in (b"+", b":"):
        return rest
    if kind == b"-":
        raise ConnectionError(f"the store replied {rest.decode('utf-8', 'replace')}")
    wrong = kind not in (b"$", b"*") or not rest.removeprefix(b"-").isdigit() or depth > MAX_REPLY_DEPTH
    if wrong or int(rest) > MAX_REPLY_BYTES:
        raise ConnectionError("the store does not speak RESP")
    count = int(rest)
    if count < 0:
        return None
    if kind == b"$":
        return (await reader.readexactly(count + 2))[:-2]
    return [await read_reply(reader, depth + 1) for _ in range(count)]


class RouterSync:
    """Publishes the choices of this router in batches, and applies those of the others."""

    def __init__(self, url: str, router_id: str, workers: HttpWorkers, index: PrefixIndex, policy: RoutePolicy) -> None:
        """`url`: redis://[[user]:password@]host[:port]. Raises ConfigError for any other form."""
        parts = urlsplit(url)
        if parts.scheme not in ("redis", "valkey") or not parts.hostname:
            raise ConfigError(f"--shared-url is {url!r}; give redis://host:port")
        self._host, self._port = parts.hostname, parts.port or 6379
        words = [unquote(word).encode() for word in (parts.username, parts.password) if word]
        self._auth = command(b"AUTH", *words) if words else b""
        self._id, self._workers, self._index, self._policy = router_id, workers, index, policy
        self._prefixes: list[tuple[str, list[bytes]]] = []
        self._sessions: list[tuple[str, str]] = []
        self.connected = False

    def sent(self, target: str, digests: Sequence[Digest], session: str) -> None:
        """A request was sent to `target`: publish it with the next batch."""
        if len(self._prefixes) + len(self._sessions) >= MAX_PENDING:
            return
        names = [digest for digest in digests if isinstance(digest, bytes)]
        if names:
            self._prefixes.append((target, names))
        if session:
            self._sessions.append((session, target))

    async def run(self) -> None:
        """Publish and subscribe until cancelled; reconnect every `RETRY_S` while the store is unreachable."""
        while True:
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._receive())
                    group.create_task(self._publish())
            except* (OSError, asyncio.IncompleteReadError, ValueError) as errors:
                if self.connected:
                    log.warning(
                        "lost the connection to the shared store; routing by local state until it is back: %s",
                        errors.exceptions[0],
                    )
                self.connected = False
            await asyncio.sleep(RETRY_S)

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        # Not wait_for, which before Python 3.12 loses a cancellation that comes with the result.
        async with asyncio.timeout(RETRY_S):
            reader, writer = await asyncio.open_connection(self._host, self._port, limit=MAX_REPLY_BYTES)
        if self._auth:
            writer.write(self._auth)
            async with asyncio.timeout(REPLY_S):
                await read_reply(reader)
        return reader, writer

    async def _receive(self) -> None:
        reader, writer = await self._open()
        try:
            writer.write(command(b"SUBSCRIBE", CHANNEL))
            while True:
                reply = await read_reply(reader)
                self.connected = True
                if (
                    isinstance(reply, list)
                    and len(reply) == 3
                    and reply[0] == b"message"
                    and isinstance(reply[2], bytes)
                ):
                    self.take(reply[2])
        finally:
            writer.close()

    async def _publish(self) -> None:
        reader, writer = await self._open()
        try:
            while True:
                await asyncio.sleep(BATCH_S)
                if not (self._prefixes or self._sessions):
                    continue
                update = SharedUpdate(self._id, self._prefixes, self._sessions)
                self._prefixes, self._sessions = [], []
                writer.write(command(b"PUBLISH", CHANNEL, msgspec.msgpack.encode(update)))
                async with asyncio.timeout(REPLY_S):
                    await read_reply(reader)
        finally:
            writer.close()

    def take(self, message: bytes) -> None:
        """Apply an update of another router. Invalid messages and own updates are ignored."""
        try:
            update = msgspec.msgpack.decode(message, type=SharedUpdate)
        except DECODE_ERRORS:
            return
        if update.router == self._id:
            return
        states = {target.state.name: target.state for worker in self._workers for target in worker.targets}
        for name, digests in update.prefixes:
            if name in states:
                self._index.insert(name, digests)
        for session, name in update.sessions:
            if name in states:
                self._policy.sent(RequestFeatures(1, session=session), states[name])
