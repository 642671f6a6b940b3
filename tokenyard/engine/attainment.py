"""Which share of recent requests met their latency targets, by service class."""

from collections import deque
from collections.abc import Callable

from tokenyard.base import NS_PER_S, CostModel, Finish, Request, SchedulerSettings, Slo
from tokenyard.policy.prefill_time import PrefillTime

WINDOW_REQUESTS = 200
MOST_CLASSES = 32
NS_PER_MS = 1_000_000
NO_CLASS = "normal"

Belief = Callable[[], CostModel | None]


class Attainment:
    """Remembers the targets of open requests, and of each class's latest ones whether they were met.

    Targets are those that `slo` serves by: the first token by the request's own `ttft`, or the larger of `slo_ttft_ms`
    and `slo_ttft_scale` times the prompt's prefill alone (where there is a cost model); the others by its `tpot`, or
    `slo_tpot_ms`, on average.
    """

    def __init__(self, settings: SchedulerSettings, belief: Belief) -> None:
        self._settings = settings
        self._belief = belief
        self._open: dict[int, tuple[str, Slo]] = {}
        self._met: dict[str, deque[bool]] = {}

    def submitted(self, request: Request) -> None:
        """A request has come; each of its answers counts."""
        promised = (request.service_class or NO_CLASS, request.slo or Slo())
        for number in range(request.number, request.number + request.sampling.n):
            self._open[number] = promised

    def finished(self, finish: Finish) -> None:
        """An answer has ended. Aborted ones say nothing about targets."""
        promised = self._open.pop(finish.number, None)
        if promised is None or finish.reason == "abort":
            return
        name, slo = promised
        if name in self._met or len(self._met) < MOST_CLASSES:
            self._met.setdefault(name, deque(maxlen=WINDOW_REQUESTS)).append(self._kept(finish, slo))

    def shares(self) -> dict[str, float]:
        """Share of the latest requests that met their targets, by class; classes without any yet are left out."""
        return {name: sum(met) / len(met) for name, met in self._met.items()}

    def _kept(self, finish: Finish, slo: Slo) -> bool:
        ttft_ns = slo.ttft_ns or self._class_ttft_ns(finish.prompt_tokens)
        tpot_ns = slo.tpot_ns or self._settings.slo_tpot_ms * NS_PER_MS
        decode_ns = finish.finished_ns - finish.first_token_ns
        soon = finish.first_token_ns - finish.arrival_ns <= ttft_ns
        return soon and decode_ns <= tpot_ns * max(finish.completion_tokens - 1, 0)

    def _class_ttft_ns(self, prompt_tokens: int) -> float:
        floor_ns, cost = self._settings.slo_ttft_ms * NS_PER_MS, self._belief()
        if cost is None:
            return floor_ns
        alone_s = PrefillTime.of(cost).chunk_s(0, prompt_tokens)
        return max(floor_ns, self._settings.slo_ttft_scale * alone_s * NS_PER_S)
