"""Log-probabilities are those of the model itself, for prompt and answer, in chunks or not."""

import pytest
import torch

from tests.executor.tiny_models import logits, prompt_of
from tokenyard.base import LogprobOptions, SamplingParams

CASE = "qwen3"


def judged(ids):
    return torch.log_softmax(logits(CASE, ids), dim=-1)


def collected(sequence):
    """All reported positions of a sequence: position -> (token, logprob, top tokens, top logprobs)."""
    found = {}
    for entry in sequence.logprobs:
        tops = zip(entry.top_tokens, entry.top_logprobs, strict=True)
        for offset, (token, value, (ids, values)) in enumerate(zip(entry.tokens, entry.logprobs, tops, strict=True)):
            assert entry.position + offset not in found
            found[entry.position + offset] = (token, value, ids, values)
    return found


@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("prompt_from", [0, 10])
def test_prompt_and_answer(make_driver, chunk, prompt_from, monkeypatch):
    monkeypatch.setattr("tokenyard.executor.sampling.logprobs.PIECE_POSITIONS", 5)
    driver = make_driver(CASE, page_size=4)
    prompt = prompt_of(24, seed=1)
    sampling = SamplingParams(temperature=1.5, seed=4, logit_bias={5: 3.0}, repetition_penalty=1.5)
    sequence = driver.start(prompt, sampling, LogprobOptions(output=True, top=3, prompt_from=prompt_from))
    driver.generate(sequence, 6, chunk=chunk)
    expected = judged(sequence.known)
    found = collected(sequence)
    assert sorted(found) == list(range(max(1, prompt_from), 30))
    for position, (token, value, ids, values) in found.items():
        assert token == sequence.known[position]
        row = expected[position - 1]
        assert value == pytest.approx(float(row[token]), abs=2e-3)
        assert values == pytest.approx(row.topk(3).values.tolist(), abs=2e-3)
        assert row[ids].tolist() == pytest.approx(values, abs=2e-3)


def test_only_rows_that_asked_report(make_driver):
    driver = make_driver(CASE)
    asking = driver.start(prompt_of(9, seed=2), logprobs=LogprobOptions(output=True))
    silent = driver.start(prompt_of(12, seed=3))
    prompt_only = driver.start(prompt_of(5, seed=4), logprobs=LogprobOptions(prompt_from=0))
    driver.step((silent, None), (asking, None), (prompt_only, None))
    driver.step((silent, 1), (asking, 1), (prompt_only, 1))
    assert silent.logprobs == []
    assert [len(entry.tokens) for entry in asking.logprobs] == [1, 1]
    assert asking.logprobs[0].top_tokens == [[]]
    assert [entry.position for entry in asking.logprobs] == [9, 10]
    assert [(entry.position, entry.tokens) for entry in prompt_only.logprobs] == [(1, prompt_only.known[1:5])]


def test_a_resumed_answer_reports_its_prompt_no_second_time(make_driver):
    driver = make_driver(CASE)
    options = LogprobOptions(output=True, prompt_from=0)
    sequence = driver.start(prompt_of(15, seed=5), logprobs=options)
    driver.generate(sequence, 3)
    resumed = driver.start(**driver.retract(sequence), logprobs=options)
    driver.generate(resumed, 5, chunk=6)
    assert sorted(collected(resumed)) == [18, 19]


def test_a_row_that_changes_owner_reports_no_more(make_driver):
    driver = make_driver(CASE, max_pool_rows=1)
    sequence = driver.start(prompt_of(8, seed=6), logprobs=LogprobOptions(output=True))
    driver.generate(sequence, 2)
    driver.retract(sequence)
    second = driver.start(prompt_of(8, seed=7))
    driver.generate(second, 2)
    assert second.logprobs == []


def test_rows_of_one_step_get_as_many_alternatives_as_each_asked_for(make_driver):
    driver = make_driver(CASE)
    sequences = [
        driver.start(prompt_of(9 + top, seed=top), logprobs=LogprobOptions(output=True, top=top)) for top in (0, 4, 2)
    ]
    driver.step(*[(sequence, None) for sequence in sequences])
    driver.step(*[(sequence, 1) for sequence in sequences])
    for sequence, top in zip(sequences, (0, 4, 2), strict=True):
        for position, (token, value, ids, values) in collected(sequence).items():
            row = judged(sequence.known)[position - 1]
            assert (token, len(ids)) == (sequence.known[position], top)
            assert value == pytest.approx(float(row[token]), abs=2e-3)
            assert values == pytest.approx(row.topk(top).values.tolist(), abs=2e-3)


def test_named_tokens_are_reported_behind_the_likeliest(make_driver):
    driver = make_driver(CASE)
    few = driver.start(prompt_of(6, seed=5), logprobs=LogprobOptions(True, 2, 0, [7, 3]))
    many = driver.start(prompt_of(8, seed=6), logprobs=LogprobOptions(True, 0, -1, [1, 2, 9]))
    plain = driver.start(prompt_of(4, seed=7), logprobs=LogprobOptions(True, 1))
    driver.step((few, None), (many, None), (plain, None))
    for sequence, top, named in ((few, 2, [7, 3]), (many, 0, [1, 2, 9]), (plain, 1, [])):
        expected = judged(sequence.known)
        for position, (_, _, ids, values) in collected(sequence).items():
            assert ids[top:] == named
            assert len(ids) == top + len(named)
            assert values == pytest.approx(expected[position - 1][ids].tolist(), abs=2e-3)
