"""The routes that the router serves itself: probes, models, workers, metrics, its page, and requests to all workers."""

import asyncio
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import orjson
from typing_extensions import override

from tokenyard.base import ConfigError, InvalidRequestError, TokenyardError
from tokenyard.base.model_cards import list_of_models
from tokenyard.base.version import __version__
from tokenyard.batch.batch_api import FLAG
from tokenyard.router.access import audit, check_access, tenant_key
from tokenyard.router.batches import FileSender, RouterBatches
from tokenyard.router.client_connection import (
    JSON_TYPE,
    UPLOAD_PATH,
    ClientConnection,
    ClientHandler,
    ClientRequest,
)
from tokenyard.router.dispatch_driver import Answer, DispatchDriver
from tokenyard.router.errors import RouterError, refusal
from tokenyard.router.health import ask
from tokenyard.router.workers import HttpWorker
from tokenyard.routing.dispatch import NO_WORKER
from tokenyard.ui.files import HEADERS, ROUTER_PAGE, read_file

JSON_LINES_TYPE = (b"content-type", b"application/x-ndjson")
PROMETHEUS = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
OPEN_PATHS = frozenset({"/health", "/live", "/ready", "/readiness", "/liveness", "/ping", "/metrics"})
FAN_OUT_TIMEOUT_S = 10.0
WEIGHTS_TIMEOUT_S = 3600.0
FAN_OUT = {
    "/flush_cache": FAN_OUT_TIMEOUT_S,
    "/abort_request": FAN_OUT_TIMEOUT_S,
    "/pause_generation": FAN_OUT_TIMEOUT_S,
    "/continue_generation": FAN_OUT_TIMEOUT_S,
    "/pause": FAN_OUT_TIMEOUT_S,
    "/resume": FAN_OUT_TIMEOUT_S,
    "/update_weights_from_disk": WEIGHTS_TIMEOUT_S,
}
"""Paths that go to all workers, and how long a worker may take."""

KEPT = ("/v1/files", "/v1/batches")
"""Paths of what the router keeps on its disk."""

EMPTY_CACHE = ("/flush_cache", "/update_weights_from_disk", "/pause")
"""Those of them after which a worker has nothing in its cache that a request can use; by default, for `/pause`."""

PAGE_HEADERS = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
PLAIN = frozenset({"/v1/models", "/models", "/version", "/get_loads", "/v1/loads"})
OWN_PATHS = OPEN_PATHS | FAN_OUT.keys() | PLAIN | {"/workers", "/usage", "/server_info", "/get_server_info"}


class Control:
    """Answers the requests that are for the router itself. docs/router.md lists the paths."""

    def __init__(self, router: DispatchDriver, batches: RouterBatches | None) -> None:
        self._router, self._batches = router, batches

    def takes(self, request: ClientRequest) -> bool:
        """Whether a request is for the router itself."""
        path = request.path
        own = ("/workers/", "/v1/models/", *KEPT)
        return path in OWN_PATHS or path in self._router.own_routes or path.startswith(own) or _is_page(request)

    def answer(self, front: ClientConnection, request: ClientRequest) -> ClientHandler | None:
        """Answer it. Raises TokenyardError for an invalid request."""
        router, path = self._router, request.path
        if path == "/metrics":
            text = router.metrics.exposition(router.machine, open_requests=len(router.exchanges))
            front.answer(200, text, [PROMETHEUS])
            return None
        if _is_page(request):
            # The files of the page need no key: the page itself calls /metrics and /workers.
            name, content_type = ROUTER_PAGE[path]
            front.answer(200, read_file(name), [(b"content-type", content_type.encode()), *PAGE_HEADERS])
            return None
        if path.startswith(KEPT):
            return self._kept(front, request)
        if path in OPEN_PATHS:
            self._probe(front, path)
            return None
        route = router.own_routes.get(path)
        free = not route.admin if route else path in PLAIN or path.startswith("/v1/models/")
        if free and router.keys is not None:
            tenant_key(request, router.settings, router.keys, time.time())
        else:
            check_access(request, router.settings, admin=not free)
            audit(request, admin=not free)
        if path == "/usage" and b"format=csv" in request.target:
            front.answer(200, router.metrics.usage_csv(), [(b"content-type", b"text/csv; charset=utf-8")])
            return None
        if route is not None:
            if request.method != route.method:
                raise _wrong_method(request)
            status, content = route.answer(request)
        else:
            status, content = self._plain(request) if free else self._admin(request)
        if isinstance(content, Awaitable):
            return _Task(front, content)
        if isinstance(content, bytes):
            front.answer(status, content, [JSON_LINES_TYPE])
        else:
            front.answer(status, orjson.dumps(content), [JSON_TYPE])
        return None

    def _kept(self, front: ClientConnection, request: ClientRequest) -> ClientHandler | None:
        """Answer a request about files or batches."""
        batches = self._batches
        if batches is None:
            message = f"this router keeps no files and batches; start it with {FLAG} FOLDER"
            raise RouterError(404, message, code="not_found")
        upload = request.upload
        if upload is None and request.path == UPLOAD_PATH and request.method == b"POST":
            # Its body was kept while its key was checked.
            upload = batches.upload(front, request)
            upload.feed(request.body)
        if upload is not None:
            return _Task(front, batches.uploaded(upload))
        content = batches.answer(request)
        if isinstance(content, Path):
            return FileSender(front, content)
        front.answer(200, orjson.dumps(content), [JSON_TYPE])
        return None

    def _probe(self, front: ClientConnection, path: str) -> None:
        """/health always succeeds; /ready fails while the router drains or has no healthy worker."""
        if path in ("/ready", "/readiness"):
            why = self._router.why_not_ready()
            front.answer(503 if why else 200, why.encode(), [(b"retry-after", b"1")] if why else [])
        else:
            front.answer(200, b"")

    def _plain(self, request: ClientRequest) -> Answer:
        path = request.path
        if path == "/version":
            return 200, {"version": __version__}
        if path in ("/get_loads", "/v1/loads"):
            return 200, {"object": "list", "data": [row for worker in self._router.workers for row in _loads(worker)]}
        if request.method not in (b"GET", b"HEAD"):
            raise _wrong_method(request)
        cards = self._router.model_cards()
        if path in ("/v1/models", "/models"):
            return 200, list_of_models([*cards.values()])
        name = path.removeprefix("/v1/models/")
        if name not in cards:
            raise RouterError(404, f"the model {name!r} is not served", code="model_not_found", param="model")
        return 200, cards[name]

    def _admin(self, request: ClientRequest) -> Answer:
        path, router = request.path, self._router
        if path in FAN_OUT:
            return 200, self._fan_out(request)
        if path == "/usage":
            return 200, {"usage": router.metrics.usage_rows()}
        if path in ("/server_info", "/get_server_info"):
            return 200, {"version": __version__, "policy": router.policy.name, "workers": len(router.workers)}
        if request.method != b"GET" and router.settings.processes > 1:
            what = "the router runs several processes and a request reaches only one of them; use --worker-file"
            raise RouterError(409, what, code="several_processes")
        if path == "/workers":
            return self._workers(request)
        name, _, verb = unquote(path.removeprefix("/workers/")).rpartition("/")
        if verb not in ("drain", "resume") or not name:
            name, verb = unquote(path.removeprefix("/workers/")), ""
        worker = router.workers.find(name)
        if worker is None:
            raise RouterError(404, "unknown worker; GET /workers lists the workers", code="no_such_worker")
        return self._worker(request, worker, verb)

    def _workers(self, request: ClientRequest) -> Answer:
        router = self._router
        if request.method == b"GET":
            return 200, {"workers": [_describe(worker) for worker in router.workers]}
        if request.method != b"POST":
            raise _wrong_method(request)
        try:
            fields = orjson.loads(request.body)
        except orjson.JSONDecodeError:
            fields = None
        url = fields.get("url") if isinstance(fields, dict) else None
        role = fields.get("role") or "" if isinstance(fields, dict) else ""
        if not isinstance(url, str) or not isinstance(role, str):
            raise InvalidRequestError('the body must be {"url": "http://host:port"}', param="url")
        try:
            worker = router.add_worker(url, "api", role)
        except ConfigError as error:
            exists = "already exists" in error.message
            raise RouterError(409 if exists else 400, error.message, code="worker_refused", param="url") from None
        return 202, _describe(worker)

    def _worker(self, request: ClientRequest, worker: HttpWorker, verb: str) -> Answer:
        """One worker: GET describes it, DELETE removes it, POST drain and resume stop and start new requests to it."""
        router, method = self._router, request.method
        if verb and method == b"POST":
            router.drain_worker(worker, draining=verb == "drain")
        elif not verb and method == b"DELETE":
            router.remove_worker(worker)
        elif verb or method != b"GET":
            raise _wrong_method(request)
        return 200, _describe(worker)

    async def _fan_out(self, request: ClientRequest) -> Answer:
        """Send the request to all healthy workers; 200 if all of them succeed, 400 if all of them say that it is wrong,
        else 502. Raises RouterError if there is no such worker.
        """
        router = self._router

        async def one(worker: HttpWorker) -> dict[str, Any]:
            path, method = request.target.decode("latin-1"), request.method.decode()
            try:
                status, body = await ask(
                    worker, path, FAN_OUT[request.path], method=method, body=request.body, headers=router.worker_headers
                )
            except OSError as error:
                return {"worker": worker.name, "status": None, "message": str(error) or "no answer came in time"}
            if status >= 300:
                return {"worker": worker.name, "status": status, "message": _refusal(body)}
            if request.path in EMPTY_CACHE:
                router.workers.flushed(worker)
            return {"worker": worker.name, "status": status}

        replies = await asyncio.gather(*(one(worker) for worker in router.workers if worker.healthy))
        if not replies:
            raise refusal(NO_WORKER)
        good = not any("message" in row for row in replies)
        wrong = all(row["status"] == 400 for row in replies)
        return 200 if good else 400 if wrong else 502, {"success": good, "workers": replies}


class _Task(ClientHandler):
    """A response that is awaited."""

    def __init__(self, front: ClientConnection, making: Awaitable[Answer]) -> None:
        self._task = asyncio.ensure_future(self._run(front, making))

    async def _run(self, front: ClientConnection, making: Awaitable[Answer]) -> None:
        try:
            status, content = await making
        except TokenyardError as error:
            front.fail(error)
            return
        front.answer(status, orjson.dumps(content), [JSON_TYPE])

    @override
    def client_gone(self) -> None:
        self._task.cancel()

    @override
    def pause(self) -> None:
        return

    @override
    def resume(self) -> None:
        return


def _refusal(body: bytes) -> str:
    """The reason in the body of an engine's error: Tokenyard's, vLLM's and SGLang's, else how it begins."""
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError:
        found = None
    if isinstance(found, dict):
        error = found.get("error")
        for said in (error.get("message") if isinstance(error, dict) else error, found.get("message")):
            if isinstance(said, str):
                return said
    return body[:200].decode("utf-8", "replace")


def _is_page(request: ClientRequest) -> bool:
    return request.path in ROUTER_PAGE and request.method in (b"GET", b"HEAD")


def _wrong_method(request: ClientRequest) -> RouterError:
    return RouterError(405, f"this path does not take {request.method.decode()}", code="method_not_allowed")


def _describe(worker: HttpWorker) -> dict[str, Any]:
    return {
        "id": worker.name,
        "url": str(worker.url),
        "state": worker.state,
        "source": worker.source,
        "role": worker.role or "both",
        "models": sorted(worker.models),
        "restarts": worker.restarts,
        "open_requests": worker.open_requests,
        "targets": _loads(worker),
    }


def _loads(worker: HttpWorker) -> list[dict[str, Any]]:
    return [
        {
            "target": target.name,
            "dp_rank": target.rank,
            "requests": target.state.requests,
            "prefill_tokens": round(target.state.prefill_tokens),
            "context_tokens": round(target.state.context_tokens),
            "cache_credit": round(target.state.credit, 3),
            "slowness": round(target.state.slowness, 3),
            "breaker": target.breaker.state,
        }
        for target in worker.targets
    ]
