"""The life of the HTTP server: it listens early, drains on the first signal and stops at once on the second."""

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
from tokenyard.server.http.protocol import HttpProtocol
from tokenyard.server.state import ServerState

log = logging.getLogger(__name__)

BACKLOG = 2048
FINAL_FLUSH_S = 2.0
"""How long aborted requests have time to send their last event."""

STALLED_S = 5.0
"""While the server drains, it does not wait longer than this for a client that takes nothing."""

SWEEP_EVERY = 5
"""Turns (of 0.1 s) between two looks at all connections."""

YOUNG = 1
"""All generations of the garbage collector but the last one."""

NEVER = 2**31 - 1
DUE_COLLECTIONS = 10
MAX_UNCOLLECTED_S = 600.0
"""A full collection is due after so many of the middle generation, as by the interpreter's own rule, but waits up to
this long for a moment without open requests: with thousands of them it takes a quarter of a second, in which no stream
moves, and would come every few seconds.
"""


def listen_at_path(path: str) -> socket.socket:
    """A listening Unix socket at `path`; a socket that an earlier server left there is replaced.

    Raises ConfigError if it cannot be made, or another server listens there.
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
    """A listening socket. Raises ConfigError if the address cannot be had."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        # The kernel asks silent peers whether they are still there.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return listener
    except OSError as error:
        # The library's own text repeats the address.
        number = error.errno or 0
        reason = os.strerror(number) if number > 0 else error.strerror or str(error)
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}; choose another --host or --port") from error


def _load_certificate(config: uvicorn.Config) -> None:
    """Read certificate and key now, as uvicorn does when it starts. Raises ConfigError for files that do not fit."""
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--ssl-certfile and --ssl-keyfile cannot be used: {error}") from error


class DrainingServer(uvicorn.Server):
    """A server that, told to stop, first lets open requests finish for `shutdown_timeout_s` seconds.

    While it drains, /ready and new requests get 503. What is open after that is aborted with an error event. A second
    signal ends it at once. `reason` and `exit_status` are set if something other than a signal ended it.
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
        self._collected_s = time.monotonic()
        self._cut_off = self._told = False
        self._sweep = ConnectionSweeper(limits)

    @property
    def draining(self) -> bool:
        """Whether a signal has told it to end."""
        return self._drain_until is not None

    def stop(self, reason: str, *, exit_status: int = 1) -> None:
        """End the server because of a failure; the first reason counts."""
        if not self.reason:
            self.reason, self.exit_status = reason, exit_status
        self.should_exit = True

    def freeze_gc(self) -> None:
        """After loading: take what exists now out of garbage collection, and collect the rest only here.

        For a process of its own, as it changes the whole process's collector.
        """
        gc.collect()
        gc.freeze()
        gc.set_threshold(*gc.get_threshold()[:2], NEVER)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take a signal: the first one drains, the second one ends everything."""
        if self._drain_until is not None:
            self.should_exit = self.force_exit = True
            return
        self._drain_until = time.monotonic() + self._shutdown_timeout_s
        self.state.start_draining()

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: see how far the draining has come, and whether it is time to collect garbage."""
        self._collect_garbage()
        if counter % SWEEP_EVERY == 0:
            stalled_s = None if self._drain_until is None else STALLED_S
            self._sweep.run(self.server_state.connections, time.monotonic(), stalled_s)  # type: ignore[arg-type]
        if self._drain_until is not None and not self.should_exit:
            await self._drain(self._drain_until)
        return await super().on_tick(counter)

    def _collect_garbage(self) -> None:
        """Collect new objects at every turn, and all objects when no request is open.

        The interpreter collects new objects once there are 700 more than before. Where requests end as fast as they
        come, that is seconds later, and then takes 30 to 80 ms.
        """
        if self.state.open_requests:
            gc.collect(YOUNG)
        if gc.get_count()[2] < DUE_COLLECTIONS:
            return
        now = time.monotonic()
        if self.state.open_requests == 0 or now - self._collected_s > MAX_UNCOLLECTED_S:
            self._collected_s = now
            gc.collect()

    async def _drain(self, until: float) -> None:
        """Exit when no request is open; abort them when the time is over."""
        now = time.monotonic()
        late_s = now - until
        if not self._told:
            # Not where the signal comes: it may interrupt the writing of another line.
            self._told = True
            log.info(
                "draining: %d requests are open and may go on for %g s; new ones are refused",
                *(self.state.open_requests, self._shutdown_timeout_s),
            )
        if self.state.open_requests == 0 or late_s > FINAL_FLUSH_S:
            self.should_exit = True
            self._drop_unfinished(late=late_s > FINAL_FLUSH_S)
        elif late_s > 0 and not self._cut_off:
            self._cut_off = True
            log.warning("shutdown timeout: aborting %d open requests", self.state.open_requests)
            await self.state.control.abort(None, "draining")

    def _drop_unfinished(self, *, late: bool) -> None:
        """End connections that uvicorn would wait for in vain: whose request has not come in full, and if it is `late`
        whose answer is not out.
        """
        for connection in self.server_state.connections:
            cycle = getattr(connection, "cycle", None)
            if cycle is not None and not cycle.response_complete and (late or cycle.more_body):
                connection.transport.abort()
