"""Adapters that cannot be served are refused in one line that says why, before anything is kept of them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.executor.lora_maker import save_adapter
from tokenyard.base import ConfigError
from tokenyard.executor.layer_loader import read_folder_config
from tokenyard.executor.lora_weights import read_adapter

MAX_RANK = 8


@pytest.fixture
def adapter(tmp_path):
    return Path(save_adapter(tmp_path / "adapter", "llama", rank=4))


@pytest.fixture
def config(folder):
    return read_folder_config(Path(folder("llama")))


def change_config(adapter, **fields):
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def change_tensors(adapter, change):
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def rename(old, new):
    def change(tensors):
        for name in [name for name in tensors if old in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return change


def put(name, make):
    def change(tensors):
        tensors[name] = make(tensors[name])

    return change


def refused(adapter, config, match):
    with pytest.raises(ConfigError, match=match) as caught:
        read_adapter(adapter, config, MAX_RANK)
    assert "\n" not in str(caught.value)


def test_a_good_one_is_read(adapter, config):
    weights = read_adapter(adapter, config, MAX_RANK)
    assert len(weights.pairs) == 7 * config.num_layers
    pair = weights.pairs[1, "down_proj"]
    assert (pair.a.shape, pair.b.shape, pair.scale) == ((4, config.intermediate_size), (config.hidden_size, 4), 2.0)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"bias": "lora_only"}, "biases"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa_niter_16"}, "changes the base model"),
        ({"init_lora_weights": "olora"}, "changes the base model"),
        ({"alora_invocation_tokens": [1]}, "aLoRA"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"trainable_token_indices": [5]}, "trainable_token_indices"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"peft_type": "PREFIX_TUNING"}, "only LORA"),
        ({"r": 9}, r"rank 9.*up to 8 \(--max-lora-rank\)"),
        ({"r": 0}, "from 1 to"),
        ({"r": "many"}, "makes no sense"),
        ({"rank_pattern": {"q_proj": 10**6}}, "from 1 to"),
        ({"rank_pattern": {"(": 2}}, "makes no sense"),
        ({"rank_pattern": {"q_proj": 2}}, "has shape"),
        ({"lora_alpha": float("inf")}, "finite"),
        ({"alpha_pattern": [1]}, "makes no sense"),
    ],
)
def test_adapters_of_other_kinds(adapter, config, fields, match):
    change_config(adapter, **fields)
    refused(adapter, config, match)


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
LONG = FIRST.replace("model.layers", "model.language_model.layers")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (rename("layers.2", "layers.7"), "changes layer 7 and this model has 3"),
        (rename("layers.0.self_attn.q_proj", "embed_tokens"), "the embedding"),
        (rename("model.layers.0.self_attn.q_proj", "lm_head"), "the output head"),
        (rename("layers.0.mlp.up_proj", "layers.0.mlp.experts.0.up_proj"), "experts"),
        (rename("q_proj.lora_A.weight", "q_proj.lora_magnitude_vector"), "DoRA"),
        (rename("self_attn.q_proj", "self_attn.qkv_proj"), "no qkv_proj"),
        (rename("lora_A", "lora_C"), "is not one that adapters have"),
        (lambda tensors: tensors.pop(FIRST), "only one of its two"),
        (lambda tensors: tensors.clear(), "no matrices"),
        (lambda tensors: tensors.update({LONG: tensors[FIRST] * 2}), "under two names"),
        (put(FIRST, lambda a: a[:, :-1].clone()), "has shape"),
        (put(FIRST, lambda a: a[0].clone()), "has shape"),
        (put(FIRST, lambda a: a * float("nan")), "not finite"),
        (put(FIRST, lambda a: a.double()), "float64"),
        (put(FIRST, lambda a: a.to(torch.int32)), "int32"),
    ],
)
def test_weights_that_do_not_fit(adapter, config, change, match):
    change_tensors(adapter, change)
    refused(adapter, config, match)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_of_half_precision_are_looked_at_too(adapter, config, dtype):
    change_tensors(adapter, put(FIRST, lambda a: a.to(dtype)))
    read_adapter(adapter, config, MAX_RANK)
    change_tensors(adapter, put(FIRST, lambda a: a.index_fill(0, torch.tensor([1]), float("inf"))))
    refused(adapter, config, "not finite")


def test_files_that_are_missing_cut_short_or_something_else(adapter, config):
    weights, settings = adapter / "adapter_model.safetensors", adapter / "adapter_config.json"
    whole = weights.read_bytes()
    for content in (whole[:100], whole[:-8], b"", b"\x80\x02}q\x00."):
        weights.write_bytes(content)
        refused(adapter, config, "damaged or no safetensors")
    weights.rename(adapter / "adapter_model.bin")
    refused(adapter, config, "safe_serialization")
    for content, match in (
        ("[]", "JSON object"),
        ("{", "as JSON"),
        (" " * (2 << 20), "more than"),
        ("\x00", "as JSON"),
    ):
        settings.write_text(content)
        refused(adapter, config, match)
    settings.unlink()
    refused(adapter, config, "No such file")


def test_a_huge_file_is_not_read(adapter, config):
    # Sparse, so that it takes no place.
    with (adapter / "adapter_model.safetensors").open("r+b") as file:
        file.truncate(1 << 38)
    refused(adapter, config, "has at most")
