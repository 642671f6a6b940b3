"""Families whose layers torch computes, against transformers, under any schedule and both attention backends."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.executor.crowded_yard import check_greedy_answers, yard_of
from tests.executor.driver import Driver
from tests.executor.tiny_models import DEVICE, TORCH_CASES, greedy, logits, prompt_of
from tokenyard import LLM
from tokenyard.base import ConfigError, LogprobOptions
from tokenyard.executor.model_loader import load_executor
from tokenyard.executor.models.hf_config import read_model_config

TOKENS = 9
BACKENDS = ["gather", "auto"] if DEVICE == "cpu" else ["auto"]


def load(folder, case, **options):
    sizes = {"page_size": 4, "max_total_tokens": 180, "max_pool_rows": 9}
    return load_executor(folder(case), device=DEVICE, dtype="float32", **sizes | options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", TORCH_CASES)
def test_logits_and_log_probabilities_are_those_of_transformers(folder, case, backend):
    driver, prompt = Driver(load(folder, case, attention_backend=backend)), prompt_of(61, seed=2)
    sequence = driver.start(prompt, logprobs=LogprobOptions(output=True, prompt_from=1))
    answer = driver.generate(sequence, 4, chunk=23)
    known = prompt + answer
    expected = logits(case, known).log_softmax(-1)
    found = {}
    for entry in sequence.logprobs:
        found |= {entry.position + place: value for place, value in enumerate(entry.logprobs)}
    assert sorted(found) == list(range(1, len(known)))
    wanted = {position: expected[position - 1, known[position]].item() for position in found}
    assert found == pytest.approx(wanted, abs=1e-3)


@pytest.mark.parametrize(
    ("case", "ratio"), [(case, ratio) for case in TORCH_CASES for ratio in (0.0, 0.7) if "gemma" in case or not ratio]
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_greedy_tokens_do_not_depend_on_the_schedule(folder, case, backend, ratio):
    """Chunked, cached, retracted, paused and two steps in flight; with and without a pool of windows."""
    options = {"max_total_tokens": 800, "swa_full_tokens_ratio": ratio} if ratio else {}
    yard = yard_of(load(folder, case, attention_backend=backend, **options), max_in_flight=2)
    check_greedy_answers(yard, case, TOKENS, 2)


@pytest.mark.parametrize("case", ["gemma4", "deepseek-v3"])
def test_bfloat16_stays_near_float32(folder, case):
    driver, prompt = Driver(load_executor(folder(case), device=DEVICE, dtype="bfloat16")), prompt_of(40, seed=13)
    _, _, ticket = driver.launch((driver.start(prompt), None), delay=True)
    assert torch.cosine_similarity(ticket.logits[0].cpu(), logits(case, prompt)[-1], dim=0) > 0.97


@pytest.mark.parametrize(
    ("case", "options", "says"),
    [
        ("gemma4", {"lora_slots": 2}, "share keys and values do not support LoRA"),
        ("gemma4", {"model_impl": "native"}, "model_impl native does not compute layers that share keys and values"),
        ("gemma4", {"quantization": "q8"}, "needs a native model"),
    ],
)
def test_what_does_not_work_is_refused(folder, case, options, says):
    with pytest.raises(ConfigError, match=says) as caught:
        load(folder, case, **options)
    assert "\n" not in str(caught.value)


def test_latents_are_kept_once(folder):
    executor = load(folder, "deepseek-v3")
    assert executor.kv_pool.tensor.shape[1:2] + executor.kv_pool.tensor.shape[3:] == (1, 1, 20 + 8)
    assert executor.info.kv_bytes_per_token == 4 * 3 * (20 + 8)
    found = executor.pieces(torch.ones(1, dtype=torch.int32).numpy())
    assert found.addresses.shape[1] * found.nbytes == 4 * executor.info.kv_bytes_per_token, "of a page of four tokens"


def test_latents_are_found_again_on_disk(folder, tmp_path):
    options = {"device": "cpu", "dtype": "float32", "threads": 1, "skip_tokenizer_init": True, "page_size": 4}
    prompt, found = prompt_of(150, seed=9), []
    for _ in range(2):
        with LLM(
            folder("deepseek-v2"),
            enable_hierarchical_cache=True,
            hicache_storage_backend="disk",
            hicache_storage_dir=str(tmp_path),
            **options,
        ) as llm:
            (generation,) = llm.generate(prompt, max_new_tokens=TOKENS, temperature=0.0, ignore_eos=True)
        answer = generation.completions[0].token_ids
        assert answer == greedy("deepseek-v2", prompt, TOKENS, answer)
        found.append(generation.cached_tokens)
    assert found == [0, 128]


def test_pools_of_two_shapes(folder):
    executor = load(folder, "gemma4")
    pool = executor.kv_pool
    # Of six layers three have keys and values: windows 0 and 2 with heads of 16, and layer 1 with heads of 24.
    assert (pool.tensor.shape[0], pool.tensor.shape[-1]) == (1, 24)
    assert (pool.windows.tensor.shape[0], pool.windows.tensor.shape[-1]) == (2, 16)
    assert executor.info.kv_bytes_per_token == 4 * 2 * 2 * (24 + 2 * 16)
    with pytest.raises(ConfigError, match="two shapes"):
        executor.pieces(torch.ones(1, dtype=torch.int32).numpy())


def test_the_text_part_of_gemma_4_with_towers(folder, tmp_path):
    source = Path(folder("gemma4"))
    tensors = load_file(source / "model.safetensors")
    tensors = {name.replace("model.", "model.language_model.", 1): value for name, value in tensors.items()}
    tensors |= {f"model.{name}.x": torch.zeros(2) for name in ("vision_tower", "audio_tower", "embed_vision")}
    save_file(tensors, tmp_path / "model.safetensors")
    text = json.loads((source / "config.json").read_text())
    # As the released files state the shapes of full layers.
    text |= {"global_head_dim": text.pop("per_layer_config")["1"]["head_dim"]}
    outer = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    driver, prompt = Driver(load_executor(str(tmp_path), device=DEVICE, dtype="float32")), prompt_of(20, seed=1)
    assert driver.generate(driver.start(prompt), TOKENS) == greedy("gemma4", prompt, TOKENS)


@pytest.mark.parametrize(
    ("case", "changes", "says"),
    [
        ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all'"),
        ("deepseek-v2", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported"),
        ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported, only sigmoid"),
        ("deepseek-v3", {"topk_group": 5}, "in 5 of 4 groups"),
        ("gemma4", {"num_kv_shared_layers": 5}, "num_kv_shared_layers 5 leaves layers"),
        ("gemma4", {"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config is not supported"),
        ("gemma4", {"rope_parameters": {"rope_type": "default"}}, "must have full_attention and sliding_attention"),
        ("gemma4-moe", {"top_k_experts": 6}, "6 of 5 experts"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(folder, case, changes, says):
    raw = json.loads((Path(folder(case)) / "config.json").read_text())
    with pytest.raises(ConfigError, match=says) as caught:
        read_model_config(raw | changes)
    assert "\n" not in str(caught.value)
