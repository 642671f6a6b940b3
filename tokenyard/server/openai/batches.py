"""`/v1/files` and `/v1/batches` as OpenAI has them, over `tokenyard.batch`."""

import asyncio
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import FileResponse
from starlette.types import ASGIApp

from tokenyard.base import InvalidRequestError, OverloadedError
from tokenyard.base.fleet_headers import TENANT_HEADER
from tokenyard.batch.batch_runner import BatchRunner
from tokenyard.batch.batch_store import OPEN, Batch, BatchStore
from tokenyard.batch.file_store import (
    DEFAULT_AGE_S,
    MAX_AGE_S,
    MAX_FILE_BYTES,
    MIN_AGE_S,
    FileStore,
    StoredFile,
    lock_folder,
)
from tokenyard.engine.frontend.io_struct import GenerateReqInput, OutputDelta
from tokenyard.server.engine_client import ControlClient
from tokenyard.server.http.api_keys import TENANT
from tokenyard.server.http.errors import HttpError
from tokenyard.server.http.multipart import FormPart, parse_form
from tokenyard.server.http.streaming import read_body
from tokenyard.server.protocol import CreateBatch, parse
from tokenyard.server.state import ServerState

FLAG = "--file-storage-path"
PURPOSES = ("batch",)
FORM_BYTES = 1_000_000
"""What a form may have beyond its file."""

DEFAULT_ROWS = 256
LINES_AT_ONCE = 16
SHARE = 0.5
"""The part of rows and of the KV pool that lines may have, so that there is room for those who arrive."""

MAX_USED_SHARE = 0.75
"""Lines start only while less than this share of the KV pool is used by all."""

FIRST_SHARE = 1 / 8
"""The part of the KV pool that a line is taken to need before one has ended."""

SMOOTHING = 0.2
"""Weight of the line that ended last in the mean of their tokens."""

HOLD_ALL_S = 0.2
"""If an interactive request has no first token for so long, lines that run give their places up as well."""

router = APIRouter(prefix="/v1")


class Batches:
    """The files and batches of a server."""

    def __init__(self, folder: Path, max_bytes: int, app: ASGIApp, state: ServerState) -> None:
        """Raises ConfigError for a folder that cannot be used."""
        self._lock = lock_folder(folder, FLAG)
        self.files = FileStore(folder / "files", max_bytes)
        self.store = BatchStore(folder / "batches", self.files)
        self._room = SpareRoom(state)
        state.observer_factories.append(self._room.observe)
        self._app = app
        self.runner = BatchRunner(self.store, self._ask, self._room)
        state.on_ready.append(self.runner.start)

    async def _ask(self, path: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
        """Answer a line by the server's own route."""
        tenant = headers.get(TENANT_HEADER, "")
        unread = [{"type": "http.request", "body": body, "more_body": False}]
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

        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")]
            + [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()],
            "client": None,
            "server": None,
            "scheme": "http",
        }
        if tenant:
            # A header has no room for all letters that a tenant's name may have.
            scope[TENANT] = tenant
        await self._app(scope, receive, send)
        return status, b"".join(parts)


class _Waiting:
    """An observer of an interactive request; it counts as waiting until its first delta, or until it is gone."""

    __slots__ = ("__weakref__", "_waiting", "since_s")

    def __init__(self, waiting: "weakref.WeakSet[_Waiting]") -> None:
        self._waiting, self.since_s = waiting, time.monotonic()
        waiting.add(self)

    def delta(self, delta: OutputDelta) -> None:
        """The request has a token, or has ended."""
        self._waiting.discard(self)


class _Line:
    """An observer of a line of a batch."""

    __slots__ = ("_begun", "_ended", "_rid")

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
    that run give their places up too, and go on later from the prefix cache.
    """

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._waiting: weakref.WeakSet[_Waiting] = weakref.WeakSet()
        self._parts: dict[str, set[str]] = {}
        """Ids of the requests of each line, by the line's own."""

        self._open: set[str] = set()
        self._begun: set[str] = set()
        self._held: set[str] = set()
        rows = state.options.info.get("max_running_requests") or DEFAULT_ROWS
        self._max_lines = max(1, int(SHARE * rows))
        self._tokens_of_line = 0.0

    def observe(self, spec: GenerateReqInput, headers: Mapping[str, str]) -> _Waiting | _Line:
        """Watch a request that arrives."""
        # A line with several prompts is several requests, and those for embeddings have ids of their own.
        parts = self._parts.get(headers.get("x-request-id", spec.rid))
        if parts is not None:
            parts.add(spec.rid)
            self._open.add(spec.rid)
            return _Line(spec.rid, self._begun, self._line_ended)
        waiting = _Waiting(self._waiting)
        self._hold(self._open - self._begun)
        return waiting

    @property
    def closing(self) -> bool:
        """Whether the server shuts down."""
        return self._state.phase == "draining"

    async def free(self, open_lines: int) -> int:
        """How many lines may start; see batch.Room."""
        self._adapt()
        if self._waiting or self._held or self._state.phase != "ready":
            return 0
        snapshot = await self._state.control.snapshot(1.0)
        used, total = snapshot.get("used_tokens", 0), snapshot.get("total_tokens", 1)
        if used > MAX_USED_SHARE * total:
            return 0
        fit = int(SHARE * total / (self._tokens_of_line or FIRST_SHARE * total))
        return min(LINES_AT_ONCE, min(self._max_lines, max(fit, 1)) - open_lines)

    def started(self, rid: str) -> None:
        """A line starts."""
        self._open.add(rid)
        self._parts[rid] = {rid}

    def ended(self, rid: str) -> None:
        """A line has ended."""
        parts = self._parts.pop(rid, {rid})
        for rids in (self._open, self._begun, self._held):
            rids -= parts

    def _line_ended(self, tokens: int) -> None:
        before = self._tokens_of_line or tokens
        self._tokens_of_line = before + SMOOTHING * (tokens - before)

    def _adapt(self) -> None:
        """Hold more lines back, or let them go on."""
        if not self._waiting:
            if self._held:
                self._control.hold(sorted(self._held), held=False)
                self._held.clear()
            return
        if time.monotonic() - min(one.since_s for one in list(self._waiting)) > HOLD_ALL_S:
            self._hold(self._open)

    def _hold(self, rids: set[str]) -> None:
        fresh = rids - self._held
        if fresh:
            self._held |= fresh
            self._control.hold(sorted(fresh), held=True)

    @property
    def _control(self) -> ControlClient:
        return self._state.control


async def _batches(request: Request) -> Batches:
    """The files and batches. Raises HttpError (404) where the server keeps none."""
    found: Batches | None = request.app.state.batches
    if found is None:
        message = f"this server keeps no files and batches; start it with {FLAG} FOLDER"
        raise HttpError("not_found", message)
    return found


async def _tenant(request: Request) -> str:
    """The tenant of a request: that of its key, or what the router or the client says."""
    headers = request.headers
    return request.scope.get(TENANT) or headers.get(TENANT_HEADER) or headers.get("x-tenant") or ""


Kept = Annotated[Batches, Depends(_batches)]
Tenant = Annotated[str, Depends(_tenant)]


@router.post("/files")
async def upload(request: Request, kept: Kept, tenant: Tenant) -> dict[str, Any]:
    """Keep the lines of a batch."""
    body = await read_body(request.receive, MAX_FILE_BYTES + FORM_BYTES)
    fields = await asyncio.to_thread(parse_form, request.headers.get("content-type", ""), body)
    file = fields.get("file")
    if file is None:
        raise InvalidRequestError("the form has no field file", param="file")
    purpose = fields.get("purpose", FormPart(b"")).data.decode("utf-8", "replace")
    if purpose not in PURPOSES:
        raise InvalidRequestError("purpose must be batch; this server keeps no other files", param="purpose")
    if not file.data:
        raise InvalidRequestError("the file is empty", param="file")
    if len(file.data) > MAX_FILE_BYTES:
        raise HttpError("body_too_large", f"the file is larger than {MAX_FILE_BYTES} bytes", param="file")
    age_s = _age_s(fields)
    name = file.filename or "upload.jsonl"
    try:
        stored = await asyncio.to_thread(kept.files.new_file, tenant, name, purpose, file.data, age_s)
    except OSError as error:
        raise OverloadedError(f"the file cannot be kept: {error.strerror}", code="storage_failed") from error
    return stored.public()


def _age_s(fields: Mapping[str, FormPart]) -> int:
    """How long a file is kept. Raises InvalidRequestError for a time out of range."""
    given = fields.get("expires_after[seconds]")
    if given is None:
        return DEFAULT_AGE_S
    text = given.data.decode("latin-1")
    seconds = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1
    if not MIN_AGE_S <= seconds <= MAX_AGE_S:
        message = f"expires_after[seconds] must be {MIN_AGE_S} to {MAX_AGE_S}"
        raise InvalidRequestError(message, param="expires_after[seconds]")
    return seconds


@router.get("/files")
async def files(
    kept: Kept, tenant: Tenant, purpose: str = "", limit: int = 10_000, after: str = "", order: str = "desc"
) -> dict[str, Any]:
    """The tenant's files."""
    found = [file for file in kept.files.of_tenant(tenant) if purpose in ("", file.purpose)]
    if order not in ("asc", "desc"):
        raise InvalidRequestError("order must be asc or desc", param="order")
    return _page([file.public() for file in (found if order == "desc" else found[::-1])], limit, 10_000, after)


@router.get("/files/{name}")
async def file(kept: Kept, tenant: Tenant, name: str) -> dict[str, Any]:
    """One file."""
    return _file(kept, tenant, name).public()


@router.get("/files/{name}/content")
async def content(kept: Kept, tenant: Tenant, name: str) -> Response:
    """What is in a file."""
    return FileResponse(kept.files.path(_file(kept, tenant, name)), media_type="application/octet-stream")


@router.delete("/files/{name}")
async def delete(kept: Kept, tenant: Tenant, name: str) -> dict[str, Any]:
    """Delete a file, unless a batch still reads it."""
    found = _file(kept, tenant, name)
    if any(batch.input_file_id == name for batch in kept.store.open()):
        raise InvalidRequestError("a batch reads this file; cancel it first", code="file_in_use")
    kept.files.delete(found)
    return {"id": name, "object": "file", "deleted": True}


@router.post("/batches")
async def create(request: Request, kept: Kept, tenant: Tenant) -> dict[str, Any]:
    """Have the lines of a file answered."""
    state: ServerState = request.app.state.server
    body = await read_body(request.receive, state.options.max_body_bytes)
    fields = parse(body, CreateBatch, strict=state.options.strict_api)
    try:
        batch = kept.store.create(tenant, fields)
    except OSError as error:
        raise OverloadedError(f"the batch cannot be kept: {error.strerror}", code="storage_failed") from error
    kept.runner.wake()
    return batch.public()


@router.get("/batches")
async def batches(kept: Kept, tenant: Tenant, limit: int = 20, after: str = "") -> dict[str, Any]:
    """The tenant's batches, the newest first."""
    return _page([batch.public() for batch in kept.store.of_tenant(tenant)], limit, 100, after)


@router.get("/batches/{name}")
async def batch(kept: Kept, tenant: Tenant, name: str) -> dict[str, Any]:
    """One batch."""
    return _batch(kept, tenant, name).public()


@router.post("/batches/{name}/cancel")
async def cancel(kept: Kept, tenant: Tenant, name: str) -> dict[str, Any]:
    """Answer no further lines of a batch. What is answered stays, in its files."""
    found = _batch(kept, tenant, name)
    if found.status not in OPEN:
        raise InvalidRequestError(f"the batch has ended: it is {found.status}", code="batch_ended")
    if found.status in ("validating", "in_progress"):
        kept.store.move(found, "cancelling")
        kept.runner.wake()
    return found.public()


def _file(kept: Batches, tenant: str, name: str) -> StoredFile:
    found = kept.files.find(tenant, name)
    if found is None:
        raise HttpError("not_found", f"there is no file {name[:100]!r}", param="file_id")
    return found


def _batch(kept: Batches, tenant: str, name: str) -> Batch:
    found = kept.store.find(tenant, name)
    if found is None:
        raise HttpError("not_found", f"there is no batch {name[:100]!r}", param="batch_id")
    return found


def _page(found: list[dict[str, Any]], limit: int, most: int, after: str) -> dict[str, Any]:
    """One page of a list, as OpenAI has it. Raises InvalidRequestError for a limit out of range or an unknown id."""
    if not 1 <= limit <= most:
        raise InvalidRequestError(f"limit must be 1 to {most}", param="limit")
    if after:
        ids = [one["id"] for one in found]
        if after not in ids:
            raise InvalidRequestError(f"there is nothing with the id {after[:100]!r}", param="after")
        found = found[ids.index(after) + 1 :]
    page = found[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(found) > limit,
    }
