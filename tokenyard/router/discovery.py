"""Discovery of workers at run time: a file, a DNS name, or Kubernetes pods."""

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp

from tokenyard.base import ConfigError
from tokenyard.router.dispatch_driver import DispatchDriver
from tokenyard.router.router_settings import RouterSettings
from tokenyard.router.worker_connection import WorkerUrl
from tokenyard.routing.workers import DECODE, PREFILL

log = logging.getLogger(__name__)

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
KUBERNETES_TIMEOUT_S = 10.0

ROLE_LABEL = "llm-d.ai/role"
"""Label of pods that only prefill or only decode, as in llm-d."""

DiscoveredWorker = tuple[str, str]
"""A worker's URL and its role (see `routing.workers.Worker`)."""


@dataclass(frozen=True, slots=True)
class DiscoverySource:
    """A source of workers.

    name: recorded as `HttpWorker.source`.
    discover: returns all current workers. If it raises OSError, ValueError or ClientError, no worker changes.
    """

    name: str
    discover: Callable[[], Coroutine[Any, Any, list[DiscoveredWorker]]]


class Discovery:
    """Keeps the router's workers of one source up to date. Workers of other sources are not changed."""

    def __init__(self, router: DispatchDriver, source: DiscoverySource) -> None:
        self._router, self._source = router, source

    async def run(self) -> None:
        """Poll the source every `discovery_interval_secs`, until cancelled."""
        while True:
            try:
                self.apply(await self._source.discover())
            except (OSError, ValueError, aiohttp.ClientError) as error:
                log.warning("discovery by %s: %s", self._source.name, error)
            await asyncio.sleep(self._router.settings.discovery_interval_secs)

    def apply(self, found: list[DiscoveredWorker]) -> None:
        """Add and remove workers so that those of this source are `found`."""
        wanted: dict[str, str] = {}
        for url, role in found:
            try:
                wanted.setdefault(str(WorkerUrl.parse(url)), role)
            except ConfigError as error:
                log.warning("discovery by %s: %s", self._source.name, error.message)
        for worker in self._router.workers:
            if worker.source == self._source.name and str(worker.url) not in wanted:
                log.info("worker %s (%s) is no longer listed; removing it", worker.name, worker.url)
                self._router.remove_worker(worker)
        for url, role in wanted.items():
            if self._router.workers.find(url) is None:
                try:
                    self._router.add_worker(url, self._source.name, role)
                except ConfigError as error:
                    log.warning("discovery by %s: %s", self._source.name, error.message)


def sources(settings: RouterSettings) -> list[DiscoverySource]:
    """The sources in the settings. Raises ConfigError for an invalid one."""
    found = []
    if settings.worker_file:
        found.append(DiscoverySource("file", lambda: read_file(Path(settings.worker_file))))
    if settings.worker_dns:
        host, _, port = settings.worker_dns.rpartition(":")
        if not host or not port.isdigit():
            raise ConfigError(f"--worker-dns is {settings.worker_dns!r}; give host:port")
        found.append(DiscoverySource("dns", lambda: resolve(host, int(port))))
    if settings.worker_selector:
        found.append(DiscoverySource("kubernetes", lambda: pods(settings)))
    return found


async def read_file(path: Path) -> list[DiscoveredWorker]:
    """One URL per line, optionally followed by a role. Empty lines and text after # are ignored.

    Raises ValueError for a file without any text: it may be about to be written.
    """
    text = path.read_text(encoding="utf-8")
    if not text.strip():
        raise ValueError(f"{path} is empty; keeping its workers. To remove them all, leave a comment in the file")
    lines = [line.partition("#")[0].split() for line in text.splitlines()]
    return [(words[0], " ".join(words[1:])) for words in lines if words]


async def resolve(host: str, port: int) -> list[DiscoveredWorker]:
    """A worker for every address of `host`."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = dict.fromkeys(str(entry[4][0]) for entry in found)
    return [(_url(address, port), "") for address in addresses]


async def pods(settings: RouterSettings) -> list[DiscoveredWorker]:
    """The ready pods that the selector matches, in the cluster that the router runs in. Raises OSError outside one."""
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise OSError("KUBERNETES_SERVICE_HOST is not set; --worker-selector works only inside a Kubernetes pod")
    namespace = settings.worker_namespace or (SERVICE_ACCOUNT / "namespace").read_text().strip()
    context = ssl.create_default_context(cafile=str(SERVICE_ACCOUNT / "ca.crt"))
    headers = {"Authorization": f"Bearer {(SERVICE_ACCOUNT / 'token').read_text().strip()}"}
    url = f"https://{host}:{port}/api/v1/namespaces/{quote(namespace)}/pods"
    timeout = aiohttp.ClientTimeout(KUBERNETES_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:
        query = {"labelSelector": settings.worker_selector}
        async with session.get(url, params=query, ssl=context) as answer:
            answer.raise_for_status()
            return ready_pods(await answer.json(), settings.worker_port)


def ready_pods(listed: dict[str, Any], port: int) -> list[DiscoveredWorker]:
    """The pods of a PodList that are ready and not terminating."""
    found = []
    for pod in listed.get("items", []):
        status = pod.get("status", {})
        ready = any(c.get("type") == "Ready" and c.get("status") == "True" for c in status.get("conditions", []))
        address = status.get("podIP")
        about = pod.get("metadata", {})
        if ready and address and not about.get("deletionTimestamp"):
            role = (about.get("labels") or {}).get(ROLE_LABEL, "")
            found.append((_url(address, port), role if role in (PREFILL, DECODE) else ""))
    return found


def _url(address: str, port: int) -> str:
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
