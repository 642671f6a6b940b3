"""What a captured step has to launch: so many kernels, and no more programs than find work or fit a device at once."""

from pathlib import Path

import pytest
import torch

from tests.executor.call_tape import CallTape
from tests.executor.tiny_models import DEVICE
from tests.executor.triton_available import need_triton

need_triton()

from tokenyard.executor.attention.triton.attention_kernel import (  # noqa: E402
    FULL_DEVICE_PROGRAMS,
    SPLIT_KEYS,
    SPLITS,
    split_programs,
)
from tokenyard.executor.attention.triton.plan_kernel import prepare_by_triton  # noqa: E402
from tokenyard.executor.cuda_graph_runner import CudaGraphRunner, capture_batch_sizes  # noqa: E402
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


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_programs_of_a_decode_find_work_or_fit_a_device_at_once(kv_heads):
    tokens = 1024
    for rows in capture_batch_sizes(512):
        programs = split_programs(SPLITS, rows * kv_heads)
        empty = rows * kv_heads * max(0, programs - tokens // SPLIT_KEYS)
        assert not empty or rows * kv_heads * programs <= FULL_DEVICE_PROGRAMS
