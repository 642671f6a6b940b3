"""SentencePiece tokenizers rebuilt from a GGUF file's vocabulary, judged by its own way of merging, word for word."""

import itertools
import json
import random

import pytest
from tokenizers import Tokenizer

from tests.executor.driver import Driver
from tests.executor.gguf_maker import write_gguf
from tests.executor.stories260k import SOURCE, convert, read_pieces
from tokenyard.base import ConfigError
from tokenyard.config import DEMO_MODEL
from tokenyard.executor.gguf_file.spm import SPACE
from tokenyard.executor.hf_hub import resolve_model_path
from tokenyard.executor.model_loader import load_executor

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
LETTERS = [SPACE, "\n", *"abcdefg"]
DP_ATTENTION = [
    "ab",
    "bc",
    "abc",
    "▁a",
    "▁ab",
    "cd",
    "de",
    "cde",
    "▁▁",
    "ef",
    "fg",
    "efg",
    "▁abc",
    "gg",
    "ggg",
    "\n▁",
    "dea",
]
SPACES = [SPACE * 3, SPACE * 4, "<tag>"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def vocabulary(user_defined):
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *LETTERS, *DP_ATTENTION, *(SPACES if user_defined else ())]
    kinds = [
        2,
        3,
        3,
        *[6] * 256,
        *[1] * len(LETTERS),
        *[1] * len(DP_ATTENTION),
        *[4] * (len(SPACES) if user_defined else 0),
    ]
    # Joined pieces before letters, the order of the list being the order of their worth.
    scores = [0.0] * 259 + [-1000.0] * len(LETTERS) + [-float(at) for at in range(len(DP_ATTENTION))]
    return tokens, scores + [0.0] * (len(tokens) - len(scores)), kinds


def best_pair_first(text, tokens, scores, kinds, prefix):
    """SentencePiece's BPE: the author's own pieces first, then the best pair, the leftmost among equals."""
    text = (SPACE if prefix and text else "") + text.replace(" ", SPACE)
    own = sorted((token for token, kind in zip(tokens, kinds, strict=True) if kind == 4), key=len, reverse=True)
    symbols, at = [], 0
    while at < len(text):
        found = next((piece for piece in own if text.startswith(piece, at)), None)
        symbols.append((found or text[at], found is not None))
        at += len(symbols[-1][0])
    score = {token: s for token, s, kind in zip(tokens, scores, kinds, strict=True) if kind == 1}
    while True:
        pairs = [
            (-score[a + b], at)
            for at, ((a, frozen), (b, also)) in enumerate(itertools.pairwise(symbols))
            if not frozen and not also and a + b in score
        ]
        if not pairs:
            break
        at = min(pairs)[1]
        symbols[at : at + 2] = [(symbols[at][0] + symbols[at + 1][0], False)]
    ids = {token: number for number, token in enumerate(tokens)}
    found = []
    for symbol, _ in symbols:
        found += [ids[symbol]] if symbol in ids else [3 + byte for byte in symbol.encode()]
    return found


@pytest.mark.parametrize(("prefix", "user_defined"), [(True, False), (False, True)], ids=["llama", "gemma"])
def test_random_texts(tmp_path, prefix, user_defined):
    path, spm = tmp_path / "model.gguf", vocabulary(user_defined)
    write_gguf(DEMO_MODEL, path, spm=(*spm, prefix))
    tokenizer = Tokenizer.from_file(str(resolve_model_path(str(path)) / "tokenizer.json"))
    rng = random.Random(4)
    for _ in range(400):
        text = "".join(rng.choices("abcdefg   \né漢<tag>", k=rng.randint(0, 30)))
        if user_defined and rng.random() < 0.3:
            text += "<tag>" + " " * rng.randint(0, 7) + "ab"
        ids = tokenizer.encode(text).ids
        assert ids == [1, *best_pair_first(text, *spm, prefix)], text
        assert tokenizer.decode(ids) == text


def test_stated_merges_count(tmp_path):
    """As in files of Gemma 4, whose scores say nothing."""
    path, (tokens, scores, kinds) = tmp_path / "model.gguf", vocabulary(True)
    write_gguf(DEMO_MODEL, path, spm=(tokens, [-1000.0] * len(scores), kinds, False, ["b c", "a bc", "▁ ▁"]))
    tokenizer = Tokenizer.from_file(str(resolve_model_path(str(path)) / "tokenizer.json"))
    assert tokenizer.encode("abc ab<tag>  é").tokens == [
        *("<s>", "abc", SPACE, "a", "b", "<tag>", SPACE * 2, "<0xC3>", "<0xA9>"),
    ]


def test_what_cannot_be_rebuilt_is_refused(tmp_path):
    tokens, scores, kinds = vocabulary(False)
    write_gguf(DEMO_MODEL, tmp_path / "short.gguf", spm=(tokens, scores[:-1], kinds))
    with pytest.raises(ConfigError, match="lacks a score or a type for each of"):
        resolve_model_path(str(tmp_path / "short.gguf"))


@pytest.mark.skipif(not SOURCE.exists(), reason="needs shared/models/stories260K next to the checkout")
def test_a_real_model_tells_its_story(tmp_path):
    expected = json.loads((SOURCE / "greedy_expected.json").read_text())
    convert(tmp_path / "folder")
    pieces, scores = read_pieces(SOURCE / "tok512.bin", 512)
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *(piece.decode().replace(" ", SPACE) for piece in pieces[259:])]
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)]
    path = tmp_path / "stories.gguf"
    write_gguf(tmp_path / "folder", path, spm=(tokens, scores, kinds))
    tokenizer = Tokenizer.from_file(str(resolve_model_path(str(path)) / "tokenizer.json"))
    assert tokenizer.encode(expected["expected_text"]).ids == expected["greedy_token_ids"]
    driver = Driver(load_executor(str(path), device="cpu", dtype="float32", max_total_tokens=512, max_pool_rows=2))
    output = driver.generate(driver.start([1]), 200)
    assert [1, *output] == expected["greedy_token_ids"]
    assert tokenizer.decode(output) == expected["expected_text"]
