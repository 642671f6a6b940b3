"""CPU time and memory of the server's processes, for /metrics."""

import time
from collections.abc import Iterable

import psutil
from prometheus_client.core import Metric as MetricFamily

from tokenyard.server.metrics.table import PROCESS, family

CACHE_S = 1.0
"""Values are reused for this long, as some gateways scrape 20 times a second."""

RELIST_S = 10.0
TITLE = "tokenyard: "


class ProcessUsage:
    """CPU seconds and resident memory of this process and its children, by title."""

    def __init__(self) -> None:
        self._processes: list[tuple[str, psutil.Process]] = []
        self._listed_s = self._read_s = -RELIST_S
        self._cpu_s: dict[str, float] = {}
        self._bytes: dict[str, int] = {}

    def families(self) -> Iterable[MetricFamily]:
        """One counter and one gauge, labelled with the process: api, scheduler, detokenizer."""
        self._refresh(time.monotonic())
        cpu, memory = map(family, PROCESS)
        for title in self._bytes:
            cpu.add_metric([title], self._cpu_s[title])
            memory.add_metric([title], self._bytes[title])
        yield cpu
        yield memory

    def _refresh(self, now: float) -> None:
        if now - self._read_s < CACHE_S:
            return
        self._read_s = now
        if now - self._listed_s > RELIST_S or not self._read():
            self._listed_s = now
            self._processes = list(_listed())
            self._read()

    def _read(self) -> bool:
        """Read all listed processes; False if one of them has exited."""
        cpu_s: dict[str, float] = {}
        used: dict[str, int] = {}
        for title, process in self._processes:
            try:
                times = process.cpu_times()
                used[title] = used.get(title, 0) + process.memory_info().rss
                cpu_s[title] = cpu_s.get(title, 0.0) + times.user + times.system
            except psutil.Error:
                return False
        self._cpu_s, self._bytes = cpu_s, used
        return True


def _listed() -> Iterable[tuple[str, psutil.Process]]:
    own = psutil.Process()
    yield "api", own
    for child in own.children():
        try:
            title = "".join(child.cmdline()[:1])
        except psutil.Error:
            continue
        if title.startswith(TITLE):
            yield title.removeprefix(TITLE), child
