"""Whole models over the Triton kernels: greedy tokens are those of transformers, for rows of all kinds."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.executor.call_tape import capture
from tests.executor.small_pool import run_all_kinds
from tests.executor.tiny_models import DEVICE, greedy, logits, prompt_of
from tests.executor.triton_available import need_triton

need_triton()

from tokenyard.executor.attention.triton.plan_kernel import prepare_by_triton  # noqa: E402
from tokenyard.executor.cuda_graph_runner import CudaGraphRunner  # noqa: E402
from tokenyard.executor.layer_loader import read_folder_config  # noqa: E402
from tokenyard.executor.plan_inputs import PlanInputs  # noqa: E402

TRITON = {"model_impl": "torch", "attention_backend": "triton"}


@pytest.mark.parametrize(
    ("case", "page_size"),
    [("llama-odd", 1), ("qwen3-layers", 4), ("phi3-partial-window", 16), ("gemma2", 4), ("gpt-oss", 1)],
)
def test_greedy_tokens_under_a_schedule_of_all_kinds(make_driver, case, page_size):
    driver = make_driver(case, page_size=page_size, **TRITON)
    assert "triton" in driver.info.kernels
    run_all_kinds(driver, case)


@pytest.mark.parametrize(("case", "page_size"), [("qwen3-layers", 1), ("gemma4", 4)])
def test_keys_and_values_of_one_byte_move_logits_a_little(make_driver, case, page_size):
    """Gemma 4 writes them by a kernel of its own, the other one as it rotates them."""
    prompt, found = prompt_of(40, seed=3), []
    for kv in ("auto", "int8"):
        driver = make_driver(case, page_size=page_size, kv_cache_dtype=kv, **TRITON)
        row = driver.start(prompt)
        driver.step((row, 30))
        _, _, ticket = driver.launch((row, None), delay=True)
        found.append(ticket.logits.cpu())
    exact, rounded = found
    assert 0.0 < (rounded - exact).square().mean().sqrt() < 0.1 * exact.std()


def test_rows_sample_at_several_positions(make_driver):
    driver = make_driver("qwen3-layers", page_size=4, **TRITON)
    prompts = {4: prompt_of(40, seed=3), 1: prompt_of(23, seed=4)}
    rows = {samples: driver.start(prompt) for samples, prompt in prompts.items()}
    for samples in (4, 1):
        driver.step((rows[samples], len(prompts[samples]) - samples))
    plan = driver.plan([(rows[1], 1), (rows[4], 4)])
    plan.samples, plan.delay_sampling = np.array([1, 4], dtype=np.int32), True
    found = driver.executor.launch(plan).logits.cpu()
    expected = torch.cat([logits("qwen3-layers", prompts[samples])[-samples:] for samples in (1, 4)])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_recorded_decodes_ask_the_host_for_nothing(make_driver, folder):
    # What is captured makes the calls of its recording again, whatever the host would do now.
    driver = make_driver("qwen3-layers", page_size=4, **TRITON)
    executor, config = driver.executor, read_folder_config(Path(folder("qwen3-layers")))
    with torch.inference_mode():
        inputs = PlanInputs(executor.pages, executor.future, executor.sampler.likeliest, prepare_by_triton)
        executor.model = CudaGraphRunner(executor.model, config, 4, torch.device(DEVICE), capture, plans=inputs)
    prompts = [prompt_of(length, seed=length) for length in (3, 40, 21)]
    rows = [driver.start(prompt) for prompt in prompts]
    driver.step(*[(row, None) for row in rows])
    for count in (3, 2):
        driver.step(*[(row, 1) for row in rows[:count]])
    for prompt, row in zip(prompts, rows, strict=True):
        assert row.output == greedy("qwen3-layers", prompt, len(row.output))


def test_recorded_steps_of_rows_of_all_kinds(make_driver, folder, monkeypatch):
    """What no kernel writes is NaN, as memory of a graph may be."""
    driver = make_driver("qwen3-layers", page_size=4, **TRITON)
    executor, config = driver.executor, read_folder_config(Path(folder("qwen3-layers")))
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: poisoned(empty(*shape, **options)))
    with torch.inference_mode():
        device = torch.device(DEVICE)
        executor.model = CudaGraphRunner(executor.model, config, 1, device, capture, max_tokens=24)
    run_all_kinds(driver, "qwen3-layers")


def poisoned(tensor):
    return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor
