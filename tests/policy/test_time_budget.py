from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.policy.timed_scheduler import COST, MS, S, make_clocked, prompt
from tokenyard.base import Slo, StepWork, step_work
from tokenyard.cost import LinearCost, LinearTerms, get_profile
from tokenyard.executor.mock import FixedStepCost
from tokenyard.policy.prefill_time import PrefillTime
from tokenyard.policy.time_budget import MAX_DENIED_STEPS

H100 = get_profile("h100", "llama-3-8b").cost()


def chunks(plan):
    return plan.counts[plan.decode_rows :].tolist()


def test_the_factors_are_read_off_any_cost_model():
    time = PrefillTime.of(H100)
    assert time.token_s == pytest.approx(0.02021e-3)
    assert time.area_s == pytest.approx(1.3e-9)
    flat = PrefillTime.of(FixedStepCost(0.01))
    assert flat.area_s == 0.0
    assert flat.tokens(0, 0.01) > 1_000_000


@given(prefix=st.integers(0, 150_000), budget_ms=st.floats(0.01, 200.0))
def test_a_chunk_fills_its_time_and_no_more(prefix, budget_ms):
    time = PrefillTime.of(H100)
    tokens = time.tokens(prefix, budget_ms / 1e3)
    assert time.chunk_s(prefix, tokens) <= budget_ms / 1e3 + 1e-9
    assert time.chunk_s(prefix, tokens + 1) > budget_ms / 1e3 - 1e-9


@given(st.integers(1, 256), st.integers(0, 400_000), st.integers(0, 100_000), st.integers(2_000, 8_000))
def test_base_and_chunk_together_are_the_time_of_the_step(decodes, context, prefix, tokens):
    time = PrefillTime.of(H100)
    work = StepWork(tokens=decodes, rows=decodes, decode_rows=decodes, decode_context=context)
    base = time.base_s(H100, work)
    work.add_chunk(prefix, tokens)
    assert base + time.chunk_s(prefix, tokens) == pytest.approx(H100.step(work), rel=1e-6)


def test_a_step_keeps_to_the_tightest_target_while_anything_decodes():
    yard = make_clocked(schedule_policy="edf")
    yard.submit(prompt(100), max_new=40)
    yard.turn()
    yard.submit(prompt(5000), max_new=2, slo=Slo(ttft_ns=60 * S))
    yard.turn()
    # 46 ms are 92% of 50; 1 ms and one decode leave room for 448 tokens of 0.1 ms, in whole 64s.
    assert chunks(yard.plans[-1]) == [448]
    yard.submit(prompt(10), max_new=40, slo=Slo(tpot_ns=20 * MS))
    yard.turn()
    yard.turn()
    assert chunks(yard.plans[-1]) == [128]


def test_while_nothing_decodes_a_step_may_take_its_idle_time():
    yard = make_clocked(schedule_policy="edf")
    yard.submit(prompt(5000), max_new=2)
    yard.turn()
    assert chunks(yard.plans[-1]) == [1984]


def test_slo_uses_the_slack_of_decodes_that_are_ahead_and_edf_does_not():
    sizes = {}
    for policy in ("edf", "slo"):
        yard = make_clocked(schedule_policy=policy)
        yard.submit(prompt(10), max_new=100)
        for _ in range(4):
            yard.turn()
        # Three tokens came after 1.1 ms each instead of 50 ms: almost 150 ms ahead, less 1 ms for safety.
        yard.submit(prompt(5000), max_new=2, slo=Slo(ttft_ns=60 * S))
        yard.turn()
        sizes[policy] = chunks(yard.plans[-1])[0]
    assert sizes["edf"] == 448
    assert 1600 <= sizes["slo"] <= 1984


@pytest.mark.part(2)
@pytest.mark.parametrize("depth", [1, 2])
def test_no_step_makes_a_decode_miss_its_mean_target(depth):
    yard = make_clocked(schedule_policy="slo", answer_tokens=(5, 60), max_in_flight=depth)
    numbers = [yard.submit(prompt(200 + 137 * index), max_new=60) for index in range(30)]
    yard.run(depth)
    for number in numbers:
        finish = yard.finished[number]
        if finish.completion_tokens > 1:
            gaps = finish.completion_tokens - 1
            assert (finish.finished_ns - finish.first_token_ns) / gaps <= 50 * MS


def test_a_chunk_that_completes_its_prompt_need_not_be_a_multiple():
    yard = make_clocked(schedule_policy="edf")
    yard.submit(prompt(77), max_new=2)
    yard.turn()
    assert chunks(yard.plans[-1]) == [77]


def test_chunks_end_on_page_borders():
    yard = make_clocked(schedule_policy="edf", page_size=48, pages=1000, chunked_prefill_size=4800)
    yard.submit(prompt(5000), max_new=2)
    yard.turn()
    assert chunks(yard.plans[-1])[0] % 48 == 0


def test_never_more_tokens_than_a_step_may_hold():
    yard = make_clocked(schedule_policy="edf", max_prefill_tokens=700)
    yard.submit(prompt(5000), max_new=2)
    yard.turn()
    assert chunks(yard.plans[-1]) == [640]


def test_a_target_that_is_lost_anyway_does_not_hold_prefill_up():
    slow = LinearCost(replace(COST.terms, step_ms=100.0))
    yard = make_clocked(schedule_policy="slo", cost=slow)
    yard.submit(prompt(10), max_new=1000)
    yard.turn()
    late = yard.submit(prompt(1500), max_new=1, slo=Slo(ttft_ns=600 * S))
    for _ in range(4):
        yard.turn()
    assert late in yard.finished


def test_prefill_moves_on_although_there_is_never_time_for_a_chunk():
    dear = LinearCost(LinearTerms(0.0, 1.0, 1.0, token_ms=1.0, context_ms=0.0, area_ms=0.0))
    yard = make_clocked(schedule_policy="edf", cost=dear)
    yard.submit(prompt(10), max_new=1000)
    yard.turn()
    yard.submit(prompt(1000), max_new=1, slo=Slo(ttft_ns=600 * S))
    before = len(yard.plans)
    for _ in range(3 * (MAX_DENIED_STEPS + 1)):
        yard.turn()
    with_chunk = [plan.step for plan in yard.plans[before:] if chunks(plan)]
    assert len(with_chunk) == 3
    assert all(chunks(yard.plans[step]) == [64] for step in with_chunk)


def test_at_most_four_prompts_are_left_unfinished():
    yard = make_clocked(schedule_policy="edf")
    for index in range(12):
        yard.submit(prompt(3000 - 100 * index), max_new=2, slo=Slo(ttft_ns=(60 - index) * S))
        yard.turn()
        assert len(yard.scheduler.state.prefilling) <= 4
    yard.rest()
    assert len(yard.finished) == 12


def test_without_a_cost_model_the_scheduler_learns_one():
    yard = make_clocked(schedule_policy="slo", cost=COST)
    yard.scheduler.state.cost = None
    yard.scheduler.state.set_policy(yard.scheduler.state.settings, yard.now)
    first = yard.submit(prompt(5000), max_new=2)
    yard.turn()
    assert chunks(yard.plans[0])[0] <= 128
    yard.rest()
    for index in range(60):
        yard.submit(prompt(300 + 10 * index), max_new=5)
    yard.rest()
    assert first in yard.finished
    work = StepWork()
    work.add_chunk(0, 1000)
    assert yard.scheduler.state.cost.step(work) == pytest.approx(COST.step(work), rel=0.3)


def test_any_policy_can_have_its_steps_bounded_in_time():
    yard = make_clocked(schedule_policy="fcfs", step_budget="time")
    yard.submit(prompt(5000), max_new=2)
    yard.turn()
    assert chunks(yard.plans[-1]) == [1984]
    yard.rest()


def test_dynamic_chunks_take_equal_time_along_a_prompt():
    cost = LinearCost(replace(COST.terms, area_ms=1e-4))
    yard = make_clocked(
        cost=cost, schedule_policy="fcfs", chunked_prefill_size=1024, enable_dynamic_chunking=True, page_size=4
    )
    yard.submit(prompt(9000), max_new=1)
    yard.rest()
    sizes = [chunks(plan)[0] for plan in yard.plans]
    times = [cost.step(step_work(plan)) for plan in yard.plans]
    assert sizes[0] == 1024
    assert sizes[:-1] == sorted(sizes[:-1], reverse=True)
    assert all(size % 4 == 0 for size in sizes[:-1])
    assert max(times[:-1]) == pytest.approx(min(times[:-1]), rel=0.05)
