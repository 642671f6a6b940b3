"""Requests that arrive with an answer begun: they end like the whole one, by the same tokens and the same count."""

import numpy as np
import pytest

from tests.scheduler.harness import Yard, make_info
from tokenyard.base import SamplingParams, SchedulerSettings
from tokenyard.policy import POLICIES

PROMPT = [5, 6, 7, 8, 9]


def yard(**changes) -> Yard:
    return Yard(SchedulerSettings(**({"context_length": 64} | changes)), make_info(), answer_tokens=(9, 9))


def begun(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


@pytest.mark.part(4)
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("max_new", [7, 20])
def test_it_ends_like_the_whole_one_wherever_it_was_cut(depth, policy, max_new):
    whole = yard(max_in_flight=depth, schedule_policy=policy)
    number = whole.submit(PROMPT, max_new=max_new)
    whole.run(depth)
    tokens, end = whole.tokens[number], whole.finished[number]
    for cut in range(len(tokens)):
        rest = yard(max_in_flight=depth, schedule_policy=policy)
        again = rest.submit(PROMPT, max_new=max_new, output_ids=begun(tokens[:cut]))
        rest.run(depth)
        finish = rest.finished[again]
        assert rest.tokens[again] == tokens[cut:]
        assert (finish.reason, finish.matched) == (end.reason, end.matched)
        assert (finish.prompt_tokens, finish.completion_tokens) == (len(PROMPT), len(tokens))
        assert rest.scheduler.idle() is None


def test_an_answer_that_is_whole_already_ends_at_once():
    ended = yard()
    by_length = ended.submit(PROMPT, max_new=3, output_ids=begun([11, 12, 13]))
    by_stop = ended.submit(PROMPT, max_new=9, output_ids=begun([11, 2]))
    own = SamplingParams(max_new_tokens=9, stop_token_ids=[12], ignore_eos=True)
    by_own_stop = ended.submit(PROMPT, sampling=own, output_ids=begun([11, 12]))
    full = ended.submit(PROMPT, max_new=100, output_ids=begun(range(3, 3 + 60)))
    ended.run()
    assert [ended.finished[n].reason for n in (by_length, by_stop, by_own_stop, full)] == [
        "length",
        "stop",
        "stop",
        "length",
    ]
    assert ended.finished[by_own_stop].matched == 12
    assert not ended.plans
    assert ended.scheduler.idle() is None


def test_cached_tokens_are_those_of_the_prompt():
    warm = yard()
    first = warm.submit(PROMPT, max_new=6)
    warm.run()
    again = warm.submit(PROMPT, max_new=9, output_ids=begun(warm.tokens[first][:4]))
    warm.run()
    assert warm.finished[again].cached_tokens == len(PROMPT)


def test_several_answers_cannot_go_on_from_one():
    refused = yard()
    number = refused.submit(PROMPT, sampling=SamplingParams(n=2), output_ids=begun([11]))
    assert {refused.finished[number + answer].cause for answer in (0, 1)} == {"invalid"}
    assert "n = 1" in refused.finished[number].message
