"""Which share of recent requests met their latency targets, by service class."""

from collections import deque

from tokenyard.base import Finish, Request
from tokenyard.engine.scheduler_process.health.slo_attainment import met_slo

WINDOW_REQUESTS = 200
MAX_CLASSES = 32
NO_CLASS = "normal"


class SloAttainment:
    """Remembers the classes of open requests, and of each class's latest ones whether they kept their promise."""

    def __init__(self) -> None:
        self._open: dict[int, str] = {}
        self._met: dict[str, deque[bool]] = {}

    def submitted(self, request: Request) -> None:
        """A request has come; each of its answers counts."""
        for number in range(request.number, request.number + request.sampling.n):
            self._open[number] = request.service_class or NO_CLASS

    def finished(self, finish: Finish) -> None:
        """An answer has ended."""
        name, kept = self._open.pop(finish.number, None), met_slo(finish)
        if name is None or kept is None:
            return
        if name in self._met or len(self._met) < MAX_CLASSES:
            self._met.setdefault(name, deque(maxlen=WINDOW_REQUESTS)).append(kept)

    def shares(self) -> dict[str, float]:
        """Share of the latest requests that met their targets, by class; classes without any yet are left out."""
        return {name: sum(met) / len(met) for name, met in self._met.items()}
