"""A real model: greedy decoding of stories260K from BOS gives the text that llama2.c's own test expects."""

import itertools
import json
import random

import pytest
from tokenizers import Tokenizer

from tests.executor.driver import Driver
from tests.executor.stories260k import SOURCE, convert, read_pieces
from tests.executor.tiny_models import DEVICE
from tokenyard.executor.model_loader import load_executor

pytestmark = pytest.mark.skipif(not SOURCE.exists(), reason="needs shared/models/stories260K next to the checkout")

BOS = 1


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    target = tmp_path_factory.mktemp("stories260K")
    convert(target)
    return target


@pytest.fixture(scope="module")
def expected():
    return json.loads((SOURCE / "greedy_expected.json").read_text())


@pytest.mark.parametrize("page_size", [1, 16])
def test_greedy_story(model_folder, expected, page_size):
    executor = load_executor(
        str(model_folder), device=DEVICE, dtype="float32", page_size=page_size, max_total_tokens=512, max_pool_rows=2
    )
    assert executor.info.eos_token_ids == (1, 2)
    driver = Driver(executor)
    output = driver.generate(driver.start([BOS]), 200)
    assert [BOS, *output] == expected["greedy_token_ids"]
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    assert tokenizer.decode([BOS, *output]) == expected["expected_text"]


def test_the_tokenizer_encodes_the_story_as_the_model_wrote_it(model_folder, expected):
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    assert tokenizer.encode(expected["expected_text"]).ids == expected["greedy_token_ids"]


def merge_best_pair_first(text, pieces, scores):
    """SentencePiece's BPE, word for word."""
    index = {piece: i for i, piece in enumerate(pieces) if i >= 259}
    tokens = []
    for character in " " + text:
        piece = character.encode()
        tokens += [index[piece]] if piece in index else [3 + byte for byte in piece]
    while True:
        pairs = [index.get(pieces[a] + pieces[b], 0) * (min(a, b) >= 259) for a, b in itertools.pairwise(tokens)]
        found = [(scores[merged], -at, merged) for at, merged in enumerate(pairs) if merged]
        if not found:
            return [BOS, *tokens]
        _, at, merged = max(found)
        tokens[-at : -at + 2] = [merged]


def test_the_tokenizer_merges_as_sentencepiece_does(model_folder):
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    pieces, scores = read_pieces(SOURCE / "tok512.bin", 512)
    letters = random.Random(0)
    texts = ["".join(letters.choices("abcdehiklmnorstuvwyz  .,THE\n", k=40)) for _ in range(60)]
    for text in ["two  spaces", "Zoë — 東京", *texts]:
        assert tokenizer.encode(text).ids == merge_best_pair_first(text, pieces, scores)


def test_unknown_characters_become_bytes(model_folder):
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    encoded = tokenizer.encode("Zoë ☃").ids
    assert [3 + byte for byte in "☃".encode()] == encoded[-3:]
    assert tokenizer.decode(encoded) == "Zoë ☃"
