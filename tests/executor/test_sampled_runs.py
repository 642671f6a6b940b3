"""Sampled answers repeat themselves through the whole executor, whatever the plan."""

from tests.executor.tiny_models import prompt_of
from tokenyard.base import SamplingParams

WARM = SamplingParams(temperature=0.8, top_p=0.95, seed=123)


def test_a_resumed_request_repeats_itself(make_driver):
    driver = make_driver("qwen2", page_size=4)
    sampling = SamplingParams(temperature=1.0, seed=5, presence_penalty=0.5, repetition_penalty=1.1)
    prompt = prompt_of(20, seed=1)
    expected = driver.generate(driver.start(prompt, sampling), 14)
    sequence = driver.start(prompt, sampling)
    driver.generate(sequence, 6)
    resumed = driver.start(**driver.retract(sequence), sampling=sampling)
    assert driver.generate(resumed, 14, chunk=5) == expected


def test_other_rows_do_not_change_an_answer(make_driver):
    driver = make_driver("llama")
    prompt = prompt_of(25, seed=2)
    expected = driver.generate(driver.start(prompt, WARM), 10)
    sequences = [driver.start(prompt, WARM), driver.start(prompt_of(7, seed=3), SamplingParams(seed=9, top_k=4))]
    driver.step((sequences[0], 10), (sequences[1], None))
    driver.step((sequences[0], None), (sequences[1], 1))
    while len(sequences[0].output) < 10:
        driver.step(*[(sequence, 1) for sequence in sequences])
    assert sequences[0].output == expected


def test_different_seeds_give_different_answers(make_driver):
    driver = make_driver("llama")
    prompt = prompt_of(25, seed=2)
    answers = {
        tuple(driver.generate(driver.start(prompt, SamplingParams(temperature=1.5, seed=seed)), 8)) for seed in range(4)
    }
    assert len(answers) == 4


def test_penalties_see_tokens_of_steps_in_flight(make_driver):
    sampling = SamplingParams(temperature=0.0, frequency_penalty=2.0, presence_penalty=2.0)
    prompt = prompt_of(12, seed=4)
    driver = make_driver("llama")
    expected = driver.generate(driver.start(prompt, sampling), 8)
    sequence = driver.start(prompt, sampling)
    launched = [driver.launch((sequence, None))] + [driver.launch((sequence, 1)) for _ in range(7)]
    for step in launched:
        driver.collect(step)
    assert sequence.output == expected
