"""`/v1/files` and `/v1/batches` at the router: files and answers on its disk, lines answered by all its workers."""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qsl

import msgspec
import orjson
from typing_extensions import override

from tokenyard.base import InvalidRequestError, TokenyardError
from tokenyard.base.cross_site import is_loopback
from tokenyard.batch.batch_api import BATCHES_A_PAGE, MAX_FILES_A_PAGE, BatchApi
from tokenyard.batch.batch_runner import NoRoomError
from tokenyard.batch.batch_store import Batch, BatchFields
from tokenyard.batch.line_budget import LINES_AT_ONCE, SHARE, LineBudget
from tokenyard.batch.upload import MAX_FORM_BYTES, UploadStream
from tokenyard.router.access import check_access, check_site, tenant_key
from tokenyard.router.client_connection import (
    JSON_TYPE,
    BodyReader,
    ClientConnection,
    ClientHandler,
    ClientRequest,
    Headers,
    ResponseWriter,
)
from tokenyard.router.disagg_exchange import DISAGG_PATHS, DisaggExchange
from tokenyard.router.dispatch_driver import DispatchDriver
from tokenyard.router.errors import RouterError, error_body, status_line, status_of
from tokenyard.router.header_forwarding import LINE_HEADER, TENANT_HEADER, HeaderForwarding
from tokenyard.router.proxy_exchange import Exchange
from tokenyard.router.request_features import ParsedRequest
from tokenyard.router.workers import HttpTarget
from tokenyard.routing.tenant_limits import KeyGrant

log = logging.getLogger(__name__)

LINE_PRIORITY = -(1 << 30)
"""Below that of any request: how the lines at a target are told from requests."""

READ_BYTES = 1 << 18


class RouterBatches:
    """The files and batches of a router, and what answers their lines.

    A line starts at a worker only while nothing waits at the router, and lines have at most half of a worker's rows. An
    engine holds a line back while an interactive request waits there for its first token.
    """

    def __init__(
        self, router: DispatchDriver, parse: Callable[[ClientRequest], ParsedRequest], passing: HeaderForwarding
    ) -> None:
        """parse: what the router reads of a request; raises TokenyardError for one that it refuses.

        Raises ConfigError for a folder that cannot be used.
        """
        settings = router.settings
        self._router, self._parse, self._passing = router, parse, passing
        self._budget = LineBudget()
        folder = Path(settings.file_storage_path).expanduser()
        self._kept = BatchApi(folder, int(settings.max_file_storage_mb * 1e6), self._ask, self)

    def start(self) -> None:
        """Go on with the batches that an earlier process has left."""
        self._kept.runner.start()

    async def close(self) -> None:
        """Stop. Lines that are open are asked again by the next process."""
        await self._kept.runner.close()

    # What clients ask for.

    def upload(self, front: ClientConnection, request: ClientRequest) -> "UploadBody":
        """What reads the body of a new file, given its head. Raises TokenyardError."""
        grant = self._grant(request)
        content_type = request.get(b"content-type").decode("latin-1")
        return UploadBody(UploadStream(self._kept.upload(grant.tenant, content_type)), front)

    async def uploaded(self, body: BodyReader) -> tuple[int, dict[str, Any]]:
        """The answer to an upload that has arrived. Raises TokenyardError."""
        return 200, await cast(UploadBody, body).finish()

    def answer(self, request: ClientRequest) -> dict[str, Any] | Path:
        """The JSON content of the answer to a request, or the file with it. Raises TokenyardError."""
        grant, kept = self._grant(request), self._kept
        query = dict(parse_qsl(request.target.partition(b"?")[2].decode("latin-1")))
        kind, name, verb, *rest = [*request.path.removeprefix("/v1/").split("/"), "", ""]
        method = "GET" if request.method == b"HEAD" else request.method.decode()
        match (method, kind, bool(name), verb, rest):
            case ("GET", "files", False, "", [] | [""]):
                names = {"purpose": query.get("purpose", ""), "order": query.get("order", "desc")}
                limit, after = _limit(query, MAX_FILES_A_PAGE), query.get("after", "")
                return kept.list_files(grant.tenant, limit=limit, after=after, **names)
            case ("GET", "files", True, "", _):
                return kept.file(grant.tenant, name).public()
            case ("GET", "files", True, "content", _):
                return kept.content(grant.tenant, name)
            case ("DELETE", "files", True, "", _):
                return kept.delete_file(grant.tenant, name)
            case ("POST", "batches", False, "", _):
                return kept.create(grant.tenant, _batch_fields(request.body), grant.models)
            case ("GET", "batches", False, "", _):
                limit = _limit(query, BATCHES_A_PAGE)
                return kept.list_batches(grant.tenant, limit=limit, after=query.get("after", ""))
            case ("GET", "batches", True, "", _):
                return kept.batch(grant.tenant, name).public()
            case ("POST", "batches", True, "cancel", _):
                return kept.cancel(grant.tenant, name)
        what = f"there is nothing at this path: {method} {request.path}"
        raise RouterError(404, what, code="not_found")

    def _grant(self, request: ClientRequest) -> KeyGrant:
        """Whose files a request is about, and which models its batches may name. Raises TokenyardError."""
        settings, keys = self._router.settings, self._router.keys
        if keys is not None:
            key = tenant_key(request, settings, keys, time.time())
            if key is not None:
                return key.grant
        else:
            check_access(request, settings, admin=False)
            if not settings.api_key:
                check_site(request, loopback_only=is_loopback(settings.host))
        return KeyGrant(request.get(b"x-tenant").decode("latin-1"))

    # The room for lines: see `batch_runner.Room`.

    @property
    def closing(self) -> bool:
        """Whether the router shuts down."""
        return self._router.draining

    def adapt(self) -> None:
        """Do nothing: engines hold lines back themselves."""

    async def free(self, open_lines: int) -> int:
        """How many further lines may start."""
        if self._router.queue:
            return 0
        most = self._router.settings.max_concurrent_requests
        left = int(SHARE * most) - open_lines if most else LINES_AT_ONCE
        targets = (target for worker in self._router.workers if worker.healthy for target in worker.targets)
        return min(LINES_AT_ONCE, left, sum(self._spare(target) for target in targets))

    def started(self, rid: str) -> None:
        """A line starts."""

    def ended(self, rid: str) -> None:
        """A line has ended."""

    def _spare(self, target: HttpTarget) -> int:
        """How many lines may start at a target."""
        state = target.state
        lines = self._budget.max_lines(state.room, state.kv_tokens, state.context_tokens)
        rows = state.room - state.requests if state.room else lines
        return max(min(lines - target.levels[LINE_PRIORITY], rows), 0)

    # Lines.

    async def _ask(self, batch: Batch, rid: str, body: dict[str, Any]) -> tuple[int, bytes]:
        """Answer a line at the worker that the policy chooses; see `batch_runner.Ask`."""
        router, path = self._router, batch.endpoint
        headers: Headers = [JSON_TYPE, (b"x-priority", b"batch")]
        # HTTP/1.0, so that the answer comes without chunks.
        request = ClientRequest(b"POST", path.encode(), headers, True, True, orjson.dumps(body), path)
        request.request_id = rid.encode()
        try:
            parsed = self._parse(request)
            for param in ("model", "lora_path"):
                if batch.models and (body.get(param) or param == "model") and body.get(param) not in batch.models:
                    what = f"name a model that the key of this batch may use: {', '.join(batch.models)}"
                    raise RouterError(403, what, code="not_allowed", param=param)
        except TokenyardError as error:
            return status_of(error), error_body(error, path)
        parsed.priority, parsed.tenant = LINE_PRIORITY, batch.tenant
        parsed.session, parsed.deadline_ns = "", None
        if not any(map(self._spare, router.workers.eligible(parsed.model, parsed.rank, router.now_ns()))):
            raise NoRoomError
        kind = DisaggExchange if router.workers.has_disagg_workers and path in DISAGG_PATHS else Exchange
        answer = _LineAnswer()
        exchange = kind(router, self._passing, answer, request, parsed)
        exchange.added_headers = [(LINE_HEADER, b"1")]
        if batch.tenant:
            exchange.added_headers.append((TENANT_HEADER, batch.tenant.encode("latin-1", "replace")))
            exchange.used_by = batch.tenant
        router.arrived(exchange)
        try:
            status, data = await answer.done
        finally:
            exchange.client_gone()
        prompt, _, output = exchange.tokens_used()
        self._budget.line_ended(prompt + output)
        return status, data


class _LineAnswer(ResponseWriter):
    """The answer to a line. done: its status and body."""

    def __init__(self) -> None:
        self.paused = False
        self.done: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self._status, self._parts = 502, list[bytes]()

    @override
    def begin(self, first_line: bytes, headers: Headers, more: bytes = b"") -> None:
        self._status = int(first_line.split(b" ", 2)[1])
        self._parts = [more]

    @override
    def write(self, data: bytes) -> None:
        self._parts.append(data)

    @override
    def end(self, *, keep: bool = True) -> None:
        if not self.done.done():
            self.done.set_result((self._status, b"".join(self._parts)))

    @override
    def answer(self, status: int, body: bytes, headers: Headers | None = None) -> None:
        self._status, self._parts = status, [body]
        self.end()

    @override
    def fail(self, error: TokenyardError, path: str = "") -> None:
        self.answer(status_of(error), error_body(error, path))

    @override
    def abort(self) -> None:
        self.answer(502, b"")


class UploadBody(BodyReader):
    """Writes the body of an upload to disk while it arrives. The client waits while a piece is written."""

    max_bytes = MAX_FORM_BYTES

    def __init__(self, stream: UploadStream, front: ClientConnection) -> None:
        self._stream, self._front = stream, front
        self._pieces: list[bytes] = []
        self._writing: asyncio.Task[None] | None = None

    @override
    def feed(self, data: bytes) -> None:
        self._pieces.append(data)
        if self._writing is None:
            self._front.transport.pause_reading()
            self._writing = asyncio.ensure_future(self._write())

    async def _write(self) -> None:
        try:
            while self._pieces:
                data, self._pieces = b"".join(self._pieces), []
                await self._stream.add(data)
        except TokenyardError as error:
            self._front.refuse(error)
        finally:
            self._writing = None
            self._front.progress += 1
            if not self._front.transport.is_closing():
                self._front.transport.resume_reading()

    @override
    def broken(self) -> None:
        self._pieces = []
        self._closing = asyncio.ensure_future(self._close())

    async def finish(self) -> dict[str, Any]:
        """All bytes are there: the file object. Raises TokenyardError."""
        try:
            if self._writing is not None:
                await self._writing
            return (await self._stream.finish()).public()
        finally:
            await self._stream.close()

    async def _close(self) -> None:
        if self._writing is not None:
            await asyncio.wait([self._writing])
        await self._stream.close()


class FileSender(ClientHandler):
    """Sends a file as a response, as fast as the client reads."""

    def __init__(self, front: ClientConnection, path: Path) -> None:
        self._front, self._path = front, path
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._task = asyncio.ensure_future(self._send())

    async def _send(self) -> None:
        front, request = self._front, self._front.current
        try:
            file = await asyncio.to_thread(self._path.open, "rb")
        except OSError:
            front.fail(RouterError(404, "the file is gone", code="not_found"))
            return
        with file:
            size = os.fstat(file.fileno()).st_size
            kind, length = (b"content-type", b"application/octet-stream"), (b"content-length", b"%d" % size)
            front.begin(status_line(200), [kind, length])
            try:
                while request is not None and request.method != b"HEAD":
                    data = await asyncio.to_thread(file.read, READ_BYTES)
                    if not data:
                        break
                    await self._flowing.wait()
                    front.write(data)
            except OSError as error:
                log.error("%s cannot be read: %s", self._path, error)
                front.abort()
                return
        front.end()

    @override
    def client_gone(self) -> None:
        self._task.cancel()

    @override
    def pause(self) -> None:
        self._flowing.clear()

    @override
    def resume(self) -> None:
        self._flowing.set()


def _limit(query: Mapping[str, str], default: int) -> int:
    """The page size that a query asks for. Raises InvalidRequestError unless it is a number."""
    text = query.get("limit", "")
    if text and not (text.isascii() and text.isdigit() and len(text) < 10):
        raise InvalidRequestError("limit must be a number", param="limit")
    return int(text) if text else default


def _batch_fields(body: bytes) -> BatchFields:
    """The body of `POST /v1/batches`. Raises InvalidRequestError that names the field at fault."""
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"the body is no JSON: {error.msg}", code="invalid_json") from None
    if not isinstance(content, dict):
        raise InvalidRequestError("the body must be a JSON object", code="invalid_json")
    for name in ("input_file_id", "endpoint", "completion_window"):
        if not isinstance(content.get(name), str):
            raise InvalidRequestError(f"the field {name!r} must be a string", param=name)
    for name in ("metadata", "output_expires_after"):
        if not isinstance(content.get(name), dict | None):
            raise InvalidRequestError(f"the field {name!r} must be an object", param=name)
    return msgspec.convert(content, BatchFields)
