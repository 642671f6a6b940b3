"""The data-parallel controller of a simulated engine with several ranks.

It chooses a rank, tries other ranks when one has no room, and exchanges tenant usage between ranks. In a server,
`engine.frontend.data_parallel_controller` and the tokenizer manager do this.
"""

from collections.abc import Collection, Sequence

from tokenyard.base import NS_PER_S, Finish, Request, SchedulerSettings
from tokenyard.policy import Policy, create_policy
from tokenyard.policy.fair import TenantService
from tokenyard.routing.balance import Assignment, RankBalancer
from tokenyard.tape.recorder import Core

TENANT_USE_EVERY_NS = NS_PER_S // 10
NO_ROOM = ("queue_full", "displaced", "tenant_limit")
"""Why a rank refuses a request that another one may take."""


class EngineRanks:
    """The ranks of one engine, and the balancer that assigns requests to them."""

    def __init__(
        self, method: str, ranks: int, pool_tokens: int, settings: SchedulerSettings, disk_tokens: int = 0
    ) -> None:
        self._balancer = RankBalancer(method, ranks, pool_tokens, settings, disk_tokens)

    def choose(self, request: Request, wanted: int | None, without: Collection[int], now_s: float) -> Assignment:
        """Assign a request to a rank: the one that the router `wanted` if it may serve the tenant, else one that may.

        Ranks in `without` are chosen only if there is no other.
        """
        parts = sorted(self._balancer.may_serve(request))
        candidates = [wanted] if wanted in parts else [rank for rank in parts if rank not in without] or parts
        return self._balancer.choose(request, candidates, now_s)

    def lost(self) -> None:
        """The engine died, and all its caches with it."""
        for rank in range(self._balancer.ranks):
            self._balancer.lost(rank)


def refused(finish: Finish) -> bool:
    """Whether a rank had no room for a request that another rank may accept."""
    return finish.cause in NO_ROOM and not finish.first_token_ns


def limits_rank(settings: SchedulerSettings) -> bool:
    """Whether an engine may have to use another rank than the one that the router named."""
    counted = any(tenant.max_running >= 0 or tenant.max_queued >= 0 for tenant in settings.tenants.values())
    return counted or settings.max_queued_requests >= 0


def shares_tenants(settings: SchedulerSettings) -> bool:
    """Whether ranks have usage to exchange: tenant rates, or the service that a fair policy weighs."""
    if any(tenant.tokens_per_s > 0.0 for tenant in settings.tenants.values()):
        return True
    policy: Policy = create_policy(settings.schedule_policy, settings)
    while (inner := getattr(policy, "inner", None)) is not None:
        policy = inner
    return isinstance(policy, TenantService)


def exchange_tenant_usage(ranks: Sequence[Core], now: int) -> bool:
    """Exchange tenant usage between the ranks of one engine; returns whether there was any."""
    uses = [(rank, use) for rank in ranks if (use := rank.drain_tenant_usage()) is not None]
    for source, use in uses:
        for rank in ranks:
            if rank is not source:
                rank.apply(use, now)
    return bool(uses)
