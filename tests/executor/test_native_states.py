"""Native steps of models with recurrent states: every instruction set, every way to cut a prompt, quantized weights."""

import json
from pathlib import Path

import pytest
import torch

from tests.executor.driver import Driver
from tests.executor.tiny_models import STATE_CASES, greedy, logits, prompt_of
from tokenyard.base import ConfigError
from tokenyard.executor.model_loader import load_executor
from tokenyard.executor.native.library import LEVELS, NoLibraryError, load_library

try:
    LIBRARY = load_library()
except NoLibraryError as error:
    pytest.skip(f"no native library: {error}", allow_module_level=True)

KERNELS = pytest.mark.parametrize("level", LIBRARY.levels(), ids=lambda level: LEVELS[level])
PROMPT = prompt_of(40, seed=3)


def driver_of(folder, case, **options):
    sizes = {"page_size": 4, "max_total_tokens": 400, "max_pool_rows": 4, "mamba_track_interval": 8, "threads": 2}
    return Driver(load_executor(folder(case), device="cpu", model_impl="native", **sizes | options))


def last_logits(driver, chunks=()):
    sequence = driver.start(PROMPT)
    for count in chunks:
        driver.step((sequence, count))
    return driver.launch((sequence, None), delay=True)[2].logits[0].clone()


@KERNELS
@pytest.mark.parametrize("case", STATE_CASES)
def test_all_kernels_give_the_logits_of_transformers_however_a_prompt_is_cut(folder, monkeypatch, case, level):
    """Bit for bit the same for every cut, in bfloat16 too, whose rounding shows where one is not where it should be."""
    monkeypatch.setattr(LIBRARY, "level", level)
    expected = logits(case, PROMPT)[-1]
    torch.testing.assert_close(last_logits(driver_of(folder, case, dtype="float32")), expected, rtol=1e-3, atol=1e-3)
    driver = driver_of(folder, case, dtype="bfloat16", deterministic=True)
    whole = last_logits(driver)
    assert torch.cosine_similarity(whole, expected, dim=0) > 0.9  # experts may be others
    for chunks in ((1, 2, 17), (39,)):
        assert torch.equal(last_logits(driver, chunks), whole)


@pytest.mark.parametrize("case", ["qwen3.5", "granite-hybrid", "lfm2-bias"])
@pytest.mark.parametrize("quantization", ["int8", "q8"])
def test_quantized_weights(folder, case, quantization):
    found = last_logits(driver_of(folder, case, dtype="float32", quantization=quantization), (7, 1, 12))
    assert torch.cosine_similarity(found, logits(case, PROMPT)[-1], dim=0) > 0.99


def test_keys_and_values_in_bytes(folder):
    found = last_logits(driver_of(folder, "qwen3.5", dtype="float32", kv_cache_dtype="int8"), (9,))
    assert torch.cosine_similarity(found, logits("qwen3.5", PROMPT)[-1], dim=0) > 0.99


def test_many_rows_decode_at_once(folder):
    driver = driver_of(folder, "qwen3.5", dtype="float32", max_total_tokens=1200, max_pool_rows=20)
    prompts = [prompt_of(20 + row, seed=row) for row in range(20)]
    rows = [driver.start(prompt) for prompt in prompts]
    for row in rows:
        driver.prefill(row)
    for _ in range(5):
        driver.step(*((row, 1) for row in rows))
    for row, prompt in zip(rows, prompts, strict=True):
        assert row.output == greedy("qwen3.5", prompt, 6, row.output)


def test_a_long_convolution_is_left_to_torch(folder, tmp_path):
    raw = json.loads((Path(folder("qwen3.5")) / "config.json").read_text()) | {"linear_conv_kernel_dim": 17}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match="native does not compute convolutions over more than 16 tokens"):
        load_executor(str(tmp_path), device="cpu", model_impl="native", load_format="dummy")
    assert not hasattr(load_executor(str(tmp_path), device="cpu", load_format="dummy").model, "logits_buffer")
