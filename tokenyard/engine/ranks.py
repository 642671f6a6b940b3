"""The schedulers of one engine, and which of them gets a request."""

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any

from tokenyard.base import OverloadedError, Pause, Resume, SetPolicy, TokenyardError
from tokenyard.engine.client import CALL_TIMEOUT_S, SchedulerClient
from tokenyard.engine.processes.messages import ToScheduler, Verb
from tokenyard.router.choice import Features, make_policy

ROUTE_POLICY = "least_load"
AVERAGED = ("new_token_ratio", "step_time_error")
"""Counters of which an engine with several ranks reports the mean; all other numbers are added up."""


class Ranks:
    """The schedulers that run, each a client away.

    While there is none, as when the only one is started again, events wait for the next one (`absent`). What holds for
    the whole engine, a pause or a policy that was chosen, is told to a scheduler that joins later.
    """

    def __init__(self) -> None:
        self._clients: dict[int, SchedulerClient] = {}
        self._route = make_policy(ROUTE_POLICY)
        self._backlog: list[ToScheduler] = []
        self.absent = SchedulerClient(self._backlog.append, rank=-1, source=-1)
        self._policy: SetPolicy | None = None
        self._paused = False
        self._lost_ns: int | None = None

    @property
    def clients(self) -> list[SchedulerClient]:
        """All that run, by rank."""
        return sorted(self._clients.values(), key=lambda client: client.rank)

    def find(self, source: int) -> SchedulerClient | None:
        """The scheduler with this process number; None if it is gone."""
        return self._clients.get(source)

    def join(self, client: SchedulerClient) -> None:
        """A scheduler runs. It gets the events that wait, with the requests that they are about."""
        self._clients[client.source] = client
        if self._policy is not None:
            client.send(self._policy)
        if self._paused:
            client.send(Pause())
        waiting, self._backlog[:] = self._backlog[:], []
        for event in waiting:
            client.send(event)  # type: ignore[arg-type]

    def leave(self, source: int, error: TokenyardError, now_ns: int) -> SchedulerClient | None:
        """A scheduler has ended; its open calls end with `error`. Returns it, None if it had left already."""
        client = self._clients.pop(source, None)
        if client is not None:
            client.close(error)
            self._lost_ns = now_ns
        return client

    def choose(self, prompt_tokens: int) -> SchedulerClient:
        """The scheduler for the next request, one with the fewest open requests."""
        if len(self._clients) == 1:
            return next(iter(self._clients.values()))
        if not self._clients:
            return self.absent
        clients = self.clients
        ranking = self._route.rank(Features(prompt_tokens), [client.load for client in clients])
        return clients[ranking.order[0]]

    def pause(self, event: Pause | Resume) -> None:
        """Stop all schedulers, or let all go on."""
        self._paused = isinstance(event, Pause)
        for client in self.clients:
            client.send(event)

    async def set_policy(self, name: str, options: dict[str, float | int | str | bool]) -> None:
        """Order all queues by another policy. Raises ConfigError, and changes nothing, if that cannot be."""
        await self.call("set_policy", None, name=name, options=options)
        self._policy = SetPolicy(name, options)

    def drop_user_policy(self) -> None:
        """Do not tell schedulers that join of a policy of the user's own that was chosen: it ended one of them."""
        if self._policy is not None and ":" in self._policy.name:
            self._policy = None

    async def call(self, verb: Verb, kind: Any, timeout_s: float = CALL_TIMEOUT_S, **arguments: Any) -> list[Any]:
        """Have all schedulers do `verb`; their replies by rank. Raises what `SchedulerClient.call` raises, and
        OverloadedError while none runs.
        """
        if not self._clients:
            raise OverloadedError("the scheduler is being started again; try again soon", code="restarting")
        return await asyncio.gather(*(client.call(verb, kind, timeout_s, **arguments) for client in self.clients))

    async def snapshot(self, timeout_s: float) -> dict[str, Any]:
        """The counters of all ranks together; those of the last heartbeats if one does not answer in time."""
        try:
            return merged(await self.call("snapshot", dict[str, Any], timeout_s))
        except OverloadedError:
            return merged([client.counters for client in self.clients])

    def age_s(self, now_ns: int) -> float:
        """Seconds since all running schedulers were known to be well, or since the last one ended."""
        if not self._clients:
            return math.inf if self._lost_ns is None else (now_ns - self._lost_ns) / 1e9
        return max(client.age_s(now_ns) for client in self._clients.values())

    def close(self, error: TokenyardError) -> None:
        """The engine is gone."""
        for client in (*self._clients.values(), self.absent):
            client.close(error)


def merged(counters: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The counters of several ranks as those of one engine: numbers are added up, of anything else the first counts."""
    if len(counters) <= 1:
        return dict(counters[0]) if counters else {}
    return {name: _merged_value(name, [one[name] for one in counters if name in one]) for name in counters[0]}


def _merged_value(name: str, values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, Mapping):
        return merged(values)
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(numbers) < len(values):
        return first
    if name == "now":
        return max(numbers)
    return sum(numbers) / len(numbers) if name in AVERAGED else sum(numbers)
