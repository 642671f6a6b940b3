"""A reader of a stream for tests."""

import asyncio
from collections.abc import Callable
from typing import Any

from tokenyard.engine.frontend.io_struct import OutputDelta


class TakingReader:
    """Calls `take` with each delta. It is slow while `free` is not set."""

    def __init__(self, take: Callable[[OutputDelta], Any]) -> None:
        self._take = take
        self.free = asyncio.Event()
        self.free.set()

    def write(self, delta: OutputDelta) -> None:
        self._take(delta)

    @property
    def slow(self) -> bool:
        return not self.free.is_set()

    async def drain(self) -> None:
        await self.free.wait()
