import pytest

from tests.policy.timed_scheduler import make_clocked, prompt
from tests.policy.waiting_order import admissions, line, row
from tokenyard.base import SetPolicy, TenantSettings
from tokenyard.policy.fair import INPUT_WEIGHT, OUTPUT_WEIGHT


def fair(policy="vtc", **more):
    return make_clocked(**{"schedule_policy": policy, "prefill_max_requests": 1, "rows": 4} | more)


def served(yard, numbers):
    policy, table = yard.scheduler.state.policy, yard.scheduler.state.table
    return [float(policy.served[table.tenant[row(yard, number)]]) for number in numbers]


def warm(yard, tokens, tenant="warm-up"):
    """Bring tokens into the cache."""
    yard.submit(tokens, max_new=1, tenant=tenant)
    yard.rest()


def test_the_gap_between_waiting_tenants_is_reported():
    yard = make_clocked(schedule_policy="vtc", rows=1)
    for tenant in ("a", "b", "a", "b"):
        yard.submit(prompt(100), max_new=10, tenant=tenant)
    yard.turn()
    while yard.scheduler.state.running:
        yard.turn()
    assert yard.scheduler.snapshot(yard.now).measures == {"service_gap_tokens": pytest.approx(100 + 2 * 10, abs=2)}
    yard.rest()
    assert yard.scheduler.snapshot(yard.now).measures == {"service_gap_tokens": 0.0}


def test_prompt_and_output_tokens_are_charged_by_their_weights():
    yard = fair()
    number = yard.submit(prompt(30), max_new=50, tenant="a")
    yard.turn()
    assert served(yard, [number]) == [30 * INPUT_WEIGHT]
    for _ in range(5):
        yard.turn()
    assert served(yard, [number]) == [30 * INPUT_WEIGHT + 5 * OUTPUT_WEIGHT]


def test_the_whole_prompt_is_charged_with_its_first_chunk():
    yard = fair(chunked_prefill_size=16)
    number = yard.submit(prompt(100), max_new=2, tenant="a")
    yard.turn()
    assert served(yard, [number]) == [100 * INPUT_WEIGHT]
    yard.turn()
    assert served(yard, [number]) == [100 * INPUT_WEIGHT]


def test_a_retraction_is_not_charged_twice():
    yard = fair()
    number = yard.submit(prompt(30), max_new=50, tenant="a")
    yard.turn()
    yard.scheduler.state.retract(row(yard, number), "out of pages", 0)
    before = served(yard, [number])
    yard.turn()
    assert served(yard, [number]) == before


def test_what_comes_from_the_cache_is_free():
    yard = fair(disable_radix_cache=False)
    warm(yard, prompt(40), tenant="a")
    number = yard.submit([*prompt(40), 3, 4, 5], max_new=2, tenant="a")
    yard.turn()
    # The first request of the tenant paid for the 40 that are cached now.
    assert served(yard, [number]) == [43 * INPUT_WEIGHT]


def test_a_flood_of_one_tenant_does_not_hold_up_another():
    yard = fair()
    flood = [yard.submit(prompt(50), max_new=5, tenant="flood") for _ in range(20)]
    yard.turn()
    yard.turn()
    quiet = [yard.submit(prompt(50), max_new=5, tenant="quiet") for _ in range(3)]
    yard.rest()
    order = admissions(yard)
    assert max(order.index(number) for number in quiet) < 8
    assert [number for number in order if number in flood] == flood


def test_weights_share_the_service_out():
    yard = fair(tenants={"heavy": TenantSettings(weight=3.0), "*": TenantSettings(weight=1.0)})
    for _ in range(40):
        yard.submit(prompt(50), max_new=2, tenant="heavy")
        yard.submit(prompt(50), max_new=2, tenant="light")
    for _ in range(60):
        yard.turn()
    started = admissions(yard)
    heavy = sum(number % 2 == 1 for number in started)
    assert 2.5 <= heavy / (len(started) - heavy) <= 3.5


def late_among_busy(saved_tokens):
    """What was admitted from the first to the last of ten requests that come after the other tenant had 20 turns."""
    yard = fair(policy_options={"saved_tokens": saved_tokens})
    busy = [yard.submit(prompt(50), max_new=2, tenant="busy") for _ in range(30)]
    for _ in range(20):
        yard.turn()
    late = [yard.submit(prompt(50), max_new=2, tenant="late") for _ in range(10)]
    yard.rest()
    order = admissions(yard)
    between = order[order.index(late[0]) : order.index(late[-1])]
    return sum(number in busy for number in between)


def test_an_idle_tenant_saves_up_no_service():
    # Without the lift, all of `late` would come before the next of `busy`.
    assert late_among_busy(0) >= 7


def test_what_an_idle_tenant_saves_up_is_bounded():
    # 150 tokens are about three requests of 50 tokens and an answer, after which turns are taken again.
    assert 4 <= late_among_busy(150) <= 8
    assert late_among_busy(10_000) <= 1


def test_a_light_tenant_does_not_take_turns_with_a_flood():
    yard = fair()
    flood = [yard.submit(prompt(50), max_new=5, tenant="flood") for _ in range(20)]
    for _ in range(8):
        yard.turn()
    waited = []
    for _ in range(3):
        quiet = [yard.submit(prompt(50), max_new=5, tenant="quiet") for _ in range(2)]
        waited.append(line(yard)[:2] == quiet)
        for _ in range(8):
            yard.turn()
    assert waited == [True, True, True]
    yard.rest()
    assert [number for number in admissions(yard) if number in flood] == flood


def test_a_long_prompt_yields_at_a_chunk_boundary_to_tenants_with_less_service():
    yard = fair(chunked_prefill_size=16, max_partial_prefills=2)
    long = yard.submit(prompt(100), max_new=2, tenant="a")
    yard.turn()
    same = yard.submit(prompt(10), max_new=2, tenant="a")
    other = yard.submit(prompt(10), max_new=2, tenant="b")
    yard.rest()
    first = {number: yard.finished[number].first_token_ns for number in (long, same, other)}
    assert first[other] < first[long] < first[same]


def test_dlpm_prefers_what_is_cached_among_tenants_with_credit():
    yard = fair("dlpm", disable_radix_cache=False)
    warm(yard, prompt(60))
    cold = yard.submit(prompt(60, start=20), max_new=2, tenant="a")
    hit = yard.submit([*prompt(60), 3], max_new=2, tenant="b")
    assert line(yard) == [hit, cold]


def test_dlpm_serves_the_other_tenant_once_the_credit_is_gone():
    yard = fair("dlpm", disable_radix_cache=False, policy_options={"quantum_tokens": 60, "saved_tokens": 0})
    warm(yard, prompt(10))
    hits = [yard.submit([*prompt(10), *prompt(40, start=30 + index)], max_new=1, tenant="a") for index in range(4)]
    cold = yard.submit(prompt(45, start=20), max_new=1, tenant="b")
    yard.rest()
    order = admissions(yard)
    assert order[1] == hits[0]
    assert order.index(cold) == 3, "two requests of 40 tokens use 60 tokens of credit up"


def test_dlpm_prefers_the_tenant_with_more_credit_among_equal_hits():
    yard = fair("dlpm", disable_radix_cache=False)
    flood = [yard.submit(prompt(50), max_new=5, tenant="flood", cache_salt=str(index)) for index in range(20)]
    for _ in range(3):
        yard.turn()
    quiet = yard.submit(prompt(50), max_new=5, tenant="quiet", cache_salt="quiet")
    assert line(yard)[0] == quiet
    yard.rest()
    assert [number for number in admissions(yard) if number in flood] == flood


def test_dlpm_bounds_the_credit_that_an_idle_tenant_saves_up():
    options = {"quantum_tokens": 60, "saved_tokens": 100}
    yard = fair("dlpm", disable_radix_cache=False, policy_options=options)
    warm(yard, prompt(10), tenant="away")
    for index in range(10):
        yard.submit(prompt(50), max_new=5, tenant="busy", cache_salt=str(index))
    for _ in range(50):
        yard.turn()
    state = yard.scheduler.state
    assert state.policy.credit[0] == 100
    yard.rest()


@pytest.mark.parametrize("policy", ["vtc", "dlpm"])
def test_a_policy_that_is_set_while_others_run_charges_from_then_on(policy):
    yard = fair("fcfs", disable_radix_cache=False)
    numbers = [yard.submit(prompt(20 + index), max_new=30, tenant=str(index % 3)) for index in range(9)]
    for _ in range(3):
        yard.turn()
    yard.apply(SetPolicy(policy))
    yard.rest()
    assert sorted(yard.finished) == numbers
