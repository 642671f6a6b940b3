"""Workers and targets as the dispatch machine sees them: health, circuit breakers, models, roles and capacity. Pure.

A worker is the router's view of one engine. A target is a worker, or one data-parallel rank of it. Drivers derive from
`Worker` and add what they need to reach the engine.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from tokenyard.base import NS_PER_S
from tokenyard.routing.dispatch_settings import DispatchSettings
from tokenyard.routing.load import TargetLoad, TtftModel, preempts_by, target_has_capacity
from tokenyard.routing.prefix_index import PrefixIndex

MAX_RANKS = 1024
PREFILL, DECODE = "prefill", "decode"
"""Roles of workers with PD disaggregation."""

REFUSES_REQUESTS = ("loading", "draining")
"""`status` in /server_info of an engine that is alive but accepts no requests."""

FAST_PROBE_S = 0.5
"""Maximum seconds between two probes of a worker that has not started yet or has just failed a probe."""

CLOSED_NS = -1


class CircuitBreaker:
    """A circuit breaker (Nygard 2007): closed, open after failures in a row, then on trial until enough succeed."""

    def __init__(self, settings: DispatchSettings) -> None:
        self._settings = settings
        self._failures = self._successes = 0
        self.open_until_ns = CLOSED_NS
        """Requests may be sent from this time on: `CLOSED_NS` while closed, else the end of the timeout."""

    @property
    def state(self) -> str:
        """closed or open."""
        return "open" if self.open_until_ns > CLOSED_NS else "closed"

    def succeeded(self) -> None:
        """A request succeeded."""
        self._failures = 0
        if self.open_until_ns > CLOSED_NS:
            self._successes += 1
            if self._successes >= self._settings.cb_success_threshold:
                self.reset()

    def failed(self, now: int) -> None:
        """A request failed at the target."""
        self._failures += 1
        self._successes = 0
        if self.open_until_ns > CLOSED_NS or self._failures >= self._settings.cb_failure_threshold:
            self.open_until_ns = now + round(self._settings.cb_timeout_s * NS_PER_S)

    def reset(self) -> None:
        """Close the breaker and reset its counts."""
        self._failures = self._successes = 0
        self.open_until_ns = CLOSED_NS


@dataclass(slots=True, eq=False)
class Worker:
    """An engine as the dispatch machine sees it."""

    name: str
    """The name that clients may see, such as "w0"."""
    address: str
    """Unique, and the same in every router; hash policies use it."""
    targets: "list[Target[Any]]" = field(default_factory=list)
    """The worker itself, or its data-parallel ranks."""
    role: str = ""
    """PREFILL, DECODE, or "" for both."""
    healthy: bool | None = None
    """None before the first probe."""
    draining: bool = False
    """Whether it gets no new requests."""
    refuses: bool = False
    """Whether it reports that it accepts no requests."""
    models: frozenset[str] = frozenset()
    """Names it serves; empty while unknown."""
    bases: frozenset[str] = frozenset()
    """Those of `models` that are neither adapters nor aliases."""
    aliases: frozenset[str] = frozenset()
    """Those of `models` that are other names of its base model."""
    boot_id: str = ""
    """Changes when the engine restarts; "" if it reports none."""
    restarts: int = 0
    """Restarts seen so far."""
    continues: str = ""
    """How it can continue a stream of another worker; "" if it cannot."""
    computes_alone: bool = False
    """Whether it computes the prompt itself if it only decodes and no prefill worker did."""
    preempts_by: int | None = None
    """Priority margin above which it preempts a running request; None if it never preempts."""
    good_probes: int = 0
    """Successful probes in a row."""
    bad_probes: int = 0
    """Failed probes in a row."""

    @property
    def state(self) -> str:
        """starting, healthy, unhealthy or draining."""
        if self.draining:
            return "draining"
        return "starting" if self.healthy is None else "healthy" if self.healthy else "unhealthy"

    @property
    def open_requests(self) -> int:
        """Requests sent and not ended."""
        return sum(target.state.requests for target in self.targets)


W = TypeVar("W", bound=Worker)


@dataclass(slots=True, eq=False)
class Target(Generic[W]):
    """A worker, or one of its ranks: what the routing chooses."""

    worker: W
    """The worker it belongs to."""
    rank: int | None
    """Data-parallel rank; None for a worker with a single one."""
    name: str
    """The name that clients may see."""
    state: TargetLoad
    """Load and speed, as policies see them."""
    breaker: CircuitBreaker
    """Its circuit breaker."""
    levels: Counter[int] = field(default_factory=Counter)
    """Open requests by priority."""
    publishes: bool = False
    """Whether KV events have come since its engine was last known to have restarted; they say what it caches."""

    def has_capacity(self, priority: int) -> bool:
        """Whether a request of `priority` fits: into free capacity, or by preempting requests of lower priority."""
        return target_has_capacity(self.state, self.levels, self.worker.preempts_by, priority)


class Workers(Generic[W]):
    """The registry of workers.

    capacity_freed: whether a request may have found capacity since the dispatch machine last served its queue.
    """

    def __init__(self, settings: DispatchSettings, index: PrefixIndex) -> None:
        self.settings, self.index = settings, index
        self.capacity_freed = False
        self._by_address: dict[str, W] = {}
        self._speeds: dict[frozenset[str], TtftModel] = {}
        self._routable: list[Target[W]] = []
        self._by_model: dict[str, list[Target[W]]] = {}
        self._prefilling: list[Target[W]] = []
        self.has_disagg_workers = False
        """Whether any worker only decodes."""
        self.adapters: frozenset[str] = frozenset()
        """Names of all adapters of all workers."""
        self._bases: dict[str, str] = {}
        self._only_base = ""

    def __iter__(self) -> Iterator[W]:
        return iter(list(self._by_address.values()))

    def __len__(self) -> int:
        return len(self._by_address)

    def at(self, address: str) -> W | None:
        """The worker with this address."""
        return self._by_address.get(address)

    def booted_as(self, prefix: str, model: str) -> W | None:
        """The worker that gets requests for `model` ("" for any) and whose boot id begins with `prefix`."""
        serving = self._by_model.get(model) or self._serving(model)
        return next((target.worker for target in serving if target.worker.boot_id.startswith(prefix)), None)

    def join(self, worker: W) -> W:
        """Add a worker. It gets requests once a probe has succeeded."""
        self._by_address[worker.address] = worker
        self.set_ranks(worker, 1)
        return worker

    def remove(self, worker: W) -> None:
        """Remove a worker and its index entries. Its open requests continue."""
        self._by_address.pop(worker.address, None)
        worker.draining = True
        for target in worker.targets:
            self.index.remove_target(target.state.name)
        self.changed()

    def drain(self, worker: W, *, draining: bool = True) -> None:
        """Stop new requests to a worker, or let it have requests again."""
        worker.draining = draining
        self.changed()

    def set_ranks(self, worker: W, ranks: int) -> None:
        """Give the worker one target, or one for each of its `ranks` if there are several."""
        wanted = [None] if ranks <= 1 else list(range(min(ranks, MAX_RANKS)))
        if [target.rank for target in worker.targets] == wanted:
            return
        for target in worker.targets:
            self.index.remove_target(target.state.name)
        worker.targets = []
        for rank in wanted:
            suffix = "" if rank is None else f"@{rank}"
            room = self.settings.max_worker_requests
            state = TargetLoad(worker.address + suffix, self._speed_of(worker), room=room)
            worker.targets.append(Target(worker, rank, worker.name + suffix, state, CircuitBreaker(self.settings)))
        self.changed()

    def set_models(
        self, worker: W, models: frozenset[str], bases: frozenset[str], aliases: frozenset[str] = frozenset()
    ) -> None:
        """Set the names that a worker serves, which of them are base models, and which other names of its base model.

        If the base models change, its cache counts as lost.
        """
        if models == worker.models:
            return
        if worker.bases and bases != worker.bases:
            self.restarted(worker)
        worker.models, worker.bases, worker.aliases = models, bases, aliases
        for target in worker.targets:
            target.state.speed = self._speed_of(worker)
        self.changed()

    def report(self, worker: W, info: Mapping[str, Any]) -> None:
        """Apply an engine's report about itself, its /server_info: ranks, boot id, role and limits.

        Values of a wrong type are ignored.
        """
        boot_id, ranks = str(info.get("boot_id") or ""), info.get("dp_size")
        if worker.boot_id and boot_id != worker.boot_id:
            self.restarted(worker)
        worker.boot_id = boot_id
        if self.settings.dp_aware and isinstance(ranks, int) and not isinstance(ranks, bool):
            self.set_ranks(worker, ranks)
        refuses = info.get("status") in REFUSES_REQUESTS
        if refuses != worker.refuses:
            worker.refuses = refuses
            self.changed()
        role = info.get("disaggregation_mode")
        if role in (PREFILL, DECODE) and not worker.role:
            worker.role = role
            self.changed()
        worker.preempts_by = preempts_by(info)
        pool = info.get("max_total_num_tokens")
        if type(pool) is int and pool > 0:
            for target in worker.targets:
                target.state.kv_tokens = pool
        most = info.get("max_running_requests")
        if not self.settings.max_worker_requests and type(most) is int and most > 0:
            for target in worker.targets:
                target.state.room = -(-most // len(worker.targets))

    def probed(self, worker: W, *, success: bool) -> None:
        """A probe of the worker has ended: update its health."""
        settings = self.settings
        worker.good_probes = worker.good_probes + 1 if success else 0
        worker.bad_probes = 0 if success else worker.bad_probes + 1
        if success and (worker.healthy is None or worker.good_probes >= settings.health_success_threshold):
            self.set_healthy(worker, True)
        elif worker.healthy and worker.bad_probes >= settings.health_failure_threshold:
            self.set_healthy(worker, False)

    def probe_interval_s(self, worker: W) -> float:
        """Seconds until the next probe of a worker."""
        usual_s = self.settings.health_check_interval_s
        return usual_s if worker.healthy and not worker.bad_probes else min(usual_s, FAST_PROBE_S)

    def down(self, worker: W) -> None:
        """No process listens at the worker's address: the next one starts with an empty cache."""
        if worker.healthy:
            self.set_healthy(worker, False)
            self.flushed(worker)
            self.restarted(worker)

    def restarted(self, worker: W) -> None:
        """The engine or one of its ranks has restarted: its cache and what was learnt about it are void.

        Where KV events come, these tell of the loss: a report comes up to a probe interval late, and would clear what
        has been cached since then.
        """
        worker.restarts += 1
        for target in worker.targets:
            target.state.forget()
            if not target.publishes:
                self.index.clear_target(target.state.name)
            target.publishes = False

    def flushed(self, worker: W) -> None:
        """The engine's cache is empty."""
        for target in worker.targets:
            self.index.clear_target(target.state.name)

    def set_healthy(self, worker: W, healthy: bool) -> None:
        """Set the health of a worker, which resets its circuit breakers if it changes."""
        if worker.healthy == healthy:
            return
        worker.healthy = healthy
        for target in worker.targets:
            target.breaker.reset()
        self.changed()

    def changed(self) -> None:
        """Recompute the routable targets."""
        workers = self._by_address.values()
        routable = [worker for worker in workers if worker.healthy and not worker.draining and not worker.refuses]
        self._routable = [target for worker in routable if worker.role != PREFILL for target in worker.targets]
        self._prefilling = [target for worker in routable if worker.role == PREFILL for target in worker.targets]
        self.has_disagg_workers = any(worker.role == DECODE for worker in workers)
        self.adapters = frozenset[str]().union(*(w.models - w.bases - w.aliases for w in workers))
        self._bases = {name: base for w in workers if len(w.bases) == 1 for base in w.bases for name in w.models}
        self._bases |= {base: base for worker in workers for base in worker.bases}
        bases = self.base_models
        self._only_base = bases[0] if len(bases) == 1 else ""
        self._by_model.clear()
        self.capacity_freed = True

    def eligible(self, model: str, rank: int | None, now: int) -> list[Target[W]]:
        """Targets that may serve `model` ("" for any) on `rank` (None for any).

        A model that no worker lists may be an alias at any of them, so all targets are eligible for it.
        """
        found = self._by_model.get(model)
        if found is None:
            found = self._serving(model)
        found = [target for target in found if target.breaker.open_until_ns <= now]
        return found if rank is None else _of_rank(found, rank)

    @property
    def base_models(self) -> list[str]:
        """The base models of all workers, healthy or not, by name."""
        return sorted({base for worker in self._by_address.values() for base in worker.bases})

    def base_of(self, model: str) -> str:
        """The base model that a request for `model` means, an adapter's for an adapter; "" where that is unknown."""
        return self._bases.get(model, self._only_base)

    def serves(self, model: str) -> bool:
        """Whether a worker that is healthy and does not drain may serve `model` ("" for any)."""
        return bool(self._by_model.get(model) or self._serving(model))

    @property
    def of_several_models(self) -> bool:
        """Whether workers serve different base models, and all of them say which."""
        served = {worker.bases for worker in self._by_address.values()}
        return len(served) > 1 and frozenset() not in served

    def lists(self, model: str) -> bool:
        """Whether a worker lists this name, as a base model or an adapter."""
        return any(model in worker.models for worker in self._by_address.values())

    def named(self, model: str) -> str:
        """`model` where a worker lists it, else the only base model, "" without one."""
        return model if model in self._bases else self._only_base

    def prefilling(self, model: str, rank: int | None, now: int) -> list[Target[W]]:
        """Targets of prefill workers for `model` and `rank`, as in `eligible`."""
        named = [target for target in self._prefilling if model in target.worker.models]
        found = [target for target in named or self._prefilling if target.breaker.open_until_ns <= now]
        return found if rank is None else _of_rank(found, rank)

    def _serving(self, model: str) -> list[Target[W]]:
        """Routable targets for a model, cached if some worker lists the model."""
        named = [target for target in self._routable if model in target.worker.models]
        known = any(model in worker.models for worker in self._by_address.values())
        found = named if known else self._routable
        if known or not model:
            self._by_model[model] = found
        return found

    def has_rank(self, rank: int) -> bool:
        """Whether any worker has this rank."""
        return any(rank < max(len(worker.targets), 1) for worker in self._by_address.values())

    def _speed_of(self, worker: W) -> TtftModel:
        """The time model that all targets of one set of base models share."""
        return self._speeds.setdefault(worker.bases, TtftModel())


def _of_rank(targets: list[Target[W]], rank: int) -> list[Target[W]]:
    return [target for target in targets if target.rank == rank or (target.rank is None and rank == 0)]
