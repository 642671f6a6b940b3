"""Routers in front of simulated replicas: their own policies, index and bookkeeping, in virtual time.

Faults of a fleet are simulated as well: several routers without shared state, KV events that come late or get lost,
replicas that die and come back empty, or slow down.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from tokenyard.base import NS_PER_S, ConfigError, Finish, Request
from tokenyard.base.blocks import BLOCK_TOKENS
from tokenyard.router.choice import Features, PolicyOptions, make_policy, mix, prompt_key
from tokenyard.router.index import KvBlocks, PrefixIndex, token_prompt
from tokenyard.router.load import Sent, Speed, TargetState

INDEX_BYTES = 1 << 30
LOSS_STREAM = 1


@dataclass(frozen=True, slots=True)
class Fault:
    """From `at_s` on, `replica` takes `factor` times as long for everything; infinity means that it is dead. It
    recovers after `for_s`, with an empty cache if it was dead. A replica that is dead from 0 on is one that joins
    later.
    """

    at_s: float
    replica: int
    for_s: float
    factor: float = float("inf")

    @property
    def deadly(self) -> bool:
        """Whether the replica loses its requests and its cache."""
        return self.factor == float("inf")


@dataclass(frozen=True, slots=True)
class Fleet:
    """The routers in front of the replicas. kv_event_lag_s: delay of KV events; None if routers use only their own
    routing decisions. kv_event_loss: share of the batches of events that get lost. believed_pool_tokens: the KV pool
    that routers believe a replica to have, 0 for the true one.
    """

    routers: int = 1
    kv_event_lag_s: float | None = None
    kv_event_loss: float = 0.0
    believed_pool_tokens: int = 0
    faults: tuple[Fault, ...] = ()

    def __post_init__(self) -> None:
        """Raise ConfigError for numbers out of range."""
        if self.routers < 1 or not 0.0 <= self.kv_event_loss <= 1.0 or (self.kv_event_lag_s or 0.0) < 0.0:
            raise ConfigError("a fleet needs at least 1 router, a loss from 0 to 1 and a lag that is not negative")


@dataclass(slots=True)
class _Open:
    """A request under way: at which router and replica, and how its load is counted."""

    router: "SimRouter"
    replica: int
    sent: Sent


class SimRouter:
    """One router: chooses a replica for each request, and learns from what becomes of it, as the proxy does."""

    def __init__(self, policy: str, replicas: int, seed: int, pool_tokens: int) -> None:
        self._policy = make_policy(policy, PolicyOptions(seed=seed))
        speed = Speed()
        self.targets = [TargetState(f"r{number}", speed) for number in range(replicas)]
        self.index = PrefixIndex(INDEX_BYTES)
        self._blocks = [KvBlocks() for _ in range(replicas)]
        for target in self.targets:
            self.index.limit(target.name, max(pool_tokens // BLOCK_TOKENS, 1))

    def choose(self, request: Request, now_ns: int, dead: set[int]) -> tuple[int, Sent]:
        """The number of the replica that shall serve a request which arrives now, and the count of it."""
        alive = [number for number in range(len(self.targets)) if number not in dead] or list(range(len(self.targets)))
        tokens, prompt = len(request.prompt_ids), token_prompt(request.prompt_ids)
        targets = [self.targets[number] for number in alive]
        matched = [BLOCK_TOKENS * self.index.match(target.name, prompt.digests) for target in targets]
        features = Features(tokens, matched, prompt_key(prompt.digests), request.tenant)
        place = self._policy.rank(features, targets).order[0]
        target = targets[place]
        self._policy.sent(features, target)
        self.index.insert(target.name, prompt.digests)
        return alive[place], Sent(target, tokens, matched[place], now_ns / NS_PER_S)

    def hear(self, replica: int, records: list[Any]) -> None:
        """What has changed in a replica's cache."""
        name = self.targets[replica].name
        for record in records:
            stored, removed, cleared = self._blocks[replica].apply(record)
            if cleared:
                self.index.drop(name)
            self.index.insert(name, stored)
            self.index.remove(name, removed)

    def died(self, replica: int) -> None:
        """The replica has lost its cache."""
        self.index.drop(self.targets[replica].name)
        self.targets[replica].forget()
        self._blocks[replica] = KvBlocks()


class Routing:
    """All routers of a fleet and the requests that they have open.

    dead: replicas that get nothing. first_seen: when the client saw the first token of requests that are not over.
    """

    def __init__(self, routers: list[SimRouter], fleet: Fleet, seed: int) -> None:
        self.dead: set[int] = set()
        self.predicted_tokens = 0
        self.first_seen: dict[int, int] = {}
        self._routers, self._fleet, self._seed = routers, fleet, seed
        self._open: dict[int, _Open] = {}
        self._late: deque[tuple[int, int, list[Any]]] = deque()
        self._loss = np.random.default_rng([seed, LOSS_STREAM])

    def choose(self, request: Request, now_ns: int) -> int:
        """The number of the replica that shall serve a request which arrives now, by the router that it came to."""
        self._hear_until(now_ns)
        router = self._routers[mix(request.number + self._seed) % len(self._routers)]
        replica, sent = router.choose(request, now_ns, self.dead)
        self._open[request.number] = _Open(router, replica, sent)
        self.predicted_tokens += sent.predicted
        return replica

    def first_token(self, number: int, now_ns: int) -> None:
        """The answer to request `number` begins."""
        self._open[number].sent.first_token(now_ns / NS_PER_S)
        self.first_seen.setdefault(number, now_ns)

    def finished(self, finish: Finish) -> None:
        """A request has ended."""
        ended = self._open.pop(finish.number)
        ended.sent.hit(finish.cached_tokens)
        ended.sent.end()

    def told(self, replica: int, records: list[Any], now_ns: int) -> None:
        """A replica says what has changed in its cache."""
        lag_s = self._fleet.kv_event_lag_s
        if records and lag_s is not None and self._loss.random() >= self._fleet.kv_event_loss:
            self._late.append((now_ns + round(lag_s * NS_PER_S), replica, records))

    def died(self, replica: int) -> list[int]:
        """A replica is dead; the numbers of the requests that it had."""
        self.dead.add(replica)
        for router in self._routers:
            router.died(replica)
        self._late = deque(entry for entry in self._late if entry[1] != replica)
        lost = [number for number, one in self._open.items() if one.replica == replica]
        for number in lost:
            self._open.pop(number).sent.end()
        return lost

    def _hear_until(self, now_ns: int) -> None:
        """Replicas run one after the other up to the same time, so batches are put in order first."""
        due = sorted((entry for entry in self._late if entry[0] <= now_ns), key=lambda entry: entry[0])
        self._late = deque(entry for entry in self._late if entry[0] > now_ns)
        for _, replica, records in due:
            for router in self._routers:
                router.hear(replica, records)


def make_routing(policy: str, replicas: int, seed: int, pool_tokens: int, fleet: Fleet) -> Routing:
    """The routers of a fleet. `pool_tokens`: the KV pool of a replica, which bounds what it can hold.

    Raises ConfigError for an unknown policy or a fault of no replica.
    """
    if any(not 0 <= fault.replica < replicas for fault in fleet.faults):
        raise ConfigError(f"a fault names a replica that is not there; there are {replicas}")
    believed = fleet.believed_pool_tokens or pool_tokens
    routers = [SimRouter(policy, replicas, seed + number, believed) for number in range(fleet.routers)]
    return Routing(routers, fleet, seed)
