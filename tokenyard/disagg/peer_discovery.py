"""Finds prefill engines by their HTTP address or transfer port, and keeps connections to them."""

import http.client
import json
import logging
import socket
import threading
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from tokenyard.disagg.protocol.redial import RedialSchedule

logger = logging.getLogger(__name__)

TIMEOUT_S = 2.0
TICK_S = 0.25
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
        self._schedule = RedialSchedule(urls)
        self._lock = threading.Lock()
        """Guards the schedule."""
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
            if self._schedule.want(address):
                self._wake.set()

    def lost(self, address: str, why: str) -> None:
        """Handle the end of the connection to an address; it is dialled again if it belongs to one of the engines."""
        if not address:
            return
        with self._lock:
            warns = self._schedule.lost(address, why, time.monotonic_ns())
        if warns:
            logger.warning("no KV from %s for now: %s", address, why)

    def _run(self) -> None:
        while not self._stop.is_set():
            self._wake.wait(TICK_S)
            self._wake.clear()
            with self._lock:
                wanted = self._schedule.take_wanted()
            for address in wanted:
                if not self._dial(address):
                    self.on_unreachable(address)
            with self._lock:
                due = self._schedule.due(time.monotonic_ns())
            for url in due:
                self._visit(url)

    def _visit(self, url: str) -> None:
        """Look up the ranks of an engine, and dial those that are not connected."""
        try:
            addresses = addresses_of(url)
        except (OSError, ValueError, http.client.HTTPException) as error:
            logger.info("the prefill engine %s does not answer: %s", url, error)
            return
        with self._lock:
            missing = self._schedule.found(url, addresses)
        for address in missing:
            self._dial(address)

    def _dial(self, address: str) -> bool:
        host, _, port = address.rpartition(":")
        try:
            sock = socket.create_connection((host.strip("[]"), int(port)), TIMEOUT_S)
        except (OSError, ValueError, OverflowError) as error:
            logger.info("%s cannot be reached: %s", address, error)
            return False
        with self._lock:
            self._schedule.connected(address)
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
