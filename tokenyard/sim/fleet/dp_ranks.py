"""What a simulated engine with several ranks does itself, as `engine.frontend.data_parallel_controller` and the
tokenizer manager do in a server.

It chooses a rank, tries others when one has no room, and lets ranks tell each other what tenants use.
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
    """The ranks of one engine, among which requests are shared out."""

    def __init__(
        self, method: str, ranks: int, pool_tokens: int, settings: SchedulerSettings, disk_tokens: int = 0
    ) -> None:
        self._balancer = RankBalancer(method, ranks, pool_tokens, settings, disk_tokens)

    def choose(self, request: Request, wanted: int | None, without: Collection[int], now_s: float) -> Assignment:
        """The place of a request: at the rank that the router `wanted` if that may serve its tenant, else at one that
        may, and of these not at those `without` if there are others.
        """
        parts = sorted(self._balancer.may_serve(request))
        candidates = [wanted] if wanted in parts else [rank for rank in parts if rank not in without] or parts
        return self._balancer.choose(request, candidates, now_s)

    def lost(self) -> None:
        """The engine has ended, and all caches with it."""
        for rank in range(self._balancer.ranks):
            self._balancer.lost(rank)


def refused(finish: Finish) -> bool:
    """Whether a rank had no room for a request that another one may take."""
    return finish.cause in NO_ROOM and not finish.first_token_ns


def limits_rank(settings: SchedulerSettings) -> bool:
    """Whether an engine may have to place a request elsewhere than at the rank that the router has named."""
    counted = any(tenant.max_running >= 0 or tenant.max_queued >= 0 for tenant in settings.tenants.values())
    return counted or settings.max_queued_requests >= 0


def shares_tenants(settings: SchedulerSettings) -> bool:
    """Whether ranks have anything to tell each other: rates of tenants, or service that a fair policy weighs."""
    if any(tenant.tokens_per_s > 0.0 for tenant in settings.tenants.values()):
        return True
    policy: Policy = create_policy(settings.schedule_policy, settings)
    while (inner := getattr(policy, "inner", None)) is not None:
        policy = inner
    return isinstance(policy, TenantService)


def exchange_tenant_usage(ranks: Sequence[Core], now: int) -> bool:
    """Let the ranks of one engine tell each other what tenants have used; returns whether there was anything."""
    uses = [(rank, use) for rank in ranks if (use := rank.drain_tenant_usage()) is not None]
    for source, use in uses:
        for rank in ranks:
            if rank is not source:
                rank.apply(use, now)
    return bool(uses)
