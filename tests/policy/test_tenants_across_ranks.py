"""Limits and fairness of tenants whose requests are spread over several data-parallel ranks."""

import pytest

from tests.policy.timed_scheduler import MS, S, make_clocked, prompt
from tokenyard.base import RanksRemaining, TenantSettings
from tokenyard.policy.tenant_limits import rank_share, ranks_of_tenant, tenant_rank_share

EVERY_NS = 100 * MS
LAG_NS = 50 * MS


class Ranks:
    """Schedulers on one clock that send each other what tenants use every 100 ms; it arrives `LAG_NS` later."""

    def __init__(self, size, **settings):
        self.yards = [make_clocked(dp_size=size, **settings) for _ in range(size)]
        self.now, self.late = 0, []

    def until(self, end, arrivals=lambda now: None):
        while self.now < end:
            self.now += EVERY_NS // 2
            arrivals(self.now)
            for yard in self.yards:
                yard.until(self.now)
            self._pass_on()

    def _pass_on(self):
        due = [entry for entry in self.late if entry[0] <= self.now]
        self.late = [entry for entry in self.late if entry[0] > self.now]
        for _, source, use in due:
            for yard in self.yards:
                if yard is not source:
                    yard.scheduler.apply(use, yard.now)
        if self.now % EVERY_NS == 0:
            for yard in self.yards:
                if (use := yard.scheduler.drain_tenant_usage()) is not None:
                    self.late.append((self.now + LAG_NS, yard, use))

    def served(self, numbers):
        """Tokens computed so far for requests given as (yard, number)."""
        return sum(computed(yard, number) for yard, number in numbers)


def computed(yard, number):
    finish, table = yard.finished.get(number), yard.scheduler.state.table
    if finish is not None:
        return finish.prompt_tokens + finish.completion_tokens
    return int(table.computed[table.row_of(number)])


RATE, BURST, PROMPT, OUTPUT = 2000.0, 1000, 100, 20
PER_RANK = 10_000
"""What a rank of these can compute in a second, at most: 0.1 ms a token."""


def flood(ranks, places, tenant, each):
    return [
        (yard, yard.submit(prompt(PROMPT), max_new=OUTPUT, tenant=tenant))
        for yard in (ranks.yards[place] for place in places)
        for _ in range(each)
    ]


@pytest.mark.part(2)
@pytest.mark.parametrize("places", [(0, 1, 2), (1,)], ids=["everywhere", "on one rank"])
def test_a_rate_is_that_of_the_engine_wherever_the_requests_are(places):
    """At any time at most burst + rate * t, what running requests still owe, and what others compute within the lag."""
    ranks = Ranks(3, pages=10**6, rows=4, tenants={"slow": TenantSettings(tokens_per_s=RATE, burst_tokens=BURST)})
    slow = flood(ranks, places, "slow", each=300 // len(places))
    debts = len(places) * 4 * (PROMPT + OUTPUT)
    unheard = (len(places) - 1) * PER_RANK * (EVERY_NS + LAG_NS) / S
    for _ in range(6):
        ranks.until(ranks.now + S)
        used, allowed = ranks.served(slow), BURST + RATE * ranks.now / S
        assert used <= allowed + debts + unheard
        assert used >= allowed - debts - unheard - RATE * (EVERY_NS + LAG_NS) / S, "the whole rate can be used"


def silent(ranks):
    for yard in ranks.yards:
        yard.scheduler.drain_tenant_usage = lambda: None
    return ranks


@pytest.mark.slow
def test_without_sharing_their_counts_ranks_would_multiply_a_rate():
    tenants = {"slow": TenantSettings(tokens_per_s=RATE, burst_tokens=BURST)}
    ranks = silent(Ranks(3, pages=10**6, rows=4, tenants=tenants))
    slow = flood(ranks, (0, 1, 2), "slow", each=100)
    ranks.until(4 * S)
    assert ranks.served(slow) > 2.5 * RATE * 4


def gap_after(ranks, seconds):
    """How far the service of a tenant that floods both ranks and that of one that floods the first grow apart."""
    greedy = flood(ranks, (0, 1), "greedy", each=120)
    modest = flood(ranks, (0,), "modest", each=120)
    ranks.until(S // 2)
    before = ranks.served(greedy) - ranks.served(modest)
    ranks.until(S // 2 + seconds * S)
    assert all(len(yard.scheduler.state.waiting) for yard in ranks.yards)
    return abs(ranks.served(greedy) - ranks.served(modest) - before)


@pytest.mark.slow
def test_the_service_of_a_tenant_at_all_ranks_decides_who_is_next():
    """The first rank is left to the tenant that has no other, so both get the same, as the bound of vtc has it."""
    settings = {"schedule_policy": "vtc", "policy_options": {"saved_tokens": 0}, "pages": 10**4, "rows": 4}
    bound = 2 * max(PROMPT, 2 * 4 * (PROMPT + OUTPUT)) + PER_RANK * (EVERY_NS + LAG_NS) / S
    gap = gap_after(Ranks(2, **settings), 1)
    assert gap <= bound
    assert gap_after(silent(Ranks(2, **settings)), 1) > 2 * gap


def test_the_limits_of_lost_ranks_pass_to_the_others():
    for size in (2, 3, 4, 7):
        for most in range(1, 30):
            tenants, left = {"a": TenantSettings(max_running=most, max_queued=2 * most)}, list(range(size))
            serving, own = ranks_of_tenant(tenants, "a", size), tenant_rank_share(tenants["a"], size)
            while len(left) > 1:
                left.remove(left[(most + size) % len(left)])
                before, had, gone = serving, own, set(serving) - set(left)
                serving, own = (
                    ranks_of_tenant(tenants, "a", size, left),
                    tenant_rank_share(tenants["a"], size, len(left)),
                )
                assert set(before) - gone <= set(serving) <= set(left), "no rank that is left leaves the tenant"
                assert serving
                assert own.max_running >= had.max_running
                assert own.max_queued >= had.max_queued
                assert most - max(len(left), own.max_running) < len(serving) * own.max_running <= most
                assert len(serving) * own.max_queued <= 2 * most


def test_a_scheduler_starts_more_of_a_tenant_when_its_part_grows():
    yard = make_clocked(dp_size=2, pages=10**4, rows=8, tenants={"*": TenantSettings(max_running=4, max_queued=6)})

    def state_after(requests):
        numbers = [yard.submit(prompt(10), max_new=10**4, tenant="a") for _ in range(requests)]
        yard.until(yard.now + S // 10)
        refused = sum(number in yard.finished for number in numbers)
        return len(yard.scheduler.state.running), len(yard.scheduler.state.waiting), refused

    assert state_after(2) == (2, 0, 0)
    assert state_after(4) == (2, 3, 1), "its part of the queue is 3"
    yard.scheduler.apply(RanksRemaining(1), yard.now)
    assert state_after(4) == (4, 4, 1), "all of the queue, which has 6, and all 4 places"


def test_counts_of_a_tenant_are_divided_and_never_add_up_to_more():
    for size in (1, 2, 3, 4, 7):
        for most in range(1, 30):
            tenant = TenantSettings(max_running=most, max_queued=2 * most)
            serving, own = ranks_of_tenant({"a": tenant}, "a", size), tenant_rank_share(tenant, size)
            assert len(set(serving)) == len(serving) > 0
            assert most - own.max_running < len(serving) * own.max_running <= most
            assert len(serving) * own.max_queued <= 2 * most
            assert sum(rank_share(most, rank, size) for rank in range(size)) == most
    assert ranks_of_tenant({"*": TenantSettings()}, "a", 4) == range(4)
    small = {"*": TenantSettings(max_running=1)}
    assert {ranks_of_tenant(small, f"t{number}", 4)[0] for number in range(50)} == {0, 1, 2, 3}
    assert rank_share(-1, 2, 3) == -1
