"""Other weights for what drafts: all that may change are the drafts, never an answer."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.executor.crowded_yard import yard_of
from tests.executor.tiny_models import prompt_of
from tokenyard.base import ConfigError, WeightSource
from tokenyard.executor.model_loader import load_executor

SIZES = {"page_size": 4, "max_total_tokens": 400, "max_pool_rows": 9, "threads": 1}


def test_a_draft_model_changes_its_weights_where_asked(folder, tmp_path):
    target = folder("llama")
    shutil.copytree(target, tmp_path / "draft")
    tensors = load_file(Path(target) / "model.safetensors")
    others = {name: torch.randn_like(tensor) if tensor.dim() > 1 else tensor for name, tensor in tensors.items()}
    save_file(others, tmp_path / "draft" / "model.safetensors")
    draft = str(tmp_path / "draft")
    executor = load_executor(target, device="cpu", dtype="float32", draft_model=draft, draft_tokens=3, **SIZES)
    executor.drafter.clock = lambda: 0.0

    def run():
        yard = yard_of(executor)
        yard.submit(prompt_of(30, seed=3), max_new=40)
        yard.run(1)
        counters = yard.scheduler.snapshot(0).counters
        return yard.tokens, counters.accepted_draft_tokens / counters.draft_tokens

    before, wrong = run()
    assert wrong < 0.5
    with pytest.raises(ConfigError, match="is another model"):
        executor.prepare_weights(WeightSource(target, draft_folder=folder("qwen2")))
    executor.prepare_weights(WeightSource(target, draft_folder=target))
    executor.swap_weights()
    assert run() == (before, 1.0)
