"""Models whose layers with a window have their own KV pool, against transformers and a pool that keeps all."""

import pytest
import torch

from tests.executor.crowded_yard import check_greedy_answers, yard_of
from tests.executor.tiny_models import DEVICE, greedy, prompt_of
from tokenyard.base import ConfigError
from tokenyard.cache import windows
from tokenyard.executor import kv_pool
from tokenyard.executor.model_loader import load_executor

TOKENS = 6


@pytest.fixture(autouse=True)
def small_pools(monkeypatch):
    monkeypatch.setattr(windows, "MARGIN_TOKENS", 2)
    monkeypatch.setattr(kv_pool, "MIN_WINDOW_TOKENS", 24)


def load(folder, case, page_size, tokens, **options):
    return load_executor(
        folder(case),
        device=DEVICE,
        dtype="float32",
        page_size=page_size,
        max_total_tokens=tokens,
        max_pool_rows=9,
        swa_full_tokens_ratio=0.1,
        **{"model_impl": "torch"} | options,
    )


@pytest.mark.part(5)
@pytest.mark.parametrize("case", ["gemma2", "gemma3", "gpt-oss", "mistral-window", "qwen3-layers"])
def test_greedy_tokens_are_those_of_transformers(folder, case, backend):
    """Chunked, cached, retracted and several at a time, with prompts longer than any window."""
    executor = load(folder, case, 4, 180, **backend)
    group = executor.info.windows
    assert group.window < 20
    assert group.num_pages < executor.info.num_pages
    assert executor.kv_pool.windows.tensor.shape[0] + executor.kv_pool.tensor.shape[0] > 2
    yard = yard_of(executor)
    assert check_greedy_answers(yard, case, TOKENS).recomputed_tokens


def test_one_long_row_needs_no_more_than_its_window(folder):
    executor = load(folder, "gemma3", 1, 200, attention_backend="gather")
    prompt = prompt_of(120, seed=1)
    assert executor.info.windows.num_pages < 60
    yard = yard_of(executor, disable_radix_cache=True)
    number = yard.submit(prompt, max_new=60)
    yard.run()
    assert yard.tokens[number][:3] == greedy("gemma3", prompt, 3)
    kept = yard_of(load_executor(folder("gemma3"), device=DEVICE, dtype="float32", max_total_tokens=200))
    other = kept.submit(prompt, max_new=60)
    kept.run()
    assert kept.tokens[other] == yard.tokens[number]


def test_the_pools_take_the_memory_of_their_own_layers(folder):
    executor = load(folder, "gemma3", 1, 200)
    layers = [pool.tensor.shape[0] for pool in (executor.kv_pool, executor.kv_pool.windows)]
    assert layers == [1, 6]
    assert executor.kv_pool.windows.tensor.shape[2] == executor.info.windows.num_pages + 1
    with pytest.raises(ConfigError, match="swa-full-tokens-ratio"):
        executor.pieces(torch.ones(1, dtype=torch.int32).numpy())


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("llama", {}),
        ("gemma3", {"swa_full_tokens_ratio": 0.0}),
        ("gemma3", {"swa_full_tokens_ratio": 1.0}),
        ("gemma3", {"context_length": 9}),
        ("gemma3", {"max_total_tokens": 40}),
    ],
)
def test_where_a_group_saves_nothing_all_layers_keep_all(folder, case, options):
    options = {"max_total_tokens": 200, "swa_full_tokens_ratio": 0.5} | options
    executor = load_executor(folder(case), device=DEVICE, dtype="float32", model_impl="torch", **options)
    assert executor.info.windows is None
