"""Mock workers and a load generator for measuring routers: raw protocols, so that they cost little compared with what
is measured.

As a separate module it is the worker: `python -m benchmarks.router_load PORT...` answers on these ports at once, or
with a stream of `chunks` events `gap_ms` apart where the body asks for one.
"""

import asyncio
import json
import sys
import time
from dataclasses import dataclass, field

import httptools
import uvloop

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
USAGE = {"prompt_tokens": 50, "completion_tokens": 1, "total_tokens": 51}
ANSWER = json.dumps(
    {"id": "x", "choices": [{"index": 0, "text": "ok", "finish_reason": "stop"}], "usage": USAGE}
).encode()
EVENT = b'data: {"id":"cmpl-1","object":"text_completion","model":"mock","choices":[{"index":0,"text":" word"}]}\n\n'
LAST = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
MODELS = json.dumps({"object": "list", "data": [{"id": "mock", "object": "model"}]}).encode()
INFO = json.dumps({"model_path": "mock", "served_model_name": "mock", "tokenizer_path": "mock"}).encode()


def chunk(data):
    return b"%x\r\n%b\r\n" % (len(data), data)


class Worker(asyncio.Protocol):
    """Answers completions, and what routers ask of a worker."""

    def connection_made(self, transport):
        self._transport, self._parser, self._task = transport, httptools.HttpRequestParser(self), None
        self._body, self._url = b"", b""

    def connection_lost(self, exc):
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data):
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.close()  # one router asks first whether a worker speaks HTTP/2

    def on_url(self, url):
        self._url = url

    def on_body(self, body):
        self._body += body

    def on_message_complete(self):
        body, self._body = self._body, b""
        if self._parser.get_method() == b"POST" and self._url.startswith(b"/v1/"):
            fields = json.loads(body)
            if fields.get("stream"):
                self._stream(fields)
                return
            self._write(ANSWER)
        else:
            self._write(MODELS if self._url.startswith(b"/v1/models") else INFO)

    def _write(self, body):
        self._transport.write(HEAD % len(body) + body)

    def _stream(self, fields):
        count, gap_s = fields.get("chunks", 64), fields.get("gap_ms", 0) / 1e3
        if gap_s:
            self._task = asyncio.get_running_loop().create_task(self._paced(count, gap_s))
        else:
            self._transport.write(STREAM)
            for _ in range(count):
                self._transport.write(chunk(EVENT))
            self._transport.write(LAST)

    async def _paced(self, count, gap_s):
        self._transport.write(STREAM)
        due = time.monotonic()
        for _ in range(count):
            due += gap_s
            await asyncio.sleep(max(due - time.monotonic(), 0))
            self._transport.write(chunk(EVENT))
        self._transport.write(LAST)


@dataclass
class Times:
    """What a run of the generator saw, in seconds."""

    first_byte: list = field(default_factory=list)
    total: list = field(default_factory=list)
    errors: int = 0


class Caller(asyncio.Protocol):
    """One connection of the generator: the next request goes out when the last one is answered."""

    def __init__(self, bodies, times, done):
        self._bodies, self._times, self._done = bodies, times, done

    def connection_made(self, transport):
        self._transport = transport
        self._next()

    def _next(self):
        body = next(self._bodies, None)
        if body is None:
            self._transport.close()
            return
        self._parser = httptools.HttpResponseParser(self)
        self._began, self._first = time.perf_counter(), None
        self._transport.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )

    def data_received(self, data):
        self._parser.feed_data(data)

    def on_body(self, body):
        if self._first is None:
            self._first = time.perf_counter() - self._began

    def on_message_complete(self):
        if self._parser.get_status_code() != 200:
            self._times.errors += 1
        else:
            self._times.first_byte.append(self._first)
            self._times.total.append(time.perf_counter() - self._began)
        self._next()

    def connection_lost(self, exc):
        self._done()


async def call(port, bodies, connections):
    """Send all `bodies` over this number of connections and return the times."""
    loop, times, bodies = asyncio.get_running_loop(), Times(), iter(bodies)
    left, finished = connections, loop.create_future()

    def done():
        nonlocal left
        left -= 1
        if not left:
            finished.set_result(None)

    for _ in range(connections):
        await loop.create_connection(lambda: Caller(bodies, times, done), "127.0.0.1", port)
    await finished
    return times


def run(port, bodies, connections):
    """`call` in a separate event loop."""
    return uvloop.run(call(port, bodies, connections))


async def serve(ports):
    loop = asyncio.get_running_loop()
    for port in ports:
        await loop.create_server(Worker, "127.0.0.1", port, backlog=4096)
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve([int(port) for port in sys.argv[1:]]))
