"""Health checks: whether workers respond, which models and ranks they have, and whether they have restarted."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

import orjson
from typing_extensions import override

from tokenyard.router.http1 import HOP_BY_HOP, ResponseHead, request_head
from tokenyard.router.router_settings import RouterSettings
from tokenyard.router.worker_connection import Body, ResponseReader, UpstreamConnection, body_of
from tokenyard.router.workers import HttpWorker, HttpWorkers
from tokenyard.routing.workers import FAST_PROBE_S

log = logging.getLogger(__name__)

MAX_RESPONSE_BYTES = 8 << 20
MAX_MODELS = 1000
INFO_PATHS = ("/server_info", "/get_server_info")


class _BufferedReader(ResponseReader):
    """Reads a whole response."""

    def __init__(self) -> None:
        self.done: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self._status = 0
        self._parts: list[bytes] = []
        self._size = 0

    @override
    def on_head(self, head: ResponseHead) -> Body | None:
        self._status = head.status
        return body_of(head, unpack=True)

    @override
    def on_body(self, data: bytes, done: bool) -> None:
        self._size += len(data)
        if self._size <= MAX_RESPONSE_BYTES:
            self._parts.append(data)
        if done and not self.done.done():
            self.done.set_result((self._status, b"".join(self._parts)))

    @override
    def on_broken(self, why: str, *, stale: bool) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionError(why))


async def ask(
    worker: HttpWorker,
    path: str,
    timeout_s: float,
    *,
    method: str = "GET",
    body: bytes = b"",
    headers: list[tuple[bytes, bytes]] | None = None,
) -> tuple[int, bytes]:
    """Send one request; returns (status, body). Raises OSError, of which TimeoutError is one, if that fails."""
    target, reader = (worker.url.path + path).encode(), _BufferedReader()
    fields = [(b"connection", b"close"), *(headers or [])]
    head = request_head(method.encode(), target, worker.url.authority.encode(), fields, len(body))
    connection: UpstreamConnection | None = None
    try:
        async with asyncio.timeout(timeout_s):
            connection = await worker.pool.connect()
            connection.send(reader, head + body, keep=False)
            return await reader.done
    finally:
        if connection is not None:
            connection.drop(reader)


class HealthChecker:
    """Checks each worker in its own task, periodically and immediately after a failed request."""

    def __init__(
        self,
        settings: RouterSettings,
        workers: HttpWorkers,
        headers: list[tuple[bytes, bytes]],
        on_change: Callable[[], None],
    ) -> None:
        """`on_change` is called after each probe, as it may have changed workers or their capacity."""
        self._settings, self._workers, self._on_change = settings, workers, on_change
        self._headers = [header for header in headers if header[0] not in HOP_BY_HOP]
        self._tasks: dict[HttpWorker, asyncio.Task[None]] = {}
        self._wake: dict[HttpWorker, asyncio.Event] = {}
        self._asked_s: dict[HttpWorker, float] = {}

    def watch(self, worker: HttpWorker) -> None:
        """Start checking a worker."""
        self._wake[worker] = asyncio.Event()
        self._tasks[worker] = asyncio.get_running_loop().create_task(self._follow(worker))

    def leave(self, worker: HttpWorker) -> None:
        """Stop checking a worker."""
        self._wake.pop(worker, None)
        self._asked_s.pop(worker, None)
        task = self._tasks.pop(worker, None)
        if task is not None:
            task.cancel()

    def check_now(self, worker: HttpWorker) -> None:
        """A request has failed at the worker: check it now."""
        event = self._wake.get(worker)
        if event is not None:
            event.set()

    def check_soon(self, worker: HttpWorker) -> None:
        """The worker is too busy for a request, or it drains: find out which, at most once every `FAST_PROBE_S`."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._asked_s.get(worker, -FAST_PROBE_S) >= FAST_PROBE_S:
            self._asked_s[worker] = now_s
            self.check_now(worker)

    async def close(self) -> None:
        """Stop all checks."""
        for worker in list(self._tasks):
            self.leave(worker)

    async def _follow(self, worker: HttpWorker) -> None:
        event = self._wake[worker]
        while True:
            try:
                wrong = await self._check_worker(worker)
            except Exception:
                log.exception("health check of worker %s failed", worker.name)
                wrong = "the health check failed with an internal error"
            self._update_health(worker, wrong)
            self._on_change()
            # Not wait_for, which before Python 3.12 loses a cancellation that comes as the event is set.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._workers.probe_interval_s(worker)):
                    await event.wait()
            event.clear()

    def _update_health(self, worker: HttpWorker, wrong: str) -> None:
        before = worker.healthy
        self._workers.probed(worker, success=not wrong)
        if worker.healthy and not before:
            log.info("worker %s (%s) is healthy", worker.name, worker.url)
        elif before and not worker.healthy:
            log.warning("worker %s (%s) is unhealthy: %s", worker.name, worker.url, wrong)
        elif worker.healthy is None and worker.bad_probes == self._settings.health_failure_threshold:
            log.warning("worker %s (%s) does not respond yet: %s", worker.name, worker.url, wrong)

    async def _check_worker(self, worker: HttpWorker) -> str:
        """Why the worker is unhealthy, "" if it is healthy. Updates its models, ranks and identity."""
        path = self._settings.health_check_endpoint
        try:
            status, _ = await self._ask(worker, path)
        except ConnectionRefusedError:
            self._workers.down(worker)
            return "connection refused"
        except OSError as error:
            return _reason(error)
        if status not in (200, 404):
            return f"{path} answers {status}"
        if status == 404 and worker.models and worker.open_requests:
            # Servers without this path, such as llama-cpp-python's, may abort a running response to list their models.
            return ""
        try:
            lists_models = await self._learn(worker)
        except OSError as error:
            return _reason(error)
        if worker.refuses:
            return "it was removed"
        return "" if status == 200 or lists_models else f"it has neither {path} nor /v1/models"

    async def _learn(self, worker: HttpWorker) -> bool:
        """Read models, ranks and identity of a worker; returns whether it lists its models."""
        status, body = await self._ask(worker, "/v1/models")
        cards = _object(body).get("data") if status == 200 else None
        if isinstance(cards, list):
            known = [card for card in cards[:MAX_MODELS] if isinstance(card, dict) and isinstance(card.get("id"), str)]
            self._workers.set_cards(worker, known)
        for path in INFO_PATHS:
            status, body = await self._ask(worker, path)
            if status == 200:
                self._workers.set_info(worker, _object(body))
                break
        return isinstance(cards, list)

    async def _ask(self, worker: HttpWorker, path: str) -> tuple[int, bytes]:
        return await ask(worker, path, self._settings.health_check_timeout_secs, headers=self._headers)


def _reason(error: OSError) -> str:
    return "the health check timed out" if isinstance(error, TimeoutError) else error.strerror or str(error)


def _object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`; empty if it is not one."""
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}
