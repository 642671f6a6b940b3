"""Attention by flashinfer, over a module of its signatures: what is planned, whole models, and what is refused."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.executor import fake_flashinfer
from tests.executor.meta_device import Watch, pretend_driver
from tests.executor.small_pool import run_all_kinds
from tests.executor.test_cuda_graphs import Player
from tests.executor.test_windows import load, small_pools, yard_of  # noqa: F401
from tests.executor.tiny_models import greedy, prompt_of
from tokenyard.base import ConfigError
from tokenyard.executor import backend_choice
from tokenyard.executor.attention import flashinfer
from tokenyard.executor.attention.flashinfer import FlashInferAttention, why_not
from tokenyard.executor.cuda_graph_runner import CudaGraphRunner
from tokenyard.executor.layer_loader import read_folder_config
from tokenyard.executor.plan_inputs import PlanInputs, prepare_by_torch
from tokenyard.executor.sampling.top_k_top_p import likeliest

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")


@pytest.fixture
def fake(monkeypatch):
    """As if the package were there and took the CPU, and heads and types of the tiny models."""
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    monkeypatch.setattr(backend_choice, "flashinfer_why_not", lambda *_: "")
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 64)


@pytest.mark.parametrize(
    ("case", "page_size"), [("llama-odd", 1), ("qwen3-layers", 4), ("phi3-partial-window", 16), ("gemma2", 4)]
)
def test_greedy_tokens_under_a_schedule_of_all_kinds(fake, make_driver, case, page_size):
    driver = make_driver(case, page_size=page_size, model_impl="torch", attention_backend="flashinfer")
    assert "flashinfer" in driver.info.kernels
    run_all_kinds(driver, case)


@pytest.mark.parametrize("captured", [False, True])
def test_layers_with_a_window_in_a_separate_pool(fake, folder, captured):
    executor = load(folder, "gemma3", 4, 180, attention_backend="flashinfer")
    player = capture(executor, folder, "gemma3") if captured else None
    assert executor.info.windows.num_pages < executor.info.num_pages
    yard = yard_of(executor)
    prompts = [prompt_of(length, seed=length) for length in (44, 7)]
    numbers = [yard.submit(prompt, max_new=4) for prompt in prompts]
    yard.run()
    for number, prompt in zip(numbers, prompts, strict=True):
        assert yard.tokens[number] == greedy("gemma3", prompt, 4)
    assert player is None or player.played


def test_a_window_reads_no_pages_before_it(fake, make_driver):
    driver = make_driver("mistral-window", page_size=4, model_impl="torch", attention_backend="flashinfer")
    attention = driver.executor.model.attention
    [window] = set(driver.executor.model.attention_spec.windows)
    row = driver.start(prompt_of(90, seed=1))
    driver.generate(row, 3)
    planned = attention.plans[-1].decode[window].planned
    assert len(planned.indices) <= window // 4 + 2
    assert row.output == greedy("mistral-window", prompt_of(90, seed=1), 3)


def test_a_step_waits_for_nothing(fake, folder, monkeypatch):
    config = read_folder_config(Path(folder("qwen3-layers")))
    driver = pretend_driver(monkeypatch, config, 4)
    executor = driver.executor
    executor.model.attention = FlashInferAttention(
        executor.kv_pool, executor.pages, executor.model.attention_spec, config.num_heads
    )
    rows = [driver.start(prompt_of(length, seed=length)) for length in (3, 60)]
    late = driver.start(prompt_of(90, seed=9))
    with Watch():
        driver.launch(*[(row, None) for row in rows])
        driver.launch((late, 40), *[(row, 1) for row in rows])
        driver.launch(*[(row, 1) for row in rows])


def whole(work):
    """Runs work; it is made again as a whole, as the package's kernels are Python here, which a tape does not see."""
    work()
    return work


def capture(executor, folder, case):
    """Captured decode steps of up to four rows; returns what plays them."""
    player = Player(whole)
    with torch.inference_mode():
        config = read_folder_config(Path(folder(case)))
        plans = PlanInputs(executor.pages, executor.future, likeliest, prepare_by_torch)
        executor.model = CudaGraphRunner(executor.model, config, 4, CPU, player, plans=plans)
    return player


@pytest.mark.parametrize("case", ["llama-odd", "gemma2"])
def test_captured_steps_answer_as_transformers_do(fake, folder, make_driver, case):
    driver = make_driver(case, page_size=4, model_impl="torch", attention_backend="flashinfer")
    player = capture(driver.executor, folder, case)
    prompts = [prompt_of(length, seed=length) for length in (3, 40, 21, 30)]
    rows = [driver.start(prompt) for prompt in prompts]
    driver.step(*[(row, None) for row in rows])
    # Three rows are padded to four; an eager step, with a chunk in it, comes between.
    for count in (4, 3, 1, 2, 3):
        driver.step(*[(row, 1) for row in rows[:count]])
    assert len(player.played) == 5
    late = driver.start(prompt_of(9, seed=5))
    driver.step((rows[0], 1), (late, None))
    driver.step((rows[0], 1), (late, 1))
    assert len(player.played) == 6
    for prompt, row in zip(prompts, rows, strict=True):
        assert row.output == greedy(case, prompt, len(row.output))


def test_auto_takes_it_on_hopper_where_it_can_compile(folder, monkeypatch):
    config = replace(read_folder_config(Path(folder("llama"))), head_dim=128)
    monkeypatch.setattr(backend_choice, "triton_why_not", lambda *_: "")

    def chosen():
        return backend_choice.choose_backends("auto", "auto", "none", config, torch.bfloat16, CUDA, 1).flashinfer

    for capability, reason, expected in (((9, 0), "", True), ((9, 0), "no nvcc", False), ((8, 0), "", False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        monkeypatch.setattr(backend_choice, "flashinfer_why_not", lambda *_, found=reason: found)
        assert chosen() == expected


def test_it_needs_a_compiler_or_compiled_kernels(folder, monkeypatch):
    config = replace(read_folder_config(Path(folder("llama"))), head_dim=128)
    there = {"flashinfer", "flashinfer_cubin"}
    tools = set()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name in there or None)
    monkeypatch.setattr("shutil.which", lambda name: name if name in tools else None)
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    assert "no nvcc" in why_not(CUDA, torch.bfloat16, config)
    tools.add("nvcc")
    assert "C++ compiler" in why_not(CUDA, torch.bfloat16, config)
    tools.add("g++")
    assert not why_not(CUDA, torch.bfloat16, config)
    tools.clear()
    there.add("flashinfer_jit_cache")
    assert not why_not(CUDA, torch.bfloat16, config)


def test_what_cannot_serve_is_one_line(folder, monkeypatch):
    config = replace(read_folder_config(Path(folder("llama"))), head_dim=128)
    half = torch.bfloat16
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install" in why_not(CUDA, half, config)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert not why_not(CUDA, half, config)
    assert "CUDA device, not cpu" in why_not(CPU, half, config)
    assert "not 80" in why_not(CUDA, half, replace(config, head_dim=80))
    assert "not float32" in why_not(CUDA, torch.float32, config)
    assert "sinks" in why_not(CUDA, half, replace(config, sinks=True))
    for impl, device, word in (("auto", CPU, "CUDA device"), ("native", CUDA, "needs model_impl torch")):
        with pytest.raises(ConfigError, match=word):
            backend_choice.choose_backends(impl, "flashinfer", "none", config, half, device, 1)
