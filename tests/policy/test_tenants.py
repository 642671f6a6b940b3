import numpy as np
import pytest

from tests.policy.timed_scheduler import MS, S, make_clocked, prompt
from tests.policy.waiting_order import admissions, row
from tokenyard.base import ConfigError, KvAvailable, KvLoaded, SchedulerSettings, TenantSettings


def limited(pages=10_000, rows=16, **tenants):
    more = {name: tenants.pop(name) for name in list(tenants) if not isinstance(tenants[name], TenantSettings)}
    return make_clocked(pages=pages, rows=rows, **{"schedule_policy": "fcfs", "tenants": tenants} | more)


def most_running(yard, numbers):
    """Run to the end; the most of `numbers` that ran or were prefilled at the same time."""
    most = 0
    while yard.turn():
        state = yard.scheduler.state
        admitted = {int(state.table.number[r]) for r in np.concatenate((state.running.rows, state.prefilling.rows))}
        most = max(most, len(admitted & set(numbers)))
    return most


def test_a_tenant_runs_no_more_requests_than_it_may():
    yard = limited(small=TenantSettings(max_running=2))
    small = [yard.submit(prompt(20), max_new=10, tenant="small") for _ in range(6)]
    other = [yard.submit(prompt(20), max_new=10, tenant="other") for _ in range(6)]
    assert most_running(yard, small) == 2
    assert sorted(yard.finished) == sorted(small + other)
    order = admissions(yard)
    assert order.index(other[-1]) < order.index(small[2]), "those who may start do not wait for those who may not"


def test_a_tenant_queues_no_more_requests_than_it_may():
    yard = limited(small=TenantSettings(max_queued=2))
    numbers = [yard.submit(prompt(20), tenant="small") for _ in range(3)]
    other = yard.submit(prompt(20), tenant="other")
    refused = yard.finished[numbers[2]]
    assert (refused.reason, refused.cause) == ("abort", "tenant_limit")
    assert "'small'" in refused.message
    yard.rest()
    assert yard.finished[other].reason == "length"
    assert yard.submit(prompt(20), tenant="small") not in yard.finished


def test_the_star_stands_for_tenants_without_a_name():
    yard = limited(**{"*": TenantSettings(max_running=1), "big": TenantSettings()})
    strangers = [yard.submit(prompt(20), max_new=10, tenant="stranger") for _ in range(3)]
    big = [yard.submit(prompt(20), max_new=10, tenant="big") for _ in range(3)]
    assert most_running(yard, strangers) == 1
    assert sorted(yard.finished) == sorted(strangers + big)


def test_borrowed_kv_is_reported():
    yard = limited(pages=1000, owner=TenantSettings(kv_share=0.5), small=TenantSettings(kv_share=0.05))
    for tenant, tokens in (("owner", 300), ("small", 80), ("none", 40)):
        yard.submit(prompt(tokens), max_new=50, tenant=tenant)
    yard.turn()
    assert yard.scheduler.snapshot(yard.now).measures == {"borrowed_tokens": (80 - 50) + 40}


def test_names_that_clients_make_up_take_no_room_beyond_a_number_of_them(monkeypatch):
    monkeypatch.setattr("tokenyard.scheduler.request_table.MAX_TENANTS", 10)
    yard = limited(named=TenantSettings(max_running=1), rows=4)
    table = yard.scheduler.state.table
    for place in range(15):
        yard.submit(prompt(5), max_new=1, tenant=f"made up {place}")
        yard.rest()
    numbers = [yard.submit(prompt(20), max_new=10, tenant=tenant) for tenant in ("new", "newer", "named", "named")]
    new, newer, named, same = (int(table.tenant[row(yard, number)]) for number in numbers)
    assert new == newer == 10
    assert named == same == 0
    assert most_running(yard, numbers[2:]) == 1


def test_a_rate_holds_over_time_and_the_scheduler_asks_to_be_woken():
    yard = limited(metered=TenantSettings(tokens_per_s=100.0, burst_tokens=50))
    numbers = [yard.submit(prompt(49), max_new=2, tenant="metered") for _ in range(10)]
    yard.rest()
    assert sorted(yard.finished) == numbers
    seconds = (yard.finished[numbers[-1]].admitted_ns - yard.finished[numbers[0]].admitted_ns) / S
    # Nine more requests of 50 tokens at 100 tokens a second, of which one came out of the burst.
    assert 4.0 <= seconds <= 4.6
    for number in numbers:
        assert yard.finished[number].finished_ns - yard.finished[number].admitted_ns < 50 * MS


def test_an_idle_scheduler_without_metered_requests_asks_for_nothing():
    yard = limited(metered=TenantSettings(tokens_per_s=100.0, burst_tokens=50))
    yard.submit(prompt(49), max_new=20, tenant="metered")
    yard.rest()
    assert yard.scheduler.wakeup_ns() is None


def test_a_rate_does_not_stop_others():
    yard = limited(metered=TenantSettings(tokens_per_s=1.0, burst_tokens=10))
    metered = [yard.submit(prompt(40), max_new=1, tenant="metered") for _ in range(3)]
    free = [yard.submit(prompt(40), max_new=1, tenant="free") for _ in range(20)]
    yard.until(1 * S)
    assert set(free) | {metered[0]} == set(yard.finished)


@pytest.mark.part(3)
@pytest.mark.parametrize("policy", ["fcfs", "vtc", "slo"])
def test_borrowed_kv_is_returned_to_its_owner(policy):
    yard = limited(pages=1000, owner=TenantSettings(kv_share=0.5), schedule_policy=policy, headroom="none")
    borrowers = [yard.submit(prompt(200), max_new=300, tenant="borrower") for _ in range(4)]
    for _ in range(20):
        yard.turn()
    assert len(yard.scheduler.state.running) == 4, "unused capacity may be borrowed"
    owner = yard.submit(prompt(300), max_new=100, tenant="owner")
    for _ in range(3):
        yard.turn()
    assert yard.scheduler.state.table.admitted_ns[row(yard, owner)] > 0
    yard.rest()
    assert yard.finished[owner].retractions == 0
    gave_way = [number for number in borrowers if yard.finished[number].retractions]
    assert gave_way, "somebody had to"
    assert borrowers[-1] in gave_way, "the newest first"
    assert sorted(yard.finished) == [*borrowers, owner]
    assert yard.scheduler.idle() is None


def shared_prompt(common, own, seed):
    """A prompt with `common` first tokens that all of them have, and `own` ones that depend on `seed`."""
    return [5] * common + [10 + seed] * own


def steps_until_started(yard, number, limit=40):
    for step in range(limit):
        if yard.scheduler.state.table.admitted_ns[row(yard, number)]:
            return step
        yard.turn()
    return limit


def test_kv_from_the_cache_counts_for_the_tenant_that_holds_it():
    yard = limited(pages=400, owner=TenantSettings(kv_share=0.5), headroom="none", disable_radix_cache=False)
    prompts = [shared_prompt(0, 120, seed) for seed in range(3)]
    for tokens in prompts:
        yard.submit(tokens, max_new=1, tenant="borrower")
    yard.rest()
    borrowers = [yard.submit(tokens, max_new=60, tenant="borrower") for tokens in prompts]
    yard.turn()
    assert all(yard.scheduler.state.table.hit[row(yard, number)] == 119 for number in borrowers)
    assert yard.scheduler.snapshot(yard.now).measures["borrowed_tokens"] >= 3 * 119
    owner = yard.submit(shared_prompt(0, 100, 9), max_new=5, tenant="owner")
    assert steps_until_started(yard, owner) <= 3
    yard.rest()
    assert yard.finished[borrowers[-1]].retractions >= 1
    assert yard.scheduler.snapshot(yard.now).counters.preempted == 1


def test_loads_count_from_when_their_pages_are_taken():
    yard = limited(pages=400, owner=TenantSettings(kv_share=0.5), headroom="none")
    loading = yard.submit(shared_prompt(0, 120, 0), max_new=60, tenant="borrower", awaits_kv=True)
    yard.apply(KvAvailable(loading, 119))
    yard.turn()
    assert row(yard, loading) in yard.scheduler.state.loading.rows
    assert yard.scheduler.snapshot(yard.now).measures["borrowed_tokens"] == 119
    (load,) = yard.scheduler.drain_moves()
    yard.apply(KvLoaded(loading, load.start + len(load.pages)))
    assert yard.scheduler.snapshot(yard.now).measures["borrowed_tokens"] == 119


def test_a_prefix_counts_once_for_each_tenant_that_holds_it_while_one_of_its_requests_does():
    shares = {"a": TenantSettings(kv_share=0.001), "b": TenantSettings(kv_share=0.001)}
    yard = limited(pages=1000, disable_radix_cache=False, **shares)
    held = yard.scheduler.state
    yard.submit(shared_prompt(100, 1, 0), max_new=1, tenant="a")
    yard.rest()
    numbers = [yard.submit(shared_prompt(100, 10, seed), max_new=30 + 30 * seed, tenant="a") for seed in range(2)]
    numbers.append(yard.submit(shared_prompt(100, 10, 2), max_new=90, tenant="b"))
    yard.turn()
    tenants = {name: place for place, name in enumerate(held.table.tenant_names())}
    of_tree = lambda: [int(held.holders.held(2)[tenants[name]]) for name in "ab"]  # noqa: E731
    assert of_tree() == [100 + 2 * 10, 110]
    assert [int(held.table.shared[row(yard, number)]) for number in numbers] == [100, 100, 100]
    while numbers[0] not in yard.finished:
        yard.turn()
    assert of_tree() == [110, 110]
    while numbers[1] not in yard.finished:
        yard.turn()
    assert of_tree() == [0, 110]
    assert held.table.shared[row(yard, numbers[2])] == 0


def test_an_owner_beyond_its_share_takes_nothing_back():
    yard = limited(pages=1000, owner=TenantSettings(kv_share=0.2), headroom="none")
    borrowers = [yard.submit(prompt(200), max_new=20, tenant="borrower") for _ in range(4)]
    yard.turn()
    yard.submit(prompt(300), max_new=5, tenant="owner")
    yard.rest()
    assert all(yard.finished[number].retractions == 0 for number in borrowers)


def test_a_share_and_an_urgent_borrower_do_not_preempt_each_other_for_ever():
    yard = limited(
        pages=100,
        rows=2,
        owner=TenantSettings(kv_share=0.6),
        enable_priority_scheduling=True,
        priority_aging_s=0.0,
        headroom="none",
    )
    owned = yard.submit(prompt(50), max_new=10, tenant="owner", priority=0)
    yard.turn()
    urgent = yard.submit(prompt(60), max_new=10, tenant="borrower", priority=100)
    yard.rest(limit=200)
    assert yard.finished[owned].retractions == 0
    assert yard.finished[urgent].first_token_ns > yard.finished[owned].finished_ns


def test_a_retracted_request_does_not_take_the_freed_pages_back():
    yard = limited(pages=400, rows=8, owner=TenantSettings(kv_share=0.6), headroom="none")
    for _ in range(3):
        yard.submit(prompt(100), max_new=90, tenant="borrower")
    yard.turn()
    owners = [yard.submit(prompt(110), max_new=20, tenant="owner") for _ in range(6)]
    yard.rest()
    assert yard.scheduler.snapshot(yard.now).counters.preempted <= 2 * len(owners)
    assert sorted(yard.finished) == list(range(1, 10))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weight": 0.0}, "weight"),
        ({"tokens_per_s": -1.0}, "tokens_per_s"),
        ({"burst_tokens": 0}, "burst_tokens"),
        ({"max_running": 0}, "max_running"),
        ({"max_queued": -2}, "max_queued"),
        ({"kv_share": 1.5}, "kv_share"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(settings, message):
    with pytest.raises(ConfigError, match=f"'acme': {message}"):
        SchedulerSettings(tenants={"acme": TenantSettings(**settings)}).validate()


def test_shares_of_more_than_the_pool_are_refused():
    tenants = {"a": TenantSettings(kv_share=0.7), "b": TenantSettings(kv_share=0.7)}
    with pytest.raises(ConfigError, match="kv_share"):
        SchedulerSettings(tenants=tenants).validate()
