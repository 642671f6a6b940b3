"""From spec to request: limits, defaults and refusals."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.engine.text_helpers import DEMO_TOKENIZER
from tokenyard.base import (
    ContextLengthError,
    ExecutorInfo,
    InvalidRequestError,
    SamplingParams,
)
from tokenyard.engine.frontend.input_processor import InputProcessor
from tokenyard.engine.frontend.io_struct import GenerateReqInput

INFO = ExecutorInfo("m", "cpu", "float32", 2048, 20, (1,), 1, 100, 8)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(DEMO_TOKENIZER))


def make(spec, tokenizer=None, info=INFO):
    maker = InputProcessor(info, tokenizer)
    ids = asyncio.run(maker.token_ids(spec))
    return maker.make(spec, *ids, number=1, rid="r", arrival_ns=5)


def of_ids(count, **sampling):
    return GenerateReqInput(input_ids=list(range(2, 2 + count)), sampling=SamplingParams(**sampling))


def test_everything_reaches_the_request():
    spec = of_ids(3, temperature=0.5)
    spec.tenant, spec.priority, spec.deadline_ms, spec.seed, spec.cache_salt = "t", 4, 1.5, 9, "salt"
    request = make(spec)
    assert request.prompt_ids.tolist() == [2, 3, 4]
    assert request.prompt_ids.dtype == np.int32
    assert (request.tenant, request.priority, request.deadline_ns, request.arrival_ns) == ("t", 4, 1_500_000, 5)
    assert (request.sampling.seed, request.sampling.temperature, request.cache_salt) == (9, 0.5, "salt")


@pytest.mark.parametrize("length", [10, 5000])
def test_texts_of_any_length_are_tokenized(tokenizer, length):
    text = "word " * length
    info = ExecutorInfo("m", "cpu", "float32", 2048, 10**5, (1,), 1, 10**5, 8)
    spec = GenerateReqInput(text=text, add_special_tokens=False)
    assert make(spec, tokenizer, info).prompt_ids.tolist() == tokenizer.encode(text, add_special_tokens=False).ids


def test_a_text_with_a_token_that_the_model_does_not_know_is_refused(tokenizer):
    small = replace(INFO, vocab_size=int(max(tokenizer.encode("Hello there").ids)))
    with pytest.raises(InvalidRequestError, match="is not in the vocabulary"):
        make(GenerateReqInput(text="Hello there"), tokenizer, small)


def test_the_tokenizers_end_mark_ends_answers_too(tokenizer):
    mark = tokenizer.id_to_token(7)

    def stops(eos_token, info=INFO, **sampling):
        maker = InputProcessor(info, tokenizer, eos_token)
        spec = of_ids(3, **sampling)
        ids = asyncio.run(maker.token_ids(spec))
        return maker.make(spec, *ids, number=1, rid="r", arrival_ns=5).sampling.stop_token_ids

    assert stops(mark) == [7]
    assert stops(mark, stop_token_ids=[3]) == [3, 7]
    assert stops(mark, ignore_eos=True) == []
    assert stops(mark, replace(INFO, eos_token_ids=(7,))) == []
    assert stops(mark, replace(INFO, vocab_size=7)) == []
    assert stops("no such token") == []


def test_stop_strings_wait_for_min_new_tokens(tokenizer):
    assert make(of_ids(3, min_new_tokens=5, max_new_tokens=9, stop=["a"]), tokenizer).text.min_tokens == 5
    assert make(of_ids(3, max_new_tokens=9, stop=["a"]), tokenizer).text.min_tokens == 0


def test_max_new_tokens_is_cut_or_refused():
    assert make(of_ids(12, max_new_tokens=128, min_new_tokens=50)).sampling.max_new_tokens == 8
    assert make(of_ids(12, max_new_tokens=128, min_new_tokens=50)).sampling.min_new_tokens == 8
    spec = of_ids(12, max_new_tokens=9)
    spec.clamp_max_new_tokens = False
    with pytest.raises(ContextLengthError, match=r"length is 20 tokens.*12 in the prompt, 9 in the completion"):
        make(spec)


def test_a_small_pool_limits_as_the_context_does():
    small = ExecutorInfo("m", "cpu", "float32", 2048, 1000, (1,), 1, 9, 8)
    assert make(of_ids(4), info=small).sampling.max_new_tokens == 6
    with pytest.raises(ContextLengthError, match="at most 9"):
        make(of_ids(10), info=small)


def test_seeds_are_drawn_when_not_given():
    seeds = {make(of_ids(3)).sampling.seed for _ in range(4)}
    assert len(seeds) == 4
    assert all(0 <= seed < 2**62 for seed in seeds)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (GenerateReqInput(), "exactly one"),
        (GenerateReqInput(text="a", input_ids=[1]), "exactly one"),
        (GenerateReqInput(text="a"), "no tokenizer"),
        (GenerateReqInput(input_ids=[]), "empty"),
        (GenerateReqInput(text=""), "empty"),
        (GenerateReqInput(input_ids=[2048]), "token id 2048 is not in the vocabulary of 2048"),
        (GenerateReqInput(input_ids=[-1]), "token id -1"),
        (GenerateReqInput(input_ids=[1.5]), "whole numbers"),
        (GenerateReqInput(input_ids=[[1]]), "flat list"),
        (of_ids(20), "20 tokens"),
        (of_ids(3, temperature=-1.0), "temperature"),
        (of_ids(3, stop=["x"]), "stop_token_ids"),
        (of_ids(3, stop_token_ids=[9999]), "stop_token_ids names a token"),
        (of_ids(3, logit_bias={9999: 1.0}), "logit_bias names a token"),
        (GenerateReqInput(input_ids=[1], deadline_ms=-1.0), "deadline_ms"),
        (GenerateReqInput(input_ids=[1], deadline_ms=float("nan")), "deadline_ms"),
    ],
)
def test_wrong_specs_are_refused_with_the_reason(spec, words):
    with pytest.raises(InvalidRequestError, match=words):
        make(spec)


@pytest.mark.parametrize("stop", [["x"] * 200, ["y" * 2000]])
def test_stop_strings_have_limits(tokenizer, stop):
    with pytest.raises(InvalidRequestError, match="stop takes at most"):
        make(of_ids(3, stop=stop), tokenizer)
