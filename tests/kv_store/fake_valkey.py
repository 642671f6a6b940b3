"""A Valkey of a few commands in a thread of this process, which does what a test wants."""

import socketserver
import threading
from collections.abc import Callable


class FakeValkey:
    """Listens on a free port; keeps strings in `values` by key. `password`: what AUTH must say, "" for anything.

    before: called before each command with its name; it may wait. answer: what is said instead, if not empty.
    """

    def __init__(self, password: bytes = b"") -> None:
        self.values: dict[bytes, bytes] = {}
        self.password = password
        self.asked: list[bytes] = []
        self.before: Callable[[bytes], None] = lambda name: None
        self.answer = b""
        fake = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                fake.serve(self)

        class PrefillPeer(socketserver.ThreadingTCPServer):
            daemon_threads = allow_reuse_address = True
            block_on_close = False

        self._server = PrefillPeer(("127.0.0.1", 0), Handler)
        self.url = f"redis://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def serve(self, client: socketserver.StreamRequestHandler) -> None:
        """Answer one client until it goes."""
        known = not self.password
        while line := client.rfile.readline():
            words = []
            for _ in range(int(line[1:])):
                size = int(client.rfile.readline()[1:])
                words.append(client.rfile.read(size + 2)[:-2])
            self.asked.append(words[0])
            self.before(words[0])
            if words[0] == b"AUTH":
                known = words[-1] == self.password
            said = self._said(words) if known else b"-NOAUTH Authentication required.\r\n"
            client.wfile.write(self.answer or said)

    def _said(self, words: list[bytes]) -> bytes:
        match words:
            case [b"SET", key, value]:
                self.values[key] = value
                return b"+OK\r\n"
            case [b"GET", key]:
                value = self.values.get(key)
                return b"$-1\r\n" if value is None else b"$%d\r\n%b\r\n" % (len(value), value)
            case [b"EXISTS", key]:
                return b":%d\r\n" % (key in self.values)
            case [b"DEL", *keys]:
                return b":%d\r\n" % sum(self.values.pop(key, None) is not None for key in keys)
            case [b"AUTH" | b"SELECT", *_]:
                return b"+OK\r\n"
        return b"-ERR unknown command\r\n"

    def close(self) -> None:
        """Listen no more. Connections that are open stay."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
