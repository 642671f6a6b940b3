"""The server's API in this process, without a socket: for batch files, and as a back end of `tokenyard.lang`.

A request takes the same path through the application whether it comes over HTTP or from here.
"""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import CancelledError, Future
from contextlib import asynccontextmanager
from typing import Any

import orjson

from tokenyard import lang
from tokenyard.offline import LLM
from tokenyard.server.http.app import create_app
from tokenyard.server.state import ServerState
from tokenyard.wiring import server_options


class LocalApi:
    """All paths of the server over an `LLM`. Callable from any event loop; the work runs on the LLM's own loop.

    Implements `lang.Transport`: `lang.set_default_backend(LocalApi(llm).backend())`.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._app = create_app(ServerState(server_options(llm.settings), llm.manager))

    def backend(self) -> lang.Endpoint:
        """A back end for programs of `tokenyard.lang`."""
        return lang.Endpoint(transport=self)

    async def whole(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        """(status, body) of an answer. `body` is the request's body, as a JSON value."""
        async with self.ask(method, path, body) as answer:
            return answer.status, b"".join([piece async for piece in answer.pieces])

    @asynccontextmanager
    async def ask(self, method: str, path: str, body: Any = None) -> AsyncIterator[lang.HttpAnswer]:
        """Send a request; the pieces of its answer may arrive as they are produced. Leaving early cancels it."""
        loop, messages = asyncio.get_running_loop(), asyncio.Queue[dict[str, Any] | None]()
        request = {"type": "http.request", "body": b"" if body is None else orjson.dumps(body), "more_body": False}
        unread = [request]

        async def receive() -> dict[str, Any]:
            if unread:
                return unread.pop()
            # There is no disconnect to report: leaving the context cancels the work instead.
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Any) -> None:
            loop.call_soon_threadsafe(messages.put_nowait, message)

        def end(_: "Future[None]") -> None:
            loop.call_soon_threadsafe(messages.put_nowait, None)

        work = self._llm.run(self._serve(method, path, receive, send))
        work.add_done_callback(end)
        try:
            head = await messages.get()
            if head is None:
                work.result()
                raise AssertionError("the server gave no answer")
            yield lang.HttpAnswer(head["status"], _pieces(messages, work))
        finally:
            work.cancel()

    async def _serve(self, method: str, path: str, receive: Any, send: Any) -> None:
        """Run the application on one request."""
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "client": None,
            "server": None,
            "scheme": "http",
        }
        await self._app(scope, receive, send)


async def _pieces(messages: "asyncio.Queue[dict[str, Any] | None]", work: "Future[None]") -> AsyncIterator[bytes]:
    """The pieces of a body. Raises the server's error if it failed."""
    while (message := await messages.get()) is not None:
        if message.get("body"):
            yield message["body"]
        if not message.get("more_body"):
            return
    try:
        work.result()
    except CancelledError as error:
        raise ConnectionError("the request was cancelled") from error
