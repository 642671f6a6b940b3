"""Finds prefill engines by their HTTP address or transfer port, and keeps connections to them."""

import http.client
import json
import logging
import socket
import threading
import time
from collections.abc import Callable
from urllib.parse import urlsplit

logger = logging.getLogger(__name__)

TIMEOUT_S = 2.0
MIN_BACKOFF_S = 0.5
MAX_BACKOFF_S = 10.0
TICK_S = 0.25
WARN_INTERVAL_S = 60.0
"""Seconds between two warnings about the same problem with the same engine."""

MAX_RESPONSE_BYTES = 1 << 20
PATH = "/v1/transfer"

Dialled = Callable[[socket.socket, str], None]


class Dialer:
    """A thread that connects to prefill engines. It passes each connected socket and its address to `dialled`.

    urls: engines whose ranks are looked up over HTTP, repeatedly while one of them is not connected. `want` adds a
    single address (host:port).
    """

    def __init__(self, urls: list[str], dialled: Dialled) -> None:
        self._dialled = dialled
        self.on_unreachable: Callable[[str], None] = lambda address: None
        self._pauses = dict.fromkeys(urls, (0.0, MIN_BACKOFF_S))
        self._wanted: set[str] = set()
        self._connected: set[str] = set()
        self._found: dict[str, set[str]] = {url: set() for url in urls}
        self._warned_s: dict[tuple[str, str], float] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dialer", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def want(self, address: str) -> None:
        """Connect to an address soon, unless there is a connection."""
        with self._lock:
            if address not in self._connected:
                self._wanted.add(address)
                self._wake.set()

    def lost(self, address: str, why: str) -> None:
        """Handle the end of the connection to an address; it is dialled again if it belongs to one of the engines."""
        if not address:
            return
        now_s = time.monotonic()
        if now_s - self._warned_s.get((address, why), -WARN_INTERVAL_S) >= WARN_INTERVAL_S:
            self._warned_s = {(address, why): now_s}
            logger.warning("no KV from %s for now: %s", address, why)
        with self._lock:
            self._connected.discard(address)

    def _run(self) -> None:
        while not self._stop.is_set():
            self._wake.wait(TICK_S)
            self._wake.clear()
            with self._lock:
                wanted, self._wanted = self._wanted, set()
            for address in wanted:
                if not self._dial(address):
                    self.on_unreachable(address)
            for url in self._found:
                self._visit(url)

    def _visit(self, url: str) -> None:
        """Look up and dial the ranks of an engine if one of them is not connected and the backoff is over."""
        due_s, pause_s = self._pauses[url]
        now_s = time.monotonic()
        with self._lock:
            complete = bool(self._found[url]) and self._found[url] <= self._connected
        if complete or now_s < due_s:
            return
        # The backoff grows until the engine has been stable for the longest backoff.
        stable = now_s - due_s > MAX_BACKOFF_S and due_s
        pause_s = MIN_BACKOFF_S if stable else pause_s
        self._pauses[url] = now_s + pause_s, min(2 * pause_s, MAX_BACKOFF_S)
        try:
            self._found[url] = set(addresses_of(url))
        except (OSError, ValueError, http.client.HTTPException) as error:
            logger.info("the prefill engine %s does not answer: %s", url, error)
            return
        for address in self._found[url] - self._connected:
            self._dial(address)

    def _dial(self, address: str) -> bool:
        host, _, port = address.rpartition(":")
        try:
            sock = socket.create_connection((host.strip("[]"), int(port)), TIMEOUT_S)
        except (OSError, ValueError, OverflowError) as error:
            logger.info("%s cannot be reached: %s", address, error)
            return False
        with self._lock:
            self._connected.add(address)
        self._dialled(sock, address)
        return True


def addresses_of(url: str) -> list[str]:
    """The transfer addresses (host:port) of an engine's ranks. Raises OSError or HTTPException if it does not answer,
    ValueError for a malformed response.
    """
    parts = urlsplit(url if "//" in url else f"http://{url}")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    if not parts.hostname:
        raise ValueError(f"{url} is no address")
    connection = kind(parts.hostname, parts.port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", parts.path.rstrip("/") + PATH)
        answer = connection.getresponse()
        body = answer.read(MAX_RESPONSE_BYTES)
        if answer.status != 200:
            raise ValueError(f"status {answer.status} for {PATH}")
        ranks = json.loads(body)["ranks"]
        found = [rank["address"] for rank in ranks.values() if rank["address"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"an answer that makes no sense: {error}") from error
    finally:
        connection.close()
    # An engine that listens everywhere is where its HTTP server was found.
    return [address.replace("0.0.0.0:", f"{parts.hostname}:") for address in found]
