"""The router's workers and their targets: state, roles, models and circuit breakers.

A worker is the router's view of one engine. A target is a worker, or one data-parallel rank of it.
"""

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
from tokenyard.routing.load import TargetLoad, TtftModel, preempts_by, target_has_capacity
from tokenyard.routing.prefix_index import PrefixIndex

MAX_RANKS = 1024
PREFILL, DECODE = "prefill", "decode"
"""Roles of workers with PD disaggregation."""

CLOSED = ("loading", "draining")
"""`status` in /server_info of an engine that is alive but accepts no requests."""


class CircuitBreaker:
    """A circuit breaker (Nygard 2007): closed, open after failures in a row, then on trial until enough succeed."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._failures = self._successes = 0
        self.open_until_s = -math.inf
        """Requests may be sent from this time on: -infinity while closed, else the end of the timeout."""

    @property
    def state(self) -> str:
        """closed or open."""
        return "open" if self.open_until_s > -math.inf else "closed"

    def succeeded(self) -> None:
        """A request succeeded."""
        self._failures = 0
        if self.open_until_s > -math.inf:
            self._successes += 1
            if self._successes >= self._settings.cb_success_threshold:
                self.reset()

    def failed(self, now_s: float) -> None:
        """A request failed at the target."""
        self._failures += 1
        self._successes = 0
        if self.open_until_s > -math.inf or self._failures >= self._settings.cb_failure_threshold:
            self.open_until_s = now_s + self._settings.cb_timeout_secs

    def reset(self) -> None:
        """Close the breaker and reset its counts."""
        self._failures = self._successes = 0
        self.open_until_s = -math.inf


@dataclass(slots=True, eq=False)
class Target:
    """A worker, or one of its ranks: what the routing chooses.

    worker: the worker it belongs to.
    rank: data-parallel rank; None for a worker with a single one.
    name: the name that clients may see.
    state: load and speed, as policies see them.
    breaker: its circuit breaker.
    levels: open requests by priority.
    """

    worker: "Worker"
    rank: int | None
    name: str
    state: TargetLoad
    breaker: CircuitBreaker
    levels: Counter[int] = field(default_factory=Counter)

    def has_capacity(self, priority: int) -> bool:
        """Whether a request of `priority` fits: into free capacity, or by preempting requests of lower priority."""
        return target_has_capacity(self.state, self.levels, self.worker.preempts_by, priority)


@dataclass(slots=True, eq=False)
class Worker:
    """An engine behind a URL.

    name: such as "w0".
    url: its address.
    source: static, api, or the name of a `DiscoverySource`.
    pool: connections to it.
    targets: the worker itself, or its data-parallel ranks.
    healthy: None before the first health check.
    draining: whether it gets no new requests.
    models: names it serves; empty while unknown.
    bases: those of `models` that are not adapters.
    cards: its /v1/models.
    boot_id: changes when the engine restarts; "" if it reports none.
    continues: how it can continue a stream of another worker (`stream_continuation`); "" if it cannot.
    context_length: of its model; None if unknown.
    restarts: restarts seen so far.
    closed: whether it reports that it accepts no requests.
    role: PREFILL, DECODE, or "" for both.
    bootstrap_port: port where decode engines reach an SGLang prefill engine.
    bootstrap_ports: the same for each rank of a Tokenyard engine.
    by_params: whether it transfers KV as vLLM does, by `kv_transfer_params`.
    preempts_by: priority margin above which it preempts a running request; None if it never preempts.
    address: path prefix and Host header, encoded.
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
        """Whether a decode engine can compute a prompt itself: vLLM and Tokenyard can, SGLang cannot."""
        return self.by_params or self.continues == BY_OUTPUT_IDS

    @property
    def open_requests(self) -> int:
        """Requests sent and not ended."""
        return sum(target.state.requests for target in self.targets)


class Workers:
    """The registry of workers. `on_change` is called whenever workers or their capacity may have changed."""

    def __init__(self, settings: RouterSettings, index: PrefixIndex) -> None:
        self._settings, self._index = settings, index
        self._by_url: dict[str, Worker] = {}
        self._made = 0
        self._speeds: dict[frozenset[str], TtftModel] = {}
        self._routable: list[Target] = []
        self._by_model: dict[str, list[Target]] = {}
        self._prefilling: list[Target] = []
        self.has_disagg_workers = False
        """Whether any worker only decodes."""
        self.adapters: frozenset[str] = frozenset()
        """Names of all adapters of all workers."""
        self._context: ssl.SSLContext | None = None
        self.on_change: Callable[[], None] = lambda: None

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._by_url.values()))

    def __len__(self) -> int:
        return len(self._by_url)

    def add(self, url_text: str, source: str, role: str = "") -> Worker:
        """Add a worker. Raises ConfigError for an invalid or duplicate URL and for an unknown role."""
        if role not in ("", PREFILL, DECODE):
            raise ConfigError(f"unknown worker role {role!r}; use {PREFILL}, {DECODE}, or no role for both")
        url = WorkerUrl.parse(url_text)
        if str(url) in self._by_url:
            raise ConfigError(f"worker {url} already exists; name each worker once")
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
        """Remove a worker and its index entries. Its open requests continue."""
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
        """Set what the worker serves, from its /v1/models: models, and adapters by their name and by "base:name".

        If the base models change, its cache counts as lost.
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
        """Apply a worker's /server_info: ranks, boot id, role and limits. Values of a wrong type are ignored."""
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
        """Read the PD role and bootstrap ports, under SGLang's names."""
        role, port = info.get("disaggregation_mode"), info.get("disaggregation_bootstrap_port")
        if port and _is_port(port):
            worker.bootstrap_port = port
        ports = info.get("disaggregation_bootstrap_ports")
        worker.bootstrap_ports = tuple(ports) if isinstance(ports, list) and all(map(_is_port, ports)) else ()
        if role in (PREFILL, DECODE) and not worker.role:
            worker.role = role
            self.changed()

    def restarted(self, worker: Worker) -> None:
        """The engine has restarted or is down: its cache and what was learnt about it are void."""
        worker.restarts += 1
        self.flushed(worker)
        for target in worker.targets:
            target.state.forget()

    def flushed(self, worker: Worker) -> None:
        """The engine's cache is empty."""
        for target in worker.targets:
            self._index.clear_target(target.state.name)

    def set_healthy(self, worker: Worker, healthy: bool) -> None:
        """Set the health of a worker, which resets its circuit breakers if it changes."""
        if worker.healthy == healthy:
            return
        worker.healthy = healthy
        for target in worker.targets:
            target.breaker.reset()
        self.changed()

    def changed(self) -> None:
        """Recompute the routable targets."""
        workers = self._by_url.values()
        routable = [worker for worker in workers if worker.healthy and not worker.draining]
        self._routable = [target for worker in routable if worker.role != PREFILL for target in worker.targets]
        self._prefilling = [target for worker in routable if worker.role == PREFILL for target in worker.targets]
        self.has_disagg_workers = any(worker.role == DECODE for worker in workers)
        self.adapters = frozenset[str]().union(*(worker.models - worker.bases for worker in workers))
        self._by_model.clear()
        self.on_change()

    def eligible(self, model: str, rank: int | None, now_s: float) -> list[Target]:
        """Targets that may serve `model` ("" for any) on `rank` (None for any).

        A model that no worker lists may be an alias at any of them, so all targets are eligible for it.
        """
        found = self._by_model.get(model)
        if found is None:
            found = self._serving(model)
        found = [target for target in found if target.breaker.open_until_s <= now_s]
        return found if rank is None else _of_rank(found, rank)

    def prefilling(self, model: str, rank: int | None, now_s: float) -> list[Target]:
        """Targets of prefill workers for `model` and `rank`, as in `eligible`."""
        named = [target for target in self._prefilling if model in target.worker.models]
        found = [target for target in named or self._prefilling if target.breaker.open_until_s <= now_s]
        return found if rank is None else _of_rank(found, rank)

    def _serving(self, model: str) -> list[Target]:
        """Routable targets for a model, cached if some worker lists the model."""
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
        """The time model that all targets of one set of base models share."""
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
