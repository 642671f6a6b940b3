"""The queue at the router: requests that no target has room for yet, ordered across all workers. Pure.

Late binding: a request is given to a target only when it leaves the queue, so the most urgent one of the whole fleet is
next wherever room appears. Urgency is priority, lifted by one for every `aging_s` of waiting, so that a request is
overtaken only by those of a priority higher by p that arrive within p * `aging_s` after it. Requests of one level are
shared out between tenants by deficit round robin in tokens (Shreedhar and Varghese 1995); one tenant's requests go by
deadline, then by arrival, and those that were lifted by arrival alone.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, TypeVar

QUANTUM_TOKENS = 2048.0

Item = TypeVar("Item")


@dataclass(slots=True, eq=False)
class QueueEntry(Generic[Item]):
    """A request in the queue. tokens: what it will cost. expires_s: when it is given up, infinity for never."""

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
    """One tenant's requests of one priority, by arrival and by deadline; entries that are gone are skipped."""

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
    """Requests that wait for room. Times are seconds on any one clock."""

    def __init__(self, *, aging_s: float = 0.0, weights: Mapping[str, float] | None = None) -> None:
        self._aging_s, self._weights = aging_s, weights or {}
        self._lines: dict[tuple[int, str], _TenantQueue[Item]] = {}
        self._deficits: dict[str, float] = {}
        self._turns: dict[str, int] = {}
        self._turn = count()
        self._numbers = count()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(
        self,
        item: Item,
        now_s: float,
        *,
        tokens: float = 1.0,
        priority: int = 0,
        tenant: str = "",
        deadline_s: float = math.inf,
        expires_s: float = math.inf,
    ) -> QueueEntry[Item]:
        """Let `item` wait, until `expires_s` at the latest."""
        entry = QueueEntry(item, tokens, priority, tenant, now_s, deadline_s, expires_s, next(self._numbers))
        line = self._lines.setdefault((priority, tenant), _TenantQueue())
        line.by_arrival.append(entry)
        if deadline_s < math.inf:
            heapq.heappush(line.by_deadline, (deadline_s, entry.number, entry))
        if tenant not in self._turns:
            self._turns[tenant], self._deficits[tenant] = next(self._turn), 0.0
        self._size += 1
        return entry

    def remove(self, entry: QueueEntry[Item]) -> None:
        """`entry` waits no longer; nothing happens if it had left already."""
        if not entry.gone:
            entry.gone = True
            self._size -= 1

    def lowest(self, now_s: float) -> QueueEntry[Item] | None:
        """What gives way when the queue is full: the newest of the least urgent."""
        entries = [entry for line in self._lines.values() for entry in line.by_arrival if not entry.gone]
        return min(entries, key=lambda entry: (self._level(entry, now_s), -entry.number), default=None)

    def expired(self, now_s: float) -> list[QueueEntry[Item]]:
        """Takes out what has waited until it leaves."""
        late = [
            entry
            for line in self._lines.values()
            for entry in line.by_arrival
            if not entry.gone and entry.expires_s <= now_s
        ]
        for entry in late:
            self.remove(entry)
        return late

    def pop(self, now_s: float, fits: Callable[[Item], bool]) -> QueueEntry[Item] | None:
        """Takes out the next request that `fits`; None if there is none.

        Of each tenant and priority only the first is asked, so that none is passed by a later one of its own line.
        """
        heads = self._heads(now_s)
        for level in sorted({level for level, _ in heads}, reverse=True):
            same = [entry for its_level, entry in heads if its_level == level and fits(entry.item)]
            if same:
                entry = self._by_turns(same)
                self.remove(entry)
                return entry
        return None

    def _heads(self, now_s: float) -> list[tuple[int, QueueEntry[Item]]]:
        """The first of each line with its level; lines that have run empty are forgotten."""
        heads, empty = [], []
        for key, line in self._lines.items():
            oldest = line.oldest()
            if oldest is None:
                empty.append(key)
                continue
            level = self._level(oldest, now_s)
            first = oldest if level > oldest.priority else line.soonest()
            if first is not None:
                heads.append((level, first))
        for key in empty:
            del self._lines[key]
        if empty:
            self._forget_idle_tenants()
        return heads

    def _forget_idle_tenants(self) -> None:
        """A tenant with nothing waiting keeps no deficit."""
        busy = {tenant for _, tenant in self._lines}
        for tenant in [name for name in self._turns if name not in busy]:
            del self._turns[tenant], self._deficits[tenant]

    def _level(self, entry: QueueEntry[Item], now_s: float) -> int:
        lifted = int((now_s - entry.arrived_s) / self._aging_s) if self._aging_s > 0.0 else 0
        return entry.priority + lifted

    def _by_turns(self, entries: list[QueueEntry[Item]]) -> QueueEntry[Item]:
        """Whose turn it is by deficit round robin: rounds in which no tenant could be served are taken all at once."""
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
        """How many rounds pass before the tenant can be served."""
        return max(math.ceil((tokens - self._deficits[tenant]) / self._quantum(tenant)), 0)
