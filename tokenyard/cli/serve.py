"""`tokenyard serve`: an engine and an HTTP server in front of it."""

import argparse
import asyncio
import contextlib
import dataclasses
import logging
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import setproctitle
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from tokenyard.base import ConfigError, ExecutorInfo, TokenyardError
from tokenyard.base.cross_site import is_loopback
from tokenyard.cli.event_loop import loop_factory
from tokenyard.cli.flags import resolve, unknown_variables
from tokenyard.cli.serve_node import serve_node
from tokenyard.config import Settings
from tokenyard.engine.processes.engine_config import EngineConfig
from tokenyard.engine.processes.launch import running_engine
from tokenyard.engine.processes.logs import set_up_logging
from tokenyard.multi_model.catalog import are_several
from tokenyard.server.http.connections import ConnectionLimits
from tokenyard.server.http.server import DrainingServer, listen, listen_at_path
from tokenyard.server.metrics.tracing import open_tracing
from tokenyard.server.state import ServerState
from tokenyard.wiring import engine_config, server_options, with_model_folder

log = logging.getLogger(__name__)

HEARTBEAT_POLL_S = 0.05
SIGNAL_GRACE_S = 0.2
USAGE_ERROR = 2


def serve(namespace: argparse.Namespace) -> int:
    """Serve until told to stop. Returns 0 after a signal, 2 for wrong settings or 1 if the engine failed."""
    given = resolve(vars(namespace))
    resolved = given.settings
    setproctitle.setproctitle("tokenyard: api")
    set_up_logging(resolved.log_level, resolved.log_format)
    for warning in unknown_variables():
        log.warning("%s", warning)
    try:
        if are_several(namespace.models):
            # The import of what only several models need costs a start of one.
            from tokenyard.cli.serve_models import serve_models

            return serve_models(given, namespace.models)
        settings = with_model_folder(resolved)
        if settings.node_rank:
            return serve_node(settings)
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            status = runner.run(_serve(settings))
    except TokenyardError as error:
        if resolved.log_format != "json":
            raise
        log.critical("%s", error.message)
        status = USAGE_ERROR
    if status != USAGE_ERROR:
        log.info("stopped, with exit status %d", status)
    return status


async def _serve(settings: Settings) -> int:
    """Listen, load the model concurrently, and run until the server ends."""
    state = ServerState(server_options(settings))
    server = DrainingServer(
        state,
        shutdown_timeout_s=settings.shutdown_timeout_s,
        limits=ConnectionLimits.of_process(),
        certificate=(settings.ssl_certfile, settings.ssl_keyfile or settings.ssl_certfile)
        if settings.ssl_certfile
        else None,
    )
    listener = listen_at_path(settings.uds) if settings.uds else listen(settings.host, settings.port)
    if not settings.uds:
        settings = dataclasses.replace(settings, port=listener.getsockname()[1])
        if not (settings.api_key or settings.tenant_keys or is_loopback(settings.host)):
            log.warning(
                "--host %s without --api-key: whoever reaches port %d may use and control this engine",
                *(settings.host, settings.port),
            )
    with _removed(settings.uds), _tracing(settings, state):
        config = engine_config(settings)
        loading = asyncio.create_task(_run_engine(settings, config, state, server))
        try:
            await server.serve(sockets=[listener])
        finally:
            loading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await loading
    if server.reason and settings.log_format == "json":
        log.critical("%s", server.reason)
    elif server.reason:
        print(f"tokenyard: {server.reason}", file=sys.stderr)
    return server.exit_status


@contextlib.contextmanager
def _removed(socket_path: str) -> Iterator[None]:
    """Remove the file of the Unix socket on exit, after an error as well."""
    try:
        yield
    finally:
        if socket_path:
            Path(socket_path).unlink(missing_ok=True)


@contextlib.contextmanager
def _tracing(settings: Settings, state: ServerState) -> Iterator[None]:
    """Send traces of requests, if enabled. Raises ConfigError if the packages for it are missing."""
    if not settings.otlp_traces_endpoint:
        yield
        return
    tracing = open_tracing(settings.otlp_traces_endpoint)
    state.observer_factories.append(tracing.watcher)
    try:
        yield
    finally:
        tracing.close()


async def _run_engine(settings: Settings, config: EngineConfig, state: ServerState, server: DrainingServer) -> None:
    """Start the engine, accept requests, and stop the server if the engine ends."""
    dead = asyncio.Event()

    def died(reason: str) -> None:
        server.stop(reason)
        dead.set()

    try:
        async with running_engine(config, died) as manager:
            while math.isinf(manager.health()) and not dead.is_set():
                await asyncio.sleep(HEARTBEAT_POLL_S)
            if not dead.is_set():
                server.freeze_gc()
                state.set_ready(manager)
                _print_box(settings, manager.info)
            await dead.wait()
    except ConfigError as error:
        server.stop(error.message, exit_status=USAGE_ERROR)
    except TokenyardError as error:
        # A signal to the process group also ends a process that is starting, and arrives here a moment later.
        await asyncio.sleep(SIGNAL_GRACE_S)
        if not server.draining:
            server.stop(error.message)
    except Exception as error:
        log.exception("the engine failed")
        server.stop(f"the engine failed: {error}")


def address_of(settings: Settings) -> str:
    """Where clients reach the server: a URL, or `unix:` and the path of its socket."""
    if settings.uds:
        return f"unix:{settings.uds}"
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"{'https' if settings.ssl_certfile else 'http'}://{host}:{settings.port}"


def _print_box(settings: Settings, info: ExecutorInfo) -> None:
    """Print the server's address and model on the terminal, followed by one stable line for scripts.

    If the output cannot be written, for example on a full disk, the server runs anyway.
    """
    url = address_of(settings)
    rows = (
        ("URL", f"{url}/v1"),
        ("Model", f"{', '.join(settings.served_model_name)} ({info.model})"),
        ("Device", f"{info.device}, {info.dtype}"),
        *((("Kernels", info.kernels),) if info.kernels else ()),
        *(
            (("Ranks", f"{settings.dp_size}, by {settings.load_balance_method}; each has:"),)
            if settings.dp_size > 1
            else ()
        ),
        ("KV tokens", f"{info.num_pages * info.page_size:,} in pages of {info.page_size}"),
        ("Context", f"{info.context_length:,} tokens"),
        ("Policy", settings.schedule_policy),
    )
    if settings.log_format == "json":
        log.info("Tokenyard is ready at %s", url, extra={"fields": {name.lower(): value for name, value in rows}})
        return
    table = Table.grid(padding=(0, 2))
    for name, value in rows:
        table.add_row(f"[bold]{name}[/bold]", escape(value))
    with contextlib.suppress(OSError):
        Console(stderr=True).print(Panel.fit(table, title="Tokenyard"))
        print(f"Tokenyard is ready at {url}", file=sys.stderr, flush=True)
