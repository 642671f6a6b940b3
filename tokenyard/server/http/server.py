"""The HTTP server process: listens early, drains on the first signal and stops immediately on the second."""

import gc
import logging
import os
import socket
import ssl
import time
from functools import partial
from pathlib import Path
from types import FrameType

import uvicorn

from tokenyard.base import ConfigError
from tokenyard.server.http.app import create_app
from tokenyard.server.http.connections import ConnectionLimits, ConnectionSweeper
from tokenyard.server.http.uvicorn_protocol import HttpProtocol
from tokenyard.server.state import ServerState

log = logging.getLogger(__name__)

BACKLOG = 2048
FINAL_FLUSH_S = 2.0
"""How long aborted requests may take to send their last event."""

STALLED_S = 5.0
"""While the server drains, it waits this long for a client that does not read."""

SWEEP_EVERY = 5
"""Ticks (of 0.1 s) between two sweeps of the connections."""

YOUNG = 1
"""Collects all generations of the garbage collector except the oldest."""

NEVER = 2**31 - 1
DUE_COLLECTIONS = 10
MAX_UNCOLLECTED_S = 600.0
"""A full collection is due after `DUE_COLLECTIONS` of the middle generation, the interpreter's own threshold, but waits
up to `MAX_UNCOLLECTED_S` for a moment without open requests. With thousands of them it takes a quarter of a second, in
which all streams stall, and would run every few seconds.
"""


def listen_at_path(path: str) -> socket.socket:
    """A listening Unix socket at `path`; a stale socket there is replaced.

    Raises ConfigError if it cannot be created, or another server listens there.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if Path(path).is_socket():
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                if probe.connect_ex(path) == 0:
                    raise ConfigError(f"--uds {path}: another server listens there")
            Path(path).unlink()
        listener.bind(path)
        listener.listen(BACKLOG)
        return listener
    except OSError as error:
        raise ConfigError(f"--uds {path}: {error.strerror or error}") from error


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket. Raises ConfigError if the address cannot be bound."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        # The kernel probes silent peers.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return listener
    except OSError as error:
        # The library's message repeats the address.
        number = error.errno or 0
        reason = os.strerror(number) if number > 0 else error.strerror or str(error)
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}; choose another --host or --port") from error


def _load_certificate(config: uvicorn.Config) -> None:
    """Load certificate and key now, as uvicorn does when it starts. Raises ConfigError for invalid files."""
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--ssl-certfile and --ssl-keyfile cannot be used: {error}") from error


class DrainingServer(uvicorn.Server):
    """A server that lets open requests finish for up to `shutdown_timeout_s` seconds before it stops.

    While it drains, /ready and new requests get 503. Requests still open after that are aborted with an error event. A
    second signal stops it immediately. `reason` and `exit_status` are set if something other than a signal ended it.
    """

    def __init__(
        self,
        state: ServerState,
        *,
        shutdown_timeout_s: float,
        limits: ConnectionLimits | None = None,
        certificate: tuple[str, str] | None = None,
    ) -> None:
        """`certificate`: files of a certificate chain and its key, for TLS."""
        limits = limits or ConnectionLimits()
        config = uvicorn.Config(
            create_app(state),
            http=partial(HttpProtocol, limits=limits),  # type: ignore[arg-type]
            ws="none",
            backlog=limits.backlog,
            timeout_keep_alive=round(limits.idle_timeout_s),
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            lifespan="off",
            timeout_graceful_shutdown=2,
            ssl_certfile=certificate[0] if certificate else None,
            ssl_keyfile=certificate[1] if certificate else None,
        )
        super().__init__(config)
        _load_certificate(config)
        self.state = state
        self.reason = ""
        self.exit_status = 0
        self._shutdown_timeout_s = shutdown_timeout_s
        self._drain_until: float | None = None
        self.collected_s = time.monotonic()
        self._aborted = self._drain_logged = False
        self.sweeper = ConnectionSweeper(limits)

    @property
    def draining(self) -> bool:
        """Whether a signal has started the shutdown."""
        return self._drain_until is not None

    def stop(self, reason: str, *, exit_status: int = 1) -> None:
        """Stop the server because of a failure. The first reason is kept."""
        if not self.reason:
            self.reason, self.exit_status = reason, exit_status
        self.should_exit = True

    def freeze_gc(self) -> None:
        """Exempt all current objects from garbage collection, and run full collections only in `on_tick`.

        Call it after loading, in a process that only serves, as it changes the collector of the whole process.
        """
        gc.collect()
        gc.freeze()
        gc.set_threshold(*gc.get_threshold()[:2], NEVER)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal: the first one drains, the second one stops immediately."""
        if self._drain_until is not None:
            self.should_exit = self.force_exit = True
            return
        self._drain_until = time.monotonic() + self._shutdown_timeout_s
        self.state.start_draining()

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: collect garbage, sweep connections and check the drain."""
        self.collect_garbage()
        if counter % SWEEP_EVERY == 0:
            stalled_s = None if self._drain_until is None else STALLED_S
            self.sweeper.run(self.server_state.connections, time.monotonic(), stalled_s)  # type: ignore[arg-type]
        if self._drain_until is not None and not self.should_exit:
            await self.drain(self._drain_until)
        return await super().on_tick(counter)

    def collect_garbage(self) -> None:
        """Collect young objects at every tick while requests are open, and all objects when none is.

        The interpreter collects young objects once there are 700 more than before. Where requests end as fast as they
        arrive, that is seconds later, and then takes 30 to 80 ms.
        """
        if self.state.open_requests:
            gc.collect(YOUNG)
        if gc.get_count()[2] < DUE_COLLECTIONS:
            return
        now = time.monotonic()
        if self.state.open_requests == 0 or now - self.collected_s > MAX_UNCOLLECTED_S:
            self.collected_s = now
            gc.collect()

    async def drain(self, until: float) -> None:
        """Exit when no request is open; abort the open ones at the timeout."""
        now = time.monotonic()
        late_s = now - until
        if not self._drain_logged:
            # Not in the signal handler, which may interrupt another log call.
            self._drain_logged = True
            if self.state.open_requests:
                log.info(
                    "draining: %d open requests may run for %g s more; new ones are refused",
                    *(self.state.open_requests, self._shutdown_timeout_s),
                )
        if self.state.open_requests == 0 or late_s > FINAL_FLUSH_S:
            self.should_exit = True
            self._drop_unfinished(late=late_s > FINAL_FLUSH_S)
        elif late_s > 0 and not self._aborted:
            self._aborted = True
            log.warning("shutdown timeout: aborting %d open requests", self.state.open_requests)
            await self.state.control.abort(None, "draining")

    def _drop_unfinished(self, *, late: bool) -> None:
        """Abort connections on which uvicorn would wait: those with an incomplete request, and if `late` those with an
        incomplete response.
        """
        for connection in self.server_state.connections:
            cycle = getattr(connection, "cycle", None)
            if cycle is not None and not cycle.response_complete and (late or cycle.more_body):
                connection.transport.abort()
