"""A Valkey that engines keep KV in and routers share their choices through. It forgets all when it is killed."""

import asyncio
from typing import Any

from tests.world.network import FakeSocket, Process

PORT = 6379
MAX_KEYS = 400
"""It evicts the oldest keys beyond these."""


class ValkeyHost:
    """One server process: as much of RESP 2 as the product uses."""

    def __init__(self, world: Any, name: str) -> None:
        self.world, self.name = world, name
        self.disk = None
        self.process: Process | None = None
        self._values: dict[bytes, bytes] = {}
        self._subscribers: dict[asyncio.StreamWriter, bytes] = {}

    def start(self) -> None:
        """Start it, empty."""
        self.process = Process(self.name)
        self._values, self._subscribers = {}, {}
        self.world.spawn(self.process, self._run)

    async def _run(self) -> None:
        await asyncio.start_server(self._serve, sock=FakeSocket(self.name, PORT))  # type: ignore[arg-type]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                count = int((await reader.readuntil(b"\r\n"))[1:])
                words = []
                for _ in range(count):
                    size = int((await reader.readuntil(b"\r\n"))[1:])
                    words.append((await reader.readexactly(size + 2))[:-2])
                writer.write(self._answer(writer, words))
        except (OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # a client that left, or one whose bits were flipped on the way
        finally:
            self._subscribers.pop(writer, None)
            writer.close()

    def _answer(self, writer: asyncio.StreamWriter, words: list[bytes]) -> bytes:
        values = self._values
        match words:
            case [b"SET", key, value]:
                values[key] = value
                if len(values) > MAX_KEYS:
                    del values[next(iter(values))]
                return b"+OK\r\n"
            case [b"GET", key] if key in values:
                return b"$%d\r\n%b\r\n" % (len(values[key]), values[key])
            case [b"GET", _]:
                return b"$-1\r\n"
            case [b"EXISTS", key]:
                return b":%d\r\n" % (key in values)
            case [b"DEL", *keys]:
                return b":%d\r\n" % sum(values.pop(key, None) is not None for key in keys)
            case [b"SUBSCRIBE", channel]:
                self._subscribers[writer] = channel
                return _array(b"subscribe", channel, b"1")
            case [b"PUBLISH", channel, message]:
                to = [one for one, of in self._subscribers.items() if of == channel]
                for subscriber in to:
                    subscriber.write(_array(b"message", channel, message))
                self.world.done["messages between routers"] += len(to)
                return b":%d\r\n" % len(to)
        return b"-ERR unknown command\r\n"

    def kill(self, *, host: bool = False) -> None:
        """kill -9."""
        assert self.process is not None
        self.world.network.kill(self.process, host=host)

    def stop(self) -> None:
        """SIGSTOP."""
        assert self.process is not None
        self.process.stop()

    def resume(self) -> None:
        """SIGCONT."""
        self.world.loop.resume(self.process)

    def left_over(self) -> list[str]:
        """It keeps nothing that counts."""
        return []


def _array(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)
