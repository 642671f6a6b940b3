"""Layers with a window in their own KV pool, attended by Triton: float64, transformers, and recorded steps."""

from pathlib import Path

import pytest
import torch

from tests.executor.tiny_models import DEVICE, greedy, prompt_of
from tests.executor.triton_available import need_triton

need_triton()

from tests.executor.checked_backends import CheckedAttention  # noqa: E402
from tests.executor.test_windows import load, small_pools, yard_of  # noqa: E402, F401
from tokenyard.base import SamplingParams  # noqa: E402
from tokenyard.executor.attention.hybrid import HybridFusedKvWriteAttention  # noqa: E402
from tokenyard.executor.attention.triton.backend import TritonAttention  # noqa: E402
from tokenyard.executor.cuda_graph_runner import CudaGraphRunner  # noqa: E402
from tokenyard.executor.layer_loader import read_folder_config  # noqa: E402

TOKENS = 2


def answers(executor, case, prompts, chunk=16):
    """Serve prompts together under the scheduler, in chunks, and hold their tokens to transformers'."""
    yard = yard_of(executor, chunked_prefill_size=chunk)
    sampling = SamplingParams(max_new_tokens=TOKENS, temperature=0.0)
    numbers = [yard.submit(prompt, sampling=sampling) for prompt in prompts]
    while yard.advance():
        yard.check()
    for number, prompt in zip(numbers, prompts, strict=True):
        assert yard.tokens[number] == greedy(case, prompt, TOKENS)


@pytest.mark.parametrize(("case", "page_size"), [("gemma3", 4), ("gpt-oss", 1)])
def test_greedy_tokens_are_those_of_transformers(folder, case, page_size):
    executor = load(folder, case, page_size, 180, attention_backend="triton")
    assert executor.info.windows.num_pages < executor.info.num_pages
    answers(executor, case, [prompt_of(length, seed=length) for length in (34, 7)])


def test_each_group_attends_as_float64_does(folder):
    executor = load(folder, "qwen3-layers", 4, 180, attention_backend="gather")
    checked, model = [], executor.model

    def make(pool, pages, spec):
        heads = read_folder_config(Path(folder("qwen3-layers"))).num_heads
        backend = TritonAttention(pool, pages, spec, heads, pool.tensor.dtype)
        checked.append(CheckedAttention(backend, pool, pages, spec))
        return checked[-1]

    model.attention = HybridFusedKvWriteAttention(make, executor.kv_pool, executor.pages, model.attention_spec)
    answers(executor, "qwen3-layers", [prompt_of(length, seed=length) for length in (24, 6)])
    assert len(checked) == 2
    assert min(one.checked for one in checked) > 1


def test_rows_that_fill_up_a_recorded_step_write_to_page_0_of_both_pools(folder):
    executor = load(folder, "qwen3-layers", 4, 180, attention_backend="triton")
    config, written, played = read_folder_config(Path(folder("qwen3-layers"))), [], []
    attention = executor.model.attention

    def record(work):
        work()

        def play():
            work()
            played.append(len(attention.batches[0].slots))
            written.append((attention.batches[0].slots.tolist(), attention.batches[1].slots.tolist()))

        return play

    with torch.inference_mode():
        executor.model = CudaGraphRunner(executor.model, config, 4, torch.device(DEVICE), record)
    answers(executor, "qwen3-layers", [prompt_of(length, seed=length) for length in (5, 4, 3)], chunk=64)
    assert 4 in played
    for window_slots, slots in written:
        filling = [slot < 4 for slot in slots]
        assert filling == [slot < 4 for slot in window_slots]
        assert len(slots) < 4 or any(filling)
