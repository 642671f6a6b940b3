"""Workers that do what a test wants, a router in front of them, and a client: all on loopback, in one event loop."""

import asyncio
import contextlib
import json
from dataclasses import dataclass, field

from tokenyard.router.proxy import Router
from tokenyard.router.router_settings import RouterSettings

FAST = {
    "health_check_interval_secs": 0.05,
    "connect_timeout_secs": 1.0,
    "initial_backoff_ms": 1.0,
    "max_backoff_ms": 5.0,
}


@dataclass
class Asked:
    """A request as a worker got it."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    raw_head: bytes

    @property
    def json(self):
        return json.loads(self.body)


def answer(body, status=200, headers=(), content_type="application/json"):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} Status", f"Content-Type: {content_type}", f"Content-Length: {len(data)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST = b"0\r\n\r\n"


def chunk(data):
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(fields):
    return chunk(b"data: " + json.dumps(fields, separators=(",", ":")).encode() + b"\n\n")


DONE = chunk(b"data: [DONE]\n\n")


@dataclass
class FakeWorker:
    """An OpenAI-compatible worker. `on_request(asked, writer)` may answer in its own way; without it, or if it returns
    False, the answer names the worker.
    """

    name: str = "w"
    models: tuple[str, ...] = ("m",)
    info: dict = field(default_factory=dict)
    on_request: object = None
    delay_s: float = 0.0
    health: int = 200
    port: int = 0
    owner: str = "me"
    asked: list[Asked] = field(default_factory=list)
    open_connections: int = 0

    async def __aenter__(self):
        await self.start()
        return self

    async def __aexit__(self, *_):
        await self.stop()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    async def start(self):
        self._writers = set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, limit=1 << 27)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self):
        """Die: stop listening and break all connections."""
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.sleep(0)

    async def _serve(self, reader, writer):
        self._writers.add(writer)
        self.open_connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while await self._one(reader, writer):
                pass
        self.open_connections -= 1
        self._writers.discard(writer)
        writer.close()

    async def _one(self, reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")[:-2]
        method, path, _ = first.split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        asked = Asked(method, path, headers, body, head)
        if path == "/health":
            writer.write(answer({}, self.health))
        elif path == "/v1/models":
            cards = [{"id": name, "object": "model", "owned_by": self.owner} for name in self.models]
            writer.write(answer({"object": "list", "data": cards}))
        elif path in ("/server_info", "/get_server_info"):
            writer.write(answer(self.info) if self.info else answer({}, 404))
        else:
            self.asked.append(asked)
            taken = self.on_request is not None and await self.on_request(asked, writer)
            if taken is False:
                await asyncio.sleep(self.delay_s)
                writer.write(answer({"worker": self.name}))
        await writer.drain()
        return not writer.is_closing() and headers.get("connection") != "close"


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def error(self):
        return self.json["error"]["code"]

    @property
    def events(self):
        """The data of the events of a stream."""
        found = [part.removeprefix(b"data: ") for part in self.body.split(b"\n\n") if part.startswith(b"data: ")]
        return [json.loads(part) if part != b"[DONE]" else "[DONE]" for part in found]


def parse_answer(raw):
    head, _, body = raw.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        parts, rest = [], body
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            length = int(size, 16)
            parts.append(rest[:length])
            assert rest[length : length + 2] == b"\r\n"
            rest = rest[length + 2 :]
            if length == 0:
                assert rest == b""
        body = b"".join(parts)
    return Answer(int(first.split(" ")[1]), headers, body)


@dataclass
class Client:
    """Talks to the router over plain sockets."""

    port: int

    async def raw(self, data, timeout_s=60.0):
        """All bytes that arrive until the router closes."""
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            writer.write(data)
            try:
                return await reader.read()
            finally:
                writer.close()

    def head(self, method, path, headers=(), body=b"", close=True):
        lines = [f"{method} {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}", *headers]
        if close:
            lines.append("Connection: close")
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body

    async def ask(self, method, path, body=None, headers=()):
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        return parse_answer(await self.raw(self.head(method, path, headers, data)))

    async def complete(self, prompt="hello", headers=(), **fields):
        return await self.ask("POST", "/v1/completions", {"prompt": prompt, **fields}, headers)


@contextlib.asynccontextmanager
async def routing(*workers, ready=True, tokenize=None, **settings):
    """A router in front of `workers` (URLs or fakes), and a client of it."""
    router = Router(RouterSettings(**{**FAST, **settings}), tokenize)
    for worker in workers:
        router.add_worker(worker if isinstance(worker, str) else worker.url, "static")
    loop = asyncio.get_running_loop()
    server = await loop.create_server(router.new_connection, "127.0.0.1", 0)

    async def sweep():
        while True:
            await asyncio.sleep(0.02)
            router.sweep()

    task = loop.create_task(sweep())
    try:
        if ready:
            async with asyncio.timeout(5):
                while not all(worker.healthy for worker in router.workers):
                    await asyncio.sleep(0.005)
        yield router, Client(server.sockets[0].getsockname()[1])
    finally:
        task.cancel()
        server.close()
        await router.close()
        for connection in list(router.connections):
            connection.transport.abort()
        router.workers.close()
        await asyncio.sleep(0)
    assert not router.exchanges, "every request must be given back"
    assert all(not target.state.requests for worker in router.workers for target in worker.targets)
