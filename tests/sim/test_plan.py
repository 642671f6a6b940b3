"""The planner: sizes of fleets, arrivals resampled, and the choice among kinds of fleets."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sim.small_workloads import setup
from tokenyard.sim.planner import trial as trials
from tokenyard.sim.planner.capacity_plan import CapacityPlanner, ConfidenceInterval
from tokenyard.sim.planner.trial import (
    FleetOption,
    Sizing,
    SizingResult,
    Trial,
    TrialTraffic,
    answered,
    attained,
    busiest,
    guess,
    reseeded,
    sized,
    smallest,
)
from tokenyard.sim.simulate import simulate
from tokenyard.sim.traces.synthetic import synthetic

SLOW = {"slo_ttft_ms": 300.0, "slo_ttft_scale": 0.0}


def option(policy="fcfs", price=None, most=64, **changes):
    settings = {"schedule_policy": policy, "disable_radix_cache": False, **SLOW}
    return FleetOption(setup(settings=settings, router="predicted_ttft", **changes), policy, price, most)


@given(answer=st.integers(1, 80), start=st.integers(1, 60), most=st.integers(1, 60))
def test_the_smallest_number_is_found_from_anywhere(answer, start, most):
    tried = []
    found = smallest(lambda count: tried.append(count) or count >= answer, min(start, most), most)
    assert found == (answer if answer <= most else None)
    assert len(tried) == len(set(tried))
    assert all(1 <= count <= most for count in tried)


@given(
    answer=st.integers(1, 60),
    start=st.integers(1, 60),
    data=st.tuples(st.integers(0, 59), st.none() | st.integers(0, 9)),
)
def test_what_is_known_is_not_tried_again(answer, start, data):
    too_few = min(data[0], answer - 1)
    enough = None if data[1] is None else answer + data[1]
    tried = []
    assert smallest(lambda count: tried.append(count) or count >= answer, start, 80, too_few, enough) == answer
    assert len(tried) == len(set(tried))
    assert all(too_few < count < (enough or 81) for count in tried)


def test_resampled_arrivals_keep_requests_and_rates():
    traffic = synthetic("bursts", 2000, 10.0, seed=1)
    other = reseeded(traffic, 3)
    assert reseeded(traffic, 0) is traffic
    assert (other.prompt_tokens == traffic.prompt_tokens).all()
    assert (np.diff(other.arrival_s) >= 0).all()
    assert not np.allclose(other.arrival_s, traffic.arrival_s)
    per_minute = [np.bincount((one.arrival_s // 60).astype(int)) for one in (traffic, other)]
    assert np.abs(per_minute[0] - per_minute[1]).max() <= 25


def test_the_busiest_part_is_found():
    traffic = synthetic("plain", 800, 10.0, seed=1)
    times = traffic.arrival_s.copy()
    times[400:] = times[400] + (times[400:] - times[400]) / 5
    begin, end = busiest(replace(traffic, arrival_s=times), 100)
    assert (end - begin, begin >= 400) == (100, True)
    assert busiest(traffic, 5000) == (0, 800)


def test_a_trial_is_a_simulation_of_its_part_of_the_trace():
    traffic = synthetic("plain", 100, 60.0, seed=1)
    kind = option()
    whole = attained(traffic, Trial(kind, 2, TrialTraffic(0, 100)))
    assert whole == pytest.approx(simulate(traffic, kind.fleet(2)).met.mean())
    first = attained(traffic, Trial(kind, 2, TrialTraffic(0, 40)))
    assert first == pytest.approx(simulate(traffic.limited(40), kind.fleet(2)).met.mean(), abs=0.03)
    assert attained(traffic, Trial(kind, 2, TrialTraffic(0, 40), slower=20.0)) < first


def test_a_hopeless_trial_ends_early_with_a_bound():
    traffic = synthetic("plain", 300, 120.0, seed=1)
    trial = Trial(option(), 1, TrialTraffic(0, 300))
    bound, whole = attained(traffic, trial, 0.99), attained(traffic, trial)
    assert whole <= bound < 0.99


def test_a_size_is_that_of_brute_force():
    traffic = synthetic("plain", 100, 100.0, seed=2)
    kind, part = option(), TrialTraffic(0, 100)
    sizing = Sizing(kind, part, 0.9)
    found = sized(traffic, sizing)
    every = [attained(traffic, Trial(kind, count, part)) for count in range(1, found.replicas + 1)]
    assert [share >= 0.9 for share in every] == [False] * (found.replicas - 1) + [True]
    assert found.attainment == every[-1]
    assert sized(traffic, replace(sizing, option=option(most=1))).replicas is None
    assert guess(traffic, sizing) >= 1


@pytest.mark.slow
def test_a_known_start_changes_nothing(monkeypatch):
    monkeypatch.setattr(trials, "MIN_PART_REQUESTS", 30)
    traffic, begin = synthetic("plain", 240, 100.0, seed=2), Sizing(option(), TrialTraffic(0, 240), 0.97)
    found = sized(traffic, begin)
    for start in (1, found.replicas, found.replicas + 2):
        again = sized(traffic, replace(begin, start=start))
        assert (again.replicas, again.attainment) == (found.replicas, found.attainment)
    few = replace(begin, option=option(most=1), start=1)
    assert (sized(traffic, few).replicas, sized(traffic, few).trials) == (None, 1)


def test_an_interval_is_that_of_the_seeds_where_they_differ():
    low, high = ConfidenceInterval((0.4, 0.5, 0.6), 10**6).bounds
    assert (low, high) == pytest.approx((0.5 - 4.30 * 0.1 / 3**0.5, 0.5 + 4.30 * 0.1 / 3**0.5))
    assert ConfidenceInterval((0.9, 1.0), 10**6).bounds[1] == 1.0


def test_an_interval_is_never_empty():
    low, high = ConfidenceInterval((1.0, 1.0, 1.0), 1000).bounds
    assert 0.9955 < low < 0.997
    assert high == 1.0
    assert ConfidenceInterval((0.0,), 1000).bounds == pytest.approx((0.0, 1.0 - low))
    assert ConfidenceInterval((0.9, 0.9), 100).bounds == pytest.approx((0.8256, 0.9448), abs=1e-4)  # Wilson 1927
    assert ConfidenceInterval((0.9,), 100).bounds == ConfidenceInterval((0.9, 0.9), 100).bounds


class Made:
    """Answers of a made-up world: an option needs `need[policy]` replicas, times how slow it is and how much comes."""

    def __init__(self, need):
        self.need, self.words = need, []

    def each(self, what, jobs):
        self.words.append(what)
        return [self.sized(job) if isinstance(job, Sizing) else self.attained(job) for job in jobs]

    def sized(self, sizing):
        need = self.need[sizing.option.policy] * sizing.slower * sizing.traffic.rate
        need += 1 if sizing.target > 0.99 else 0
        count = int(np.ceil(need - 1e-9))
        return SizingResult(sizing, count if count <= sizing.option.max_replicas else None, 0.995, 3)

    def attained(self, trial):
        return 0.995 if trial.replicas >= self.need[trial.option.policy] * trial.traffic.rate else 0.5


def test_the_cheapest_and_the_smallest_are_separate_and_get_what_ifs():
    world = Made({"few": 2, "cheap": 5, "dear": 4})
    kinds = [option(price=price) for price in (4.0, 1.0, 3.0)]
    kinds = [replace(kind, policy=policy) for kind, policy in zip(kinds, world.need, strict=True)]
    plan = CapacityPlanner(synthetic("plain", 100, 10.0), 0.99, 3, world.each).plan(kinds)
    best, least = plan.finalists[plan.cheapest], plan.finalists[plan.smallest]
    assert (best.option.policy, best.replicas, best.cost) == ("cheap", 5, 5.0)
    assert (least.option.policy, least.devices) == ("few", 2)
    assert len(best.attainment.values) == 3
    first = plan.what_if[0]
    assert (first.nine_more, first.at_more_traffic, first.more_traffic, first.one_down.mean) == (6, 8, 0.5, 0.5)
    place = [found.option.policy for found in plan.finalists].index("cheap")
    assert (plan.bounds.faster[place], plan.bounds.slower[place]) == (4, 6)
    assert not plan.bounds.measured


def test_halving_looks_longer_at_the_better_half_only():
    world = Made({f"p{count}": count for count in range(1, 9)})
    kinds = [replace(option(), policy=policy) for policy in world.need]
    plan = CapacityPlanner(synthetic("plain", 16_000, 100.0), 0.99, 1, world.each).plan(kinds)
    assert world.words[:3] == ["round 1 of 3: 8 kinds", "round 2 of 3: 4 kinds", "round 3 of 3: 3 kinds"]
    assert plan.finalists[plan.cheapest].option.policy == "p1"
    assert len(plan.eliminated) == 5


def test_a_fleet_that_misses_on_average_over_the_seeds_gets_one_more():
    class Unlucky(Made):
        def attained(self, trial):
            return 0.95 if trial.replicas == 3 else 0.999

    world = Unlucky({"one": 3})
    plan = CapacityPlanner(synthetic("plain", 100, 10.0), 0.99, 3, world.each).plan([replace(option(), policy="one")])
    assert plan.finalists[0].replicas == 4


def test_the_size_is_the_smallest_whose_mean_over_the_seeds_meets_the_target():
    """Also where the recorded arrivals need more replicas than the mean of the seeds."""
    rng = np.random.default_rng(7)
    for case in range(20):
        need = [int(count) for count in np.clip(rng.integers(3, 8) + rng.integers(-2, 3, 3), 1, 12)]

        class Seeded(Made):
            def share(self, seed, replicas, need=need):
                return 1.0 if replicas >= need[seed] else 0.99 - 0.02 * (need[seed] - replicas)

            def sized(self, sizing):
                target = sizing.target
                count = next(n for n in range(1, 40) if self.share(0, n) >= target)
                return SizingResult(sizing, count, self.share(0, count), 1)

            def attained(self, trial):
                return self.share(trial.traffic.seed, trial.replicas)

        world = Seeded({})
        kind = replace(option(), policy="one")
        found = CapacityPlanner(synthetic("plain", 100, 10.0), 0.985, 3, world.each).plan([kind]).finalists[0]
        means = [np.mean([world.share(seed, n) for seed in range(3)]) for n in range(1, 20)]
        expected = next(n for n, mean in enumerate(means, 1) if mean >= 0.985 - 1e-12)
        assert found.replicas == expected, (case, need)
        assert found.attainment.mean == pytest.approx(means[expected - 1])
        if expected > 1:
            assert found.one_fewer.mean == pytest.approx(means[expected - 2])


@pytest.mark.slow
@pytest.mark.parametrize("case", range(3))
def test_plans_agree_with_brute_force_over_seeds(case):
    rng = np.random.default_rng(case)
    traffic = synthetic("bursts", 60, float(rng.uniform(60, 240)), seed=case)
    kind, target = option("slo" if case % 2 else "fcfs"), float(rng.choice([0.9, 0.95, 0.98]))
    plan = CapacityPlanner(traffic, target, 3, lambda what, jobs: [answered(traffic, one) for one in jobs])
    found = plan.plan([kind]).finalists[0]
    whole = TrialTraffic(0, len(traffic))
    for replicas in range(1, found.replicas + 1):
        trials = [Trial(kind, replicas, replace(whole, seed=seed)) for seed in range(3)]
        mean = np.mean([attained(traffic, trial) for trial in trials])
        assert (mean >= target) == (replicas == found.replicas), replicas
    assert found.attainment.mean == pytest.approx(mean)


def test_there_may_be_no_plan():
    world = Made({"one": 100})
    planner = CapacityPlanner(synthetic("plain", 100, 10.0), 0.99, 1, world.each)
    assert planner.plan([replace(option(), policy="one")]) is None
    assert [(one.replicas, one.attainment) for one in planner.eliminated] == [(None, 0.995)]
