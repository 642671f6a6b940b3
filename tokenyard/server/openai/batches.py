"""`/v1/files` and `/v1/batches` as OpenAI has them, over `tokenyard.batch`."""

import asyncio
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import orjson
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.types import ASGIApp

from tokenyard.base.fleet_headers import BATCH_LINE_HEADER, TENANT_HEADER
from tokenyard.batch.batch_api import BATCHES_A_PAGE, FLAG, MAX_FILES_A_PAGE, BatchApi
from tokenyard.batch.batch_runner import POLL_S
from tokenyard.batch.batch_store import Batch, BatchFields
from tokenyard.batch.line_budget import LINES_AT_ONCE, LineBudget
from tokenyard.batch.upload import UploadStream
from tokenyard.engine.frontend.io_struct import GenerateReqInput, OutputDelta
from tokenyard.server.engine_client import ControlClient
from tokenyard.server.http.api_keys import TENANT
from tokenyard.server.http.errors import HttpError
from tokenyard.server.http.routes import Given, Routes
from tokenyard.server.http.streaming import ClientGoneError, read_body
from tokenyard.server.protocol import parse
from tokenyard.server.state import ServerState

HOLD_ALL_S = 0.2
"""If an interactive request has no first token for so long, lines that run give their places up as well."""

routes = Routes("/v1")


class AskApp:
    """Answers lines of batches by the server's own routes."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, batch: Batch, rid: str, body: dict[str, Any]) -> tuple[int, bytes]:
        """See `batch_runner.Ask`."""
        unread = [{"type": "http.request", "body": orjson.dumps(body), "more_body": False}]
        status, parts = 500, []

        async def receive() -> dict[str, Any]:
            if unread:
                return unread.pop()
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            parts.append(message.get("body", b""))

        headers = ((b"content-type", b"application/json"), (b"x-request-id", rid.encode()), (b"x-priority", b"batch"))
        scope: dict[str, Any] = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "path": batch.endpoint,
            "raw_path": batch.endpoint.encode(),
            "query_string": b"",
            "headers": [*headers, (TENANT_HEADER.encode(), batch.tenant.encode("latin-1", "replace"))],
            "client": None,
            "server": None,
            "scheme": "http",
        }
        if batch.tenant:
            # A header has no room for all letters that a tenant's name may have.
            scope[TENANT] = batch.tenant
        await self._app(scope, receive, send)
        return status, b"".join(parts)


def make_batches(folder: Path, max_bytes: int, app: ASGIApp, state: ServerState, room: "SpareRoom") -> BatchApi:
    """The files and batches of a server, which start when it is ready. Raises ConfigError."""
    kept = BatchApi(folder, max_bytes, AskApp(app), room)
    state.on_ready.append(kept.runner.start)
    return kept


class _Waiting:
    """An observer of an interactive request; it counts as waiting until its first delta, or until it is gone."""

    __slots__ = ("__weakref__", "_begun", "_waiting", "since_s")

    def __init__(self, waiting: "weakref.WeakSet[_Waiting]") -> None:
        self._waiting, self._begun, self.since_s = waiting, False, time.monotonic()
        waiting.add(self)

    def delta(self, delta: OutputDelta) -> None:
        """The request has a token, or has ended."""
        if not self._begun:
            self._begun = True
            self._waiting.discard(self)


class _Line:
    """An observer of a line of a batch."""

    __slots__ = ("__weakref__", "_begun", "_ended", "_rid")

    def __init__(self, rid: str, begun: set[str], ended: Callable[[int], None]) -> None:
        self._rid, self._begun, self._ended = rid, begun, ended

    def delta(self, delta: OutputDelta) -> None:
        """The line has a token, or has ended."""
        self._begun.add(self._rid)
        if delta.finish is not None:
            self._ended(delta.prompt_tokens + delta.completion_tokens)


class SpareRoom:
    """Capacity that nobody else uses.

    Lines start while no other request waits, and have up to half of the rows and of the KV pool. When an interactive
    request arrives, lines without a first token are held back at once, until it has its own; if that takes long, those
    that run give their places up too, and go on later from the prefix cache. Lines are those of this server's batches,
    and those that a router sends of its own.
    """

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._waiting: weakref.WeakSet[_Waiting] = weakref.WeakSet()
        self._parts: dict[str, set[str]] = {}
        """Ids of the requests of each line of this server, by the line's own."""

        self._open: set[str] = set()
        self._begun: set[str] = set()
        self._held: set[str] = set()
        self._budget = LineBudget()
        self._watcher: asyncio.Task[None] | None = None

    def observe(self, spec: GenerateReqInput, headers: Mapping[str, str]) -> _Waiting | _Line:
        """Watch a request that arrives."""
        # A line with several prompts is several requests, and those for embeddings have ids of their own.
        parts = self._parts.get(headers.get("x-request-id", spec.rid))
        if parts is not None:
            parts.add(spec.rid)
            self._open.add(spec.rid)
            return _Line(spec.rid, self._begun, self._budget.line_ended)
        if BATCH_LINE_HEADER in headers:
            return self._line_of_router(spec.rid)
        waiting = _Waiting(self._waiting)
        self._hold(self._open - self._begun)
        return waiting

    def _line_of_router(self, rid: str) -> _Line:
        self._open.add(rid)
        line = _Line(rid, self._begun, self._budget.line_ended)
        weakref.finalize(line, self.ended, rid)
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.ensure_future(self._watch())
        return line

    async def _watch(self) -> None:
        """Hold lines back and let them go on, while any is open."""
        while self._open:
            await asyncio.sleep(POLL_S)
            self.adapt()

    @property
    def closing(self) -> bool:
        """Whether the server shuts down."""
        return self._state.phase == "draining"

    async def free(self, open_lines: int) -> int:
        """How many lines may start; see batch.Room."""
        if self._waiting or self._held or self._state.phase != "ready":
            return 0
        snapshot = await self._state.control.snapshot(1.0)
        rows = self._state.options.info.get("max_running_requests") or 0
        most = self._budget.max_lines(rows, snapshot.get("total_tokens", 1), snapshot.get("used_tokens", 0))
        return min(LINES_AT_ONCE, most - open_lines)

    def started(self, rid: str) -> None:
        """A line starts."""
        self._open.add(rid)
        self._parts[rid] = {rid}

    def ended(self, rid: str) -> None:
        """A line has ended."""
        parts = self._parts.pop(rid, {rid})
        for rids in (self._open, self._begun, self._held):
            rids -= parts

    def adapt(self) -> None:
        """Hold more lines back, or let them go on; see batch.Room."""
        if not self._waiting:
            if self._held:
                self._control.hold(sorted(self._held), held=False)
                self._held.clear()
            return
        long = time.monotonic() - min(one.since_s for one in list(self._waiting)) > HOLD_ALL_S
        self._hold(self._open if long else self._open - self._begun)

    def _hold(self, rids: set[str]) -> None:
        fresh = rids - self._held
        if fresh:
            self._held |= fresh
            self._control.hold(sorted(fresh), held=True)

    @property
    def _control(self) -> ControlClient:
        return self._state.control


async def _batches(request: Request) -> BatchApi:
    """The files and batches. Raises HttpError (404) where the server keeps none."""
    found: BatchApi | None = request.app.state.batches
    if found is None:
        message = f"this server keeps no files and batches; start it with {FLAG} FOLDER"
        raise HttpError("not_found", message)
    return found


async def _tenant(request: Request) -> str:
    """The tenant of a request: that of its key, or what the router or the client says."""
    headers = request.headers
    return request.scope.get(TENANT) or headers.get(TENANT_HEADER) or headers.get("x-tenant") or ""


Kept = Annotated[BatchApi, Given(_batches)]
Tenant = Annotated[str, Given(_tenant)]


@routes.post("/files")
async def upload(request: Request, kept: Kept, tenant: Tenant) -> dict[str, Any]:
    """Keep the lines of a batch."""
    form = UploadStream(kept.upload(tenant, request.headers.get("content-type", "")))
    try:
        more = True
        while more:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            await form.add(message.get("body", b""))
            more = message.get("more_body", False)
        return (await form.finish()).public()
    finally:
        await form.close()


@routes.get("/files")
async def files(
    kept: Kept,
    tenant: Tenant,
    purpose: str = "",
    limit: int = MAX_FILES_A_PAGE,
    after: str = "",
    order: str = "desc",
) -> dict[str, Any]:
    """The tenant's files."""
    return kept.list_files(tenant, purpose=purpose, limit=limit, after=after, order=order)


@routes.get("/files/{name}")
async def file(kept: Kept, tenant: Tenant, name: str) -> dict[str, Any]:
    """One file."""
    return kept.file(tenant, name).public()


@routes.get("/files/{name}/content")
async def content(kept: Kept, tenant: Tenant, name: str) -> Response:
    """What is in a file."""
    return FileResponse(kept.content(tenant, name), media_type="application/octet-stream")


@routes.on("DELETE", "/files/{name}")
async def delete(kept: Kept, tenant: Tenant, name: str) -> dict[str, Any]:
    """Delete a file, unless a batch still reads it."""
    return kept.delete_file(tenant, name)


@routes.post("/batches")
async def create(request: Request, kept: Kept, tenant: Tenant) -> dict[str, Any]:
    """Have the lines of a file answered."""
    state: ServerState = request.app.state.server
    body = await read_body(request.receive, state.options.max_body_bytes)
    return kept.create(tenant, parse(body, BatchFields, strict=state.options.strict_api))


@routes.get("/batches")
async def batches(kept: Kept, tenant: Tenant, limit: int = BATCHES_A_PAGE, after: str = "") -> dict[str, Any]:
    """The tenant's batches, the newest first."""
    return kept.list_batches(tenant, limit=limit, after=after)


@routes.get("/batches/{name}")
async def batch(kept: Kept, tenant: Tenant, name: str) -> dict[str, Any]:
    """One batch."""
    return kept.batch(tenant, name).public()


@routes.post("/batches/{name}/cancel")
async def cancel(kept: Kept, tenant: Tenant, name: str) -> dict[str, Any]:
    """Answer no further lines of a batch. What is answered stays, in its files."""
    return kept.cancel(tenant, name)
