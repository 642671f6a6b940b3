"""The workers that a router knows, and their targets: which are there, which may get requests, which are on trial."""

import math
import ssl
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tokenyard.base import ConfigError
from tokenyard.router.router_settings import RouterSettings
from tokenyard.router.stream_continuation import BY_OUTPUT_IDS, BY_PROMPT_IDS
from tokenyard.router.worker_connection import ConnectionPool, WorkerUrl
from tokenyard.routing.index import PrefixIndex
from tokenyard.routing.load import TargetLoad, TtftModel, preempts_by, target_has_capacity

MAX_RANKS = 1024
PREFILL, DECODE = "prefill", "decode"
"""Roles of workers that do only one half of the work."""

CLOSED = ("loading", "draining")
"""What our engines say of themselves while they live but take no requests."""


class CircuitBreaker:
    """A circuit breaker (Nygard 2007): closed, open after failures in a row, then on trial until enough succeed."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._failures = self._successes = 0
        self.open_until_s = -math.inf
        """A request may be sent from then on: at any time while it is closed, and on trial after the timeout."""

    @property
    def state(self) -> str:
        """closed or open."""
        return "open" if self.open_until_s > -math.inf else "closed"

    def succeeded(self) -> None:
        """A request went well."""
        self._failures = 0
        if self.open_until_s > -math.inf:
            self._successes += 1
            if self._successes >= self._settings.cb_success_threshold:
                self.reset()

    def failed(self, now_s: float) -> None:
        """A request failed by the target's fault."""
        self._failures += 1
        self._successes = 0
        if self.open_until_s > -math.inf or self._failures >= self._settings.cb_failure_threshold:
            self.open_until_s = now_s + self._settings.cb_timeout_secs

    def reset(self) -> None:
        """Begin anew, closed."""
        self._failures = self._successes = 0
        self.open_until_s = -math.inf


@dataclass(slots=True, eq=False)
class Target:
    """A worker or one of its ranks. name: what clients may see of it. levels: its open requests by priority."""

    worker: "Worker"
    rank: int | None
    name: str
    state: TargetLoad
    breaker: CircuitBreaker
    levels: Counter[int] = field(default_factory=Counter)

    def has_capacity(self, priority: int) -> bool:
        """Whether a request of `priority` finds a place: a free one, or one that the engine takes from a lesser one."""
        return target_has_capacity(self.state, self.levels, self.worker.preempts_by, priority)


@dataclass(slots=True, eq=False)
class Worker:
    """An engine behind a URL. source: where that came from. boot_id: changes when it starts anew, "" if it tells none.

    models: what it serves, empty while that is unknown; bases: those that are no adapters. healthy: None before the
    first look. continues: how it can go on with an answer that another worker has begun (see `continuation`), "" if it
    cannot. closed: it says that it takes no requests now. role: PREFILL, DECODE, or "" for both. bootstrap_port: where
    an engine of SGLang that prefills is met by those that decode; bootstrap_ports: the same of each rank of an engine
    of ours. by_params: it hands over as vLLM does, by `kv_transfer_params`. preempts_by: by how much the priority of a
    request must be higher for the engine to give it the place of one that runs; None if it never does.
    """

    name: str
    url: WorkerUrl
    source: str
    pool: ConnectionPool
    targets: list[Target] = field(default_factory=list)
    healthy: bool | None = None
    draining: bool = False
    models: frozenset[str] = frozenset()
    bases: frozenset[str] = frozenset()
    cards: list[dict[str, Any]] = field(default_factory=list)
    boot_id: str = ""
    continues: str = ""
    context_length: int | None = None
    restarts: int = 0
    closed: bool = False
    role: str = ""
    bootstrap_port: int = 0
    bootstrap_ports: tuple[int, ...] = ()
    by_params: bool = False
    preempts_by: int | None = None
    address: tuple[bytes, bytes] = (b"", b"")

    def __post_init__(self) -> None:
        self.address = self.url.path.encode(), self.url.authority.encode()

    @property
    def state(self) -> str:
        """starting, healthy, unhealthy or draining."""
        if self.draining:
            return "draining"
        return "starting" if self.healthy is None else "healthy" if self.healthy else "unhealthy"

    @property
    def computes_alone(self) -> bool:
        """Whether, as an engine that decodes, it can compute a prompt itself: vLLM's and ours can, SGLang's cannot."""
        return self.by_params or self.continues == BY_OUTPUT_IDS

    @property
    def open_requests(self) -> int:
        """Requests sent and not ended."""
        return sum(target.state.requests for target in self.targets)


class Workers:
    """The registry. `on_change` is called whenever there may be more room than before, or fewer workers."""

    def __init__(self, settings: RouterSettings, index: PrefixIndex) -> None:
        self._settings, self._index = settings, index
        self._by_url: dict[str, Worker] = {}
        self._made = 0
        self._speeds: dict[frozenset[str], TtftModel] = {}
        self._routable: list[Target] = []
        self._by_model: dict[str, list[Target]] = {}
        self._prefilling: list[Target] = []
        self.has_disagg_workers = False
        """Whether there are workers that only decode."""
        self.adapters: frozenset[str] = frozenset()
        """Names of models that are adapters at some worker."""
        self._context: ssl.SSLContext | None = None
        self.on_change: Callable[[], None] = lambda: None

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._by_url.values()))

    def __len__(self) -> int:
        return len(self._by_url)

    def add(self, url_text: str, source: str, role: str = "") -> Worker:
        """A new worker. Raises ConfigError for a wrong URL, one that is there already, or an unknown role."""
        if role not in ("", PREFILL, DECODE):
            raise ConfigError(f"{role!r} is no role of a worker; it is {PREFILL}, {DECODE}, or none for both")
        url = WorkerUrl.parse(url_text)
        if str(url) in self._by_url:
            raise ConfigError(f"the worker {url} is there already; every worker is named once")
        context = self._tls() if url.scheme == "https" else None
        worker = Worker(
            f"w{self._made}", url, source, ConnectionPool(url, context, self._settings.connect_timeout_secs)
        )
        worker.role, worker.bootstrap_port = role, self._settings.bootstrap_port
        self._made += 1
        self._by_url[str(url)] = worker
        self.set_ranks(worker, 1)
        return worker

    def find(self, name: str) -> Worker | None:
        """The worker with this name or URL."""
        for worker in self._by_url.values():
            if name in (worker.name, str(worker.url)):
                return worker
        try:
            return self._by_url.get(str(WorkerUrl.parse(name)))
        except ConfigError:
            return None

    def remove(self, worker: Worker) -> None:
        """It gets nothing more, and nothing is remembered of it; what it is answering goes on."""
        self._by_url.pop(str(worker.url), None)
        worker.draining = True
        worker.pool.close()
        for target in worker.targets:
            self._index.remove_target(target.state.name)
        self.changed()

    def set_ranks(self, worker: Worker, ranks: int) -> None:
        """Give the worker one target, or one for each of its `ranks` if there are several."""
        wanted = [None] if ranks <= 1 else list(range(min(ranks, MAX_RANKS)))
        if [target.rank for target in worker.targets] == wanted:
            return
        for target in worker.targets:
            self._index.remove_target(target.state.name)
        worker.targets = []
        for rank in wanted:
            suffix = "" if rank is None else f"@{rank}"
            room = self._settings.max_worker_requests
            state = TargetLoad(f"{worker.url}{suffix}", self._speed_of(worker), room=room)
            worker.targets.append(Target(worker, rank, worker.name + suffix, state, CircuitBreaker(self._settings)))
        self.changed()

    def set_models(self, worker: Worker, cards: list[dict[str, Any]]) -> None:
        """What the worker serves, from its /v1/models: models, and their adapters by both names that they have. Another
        model than before has another cache.
        """
        bases = frozenset(str(card["id"]) for card in cards if not card.get("parent"))
        names = (f"{card.get('parent')}:{card['id']}" for card in cards if card.get("parent"))
        models = frozenset(str(card["id"]) for card in cards) | frozenset(names)
        worker.cards = cards
        lengths = [card.get("max_model_len") for card in cards]
        worker.context_length = lengths[0] if lengths and isinstance(lengths[0], int) else None
        worker.by_params = any(card.get("owned_by") == "vllm" for card in cards)
        if worker.continues != BY_OUTPUT_IDS:
            worker.continues = BY_PROMPT_IDS if worker.by_params else ""
        if models == worker.models:
            return
        if worker.bases and bases != worker.bases:
            self.restarted(worker)
        worker.models, worker.bases = models, bases
        for target in worker.targets:
            target.state.speed = self._speed_of(worker)
        self.changed()

    def set_info(self, worker: Worker, info: dict[str, Any]) -> None:
        """What a worker says of itself in /server_info: its ranks, its identity, how much it takes at a time.

        What a lying worker sends instead of numbers is ignored.
        """
        boot_id, ranks = str(info.get("boot_id") or ""), info.get("dp_size")
        if worker.boot_id and boot_id != worker.boot_id:
            self.restarted(worker)
        worker.boot_id = boot_id
        if info.get("continues_output_ids") is True:
            worker.continues = BY_OUTPUT_IDS
        if self._settings.dp_aware and isinstance(ranks, int) and not isinstance(ranks, bool):
            self.set_ranks(worker, ranks)
        worker.closed = info.get("status") in CLOSED
        self._set_role(worker, info)
        worker.preempts_by = preempts_by(info)
        pool = info.get("max_total_num_tokens")
        if type(pool) is int and pool > 0:
            for target in worker.targets:
                target.state.kv_tokens = pool
        most = info.get("max_running_requests")
        if not self._settings.max_worker_requests and type(most) is int and most > 0:
            for target in worker.targets:
                target.state.room = -(-most // len(worker.targets))

    def _set_role(self, worker: Worker, info: dict[str, Any]) -> None:
        """SGLang's engines say which half of the work they do, and where prefill hands over."""
        role, port = info.get("disaggregation_mode"), info.get("disaggregation_bootstrap_port")
        if port and _is_port(port):
            worker.bootstrap_port = port
        ports = info.get("disaggregation_bootstrap_ports")
        worker.bootstrap_ports = tuple(ports) if isinstance(ports, list) and all(map(_is_port, ports)) else ()
        if role in (PREFILL, DECODE) and not worker.role:
            worker.role = role
            self.changed()

    def restarted(self, worker: Worker) -> None:
        """It has started anew, or is gone."""
        worker.restarts += 1
        self.flushed(worker)
        for target in worker.targets:
            target.state.forget()

    def flushed(self, worker: Worker) -> None:
        """Its cache is empty."""
        for target in worker.targets:
            self._index.clear_target(target.state.name)

    def set_healthy(self, worker: Worker, healthy: bool) -> None:
        """The worker may, or may no longer, get requests."""
        if worker.healthy == healthy:
            return
        worker.healthy = healthy
        for target in worker.targets:
            target.breaker.reset()
        self.changed()

    def changed(self) -> None:
        """Which workers may get requests has changed."""
        workers = self._by_url.values()
        routable = [worker for worker in workers if worker.healthy and not worker.draining]
        self._routable = [target for worker in routable if worker.role != PREFILL for target in worker.targets]
        self._prefilling = [target for worker in routable if worker.role == PREFILL for target in worker.targets]
        self.has_disagg_workers = any(worker.role == DECODE for worker in workers)
        self.adapters = frozenset[str]().union(*(worker.models - worker.bases for worker in workers))
        self._by_model.clear()
        self.on_change()

    def eligible(self, model: str, rank: int | None, now_s: float) -> list[Target]:
        """Targets that may serve `model` ("" for any) on `rank` (None for any). A model that no worker names may be
        known to any of them by another name.
        """
        found = self._by_model.get(model)
        if found is None:
            found = self._serving(model)
        found = [target for target in found if target.breaker.open_until_s <= now_s]
        return found if rank is None else _of_rank(found, rank)

    def prefilling(self, model: str, rank: int | None, now_s: float) -> list[Target]:
        """Targets that only prefill and may do so for `model` on `rank`, as in `eligible`."""
        named = [target for target in self._prefilling if model in target.worker.models]
        found = [target for target in named or self._prefilling if target.breaker.open_until_s <= now_s]
        return found if rank is None else _of_rank(found, rank)

    def _serving(self, model: str) -> list[Target]:
        """Routable targets for a model; kept for models that some worker names."""
        named = [target for target in self._routable if model in target.worker.models]
        known = any(model in worker.models for worker in self._by_url.values())
        found = named if known else self._routable
        if known or not model:
            self._by_model[model] = found
        return found

    def has_rank(self, rank: int) -> bool:
        """Whether any worker has this rank."""
        return any(rank < max(len(worker.targets), 1) for worker in self._by_url.values())

    def close(self) -> None:
        """Close all idle connections."""
        for worker in self._by_url.values():
            worker.pool.close()

    def _speed_of(self, worker: Worker) -> TtftModel:
        """What targets of one model share."""
        return self._speeds.setdefault(worker.bases, TtftModel())

    def _tls(self) -> ssl.SSLContext:
        if self._context is None:
            try:
                self._context = ssl.create_default_context(cafile=self._settings.ca_cert_path or None)
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(f"--ca-cert-path {self._settings.ca_cert_path} cannot be read: {error}") from None
        return self._context


def _is_port(value: object) -> bool:
    return type(value) is int and 0 <= value < 65536


def _of_rank(targets: list[Target], rank: int) -> list[Target]:
    return [target for target in targets if target.rank == rank or (target.rank is None and rank == 0)]
