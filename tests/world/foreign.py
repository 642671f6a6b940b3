"""An engine of another make that looks healthy and answers every request wrongly, each time in another way."""

import asyncio
import json
import random
from typing import Any

from tests.world.engine import MODEL, PORT
from tests.world.network import FakeSocket, Process
from tokenyard.config import Settings
from tokenyard.wiring import with_model_folder

STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
WHOLE = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n"
WRONG_ANSWERS = (
    b"",
    b"\x00\xff\xfe\r\n\r\n",
    b"HTTP/1.1 abc OK\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 20000,
    b"HTTP/1.1 500 Internal Server Error\r\nContent-Type: text/html\r\nContent-Length: 6\r\n\r\n<html>",
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 502 Bad Gateway\r\nTransfer-Encoding: chunked\r\n\r\n7\r\npartial",
    STREAM,
    STREAM + b"zz\r\n",
    STREAM + b"ffffffffffffffffffff\r\n",
    STREAM + b"5\r\ndata:",
    STREAM + b"0\r\n\r\n",
    STREAM + b"7\r\ndata: {\r\n9\r\n\x00\x01\n\n\n\ndata\r\n0\r\n\r\n",
    WHOLE,
)
"""What it sends before it closes the connection: no answer, no HTTP, errors, and bodies that are cut off before the
first whole event. Bodies that begin go only to streams that the router follows: the others (several answers, grammars)
cannot be continued once they have begun.
"""


class ForeignEngine:
    """A host with such an engine. It serves the model of the others, with none of their own routes."""

    def __init__(self, world: Any, name: str, rng: random.Random) -> None:
        self.world, self.name, self._rng = world, name, rng
        self._model = with_model_folder(Settings(model_path=MODEL, executor="mock")).served_model_name[0]
        self.process: Process | None = None
        self.answers = 0

    @property
    def url(self) -> str:
        """The address of its server."""
        return f"http://{self.name}:{PORT}"

    def start(self) -> None:
        """Start it."""
        self.process = Process(self.name)
        self.world.spawn(self.process, self._run)

    async def _run(self) -> None:
        await asyncio.start_server(self._serve, sock=FakeSocket(self.name, PORT))  # type: ignore[arg-type]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"GET"):
                    writer.write(self._page(head.split(b" ")[1].decode()))
                    continue
                self.answers += 1
                length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
                fields = json.loads(await reader.readexactly(int(length[15:])))
                followed = fields.get("stream") and fields.get("n") == 1 and not fields.get("regex")
                await asyncio.sleep(self._rng.choice((0.0, 0.3, 3.0)))
                wrong = [answer for answer in WRONG_ANSWERS if followed or not answer.startswith(STREAM)]
                writer.write(self._rng.choice(wrong))
                await asyncio.sleep(self._rng.choice((0.0, 0.1, 2.0)))
                return
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    def _page(self, path: str) -> bytes:
        cards = {"object": "list", "data": [{"id": self._model, "object": "model", "owned_by": "vllm"}]}
        pages = {"/health": {}, "/v1/models": cards}
        body = json.dumps(pages.get(path, {"error": "Not Found"})).encode()
        status = b"200 OK" if path in pages else b"404 Not Found"
        return b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (
            status,
            len(body),
            body,
        )

    def kill(self, *, host: bool = False) -> None:
        """kill -9."""
        assert self.process is not None
        self.world.network.kill(self.process, host=host)

    def left_over(self) -> list[str]:
        """It keeps nothing that counts."""
        return []
