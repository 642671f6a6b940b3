"""What a config.json leaves out is what transformers takes: a file of sizes alone reads like one that states all."""

import copy
import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.executor.driver import Driver
from tests.executor.tiny_models import CASES, DEVICE, EXPERT_CASES, FAMILY_CASES, STATE_CASES, TORCH_CASES, prompt_of
from tokenyard.base import ConfigError
from tokenyard.executor.model_loader import load_executor
from tokenyard.executor.models.architectures import ARCHITECTURES
from tokenyard.executor.models.hf_config import read_model_config

SIZES = {
    "vocab_size": 40_000,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 7,
    "num_attention_heads": 32,
    "max_position_embeddings": 8192,
}
EXPERTS = {"num_experts": 16, "num_local_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral-window",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3-moe",
    "Qwen3NextForCausalLM": "qwen3-next",
    "Qwen3_5ForCausalLM": "qwen3.5",
    "Qwen3_5MoeForCausalLM": "qwen3.5-moe",
    "Phi3ForCausalLM": "phi3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma4ForCausalLM": "gemma4",
    "GptOssForCausalLM": "gpt-oss",
    "DeepseekV2ForCausalLM": "deepseek-v2",
    "DeepseekV3ForCausalLM": "deepseek-v3",
    "GraniteForCausalLM": "granite",
    "SeedOssForCausalLM": "seed-oss",
    "Lfm2ForCausalLM": "lfm2",
    "GraniteMoeHybridForCausalLM": "granite-hybrid",
}
"""A case of each architecture, for its config class."""

LONGROPE = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
LINEAR, YARN = {"rope_type": "linear", "factor": 8.0}, {"rope_type": "yarn", "factor": 4.0}
GIVEN = {
    "nothing": {},
    "nulls": {"rope_scaling": None, "rope_parameters": None, "sliding_window": None, "layer_types": None},
    "windows": {"use_sliding_window": True},
    "windows-from": {"use_sliding_window": True, "max_window_layers": 2},
    "windows-everywhere": {"layer_types": ["sliding_attention"] * 7},
    "windows-nowhere": {"layer_types": ["full_attention"] * 7},
    "pattern": {"sliding_window_pattern": 3},
    "theta": {"rope_theta": 5e5},
    "linear": {"rope_scaling": LINEAR, "rope_theta": 7e4},
    "linear-new": {"rope_parameters": LINEAR},
    "linear-thetas": {"rope_parameters": {**LINEAR, "rope_theta": 77.0}, "rope_theta": 5.0},
    "both-ages": {"rope_parameters": LINEAR, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "yarn": {"rope_scaling": YARN},
    "yarn-from": {"rope_scaling": {**YARN, "original_max_position_embeddings": 1024}},
    "yarn-by-ratio": {"rope_scaling": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 1024}},
    "longrope": {"rope_scaling": {**LONGROPE, "original_max_position_embeddings": 1024}, "head_dim": 2},
    "longrope-outside": {"rope_scaling": LONGROPE, "original_max_position_embeddings": 512, "head_dim": 2},
}
REFUSED_BY_TRANSFORMERS = {
    ("Phi3ForCausalLM", given)
    for given in ("linear", "linear-new", "linear-thetas", "both-ages", "yarn", "yarn-from", "yarn-by-ratio")
} | {("Gemma3ForCausalLM", "both-ages")}
REFUSED_BY_TRANSFORMERS |= {
    ("Gemma4ForCausalLM", given)
    for given in GIVEN
    if given == "nulls" or given.startswith(("linear", "yarn", "longrope", "both-ages"))
}
NO_SUCH_MODELS = {
    ("Lfm2ForCausalLM", "windows-everywhere"),
    # Heads of 64 are rotated, and the lists of factors are for heads of 2.
    *((f"Deepseek{name}ForCausalLM", given) for name in ("V2", "V3") for given in ("longrope", "longrope-outside")),
    # Without kinds of layers none of its layers attends.
    *(("GraniteMoeHybridForCausalLM", given) for given in GIVEN if given != "windows-nowhere"),
    # Its heads of 2 are rotated by a quarter, and no layer has a window.
    *(
        (family, given)
        for family in ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
        for given in ("longrope", "longrope-outside", "windows-everywhere")
    ),
}


def config_type(architecture):
    return (CASES | EXPERT_CASES | FAMILY_CASES | STATE_CASES | TORCH_CASES)[FAMILIES[architecture]][0]


def test_every_family_is_compared():
    assert set(FAMILIES) == set(ARCHITECTURES)


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_file_that_leaves_defaults_out_reads_like_one_that_states_them(architecture, given):
    if (architecture, given) in REFUSED_BY_TRANSFORMERS:
        pytest.skip("transformers refuses it")
    if (architecture, given) in NO_SUCH_MODELS:
        pytest.skip("this family has no such models")
    raw = SIZES | EXPERTS | GIVEN[given]
    stated = json.loads(config_type(architecture)(**copy.deepcopy(raw)).to_json_string(use_diff=False))
    assert read_model_config(raw | {"architectures": [architecture]}) == read_model_config(
        stated | {"architectures": [architecture], "dtype": None}
    )


@pytest.mark.parametrize(
    ("architecture", "scaling", "length"),
    [
        ("Gemma3ForCausalLM", LINEAR, 8192),
        ("LlamaForCausalLM", LINEAR, 8 * 8192),
        ("LlamaForCausalLM", {**YARN, "original_max_position_embeddings": 4096}, 4 * 4096),
        ("LlamaForCausalLM", {**YARN, "original_max_position_embeddings": 2048}, 8192),
        ("LlamaForCausalLM", {**LINEAR, "rope_type": "llama3", "original_max_position_embeddings": 1024}, 8192),
    ],
)
def test_context_is_scaled_where_the_file_states_it_unscaled(architecture, scaling, length):
    raw = SIZES | {"architectures": [architecture], "rope_scaling": scaling}
    assert read_model_config(raw).context_length == length


def test_the_family_ends_answers_where_no_file_says_how():
    raw = SIZES | {"architectures": ["MistralForCausalLM"]}
    assert read_model_config(raw).eos_token_ids == (2,)
    assert read_model_config(raw, {"eos_token_id": [7]}).eos_token_ids == (7,)
    assert read_model_config(raw, {"temperature": 0.6}).eos_token_ids == ()
    assert read_model_config(raw | {"eos_token_id": None}).eos_token_ids == ()


SMALL = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "max_position_embeddings": 8192,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


@pytest.mark.parametrize(
    ("architecture", "given"),
    [
        ("Qwen3_5ForConditionalGeneration", {}),
        ("GraniteMoeHybridForCausalLM", {"time_step_limit": [{}, 1.0], "layer_types": ["attention"] * 7}),
    ],
)
def test_a_file_without_a_part_is_refused_in_one_line(architecture, given):
    raw = (SIZES | EXPERTS if given else {}) | given
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_model_config(raw | {"architectures": [architecture]})


@pytest.mark.part(4)
@pytest.mark.parametrize(
    ("architecture", "given"),
    [
        ("GptOssForCausalLM", {}),
        ("Qwen3ForCausalLM", {}),
        ("Gemma3ForCausalLM", {"layer_types": ["sliding_attention"] * 4, "sliding_window": 9}),
        ("Gemma3ForCausalLM", {"layer_types": ["full_attention"] * 4}),
    ],
)
def test_models_of_short_files_compute_what_transformers_computes(tmp_path, backend, architecture, given):
    torch.manual_seed(5)
    config = config_type(architecture)(**SMALL | given, pad_token_id=0, initializer_range=0.1)
    judge = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    judge.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(SMALL | given | {"architectures": [architecture]}))
    executor = load_executor(
        str(tmp_path), device=DEVICE, dtype="float32", max_total_tokens=256, max_pool_rows=4, **backend
    )
    driver, prompt = Driver(executor), prompt_of(40, seed=4)
    _, _, ticket = driver.launch((driver.start(prompt), None), delay=True)
    with torch.inference_mode():
        expected = judge(torch.tensor([prompt])).logits[0, -1]
    torch.testing.assert_close(ticket.logits[0].cpu(), expected, rtol=1e-3, atol=1e-3)
