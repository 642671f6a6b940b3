"""Rows whose logits are NaN are reported, and no others."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.executor.driver import GREEDY, Driver
from tests.executor.tiny_models import DEVICE, greedy, judge, prompt_of
from tokenyard.base import SamplingParams
from tokenyard.executor.model_loader import load_executor
from tokenyard.executor.sampling.top_k_top_p import NAN_MARK, mark_nan, unmark_nan

DAMAGED = 7
PROMPT = [token for token in prompt_of(12, seed=3) if token != DAMAGED]


@pytest.fixture
def damaged(tmp_path):
    """A model that computes NaN for prompts with one token, and what it should for others."""
    judge("llama").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][DAMAGED] = float("nan")
    save_file(tensors, path)
    return str(tmp_path)


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=1.0, seed=1, top_k=5)])
def test_rows_of_nan_are_named_and_leave_others_alone(damaged, backend, sampling):
    executor = load_executor(damaged, device=DEVICE, dtype="float32", max_total_tokens=256, max_pool_rows=4, **backend)
    driver = Driver(executor)
    rows = [driver.start(PROMPT), driver.start([*PROMPT, DAMAGED], sampling), driver.start(PROMPT)]
    _, _, ticket = driver.launch(*((row, None) for row in rows))
    result = executor.collect(ticket)
    assert result.nan_rows == (1,)
    assert result.tokens[[0, 2]].tolist() == greedy("llama", PROMPT, 1) * 2
    assert 0 <= result.tokens[1] < executor.info.vocab_size


def test_nan_marks_are_cleared():
    logits = torch.zeros(4, 5)
    logits[1] = float("nan")
    logits[3] = float("nan")
    marked = mark_nan(logits, torch.tensor([4, 2, -1, -1]))
    assert marked.tolist() == [4, 2 - NAN_MARK, -1, -1 - NAN_MARK]
    tokens, places = unmark_nan(marked.numpy().astype(np.int32))
    assert (tokens.tolist(), places.tolist()) == ([4, 2, -1, -1], [1])
