import pytest

from tests.policy.timed_scheduler import COST, MS, S, make_clocked, prompt
from tests.policy.waiting_order import admissions, line, make_yard, put_into_tree, row
from tokenyard.base import SchedulerSettings, StepWork, step_work
from tokenyard.policy import Policy
from tokenyard.policy.time_budget import prefill_slowdown
from tokenyard.scheduler import RowState

CHEAP_S = 0.005
"""By `COST` a request with at most 50 tokens to compute is cheap."""


def cautious(**settings):
    """A scheduler of `hits-first` on a clock; 10 tokens take 1 ms."""
    options = {"policy_options": {"cheap_s": CHEAP_S}, "enable_mixed_chunk": True, "disable_radix_cache": False}
    return make_clocked(schedule_policy="hits-first", **{**options, **settings})


def test_cheap_requests_go_before_misses_and_due_ones_before_all():
    yard = cautious(rows=1, session_max_wait_s=1.0, max_queued_requests=9)
    yard.submit([9] * 3, max_new=5000)
    yard.turn()
    put_into_tree(yard, [7] * 300)
    miss = yard.submit([5] * 200, arrival_ns=yard.now)
    hit = yard.submit([7] * 300 + [8] * 20, arrival_ns=yard.now)
    short = yard.submit([6] * 30, arrival_ns=yard.now)
    assert line(yard) == [hit, short, miss]
    assert line(yard, yard.now + S) == [miss, hit, short]


def test_a_miss_waits_while_a_chunk_of_a_started_prompt_is_left():
    yard = cautious(chunked_prefill_size=100, decode_share=0.0)
    first = yard.submit([5] * 450)
    yard.turn()
    miss, cheap = yard.submit([6] * 200), yard.submit([7] * 10)
    assert line(yard) == [cheap]
    yard.rest()
    assert admissions(yard)[0] == first
    assert sorted(yard.finished) == [first, miss, cheap]


def test_cheap_requests_start_during_a_long_prefill_until_it_is_due():
    yard = cautious(chunked_prefill_size=100, decode_share=0.0, session_max_wait_s=1.0)
    long = yard.submit([5] * 1000, arrival_ns=yard.now)
    yard.turn()
    cheap = yard.submit([6] * 40, max_new=1, arrival_ns=yard.now)
    yard.turn()
    assert cheap in yard.tokens
    assert yard.plans[-1].counts.tolist() == [40, 60]
    yard.now += S
    later = yard.submit([7] * 40, arrival_ns=yard.now)
    yard.turn()
    assert yard.plans[-1].counts.tolist() == [100]
    yard.rest()
    assert yard.finished[later].first_token_ns >= yard.finished[long].first_token_ns


def small_pool(**settings):
    """A pool of 100 tokens of which a running request holds 60, until it has written 20 more."""
    around = {"headroom": "none", "prefill_max_requests": -1, "decode_share": 0.0}
    settings = {"schedule_policy": "hits-first"} | around | settings
    yard = make_yard(pages=100, rows=8, **settings)
    yard.submit([9] * 60, max_new=20)
    yard.launch()
    yard.commit()
    return yard


def started(yard):
    yard.launch()
    yard.commit()
    table = yard.scheduler.state.table
    return [number for number in yard.tokens if table.row_of(number) is not None]


def test_one_that_does_not_fit_is_passed_over_until_it_is_due():
    yard = small_pool(session_max_wait_s=1.0)
    large = yard.submit([5] * 50, arrival_ns=yard.now)
    small = yard.submit([6] * 10, arrival_ns=yard.now)
    assert started(yard) == [1, small]
    assert yard.scheduler.state.table.state[row(yard, large)] == RowState.WAITING
    yard.now += S
    later = yard.submit([7] * 5, arrival_ns=yard.now)
    assert started(yard) == [1, small]
    yard.run()
    assert yard.finished[large].admitted_ns <= yard.finished[later].admitted_ns


def test_fcfs_passes_no_request_over():
    yard = small_pool(schedule_policy="fcfs")
    yard.submit([5] * 50)
    yard.submit([6] * 10)
    assert started(yard) == [1]


def test_levels_pass_no_request_over():
    yard = small_pool(enable_service_levels=True)
    yard.submit([5] * 50)
    yard.submit([6] * 10)
    assert started(yard) == [1]


def test_a_bound_counts_what_passes_a_request_over():
    yard = small_pool(max_overtaken_tokens=12)
    yard.submit([5] * 50)
    first, second = yard.submit([6] * 10), yard.submit([7] * 10)
    assert started(yard) == [1, first]
    assert second not in started(yard)


def test_only_equals_pass_one_that_is_more_urgent():
    yard = small_pool(enable_priority_scheduling=True, priority_aging_s=0.0, disable_priority_preemption=True)
    yard.submit([5] * 50, priority=3)
    equal, lower = yard.submit([6] * 10, priority=3), yard.submit([7] * 10, priority=1)
    assert started(yard) == [1, equal]
    assert lower not in started(yard)


def busy(share, pages=2000, **settings):
    """Four requests decode while long prompts that do not fit next to each other keep coming."""
    around = {"chunked_prefill_size": 200, "max_prefill_tokens": 10_000, "disable_radix_cache": True}
    yard = make_clocked(pages=pages, decode_share=share, **{**around, "enable_mixed_chunk": True, **settings})
    for index in range(4):
        yard.submit(prompt(10, index), max_new=400)
    yard.turn()
    for index in range(12):
        yard.submit(prompt(900, index), max_new=2)
    return yard


def times(yard, steps):
    """Seconds that chunks added to the next `steps` steps, and those of the steps."""
    added = whole = 0.0
    for _ in range(steps):
        yard.launch()
        work = step_work(yard.plans[-1])
        decodes = StepWork(tokens=work.decode_rows, rows=work.decode_rows, decode_rows=work.decode_rows)
        added += COST.step(work) - COST.step(decodes)
        whole += COST.step(work)
        yard.commit()
    return added, whole


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("settings", [{}, {"step_budget": "time", "slo_tpot_ms": 40.0}], ids=["tokens", "time"])
def test_prefill_and_decodes_keep_their_shares(share, settings):
    added, whole = times(busy(share, **settings), 120)
    # Both are kept to a step.
    assert added >= (1 - share) * whole - 0.025
    assert whole - added >= share * whole - 0.025


def test_prefill_without_decodes_in_a_step_counts_whole():
    yard = busy(0.5, enable_mixed_chunk=False)
    times(yard, 60)
    kinds = [plan.forward_mode for plan in yard.plans[1:]]
    prefill_s = sum(COST.step(step_work(plan)) for plan in yard.plans[1:] if plan.forward_mode == "EXTEND")
    decode_s = sum(COST.step(step_work(plan)) for plan in yard.plans[1:] if plan.forward_mode == "DECODE")
    assert {"EXTEND", "DECODE"} == set(kinds)
    assert decode_s >= prefill_s - 0.025


def test_the_share_is_off_where_all_requests_fit():
    with_share, without = busy(0.5, pages=100_000), busy(0.0, pages=100_000)
    times(with_share, 60)
    times(without, 60)
    assert [plan.counts.tolist() for plan in with_share.plans] == [plan.counts.tolist() for plan in without.plans]


def test_forecasts_know_the_share():
    def slowdown(share, pages):
        yard = busy(share, pages)
        state = yard.scheduler.state
        return prefill_slowdown(state.views(yard.now), state.settings, COST)

    assert slowdown(0.5, 2000) == pytest.approx(2 * slowdown(0.0, 2000))
    assert slowdown(0.5, 100_000) == slowdown(0.0, 100_000)


def test_a_policy_passes_nothing_over_unless_it_says_so():
    assert not Policy(SchedulerSettings()).passable(0, MS)
