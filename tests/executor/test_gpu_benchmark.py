"""The benchmark for GPUs runs through on a CPU, so that no line of it is broken when a GPU is at hand."""

import json
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.gpu_choices import CHOICES
from tokenyard.cost.profiles import load_profile
from tokenyard.executor.models.config import ModelConfig

ONE_LAYER = {
    **{"hidden_size": 8, "head_dim": 8, "num_heads": 1, "num_kv_heads": 1},
    **{"intermediate_size": 16, "num_layers": 1, "vocab_size": 10},
}


def lines(capsys):
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(line.pop("at_s") >= 0.0 for line in printed)
    return printed


@pytest.mark.slow
def test_all_parts_run(capsys, tmp_path):
    assert gpu.measure(gpu.rehearsal(tmp_path))
    printed = lines(capsys)
    assert not [line for line in printed if "error" in line]
    assert sum(line.get("tokens_as_on_cpu", False) for line in printed) == 2 * len(gpu.EXACT_CASES)
    steps = [line for line in printed if line["part"] == "steps, tiny"]
    for figure in ("floor_share", "idle_share"):
        found = [(line["batch"], line["context"]) for line in steps if figure in line]
        assert found == [(1, 64), (4, 64), (1, 200), (4, 200)]
    assert sum("product_share" in line for line in steps) == 1
    choices = [line for line in printed if line["part"] == "choices, tiny"]
    assert [line["same_tokens"] for line in choices] == [1, 4] * len(CHOICES)
    ratios = [line["ratio"] for line in printed if line["part"] == "compared with transformers, tiny"]
    assert ratios
    assert min(ratios) > 0
    [profile] = [line["profile"] for line in printed if line["part"] == "profile, tiny"]
    assert load_profile(Path(profile)).model == "tiny"


@pytest.mark.slow
def test_parts_that_would_begin_too_late_are_left_out(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "describe", lambda scale: iter([{"device": "none"}]))
    assert gpu.measure(gpu.rehearsal(tmp_path), limit_s=-1.0)
    printed = lines(capsys)
    assert len(printed) == 7
    assert all("left_out" in line for line in printed)


def test_operations_of_a_prompt_are_those_of_its_products():
    # One layer, one head, by hand: 4 products of 8 x 8 and 3 of 8 x 16 for each of 3 tokens, scores and values of the
    # 1 + 2 + 3 pairs, and the head for one.
    config = ModelConfig(**dict.fromkeys(ModelConfig.__dataclass_fields__) | ONE_LAYER)
    weights = 4 * 64 + 3 * 128
    assert gpu.prefill_operations(config, 3) == 2 * 3 * weights + 4 * 8 * 6 + 2 * 8 * 10


@pytest.mark.slow
def test_a_part_that_fails_says_so_after_what_it_has(capsys):
    def part():
        yield {"case": "first", "tokens_as_on_cpu": True}
        raise MemoryError("no room")

    assert not gpu.tell("some part", part())
    assert lines(capsys) == [
        {"part": "some part", "case": "first", "tokens_as_on_cpu": True},
        {"part": "some part", "error": "MemoryError: no room"},
    ]
    assert not gpu.tell("other tokens", iter([{"tokens_as_on_cpu": False}]))
    assert gpu.tell("figures", iter([{"batch": 1}]))
