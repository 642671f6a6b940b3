import random

import numpy as np
import pytest

from tests.cost.test_online import some_work
from tokenyard.base import ConfigError, StepWork
from tokenyard.cost import LinearTerms, fit_terms, get_profile, relative_errors


def samples_of(terms: LinearTerms, count: int, noise: float = 0.0):
    rng = random.Random(7)
    works = [some_work(rng) for _ in range(count)]
    works += [StepWork(tokens=n, rows=n, decode_rows=n, decode_context=100 * n) for n in (1, 2, 4)]
    return [(work, terms.step(work) / 1e3 * rng.uniform(1.0 - noise, 1.0 + noise)) for work in works]


@pytest.mark.parametrize("name", [("h100", "llama-3-8b"), ("a100", "llama-2-7b"), ("cpu", "smollm2-135m")])
def test_exact_times_give_exact_predictions(name):
    truth = get_profile(*name).terms
    fitted = fit_terms(samples_of(truth, 40))
    assert np.abs(relative_errors(fitted, samples_of(truth, 90))).max() < 1e-6
    assert fitted.token_ms == pytest.approx(truth.token_ms)
    assert fitted.area_ms == pytest.approx(truth.area_ms)
    assert fitted.floor_ms == pytest.approx(truth.floor_ms + truth.step_ms)


def test_noise_moves_the_fit_by_less_than_itself():
    truth = get_profile("h100", "llama-3-8b").terms
    fitted = fit_terms(samples_of(truth, 60, noise=0.1))
    assert np.abs(relative_errors(fitted, samples_of(truth, 90))).mean() < 0.05


def test_no_term_is_ever_below_zero():
    rng = random.Random(1)
    for _ in range(20):
        samples = [(some_work(rng), rng.uniform(1e-4, 1e-1)) for _ in range(12)]
        fitted = fit_terms(samples)
        assert min(fitted.floor_ms, fitted.dense_ms, fitted.token_ms, fitted.context_ms, fitted.area_ms) >= 0.0


def test_without_steps_on_the_floor_it_ends_where_the_line_begins():
    truth = LinearTerms(0.0, 0.0, 2.0, 0.5, 1e-4, 1e-6)
    fitted = fit_terms(samples_of(truth, 30))
    assert fitted.floor_ms == pytest.approx(2.5, rel=1e-3)


def test_too_few_steps_or_no_time_are_refused():
    work = StepWork(tokens=1, rows=1)
    with pytest.raises(ConfigError, match="too few"):
        fit_terms([(work, 1.0)] * 3)
    with pytest.raises(ConfigError, match="took no time"):
        fit_terms([(work, 0.0)] * 20)
