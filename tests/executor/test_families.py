"""Families with layers that no other family has, against transformers, under any schedule and on every back end."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.executor.driver import Driver
from tests.executor.small_pool import serve_with_small_pool
from tests.executor.tiny_models import DEVICE, FAMILY_CASES, greedy, judge, logits, prompt_of
from tokenyard.base import ConfigError
from tokenyard.executor.layer_loader import read_folder_config
from tokenyard.executor.model_loader import load_executor
from tokenyard.executor.models.hf_config import read_model_config

TOKENS = 10


@pytest.mark.parametrize("case", FAMILY_CASES)
def test_logits_are_those_of_transformers(make_driver, backend, case):
    driver = make_driver(case, page_size=4, **backend)
    prompt = prompt_of(41, seed=2)
    sequence = driver.start(prompt)
    driver.step((sequence, 23))
    _, _, ticket = driver.launch((sequence, None), delay=True)
    torch.testing.assert_close(ticket.logits[0].cpu(), logits(case, prompt)[-1], rtol=1e-3, atol=1e-3)


@pytest.mark.part(3)
@pytest.mark.parametrize("case", FAMILY_CASES)
def test_long_prompts_in_chunks(make_driver, backend, case):
    driver = make_driver(case, page_size=4, **backend)
    prompt = prompt_of(130, seed=3)
    expected = greedy(case, prompt, 3)
    for chunk in (None, 50, 7):
        assert driver.generate(driver.start(prompt), 3, chunk=chunk) == expected


@pytest.mark.part(4)
@pytest.mark.parametrize("case", ["phi3-partial-window", "gemma2", "gemma3", "gpt-oss"])
def test_greedy_tokens_do_not_depend_on_the_schedule(folder, backend, case):
    executor = load_executor(
        folder(case), device=DEVICE, dtype="float32", page_size=4, max_total_tokens=120, max_pool_rows=9, **backend
    )
    serve_with_small_pool(executor, case)


@pytest.mark.parametrize("case", ["gemma2", "gemma3", "gpt-oss"])
def test_bfloat16_stays_near_float32(folder, backend, case):
    if DEVICE != "cpu":
        pytest.skip("compares what a CPU computes")
    executor = load_executor(
        folder(case), device="cpu", dtype="bfloat16", max_total_tokens=256, max_pool_rows=8, **backend
    )
    driver, prompt = Driver(executor), prompt_of(40, seed=13)
    _, _, ticket = driver.launch((driver.start(prompt), None), delay=True)
    expected = logits(case, prompt)[-1]
    assert torch.cosine_similarity(ticket.logits[0], expected, dim=0) > 0.98


def test_longrope_is_chosen_by_the_context_that_is_served(make_driver):
    # The model's own context is beyond the original one; a shorter one that is asked for is not.
    short = make_driver("phi3-long", context_length=16)
    prompt = prompt_of(12, seed=5)
    assert short.generate(short.start(prompt), 4) == greedy("phi3-long", prompt, 4)


def copied(folder, target, change):
    """A tiny model with its tensors changed by a function."""
    source = Path(folder)
    target.mkdir()
    (target / "config.json").write_text((source / "config.json").read_text())
    save_file(change(load_file(source / "model.safetensors")), target / "model.safetensors")
    return target


def edit(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def first_logits(path, prompt, **options):
    executor = load_executor(str(path), device="cpu", dtype="float32", max_total_tokens=64, **options)
    driver = Driver(executor)
    return driver.launch((driver.start(prompt), None), delay=True)[2].logits[0].clone()


def test_mxfp4_is_read_as_transformers_reads_it(folder, tmp_path):
    rng = torch.Generator().manual_seed(3)

    def packed(tensors):
        for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
            experts, inputs, outputs = tensors.pop(name).shape
            shape = (experts, outputs, inputs // 32)
            tensors[name + "_blocks"] = torch.randint(0, 256, (*shape, 16), generator=rng, dtype=torch.uint8)
            tensors[name + "_scales"] = torch.randint(120, 127, shape, generator=rng, dtype=torch.uint8)
        return tensors

    def whole(tensors):
        for name in [name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")]:
            blocks, scales = tensors.pop(name + "_blocks"), tensors.pop(name + "_scales")
            tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
        return tensors

    path = copied(folder("gpt-oss"), tmp_path / "packed", packed)
    plain = copied(path, tmp_path / "plain", whole)
    edit(path, quantization_config={"quant_method": "mxfp4"})
    prompt = prompt_of(12, seed=1)
    # Native products would round their inputs to bytes for packed weights; torch's layers unpack them.
    ours, theirs = (first_logits(where, prompt, model_impl="torch") for where in (path, plain))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    name = "model.layers.1.mlp.experts.down_proj"
    for change, says in (
        ({f"{name}_scales": None}, rf"lacks {name}_blocks or {name}_scales"),
        (
            {f"{name}_scales": torch.zeros(6, 64, 2, dtype=torch.uint8)},
            rf"{name}: mxfp4 blocks .* do not make 6 experts",
        ),
    ):
        tensors = load_file(path / "model.safetensors") | change
        save_file({key: value for key, value in tensors.items() if value is not None}, path / "model.safetensors")
        with pytest.raises(ConfigError, match=says):
            first_logits(path, prompt)
    edit(path, quantization_config={"quant_method": "gptq"})
    with pytest.raises(ConfigError, match="'gptq' of gpt-oss is not supported, only mxfp4"):
        first_logits(path, prompt)


@pytest.mark.parametrize("names", [("language_model.model.", "language_model."), ("model.language_model.", "")])
def test_the_text_part_of_a_vision_model(folder, tmp_path, names):
    # As the two ages of transformers name it; what the pictures need is left alone.
    inner, head = names

    def seeing(tensors):
        renamed = {inner + name.removeprefix("model."): value for name, value in tensors.items()}
        return renamed | {"model.vision_tower.encoder.weight" if not head else "vision_tower.x": torch.zeros(2)}

    path = copied(folder("gemma3"), tmp_path / "seeing", seeing)
    config = json.loads((path / "config.json").read_text())
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": config, "eos_token_id": [2, 5]}
    (path / "config.json").write_text(json.dumps(outer))
    prompt = prompt_of(20, seed=1)
    expected = logits("gemma3", prompt)[-1]
    torch.testing.assert_close(first_logits(path, prompt), expected, rtol=1e-3, atol=1e-3)


def test_a_gemma_3_config_that_leaves_out_what_all_have(tmp_path):
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    scaling = {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    config = read_model_config(
        {"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106], "text_config": text | scaling}
    )
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262_208)
    assert config.windows[:7] == (1024, 1024, 1024, 1024, 1024, 0, 1024)
    assert (config.rope.kind, config.rope.theta, config.rope.factor) == ("linear", 1e6, 8.0)
    assert config.local_rope is not None
    assert (config.local_rope.kind, config.local_rope.theta) == ("default", 1e4)
    assert config.eos_token_ids == (1, 106)
    assert config.tied_embeddings


@pytest.mark.parametrize(
    ("case", "changes", "says"),
    [
        ("gemma3", {"use_bidirectional_attention": True}, "a model for embeddings"),
        ("gemma3", {"hidden_activation": "relu"}, "hidden_act 'relu' is not supported, only gelu_pytorch_tanh"),
        ("gpt-oss", {"num_experts_per_tok": 7}, "7 of 6 experts"),
        ("gpt-oss", {"swiglu_alpha": 1.5}, "swiglu_alpha 1.5"),
        ("phi3", {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}}, "longrope needs 6 factors"),
        ("phi3", {"rope_parameters": {"partial_rotary_factor": 0.3}}, "partial_rotary_factor 0.3"),
        ("phi3", {"architectures": ["KimiK25ForConditionalGeneration"]}, r"one latent vector a token \(MLA\)"),
        ("phi3", {"architectures": ["Gemma3nForConditionalGeneration"]}, "of unequal shapes"),
    ],
)
def test_what_is_not_built_is_refused_with_its_reason(folder, case, changes, says):
    raw = json.loads((Path(folder(case)) / "config.json").read_text())
    with pytest.raises(ConfigError, match=says) as caught:
        read_model_config(raw | changes)
    assert "\n" not in str(caught.value)


def test_the_start_says_what_computes(folder):
    if DEVICE != "cpu":
        pytest.skip("native kernels are for the CPU")
    for case, part in (("gpt-oss", "attention and experts"), ("gemma3", "attention")):
        native, torchs = (
            load_executor(folder(case), device="cpu", dtype="float32", max_total_tokens=64, model_impl=model_impl)
            for model_impl in ("auto", "torch")
        )
        assert native.info.kernels.startswith("native ")
        assert torchs.info.kernels.startswith(f"torch, {part} native ")


def test_configs_of_the_judges_say_what_they_hold(folder):
    config = read_folder_config(Path(folder("gemma2")))
    assert (config.attention_softcap, config.logit_softcap, config.windows) == (5.0, 3.0, (9, 0, 9))
    assert read_folder_config(Path(folder("gemma3"))).windows == (9, 9, 9, 9, 9, 0, 9)
    assert read_folder_config(Path(folder("gpt-oss"))).windows == (9, 0, 9)
    assert judge("phi3").config.rope_parameters["rope_theta"] == read_folder_config(Path(folder("phi3"))).rope.theta
