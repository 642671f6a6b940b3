"""The router's queue: requests that no target has capacity for, ordered across all workers. Pure.

A request is bound to a target only when it leaves the queue, so free capacity always goes to the most urgent request of
the fleet. The level of a request is its priority plus one for every `aging_s` of waiting: a request whose priority is
higher by p overtakes only if it arrives within p * `aging_s`. Requests of one level share capacity between tenants by
deficit round robin in tokens (Shreedhar and Varghese 1995). The requests of one tenant are ordered by deadline, then by
arrival; once aged, by arrival alone.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, TypeVar

QUANTUM_TOKENS = 2048.0

Item = TypeVar("Item")


@dataclass(slots=True, eq=False)
class QueueEntry(Generic[Item]):
    """A request in the queue. Times are seconds of the queue's clock.

    item: what the caller queued.
    tokens: its cost in the round robin.
    priority: before aging; larger is more urgent.
    tenant: whose share it uses.
    arrived_s: when it was queued.
    deadline_s: orders the requests of a tenant; infinity for none.
    expires_s: when it is dropped; infinity for never.
    number: order of arrival.
    gone: whether it has left the queue.
    """

    item: Item
    tokens: float
    priority: int
    tenant: str
    arrived_s: float
    deadline_s: float
    expires_s: float
    number: int
    gone: bool = False


@dataclass(slots=True)
class _TenantQueue(Generic[Item]):
    """The requests of one tenant, priority and model, by arrival and by deadline, with some that are `gone`."""

    by_arrival: deque[QueueEntry[Item]] = field(default_factory=deque)
    by_deadline: list[tuple[float, int, QueueEntry[Item]]] = field(default_factory=list)

    def oldest(self) -> QueueEntry[Item] | None:
        while self.by_arrival and self.by_arrival[0].gone:
            self.by_arrival.popleft()
        return self.by_arrival[0] if self.by_arrival else None

    def soonest(self) -> QueueEntry[Item] | None:
        while self.by_deadline and self.by_deadline[0][2].gone:
            heapq.heappop(self.by_deadline)
        return self.by_deadline[0][2] if self.by_deadline else self.oldest()


class WaitingQueue(Generic[Item]):
    """Requests that wait for capacity. Times are seconds of one clock."""

    def __init__(self, *, aging_s: float = 0.0, weights: Mapping[str, float] | None = None) -> None:
        self._aging_s, self._weights = aging_s, weights or {}
        self._queues: dict[tuple[int, str, str], _TenantQueue[Item]] = {}
        self._deficits: dict[str, float] = {}
        self._turns: dict[str, int] = {}
        self._turn = count()
        self._numbers = count()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[QueueEntry[Item]]:
        """The entries, in no order."""
        return (entry for line in self._queues.values() for entry in line.by_arrival if not entry.gone)

    def push(
        self,
        item: Item,
        now_s: float,
        *,
        tokens: float = 1.0,
        priority: int = 0,
        tenant: str = "",
        model: str = "",
        deadline_s: float = math.inf,
        expires_s: float = math.inf,
    ) -> QueueEntry[Item]:
        """Queue `item` until `expires_s` at the latest. Items of different models do not wait for each other."""
        entry = QueueEntry(item, tokens, priority, tenant, now_s, deadline_s, expires_s, next(self._numbers))
        line = self._queues.setdefault((priority, tenant, model), _TenantQueue())
        line.by_arrival.append(entry)
        if deadline_s < math.inf:
            heapq.heappush(line.by_deadline, (deadline_s, entry.number, entry))
        if tenant not in self._turns:
            self._turns[tenant], self._deficits[tenant] = next(self._turn), 0.0
        self._size += 1
        return entry

    def remove(self, entry: QueueEntry[Item]) -> None:
        """Take `entry` out; no effect if it has left already."""
        if not entry.gone:
            entry.gone = True
            self._size -= 1

    def lowest(self, now_s: float) -> QueueEntry[Item] | None:
        """The entry to drop when the queue is full: the newest of the lowest level; None if empty."""
        return min(self, key=lambda entry: (self._level(entry, now_s), -entry.number), default=None)

    def expired(self, now_s: float) -> list[QueueEntry[Item]]:
        """Take out and return the entries whose `expires_s` has passed."""
        late = [entry for entry in self if entry.expires_s <= now_s]
        for entry in late:
            self.remove(entry)
        return late

    def pop(self, now_s: float, fits: Callable[[Item], object]) -> QueueEntry[Item] | None:
        """Take out the next request for which `fits` returns a true value; None if there is none.

        Only the first entry of each tenant, priority and model is tried, so a request is not overtaken within those.
        """
        heads = self._heads(now_s)
        for level in sorted({level for level, _ in heads}, reverse=True):
            same = [entry for its_level, entry in heads if its_level == level and fits(entry.item)]
            if same:
                entry = self._round_robin(same)
                self.remove(entry)
                return entry
        return None

    def _heads(self, now_s: float) -> list[tuple[int, QueueEntry[Item]]]:
        """The first entry of each tenant queue with its level; empty tenant queues are removed."""
        heads, empty = [], []
        for key, line in self._queues.items():
            oldest = line.oldest()
            if oldest is None:
                empty.append(key)
                continue
            level = self._level(oldest, now_s)
            first = oldest if level > oldest.priority else line.soonest()
            if first is not None:
                heads.append((level, first))
        for key in empty:
            del self._queues[key]
        if empty:
            self._forget_idle_tenants()
        return heads

    def _forget_idle_tenants(self) -> None:
        """A tenant without waiting requests keeps no deficit."""
        busy = {tenant for _, tenant, _ in self._queues}
        for tenant in [name for name in self._turns if name not in busy]:
            del self._turns[tenant], self._deficits[tenant]

    def _level(self, entry: QueueEntry[Item], now_s: float) -> int:
        aged = int((now_s - entry.arrived_s) / self._aging_s) if self._aging_s > 0.0 else 0
        return entry.priority + aged

    def _round_robin(self, entries: list[QueueEntry[Item]]) -> QueueEntry[Item]:
        """The next entry by deficit round robin. Rounds that serve no tenant are skipped in one step."""
        firsts: dict[str, QueueEntry[Item]] = {}
        for entry in sorted(entries, key=lambda entry: (-entry.priority, entry.number)):
            firsts.setdefault(entry.tenant, entry)
        if len(firsts) == 1:
            return next(iter(firsts.values()))
        ring = sorted(firsts, key=self._turns.__getitem__)
        rounds = {name: self._rounds(name, firsts[name].tokens) for name in ring}
        fewest = min(rounds.values())
        for name in ring:
            self._deficits[name] += fewest * self._quantum(name)
        chosen = next(name for name in ring if rounds[name] == fewest)
        self._deficits[chosen] -= firsts[chosen].tokens
        for name in ring[: ring.index(chosen)]:
            self._turns[name] = next(self._turn)
        return firsts[chosen]

    def _quantum(self, tenant: str) -> float:
        return QUANTUM_TOKENS * self._weights.get(tenant, 1.0)

    def _rounds(self, tenant: str, tokens: float) -> int:
        """Rounds until the tenant's deficit covers `tokens`."""
        return max(math.ceil((tokens - self._deficits[tenant]) / self._quantum(tenant)), 0)
