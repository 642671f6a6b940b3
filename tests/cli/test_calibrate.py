"""The command calibrate: against the mock executor, whose times are known, and a tiny model in torch."""

import json

import numpy as np
import pytest

from tokenyard.base import ExecutorInfo
from tokenyard.cli.main import main
from tokenyard.cost import get_profile, load_profile
from tokenyard.cost.calibration import MAX_KV_TOKENS, CalibrationPoint, CalibrationRunner, measure_all, points
from tokenyard.executor.mock import MockExecutor

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
}


def make_info(**fields) -> ExecutorInfo:
    values = {"context_length": 4096, "page_size": 16, "num_pages": 4096, "max_pool_rows": 64, **fields}
    return ExecutorInfo("m", "cpu", "none", 100, eos_token_ids=(), **values)


@pytest.mark.parametrize("info", [make_info(), make_info(context_length=300, num_pages=100, max_pool_rows=3)])
def test_points_fit_the_device_and_begin_with_the_quick_ones(info):
    found = points(info)
    assert len(found) == len(set(found)) >= 8
    assert [point.size for point in found] == sorted(point.size for point in found)
    for point in found:
        assert max(point.context + 1, point.prefix + point.chunk) <= info.context_length
        tokens = point.rows * (point.context + 1) + point.prefix + point.chunk
        assert tokens <= min(info.num_pages * info.page_size, MAX_KV_TOKENS)
        assert point.rows < info.max_pool_rows


def test_a_device_with_much_memory_measures_fifty_steps():
    found = points(make_info(context_length=131_072, num_pages=60_000, max_pool_rows=257))
    assert 40 <= len(found) <= 60
    assert {bool(point.rows) + 2 * bool(point.chunk) for point in found} == {1, 2, 3}


def test_the_measured_work_is_that_of_the_point():
    cost = get_profile("h100", "llama-3-8b").cost()
    rig = CalibrationRunner(MockExecutor(make_info(), cost, sleep=False, check_kv=False))
    work, seconds = rig.measure(CalibrationPoint(rows=8, context=100, chunk=64, prefix=512))
    assert (work.tokens, work.rows, work.decode_context) == (72, 9, 808)
    assert work.chunk_area == 64 * (512 + 32)
    assert seconds == cost.step(work)


def test_measuring_ends_when_its_time_is_up():
    rig = CalibrationRunner(
        MockExecutor(make_info(), get_profile("h100", "llama-3-8b").cost(), sleep=False, check_kv=False)
    )
    clock = iter(np.arange(100.0))
    assert len(list(measure_all(rig, points(make_info()), lambda: next(clock), 5.0))) == 4


def test_the_times_of_the_mock_executor_are_found_again(tmp_path, capsys):
    out = tmp_path / "p.json"
    truth = get_profile("h100", "llama-3-8b").terms
    argv = ["calibrate", "--executor", "mock", "--cost-profile", "h100/llama-3-8b", "--skip-tokenizer-init"]
    sizes = ["--page-size", "16", "--max-total-tokens", "64k", "--context-length", "2048"]
    assert main([*argv, *sizes, "--device-name", "Pretend 9000", "--output", str(out)]) == 0
    profile = load_profile(out)
    assert (profile.device, profile.context_length, profile.kv_pool_tokens) == ("pretend-9000", 2048, 64_000)
    assert profile.terms.token_ms == pytest.approx(truth.token_ms, rel=1e-3)
    assert profile.terms.context_ms == pytest.approx(truth.context_ms, rel=1e-3)
    assert "0.0 % on average" in " ".join(capsys.readouterr().out.split())
    assert main(["simulate", "--profile", str(out), "--synthetic", "plain", "--limit", "20", "--quiet"]) == 0


def test_a_tiny_model_is_measured_on_the_cpu(tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    out = tmp_path / "p.json"
    sizes = ["--max-total-tokens", "16k", "--max-running-requests", "16", "--threads", "1"]
    argv = ["calibrate", str(tmp_path), "--load-format", "dummy", "--skip-tokenizer-init", "--device", "cpu"]
    assert main([*argv, *sizes, "--output", str(out)]) == 0
    profile = load_profile(out)
    assert profile.device == "cpu"
    assert profile.kv_bytes_per_token > 0
    assert profile.terms.floor_ms > 0.0


@pytest.mark.parametrize(
    ("extra", "complaint"),
    [
        (["--seconds", "0"], "--seconds"),
        (["--output", "/"], "--output"),
        (["--seconds", "1e-9"], "raise --seconds"),
    ],
)
def test_what_cannot_work_is_one_line(extra, complaint, capsys):
    mock = ["--executor", "mock", "--mock-step-ms", "0.01", "--skip-tokenizer-init"]
    assert main(["calibrate", *mock, *extra]) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.strip().count("\n") == 0
