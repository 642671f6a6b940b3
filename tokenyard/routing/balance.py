"""Choose the rank of an engine for each request, by the routing policies and the prefix index. Pure.

The engine and the simulator share it.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from tokenyard.base import Request, SchedulerSettings
from tokenyard.base.blocks import BLOCK_TOKENS, root_digest
from tokenyard.base.sessions import tenant_session
from tokenyard.policy.tenant_limits import ranks_of_tenant
from tokenyard.routing.load import DispatchedRequest, TargetLoad, TtftModel
from tokenyard.routing.policies import RequestFeatures, prompt_key
from tokenyard.routing.prefix_index import PrefixIndex, Prompt, token_prompt
from tokenyard.routing.registry import make_policy

LOAD_BALANCE_METHODS = ("predicted_ttft", "cache_aware", "shortest_queue", "total_tokens", "round_robin")
INDEX_BYTES = 1 << 28
MIN_LEVEL = -(2**31)


@dataclass(slots=True)
class LevelLoad:
    """Open requests of one priority level at one rank.

    requests: their number.
    prefill_tokens: uncached prompt tokens of those without a first token.
    context_tokens: prompt tokens of all of them.
    """

    requests: int = 0
    prefill_tokens: float = 0.0
    context_tokens: int = 0


class Assignment:
    """One request at one rank, counted in its load from dispatch until `end`."""

    __slots__ = ("_level", "_prefilling", "rank", "sent")

    def __init__(self, rank: int, sent: DispatchedRequest, level: LevelLoad | None) -> None:
        self.rank = rank
        self.sent, self._level, self._prefilling = sent, level, True
        if level is not None:
            level.requests += 1
            level.prefill_tokens += sent.uncached
            level.context_tokens += sent.tokens

    def expected_s(self) -> float:
        """Predicted seconds from dispatch to the first token."""
        return self.sent.expected_s()

    def first_token(self, now_s: float | None = None) -> None:
        """The prompt is computed. `now_s`: when the first token was observed; None if it is only assumed."""
        if now_s is None:
            self.sent.prefilled()
        else:
            self.sent.first_token(now_s)
        if self._level is not None and self._prefilling:
            self._level.prefill_tokens -= self.sent.uncached
        self._prefilling = False

    def hit(self, cached_tokens: int) -> None:
        """The response reports that `cached_tokens` of the prompt were cached."""
        self.sent.hit(cached_tokens)

    def end(self) -> None:
        """The request has ended or moves to another rank. Further calls have no effect."""
        self.sent.end()
        if self._level is not None:
            self.first_token()
            self._level.requests -= 1
            self._level.context_tokens -= self.sent.tokens
            self._level = None


class RankBalancer:
    """Tracks the load of each rank (`routing.load`) and the prefixes that its cache should hold.

    The load and the learnt speed of a rank outlive its process; its cache does not (see `lost`). With priority
    scheduling, a request counts only the requests that it does not overtake: those of its level and above. The
    fewest requests of any level break ties.

    ranks: number of ranks.
    left: the ranks that have not been removed.
    """

    def __init__(
        self,
        method: str = LOAD_BALANCE_METHODS[0],
        ranks: int = 1,
        pool_tokens: int = 0,
        settings: SchedulerSettings | None = None,
        disk_tokens: int = 0,
    ) -> None:
        """`pool_tokens` bounds the index of a rank by its KV pool, `disk_tokens` by its disk store, which outlives its
        process; 0 for no bound and no disk store. Raises ConfigError for an unknown method.
        """
        self.ranks = ranks
        self.left = list(range(ranks))
        self.settings = settings or SchedulerSettings()
        self.policy = make_policy(method, sticky=ranks > 1)
        self.index = PrefixIndex(INDEX_BYTES)
        speed = TtftModel()
        self.loads = [TargetLoad(f"rank {rank}", speed) for rank in range(ranks)]
        self._levels: list[dict[int, LevelLoad]] = [{} for _ in range(ranks)]
        self._on_disk = disk_tokens > 0
        for load in self.loads:
            self.index.limit(load.name, max(pool_tokens, disk_tokens) // BLOCK_TOKENS)

    def choose(self, request: Request, candidates: Sequence[int], now_s: float) -> Assignment:
        """Assign a request to one of the ranks `candidates`, which must not be empty."""
        loads, tokens = [self.loads[rank] for rank in candidates], len(request.prompt_ids)
        if self.ranks == 1:
            return Assignment(0, DispatchedRequest(loads[0], tokens, 0, now_s), None)
        prompt = Prompt()
        if self.policy.needs_prefix:
            prompt = token_prompt(request.prompt_ids, root_digest(request.namespace))
        matched = [BLOCK_TOKENS * self.index.match(load.name, prompt.digests) for load in loads]
        features = RequestFeatures(
            tokens, matched, prompt_key(prompt.digests), tenant_session(request.tenant, request.session)
        )
        level = self._level(request)
        seen = loads if level is None else [self._as_seen(rank, level) for rank in candidates]
        first = self.policy.rank(features, seen).order[0]
        rank, load = candidates[first], loads[first]
        self.policy.sent(features, load)
        self.index.insert(load.name, prompt.digests)
        sent = DispatchedRequest(load, tokens, matched[first], now_s)
        return Assignment(rank, sent, None if level is None else self._levels[rank].setdefault(level, LevelLoad()))

    def may_serve(self, request: Request) -> Collection[int]:
        """The ranks that hold a part of the limits of the request's tenant."""
        return ranks_of_tenant(self.settings.tenants, request.tenant, self.ranks, self.left)

    def remove_rank(self, rank: int) -> None:
        """The rank does not come back; the other ranks take over its part of the tenant limits."""
        self.left = [other for other in self.left if other != rank]

    def lost(self, rank: int) -> None:
        """The rank's process has ended. Its cache is lost; its disk store is not."""
        if not self._on_disk:
            self.index.clear_target(self.loads[rank].name)
        self.loads[rank].forget()

    def flushed(self) -> None:
        """All caches were flushed. Disk stores are kept."""
        for load in self.loads if not self._on_disk else ():
            self.index.clear_target(load.name)

    def _level(self, request: Request) -> int | None:
        """The priority level of a request, larger is more urgent; None without priority scheduling."""
        if not self.settings.uses_priorities:
            return None
        priority = request.priority if request.priority is not None else self.settings.default_priority_value
        if priority is None:
            return MIN_LEVEL
        return -priority if self.settings.schedule_low_priority_values_first else priority

    def _as_seen(self, rank: int, level: int) -> TargetLoad:
        """The load of a rank without the requests that a request of `level` overtakes."""
        load, rivals = self.loads[rank], LevelLoad()
        for other, one in list(self._levels[rank].items()):
            if not one.requests:
                del self._levels[rank][other]
            elif other >= level:
                rivals.requests += one.requests
                rivals.prefill_tokens += one.prefill_tokens
                rivals.context_tokens += one.context_tokens
        return replace(
            load,
            requests=rivals.requests,
            prefill_tokens=rivals.prefill_tokens,
            context_tokens=float(rivals.context_tokens),
            served=load.requests,
        )
