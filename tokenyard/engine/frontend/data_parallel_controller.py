"""The schedulers of one engine, and which of them gets a request."""

import asyncio
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from tokenyard.base import (
    InvalidRequestError,
    OverloadedError,
    Pause,
    RanksRemaining,
    Request,
    Resume,
    SetPolicy,
    TokenyardError,
)
from tokenyard.engine.frontend.scheduler_client import CALL_TIMEOUT_S, SchedulerClient
from tokenyard.engine.processes.messages import ToScheduler
from tokenyard.policy.tenant_limits import rank_share
from tokenyard.routing.balance import Assignment, RankBalancer

SILENT_S = 5.0
"""A rank that is silent for this long gets no new requests while others are healthy."""

ANY_RANK, ABSENT_SOURCE = -1, -1

COUNTERS_BY_MEAN = ("new_token_ratio", "step_time_error")
"""Counters of which an engine with several ranks reports the mean; all other numbers are added up."""

COUNTERS_BY_MAX = ("now", "service_gap_tokens")
"""Counters of which it reports the largest."""


class DataParallelController:
    """The schedulers that run, each a client away.

    While there is none, as when the only one is started again, events wait for the next one (`absent`); where only some
    ranks have a part in the limits of a tenant, for one of these (`absent_rank`). A scheduler that joins later gets the
    state of the whole engine: a pause, or the policy that was set. SGLang's `DataParallelController`.
    """

    def __init__(self, balancer: RankBalancer | None = None) -> None:
        self._clients: dict[int, SchedulerClient] = {}
        self.balancer = balancer or RankBalancer()
        self._backlogs: dict[int, list[ToScheduler]] = {}
        self._absent: dict[int, SchedulerClient] = {}
        self._policy: SetPolicy | None = None
        self.paused = False
        """Whether a pause of the whole engine is on."""

        self._lost_ns: int | None = None
        self.on_join: list[Callable[[SchedulerClient], None]] = []
        self.lost_schedulers = 0
        """How many schedulers have ended, each with its cache."""

        self.all_restarting = False
        """Whether all schedulers are ended and started again, so that requests wait for the next process of a rank."""

        self._past_counters: dict[str, Any] = {"counters": {}, "evicted_tokens": 0}

    @property
    def clients(self) -> list[SchedulerClient]:
        """All that run, by rank."""
        return sorted(self._clients.values(), key=lambda client: client.rank)

    def find(self, source: int) -> SchedulerClient | None:
        """The scheduler with this process number; None if it is gone."""
        return self._clients.get(source)

    @property
    def absent(self) -> SchedulerClient:
        """A placeholder for the next scheduler that runs."""
        return self.absent_rank(ANY_RANK)

    def absent_rank(self, rank: int) -> SchedulerClient:
        """A placeholder for the scheduler of a rank while it restarts."""
        if rank not in self._absent:
            backlog = self._backlogs[rank] = []
            self._absent[rank] = SchedulerClient(backlog.append, rank, ABSENT_SOURCE)
        return self._absent[rank]

    def remove_rank(self, rank: int) -> tuple[SchedulerClient, list[ToScheduler]]:
        """A rank is abandoned. The others take over its parts of the limits. Returns who stood for it, and the
        events that wait for it, which are to be sent elsewhere.
        """
        self.balancer.remove_rank(rank)
        for client in self.clients:
            self._send_limits(client)
        absent = self._absent.pop(rank, None) or SchedulerClient(lambda event: None, rank, ABSENT_SOURCE)
        return absent, self._backlogs.pop(rank, [])

    def _send_limits(self, client: SchedulerClient) -> None:
        """Tell a scheduler its parts of the limits if ranks are out for good."""
        left = self.balancer.left
        if len(left) < self.size:
            most = self.balancer.settings.max_queued_requests
            client.send(RanksRemaining(len(left), rank_share(most, left.index(client.rank), len(left))))

    def join(self, client: SchedulerClient) -> None:
        """A scheduler runs. It gets the events that wait for it, with the requests that they are about."""
        self._clients[client.source] = client
        for tell in self.on_join:
            tell(client)
        self._send_limits(client)
        if self._policy is not None:
            client.send(self._policy)
        if self.paused:
            client.send(Pause())
        for rank in (ANY_RANK, client.rank):
            backlog = self._backlogs.get(rank, [])
            waiting, backlog[:] = backlog[:], []
            for event in waiting:
                client.send(event)  # type: ignore[arg-type]

    def leave(self, source: int, error: TokenyardError, now_ns: int) -> SchedulerClient | None:
        """A scheduler has ended; its open calls end with `error`. Returns it, None if it had left already."""
        client = self._clients.pop(source, None)
        if client is not None:
            client.close(error)
            self._lost_ns = now_ns
            self.lost_schedulers += 1
            self.balancer.lost(client.rank)
            self._add_past_counters(client.counters)
        return client

    @property
    def size(self) -> int:
        """How many ranks the engine has, whether they run or not."""
        return self.balancer.ranks

    def check_rank(self, rank: int | None) -> None:
        """Raise InvalidRequestError for a rank that the engine does not have."""
        if rank is not None and not 0 <= rank < self.size:
            message = f"there is no rank {rank}; this server has " + (
                f"the ranks 0 to {self.size - 1}" if self.size > 1 else "one rank, 0"
            )
            raise InvalidRequestError(message, param="data_parallel_rank", code="unknown_rank")

    def choose(
        self, request: Request, wanted: int | None = None, without: Collection[int] = ()
    ) -> tuple[SchedulerClient, Assignment | None]:
        """The scheduler for a request, and its place there; one that is absent and None where none that may serve it
        runs.

        The rank that the client `wanted` is taken if it runs and has a part in the limits of the request's tenant. Of
        the others, those in `without` and those that are silent are used only if there is no other.
        """
        if self.all_restarting:
            ranks = list(self.balancer.may_serve(request))
            place = self.balancer.choose(request, ranks, time.monotonic())
            return self.absent_rank(place.rank), place
        if not self._clients:
            return self.absent, None
        clients = self.clients
        if self.size > 1:
            allowed_ranks = self.balancer.may_serve(request)
            clients = [client for client in clients if client.rank in allowed_ranks]
            if not clients:
                return self.absent_rank(min(allowed_ranks)), None
            clients = _eligible(clients, wanted, without)
        place = self.balancer.choose(request, [client.rank for client in clients], time.monotonic())
        return next(client for client in clients if client.rank == place.rank), place

    def pause(self, event: Pause | Resume) -> None:
        """Stop all schedulers, or let all go on."""
        self.paused = isinstance(event, Pause)
        for client in self.clients:
            client.send(event)

    async def set_policy(self, name: str, options: dict[str, float | int | str | bool]) -> None:
        """Order all queues by another policy. Raises ConfigError, and changes nothing, if that cannot be."""
        await self.call("set_policy", None, name=name, options=options)
        self._policy = SetPolicy(name, options)

    def drop_user_policy(self) -> None:
        """Do not tell schedulers that join of a user-defined policy: it may have ended one of them."""
        if self._policy is not None and ":" in self._policy.name:
            self._policy = None

    async def call(self, verb: str, kind: Any, timeout_s: float = CALL_TIMEOUT_S, **arguments: Any) -> list[Any]:
        """Have all schedulers do `verb`; their replies by rank. Raises what `SchedulerClient.call` raises, and
        OverloadedError while none runs.
        """
        if not self._clients:
            raise OverloadedError("the scheduler is being started again; try again soon", code="restarting")
        return await asyncio.gather(*(client.call(verb, kind, timeout_s, **arguments) for client in self.clients))

    async def snapshots(self, timeout_s: float) -> dict[int, dict[str, Any]]:
        """The counters of each rank that runs; those of its last heartbeat if it does not answer in time, and without
        asking it if no time is given.
        """
        clients = self.clients
        if self.size == 1 and not clients:
            return {0: {}}
        if timeout_s <= 0.0:
            return {client.rank: client.counters for client in clients}
        found = await asyncio.gather(*(self._counters(client, timeout_s) for client in clients))
        return {client.rank: counters for client, counters in zip(clients, found, strict=True)}

    async def _counters(self, client: SchedulerClient, timeout_s: float) -> dict[str, Any]:
        try:
            counters: dict[str, Any] = await client.call("snapshot", dict[str, Any], timeout_s)
        except OverloadedError:
            counters = client.counters
        return counters

    async def snapshot(self, timeout_s: float) -> dict[str, Any]:
        """The counters of all ranks together, those of processes that have ended included: totals never fall."""
        now = [counters for counters in (await self.snapshots(timeout_s)).values() if counters]
        return merge_counters([*now, self._past_counters]) if now else {}

    def note_refusal(self, answers: int, prompt_tokens: int, *, rejected: bool) -> None:
        """A rank refused a request that another one gets now: of the engine's totals it counts once."""
        totals = {"submitted": answers, "aborted": answers, "prompt_tokens": answers * prompt_tokens}
        if rejected:
            totals["rejected"] = answers
        self._add_past_counters({"counters": {name: -amount for name, amount in totals.items()}})

    def _add_past_counters(self, counters: Mapping[str, Any]) -> None:
        """Add to the totals that no running process counts."""
        past, more = self._past_counters["counters"], counters.get("counters", {})
        self._past_counters["counters"] = {name: past.get(name, 0) + more.get(name, 0) for name in {**past, **more}}
        self._past_counters["evicted_tokens"] += counters.get("evicted_tokens", 0)

    def age_s(self, now_ns: int) -> float:
        """Seconds since any running scheduler was known to be well, or since the last one ended."""
        if not self._clients:
            return math.inf if self._lost_ns is None else (now_ns - self._lost_ns) / 1e9
        return min(client.age_s(now_ns) for client in self._clients.values())

    def ages_s(self, now_ns: int) -> dict[int, float]:
        """The same of each rank; infinite for one that does not run."""
        ages = dict.fromkeys(range(self.size), math.inf)
        return ages | {client.rank: client.age_s(now_ns) for client in self.clients}

    def close(self, error: TokenyardError) -> None:
        """End open calls with `error`."""
        for client in (*self._clients.values(), *self._absent.values()):
            client.close(error)


def _eligible(clients: list[SchedulerClient], wanted: int | None, without: Collection[int]) -> list[SchedulerClient]:
    """Those of `clients` among which the balancer chooses."""
    named = [client for client in clients if client.rank == wanted and wanted not in without]
    if named:
        return named
    now = time.monotonic_ns()
    rest = [client for client in clients if client.rank not in without] or clients
    return [client for client in rest if client.age_s(now) < SILENT_S] or rest


def merge_counters(counters: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The counters of several ranks as those of one engine: numbers are added up, of anything else the first counts."""
    if len(counters) <= 1:
        return dict(counters[0]) if counters else {}
    names = dict.fromkeys(name for one in counters for name in one)
    return {name: _merged_value(name, [one[name] for one in counters if name in one]) for name in names}


def _merged_value(name: str, values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, Mapping):
        return merge_counters(values)
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(numbers) < len(values):
        return first
    if name in COUNTERS_BY_MAX:
        return max(numbers)
    return sum(numbers) / len(numbers) if name in COUNTERS_BY_MEAN else sum(numbers)
