"""Tries to break the bound on the service gap between tenants that both keep waiting."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.policy.timed_scheduler import make_clocked, prompt
from tokenyard.base import TenantSettings

POOL, LONGEST, QUANTUM = 160, 60, 50
SAVED = 300
OUTPUT_WEIGHT = 2

TENANT = st.fixed_dictionaries(
    {
        "weight": st.sampled_from([0.5, 1.0, 3.0]),
        "prompts": st.lists(st.integers(1, LONGEST), min_size=3, max_size=12),
        "answers": st.lists(st.integers(1, 40), min_size=3, max_size=12),
        "joins_at": st.integers(0, 30),
    }
)


def serve(policy, tenants, mixed, depth, drafts=0, right=0.0):
    """Run until a tenant has nothing left to wait for; return each tenant's service after every step, per weight, with
    the steps at whose start it was waiting. Rows of the first tenant have `drafts` drafts; the share `right` is.
    """
    yard = make_clocked(
        pages=POOL,
        rows=6,
        context=120,
        drafts=drafts,
        right=right,
        schedule_policy=policy,
        enable_mixed_chunk=mixed,
        max_in_flight=depth,
        chunked_prefill_size=32,
        disable_radix_cache=policy == "vtc",
        headroom="ratio",
        schedule_conservativeness=0.1,
        tenants={str(number): TenantSettings(weight=tenant["weight"]) for number, tenant in enumerate(tenants)},
        policy_options={"dlpm": {"quantum_tokens": QUANTUM, "saved_tokens": SAVED}, "vtc": {"saved_tokens": SAVED}}.get(
            policy, {}
        ),
    )
    numbers = [[] for _ in tenants]
    if drafts:
        draft_for(yard, numbers[0])
    service, waits = [], []
    for step in range(250):
        for number, tenant in enumerate(tenants):
            if step == (tenant["joins_at"] if number else 0):
                # No two prompts share a token, so that what is served is what is computed.
                for index in range(3 * len(tenant["prompts"])):
                    tokens = tenant["prompts"][index % len(tenant["prompts"])]
                    answer = tenant["answers"][index % len(tenant["answers"])]
                    ids = prompt(tokens, start=3 + (7 * number + index) % 80)
                    numbers[number].append(
                        yard.submit(ids, max_new=answer, tenant=str(number), cache_salt=f"{number}-{index}")
                    )
        table = yard.scheduler.state.table
        waiting = {int(table.number[row]) for row in yard.scheduler.state.waiting.rows}
        waits.append([any(one in waiting for one in own) for own in numbers])
        moved = True
        while len(yard.tickets) < depth and moved:
            moved = yard.launch()
        if not yard.commit():
            break
        service.append([served(yard, own) / tenant["weight"] for own, tenant in zip(numbers, tenants, strict=True)])
    return np.array(service), np.array(waits[: len(service)])


def draft_for(yard, numbers):
    """Leave drafts to the requests `numbers`, with a chance at which they pay, however often they are right."""
    collect = yard.executor.collect

    def reported(ticket):
        result, step = collect(ticket), ticket.plan.step
        plan = next(plan for plan in reversed(yard.plans) if plan.step == step)
        owners = [yard.scheduler.request_number(plan, place) for place in range(len(plan.pool_rows))]
        result.drafted = np.where([owner in numbers for owner in owners], result.drafted, 0).astype(np.int32)
        result.chances[:] = 900
        return result

    yard.executor.collect = reported


def served(yard, numbers):
    """What the requests were given: their prompts once they are admitted, and each decoded token twice."""
    total = 0
    for number in numbers:
        finish, row = yard.finished.get(number), yard.scheduler.state.table.row_of(number)
        if row is None:
            total += finish.prompt_tokens
        elif yard.scheduler.state.table.admitted_ns[row]:
            total += int(yard.scheduler.state.table.prompt_tokens[row])
        total += OUTPUT_WEIGHT * max(len(yard.tokens.get(number, [])) - 1, 0)
    return total


def widest_gap(service, waits, one, other):
    """The largest difference of service gained in any span of steps in which both were waiting all the time."""
    widest, low, high = 0.0, 0.0, 0.0
    before = np.vstack((np.zeros(service.shape[1]), service[:-1]))
    for step in range(len(service)):
        if not (waits[step][one] and waits[step][other]):
            low, high = np.inf, -np.inf
            continue
        start = before[step][one] - before[step][other]
        low, high = min(low, start), max(high, start)
        now = service[step][one] - service[step][other]
        widest = max(widest, now - low, high - now)
    return widest


def check(policy, tenants, mixed, depth, slack, drafts=0, right=0.0):
    service, waits = serve(policy, tenants, mixed, depth, drafts, right)
    lightest = min(tenant["weight"] for tenant in tenants)
    bound = 2 * (max(LONGEST, OUTPUT_WEIGHT * POOL) / lightest + slack)
    for one in range(len(tenants)):
        for other in range(one):
            assert widest_gap(service, waits, one, other) <= bound


@given(st.lists(TENANT, min_size=2, max_size=4), st.booleans(), st.integers(1, 2))
@settings(max_examples=examples(15), deadline=None)
def test_vtc_keeps_the_service_gap_within_its_theorem(tenants, mixed, depth):
    check("vtc", tenants, mixed, depth, slack=0)


@given(st.lists(TENANT, min_size=2, max_size=4), st.booleans(), st.integers(1, 2))
@settings(max_examples=examples(15), deadline=None)
def test_dlpm_keeps_the_service_gap_within_its_theorem(tenants, mixed, depth):
    check("dlpm", tenants, mixed, depth, slack=max(QUANTUM, SAVED))


@pytest.mark.part(2)
@pytest.mark.parametrize("policy", ["vtc", "dlpm"])
@given(
    st.lists(TENANT, min_size=2, max_size=3),
    st.booleans(),
    st.integers(1, 2),
    st.integers(1, 8),
    st.sampled_from([0.0, 0.5, 1.0]),
)
@settings(max_examples=examples(15), deadline=None)
def test_drafts_of_one_tenant_leave_the_gap_within_its_theorem(policy, tenants, mixed, depth, drafts, right):
    check(policy, tenants, mixed, depth, max(QUANTUM, SAVED) if policy == "dlpm" else 0, drafts, right)


@pytest.mark.parametrize("right", [0.0, 1.0])
def test_drafts_change_no_tenants_share(right):
    tenants = [{"weight": 1.0, "prompts": [2] * 12, "answers": [40], "joins_at": 0}] * 2
    service, waits = serve("vtc", tenants, mixed=False, depth=1, drafts=7, right=right)
    assert widest_gap(service, waits, 0, 1) <= 2 * OUTPUT_WEIGHT * POOL


def test_fcfs_would_break_that_bound():
    tenants = [
        {"weight": 1.0, "prompts": [60] * 12, "answers": [40], "joins_at": 0},
        {"weight": 1.0, "prompts": [5] * 12, "answers": [2], "joins_at": 1},
    ]
    service, waits = serve("fcfs", tenants, mixed=False, depth=1)
    assert widest_gap(service, waits, 0, 1) > 2 * OUTPUT_WEIGHT * POOL
    service, waits = serve("vtc", tenants, mixed=False, depth=1)
    assert widest_gap(service, waits, 0, 1) <= OUTPUT_WEIGHT * POOL
