"""Models whose layers with a window have their own KV pool, against transformers and a pool that keeps all."""

from dataclasses import replace

import pytest
import torch

from tests.executor.tiny_models import DEVICE, greedy, prompt_of
from tests.scheduler.harness import Yard
from tokenyard.base import ConfigError, Pause, Resume, SamplingParams, SchedulerSettings
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


def yard_of(executor, **fields):
    settings = SchedulerSettings(
        page_size=executor.info.page_size,
        max_running_requests=6,
        context_length=200,
        schedule_conservativeness=0.01,
        clip_max_new_tokens=1,
        **{"chunked_prefill_size": 16, "enable_mixed_chunk": True} | fields,
    )
    return Yard(settings, replace(executor.info, eos_token_ids=()), executor=executor)


@pytest.mark.part(3)
@pytest.mark.parametrize("case", ["gemma2", "gemma3", "gpt-oss", "mistral-window", "qwen3-layers"])
def test_greedy_tokens_are_those_of_transformers(folder, case, backend):
    """Chunked, cached, retracted and several at a time, with prompts longer than any window."""
    executor = load(folder, case, 4, 180, **backend)
    group = executor.info.windows
    assert group.window < 20
    assert group.num_pages < executor.info.num_pages
    assert executor.kv_pool.windows.tensor.shape[0] + executor.kv_pool.tensor.shape[0] > 2
    yard = yard_of(executor)
    common = prompt_of(40, seed=7)
    prompts = [common + prompt_of(3 + 4 * index, seed=index) for index in range(6)]
    sampling = SamplingParams(max_new_tokens=TOKENS, temperature=0.0, n=2)
    numbers = [yard.submit(prompt, sampling=sampling) for prompt in prompts]
    for step in range(1000):
        if not yard.advance():
            break
        yard.check()
        if step in (4, 9):
            yard.apply(Pause("retract"))
            yard.apply(Resume())
    for number, prompt in zip(numbers, prompts, strict=True):
        assert yard.tokens[number] == yard.tokens[number + 1] == greedy(case, prompt, TOKENS)
    # The next turn continues where the first one ended, with what its window reaches.
    turn = prompts[0] + yard.tokens[numbers[0]] + prompt_of(5, seed=50)
    number = yard.submit(turn, max_new=TOKENS)
    yard.run()
    assert yard.tokens[number] == greedy(case, turn, TOKENS)
    assert yard.scheduler.snapshot(0).counters.hit_tokens > 40
    assert yard.scheduler.snapshot(0).counters.recomputed_tokens
    assert yard.scheduler.idle() is None


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
