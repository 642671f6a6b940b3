"""The demo model's folder: its files agree with each other and Hugging Face loads them unchanged."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

FOLDER = Path(__file__).resolve().parents[2] / "tokenyard" / "demo_model"
MARKERS = {"<|startoftext|>", "<|endoftext|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"}
MAX_WEIGHTS_BYTES = 12_000_000
TOKENIZER = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def read_json(name: str) -> dict[str, object]:
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))


def tensor_headers() -> dict[str, dict[str, object]]:
    data = (FOLDER / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    return header


@given(st.text().filter(lambda text: not any(marker in text for marker in MARKERS)))
def test_any_text_survives_the_tokenizer(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids) == text


def test_plain_text_starts_with_the_opening_token_once() -> None:
    ids = TOKENIZER.encode("Once upon a time").ids
    assert ids.count(TOKENIZER.token_to_id("<|startoftext|>")) == 1
    assert ids[0] == TOKENIZER.token_to_id("<|startoftext|>")


def test_ids_in_the_configurations_agree_with_the_tokenizer() -> None:
    config, generation = read_json("config.json"), read_json("generation_config.json")
    ends = [TOKENIZER.token_to_id("<|endoftext|>"), TOKENIZER.token_to_id("<|end|>")]
    assert config["vocab_size"] == TOKENIZER.get_vocab_size()
    for settings in (config, generation):
        assert settings["eos_token_id"] == ends
        assert settings["bos_token_id"] == TOKENIZER.token_to_id("<|startoftext|>")
        assert settings["pad_token_id"] == TOKENIZER.token_to_id("<|pad|>")


def test_weights_are_small_and_bf16_and_have_the_configured_shapes() -> None:
    config, tensors = read_json("config.json"), tensor_headers()
    hidden, width, layers = config["hidden_size"], config["head_dim"], config["num_hidden_layers"]
    assert (FOLDER / "model.safetensors").stat().st_size < MAX_WEIGHTS_BYTES
    assert {tensor["dtype"] for tensor in tensors.values()} == {"BF16"}
    assert len(tensors) == layers * 9 + 2
    assert tensors["model.embed_tokens.weight"]["shape"] == [config["vocab_size"], hidden]
    kv_shape = [config["num_key_value_heads"] * width, hidden]
    assert tensors["model.layers.0.self_attn.k_proj.weight"]["shape"] == kv_shape


def render(messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
    def raise_exception(message: str) -> None:
        raise ValueError(message)

    settings = read_json("tokenizer_config.json")
    template = jinja2.Environment().from_string(str(settings["chat_template"]))
    return template.render(
        messages=messages,
        add_generation_prompt=add_generation_prompt,
        bos_token=settings["bos_token"],
        raise_exception=raise_exception,
    )


def test_chat_template_marks_every_role_and_opens_the_answer() -> None:
    messages = [
        {"role": "system", "content": "You tell short stories."},
        {"role": "user", "content": " Hi "},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "A story"},
    ]
    expected = (
        "<|startoftext|><|system|>You tell short stories.<|end|><|user|>Hi<|end|>"
        "<|assistant|>Hello!<|end|><|user|>A story<|end|>"
    )
    assert render(messages, add_generation_prompt=False) == expected
    assert render(messages, add_generation_prompt=True) == expected + "<|assistant|>"


def test_chat_template_refuses_an_unknown_role() -> None:
    with pytest.raises(ValueError, match="role must be"):
        render([{"role": "tool", "content": "x"}], add_generation_prompt=False)


def test_transformers_loads_the_folder_and_a_greedy_story_ends(model_folder: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        model_folder, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    request = [{"role": "user", "content": "Tell me a story about a dog"}]
    rendered = tokenizer.apply_chat_template(request, add_generation_prompt=True, tokenize=False)
    inputs = tokenizer(rendered, add_special_tokens=False, return_tensors="pt")
    output = model.generate(**inputs, do_sample=False, max_new_tokens=400)[0].tolist()
    answer = tokenizer.decode(output[inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert output[-1] in model.generation_config.eos_token_id
    assert len(answer.split()) > 40
    assert "dog" in answer
