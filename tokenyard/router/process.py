"""The router process: listen, discover workers, sweep, and drain on the first signal."""

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tokenyard.base import ConfigError
from tokenyard.router.discovery import Discovery, sources
from tokenyard.router.kv_event_subscriber import KvEventSubscriptions
from tokenyard.router.proxy import Router
from tokenyard.router.request_features import Tokenize
from tokenyard.router.router_settings import RouterSettings
from tokenyard.router.worker_connection import WorkerUrl
from tokenyard.routing.workers import DECODE, PREFILL

log = logging.getLogger(__name__)

BACKLOG = 2048
SWEEP_S = 0.25
FINAL_FLUSH_S = 0.2
SPARE_FILES, MIN_CONNECTIONS = 64, 8
"""Half of the other files are for connections of clients, as each may need one to a worker."""

GC_THRESHOLDS = 20_000, 20, 50
"""Requests create few reference cycles, so the garbage collector can run rarely."""


def listen(settings: RouterSettings) -> socket.socket:
    """A listening socket, with SO_REUSEPORT if several processes share the port.

    Raises ConfigError if the address is not available.
    """
    host, port = settings.host, settings.port
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        shared = settings.processes > 1
        return socket.create_server((host, port), family=family, backlog=BACKLOG, reuse_port=shared)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}; choose another --host or --port") from error


def raise_file_limit() -> int:
    """Raise the soft limit of open files to the hard limit, and return the limit in force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return hard
    return soft


def tls_context(settings: RouterSettings) -> ssl.SSLContext | None:
    """The TLS context to listen with; None for plain HTTP. Raises ConfigError for invalid files."""
    if not settings.tls_cert_path:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(settings.tls_cert_path, settings.tls_key_path)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--tls-cert-path and --tls-key-path cannot be used: {error}") from None
    return context


def check_urls(urls: Sequence[str]) -> None:
    """Raise ConfigError for an invalid or duplicate URL."""
    seen: set[str] = set()
    for url in urls:
        parsed = str(WorkerUrl.parse(url))
        if parsed in seen:
            raise ConfigError(f"worker {parsed} is given twice; name each worker once")
        seen.add(parsed)


async def run(
    settings: RouterSettings,
    listener: socket.socket,
    tokenize: Tokenize | None = None,
    *,
    announce: str = "Tokenyard routes at",
    make_router: Callable[[RouterSettings, Tokenize | None], Router] = Router,
) -> None:
    """Route until a signal, then drain. `announce`: printed to standard error before the address; "" for nothing.

    Raises ConfigError for invalid workers or certificates.
    """
    router, context, found = make_router(settings, tokenize), tls_context(settings), sources(settings)
    events = KvEventSubscriptions(router, settings.kv_events, settings.kv_events_replay) if settings.kv_events else None
    router.max_connections = max((raise_file_limit() - SPARE_FILES) // 2, MIN_CONNECTIONS)
    check_urls([*settings.worker_urls, *settings.prefill_urls, *settings.decode_urls])
    for urls, role in ((settings.worker_urls, ""), (settings.prefill_urls, PREFILL), (settings.decode_urls, DECODE)):
        for url in urls:
            router.add_worker(url, "static", role)
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    server = await loop.create_server(router.new_connection, sock=listener, ssl=context)
    picker = await _start_picker(router) if settings.endpoint_picker_port else None
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    tasks = [loop.create_task(_sweep(router))]
    tasks += [loop.create_task(Discovery(router, source).run()) for source in found]
    if events is not None:
        tasks.append(loop.create_task(events.run()))
    if router.shared is not None:
        tasks.append(loop.create_task(router.shared.run()))
    if router.batches is not None:
        router.batches.start()
    if announce:
        _say_ready(settings, listener, announce)
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        await stop.wait()
        await _drain(router, stop)
    finally:
        server.close()
        if picker is not None:
            await picker.stop(None)
        for task in tasks:
            task.cancel()
        if router.batches is not None:
            await router.batches.close()
        await router.close()
        for connection in list(router.connections):
            connection.transport.abort()
        router.workers.close()


async def _start_picker(router: Router) -> Any:
    try:
        from tokenyard.router.endpoint_picker import start_picker
    except ImportError as error:
        what = f"--endpoint-picker-port needs gRPC ({error}): pip install 'tokenyard[gateway]'"
        raise ConfigError(what) from None
    return await start_picker(router)


async def _sweep(router: Router) -> None:
    while True:
        await asyncio.sleep(SWEEP_S)
        try:
            router.sweep()
        except Exception:
            log.exception("a sweep failed")


async def _drain(router: Router, stop: asyncio.Event) -> None:
    """New requests get 503; open ones continue until the grace period ends or another signal arrives."""
    router.draining = True
    stop.clear()
    log.info("draining %d open requests", len(router.exchanges))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(router.settings.shutdown_grace_period_secs):
            while router.exchanges and not stop.is_set():
                await asyncio.sleep(SWEEP_S / 5)
    router.abort_all()
    await asyncio.sleep(FINAL_FLUSH_S)


def run_all(settings: RouterSettings, run_one: Callable[[RouterSettings, socket.socket, bool], None]) -> None:
    """Run `run_one` in `settings.processes` processes, including this one. Only this one announces the address; the
    others are stopped when it ends.

    Raises ConfigError if the address is not available.
    """
    listener = listen(settings)
    settings = replace(settings, port=listener.getsockname()[1])
    children = []
    for _ in range(settings.processes - 1):
        # One socket per process, so that the kernel balances connections between them.
        shared = listen(settings)
        pid = os.fork()
        if pid == 0:
            listener.close()
            status = 1
            try:
                run_one(settings, shared, False)
                status = 0
            finally:
                os._exit(status)
        shared.close()
        children.append(pid)
    try:
        run_one(settings, listener, True)
    finally:
        for pid in children:
            os.kill(pid, signal.SIGTERM)
        for pid in children:
            os.waitpid(pid, 0)


def _say_ready(settings: RouterSettings, listener: socket.socket, words: str) -> None:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    scheme = "https" if settings.tls_cert_path else "http"
    line = f"{words} {scheme}://{host}:{listener.getsockname()[1]}"
    if settings.log_format == "json":
        log.info("%s", line)
        return
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)
