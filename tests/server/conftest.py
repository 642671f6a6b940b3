"""A real HTTP server over the fake engine, one per test."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest
import uvicorn

from tests.server.fake import FakeManager
from tokenyard.server.http.app import create_app
from tokenyard.server.state import ServerOptions, ServerState

POLL_S = 0.01


class QuickServer(uvicorn.Server):
    """Ends at once where uvicorn's own loops sleep for tenths of a second, as the tests start hundreds of servers."""

    async def main_loop(self) -> None:
        await self.on_tick(0)
        while not self.should_exit:
            await asyncio.sleep(POLL_S)

    async def shutdown(self, sockets: Any = None) -> None:
        for server in self.servers:
            server.close()
        await asyncio.sleep(0)
        if self.server_state.connections or self.server_state.tasks:
            await super().shutdown(sockets)


class Running:
    """A server in a thread."""

    def __init__(self, options: ServerOptions, manager: FakeManager | None) -> None:
        self.manager = manager
        self.state = ServerState(options, manager)
        self._server = QuickServer(
            uvicorn.Config(
                create_app(self.state),
                port=0,
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=1,
            )
        )
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive(), "the server did not start"
            time.sleep(0.005)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.client = httpx2.Client(base_url=self.url, timeout=20)

    def break_connections(self) -> None:
        """Abort all connections, from the server's thread."""
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()

    def close(self) -> None:
        self.client.close()
        self._server.should_exit = True
        self._thread.join(10)


@pytest.fixture
def start() -> Iterator[Callable[..., Running]]:
    """Start servers with options; they stop with the test."""
    running: list[Running] = []

    def begin(manager: FakeManager | None = None, *, loading: bool = False, **options: object) -> Running:
        manager = None if loading else manager or FakeManager()
        running.append(Running(ServerOptions(model_name="fake", **options), manager))  # type: ignore[arg-type]
        return running[-1]

    yield begin
    for server in running:
        server.close()


@pytest.fixture
def server(start: Callable[..., Running]) -> Running:
    """A server with default options."""
    return start()
