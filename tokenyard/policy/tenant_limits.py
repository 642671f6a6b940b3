"""Limits of tenants under any order of the queue: token rates, concurrent requests, and shares of the KV pool.

Limits are those of the whole engine. With several data-parallel ranks each rank keeps its *part* of the counts, and the
parts add up to no more than the limit. Each rank keeps the rates of all ranks, which report their usage to each other
(`base.TenantUsage`). docs/ranks.md states the bounds.
"""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from zlib import crc32

import numpy as np
from typing_extensions import override

from tokenyard.base import NS_PER_S, BoolArray, Int32Array, Int64Array, SchedulerSettings, TenantSettings
from tokenyard.base.settings import ANY_TENANT
from tokenyard.policy.views import Columns, TenantPrefixes, Views

NO_LIMIT = 2**31 - 1


def rank_share(total: int, rank: int, ranks: int) -> int:
    """What `rank` has of a limit that `ranks` ranks keep together; the parts add up to it. -1 (no limit) stays that."""
    return total if total < 0 else total // ranks + (rank < total % ranks)


def tenant_rank_share(tenant: TenantSettings, ranks: int, left: int | None = None) -> TenantSettings:
    """The settings of a tenant on each of the ranks that serve it (`ranks_of_tenant`), where only `left` of the ranks
    are left (None: all).
    """
    running, queued = (
        _limit_rank_share(most, ranks, left or ranks) for most in (tenant.max_running, tenant.max_queued)
    )
    return replace(tenant, max_running=running, max_queued=queued)


def _limit_rank_share(most: int, ranks: int, left: int) -> int:
    """The part of a tenant's limit. It only grows as ranks go, and the parts never add up to more than the limit."""
    if most <= 0:
        return most
    share = -(-most // ranks)
    return share if most // share <= left else most // left


def ranks_of_tenant(
    tenants: Mapping[str, TenantSettings], name: str, ranks: int, left: Sequence[int] | None = None
) -> Sequence[int]:
    """The ranks that serve a tenant, of those that are `left` (None: all): as many as have a part in its limits without
    going beyond them.

    All ranks have the same part, so that no plan depends on a tenant's name, which tapes do not tell; where there is
    not enough for all, ranks are left out, other ones for each tenant. What the others have together is at most the
    limit, and less than it by less than one part. When a rank goes, another one steps in or the parts grow; no other
    rank leaves the tenant, so that what runs never goes beyond the limit.
    """
    left = range(ranks) if left is None else left
    tenant = tenants.get(name) or tenants.get(ANY_TENANT)
    if tenant is None or (tenant.max_running < 0 and tenant.max_queued < 0):
        return left
    own = tenant_rank_share(tenant, ranks)
    limits = ((tenant.max_running, own.max_running), (tenant.max_queued, own.max_queued))
    count = min(most // share for most, share in limits if most > 0)
    first = crc32(name.encode("utf-8", "surrogatepass"))
    ring = [(first + place) % ranks for place in range(ranks)]
    return [rank for rank in ring if rank in left][:count]


class TenantRegistry:
    """The settings of each number in the tenant column, filled in when a tenant first appears.

    `ranks` is how many data-parallel ranks keep the limits together.
    """

    def __init__(self, tenants: dict[str, TenantSettings], ranks: int = 1) -> None:
        self._whole, self._ranks = tenants, ranks
        self._known: list[TenantSettings | None] = []
        self._recompute_rank_shares(ranks)

    def _recompute_rank_shares(self, left: int) -> None:
        parts = {name: tenant_rank_share(tenant, self._ranks, left) for name, tenant in self._whole.items()}
        self._named = parts if self._ranks > 1 else self._whole
        self._default = self._named.get(ANY_TENANT, TenantSettings())

    def set_remaining_ranks(self, left: int) -> list[tuple[int, TenantSettings]]:
        """Only `left` of the ranks are left: the new settings of all tenants that are known, as (number, settings)."""
        names = {id(rank_share): name for name, rank_share in self._named.items()}
        found = [
            (number, names.get(id(rank_share)))
            for number, rank_share in enumerate(self._known)
            if rank_share is not None
        ]
        self._recompute_rank_shares(left)
        known = [(number, self._default if name is None else self._named[name]) for number, name in found]
        for number, settings in known:
            self._known[number] = settings
        return known

    def __len__(self) -> int:
        return len(self._known)

    def of(self, name: str) -> TenantSettings:
        """The settings of the tenant with this name."""
        return self._named.get(name, self._default)

    def add_known_tenant(self, number: int, name: str) -> TenantSettings | None:
        """The settings of a tenant that another rank has spoken of; None if it was known before."""
        self._known.extend([None] * (number + 1 - len(self._known)))
        if self._known[number] is not None:
            return None
        self._known[number] = settings = self.of(name)
        return settings

    def learn(self, columns: Columns, rows: Int32Array) -> list[tuple[int, TenantSettings]]:
        """Tenants of `rows` that were not known before, as (number, settings)."""
        tenants = columns.tenant[rows]
        if not len(rows):
            return []
        self._known.extend([None] * (int(tenants.max()) + 1 - len(self._known)))
        numbers = np.flatnonzero(np.bincount(tenants, minlength=len(self._known)))
        new = [number for number in numbers.tolist() if self._known[number] is None]
        for number in new:
            row = int(rows[np.argmax(tenants == number)])
            self._known[number] = self.of(columns.request(row).tenant)
        return [(number, settings) for number in new if (settings := self._known[number]) is not None]


class NoTenantLimits:
    """No limits: every request may start, and no tenant borrows. `TenantLimits` overrides all of it.

    next_ns: when the first request that a token rate holds back may start; None if there is none. counts: whether what
    is computed must be charged. shares: whether a tenant has a share of the pool, for which `Views.tenant_prefixes` is
    needed.
    """

    next_ns: int | None = None
    counts = False
    shares = False

    def set_remaining_ranks(self, left: int) -> None:
        """Only `left` data-parallel ranks keep the limits together from now on."""

    def queue_is_full(self, columns: Columns, name: str, waiting: Int32Array, rows: list[int]) -> bool:
        """Whether the queue of the tenant called `name`, with its `waiting` rows, has no room for its new `rows`."""
        return False

    def begin_step(self, views: Views) -> None:
        """Called with the state before a step: remove rows that may not start now from `views.waiting`."""

    def may_start(self, row: int) -> bool:
        """Whether a waiting row may start in this step, given the rows that have started in it already."""
        return True

    def end_step(self, drawn: Container[int]) -> None:
        """The policy has named all its candidates, the rows `drawn`, and none of them had to wait for room."""

    def admitted(self, row: int) -> None:
        """A waiting row was admitted."""

    def preempted(self, row: int, preemptor: int) -> None:
        """The running `row` is preempted for the waiting `preemptor`."""

    def charge(self, row: int, tokens: int) -> None:
        """A chunk of `tokens` was planned for a row."""

    def charge_decode(self, rows: Int32Array) -> None:
        """Each of `rows` decodes one token; see `Policy.charge_decode`."""

    def add_remote_usage(self, tenant: int, name: str, tokens: int) -> None:
        """Another rank has computed `tokens` for the tenant with this number."""

    def drain_tenant_usage(self) -> dict[int, int]:
        """Tokens that count against rates, by tenant, since the last call; for other ranks."""
        return {}

    def borrowers(self, views: Views, row: int) -> Iterator[int]:
        """Running rows to preempt for the waiting `row` because they hold its tenant's share of the pool."""
        return iter(())

    def exclude_protected_rows(self, row: int, victims: list[int]) -> list[int]:
        """Those of `victims` that the waiting `row` may preempt because it is more urgent, in the same order."""
        return victims

    def measures(
        self, columns: Columns, held: Int32Array, total_tokens: int, prefixes: TenantPrefixes | None
    ) -> dict[str, float]:
        """Figures to publish as metrics, by metric name; the rows `held` hold KV in a pool of `total_tokens`, and of
        the prefix tree what `prefixes` says.
        """
        return {}

    def borrowers_first(self, views: Views, victims: list[int]) -> list[int]:
        """The rows of tenants beyond their share, then the others; each part in the given order."""
        return victims


class TenantLimits(NoTenantLimits):
    """Which waiting requests may start, and which running requests give back borrowed KV.

    Rates are token buckets: a tenant may start requests while its bucket is above empty, and every token it computes is
    taken out, but for rejected drafts. A large request leaves a debt, and the tenant waits until it is refilled. A
    tenant within its `kv_share` of the pool may preempt requests of tenants beyond theirs. The request that preempts
    has a claim on the room until it starts, and meanwhile only requests within their tenant's share start. The claim
    also ends when the request ends or is held back by a limit, and when the policy names all candidates of a step
    without it.

    A tenant uses what its requests hold, computed, loaded or from the cache: tokens that several of them hold count
    once, and tokens that requests of several tenants hold count for each of these. So no tenant's count depends on what
    others do, and none can rise because another tenant's request was preempted.
    """

    counts = True

    def __init__(self, settings: SchedulerSettings) -> None:
        self._named = settings.tenants
        self.shares = any(tenant.kv_share for tenant in settings.tenants.values())
        self._shared = settings.dp_size > 1
        self._registry = TenantRegistry(settings.tenants, settings.dp_size)
        self._rate = self._burst = self._bucket = self._share = self._spent = np.empty(0, np.float64)
        self._max_running = self._running = self._used = np.empty(0, np.int64)
        self._columns: Columns | None = None
        self._prefixes: TenantPrefixes | None = None
        self._total_tokens = 0
        self._filled_ns = 0
        self._claim: tuple[int, int] | None = None

    @override
    def set_remaining_ranks(self, left: int) -> None:
        for number, tenant in self._registry.set_remaining_ranks(left):
            self._note_most_running(number, tenant)

    @override
    def queue_is_full(self, columns: Columns, name: str, waiting: Int32Array, rows: list[int]) -> bool:
        most = self._registry.of(name).max_queued
        if most < 0:
            return False
        same = np.count_nonzero(columns.tenant[waiting] == columns.tenant[rows[0]])
        return int(same) + len(rows) > most

    @override
    def begin_step(self, views: Views) -> None:
        self._columns, self._prefixes, self._total_tokens = views.columns, views.tenant_prefixes, views.total_tokens
        held = np.concatenate((views.running, views.prefilling, views.loading))
        self._learn(views.columns, np.concatenate((held, views.waiting)))
        self._fill_buckets(views.now)
        owners, tenants = views.columns.tenant[held], views.columns.tenant[views.waiting]
        self._running = np.bincount(owners, minlength=len(self._rate))
        self._used = self._held_tokens(views.columns, held, views.tenant_prefixes)
        empty = (self._rate > 0.0) & (self._bucket <= 0.0)
        self._note_refill(empty, tenants, views.now)
        views.waiting = views.waiting[~(empty | (self._running >= self._max_running))[tenants]]
        self._drop_old_claim(views)

    @override
    def may_start(self, row: int) -> bool:
        assert self._columns is not None
        tenant = int(self._columns.tenant[row])
        if self._running[tenant] >= self._max_running[tenant]:
            return False
        if self._rate[tenant] > 0.0 and self._bucket[tenant] <= 0.0:
            return False
        return self._claim is None or self._claim[0] == row or self._within_share(row)

    @override
    def end_step(self, drawn: Container[int]) -> None:
        if self._claim is not None and self._claim[0] not in drawn:
            self._claim = None

    @override
    def admitted(self, row: int) -> None:
        assert self._columns is not None
        tenant = int(self._columns.tenant[row])
        self._running[tenant] += 1
        self._used[tenant] += int(self._columns.target[row] - self._columns.cached[row]) + self._leaving()(row)
        if self._claim is not None and self._claim[0] == row:
            self._claim = None

    @override
    def preempted(self, row: int, preemptor: int) -> None:
        assert self._columns is not None
        tenant = int(self._columns.tenant[row])
        self._running[tenant] -= 1
        self._used[tenant] -= _own_tokens(self._columns, row) + self._leaving()(row)
        if self._within_share(preemptor):
            self._claim = preemptor, int(self._columns.seq[preemptor])

    @override
    def charge(self, row: int, tokens: int) -> None:
        assert self._columns is not None
        tenant = int(self._columns.tenant[row])
        self._bucket[tenant] -= tokens
        if self._shared:
            self._spent[tenant] += tokens

    @override
    def charge_decode(self, rows: Int32Array) -> None:
        if self._columns is None:
            return
        tokens = np.bincount(self._columns.tenant[rows], minlength=len(self._bucket))
        self._bucket -= tokens
        if self._shared:
            self._spent += tokens

    @override
    def add_remote_usage(self, tenant: int, name: str, tokens: int) -> None:
        """The bucket is that of the whole engine, so it is taken out here too."""
        if (settings := self._registry.add_known_tenant(tenant, name)) is not None:
            self._add_tenants([(tenant, settings)])
        self._bucket[tenant] -= tokens

    @override
    def drain_tenant_usage(self) -> dict[int, int]:
        tenants = np.flatnonzero((self._spent > 0.0) & (self._rate > 0.0)).tolist()
        used = {tenant: int(self._spent[tenant]) for tenant in tenants}
        self._spent[:] = 0.0
        return used

    @override
    def borrowers(self, views: Views, row: int) -> Iterator[int]:
        """Of tenants beyond their share, the furthest beyond goes first, and of each the newest request, until it is
        within its share. None if `row` would take its own tenant beyond its share.
        """
        if not self._within_share(row):
            return
        columns, used, leave = views.columns, self._used.copy(), self._leaving()
        share = self._share * self._total_tokens
        running = views.running[np.argsort(-columns.seq[views.running], kind="stable")]
        queues = {tenant: running[columns.tenant[running] == tenant].tolist() for tenant in range(len(used))}
        over = [tenant for tenant in queues if queues[tenant] and used[tenant] > share[tenant]]
        while over:
            tenant = max(over, key=lambda number: (used[number] - share[number], -number))
            victim = queues[tenant].pop(0)
            used[tenant] -= _own_tokens(columns, victim) + leave(victim)
            over = [number for number in over if queues[number] and used[number] > share[number]]
            yield victim

    @override
    def exclude_protected_rows(self, row: int, victims: list[int]) -> list[int]:
        """A row beyond its tenant's share preempts no request within the share of another tenant. That request could
        preempt it in turn, and so on without end.
        """
        assert self._columns is not None
        if self._within_share(row):
            return victims
        used, share, left = self._used.copy(), self._share * self._total_tokens, []
        leave = self._leaving()
        for victim in victims:
            tenant = int(self._columns.tenant[victim])
            if not share[tenant] or used[tenant] > share[tenant]:
                used[tenant] -= _own_tokens(self._columns, victim) + leave(victim)
                left.append(victim)
        return left

    @override
    def measures(
        self, columns: Columns, held: Int32Array, total_tokens: int, prefixes: TenantPrefixes | None
    ) -> dict[str, float]:
        """borrowed_tokens: KV tokens that tenants hold beyond their own shares, if any tenant has a share."""
        if not self.shares:
            return {}
        beyond = self._held_tokens(columns, held, prefixes) - self._share * total_tokens
        return {"borrowed_tokens": float(np.maximum(beyond, 0.0).sum())}

    @override
    def borrowers_first(self, views: Views, victims: list[int]) -> list[int]:
        if not self.shares:
            return victims
        self._columns, self._prefixes, self._total_tokens = views.columns, views.tenant_prefixes, views.total_tokens
        rows = np.concatenate((views.running, views.prefilling, views.loading))
        self._learn(views.columns, rows)
        used, share = self._held_tokens(views.columns, rows, views.tenant_prefixes), self._share * views.total_tokens
        leave = self._leaving()
        first, after = [], []
        for victim in victims:
            tenant = int(views.columns.tenant[victim])
            if used[tenant] > share[tenant]:
                used[tenant] -= _own_tokens(views.columns, victim) + leave(victim)
                first.append(victim)
            else:
                after.append(victim)
        return first + after

    def _held_tokens(self, columns: Columns, rows: Int32Array, prefixes: TenantPrefixes | None) -> Int64Array:
        """KV tokens by tenant that `rows` hold, and of the tree what `prefixes` says: int64[tenants].

        Tokens of steps in flight do not count. A row preempted because of them would lose them, be within its share
        again, and preempt in turn, without a token gained.
        """
        tokens = np.minimum(columns.held[rows], columns.known[rows]) - columns.cached[rows]
        held: Int64Array = np.bincount(columns.tenant[rows], tokens, minlength=len(self._rate)).astype(np.int64)
        return held if prefixes is None else held + prefixes.held(len(held))

    def _leaving(self) -> Callable[[int], int]:
        """`TenantPrefixes.leaving`."""
        return _nothing if self._prefixes is None else self._prefixes.leaving()

    def _within_share(self, row: int) -> bool:
        assert self._columns is not None
        tenant = int(self._columns.tenant[row])
        return bool(self._used[tenant] + self._columns.target[row] <= self._share[tenant] * self._total_tokens)

    def _drop_old_claim(self, views: Views) -> None:
        """Drop the claim of a request that has started or ended, is held back, or whose tenant is at a limit."""
        if self._claim is not None:
            row, seq = self._claim
            if views.columns.seq[row] != seq or row not in views.waiting:
                self._claim = None

    def _fill_buckets(self, now: int) -> None:
        earned = self._rate * ((now - self._filled_ns) / NS_PER_S)
        self._bucket = np.minimum(self._bucket + earned, self._burst)
        self._filled_ns = now

    def _note_refill(self, empty: BoolArray, tenants: Int32Array, now: int) -> None:
        """Note when the bucket of the first waiting tenant is above empty again."""
        waits = empty & (np.bincount(tenants, minlength=len(empty)) > 0)
        self.next_ns = None
        if waits.any():
            seconds = float((-self._bucket[waits] / self._rate[waits]).min())
            self.next_ns = now + int(seconds * NS_PER_S) + 1

    def _learn(self, columns: Columns, rows: Int32Array) -> None:
        self._add_tenants(self._registry.learn(columns, rows))

    def _add_tenants(self, new: list[tuple[int, TenantSettings]]) -> None:
        """Make room for tenants that were not known before, and note their limits."""
        extra = len(self._registry) - len(self._rate)
        if extra > 0:
            for name in ("_rate", "_burst", "_bucket", "_share", "_spent"):
                setattr(self, name, np.concatenate((getattr(self, name), np.zeros(extra))))
            self._max_running = np.concatenate((self._max_running, np.full(extra, NO_LIMIT, np.int64)))
        for number, tenant in new:
            self._rate[number], self._share[number] = tenant.tokens_per_s, tenant.kv_share
            self._burst[number] = self._bucket[number] = tenant.burst_tokens
            self._note_most_running(number, tenant)

    def _note_most_running(self, number: int, tenant: TenantSettings) -> None:
        self._max_running[number] = tenant.max_running if tenant.max_running >= 0 else NO_LIMIT


def _own_tokens(columns: Columns, row: int) -> int:
    """KV tokens that a row holds and that are not in the tree."""
    return int(min(columns.held[row], columns.known[row]) - columns.cached[row])


def _nothing(row: int) -> int:
    """What a row holds of a tree that is not there."""
    return 0


def create_tenant_limits(settings: SchedulerSettings) -> NoTenantLimits:
    """The limits of `settings.tenants`."""
    return TenantLimits(settings) if settings.tenants else NoTenantLimits()
