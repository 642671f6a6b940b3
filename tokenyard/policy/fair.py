"""Fairness between tenants: the tenant that was served least goes next, with service counted in tokens.

A prompt token that is computed counts `INPUT_WEIGHT`, an output token `OUTPUT_WEIGHT`, both divided by the tenant's
weight. Tokens from the cache cost nothing, and neither do tokens that are computed again after a retraction, nor drafts
that are rejected.
"""

import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import numpy as np
from typing_extensions import override

from tokenyard.base import BoolArray, Float64Array, Int32Array, SchedulerSettings, TenantSettings
from tokenyard.policy.base import Option, Policy
from tokenyard.policy.queue_orders import in_groups
from tokenyard.policy.tenant_limits import TenantRegistry
from tokenyard.policy.views import Columns, Views

INPUT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0
NOT_CHARGED = -1
SMALL_SORT = 1 << 15


class TenantService(Policy, ABC):
    """What the fair policies share: which tenants wait, and what each is charged (`serve`)."""

    charges_decode = True

    def __init__(self, settings: SchedulerSettings) -> None:
        super().__init__(settings)
        self._registry = TenantRegistry(settings.tenants)
        self._weight = np.empty(0, np.float64)
        self._charged = np.empty(0, np.int64)
        self._shared = settings.dp_size > 1
        self._served_here: dict[int, float] = {}

    @override
    def begin_step(self, views: Views) -> None:
        super().begin_step(views)
        extra = len(views.columns.seq) - len(self._charged)
        if extra > 0:
            self._charged = np.concatenate((self._charged, np.full(extra, NOT_CHARGED, np.int64)))
        self._learn(views.columns, np.concatenate((views.waiting, views.prefilling, views.running)))

    @override
    def charge(self, row: int, prefill_tokens: int) -> None:
        """The first chunk pays for the whole prompt, because a started prompt is completed in any case."""
        assert self.views is not None
        columns = self.views.columns
        if self._charged[row] == columns.seq[row]:
            return
        self._charged[row] = columns.seq[row]
        tenant = int(columns.tenant[row])
        tokens = int(columns.target[row] - columns.planned[row]) + prefill_tokens
        self._serve_here(tenant, INPUT_WEIGHT * tokens)

    @override
    def charge_decode(self, rows: Int32Array) -> None:
        if self.views is None:
            return
        tokens = np.bincount(self.views.columns.tenant[rows], minlength=len(self._weight))
        for tenant in np.flatnonzero(tokens).tolist():
            self._serve_here(tenant, OUTPUT_WEIGHT * int(tokens[tenant]))

    def _serve_here(self, tenant: int, service: float) -> None:
        self.serve(tenant, service / float(self._weight[tenant]))
        if self._shared:
            self._served_here[tenant] = self._served_here.get(tenant, 0.0) + service

    @override
    def served_elsewhere(self, tenant: int, name: str, service: float) -> None:
        """Accounts are those of the whole engine."""
        if (settings := self._registry.add_known_tenant(tenant, name)) is not None:
            self._add_tenants([(tenant, settings)])
        self.serve(tenant, service / float(self._weight[tenant]))

    @override
    def drain_service(self) -> dict[int, float]:
        served, self._served_here = self._served_here, {}
        return served

    @override
    def measures(self, rows: Int32Array) -> dict[str, float]:
        """service_gap_tokens: the largest difference between the accounts of two tenants of `rows`."""
        if self.views is None:
            return {}
        tenants = self.views.columns.tenant[rows]
        accounts = self.accounts[tenants[tenants < len(self.accounts)]]
        return {"service_gap_tokens": float(np.ptp(accounts)) if len(accounts) else 0.0}

    @property
    @abstractmethod
    def accounts(self) -> Float64Array:
        """The account that tenants are ordered by, float64[tenants]; service changes it, in tokens of weight 1."""

    @abstractmethod
    def serve(self, tenant: int, service: float) -> None:
        """Charge `service` to the tenant, in tokens of weight 1."""

    def grow(self, tenants: int) -> None:
        """Make room for `tenants` tenants."""
        self._weight = np.concatenate((self._weight, np.ones(tenants - len(self._weight))))

    def _learn(self, columns: Columns, rows: Int32Array) -> None:
        self._add_tenants(self._registry.learn(columns, rows))

    def _add_tenants(self, new: list[tuple[int, TenantSettings]]) -> None:
        if len(self._registry) > len(self._weight):
            self.grow(len(self._registry))
        for number, tenant in new:
            self._weight[number] = tenant.weight


class VirtualTokenCounter(TenantService):
    """The tenant with the least service first, within a tenant by arrival (VTC, Sheng et al. 2024).

    A tenant with less service can interrupt a started prefill between chunks. A tenant without waiting requests
    that sends one again is lifted to the least service among the waiting tenants, or to `saved_tokens` below the most
    if that is less. So an idle tenant saves up that much and no more (as Linux's CFS credits sleepers; 0 is the paper's
    rule). Without the credit, a tenant that sends little is treated like one that floods the queue each time it sends a
    request. Two tenants that both keep waiting are never further apart than 2 * max(longest prompt, OUTPUT_WEIGHT * KV
    pool, saved_tokens).
    """

    name = "vtc"
    options: ClassVar[dict[str, Option]] = {"saved_tokens": 32768}
    ranges: ClassVar[dict[str, tuple[float, float]]] = {"saved_tokens": (0, 2**40)}
    overtaking = (
        "between tenants by the service gap of at most 2 * max(prompt, 2 * pool, saved_tokens) tokens; none within a "
        "tenant"
    )

    def __init__(self, settings: SchedulerSettings) -> None:
        super().__init__(settings)
        self._saved = float(self.chosen["saved_tokens"])
        self.served = np.empty(0, np.float64)
        self._waited: BoolArray = np.empty(0, np.bool_)
        self._level = 0.0

    @override
    def begin_step(self, views: Views) -> None:
        super().begin_step(views)
        waits = np.bincount(views.columns.tenant[views.waiting], minlength=len(self.served)) > 0
        stayed, joined, left = waits & self._waited, waits & ~self._waited, self._waited & ~waits
        there = stayed if stayed.any() else left
        if there.any():
            served = self.served[there]
            self._level = float(min(served.min(), served.max() - self._saved))
        self.served[joined] = np.maximum(self.served[joined], self._level)
        self._waited = waits

    @override
    def candidates(self, views: Views) -> Iterator[int]:
        """Here a started prefill precedes only the newcomers of its tenant."""
        return self._by_service(views, np.concatenate((views.prefilling, views.waiting)))

    @override
    def prefilling_order(self, views: Views) -> Iterator[int]:
        return self._by_service(views, views.prefilling)

    @override
    def order(self, views: Views) -> Iterator[int]:
        return self._by_service(views, views.waiting)

    def _by_service(self, views: Views, rows: Int32Array) -> Iterator[int]:
        """Rows by their tenants' service at the moment when they are drawn, within a tenant in the order of `rows`."""
        tenants = views.columns.tenant[rows]
        # numpy sorts 16-bit numbers by radix, several times faster than wider ones.
        rows = rows[np.argsort(tenants.astype(np.int16) if len(self.served) < SMALL_SORT else tenants, kind="stable")]
        ends = np.cumsum(np.bincount(tenants, minlength=len(self.served))).tolist()
        places = [0, *ends[:-1]]
        heap = [self._entry(views, rows, tenant, places) for tenant in np.flatnonzero(np.diff([0, *ends])).tolist()]
        heapq.heapify(heap)
        while heap:
            tenant = heap[0][2]
            yield int(rows[places[tenant]])
            places[tenant] += 1
            if places[tenant] < ends[tenant]:
                heapq.heapreplace(heap, self._entry(views, rows, tenant, places))
            else:
                heapq.heappop(heap)

    @property
    @override
    def accounts(self) -> Float64Array:
        """The service of each tenant."""
        return self.served

    @override
    def serve(self, tenant: int, service: float) -> None:
        self.served[tenant] += service

    @override
    def grow(self, tenants: int) -> None:
        super().grow(tenants)
        extra = tenants - len(self.served)
        self.served = np.concatenate((self.served, np.zeros(extra)))
        self._waited = np.concatenate((self._waited, np.zeros(extra, np.bool_)))

    def _entry(self, views: Views, rows: Int32Array, tenant: int, places: list[int]) -> tuple[float, int, int]:
        return float(self.served[tenant]), int(views.columns.seq[rows[places[tenant]]]), tenant


class DeficitLongestPrefixMatch(TenantService):
    """Longest prefix first among tenants with credit left (DLPM, Cao et al. 2025); among equals the most credit first.

    Service is paid out of a tenant's credit. When no waiting tenant has any, each is given `quantum_tokens` times its
    weight: a larger quantum finds more prefixes and lets the gap grow. An idle tenant is given as much, but saves up no
    more than `saved_tokens`, which is also its first credit (0 is the paper's rule). So a tenant that sends little
    precedes one that floods the queue if the cache holds as much for both. The gap between two tenants that both keep
    waiting stays within 2 * (max(longest prompt, OUTPUT_WEIGHT * KV pool) + max(quantum_tokens, saved_tokens)).
    """

    name = "dlpm"
    needs_tree = True
    options: ClassVar[dict[str, Option]] = {"quantum_tokens": 16384, "saved_tokens": 32768}
    ranges: ClassVar[dict[str, tuple[float, float]]] = {"quantum_tokens": (1, 2**40), "saved_tokens": (0, 2**40)}
    overtaking = (
        "between tenants by the service gap of at most 2 * (max(prompt, 2 * pool) + max(quantum_tokens, saved_tokens)) "
        "tokens; within a tenant unbounded, as for lpm"
    )

    def __init__(self, settings: SchedulerSettings) -> None:
        super().__init__(settings)
        self._quantum = float(self.chosen["quantum_tokens"])
        self._saved = float(self.chosen["saved_tokens"])
        self.credit = np.empty(0, np.float64)

    @override
    def order(self, views: Views) -> Iterator[int]:
        left, columns = views.waiting, views.columns
        while len(left):
            tenants = columns.tenant[left]
            self._refill(tenants)
            payers = left[self.credit[tenants] > 0.0]
            drawn = np.zeros(len(columns.seq), np.bool_)
            for equal in in_groups(payers, -columns.matchable[payers].astype(np.int64)):
                for row in self._by_credit(equal, columns.tenant[equal]):
                    drawn[row] = True
                    yield row
            left = left[~drawn[left]]

    def _by_credit(self, rows: Int32Array, tenants: Int32Array) -> Iterator[int]:
        """`rows` by tenant, the one with the most credit first, of each as long as its credit lasts."""
        present = np.flatnonzero(np.bincount(tenants)) if len(rows) > 1 else tenants
        for tenant in present[np.argsort(-self.credit[present], kind="stable")].tolist():
            for row in rows[tenants == tenant].tolist():
                if self.credit[tenant] <= 0.0:
                    break
                yield row

    @property
    @override
    def accounts(self) -> Float64Array:
        """The credit of each tenant."""
        return self.credit

    @override
    def serve(self, tenant: int, service: float) -> None:
        """Credit is in tokens of weight 1."""
        self.credit[tenant] -= service

    @override
    def grow(self, tenants: int) -> None:
        super().grow(tenants)
        self.credit = np.concatenate((self.credit, np.full(tenants - len(self.credit), self._saved)))

    def _refill(self, tenants: Int32Array) -> None:
        """Give credit until a waiting tenant has some; idle ones save up no more than `saved_tokens`."""
        waits = np.bincount(tenants, minlength=len(self.credit)) > 0
        if (self.credit[waits] > 0.0).any():
            return
        rounds = float(np.floor(-self.credit[waits] / self._quantum).min()) + 1.0
        richer = self.credit + rounds * self._quantum
        self.credit = np.where(waits, richer, np.maximum(self.credit, np.minimum(richer, self._saved)))


POLICIES: list[type[Policy]] = [VirtualTokenCounter, DeficitLongestPrefixMatch]
