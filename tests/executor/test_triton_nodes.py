"""What a captured step has to launch: so many kernels, and no more programs than find work or fit a device at once."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.executor.call_tape import CallTape
from tests.executor.tiny_models import DEVICE
from tests.executor.triton_available import need_triton

need_triton()

from tokenyard.executor.attention.backend import AttentionSpec  # noqa: E402
from tokenyard.executor.attention.triton.attention_kernel import (  # noqa: E402
    FULL_DEVICE_PROGRAMS,
    SPLIT_KEYS,
    SPLITS,
    split_programs,
)
from tokenyard.executor.attention.triton.backend import TritonAttention  # noqa: E402
from tokenyard.executor.attention.triton.plan_kernel import prepare_by_triton  # noqa: E402
from tokenyard.executor.cuda_graph_runner import CudaGraphRunner, capture_batch_sizes, capture_buckets  # noqa: E402
from tokenyard.executor.layer_loader import read_folder_config  # noqa: E402
from tokenyard.executor.plan_inputs import PlanInputs  # noqa: E402

OTHERS = 16
"""Nodes of a step that are no layer's: the embedding, the last norm, logits and the choice of tokens."""


@pytest.mark.parametrize(("case", "per_layer"), [("llama", 10), ("qwen3-layers", 10), ("gemma2", 13)])
def test_a_captured_step_has_few_nodes(make_driver, folder, case, per_layer):
    driver = make_driver(case, page_size=4, model_impl="torch", attention_backend="triton")
    executor, config, tapes = driver.executor, read_folder_config(Path(folder(case))), []

    def record(work):
        work()
        tapes.append(CallTape(work))
        return tapes[-1].play

    with torch.inference_mode():
        inputs = PlanInputs(executor.pages, executor.future, lambda logits: logits.argmax(dim=-1), prepare_by_triton)
        CudaGraphRunner(executor.model, config, 4, torch.device(DEVICE), record, plans=inputs)
    assert len(tapes) == 3
    for tape in tapes:
        assert len(tape.calls) <= per_layer * config.num_layers + OTHERS


@pytest.mark.parametrize(("case", "per_layer"), [("llama", 13), ("gemma2", 16)])
def test_a_captured_step_of_rows_of_all_kinds_has_few_nodes(make_driver, folder, case, per_layer):
    """Attention is three launches and two that join splits."""
    driver = make_driver(case, page_size=4, model_impl="torch", attention_backend="triton")
    config, tapes = read_folder_config(Path(folder(case))), []

    def record(work):
        work()
        tapes.append(CallTape(work))
        return tapes[-1].play

    with torch.inference_mode():
        CudaGraphRunner(driver.executor.model, config, 1, torch.device(DEVICE), record, max_tokens=16)
    *buckets, _ = tapes
    assert len(buckets) == len(capture_buckets(16))
    for tape in buckets:
        assert len(tape.calls) <= per_layer * config.num_layers + OTHERS


@pytest.mark.parametrize("bucket", capture_buckets(512), ids=str)
def test_blocks_of_a_captured_step_suffice_and_few_are_empty(bucket):
    heads, kv_heads, head_dim = 32, 8, 128
    pool = SimpleNamespace(tensor=torch.zeros(1, 2, 1, kv_heads, head_dim), head_dim=head_dim)
    pages = SimpleNamespace(tensor=torch.zeros(256, 1))
    attention = TritonAttention(pool, pages, AttentionSpec((0,), 1.0), heads, torch.bfloat16)
    draw = np.random.default_rng(bucket.tokens)
    for most in (1, 2, 17, 33, 512) * 4:
        counts, left = [], bucket.tokens
        while left and len(counts) < min(bucket.rows, 256):
            counts.append(min(left, int(draw.choice([1, 2, 3, 5, 16, 17, 18, 33, 200]).clip(max=most))))
            left -= counts[-1]
        counts = np.array(counts)
        attention.plan_bucket(SimpleNamespace(counts=counts), bucket)
        attention.prepare(SimpleNamespace(bucket=bucket))
        queries = [
            int(token) + query
            for launch in attention.launches
            for token, count in zip(launch.tokens, launch.counts, strict=True)
            for query in range(int(count))
        ]
        assert sorted(queries) == list(range(counts.sum()))
    blocks = [(len(launch.tokens) * kv_heads, launch.splits) for launch in attention.launches]
    programs = sum(others * split_programs(splits, others) for others, splits in blocks)
    assert programs <= 2 * FULL_DEVICE_PROGRAMS + 4 * kv_heads * 2 * min(bucket.rows, 256)


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_programs_of_a_decode_find_work_or_fit_a_device_at_once(kv_heads):
    tokens = 1024
    for rows in capture_batch_sizes(512):
        programs = split_programs(SPLITS, rows * kv_heads)
        empty = rows * kv_heads * max(0, programs - tokens // SPLIT_KEYS)
        assert not empty or rows * kv_heads * programs <= FULL_DEVICE_PROGRAMS
