"""Sends requests at their times and reads every stream."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from tokenyard.base import ConfigError
from tokenyard.bench.backends import RequestBackend, RequestFuncOutput
from tokenyard.bench.datasets import DatasetRow

REQUEST_TIMEOUT_S = 6 * 3600.0
READ_BUFFER_BYTES = 1 << 20
MAX_ERROR_CHARS = 300


class ServerClient:
    """A server under load. Use it as an async context manager."""

    def __init__(self, base_url: str, headers: dict[str, str]) -> None:
        """Raises ConfigError for a URL without http:// or https://."""
        if not base_url.startswith(("http://", "https://")):
            raise ConfigError(f"{base_url!r} is no URL of a server; write it as http://HOST:PORT")
        self.base_url = base_url.rstrip("/")
        self._headers = headers
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> "ServerClient":
        self._session = await self._stack.enter_async_context(
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S),
                read_bufsize=READ_BUFFER_BYTES,
                headers=self._headers,
            )
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def get(self, path: str) -> Any:
        """JSON of a path, None if the server has nothing there. Raises ConfigError if there is no server."""
        try:
            async with self._session.get(self.base_url + path) as reply:
                return orjson.loads(await reply.read()) if reply.status == 200 else None
        except (aiohttp.ClientError, orjson.JSONDecodeError, ValueError) as error:
            raise ConfigError(f"{self.base_url}{path}: {error}; is a server running there?") from error

    async def text(self, path: str) -> str:
        """The text of a path, "" if the server has nothing there."""
        try:
            async with self._session.get(self.base_url + path) as reply:
                return await reply.text() if reply.status == 200 else ""
        except aiohttp.ClientError:
            return ""

    async def flush_cache(self) -> None:
        """Empty the server's prefix cache. Raises ConfigError if it refuses."""
        async with self._session.post(self.base_url + "/flush_cache") as reply:
            if reply.status != 200:
                raise ConfigError(f"--flush-cache: {_reason(reply.status, await reply.read())}")

    async def stream(self, backend: RequestBackend, prompt: DatasetRow) -> RequestFuncOutput:
        """Send one request and read its stream to the end. An error goes into the answer's `error`."""
        answer = RequestFuncOutput(service_class=prompt.service_class, prompt_tokens=prompt.prompt_tokens)
        body = orjson.dumps(backend.body(prompt))
        headers = {"Content-Type": "application/json"} | ({"X-Session-Id": prompt.session} if prompt.session else {})
        begin = time.perf_counter()
        try:
            async with self._session.post(self.base_url + backend.path, data=body, headers=headers) as reply:
                if reply.status != 200:
                    answer.error = _reason(reply.status, await reply.read())
                    return answer
                await _read(reply.content, backend, answer, begin)
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
            answer.error = f"{type(error).__name__}: {error}"
        return answer


async def _read(
    content: aiohttp.StreamReader, backend: RequestBackend, answer: RequestFuncOutput, begin: float
) -> None:
    """Read all events of a stream into `answer`; a stream that ends without [DONE] is an error."""
    async for event in server_sent_events(content):
        if event == b"[DONE]":
            return
        fields = orjson.loads(event)
        if fields.get("error"):
            answer.error = _message(fields)
            return
        if new := backend.read(fields, answer):
            answer.arrived(time.perf_counter() - begin, new)
    answer.error = answer.error or "the stream ended before its end"


async def server_sent_events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The data of each event; comments and other fields are skipped."""
    async for line in content:
        if line.startswith(b"data:"):
            yield line[5:].strip()


def _reason(status: int, body: bytes) -> str:
    """The status and message of an answer other than 200, in a few words."""
    try:
        return f"{status}: {_message(orjson.loads(body))}"
    except orjson.JSONDecodeError:
        return f"{status}: {body.decode('utf-8', 'replace')[:MAX_ERROR_CHARS]}"


def _message(fields: Any) -> str:
    """The message of an error's body, nested as OpenAI's or flat."""
    error = fields.get("error", fields) if isinstance(fields, dict) else fields
    text = error.get("message", error) if isinstance(error, dict) else error
    return str(text)[:MAX_ERROR_CHARS]


@dataclass(frozen=True, slots=True)
class BenchResult:
    """The result of a run. `duration_s` counts from the first request to the end of the last answer."""

    answers: list[RequestFuncOutput]
    duration_s: float


async def run_load(
    target: ServerClient,
    backend: RequestBackend,
    prompts: Sequence[DatasetRow],
    arrivals_s: Sequence[float],
    *,
    max_concurrency: int | None,
    on_done: Callable[[], None] = lambda: None,
) -> BenchResult:
    """Send each prompt at its time and wait for all answers.

    The load is open: a slow server does not delay the next request, unless `max_concurrency` requests are in flight. A
    request that waits for that is timed from when it is sent. An answer's `late_s` is the delay until it was sent.
    """
    gate = asyncio.Semaphore(max_concurrency or len(prompts))
    begin = time.perf_counter()

    async def one(prompt: DatasetRow, arrival_s: float) -> RequestFuncOutput:
        await asyncio.sleep(arrival_s - (time.perf_counter() - begin))
        async with gate:
            sent_s = time.perf_counter() - begin
            answer = await target.stream(backend, prompt)
        answer.sent_s, answer.late_s = sent_s, sent_s - arrival_s
        on_done()
        return answer

    answers = await asyncio.gather(*(one(prompt, at) for prompt, at in zip(prompts, arrivals_s, strict=True)))
    return BenchResult(list(answers), time.perf_counter() - begin)
