"""Transports between programs and a server."""

import atexit
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp

from tokenyard.lang.interpreter import LOOP


@dataclass(slots=True)
class HttpAnswer:
    """A streamed response.

    status: HTTP status.
    pieces: parts of the body as they arrive.
    """

    status: int
    pieces: AsyncIterator[bytes]


class Transport(Protocol):
    """Sends requests to a server. Used on the event loop of the language."""

    def ask(self, method: str, path: str, body: Any = None) -> AbstractAsyncContextManager[HttpAnswer]:
        """Send a request with `body` as JSON. Leaving the block before the end aborts the response."""


class HttpTransport:
    """Over HTTP, to the server at `base_url`."""

    def __init__(self, base_url: str, api_key: str | None, *, timeout_s: float) -> None:
        self._url = base_url.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._open: aiohttp.ClientSession | None = None

    @asynccontextmanager
    async def ask(self, method: str, path: str, body: Any = None) -> AsyncIterator[HttpAnswer]:
        """Send a request; see Transport."""
        async with self._session.request(method, self._url + path, json=body) as response:
            yield HttpAnswer(response.status, response.content.iter_any())

    def close(self) -> None:
        """Close the connections."""
        if self._open is not None:
            LOOP.run(self._open.close()).result()
            self._open = None

    @property
    def _session(self) -> aiohttp.ClientSession:
        if self._open is None:
            # Programs decide how much runs concurrently; the server queues the requests.
            connector = aiohttp.TCPConnector(limit=0)
            atexit.register(self.close)
            self._open = aiohttp.ClientSession(headers=self._headers, timeout=self._timeout, connector=connector)
        return self._open
