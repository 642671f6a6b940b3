"""Answers the lines of batches, as many at a time as the engine has room for."""

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from tokenyard.batch.batch_store import CANCELLED, EXPIRED, Answer, Batch, BatchStore
from tokenyard.batch.file_store import Clock

logger = logging.getLogger(__name__)

POLL_S = 0.05
SWEEP_S = 60.0
FIRST_RETRY_S, MAX_RETRY_S = 0.5, 30.0
NO_ROOM_S = 0.5
"""When the lines of a batch are tried again after there was nothing free for one."""

TRY_AGAIN = (408, 429, 502, 503, 504)
"""Statuses of a server that is busy or restarts; the line is asked again."""

OWN_FIELDS = ("priority", "service_tier", "deadline_ms", "slo", "rid", "request_id", "tenant")
"""Fields of a body that would change how urgent it is, or whose it is; a batch decides that."""

Ask = Callable[[Batch, str, dict[str, Any]], Awaitable[tuple[int, bytes]]]
"""Answers a line of a batch, given the id of its request and its body: (status, body). Raises NoRoomError where nothing
is free for it.
"""


class NoRoomError(Exception):
    """A line cannot be answered now, as nothing is free for its model."""


class Room(Protocol):
    """How many lines may be open."""

    @property
    def closing(self) -> bool:
        """Whether the server shuts down, so that no line shall be open."""

    def adapt(self) -> None:
        """Hold open lines back while others wait, or let them go on; called again and again while batches run."""

    async def free(self, open_lines: int) -> int:
        """How many further lines may start, with so many open."""

    def started(self, rid: str) -> None:
        """A line starts, as the request with this id."""

    def ended(self, rid: str) -> None:
        """The line with this id has an answer, or is given up."""


@dataclass(eq=False, slots=True)
class _Running:
    """A batch whose lines are answered.

    offsets: where each line begins.
    left: places of lines that are not asked yet, the next one last.
    tasks: of open lines, by place.
    failures: how often lines in a row met a busy server.
    retry_s: when lines may start again, on the monotonic clock.
    end_s: when its end is tried again, after its files could not be written.
    """

    batch: Batch
    offsets: list[int]
    left: list[int]
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    failures: int = 0
    retry_s: float = 0.0
    end_s: float = 0.0


class BatchRunner:
    """Runs the batches of a store, the one with the nearest deadline first. Used from one event loop.

    A line is answered once: its answer is on disk before the line counts as answered.
    """

    def __init__(self, store: BatchStore, ask: Ask, room: Room, clock: Clock = time.time) -> None:
        self._store, self._ask, self._room, self._clock = store, ask, room, clock
        self._running: dict[str, _Running] = {}
        self._checking: dict[str, asyncio.Task[None]] = {}
        self._writing = asyncio.Lock()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Go on with what an earlier process has left."""
        self._task = asyncio.ensure_future(self._run())

    async def close(self) -> None:
        """Stop. Lines that are open are asked again by the next process."""
        tasks = [task for running in self._running.values() for task in running.tasks.values()]
        tasks += self._checking.values()
        if self._task is not None:
            tasks.append(self._task)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def wake(self) -> None:
        """A batch was created or cancelled."""
        self._wake.set()

    @property
    def open_lines(self) -> int:
        """Lines that are being answered."""
        return sum(len(running.tasks) for running in self._running.values())

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            try:
                await self._advance()
            except Exception:
                logger.exception("batches stopped for a moment; they go on")
            wait_s = POLL_S if self._running else SWEEP_S
            # Not wait_for, which before Python 3.12 loses a cancellation that comes as the event is set.
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()

    async def _advance(self) -> None:
        if self._room.closing:
            for running in self._running.values():
                for task in running.tasks.values():
                    task.cancel()
            return
        for batch in self._store.open():
            if batch.id not in self._running and batch.id not in self._checking:
                self._checking[batch.id] = asyncio.ensure_future(self._begin(batch))
        now = self._clock()
        for running in list(self._running.values()):
            if time.monotonic() < running.end_s:
                continue
            try:
                await self._end_if_due(running, now)
            except OSError as error:
                logger.error("batch %s cannot be ended; it is tried again: %s", running.batch.id, error)
                running.end_s = running.retry_s = time.monotonic() + MAX_RETRY_S
        if self._running:
            self._room.adapt()
        await self._start_lines()

    async def _end_if_due(self, running: _Running, now: float) -> None:
        batch = running.batch
        if batch.status == "cancelling":
            await self._give_up(running, "cancelled", CANCELLED)
        elif now >= batch.expires_at:
            await self._give_up(running, "expired", EXPIRED)
        elif not running.left and not running.tasks:
            await self._finish(running, {})

    async def _begin(self, batch: Batch) -> None:
        """Check a batch, or find where it was."""
        try:
            await self._check(batch)
        except OSError as error:
            logger.error("batch %s cannot begin; it is tried again: %s", batch.id, error)
            await asyncio.sleep(MAX_RETRY_S)
        finally:
            del self._checking[batch.id]
            self._wake.set()

    async def _check(self, batch: Batch) -> None:
        batch.errors = []
        offsets = await asyncio.to_thread(self._store.validate, batch)
        if batch.errors:
            self._store.move(batch, "failed")
            logger.info("batch %s failed: %s", batch.id, batch.errors[0].message)
            return
        answers = await asyncio.to_thread(self._store.answers, batch)
        batch.total = len(offsets)
        _count(batch, answers)
        if batch.status == "validating":
            self._store.move(batch, "in_progress")
        left = [place for place in reversed(range(len(offsets))) if place not in answers]
        self._running[batch.id] = _Running(batch, offsets, left)
        logger.info("batch %s: %d of %d lines are left", batch.id, len(left), len(offsets))

    async def _start_lines(self) -> None:
        now = time.monotonic()
        ready = [running for running in self._running.values() if running.left and now >= running.retry_s]
        ready.sort(key=lambda running: running.batch.expires_at)
        # A room also lets lines go on that it has held back, so it is asked until the last one has ended.
        free = await self._room.free(self.open_lines) if ready or self.open_lines else 0
        for running in ready:
            while free > 0 and running.left:
                place = running.left.pop()
                running.tasks[place] = asyncio.ensure_future(self._answer(running, place))
                free -= 1

    async def _answer(self, running: _Running, place: int) -> None:
        """Ask one line, and keep its answer."""
        batch, rid = running.batch, f"batch-{uuid.uuid4().hex}"
        self._room.started(rid)
        try:
            content = await asyncio.to_thread(self._line, running, place)
            body = {name: value for name, value in content["body"].items() if name not in OWN_FIELDS}
            status, data = await self._ask(batch, rid, body)
            if status in TRY_AGAIN:
                self._retry(running, place)
                return
            response = {"status_code": status, "request_id": rid, "body": orjson.loads(data)}
            line = {"id": f"batch_req_{rid[6:]}", "custom_id": content["custom_id"], "response": response}
            answer = Answer(place, status < 300, {**line, "error": None})
            await asyncio.shield(self._keep(batch, answer))
            running.failures = 0
            batch.completed += answer.succeeded
            batch.failed += not answer.succeeded
        except NoRoomError:
            running.left.append(place)
            running.retry_s = time.monotonic() + NO_ROOM_S
        except (OSError, ValueError) as error:
            logger.warning("batch %s: line %d is asked again: %s", batch.id, place + 1, error)
            self._retry(running, place)
        finally:
            self._room.ended(rid)
            running.tasks.pop(place, None)
            self._wake.set()

    async def _keep(self, batch: Batch, answer: Answer) -> None:
        async with self._writing:
            await asyncio.to_thread(self._store.add, batch, [answer])

    def _retry(self, running: _Running, place: int) -> None:
        """The server is busy, or the disk full: the line starts again later."""
        running.left.append(place)
        running.failures += 1
        running.retry_s = time.monotonic() + min(FIRST_RETRY_S * 2 ** min(running.failures, 10), MAX_RETRY_S)

    def _line(self, running: _Running, place: int) -> dict[str, Any]:
        """The request of a line. Raises FileNotFoundError if the input was deleted."""
        path = self._store.input_of(running.batch)
        if path is None:
            raise FileNotFoundError("the input file was deleted")
        with path.open("rb") as file:
            file.seek(running.offsets[place])
            content: dict[str, Any] = orjson.loads(file.readline())
            return content

    async def _give_up(self, running: _Running, status: Any, error: dict[str, str]) -> None:
        """End a batch whose lines have not all been answered."""
        tasks = list(running.tasks.items())
        for _, task in tasks:
            task.cancel()
        await asyncio.gather(*(task for _, task in tasks), return_exceptions=True)
        async with self._writing:
            # Answers that were being written when their lines were given up are there.
            answered = await asyncio.to_thread(self._store.answers, running.batch)
        _count(running.batch, answered)
        rest = {}
        for place in range(len(running.offsets)):
            if place not in answered:
                try:
                    name = (await asyncio.to_thread(self._line, running, place))["custom_id"]
                except OSError:
                    break
                line = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": name, "response": None, "error": error}
                rest[place] = line
        await self._finish(running, rest, status)

    async def _finish(self, running: _Running, rest: dict[int, dict[str, Any]], status: Any = "completed") -> None:
        batch = running.batch
        if status == "completed":
            self._store.move(batch, "finalizing")
        await asyncio.to_thread(self._store.finish, batch, status, rest)
        del self._running[batch.id]
        logger.info("batch %s is %s: %d answered, %d failed", batch.id, status, batch.completed, batch.failed)


def _count(batch: Batch, answers: dict[int, Answer]) -> None:
    """Set the counts of a batch to those of its answers."""
    batch.completed = sum(answer.succeeded for answer in answers.values())
    batch.failed = len(answers) - batch.completed
