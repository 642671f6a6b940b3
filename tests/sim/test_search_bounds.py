from dataclasses import replace

import numpy as np
import pytest

from tests.sim.small_workloads import setup, workload
from tokenyard.base import ConfigError
from tokenyard.cost import get_profile
from tokenyard.sim.planner.oracle_bounds import attainment_bound, endless_cache, min_work_s
from tokenyard.sim.planner.trial import largest_scale
from tokenyard.sim.simulate import DefaultSlo, simulate
from tokenyard.sim.traces.synthetic import SYNTHETIC, synthetic

PROFILE = get_profile("h100", "llama-3-8b")


@pytest.mark.parametrize("answer", [0.013, 0.7, 1.0, 3.3, 900.0])
def test_the_largest_scale_is_found(answer):
    found = largest_scale(lambda scale: scale <= answer, tolerance=0.01)
    assert answer / 1.01 <= found <= answer


def test_no_scale_meets_the_target():
    assert largest_scale(lambda scale: False) == 0.0


def test_a_target_that_is_always_met_is_reported():
    with pytest.raises(ConfigError, match="long enough"):
        largest_scale(lambda scale: True)


@pytest.mark.slow
def test_no_simulated_policy_beats_the_bound():
    for rate in (15.0, 25.0, 60.0):
        traffic = synthetic("plain", 300, rate, seed=7)
        bound = attainment_bound(traffic, PROFILE, DefaultSlo())
        for name in ("sglang-default", "vllm-default", "sarathi"):
            assert simulate(traffic, setup(name)).met.mean() <= bound + 1e-9


def test_the_bound_bites_under_overload_and_grows_with_replicas():
    traffic = synthetic("plain", 2000, 60.0, seed=7)
    one = attainment_bound(traffic, PROFILE, DefaultSlo())
    two = attainment_bound(traffic, PROFILE, DefaultSlo(), replicas=2)
    assert one < 0.95
    assert one < two
    assert attainment_bound(traffic.scaled(0.01), PROFILE, DefaultSlo()) == 1.0


def test_targets_of_single_requests_move_the_bound():
    traffic = synthetic("plain", 2000, 60.0, seed=7)
    patient = replace(traffic, slo_ttft_s=np.full(2000, 60.0), slo_tpot_s=np.full(2000, 1.0))
    due = replace(patient, deadline_s=np.full(2000, 0.5))
    bounds = [attainment_bound(one, PROFILE, DefaultSlo()) for one in (due, traffic, patient)]
    assert bounds == sorted(set(bounds))


def test_least_work_is_less_than_any_real_run_takes():
    traffic = workload((0.0, 5000, 50))
    assert min_work_s(traffic, PROFILE)[0] < simulate(traffic, setup()).e2e_s[0]


@pytest.mark.parametrize("kind", ["shared-prefix", "multi-turn"])
def test_no_cache_hits_more_than_an_endless_one(kind):
    traffic = synthetic(kind, 200, 5.0)
    cache = endless_cache(traffic, 16)
    settings = {"disable_radix_cache": False}
    outcome = simulate(traffic, setup("vllm-default", settings, kv_pool_tokens=10_000_000))
    hits = outcome.cached_tokens
    assert 0.3 < hits.sum() / traffic.prompt_tokens.sum() <= cache.hit_rate < 1.0
    assert (hits <= cache.shared_tokens).all()
    assert (cache.shared_tokens <= traffic.prompt_tokens).all()
    one_by_one = simulate(traffic.scaled(0.001), setup("vllm-default", settings, kv_pool_tokens=10_000_000))
    assert one_by_one.cached_tokens.sum() / traffic.prompt_tokens.sum() == pytest.approx(cache.hit_rate, rel=0.001)


def test_an_endless_cache_of_what_is_never_said_twice():
    assert endless_cache(synthetic("plain", 20, 5.0), 16).hit_rate == 0.0


def test_the_bound_counts_what_a_cache_saves():
    traffic = synthetic("shared-prefix", 1500, 25.0)
    reached = simulate(traffic, setup("vllm-default", {"disable_radix_cache": False})).met.mean()
    assert attainment_bound(traffic, PROFILE, DefaultSlo()) < reached
    assert attainment_bound(traffic, PROFILE, DefaultSlo(), 1, endless_cache(traffic, 16).shared_tokens) >= reached


def test_prefill_alone_may_take_long_steps():
    traffic = workload(*[(0.0, 4096, 1)] * 10)
    assert simulate(traffic, setup()).met.all()
    assert attainment_bound(traffic, PROFILE, DefaultSlo()) == 1.0


@pytest.mark.parametrize("kind", sorted(SYNTHETIC))
def test_synthetic_traffic_has_its_rate_and_repeats_by_seed(kind):
    traffic = synthetic(kind, 3000, 10.0, seed=1)
    assert len(traffic) == 3000
    assert (np.diff(traffic.arrival_s) >= 0).all()
    middle = traffic.arrival_s[2250] - traffic.arrival_s[750]
    assert 1500 / middle == pytest.approx(10.0, rel=0.2)
    again, other = synthetic(kind, 3000, 10.0, seed=1), synthetic(kind, 3000, 10.0, seed=2)
    assert (traffic.prompt_tokens == again.prompt_tokens).all()
    assert (traffic.arrival_s == again.arrival_s).all()
    assert (traffic.arrival_s != other.arrival_s).any()
    for index in (0, 2999):
        request = traffic.request(index)
        assert len(request.prompt_ids) == traffic.prompt_tokens[index]


def test_a_turn_begins_with_the_turn_before_it():
    traffic = synthetic("multi-turn", 600, 5.0, seed=1)
    prompts = [traffic.request(i).prompt_ids for i in range(600)]
    firsts = {prompt[:20].tobytes(): i for i, prompt in reversed(list(enumerate(prompts)))}
    later = [i for i, prompt in enumerate(prompts) if firsts[prompt[:20].tobytes()] != i]
    assert len(later) > 300
    for i in later[:50]:
        begin = prompts[firsts[prompts[i][:20].tobytes()]]
        assert (prompts[i][: len(begin)] == begin).all()


def test_bursts_are_burstier_than_poisson():
    gaps = np.diff(synthetic("bursts", 5000, 10.0).arrival_s)
    assert gaps.std() / gaps.mean() > 1.15


def test_the_flooding_tenant_sends_ten_times_as_much():
    traffic = synthetic("tenants", 13_000, 10.0)
    counts = np.bincount(traffic.tenant)
    assert counts[0] / counts[1] == pytest.approx(10.0, rel=0.15)


def test_unknown_kinds_and_rates_are_refused():
    with pytest.raises(ConfigError, match="did you mean bursts"):
        synthetic("burst", 10, 1.0)
    with pytest.raises(ConfigError, match="above 0"):
        synthetic("plain", 10, 0.0)
