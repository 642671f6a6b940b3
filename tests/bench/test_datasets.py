"""What benchmarks ask: lengths, shared prefixes, files."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer

from tokenyard.base import ConfigError
from tokenyard.bench.datasets import (
    DatasetRow,
    Lengths,
    SharedPrefix,
    Vocabulary,
    json_lines,
    mooncake,
    poisson_arrivals,
    random_ids,
    random_text,
    recorded_arrivals,
    shared_prefix,
)
from tokenyard.config import DEMO_MODEL

pytestmark = pytest.mark.skipif(not (DEMO_MODEL / "tokenizer.json").is_file(), reason="the demo model is not there")


@pytest.fixture(scope="module")
def vocabulary():
    return Vocabulary(Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")))


def rng(seed=0):
    return np.random.default_rng(seed)


def test_lengths_stay_in_their_range():
    inputs, outputs = Lengths(100, 10, 0.5).draw(500, rng())
    assert (min(inputs), max(inputs), min(outputs), max(outputs)) == (50, 100, 5, 10)
    assert set(Lengths(7, 3, 1.0).draw(9, rng())[0]) == {7}
    assert min(Lengths(3, 3, 0.0).draw(99, rng())[0]) == 1


@pytest.mark.parametrize("wrong", [(0, 1, 0.0), (1, 0, 0.0), (1, 1, 1.5), (1, 1, -0.1)])
def test_wrong_lengths_are_refused(wrong):
    with pytest.raises(ConfigError):
        Lengths(*wrong)


def test_random_prompts_repeat_with_their_seed(vocabulary):
    lengths = Lengths(40, 8, 0.0)
    for make in (random_text, random_ids):
        first, again, other = (make(vocabulary, 5, lengths, rng(seed)) for seed in (1, 1, 2))
        assert first == again != other
        assert all(1 <= prompt.output_tokens <= 8 for prompt in first)


def test_token_counts_of_random_prompts_are_true(vocabulary):
    for prompt in random_ids(vocabulary, 5, Lengths(40, 8, 1.0), rng()):
        assert prompt.prompt_tokens == len(prompt.content) == 40
        assert set(prompt.content) <= set(vocabulary.ordinary.tolist())
    for prompt in random_text(vocabulary, 5, Lengths(40, 8, 1.0), rng()):
        count = len(vocabulary.tokenizer.encode(prompt.content, add_special_tokens=False).ids)
        assert prompt.prompt_tokens == count
        assert 30 <= count <= 50


def test_groups_share_their_system_prompt_and_nothing_else(vocabulary):
    prompts = shared_prefix(vocabulary, SharedPrefix(3, 4, 20, 5, 9), rng())
    heads = [prompt.content.split("\n\n")[0] for prompt in prompts]
    assert len(prompts) == 12
    assert all(heads.count(head) == 4 for head in heads)
    assert len({prompt.content for prompt in prompts}) == 12
    with pytest.raises(ConfigError, match="gsp-question-len"):
        SharedPrefix(3, 4, 20, 0, 9)


def test_mooncake_keeps_shared_blocks_and_times(tmp_path, vocabulary):
    lines = [
        {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]},
        {"timestamp": 6000, "input_length": 520, "output_length": 7, "hash_ids": [1, 3]},
        {"timestamp": 9000, "input_length": 100, "output_length": 7, "hash_ids": [9]},
    ]
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    first, second = mooncake(vocabulary, path, 2, 0)
    assert (first.prompt_tokens, second.output_tokens) == (600, 7)
    assert first.content[:512] == second.content[:512]
    assert first.content[512:520] != second.content[512:520]
    begin, then = recorded_arrivals([first, second])
    assert begin == 0.0
    assert 3.0 < then < 9.0


def test_json_lines(tmp_path):
    path = tmp_path / "p.jsonl"
    lines = [
        {"prompt": "a", "output_tokens": 3, "class": "chat", "arrival_s": 1.5, "body": {"priority": 2}},
        {"token_ids": [1, 2, 3], "max_tokens": 4},
        {"messages": [{"role": "user", "content": "b"}]},
        {"prompt": "not read"},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    first, second, third = json_lines(path, 3, 16)
    assert first == DatasetRow("a", 0, 3, 1.5, "chat", {"priority": 2})
    assert (second.content, second.prompt_tokens, second.output_tokens) == ([1, 2, 3], 3, 4)
    assert (third.content[0]["content"], third.output_tokens) == ("b", 16)
    with pytest.raises(ConfigError, match="times"):
        recorded_arrivals([first, second])


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({}, "exactly one"),
        ({"prompt": "a", "token_ids": [1]}, "exactly one"),
        ({"prompt": "a", "output_tokens": 0}, "output_tokens"),
        ({"prompt": "a", "arrival_s": "now"}, "arrival_s"),
        ({"prompt": "a", "body": [1]}, "body"),
    ],
)
def test_wrong_lines_are_named(tmp_path, line, says):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "fine"}\n' + json.dumps(line))
    with pytest.raises(ConfigError, match=f"line 2.*{says}"):
        json_lines(path, 9, 16)


def test_arrivals():
    times = poisson_arrivals(4000, 10.0, rng())
    assert times[0] == 0.0
    assert times == sorted(times)
    assert times[-1] == pytest.approx(400.0, rel=0.1)
    assert poisson_arrivals(5, float("inf"), rng()) == [0.0] * 5
    for rate in (0.0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="request-rate"):
            poisson_arrivals(5, rate, rng())
