"""Routers in front of simulated replicas: drives the dispatch machine of the proxy in virtual time."""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from tokenyard.base import NS_PER_S, Finish, Request, SchedulerSettings
from tokenyard.base.blocks import BLOCK_TOKENS
from tokenyard.base.sessions import tenant_session
from tokenyard.routing.balance import Assignment
from tokenyard.routing.dispatch import Action, Dispatcher, PendingRequest, Refuse, RequestFacts, Send
from tokenyard.routing.dispatch_settings import DispatchSettings
from tokenyard.routing.policies import KEY_BYTES, PolicyOptions, prefix_key, splitmix64
from tokenyard.routing.prefix_index import BlockHashTranslator, PrefixIndex, Prompt, token_prompt
from tokenyard.routing.registry import make_policy
from tokenyard.routing.workers import DECODE, Target, Worker, Workers
from tokenyard.sim.fleet.dp_ranks import EngineRanks, limits_rank, refused
from tokenyard.sim.fleet.fleet_settings import Fleet

INDEX_BYTES = 1 << 30
LOSS_STREAM = 1


@dataclass(slots=True, eq=False, kw_only=True)
class SimWorker(Worker):
    """A replica as a router sees it."""

    replica: int
    """Its number in the fleet."""


class RoutedRequest(PendingRequest[SimWorker]):
    """A request that a router has open.

    scheduler: the scheduler it was sent to.
    place: its assignment to a rank, in an engine that chooses ranks itself.
    tried_ranks: ranks of that engine that had no room for it.
    """

    def __init__(self, request: Request, router: "SimRouter", facts: RequestFacts) -> None:
        super().__init__(facts, disagg=router.disagg)
        self.request, self.router = request, router
        self.scheduler = -1
        self.place: Assignment | None = None
        self.tried_ranks: set[int] = set()


@dataclass(frozen=True, slots=True)
class FleetLayout:
    """The schedulers of a fleet: `ranks` of each of `replicas`, and the targets that a router sees.

    A target is a replica, or with `dp_aware` one of its ranks.

    room: most open requests of a replica.
    pools: KV pool in tokens of a scheduler, by replica.
    settings: settings of an engine.
    disk_tokens: tokens of KV that the disk of each scheduler holds.
    """

    replicas: int
    ranks: int
    dp_aware: bool
    room: int
    pools: Sequence[int]
    settings: SchedulerSettings = field(default_factory=SchedulerSettings)
    disk_tokens: int = 0

    @property
    def per_target(self) -> int:
        """Number of schedulers per target."""
        return 1 if self.dp_aware else self.ranks

    @property
    def engines_choose(self) -> bool:
        """Whether engines take part in the choice of a rank."""
        return self.ranks > 1 and (not self.dp_aware or limits_rank(self.settings))

    def schedulers_of(self, replica: int) -> range:
        """The schedulers of a replica."""
        return range(replica * self.ranks, (replica + 1) * self.ranks)


class SimRouter:
    """One router: a dispatch machine whose workers are replicas.

    workers: the replicas by number.
    disagg: whether it chooses a prefill and a decode engine for each request.
    """

    def __init__(self, policies: Sequence[str], fleet: Fleet, seed: int) -> None:
        """`policies`: the policy, or with PD disaggregation those for prefill and for decode engines.

        Raises ConfigError for an unknown policy.
        """
        settings = DispatchSettings(
            max_worker_requests=fleet.max_worker_requests,
            dp_aware=fleet.dp_aware,
            queue_size=fleet.queue_size,
            queue_timeout_s=fleet.queue_timeout_s,
            queue_aging_s=fleet.queue_aging_s,
            tenant_weights=fleet.tenant_weights,
            health_success_threshold=1,
        )
        self.policy_failure = ""
        made = [
            make_policy(name, PolicyOptions(seed=seed), sticky=place < 1, failed=self._policy_failed)
            for place, name in enumerate(policies)
        ]
        self.disagg = len(made) > 1
        self.needs_prefix = any(policy.needs_prefix for policy in made)
        registry: Workers[SimWorker] = Workers(settings, PrefixIndex(INDEX_BYTES))
        self.machine: Dispatcher[SimWorker, RoutedRequest] = Dispatcher(registry, made[0], made[0], made[-1])
        self.workers: list[SimWorker] = []
        self._fleet = fleet
        self._blocks: dict[int, BlockHashTranslator] = {}

    def _policy_failed(self, reason: str) -> None:
        self.policy_failure = reason

    def add(self, layout: FleetLayout, role: str = "") -> None:
        """Add the replicas of a layout. They report themselves as engines do."""
        registry = self.machine.workers
        report = {**asdict(layout.settings), "dp_size": layout.ranks, "max_running_requests": layout.room}
        for pool_tokens in layout.pools:
            name = f"r{len(self.workers)}"
            worker = SimWorker(name=name, address=name, role=role, computes_alone=True, replica=len(self.workers))
            registry.join(worker)
            registry.report(worker, {**report, "max_total_num_tokens": pool_tokens * layout.per_target})
            registry.probed(worker, success=True)
            self.workers.append(worker)
            for target in worker.targets:
                held = self._fleet.assumed_pool_tokens or target.state.kv_tokens
                registry.index.limit(target.state.name, max(held // BLOCK_TOKENS, 1))

    def close(self, replica: int) -> None:
        """Send the replica no new requests."""
        self.machine.workers.drain(self.workers[replica])

    def open(self, replica: int) -> None:
        """Send the replica requests again, or for the first time."""
        worker = self.workers[replica]
        self.machine.workers.drain(worker, draining=False)
        self.machine.workers.probed(worker, success=True)

    def down(self, replica: int, schedulers: range) -> None:
        """A replica died, and lost its cache."""
        self.machine.workers.down(self.workers[replica])
        for scheduler in schedulers:
            self._blocks.pop(scheduler, None)

    def apply_kv_events(self, scheduler: int, target: Target[SimWorker], records: list[Any]) -> None:
        """Apply the KV events of a scheduler of a target to the index."""
        name, index = target.state.name, self.machine.index
        blocks = self._blocks.setdefault(scheduler, BlockHashTranslator())
        for record in records:
            stored, removed, cleared = blocks.apply(record)
            if cleared:
                index.clear_target(name)
            index.insert(name, stored)
            index.remove(name, removed)


Submit = Callable[[Request, int, int], None]
"""(request, scheduler, now in ns)"""

Reject = Callable[[int, int], None]
"""(number of the request, now in ns)"""


class SimRouting:
    """All routers of a fleet and their open requests.

    capacity_freed: whether a request may have found capacity since the last `serve`.
    alike: whether prompts may share prefixes. If not, no target can match a new prompt, and the index is not searched.
    first_seen: when the client saw the first token, for requests that are not over.
    """

    def __init__(
        self, policies: Sequence[str], places: FleetLayout, fleet: Fleet, seed: int, submit: Submit, reject: Reject
    ) -> None:
        """Raises ConfigError for an unknown policy."""
        self.capacity_freed, self.alike = False, True
        self.predicted_tokens = 0
        self.first_seen: dict[int, int] = {}
        self._places, self._fleet, self._seed = places, fleet, seed
        self._submit, self._reject = submit, reject
        self._routers = [SimRouter(policies, fleet, seed + number) for number in range(fleet.routers)]
        for router in self._routers:
            router.add(places, DECODE if router.disagg else "")
        self._engines = [self._engine(pool_tokens) for pool_tokens in places.pools]
        self._retried: Counter[str] = Counter()
        self.open_calls: dict[int, RoutedRequest] = {}
        self._late: deque[tuple[int, int, list[Any]]] = deque()
        self._loss = np.random.default_rng([seed, LOSS_STREAM])

    def _engine(self, pool_tokens: int) -> EngineRanks | None:
        if not self._places.engines_choose:
            return None
        places = self._places
        method = self._fleet.load_balance_method
        return EngineRanks(method, places.ranks, pool_tokens, places.settings, places.disk_tokens)

    @property
    def policy_failure(self) -> str:
        """Why a user-defined policy was replaced, "" if none was."""
        return next((router.policy_failure for router in self._routers if router.policy_failure), "")

    def arrive(self, request: Request, now: int) -> None:
        """A request arrives at one of the routers: it is sent, queued or refused."""
        self._apply_kv_events_until(now)
        router = self._routers[splitmix64(request.number + self._seed) % len(self._routers)]
        ids = request.prompt_ids
        facts = RequestFacts(
            token_prompt(ids) if router.needs_prefix and self.alike else Prompt(size=len(ids)),
            len(ids),
            stream=True,
            priority=request.priority or 0,
            tenant=request.tenant,
            session=tenant_session(request.tenant, request.session),
            deadline_ns=request.deadline_ns,
            key=prefix_key(ids[: KEY_BYTES // 4].tobytes()),
        )
        call = RoutedRequest(request, router, facts)
        self._perform(router.machine.arrived(call, now), now)
        if router.machine.serve_due:
            self.serve(now)

    def serve(self, now: int) -> None:
        """Assign free capacity to the most urgent queued requests."""
        self.capacity_freed = False
        self._apply_kv_events_until(now)
        for router in self._routers:
            self._perform(router.machine.serve(now), now)

    def _perform(self, actions: Sequence[Action[RoutedRequest]], now: int) -> None:
        """Perform actions of a dispatch machine. Replicas need no probes: the schedule of events says how they are."""
        for action in actions:
            if isinstance(action, Send):
                self._send(action.request, action, now)
            elif isinstance(action, Refuse):
                action.request.router.machine.ended(action.request)
                self._reject(action.request.request.number, now)

    def _send(self, call: RoutedRequest, action: Send[RoutedRequest], now: int) -> None:
        target = action.choice.target
        self.predicted_tokens += action.choice.predicted
        # Its lists are as long as the fleet; while requests are open they would only keep the garbage collector busy.
        call.choice = None
        self.open_calls[call.request.number] = call
        replica, rank = target.worker.replica, target.rank or 0
        call.scheduler = replica * self._places.ranks + rank
        engine = self._engines[replica]
        if engine is not None:
            wanted = rank if self._places.dp_aware else None
            call.tried_ranks.clear()
            call.place = engine.choose(call.request, wanted, (), now / NS_PER_S)
            call.scheduler += call.place.rank - rank
        self._submit(call.request, call.scheduler, now)

    def move_to_other_rank(self, finish: Finish, now: int) -> int | None:
        """The scheduler to which the engine moves a request that one of its ranks refused; None if the request has
        ended.
        """
        call = self.open_calls[finish.number]
        if call.place is None or not refused(finish):
            return None
        replica, rank = divmod(call.scheduler, self._places.ranks)
        engine = self._engines[replica]
        assert engine is not None
        call.tried_ranks.add(rank)
        place = engine.choose(call.request, None, call.tried_ranks, now / NS_PER_S)
        if place.rank in call.tried_ranks:
            place.end()
            return None
        call.place.end()
        call.place, call.scheduler = place, replica * self._places.ranks + place.rank
        self._retried.update(
            submitted=1, aborted=1, prompt_tokens=call.facts.tokens, rejected=finish.cause != "displaced"
        )
        return call.scheduler

    @property
    def engines_choose(self) -> bool:
        """See `FleetLayout`."""
        return self._places.engines_choose

    @property
    def retried(self) -> Mapping[str, int]:
        """Counters of requests that moved to another rank; an engine's totals count each such request once."""
        return self._retried

    @property
    def waiting(self) -> int:
        """Number of requests that wait at the routers."""
        return sum(len(router.machine.queue) for router in self._routers)

    def next_sweep_ns(self, now: int) -> int:
        """When to call `sweep`, for the time after `now` (ns); NEVER_NS while no request waits."""
        return min([router.machine.next_ns(now) for router in self._routers])

    def sweep(self, now: int) -> None:
        """End requests that have waited too long, and assign free capacity."""
        self._apply_kv_events_until(now)
        for router in self._routers:
            self._perform(router.machine.tick(now), now)

    def first_token(self, number: int, cached_tokens: int, now: int) -> None:
        """Record the first token of request `number`; `cached_tokens` of its prompt were in the cache."""
        call = self.open_calls[number]
        call.router.machine.first_token(call, now)
        if call.place is not None:
            call.place.first_token(now / NS_PER_S)
            call.place.hit(cached_tokens)
        self.first_seen.setdefault(number, now)

    def finished(self, finish: Finish) -> None:
        """Record the end of a request."""
        call = self.open_calls.pop(finish.number)
        assert call.sent is not None
        call.sent.hit(finish.cached_tokens)
        call.router.machine.ended(call)
        self.capacity_freed = True
        if call.place is not None:
            call.place.end()

    def kv_events_sent(self, scheduler: int, records: list[Any], now: int) -> None:
        """Receive the KV events of a scheduler."""
        lag_s = self._fleet.kv_event_lag_s
        if records and lag_s is not None and self._loss.random() >= self._fleet.kv_event_loss:
            self._late.append((now + round(lag_s * NS_PER_S), scheduler, records))

    def close(self, replica: int) -> None:
        """Send the replica no new requests."""
        for router in self._routers:
            router.close(replica)

    def open(self, replica: int) -> None:
        """Send the replica requests again, or for the first time."""
        for router in self._routers:
            router.open(replica)
        self.capacity_freed = True

    def died(self, replica: int, now: int) -> None:
        """A replica died. Its requests restart elsewhere.

        An engine that continues an answer also has to compute all of it again.
        """
        schedulers = self._places.schedulers_of(replica)
        for router in self._routers:
            router.down(replica, schedulers)
        self._late = deque(entry for entry in self._late if entry[1] not in schedulers)
        lost = [call for call in self.open_calls.values() if call.scheduler in schedulers]
        for call in lost:
            del self.open_calls[call.request.number]
            call.router.machine.released(call)
            if call.place is not None:
                call.place.end()
        engine = self._engines[replica]
        if engine is not None:
            engine.lost()
        for call in lost:
            self._perform(call.router.machine.place(call, now), now)
            if call.router.machine.serve_due:
                self.serve(now)

    def _apply_kv_events_until(self, now: int) -> None:
        """Apply the KV events that have arrived. They are stored in the order in which they were sent."""
        while self._late and self._late[0][0] <= now:
            _, scheduler, records = self._late.popleft()
            replica, rank = divmod(scheduler, self._places.ranks)
            for router in self._routers:
                targets = router.workers[replica].targets
                router.apply_kv_events(scheduler, targets[rank % len(targets)], records)
