"""A model in a GGUF file is the model that its folder held: numbers, tokens, template and ends."""

import json
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.executor.driver import Driver
from tests.executor.gguf_maker import OWN_WRITERS, SCALES_AT, write_gguf
from tests.executor.tiny_models import SMALL, logits, prompt_of
from tokenyard.base import ConfigError
from tokenyard.config import DEMO_MODEL
from tokenyard.executor.gguf_file.folder import folder_of_gguf
from tokenyard.executor.gguf_file.tokenizer import SPLITS
from tokenyard.executor.hf_hub import resolve_model_path
from tokenyard.executor.layer_loader import read_folder_config
from tokenyard.executor.model_loader import load_executor

TEXTS = ("Once upon a time", " don't   stop\n\nnow 12345", "<|user|>hi<|end|>", "Zażółć 漢字 🙂", "")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def first_logits(path, prompt):
    executor = load_executor(str(path), device="cpu", dtype="float32", max_total_tokens=64, model_impl="torch")
    driver = Driver(executor)
    return driver.launch((driver.start(prompt), None), delay=True)[2].logits[0].clone()


def assert_there_and_back(source, tmp_path, kind):
    """The file computes what a folder computes that holds the numbers which the file's mean."""
    path, prompt = tmp_path / "there.gguf", prompt_of(12, seed=3)
    whole = write_gguf(source, path, kind)
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.json").write_text((Path(source) / "config.json").read_text())
    save_file({name: torch.tensor(values) for name, values in whole.items()}, plain / "model.safetensors")
    found = first_logits(path, prompt)
    assert found.isfinite().all()
    torch.testing.assert_close(found, first_logits(plain, prompt), rtol=1e-4, atol=1e-5)


@pytest.mark.part(9)
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4"])
def test_the_demo_model_there_and_back(tmp_path, kind):
    assert_there_and_back(DEMO_MODEL, tmp_path, kind)


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory):
    """A model whose rows are whole blocks of 256 numbers, which the demo model's are not."""
    config = LlamaConfig(
        **(SMALL | {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "initializer_range": 0.05}),
    )
    made = tmp_path_factory.mktemp("wide")
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(made)
    return made


@pytest.mark.part(4)
@pytest.mark.parametrize("kind", [*SCALES_AT, *OWN_WRITERS, "TQ1_0", "TQ2_0"])
def test_kinds_in_blocks_of_256_there_and_back(tmp_path, wide_model, kind):
    assert_there_and_back(wide_model, tmp_path, kind)


def test_config_tokens_template_and_ends_are_those_of_the_folder(tmp_path):
    path = tmp_path / "demo.gguf"
    write_gguf(DEMO_MODEL, path)
    folder = resolve_model_path(str(path))
    found, expected = read_folder_config(folder), read_folder_config(DEMO_MODEL)
    assert replace(found, dtype="bfloat16", norm_eps=expected.norm_eps) == expected
    assert found.norm_eps == pytest.approx(expected.norm_eps)
    ours, theirs = (Tokenizer.from_file(str(place / "tokenizer.json")) for place in (folder, DEMO_MODEL))
    for text in TEXTS:
        assert ours.encode(text).ids == theirs.encode(text).ids
        assert ours.decode(ours.encode(text).ids) == theirs.decode(theirs.encode(text).ids)
    configs = [json.loads((place / "tokenizer_config.json").read_text()) for place in (folder, DEMO_MODEL)]
    assert configs[0]["chat_template"] == configs[1]["chat_template"]
    assert folder_of_gguf(path) == folder, "the same file has the same folder"


@pytest.mark.parametrize(
    ("case", "architecture"),
    [
        ("qwen3", "qwen3"),
        ("qwen2", "qwen2"),
        ("qwen3-moe", "qwen3moe"),
        ("phi3-long", "phi3"),
        ("phi3-partial-window", "phi3"),
        ("gemma2", "gemma2"),
        ("gemma3", "gemma3"),
        ("gemma4", "gemma4"),
        ("gemma4-moe", "gemma4"),
        ("gpt-oss-7", "gpt-oss"),
        ("granite", "granite"),
        ("lfm2", "lfm2"),
        ("qwen3.5", "qwen35"),
        ("qwen3.5-odd", "qwen35"),
        ("qwen3.5-moe", "qwen35moe"),
        ("qwen3-next-normed", "qwen3next"),
        ("granite-hybrid", "granitehybrid"),
        ("granite-hybrid-moe-7", "granitehybrid"),
    ],
)
def test_other_kinds_compute_what_transformers_does(tmp_path, folder, case, architecture):
    path, prompt = tmp_path / "tiny.gguf", prompt_of(20, seed=4)
    # LFM2's config.json says another size than its MLPs have.
    changes = {"feed_forward_length": 64} if architecture == "lfm2" else {}
    write_gguf(folder(case), path, architecture=architecture, **changes)
    torch.testing.assert_close(first_logits(path, prompt), logits(case, prompt)[-1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("qwen2", "I've 1234 cats!\n\n  So", ["I", "'ve", "Ġ", "1", "2", "3", "4", "Ġcats", "!ĊĊ", "Ġ", "ĠSo"]),
        ("llama-bpe", "I've 1234 cats!\n\n  So", ["I", "'ve", "Ġ", "123", "4", "Ġcats", "!ĊĊ", "Ġ", "ĠSo"]),
        ("smollm", "a 12b", ["a", "Ġ", "1", "2", "b"]),
    ],
)
def test_text_is_split_as_the_name_says(tmp_path, name, text, words):
    path = tmp_path / "demo.gguf"
    write_gguf(DEMO_MODEL, path, pre=name)
    tokenizer = Tokenizer.from_file(str(resolve_model_path(str(path)) / "tokenizer.json"))
    assert [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)] == words
    assert name in (*SPLITS, "smollm")


def test_what_cannot_be_read_is_refused_in_one_line(tmp_path):
    path = tmp_path / "demo.gguf"
    write_gguf(DEMO_MODEL, path)
    data = path.read_bytes()
    key = b"tokenizer.ggml.tokens" + struct.pack("<II", 9, 8)
    count = data.index(key) + len(key)
    for name, content, says in (
        ("count.gguf", data[:count] + struct.pack("<Q", 2**60) + data[count + 8 :], "reaches beyond its end"),
        ("cut.gguf", data[: len(data) // 2], "is damaged, cut off"),
        ("head.gguf", data[:40], "is damaged, cut off"),
        ("other.gguf", b"PK\x03\x04" * 40, "is damaged, cut off or no GGUF"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=says) as caught:
            resolve_model_path(str(tmp_path / name))
        assert "\n" not in str(caught.value)
    write_gguf(DEMO_MODEL, tmp_path / "pre.gguf", pre="unheard-of")
    with pytest.raises(ConfigError, match="named 'unheard-of'"):
        resolve_model_path(str(tmp_path / "pre.gguf"))
    write_gguf(DEMO_MODEL, tmp_path / "kind.gguf", architecture="gemma")
    with pytest.raises(ConfigError, match="kind 'gemma'"):
        resolve_model_path(str(tmp_path / "kind.gguf"))
    write_gguf(DEMO_MODEL, tmp_path / "layers.gguf", block_count=6)
    with pytest.raises(ConfigError, match=r"has no tensor 'blk\.5"):
        load_executor(str(tmp_path / "layers.gguf"), device="cpu", dtype="float32", max_total_tokens=64)


def test_llama_3s_factors_are_recognised(tmp_path, folder):
    import gguf

    source, path = Path(folder("llama")), tmp_path / "tiny.gguf"
    assert load_file(source / "model.safetensors")
    factors = torch.tensor([1.0, 1.0, 1.0, 1.0, 8.0, 8.0]).numpy()
    original = gguf.GGUFWriter.write_header_to_file

    def with_factors(writer, *arguments):
        writer.add_tensor("rope_freqs.weight", factors)
        original(writer, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "write_header_to_file", with_factors)
        write_gguf(source, path)
    with pytest.raises(ConfigError, match="none of Llama 3's"):
        resolve_model_path(str(path))
