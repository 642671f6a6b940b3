"""Limits on the number of connections, and timeouts for idle and slow ones.

A client can hold a connection without making progress: between requests, within a request, or without reading its
answer. Each of these has a timeout, which is shorter while connections are scarce. A few connections beyond the limit
are reserved for probes and metrics.
"""

import os
import resource
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

PROBES = 16
SPARE_FILES = 48
SPARE_SHARE = 1 / 8
"""Descriptors reserved for the rest of the process, and for connections accepted before others have closed."""

MAX_BACKLOG = 2048
MIN_CONNECTIONS = 8
SCARCE_SHARE = 0.75
SCARCE_FACTOR = 0.1
MIN_BODY_BYTES_PER_S = 10_000


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits and timeouts (seconds) of a server's connections.

    max_connections: connections that take any request, 0 for no limit.
    probes: further connections, which take requests for `OPEN_PATHS` only.
    backlog: further connections that may be accepted before closed ones are gone.
    idle_timeout_s: between requests, and before the first.
    head_timeout_s: from the first byte of a request to the end of its headers.
    body_timeout_s: for a body, plus the time that the received bytes take at `MIN_BODY_BYTES_PER_S`.
    unread_timeout_s: for a client that reads nothing of what is written to it.
    """

    max_connections: int = 0
    probes: int = PROBES
    backlog: int = MAX_BACKLOG
    idle_timeout_s: float = 65.0
    head_timeout_s: float = 20.0
    body_timeout_s: float = 60.0
    unread_timeout_s: float = 120.0

    @classmethod
    def of_process(cls) -> "ConnectionLimits":
        """Limits that fit the number of files that this process may open."""
        files = raise_file_limit()
        spare = max(SPARE_FILES, round(SPARE_SHARE * files))
        max_connections = max(MIN_CONNECTIONS, files - _open_files() - spare - PROBES)
        return cls(max_connections=max_connections, backlog=min(MAX_BACKLOG, spare))


def raise_file_limit() -> int:
    """Raise this process's soft limit of open files to the hard limit, and return the limit in force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            return hard
        except (OSError, ValueError):
            return soft
    return soft


def _open_files() -> int:
    try:
        return len(os.listdir("/dev/fd"))
    except OSError:
        return SPARE_FILES


class Connection(Protocol):
    """What `ConnectionSweeper` needs of a connection; `server.http.uvicorn_protocol.HttpProtocol` implements it."""

    transport: Any

    def overdue(self, now: float, factor: float) -> str:
        """The part of a request that is overdue, "" for none. `factor` scales the timeouts."""

    def end(self, waited_for: str) -> None:
        """Close the connection, with an error response where one can be sent."""


class ConnectionSweeper:
    """Ends overdue connections. Called several times a second."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._unread: dict[Connection, tuple[int, float]] = {}

    def run(self, connections: Collection[Connection], now: float, unread_timeout_s: float | None = None) -> None:
        """End overdue connections at `now` (s, monotonic). `unread_timeout_s` overrides that of the limits."""
        self._end_unread(connections, now, unread_timeout_s or self._limits.unread_timeout_s)
        max_connections = self._limits.max_connections
        factor = SCARCE_FACTOR if max_connections and len(connections) > SCARCE_SHARE * max_connections else 1.0
        for connection in list(connections):
            if not connection.transport.is_closing() and (waited_for := connection.overdue(now, factor)):
                connection.end(waited_for)

    def _end_unread(self, connections: Collection[Connection], now: float, timeout_s: float) -> None:
        """Abort connections, and with them their requests, whose clients do not read."""
        before, self._unread = self._unread, {}
        for connection in connections:
            size = connection.transport.get_write_buffer_size()
            if size:
                known, since = before.get(connection, (0, now))
                self._unread[connection] = (size, since if size == known else now)
        for connection, (_, since) in self._unread.items():
            if now - since > timeout_s:
                connection.transport.abort()
