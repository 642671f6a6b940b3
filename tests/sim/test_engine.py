from dataclasses import replace

import numpy as np
import pytest

from tests.sim.small_workloads import setup, workload
from tokenyard.base import ConfigError, Slo, StepWork
from tokenyard.sim.report.summary import length_classes, summary
from tokenyard.sim.simulate import FINISHED, REJECTED, DefaultSlo, simulate
from tokenyard.sim.traces.prompt_ids import ANSWER_STREAM, SegmentContent
from tokenyard.sim.traces.synthetic import synthetic


def test_one_request_takes_its_prefill_and_its_decode_steps():
    run = setup()
    outcome = simulate(workload((2.0, 1000, 4)), run)
    cost = run.profile.cost()
    prefill = StepWork()
    prefill.add_chunk(0, 1000)
    decodes = [cost.step(StepWork(tokens=1, rows=1, decode_rows=1, decode_context=1001 + i)) for i in range(3)]
    assert outcome.ttft_s[0] == pytest.approx(cost.step(prefill), abs=1e-8)
    assert outcome.e2e_s[0] == pytest.approx(cost.step(prefill) + sum(decodes), abs=1e-7)
    assert outcome.completion_tokens.tolist() == [4]
    assert outcome.unloaded_s[0] == pytest.approx(outcome.ttft_s[0])


def test_a_long_prompt_goes_in_chunks_with_growing_attention():
    run = setup()
    outcome = simulate(workload((0.0, 20_000, 1)), run)
    assert outcome.counters["prefill_steps"] == 3
    assert outcome.ttft_s[0] == pytest.approx(outcome.unloaded_s[0], abs=1e-7)


def test_arrivals_at_the_same_moment_share_the_first_step():
    outcome = simulate(workload((1.0, 100, 1), (1.0, 100, 1), (1.0, 100, 1)), setup())
    assert outcome.counters["steps"] == 1
    assert len(set(outcome.first_token_ns.tolist())) == 1


def test_answers_have_their_true_length_and_max_new_tokens_bounds_nothing_else():
    outcome = simulate(workload((0.0, 50, 3), (0.1, 60, 17), (0.2, 70, 1)), setup())
    assert outcome.completion_tokens.tolist() == [3, 17, 1]


def test_equal_runs_have_equal_hashes_and_other_settings_other_ones():
    traffic = synthetic("plain", 60, 8.0, seed=4)
    hashes = [simulate(traffic, setup(name)).decision_hash for name in ("sglang-default",) * 2 + ("vllm-default",)]
    assert hashes[0] == hashes[1]
    assert hashes[0] != hashes[2]


@pytest.mark.parametrize("name", ["sglang-default", "vllm-default", "sarathi"])
def test_every_request_is_served_whole_under_memory_pressure(name):
    traffic = synthetic("plain", 80, 40.0, seed=5)
    outcome = simulate(traffic, setup(name, kv_pool_tokens=32_000))
    served = outcome.status == FINISHED
    assert (outcome.completion_tokens[served] == traffic.output_tokens[served]).all()
    assert served.sum() + (outcome.status == REJECTED).sum() == 80
    assert served.mean() > 0.9


def test_a_prompt_larger_than_the_pool_is_counted_as_rejected_and_missed():
    outcome = simulate(workload((0.0, 30_000, 5), (0.0, 100, 5)), setup(kv_pool_tokens=16_000))
    numbers = summary(outcome)
    assert outcome.status.tolist() == [REJECTED, FINISHED]
    assert (numbers["rejected"], numbers["finished"], numbers["slo_attainment"]) == (1, 1, 0.5)


def test_a_second_turn_hits_the_first_prompt_and_its_answer():
    streams = np.array([1, 1, ANSWER_STREAM, 2], np.int64)
    content = SegmentContent(streams, np.array([1024, 1024, 512, 64], np.int32), np.array([0, 1, 4], np.int64))
    turns = workload((0.0, 1024, 520), (60.0, 1024 + 512 + 64, 2), content=content)
    outcome = simulate(turns, setup(settings={"disable_radix_cache": False}))
    assert outcome.cached_tokens.tolist() == [0, 1024 + 512]


def test_without_the_prefix_cache_nothing_hits():
    outcome = simulate(synthetic("shared-prefix", 40, 5.0), setup())
    assert outcome.cached_tokens.sum() == 0


def test_overlap_hides_host_time_and_costs_no_answer_its_length():
    traffic = synthetic("plain", 40, 20.0, seed=2)
    slow = simulate(traffic, setup(host_s=0.004))
    hidden = simulate(traffic, setup(settings={"max_in_flight": 2}, host_s=0.004))
    assert hidden.e2e_s.mean() < slow.e2e_s.mean()
    assert (hidden.completion_tokens == traffic.output_tokens).all()


def test_slo_is_judged_on_the_whole_prompt_and_on_every_request():
    outcome = simulate(workload((0.0, 20_000, 1), (0.0, 100, 40)), setup())
    assert outcome.ttft_slo_s[0] == pytest.approx(5 * outcome.unloaded_s[0])
    assert outcome.ttft_slo_s[1] == 1.0
    strict = setup(settings={"slo_ttft_ms": 0.0, "slo_ttft_scale": 0.5})
    assert not simulate(workload((0.0, 20_000, 1)), strict).met.any()


def test_a_slow_answer_misses_its_token_target():
    strict = setup(settings={"slo_tpot_ms": 1.0})
    outcome = simulate(workload((0.0, 100, 40), (0.0, 100, 1)), strict)
    assert outcome.met.tolist() == [False, True], "an answer of one token has no time per token"


def test_targets_of_a_request_override_those_of_the_run():
    plain = workload((0.0, 20_000, 1), (0.0, 100, 40), (0.0, 100, 40), (0.0, 100, 40))
    none = np.full(4, np.nan)
    traffic = replace(plain, slo_ttft_s=np.array([0.2, np.nan, np.nan, 9.0]), slo_tpot_s=none.copy(), deadline_s=none)
    traffic.slo_tpot_s[1] = 0.001
    outcome = simulate(traffic, setup())
    assert simulate(plain, setup()).met.all()
    assert outcome.met.tolist() == [False, False, True, True]
    assert outcome.ttft_slo_s.tolist()[::3] == [0.2, 9.0]
    assert outcome.late_s[0] == pytest.approx(outcome.ttft_s[0] - 0.2)
    assert outcome.late_s[1:].tolist() == [0.0, 0.0, 0.0]


def test_a_deadline_is_to_the_end_and_stands_in_for_the_first_token():
    strict = {"slo_ttft_ms": 1.0, "slo_ttft_scale": 0.0}
    plain = workload((0.0, 4000, 40), (100.0, 4000, 40), (200.0, 4000, 40))
    took_s = float(simulate(plain, setup()).e2e_s[0])
    traffic = replace(plain, deadline_s=np.array([took_s + 0.01, took_s - 0.01, np.nan]))
    outcome = simulate(traffic, setup(settings=strict))
    assert outcome.met.tolist() == [True, False, False]
    assert outcome.late_s[:2] == pytest.approx([0.0, 0.01])


def test_the_scheduler_gets_targets_and_deadlines():
    one = replace(workload((0.0, 9, 1)), slo_ttft_s=np.array([0.5]), slo_tpot_s=np.array([0.25]))
    assert one.request(0).slo == Slo(500_000_000, 250_000_000)
    assert workload((0.0, 9, 1)).request(0).slo is None


def test_replicas_share_the_load():
    traffic = synthetic("plain", 80, 30.0, seed=1)
    one, four = simulate(traffic, setup()), simulate(traffic, setup(replicas=4, router="least_load"))
    assert set(four.replica.tolist()) == {0, 1, 2, 3}
    assert four.ttft_s.mean() < one.ttft_s.mean()
    assert four.served.all()


def test_cache_aware_routing_keeps_prefixes_together():
    traffic = synthetic("shared-prefix", 200, 20.0, seed=1)
    cached = {"disable_radix_cache": False}
    rates = [
        summary(simulate(traffic, setup(settings=cached, replicas=4, router=router)))["prefix_hit_rate"]
        for router in ("round_robin", "cache_aware")
    ]
    assert rates[1] > rates[0] + 0.05


def test_a_wrong_prior_cost_model_changes_no_time_of_the_device():
    traffic = workload((0.0, 1000, 5))
    right, wrong = simulate(traffic, setup()), simulate(traffic, setup(prior_scale=2.0, learn=True))
    assert right.e2e_s[0] == wrong.e2e_s[0]


def test_progress_reaches_the_end():
    seen: list[tuple[int, int]] = []
    simulate(synthetic("plain", 10, 5.0), setup(), progress=lambda done, total: seen.append((done, total)))
    assert seen[0] == (0, 10)
    assert seen[-1] == (10, 10)


def test_summary_adds_up_and_has_the_promised_fields():
    traffic = synthetic("classes", 100, 10.0, seed=3)
    numbers = summary(simulate(traffic, setup()))
    assert numbers["finished"] + numbers["rejected"] + numbers["unfinished"] == numbers["requests"] == 100
    assert set(numbers["slo_attainment_by_class"]) == {"interactive", "standard", "batch"}
    assert set(numbers["slo_attainment_by_length"]) >= {"longest_quarter", "longest_5_percent"}
    for name in ("ttft_s", "tpot_s", "e2e_s", "wait_s", "late_s"):
        spread = numbers[name]
        assert spread["p50"] <= spread["p90"] <= spread["p99"] <= spread["p999"] <= spread["max"]
    for name in ("throughput_tokens_per_s", "prefix_hit_rate", "preemptions", "recomputed_tokens", "utilisation"):
        assert numbers[name] >= 0
    assert len(numbers["decision_hash"]) == 32


def test_an_answer_that_the_pool_cuts_off_is_reported():
    numbers = summary(simulate(workload((0.0, 15_900, 500), (0.0, 100, 5)), setup(kv_pool_tokens=16_000)))
    assert (numbers["finished"], numbers["cut_short"]) == (2, 1)
    assert summary(simulate(workload((0.0, 100, 5)), setup()))["cut_short"] == 0


def test_many_prompts_as_long_as_the_longest_are_the_longest():
    outcome = simulate(workload(*[(0.0, 50, 2)] * 8, *[(0.0, 7000, 2)] * 12), setup())
    classes = length_classes(outcome)
    assert classes["longest_5_percent"].sum() == classes["longest_quarter"].sum() == 12


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"replicas": 0}, "--replicas"),
        ({"kv_pool_tokens": 3}, "does not hold one page"),
        ({"router": "nearest"}, "unknown router policy"),
    ],
)
def test_setups_that_cannot_work_are_refused(change, complaint):
    with pytest.raises(ConfigError, match=complaint):
        simulate(workload((0.0, 10, 1)), setup(**change))


def test_targets_that_cannot_be_met_are_refused():
    with pytest.raises(ConfigError, match="SLO"):
        DefaultSlo(tpot_s=0.0)
    with pytest.raises(ConfigError, match="both 0"):
        DefaultSlo(ttft_s=0.0, ttft_scale=0.0)
