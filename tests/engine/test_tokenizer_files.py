"""Tokenizers of every kind: set up as with transformers, and streamed text that equals decoding in one go."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.engine.text_helpers import Run
from tests.examples import examples
from tokenyard.base import ConfigError
from tokenyard.engine.text.tokenizer_files import load_tokenizer

TEXTS = [
    "Once upon a time, there was a little fox. It didn't know what's up ? no !",
    "Él señor ñandú 日本語 🦊🦊 test's do not don't , . ! end",
    "    spaces   here\n\nnew lines\t tabs",
]
MARKS = ["<s>", "</s>", "<unk>"]
BYTES = [f"<0x{value:02X}>" for value in range(256)]


def sentencepiece_bpe(*, prefix):
    """As of Llama 2 (with a space put before the text) and Gemma (without)."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    space = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space]) if prefix else space
    ends = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *ends])
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=MARKS + BYTES, limit_alphabet=40, show_progress=False)
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    saved = json.loads(tokenizer.to_str())
    saved["added_tokens"] = [token for token in saved["added_tokens"] if token["content"] in MARKS]
    return Tokenizer.from_str(json.dumps(saved))


def unigram():
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=MARKS, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return tokenizer


def wordpiece():
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=MARKS, show_progress=False)
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return tokenizer


def byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=MARKS, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return tokenizer


KINDS = {
    "llama": sentencepiece_bpe(prefix=True),
    "gemma": sentencepiece_bpe(prefix=False),
    "unigram": unigram(),
    "wordpiece": wordpiece(),
    "byte level": byte_level(),
}


@settings(max_examples=examples(150), deadline=None)
@given(
    kind=st.sampled_from(list(KINDS)),
    text=st.sampled_from([*TEXTS, "ok 🦊!", "\n\n", "é"]),
    cut=st.integers(0, 10),
    prompt=st.sampled_from(["", "Hello there", "Once upon a time,"]),
    marks=st.booleans(),
    stream=st.booleans(),
)
def test_streamed_text_equals_decoding_in_one_go(kind, text, cut, prompt, marks, stream):
    tokenizer = KINDS[kind]
    before = tokenizer.encode(prompt).ids
    ids = tokenizer.encode(text[cut:]).ids + ([0, 1] if marks else []) + tokenizer.encode(" time").ids
    for skip in (False, True):
        whole = tokenizer.decode(before + ids, skip_special_tokens=skip)
        start = tokenizer.decode(before, skip_special_tokens=skip)
        run = Run(tokenizer, ids, prompt=before, stream=stream, skip_special_tokens=skip)
        assert start + run.text == whole


def folder_of(path, tokenizer, **config):
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return str(path)


def test_saved_padding_and_truncation_do_not_touch_prompts(tmp_path):
    tokenizer = byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    loaded = load_tokenizer(folder_of(tmp_path, tokenizer))
    assert loaded.decode(loaded.encode(TEXTS[0]).ids) == TEXTS[0]


@pytest.mark.parametrize(
    ("config", "frame"),
    [
        ({}, [0, 1]),
        ({"add_bos_token": True, "add_eos_token": False}, [0]),
        ({"add_bos_token": False}, []),
        ({"add_bos_token": True, "add_eos_token": True}, [0, 1]),
        ({"add_bos_token": True, "bos_token": "<nowhere>"}, []),
    ],
)
def test_marks_around_a_text_are_as_the_config_says(tmp_path, config, frame):
    tokenizer = byte_level()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, **config}
    loaded = load_tokenizer(folder_of(tmp_path, tokenizer, **config))
    assert loaded.encode("").ids == frame
    if config.get("bos_token") == "<s>":
        transformers, given = pytest.importorskip("transformers"), config | {"eos_token": "</s>"}
        reference = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), **given)
        assert loaded.encode(TEXTS[0]).ids == reference(TEXTS[0])["input_ids"]


def test_tokens_of_the_config_are_declared(tmp_path):
    tokenizer = byte_level()
    size = tokenizer.get_vocab_size()
    word = tokenizer.id_to_token(300)
    listed = {
        str(size): {"content": "<tool>", "special": False},
        str(size + 1): {"content": "<end>", "special": True},
        str(size + 9): {"content": "<far>", "special": True},
        "300": {"content": word, "special": True},
    }
    config = {"added_tokens_decoder": listed, "pad_token": "<unlisted>", "additional_special_tokens": ["<end>"]}
    loaded = load_tokenizer(folder_of(tmp_path, tokenizer, **config))
    assert loaded.encode("a<tool><end>").ids[-2:] == [size, size + 1]
    assert loaded.token_to_id("<far>") is None
    assert loaded.token_to_id("<unlisted>") is None
    assert loaded.decode([size, size + 1, 300]) == "<tool>"
    assert loaded.decode([size, size + 1], skip_special_tokens=False) == "<tool><end>"


def test_an_end_mark_that_is_only_named_is_left_out_of_answers(tmp_path):
    saved = json.loads(byte_level().to_str())
    saved["added_tokens"] = []
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved))
    assert load_tokenizer(str(tmp_path)).decode([1]) == "</s>"
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
    assert load_tokenizer(str(tmp_path)).decode([1]) == ""


def test_broken_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match="no tokenizer at"):
        load_tokenizer(str(tmp_path))
    folder = folder_of(tmp_path, byte_level())
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ConfigError, match="must hold a JSON object"):
        load_tokenizer(folder)
