"""Routers in front of simulated replicas, in virtual time: the policies, index, bookkeeping and queue of the proxy.

Each class follows its counterpart in `router/`, so that the same requests lead to the same choices
(tests/contract/test_same_choices.py).
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from tokenyard.base import NS_PER_S, Finish, Request, SchedulerSettings
from tokenyard.base.blocks import BLOCK_TOKENS
from tokenyard.routing.balance import Assignment
from tokenyard.routing.load import DispatchedRequest, TargetLoad, TtftModel, preempts_by, target_has_capacity
from tokenyard.routing.policies import KEY_BYTES, PolicyOptions, RequestFeatures, make_policy, prefix_key, splitmix64
from tokenyard.routing.prefix_index import BlockHashTranslator, PrefixIndex, Prompt, token_prompt
from tokenyard.routing.queue import QueueEntry, WaitingQueue
from tokenyard.sim.engine.sim_scheduler import NEVER_NS
from tokenyard.sim.fleet.dp_ranks import EngineRanks, limits_rank, refused
from tokenyard.sim.fleet.fleet_settings import Fleet

INDEX_BYTES = 1 << 30
LOSS_STREAM = 1
SWEEP_NS = NS_PER_S // 4
"""How often the proxy looks for requests that have waited too long."""


@dataclass(slots=True, eq=False)
class RoutedRequest:
    """A request that a router has open.

    target: its target, -1 while it waits.
    sent: how its load is counted at the target.
    place: its assignment to a rank, in an engine that chooses ranks itself.
    tried_ranks: ranks of that engine that had no room for it.
    prefills: whether the target computes its prompt.
    """

    request: Request
    router: "SimRouter"
    prompt: Prompt
    key: int
    target: int = -1
    scheduler: int = -1
    sent: DispatchedRequest | None = None
    place: Assignment | None = None
    tried: set[int] = field(default_factory=set)
    tried_ranks: set[int] = field(default_factory=set)
    waiting: "QueueEntry[RoutedRequest] | None" = None
    prefills: bool = True

    @property
    def tokens(self) -> int:
        """Prompt length in tokens."""
        return len(self.request.prompt_ids)

    @property
    def priority(self) -> int:
        """Its priority, 0 if it has none."""
        return self.request.priority or 0


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

    def target_names(self) -> list[str]:
        """The names of all targets, as in the proxy."""
        ranks = [""] if self.per_target == self.ranks else [f"@{rank}" for rank in range(self.ranks)]
        return [f"r{replica}{rank}" for replica in range(self.replicas) for rank in ranks]

    def replica_of(self, target: int) -> int:
        """The replica of a target."""
        return target * self.per_target // self.ranks

    def schedulers_of(self, replica: int) -> range:
        """The schedulers of a replica."""
        return range(replica * self.ranks, (replica + 1) * self.ranks)


class SimRouter:
    """One router: chooses a target for each request, queues requests that find no room, and learns from completions."""

    def __init__(self, policy: str, places: FleetLayout, fleet: Fleet, seed: int) -> None:
        self._policy = make_policy(policy, PolicyOptions(seed=seed))
        speed, names = TtftModel(), places.target_names()
        room = fleet.max_worker_requests or -(-places.room * places.per_target // places.ranks)
        self.targets = [TargetLoad(name, speed, room=room) for name in names]
        self.closed: set[int] = set()
        self.queue: WaitingQueue[RoutedRequest] = WaitingQueue(
            aging_s=fleet.queue_aging_s, weights=fleet.tenant_weights
        )
        self.index = PrefixIndex(INDEX_BYTES)
        self._fleet = fleet
        self._blocks = [BlockHashTranslator() for _ in range(places.replicas * places.ranks)]
        self._levels: list[Counter[int]] = [Counter() for _ in names]
        self._preempts_by = preempts_by(asdict(places.settings))
        for number, target in enumerate(self.targets):
            target.kv_tokens = places.pools[places.replica_of(number)] * places.per_target
            held = fleet.assumed_pool_tokens or target.kv_tokens
            self.index.limit(target.name, max(held // BLOCK_TOKENS, 1))

    @property
    def needs_prefix(self) -> bool:
        """Whether its policy uses prefix matches."""
        return self._policy.needs_prefix

    def has_capacity(self, call: RoutedRequest) -> bool:
        """Whether any target has capacity for a request now."""
        return any(number not in self.closed and self._fits(call, number) for number in range(len(self.targets)))

    def _fits(self, call: RoutedRequest, number: int) -> bool:
        """Whether target `number` has capacity for a request."""
        state = self.targets[number]
        return not state.full or target_has_capacity(state, self._levels[number], self._preempts_by, call.priority)

    def enqueue(self, call: RoutedRequest, now_s: float) -> RoutedRequest | None:
        """Queue a request until there is room; returns the request that is refused because the queue is full."""
        request, queue, fleet = call.request, self.queue, self._fleet
        refused = None
        if len(queue) >= fleet.queue_size:
            lowest = queue.lowest(now_s)
            if lowest is None or lowest.priority >= call.priority:
                return call
            queue.remove(lowest)
            refused = lowest.item
        deadline_s = math.inf if request.deadline_ns is None else now_s + request.deadline_ns / NS_PER_S
        call.waiting = queue.push(
            call,
            now_s,
            tokens=call.tokens,
            priority=call.priority,
            tenant=request.tenant,
            deadline_s=deadline_s,
            expires_s=min(deadline_s, now_s + fleet.queue_timeout_s),
        )
        return refused

    def dispatch(self, call: RoutedRequest, now_s: float) -> None:
        """Choose the target of a request and count its load there."""
        call.waiting = None
        targets, closed = self.targets, self.closed
        eligible = [number for number in range(len(targets)) if number not in closed]
        if self._preempts_by is None:
            fresh = [number for number in eligible if not 0 < targets[number].room <= targets[number].requests]
        else:
            fresh = [number for number in eligible if self._fits(call, number)]
        fresh = fresh or eligible
        if call.tried:
            untried = [number for number in fresh if number not in call.tried]
            if not untried:
                call.tried.clear()
            fresh = untried or fresh
        states = [targets[number] for number in fresh]
        matched = self._matched(call.prompt, states)
        features = RequestFeatures(call.tokens, matched, call.key)
        place = self._policy.rank(features, states).order[0]
        target = states[place]
        self._policy.sent(features, target)
        if matched:
            self.index.insert(target.name, call.prompt.digests)
        call.target = fresh[place]
        call.tried.add(call.target)
        call.sent = DispatchedRequest(
            target, call.tokens, matched[place] if matched else 0, now_s, prefills=call.prefills
        )
        self._levels[call.target][call.priority] += 1

    def ended(self, call: RoutedRequest) -> None:
        """Remove the load of a request that has left its target."""
        assert call.sent is not None
        call.sent.end()
        levels = self._levels[call.target]
        levels[call.priority] -= 1
        if not levels[call.priority]:
            del levels[call.priority]

    def _matched(self, prompt: Prompt, targets: Sequence[TargetLoad]) -> list[int]:
        """Predicted prefix match of a prompt at each target, in tokens; empty if the policy does not use it."""
        if not prompt.digests or not self.needs_prefix:
            return []
        blocks = self.index.matches([target.name for target in targets], prompt.digests)
        return [round(prompt.share(held) * prompt.size) if held else 0 for held in blocks]

    def apply_kv_events(self, scheduler: int, target: int, records: list[Any]) -> None:
        """Apply the KV events of a scheduler of a target to the index."""
        name = self.targets[target].name
        for record in records:
            stored, removed, cleared = self._blocks[scheduler].apply(record)
            if cleared:
                self.index.clear_target(name)
            self.index.insert(name, stored)
            self.index.remove(name, removed)

    def died(self, target: int, schedulers: Sequence[int]) -> None:
        """Drop what the index holds of a target that lost its cache."""
        self.index.clear_target(self.targets[target].name)
        self.targets[target].forget()
        for scheduler in schedulers:
            self._blocks[scheduler] = BlockHashTranslator()


Send = Callable[[Request, int, int], None]
"""(request, scheduler, now in ns)"""

Refuse = Callable[[int, int], None]
"""(number of the request, now in ns)"""


class SimRouting:
    """All routers of a fleet and their open requests.

    room: set when a request may have found room since the last `serve`.
    alike: whether prompts may share prefixes. If not, no target can match a new prompt, and the index is not searched.
    first_seen: when the client saw the first token, for requests that are not over.
    """

    def __init__(self, policy: str, places: FleetLayout, fleet: Fleet, seed: int, send: Send, refuse: Refuse) -> None:
        """Raises ConfigError for an unknown policy."""
        self.room, self.alike = False, True
        self.predicted_tokens = 0
        self.first_seen: dict[int, int] = {}
        self._places, self._fleet, self._seed = places, fleet, seed
        self._send, self._refuse = send, refuse
        self._routers = [SimRouter(policy, places, fleet, seed + number) for number in range(fleet.routers)]
        self._engines = [self._engine(pool_tokens) for pool_tokens in places.pools]
        self._retried: Counter[str] = Counter()
        self._open: dict[int, RoutedRequest] = {}
        self._late: deque[tuple[int, int, list[Any]]] = deque()
        self._loss = np.random.default_rng([seed, LOSS_STREAM])

    def _engine(self, pool_tokens: int) -> EngineRanks | None:
        if not self._places.engines_choose:
            return None
        places = self._places
        method = self._fleet.load_balance_method
        return EngineRanks(method, places.ranks, pool_tokens, places.settings, places.disk_tokens)

    def arrive(self, request: Request, now: int) -> None:
        """A request arrives at one of the routers: it is sent, queued or refused."""
        self._apply_kv_events_until(now)
        router = self._routers[splitmix64(request.number + self._seed) % len(self._routers)]
        ids = request.prompt_ids
        prompt = token_prompt(ids) if router.needs_prefix and self.alike else Prompt(size=len(ids))
        self._start(RoutedRequest(request, router, prompt, prefix_key(ids[: KEY_BYTES // 4].tobytes())), now)

    def _start(self, call: RoutedRequest, now: int) -> None:
        router = call.router
        fits = router.has_capacity(call)
        if fits and not router.queue:
            self._dispatch(call, now)
            return
        refused = router.enqueue(call, now / NS_PER_S)
        if refused is not None:
            self._refuse(refused.request.number, now)
        if fits:
            self.serve(now)

    def serve(self, now: int) -> None:
        """Assign free room to the most urgent queued requests."""
        self.room = False
        self._apply_kv_events_until(now)
        for router in self._routers:
            while router.queue:
                entry = router.queue.pop(now / NS_PER_S, router.has_capacity)
                if entry is None:
                    break
                self._dispatch(entry.item, now)

    def _dispatch(self, call: RoutedRequest, now: int) -> None:
        call.router.dispatch(call, now / NS_PER_S)
        assert call.sent is not None
        self.predicted_tokens += call.sent.predicted
        self._open[call.request.number] = call
        call.scheduler = call.target * self._places.per_target
        replica, rank = divmod(call.scheduler, self._places.ranks)
        engine = self._engines[replica]
        if engine is not None:
            wanted = rank if self._places.dp_aware else None
            call.tried_ranks.clear()
            call.place = engine.choose(call.request, wanted, (), now / NS_PER_S)
            call.scheduler += call.place.rank - rank
        self._send(call.request, call.scheduler, now)

    def move_to_other_rank(self, finish: Finish, now: int) -> int | None:
        """The scheduler to which the engine moves a request that one of its ranks refused; None if the request has
        ended.
        """
        call = self._open[finish.number]
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
        self._retried.update(submitted=1, aborted=1, prompt_tokens=call.tokens, rejected=finish.cause != "displaced")
        return call.scheduler

    @property
    def engines_choose(self) -> bool:
        """See `FleetLayout`."""
        return self._places.engines_choose

    @property
    def retried(self) -> Mapping[str, int]:
        """Counters of requests that moved to another rank; an engine's totals count each such request once."""
        return self._retried

    def next_sweep_ns(self, now: int) -> int:
        """Time (ns) of the next check for requests that have waited too long; NEVER_NS while none waits."""
        return (now // SWEEP_NS + 1) * SWEEP_NS if any(router.queue for router in self._routers) else NEVER_NS

    def sweep(self, now: int) -> None:
        """End requests that have waited too long."""
        for router in self._routers:
            for entry in router.queue.expired(now / NS_PER_S):
                self._refuse(entry.item.request.number, now)
        self.room = True

    def first_token(self, number: int, cached_tokens: int, now: int) -> None:
        """Record the first token of request `number`; `cached_tokens` of its prompt were in the cache."""
        call = self._open[number]
        assert call.sent is not None
        call.sent.first_token(now / NS_PER_S)
        if call.place is not None:
            call.place.first_token(now / NS_PER_S)
            call.place.hit(cached_tokens)
        self.first_seen.setdefault(number, now)

    def finished(self, finish: Finish) -> None:
        """Record the end of a request."""
        call = self._open.pop(finish.number)
        assert call.sent is not None
        call.sent.hit(finish.cached_tokens)
        call.router.ended(call)
        if call.place is not None:
            call.place.end()
        self.room = True

    def kv_events_sent(self, scheduler: int, records: list[Any], now: int) -> None:
        """Receive the KV events of a scheduler."""
        lag_s = self._fleet.kv_event_lag_s
        if records and lag_s is not None and self._loss.random() >= self._fleet.kv_event_loss:
            self._late.append((now + round(lag_s * NS_PER_S), scheduler, records))

    def close(self, replica: int) -> None:
        """Send the replica no new requests."""
        for router in self._routers:
            router.closed.update(self._targets_of(replica))

    def open(self, replica: int) -> None:
        """Send the replica requests again, or for the first time."""
        for router in self._routers:
            router.closed.difference_update(self._targets_of(replica))
        self.room = True

    def died(self, replica: int, now: int) -> None:
        """A replica died. Its requests restart elsewhere.

        An engine that continues an answer also has to compute all of it again.
        """
        self.close(replica)
        schedulers = self._places.schedulers_of(replica)
        for target in self._targets_of(replica):
            first = target * self._places.per_target
            for router in self._routers:
                router.died(target, range(first, first + self._places.per_target))
        self._late = deque(entry for entry in self._late if entry[1] not in schedulers)
        lost = [call for call in self._open.values() if call.scheduler in schedulers]
        for call in lost:
            del self._open[call.request.number]
            call.router.ended(call)
            if call.place is not None:
                call.place.end()
        engine = self._engines[replica]
        if engine is not None:
            engine.lost()
        for call in lost:
            self.room = True
            self._start(call, now)

    def _targets_of(self, replica: int) -> range:
        per_replica = self._places.ranks // self._places.per_target
        return range(replica * per_replica, (replica + 1) * per_replica)

    def _apply_kv_events_until(self, now: int) -> None:
        """Apply the KV events that have arrived. They are stored in the order in which they were sent."""
        while self._late and self._late[0][0] <= now:
            _, scheduler, records = self._late.popleft()
            for router in self._routers:
                router.apply_kv_events(scheduler, scheduler // self._places.per_target, records)
