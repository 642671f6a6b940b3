"""The benchmark for GPUs runs through on a CPU, so that no line of it is broken when a GPU is at hand."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import gpu
from benchmarks.gpu_choices import CHOICES
from benchmarks.step_plans import EqualRows
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
    [prompts] = [line for line in printed if line["part"] == "prompts by varlen, tiny"]
    # A rehearsal compares the default with itself.
    assert (prompts["prefill_attention_backend"], prompts["same_tokens"], prompts["prompts"]) == ("auto", 8, 8)
    constants = [line for line in printed if line["part"] == "kernel constants, tiny"]
    assert [line.get("DECODE_STAGES") or line.get("MIN_SPLIT_PROGRAMS") for line in constants] == [3, 5, 4, 16]
    choices = [line for line in printed if line["part"] == "choices, tiny"]
    assert [line["same_tokens"] for line in choices] == [1, 4] * len(CHOICES)
    ratios = [line["ratio"] for line in printed if line["part"] == "compared with transformers, tiny"]
    assert ratios
    assert min(ratios) > 0
    [profile] = [line["profile"] for line in printed if line["part"] == "profile, tiny"]
    assert load_profile(Path(profile)).model == "tiny"
    # A CPU has no idle share of a device. Shapes of the rehearsal have no goal for their steps.
    assert printed[-1]["part"] == "goals"
    assert printed[-1]["met"] + len(printed[-1]["missed"]) == 5
    assert "steps, tiny: batch 4, context 200: idle_share 1, goal 0.02" in printed[-1]["missed"]


@pytest.mark.slow
def test_parts_that_would_begin_too_late_are_left_out(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "describe", lambda scale: iter([{"device": "none"}]))
    assert gpu.measure(gpu.rehearsal(tmp_path), limit_s=-1.0)
    printed = lines(capsys)
    assert len({line["part"] for line in printed}) == len(printed) >= 8
    assert all("left_out" in line for line in printed)


def test_operations_of_a_prompt_are_those_of_its_products():
    # One layer, one head, by hand: 4 products of 8 x 8 and 3 of 8 x 16 for each of 3 tokens, scores and values of the
    # 1 + 2 + 3 pairs, and the head for one.
    config = ModelConfig(**dict.fromkeys(ModelConfig.__dataclass_fields__) | ONE_LAYER)
    weights = 4 * 64 + 3 * 128
    assert gpu.prefill_operations(config, 3) == 2 * 3 * weights + 4 * 8 * 6 + 2 * 8 * 10


def test_the_floor_of_a_decode_is_that_of_each_kernel():
    config = ModelConfig(**dict.fromkeys(ModelConfig.__dataclass_fields__) | ONE_LAYER)
    # By hand, for 2 rows of 3 tokens: weights, inputs and outputs of the products, and keys and values, of 2 bytes.
    weights = [8 * 24, 8 * 8, 8 * 32, 16 * 8, 8 * 10]
    moved = [2 * (8 + 24), 2 * (8 + 8), 2 * (8 + 32), 2 * (16 + 8), 2 * (8 + 10)]
    numbers = sum(weights) + sum(moved) + 2 * 2 * 3 * 8
    assert gpu.decode_floor_s(config, 2, 3, 1.0, 1e9) == 2 * numbers
    operations = 2 * 2 * sum(weights) + 4 * 2 * 3 * 8
    assert gpu.decode_floor_s(config, 2, 3, 1e9, 1.0) == operations
    # With 8 rows products take as long as their operations, and attention as its bytes: neither sum alone says so.
    either = [gpu.decode_floor_s(config, 8, 3, *speeds) for speeds in ((1.0, 1e9), (1e9, 3.0))]
    assert gpu.decode_floor_s(config, 8, 3, 1.0, 3.0) > max(either)


def test_pages_of_steps_are_written_as_a_server_writes_them():
    rows = EqualRows(SimpleNamespace(page_size=4, num_pages=16, max_pool_rows=4), 2, 12)
    assert len(rows.pretend(6).page_ids) == 4
    assert [len(rows.decode().page_ids) for _ in range(6)] == [0, 0, 2, 0, 0, 0]


def test_figures_are_judged_by_their_goals():
    line = {
        "batch": 1,
        "floor_share": 0.84219,
        "floor_share_target": 0.8,
        "idle_share": 0.03,
        "idle_share_target": 0.02,
    }
    line |= {"product_share": 0.5, "product_share_target": None}
    assert list(gpu.judged("steps", line)) == [
        (True, "steps: batch 1: floor_share 0.842, goal 0.8"),
        (False, "steps: batch 1: idle_share 0.03, goal 0.02"),
    ]


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
