import random

import pytest

from tokenyard.base import ConfigError, StepWork
from tokenyard.cost import LinearCost, LinearTerms, OnlineCost, get_profile


def some_work(rng: random.Random) -> StepWork:
    rows = rng.randrange(1, 200)
    work = StepWork(tokens=rows, rows=rows, decode_rows=rows, decode_context=rows * rng.randrange(100, 3000))
    if rng.random() < 0.5:
        work.add_chunk(rng.randrange(0, 20_000), rng.randrange(16, 4096))
    return work


def scaled(terms: LinearTerms, factor: float) -> LinearCost:
    names = ("step_ms", "floor_ms", "dense_ms", "token_ms", "context_ms", "area_ms")
    return LinearCost(LinearTerms(*(getattr(terms, name) * factor for name in names)))


def mean_error(model, truth, rng: random.Random) -> float:
    works = [some_work(rng) for _ in range(200)]
    return sum(abs(model.step(w) - truth.step(w)) / truth.step(w) for w in works) / len(works)


@pytest.mark.parametrize("factor", [0.6, 1.0, 1.7])
def test_a_wrong_prior_is_corrected_by_measured_steps(factor):
    truth = get_profile("h100", "llama-3-8b").cost()
    online = OnlineCost(scaled(truth.terms, factor))
    rng = random.Random(3)
    for _ in range(1000):
        work = some_work(rng)
        online.learn(work, truth.step(work) * rng.uniform(0.97, 1.03))
    assert mean_error(online, truth, random.Random(4)) < 0.02
    assert online.relative_error < 0.05


@pytest.mark.parametrize("factor", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_the_prediction_for_a_busy_device_is_its_mean_time(kind, factor):
    truth = get_profile("cpu", "demo").cost()
    online = OnlineCost(scaled(truth.terms, factor))
    rng = random.Random(3)
    took_s = predicted_s = 0.0
    for turn in range(4000):
        work = some_work(rng)
        seconds = truth.step(work) * (1.0 + rng.expovariate(2.0))
        if turn > 1000 and (work.prefill_tokens > 0) == (kind == "prefill"):
            took_s += seconds
            predicted_s += online.step(work)
        online.learn(work, seconds)
    assert predicted_s == pytest.approx(took_s, rel=0.04)


def test_a_stalled_step_changes_little():
    truth = get_profile("h100", "llama-3-8b").cost()
    online = OnlineCost(truth)
    rng = random.Random(8)
    for turn in range(320):
        work = some_work(rng)
        online.learn(work, truth.step(work) * (1000.0 if turn == 10 else 1.0))
    assert mean_error(online, truth, random.Random(4)) < 0.02


def test_terms_never_measured_keep_their_prior():
    truth = get_profile("h100", "llama-3-8b").cost()
    online = OnlineCost(truth)
    for rows in range(1, 400):
        work = StepWork(tokens=rows % 60 + 1, rows=rows % 60 + 1, decode_rows=rows % 60 + 1, decode_context=1000 * rows)
        online.learn(work, truth.step(work) * 1.3)
    assert online.terms.area_ms == pytest.approx(truth.terms.area_ms)
    assert online.terms.token_ms == pytest.approx(truth.terms.token_ms)


def test_terms_stay_at_zero_or_above_whatever_is_measured():
    online = OnlineCost(get_profile("h100", "llama-3-8b").cost())
    rng = random.Random(5)
    for _ in range(320):
        online.learn(some_work(rng), rng.choice((1e-6, 10.0)))
    assert min(online.terms.floor_ms, online.terms.token_ms, online.terms.context_ms, online.terms.area_ms) >= 0.0


def test_nonsense_measurements_are_ignored():
    online = OnlineCost(get_profile("h100", "llama-3-8b").cost())
    online.learn(StepWork(tokens=1, rows=1), 0.0)
    online.learn(StepWork(), 1.0)
    assert online.steps_learned == 0


def test_learning_the_same_steps_gives_the_same_terms():
    def learned() -> LinearTerms:
        online = OnlineCost(get_profile("h100", "llama-3-8b").cost())
        rng = random.Random(6)
        for _ in range(200):
            online.learn(some_work(rng), rng.uniform(0.01, 0.2))
        return online.terms

    assert learned() == learned()


def test_bad_settings_are_refused():
    with pytest.raises(ConfigError, match="forgetting"):
        OnlineCost(get_profile("h100", "llama-3-8b").cost(), forgetting=0.0)
